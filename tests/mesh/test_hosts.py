"""One model in several processes, of which one leads: the tokens of one process, weights read once, and one end."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from dflash_jax.frontend.llm_config import TINY
from tests.checkpoint.conftest import TARGET_JSON
from tests.checkpoint.test_quantized import save_in

# A process that compiles longer than the other one, on a busy machine, is no reason to end.
FLAGS = (
    os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=2"
    " --xla_cpu_collective_call_terminate_timeout_seconds=600 --xla_cpu_collective_timeout_seconds=600"
)
# As Slurm starts one process on each of two hosts. The variables of JAX say the rest.
SLURM = {f"SLURM_{name}": "0" for name in ("JOB_ID", "STEP_NODELIST", "NTASKS", "PROCID", "LOCALID")}
SLURM["SLURM_STEP_TASKS_PER_NODE"] = "1(x2)"
# Waits for the leader's calls, of which there are none.
TURN = """
import jax
from dflash_jax.parallel import distributed, group
distributed.start()
one = group.joined(0)
with one.turn():
    print("ready", jax.config.values["jax_cuda_visible_devices"], flush=True)
    if one.leads:
        input()
    while not one.leads and one.next() is not None:
        pass
"""


# As on two hosts of a TPU slice of GKE, which has no other variables; JAX looks for them on a machine with TPUs only.
# Both have one address here: the second one's name stands for another.
ON_SLICE = f"""
import os
from jax._src.clusters import cloud_tpu_cluster, cluster
cloud_tpu_cluster.running_in_cloud_tpu_vm = cluster.running_in_cloud_tpu_vm = True
os.environ |= {{"TPU_WORKER_ID": os.environ.pop("JAX_PROCESS_ID"), "TPU_WORKER_HOSTNAMES": "localhost,127.0.0.1"}}
for name in ("JAX_NUM_PROCESSES", "SLURM_JOB_ID", "SLURM_STEP_NODELIST"):
    os.environ.pop(name)
address = os.environ.pop("JAX_COORDINATOR_ADDRESS")
# Where GKE does not set these, JAX asks Google's metadata server.
os.environ |= dict.fromkeys((f"MEGASCALE_{{x}}" for x in ("COORDINATOR_ADDRESS", "NUM_SLICES", "SLICE_ID")), "")
os.environ["JAX_COORDINATOR_PORT"] = address.rpartition(":")[2]
{TURN}
"""
# Arguments that differ, of processes that have started together.
DIFFERS = """
import os
from dflash_jax.parallel import distributed, group
distributed.start()
group.joined(0, {"mesh": f"tensor={2 ** int(os.environ['JAX_PROCESS_ID'])}"})
# In place of loading the model.
input()
"""


class Process:
    """A process and what it writes on stderr: into a file, which is never full."""

    def __init__(self, log: Path, environment: dict[str, str], command: tuple[str, ...]):
        self._log = log
        with log.open("w") as stderr:
            self.popen = subprocess.Popen(
                [sys.executable, *command],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    def line(self, beginning: str) -> str:
        """The first line of stdout that begins so; Gloo writes there, too."""
        for line in self.popen.stdout:
            if line.startswith(beginning):
                return line
        raise AssertionError(self.said[-5000:])

    def end(self) -> int:
        """Waits for its end: the exit code."""
        self.popen.communicate(timeout=600)
        return self.popen.returncode

    def kill(self) -> None:
        self.popen.kill()


@pytest.fixture
def start(tmp_path):
    """Starts processes of two CPU devices each, and kills them at the end."""
    with ExitStack() as stack:
        # JAX's coordinator shares the port that it listens on, and processes of other tests do not.
        reserved = stack.enter_context(socket.socket())
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("", 0))
        environment = {**os.environ, **SLURM, "XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
        environment["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{reserved.getsockname()[1]}"

        def started(*command: str, count: int = 2, **more: str) -> list[Process]:
            processes = []
            environment.update({"JAX_NUM_PROCESSES": str(count)} | more)
            for i in range(count):
                processes.append(Process(tmp_path / f"{i}.log", environment | {"JAX_PROCESS_ID": str(i)}, command))
                stack.callback(processes[-1].end)
                stack.callback(processes[-1].kill)
            return processes

        yield started


def kill_and_wait(follower: Process, leader: Process) -> None:
    """Kills the follower: the leader ends, too, and says why."""
    follower.kill()
    assert leader.end() == 1, leader.said
    # Gloo notices it as well, and on a busy machine perhaps long before the connection's thread gets to run.
    reasons = "error: process 1 of 2 is lost (", "error: the leader (process 0 of 2) failed: "
    assert any(reason in leader.said for reason in reasons), leader.said


@pytest.mark.long
def test_two_processes_give_the_tokens_of_one_until_one_is_killed(start):
    """Data shards and tensors across both; prefixes of both tiers, aborts, drafts, a mask, log-probabilities."""
    leader, follower = start("-m", "tests.mesh.hosts")
    result = json.loads(leader.line("{"))
    assert result["cached"] > 0
    assert result["host_hits"] > 0
    assert result["masked"]
    assert 60 not in result["masked"]
    assert result["scored"] == 0
    kill_and_wait(follower, leader)


def test_two_processes_give_the_tokens_of_one_and_one_that_is_killed_ends_the_other(start):
    """The short form: drafts on both tensors and data shards, until the follower is killed."""
    leader, follower = start("-m", "tests.mesh.hosts", "short")
    assert json.loads(leader.line("{"))["tokens"] > 0
    kill_and_wait(follower, leader)


# Sizes that several devices divide, and that are whole blocks of weights in few bits.
DIVIDED = TARGET_JSON | {
    "vocab_size": 256,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 20,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_experts": 8,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}


@pytest.mark.parametrize(("count", "mesh"), [(2, "tensor=2,expert=2"), (4, "tensor=4,expert=2")])
def test_a_process_reads_the_parts_that_its_devices_have_once(start, tmp_path, count, mesh):
    """Of a checkpoint's bytes, whatever their form: experts one by one or stacked, words along outputs and inputs."""
    forms = {"fp8 block": True, "nvfp4 compressed": False, "int4 asymmetric": False, "gptq asymmetric": False}
    for form, is_fused in ({**forms, "awq": False}).items():
        save_in(form, tmp_path / form, is_fused, DIVIDED)
    directories = [*map(str, (tmp_path / form for form in (*forms, "awq"))), str(TINY / "target"), str(TINY / "draft")]
    for process in start("-m", "tests.mesh.reading", mesh, *directories, count=count):
        for directory, (read, own, whole) in json.loads(process.line("{")).items():
            # Whole words of a part's first and last codes.
            assert read <= 1.02 * own, (directory, read, own, whole)
            assert own < whole, (directory, read, own, whole)


def test_hosts_of_a_slice_need_no_variables_of_ours(start):
    leader, follower = start("-c", ON_SLICE)
    for each in (leader, follower):
        each.line("ready")
    leader.popen.stdin.write("\n")
    leader.popen.stdin.flush()
    assert (leader.end(), follower.end()) == (0, 0), leader.said + follower.said


def test_processes_with_other_arguments_all_end(start):
    for process in start("-c", DIFFERS):
        assert process.popen.wait(600) == 1
        assert "its mesh is tensor=2, the leader's is tensor=1" in process.said


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "ends"])
def test_a_follower_ends_with_its_leader(is_killed, start):
    leader, follower = start("-c", TURN)
    for each in (leader, follower):
        assert each.line("ready") == "ready all\n"
    if is_killed:
        leader.kill()
        # JAX, which notices it too, may abort the process first.
        assert follower.end() in (1, -signal.SIGABRT), follower.said
    else:
        leader.popen.stdin.write("\n")
        leader.popen.stdin.flush()
        assert (leader.end(), follower.end()) == (0, 0), leader.said + follower.said

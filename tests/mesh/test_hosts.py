"""One model in two processes, of which one leads: the same tokens as one process, and one end for both."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

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
    """Starts two processes of two CPU devices each, and kills them at the end."""
    with ExitStack() as stack:
        # JAX's coordinator shares the port that it listens on, and processes of other tests do not.
        reserved = stack.enter_context(socket.socket())
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("", 0))
        environment = {**os.environ, **SLURM, "XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
        environment["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{reserved.getsockname()[1]}"
        environment["JAX_NUM_PROCESSES"] = "2"

        def started(*command: str) -> list[Process]:
            processes = []
            for i in range(2):
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

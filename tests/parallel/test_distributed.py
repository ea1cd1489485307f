"""How processes learn of each other, without starting any."""

import os
import queue
import re
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import jax
import pytest

import dflash_jax
from dflash_jax.errors import InputError
from dflash_jax.parallel import distributed
from tests.helpers import said_by_two

OF_A_SET = {"LWS_LEADER_ADDRESS": "dflash-0.dflash.default", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "2"}


@pytest.fixture
def calls(monkeypatch):
    """The arguments of jax.distributed.initialize, and the coordinator's address that it reads."""
    calls = []

    def initialize(**options):
        # Later than the line of this package.
        assert options.pop("initialization_timeout") > distributed.START_S
        given = {name: value for name, value in options.items() if value is not None}
        calls.append(given | {"address": os.environ.get("JAX_COORDINATOR_ADDRESS")})

    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        # Set first, so that what `start` sets is removed at the end.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(jax, "config", SimpleNamespace(update=lambda *_: None))
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    return calls


def test_a_leader_worker_set_names_the_processes(calls, monkeypatch):
    for name, value in OF_A_SET.items():
        monkeypatch.setenv(name, value)
    distributed.start()
    assert calls == [{"num_processes": 4, "process_id": 2, "address": "dflash-0.dflash.default:8482"}]


def test_variables_of_jax_win(calls, monkeypatch):
    for name, value in OF_A_SET.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "10.0.0.1:9")
    monkeypatch.setenv("JAX_PROCESS_ID", "3")
    distributed.start()
    assert calls == [{"num_processes": 4, "process_id": 3, "address": "10.0.0.1:9"}]


def test_a_set_without_numbers_is_refused(calls, monkeypatch):
    monkeypatch.setenv("LWS_LEADER_ADDRESS", "x")
    with pytest.raises(InputError, match="no cluster is recognised"):
        distributed.start()


@pytest.mark.parametrize(
    ("environment", "has_all"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "1"}, True),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x12)"}, True),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, False),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,1(x3)"}, False),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "JAX_LOCAL_DEVICE_IDS": "0,1"}, False),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, True),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, False),
    ],
)
def test_the_only_process_of_a_host_has_all_of_its_devices(calls, monkeypatch, environment, has_all):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    distributed.start()
    assert calls[0].get("local_device_ids") == ([] if has_all else None)


RAISES_ITS_FLAG_AT = """if 1:
    from dflash_jax.parallel import distributed
    distributed.start()
    for step in range(6):
        is_raised = distributed.anywhere(lambda: not distributed.is_first() and step == 3)
        if is_raised():
            break
    print("stopped at", step, flush=True)
"""


def test_a_flag_of_any_process_is_seen_by_all_at_the_same_step():
    said = said_by_two(RAISES_ITS_FLAG_AT)
    assert ["stopped at 3" in text for text in said] == [True, True], said


SLICE = {"TPU_WORKER_HOSTNAMES": "w-0.x,w-1.x", "TPU_WORKER_ID": "1"}


@pytest.mark.parametrize(
    ("environment", "is_refused"),
    [
        (SLICE, True),
        (SLICE | {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, False),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_PROCESS_ADDRESSES": "w-0.x:8476,w-1.x:8476"}, True),
        (SLICE | {"JAX_PLATFORMS": "cpu"}, False),
        ({}, False),
    ],
)
def test_one_host_of_a_slice_alone_is_refused(monkeypatch, environment, is_refused):
    """Its driver would wait for the others for ever."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        jax, "config", SimpleNamespace(values={"jax_platforms": environment.get("JAX_PLATFORMS")}, update=None)
    )
    if not is_refused:
        distributed.check_whole()
        return
    says = "TPU_WORKER_ID=0, and unset TPU_P" if "TPU_PROCESS_ADDRESSES" in environment else "TPU_WORKER_ID=0 (no slice"
    with pytest.raises(InputError, match=re.escape(says)):
        distributed.check_whole("tpu,cpu")
    with pytest.raises(InputError, match="of the 2 of a TPU slice: start a command that has --distributed, or a"):
        distributed.check_whole()


STARTS = "from dflash_jax.parallel import distributed; distributed.START_S = 2; distributed.start()"


@pytest.mark.parametrize(
    ("index", "hosts", "says"),
    [
        (0, "127.0.0.1,127.0.0.2,127.0.0.3", "missing are process 1 (127.0.0.2), process 2 (127.0.0.3); "),
        (0, "", "other hosts with connections to 127.0.0.1:{port}: none; "),
        (2, "", "process 2 finds no first process at 127.0.0.1:{port} (Connection refused); "),
        (0, "127.0.0.1," + "x" * 70, "missing are process 1 (" + "x" * 70 + "); "),
    ],
    ids=["the leader of a slice", "a leader", "a follower", "a name that is none"],
)
def test_processes_that_do_not_come_are_named(index, hosts, says):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": "3",
        "JAX_PROCESS_ID": str(index),
        "TPU_WORKER_HOSTNAMES": hosts,
    }
    done = subprocess.run([sys.executable, "-c", STARTS], env=environment, capture_output=True, text=True)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: --distributed: ")]
    assert says.format(port=port) in line
    assert "after 2 s" in line
    assert done.returncode == 1


@pytest.mark.parametrize("address", ["x", "10.0.0.1", "10.0.0.1:", "10.0.0.1:port", ":1"])
def test_a_coordinator_without_a_port_is_refused(calls, monkeypatch, address):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", address)
    with pytest.raises(InputError, match=f"JAX_COORDINATOR_ADDRESS is '{address}': it must be host:port"):
        distributed.start()


def test_the_process_ends_with_a_line_whatever_it_cannot_learn(monkeypatch):
    """Here that the coordinator's port is no number."""
    for name, value in {"JAX_COORDINATOR_ADDRESS": "x:y", "JAX_PROCESS_ID": "0"}.items():
        monkeypatch.setenv(name, value)
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(distributed, "end_process", said.put)
    monkeypatch.setattr(distributed, "START_S", 0)
    with distributed._watched():
        line = said.get(timeout=600)
    assert "not all processes are there after 0 s: ValueError: invalid literal" in line
    assert line.endswith("; the same command has to run on every host")


def test_a_look_up_that_takes_long_delays_no_line(monkeypatch):
    ends = threading.Event()

    def look_up(host, *_, **__):
        if host == "slow":
            ends.wait()
        return [(None, None, None, "", ("10.0.0.7", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(distributed, "LOOK_UP_S", 0.5)
    try:
        assert distributed._addresses(["slow"] * 2 + ["quick:8476"]) == {"slow": None, "quick:8476": {"10.0.0.7"}}
    finally:
        ends.set()


def test_connections_of_other_hosts_are_found():
    """Of both families, of which one has the other's addresses too; not the leader's own."""
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), socket.create_connection(("::1", port)):
            assert distributed._connected(port) == set()
            with socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0)):
                assert distributed._connected(port) == {"127.0.0.2"}


@pytest.mark.parametrize(
    ("platform", "flags", "compared"),
    [
        ("cpu", "", {}),
        ("cpu", "--xla_dump_to=/a --xla_gpu_cuda_data_dir=/b --xla_gpu_kernel_cache_file=/c", {}),
        ("gpu", " --xla_b  --xla_dump_hlo_pass_re=.* --xla_a=1 --xla_a=2", {"XLA_FLAGS": "--xla_a=2 --xla_b"}),
        ("tpu", "--xla_a=1", {"XLA_FLAGS": "--xla_a=1", "LIBTPU_INIT_ARGS": "--tpu_x=1", "libtpu": "9"}),
    ],
)
def test_what_makes_other_programs_is_compared(monkeypatch, platform, flags, compared):
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--tpu_x=1 --tpu_log_dir=/tmp/x")
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(distributed, "version", lambda name: "9")
    assert distributed.build() == {"dflash_jax": dflash_jax.__version__, "jax": "9", "jaxlib": "9"} | compared


def test_a_process_alone_has_its_flag_as_it_is_when_asked():
    raised = [False]
    is_raised = distributed.anywhere(lambda: raised[0])
    assert not is_raised()
    raised[0] = True
    assert is_raised()

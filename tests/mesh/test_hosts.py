"""One model in two processes, of which one leads: the same tokens as one process, and one end for both."""

import json
import os
import socket
import subprocess
import sys

import pytest

FLAGS = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=2"
# Waits for the leader's calls, of which there are none.
TURN = """
from dflash_jax.parallel import distributed, group
distributed.start()
one = group.joined(0)
with one.turn():
    print("ready", flush=True)
    if one.leads:
        input()
    while not one.leads and one.next() is not None:
        pass
"""


def start(*command: str) -> list[subprocess.Popen]:
    """Two processes of two CPU devices each."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    environment = {**os.environ, "XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu", "JAX_COORDINATOR_ADDRESS": address}
    environment |= {"JAX_NUM_PROCESSES": "2", "PYTHONUNBUFFERED": "1"}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return [
        subprocess.Popen([sys.executable, *command], env={**environment, "JAX_PROCESS_ID": str(i)}, text=True, **pipes)
        for i in range(2)
    ]


def line_of(process: subprocess.Popen, beginning: str) -> str:
    """The first line of stdout that begins so; Gloo writes there, too."""
    for line in process.stdout:
        if line.startswith(beginning):
            return line
    raise AssertionError(process.stderr.read()[-5000:])


def test_two_processes_give_the_tokens_of_one_until_one_is_killed():
    """Data shards and tensors across both; prefixes of both tiers, aborts, drafts, a mask, log-probabilities."""
    leader, follower = start("-m", "tests.mesh.hosts")
    try:
        found = json.loads(line_of(leader, "{"))
        assert found["cached"] > 0
        assert found["host_hits"] > 0
        assert found["masked"]
        assert 60 not in found["masked"]
        assert found["scored"] == 0
        follower.kill()
        _, said = leader.communicate(timeout=120)
        assert leader.returncode == 1
        assert "error: process 1 of 2 is lost (" in said
    finally:
        for process in (leader, follower):
            process.kill()
            process.communicate()


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "ends"])
def test_a_follower_ends_with_its_leader(is_killed):
    leader, follower = start("-c", TURN)
    try:
        for each in (leader, follower):
            line_of(each, "ready")
        if is_killed:
            leader.kill()
            follower.communicate(timeout=120)
            # JAX, which notices it too, may abort the process first.
            assert follower.returncode in (1, -6)
        else:
            leader.stdin.write("\n")
            leader.stdin.flush()
            leader.wait(120)
            follower.wait(120)
            assert (leader.returncode, follower.returncode) == (0, 0)
    finally:
        for process in (leader, follower):
            process.kill()
            process.communicate()

"""The supervisor over stand-ins of its processes: starts, ends, deaths, fronts that hang, signals."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from dflash_jax.options.serve import parse
from dflash_jax.server import supervisor

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tmp_path():
    """A directory whose path leaves room for a socket's, unlike pytest's in a process of xdist."""
    with tempfile.TemporaryDirectory(prefix="d") as path:
        yield Path(path)


class Server:
    """A server of stand-ins."""

    def __init__(self, *words: str, stand_in: str = "", tmp_path: Path, **environment: str):
        self.folder = tmp_path
        environment |= {"STAND_IN": stand_in, "TMPDIR": str(tmp_path)}
        command = [sys.executable, "-m", "tests.server.stand_in", "--bundled", *words]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | environment
        )
        self.said, self.opened = "", contextlib.ExitStack()

    def until(self, pattern: str) -> str:
        """Waits for a line; the first group of the pattern."""
        for line in self.process.stderr:
            self.said += line
            if found := re.search(pattern, line):
                return found[found.re.groups]
        raise AssertionError(f"no {pattern} in:\n{self.said}")

    def pids(self, kind: str) -> list[int]:
        """Of all processes of a kind so far."""
        return [int(pid) for pid in re.findall(rf"^{kind} (\d+)$", self.said, re.MULTILINE)]

    def ready(self) -> "Server":
        """Waits until it is ready."""
        host, port = self.until(r"listening on http://(\S+), warming up").split(":")
        self.address = host, int(port)
        self.until(r"(ready: 1 of 2 programs compiled; as model)")
        return self

    def end(self) -> int:
        """Waits for its end: the exit code. No process remains, and no file."""
        self.said += self.process.stderr.read()
        code = self.process.wait()
        for pid in (*self.pids("engine"), *self.pids("front")):
            # stderr is closed when all processes have ended; the last one may still be an entry of the system.
            until(lambda pid=pid: not is_running(pid))
        assert not list(self.folder.iterdir())
        return code

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def connections(self, count: int) -> dict[int, socket.socket]:
        """Connections to ``count`` fronts, by their process ids."""
        found = {}
        while len(found) < count:
            connection = self.opened.enter_context(socket.create_connection(self.address, 60))
            if found.setdefault(ask(connection), connection) is not connection:
                connection.close()
        return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(holds) -> None:
    while not holds():
        time.sleep(0.01)


def ask(connection: socket.socket, line: str = "pid") -> int:
    connection.sendall(line.encode() + b"\n")
    with connection.makefile() as answers:
        return int(answers.readline())


@pytest.fixture
def start(tmp_path):
    """Starts a server, and ends it and its processes."""
    with contextlib.ExitStack() as stack:

        def started(*words: str, **options) -> Server:
            server = Server("--port", "0", *words, tmp_path=tmp_path, **options)
            stack.callback(server.process.communicate)
            stack.callback(server.process.kill)
            stack.enter_context(server.opened)
            return server

        yield started


def test_a_signal_ends_fronts_when_their_requests_have_ended_and_the_engine_after_them(start):
    server = start("--api-server-count", "2", "--drain-s", "600").ready()
    connections = server.connections(2)
    server.signal(signal.SIGTERM)
    assert int(server.until(r"SIGTERM: finishing (\d+) requests")) >= 2
    for connection in connections.values():
        assert ask(connection) in connections
        connection.close()
    assert server.end() == 0
    assert server.said.rstrip().endswith("engine stops")
    with pytest.raises(ConnectionError):
        socket.create_connection(server.address)


def test_a_second_signal_ends_requests_and_a_third_the_server(start):
    server = start("--drain-s", "600").ready()
    (connection,) = server.connections(1).values()
    server.signal(signal.SIGINT)
    server.until("(SIGINT: finishing 1 requests)")
    server.signal(signal.SIGTERM)
    server.until("(stopped with 1 requests in flight)")
    assert server.end() == 0
    assert connection.recv(1) == b""
    server = start("--drain-s", "600", COUNT_S="0.1").ready()
    (connection,) = server.connections(1).values()
    connection.sendall(b"ignore\n")
    assert connection.recv(20)
    for line in ("finishing", "stopped with", "SIGTERM: ended at once"):
        server.signal(signal.SIGTERM)
        server.until(f"({line})")
    assert server.end() == 128 + signal.SIGTERM


def test_the_time_of_a_drain_ends(start):
    server = start("--drain-s", "0.1").ready()
    connections = server.connections(1)
    server.signal(signal.SIGTERM)
    server.until("(1 requests did not end within 0.1 s)")
    assert server.end() == 1
    for connection in connections.values():
        connection.close()


def test_a_signal_before_the_server_is_ready_ends_it_at_once(start):
    server = start("--api-server-count", "2", stand_in="never-ready")
    server.until("(listening on)")
    server.signal(signal.SIGTERM)
    server.until("(SIGTERM: ended at once)")
    assert server.end() == 128 + signal.SIGTERM


@pytest.mark.parametrize("how", ["killed", "spin", "sleep", "stopped"])
def test_a_front_that_dies_or_hangs_is_replaced_and_other_fronts_streams_go_on(how, start):
    server = start("--api-server-count", "2").ready()
    (bad, connection), (good, other) = server.connections(2).items()
    if how in ("killed", "stopped"):
        os.kill(bad, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    else:
        connection.sendall(how.encode() + b"\n")
    if how != "killed":
        waited = float(server.until(r"front \d has not answered for (\d+) s: ending it"))
        # One that uses no processor time is not known to hang.
        assert waited >= (1 if how == "spin" else 3)
    server.until(r"(front \d has ended by SIGKILL: restarting it)")
    new = int(server.until(r"^front (\d+)$"))
    with contextlib.suppress(ConnectionError):
        assert connection.recv(1) == b""
    assert ask(other) == good
    assert {good, new} == set(server.connections(2))
    server.signal(signal.SIGKILL)
    assert server.process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("how", ["spins", "waits"])
def test_a_front_that_hangs_before_it_accepts_connections_ends_the_start(how, start):
    server = start("--api-server-count", "2", stand_in=f"front-{how}")
    waited = float(server.until(r"front \d has not answered for (\d+) s: ending it"))
    # While it starts, it imports and builds: that takes more processor time than a turn later.
    assert waited >= 3
    assert server.end() == 1
    assert len(re.findall("error: front . has ended by SIGKILL while the server started", server.said)) == 1


@pytest.mark.parametrize("how", [signal.SIGUSR1, signal.SIGUSR2], ids=["spins", "waits"])
def test_an_engine_whose_event_loop_hangs_ends_as_one_that_died(how, start):
    server = start().ready()
    os.kill(server.pids("engine")[0], how)
    server.until(r"the engine has not answered for (\d+) s: ending it")
    server.until("(the engine's process has ended by SIGKILL)")
    server.until("(exiting: the engine has failed)")
    assert server.end() == 1


def test_an_engine_that_loads_may_be_silent_for_long(start):
    server = start(stand_in="engine-loads").ready()
    assert "has not answered" not in server.said
    server.signal(signal.SIGTERM)
    assert server.end() == 0


def test_an_engine_that_does_not_end_when_it_is_asked_to_is_ended(start):
    server = start(stand_in="engine-stays", ENGINE_S="0.5").ready()
    server.signal(signal.SIGTERM)
    server.until("(engine stops)")
    server.until("(the engine has not ended within 0.5 s: ending it)")
    assert server.end() == 0
    server = start(stand_in="engine-stays", ENGINE_S="600").ready()
    server.signal(signal.SIGTERM)
    server.until("(engine stops)")
    server.signal(signal.SIGTERM)
    assert server.end() == 0


def test_fronts_that_die_again_and_again_end_the_server(start):
    server = start().ready()
    for _ in range(supervisor.RESTARTS + 1):
        (pid,) = server.connections(1)
        os.kill(pid, signal.SIGKILL)
        server.until("(restarting it)")
    server.until("(error: fronts have ended 6 times within 60 s)")
    assert server.end() == 1


def test_the_death_of_the_engine_ends_the_server_with_code_1_after_its_requests(start):
    server = start("--drain-s", "600").ready()
    (connection,) = server.connections(1).values()
    os.kill(server.pids("engine")[0], signal.SIGKILL)
    server.until("(the engine's process has ended by SIGKILL)")
    server.until("(exiting: the engine has failed)")
    ask(connection)
    connection.close()
    assert server.end() == 1


def test_a_failure_of_the_device_that_is_to_end_the_server_drains_it(start):
    server = start(stand_in="breaks").ready()
    server.until("(exiting: the engine has failed)")
    assert server.end() == 1
    assert "engine stops" in server.said


def test_a_new_engine_takes_the_place_of_one_that_died(start):
    server = start("--restart-on-failure").ready()
    (front,) = server.connections(1)
    os.kill(server.pids("engine")[0], signal.SIGKILL)
    server.until("(restarting the engine)")
    server.until(r"(ready: 1 of 2 programs compiled; as model)")
    assert set(server.connections(1)) == {front}
    server.signal(signal.SIGTERM)
    server.until("(SIGTERM)")
    server.signal(signal.SIGTERM)
    assert server.end() == 0
    assert len(server.pids("engine")) == 2


@pytest.mark.parametrize(
    ("stand_in", "code", "line"),
    [
        ("engine-fails", 2, "error: the model is missing"),
        ("front-fails", 2, "error: the store is missing"),
        ("engine-dies", 1, "error: the engine has ended by SIGKILL while the server started"),
    ],
)
def test_what_fails_while_the_server_starts_is_one_line(stand_in, code, line, start):
    server = start("--api-server-count", "3", stand_in=stand_in)
    assert server.end() == code
    assert re.findall("error: .*", server.said) == [line]


def test_neither_process_nor_file_outlives_a_supervisor_that_is_killed(start):
    server = start("--api-server-count", "2").ready()
    (pid, connection), _ = server.connections(2).items()
    connection.sendall(b"spin\n")
    server.signal(signal.SIGKILL)
    for pid in (*server.pids("engine"), *server.pids("front")):
        until(lambda pid=pid: not is_running(pid))
    assert not list(server.folder.iterdir())


def test_signals_to_all_processes_are_the_supervisors(start):
    server = start("--api-server-count", "2", "--drain-s", "600").ready()
    connections = server.connections(2)
    for pid in (*server.pids("engine"), *server.pids("front")):
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    for pid, connection in connections.items():
        assert ask(connection) == pid
    server.signal(signal.SIGINT)
    server.until("(finishing)")
    for connection in connections.values():
        connection.close()
    assert server.end() == 0


def test_of_several_hosts_the_first_alone_has_fronts(start):
    server = start("--distributed", stand_in="leads").ready()
    assert server.pids("front")
    server.signal(signal.SIGTERM)
    assert server.end() == 0
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = start("--distributed", "--port", str(taken.getsockname()[1]), stand_in="leads")
        assert server.end() == 2
        assert "in use" in server.said
        assert "Traceback" not in server.said
    server = start("--distributed", ENDS_S="0")
    assert server.end() == 0
    assert "listening" not in server.said
    assert not server.pids("front")
    server = start("--distributed", ENDS_S="600")
    server.until("(this process follows the first one)")
    server.signal(signal.SIGTERM)
    server.until("(SIGTERM: this process ends with the first one)")
    server.signal(signal.SIGTERM)
    assert server.end() == 128 + signal.SIGTERM


def test_fronts_follow_from_cores_unless_their_number_is_given(monkeypatch):
    for cores, fronts in ((1, 1), (2, 1), (7, 1), (8, 2), (64, 4)):
        monkeypatch.setattr(supervisor.os, "sched_getaffinity", lambda pid, cores=cores: range(cores), raising=False)
        assert supervisor.front_count(parse(["--bundled"])[0]) == fronts
        assert supervisor.front_count(parse(["--bundled", "--api-server-count", "3"])[0]) == 3


def test_the_supervisor_imports_neither_jax_nor_fastapi():
    code = "import sys, dflash_jax.cli.serve; print(*{'jax', 'fastapi', 'numpy', 'uvicorn'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_a_front_imports_no_jax():
    modules = ("server.front_process", "server.app", "server.engine_client", "frontend.front_model", "server.tracing")
    names = ", ".join(f"dflash_jax.{name}" for name in modules)
    code = f"import sys, {names}; print(*{{'jax', 'jaxlib', 'flax'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"

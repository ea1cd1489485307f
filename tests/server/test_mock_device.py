"""The server on a mock device, as scripts/bench/host.py measures it."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from dflash_jax.engine.service import AsyncEngine
from dflash_jax.server.engine_host import in_process
from dflash_jax.server.serving import Serving
from tests.helpers import load_script
from tests.server.conftest import Running, hosted

host = load_script("bench/host.py")
# A device that takes no time, and the shortest time that counts.
ARGS = {"new_tokens": 64, "round_ms": 0.0, "tokens": 4, "warm_up": 0.01, "seconds": 0.05, "grammar": False}
SLOTS = 2


@pytest.fixture(scope="module")
def mock(llm):
    mock = hosted(llm, AsyncEngine(host.device_of(SimpleNamespace(**ARGS), SLOTS).engine(llm)).start())
    running = Running(Serving(llm, in_process(mock), ["mock"]), mock)
    yield running
    running.stop()
    mock.engine.stop()


@pytest.mark.parametrize("form", [{}, {"regex": host.FORM}], ids=["free", "grammar"])
def test_a_stream_has_the_whole_text_of_its_seed(mock, llm, form):
    body = {"prompt": "class A:", "max_tokens": 57, "seed": 3, "ignore_eos": True, "stream": True} | form
    lines = mock.post("/v1/completions", **body).text.splitlines()
    pieces = [json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith('data: {"id"')]
    device = mock.host.engine.engine.runner
    assert "".join(pieces) == llm.tokenizer.decode(device.text(3, 0, 57))


def test_clients_say_when_they_begin_and_then_what_they_got(mock, capsys):
    args = SimpleNamespace(**ARGS | {"client": mock.url, "streams": [SLOTS]})
    asyncio.run(host.clients(args))
    first, last = capsys.readouterr().out.splitlines()
    assert not first
    # On a machine that stands still for that time, nothing.
    assert json.loads(last).keys() == {"rate", "client_s"}


class Pieces:
    """A transport that answers every request with the same bytes, in pieces of ``size``."""

    def __init__(self, connection, answer: bytes, size: int):
        self.connection, self.answer, self.size = connection, answer, size

    def write(self, data):
        loop = asyncio.get_running_loop()
        for first in range(0, len(self.answer), self.size):
            loop.call_soon(self.connection.data_received, self.answer[first : first + self.size])


def answered(size: int, asked: int = 9, status: bytes = b"200") -> None:
    """Posts requests for ``asked`` tokens, whose answers say that they have 9."""
    usage = b'data: {"usage":{"completion_tokens":9}}\n\ndata: [DONE]\n\n'
    answer = b"HTTP/1.1 %b OK\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (status, len(usage), usage)

    async def run():
        connection = host.Connection()
        connection.connection_made(Pieces(connection, answer, size))
        for _ in range(2):
            await asyncio.wait_for(connection.post("mock", {"max_tokens": asked}), 60)

    asyncio.run(run())


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_answer_ends_wherever_its_bytes_are_cut(size):
    answered(size)


@pytest.mark.parametrize("wrong", [{"asked": 10}, {"status": b"429"}])
def test_an_answer_that_is_not_what_was_asked_for_ends_the_measurement(wrong):
    with pytest.raises(RuntimeError, match="tokens were asked for"):
        answered(1000, **wrong)


def test_a_request_counts_by_its_share_of_the_time(monkeypatch):
    times = iter([0.0, 0.0, 4.0, 4.0])
    monkeypatch.setattr(host, "time", SimpleNamespace(perf_counter=lambda: next(times)))

    async def ready(i):
        async def ask(seed, count):
            counts.append(count)

        return ask

    counts: list[int] = []
    args = SimpleNamespace(warm_up=1.0, seconds=2.0, new_tokens=64)
    rate = asyncio.run(host.closed_loop(ready, args, 1))
    # From second 1 to 3 of a request that took 4 s.
    assert rate == pytest.approx(counts[0] * 2 / 4 / args.seconds)


def test_the_table_has_the_device_before_the_lines_of_its_streams():
    args = SimpleNamespace(**ARGS | {"round_ms": 6.0, "seconds": 2.0})
    window = {"engine_s": 0.1, "host_s": 0.2, "dispatches": 100, "p50": 0.0, "p99": 0.0001}
    row = host.row(args, 32, "http", 20000.0, window, {"engine": 0.2, "front": 0.4})
    lines = host.table([row]).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith("| 32 | device | 20779 | 1.00 |")
    assert lines[3] == "| 32 | http | 20000 | 0.96 | 0.00 | 0.10 | 2.00 | 2.50 | 5.00 | 10.00 |  |  |"


def test_a_window_has_what_figures_grow_by():
    samples = [(0.1 * i, 0.01 * i, 0.02 * i, 3 * i, 4 * i) for i in range(11)]
    window = host.window_of({"samples": samples, "gaps": [0.001 * (i == 20) for i in range(44)]}, 0.15, 0.75)
    assert window == pytest.approx(
        {"engine_s": 0.05, "host_s": 0.1, "dispatches": 15, "p50": 0.0, "p99": window["p99"]}
    )
    assert 0 < window["p99"] <= 0.001

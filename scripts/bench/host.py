"""What the host costs: tokens per second beside those of a device whose rounds take a fixed time, of the engine driven
directly, over HTTP, and with a grammar on every request; how long the device waits for the host between two pieces of
work; and processor time per token. The device is a clock (`tools/mock_runner.py`), all else is the server's own.

    python scripts/bench/host.py [--streams 32 128] [--out benchmarks/host]

Each stream sends its next request when the last one has ended; requests differ in length, so that they end one by one.
The clients are a process of their own on the same processors. A table on stdout, with --out as Markdown and JSON.
"""

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from itertools import chain
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from dflash_jax import LLM, SamplingParams
from dflash_jax.engine.service import AsyncEngine
from tools.mock_runner import Figures, MockDevice
from tools.server_process import ServerProcess, free_port, is_ready, machine

INTRODUCTION = """# What the host costs

`python scripts/bench/host.py --streams {streams}`, {machine}. A mock device: a round takes {round_ms:g} ms and yields
{tokens} tokens of each sequence, whatever the batch; requests of {new_tokens} new tokens on average. Gaps: how long the
device has nothing to do before a piece of work. Processor time in µs a token: of the engine's thread, of its process,
of the fronts, of all other processes of the server (grammars among them), and of the clients.

"""
PROMPTS = ["def read_config(path):", "class Parser:", "import os\n", "def main(argv):"]
# A grammar that forbids little and lets nothing end early.
FORM = "(?s:.){1,100000}"
CHUNK = 16
# Of whose processor time.
KINDS = ("engine", "front", "other", "client")
# The beginning of a good answer, the end of one in chunks, and how much of an answer is kept to look at.
GOOD, END, TAIL = b"HTTP/1.1 200", b"\r\n0\r\n\r\n", 2048

# Sends a request for so many tokens with a seed, and returns at its end.
Ask = Callable[[int, int], Awaitable[None]]


async def closed_loop(ask: Callable[[int], Awaitable[Ask]], args, streams: int) -> float:
    """Tokens per second of so many streams during ``args.seconds``, after ``args.warm_up``.

    A request that is not all in that time counts by its share.
    """
    asks = [await ask(i) for i in range(streams)]
    began = time.perf_counter() + args.warm_up
    ended, spans = began + args.seconds, []

    async def stream(i: int) -> None:
        rng = random.Random(i)
        while (sent := time.perf_counter()) < ended:
            count = rng.randint(args.new_tokens // 2, 3 * args.new_tokens // 2)
            await asks[i](rng.randrange(2**32), count)
            spans.append((sent, time.perf_counter(), count))

    await asyncio.gather(*map(stream, range(streams)))
    inside = (count * max(0.0, min(b, ended) - max(a, began)) / (b - a) for a, b, count in spans)
    return sum(inside) / args.seconds


class Connection(asyncio.Protocol):
    """A connection that sends requests and looks at the ends of their answers only, so that it costs little."""

    ended: asyncio.Future

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if len(self.status) < len(GOOD):
            self.status = (self.status + data)[: len(GOOD)]
        self.tail = (self.tail + data)[-TAIL:]
        if self.tail.endswith(END) and not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(exc or ConnectionError(f"the connection has ended: {self.tail!r}"))

    async def post(self, host: str, body: dict) -> None:
        """Sends a request for a stream, and returns at the end of a good answer."""
        self.status, self.tail, self.ended = b"", b"", asyncio.get_running_loop().create_future()
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        self.transport.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        await self.ended
        found = re.search(rb'"completion_tokens": ?(\d+)', self.tail)
        if self.status != GOOD or found is None or int(found[1]) != body["max_tokens"]:
            raise RuntimeError(f"{body['max_tokens']} tokens were asked for: {self.status!r} … {self.tail!r}")


async def clients(args) -> None:
    """Asks the server at ``args.client``: writes a line at the beginning, and then a line of JSON."""
    address, (streams,) = urlsplit(args.client), args.streams
    body = {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.7}
    body |= {"regex": FORM} if args.grammar else {}

    transports = []

    async def connected(i: int) -> Ask:
        loop = asyncio.get_running_loop()
        transport, connection = await loop.create_connection(Connection, address.hostname, address.port)
        transports.append(transport)
        prompt = PROMPTS[i % len(PROMPTS)]
        return lambda seed, count: connection.post(
            address.netloc, body | {"prompt": prompt, "seed": seed, "max_tokens": count}
        )

    print(flush=True)
    processor = asyncio.create_task(differences(time.process_time, args))
    rate = await closed_loop(connected, args, streams)
    for transport in transports:
        transport.close()
    print(json.dumps({"rate": rate, "client_s": await processor}))


async def differences(read: Callable[[], float], args) -> float:
    """What a figure grows by in the time that counts."""
    await asyncio.sleep(args.warm_up)
    before = read()
    await asyncio.sleep(args.seconds)
    return read() - before


class Direct:
    """The engine driven by tasks of this process, without a server.

    Args:
        args: The arguments.
        llm: The model.
        streams: How many tasks.
    """

    def __init__(self, args, llm: LLM, streams: int):
        self._args, self._llm, self._streams = args, llm, streams

    async def measure(self) -> dict:
        """The row."""
        engine, args = device_of(self._args, self._streams).engine(self._llm), self._args
        figures = Figures(engine)
        async with AsyncEngine(engine) as service:
            figures.start()

            async def ready(i: int) -> Ask:
                async def ask(seed: int, count: int) -> None:
                    params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.7, seed=seed)
                    request = self._llm.new_sequence(PROMPTS[i % len(PROMPTS)], params, "auto").request
                    async for _ in service.submit(request):
                        pass
                    assert len(request.tokens) == count

                return ask

            began = time.perf_counter() + args.warm_up
            others = asyncio.create_task(differences(time.process_time, args))
            rate = await closed_loop(ready, args, self._streams)
            window = window_of(figures.stop(), began, began + args.seconds)
        return row(args, self._streams, "engine", rate, window, {"engine": await others})


def device_of(args, streams: int, figures: str = "") -> MockDevice:
    """The device that the arguments describe."""
    return MockDevice(streams, 2 * args.new_tokens, args.round_ms / 1000, args.tokens, figures)


def window_of(figures: dict, began: float, ended: float) -> dict:
    """What the figures of an engine grow by in a time."""
    inside = [sample for sample in figures["samples"] if began <= sample[0] <= ended]
    first, last = inside[0], inside[-1]
    gaps = figures["gaps"][first[4] : last[4]]
    parts = statistics.quantiles(gaps or [0.0, 0.0], n=100, method="inclusive")
    engine_s, host_s, dispatches = (last[i] - first[i] for i in (1, 2, 3))
    return {"engine_s": engine_s, "host_s": host_s, "dispatches": dispatches, "p50": parts[49], "p99": parts[98]}


def processor_s(pid: int) -> dict[str, float]:
    """Processor seconds of a server's processes so far: of its engine, its fronts, and all others."""
    found, waiting = {"engine": 0.0, "front": 0.0, "other": 0.0}, [pid]
    for pid in waiting:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            children = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
        except OSError:
            continue
        waiting += map(int, chain(*children))
        is_supervisor = b"--port" in command
        kinds = {"engine": b"mock_engine" in command and not is_supervisor, "front": b"front_process" in command}
        kind = next((kind for kind, is_kind in kinds.items() if is_kind), "other")
        found[kind] += sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return found


async def over_http(args, streams: int, grammar: bool) -> dict:
    """The row of a server, and of clients in a process of their own, which stream."""
    with tempfile.TemporaryDirectory() as folder:
        figures, port = Path(folder) / "figures.json", free_port()
        command = [sys.executable, "-m", "tools.mock_engine", "--bundled", "--port", str(port)]
        command += ["--api-server-count", str(args.fronts), "--log-level", "error"]
        environment = device_of(args, streams, str(figures)).environment
        with ServerProcess(command, port, environment) as server:
            await asyncio.to_thread(server.wait_until, lambda: is_ready(server.url))
            rate, client_s, began, used = await asked(args, server, streams, grammar)
            server.stop()
        window = window_of(json.loads(figures.read_text()), began, began + args.seconds)
    return row(args, streams, "http and a grammar" if grammar else "http", rate, window, used | {"client": client_s})


async def asked(args, server: ServerProcess, streams: int, grammar: bool) -> tuple[float, float, float, dict]:
    """(tokens per second, processor seconds of the clients, when the time began that counts, those of the server)."""
    words = ["--client", server.url, "--streams", streams, "--new-tokens", args.new_tokens]
    words += ["--warm-up", args.warm_up, "--seconds", args.seconds, *["--grammar"] * grammar]
    command = map(str, (sys.executable, __file__, *words))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    await process.stdout.readline()
    began = time.perf_counter() + args.warm_up
    await asyncio.sleep(args.warm_up)
    before = processor_s(server.process.pid)
    await asyncio.sleep(args.seconds)
    after = processor_s(server.process.pid)
    out, _ = await process.communicate()
    if process.returncode:
        raise SystemExit("error: the clients have failed")
    found = json.loads(out)
    return found["rate"], found["client_s"], began, {kind: after[kind] - before[kind] for kind in after}


def row(args, streams: int, line: str, rate: float, window: dict, used: dict[str, float]) -> dict:
    """A row of the table; ``used``: processor seconds."""
    micro = 1e6 / (rate * args.seconds)
    # A request's rounds, and its chunk of prefill, which no other decodes beside.
    device = device_of(args, streams)
    token_s = device.round_s / device.tokens / streams + device.prefill_s * CHUNK / args.new_tokens
    found = {
        "streams": streams,
        "line": line,
        "tokens_per_s": rate,
        "device_tokens_per_s": 1 / token_s,
        "share": rate * token_s,
        "gap_p50_ms": 1000 * window["p50"],
        "gap_p99_ms": 1000 * window["p99"],
        "host_ms_a_dispatch": 1000 * window["host_s"] / max(window["dispatches"], 1),
        "engine_thread_us": window["engine_s"] * micro,
    }
    return found | {f"{kind}_us": used[kind] * micro if kind in used else None for kind in KINDS}


def table(rows: list[dict]) -> str:
    """The rows as Markdown."""
    head = ["streams", "line", "tokens/s", "of the device's", "gap p50 ms", "gap p99 ms", "host ms a dispatch"]
    head += ["thread µs", "engine µs", "fronts µs", "others µs", "clients µs"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for streams in dict.fromkeys(row["streams"] for row in rows):
        mine = [row for row in rows if row["streams"] == streams]
        lines.append(f"| {streams} | device | {mine[0]['device_tokens_per_s']:.0f} | 1.00 |" + "  |" * 8)
        for row in mine:
            figures = [f"{row['tokens_per_s']:.0f}", f"{row['share']:.2f}"]
            figures += ["" if row[name] is None else f"{row[name]:.2f}" for name in list(row)[5:]]
            lines.append(f"| {streams} | {row['line']} | {' | '.join(figures)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--streams", type=int, nargs="+", default=[32, 128], metavar="N", help="default: 32 128")
    p.add_argument("--new-tokens", type=int, default=512, metavar="N", help="of a request, on average")
    p.add_argument("--round-ms", type=float, default=6.0, metavar="MS", help="of the device (default: %(default)s)")
    p.add_argument("--tokens", type=int, default=4, metavar="N", help="of a round (default: %(default)s)")
    p.add_argument("--fronts", type=int, default=1, metavar="N", help="of the server (default: %(default)s)")
    p.add_argument("--warm-up", type=float, default=2.0, metavar="S", help="default: %(default)s")
    p.add_argument("--seconds", type=float, default=6.0, metavar="S", help="of each line (default: %(default)s)")
    p.add_argument("--out", type=Path, metavar="PATH", help="writes PATH.md and PATH.json")
    p.add_argument("--client", metavar="URL", help=argparse.SUPPRESS)
    p.add_argument("--grammar", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.client:
        asyncio.run(clients(args))
        return
    llm, rows = LLM(slots=1), []
    for streams in args.streams:
        rows.append(asyncio.run(Direct(args, llm, streams).measure()))
    # It would have the processors' caches.
    del llm
    for streams in args.streams:
        rows += [asyncio.run(over_http(args, streams, grammar)) for grammar in (False, True)]
    print(table(rows))
    if args.out:
        streams = " ".join(map(str, args.streams))
        introduction = INTRODUCTION.format(**vars(args) | {"streams": streams, "machine": machine()})
        args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(introduction + table(rows))


if __name__ == "__main__":
    main()

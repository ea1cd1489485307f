"""What the host costs: tokens per second beside those of a device whose rounds take a fixed time, of the engine driven
directly, over HTTP, and with a grammar on every request; how long the device waits for the host between two pieces of
work; and processor time per token. The device is a clock (`tools/mock_runner.py`), all else is the server's own.

    python scripts/bench/host.py [--streams 32 128] [--out benchmarks/host]

Each stream sends its next request when the last one has ended; requests differ in length, so that they end one by one.
The clients are a process of their own on the same processors. A table on stdout, with --out as Markdown and JSON.
"""

import argparse
import asyncio
import gc
import json
import random
import re
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from dflash_jax import LLM, SamplingParams
from dflash_jax.engine.config import EngineConfig, prefill_config, speculations_of
from dflash_jax.engine.engine import Engine
from tools.mock_runner import MockRunner
from tools.server_process import machine

INTRODUCTION = """# What the host costs

`python scripts/bench/host.py --streams {streams}`, {machine}. A mock device: a round takes {round_ms:g} ms and yields
{tokens} tokens of each sequence, whatever the batch; requests of {new_tokens} new tokens on average. Gaps: how long the
device has nothing to do before a piece of work. Processor time per token: of the engine's thread, of all other threads
of the server, and of the clients; without the processes of grammars.

"""
PROMPTS = ["def read_config(path):", "class Parser:", "import os\n", "def main(argv):"]
# A grammar that forbids little and lets nothing end early.
FORM = "(?s:.){1,100000}"
BLOCK = 8
CHUNK = 16
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


def vocabulary(llm: LLM) -> list[int]:
    """Tokens of printable ASCII, without tags such as ``<think>``."""
    assert llm.tokenizer is not None
    texts = {token: llm.tokenizer.token_bytes(token) for token in range(llm.config.vocab_size)}
    return [token for token, text in texts.items() if re.fullmatch(rb"[ -;=-~]+", text)]


def mock_engine(llm: LLM, args, slots: int) -> Engine:
    """An engine of the model's vocabulary on a device that is a clock."""
    runner = MockRunner(
        slots,
        2 * args.new_tokens,
        round_s=args.round_ms / 1000,
        tokens=args.tokens,
        vocabulary=vocabulary(llm),
        vocab_size=llm.config.vocab_size,
    )
    options = {"max_queue": 1024, "prefix_bytes": runner.pages[0] * runner.page_bytes[0] // 2, "masks": True}
    return Engine(runner, EngineConfig(speculations_of((BLOCK,)), **prefill_config("gpu", True), **options))


class Measurement:
    """One engine, its server, and what its process and threads take."""

    def __init__(self, args, host, url: str, streams: int):
        self.args, self.host, self.url, self.streams = args, host, url, streams
        self.runner, self.statistics = host.engine.engine.runner, host.engine.engine.statistics

    async def directly(self) -> dict:
        """The engine driven by tasks of this process."""

        async def ready(i: int) -> Ask:
            async def ask(seed: int, count: int) -> None:
                params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.7, seed=seed)
                request = self.host.llm.new_sequence(PROMPTS[i % len(PROMPTS)], params, "auto").request
                async for _ in self.host.engine.submit(request):
                    pass
                assert len(request.tokens) == count

            return ask

        rate, window = await asyncio.gather(closed_loop(ready, self.args, self.streams), self._window())
        return self._row("engine", rate, window)

    async def over_http(self, grammar: bool) -> dict:
        """Clients in a process of their own, which stream."""
        command = [sys.executable, __file__, "--client", self.url, "--streams", str(self.streams)]
        command += [
            "--new-tokens",
            self.args.new_tokens,
            "--warm-up",
            self.args.warm_up,
            "--seconds",
            self.args.seconds,
        ]
        command += ["--grammar"] * grammar
        process = await asyncio.create_subprocess_exec(*map(str, command), stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        await process.stdout.readline()
        window = await self._window()
        out, _ = await process.communicate()
        if process.returncode:
            raise SystemExit("error: the clients have failed")
        found = json.loads(out)
        return self._row("http and a grammar" if grammar else "http", found["rate"], window, found["client_s"])

    def _figures(self) -> dict[str, float]:
        (thread,) = (each for each in threading.enumerate() if each.name == "engine")
        assert thread.ident is not None
        engine_s = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        return {
            "engine_s": engine_s,
            "others_s": time.process_time() - engine_s,
            "host_s": self.statistics.host_s,
            "dispatches": sum(self.statistics.dispatches.values()),
            "gaps": len(self.runner.gaps),
        }

    async def _window(self) -> dict:
        """What the figures of this process grow by in the time that counts."""
        await asyncio.sleep(self.args.warm_up)
        before = self._figures()
        await asyncio.sleep(self.args.seconds)
        after = self._figures()
        gaps = self.runner.gaps[int(before["gaps"]) : int(after["gaps"])]
        parts = statistics.quantiles(gaps or [0.0, 0.0], n=100, method="inclusive")
        return {name: after[name] - before[name] for name in after} | {"gap_p50": parts[49], "gap_p99": parts[98]}

    def _row(self, line: str, rate: float, window: dict, client_s: float | None = None) -> dict:
        args, micro = self.args, 1e6 / (rate * self.args.seconds)
        # A request's rounds, and its chunk of prefill, which no other decodes beside.
        token_s = args.round_ms / 1000 / args.tokens / self.streams + self.runner.prefill_s * CHUNK / args.new_tokens
        return {
            "streams": self.streams,
            "line": line,
            "tokens_per_s": rate,
            "device_tokens_per_s": 1 / token_s,
            "share": rate * token_s,
            "gap_p50_ms": 1000 * window["gap_p50"],
            "gap_p99_ms": 1000 * window["gap_p99"],
            "host_ms_a_dispatch": 1000 * window["host_s"] / max(window["dispatches"], 1),
            "engine_us_a_token": window["engine_s"] * micro,
            "server_us_a_token": window["others_s"] * micro,
            "client_us_a_token": None if client_s is None else client_s * micro,
        }


async def measure(args, llm: LLM, streams: int) -> list[dict]:
    """The rows of so many streams."""
    import uvicorn

    from dflash_jax.engine.service import AsyncEngine
    from dflash_jax.server.app import build
    from dflash_jax.server.connections import protocol
    from dflash_jax.server.engine_host import EngineHost, in_process
    from dflash_jax.server.serving import Serving

    host = EngineHost(llm, AsyncEngine(mock_engine(llm, args, streams)), "mock")
    host.set_ready()
    serving = Serving(llm, in_process(host), ["mock"])
    serving.prepare()
    host.start_workers()
    options = {"lifespan": "off", "log_level": "warning", "ws": "none", "access_log": False}
    # uvicorn calls it, and a class is not needed for that.
    http = cast("type[asyncio.Protocol]", protocol())
    server = uvicorn.Server(uvicorn.Config(build(serving), port=0, http=http, **options))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.05)
    # As the server does.
    gc.collect()
    gc.freeze()
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    measurement = Measurement(args, host, url, streams)
    try:
        rows = [await measurement.directly(), await measurement.over_http(False)]
        return [*rows, *([await measurement.over_http(True)] if host.grammar else [])]
    finally:
        server.should_exit = True
        await task
        host.engine.stop()
        host.stop_workers()
        serving.stop_workers()


def table(rows: list[dict]) -> str:
    """The rows as Markdown."""
    head = ["streams", "line", "tokens/s", "of the device's", "gap p50 ms", "gap p99 ms", "host ms a dispatch"]
    head += ["engine µs a token", "server µs a token", "client µs a token"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for streams in dict.fromkeys(row["streams"] for row in rows):
        mine = [row for row in rows if row["streams"] == streams]
        lines.append(f"| {streams} | device | {mine[0]['device_tokens_per_s']:.0f} | 1.00 |" + "  |" * 6)
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
    p.add_argument("--warm-up", type=float, default=2.0, metavar="S", help="default: %(default)s")
    p.add_argument("--seconds", type=float, default=6.0, metavar="S", help="of each line (default: %(default)s)")
    p.add_argument("--out", type=Path, metavar="PATH", help="writes PATH.md and PATH.json")
    p.add_argument("--client", metavar="URL", help=argparse.SUPPRESS)
    p.add_argument("--grammar", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.client:
        asyncio.run(clients(args))
        return
    if find_spec("uvicorn") is None:
        p.error('this needs the extra server: pip install "dflash-jax[server]"')
    llm, rows = LLM(slots=1), []
    for streams in args.streams:
        rows += asyncio.run(measure(args, llm, streams))
    print(table(rows))
    if args.out:
        streams = " ".join(map(str, args.streams))
        introduction = INTRODUCTION.format(**vars(args) | {"streams": streams, "machine": machine()})
        args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(introduction + table(rows))


if __name__ == "__main__":
    main()

"""How long first tokens take under unequal load: a short request beside a long prompt, a long prompt beside many short
requests, urgent requests beside others, and many streams on few slots. Starts `dflash serve` on the bundled pair,
whose positions it extends where ``--long`` needs it (the text is then worth nothing, the time is the same).

    python scripts/bench/fairness.py [--long 7000] [--out benchmarks/fairness.json] [-- OPTIONS OF dflash serve]
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from tools.bundled_pair import with_positions

# --help works without it.
with contextlib.suppress(ModuleNotFoundError):
    import httpx

VOCAB = 500
SHORT, NEW = 16, 32
CLIENTS = 64


@contextlib.contextmanager
def serving(options: list[str], log: Path):
    """A server in a process of its own, warmed up: its address."""
    command = [sys.executable, "-m", "dflash_jax.serve", "--bundled", "--port", "0", "--warm-up", "full"]
    command += ["--max-queue", "1024"]
    with log.open("w") as out:
        process = subprocess.Popen([*command, *options], stdout=out, stderr=subprocess.STDOUT)
    try:
        while "listening on" not in log.read_text():
            if process.poll() is not None:
                raise SystemExit(f"error: the server has ended:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        (url,) = re.findall(r"listening on (http://[\d.]+:\d+)", log.read_text())
        while httpx.get(f"{url}/ready").status_code != 200:
            time.sleep(0.2)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


async def first_token(client, rng: random.Random, length: int, new: int = NEW, **more) -> float:
    """Seconds to the first token of a stream after a random prompt of ``length`` tokens, which is read to its end."""
    prompt = [rng.randrange(10, VOCAB) for _ in range(length)]
    body = {"prompt": prompt, "max_tokens": new, "ignore_eos": True, "temperature": 0, "stream": True} | more
    began, first = time.perf_counter(), None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                assert "error" not in json.loads(line[6:]), line
                first = first or time.perf_counter() - began
    assert first is not None, "a stream without tokens"
    return first


@contextlib.asynccontextmanager
async def short_requests(client, rng: random.Random, **more):
    """`CLIENTS` clients, each of which sends a short request when its last one has ended: their times so far."""
    times: list[float] = []

    async def one():
        while True:
            times.append(await first_token(client, rng, SHORT, **more))

    tasks = [asyncio.create_task(one()) for _ in range(CLIENTS)]
    while len(times) < CLIENTS:
        await asyncio.sleep(0.05)
    try:
        yield times
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure(url: str, long: int, repeats: int, streams: int) -> dict[str, list[float]]:
    """Seconds to first tokens by case."""
    rng, times = random.Random(0), {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        times["short, alone"] = [await first_token(client, rng, SHORT) for _ in range(10 * repeats)]
        times[f"{long:,} tokens, alone"] = [await first_token(client, rng, long) for _ in range(repeats)]
        short_waits, long_waits = [], []
        for _ in range(repeats):
            task = asyncio.create_task(first_token(client, rng, long))
            await asyncio.sleep(0.05)
            while not task.done():
                short_waits.append(await first_token(client, rng, SHORT))
            long_waits.append(await task)
        times[f"short, one after the other, beside {long:,} tokens"] = short_waits
        times[f"{long:,} tokens, beside those"] = long_waits
        async with short_requests(client, rng) as short:
            del short[:]
            times[f"{long:,} tokens, beside {CLIENTS} clients with short requests"] = [
                await first_token(client, rng, long) for _ in range(repeats)
            ]
            times[f"short, of {CLIENTS} clients, beside those"] = short[:]
        async with short_requests(client, rng, priority=1) as short:
            del short[:]
            times[f"short and urgent, beside {CLIENTS} clients"] = [
                await first_token(client, rng, SHORT, priority=0) for _ in range(10 * repeats)
            ]
            times[f"short and not urgent, of {CLIENTS} clients"] = short[:]
        together = [first_token(client, rng, SHORT, new=128) for _ in range(streams)]
        times[f"{streams} streams at once"] = list(await asyncio.gather(*together))
    return times


def summary(times: list[float]) -> dict:
    """p50, p95 and p99 in milliseconds."""
    parts = statistics.quantiles(times, n=100, method="inclusive") if len(times) > 1 else times * 99
    return {"count": len(times)} | {f"p{p}_ms": round(1000 * parts[p - 1], 1) for p in (50, 95, 99)}


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = "tokens of the long prompts (default: %(default)s)"
    p.add_argument("--long", type=int, default=7000, metavar="N", help=text)
    p.add_argument("--repeats", type=int, default=5, metavar="N", help="long prompts a case (default: %(default)s)")
    p.add_argument("--streams", type=int, default=300, metavar="N", help="opened at once (default: %(default)s)")
    p.add_argument("--out", type=Path, metavar="FILE", help="writes the figures as JSON, too")
    p.add_argument("options", nargs="*", metavar="OPTION", help="options of dflash serve, after --")
    args = p.parse_args()
    if find_spec("httpx") is None:
        p.error('this needs the extra server: pip install "dflash-jax[server]"')
    positions = -(-(args.long + 256) // 1024) * 1024
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        target, draft = map(str, with_positions(where, positions))
        options = ["--target", target, "--draft", draft, "--slots", "32", "--max-len", str(positions), *args.options]
        with serving(options, where / "log") as url:
            times = asyncio.run(measure(url, args.long, args.repeats, args.streams))
    rows = {name: summary(values) for name, values in times.items()}
    print("| first token of | requests | p50 ms | p95 ms | p99 ms |\n| --- | ---: | ---: | ---: | ---: |")
    for name, row in rows.items():
        print(f"| {name} | {row['count']} | {row['p50_ms']:,} | {row['p95_ms']:,} | {row['p99_ms']:,} |")
    if args.out:
        about = {"cpus": os.cpu_count(), "options": args.options}
        args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

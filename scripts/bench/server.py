"""What HTTP costs: tokens per second through the server against the engine driven directly, in one process and
interleaved; what masks cost: requests with a grammar against the same requests at one round a dispatch; and when the
first tokens come of many streams that are opened at once.

    python scripts/bench/server.py [--concurrency 32] [--runs 5]
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from dataclasses import replace
from importlib.util import find_spec

from dflash_jax import LLM, SamplingParams

# --help works without it.
with contextlib.suppress(ModuleNotFoundError):
    import httpx

PROMPTS = ["def read_config(path):", "class Parser:", "import os\n", "def main(argv):"]
# A grammar that forbids little and lets nothing end early.
FORM = "(?s:.){1,100000}"


async def direct(host, new: int, count: int, block, grammar: bool = False) -> float:
    from dflash_jax.protocol import Form

    params = SamplingParams(temperature=0.7, max_tokens=new, ignore_eos=True)
    compiled = await host.grammar.grammar(Form.of("regex", FORM, "regex")) if grammar else None

    async def one(i: int) -> int:
        mask = compiled.mask() if compiled else None
        row = host.llm.new_sequence(PROMPTS[i % len(PROMPTS)], replace(params, seed=i), block, mask=mask)
        async for event in host.engine.submit(row.request):
            row.take(event)
        return len(row.request.tokens)

    began = time.perf_counter()
    tokens = sum(await asyncio.gather(*(one(i) for i in range(count))))
    return tokens / (time.perf_counter() - began)


async def clients(url: str, new: int, count: int, block: str, stream: bool) -> float:
    """Tokens per second of so many requests at once over HTTP."""

    async def one(client: "httpx.AsyncClient", i: int) -> int:
        body = {"prompt": PROMPTS[i % len(PROMPTS)], "max_tokens": new, "ignore_eos": True, "temperature": 0.7}
        body |= {"seed": i, "block_size": block, "stream": stream}
        if not stream:
            return (await client.post("/v1/completions", json=body)).json()["usage"]["completion_tokens"]
        body["stream_options"], last = {"include_usage": True}, ""
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith('data: {"id"'):
                    last = line
        return json.loads(last[6:])["usage"]["completion_tokens"]

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        began = time.perf_counter()
        tokens = sum(await asyncio.gather(*(one(client, i) for i in range(count))))
        return tokens / (time.perf_counter() - began)


async def first_tokens(url: str, new: int, count: int) -> list[float]:
    """Seconds to the first token of each of ``count`` streams of ``new`` tokens that are opened at once."""

    async def one(client: "httpx.AsyncClient", i: int) -> float:
        body = {"prompt": PROMPTS[i % len(PROMPTS)], "max_tokens": new, "ignore_eos": True, "temperature": 0.7}
        first = None
        async with client.stream("POST", "/v1/completions", json=body | {"seed": i, "stream": True}) as response:
            async for line in response.aiter_lines():
                if first is None and line.startswith("data: {"):
                    assert "error" not in json.loads(line[6:]), line
                    first = time.perf_counter() - began
        assert first is not None, "a stream without tokens"
        return first

    async with httpx.AsyncClient(base_url=url, timeout=None, limits=httpx.Limits(max_connections=None)) as client:
        began = time.perf_counter()
        return await asyncio.gather(*(one(client, i) for i in range(count)))


async def over_http(url: str, args, *options: str):
    """What a client in a process of its own prints, as JSON."""
    command = [sys.executable, __file__, "--client", url, "--new-tokens", str(args.new_tokens)]
    command += ["--concurrency", str(args.concurrency), *options]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    return json.loads(out)


async def run(args) -> None:
    import uvicorn

    from dflash_jax.engine import scheduler
    from dflash_jax.engine.service import AsyncEngine
    from dflash_jax.engine.warm_up import warm_up
    from dflash_jax.server.app import build
    from dflash_jax.server.engine_host import EngineHost, in_process
    from dflash_jax.server.serving import Serving

    llm = LLM(slots=args.concurrency)
    engine = llm.new_engine(llm.programs, args.concurrency, 1024, max_queue=1024, masks=True)
    warm_up(engine)
    host = EngineHost(llm, AsyncEngine(engine), "tiny")
    host.set_ready()
    serving = Serving(llm, in_process(host), ["tiny"])
    server = uvicorn.Server(
        uvicorn.Config(build(serving), port=0, lifespan="off", log_level="warning", timeout_keep_alive=600)
    )
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.05)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    count, found = 2 * args.concurrency, {}

    async def one_round(masked: bool) -> float:
        """At one round a dispatch, as masks need it."""
        before = scheduler.MAX_ROUNDS, scheduler.MIN_ROUNDS
        scheduler.MAX_ROUNDS = scheduler.MIN_ROUNDS = 1
        try:
            return await direct(host, args.new_tokens, args.concurrency, 1, masked)
        finally:
            scheduler.MAX_ROUNDS, scheduler.MIN_ROUNDS = before

    for i in range(args.runs + 1):
        measured = {
            "engine": await direct(host, args.new_tokens, count, "auto"),
            "http": await over_http(url, args),
            "http, streaming": await over_http(url, args, "--stream"),
            "one round a dispatch": await one_round(False),
            "with a grammar": await one_round(True),
        }
        # The first run warms up.
        for name, value in measured.items() if i else ():
            found.setdefault(name, []).append(value)
    firsts = await over_http(url, args, "--first", "--streams", str(args.streams)) if args.streams else None
    server.should_exit = True
    await task
    host.engine.stop()
    host.stop_workers()
    serving.stop_workers()
    middle = {name: statistics.median(values) for name, values in found.items()}
    for name, value in middle.items():
        beside = "one round a dispatch" if name == "with a grammar" else "engine"
        print(f"| {name} | {value:.0f} | {value / middle[beside]:.2f} |")
    if firsts:
        parts = statistics.quantiles(firsts, n=100, method="inclusive")
        times = ", ".join(f"p{p} {parts[p - 1]:.2f} s" for p in (50, 95, 99))
        print(f"first token of {args.streams} streams of {args.new_tokens} tokens: {times}, last {max(firsts):.2f} s")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--concurrency", type=int, default=32, metavar="N", help="default: %(default)s")
    p.add_argument("--new-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    p.add_argument("--runs", type=int, default=5, metavar="N", help="default: %(default)s")
    p.add_argument("--streams", type=int, default=300, metavar="N", help="opened at once (default: %(default)s)")
    p.add_argument("--client", metavar="URL", help=argparse.SUPPRESS)
    p.add_argument("--stream", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--first", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if find_spec("httpx") is None:
        p.error('this needs the extra server: pip install "dflash-jax[server]"')
    if args.client and args.first:
        print(json.dumps(asyncio.run(first_tokens(args.client, args.new_tokens, args.streams))))
    elif args.client:
        print(asyncio.run(clients(args.client, args.new_tokens, 2 * args.concurrency, "auto", args.stream)))
    else:
        asyncio.run(run(args))


if __name__ == "__main__":
    main()

"""Thousands of requests of all kinds on a running server, a tenth of them aborted: memory must not grow, what the
others get must be what the same request gets alone, and no page may be in use at the end.

    python -m dflash_jax.serve --bundled --port 30000 --max-len 2048 --slots 32 --max-total-tokens 8192 &
    python scripts/server/soak.py --requests 3000 --pid $!

With so few tokens in all, requests move to the host and back: the script prints how often, and how many of them have
more than one page of 256 positions, and more than four.
"""

import argparse
import asyncio
import contextlib
import random
import sys
from importlib.util import find_spec
from pathlib import Path

# --help works without it.
with contextlib.suppress(ModuleNotFoundError):
    import httpx

STEPS = 10


def resident(pid: int) -> float:
    """MB of a process and of all below it; pages that they share count for each."""
    total, pids = 0.0, [pid]
    for each in pids:
        # A worker may end meanwhile.
        with contextlib.suppress(OSError, IndexError):
            total += int(Path(f"/proc/{each}/status").read_text().split("VmRSS:")[1].split()[0]) / 1024
            for children in Path(f"/proc/{each}/task").glob("*/children"):
                pids += map(int, children.read_text().split())
    return total


def wanted(i: int) -> tuple[str, dict]:
    """The i-th of 50 distinct requests: path and body."""
    rng = random.Random(i)
    tokens = rng.choice([1, 120, 260, 280, 400, 500, 600, 700, 1100, 1200])
    body = {"max_tokens": tokens, "temperature": rng.choice([0, 0.7, 1.2]), "seed": i}
    body |= {"ignore_eos": tokens > 200, "priority": rng.choice([0, 0, 1, -1])}
    body |= rng.choice([{}, {"stop": ["\n\n"]}, {"block_size": 8}, {"min_p": 0.05}, {"repetition_penalty": 1.2}])
    kind = rng.randrange(5)
    if kind == 0:
        form = {"regex": "[a-z ]{5,40}\\."} if i % 2 else {"guided_json": {"type": "object"}}
        return "/v1/completions", {"prompt": "def ", **body, **form}
    if kind == 1:
        return "/v1/completions", {"prompt": "class A:\n" * rng.choice([1, 20]), "logprobs": 2, **body}
    messages = [{"role": "user", "content": rng.choice(["Write.", "Be brief. " * 30])}]
    return "/v1/chat/completions", {"messages": messages, "n": rng.choice([1, 1, 3]), **body}


def texts(path: str, answer: dict) -> list[str]:
    if path.endswith("chat/completions"):
        return [str(c["message"]["reasoning_content"]) + str(c["message"]["content"]) for c in answer["choices"]]
    return [c["text"] for c in answer["choices"]]


async def metrics(client) -> dict[str, float]:
    """The sums of the server's metrics."""
    sums: dict[str, float] = {}
    for line in (await client.get("/metrics")).text.splitlines():
        if not line.startswith("#"):
            name, value = line.split("{")[0].split(" ")[0], line.rsplit(" ", 1)[1]
            sums[name] = sums.get(name, 0) + float(value)
    return sums


def lengths(answer: dict) -> list[int]:
    """Tokens of each sequence of an answer, on average."""
    usage, count = answer["usage"], len(answer["choices"])
    return [usage["prompt_tokens"] + usage["completion_tokens"] // count] * count


async def run(args) -> bool:
    rng, wrong, errors, aborted, sizes = random.Random(0), 0, 0, 0, []
    limits = httpx.Limits(max_connections=args.concurrency)
    async with httpx.AsyncClient(base_url=args.url, timeout=None, limits=limits) as client:
        # What is compiled after the start takes memory, too.
        while (info := (await client.get("/server_info")).json()["warm_up"])["compiled"] < info["total"]:
            await asyncio.sleep(1)
        expected = {}
        for i in range(50):
            path, body = wanted(i)
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            expected[i] = texts(path, answer.json())

        async def one(i: int, gate: asyncio.Semaphore) -> None:
            nonlocal wrong, errors, aborted
            path, body = wanted(i)
            async with gate:
                if rng.random() < 0.1:
                    try:
                        await client.post(path, json=body, timeout=rng.uniform(0.001, 0.3))
                    except httpx.TimeoutException:
                        aborted += 1
                    return
                answer = await client.post(path, json=body)
                if answer.status_code != 200:
                    errors += 1
                else:
                    sizes.extend(lengths(answer.json()))
                    wrong += texts(path, answer.json()) != expected[i]

        first = 0.0
        for step in range(STEPS):
            gate = asyncio.Semaphore(args.concurrency)
            await asyncio.gather(*(one(rng.randrange(50), gate) for _ in range(args.requests // STEPS)))
            memory = resident(args.pid)
            first = first or memory
            print(f"{(step + 1) * args.requests // STEPS} requests: {memory:.0f} MB", flush=True)
        while (found := await metrics(client))["vllm:num_requests_running"]:
            # Aborted ones end with their next step.
            await asyncio.sleep(0.1)
    usage, moved = found["vllm:kv_cache_usage_perc"], found["vllm:num_preemptions_total"]
    shares = [sum(n > size for n in sizes) / len(sizes) for size in (256, 1024)]
    print(f"aborted {aborted}, errors {errors}, unequal {wrong}, memory {memory / first:.3f} of the first tenth's")
    print(f"{shares[0]:.0%} have more than 256 tokens, {shares[1]:.0%} more than 1,024; moved {moved:.0f} times")
    print(f"pages in use at the end: {usage:.1%}")
    return not errors and not wrong and not usage and memory <= 1.05 * first


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--url", default="http://127.0.0.1:30000", help="default: %(default)s")
    p.add_argument("--pid", type=int, required=True, help="the server's")
    p.add_argument("--requests", type=int, default=3000, metavar="N", help="default: %(default)s")
    p.add_argument("--concurrency", type=int, default=32, metavar="N", help="default: %(default)s")
    args = p.parse_args()
    if find_spec("httpx") is None:
        p.error('this needs the extra server: pip install "dflash-jax[server]"')
    return 0 if asyncio.run(run(args)) else 1


if __name__ == "__main__":
    sys.exit(main())

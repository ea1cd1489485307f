"""Thousands of requests of all kinds on a running server, a tenth of them aborted: memory must not grow, and what the
others get must be what the same request gets alone.

    python -m dflash_jax.serve --port 30000 &
    python scripts/server/soak.py --requests 3000 --pid $!
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
    """MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def wanted(i: int) -> tuple[str, dict]:
    """The i-th of 50 distinct requests: path and body."""
    rng = random.Random(i)
    body = {"max_tokens": rng.choice([1, 8, 40, 120]), "temperature": rng.choice([0, 0.7, 1.2]), "seed": i}
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


async def run(args) -> bool:
    rng, wrong, errors, aborted = random.Random(0), 0, 0, 0
    limits = httpx.Limits(max_connections=args.concurrency)
    async with httpx.AsyncClient(base_url=args.url, timeout=None, limits=limits) as client:
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
                elif texts(path, answer.json()) != expected[i]:
                    wrong += 1

        first = 0.0
        for step in range(STEPS):
            gate = asyncio.Semaphore(args.concurrency)
            await asyncio.gather(*(one(rng.randrange(50), gate) for _ in range(args.requests // STEPS)))
            memory = resident(args.pid)
            first = first or memory
            print(f"{(step + 1) * args.requests // STEPS} requests: {memory:.0f} MB", flush=True)
    print(f"aborted {aborted}, errors {errors}, unequal {wrong}, memory {memory / first:.3f} of the first tenth's")
    return not errors and not wrong and memory <= 1.05 * first


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

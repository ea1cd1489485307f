"""Kills replicas of a cluster with SIGKILL under load: no request may be lost, repeated in part, or changed.

    python scripts/cluster/kill_replicas.py --out report.md

Starts `dflash cluster` with two replicas. For each seed it sends the same requests, half of them streams, and kills one
replica at a random time. Tokens and texts are compared with those of a run without a kill. Needs "dflash-jax[ray]".
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

# --help works without them.
with contextlib.suppress(ModuleNotFoundError):
    import httpx
    import psutil

REPLICA = "ray::ServeReplica"
PROMPTS = ["def clamp(value, low, high):\n    ", "class Stack:\n", "import os\n\n", "x = "]
# Seconds that replicas may take to start.
START_S = 900


def wanted(i: int) -> tuple[str, dict]:
    """The i-th request: path and body. Every second one is a stream."""
    rng = random.Random(i)
    body = {"seed": i, "temperature": rng.choice([0, 0.7, 1.0]), "ignore_eos": True, "return_token_ids": True}
    body |= {"max_tokens": rng.choice([40, 120, 200]), "stream": i % 2 == 0}
    body |= rng.choice([{}, {}, {"frequency_penalty": 0.5, "repetition_penalty": 1.1}, {"stop": ["return"]}])
    if rng.random() < 0.5:
        return "/v1/completions", {"prompt": rng.choice(PROMPTS), **body}
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": rng.choice(PROMPTS)}], **body}


async def answer(client: "httpx.AsyncClient", path: str, body: dict) -> tuple[list[int], str]:
    """Tokens and text of a request. Raises for an answer that is not complete."""
    tokens, text, ended, done = [], "", False, False

    def take(choice: dict, message: dict) -> None:
        nonlocal text, ended
        tokens.extend(choice.get("token_ids") or ())
        for name in ("text", "reasoning_content", "content"):
            text += message.get(name) or ""
        ended = ended or choice["finish_reason"] is not None

    if not body["stream"]:
        response = await client.post(path, json=body)
        response.raise_for_status()
        (choice,) = response.json()["choices"]
        take(choice, choice.get("message", choice))
        return tokens, text
    async with client.stream("POST", path, json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                for choice in event["choices"]:
                    take(choice, choice.get("delta", choice))
    if not (ended and done):
        raise RuntimeError("the stream has no end")
    return tokens, text


async def send_all(url: str, count: int, concurrency: int) -> tuple[list, float]:
    """Answers to all requests, or the exceptions in their places; and the seconds that it took."""
    places, began = asyncio.Semaphore(concurrency), time.perf_counter()
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:

        async def one(i: int):
            async with places:
                return await answer(client, *wanted(i))

        answers = await asyncio.gather(*map(one, range(count)), return_exceptions=True)
    return answers, time.perf_counter() - began


def replicas(of: int) -> list["psutil.Process"]:
    """Processes of replicas below the process ``of``."""
    found = []
    for process in psutil.Process(of).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(REPLICA):
                found.append(process)
    return found


def metric(url: str, name: str) -> float:
    """The value of a metric without labels."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))


def wait_for_replicas(url: str, count: int) -> None:
    """Returns when the ingress knows ``count`` replicas."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        with contextlib.suppress(httpx.HTTPError, StopIteration):
            if metric(url, "dflash:replicas") == count:
                return
        time.sleep(0.5)
    raise SystemExit(f"{count} replicas did not start within {START_S} s")


async def with_kill(url: str, pid: int, seed: int, args, seconds: float) -> tuple[list, float]:
    """`send_all`, with the death of a random replica at a random time."""
    rng = random.Random(f"kill {seed}")

    async def kill() -> None:
        await asyncio.sleep(rng.uniform(0.05, 0.8) * seconds)
        victim = rng.choice(replicas(pid))
        print(f"seed {seed}: SIGKILL for {victim.pid}", file=sys.stderr)
        victim.send_signal(signal.SIGKILL)

    answers, _ = await asyncio.gather(send_all(url, args.requests, args.concurrency), kill())
    return answers


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--requests", type=int, default=200)
    p.add_argument("--concurrency", type=int, default=8)
    p.add_argument("--seeds", type=int, default=5)
    p.add_argument("--out", type=Path, help="write the report here too")
    p.add_argument("words", nargs="*", help="behind --: further words of dflash cluster")
    args = p.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    words = ["--replicas", "2", "--port", str(port), "--slots", "8", "--max-len", "1024", *args.words]
    command = [sys.executable, "-m", "dflash_jax.cluster", *words]
    cluster, lines = subprocess.Popen(command), []
    try:
        wait_for_replicas(url, 2)
        expected, seconds = asyncio.run(send_all(url, args.requests, args.concurrency))
        if failures := [each for each in expected if isinstance(each, Exception)]:
            raise SystemExit(f"without a kill: {failures[0]!r}")
        for seed in range(args.seeds):
            before = {name: metric(url, f"dflash:cluster_{name}_total") for name in ("resumed", "repeated")}
            answers, took = asyncio.run(with_kill(url, cluster.pid, seed, args, seconds))
            lost = sum(isinstance(each, Exception) for each in answers)
            pairs = [(a, b) for a, b in zip(answers, expected, strict=True) if not isinstance(a, Exception)]
            longer = sum(len(a[0]) > len(b[0]) for a, b in pairs)
            changed = sum(a != b for a, b in pairs)
            for each in answers:
                if isinstance(each, Exception):
                    print(f"seed {seed}: {each!r}", file=sys.stderr)
            after = {name: metric(url, f"dflash:cluster_{name}_total") for name in before}
            went_on = [int(after[name] - before[name]) for name in before]
            cells = [seed, args.requests, lost, longer, changed, *went_on, f"{took:.1f}"]
            lines.append(f"| {' | '.join(map(str, cells))} |")
            print(lines[-1], file=sys.stderr)
            wait_for_replicas(url, 2)
        began, children = time.perf_counter(), psutil.Process(cluster.pid).children(recursive=True)
        cluster.send_signal(signal.SIGTERM)
        code = cluster.wait(timeout=120)
        left = [each for each in children if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
        end = f"SIGTERM: exit code {code}, {len(left)} processes left after {time.perf_counter() - began:.0f} s."
    finally:
        if cluster.poll() is None:
            cluster.kill()
    machine = f"{os.cpu_count()} cores ({platform.machine()}), {time.strftime('%B %-d, %Y')}"
    load = f"{args.requests} requests, {args.concurrency} at a time, {seconds:.1f} s without a kill"
    head = "| seed | requests | lost | too long | changed | streams that went on | requests repeated | seconds |"
    text = [f"`{' '.join(['dflash cluster', *words])}` on {machine}: {load}.", "", head, "| ---: " * 8 + "|"]
    report = "\n".join([*text, *lines, "", end, ""])
    print(report)
    if args.out:
        args.out.write_text(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())

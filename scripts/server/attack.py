"""Sends a server what could stop it, one attack after the other, beside another client.

    python scripts/server/attack.py [--markdown benchmarks/attack.md] [--only NAME ...]

Starts a server of the bundled pair on 127.0.0.1 with two keys: one client attacks. The other one has a stream, asks
/health every 20 ms, and opens a connection four times a second, each for a few tokens, with a grammar every other time.
Prints a table: what each attack got, how much longer than without it the stream waited for its next piece, the slowest
answer of /health, the latest first token of a new connection, and what the server's processes grew by.

Exits 1 where the stream waited more than 0.25 s longer, /health took longer than that, a first token came more than a
second later, or the other client was refused. With --url it takes a server of 127.0.0.1 that runs already (without
keys), and its memory is not measured. A checkpoint with a vision tower (--target) is attacked with images and videos,
too.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from tools.attacks import ATTACK_S, KEYS, OTHER, Target, attacks, image, media_attacks, png
from tools.server_process import machine

# --help works without it.
with contextlib.suppress(ModuleNotFoundError):
    import httpx

# Seconds that the stream or /health may be late, and the first token of a new connection.
MOST_S, FIRST_S = 0.25, 1.0
# Seconds between two new connections.
NEW_S = 0.25
# Seconds that the server has to recover from an attack.
PAUSE_S = 1.0
# Seconds of the run without attacks.
BASELINE_S = 20.0
# What the template of the server that is started here does when it is asked.
TEMPLATE = "{% if messages[0]['content'] == 'attack' %}{{ 'a' * 10**9 }}{% endif %}"
RANGE = "range(99999) %}"
LOOPS = (
    "{% if messages[0]['content'] == 'loop' %}{% for i in "
    + RANGE
    + "{% for j in "
    + RANGE
    + "{% endfor %}{% endfor %}"
    "{% endif %}"
)


def watch(url: str, takes_media: bool, connection) -> None:
    """A process: the other client. At each message it sends the longest waits since the last one."""
    asyncio.run(_watch(url, takes_media, connection))


async def _watch(url: str, takes_media: bool, connection) -> None:
    longest = {"gap": 0.0, "health": 0.0, "first": 0.0}
    last, failures = {"piece": time.perf_counter()}, Counter()
    # When the new connections that wait for a token were begun.
    waiting: dict[int, float] = {}

    async def stream(client: "httpx.AsyncClient") -> None:
        capacity = (await client.get("/v1/models")).json()["data"][0]["max_model_len"]
        body = {"prompt": "def f(", "ignore_eos": True, "stream": True, "temperature": 0}
        # The prompt has a few tokens.
        body["max_tokens"] = min(2000, capacity - 32)
        while True:
            try:
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    if answer.status_code != 200:
                        failures[f"stream {answer.status_code}"] += 1
                        await asyncio.sleep(0.1)
                    async for _ in answer.aiter_raw():
                        now = time.perf_counter()
                        longest["gap"] = max(longest["gap"], now - last["piece"])
                        last["piece"] = now
            except httpx.HTTPError as e:
                failures[f"stream {type(e).__name__}"] += 1
                await asyncio.sleep(0.1)

    async def poll(client: "httpx.AsyncClient") -> None:
        while True:
            began = time.perf_counter()
            try:
                answer = await client.get("/health")
                if answer.status_code != 200:
                    failures[f"health {answer.status_code}"] += 1
            except httpx.HTTPError as e:
                failures[f"health {type(e).__name__}"] += 1
            longest["health"] = max(longest["health"], time.perf_counter() - began)
            await asyncio.sleep(0.02)

    async def newcomer(i: int) -> None:
        path, body = "/v1/completions", {"prompt": f"def f{i}(", "max_tokens": 8, "stream": True}
        if i % 2:
            body["regex"] = "[ab]{8}"
        elif takes_media and i % 4:
            path, body = "/v1/chat/completions", image(png(64, 48 + i % 16)) | {"max_tokens": 8, "stream": True}
        began = waiting[i] = time.perf_counter()
        try:
            async with (
                httpx.AsyncClient(base_url=url, timeout=ATTACK_S, headers=OTHER) as client,
                client.stream("POST", path, json=body) as answer,
            ):
                if answer.status_code != 200:
                    failures[f"newcomer {answer.status_code}"] += 1
                async for _ in answer.aiter_raw():
                    break
        except httpx.HTTPError as e:
            failures[f"newcomer {type(e).__name__}"] += 1
        del waiting[i]
        longest["first"] = max(longest["first"], time.perf_counter() - began)

    async def newcomers() -> None:
        async with asyncio.TaskGroup() as group:
            for i in itertools.count():
                group.create_task(newcomer(i))
                await asyncio.sleep(NEW_S)

    async with httpx.AsyncClient(base_url=url, timeout=ATTACK_S, headers=OTHER) as client:
        tasks = [asyncio.create_task(work) for work in (stream(client), poll(client), newcomers())]
        while await asyncio.to_thread(connection.recv):
            now = time.perf_counter()
            gap = max(longest["gap"], now - last["piece"])
            first = max([longest["first"], *(now - began for began in waiting.values())])
            connection.send((gap, longest["health"], first, dict(failures)))
            longest.update(gap=0.0, health=0.0, first=0.0)
            last["piece"] = now
            waiting |= dict.fromkeys(waiting, now)
            failures.clear()
        for task in tasks:
            task.cancel()


class Monitor:
    """What another client sees: `watch`, in a process of its own, so that building attacks does not delay it."""

    def __init__(self, url: str, takes_media: bool):
        self._connection, other = multiprocessing.Pipe()
        arguments = url, takes_media, other
        self._process = multiprocessing.get_context("spawn").Process(target=watch, args=arguments, daemon=True)
        self._process.start()

    def mark(self) -> tuple[float, float, float, dict]:
        """(longest wait for a piece, for /health, for a first token, failures) since the last mark."""
        self._connection.send(True)
        return self._connection.recv()

    def stop(self) -> None:
        self._connection.send(False)
        self._process.join(5)


class Memory:
    """The largest memory of a tree of processes, of what each has for itself."""

    def __init__(self, pid: int | None):
        self._pid, self._largest, self._ended = pid, 0, threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def now(self) -> int:
        if self._pid is None:
            return 0
        total = 0
        with contextlib.suppress(OSError):
            for pid in self._tree(str(self._pid)):
                with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as file:
                    total += sum(int(line.split()[1]) for line in file if line.startswith("Private_"))
        return total << 10

    def _tree(self, pid: str) -> list[str]:
        found = [pid]
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += [each for child in path.read_text().split() for each in self._tree(child)]
        return found

    def _run(self) -> None:
        while not self._ended.wait(0.5):
            self._largest = max(self._largest, self.now())

    def mark(self) -> int:
        largest, self._largest = max(self._largest, self.now()), 0
        return largest

    def stop(self) -> None:
        self._ended.set()


@contextlib.contextmanager
def started(checkpoint: Path | None):
    """(URL, process id) of a server of the bundled pair or a checkpoint, whose template can be told to misbehave."""
    from dflash_jax.frontend.llm_config import TINY

    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "target"
        shutil.copytree(checkpoint or TINY / "target", target)
        path = target / "chat_template.jinja"
        if path.exists():
            path.write_text(TEMPLATE + LOOPS + path.read_text())
        else:
            config = json.loads((target / "tokenizer_config.json").read_text())
            config["chat_template"] = TEMPLATE + LOOPS + config["chat_template"]
            (target / "tokenizer_config.json").write_text(json.dumps(config))
        keys = Path(directory) / "keys"
        keys.write_text("\n".join(KEYS))
        draft = "none" if checkpoint else str(TINY / "draft")
        command = [sys.executable, "-m", "dflash_jax.serve", str(target), "--draft", draft, "--api-key-file", str(keys)]
        process = subprocess.Popen(
            [*command, "--port", "0", "--slots", "8", "--platform", "cpu"], stderr=subprocess.PIPE, text=True
        )
        url, stderr = None, process.stderr
        assert stderr is not None
        try:
            for line in stderr:
                if found := re.search(r"listening on (http://\S+?),", line):
                    url = found[1]
                if " ready: " in line:
                    break
            else:
                raise SystemExit("the server did not start")
            threading.Thread(target=lambda: [None for _ in stderr], daemon=True).start()
            assert url is not None
            yield url, process.pid
        finally:
            process.kill()
            process.wait()


def measure(url: str, pid: int | None, only: list[str]) -> tuple[list[list[str]], bool]:
    """(rows of the table, whether all waits were short)."""
    capacity = httpx.get(f"{url}/v1/models", headers=OTHER).json()["data"][0]["max_model_len"]
    # What is compiled after the start delays the stream of the run without attacks, too.
    while (info := httpx.get(f"{url}/server_info", headers=OTHER).json()["warm_up"])["compiled"] < info["total"]:
        time.sleep(1)
    takes_media = httpx.get(f"{url}/model_info", headers=OTHER).json()["has_image_understanding"]
    target, monitor, memory = Target(url, capacity), Monitor(url, takes_media), Memory(pid)
    time.sleep(5)
    monitor.mark()
    time.sleep(BASELINE_S)
    usual, health, usual_first, _ = monitor.mark()
    base, none = memory.mark(), ["none", "", f"({usual:.3f} s)", f"{health:.3f} s", f"({usual_first:.3f} s)"]
    rows, good = [[*none, f"({base >> 20} MiB)", ""]], True
    print_row(rows[-1])
    for name, attack in (attacks(target) | (media_attacks(target) if takes_media else {})).items():
        if only and not any(word in name for word in only):
            continue
        base = memory.mark()
        monitor.mark()
        began = time.perf_counter()
        try:
            found = asyncio.run(asyncio.wait_for(attack(), ATTACK_S))
        except TimeoutError:
            found = f"no end in {ATTACK_S:g} s"
        took = time.perf_counter() - began
        time.sleep(PAUSE_S)
        gap, health, first, failures = monitor.mark()
        extra, later = max(gap - usual, 0.0), max(first - usual_first, 0.0)
        grown = max(memory.mark() - base, 0) >> 20
        good &= extra <= MOST_S and health <= MOST_S and later <= FIRST_S and not failures
        found += "".join(f"; {what}: {n}" for what, n in failures.items())
        waits = [f"{extra:.3f} s", f"{health:.3f} s", f"{later:.3f} s"]
        rows.append([name, found, *waits, f"{grown} MiB", f"{took:.1f} s"])
        print_row(rows[-1])
    monitor.stop()
    memory.stop()
    return rows, good


def print_row(row: list[str]) -> None:
    print("| " + " | ".join(row) + " |", flush=True)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--url", help="a server on 127.0.0.1 that runs already")
    p.add_argument("--target", type=Path, metavar="DIR", help="a checkpoint, such as one that takes images")
    p.add_argument("--only", nargs="+", default=[], metavar="WORD", help="attacks whose names have one of the words")
    p.add_argument("--markdown", metavar="FILE", help="where the table is written")
    args = p.parse_args()
    if find_spec("httpx") is None:
        p.error('this needs the extra server: pip install "dflash-jax[server]"')
    if args.url and urlsplit(args.url).hostname != "127.0.0.1":
        p.error("--url must be of 127.0.0.1")
    names = [
        "attack",
        "answer",
        "extra wait of a stream",
        "/health",
        "extra wait for a first token",
        "memory",
        "duration",
    ]
    head = [names, ["---"] * len(names)]
    for row in head:
        print_row(row)
    with contextlib.nullcontext((args.url, None)) if args.url else started(args.target) as (url, pid):
        rows, good = measure(url, pid, args.only)
    if args.markdown:
        lines = ["| " + " | ".join(row) + " |" for row in [*head, *rows]]
        title = "# The server under attack\n\n`python scripts/server/attack.py`, the bundled pair on "
        Path(args.markdown).write_text(title + machine() + ".\n\n" + "\n".join(lines) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

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
import base64
import contextlib
import itertools
import json
import multiprocessing
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

# --help works without it.
with contextlib.suppress(ModuleNotFoundError):
    import httpx

# Seconds that the stream or /health may be late, and the first token of a new connection.
MOST_S, FIRST_S = 0.25, 1.0
# The keys of the attacker and of the other client.
KEYS = "attacker-key", "other-key"
HEADERS, OTHER = ({"Authorization": f"Bearer {key}"} for key in KEYS)
# Seconds between two new connections.
NEW_S = 0.25
# Seconds that an attack lasts at most, and that the server has to recover.
ATTACK_S, PAUSE_S = 60.0, 1.0
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


def watch(url: str, connection) -> None:
    """A process: the other client. At each message it sends the longest waits since the last one."""
    asyncio.run(_watch(url, connection))


async def _watch(url: str, connection) -> None:
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
        body = {"prompt": f"def f{i}(", "max_tokens": 8, "stream": True} | ({"regex": "[ab]{8}"} if i % 2 else {})
        began = waiting[i] = time.perf_counter()
        try:
            async with (
                httpx.AsyncClient(base_url=url, timeout=ATTACK_S, headers=OTHER) as client,
                client.stream("POST", "/v1/completions", json=body) as answer,
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

    def __init__(self, url: str):
        self._connection, other = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=watch, args=(url, other), daemon=True)
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


@dataclass
class Target:
    """A server under attack."""

    url: str
    capacity: int

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None, self.url
        assert parts.port is not None, self.url
        return parts.hostname, parts.port

    async def post(self, path: str, body: dict | bytes, timeout_s: float = ATTACK_S) -> str:
        """The status, or how the request ended."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with httpx.AsyncClient(base_url=self.url, timeout=timeout_s, headers=HEADERS) as client:
            try:
                found = await client.post(path, content=content, headers={"Content-Type": "application/json"})
            except httpx.TimeoutException:
                return "left"
            except httpx.HTTPError as e:
                return type(e).__name__
            return str(found.status_code)

    async def posts(self, path: str, bodies: list, timeout_s: float = ATTACK_S) -> str:
        return counts(await asyncio.gather(*(self.post(path, body, timeout_s) for body in bodies)))

    async def send(self, head: bytes, part: bytes, times: int) -> str:
        """``head``, and then ``part`` again and again until the server answers or closes."""
        reader, writer = await asyncio.open_connection(*self.address)
        answer = asyncio.create_task(reader.read(4096))
        try:
            writer.write(head)
            for _ in range(times):
                if answer.done():
                    break
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            return status(await asyncio.wait_for(answer, ATTACK_S))
        except (OSError, TimeoutError) as e:
            return type(e).__name__
        finally:
            answer.cancel()
            writer.close()


def status(answer: bytes) -> str:
    found = re.match(rb"HTTP/1.1 (\d+)", answer)
    return found[1].decode() if found else "closed"


def counts(each: list[str]) -> str:
    return ", ".join(f"{n} × {what}" if n > 1 else what for what, n in sorted(Counter(each).items()))


def chat(content: object = "hi", **more) -> dict:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **more}


def linked_definitions() -> dict:
    definitions = {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(1199)}
    return {"$defs": definitions | {"1199": {"type": "integer"}}, "$ref": "#/$defs/0"}


def many_terms() -> str:
    return "start: T\nT: " + " & ".join(f"/(?s:.*[a-z]{{{i}}}x.*)/" for i in range(1, 200))


def optional_properties() -> dict:
    return {"type": "object", "properties": {f"a{i}": {"type": "integer"} for i in range(1800)}}


async def half_sent(target: Target) -> str:
    """2,000 connections that begin a request."""
    opened = []
    try:
        for i in range(2000):
            with contextlib.suppress(OSError):
                opened.append(await asyncio.open_connection(*target.address))
                opened[-1][1].write(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A" if i % 2 else b"")
        reads = (asyncio.wait_for(reader.read(4096), ATTACK_S / 2) for reader, _ in opened)
        found = await asyncio.gather(*reads, return_exceptions=True)
        return counts(["open" if isinstance(a, BaseException) else status(a) for a in found])
    finally:
        for _, writer in opened:
            writer.close()


async def left_streams(target: Target, **more) -> str:
    """300 clients, 4 at a time so that slots are left, who leave after the first bytes of a stream."""
    room = asyncio.Semaphore(4)

    async def one(client: "httpx.AsyncClient", i: int) -> str:
        body = {"prompt": f"def f{i}(", "max_tokens": 500, "ignore_eos": True, "stream": True, **more}
        try:
            async with room, client.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_raw():
                    break
                return str(answer.status_code)
        except httpx.HTTPError as e:
            return type(e).__name__

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=target.url, timeout=ATTACK_S, limits=limits, headers=HEADERS) as client:
        return counts(await asyncio.gather(*(one(client, i) for i in range(300))))


async def raced_responses(target: Target) -> str:
    """40 clients that make, continue, read, cancel and delete the same responses."""
    path, new, seen = "/v1/responses", {"input": "hi", "max_output_tokens": 8}, Counter()

    async def one(client: "httpx.AsyncClient", i: int) -> None:
        name = f"resp_race{i % 4}"
        calls = [
            lambda: client.post(path, json=new | {"request_id": name}),
            lambda: client.post(path, json=new | {"previous_response_id": name}),
            lambda: client.get(f"{path}/{name}"),
            lambda: client.get(f"{path}/{name}/input_items"),
            lambda: client.post(f"{path}/{name}/cancel"),
            lambda: client.delete(f"{path}/{name}"),
        ]
        for j in range(12):
            seen[str((await calls[(i + j) % len(calls)]()).status_code)] += 1

    async with httpx.AsyncClient(base_url=target.url, timeout=ATTACK_S, headers=HEADERS) as client:
        await asyncio.gather(*(one(client, i) for i in range(40)))
    return counts(list(seen.elements()))


async def continued_responses(target: Target) -> str:
    """A stored conversation of 8,000 items that 32 requests at once continue."""
    items = [*([{"type": "reasoning", "content": []}] * 7999), {"role": "user", "content": "hi"}]
    async with httpx.AsyncClient(base_url=target.url, timeout=ATTACK_S, headers=HEADERS) as client:
        first = (await client.post("/v1/responses", json={"input": items, "max_output_tokens": 1})).json()
    more = {"input": "more", "previous_response_id": first["id"], "truncation": "auto", "store": False}
    return await target.posts("/v1/responses", [more | {"max_output_tokens": 1}] * 32)


async def commanded_engine(target: Target) -> str:
    """Flushes, resets and aborts beside the requests that they are for."""
    bodies = [{"prompt": "def f(", "max_tokens": 30, "rid": f"commanded-{i}"} for i in range(24)]
    commands = [("/flush_cache", {}), ("/reset_prefix_cache", {})]
    commands += [("/abort_request", {"rid": body["rid"]}) for body in bodies]
    load = asyncio.create_task(target.posts("/v1/completions", bodies))
    found = [await target.post(*commands[i % len(commands)]) for i in range(100)]
    return f"{counts(found)}; of the requests: {await load}"


def png(width: int, height: int) -> bytes:
    """A PNG without content whose header has these sizes: a few kilobytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compressobj()
    line = bytes(1 + 3 * width)
    content = b"".join(rows.compress(line) for _ in range(min(height, 2**28 // len(line)))) + rows.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", content) + chunk(b"IEND", b"")


def image(content: bytes | str, kind: str = "image_url") -> dict:
    url = content if isinstance(content, str) else f"data:;base64,{base64.b64encode(content).decode()}"
    return chat([{"type": kind, kind: {"url": url}}, {"type": "text", "text": "x"}])


async def left_images(target: Target) -> str:
    """64 clients, 8 at a time, that leave 0.2 s after they have sent an image."""
    room = asyncio.Semaphore(8)

    async def one(i: int) -> str:
        async with room:
            return await target.post("/v1/chat/completions", image(png(2000 + i, 2000)), 0.2)

    return counts(await asyncio.gather(*(one(i) for i in range(64))))


async def continued_images(target: Target) -> str:
    """A stored conversation with an image of 40 MB that 32 requests at once continue."""
    # What follows a PNG's end is ignored.
    url = f"data:;base64,{base64.b64encode(png(64, 64) + bytes(30_000_000)).decode()}"
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]
    async with httpx.AsyncClient(base_url=target.url, timeout=ATTACK_S, headers=HEADERS) as client:
        first = (await client.post("/v1/responses", json={"input": items, "max_output_tokens": 1})).json()
    more = {"input": "more", "previous_response_id": first["id"], "store": False, "max_output_tokens": 1}
    return await target.posts("/v1/responses", [more] * 32)


def media_attacks(target: Target) -> dict[str, Callable]:
    """Attacks on a server that takes images and videos."""
    path, post, posts = "/v1/chat/completions", target.post, target.posts
    closed = ("http://127.0.0.1/a.png", "http://[::1]/a.png", "http://169.254.169.254/", "file:///etc/passwd")
    return {
        "images of 8,000 × 8,000, 8 at a time": lambda: posts(path, [image(png(8000, 8000))] * 8),
        "an image whose header says 100,000 × 100,000": lambda: post(path, image(png(100_000, 100_000))),
        "40 MB of base64 that is no image, 8 at a time": lambda: posts(path, [image(bytes(30_000_000))] * 8),
        "40 MB of base64 that is no video": lambda: post(path, image(bytes(30_000_000), "video_url")),
        "60 MB of escapes in a URL": lambda: post(
            path, b'{"messages": [{"role": "user", "content": "' + b"\\/" * 30_000_000 + b'"}]}'
        ),
        "60 MB of text": lambda: post(path, chat("x" * 60_000_000)),
        "60 MB of text that takes 240, 8 at a time": lambda: posts(
            path, [f'{{"messages": [{{"role": "user", "content": "😀{"x" * 60_000_000}"}}]}}'.encode()] * 8
        ),
        "a stored image of 40 MB, 32 at a time": lambda: continued_images(target),
        "1,000 images in a prompt": lambda: post(path, chat(image(png(8, 8))["messages"][0]["content"] * 1000)),
        "200 images at once": lambda: posts(path, [image(png(64 + i, 64)) for i in range(200)]),
        "images that are left": lambda: left_images(target),
        "addresses of its own network": lambda: posts(path, [image(url) for url in closed]),
    }


def attacks(target: Target) -> dict[str, Callable]:
    """Names and what each does."""
    text = "def f(a, b):\n    return a + b\n" * 300_000
    post, posts, send = target.post, target.posts, target.send
    rules = "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(4500)), 'r4500: "x"'])
    start = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer attacker-key\r\n"
    json_head = start + b"Content-Type: application/json\r\n"
    long_prompt = {"prompt": [5 + i % 200 for i in range(target.capacity - 1)], "max_tokens": 1}
    return {
        "1,200 linked $defs": lambda: post("/v1/chat/completions", chat(guided_json=linked_definitions())),
        "4,500 Lark rules": lambda: post("/v1/chat/completions", chat(grammar=rules)),
        "8 grammars of 199 terms, left after 3 s": lambda: posts(
            "/v1/chat/completions", [chat(grammar=many_terms() + "\n" * i) for i in range(8)], 3.0
        ),
        "regex a? × 15,000": lambda: post("/v1/chat/completions", chat(regex="a?" * 15_000 + "a" * 15_000)),
        "guided_choice of 6,000": lambda: post(
            "/v1/chat/completions", chat(guided_choice=[f"c{i}" for i in range(6000)])
        ),
        "1,800 optional properties": lambda: post("/v1/chat/completions", chat(guided_json=optional_properties())),
        "9 MB of text: completions": lambda: post("/v1/completions", {"prompt": text}),
        "9 MB of text: chat": lambda: post("/v1/chat/completions", chat(text)),
        "9 MB of text: generate": lambda: post("/generate", {"text": text}),
        "9 MB of text: tokenize": lambda: post("/tokenize", {"prompt": text}),
        "9 MB of text: responses": lambda: post("/v1/responses", {"input": text}),
        "9 MB of one letter, 8 at a time": lambda: posts("/v1/completions", [{"prompt": "a" * 9_000_000}] * 8),
        "text that just may fit, 8 at a time": lambda: posts(
            "/v1/completions", [{"prompt": text[: 19 * target.capacity]}] * 8
        ),
        "128 prompts of 60 KB": lambda: post("/v1/completions", {"prompt": [text[:60_000]] * 128, "max_tokens": 1}),
        "3 million ids: detokenize": lambda: post("/detokenize", {"tokens": [5] * 3_000_000}),
        "3 million ids: completions": lambda: post("/v1/completions", {"prompt": [5] * 3_000_000}),
        "250,000 ids: completions": lambda: post("/v1/completions", {"prompt": [5] * 250_000}),
        "50,000 messages": lambda: post("/v1/chat/completions", {"messages": chat()["messages"] * 50_000}),
        "8,000 messages": lambda: post("/v1/chat/completions", {"messages": chat()["messages"] * 8_000}),
        "8,000 messages, 16 at a time": lambda: posts(
            "/v1/chat/completions", [{"messages": chat()["messages"] * 8_000}] * 16
        ),
        "240,000 values, 16 at a time": lambda: posts(
            "/v1/chat/completions", [chat(metadata={"x": [0] * 240_000})] * 16
        ),
        "8,000 stored items, 32 at a time": lambda: continued_responses(target),
        "8,000 parts": lambda: post("/v1/chat/completions", chat([{"type": "text", "text": "x"}] * 8_000)),
        "5 MB of [": lambda: post("/v1/completions", b'{"prompt": ' + b"[" * 5_000_000),
        "10 MB of backslashes": lambda: post("/v1/completions", b'{"prompt": "' + b"\\" * 9_999_000 + b'"}'),
        "a body of 50 MB": lambda: post("/v1/completions", b'{"prompt": "' + b"x" * 50_000_000 + b'"}'),
        "(no attack) a prompt of all tokens": lambda: post("/v1/completions", long_prompt | {"temperature": 0}),
        "prompt_logprobs of all tokens": lambda: post("/v1/completions", long_prompt | {"prompt_logprobs": 20}),
        "input logprobs, SGLang's": lambda: post(
            "/generate",
            {
                "input_ids": long_prompt["prompt"],
                "return_logprob": True,
                "logprob_start_len": 0,
                "top_logprobs_num": 20,
                "sampling_params": {"max_new_tokens": 1},
            },
        ),
        "6 choices, logprobs, streamed": lambda: post(
            "/v1/completions",
            {"prompt": "def f(", "n": 6, "logprobs": 20, "max_tokens": 500, "stream": True, "ignore_eos": True},
        ),
        "short headers without end": lambda: send(start, b"a:b\r\n" * 10_000, 2000),
        "one header without end": lambda: send(start + b"a: ", b"b" * 50_000, 2000),
        "a path without end": lambda: send(b"GET /", b"b" * 50_000, 2000),
        "trailers without end": lambda: send(
            json_head + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\na: ", b"b" * 50_000, 2000
        ),
        "chunks of one byte": lambda: send(
            json_head + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n" * 10_000, 1100
        ),
        "100,000 requests in one": lambda: send(b"", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 10_000, 10),
        "a body that stalls": lambda: send(json_head + b"Content-Length: 1000\r\n\r\n{", b"", 0),
        "2,000 half-sent requests": lambda: half_sent(target),
        "300 streams that are left": lambda: left_streams(target),
        "300 streams with a grammar that are left": lambda: left_streams(target, regex="(?s:.){1,5000}"),
        "races for the same responses": lambda: raced_responses(target),
        "flushes, resets, aborts": lambda: commanded_engine(target),
        "16 prompts of all tokens": lambda: posts("/v1/completions", [long_prompt | {"max_tokens": 1}] * 16),
        "128 prompts × 8, first priority": lambda: post(
            "/v1/completions", {"prompt": ["def f("] * 128, "n": 8, "max_tokens": 64, "priority": -(2**31)}
        ),
        "128 prompts × 8, last priority": lambda: post(
            "/v1/completions", {"prompt": ["def f("] * 128, "n": 8, "max_tokens": 64, "priority": 2**31 - 1}
        ),
        "300 grammars of 199 terms": lambda: posts(
            "/v1/chat/completions", [chat(grammar=many_terms() + "\n" * i) for i in range(300)]
        ),
        "a template of a gigabyte": lambda: posts("/v1/chat/completions", [chat("attack")] * 8),
        "a template without end": lambda: posts("/v1/chat/completions", [chat("loop")] * 8),
    }


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


def machine() -> str:
    with open("/proc/cpuinfo") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    load = os.getloadavg()[0]
    return f"{(names or [platform.machine()])[0]}, {os.cpu_count()} cores, load {load:.1f}, {date.today()}"


def measure(url: str, pid: int | None, only: list[str]) -> tuple[list[list[str]], bool]:
    """(rows of the table, whether all waits were short)."""
    capacity = httpx.get(f"{url}/v1/models", headers=OTHER).json()["data"][0]["max_model_len"]
    # What is compiled after the start delays the stream of the run without attacks, too.
    while (info := httpx.get(f"{url}/server_info", headers=OTHER).json()["warm_up"])["compiled"] < info["total"]:
        time.sleep(1)
    target, monitor, memory = Target(url, capacity), Monitor(url), Memory(pid)
    time.sleep(5)
    monitor.mark()
    time.sleep(BASELINE_S)
    usual, health, usual_first, _ = monitor.mark()
    base, none = memory.mark(), ["none", "", f"({usual:.3f} s)", f"{health:.3f} s", f"({usual_first:.3f} s)"]
    rows, good = [[*none, f"({base >> 20} MiB)", ""]], True
    print_row(rows[-1])
    takes_media = httpx.get(f"{url}/model_info", headers=OTHER).json()["has_image_understanding"]
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

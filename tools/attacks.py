"""What stops a server that takes anything: each attack as a coroutine that says what it got."""

import asyncio
import base64
import contextlib
import json
import re
import struct
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

# --help works without it.
with contextlib.suppress(ModuleNotFoundError):
    import httpx

# The keys of the attacker and of the other client.
KEYS = "attacker-key", "other-key"
HEADERS, OTHER = ({"Authorization": f"Bearer {key}"} for key in KEYS)
ROLES = "user", "assistant"
# As if the server had sealed it.
SEALED = {"type": "compaction", "encrypted_content": "dflash1." + "A" * 2_000_000}
# Seconds that an attack lasts at most.
ATTACK_S = 60.0


@dataclass
class Target:
    """A server under attack."""

    url: str
    capacity: int

    @property
    def address(self) -> tuple[str, int]:
        """Its host and port."""
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
        """How often each of the statuses came, of requests that are sent at once."""
        return _counts(await asyncio.gather(*(self.post(path, body, timeout_s) for body in bodies)))

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
            return _status(await asyncio.wait_for(answer, ATTACK_S))
        except (OSError, TimeoutError) as e:
            return type(e).__name__
        finally:
            answer.cancel()
            writer.close()


def _status(answer: bytes) -> str:
    found = re.match(rb"HTTP/1.1 (\d+)", answer)
    return found[1].decode() if found else "closed"


def _counts(each: list[str]) -> str:
    return ", ".join(f"{n} × {what}" if n > 1 else what for what, n in sorted(Counter(each).items()))


def _chat(content: object = "hi", **more) -> dict:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **more}


def _linked_definitions() -> dict:
    definitions = {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(1199)}
    return {"$defs": definitions | {"1199": {"type": "integer"}}, "$ref": "#/$defs/0"}


def _many_terms() -> str:
    return "start: T\nT: " + " & ".join(f"/(?s:.*[a-z]{{{i}}}x.*)/" for i in range(1, 200))


def _optional_properties() -> dict:
    return {"type": "object", "properties": {f"a{i}": {"type": "integer"} for i in range(1800)}}


async def _half_sent(target: Target) -> str:
    """2,000 connections that begin a request."""
    opened = []
    try:
        for i in range(2000):
            with contextlib.suppress(OSError):
                opened.append(await asyncio.open_connection(*target.address))
                opened[-1][1].write(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A" if i % 2 else b"")
        reads = (asyncio.wait_for(reader.read(4096), ATTACK_S / 2) for reader, _ in opened)
        found = await asyncio.gather(*reads, return_exceptions=True)
        return _counts(["open" if isinstance(a, BaseException) else _status(a) for a in found])
    finally:
        for _, writer in opened:
            writer.close()


async def _left_streams(target: Target, **more) -> str:
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
        return _counts(await asyncio.gather(*(one(client, i) for i in range(300))))


async def _raced_responses(target: Target) -> str:
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
    return _counts(list(seen.elements()))


async def _continued_responses(target: Target) -> str:
    """A stored conversation of 8,000 items that 32 requests at once continue."""
    items = [*([{"type": "reasoning", "content": []}] * 7999), {"role": "user", "content": "hi"}]
    async with httpx.AsyncClient(base_url=target.url, timeout=ATTACK_S, headers=HEADERS) as client:
        first = (await client.post("/v1/responses", json={"input": items, "max_output_tokens": 1})).json()
    more = {"input": "more", "previous_response_id": first["id"], "truncation": "auto", "store": False}
    return await target.posts("/v1/responses", [more | {"max_output_tokens": 1}] * 32)


async def _commanded_engine(target: Target) -> str:
    """Flushes, resets and aborts beside the requests that they are for."""
    bodies = [{"prompt": "def f(", "max_tokens": 30, "rid": f"commanded-{i}"} for i in range(24)]
    commands = [("/flush_cache", {}), ("/reset_prefix_cache", {})]
    commands += [("/abort_request", {"rid": body["rid"]}) for body in bodies]
    load = asyncio.create_task(target.posts("/v1/completions", bodies))
    found = [await target.post(*commands[i % len(commands)]) for i in range(100)]
    return f"{_counts(found)}; of the requests: {await load}"


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
    """A chat about an image or a video, of its bytes or at a URL."""
    url = content if isinstance(content, str) else f"data:;base64,{base64.b64encode(content).decode()}"
    return _chat([{"type": kind, kind: {"url": url}}, {"type": "text", "text": "x"}])


async def _left_images(target: Target) -> str:
    """64 clients, 8 at a time, that leave 0.2 s after they have sent an image."""
    room = asyncio.Semaphore(8)

    async def one(i: int) -> str:
        async with room:
            return await target.post("/v1/chat/completions", image(png(2000 + i, 2000)), 0.2)

    return _counts(await asyncio.gather(*(one(i) for i in range(64))))


async def _continued_images(target: Target) -> str:
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
        "100 images of 4,000 × 4,000": lambda: posts(path, [image(png(4000, 4000 + i)) for i in range(100)]),
        "an image whose header says 100,000 × 100,000": lambda: post(path, image(png(100_000, 100_000))),
        "40 MB of base64 that is no image, 8 at a time": lambda: posts(path, [image(bytes(30_000_000))] * 8),
        "40 MB of base64 that is no video": lambda: post(path, image(bytes(30_000_000), "video_url")),
        "60 MB of escapes in a URL": lambda: post(
            path, b'{"messages": [{"role": "user", "content": "' + b"\\/" * 30_000_000 + b'"}]}'
        ),
        "60 MB of text": lambda: post(path, _chat("x" * 60_000_000)),
        "60 MB of text that takes 240, 8 at a time": lambda: posts(
            path, [f'{{"messages": [{{"role": "user", "content": "😀{"x" * 60_000_000}"}}]}}'.encode()] * 8
        ),
        "a stored image of 40 MB, 32 at a time": lambda: _continued_images(target),
        "1,000 images in a prompt": lambda: post(path, _chat(image(png(8, 8))["messages"][0]["content"] * 1000)),
        "200 images at once": lambda: posts(path, [image(png(64 + i, 64)) for i in range(200)]),
        "images that are left": lambda: _left_images(target),
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
        "1,200 linked $defs": lambda: post("/v1/chat/completions", _chat(guided_json=_linked_definitions())),
        "4,500 Lark rules": lambda: post("/v1/chat/completions", _chat(grammar=rules)),
        "8 grammars of 199 terms, left after 3 s": lambda: posts(
            "/v1/chat/completions", [_chat(grammar=_many_terms() + "\n" * i) for i in range(8)], 3.0
        ),
        "regex a? × 15,000": lambda: post("/v1/chat/completions", _chat(regex="a?" * 15_000 + "a" * 15_000)),
        "guided_choice of 6,000": lambda: post(
            "/v1/chat/completions", _chat(guided_choice=[f"c{i}" for i in range(6000)])
        ),
        "1,800 optional properties": lambda: post("/v1/chat/completions", _chat(guided_json=_optional_properties())),
        "9 MB of text: completions": lambda: post("/v1/completions", {"prompt": text}),
        "9 MB of text: chat": lambda: post("/v1/chat/completions", _chat(text)),
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
        "50,000 messages": lambda: post("/v1/chat/completions", {"messages": _chat()["messages"] * 50_000}),
        "8,000 messages": lambda: post("/v1/chat/completions", {"messages": _chat()["messages"] * 8_000}),
        "8,000 messages, 16 at a time": lambda: posts(
            "/v1/chat/completions", [{"messages": _chat()["messages"] * 8_000}] * 16
        ),
        "240,000 values, 16 at a time": lambda: posts(
            "/v1/chat/completions", [_chat(metadata={"x": [0] * 240_000})] * 16
        ),
        "8,000 stored items, 32 at a time": lambda: _continued_responses(target),
        "7,000 items summed up, 8 at a time": lambda: posts(
            "/v1/responses/compact", [{"input": [{"role": role, "content": "x"} for role in ROLES * 3500]}] * 8
        ),
        "4 seals of 2 MB, 16 at a time": lambda: posts(
            "/v1/responses/input_tokens", [{"input": [*[SEALED] * 4, {"role": "user", "content": "x"}]}] * 16
        ),
        "8,000 parts": lambda: post("/v1/chat/completions", _chat([{"type": "text", "text": "x"}] * 8_000)),
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
        "2,000 half-sent requests": lambda: _half_sent(target),
        "300 streams that are left": lambda: _left_streams(target),
        "300 streams with a grammar that are left": lambda: _left_streams(target, regex="(?s:.){1,5000}"),
        "races for the same responses": lambda: _raced_responses(target),
        "flushes, resets, aborts": lambda: _commanded_engine(target),
        "16 prompts of all tokens": lambda: posts("/v1/completions", [long_prompt | {"max_tokens": 1}] * 16),
        "128 prompts × 8, first priority": lambda: post(
            "/v1/completions", {"prompt": ["def f("] * 128, "n": 8, "max_tokens": 64, "priority": -(2**31)}
        ),
        "128 prompts × 8, last priority": lambda: post(
            "/v1/completions", {"prompt": ["def f("] * 128, "n": 8, "max_tokens": 64, "priority": 2**31 - 1}
        ),
        "300 grammars of 199 terms": lambda: posts(
            "/v1/chat/completions", [_chat(grammar=_many_terms() + "\n" * i) for i in range(300)]
        ),
        "a template of a gigabyte": lambda: posts("/v1/chat/completions", [_chat("attack")] * 8),
        "a template without end": lambda: posts("/v1/chat/completions", [_chat("loop")] * 8),
    }

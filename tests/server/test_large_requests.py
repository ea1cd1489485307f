"""What is large is refused by its size, before it costs anything; what is not is served as before."""

import asyncio
import gc
import json
import socket
import threading
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.frontend.llm_config import TINY
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.sampling_params import SamplingParams
from dflash_jax.server import body, prepare, stream, texts
from dflash_jax.server.errors import ApiError, JsonResponse
from dflash_jax.server.limits import Limits
from dflash_jax.server.stream import json_parts, pieces
from dflash_jax.server.texts import Texts
from tests.server.conftest import TOOL, wait_until
from tests.server.test_robust import HI, JSON

LEAVES = st.none() | st.booleans() | st.integers() | st.text() | st.text(alphabet='\\",[]{}:', max_size=20)
VALUES = st.recursive(LEAVES, lambda v: st.lists(v, max_size=40) | st.dictionaries(st.text(), v), max_leaves=60)
# A string of the body.
JSON_IN_JSON = "[" + "1," * 300_000 + "1]"
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": JSON_IN_JSON}}


def numbers(value: object) -> tuple[int, int, int]:
    """(values, objects, their fields) inside of a value, and those that hold some count as well."""
    if isinstance(value, dict):
        inner, own = list(value.values()), (max(len(value), 1), 1, len(value))
    elif isinstance(value, list):
        inner, own = value, (max(len(value), 1), 0, 0)
    else:
        return 0, 0, 0
    values, objects, fields = (sum(counts) for counts in zip(own, *map(numbers, inner), strict=True))
    return values, objects, fields


@given(VALUES, st.booleans(), st.integers(1, 64))
def test_values_and_depth_are_counted_at_any_step(value, ascii_only, step):
    text = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "STEP_BYTES", step)
        seen = list(counts(text))
    assert (seen or [(0, 0, 0, 0)])[-1][:3] == numbers(value)
    assert not ascii_only or not any(each[3] for each in seen)


@given(st.lists(st.text(alphabet='ab"\\\\é', max_size=40), max_size=8), st.integers(1, 64))
def test_strings_beyond_ascii_are_counted_as_a_whole_at_any_step(given_texts, step):
    text = json.dumps(given_texts, ensure_ascii=False).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "STEP_BYTES", step)
        found = (counts(text) or [(0, 0, 0, 0)])[-1][3]
    # Escapes are left out where a step has a quote.
    least = sum(len(each.replace("\\", "").replace('"', "").encode()) for each in given_texts if not each.isascii())
    most = sum(len(json.dumps(each, ensure_ascii=False).encode()) - 2 for each in given_texts if not each.isascii())
    assert least <= found <= most


def counts(text: bytes) -> list[tuple[int, int, int, int]]:
    async def every() -> list[tuple[int, int, int, int]]:
        return [found async for found in body._counted(text)]

    return asyncio.run(every())


@given(VALUES, st.integers(1, 64), st.sampled_from([0.0, 1e9]))
def test_an_answer_in_pieces_of_any_size_is_the_same(value, nbytes, seconds):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "PIECE_BYTES", nbytes)
        patch.setattr(stream, "PIECE_S", seconds)
        found = list(pieces(json_parts(value)))
    assert b"".join(found) == JsonResponse(value).body
    assert max(map(len, found)) < 2 * nbytes


@given(st.lists(VALUES))
def test_elements_that_are_made_late_or_are_json_already_are_the_same(values):
    def elements():
        for value in values:
            yield b""
            yield JsonResponse(value).body if len(values) % 2 else value

    assert b"".join(json_parts({"x": elements(), "y": iter(())})) == JsonResponse({"x": values, "y": []}).body


@pytest.mark.parametrize("text", [b"\\" * 10**5, b'"' * 10**5, b'\\"' * 10**5, b"[" * 10**5, b'"' + b"\\" * 10**5])
def test_what_is_no_json_is_counted_too(text):
    assert counts(text)


TOO_MUCH = {
    "text": ("/v1/completions", {"prompt": "x " * 10**6}, "prompt"),
    "a text among others": ("/v1/completions", {"prompt": ["x", "x " * 10**6]}, "prompt"),
    "ids": ("/v1/completions", {"prompt": [5] * 200_000}, "prompt"),
    "more ids": ("/v1/completions", {"prompt": [5] * 10**6}, None),
    "text for SGLang's": ("/generate", {"text": "x " * 10**6}, "text"),
    "ids for SGLang's": ("/generate", {"input_ids": [5] * 200_000}, "input_ids"),
    "a message": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 10**6}]}, "messages"),
    "messages": ("/v1/chat/completions", {"messages": HI * 50_000}, None),
    "fields": ("/v1/completions", {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(70_000)), 1)}, None),
    "biases": ("/v1/completions", {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(301)), 1)}, "logit_bias"),
    "parts": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 50_000}]},
        None,
    ),
    "text to tokenize": ("/tokenize", {"prompt": "x " * 10**6}, "prompt"),
    "messages to tokenize": ("/tokenize", {"messages": [{"role": "user", "content": "x " * 10**6}]}, "messages"),
    "ids to detokenize": ("/detokenize", {"tokens": [5] * 200_000}, "tokens"),
    "input": ("/v1/responses", {"input": "x " * 10**6}, None),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_too_large_input_is_refused_before_the_tokenizer(quiet, monkeypatch, name):
    """Nothing of it reaches the tokenizer."""
    path, given, param = TOO_MUCH[name]
    encoded = []
    encode = quiet.serving.llm.tokenizer._encode
    monkeypatch.setattr(
        quiet.serving.llm.tokenizer, "_encode", lambda text, special: encoded.append(text) or encode(text, special)
    )
    found = quiet.http.post(path, content=json.dumps(given), headers=JSON)
    assert found.status_code == 400, found.text
    if path != "/v1/responses":
        assert found.json()["error"]["param"] == param
    assert max(map(len, encoded), default=0) < 10


def texts_of(capacity: int) -> Texts:
    class Model:
        tokenizer = Tokenizer(TINY / "target")

        def encode(self, prompt):
            return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    return Texts(Model(), capacity)


def test_a_text_that_may_just_fit():
    """Its tokens are counted piece by piece, and no further than needed."""
    found, read = texts_of(20_000), []
    encode = found._tokenizer.encode_plain
    found._tokenizer.encode_plain = lambda text: read.append(text) or encode(text)
    long = "x y z " * 60_000
    with pytest.raises(ApiError, match="do not fit"):
        asyncio.run(found.prompt(long, "prompt"))
    assert len(read) < len(long) / texts.PIECE
    whole = "    " * 50_000
    assert asyncio.run(found.prompt(whole, "prompt")) == Tokenizer(TINY / "target").encode(whole)


def test_a_text_that_is_cut_has_a_limit():
    """It is tokenised as a whole: 9 MB take half a minute, in which no other long text is."""
    found = texts_of(100)
    found._tokenizer.encode = None
    with pytest.raises(ApiError, match="at most 1048576 are possible"):
        asyncio.run(found.prompt("x" * (texts.CUT + 1), "prompt", is_truncated=True))


def test_a_client_that_leaves_ends_the_tokenising():
    found, read = texts_of(10**5), []
    found._tokenizer.encode_plain = lambda text: read.append(text) or []

    async def main():
        # Cancelled before the thread has begun.
        gate = found._long.submit(lambda: event.wait())
        task = asyncio.create_task(found.prompt("x" * 10**6, "prompt"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        event.set()
        await asyncio.wrap_future(gate)

    event = threading.Event()
    asyncio.run(main())
    assert not read


def test_too_many_long_texts_wait():
    found = texts_of(10**5)

    async def main():
        each = (found.prompt("x" * (texts.LONG + 1), "prompt") for _ in range(texts.WAITING + 3))
        return await asyncio.gather(*each, return_exceptions=True)

    statuses = [e.status_code for e in asyncio.run(main()) if isinstance(e, ApiError)]
    # One is tokenised meanwhile.
    assert statuses == [503] * 2


def test_longest_token_bounds_the_bytes_of_every_token():
    tokenizer = Tokenizer(TINY / "target")
    longest = max((tokenizer.token_bytes(i) for i in range(512)), key=len)
    assert len(longest) <= tokenizer.longest_token


def test_logprobs_of_a_long_prompt(quiet):
    """The first log-probabilities of a long prompt equal those of a prompt that has only its first tokens."""
    ids = [5 + i % 200 for i in range(600)]
    ask = {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 3, "echo": True, "logprobs": 3, "temperature": 0}
    choice = quiet.post("/v1/completions", **ask).json()["choices"][0]
    assert len(choice["prompt_logprobs"]) == 600
    assert len(choice["logprobs"]["tokens"]) == 601
    short = quiet.post("/v1/completions", **(ask | {"prompt": ids[:100]})).json()["choices"][0]
    for a, b in zip(choice["prompt_logprobs"][1:100], short["prompt_logprobs"][1:], strict=True):
        assert a.keys() == b.keys()
        assert all(a[k]["logprob"] == pytest.approx(b[k]["logprob"], abs=1e-4) for k in a)


@pytest.mark.parametrize("nbytes", [64, 2**16])
def test_responses_with_many_logprobs(quiet, monkeypatch, nbytes):
    """In many pieces or few, the same events and the same answer."""
    monkeypatch.setattr(stream, "PIECE_BYTES", nbytes)
    fields = {"input": "hi", "top_logprobs": 2, "max_output_tokens": 40, "temperature": 0}
    fields["chat_template_kwargs"] = {"enable_thinking": False}
    found = quiet.post("/v1/responses", **fields)
    assert found.headers["content-type"] == "application/json"
    (part,) = found.json()["output"][-1]["content"]
    assert part["logprobs"]
    lines = quiet.post("/v1/responses", stream=True, **fields).text.strip().split("\n\n")
    names, events = zip(*(line.removeprefix("event: ").split("\ndata: ") for line in lines), strict=True)
    events = [json.loads(event) for event in events]
    assert list(names) == [event["type"] for event in events]
    (streamed,) = events[-1]["response"]["output"][-1]["content"]
    assert streamed["text"] == part["text"]
    assert [e["token"] for e in streamed["logprobs"]] == [e["token"] for e in part["logprobs"]]


def test_others_have_their_turn_between_rows(llm):
    """A request may ask for thousands of rows."""
    turns, serving = [], SimpleNamespace(llm=llm)
    params = SamplingParams(max_tokens=4, seed=1)

    async def other() -> None:
        while True:
            turns.append(None)
            await asyncio.sleep(0)

    async def main() -> list:
        task = asyncio.create_task(other())
        rows = await prepare.sequences(serving, [5, 6], params, 8)
        task.cancel()
        return rows

    rows = asyncio.run(main())
    assert [row.request.params.seed for row in rows] == list(range(1, 9))
    assert len(turns) >= 8


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": JSON_IN_JSON}, "guided_json"),
        ({"structured_outputs": {"json": JSON_IN_JSON}}, "structured_outputs.json"),
        ({"messages": [*HI, {"role": "assistant", "content": "", "tool_calls": [CALL]}, *HI]}, "messages"),
    ],
    ids=["schema", "structured", "arguments"],
)
def test_json_inside_of_json_is_not_read(quiet, monkeypatch, fields, param):
    """The body's own values are counted, and those inside of its strings too."""
    read = []
    monkeypatch.setattr(json, "loads", lambda text, loads=json.loads, **more: read.append(len(text)) or loads(text))
    found = quiet.post("/v1/chat/completions", **({"messages": HI} | fields))
    assert found.status_code == 400
    assert param in (found.json()["error"]["param"], found.json()["error"]["message"].partition(" ")[0])
    assert len(JSON_IN_JSON) not in read


LARGE = 2**20
DROPPED = {"metadata": {"a": "x" * LARGE}, "user": "x" * LARGE}
TOOL_HI = TOOL | {"function": TOOL["function"] | {"description": "x" * LARGE}}
CHAT = {"messages": HI, "max_tokens": 4, "tools": [TOOL_HI], "tool_choice": "none", **DROPPED}
LONG_ANSWERS = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat, streamed": ("/v1/chat/completions", CHAT | {"stream": True}),
    "conversations": ("/v1/chat/completions/batch", {"messages": [HI, HI], "max_tokens": 4, **DROPPED}),
    "text": ("/v1/completions", {"prompt": "x", "max_tokens": 4, **DROPPED}),
    "text, streamed": ("/v1/completions", {"prompt": "x", "max_tokens": 4, "stream": True, **DROPPED}),
    "a form": ("/v1/completions", {"prompt": "x", "max_tokens": 4, "guided_json": {"description": "x" * 60_000}}),
    "SGLang's": ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 4}, "session_id": "x" * LARGE}),
    "Anthropic's": (
        "/v1/messages",
        {"messages": HI, "max_tokens": 4, "model": "default", "metadata": {"user_id": "x" * LARGE}},
    ),
}


@contextmanager
def paused(server):
    """The engine takes requests, and answers none before the end."""
    gate = threading.Event()
    server.host.engine._command(gate.wait)
    try:
        yield
    finally:
        gate.set()


def sent(server, path: str, given: dict, connections: ExitStack) -> socket.socket:
    """A request, without a copy of it on the client's side."""
    url = urlsplit(server.url)
    connection = connections.enter_context(socket.create_connection((url.hostname, url.port), 60))
    content = json.dumps(given).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def answered(connection: socket.socket) -> bytes:
    data = b""
    while part := connection.recv(2**16):
        data += part
    return data


@pytest.mark.parametrize("name", LONG_ANSWERS)
def test_a_body_is_dropped_before_its_answer_begins(quiet, name):
    """However long that takes: others' large bodies have room again."""
    path, given = LONG_ANSWERS[name]
    serving, few = quiet.serving, 5
    with ExitStack() as connections:
        # What is imported and cached at first.
        assert answered(sent(quiet, path, given, connections)).startswith(b"HTTP/1.1 200")
        tracemalloc.start()
        try:
            with paused(quiet):
                before = tracemalloc.get_traced_memory()[0]
                all_sent = [sent(quiet, path, given, connections) for _ in range(few)]
                rows = few * (2 if "batch" in path else 1)
                # The engine is asked for all of them.
                assert wait_until(lambda: quiet.host.engine.open_requests == rows)
                assert wait_until(lambda: serving.bodies.nbytes == 0)
                assert serving.in_flight == few
                assert not serving.bodies.nbytes_of
                gc.collect()
                assert tracemalloc.get_traced_memory()[0] - before < few * LARGE / 2
        finally:
            tracemalloc.stop()
        assert all(answered(each).startswith(b"HTTP/1.1 200") for each in all_sent)


@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 4, "tools": [TOOL], **DROPPED}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 16, "metadata": {"a": "x"}, "store": False}),
    ],
    ids=["tools", "response"],
)
def test_what_an_answer_needs_of_a_body_counts(quiet, path, given):
    """Calls are read by the tools' schemas; a response repeats its request."""
    with ExitStack() as connections:
        with paused(quiet):
            connection = sent(quiet, path, given, connections)
            assert wait_until(lambda: quiet.host.engine.open_requests == 1)
            # Values take more than their text.
            assert quiet.serving.bodies.nbytes > len(json.dumps(given)) + body.VALUE_BYTES * len(given)
        assert answered(connection).startswith(b"HTTP/1.1 200")
    assert wait_until(lambda: quiet.serving.bodies.nbytes == 0)


def test_one_client_takes_a_part_of_the_memory_for_bodies(quiet, monkeypatch):
    serving = quiet.serving
    most = int(body.CLIENT_SHARE * serving.limits.total_body_bytes)
    taken = Counter({"127.0.0.1": most, "127.0.0.2": most})
    monkeypatch.setattr(serving.bodies, "nbytes_of", taken)
    # A key that is not asked for makes no other client.
    quiet.http.headers["Authorization"] = "Bearer another"
    found = quiet.post("/v1/completions", prompt="x" * 2**16, max_tokens=1)
    del quiet.http.headers["Authorization"]
    assert found.status_code == 429
    assert found.headers["retry-after"]
    assert quiet.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200
    serving.bodies.nbytes_of["127.0.0.1"] -= 2**17
    assert quiet.post("/v1/completions", prompt="x" * 2**16, max_tokens=1).status_code == 400


def test_one_client_takes_a_part_of_the_memory_for_values(quiet, monkeypatch):
    """Of small bodies with many values, whose requests need them until they end."""
    monkeypatch.setattr(quiet.serving, "limits", replace(quiet.serving.limits, total_body_bytes=2**22))
    tool = {"type": "function", "name": "f", "parameters": {"x": [0] * 20_000}}
    given = {"input": "x", "max_output_tokens": 16, "store": False, "tools": [tool], "tool_choice": "none"}
    other = httpx.HTTPTransport(local_address="127.0.0.2")
    with ExitStack() as connections:
        with paused(quiet):
            connection = sent(quiet, "/v1/responses", given, connections)
            assert wait_until(lambda: quiet.host.engine.open_requests == 1)
            assert quiet.post("/v1/responses", **given).status_code == 429
            with httpx.Client(base_url=quiet.url, timeout=120, transport=other) as client:
                prompt = {"prompt": "x" * 2**17, "max_tokens": 1}
                assert client.post("/v1/completions", json=prompt).status_code == 400
        assert answered(connection).startswith(b"HTTP/1.1 200")


def test_small_bodies_beside_many_large_ones(quiet, monkeypatch):
    """Those who send 100 bodies of 10 MB slowly keep only large ones out."""
    monkeypatch.setattr(quiet.serving.bodies, "nbytes", quiet.serving.limits.total_body_bytes)
    assert quiet.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200
    assert quiet.post("/v1/completions", prompt="x" * 2**16, max_tokens=1).status_code == 503
    # Few bytes, but what their values take is large.
    assert quiet.post("/v1/completions", prompt=[5] * 10_000, max_tokens=1).status_code == 503


@pytest.mark.parametrize(("sure_s", "slow", "quick"), [(0.0, 408, 100_000), (1e9, 100_000, 503)])
def test_a_large_body_that_arrives_slowly_gives_way(monkeypatch, sure_s, slow, quick):
    """Not to others before it has had its time."""
    monkeypatch.setattr(body, "SURE_S", sure_s)
    monkeypatch.setattr(body, "CLIENT_SHARE", 1)
    bodies, limits = body.Bodies(), Limits(total_body_bytes=150_000)

    async def read(client: str, *parts: bytes | asyncio.Event) -> int:
        """Bytes of a body that arrives in parts, or the error's status."""
        left, one = list(parts), body.Body(bodies, limits, client)

        async def receive() -> dict:
            if isinstance(left[0], asyncio.Event):
                await left.pop(0).wait()
            return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

        try:
            return len(await one.read(receive))
        except ApiError as e:
            return e.status_code
        finally:
            one.close()

    async def both() -> tuple[int, int]:
        has_come = asyncio.Event()
        first = asyncio.create_task(read("a", b"x" * 90_000, has_come, b"x" * 10_000))
        # The event loop's clock moves on.
        await asyncio.sleep(0.01)
        second = await read("b", b"x" * 100_000)
        has_come.set()
        return await first, second

    assert asyncio.run(both()) == (slow, quick)
    assert (bodies.nbytes, bodies.arriving, bodies.nbytes_of) == (0, set(), {})


def test_a_second_address_is_next_whatever_the_first_one_has_sent_and_at_which_priority(quiet):
    engine = quiet.host.engine.engine
    given = {"prompt": "x", "max_tokens": 2, "ignore_eos": True, "priority": -9}
    with ExitStack() as stack:
        other = httpx.HTTPTransport(local_address="127.0.0.2")
        client = stack.enter_context(httpx.Client(base_url=quiet.url, timeout=120, transport=other))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        count = 3 * engine.runner.slots
        with paused(quiet):
            many = [sent(quiet, "/v1/completions", given, stack) for _ in range(count)]
            assert wait_until(lambda: quiet.host.engine.open_requests == count)
            one = pool.submit(client.post, "/v1/completions", json=given | {"priority": 9})
            assert wait_until(lambda: quiet.host.engine.open_requests == count + 1)
            requests = {address: [] for address in ("127.0.0.1", "127.0.0.2")}
            for request in quiet.host.engine._router.requests:
                requests[request.client].append(request)
        assert one.result().status_code == 200
        assert all(answered(each).startswith(b"HTTP/1.1 200") for each in many)
    (request,) = requests["127.0.0.2"]
    # Of the first client, those had begun that came before.
    assert sum(r.times.admitted < request.times.admitted for r in requests["127.0.0.1"]) <= engine.runner.slots

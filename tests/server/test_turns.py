"""Whatever a client asks for: no turn of the server's event loop takes more than 50 ms of processor time.

All endpoints with their fields at the limits, on a device that takes no time. Front and engine are one process here, so
that the turns of both count, and records between them are encoded and decoded as between two.
"""

import asyncio
import base64
import copy
import gc
import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save

from dflash_jax import protocol
from dflash_jax.decoding.sampling import Logprobs
from dflash_jax.engine.config import EngineConfig, prefill_config, speculations_of
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.service import AsyncEngine
from dflash_jax.server import wire
from dflash_jax.server.body import MOST_FIELDS
from dflash_jax.server.engine_client import EngineClient
from dflash_jax.server.limits import DEFAULT_LIMITS as LIMITS
from dflash_jax.server.response_store import MOST_SEALED, SEAL, StoredResponse
from dflash_jax.server.serving import Serving
from dflash_jax.server.stored_responses import answer_item_id, stored_response
from tests.server.conftest import Running, hosted
from tests.server.turns import MOST_S, Turns, slowness
from tools.mock_runner import MockRunner, printable

CAPACITY = 2**17
# Tokens whose log-probabilities are asked for: each entry takes as long as hundreds of other values.
ENTRIES = 2**14
# Choices of each of the most prompts, so that all have a place in the queue.
CHOICES = 8
TRIES = 3


def logprobs(count: int) -> Logprobs:
    """Of so many tokens, the same of each."""
    likeliest = np.arange(100, 120, dtype=np.int32), np.linspace(-0.1, -9, 20, dtype=np.float32)
    ids, values = (np.broadcast_to(row, (count, 20)) for row in likeliest)
    return Logprobs(np.full(count, -1.5, np.float32), ids, values, values)


class ScoredRunner(MockRunner):
    """A mock device that has log-probabilities, the same of each token."""

    def batch_sizes(self):
        # Not those of the tests.
        return [1, 8, 32]

    def score(self, slot, tokens, size, media=None):
        return self.work(self.prefill_s * size), tokens

    def read_scores(self, ticket):
        until, tokens = ticket
        self.wait(until)
        return logprobs(tokens)

    def read(self, ticket, with_logprobs):
        outcome = super().read(ticket, with_logprobs)
        return replace(outcome, logprobs=[*map(logprobs, map(len, outcome.tokens))]) if with_logprobs else outcome


def over_records(host) -> EngineClient:
    """As `engine_host.in_process`, with records that are encoded by the sender and decoded by the receiver."""
    decoders = wire._Decoder(protocol.FromFront), wire._Decoder(protocol.FromEngine)

    def passed(record, decoder, receive):
        frame = memoryview(b"".join(wire._Encoder().pieces(record)))
        size = wire._HEADER.unpack_from(frame)[1]
        return lambda: receive(decoder.record(frame[wire._HEADER.size :], size))

    def to_engine(record):
        asyncio.get_running_loop().call_soon(passed(record, decoders[0], front.receive))

    def to_front(record):
        receive = passed(record, decoders[1], client.receive)
        try:
            asyncio.get_running_loop().call_soon(receive)
        except RuntimeError:
            # Before there is a loop.
            receive()

    client = EngineClient(to_engine)
    front = host.connect(to_front)
    return client


@pytest.fixture(scope="module")
def mock(llm):
    llm = copy.copy(llm)
    llm.max_len = CAPACITY
    runner = ScoredRunner(
        32,
        CAPACITY,
        round_s=0.0,
        prefill_s=0.0,
        vocabulary=printable(llm),
        vocab_size=llm.config.vocab_size,
    )
    config = EngineConfig(speculations_of((8,)), **prefill_config("gpu", True), max_queue=1024, masks=True)
    engine = hosted(llm, AsyncEngine(Engine(runner, config)).start())
    serving = Serving(llm, over_records(engine), ["mock"])
    serving.prepare()
    running = Running(serving, engine, admin_key="root")
    # As the server does.
    gc.collect()
    gc.freeze()
    yield running
    gc.unfreeze()
    running.stop()
    engine.engine.stop()


IDS = [5 + i % 200 for i in range(2**18)]
STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
TIMED = {"stream": True, "stream_options": STREAM["stream_options"] | {"include_timings": True}}
SAMPLED = {"seed": 1, "temperature": 0.5, "ignore_eos": True, "logit_bias": {str(i): 0.5 for i in range(300)}}
SAMPLED |= {"stop": [chr(200 + i) * LIMITS.stop_characters for i in range(LIMITS.stops)]}
ALL = {"return_token_ids": True, "return_drafts": True, "prompt_logprobs": 20, "logprob_token_ids": [*range(20)]}
LOGPROBS = {"logprobs": True, "top_logprobs": 20}
WORDS = "def add(values): return sum(values)\n"
TURN = [{"role": "user", "content": WORDS}, {"role": "assistant", "content": WORDS}]
TALK = [{**TURN[i % 2], "content": "x"} for i in range(LIMITS.objects - 2 * LIMITS.tools - 9)]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "x "}] * 4000}]
# Documents, and references to a large tool, as many as a body may have.
DOCUMENT = {"type": "document", "title": "x", "source": {"type": "base64", "data": "eCA="}}
REFERENCE = {"type": "tool_reference", "tool_name": "f"}
LARGE_TOOL = {"name": "f", "description": "x" * 10**6, "input_schema": {}, "defer_loading": True}
TOOLS = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(LIMITS.tools)]
# As if this server had sealed them.
SEALED = [{"type": "compaction", "encrypted_content": SEAL + "A" * (MOST_SEALED - len(SEAL))}] * 4
ADDED = {"type": "additional_tools", "role": "developer"}
ADDED |= {"tools": [{"type": "function", "name": "f", "parameters": {}}] * (LIMITS.objects // 2 - 9)}
ITEM = {"id": "msg_0", "type": "message", "status": "completed", "role": "user"}


def completions(count: int, length: int, **fields) -> tuple[str, dict]:
    """A request with so many prompts of so many token ids."""
    return "/v1/completions", {"prompt": [IDS[i : i + length] for i in range(count)], **SAMPLED, **fields}


def short(**fields) -> tuple[str, dict]:
    return completions(LIMITS.prompts, 8, n=CHOICES, max_tokens=8, **fields)


def chat(**fields) -> tuple[str, dict]:
    given = {"messages": TALK, "n": LIMITS.choices, "max_tokens": 256, **SAMPLED, **fields}
    return "/v1/chat/completions", given


def generate(count: int, length: int, **fields) -> tuple[str, dict]:
    sampling = SAMPLED | {"max_new_tokens": 8, "n": CHOICES, "sampling_seed": 1}
    del sampling["seed"]
    fields = {"input_ids": [IDS[i : i + length] for i in range(count)], "sampling_params": sampling} | fields
    return "/generate", fields


NATIVE = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 20, "return_text_in_logprobs": True}
CASES = {
    "many": short(**ALL, logprobs=20, echo=True),
    "many, streamed": short(**ALL, logprobs=20, echo=True, **TIMED),
    "many without log-probabilities": completions(128, 16, n=CHOICES, max_tokens=64, return_token_ids=True),
    "many without log-probabilities, streamed": completions(128, 16, n=CHOICES, max_tokens=64, **STREAM),
    "many long": completions(128, 2000, n=CHOICES, max_tokens=1, return_token_ids=True),
    "many long, streamed": completions(128, 2000, n=CHOICES, max_tokens=1, return_token_ids=True, **STREAM),
    "many long, echoed": completions(16, 8000, n=2, max_tokens=0, echo=True, return_token_ids=True),
    "many long, echoed, streamed": completions(16, 8000, n=2, max_tokens=0, echo=True, **STREAM),
    "long": completions(1, CAPACITY - 8, max_tokens=1, echo=True, return_token_ids=True),
    "long, scored": completions(1, ENTRIES, max_tokens=16, echo=True, logprobs=20, **ALL),
    "long, scored, streamed": completions(1, ENTRIES, max_tokens=16, echo=True, logprobs=20, **ALL, **STREAM),
    "long answer": completions(1, 8, max_tokens=ENTRIES, logprobs=20, **ALL),
    "long answer, streamed": completions(1, 8, max_tokens=ENTRIES, logprobs=20, **ALL, **STREAM),
    "texts": ("/v1/completions", {"prompt": [WORDS * 2000] * 128, "max_tokens": 1, "return_token_ids": True}),
    "text": ("/v1/completions", {"prompt": WORDS * (10 * 2**20 // (len(WORDS) + 1) - 9), "max_tokens": 1}, 400),
    "rendered": ("/v1/completions/render", completions(128, 2000, n=CHOICES, max_tokens=1)[1]),
    "chat": chat(**LOGPROBS, tools=TOOLS, **(ALL | {"prompt_logprobs": None})),
    "chat, streamed": chat(**LOGPROBS, tools=TOOLS, **(ALL | {"prompt_logprobs": None}), **TIMED),
    "chat, scored": chat(**LOGPROBS, **ALL, n=1),
    "chats of choices, scored": chat(**LOGPROBS, **ALL, messages=TURN[:1]),
    "chat of parts": chat(messages=PARTS, max_tokens=8),
    "chat, rendered": ("/v1/chat/completions/render", chat()[1]),
    "chats": (
        "/v1/chat/completions/batch",
        {"messages": [TURN[:1]] * LIMITS.prompts, "max_tokens": 64, **LOGPROBS, **ALL},
    ),
    "tokens": ("/tokenize", {"prompt": WORDS * 8000, "return_token_strs": True}),
    "tokens of a chat": ("/tokenize", {"messages": TALK, "return_token_strs": True}),
    "text of tokens": ("/detokenize", {"tokens": IDS[:CAPACITY]}),
    "messages": ("/v1/messages", {"messages": TALK, "max_tokens": 4096, "model": "mock"}),
    "messages, streamed": ("/v1/messages", {"messages": TALK, "max_tokens": 4096, "model": "mock", "stream": True}),
    "documents": ("/v1/messages", {"messages": [PARTS[0] | {"content": [DOCUMENT] * 4000}], "max_tokens": 8}, None),
    "references": (
        "/v1/messages",
        {"messages": [PARTS[0] | {"content": [REFERENCE] * 8000}], "tools": [LARGE_TOOL], "max_tokens": 8},
        None,
    ),
    "count": ("/v1/messages/count_tokens", {"messages": TALK, "model": "mock"}),
    "tokens of tokens": (
        "/inference/v1/generate",
        {"token_ids": IDS[:ENTRIES], "sampling_params": SAMPLED | {"max_tokens": ENTRIES, "logprobs": 20, "n": 2}},
    ),
    "tokens of tokens, streamed": (
        "/inference/v1/generate",
        {"token_ids": IDS[:8], "sampling_params": SAMPLED | {"max_tokens": ENTRIES, "logprobs": 20}, "stream": True},
    ),
    "native": generate(128, 8, **NATIVE, token_ids_logprob=[[*range(20)]] * 128),
    "native, streamed": generate(128, 8, **NATIVE, token_ids_logprob=[[*range(20)]] * 128, stream=True),
    "native, long": generate(1, ENTRIES, **NATIVE),
    "native, long answer, streamed": generate(1, 8, sampling_params={"max_new_tokens": ENTRIES}, stream=True, **NATIVE),
    "invocation": ("/invocations", chat(max_tokens=8)[1]),
    "response": (
        "/v1/responses",
        {"input": TALK, "max_output_tokens": ENTRIES, "top_logprobs": 20, "ignore_eos": True, "seed": 1},
    ),
    "response, streamed": (
        "/v1/responses",
        {"input": TALK, "max_output_tokens": ENTRIES, "top_logprobs": 20, "ignore_eos": True, "stream": True},
    ),
    "sealed response": (
        "/v1/responses",
        {"input": TALK, "max_output_tokens": ENTRIES, "include": ["reasoning.encrypted_content"], "ignore_eos": True},
    ),
    "summary": ("/v1/responses/compact", {"input": TALK, "max_output_tokens": ENTRIES // 2, "ignore_eos": True}),
    "tokens of a response": ("/v1/responses/input_tokens", {"input": TALK}),
    "foreign seals": ("/v1/responses/input_tokens", {"input": [*TALK, *SEALED]}),
    "added tools": ("/v1/responses/input_tokens", {"input": [*TURN, ADDED]}),
}


def check(mock, method: str, path: str, content: bytes = b"", right: int | None = 200, **headers: str) -> None:
    """Sends a request whose answer has the status ``right``, or any below 500. A long turn has further tries."""
    headers = ({"Content-Type": "application/json"} if content else {}) | headers
    longest = []
    while len(longest) < TRIES and (not longest or longest[-1].seconds > MOST_S):
        gc.collect()
        gc.freeze()
        with Turns(mock._thread) as turns:
            with mock.http.stream(method, path, content=content or None, headers=headers) as answer:
                parts = [part[:500] for part in answer.iter_raw()]
            assert mock.idle()
        assert answer.status_code == right or (right is None and answer.status_code < 500), b"".join(parts)[:500]
        assert right != 200 or b'"error":{' not in parts[-1], parts[-1]
        longest.append(replace(turns.longest, seconds=turns.longest.seconds / slowness()))
    turn = min(longest, key=lambda turn: turn.seconds)
    assert turn.seconds <= MOST_S, f"{method} {path} {content[:200]}: {turn}"


@pytest.mark.parametrize("name", CASES)
def test_no_turn_is_long(mock, name):
    path, body, *right = CASES[name]
    check(mock, "POST", path, json.dumps(body).encode(), *right)


# As many values, objects and bytes as a body may have.
MANY = LIMITS.values - 100
WIDE = {str(i): 0.5 for i in range(MOST_FIELDS * LIMITS.objects - 100)}
TEXT = "x" * (LIMITS.body_bytes - 2**10)
CROWDED = {
    "stop": ["x"] * MANY,
    "stop_token_ids": [5] * MANY,
    "stop_regex": ["x"] * MANY,
    "bad_words": ["x"] * MANY,
    "allowed_token_ids": [5] * MANY,
    "logprob_token_ids": [5] * MANY,
    "logit_bias": WIDE,
    "guided_choice": ["x"] * MANY,
    "guided_json": {"enum": [*range(MANY)]},
    "guided_regex": TEXT,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": WIDE}}},
    "structured_outputs": {"choice": ["x"] * MANY},
    "user": TEXT,
    "prompt": ["x"] * MANY,
    "unknown": WIDE,
}
CROWDED_CHAT = {
    "messages": [{"role": "user", "content": TEXT}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": WIDE}}}],
    "chat_template_kwargs": WIDE,
    "metadata": dict.fromkeys(WIDE, "x"),
    "user": TEXT,
}
CROWDED_RESPONSE = {
    "instructions": TEXT,
    "metadata": {"a": TEXT},
    "tools": [{"type": "function", "name": "f", "parameters": {"properties": WIDE}}],
    "input": [{"type": "function_call_output", "call_id": "a", "output": TEXT}],
    "user": TEXT,
}


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        *(("/v1/completions", field, value) for field, value in CROWDED.items()),
        *(("/v1/chat/completions", field, value) for field, value in CROWDED_CHAT.items()),
        *(("/v1/responses", field, value) for field, value in CROWDED_RESPONSE.items()),
        ("/v1/messages", "messages", [{"role": "user", "content": TEXT}]),
        ("/v1/messages", "metadata", {"user_id": TEXT}),
        ("/generate", "text", ["x"] * MANY),
        ("/generate", "rid", ["x"] * MANY),
        ("/generate", "sampling_params", [{"max_new_tokens": 1}] * (LIMITS.objects - 2)),
        ("/invocations", "prompt", ["x"] * MANY),
        ("/tokenize", "prompt", TEXT),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 99 else "",
)
def test_no_turn_of_a_field_is_long(mock, path, field, value):
    """Its values are too many or not."""
    given = {"/v1/completions": "prompt", "/v1/responses": "input", "/generate": "text", "/invocations": "prompt"}
    most = {"/generate": {"sampling_params": {"max_new_tokens": 1}}, "/v1/responses": {"max_output_tokens": 1}}
    body = {given.get(path, "messages"): "x" if path in given else TURN[:1]} | most.get(path, {"max_tokens": 1})
    check(mock, "POST", path, json.dumps(body | {field: value}).encode(), None)


# Tensors of many names, and of many bytes, which are no tensors of the model.
NAMED = save({f"model.layers.{i}.mlp.up_proj.weight": np.zeros(1, np.float32) for i in range(2**15)})
LARGE = save({f"x{i}": np.zeros(2**20, np.uint8) for i in range(LIMITS.media_body_bytes // 2**20 * 5 // 8)})


@pytest.mark.parametrize(
    ("path", "tensors"),
    [
        ("/update_weights", NAMED),
        ("/update_weights", LARGE),
        ("/update_weights_from_tensor", NAMED),
        ("/update_weights_from_tensor", LARGE),
        ("update_info", LARGE),
        ("/abort_requests", None),
    ],
    ids=["names", "bytes", "names in base64", "bytes in base64", "bytes in a field", "requests"],
)
def test_no_turn_of_an_administrator_is_long(mock, path, tensors):
    key = {"Authorization": "Bearer root"}
    if path == "/update_weights":
        check(mock, "POST", path, tensors, 400, **key, **{"Content-Type": "application/octet-stream"})
    elif tensors is None:
        check(mock, "POST", path, json.dumps({"request_ids": ["x"] * MANY}).encode(), **key)
    elif path == "update_info":
        body = {path: {"serialized_named_tensors": base64.b64encode(tensors).decode()}}
        check(mock, "POST", "/update_weights", json.dumps(body).encode(), 400, **key)
    else:
        body = {"serialized_named_tensors": [base64.b64encode(tensors).decode()]}
        check(mock, "POST", path, json.dumps(body).encode(), 400, **key)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/mock", "/server_info", "/metrics", "/load", "/health"])
def test_no_turn_of_a_question_is_long(mock, path):
    check(mock, "GET", path)


@pytest.mark.parametrize("items", [8, LIMITS.objects], ids=["few items", "many items"])
def test_no_turn_of_a_stored_response_is_long(mock, items):
    """A conversation of as many bytes as a body may have."""
    size = LIMITS.media_body_bytes // items - 256
    lines = (ITEM | {"id": f"msg_{i}", "content": [{"type": "input_text", "text": "x" * size}]} for i in range(items))
    stored = b"\n".join(json.dumps(line, separators=(",", ":")).encode() for line in lines)
    answer = json.dumps({"id": "resp_0", "output": []}).encode()
    assert asyncio.run(
        mock.serving.response_store.put(hashlib.sha256(b"").digest(), "resp_0", StoredResponse(answer, stored, 2))
    )
    del stored
    path, body = "/v1/responses/resp_0", {"previous_response_id": "resp_0", "input": "x", "max_output_tokens": 16}
    last = f"msg_{items - 1}"
    requests = [
        ("GET", path, b"", 200),
        ("GET", f"{path}/input_items?limit=100", b"", 200),
        ("GET", f"{path}/input_items?limit=100&order=asc&after=msg_1", b"", 200),
        ("GET", f"{path}/input_items?after={last}", b"", 200),
        ("GET", f"{path}/input_items?after=msg", b"", 404),
        ("POST", f"{path}/cancel", b"", 400),
        ("POST", "/v1/responses", json.dumps(body).encode(), 400),
        ("POST", "/v1/responses", json.dumps(body | {"truncation": "auto"}).encode(), 400),
        ("DELETE", path, b"", 200),
    ]
    for request in requests:
        check(mock, *request)


def test_no_turn_of_many_summaries_is_long(mock):
    seal = mock.serving.response_store.seal(hashlib.sha256(b"").digest(), "compaction", "x")
    item = {"type": "compaction", "encrypted_content": seal}
    body = {"input": [item] * (LIMITS.objects - 9) + TURN}
    check(mock, "POST", "/v1/responses/input_tokens", json.dumps(body).encode())


def test_no_turn_of_many_references_is_long(mock):
    """Each is in an answer of its own."""
    store, items = mock.serving.response_store, []

    async def put() -> None:
        for i in range(store.size // 2):
            item = {"id": answer_item_id("rs", f"{i:024x}", 0), "type": "reasoning", "summary": [], "content": []}
            items.append({"type": "item_reference", "id": item["id"]})
            entry = stored_response({"id": f"resp_{i}", "output": [item] * 4, "tools": TOOLS}, b"", f"{i:024x}")
            assert await store.put(hashlib.sha256(b"").digest(), f"resp_{i}", entry)

    asyncio.run(put())
    check(mock, "POST", "/v1/responses/input_tokens", json.dumps({"input": [*TURN, *items]}).encode())

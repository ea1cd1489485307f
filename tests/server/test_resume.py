"""The record of a stream, and its replay, without an engine."""

import asyncio
from itertools import pairwise
from unittest.mock import Mock

import pytest

from dflash_jax import SamplingParams, protocol
from dflash_jax.engine.request import Event
from dflash_jax.errors import QueueFullError
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.frontend.sequence import TextSequence
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.server.engine_client import EngineClient, RemoteSequence
from dflash_jax.server.request_context import RequestContext
from dflash_jax.server.response_store import ResponseStore, StoredResponse
from dflash_jax.server.resume import END, LOST, RECORD, REPLAYED, Run, recorded
from dflash_jax.server.serving import Serving

TEXT = "def naïve(x):\n    return '日本語 🎉' + x\n"
# What an event of the engine has beside tokens.
LOGPROBS = {"token_id": 5, "logprob": -0.1, "top": {5: -0.1, 7: float("-inf")}, "named": {9: -3.5}}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(TINY / "target")


def new_sequence(tokenizer, **params):
    return TextSequence([1], SamplingParams(**params), [0], tokenizer)


def generated(sequence, ids, cuts, reason="length", entry=None):
    """The pieces of a sequence that gets ``ids`` in events that end at ``cuts``."""
    pieces, request = [], sequence.request
    for start, end in pairwise([0, *cuts, len(ids)]):
        tokens = ids[start:end]
        count = request.monitor(tokens)
        tokens = tokens[:count]
        request.tokens += tokens
        last = "stop" if count is not None else reason if end == len(ids) else None
        request.finish_reason = last
        sequence.take(Event(request, tokens, [len(tokens)], entry and [entry] * len(tokens), last, block_size=4))
        pieces.append(sequence.pieces.popleft())
        if last:
            break
    return pieces


def record(sequence, pieces):
    """The lines that a stream of these pieces has."""
    sent = []

    async def send(message):
        sent.append(message["body"])

    async def write():
        run = Run("key")
        run.record_in(send)
        for piece in pieces:
            await run.record(3, sequence, piece)

    asyncio.run(write())
    assert all(line.startswith(RECORD) and line.endswith(END) for line in sent)
    return [line[len(RECORD) : -len(END)] for line in sent]


@pytest.mark.parametrize("params", [{}, {"stop": ["'日", "return"], "include_stop_str_in_output": True}])
def test_replayed_pieces_are_those_of_the_earlier_run(tokenizer, params):
    ids = tokenizer.encode_plain(TEXT)
    for cuts in ([], [1, 2, 9], [4, 5, 6, 7, 8, 9, 10, 11, 12]):
        first, second = new_sequence(tokenizer, **params), new_sequence(tokenizer, **params)
        pieces = generated(first, ids, cuts)
        replayed = list(Run("key", lines=record(first, pieces)).replayed({3: second}))
        assert replayed == [(3, piece) for piece in pieces]
        for name in ("token_ids", "shown_text", "yielded", "starts", "drafts", "draft_tokens", "matched"):
            assert getattr(second, name) == getattr(first, name), name
        assert second.request.finish_reason == first.request.finish_reason


def test_replayed_logprobs_are_those_of_the_earlier_run(tokenizer):
    ids = tokenizer.encode_plain(TEXT)
    first, second = (new_sequence(tokenizer, logprobs=1) for _ in range(2))
    pieces = generated(first, ids, [3], entry=LOGPROBS)
    list(Run("key", lines=record(first, pieces)).replayed({3: second}))
    assert second.logprobs == first.logprobs == [LOGPROBS] * len(ids)


def test_min_tokens_of_a_replayed_stop_string_count_from_the_beginning(tokenizer):
    ids = tokenizer.encode_plain("x = 1\nx = 2\n")
    first, second = (new_sequence(tokenizer, stop=["x"], min_tokens=4) for _ in range(2))
    lines = record(first, generated(first, ids[:4], [1, 2, 3], reason=None))
    list(Run("key", lines=lines).replayed({3: second}))
    assert second.request.finish_reason is None
    whole = new_sequence(tokenizer, stop=["x"], min_tokens=4)
    generated(whole, ids, [4])
    count = second.request.monitor(ids[4:])
    assert second.text.stop == whole.text.stop == "x"
    assert second.text.text == whole.text.text
    assert count is not None


def test_stream_outside_of_a_cluster_has_no_record(tokenizer):
    sequence = new_sequence(tokenizer)
    pieces = generated(sequence, tokenizer.encode_plain("x"), [])

    async def write():
        run = Run()
        run.record_in(lambda message: pytest.fail("sent"))
        await run.record(0, sequence, pieces[0])
        await run.end_replay()
        await run.lose()

    asyncio.run(write())


def test_comments_end_the_replay_and_say_that_the_engine_fails():
    sent = []

    async def send(message):
        sent.append(message)

    async def write():
        run = Run("key", lines=[b"[]"])
        run.record_in(send)
        await run.end_replay()
        await run.lose()
        fresh = Run("key")
        fresh.record_in(send)
        await fresh.end_replay()

    asyncio.run(write())
    assert [message["body"] for message in sent] == [REPLAYED, LOST]
    assert all(message["more_body"] for message in sent)


def test_ids_and_seeds_follow_from_the_key_and_are_random_without_one():
    def drawn(key):
        run = Run(key, 5)
        return run.fresh_id(), run.fresh_seed(), run.created

    assert drawn("a") == drawn("a")
    assert drawn("a") != drawn("b")
    assert drawn(None) != drawn(None)
    assert len(drawn("a")[0]) == 32
    assert 0 <= drawn("a")[1] < 2**32
    assert drawn("a")[2] == 5
    assert Run().fresh_id() != Run().fresh_id()


def test_stored_response_is_replaced_by_a_later_run_of_its_request_alone():
    async def put(*entries):
        store = ResponseStore()
        stored = [await store.put(b"me", "resp_1", entry) for entry in entries]
        return stored, (await store.get(b"me", "resp_1")).response

    def entry(text, run):
        return StoredResponse(text, b"", run)

    assert asyncio.run(put(entry(b"1", "a"), entry(b"2", "a"))) == ([True, True], b"2")
    assert asyncio.run(put(entry(b"1", "a"), entry(b"2", "b"))) == ([True, False], b"1")
    assert asyncio.run(put(entry(b"1", None), entry(b"2", None))) == ([True, False], b"1")


def test_a_resumed_stream_that_finds_no_place_is_refused_before_its_first_piece(tokenizer):
    """So that the refusal sets the status, and another replica may take the stream."""
    sequence = new_sequence(tokenizer)
    pieces = generated(sequence, tokenizer.encode_plain("x = 1"), [1])
    lines = [recorded(0, sequence, piece) for piece in pieces[:-1]]

    def send(record):
        client.receive(protocol.Failed(record.number, protocol.failure_of(QueueFullError("full"))))

    client = EngineClient(send)

    async def first():
        RequestContext(run=Run("key", lines=lines)).enter()
        resumed = RemoteSequence([1], SamplingParams(), [0], tokenizer)
        resumed.prompt = protocol.Prompt([1], {}, "auto")
        return await anext(Serving.merged(Mock(engine=client), [resumed]))

    with pytest.raises(QueueFullError):
        asyncio.run(first())

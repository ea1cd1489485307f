"""Prompts with images in the engine: rows of a tower in place of embeddings, and three rotary positions a token.

The rows are random here; `tests/parity/test_media.py` computes them.
"""

import random
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decoding.prefill import MediaChunk
from dflash_jax.engine import model_runner
from dflash_jax.engine.config import EngineConfig, Speculation
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.executables import Executables
from dflash_jax.engine.media import MediaSpan, PromptMedia
from dflash_jax.engine.prefix_cache import cut_points
from dflash_jax.engine.request import Request
from dflash_jax.models.cache import init_cache
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.drafting import ContextTokens
from dflash_jax.sampling_params import SamplingParams
from tests import tiny
from tests.engine import mock_runner
from tests.engine.load import CAPACITY, engine_for
from tests.engine.mock_runner import CheckedRunner
from tests.helpers import extend, logits
from tools.equality import equal_or_tie
from tools.token_runs import Remembering

PAD, NEW = 59, 12


def prompt_with(parts: list[tuple[int, int] | int], seed: int, hidden: int = 36) -> tuple[list[int], PromptMedia]:
    """A prompt of ``parts``: a number is that many tokens of text, a pair (h, w) an image of so many merged patches."""
    rng, tokens, spans, positions, now = np.random.default_rng(seed), [], [], [], 0
    for part in parts:
        if isinstance(part, int):
            tokens += rng.integers(2, PAD, part).tolist()
            positions.append(np.tile(now + np.arange(part), (3, 1)))
            now += part
            continue
        h, w = part
        rows = rng.standard_normal((h * w, hidden)).astype(np.float32)
        spans.append(MediaSpan(len(tokens), h * w, rows.tobytes()[:16], lambda rows=rows: rows))
        tokens += [PAD] * (h * w)
        grid = np.stack([np.zeros(h * w), np.repeat(np.arange(h), w), np.tile(np.arange(w), h)])
        positions.append(now + grid)
        now += max(h, w)
    array = np.concatenate(positions, axis=1).astype(np.int32)
    return tokens, PromptMedia(tuple(spans), array[:, : spans[-1].end], int(array.max()) + 1 - len(tokens))


PROMPTS = [
    prompt_with([3, (3, 5), 4], 0),
    prompt_with([9, (2, 3), 1, (4, 1), 7], 1),
    # Begins with an image, and is longer than the largest chunk.
    prompt_with([(5, 8), 2, (1, 1), 21], 2),
    prompt_with([20, (6, 2), 2], 3),
]


@dataclass(frozen=True)
class Pair:
    target: Decoder
    plain: Executables
    drafting: Executables
    expected: list[list[int]]


def by_definition(target: Decoder, prompt: list[int], media: PromptMedia, new: int) -> tuple[list[int], list[float]]:
    """Greedy tokens from passes over the whole text, each from empty caches, and how decided each was."""
    rows = {span.start + i: row for span in media.spans for i, row in enumerate(span.rows())}
    table, tokens, margins = np.asarray(target.embed), list(prompt), []
    for _ in range(new):
        total = len(prompt) + new
        x = np.zeros((1, total, 36), np.float32)
        x[0, : len(tokens)] = [rows.get(i, table[t]) for i, t in enumerate(tokens)]
        after = np.tile(np.arange(media.end, total) + media.rope_delta, (3, 1))
        positions = np.concatenate([media.positions, after], axis=1)[:, None]
        cache, zero = init_cache(target.config, 1, total, jnp.float32), jnp.zeros(1, jnp.int32)
        n = jnp.full(1, len(tokens), jnp.int32)
        hidden, _, _ = extend(target, jnp.asarray(x), cache, zero, n, positions=jnp.asarray(positions, jnp.int32))
        scores = np.asarray(logits(target, hidden[0, len(tokens) - 1]))
        low, high = np.sort(scores)[-2:]
        tokens.append(int(scores.argmax()))
        margins.append(float(high - low))
    return tokens[len(prompt) :], margins


def request(i: int, **options) -> Request:
    prompt, media = PROMPTS[i]
    params = SamplingParams(temperature=0.0, max_tokens=NEW, top_k=0, top_p=1.0, min_p=0.0, seed=i)
    params = replace(params, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0)
    return Request(prompt, options.pop("params", params), media=options.pop("media", media), **options)


def run(engine, *requests: Request) -> list[list[int]]:
    for each in requests:
        engine.submit(each)
    while engine.has_work:
        engine.step()
    assert all(each.finish_reason == "length" for each in requests)
    return [each.tokens for each in requests]


@pytest.fixture(scope="module")
def pair():
    target = tiny.target("da", moe="1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "BATCH_SIZES", (4,))
        plain = Executables(target, None)
        alone = [request(i) for i in range(len(PROMPTS))]
        for each in alone:
            run(engine_for(plain, (1,), slots=4, prefix_bytes=0), each)
        drafter = Remembering.of(tiny.drafter(target), alone, wide=8, capacity=CAPACITY)
        yield Pair(target, plain, Executables(target, drafter), [each.tokens for each in alone])


@pytest.mark.parametrize("i", range(len(PROMPTS)))
def test_tokens_behind_images_are_those_of_one_pass_with_embeddings_and_positions(pair, i):
    expected, margins = by_definition(pair.target, *PROMPTS[i], NEW)
    equal_or_tie(expected, pair.expected[i], margins.__getitem__)


def test_text_behind_images_depends_on_pixels_and_positions(pair):
    """What the other tests compare could otherwise be a constant."""
    media = PROMPTS[0][1]
    (span,) = media.spans
    others = [
        replace(media, spans=(replace(span, key=b"x", rows=lambda: -span.rows()),)),
        replace(media, positions=media.positions[[0, 2, 1]]),
        replace(media, rope_delta=media.rope_delta + 5),
    ]
    for other in others:
        engine = engine_for(pair.plain, (1,), slots=4, prefix_bytes=0)
        first = replace(request(0).params, max_tokens=1, logprobs=0)
        values = []
        for each in (media, other):
            wanted = request(0, media=each, params=first)
            engine.submit(wanted)
            events = [event for _ in range(9) if engine.has_work for event in engine.step()]
            values.append([entry["logprob"] for event in events for entry in event.logprobs or []])
        assert abs(values[0][0] - values[1][0]) > 1e-3


def test_images_with_a_drafter_together_in_other_chunks_and_from_the_prefix_cache(pair):
    engine = engine_for(pair.drafting, slots=4, prefix_host_bytes=10**8)
    rng = random.Random(0)
    for turn in range(3):
        # What the device has moves to the host.
        assert engine.prefix_cache.tiers.has_room(engine.prefix_cache.budget)
        order = rng.sample(range(len(PROMPTS)), len(PROMPTS))
        found = run(engine, *(request(i, block_size=rng.choice([1, 3, 8])) for i in order))
        assert found == [pair.expected[i] for i in order]
        assert (engine.statistics.cached_tokens > 0) == (turn > 0)
        assert (engine.prefix_cache.tiers.host.hits > 0) == (turn > 0)
    assert max(yielded for _, _, yielded in engine.statistics.rounds) > 1, "no draft was accepted"
    other = engine_for(pair.plain, (1,), slots=4, prefill_sizes=(4, 16), max_num_batched_tokens=16)
    assert run(other, *map(request, range(len(PROMPTS)))) == pair.expected


def test_text_in_a_slot_that_had_an_image(pair, monkeypatch):
    """The rotary offset of an image must not stay."""
    monkeypatch.setattr(model_runner, "BATCH_SIZES", (1,))
    engine = engine_for(pair.plain, (1,), slots=1, prefix_bytes=0)
    text = [2, 3, 5, 7, 11, 13]
    (before,) = run(engine, Request(text, request(0).params))
    run(engine, request(2))
    assert run(engine, Request(text, request(0).params)) == [before]


@pytest.mark.parametrize("kind", [tiny.drafter, tiny.head], ids=["dflash", "mtp"])
def test_the_context_of_a_prompt_with_images_is_that_of_one_pass(kind, pair):
    """In chunks that divide images. Positions of DFlash are plain indices, those of a head are the target's."""
    drafter, (prompt, media) = kind(pair.target), PROMPTS[1]
    runner = engine_for(Executables(pair.target, drafter), slots=1, prefix_bytes=0).runner
    runner.admit(0, request(1))
    length = len(prompt) - 1
    for start in range(0, length, 8):
        n = min(8, length - start)
        runner.prefill([0], [n], 8, 1, True, MediaChunk(*media.chunk(start, 8, *runner.embedding)))
    x = np.asarray(pair.target.embed)[prompt]
    for span in media.spans:
        x[span.start : span.end] = span.rows()
    tail = np.tile(np.arange(media.end, len(prompt)) + media.rope_delta, (3, 1))
    positions = jnp.asarray(np.concatenate([media.positions, tail], axis=1)[:, None], jnp.int32)
    cache, zero = init_cache(pair.target.config, 1, CAPACITY, jnp.float32), jnp.zeros(1, jnp.int32)
    n = jnp.full(1, length, jnp.int32)
    _, features, _ = extend(pair.target, x[None], cache, zero, n, taps=drafter.taps, positions=positions)
    empty = drafter.init_cache(1, CAPACITY, jnp.float32, runner.settings.draft_window)
    steps = jnp.arange(len(prompt))[None]
    new = ContextTokens(jnp.asarray([prompt]), x[None], features, steps, positions, steps < length)
    expected = jax.jit(type(drafter).extend)(drafter, empty, new)
    for mine, right in zip(jax.tree.leaves(runner.state.draft), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, right, atol=2e-4)


def test_prompt_logprobs_of_a_prompt_with_images(pair):
    engine = engine_for(pair.plain, (1,), slots=4)
    wanted = request(1)
    wanted.params = replace(wanted.params, prompt_logprobs=0)
    assert run(engine, wanted) == [pair.expected[1]]
    assert len(wanted.prompt_entries) == len(wanted.prompt) - 1


def test_equal_tokens_with_other_pixels_share_no_prefix(pair):
    engine = engine_for(pair.plain, (1,), slots=4)
    prompt, media = PROMPTS[3]
    run(engine, request(3))
    before = engine.statistics.cached_tokens
    (span,) = media.spans
    other = replace(media, spans=(replace(span, key=b"another", rows=lambda: -span.rows()),))
    wanted = request(3, media=other)
    run(engine, wanted)
    # Text before the image is shared where a cut lies in it.
    assert wanted.cached <= span.start
    run(engine, again := request(3))
    assert again.cached == len(prompt) - 1
    assert engine.statistics.cached_tokens > before


def test_no_cut_divides_an_image():
    """Also where each of its tokens would open a message."""
    for seed, (_, media) in enumerate(PROMPTS):
        tokens = PROMPTS[seed][0]
        cuts = cut_points(tokens, len(tokens) - 1, frozenset([PAD]), (1, 16), media)
        assert not any(span.start < cut < span.end for span in media.spans for cut in cuts)
        assert cuts[-1] == len(tokens) - 1
    tokens, media = PROMPTS[2]
    assert cut_points(tokens, len(tokens) - 1, frozenset([PAD]), (1, 16))[0] == 16, "the test has no cut to avoid"


def test_a_request_waits_for_the_program_of_images_and_others_do_not():
    runner = CheckedRunner(4)
    runner.allowed = {("prefill", 1, 16, True), ("decode", 1, Speculation(1))}
    engine = Engine(runner, EngineConfig(prefill_sizes=(16,)))
    prompt, media = prompt_with([3, (2, 2), 3], 0, hidden=1)
    waits, goes = mock_runner.request(prompt, media=media), mock_runner.request([1, 2, 3])
    engine.submit(waits)
    engine.submit(goes)
    while not goes.finish_reason:
        engine.step()
    assert waits.prefilled == 0
    runner.allowed.add(("media", 16, True))
    while engine.has_work:
        engine.step()
    assert waits.finish_reason in ("stop", "length")


def test_scores_behind_an_image_wait_for_a_program_of_their_own():
    runner = CheckedRunner(4)
    runner.allowed = {("prefill", 1, 16, True), ("media", 16, True), ("decode", 1, Speculation(1)), ("score",)}
    engine = Engine(runner, EngineConfig(prefill_sizes=(16,)))
    prompt, media = prompt_with([3, (2, 2), 3], 0, hidden=1)
    engine.submit(wanted := mock_runner.request(prompt, media=media, prompt_logprobs=0))
    for _ in range(9):
        engine.step()
    assert wanted.prefilled == 0
    assert engine._prefiller.waiting() == [("media score", wanted)]


def test_a_request_whose_program_cannot_be_compiled_ends_with_an_error():
    runner = CheckedRunner(4)
    runner.allowed, runner.failed = {("prefill", 1, 16, True), ("decode", 1, Speculation(1))}, {"media"}
    engine = Engine(runner, EngineConfig(prefill_sizes=(16,)))
    prompt, media = prompt_with([3, (2, 2), 3], 0, hidden=1)
    engine.submit(wanted := mock_runner.request(prompt, media=media))
    events = []
    while engine.has_work:
        events += engine.step()
    assert wanted.finish_reason == "error"
    assert "cannot be compiled" in str(events[-1].error)


def test_a_text_with_the_same_beginning_does_not_wait_for_the_program_of_images():
    runner = CheckedRunner(4)
    runner.allowed = {("prefill", 1, 16, True), ("decode", 1, Speculation(1)), ("prefix",)}
    spacing = {"cut_spacing": (4, 8), "markers": frozenset([1])}
    engine = Engine(runner, EngineConfig(prefill_sizes=(16,), prefix_bytes=10**6, **spacing))
    prompt, media = prompt_with([300, (2, 2), 3], 0, hidden=1)
    waits, goes = mock_runner.request(prompt, media=media), mock_runner.request(prompt[:290])
    engine.submit(waits)
    engine.submit(goes)
    for _ in range(400):
        engine.step()
    assert waits.prefilled == 0
    assert goes.finish_reason is not None

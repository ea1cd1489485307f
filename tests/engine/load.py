"""Random load for an engine on a real (small) model, and what each request must give."""

import random
from types import SimpleNamespace

import numpy as np

from dflash_jax.decoding.state import Settings
from dflash_jax.engine.config import EngineConfig, speculations_of
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.executables import Executables
from dflash_jax.engine.model_runner import ModelRunner
from dflash_jax.engine.request import Request
from dflash_jax.models.drafting import NO_WINDOW
from dflash_jax.ops.cache import pages_of
from dflash_jax.sampling_params import LOGPROBS_MODES, SamplingParams
from tests import tiny
from tools.equality import Reference, equal_or_tie

MARKER, CAPACITY, SIZES = 1, 96, (8, 32)


def engine_for(
    programs: Executables,
    block_sizes=(1, 8),
    slots: int = 32,
    pages=None,
    draft_window=NO_WINDOW,
    aligned: bool = False,
    **options,
) -> Engine:
    settings = Settings(block_sizes[-1] if aligned else 1, aligned, top_logprobs=5, draft_window=draft_window)
    options = {"prefill_sizes": SIZES, "prefill_batch_tokens": 32, "max_num_batched_tokens": 64} | options
    options.setdefault("cut_spacing", (16, 24))
    options.setdefault("prefix_bytes", 2 * 10**6)
    if pages is None and options["prefix_bytes"]:
        # Twice as many as the slots can use: the others are for prefixes.
        pages = (2 * slots * pages_of(CAPACITY, CAPACITY),) * 2
    options = {"speculations": speculations_of(block_sizes), "markers": frozenset([MARKER])} | options
    return Engine(ModelRunner(programs, slots, CAPACITY, settings, pages), EngineConfig(**options))


def some_requests(seed: int, count: int, vocab: int) -> list[dict]:
    """Prompts of one token to several chunks, with beginnings in common, and options of all kinds."""
    rng = random.Random(seed)

    def tokens(n):
        return [rng.randrange(2, vocab - 2) for _ in range(n)]

    systems = [[MARKER, *tokens(n)] for n in (18, 40)]
    found = []
    for i in range(count):
        prompt = rng.choice([[], [], *systems])
        for _ in range(rng.randrange(3)):
            prompt = [*prompt, MARKER, *tokens(rng.choice([2, 17]))]
        prompt = (prompt or tokens(rng.choice([1, 2, 9, 33])))[:70]
        sampled = rng.random() < 0.6
        params = SamplingParams(
            temperature=rng.choice([0.5, 0.9, 1.3]) if sampled else 0.0,
            top_k=rng.choice([0, 5, 20]),
            top_p=rng.choice([1.0, 0.9]),
            min_p=rng.choice([0.0, 0.05]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.4]),
            presence_penalty=rng.choice([0.0, 0.0, 0.5]),
            logit_bias=rng.choice([{}, {}, {7: 3.0, 9: -2.0}]),
            seed=i,
            max_tokens=rng.choice([1, 2, 10, 24]),
            logprobs=rng.choice([None, None, 0, 3]),
            logprobs_mode=LOGPROBS_MODES[i % len(LOGPROBS_MODES)],
        )
        stops = [] if rng.random() < 0.5 else rng.sample(range(2, vocab), 4)
        found.append({"prompt": prompt, "params": params, "stops": stops})
    return found


def alone(engine: Engine, wanted: list[dict]) -> list[tuple]:
    """(request, its log-probabilities) of each, one after the other."""
    found = []
    for w in wanted:
        request, entries = Request(**w, block_size=1), []
        engine.submit(request)
        while engine.has_work:
            for event in engine.step():
                entries += event.logprobs or []
        found.append((request, entries))
    return found


def margin(target, request: Request, at: int) -> float:
    """How decided the target was about the new token ``at``."""
    p = request.params
    vocab = target.config.vocab_size
    bias = np.zeros((1, vocab))
    for token, value in p.logit_bias.items():
        bias[0, token] = value
    sampling = tiny.sampling(
        1,
        vocab,
        temperature=[p.temperature],
        top_k=[p.top_k],
        top_p=[p.top_p],
        min_p=[p.min_p],
        repetition=[p.repetition_penalty],
        frequency=[p.frequency_penalty],
        presence=[p.presence_penalty],
        seed=[p.seed],
        logit_bias=bias,
    )
    tokens = np.array([request.prompt + request.tokens])
    start = len(request.prompt)
    state = SimpleNamespace(sampling=sampling, prompt_length=[start], tokens=tokens, length=[tokens.shape[1]])
    return Reference(target, state).margin(0, start + at)


def check(target, expected: tuple, found: Request, entries: list[dict]) -> None:
    """Tokens, reason and log-probabilities are those of the request alone, or part at a tie."""
    right, logprobs = expected
    parted = equal_or_tie(right.tokens, found.tokens, lambda at: margin(target, right, at))
    upto = len(right.tokens) if parted is None else parted
    if parted is None:
        assert found.finish_reason == right.finish_reason
    if right.params.wants_logprobs:
        assert len(entries) == len(found.tokens)
        for a, b in zip(logprobs[:upto], entries, strict=False):
            assert a["token_id"] == b["token_id"]
            np.testing.assert_allclose(a["logprob"], b["logprob"], atol=1e-4)
            assert len(a["top"]) == len(b["top"]) == (right.params.logprobs or 0)
            np.testing.assert_allclose(list(a["top"].values()), list(b["top"].values()), atol=1e-4)


def copying_out(engine: Engine, seed: int) -> list[tuple[Request, int]]:
    """Has an engine copy requests out of their slots before most steps.

    Returns:
        (request, slot), to which it adds.
    """
    rng, copied, original = random.Random(seed), [], engine.step

    def step():
        if rng.random() < 0.8:
            engine._collect_all()
            if decoding := [r for r in engine._scheduler.requests if r.tokens and r.is_resident]:
                copied.append((request := rng.choice(decoding), request.slot))
                assert engine._slots.copy_out(request)
        return original()

    engine.step = step
    return copied


def run_last(engine: Engine, wanted: list[dict]) -> None:
    """Runs requests after which nothing comes: their slots have their pages still."""
    for each in wanted:
        engine.submit(Request(**each))
    while engine.has_work:
        engine.step()


def under_load(engine: Engine, target, wanted: list[dict], expected: list[tuple], count: int, seed: int) -> None:
    """``count`` requests drawn from ``wanted`` arrive at random, a tenth are aborted; all others are checked."""
    rng, left, live, entries = random.Random(seed), count, [], {}
    checked, widest = 0, engine.config.largest_block
    blocks = ["auto", "auto", 1, min(3, widest), widest]
    while left or engine.has_work:
        while left and rng.random() < 0.6:
            which = rng.randrange(len(wanted))
            request = Request(**wanted[which], block_size=rng.choice(blocks))
            if rng.random() < 0.3:
                request.draft_window_size, request.draft_sink_size = rng.choice([(4, 0), (9, 2)])
            request.priority = rng.choice([0, 0, 1])
            engine.submit(request)
            live.append((which, request))
            entries[request] = []
            left -= 1
        if live and rng.random() < 0.05:
            engine.abort(rng.choice(live)[1])
        for event in engine.step():
            entries[event.request] += event.logprobs or []
        ended = [pair for pair in live if pair[1].finish_reason]
        live = [pair for pair in live if not pair[1].finish_reason]
        for which, request in ended:
            if request.finish_reason != "abort":
                check(target, expected[which], request, entries.pop(request))
                checked += 1
    assert checked > 0.8 * count

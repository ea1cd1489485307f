"""The engine on real (small) models: under load every request gives what it gives alone."""

import itertools
import os
import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.engine import model_runner, steps
from dflash_jax.engine.config import NO_DRAFTER, Speculation
from dflash_jax.engine.executables import Executables
from dflash_jax.engine.prefix_cache import MIN_MESSAGE
from dflash_jax.engine.request import ReadyMasks, Request
from dflash_jax.engine.token_rules import Rules, ThinkingBudget, TokenRules
from dflash_jax.models.decoder import Decoder
from dflash_jax.ops.cache import KVCache
from dflash_jax.sampling_params import MAX_STOPS, SamplingParams
from tests import tiny
from tests.engine.load import CAPACITY, MARKER, alone, check, engine_for, some_requests, under_load
from tools.token_runs import Remembering

# 400 in make check-long; DFLASH_LOAD=1500 for a long soak.
COUNT = int(os.environ.get("DFLASH_LOAD", "120"))


@pytest.fixture(scope="module", autouse=True)
def few_batch_sizes():
    """Each costs seconds to compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "BATCH_SIZES", (1, 32))
        yield


@dataclass(frozen=True)
class Family:
    """A target with programs that decode plainly and with a drafter, distinct requests, and each one's run alone."""

    target: Decoder
    plain: Executables
    drafting: Executables
    wanted: list
    expected: list


@pytest.fixture(scope="module", params=["hybrid", pytest.param("classic", marks=pytest.mark.long)])
def family(request):
    target = tiny.target("da", moe="1") if request.param == "hybrid" else tiny.target("aa", moe="")
    wanted, plain = some_requests(0, 60, tiny.VOCAB), Executables(target, None)
    expected = alone(engine_for(plain, (1,), prefix_bytes=0), wanted)
    drafter = Remembering.of(tiny.drafter(target), [r for r, _ in expected], wide=8, capacity=CAPACITY)
    return Family(target, plain, Executables(target, drafter), wanted, expected)


# The recurrent state decides, or the other family adds nothing.
hybrid_only = pytest.mark.parametrize("family", ["hybrid"], indirect=True)


@pytest.fixture(scope="module")
def loaded(family):
    """An engine that has seen some load, with any width at any time where a request leaves that open."""
    engine, rng = engine_for(family.drafting), random.Random(0)

    def choose(batch_size, acceptances, allowed=engine.config.speculations, *_):
        return rng.choice(allowed)

    engine.policy.choose = choose
    under_load(engine, family.target, family.wanted, family.expected, COUNT, seed=1)
    return engine


def test_requests_under_load_give_what_they_give_alone(loaded):
    """Many, up to 32 at once: lengths, parameters, widths, windows, priorities, aborts."""
    s = loaded.statistics
    assert sum(s.requests.values()) == COUNT
    assert {spec for _, spec in s.dispatches} == {NO_DRAFTER, Speculation(1), Speculation(8)}
    assert max(yielded for _, _, yielded in s.rounds) == 8
    assert s.cached_tokens > 0.2 * s.prompt_tokens
    assert loaded.prefix_cache.size <= loaded.prefix_cache.budget
    assert loaded.free_slots == 32


def test_no_program_for_another_request(family, loaded):
    """Whatever comes: one program for each number of rows and width, and for each chunk with and without drafter, the
    short ones of one prompt and of several."""
    under_load(loaded, family.target, family.wanted, family.expected, 40, seed=2)
    kinds = Counter(key[0] for key in loaded.runner.programs.compiled)
    most = {"decode": 2 * 3, "prefill": 3 * 2, "save": 2, "load": 2} | dict.fromkeys(
        ("admit", "set_tables", "snapshot", "restore", "empty"), 1
    )
    assert kinds.keys() == most.keys()
    assert all(kinds[name] <= count for name, count in most.items()), kinds


@pytest.mark.parametrize("drafts", [True, False], ids=["drafter", "plain"])
def test_a_known_prefix_changes_nothing(family, drafts):
    """Hits at every boundary, after evictions and aborts, from the device and from the host."""
    programs, widths, sizes = (family.drafting, (1, 8), {}) if drafts else (family.plain, (1,), {})
    for budget, host_budget in ((10**8, 0), (150_000, 0), (150_000, 10**8)):
        engine = engine_for(programs, widths, prefix_bytes=budget, prefix_host_bytes=host_budget)
        for again in range(3):
            for i, w in enumerate(family.wanted[:30]):
                request, entries = Request(**w), []
                engine.submit(request)
                if (i + again) % 4 == 3:
                    engine.step()
                    engine.abort(request)
                while engine.has_work:
                    for event in engine.step():
                        entries += event.logprobs or []
                if request.finish_reason != "abort":
                    check(family.target, family.expected[i], request, entries)
                if 10**8 in (budget, host_budget) and again == 2:
                    # Short ends of prompts go when another prompt begins as they do.
                    assert request.cached >= len(request.prompt) - MIN_MESSAGE
        tiers = engine.prefix_cache.tiers
        assert tiers.device.size <= budget
        assert (tiers.host.hits > 0) == (host_budget > 0)
        sizes[budget, host_budget] = len(engine.prefix_cache)
    assert 0 < sizes[150_000, 0] < sizes[150_000, 10**8] == sizes[10**8, 0]


@hybrid_only
def test_a_stale_state_would_be_noticed(family, monkeypatch):
    """A fault made on purpose: a hit brings back the keys and values, and forgets the recurrent state."""
    real = steps.restore

    def forgetful(target, drafter, state, slots, length, snapshot):
        return real.function(target, drafter, state, slots, length, jax.tree.map(jnp.zeros_like, snapshot))

    monkeypatch.setattr(steps, "restore", replace(real, function=forgetful))
    engine = engine_for(Executables(family.target, None), (1,))
    with pytest.raises(AssertionError):
        under_load(engine, family.target, family.wanted, family.expected, 60, seed=3)


# Messages of 40, 21 and 27 tokens, and their cuts in the reproducible mode.
CONVERSATION = [MARKER, *range(2, 41), MARKER, *range(5, 25), MARKER, *range(3, 29)]
CUTS = (0, 24, 40, 61, 85)
# Where an earlier prompt ends: beside each border of a chunk and each cut, and in between.
ENDS = (8, 9, 24, 25, 26, 33, 40, 41, 42, 48, 49, 50, 57, 60, 61, 62, 63, 70, 86)


@pytest.mark.parametrize("host_budget", [0, 10**8], ids=["device", "host"])
def test_a_full_prefill_and_a_hit_are_the_same_bits(family, host_budget):
    """In the reproducible mode chunks follow from the tokens alone, wherever the prompt before ended."""
    params = SamplingParams(
        temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=1, max_tokens=1
    )

    def prefilled(engine, prompt):
        """How many tokens were cached, and the caches of all positions but the last: that token is in none."""
        engine.submit(r := Request(prompt, params))
        while engine.has_work:
            engine.step()
        return r.cached, [of_row(cache, 0, len(prompt) - 1) for cache in engine.runner.state.target]

    cold = engine_for(family.drafting, prefix_bytes=0, aligned=True)
    warm = engine_for(family.drafting, prefix_bytes=10**8, prefix_host_bytes=host_budget, aligned=True)
    alone = {n: prefilled(cold, CONVERSATION[:n])[1] for n in (*ENDS, len(CONVERSATION))}
    cached = []

    def check(end):
        n, state = prefilled(warm, CONVERSATION[:end])
        jax.tree.map(np.testing.assert_array_equal, alone[end], state)
        cached.append(n)
        if host_budget:
            # What the device has moves to the host.
            assert warm.prefix_cache.tiers.has_room(10**8)
            assert warm.prefix_cache.size == 0

    for end in ENDS:
        warm.prefix_cache.clear()
        check(end)
        check(len(CONVERSATION))
    # The last cut before the other prompt's last token, which is in no cache.
    assert cached == [n for end in ENDS for n in (0, max(cut for cut in CUTS if cut < end))]
    # All that was said before, prompt by prompt.
    warm.prefix_cache.clear()
    for end in ENDS:
        check(end)
    assert cached[-len(ENDS) :] == [max(cut for cut in CUTS if cut <= end) for end in (0, *(n - 1 for n in ENDS[:-1]))]
    assert (warm.prefix_cache.tiers.host.hits > 0) == (host_budget > 0)


def of_row(cache, row: int, length: int):
    """What a cache has of a slot: keys and values of its first positions, or its state."""
    if not isinstance(cache, KVCache):
        return jax.tree.map(lambda x: np.asarray(x[row]), cache)
    k, v = replace(cache, rows=jnp.asarray([row])).read(jnp.arange(cache.table.shape[1])[None])
    return np.asarray(k[0, :, :length]), np.asarray(v[0, :, :length])


class OddOnly(ReadyMasks):
    """Allows odd tokens after even places and even ones after odd places, whatever was drawn."""

    def __init__(self, vocab: int, start: int):
        self.vocab, self.at = vocab, start

    def take(self, tokens):
        self.at += len(tokens)

    def masks(self, drafts):
        ids = np.arange(self.vocab)
        rows = [(ids % 2) == ((self.at + i) % 2) for i in range(len(drafts) + 1)]
        bits = np.zeros((len(rows), -(-self.vocab // 32) * 32), np.uint64)
        bits[:, : self.vocab] = rows
        return (bits.reshape(len(rows), -1, 32) << np.arange(32, dtype=np.uint64)).sum(-1).astype(np.uint32)


@hybrid_only
def test_a_mask_holds_under_speculation_and_leaves_neighbours_alone(family):
    wanted, vocab, texts = family.wanted, tiny.VOCAB, {}
    for widths, width in (((1,), 1), ((1, 8), 8)):
        engine = engine_for(family.drafting if width > 1 else family.plain, widths)
        requests = []
        for i in range(4):
            mask = OddOnly(vocab, len(wanted[i]["prompt"])) if i % 2 == 0 else None
            options = wanted[i] | {"params": replace(wanted[i]["params"], logprobs=None, max_tokens=20), "stops": []}
            requests.append(Request(**options, mask=mask, block_size=width))
            engine.submit(requests[-1])
        while engine.has_work:
            engine.step()
        for i in (0, 2):
            start = len(wanted[i]["prompt"])
            assert [t % 2 for t in requests[i].tokens] == [(start + j) % 2 for j in range(20)]
        texts[width] = [r.tokens for r in requests]
    assert texts[1] == texts[8]


RULES = (
    Rules(min_tokens=9, stop_ids=tuple(range(0, tiny.VOCAB, 2))),
    Rules(bad_words=tuple((a, b) for a in range(0, tiny.VOCAB, 3) for b in range(0, tiny.VOCAB, 2))),
    Rules(allowed=tuple(range(1, tiny.VOCAB, 5))),
    Rules(budget=ThinkingBudget(5, (1,), (2, 3), True)),
)


@hybrid_only
def test_rules_hold_under_speculation(family):
    texts = {}
    for widths, width in (((1,), 1), ((1, 8), 8)):
        engine, requests = engine_for(family.drafting if width > 1 else family.plain, widths), []
        for rules, wanted in zip(RULES, family.wanted, strict=False):
            params = replace(wanted["params"], logprobs=None, max_tokens=24)
            stops = rules.stop_ids[:MAX_STOPS]
            mask = TokenRules(rules, tiny.VOCAB)
            requests.append(Request(**wanted | {"params": params, "stops": stops}, mask=mask, block_size=width))
            engine.submit(requests[-1])
        while engine.has_work:
            engine.step()
        texts[width] = [r.tokens for r in requests]
        least, words, only, thought = texts[width]
        assert not set(least[:9]) & set(RULES[0].stop_ids)
        assert not any(pair in RULES[1].bad_words for pair in itertools.pairwise(words))
        assert set(only) <= set(RULES[2].allowed)
        assert thought[5:7] == [2, 3] or (2, 3) in itertools.pairwise(thought[:6])
    assert texts[1] == texts[8]


def test_log_probabilities_of_named_tokens(family):
    """Those of all tokens, taken at the named ones, beside those of the likeliest."""
    engine, prompt, close = engine_for(family.plain, (1,)), [2, 3, 4, 5], partial(pytest.approx, abs=1e-4)
    params = family.wanted[0]["params"]
    named = (7, 3, tiny.VOCAB - 1)
    requests = [
        Request(prompt, replace(params, logprobs=20, max_tokens=6, prompt_logprobs=20)),
        Request(prompt, replace(params, logprobs=5, logprob_token_ids=named, max_tokens=6, prompt_logprobs=2)),
        Request(prompt, replace(params, logprob_token_ids=named[:1], logprobs=None, max_tokens=6)),
    ]
    entries = {}
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        for event in engine.step():
            entries.setdefault(event.request, []).extend(event.logprobs or [])
    likeliest, several, one = (entries[r] for r in requests)
    assert [list(e["named"]) for e in several] == [list(named)] * 6
    assert [(e["top"], list(e["named"])) for e in one] == [({}, list(named[:1]))] * 6
    for a, b, c in zip(likeliest, several, one, strict=True):
        assert a["logprob"] == close(b["logprob"])
        assert c["named"][7] == close(b["named"][7])
        assert b["top"] == close(dict(list(a["top"].items())[:5]))
        for token in a["top"].keys() & b["named"].keys():
            assert a["top"][token] == close(b["named"][token])
        if b["token_id"] in named:
            assert b["named"][b["token_id"]] == b["logprob"]
    assert not any("named" in e for e in likeliest)
    for a, b in zip(requests[0].prompt_entries, requests[1].prompt_entries, strict=True):
        assert b["top"] == close(dict(list(a["top"].items())[:2]))
        assert list(b["named"]) == list(named)
        for token in a["top"].keys() & b["named"].keys():
            assert a["top"][token] == close(b["named"][token])


def test_a_request_that_cannot_fit_is_refused(family):
    engine = engine_for(family.plain, (1,))
    params = SamplingParams(max_tokens=CAPACITY)
    with pytest.raises(ValueError, match=f"5 prompt tokens and {CAPACITY} new ones are {CAPACITY + 5}"):
        engine.submit(Request([2, 3, 4, 5, 6], params))

"""The law of sampled text under speculation is the target's own, by enumeration over a tiny vocabulary."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from dflash_jax.decoding.state import Settings
from dflash_jax.models.drafting import Proposal
from tests import tiny
from tools.equality import forward, options_of, processed_reference

# 12,000 draws behind each of two prompts.
VOCAB, ROWS, DISPATCHES, NEW = 13, 1000, 24, 4
PROMPTS = [[3], [5, 9, 2, 6, 5]]
OPTIONS = {"temperature": 0.8, "top_p": 0.9}
SETTINGS = Settings(block_size=4)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Bigram:
    """Drafts by the target's embedding and head alone, each from the draft before it, with the row's own noise.

    Implements `Drafting`.
    """

    taps: tuple[int, ...] = ()

    def init_cache(self, *_):
        return ()

    def extend(self, cache, *_):
        return cache

    def propose(self, cache, last, start, block_sizes, size, heads, window):
        drafts = []
        for step in range(size - 1):
            h = heads.embed(last[:, None])
            h = h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True))
            last = heads.draw(heads.logits(h), start[:, None] + 1 + step)[:, 0]
            drafts.append(last)
        return Proposal(jnp.stack(drafts, axis=1))


@pytest.fixture(scope="module")
def target():
    return tiny.target("da", vocab=VOCAB, hidden=16, moe="", seed=2)


@pytest.fixture(scope="module")
def drawn(target):
    """New tokens int [DISPATCHES, ROWS, NEW], row i behind prompt i % 2, and tokens per round."""
    tokens, yielded = [], []
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(ROWS)]
    starts = np.array([len(p) for p in prompts])[:, None]
    for dispatch in range(DISPATCHES):
        rows = tiny.sampling(
            ROWS,
            VOCAB,
            seed=dispatch * ROWS + np.arange(ROWS),
            **{k: np.full(ROWS, v) for k, v in OPTIONS.items()},
        )
        state = tiny.optimised.generate(target, Bigram(), prompts, NEW, SETTINGS, sampling=rows)
        tokens.append(np.take_along_axis(state.tokens, starts + np.arange(NEW), axis=1))
        yielded.append(state.yielded[state.yielded > 0].mean())
    return np.array(tokens), np.mean(yielded)


@pytest.fixture(scope="module")
def law(target):
    """P(t1, t2, t3) behind each prompt, float64 [V, V, V]."""
    options = options_of(tiny.sampling(1, VOCAB, **{k: [v] for k, v in OPTIONS.items()}), 0)

    def probabilities(logits):
        flat = logits.reshape(-1, VOCAB)
        return np.array([scipy.special.softmax(processed_reference(x, options)[0]) for x in flat]).reshape(logits.shape)

    first, second = np.divmod(np.arange(VOCAB**2), VOCAB)
    longest = max(map(len, PROMPTS)) + 2
    texts = np.zeros((len(PROMPTS), VOCAB**2, longest), np.int32)
    for i, prompt in enumerate(PROMPTS):
        n = len(prompt)
        texts[i, :, :n], texts[i, :, n], texts[i, :, n + 1] = prompt, first, second
    logits, _ = forward(target, jnp.asarray(texts.reshape(-1, longest)))
    logits = np.asarray(logits).reshape(len(PROMPTS), VOCAB, VOCAB, longest, VOCAB)
    joint = []
    for i, prompt in enumerate(PROMPTS):
        n = len(prompt)
        p1 = probabilities(logits[i, 0, 0, n - 1])
        p2 = probabilities(logits[i, :, 0, n])
        p3 = probabilities(logits[i, :, :, n + 1])
        joint.append(p1[:, None, None] * p2[:, :, None] * p3)
    return np.array(joint)


def p_value(counts, probabilities) -> float:
    """Of the chi-square test; cells of fewer than 5 expected draws are put together."""
    counts, expected = counts.ravel(), probabilities.ravel() * counts.sum()
    assert counts[expected == 0].sum() == 0
    rare = expected < 5
    cells = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    if cells[1][-1] < 1:
        # Too few to be a cell: the next one takes them.
        cells = [np.append(c[:-2], c[-2:].sum()) for c in cells]
    return float(scipy.stats.chisquare(*cells).pvalue)


def counts_of(tokens, prompt: int, places) -> np.ndarray:
    """How often each combination of new tokens at ``places`` came behind a prompt."""
    mine = tokens[:, prompt :: len(PROMPTS)].reshape(-1, NEW)[:, list(places)]
    return np.bincount(np.ravel_multi_index(mine.T, (VOCAB,) * len(places)), minlength=VOCAB ** len(places))


def test_the_test_means_something(drawn, law):
    """Drafts are accepted and rejected often, and the distribution is neither flat nor a point."""
    tokens, yielded = drawn
    assert tokens.shape == (DISPATCHES, ROWS, NEW)
    assert 1.3 < yielded < 2.5
    np.testing.assert_allclose(law.sum((1, 2, 3)), 1)
    for p in law.sum((1, 2)):
        assert 0.1 < p.max() < 0.9
        assert (p > 0.01).sum() >= 4
    # The chi-square sees a fifth of the mass one token further.
    right = law[0].sum((0, 1))
    assert p_value(counts_of(tokens, 0, [2]), 0.8 * right + 0.2 * np.roll(right, 1)) < 1e-3


@pytest.mark.parametrize("prompt", range(len(PROMPTS)))
@pytest.mark.parametrize("places", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)], ids=lambda x: "".join(map(str, x)))
def test_tokens_follow_the_exact_distribution(drawn, law, prompt, places):
    others = tuple(i for i in range(3) if i not in places)
    assert p_value(counts_of(drawn[0], prompt, places), law[prompt].sum(others)) > 1e-3

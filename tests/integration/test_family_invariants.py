"""The invariants of the loop, for a target of every family."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decoding.state import Settings
from dflash_jax.models.cache import init_cache
from tests import tiny
from tests.families import FAMILIES, VOCAB, family_config
from tests.helpers import commit, extend, random_decoder, random_drafter, tiny_draft_config, tokens_of, verify
from tests.tiny import coach
from tools.equality import Reference, check_same

PROMPTS = [list(range(3, 20)), [5], list(range(40, 50)), [7, 8, 9], [], [60, 3, 9, 9]]
NEW = [20, 30, 11, 31, 0, 17]
# The fourth row ends at the last position of the buffer; prompts cross chunks of 8 and the drafter's window of 6.
CAPACITY = 37
ROWS = len(PROMPTS)
OPTIONS = {
    "temperature": [0.9, 0.0, 0.7, 1.1, 0.0, 0.9],
    "top_k": [20] * ROWS,
    "top_p": [0.9] * ROWS,
    "repetition": [1.2] * ROWS,
    "seed": range(ROWS),
}


# Their layers are those of others, too: of qwen3_5_moe, those of qwen3_next.
IN_OTHERS = ("qwen3", "qwen3_5", "qwen3_5_moe")


@pytest.fixture(
    scope="module", params=[pytest.param(f, marks=[pytest.mark.long] if f in IN_OTHERS else []) for f in FAMILIES]
)
def target(request):
    return random_decoder(family_config(request.param))


@pytest.fixture(scope="module")
def drafter(target):
    return random_drafter(replace(tiny_draft_config(target.config), vocab_size=VOCAB))


def generate(target, drafter, sampled: bool, settings: Settings, **options):
    sampling = tiny.sampling(ROWS, VOCAB, **(OPTIONS if sampled else {}))
    options |= {"sampling": sampling, "capacity": CAPACITY}
    new = [min(n, CAPACITY - len(p)) for n, p in zip(NEW, PROMPTS, strict=True)]
    return tiny.fast.generate(target, drafter, PROMPTS, new, settings, **options)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_the_drafter_changes_nothing(target, drafter, sampled):
    plain = generate(target, None, sampled, Settings(block_size=1))
    assert int(plain.length.max()) == CAPACITY
    reference, runs = Reference(target, plain), np.random.default_rng(0).integers(-1, 8, (ROWS, CAPACITY))
    perfect, mixed = coach(drafter, plain.tokens, 7), coach(drafter, plain.tokens, runs)
    wide = Settings(block_size=8)
    check_same(reference, generate(target, coach(drafter, plain.tokens), sampled, wide))
    for width in range(1, 9, 2):
        check_same(reference, generate(target, mixed, sampled, wide, block_sizes=width))
    quick = generate(target, perfect, sampled, wide)
    check_same(reference, quick)
    assert int(quick.rounds.max()) < int(plain.rounds.max()) / 3


def test_commit_of_a_prefix_equals_extending_by_it(target):
    rng = np.random.default_rng(1)
    rows, before, size = 4, 9, 16
    prompt, block = tokens_of(rng, rows, before, vocab=VOCAB), tokens_of(rng, rows, size, vocab=VOCAB)
    cache = init_cache(target.config, rows, 40, jnp.float32)
    full = jnp.full((rows,), before, jnp.int32)
    _, _, cache = extend(target, prompt, cache, jnp.zeros_like(full), full)
    _, _, record = verify(target, block, cache, full, jnp.full((rows,), size, jnp.int32))
    # What follows sees the caches through what they make of one more token.
    probe, one = tokens_of(rng, rows, 1, vocab=VOCAB), jnp.ones((rows,), jnp.int32)
    for n in ([0, 1, 5, 16], [16, 15, 2, 7]):
        n = jnp.asarray(n, jnp.int32)
        _, _, extended = extend(target, block, cache, full, n)
        hidden = [
            extend(target, probe, c, full + n, one)[0] for c in (commit(target, cache, record, full, n), extended)
        ]
        np.testing.assert_allclose(*hidden, atol=2e-5)
        assert np.isfinite(jax.device_get(hidden[0])).all()

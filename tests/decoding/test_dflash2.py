"""A drafter with a selector in the loop: the text is the target's, and drafts share the noise of its draws."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decoding.batch_init import init_state
from dflash_jax.decoding.sampling import add_noise, process_logits
from dflash_jax.decoding.speculative import propose
from dflash_jax.decoding.state import Settings
from dflash_jax.models.config import ConvSpec, SelectorSpec
from dflash_jax.models.drafter import DraftVocabulary
from tests import tiny
from tests.helpers import random_drafter, tiny_draft_config
from tests.parity import dflash_reference
from tests.tiny import VOCAB, fast, sampling
from tools.equality import Reference, check_same

PROMPTS = [np.random.default_rng(i).integers(0, VOCAB, n).tolist() for i, n in enumerate([1, 38, 7, 20])]
NEW, TOP_K = 20, 6
SETTINGS = Settings(block_size=16, top_logprobs=2)
SAMPLING = {
    "greedy": sampling(4),
    "sampled": sampling(
        4,
        temperature=[0.9, 1.6, 0.7, 0.0],
        top_k=[0, 30, 0, 0],
        top_p=[1.0, 1.0, 0.98, 1.0],
        repetition=[1.0, 1.3, 1.0, 1.4],
        seed=[3, 2**32 - 1, 7, 8],
    ),
}


@pytest.fixture(scope="module")
def target():
    return tiny.target("da", moe="01", seed=3)


@pytest.fixture(scope="module", params=[False, True], ids=["all", "shortlist"])
def drafter(request, target):
    config = tiny_draft_config(target.config, windows=(10, None))
    drafter = random_drafter(replace(config, conv=ConvSpec(2, 4), selector=SelectorSpec(5, TOP_K)), 1)
    # A selector that moves every other choice.
    drafter.selector.gate[...] *= 3
    if request.param:
        ids = jnp.arange(1, VOCAB, 2)
        drafter.vocabulary = DraftVocabulary(ids, target.head_rows(ids), target.backend)
    return drafter


@pytest.mark.parametrize("mode", SAMPLING)
def test_every_width_gives_the_plain_tokens(target, drafter, mode):
    options = {"capacity": 64, "sampling": SAMPLING[mode]}
    plain = fast.generate(target, None, PROMPTS, NEW, Settings(block_size=1, top_logprobs=2), **options)
    for widths in ([16, 2, 8, 5], [3, 16, 1, 16]):
        found = fast.generate(target, drafter, PROMPTS, NEW, SETTINGS, block_sizes=widths, **options)
        check_same(Reference(target, plain), found)


@pytest.mark.parametrize("mode", SAMPLING)
def test_drafts_are_the_walk_over_what_a_draw_compares(target, drafter, mode):
    state = init_state(target, drafter, PROMPTS, NEW, settings=SETTINGS, capacity=64, sampling=SAMPLING[mode])
    state = fast.prefill(target, drafter, state)
    found = np.asarray(jax.jit(propose, static_argnums=3)(target, drafter, state, SETTINGS))
    start = state.length - 1
    last = jnp.take_along_axis(state.tokens, start[:, None], axis=1)
    masks = jnp.full((4, 15), drafter.config.mask_token_id)
    embedded = target.embed_tokens(jnp.concatenate([last, masks], axis=1))
    hidden = jax.jit(type(drafter).block)(drafter, embedded, state.draft, start, state.block_sizes)[:, 1:]
    options, ids = state.sampling, None
    logits = target.logits(hidden)
    if drafter.vocabulary is not None:
        ids = drafter.vocabulary.ids[...]
        logits, options = logits[..., ids], state.sampling.for_tokens(ids)
    noised = add_noise(process_logits(logits, options), options, start[:, None] + 1 + jnp.arange(15)[None], ids)
    scores = np.full((4, 15, VOCAB), -np.inf)
    scores[..., np.arange(VOCAB) if ids is None else np.asarray(ids)] = np.asarray(noised)
    parts = {"hidden_projection.weight": "gate"} | {f"{p}_codebook": p for p in ("predecessor", "successor")}
    tensors = {f"candidate_selector.{name}": getattr(drafter.selector, part)[...] for name, part in parts.items()}
    raw, moved, compared = {"dflash_config": {"selector_top_k": TOP_K}}, 0, 0
    for row in range(4):
        temperature = float(SAMPLING[mode].temperature[row])
        scale, states = 1 / temperature if temperature else 1.0, np.asarray(hidden[row], np.float64)
        want, leads = dflash_reference.chain(raw, tensors, states, int(last[row, 0]), scores[row], scale)
        clear = int(np.argmax([*(np.asarray(leads) < 1e-3), True]))
        assert found[row, 1 : 1 + clear].tolist() == want[:clear]
        moved += (scores[row].argmax(-1)[:clear] != want[:clear]).sum()
        compared += clear
    assert compared > 20
    assert moved > 3

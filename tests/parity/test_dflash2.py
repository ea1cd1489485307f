"""DFlash2 against its restatement in `dflash_reference`: convolutions around the sublayers, and the walked chain."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflash_jax.models.config import ConvSpec, SelectorSpec
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.drafters import abstract_drafter
from dflash_jax.models.drafting import DraftWindow, TargetHeads
from dflash_jax.models.selector import Candidates
from dflash_jax.parallel.sharding import parameter_paths
from tests.helpers import random_drafter, randomise, tiny_config, tiny_draft_config
from tests.parity import dflash_reference
from tests.parity.test_drafter import (
    CAPACITY,
    FULL,
    HIDDEN,
    LENGTHS,
    SLIDING,
    SLOTS,
    TAPS,
    VOCAB,
    WIDTHS,
    assert_blocks,
    build_context,
    config,
    reference_rows,
    saved,
)

CONVOLUTIONS = {"conv_kernel_size": 2, "conv_group_size": 4}
SELECTOR = {"selector_rank": 7, "selector_top_k": 5}
# Each feature alone and together, other sizes than the published ones among them.
CASES = {
    "published": config(
        architectures=["DFlash2DraftModel"],
        layer_types=[SLIDING, SLIDING],
        sliding_window=9,
        is_causal=False,
        dflash_config=CONVOLUTIONS | SELECTOR,
    ),
    "four_taps_of_single_channels": config(
        layer_types=[FULL, SLIDING], sliding_window=7, conv_kernel_size=4, conv_group_size=1
    ),
    "one_group": config(dflash_config={"conv_kernel_size": 3, "conv_group_size": HIDDEN}),
    "selector_alone": config(dflash_config={"selector_rank": 3, "selector_top_k": 8}),
    "factors": config(
        dflash_config=SELECTOR
        | {"output_multiplier": 0.4, "final_logit_softcapping": 9.0, "input_embedding_scale": 3.0}
    ),
    "factors_alone": config(output_multiplier=1.7, final_logit_softcapping=9.0, input_embedding_scale=0.5),
    "more_candidates_than_tokens": config(dflash_config=CONVOLUTIONS | {"selector_rank": 2, "selector_top_k": 64}),
}


@pytest.mark.parametrize("name", ["published", "four_taps_of_single_channels", "one_group", "factors"])
def test_block_of_every_width_equals_the_reference(name, tmp_path):
    assert_blocks(CASES[name], DraftWindow(), tmp_path)


def best(logits, positions, count, ids=None) -> Candidates:
    scores, tokens = jax.lax.top_k(logits, min(count, logits.shape[-1]))
    return Candidates(tokens, scores, jnp.ones(len(logits)))


@pytest.mark.parametrize("name", CASES)
def test_chains_are_those_of_the_reference(name, tmp_path):
    raw, window = CASES[name], DraftWindow()
    drafter, tensors = saved(raw, tmp_path)
    rng = np.random.default_rng(5)
    table, head = (rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32) for _ in range(2))
    features = rng.standard_normal((SLOTS, CAPACITY, TAPS, HIDDEN)).astype(np.float32)
    last = rng.integers(0, VOCAB, SLOTS)
    cache = build_context(drafter, features, LENGTHS, window, CAPACITY, 13, rng)
    heads = TargetHeads(
        lambda tokens: jnp.asarray(table)[tokens],
        lambda hidden: hidden @ head.T,
        lambda logits, positions, ids=None: logits.argmax(-1),
        best,
    )
    run = jax.jit(lambda *args: drafter.propose(*args, SLOTS, heads, window).tokens)
    got = np.asarray(run(cache, jnp.asarray(last), jnp.asarray(LENGTHS), jnp.asarray(WIDTHS)))
    tokens = np.concatenate([last[:, None], np.full((SLOTS, SLOTS - 1), 51)], axis=1)
    compared = differs = 0
    for row, hidden in enumerate(reference_rows(raw, tensors, features, LENGTHS, WIDTHS, table[tokens], window)):
        scores = dflash_reference.logits(raw, hidden.value[1:], head)
        want, leads = dflash_reference.chain(raw, tensors, hidden.value[1:], last[row], scores)
        # A close choice may go either way, and then all later ones.
        clear = int(np.argmax([*(np.asarray(leads) < 1e-3), True]))
        assert got[row, :clear].tolist() == want[:clear]
        compared += clear
        differs += (scores.argmax(-1)[:clear] != want[:clear]).sum()
    assert compared > 90
    assert (differs > 3) == ("selector_top_k" in str(raw))


@pytest.mark.parametrize("drafts", [1, 2, 7, 15])
def test_composed_maps_choose_what_a_loop_chooses(drafts):
    rng = np.random.default_rng(drafts)
    rows, count = 40, 6
    tokens = rng.permuted(np.tile(np.arange(50), (rows, drafts, 1)), axis=-1)[..., :count]
    scores = -np.sort(-rng.standard_normal((rows, drafts, count)).astype(np.float32), axis=-1)
    pairs = rng.standard_normal((rows, drafts, count, count)).astype(np.float32)
    pairs[:, 0] = pairs[:, 0, :1]
    scale = rng.uniform(0.5, 4, rows).astype(np.float32)
    chosen, share = jax.jit(Candidates.walk)(Candidates(*map(jnp.asarray, (tokens, scores, scale))), pairs)
    for row in range(rows):
        before = 0
        for place in range(drafts):
            total = scores[row, place] + scale[row] * pairs[row, place, before]
            before = int(total.argmax())
            assert chosen[row, place] == tokens[row, place, before]
            weights = np.exp(total - total.max())
            np.testing.assert_allclose(share[row, place], weights[before] / weights.sum(), rtol=1e-5)


def test_new_parts_change_nothing_at_first():
    """A drafter that gets convolutions and a selector drafts as before: its states differ in rounding at most."""
    plain = tiny_draft_config(tiny_config())
    richer = dataclasses.replace(plain, conv=ConvSpec(2, 4), selector=SelectorSpec(5, 6))
    without, rng = random_drafter(plain), np.random.default_rng(0)
    arrays = dict(zip(parameter_paths(without), jax.tree.leaves(without), strict=True))
    fresh = Drafter(richer, rngs=nnx.Rngs(0))
    leaves, structure = jax.tree.flatten(fresh)
    paths = zip(parameter_paths(fresh), leaves, strict=True)
    with_parts = jax.tree.unflatten(structure, [arrays.get(path, leaf) for path, leaf in paths])
    shape = (3, 9, plain.hidden_size)
    embedded = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    args = (jnp.zeros(3, jnp.int32), jnp.full(3, 9, jnp.int32))
    states = [np.asarray(d.block(embedded, d.init_cache(3, 32, jnp.float32), *args)) for d in (with_parts, without)]
    np.testing.assert_allclose(*states, rtol=0, atol=1e-5)
    candidates = best(jnp.asarray(rng.standard_normal((3, 8, 50)), jnp.float32), None, 6)
    hidden = jnp.asarray(states[0][:, 1:])
    chosen, _ = with_parts.selector.choose(hidden, jnp.arange(3), candidates, candidates.tokens)
    np.testing.assert_array_equal(chosen, candidates.tokens[..., 0])


def test_a_place_reaches_no_other_sequence_and_none_before_it():
    draft = dataclasses.replace(tiny_draft_config(tiny_config(), windows=(5,)), conv=ConvSpec(3, 4))
    drafter = randomise(abstract_drafter(draft), 3)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, 8, draft.hidden_size)).astype(np.float32)
    other = x.copy()
    other[0, 4] += 1
    layer = drafter.layers[0]
    run = jax.jit(lambda x: layer.attention_conv.around(x, layer.input_norm, lambda v: 2 * v))
    moved = np.abs(np.asarray(run(x)) - np.asarray(run(other))).max(-1) > 1e-6
    assert np.argwhere(moved).tolist() == [[0, 4], [0, 5], [0, 6], [0, 7]]

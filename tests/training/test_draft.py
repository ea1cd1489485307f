"""The drafter's training pass: equal to decoding, blind to the future, weighted as the paper says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import random_decoder, random_drafter, tiny_config, tiny_draft_config

from dflash_jax.models.drafter import Drafter
from dflash_jax.training.draft import GAMMA, block_states, draft_loss, sample_anchors
from dflash_jax.training.evaluation import is_degenerate

T, W = 40, 16


@pytest.fixture(scope="module")
def pair():
    target = random_decoder(tiny_config("da"))
    return target, random_drafter(tiny_draft_config(target.config, windows=(9, None)))


@pytest.fixture(scope="module")
def text(pair):
    target, drafter = pair
    tokens = jax.random.randint(jax.random.key(0), (2, T), 0, target.config.vocab_size)
    return tokens, jax.jit(lambda t, x: t(x, drafter.taps))(target, tokens)[1]


def blocks(drafter: Drafter, tokens, anchors):
    mask = jnp.full((*anchors.shape, W), drafter.config.mask_token_id)
    return mask.at[..., 0].set(jnp.take_along_axis(tokens, anchors, 1))


def test_training_equals_decoding(pair, text):
    target, drafter = pair
    tokens, features = text
    anchors = jnp.array([[0, 7, 33, T - 1], [1, 2, 25, 30]])
    embedded = target.embed_tokens(blocks(drafter, tokens, anchors))
    trained = jax.jit(block_states)(drafter, features, embedded, anchors)

    @jax.jit
    def decoded(features, embedded, anchor):
        cache = drafter.init_cache(1, 64, jnp.float32)
        steps = jnp.arange(T)[None]
        cache = drafter.extend(cache, features[None], None, steps, steps < anchor)
        return drafter.block(embedded[None], cache, anchor[None], jnp.array([W]))[0]

    for row in range(2):
        for i in range(4):
            expected = decoded(features[row], embedded[row, i], anchors[row, i])
            np.testing.assert_allclose(trained[row, i], expected, atol=2e-5)


def test_a_block_knows_nothing_from_its_anchor_on(pair, text):
    target, drafter = pair
    tokens, features = text
    anchors = jnp.array([[12], [20]])
    embedded = target.embed_tokens(blocks(drafter, tokens, anchors))
    states = jax.jit(block_states)
    before = states(drafter, features, embedded, anchors)
    later = features.at[0, 12:].add(3.0).at[1, 20:].add(3.0)
    np.testing.assert_array_equal(states(drafter, later, embedded, anchors), before)
    earlier = features.at[0, 11].add(3.0)
    assert jnp.abs(states(drafter, earlier, embedded, anchors)[0] - before[0]).max() > 1e-3


def test_blocks_do_not_see_one_another(pair, text):
    target, drafter = pair
    tokens, features = text
    anchors = jnp.array([[5, 18], [9, 9]])
    embedded = target.embed_tokens(blocks(drafter, tokens, anchors))
    states = jax.jit(block_states)
    before = states(drafter, features, embedded, anchors)
    after = states(drafter, features, embedded.at[:, 1].add(1.0), anchors)
    np.testing.assert_array_equal(after[:, 0], before[:, 0])
    assert jnp.abs(after[:, 1] - before[:, 1]).max() > 1e-3


def test_anchors_are_distinct_and_lie_where_they_may():
    mask = np.zeros((3, 30), bool)
    mask[0, 5:15], mask[1, [3, 9, 10]], mask[2] = True, True, True
    anchors, valid = map(np.asarray, sample_anchors(jax.random.key(1), jnp.asarray(mask), 12))
    assert set(anchors[0][valid[0]]) == set(range(5, 14))
    assert set(anchors[1][valid[1]]) == {9}
    assert valid[2].all()
    assert len(set(anchors[2])) == 12
    other, _ = sample_anchors(jax.random.key(2), jnp.asarray(mask), 12)
    assert set(np.asarray(other)[2]) != set(anchors[2])


@pytest.mark.parametrize(("slots", "soft"), [(W, False), (8, False), (W, True)])
def test_loss_against_a_plain_restatement(pair, text, slots, soft):
    target, drafter = pair
    tokens, features = text
    mask = np.ones((2, T), bool)
    mask[0, :6], mask[1, 30:] = False, False
    key, count = jax.random.key(4), 5
    loss = jax.jit(draft_loss, static_argnums=(5, 6, 7))
    loss = float(loss(drafter, target, tokens, jnp.asarray(mask), key, count, None if slots == W else slots, soft))
    anchors, valid = sample_anchors(key, jnp.asarray(mask), count)
    embedded = target.embed_tokens(blocks(drafter, tokens, anchors)[..., :slots])
    states = block_states(drafter, features, embedded, anchors)
    logs = np.asarray(jax.nn.log_softmax(target.logits(states)), np.float64)
    teacher = np.asarray(jax.nn.softmax(target.logits(target(tokens)[0])), np.float64)
    total = weight = 0.0
    for row in range(2):
        for i in np.flatnonzero(valid[row]):
            for k in range(1, slots):
                at = int(anchors[row, i]) + k
                if at < T and mask[row, at]:
                    w = np.exp(-(k - 1) / GAMMA[slots])
                    label = teacher[row, at - 1] if soft else np.eye(logs.shape[-1])[int(tokens[row, at])]
                    total -= w * (label @ logs[row, i, k])
                    weight += w
    assert abs(loss - total / weight) < 1e-4


def test_repetition_is_told_from_text():
    assert is_degenerate([1, 2, 3] * 20)
    assert not is_degenerate(list(range(60)))
    assert not is_degenerate([1, 1])

"""The drafter's training pass: equal to decoding, blind to the future, weighted as it says."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.checkpoint.load import load_drafter, load_target
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.models.config import ConvSpec
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.drafting import ContextTokens
from dflash_jax.ops.backend import XLA
from dflash_jax.training import step
from dflash_jax.training.blocks import block_states, sample_anchors
from dflash_jax.training.evaluation import is_degenerate
from dflash_jax.training.losses import Head, Loss
from dflash_jax.training.step import Batch, Recipe, batch_sums
from tests.float64 import Exact, assert_as_near, assert_sum_near, in_both_of
from tests.helpers import random_decoder, random_drafter, tiny_config, tiny_draft_config

T, W = 40, 16
# Documents of the second row; the first is one.
LENGTHS = (11, 2, 27)
STARTS = np.stack([np.zeros(T, np.int32), np.repeat([0, 11, 13], LENGTHS).astype(np.int32)])
# Tokens of a loss over part of the vocabulary.
KEPT = np.arange(3, 90, 4)


@pytest.fixture(scope="module", params=["sliding and full"])
def pair(request):
    target = random_decoder(tiny_config("da"))
    config = tiny_draft_config(target.config, windows=(9, None))
    if request.param == "causal":
        config = replace(config, layers=tuple(replace(spec, causal=not spec.causal) for spec in config.layers))
    if request.param == "convolutions":
        config = replace(config, conv=ConvSpec(3, 4), embedding_scale=1.5)
    return target, random_drafter(config)


# What a block sees; the losses are made of its states, whatever these are.
with_every_mask = pytest.mark.parametrize("pair", ["sliding and full", "causal", "convolutions"], indirect=True)


@pytest.fixture(scope="module")
def text(pair):
    target, drafter = pair
    tokens = jax.random.randint(jax.random.key(0), (2, T), 0, target.config.vocab_size)
    return tokens, *jax.jit(lambda x, s: target(x, drafter.taps, s))(tokens, STARTS)


def blocks(drafter: Drafter, tokens, anchors):
    mask = jnp.full((*anchors.shape, W), drafter.config.mask_token_id)
    return mask.at[..., 0].set(jnp.take_along_axis(tokens, anchors, 1))


@with_every_mask
def test_block_logits_of_training_equal_those_of_decoding(pair, text):
    assert_training_is_decoding(*pair, text[0], text[2], pair)


def test_training_equals_decoding_of_a_trained_drafter():
    target = load_target(TINY / "target")
    drafter = load_drafter(TINY / "draft", target=target.config)
    plain = [
        load_target(TINY / "target", backend=XLA),
        load_drafter(TINY / "draft", target=target.config, backend=XLA),
    ]
    text = Tokenizer(TINY / "target").encode(
        "def clamp(value, low, high):\n    return max(low, min(value, high))\n" * 4
    )
    tokens = jnp.asarray(text[: 2 * T]).reshape(2, T)
    features = jax.jit(lambda x, s: target(x, drafter.taps, s))(tokens, STARTS)[1]
    assert_training_is_decoding(target, drafter, tokens, features, plain)


def assert_training_is_decoding(target, drafter, tokens, features, plain):
    """Every slot of every block, alone in a row or packed, is what decoding computes for that document alone.
    ``plain``: the same models, without kernels. Behind a document are zeros, which decoding does not see: all have the
    length of one program."""
    anchors = jnp.array([[0, 7, 33, T - 1], [1, 12, 25, 30]])
    embedded = target.embed_tokens(blocks(drafter, tokens, anchors))
    trained = jax.jit(block_states)(drafter, features, embedded, anchors, STARTS)
    trained = jax.jit(target.logits)(trained)

    @jax.jit
    def decoded(target, drafter, tokens, embedded, anchor):
        features = target(tokens[None], drafter.taps)[1]
        cache = drafter.init_cache(1, 64, jnp.float32)
        steps = jnp.arange(len(tokens))[None]
        new = ContextTokens(tokens[None], target.embed_tokens(tokens[None]), features, steps, steps, steps < anchor)
        cache = drafter.extend(cache, new)
        return target.logits(drafter.block(embedded[None], cache, anchor[None], jnp.array([W]))[0])

    # NumPy's arrays, which are sliced without a compilation.
    anchors, tokens, embedded, trained = map(np.asarray, (anchors, tokens, embedded, trained))
    for row in range(2):
        for i in range(4):
            start = int(STARTS[row, anchors[row, i]])
            length, own = np.sum(STARTS[row] == start), np.zeros(T, np.int32)
            own[:length] = tokens[row, start : start + length]
            assert_as_near(trained[row, i], decoded, *plain, own, embedded[row, i], anchors[row, i] - start)


@with_every_mask
def test_a_block_knows_nothing_from_its_anchor_on(pair, text):
    target, drafter = pair
    tokens, _, features = text
    anchors = jnp.array([[12], [20]])
    embedded = target.embed_tokens(blocks(drafter, tokens, anchors))
    states = jax.jit(block_states)
    before = states(drafter, features, embedded, anchors, STARTS)
    later = features.at[0, 12:].add(3.0).at[1, 20:].add(3.0).at[1, :13].add(3.0)
    np.testing.assert_array_equal(states(drafter, later, embedded, anchors, STARTS), before)
    earlier = features.at[0, 11].add(3.0)
    assert jnp.abs(states(drafter, earlier, embedded, anchors, STARTS)[0] - before[0]).max() > 1e-3


@with_every_mask
def test_blocks_do_not_see_one_another(pair, text):
    target, drafter = pair
    tokens, _, features = text
    anchors = jnp.array([[5, 18], [9, 9]])
    embedded = target.embed_tokens(blocks(drafter, tokens, anchors))
    states = jax.jit(block_states)
    before = states(drafter, features, embedded, anchors)
    after = states(drafter, features, embedded.at[:, 1].add(1.0), anchors)
    np.testing.assert_array_equal(after[:, 0], before[:, 0])
    assert jnp.abs(after[:, 1] - before[:, 1]).max() > 1e-3


def test_anchors_are_distinct_and_lie_where_they_may():
    mask, starts = np.zeros((4, 30), bool), np.zeros((4, 30), np.int32)
    mask[0, 5:15], mask[1, [3, 9, 10]], mask[2], mask[3] = True, True, True, True
    starts[3, 10:], starts[3, 11:] = 10, 11
    anchors, valid = map(np.asarray, sample_anchors(jax.random.key(1), jnp.asarray(mask), starts, 12))
    assert set(anchors[0][valid[0]]) == set(range(5, 14))
    assert set(anchors[1][valid[1]]) == {9}
    assert valid[2].all()
    assert len(set(anchors[2])) == 12
    assert all(np.all(np.diff(a) >= 0) for a in anchors)
    other, _ = sample_anchors(jax.random.key(2), jnp.asarray(mask), starts, 12)
    assert set(np.asarray(other)[2]) != set(anchors[2])
    every, valid = map(np.asarray, sample_anchors(jax.random.key(1), jnp.asarray(mask), starts, 30))
    # The last token of a document has none behind it.
    assert set(every[3][valid[3]]) == set(range(29)) - {9, 10}


def head_of(target, kept=None) -> Head:
    return Head.over(target.backend, target.embed[...] if target.config.tied_embeddings else target.head[...], kept)


def restated(loss: Loss, logs, teacher, labels, learned):
    """(losses, weights) of one block's slots by hand: log-probabilities [K, V] of the drafter's and of the target's."""
    losses, weights = [], []
    for k in range(len(labels)):
        if not learned[k]:
            continue
        q = np.exp(logs[k])
        p = np.exp(teacher[k])
        worth = np.exp(-k / loss.gamma)
        if loss.weights == "d-pace":
            mixed = [(1 - loss.alpha) * np.exp(logs[i, labels[i]]) + loss.alpha for i in range(len(labels))]
            upto = [np.prod(mixed[: m + 1]) for m in range(len(labels)) if learned[m]]
            worth = sum(upto[k:])
        value = -logs[k, labels[k]]
        if loss.kind != "cross-entropy":
            value = np.sum(p * (teacher[k] - logs[k]))
        if loss.kind == "hybrid":
            overlap = np.sum(np.minimum(p, q))
            share = np.exp(-loss.eta * overlap)
            value = share * value + (1 - share) * 0.5 * np.sum(np.abs(p - q))
        losses.append(worth * value)
        weights.append(worth)
    return losses, weights


def over(logits, kept, labels):
    """Log-probabilities [K, V] by hand, of the kept tokens and each slot's label only."""
    if kept is not None:
        out = np.ones(logits.shape, bool)
        out[:, kept] = False
        out[np.arange(len(labels)), labels] = False
        logits = np.where(out, -1e9, logits)
    logits = np.asarray(logits, np.float64)
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize(
    ("slots", "kind", "kept", "weights"),
    [
        (W, "cross-entropy", None, "decay"),
        (W, "cross-entropy", KEPT, "d-pace"),
        (8, "kl", KEPT, "decay"),
        (8, "kl", None, "d-pace"),
        (8, "hybrid", None, "decay"),
        (8, "hybrid", KEPT, "d-pace"),
    ],
)
def test_loss_against_a_plain_restatement(pair, text, slots, kind, kept, weights):
    target, drafter = pair
    tokens, hidden, features = text
    mask = np.ones((2, T), bool)
    mask[0, :6], mask[0, 22:30], mask[1, 36:] = False, False, False
    key, count = jax.random.key(4), 7
    recipe = Recipe(Loss(kind, weights, gamma=5.0, chunk=3), count, slots)
    batch = Batch(tokens, jnp.asarray(mask), jnp.asarray(STARTS), features, hidden)
    run = jax.jit(lambda d, b: batch_sums(d, target.embed_tokens, head_of(target, kept), b, key, recipe))
    sums = run(drafter, batch)
    anchors, valid = sample_anchors(key, batch.loss_mask, batch.starts, count)
    embedded = target.embed_tokens(blocks(drafter, tokens, anchors)[..., :slots])

    def logits_of(target, drafter, features, embedded, hidden):
        return target.logits(block_states(drafter, features, embedded, anchors, STARTS)), target.logits(hidden)

    logits, taught = in_both_of(logits_of, target, drafter, features, embedded, hidden)
    terms, seen, right = {"value": ([], []), "single": ([], [])}, 0.0, 0.0
    for row in range(2):
        for i in np.flatnonzero(valid[row]):
            places = int(anchors[row, i]) + np.arange(1, slots)
            ok = [p < T and mask[row, p] and STARTS[row, p] == STARTS[row, places[0] - 1] for p in places]
            learned = np.cumprod(ok).astype(bool)
            places = np.minimum(places, T - 1)
            labels = np.asarray(tokens[row])[places]
            for kind_of, (losses, weights_of) in terms.items():
                drafted, wanted = (getattr(x, kind_of) for x in (logits[row, i, 1:], taught[row, places - 1]))
                drafted, wanted = (over(x, kept, labels) for x in (drafted, wanted))
                more = restated(recipe.loss, drafted, wanted, labels, learned)
                losses += more[0]
                weights_of += more[1]
            seen += learned.sum()
            right += (learned & (drafted.argmax(-1) == labels)).sum()
    losses, worths = (Exact(*(np.array(terms[name][i]) for name in ("value", "single"))) for i in range(2))
    assert_sum_near(float(sums.loss), losses, "loss")
    assert_sum_near(float(sums.weight), worths, "weight")
    assert (float(sums.seen.sum()), float(sums.right.sum()), float(sums.anchors)) == (seen, right, valid.sum())


def test_the_distance_to_the_targets_states_is_added(pair, text):
    target, drafter = pair
    tokens, hidden, features = text
    batch, key = Batch(tokens, jnp.ones((2, T), bool), jnp.asarray(STARTS), features, hidden), jax.random.key(0)

    def sums(match: float):
        recipe = Recipe(Loss(gamma=1e9, match=match, chunk=2), 5, 8)
        return jax.jit(lambda d, b: batch_sums(d, target.embed_tokens, head_of(target), b, key, recipe))(drafter, batch)

    anchors, valid = sample_anchors(key, batch.loss_mask, batch.starts, 5)
    embedded = target.embed_tokens(blocks(drafter, tokens, anchors)[..., :8])
    states = in_both_of(lambda *x: block_states(*x, anchors, STARTS), drafter, features, embedded)
    plain = float(sums(0.0).loss)
    terms = Exact([plain], [plain])
    for row, i in zip(*np.nonzero(valid), strict=True):
        start = int(anchors[row, i])
        for k in range(1, 8):
            if start + k >= T or STARTS[row, start + k] != STARTS[row, start]:
                break
            wanted = np.asarray(hidden[row, start + k - 1], np.float64)
            for each, state in ((terms.value, states.value), (terms.single, states.single)):
                each.append(0.5 * np.sum((state[row, i, k] - wanted) ** 2) / np.sum(wanted**2))
    assert len(terms.value) > 20
    assert_sum_near(float(sums(0.5).loss), Exact(np.array(terms.value), np.array(terms.single)), "loss")


def test_chunks_of_the_vocabulary_do_not_change_the_gradients(pair, text, monkeypatch):
    target, drafter = pair
    tokens, hidden, features = text
    batch, key = Batch(tokens, jnp.ones((2, T), bool), jnp.asarray(STARTS), features, hidden), jax.random.key(0)
    # float64 would draw others.
    drawn = sample_anchors(key, batch.loss_mask, batch.starts, 6)
    monkeypatch.setattr(step, "sample_anchors", lambda *_: drawn)

    def gradients(chunk: int):
        recipe = Recipe(Loss("hybrid", chunk=chunk), 6, 8)

        def value(drafter, target, batch):
            return batch_sums(drafter, target.embed_tokens, head_of(target), batch, key, recipe).loss

        return jax.jit(jax.grad(value))

    found = gradients(6)(drafter, target, batch)
    assert all(np.any(g) for g in jax.tree.leaves(found))
    assert_as_near(found, gradients(1), drafter, target, batch)


def test_repetition_is_told_from_text():
    assert is_degenerate([1, 2, 3] * 20)
    assert not is_degenerate(list(range(60)))
    assert not is_degenerate([1, 1])

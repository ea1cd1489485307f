"""Training of an MTP head: its pass is that of decoding, documents do not mix, and a run leaves a head that drafts."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import LLM, InputError, SamplingParams
from dflash_jax.checkpoint.files import TensorFiles
from dflash_jax.models.drafting import TargetHeads
from dflash_jax.options.train import TrainConfig
from dflash_jax.training import run
from dflash_jax.training.drafters import MAX_MTP_BLOCK_SIZE, raw_config
from dflash_jax.training.losses import Head, Loss
from dflash_jax.training.recurrence import step_states
from dflash_jax.training.step import Batch, Recipe, batch_sums
from tests import tiny
from tests.mtp_context import one_pass
from tests.tiny import VOCAB
from tests.training.talks import TALKS

T, STEPS = 24, 3
# Two documents in a row.
STARTS = jnp.asarray([[0] * 10 + [10] * 14])


@pytest.fixture(scope="module")
def pair():
    target = tiny.target("da", moe="1")
    return target, tiny.head(target)


@pytest.fixture(scope="module")
def tokens():
    return jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (1, T)), jnp.int32)


@jax.jit
def states_of(target, head, tokens, anchors, starts):
    features = target(tokens, head.taps, starts)[1]
    return step_states(head, features, target.embed_tokens, tokens, anchors, starts, STEPS)


@jax.jit
def first_draft_logits(target, head, tokens, start):
    """Logits of decoding's first step behind the token at ``start``."""
    seen = []

    def draw(logits, positions, ids=None):
        seen.append(logits[0, 0])
        return jnp.zeros(logits.shape[:2], jnp.int32)

    heads = TargetHeads(target.embed_tokens, target.logits, draw, lambda *_: None)
    cache, last = one_pass(target, head, tokens, start), jnp.take_along_axis(tokens, start[:, None], 1)[:, 0]
    head.propose(cache, last, start, jnp.full_like(start, 2), 2, heads)
    return seen[0]


def test_the_first_step_is_that_of_decoding_in_each_document(pair, tokens):
    target, head = pair
    anchors = jnp.asarray([[1, 7, 11, 22]])
    trained = jax.jit(type(target).logits)(target, states_of(target, head, tokens, anchors, STARTS)[0, :, 0])
    for i, anchor in enumerate(anchors[0].tolist()):
        begin = int(STARTS[0, anchor])
        own = np.pad(tokens, ((0, 0), (0, T)))[:, begin : begin + T]
        own[:, 14:] = 0
        decoded = first_draft_logits(target, head, own, np.array([anchor - begin], np.int32))
        np.testing.assert_allclose(trained[i], decoded, atol=1e-3)


def test_later_steps_of_a_document_do_not_depend_on_the_row_around_it(pair, tokens):
    target, head = pair
    packed = states_of(target, head, tokens, jnp.asarray([[12, 19]]), STARTS)
    alone = jnp.concatenate([tokens[:, 10:], tokens[:, :10]], axis=1)
    own = states_of(target, head, alone, jnp.asarray([[2, 9]]), jnp.asarray([[0] * 14 + [14] * 10]))
    np.testing.assert_allclose(packed, own, atol=1e-4)


def test_every_weight_but_the_targets_norm_learns(pair, tokens):
    target, head = pair
    features = jax.jit(lambda t, x: t(x, head.taps, STARTS)[1])(target, tokens)
    batch = Batch(tokens, jnp.ones((1, T), bool), STARTS, features)
    recipe = Recipe(Loss(gamma=2.0), 8, STEPS + 1)
    table = Head.over(target.backend, target.head[...])

    @jax.jit
    def gradient(head):
        key = jax.random.key(0)
        return jax.grad(lambda h: batch_sums(h, target.embed_tokens, table, batch, key, recipe).loss)(head)

    found = gradient(head)
    assert not np.asarray(found.final_norm.weight[...]).any()
    rest = [x for x in jax.tree.leaves(found) if x is not found.final_norm.weight.get_value()]
    assert sum(bool(np.asarray(x).any()) for x in rest) == len(jax.tree.leaves(head)) - 1


def test_the_first_token_of_a_document_begins_no_block(pair, tokens):
    """There is no hidden state before it."""
    target, head = pair
    features = jax.jit(lambda t, x: t(x, head.taps, STARTS)[1])(target, tokens)
    batch = Batch(tokens, jnp.ones((1, T), bool), STARTS, features)
    recipe, table = Recipe(Loss(), T - 1, 2), Head.over(target.backend, target.head[...])
    sums = jax.jit(lambda h, b: batch_sums(h, target.embed_tokens, table, b, jax.random.key(0), recipe))(head, batch)
    # Of 24 tokens the last of each document has no successor, and the first of each no hidden state.
    assert float(sums.anchors) == T - 4


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "talks.jsonl"
    path.write_text("".join(json.dumps({"messages": t}) + "\n" for t in TALKS))
    return TrainConfig(
        mtp=True, data=(str(path),), sequence_length=96, rows=2, anchors=8, steps=4, save_every=2, log_every=1,
        learning_rate=1e-3, output=str(path.parent / "run"),
    )  # fmt: skip


def test_a_run_leaves_a_head_that_drafts_losslessly(config):
    said: list[str] = []
    assert run.fit(config, said.append) == (4, 4)
    directory = config.directory / "draft"
    names = set(TensorFiles(directory))
    assert len([n for n in names if n.startswith("mtp.")]) == 19
    assert names - {n for n in names if n.startswith("mtp.")} == {"model.norm.weight"}
    losses = [float(line.split(",")[1]) for line in (config.directory / "metrics.csv").read_text().splitlines()[1:]]
    assert len(losses) == 4
    llm = LLM(None, directory)
    assert llm.drafting_method == "NEXTN"
    params = SamplingParams(max_tokens=16)
    (found,), (plain,) = (llm.generate(["def f("], params, size) for size in (4, 1))
    assert found.token_ids == plain.token_ids
    assert found.acceptance_lengths


def test_a_block_that_no_head_has_is_refused(config):
    wrong = replace(config, block_size=MAX_MTP_BLOCK_SIZE + 1)
    with pytest.raises(InputError, match="block_size 9: it must be 2 to 8 with mtp"):
        raw_config(wrong, LLM(None, None))

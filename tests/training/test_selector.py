"""Training of selectors and Markov heads: losses restated, parts that change nothing at first, and steps that learn."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import LLM, InputError, SamplingParams
from dflash_jax.checkpoint.load import load_drafter
from dflash_jax.models.config import ConvSpec, SelectorSpec
from dflash_jax.models.families import dflash
from dflash_jax.models.packing import unpack_weights
from dflash_jax.ops.backend import XLA
from dflash_jax.options.train import TrainConfig
from dflash_jax.parallel.sharding import parameter_paths
from dflash_jax.training.drafters import export, raw_config, starting_drafter, with_fresh_parts
from dflash_jax.training.losses import Choice, Head, Loss, block_loss
from dflash_jax.training.optimiser import in_part, matrix_axes, optimiser
from dflash_jax.training.step import Batch, Recipe, Trainer
from tests.helpers import random_drafter, tiny_config, tiny_draft_config
from tools.bundled_pair import without_selector

SHAPE, VOCAB = (2, 5, 6), 101
KEPT = np.arange(3, 90, 4)
SELECTOR = SelectorSpec(7, 5)


def drafter_with(**parts):
    return random_drafter(replace(tiny_draft_config(tiny_config()), **parts), 2)


@pytest.fixture
def blocks():
    rng = np.random.default_rng(0)
    states = rng.standard_normal((*SHAPE, 36)).astype(np.float32)
    head = rng.standard_normal((VOCAB, 36)).astype(np.float32)
    labels, before = rng.integers(0, VOCAB, SHAPE), rng.integers(0, VOCAB, SHAPE)
    before[..., 1:] = labels[..., :-1]
    # Labels that are often candidates.
    often = (states @ head.T).argmax(-1)
    labels = np.where(rng.random(SHAPE) < 0.4, often, labels)
    before[..., 1:] = labels[..., :-1]
    learned = np.cumprod(rng.random(SHAPE) < 0.9, axis=-1).astype(bool)
    return states, head, labels, before, learned


@pytest.mark.parametrize("kept", [None, KEPT], ids=["all", "frequent"])
@pytest.mark.parametrize("kind", ["cross-entropy", "kl"])
def test_the_selectors_loss_is_that_of_what_is_right_among_the_candidates(blocks, kind, kept):
    """The true token, or with a teacher its distribution; nothing where the true token is no candidate."""
    states, matrix, labels, before, learned = blocks
    drafter, loss = drafter_with(selector=SELECTOR), Loss(kind, gamma=3.0, chunk=2)
    teacher = np.random.default_rng(1).standard_normal(states.shape).astype(np.float32)
    head = Head.over(XLA, jnp.asarray(matrix), kept)
    sums = jax.jit(lambda *x: block_loss(loss, head, *x, choice=Choice(drafter, jnp.asarray(before))))(
        states, labels, learned, teacher
    )
    alone = jax.jit(lambda *x: block_loss(loss, head, *x))(states, labels, learned, teacher)
    part = drafter.selector
    gate, first, second = (np.asarray(x[...], np.float64) for x in (part.gate, part.predecessor, part.successor))
    expected = recalled = accepted = 0.0
    for row, block in np.ndindex(SHAPE[:2]):
        path, is_right = before[row, block, 0], True
        for k in range(SHAPE[2]):
            state, label = states[row, block, k].astype(np.float64), labels[row, block, k]
            tokens = np.arange(VOCAB) if kept is None else np.union1d(kept, [label])
            unary = matrix[tokens] @ state
            order = np.argsort(-unary)[: SELECTOR.top_k]
            candidates = [*tokens[order]]
            if not learned[row, block, k]:
                break
            recalled += label in candidates

            def score(token, previous, state=state, unary=unary, tokens=tokens):
                pair = (first[previous] * (gate @ state) * second[token]).sum()
                return unary[list(tokens).index(token)] + pair

            path = max(candidates, key=lambda token, path=path: score(token, path))
            is_right = is_right and path == label
            accepted += is_right
            if label not in candidates:
                continue
            scores = np.array([score(token, before[row, block, k]) for token in candidates])
            taught = np.exp(matrix[candidates] @ teacher[row, block, k].astype(np.float64))
            right = np.array(candidates) == label if kind == "cross-entropy" else taught / taught.sum()
            expected += np.exp(-k / 3.0) * (np.log(np.exp(scores).sum()) - right @ scores)
    assert float(sums.loss - alone.loss) == pytest.approx(expected, rel=1e-4)
    assert float(sums.recalled.sum()) == recalled
    assert float(sums.path_accepted) == accepted > 0
    assert float(sums.accepted) == float(alone.accepted)


@pytest.mark.parametrize("kept", [None, KEPT], ids=["all", "frequent"])
@pytest.mark.parametrize("kind", ["vanilla", "gated"])
def test_a_markov_head_changes_the_logits_of_the_loss(blocks, kind, kept):
    states, matrix, labels, before, learned = blocks
    drafter = drafter_with(selector=SelectorSpec(7, 5, kind), confidence="state and token")
    head, loss = Head.over(XLA, jnp.asarray(matrix), kept), Loss(gamma=3.0, chunk=2, confidence=0.5)
    sums = block_loss(loss, head, states, labels, learned, choice=Choice(drafter, jnp.asarray(before)))
    part, expected = drafter.selector, 0.0
    weights, bias = (np.asarray(x[...], np.float64) for x in (drafter.confidence, drafter.confidence_bias))
    for place in np.ndindex(SHAPE):
        if not learned[place]:
            continue
        state, label = states[place].astype(np.float64), labels[place]
        row = np.asarray(part.predecessor[before[place]], np.float64)
        gated = row
        if kind == "gated":
            at = np.asarray(part.gate[...]) @ np.concatenate([state, row]) + np.asarray(part.gate_bias[...])
            gated = row / (1 + np.exp(-at))
        tokens = np.arange(VOCAB) if kept is None else np.union1d(kept, [label])
        logits = matrix[tokens] @ state + np.asarray(part.successor[...])[tokens] @ gated
        log_q = logits[list(tokens).index(label)] - np.log(np.exp(logits).sum())
        said = 1 / (1 + np.exp(-(weights[0] @ np.concatenate([state, row]) + bias[0])))
        right = np.exp(log_q)
        sure = -(right * np.log(said) + (1 - right) * np.log(1 - said))
        expected += np.exp(-place[-1] / 3.0) * (-log_q + 0.5 * sure)
    assert float(sums.loss) == pytest.approx(expected, rel=1e-4)


def test_the_loss_of_dspark_is_cross_entropy_and_distance(blocks):
    states, matrix, labels, _, learned = blocks
    teacher = np.random.default_rng(1).standard_normal(states.shape).astype(np.float32)
    sums = block_loss(Loss("dspark", gamma=3.0), Head.over(XLA, jnp.asarray(matrix)), states, labels, learned, teacher)
    q, p = (jax.nn.softmax(x @ matrix.T, axis=-1) for x in (states, teacher))
    ce = -np.log(np.take_along_axis(np.asarray(q), labels[..., None], -1))[..., 0]
    each = 0.1 * ce + 0.9 * np.abs(np.asarray(q) - np.asarray(p)).sum(-1)
    expected = (each * np.exp(-np.arange(SHAPE[2]) / 3.0) * learned).sum()
    assert float(sums.loss) == pytest.approx(expected, rel=1e-4)


PARTS = {
    "dflash2": {"convolutions": True, "selector": True},
    "convolutions": {"convolutions": True},
    "dspark": {"markov": "gated", "confidence": True, "loss": "dspark"},
}


@pytest.fixture(scope="module")
def llm():
    return LLM()


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """The bundled drafter without its selector."""
    return without_selector(tmp_path_factory.mktemp("given") / "draft")


@pytest.mark.parametrize("kind", PARTS)
def test_a_drafter_gets_parts_that_change_nothing_and_learns_with_them(kind, llm, given, tmp_path):
    numbers = {} if kind == "convolutions" else {"rank": 8, "candidates": 4}
    config = TrainConfig(data=("x",), output="y", draft=str(given), **numbers, **PARTS[kind])
    raw = raw_config(config, llm)
    plain, drafter = load_drafter(given), starting_drafter(config, raw, llm.target, llm.directory)
    assert drafter.config == dflash.read_config(raw)
    prompts, params = ["def clamp(value, low, high):\n"], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    rounds = [llm.with_drafter(each).generate(prompts, params, block_size=8)[0] for each in (plain, drafter)]
    assert rounds[0].token_ids == rounds[1].token_ids
    assert rounds[0].acceptance_lengths == rounds[1].acceptance_lengths
    # A few steps on one text.
    target = LLM(kernels="xla").target
    tokens = jnp.asarray(rounds[0].token_ids * 2)[None, :64]
    rows = jnp.ones(tokens.shape, bool), jnp.zeros(tokens.shape, jnp.int32)
    recipe = Recipe(Loss(config.loss, gamma=4.0), 12, 8)
    trainer = Trainer(target, drafter.config, recipe, optimiser(2e-3, 30))
    state, losses = trainer.start(drafter), []
    batch = jax.tree.map(lambda x: x[None], Batch(tokens, *rows))
    for i in range(12):
        state, sums, norm = trainer.step(state, trainer.leaves, batch, jax.random.key(i % 2))
        losses.append(float(sums.loss / sums.weight))
        assert np.isfinite(float(norm))
    assert np.mean(losses[-2:]) < 0.8 * np.mean(losses[:2])
    trained = trainer.on_host(state[0])
    moved = {"dflash2": "selector.successor", "dspark": "selector.successor", "convolutions": "layers.0.mlp_conv.base"}
    before, after = drafter, trained
    for name in moved[kind].split("."):
        before, after = (x[int(name)] if name.isdigit() else getattr(x, name) for x in (before, after))
    assert np.abs(np.asarray(after[...]) - np.asarray(before[...])).max() > 1e-4
    export(trained, raw, tmp_path / "draft")
    assert load_drafter(tmp_path / "draft").config == drafter.config
    again = LLM(None, tmp_path / "draft").generate(prompts, params, block_size=8)[0]
    assert again.token_ids == rounds[0].token_ids


@pytest.mark.parametrize("options", [{"selector": True}, {"markov": "vanilla"}, {"convolutions": True}])
def test_a_drafter_of_speculators_gets_parts(options, llm, given, tmp_path):
    raw = json.loads((given / "config.json").read_text())
    section = raw.pop("dflash_config")
    layers = {key: value for key, value in raw.items() if key not in ("architectures", "num_target_layers")}
    block_size = layers.pop("block_size", section.get("block_size"))
    published = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "transformer_layer_config": layers,
        "draft_vocab_size": raw["vocab_size"],
        "aux_hidden_state_layer_ids": [i + 1 for i in section["target_layer_ids"]],
        "mask_token_id": section["mask_token_id"],
        "block_size": block_size,
    }
    (tmp_path / "draft.json").write_text(json.dumps(published))
    config = TrainConfig(data=("x",), output="y", draft_config=str(tmp_path / "draft.json"), **options)
    before, after = dflash.read_config(published), dflash.read_config(raw_config(config, llm))
    added = {"conv": None, "selector": None}
    assert after != before
    assert replace(after, **added) == before


def test_a_drafter_with_a_markov_head_gets_a_confidence_head(llm, given, tmp_path):
    raw = json.loads((given / "config.json").read_text())
    raw["dflash_config"] |= {"markov_rank": 4, "markov_head_type": "gated"}
    (tmp_path / "draft.json").write_text(json.dumps(raw))
    path = str(tmp_path / "draft.json")
    config = TrainConfig(data=("x",), output="y", draft_config=path, markov="gated", confidence=True)
    before, after = dflash.read_config(raw), dflash.read_config(raw_config(config, llm))
    assert after == replace(before, confidence="state and token")


def test_a_markov_head_that_is_trained_says_that_its_places_are_not_shifted(llm, given):
    """A DSpark drafter that does not say is shifted, here and for other servers."""
    config = TrainConfig(data=("x",), output="y", draft=str(given), markov="gated", rank=8)
    raw = raw_config(config, llm)
    assert raw["architectures"] == ["DSparkDraftModel"]
    assert raw["dflash_config"]["sample_from_anchor"] is False


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"selector": True, "markov": "gated"}, "selector and markov 'gated': a drafter has one of them"),
        ({"confidence": True}, "confidence: it comes with markov"),
        ({"mtp": True, "rank": 8}, "rank 8: with mtp there is none"),
        ({"body_rate": 0.0}, "body_rate 0: nothing would be learned, without convolutions, selector and Markov head"),
        ({"mtp": True, "body_rate": 0.5}, "body_rate 0.5: an MTP head learns as a whole"),
        ({"convolutions": True, "convolution_group": 7}, "conv_group_size is 7: it must divide hidden_size, 192"),
    ],
)
def test_parts_that_cannot_be(options, says, llm, given):
    with pytest.raises(InputError, match=says):
        raw_config(TrainConfig(data=("x",), output="y", draft=str(given), **options), llm)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"sample_from_anchor": True}, "the drafter has sample_from_anchor: drafters of this form are run here"),
        ({"draft_vocab_size": 100}, "the drafter has draft_vocab_size"),
        ({"markov_rank": 4, "markov_head_type": "rnn"}, "the drafter has markov_head_type rnn"),
        ({"markov_rank": 4}, "the drafter has a vanilla selector: it cannot get a dflash2 one, too"),
    ],
)
def test_forms_that_are_not_trained_are_named(keys, says, llm, given, tmp_path):
    raw = json.loads((given / "config.json").read_text())
    raw["dflash_config"] |= keys
    (tmp_path / "draft.json").write_text(json.dumps(raw))
    options = {"selector": True} if "too" in says else {}
    config = TrainConfig(data=("x",), output="y", draft_config=str(tmp_path / "draft.json"), **options)
    with pytest.raises(InputError, match=says):
        raw_config(config, SimpleNamespace(config=llm.config))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rank": 5}, "rank 5: that of .* is 4, and stays"),
        ({"candidates": 7}, "candidates 7: that of .* is 6, and stays"),
        ({"convolution_taps": 3, "convolutions": True}, "convolution_taps 3: that of .* is 4, and stays"),
        ({"convolution_group": 8}, "convolution_group 8: that of .* is 24, and stays"),
    ],
)
def test_numbers_of_parts_that_a_drafter_has_stay(options, says, llm, given, tmp_path):
    raw = json.loads((given / "config.json").read_text())
    parts = {"selector_rank": 4, "selector_top_k": 6, "conv_kernel_size": 4, "conv_group_size": 24}
    (tmp_path / "draft.json").write_text(json.dumps(raw | {"dflash_config": raw["dflash_config"] | parts}))

    def read(path, **options):
        config = TrainConfig(data=("x",), output="y", draft_config=str(path), **options)
        return raw_config(config, SimpleNamespace(config=llm.config))

    with pytest.raises(InputError, match=says):
        read(tmp_path / "draft.json", **options)
    equal = {"rank": 4, "candidates": 6, "convolution_taps": 4, "convolution_group": 24}
    read(tmp_path / "draft.json", selector=True, convolutions=True, **equal)
    (name,) = options.keys() - {"convolutions"}
    with pytest.raises(InputError, match=f"{name} {options[name]}: it comes with (convolutions|selector or markov)"):
        read(given / "config.json", **{name: options[name]})


@pytest.mark.parametrize("kind", ["dflash2", "gated"])
def test_muon_orthogonalises_matrices_of_the_parts_and_nothing_else(kind):
    parts = {"selector": replace(SELECTOR, kind=kind)}
    parts |= {"conv": ConvSpec(2, 4)} if kind == "dflash2" else {"confidence": "state and token"}
    drafter = drafter_with(**parts)
    update = optimiser(1e-3, 10, "muon")
    jax.eval_shape(lambda d: update.update(d, update.init(d), d), drafter)
    leaves = jax.tree.structure(drafter).flatten_up_to(matrix_axes(drafter))
    paths = [path for path, axes in zip(parameter_paths(drafter), leaves, strict=True) if axes is not None]
    names = {path.rsplit(".", 1)[-1] for path in paths}
    assert names == {"fc", "q", "k", "v", "o", "gate_up", "down", "gate"} | (
        {"projection"} if "conv" in parts else set()
    )


@pytest.mark.parametrize("rate", [0.0, 0.25])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_body_learns_at_its_own_rate(llm, given, kind, rate):
    """With 0 it stays; without gradients, an update of nothing."""
    drafter = random_drafter(replace(load_drafter(given).config, selector=SELECTOR, conv=ConvSpec(2, 16)), 2)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 500, (1, 1, 24)), jnp.int32)
    batch, target = Batch(tokens, jnp.ones(tokens.shape, bool), jnp.zeros_like(tokens)), unpack_weights(llm.target)
    moved = []
    for body_rate in (1.0, rate):
        recipe = Recipe(Loss("kl", gamma=4.0), 4, 4, learns_body=body_rate > 0)
        trainer = Trainer(target, drafter.config, recipe, optimiser(1e-3, 10, kind, 0.0, 1e9, body_rate))
        state = trainer.start(drafter)
        # The learning rate of the first step is 0.
        for _ in range(2):
            state, _, _ = trainer.step(state, trainer.leaves, batch, jax.random.key(0))
        pairs = zip(*map(jax.tree.leaves, (state[0], drafter)), strict=True)
        moved.append([np.asarray(new) - np.asarray(old) for new, old in pairs])
    are_parts = jax.tree.leaves(in_part(drafter))
    for path, is_part, whole, slow in zip(parameter_paths(drafter), are_parts, *moved, strict=True):
        assert is_part == any(name in path for name in ("conv", "selector")), path
        np.testing.assert_allclose(slow, whole * (1 if is_part else rate), atol=1e-4, err_msg=path)
        assert is_part or rate or not slow.any(), path
    assert any(np.abs(x).max() > 1e-4 for x in moved[0])


def test_fresh_parts_keep_what_is_there():
    given = drafter_with(conv=ConvSpec(2, 4))
    assert with_fresh_parts(given, given.config, 0) is given
    richer = with_fresh_parts(given, replace(given.config, selector=SELECTOR), 0)
    np.testing.assert_array_equal(richer.layers[1].mlp_conv.base[...], given.layers[1].mlp_conv.base[...])
    assert not richer.selector.successor[...].any()
    assert richer.selector.predecessor[...].any()

"""Training on eight devices is training on one. Collected by `test_devices.py` only, where there are eight."""

import contextlib
import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.checkpoint.files import TensorFiles
from dflash_jax.models.config import ConvSpec, SelectorSpec
from dflash_jax.models.decoder import abstract_decoder
from dflash_jax.options.train import TrainConfig
from dflash_jax.parallel.sharding import ONE_DEVICE, Layout, parameter_paths
from dflash_jax.training import run
from dflash_jax.training.losses import Loss
from dflash_jax.training.optimiser import optimiser
from dflash_jax.training.step import Batch, Recipe, Trainer
from tests.families import VOCAB, family_config
from tests.helpers import random_decoder, random_drafter, tiny_draft_config
from tools.float64_reference import assert_tree_near, in_both_of

ROWS, LENGTH = 8, 32
LAYOUTS = [Layout(data=8), Layout(tensor=8), Layout(data=2, tensor=2, expert=2)]


def batches(micro: int) -> Batch:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (micro, ROWS, LENGTH)).astype(np.int32)
    mask = rng.random((micro, ROWS, LENGTH)) < 0.9
    # Rows of unequal use: a mean over devices would not be the mean over tokens.
    mask[:, :4, 8:] = False
    starts = np.where(np.arange(LENGTH) < 13, 0, 13) * np.ones((micro, ROWS, 1), np.int32)
    return jax.tree.map(jnp.asarray, Batch(tokens, mask, starts.astype(np.int32)))


PARTS = {
    "dflash": {},
    "dflash2": {"conv": ConvSpec(2, 4), "selector": SelectorSpec(7, 5)},
    "dspark": {"selector": SelectorSpec(7, 5, "gated"), "confidence": "state and token"},
}


def pair_with(kind: str):
    """Recurrent and attention layers, experts and a shared one; a drafter of a kind of `PARTS`."""
    target = random_decoder(family_config("qwen3_5_moe"))
    return target, random_drafter(replace(tiny_draft_config(target.config), vocab_size=VOCAB, **PARTS[kind]))


@pytest.fixture(scope="module")
def pair():
    return pair_with("dflash")


def trainer(target, drafter, layout: Layout, kind: str = "adamw") -> Trainer:
    cut = jax.tree.unflatten(
        jax.tree.structure(abstract_decoder(target.config, layout=layout)), jax.tree.leaves(target)
    )
    # float64 where the reference is computed.
    recipe = Recipe(Loss("hybrid"), 6, 8, dtype=jnp.dtype(jnp.float32).name)
    return Trainer(cut, drafter.config, recipe, optimiser(1e-3, 10, kind, warm_up=0.0))


@pytest.fixture(scope="module")
def gradients(pair):
    """Those of one device, in float64 and float32: computed once."""

    def on_one_device(target, drafter):
        t = trainer(target, drafter, ONE_DEVICE)
        return jax.jit(t.gradients)(drafter, t.leaves, batches(2), jax.random.key(3))

    with pytest.MonkeyPatch.context() as patch:
        # Anchors are those of float32, also where the rest is float64.
        patch.setattr(jax.random, "uniform", partial(jax.random.uniform, dtype=np.float32))
        return in_both_of(on_one_device, *pair)


@pytest.mark.parametrize(
    "layout", [*(pytest.param(layout, marks=pytest.mark.long) for layout in LAYOUTS[:2]), LAYOUTS[2]], ids=str
)
def test_gradients_do_not_depend_on_the_devices(pair, gradients, layout):
    t = trainer(*pair, layout)
    found = jax.jit(t.gradients)(t.start(pair[1])[0], t.leaves, batches(2), jax.random.key(3))
    assert_tree_near(found, gradients)
    assert float(found[1].weight) > 1


@pytest.mark.parametrize("parts", ["dflash2", "dspark"])
def test_gradients_of_a_selectors_parts_do_not_depend_on_the_devices(parts):
    """Convolutions with a selector, and a Markov head with a confidence head."""
    target, drafter = pair_with(parts)
    found = []
    for layout in (ONE_DEVICE, LAYOUTS[2]):
        t = trainer(target, drafter, layout)
        found.append(jax.jit(t.gradients)(t.start(drafter)[0], t.leaves, batches(1), jax.random.key(3)))
    one, sums = found[0]
    named = dict(zip(parameter_paths(drafter), jax.tree.leaves(one), strict=True))
    parts_of = {path: x for path, x in named.items() if "conv" in path or "selector" in path or "confidence" in path}
    assert parts_of
    assert all(np.abs(np.asarray(x)).max() > 0 for x in parts_of.values()), "a part has no gradient"
    assert float(sums.recalled.sum()) > 0
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), found[1], found[0])


@pytest.mark.parametrize("kind", ["adamw", pytest.param("muon", marks=pytest.mark.long)])
def test_steps_do_not_depend_on_the_devices(pair, kind):
    target, drafter = pair
    found = []
    for layout in (ONE_DEVICE, LAYOUTS[2]):
        t = trainer(target, drafter, layout, kind)
        state = t.start(drafter)
        for i in range(3):
            state, _, _ = t.step(state, t.leaves, batches(1), jax.random.key(i))
        if layout.devices > 1:
            wide = [x for x in jax.tree.leaves(state[0]) if not x.sharding.is_fully_replicated]
            assert wide, "nothing is divided"
        found.append(state[0])
    for a, b, before in zip(*map(jax.tree.leaves, (*found, drafter)), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=3e-4)
        assert not np.array_equal(np.asarray(a), np.asarray(before))


def test_a_run_goes_on_with_other_devices(tmp_path):
    """Stopped on one, continued on eight."""
    data = tmp_path / "text.jsonl"
    data.write_text("".join(json.dumps({"text": f"def f{i}(x):\n    return {i} * x\n" * 3}) + "\n" for i in range(8)))
    config = TrainConfig(
        data=(str(data),), layers=1, block_size=4, taps=(1, 3), sequence_length=64, rows=4, anchors=8, steps=4
    )
    whole = replace(config, output=str(tmp_path / "whole"))
    run.fit(whole, print)
    broken = replace(config, output=str(tmp_path / "broken"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "stop_signal", lambda _: contextlib.nullcontext(lambda: "a test"))
        assert run.fit(broken, print) == (1, 4)
    assert run.fit(replace(broken, mesh="data=4,tensor=2"), print) == (4, 4)
    a, b = (TensorFiles(tmp_path / name / "draft") for name in ("whole", "broken"))
    assert list(a)
    for name in a:
        np.testing.assert_allclose(a.read(name).astype(np.float32), b.read(name).astype(np.float32), atol=5e-4)

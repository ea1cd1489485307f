"""Drafters at their beginning."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import InputError
from dflash_jax.checkpoint.load import load_drafter, load_target
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.models.config import DraftLayerSpec
from dflash_jax.models.families import dflash
from dflash_jax.models.mtp_config import MtpConfig
from dflash_jax.ops.weights import dense, is_weight
from dflash_jax.options.train import TrainConfig
from dflash_jax.training.drafters import copy_layers, export, fresh_head, raw_config
from tests import few_bits
from tests.families import family_config
from tests.helpers import random_decoder, random_drafter, tiny_draft_config


@pytest.fixture(params=["llama", "qwen3"])
def target(request):
    return random_decoder(family_config(request.param))


def drafter_for(target, intermediate: int = 32):
    spec = replace(target.config.layers[0].mixer, qk_norm=True)
    config = tiny_draft_config(target.config)
    return random_drafter(replace(config, layers=(DraftLayerSpec(spec, intermediate, None, False),) * 2))


@pytest.mark.parametrize("form", [None, "int4"])
def test_layers_begin_as_the_targets(target, form):
    drafter, few = drafter_for(target), target if form is None else few_bits.quantized(target, form)
    copy_layers(drafter, few, (1, 0))
    target = jax.tree.map(lambda x: dense(x) if is_weight(x) else x, few, is_leaf=is_weight)
    for mine, theirs in zip(drafter.layers, (target.layers[1], target.layers[0]), strict=True):
        for part, names in (("mixer", "qkvo"), ("ffn", ("gate_up", "down"))):
            for name in names:
                np.testing.assert_array_equal(*(getattr(getattr(x, part), name)[...] for x in (mine, theirs)))
        # The target stores its norms less 1, the drafter whole.
        stored = theirs.input_norm.weight[...] + target.config.norm_offset
        np.testing.assert_array_equal(mine.input_norm.weight[...], stored)
        if hasattr(theirs.mixer, "k_norm"):
            np.testing.assert_array_equal(mine.mixer.k_norm.weight[...], theirs.mixer.k_norm.weight[...] + 1)
    np.testing.assert_array_equal(drafter.norm.weight[...], target.norm.weight[...] + target.config.norm_offset)


def test_an_mtp_head_begins_as_the_last_layer_of_its_kind_also_of_a_target_in_few_bits():
    target = few_bits.quantized(random_decoder(family_config("qwen3_5_moe")), "int8")
    config = MtpConfig(target.config)
    head = fresh_head(TrainConfig(data=("x",), output="y", mtp=True), config, target)
    (spec,) = config.layers
    layer = target.layers[[i for i, each in enumerate(target.config.layers) if each == spec][-1]]
    np.testing.assert_array_equal(head.layers[0].mixer.q[...], dense(layer.mixer.q[...]))
    np.testing.assert_array_equal(head.layers[0].ffn.down[...], dense(layer.ffn.down[...]))


def test_norms_that_a_target_lacks_are_of_the_size_of_its_keys():
    target = random_decoder(family_config("llama"))
    drafter = drafter_for(target)
    copy_layers(drafter, target, (0, 1))
    inputs = np.random.default_rng(0).standard_normal((4000, target.config.hidden_size))
    layer = drafter.layers[0]
    keys = np.einsum("th,kdh->tkd", inputs * np.asarray(layer.input_norm.weight[...]), np.asarray(layer.mixer.k[...]))
    assert abs(float(layer.mixer.k_norm.weight[0]) / np.sqrt(np.mean(keys**2)) - 1) < 0.05


def test_a_causal_head_is_trained_and_exported_as_one(tmp_path):
    """JetSpec's drafters: all layers are causal within the block, and their config.json keeps saying so."""
    raw = json.loads((TINY / "draft" / "config.json").read_text())
    raw["dflash_config"]["causal_head"] = True
    (tmp_path / "draft.json").write_text(json.dumps(raw))
    llm = SimpleNamespace(config=load_target(TINY / "target").config)
    kept = raw_config(TrainConfig(data=("x",), output="y", draft_config=str(tmp_path / "draft.json")), llm)
    config = dflash.read_config(kept)
    assert [spec.causal for spec in config.layers] == [True] * 3
    drafter = random_drafter(config)
    export(drafter, kept, tmp_path / "exported")
    assert json.loads((tmp_path / "exported" / "config.json").read_text()) == raw
    again = load_drafter(tmp_path / "exported")
    assert again.config == config
    masks = [layer.block_mask(jnp.array([16]), 16)[0] for layer in again.layers]
    assert not any(np.triu(mask, 1).any() for mask in masks)


@pytest.mark.parametrize(
    ("layers", "intermediate", "message"),
    [
        ((0,), 32, r"start_layers \[0\]: give 2, each 0 to 1"),
        ((0, 2), 32, "each 0 to 1"),
        ((0, 1), 30, r"start_layers 0: gate_up is \(2, 32, 36\) in the target, \(2, 30, 36\) in the drafter"),
    ],
)
def test_what_does_not_fit_is_told(layers, intermediate, message):
    target = random_decoder(family_config("llama"))
    with pytest.raises(InputError, match=message):
        copy_layers(drafter_for(target, intermediate), target, layers)

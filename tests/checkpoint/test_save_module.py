"""What is written is read back exactly."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.checkpoint.load import load_drafter, load_target, save_module
from dflash_jax.models.families import dflash, qwen3_5
from dflash_jax.ops.backend import XLA
from tests.checkpoint.conftest import DRAFT_JSON, TARGET_JSON
from tests.helpers import tiny_config, tiny_draft_config


def test_bfloat16_round_trip_is_exact(target, drafter, tmp_path):
    for module, table, raw, load in (
        (target, qwen3_5, TARGET_JSON, load_target),
        (drafter, dflash, DRAFT_JSON, load_drafter),
    ):
        path = tmp_path / table.__name__
        rounded = [np.asarray(x).astype(jnp.bfloat16) for x in jax.tree.leaves(module)]
        save_module(module, table.weight_names(module.config), raw, path)
        assert json.loads((path / "config.json").read_text()) == raw
        back = load(path, jnp.bfloat16, backend=XLA)
        assert jax.tree.structure(back) == jax.tree.structure(module)
        for a, b in zip(jax.tree.leaves(back), rounded, strict=True):
            assert a.dtype == b.dtype == jnp.bfloat16
            np.testing.assert_array_equal(np.asarray(a).view(np.uint16), b.view(np.uint16))


TABLES = {
    "fused": qwen3_5.weight_names(tiny_config("da")),
    "per_expert": qwen3_5.weight_names(tiny_config("da"), ["model.layers.0.mlp.experts.0.up_proj.weight"]),
    "multimodal": qwen3_5.weight_names(tiny_config("da"), ["model.language_model.layers.0.input_layernorm.weight"]),
    "dense": qwen3_5.weight_names(tiny_config("da", moe=False)),
    "tied": qwen3_5.weight_names(tiny_config("da", tied_embeddings=True)),
    "drafter": dflash.weight_names(tiny_draft_config(tiny_config("da"))),
}


@pytest.mark.parametrize("name", TABLES)
def test_every_entry_is_reversible(name):
    rng = np.random.default_rng(0)
    tensors = set()
    for entry in TABLES[name]:
        x = rng.standard_normal(entry.shape).astype(np.float32)
        written = entry.write(x)
        assert [w.shape for w in written] == [t.shape for t in entry.tensors], entry.path
        np.testing.assert_array_equal(entry.read(written), x, err_msg=entry.path)
        # And the other way, so that write does not merely undo read.
        disk = [rng.standard_normal(t.shape).astype(np.float32) for t in entry.tensors]
        for a, b in zip(entry.write(entry.read(disk)), disk, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=entry.path)
        names = {t.name for t in entry.tensors}
        assert not names & tensors, entry.path
        tensors |= names
    assert ("lm_head.weight" in tensors) == (name not in ("tied", "drafter"))
    assert any(n.startswith("model.language_model.") for n in tensors) == (name == "multimodal")

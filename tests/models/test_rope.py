"""Rotary embedding: plain, with three position rows, partial, and YaRN, against transformers."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import Qwen3_5TextConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding, apply_rotary_pos_emb

from dflash_jax.config import RopeSpec
from dflash_jax.models.families.reading import Raw, read_rope
from dflash_jax.models.rope import apply_rope, rope_angles, rope_frequencies


def halves(x):
    """transformers repeats the angles for both halves."""
    half = x.shape[-1] // 2
    np.testing.assert_array_equal(x[..., :half], x[..., half:])
    return x[..., :half].numpy()


def qwen3_5(head_dim, partial, sections, theta):
    parameters = {
        "rope_type": "default",
        "rope_theta": theta,
        "partial_rotary_factor": partial,
        "mrope_section": list(sections),
    }
    return Qwen3_5TextConfig(head_dim=head_dim, rope_parameters=parameters)


@pytest.mark.parametrize(
    ("head_dim", "partial", "sections"),
    [(256, 0.25, (11, 11, 10)), (20, 0.6, (3, 2, 1)), (24, 0.5, (2, 2, 2)), (40, 0.5, (6, 1, 3))],
)
def test_three_position_rows(head_dim, partial, sections):
    rope = RopeSpec(1e7, int(head_dim * partial), sections)
    theirs = Qwen3_5TextRotaryEmbedding(qwen3_5(head_dim, partial, sections, 1e7))
    positions = np.random.default_rng(0).integers(0, 300, (3, 2, 50))
    cos, sin = theirs(torch.zeros(()), torch.as_tensor(positions))
    mine = rope_angles(jnp.asarray(positions), rope)
    assert mine[0].shape == (2, 50, rope.dim // 2)
    np.testing.assert_allclose(mine[0], halves(cos), atol=5e-5)
    np.testing.assert_allclose(mine[1], halves(sin), atol=5e-5)

    # And applied: only the first dimensions turn.
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 2, 50, 3, head_dim)).astype(np.float32)
    want, _ = apply_rotary_pos_emb(*(torch.from_numpy(x).transpose(1, 2) for x in (q, k)), cos, sin)
    got = apply_rope(jnp.asarray(q), mine)
    np.testing.assert_allclose(got, want.transpose(1, 2).numpy(), atol=2e-4)
    np.testing.assert_array_equal(got[..., rope.dim :], q[..., rope.dim :])


def test_equal_position_rows_are_plain():
    rope = RopeSpec(1e4, 20, (4, 3, 3))
    positions = jnp.arange(100)[None]
    plain = rope_angles(positions, RopeSpec(1e4, 20))
    for mine in (rope_angles(positions, rope), rope_angles(jnp.broadcast_to(positions, (3, 1, 100)), rope)):
        for a, b in zip(mine, plain, strict=True):
            np.testing.assert_array_equal(a, b)


YARNS = {
    # Qwen3.6-35B-A3B-DFlash-8-layer
    "published": (128, 1e7, 262144, {"factor": 64.0, "original_max_position_embeddings": 4096}),
    "betas": (
        32,
        1e4,
        512,
        {"factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 8.0, "beta_slow": 2.0},
    ),
    "attention_factor": (
        64,
        1e6,
        4096,
        {"factor": 2.0, "original_max_position_embeddings": 2048, "attention_factor": 0.7},
    ),
    "short": (10, 1e4, 64, {"factor": 4.0, "original_max_position_embeddings": 16}),
    "factor_one": (16, 1e4, 64, {"factor": 1.0, "original_max_position_embeddings": 64}),
}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", YARNS)
def test_yarn(name, key):
    head_dim, theta, longest, yarn = YARNS[name]
    raw = {"max_position_embeddings": longest, key: {"rope_type": "yarn", **yarn}}
    if key == "rope_scaling":
        raw["rope_theta"] = theta
    else:
        raw[key]["rope_theta"] = theta
    rope = read_rope(Raw(raw), head_dim)
    config = Qwen3Config(
        head_dim=head_dim,
        max_position_embeddings=longest,
        rope_parameters={"rope_type": "yarn", "rope_theta": theta, **yarn},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config, device="cpu")
    got, got_factor = rope_frequencies(rope)
    np.testing.assert_allclose(got, frequencies.numpy(), rtol=2e-6)
    assert got_factor == pytest.approx(factor, rel=1e-6)
    plain, _ = rope_frequencies(RopeSpec(theta, head_dim))
    if name != "factor_one":
        assert not np.allclose(got, plain, rtol=1e-3), "YaRN changes nothing here: this test tests nothing"

    positions = np.arange(0, 300, 7)[None]
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(()), torch.as_tensor(positions))
    mine = rope_angles(jnp.asarray(positions), rope)
    np.testing.assert_allclose(mine[0], halves(cos), atol=1e-4)
    np.testing.assert_allclose(mine[1], halves(sin), atol=1e-4)


def test_bad_rope_type_is_named():
    with pytest.raises(ValueError, match="longrope"):
        read_rope(Raw({"rope_scaling": {"rope_type": "longrope"}, "max_position_embeddings": 10}), 8)

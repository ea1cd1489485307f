"""Rotary embedding: plain, with three position rows, partial, and YaRN, against transformers."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import Qwen3_5TextConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding, apply_rotary_pos_emb

from dflash_jax.models.config import RopeSpec
from dflash_jax.models.families.reading import Raw, read_rope
from dflash_jax.models.rope import rope_angles, rope_frequencies
from dflash_jax.ops.rotation import apply_rope
from tests.float64 import Exact, assert_near, doubled


def exact(compute) -> list[Exact]:
    """What ``compute(dtype)`` of transformers gives in float64, and in float32."""
    single = compute(torch.float32)
    with doubled():
        double = compute(torch.float64)
    assert all(x.dtype == torch.float64 for x in double)
    return [Exact(b.numpy(), a.numpy()) for a, b in zip(single, double, strict=True)]


def assert_halves(found, whole: Exact, what: str) -> None:
    """transformers repeats the angles for both halves."""
    half = whole.value.shape[-1] // 2
    np.testing.assert_array_equal(whole.value[..., :half], whole.value[..., half:])
    assert_near(np.asarray(found), whole[..., :half], what)


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
def test_mrope_of_three_position_axes_equals_transformers(head_dim, partial, sections):
    rope = RopeSpec(1e7, int(head_dim * partial), sections)
    positions = np.random.default_rng(0).integers(0, 300, (3, 2, 50))
    q, k = np.random.default_rng(1).standard_normal((2, 2, 50, 3, head_dim)).astype(np.float32)

    def reference(dtype):
        embedding = Qwen3_5TextRotaryEmbedding(qwen3_5(head_dim, partial, sections, 1e7))
        cos, sin = embedding(torch.zeros((), dtype=dtype), torch.as_tensor(positions))
        applied, _ = apply_rotary_pos_emb(*(torch.from_numpy(x).to(dtype).transpose(1, 2) for x in (q, k)), cos, sin)
        return cos, sin, applied.transpose(1, 2)

    cos, sin, applied = exact(reference)
    angles = rope_angles(jnp.asarray(positions), rope)
    assert angles[0].shape == (2, 50, rope.dim // 2)
    assert_halves(angles[0], cos, "cos")
    assert_halves(angles[1], sin, "sin")
    # And applied: only the first dimensions turn.
    got = apply_rope(jnp.asarray(q), angles)
    assert_near(np.asarray(got), applied, "q")
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
def test_yarn_frequencies_equal_those_of_transformers(name, key):
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
    (frequencies,) = exact(lambda _: [ROPE_INIT_FUNCTIONS["yarn"](config, device="cpu")[0]])
    got, got_factor = rope_frequencies(rope)
    # Relative to each: the lowest are a millionth of the highest.
    relative = Exact(np.ones_like(frequencies.value), frequencies.single / frequencies.value)
    assert_near(np.asarray(got) / frequencies.value, relative, "frequencies")
    _, factor = ROPE_INIT_FUNCTIONS["yarn"](config, device="cpu")
    assert got_factor == pytest.approx(factor, rel=1e-12)
    plain, _ = rope_frequencies(RopeSpec(theta, head_dim))
    if name != "factor_one":
        assert not np.allclose(got, plain, rtol=1e-3), "YaRN changes nothing here: this test tests nothing"

    positions = np.arange(0, 300, 7)[None]
    cos, sin = exact(
        lambda dtype: Qwen3RotaryEmbedding(config)(torch.zeros((), dtype=dtype), torch.as_tensor(positions))
    )
    angles = rope_angles(jnp.asarray(positions), rope)
    assert_halves(angles[0], cos, "cos")
    assert_halves(angles[1], sin, "sin")


def test_bad_rope_type_is_named():
    with pytest.raises(ValueError, match="longrope"):
        read_rope(Raw({"rope_scaling": {"rope_type": "longrope"}, "max_position_embeddings": 10}), 8)

"""Rotary position embedding (RoFormer, arXiv 2104.09864): frequencies, context extensions, angles."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.models.config import Llama3Spec, RopeSpec, YarnSpec

# cos and sin of the rotary angles, float32 [B, T, dim / 2] each.
CosSin = tuple[Float[Array, "B T half"], Float[Array, "B T half"]]
# Those of every rotary embedding in a model.
Angles = dict[RopeSpec, CosSin]


def _yarn(frequencies: Float[Array, " half"], rope: RopeSpec, yarn: YarnSpec) -> tuple[Float[Array, " half"], float]:
    """YaRN (arXiv 2309.00071, section 3; transformers' `_compute_yarn_parameters`): as `rope_frequencies`."""

    def dimension(rotations: float) -> float:
        return rope.dim * math.log(yarn.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(yarn.beta_fast)), 0)
    high = min(math.ceil(dimension(yarn.beta_slow)), rope.dim - 1)
    ramp = (jnp.arange(rope.dim // 2, dtype=jnp.float32) - low) / max(high - low, 1e-3)
    interpolated = jnp.clip(ramp, 0.0, 1.0)
    factor = yarn.attention_factor
    if factor is None:
        factor = 0.1 * math.log(yarn.factor) + 1.0 if yarn.factor > 1 else 1.0
    return frequencies * (1 - interpolated) + frequencies / yarn.factor * interpolated, factor


def _llama3(frequencies: Float[Array, " half"], spec: Llama3Spec) -> Float[Array, " half"]:
    """Llama 3.1's frequencies (transformers' `_compute_llama3_parameters`).

    Those with fewer than ``low_freq_factor`` rotations over the original context are divided, those with more than
    ``high_freq_factor`` stay.
    """
    rotations = spec.original_max_positions * frequencies / (2 * math.pi)
    share = (rotations - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    share = jnp.clip(share, 0.0, 1.0)
    return frequencies * share + frequencies / spec.factor * (1 - share)


def rope_frequencies(rope: RopeSpec) -> tuple[Float[Array, " half"], float]:
    """Frequencies of a rotary embedding.

    Args:
        rope: Its configuration.

    Returns:
        Radians per position, float32 [dim / 2], and the factor on cos and sin.
    """
    frequencies = rope.theta ** (-jnp.arange(0, rope.dim, 2, dtype=jnp.float32) / rope.dim)
    if isinstance(rope.scaling, YarnSpec):
        return _yarn(frequencies, rope, rope.scaling)
    if isinstance(rope.scaling, Llama3Spec):
        return _llama3(frequencies, rope.scaling), 1.0
    return frequencies, 1.0


def rope_angles(positions: Int[Array, "B T"] | Int[Array, "3 B T"], rope: RopeSpec) -> CosSin:
    """Rotary angles.

    Time, height and width alternate over the frequencies: the interleaved M-RoPE of Qwen3-VL, as in transformers'
    `Qwen3_5TextRotaryEmbedding`.

    Args:
        positions: int [B, T], or [3, B, T] (time, height, width).
        rope: The rotary embedding.

    Returns:
        cos and sin, float32 [B, T, dim / 2] each.
    """
    frequencies, factor = rope_frequencies(rope)
    if positions.ndim == 2:
        positions = positions[None]
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    if positions.shape[0] == 1:
        angles = angles[0]
    else:
        index = jnp.arange(rope.dim // 2)
        _, height, width = rope.sections or (rope.dim // 2, 0, 0)
        is_height = (index % 3 == 1) & (index < 3 * height)
        is_width = (index % 3 == 2) & (index < 3 * width)
        angles = jnp.where(is_height, angles[1], jnp.where(is_width, angles[2], angles[0]))
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor

"""Rotary position embedding: frequencies, with the context extensions in use, angles, rotation."""

import math

import jax
import jax.numpy as jnp

from dflash_jax.models.config import Llama3Spec, RopeSpec, YarnSpec


def _yarn(frequencies, rope: RopeSpec, yarn: YarnSpec) -> tuple[jax.Array, float]:
    """arXiv 2309.00071, section 3."""

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


def _llama3(frequencies, spec: Llama3Spec) -> jax.Array:
    """Rotations over the original context: below ``low_freq_factor`` of them divided, above ``high_freq_factor``
    kept."""
    rotations = spec.original_max_positions * frequencies / (2 * math.pi)
    kept = (rotations - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    kept = jnp.clip(kept, 0.0, 1.0)
    return frequencies * kept + frequencies / spec.factor * (1 - kept)


def rope_frequencies(rope: RopeSpec) -> tuple[jax.Array, float]:
    """Inverse frequencies float32 [dim / 2], and the factor on cos and sin."""
    frequencies = rope.theta ** (-jnp.arange(0, rope.dim, 2, dtype=jnp.float32) / rope.dim)
    if isinstance(rope.scaling, YarnSpec):
        return _yarn(frequencies, rope, rope.scaling)
    if isinstance(rope.scaling, Llama3Spec):
        return _llama3(frequencies, rope.scaling), 1.0
    return frequencies, 1.0


def rope_angles(positions, rope: RopeSpec) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [B, T, dim / 2], of positions [B, T] or [3, B, T] (time, height, width)."""
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

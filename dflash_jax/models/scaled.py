"""Weights in few bits: eight-bit values with a scale for each run of inputs of each output."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scaled:
    """``values`` [..., I] (float8_e4m3fn or int8) times ``scale`` [..., N], one for each of N equal runs of the last
    axis.

    Stands where a weight array stands: `parts.project` and the experts compute with it without a dequantised copy.
    """

    values: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    def __getitem__(self, index) -> "Scaled":
        """Of leading axes only."""
        return Scaled(self.values[index], self.scale[index])

    def reshape(self, *shape: int) -> "Scaled":
        """Leading axes anew; the last one stays, or takes in those before it."""
        values = self.values.reshape(shape)
        return Scaled(values, self.scale.reshape(*values.shape[:-1], -1))

    def dense(self, dtype) -> jax.Array:
        """The weight itself: elementwise, so that it fuses into what reads it."""
        runs = self.values.astype(dtype).reshape(*self.scale.shape, -1) * self.scale.astype(dtype)[..., None]
        return runs.reshape(self.shape)

    def matmul(self, x) -> jax.Array:
        """x [T, I] times the transpose of this matrix [O, I] → [T, O]: the runs' products are scaled, not the
        weight."""
        outputs, runs = self.scale.shape
        parts = jnp.einsum(
            "tni,oni->nto",
            x.reshape(x.shape[0], runs, -1),
            self.values.astype(x.dtype).reshape(outputs, runs, -1),
            preferred_element_type=jnp.float32,
        )
        return jnp.einsum("nto,on->to", parts, self.scale.astype(jnp.float32)).astype(x.dtype)


def dense(weight, dtype=None) -> jax.Array:
    """A weight array as it is (cast, where ``dtype`` is given), a `Scaled` one multiplied out."""
    if isinstance(weight, Scaled):
        return weight.dense(dtype or jnp.float32)
    return weight if dtype is None else weight.astype(dtype)


def quantize(weight, kind: str, runs: int = 1) -> Scaled:
    """``runs`` scales for each index of the leading axes; ``kind`` "int8" or "fp8"."""
    dtype, largest = (jnp.int8, 127.0) if kind == "int8" else (jnp.float8_e4m3fn, 448.0)
    split = weight.astype(jnp.float32).reshape(*weight.shape[:-1], runs, -1)
    top = jnp.max(jnp.abs(split), axis=-1)
    scale = jnp.where(top > 0, top, 1.0) / largest
    values = split / scale[..., None]
    if kind == "int8":
        values = jnp.round(values)
    return Scaled(values.astype(dtype).reshape(weight.shape), scale)

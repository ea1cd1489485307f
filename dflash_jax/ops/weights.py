"""Weights in other forms than an array [*out, *in]: in few bits, or in panels for a CPU."""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.ops.kernels.cpu.calls import LANES

# Of more, the products of all runs, float32 [T, runs, O], are larger than the weight in bfloat16.
FEW_TOKENS = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedWeight:
    """Few bits: ``values`` [..., I] (float8_e4m3fn or int8) times ``scale`` [..., N], one for each of N equal runs of
    the last axis.

    Stands where a weight array stands: `ops.linear.project` and the experts compute with it without a dequantised copy.
    """

    values: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    def __getitem__(self, index) -> "QuantizedWeight":
        """Of leading axes only."""
        return QuantizedWeight(self.values[index], self.scale[index])

    def reshape(self, *shape: int) -> "QuantizedWeight":
        """Leading axes anew; the last one stays, or takes in those before it."""
        values = self.values.reshape(shape)
        return QuantizedWeight(values, self.scale.reshape(*values.shape[:-1], -1))

    def dense(self, dtype) -> jax.Array:
        """The weight itself: elementwise, so that it fuses into what reads it."""
        runs = self.values.astype(dtype).reshape(*self.scale.shape, -1) * self.scale.astype(dtype)[..., None]
        return runs.reshape(self.shape)

    def matmul(self, x) -> jax.Array:
        """x [T, I] times the transpose of this matrix [O, I] → [T, O]: of few tokens the runs' products are scaled, not
        the weight."""
        outputs, runs = self.scale.shape
        if runs > 1 and x.shape[0] > FEW_TOKENS:
            return jnp.einsum("ti,oi->to", x, self.dense(x.dtype))
        parts = jnp.einsum(
            "tni,oni->nto",
            x.reshape(x.shape[0], runs, -1),
            self.values.astype(x.dtype).reshape(outputs, runs, -1),
            preferred_element_type=jnp.float32,
        )
        return jnp.einsum("nto,on->to", parts, self.scale.astype(jnp.float32)).astype(x.dtype)


@partial(jax.tree_util.register_dataclass, data_fields=["panels"], meta_fields=["shape", "contracted"])
@dataclass(frozen=True)
class PackedWeight:
    """A float32 weight of ``shape``, as a matrix [O, I], in panels of 16 outputs, for the C++ kernels: float32
    [O / 16, I, 16] or, where bfloat16 loses nothing, as in what comes from such a checkpoint, uint32 [O / 16, I / 2,
    16], whose low halves are those of even inputs.

    Stands where a weight array stands. Past the last output, and where I would be odd, there are zeros. Words, not
    bfloat16: of rows of a bfloat16 array XLA's CPU compiler makes a float32 copy of the whole array first.
    """

    panels: jax.Array
    shape: tuple[int, ...]
    contracted: int = 1

    dtype = jnp.float32

    @classmethod
    def of(cls, weight: np.ndarray, contracted: int) -> "PackedWeight":
        """Of a float32 weight [*out, *in] with ``contracted`` axes in *in."""
        inputs = math.prod(weight.shape[weight.ndim - contracted :])
        matrix = weight.reshape(-1, inputs)
        if len(matrix) % LANES or inputs % 2:
            matrix = np.pad(matrix, ((0, -len(matrix) % LANES), (0, inputs % 2)))
        matrix = matrix.reshape(-1, LANES, inputs + inputs % 2)
        bits = matrix.view(np.uint32)
        if not np.bitwise_or.reduce(bits, axis=None) & 0xFFFF:
            matrix = bits[..., ::2] >> 16 | bits[..., 1::2]
        return cls(np.ascontiguousarray(matrix.transpose(0, 2, 1)), weight.shape, contracted)

    @classmethod
    def abstract(cls, shape: tuple[int, ...], contracted: int) -> "PackedWeight":
        """A float32 weight's shape without its values."""
        outputs, inputs = (math.prod(part) for part in (shape[:-contracted], shape[-contracted:]))
        panels = jax.ShapeDtypeStruct((-(-outputs // LANES), inputs + inputs % 2, LANES), jnp.float32)
        return cls(panels, shape, contracted)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, index):
        """All of it, or, of a weight [O, I], the rows of an integer array, which are all there."""
        if index is ...:
            return self
        if self.ndim != 2:
            raise IndexError(f"rows of a weight of shape {self.shape}: it must have two axes")
        return self._floats(self.panels[index // LANES, :, index % LANES], self.shape[1])

    def reshape(self, outputs: int, inputs: int) -> "PackedWeight":
        """As a matrix; ``outputs`` -1: those that there are."""
        return PackedWeight(self.panels, (math.prod(self.shape) // inputs, inputs))

    def dense(self) -> jax.Array:
        """The weight [*out, *in]."""
        matrix = self._floats(self.panels.transpose(0, 2, 1), math.prod(self.shape[-self.contracted :]))
        return matrix.reshape(-1, matrix.shape[-1])[: math.prod(self.shape[: -self.contracted])].reshape(self.shape)

    @staticmethod
    def _floats(rows, inputs: int) -> jax.Array:
        """[..., inputs as they are kept] → float32 [..., inputs]."""
        if rows.dtype == jnp.uint32:
            pairs = jnp.stack([rows << 16, rows & jnp.uint32(0xFFFF0000)], axis=-1)
            rows = jax.lax.bitcast_convert_type(pairs, jnp.float32).reshape(*rows.shape[:-1], -1)
        return rows[..., :inputs]


def is_packed(x) -> bool:
    """Whether x takes the place of a weight's array."""
    return isinstance(x, QuantizedWeight | PackedWeight)


def dense(weight, dtype=None) -> jax.Array:
    """A weight array as it is (cast, where ``dtype`` is given), a `QuantizedWeight` one multiplied out."""
    if isinstance(weight, QuantizedWeight):
        return weight.dense(dtype or jnp.float32)
    return weight if dtype is None else weight.astype(dtype)


def quantize(weight, kind: str, runs: int = 1) -> QuantizedWeight:
    """``runs`` scales for each index of the leading axes; ``kind`` "int8" or "fp8"."""
    dtype, largest = (jnp.int8, 127.0) if kind == "int8" else (jnp.float8_e4m3fn, 448.0)
    split = weight.astype(jnp.float32).reshape(*weight.shape[:-1], runs, -1)
    top = jnp.max(jnp.abs(split), axis=-1)
    scale = jnp.where(top > 0, top, 1.0) / largest
    values = split / scale[..., None]
    if kind == "int8":
        values = jnp.round(values)
    return QuantizedWeight(values.astype(dtype).reshape(weight.shape), scale)

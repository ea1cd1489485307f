"""Weights in other forms than an array [*out, *in]: in few bits, or turned."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash_jax.sharding import said_of_parameters

# Of more, the products of all runs, float32 [T, runs, O], are larger than the weight in bfloat16.
FEW_TOKENS = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scaled:
    """Few bits: ``values`` [..., I] (float8_e4m3fn or int8) times ``scale`` [..., N], one for each of N equal runs of
    the last axis.

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


@partial(jax.tree_util.register_dataclass, data_fields=["matrix"], meta_fields=["contracted"])
@dataclass(frozen=True)
class Turned:
    """A weight [*out, *in] kept as ``matrix`` [*in, *out], with ``contracted`` axes in *in.

    Stands where a weight array stands. On a CPU products of two to eight rows take up to 1.7 times as long in the
    other order (benchmarks/NOTES.md); a layout given to XLA would do, if its CPU compiler did not copy it back.
    """

    matrix: jax.Array
    contracted: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape[self.contracted :] + self.matrix.shape[: self.contracted]

    @property
    def ndim(self) -> int:
        return self.matrix.ndim

    @property
    def dtype(self):
        return self.matrix.dtype

    def __getitem__(self, index):
        """All of it, or, of a weight [O, I], the rows of an integer array."""
        return self if index is ... else jnp.moveaxis(self.matrix[:, index], 0, -1)

    def reshape(self, outputs: int, inputs: int) -> "Turned":
        return Turned(self.matrix.reshape(inputs, outputs))

    def dense(self) -> jax.Array:
        return self.matrix.transpose(*range(self.contracted, self.ndim), *range(self.contracted))

    def matmul(self, x) -> jax.Array:
        """x [T, I] times the transpose of this matrix [O, I] → [T, O]."""
        return jnp.einsum("ti,io->to", x, self.matrix)


def is_form(x) -> bool:
    """Whether something stands for a weight."""
    return isinstance(x, Scaled | Turned)


def turned(module: nnx.Module) -> nnx.Module:
    """``module`` with `Turned` weights, where a part has ``matrices()``: parameter → how many last axes of it are
    contracted, and is not `Scaled`. The arrays they come from are given up, one by one."""
    leaves, structure = jax.tree.flatten(module, is_form)
    for i, contracted in enumerate(said_of_parameters(module, "matrices", 0, is_form)):
        if contracted and not is_form(leaves[i]):
            leaf, kept = leaves[i], leaves[i].ndim - contracted
            # By numpy: nothing to compile for each shape.
            other = np.array(np.asarray(leaf).transpose(*range(kept, leaf.ndim), *range(kept)), order="C")
            leaves[i] = Turned(jax.device_put(other, leaf.device), contracted)
            leaf.delete()
    return jax.tree.unflatten(structure, leaves)


def plain(module: nnx.Module) -> nnx.Module:
    """Undoes `turned`."""
    return jax.tree.map(lambda x: x.dense() if isinstance(x, Turned) else x, module, is_leaf=is_form)


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

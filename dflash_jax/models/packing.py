"""Packed weights for the C++ kernels: a module with `ops.weights.PackedWeight` in place of arrays, and back."""

from typing import TypeVar

import jax
import numpy as np
from flax import nnx

from dflash_jax.ops.weights import PackedWeight, is_packed
from dflash_jax.parallel.sharding import parameter_attribute

M = TypeVar("M", bound=nnx.Module)


def pack_weights(module: M) -> M:
    """A float32 module of one CPU with packed weights.

    Args:
        module: A part that has ``matrices()``, parameter → number of its contracted last axes, gets those parameters
            packed, but for quantised ones. The arrays they come from are deleted, one by one.
    """
    leaves, structure = jax.tree.flatten(module, is_packed)
    for i, contracted in enumerate(parameter_attribute(module, "matrices", 0, is_packed)):
        leaf = leaves[i]
        if contracted and not is_packed(leaf):
            if isinstance(leaf, jax.ShapeDtypeStruct):
                leaves[i] = PackedWeight.abstract(leaf.shape, contracted)
                continue
            # By numpy: nothing to compile for each shape.
            leaves[i] = jax.device_put(PackedWeight.of(np.asarray(leaf), contracted), leaf.device)
            leaf.delete()
    return jax.tree.unflatten(structure, leaves)


def unpack_weights(module: M) -> M:
    """Undoes `pack_weights`."""
    return jax.tree.map(lambda x: x.dense() if isinstance(x, PackedWeight) else x, module, is_leaf=is_packed)

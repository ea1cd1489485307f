"""Packed weights for the C++ kernels: a module with `ops.weights.PackedWeight` in place of arrays, and back."""

from typing import TypeVar

import jax
import numpy as np
from flax import nnx

from dflash_jax.ops.weights import PackedWeight, is_weight
from dflash_jax.parallel.sharding import parameter_attribute

M = TypeVar("M", bound=nnx.Module)


def pack_weights(module: M) -> M:
    """A float32 module of one CPU with packed weights.

    Args:
        module: The module. Its submodules name the parameters to pack in ``matrices()``, parameter → number of its
            contracted last axes. Quantised parameters stay as they are. Each packed parameter's array is deleted.

    Returns:
        The module with packed weights.
    """
    leaves, structure = jax.tree.flatten(module, is_weight)
    for i, contracted in enumerate(parameter_attribute(module, "matrices", 0, is_weight)):
        leaf = leaves[i]
        if contracted and not is_weight(leaf):
            if isinstance(leaf, jax.ShapeDtypeStruct):
                leaves[i] = PackedWeight.abstract(leaf.shape, contracted)
                continue
            # By numpy: nothing to compile for each shape.
            leaves[i] = jax.device_put(PackedWeight.of(np.asarray(leaf), contracted), leaf.device)
            leaf.delete()
    return jax.tree.unflatten(structure, leaves)


def unpack_weights(module: M) -> M:
    """The module with float32 arrays in place of packed weights: undoes `pack_weights`."""
    return jax.tree.map(lambda x: _dense(x) if isinstance(x, PackedWeight) else x, module, is_leaf=is_weight)


_dense = jax.jit(PackedWeight.dense)

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
            contracted last axes. Each packed parameter's arrays are deleted.

    Returns:
        The module with packed weights.
    """
    leaves, structure = jax.tree.flatten(module, is_weight)
    for i, contracted in enumerate(parameter_attribute(module, "matrices", 0, is_weight)):
        leaf = leaves[i]
        if contracted and not isinstance(leaf, PackedWeight):
            arrays = jax.tree.leaves(leaf)
            if isinstance(arrays[0], jax.ShapeDtypeStruct):
                leaves[i] = PackedWeight.abstract(leaf, contracted)
                continue
            # By numpy: nothing to compile for each shape.
            whole = jax.tree.map(np.asarray, leaf)
            leaves[i] = jax.device_put(PackedWeight.of(whole, contracted), arrays[0].device)
            for array in arrays:
                array.delete()
    return jax.tree.unflatten(structure, leaves)


def unpack_weights(module: M) -> M:
    """The module with arrays and `QuantizedWeight` in place of packed weights: undoes `pack_weights`."""
    return jax.tree.map(lambda x: _unpacked(x) if isinstance(x, PackedWeight) else x, module, is_leaf=is_weight)


_unpacked = jax.jit(PackedWeight.unpacked)

"""Modules with the weights that a platform reads fastest (`ops.weights`) in place of arrays, and back."""

from functools import cache
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from dflash_jax.ops.weights import PackedWeight, QuantizedWeight, TransposedWeight, is_exact, is_weight
from dflash_jax.parallel.sharding import parameter_attribute

M = TypeVar("M", bound=nnx.Module)


def pack_weights(module: M, like: M | None = None) -> M:
    """A float32 module of one CPU with packed weights.

    Args:
        module: The module. Its submodules name the parameters to pack in ``matrices()``, parameter → number of its
            contracted last axes. Each packed parameter's arrays are deleted.
        like: A module that is packed. Where other weights are exact in 16 bits than there, all panels are float32, so
            that new weights have one other form and no more.

    Returns:
        The module with packed weights.
    """
    leaves, structure = jax.tree.flatten(module, is_weight)
    matrices = parameter_attribute(module, "matrices", 0, is_weight)
    has_float_panels = like is not None and not _are_exact_alike(leaves, matrices, like)
    for i, contracted in enumerate(matrices):
        leaf = leaves[i]
        if has_float_panels and isinstance(leaf, PackedWeight) and leaf.form is None and not leaf.has_float_panels:
            leaf = _unpacked(leaf)
        if contracted and not isinstance(leaf, PackedWeight):
            arrays = jax.tree.leaves(leaf)
            if isinstance(arrays[0], jax.ShapeDtypeStruct):
                leaves[i] = PackedWeight.abstract(leaf, contracted)
                continue
            # By numpy: nothing to compile for each shape.
            whole = jax.tree.map(np.asarray, leaf)
            packed = PackedWeight.of(whole, contracted, has_float_panels)
            leaves[i] = jax.device_put(packed, arrays[0].device)
            for array in arrays:
                array.delete()
    return jax.tree.unflatten(structure, leaves)


def _are_exact_alike(leaves: list, matrices: list[int], like: Any) -> bool:
    """Whether weights have panels of 16 bits where those of ``like`` do."""
    pairs = zip(leaves, matrices, jax.tree.leaves(like, is_leaf=is_weight), strict=True)
    packed = [(leaf, other) for leaf, contracted, other in pairs if contracted and isinstance(other, PackedWeight)]
    return all(
        (leaf.has_float_panels if isinstance(leaf, PackedWeight) else not is_exact(np.asarray(leaf)))
        == other.has_float_panels
        for leaf, other in packed
        if other.form is None and not isinstance(leaf, QuantizedWeight)
    )


def transpose_experts(module: M) -> M:
    """A module with a `TransposedWeight` in place of experts' weights that are not in few bits.

    Args:
        module: The module. Its submodules say in ``of_experts()`` which parameters can be transposed. Arrays are
            deleted once they are transposed, each device's part by itself.

    Returns:
        The module with transposed weights.
    """
    leaves, structure = jax.tree.flatten(module, is_weight)
    for i, is_of_experts in enumerate(parameter_attribute(module, "of_experts", False, is_weight)):
        leaf = leaves[i]
        if not is_of_experts or isinstance(leaf, TransposedWeight):
            continue
        if isinstance(leaf, jax.ShapeDtypeStruct):
            leaves[i] = jax.eval_shape(TransposedWeight.of, leaf)
            continue
        mesh, division = _division(leaf)
        after = division[0], division[-1], division[-2]
        leaves[i] = _by_device(TransposedWeight.of, mesh, division, after)(leaf)
        leaf.delete()
    return jax.tree.unflatten(structure, leaves)


def _division(array: jax.Array) -> tuple[Any, tuple]:
    """The mesh that an array is placed on, None for one device without one, and how each dimension is divided."""
    sharding, whole = array.sharding, (None,) * array.ndim
    if not isinstance(sharding, NamedSharding):
        return None, whole
    return sharding.mesh, (*sharding.spec, *whole)[: array.ndim]


@cache
def _by_device(function, mesh, before: tuple, after: tuple):
    """``function`` of each device's part of a weight, of which ``before`` and after it ``after`` are the divisions."""
    if mesh is not None:
        specs = PartitionSpec(*before), PartitionSpec(*after)
        function = jax.shard_map(function, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
    return jax.jit(function)


def unpack_weights(module: M) -> M:
    """The module with arrays and `QuantizedWeight` in place of other weights.

    It undoes `pack_weights` and `transpose_experts`.
    """
    return jax.tree.map(plain_weight, module, is_leaf=is_weight)


def plain_weight(weight):
    """An array or a `QuantizedWeight` in place of a `PackedWeight` or a `TransposedWeight`; others as they are."""
    if isinstance(weight, PackedWeight):
        return _unpacked(weight)
    if not isinstance(weight, TransposedWeight):
        return weight
    mesh, (experts, inputs, outputs) = _division(weight.matrices)
    after = (experts, *(None,) * weight.is_pair, outputs, inputs)
    return _by_device(TransposedWeight.untransposed, mesh, (experts, inputs, outputs), after)(weight)


_unpacked = jax.jit(PackedWeight.unpacked)

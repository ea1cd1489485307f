"""Modules with the weights that a platform reads fastest (`ops.weights`) in place of arrays, and back."""

from functools import cache, partial
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from dflash_jax.ops.weights import (
    SCALED_OUTPUTS,
    PackedWeight,
    QuantizedWeight,
    TransposedWeight,
    is_exact,
    is_weight,
    shares_scales,
)
from dflash_jax.parallel.sharding import parameter_attribute, parameter_paths

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
    has_float_panels = like is not None and not _are_exact_alike(module, matrices, like)
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


def _are_exact_alike(module: Any, matrices: list[int], like: Any) -> bool:
    """Whether weights have panels of 16 bits where those of ``like`` do, which may have parameters more."""
    others = dict(zip(parameter_paths(like, is_weight), jax.tree.leaves(like, is_leaf=is_weight), strict=True))
    own = zip(parameter_paths(module, is_weight), jax.tree.leaves(module, is_leaf=is_weight), matrices, strict=True)
    pairs = [(leaf, others.get(path)) for path, leaf, contracted in own if contracted]
    return all(
        (leaf.has_float_panels if isinstance(leaf, PackedWeight) else not is_exact(np.asarray(leaf)))
        == other.has_float_panels
        for leaf, other in pairs
        if isinstance(other, PackedWeight) and other.form is None and not isinstance(leaf, QuantizedWeight)
    )


def transpose_experts(module: M) -> M:
    """A module with a `TransposedWeight` in place of experts' weights.

    Args:
        module: The module. Its submodules say in ``of_experts()`` which parameters can be transposed. Arrays are
            deleted once they are transposed, each device's part by itself.

    Returns:
        The module with transposed weights. Both weights of a mixture stay where one has scales of a form that a
        `TransposedWeight` cannot have.
    """
    leaves, structure = jax.tree.flatten(module, is_weight)
    owners = [path.rpartition(".")[0] for path in parameter_paths(module, is_weight)]
    widths = dict(enumerate(parameter_attribute(module, "of_experts", None, is_weight)))
    unfit = {owners[i] for i, width in widths.items() if width and not _shares_scales(leaves[i], width)}
    for i, width in widths.items():
        leaf = leaves[i]
        if width is None or owners[i] in unfit or isinstance(leaf, TransposedWeight):
            continue
        values = leaf.values if isinstance(leaf, QuantizedWeight) else leaf
        if isinstance(values, jax.ShapeDtypeStruct):
            leaves[i] = jax.eval_shape(_transposed(width), leaf)
            continue
        mesh, (experts, *pair, outputs, inputs) = _division(values)
        after = (experts, outputs, inputs) if width else (experts, inputs, outputs)
        leaves[i] = _by_device(_transposed(width), mesh, (experts, *pair, outputs, inputs), after)(leaf)
        for array in jax.tree.leaves(leaf):
            array.delete()
    return jax.tree.unflatten(structure, leaves)


@cache
def _transposed(width: int) -> partial:
    """One object for each width, by which `_by_device` knows its program again."""
    return partial(TransposedWeight.of, width=width)


def _shares_scales(weight: QuantizedWeight, width: int) -> bool:
    if isinstance(weight.scale, jax.ShapeDtypeStruct):
        # Of shapes nothing else is known: blocks of checkpoints are square.
        return weight.run % SCALED_OUTPUTS == 0
    return bool(_all_share(weight, width))


_all_share = jax.jit(shares_scales, static_argnums=1)


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
    mesh, (experts, second, third, *_) = _division(weight.matrices)
    outputs, inputs = (second, third) if weight.has_parts else (third, second)
    after = (experts, *(None,) * weight.is_pair, outputs, inputs)
    return _by_device(TransposedWeight.untransposed, mesh, (experts, second, third), after)(weight)


_unpacked = jax.jit(PackedWeight.unpacked)

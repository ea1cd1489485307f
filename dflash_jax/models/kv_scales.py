"""Scales of keys and values in FP8: fixed before the first token, so that a token's are the same in every pass.

They are the checkpoint's, or else follow from the weights alone. A norm with the weights g over H numbers gives x with
|x / g| ≤ √H, so that a value of the projection W is |v_d| ≤ √H · ‖W_d · g‖. A normed key has |k_d| ≤ √D · max|g|, and a
rotation keeps the length of pairs. A head's scale is the least power of two with which none of its numbers is larger
than FP8's largest. These bounds are some tens of times what is usual: float8 has the same relative precision over a
range of 30,000 times.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array, Float

from dflash_jax.models.decoder import Decoder
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.layers import Attention, RMSNorm
from dflash_jax.models.mtp import Mtp
from dflash_jax.ops.cache import LARGEST_FP8
from dflash_jax.ops.weights import PackedWeight, QuantizedWeight
from dflash_jax.parallel.sharding import place

M = TypeVar("M", bound=Decoder | Drafter | Mtp)
SCALES = ("k_scale", "v_scale")


def with_fp8_caches(module: M, known: Mapping[str, np.ndarray] = MappingProxyType({})) -> M:
    """A copy of ``module``, over the same arrays, whose keys and values are cached in FP8.

    Args:
        module: A target or a drafter, with arrays or shapes.
        known: Scales of its checkpoint, float32 of one number or of one a KV head, by path, such as
            ``layers.3.mixer.k_scale``.

    Returns:
        The module; every attention has `SCALES`.
    """
    copy: Any = jax.tree.map(lambda x: x, module)
    for i, layer in enumerate(copy.layers):
        mixer = layer.mixer
        if not isinstance(mixer, Attention):
            continue
        # Keys and values of a drafter's context have a norm of their own.
        norms = [layer.input_norm, *([module.hidden_norm] if isinstance(module, Drafter) else [])]
        for name in SCALES:
            setattr(mixer, name, nnx.Param(_scale(mixer, name, norms, known.get(f"layers.{i}.mixer.{name}"))))
    return copy


def is_scale(path: str) -> bool:
    """Whether a parameter, by its path, is one that `with_fp8_caches` adds."""
    return path.rpartition(".")[2] in SCALES


def _scale(
    mixer: Attention, name: str, norms: Sequence[RMSNorm], known: np.ndarray | None
) -> Array | jax.ShapeDtypeStruct:
    parameter, heads = getattr(mixer, name[0]), mixer.spec.num_kv_heads
    array = jax.tree.leaves(parameter)[0]
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((heads,), jnp.float32)
    sharding = array.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
    else:
        sharding = SingleDeviceSharding(next(iter(array.devices())))
    if known is not None:
        return place(np.broadcast_to(known, (heads,)), sharding)
    in_heads = partial(jax.jit, out_shardings=sharding)
    if name == "k_scale" and mixer.spec.qk_norm:
        return in_heads(partial(_of_normed_keys, heads, mixer.k_norm.offset))(mixer.k_norm.weight[...])
    bias = getattr(mixer, f"{name[0]}_bias")[...] if mixer.spec.qkv_bias else None
    of_rows = partial(_of_projection, tuple(norm.offset for norm in norms), name == "k_scale")
    return in_heads(of_rows)(parameter[...], bias, [norm.weight[...] for norm in norms])


def _of_normed_keys(heads: int, offset: float, weight: Float[Array, " D"]) -> Float[Array, " K"]:
    largest = jnp.abs(weight.astype(jnp.float32) + offset).max() * (len(weight) ** 0.5 / LARGEST_FP8)
    return jnp.broadcast_to(_power_of_two(largest), (heads,))


def _of_projection(
    offsets: tuple[float, ...],
    is_rotated: bool,
    weight: Float[Array, "K D H"] | QuantizedWeight | PackedWeight,
    bias: Float[Array, "K D"] | None,
    norms: list[Float[Array, " H"]],
) -> Float[Array, " K"]:
    """The scales of a projection's outputs: bounds of the numbers of each head."""
    if isinstance(weight, PackedWeight):
        weight = weight.dense()
    elif isinstance(weight, QuantizedWeight):
        weight = weight.dense(jnp.float32)
    gain = jnp.stack([jnp.abs(g.astype(jnp.float32) + o) for g, o in zip(norms, offsets, strict=True)]).max(0)
    x = jnp.abs(weight.astype(jnp.float32)) * gain
    squares = float(x.shape[-1])
    if bias is not None:
        # As the weight of one more input of size √H.
        column = jnp.abs(bias.astype(jnp.float32)) * squares**-0.5
        x, squares = jnp.concatenate([x, column[..., None]], axis=-1), 2 * squares
    # A rotated number is at most √2 times the larger one of its pair.
    squares *= 1 + is_rotated
    # Whole numbers: their sum has the same bits in any order, on every mesh and device.
    top = _power_of_two(x.max((1, 2)))
    parts = x / top[:, None, None]
    total = jnp.ceil(parts * parts * 2.0**16).astype(jnp.int32).sum(-1).max(-1)
    exponent = _exponent(total.astype(jnp.float32) * (squares / 2**16 / LARGEST_FP8**2))
    return top * _to_the(jnp.ceil(exponent / 2).astype(jnp.int32))


def _exponent(x: Float[Array, " K"]) -> Array:
    """The least n with 2ⁿ ≥ x; of 0, that of a number that is not large."""
    fraction, exponent = jnp.frexp(jnp.where(x > 0, x, 1.0))
    return jnp.where(fraction == 0.5, exponent - 1, exponent)


def _to_the(n: Array) -> Float[Array, " K"]:
    """2ⁿ, exactly; n is kept in the range of float32."""
    return jax.lax.bitcast_convert_type((jnp.clip(n, -126, 127) + 127) << 23, jnp.float32)


def _power_of_two(x: Float[Array, "*K"]) -> Float[Array, "*K"]:
    """The least power of two that is x or more."""
    return _to_the(_exponent(x))

"""C++ kernels for a CPU: linear maps, attention, rotation, cache writes, the delta rule, experts, noise, frames.

A linear map reads each weight once for all rows. XLA's product of four rows takes twice as long as that of one row,
XLA cannot read weights in bfloat16 faster than in float32, and its small products take tens of microseconds to start
(benchmarks/NOTES.md). `ops.kernels.library` compiles the kernels.
"""

# jax's own annotations are partial: members such as jnp.where have unknown parameter types.
# pyright: reportUnknownMemberType=false

import ctypes
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from dflash_jax.ops.cache import FP8, Bounds, DeltaRecord, DeltaState, KVCache
from dflash_jax.ops.kernels.library import Library, NotBuiltError, threads
from dflash_jax.ops.weights import LANES, PackedWeight

log = logging.getLogger("dflash_jax")

# The largest head size of attention and of the delta rule.
MAX_HEAD_SIZE = 256


HERE = Path(__file__).parent
NAMES = ("panels", "codes", "product", "attention", "delta", "experts", "frame_attention", "noise", "team", "zeros")
LIBRARY = Library(
    "cpu",
    tuple(HERE / f"{name}.cc" for name in NAMES),
    tuple(HERE / f"{name}.h" for name in ("codes", "panels", "shared")),
)


@cache
def why_not() -> str | None:
    """The reason why the kernels cannot be called, or None.

    The first call compiles them if they are not in the cache, registers them, and logs the reason.
    """
    try:
        library = LIBRARY.load()
    except NotBuiltError as e:
        log.warning("on this CPU all kernels are XLA's, which are slower: %s", e)
        return str(e)
    library.DflashThreads(ctypes.c_int64(threads()))
    for name in ("Linear", "Attend", "Rotate", "Write", "AttendFrames", "Mix", "Replay", "Experts", "Noise", "Zeros"):
        name = f"Dflash{name}"
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return None


def linear(
    x: Float[Array, "T I"],
    weights: Sequence[PackedWeight],
    norm: Float[Array, " I"] | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
    norm_bias: Float[Array, " I"] | None = None,
    *,
    return_normed: bool = False,
    swiglu: bool = False,
    biases: Sequence[Float[Array, " O"]] | None = None,
    gelu: bool = False,
    residual: Float[Array, "T O"] | None = None,
    live: Int[Array, ""] | None = None,
) -> list[Array]:
    """`ops.linear.linear` of matrices. Each output has the same bits for any number of tokens.

    Args:
        x: float32 [T, I].
        weights: Matrices [O, I], or one matrix [2 F, I] with ``swiglu``.
        norm: Weight of RMSNorm, [I]; None: no norm.
        eps: Added to the mean of squares, or to the variance.
        offset: Added to the weight of RMSNorm.
        norm_bias: Bias of LayerNorm, [I], whose weight ``norm`` is; None: RMSNorm.
        return_normed: Whether the normed x follows the results.
        swiglu: The first half of the outputs, through silu, multiplies the second half.
        biases: [O] for each weight, added to its result; without ``swiglu``.
        gelu: Whether GELU by tanh follows the biases.
        residual: [T, O], added to each result.
        live: How many rows, from the first, are computed; None: all. The others are undefined.

    Returns:
        float32 [T, O] for each weight, then the normed x if ``return_normed``.
    """
    none = jnp.zeros(0, jnp.float32)
    stacked = [w.index for w in weights if w.index is not None]
    if stacked and len(stacked) < len(weights):
        raise ValueError("weights of a stack and others in one call")
    tokens = x.shape[0]
    shapes = [jax.ShapeDtypeStruct((tokens, w.shape[0] // (1 + swiglu)), jnp.float32) for w in weights]
    if return_normed and norm is not None:
        shapes.append(jax.ShapeDtypeStruct(x.shape, jnp.float32))
    call: Any = jax.ffi.ffi_call("DflashLinear", shapes)
    outputs: list[Array] = call(
        x,
        none if norm is None else norm,
        none if norm_bias is None else norm_bias,
        none if biases is None else jnp.concatenate(biases),
        none if residual is None else residual,
        jnp.zeros(0, jnp.int32) if live is None else live.astype(jnp.int32)[None],
        jnp.stack(stacked).astype(jnp.int32) if stacked else jnp.zeros(0, jnp.int32),
        *(w.panels for w in weights),
        forms=forms_of(*weights),
        eps=np.float32(eps),
        offset=np.float32(offset),
        gated=swiglu,
        gelu=gelu,
    )
    return [*outputs, x] if return_normed and norm is None else outputs


def forms_of(*weights: PackedWeight) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The attribute ``forms`` of a call: the fields of `Form` in panels.h for each weight."""
    fields = [(0, 1, 0, 0, 0) if w.form is None else w.form.fields() for w in weights]
    return np.asarray(fields, np.int64).reshape(-1)


def can_fuse_swiglu(weight: PackedWeight) -> bool:
    """Whether `linear` can compute SwiGLU with a weight [2, F, H]: its halves must share no panel."""
    return weight.shape[1] % LANES == 0


def why_not_attended(q: Array, cache: KVCache) -> str | None:
    """The reason why `attend` does not support queries [B, T, N, D] and a cache, or None."""
    size = q.shape[-1]
    if q.dtype != jnp.float32 or cache.k.dtype not in (jnp.float32, FP8):
        cached = jnp.dtype(cache.k.dtype).name
        return f"{jnp.dtype(q.dtype).name} over {cached}: the kernel is for float32, over that or {FP8.__name__}"
    if size % LANES or size > MAX_HEAD_SIZE:
        return f"heads of {size}: sizes are multiples of {LANES} up to {MAX_HEAD_SIZE}"
    return None


def attend(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    mask: Bool[Array, "..."] | None,
    cache: KVCache,
    length: Int[Array, " B"],
    bounds: Bounds,
) -> Float[Array, "B T N D"]:
    """`ops.attention.attention` in float32, with a cache and bounds, without a gate and without a gradient."""
    t = q.shape[1]
    block_mask = jnp.ones((1, 1, 1), bool) if mask is None else mask
    if mask is not None:
        block_mask = jnp.broadcast_to(block_mask, (block_mask.shape[0] if block_mask.ndim == 3 else 1, t, t))
    context = cache.k, cache.v, cache.table, cache.row_indices(), length
    seen = bounds.first, bounds.recent, bounds.sinks
    call: Any = jax.ffi.ffi_call("DflashAttend", jax.ShapeDtypeStruct(q.shape, jnp.float32))
    return call(q, k, v, block_mask, *context, *seen, causal=mask is None)


def rotate(
    q: Float[Array, "B T N halves D"] | None,
    k: Float[Array, "B T K D"],
    angles: tuple[Float[Array, "#B T half"], Float[Array, "#B T half"]],
    norms: tuple[Float[Array, " D"] | None, Float[Array, " D"] | None],
    eps: float = 0.0,
    offset: float = 0.0,
) -> tuple[Float[Array, "B T N D"] | None, Float[Array, "B T K D"]]:
    """`ops.rotation.rotate` in float32, without a gradient.

    XLA computes the cosine and the sine of an angle again for each head, as parts of its fusions.
    """
    none = jnp.zeros(0, jnp.float32)
    each = [(x, norm) for x, norm in zip((q, k[..., None, :]), norms, strict=True) if x is not None]
    shapes = [jax.ShapeDtypeStruct((*x.shape[:3], x.shape[4]), jnp.float32) for x, _ in each]
    inputs = [a for x, norm in each for a in (x, none if norm is None else norm)]
    call: Any = jax.ffi.ffi_call("DflashRotate", shapes, vmap_method="sequential")
    *queries, keys = call(*angles, *inputs, eps=np.float32(eps), offset=np.float32(offset))
    return (queries[0] if queries else None), keys


def write(
    k_buffer: Shaped[Array, "pages K P D"],
    v_buffer: Shaped[Array, "pages K P D"],
    table: Int[Array, "rows n"],
    k: Shaped[Array, "B T K D"],
    v: Shaped[Array, "B T K D"],
    rows: Int[Array, " B"],
    positions: Int[Array, "B T"],
) -> list[Array]:
    """`ops.cache_write.reference` in place, for keys and values in the buffers' dtype."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_buffer, v_buffer)]
    call: Any = jax.ffi.ffi_call("DflashWrite", shapes, input_output_aliases={0: 0, 1: 1})
    return call(k_buffer, v_buffer, table, k, v, rows, positions.astype(jnp.int32))


def why_not_frames(qkv: Array) -> str | None:
    """The reason why `attend_frames` does not support queries, keys and values [N, 3, heads, D], or None."""
    if qkv.dtype in (jnp.float32, jnp.bfloat16):
        return None
    return f"{jnp.dtype(qkv.dtype).name}: the kernel is for float32 and bfloat16"


def attend_frames(
    qkv: Float[Array, "N 3 heads D"],
    angles: tuple[Float[Array, "N half"], Float[Array, "N half"]],
    low: Int[Array, " N"],
    high: Int[Array, " N"],
) -> Float[Array, "N heads D"]:
    """`ops.frame_attention.frame_attention`, computed in float32.

    The bits of a row depend on its query and on the keys and values that it sees, and on nothing else.
    """
    shape = jax.ShapeDtypeStruct((len(qkv), *qkv.shape[2:]), qkv.dtype)
    call: Any = jax.ffi.ffi_call("DflashAttendFrames", shape)
    return call(qkv, *angles, low, high)


def why_not_gated_delta(state: DeltaState) -> str | None:
    """The reason why `gated_delta` and `replay` do not support a state, or None."""
    keys, values = state.recurrent.shape[-2:]
    if state.conv_inputs.dtype != jnp.float32:
        return f"{jnp.dtype(state.conv_inputs.dtype).name}: the kernel is for float32"
    if keys % LANES or values % LANES or keys > MAX_HEAD_SIZE:
        return f"heads of {keys} and {values}: sizes are multiples of {LANES}, of keys up to {MAX_HEAD_SIZE}"
    return None


def gated_delta(
    qkvz: Float[Array, "B T G CZ"],
    gates: Float[Array, "B T 2 G R"],
    state: DeltaState,
    conv_weight: Float[Array, "G C W"],
    a_log: Float[Array, "G R"],
    dt_bias: Float[Array, "G R"],
    norm: Float[Array, " Dv"],
    eps: float,
) -> list[Array]:
    """`ops.gated_delta.gated_delta` in float32, for one document per sequence, without a gradient.

    Returns:
        y, and the fields of the `ops.cache.DeltaRecord`.
    """
    b, t, g = qkvz.shape[:3]
    r, dk, dv = state.recurrent.shape[2:]
    shapes = [(b, t, g, r, dv), (b, t, g, dk), (b, t, g, r, dv), (b, t, g, r), (b, t, g, conv_weight.shape[1])]
    call: Any = jax.ffi.ffi_call("DflashMix", [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])
    buffers = state.recurrent, state.conv_inputs, state.row_indices()
    return call(qkvz, gates, *buffers, conv_weight, a_log, dt_bias, norm, eps=np.float32(eps))


def replay(state: DeltaState, record: DeltaRecord, n: Int[Array, " B"]) -> list[Array]:
    """`ops.gated_delta.replay` in place: the state's recurrent and convolution arrays."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (state.recurrent, state.conv_inputs)]
    call: Any = jax.ffi.ffi_call("DflashReplay", shapes, input_output_aliases={0: 0, 1: 1})
    buffers = state.recurrent, state.conv_inputs, state.row_indices()
    return call(*buffers, record.k, record.delta, record.log_decay, record.conv_inputs, n)


def mixture(
    x: Float[Array, "N H"],
    logits: Float[Array, "N E"],
    live: Bool[Array, " N"],
    gate_up: PackedWeight,
    down: PackedWeight,
    top: int,
    normalise: bool,
) -> Float[Array, "N H"]:
    """`ops.moe.mixture` in float32 with all experts, without a shared expert, a residual and a gradient.

    Args:
        x: float32 [N, H].
        logits: Router logits, [N, E].
        live: bool [N].
        gate_up: [E, 2, F, H].
        down: [E, H, F].
        top: Experts per token.
        normalise: Whether the weights of a token's experts are normalised to a sum of 1.

    Returns:
        float32 [N, H].
    """
    call: Any = jax.ffi.ffi_call("DflashExperts", jax.ShapeDtypeStruct(x.shape, jnp.float32))
    options: dict[str, Any] = {"features": np.int64(gate_up.shape[2]), "top": np.int64(top), "normalise": normalise}
    options["forms"] = forms_of(gate_up, down)
    return call(x, logits, live, gate_up.panels, down.panels, **options)


def noise(seed: UInt32[Array, " B"], positions: Int[Array, "B T"], ids: Int[Array, " V"]) -> Float[Array, "B T V"]:
    """`ops.sampling_noise.gumbel_noise`, but for roundings in the last places."""
    call: Any = jax.ffi.ffi_call("DflashNoise", jax.ShapeDtypeStruct((*positions.shape, len(ids)), jnp.float32))
    return call(seed, positions.astype(jnp.int32), ids.astype(jnp.uint32))


def zeros(like: Array | jax.ShapeDtypeStruct) -> Array:
    """Zeros in the shape and dtype of ``like``, which take time and memory only where they are written."""
    call: Any = jax.ffi.ffi_call("DflashZeros", jax.ShapeDtypeStruct(like.shape, like.dtype))
    return call()

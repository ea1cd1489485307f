"""Kernels for a CPU, in C++: products of rows by a weight, which is read once for all of them, attention, the gated
delta rule, mixtures of experts, and the noise of draws.

XLA's own product of four rows takes twice as long as one of one row, cannot read weights in bfloat16 faster than in
float32, and its small products take tens of microseconds to start (benchmarks/NOTES.md). `library` compiles them.
"""

import ctypes
import logging
import subprocess
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.ops.kernels.cpu.library import find_compiler, load, threads

log = logging.getLogger("dflash_jax")

LANES = 16  # outputs in a panel
MOST_SIZE = 256  # of heads, of attention and of the delta rule


@cache
def why_not() -> str:
    """Why the kernels cannot be called; empty where they can. The first call compiles them if they are
    not in the cache, registers them, and logs a reason."""
    compiler = find_compiler()
    if compiler is None:
        log.warning("no C++ compiler is here (c++, or CXX): on this CPU all kernels are XLA's, which are slower")
        return "no C++ compiler is here (c++, or CXX)"
    try:
        library = load(compiler)
    except (ImportError, OSError, subprocess.SubprocessError) as e:
        lines = (getattr(e, "stderr", None) or str(e)).strip().splitlines()
        reason = next((line for line in lines if "error" in line), lines[0] if lines else type(e).__name__)
        log.warning("%s could not make the kernels for this CPU, all are XLA's: %s", " ".join(compiler), reason)
        return f"{' '.join(compiler)} could not compile them: {reason}"
    library.DflashThreads(ctypes.c_int64(threads()))
    for name in ("DflashLinear", "DflashAttend", "DflashMix", "DflashReplay", "DflashExperts", "DflashNoise"):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return ""


def linear(x, weights, norm=None, eps: float = 0.0, offset: float = 0.0, *, kept=False, gated=False, residual=None):
    """`ops.linear.linear` of x [T, I] float32 and matrices [O, I] (`ops.weights.PackedWeight`), the weight of
    RMSNorm ``norm`` [I]; ``gated``: of one matrix [2 · F, I]; ``residual`` [T, O]. The sum of each output is the same
    for any number of rows, bit for bit."""
    none = jnp.zeros(0, jnp.float32)
    rows = x.shape[0]
    shapes = [jax.ShapeDtypeStruct((rows, w.shape[0] // (1 + gated)), jnp.float32) for w in weights]
    if kept and norm is not None:
        shapes.append(jax.ShapeDtypeStruct(x.shape, jnp.float32))
    made = jax.ffi.ffi_call("DflashLinear", shapes)(
        x,
        none if norm is None else norm,
        none if residual is None else residual,
        *(w.panels for w in weights),
        eps=np.float32(eps),
        offset=np.float32(offset),
        gated=gated,
    )
    return [*made, x] if kept and norm is None else made


def gates(weight) -> bool:
    """Whether one call of `linear` does SwiGLU behind a weight [2, F, H]: the halves share no panel."""
    return weight.shape[1] % LANES == 0


def why_not_attended(q, cache) -> str | None:
    """Why `attend` does not take these; None where it does."""
    size = q.shape[-1]
    if not q.dtype == cache.k.dtype == jnp.float32:
        return f"{jnp.dtype(q.dtype).name}: it is for float32"
    if size % LANES or size > MOST_SIZE:
        return f"heads of {size}: sizes are multiples of {LANES} up to {MOST_SIZE}"
    return None


def attend(q, k, v, own_mask, cache, length, bounds):
    """As `ops.attention.attention`, with a cache and bounds, and without a gate. It has no gradient."""
    b, t = q.shape[:2]
    own = jnp.ones((1, 1, 1), bool) if own_mask is None else own_mask
    if own_mask is not None:
        own = jnp.broadcast_to(own, (own.shape[0] if own.ndim == 3 else 1, t, t))
    rows = jnp.arange(b, dtype=jnp.int32) if cache.rows is None else cache.rows
    args = (q, k, v, own, cache.k, cache.v, rows, length, bounds.first, bounds.recent, bounds.sinks)
    call = jax.ffi.ffi_call("DflashAttend", jax.ShapeDtypeStruct(q.shape, jnp.float32))
    return call(*args, ring_sinks=np.int64(cache.sinks if cache.ring else -1), causal=own_mask is None)


def why_not_mixed(state) -> str | None:
    """Why `mix` and `replay` do not take an `ops.cache.DeltaState`; None where they do."""
    keys, values = state.recurrent.shape[-2:]
    if state.conv.dtype != jnp.float32:
        return f"{jnp.dtype(state.conv.dtype).name}: it is for float32"
    if keys % LANES or values % LANES or keys > MOST_SIZE:
        return f"heads of {keys} and {values}: sizes are multiples of {LANES}, of keys up to {MOST_SIZE}"
    return None


def mix(qkvz, gates, state, taps, a_log, dt_bias, norm, eps: float):
    """As `ops.gated_delta.gated_delta`, all float32, of one document a row: y and the fields of its `DeltaRecord`. It
    has no gradient."""
    b, t, g = qkvz.shape[:3]
    r, dk, dv = state.recurrent.shape[2:]
    shapes = [(b, t, g, r, dv), (b, t, g, dk), (b, t, g, r, dv), (b, t, g, r), (b, t, g, taps.shape[1])]
    call = jax.ffi.ffi_call("DflashMix", [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])
    held = state.recurrent, state.conv, state.row_indices()
    return call(qkvz, gates, *held, taps, a_log, dt_bias, norm, eps=np.float32(eps))


def replay(state, record, n):
    """As `ops.gated_delta.replay`: the state's arrays, written in place."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (state.recurrent, state.conv)]
    call = jax.ffi.ffi_call("DflashReplay", shapes, input_output_aliases={0: 0, 1: 1})
    held = state.recurrent, state.conv, state.row_indices()
    return call(*held, record.k, record.delta, record.log_decay, record.conv, n)


def mixture(x, logits, live, gate_up, down, top: int, normalise: bool):
    """As `ops.moe.mixture`, of x [T, H] float32, router logits [T, E], ``live`` bool [T] and all experts in panels,
    [E, 2, F, H] and [E, H, F]; without a shared expert and a residual. It has no gradient."""
    call = jax.ffi.ffi_call("DflashExperts", jax.ShapeDtypeStruct(x.shape, jnp.float32))
    options = {"features": np.int64(gate_up.shape[2]), "top": np.int64(top), "normalise": normalise}
    return call(x, logits, live, gate_up.panels, down.panels, **options)


def noise(seed, positions, ids):
    """As `ops.sampling_noise.gumbel_noise`, but for roundings in the last places."""
    call = jax.ffi.ffi_call("DflashNoise", jax.ShapeDtypeStruct((*positions.shape, len(ids)), jnp.float32))
    return call(seed, positions.astype(jnp.int32), ids.astype(jnp.uint32))

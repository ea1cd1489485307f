"""Kernels for a CPU, in C++: products of rows by a weight, which is read once for all of them, attention, the gated
delta rule, mixtures of experts, and the noise of draws.

XLA's own product of four rows takes twice as long as one of one row, cannot read weights in bfloat16 faster than in
float32, and its small products take tens of microseconds to start (benchmarks/NOTES.md). Compiled when first needed, in
seconds, by the C++ compiler that is there, for this very CPU, and kept in the user's cache directory.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

log = logging.getLogger("dflash_jax")

HERE = Path(__file__).parent
SOURCES = [HERE / f"cpu_{name}.cc" for name in ("panels", "product", "attention", "delta", "experts", "noise", "team")]
HEADERS = [HERE / f"cpu_{name}.h" for name in ("panels", "shared")]
NATIVE = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
FLAGS = ("-O3", NATIVE, "-std=c++20", "-fPIC", "-pthread", "-w")
LANES = 16  # outputs in a panel
MOST_SIZE = 256  # of heads, of attention and of the delta rule


@cache
def is_here() -> bool:
    """Whether the kernels can be called; compiles and registers them where it has to. Without a compiler, or where
    compilation fails, says so once."""
    compiler = find_compiler()
    if compiler is None:
        log.warning("no C++ compiler is here (c++, or CXX): on this CPU all kernels are XLA's, which are slower")
        return False
    try:
        library = _loaded(compiler)
    except (ImportError, OSError, subprocess.SubprocessError) as e:
        lines = (getattr(e, "stderr", None) or str(e)).strip().splitlines()
        reason = next((line for line in lines if "error" in line), lines[0] if lines else type(e).__name__)
        log.warning("%s could not make the kernels for this CPU, all are XLA's: %s", " ".join(compiler), reason)
        return False
    library.DflashThreads(ctypes.c_int64(threads()))
    for name in ("DflashLinear", "DflashAttend", "DflashMix", "DflashReplay", "DflashExperts", "DflashNoise"):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return True


def threads() -> int:
    """As many as the process may use cores, or OMP_NUM_THREADS."""
    if (asked := os.environ.get("OMP_NUM_THREADS", "")).isdecimal():
        return max(1, int(asked))
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_compiler() -> list[str] | None:
    """The command, or None."""
    command = shlex.split(os.environ.get("CXX") or "c++")
    found = shutil.which(command[0])
    return [found, *command[1:]] if found else None


def _loaded(compiler: list[str]) -> ctypes.CDLL:
    library = compiled(compiler)
    try:
        return ctypes.CDLL(str(library))
    except OSError:
        # Made by another compiler's libraries, or not written to its end.
        library.unlink()
        return ctypes.CDLL(str(compiled(compiler)))


def compiled(compiler: list[str]) -> Path:
    """The library, made where it is not there yet."""
    from platformdirs import user_cache_path

    directory = user_cache_path("dflash_jax") / "kernels"
    versions = (str(os.stat(compiler[0]).st_mtime_ns), *platform.libc_ver(), jaxlib.__version__)
    digest = hashlib.sha256("\0".join((*compiler, *FLAGS, *versions, _cpu())).encode())
    for source in (*SOURCES, *HEADERS):
        digest.update(source.read_bytes())
    library = directory / f"cpu-{digest.hexdigest()[:16]}.so"
    if not library.exists():
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=directory) as made:

            def run(*args: str) -> None:
                command = [*compiler, *FLAGS, *args]
                subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=300)

            objects = [f"{made}/{source.stem}.o" for source in SOURCES]
            with ThreadPoolExecutor(threads()) as pool:
                include = f"-I{jax.ffi.include_dir()}"
                list(pool.map(lambda source, o: run(include, "-c", str(source), "-o", o), SOURCES, objects))
            run("-shared", *objects, "-o", f"{made}/it.so")
            os.replace(f"{made}/it.so", library)
    return library


def _cpu() -> str:
    """What tells the machines that share a home directory apart: the compiled code is for one kind of CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def linear(x, weights, norm=None, eps: float = 0.0, offset: float = 0.0, *, kept=False, gated=False, residual=None):
    """`models.parts.linear` of x [T, I] float32 and matrices [O, I] in panels (`models.weights.Panels`), the weight of
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


def attends(q, cache) -> bool:
    """Whether `attend` takes these."""
    size = q.shape[-1]
    return q.dtype == cache.k.dtype == jnp.float32 and size % LANES == 0 and size <= MOST_SIZE


def attend(q, k, v, own_mask, cache, length, bounds):
    """As `cache.attend`, with a cache and bounds, and without a gate. It has no gradient."""
    b, t = q.shape[:2]
    own = jnp.ones((1, 1, 1), bool) if own_mask is None else own_mask
    if own_mask is not None:
        own = jnp.broadcast_to(own, (own.shape[0] if own.ndim == 3 else 1, t, t))
    rows = jnp.arange(b, dtype=jnp.int32) if cache.rows is None else cache.rows
    args = (q, k, v, own, cache.k, cache.v, rows, length, bounds.first, bounds.recent, bounds.sinks)
    call = jax.ffi.ffi_call("DflashAttend", jax.ShapeDtypeStruct(q.shape, jnp.float32))
    return call(*args, ring_sinks=np.int64(cache.sinks if cache.ring else -1), causal=own_mask is None)


def mixes(state) -> bool:
    """Whether `mix` and `replay` take this `cache.DeltaState`."""
    keys, values = state.recurrent.shape[-2:]
    return state.conv.dtype == jnp.float32 and keys % LANES == values % LANES == 0 and keys <= MOST_SIZE


def mix(qkvz, gates, state, taps, a_log, dt_bias, norm, eps: float):
    """As `models.gated_delta.mix`, all float32, of one document a row: y and the fields of its `DeltaRecord`. It has no
    gradient."""
    b, t, g = qkvz.shape[:3]
    r, dk, dv = state.recurrent.shape[2:]
    shapes = [(b, t, g, r, dv), (b, t, g, dk), (b, t, g, r, dv), (b, t, g, r), (b, t, g, taps.shape[1])]
    call = jax.ffi.ffi_call("DflashMix", [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])
    held = state.recurrent, state.conv, state.all_rows()
    return call(qkvz, gates, *held, taps, a_log, dt_bias, norm, eps=np.float32(eps))


def replay(state, record, n):
    """As `cache.replay`: the state's arrays, written where they lie."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (state.recurrent, state.conv)]
    call = jax.ffi.ffi_call("DflashReplay", shapes, input_output_aliases={0: 0, 1: 1})
    held = state.recurrent, state.conv, state.all_rows()
    return call(*held, record.k, record.delta, record.log_decay, record.conv, n)


def mixture(x, logits, live, gate_up, down, top: int, normalise: bool):
    """As `models.moe.mixture`, of x [T, H] float32, router logits [T, E], ``live`` bool [T] and all experts in panels,
    [E, 2, F, H] and [E, H, F]; without a shared expert and a residual. It has no gradient."""
    call = jax.ffi.ffi_call("DflashExperts", jax.ShapeDtypeStruct(x.shape, jnp.float32))
    options = {"features": np.int64(gate_up.shape[2]), "top": np.int64(top), "normalise": normalise}
    return call(x, logits, live, gate_up.panels, down.panels, **options)


def noise(seed, positions, ids):
    """As `sampling.gumbel_noise`, but for roundings in the last places."""
    call = jax.ffi.ffi_call("DflashNoise", jax.ShapeDtypeStruct((*positions.shape, len(ids)), jnp.float32))
    return call(seed, positions.astype(jnp.int32), ids.astype(jnp.uint32))

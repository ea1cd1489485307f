"""Triton's interpreter in place of a GPU: kernels run in NumPy, inside compiled programs too. For tests and checks.

It needs torch, whose tensors the interpreter takes, and TRITON_INTERPRET=1 in the environment when Triton is imported.
"""

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.core import Tracer

from dflash_jax.errors import InputError
from dflash_jax.ops.backend import Backend
from dflash_jax.ops.card import HOPPER
from dflash_jax.ops.kernels.triton.call import DEPENDENT, Launch, calling
from dflash_jax.ops.kernels.triton.launch import launch_by_default, launching

# The backend of models and operations whose kernels are interpreted.
INTERPRETED = Backend.for_card(HOPPER)
# Dtypes that NumPy lacks, which are passed as their bits.
BITS = {"float8_e4m3fn": np.uint8, "bfloat16": np.int16}
# Counted beside the kernels: the calls of `launch_p` that were traced.
CALLS = "calls"
# The interpreter keeps a program's number and its patches of Triton's language in module globals.
_LOCK = threading.Lock()


def interpret(launch: Launch) -> list[np.ndarray]:
    """Runs a launch in the interpreter, and returns what `launch.triton_call` returns, for concrete arrays.

    Elements that no program writes are NaN, or an integer that is no index.
    """
    import torch

    args, outputs = [_to_torch(x) for x in launch.args], [_to_torch(_unwritten(spec)) for spec in launch.out]
    # XLA's threads round subnormal numbers to zero, a card does not.
    torch.set_flush_denormal(False)
    with _LOCK:
        launch.kernel[launch.grid](*args, *outputs, **launch.meta)
    return [_to_numpy(x) for x in (*(args[i] for i in launch.in_place), *outputs)]


def _unwritten(spec) -> np.ndarray:
    is_float = jnp.issubdtype(spec.dtype, jnp.floating)
    return np.full(spec.shape, np.nan if is_float else np.iinfo(spec.dtype).max // 2, spec.dtype)


def _to_torch(x):
    import torch

    x = np.array(x)
    for name, bits in BITS.items():
        if x.dtype == jnp.dtype(name):
            return torch.from_numpy(x.view(bits)).view(getattr(torch, name))
    return torch.from_numpy(x)


def _to_numpy(x) -> np.ndarray:
    import torch

    for name, bits in BITS.items():
        if x.dtype == getattr(torch, name):
            return x.view(getattr(torch, jnp.dtype(bits).name)).numpy().view(jnp.dtype(name))
    return x.numpy()


@contextmanager
def interpreting(emulate_tf32: bool = False, joined: bool = False) -> Iterator[Counter]:
    """A context in which kernels are interpreted.

    Args:
        joined: Whether launches are calls of `launch_p`, which `launch.chained` joins.
        emulate_tf32: Products of float32 in TF32 lose the 13 lowest bits of their operands, as a tensor core that
            truncates them does. Else they are products of float32.

    Yields:
        How often each kernel ran, by name, and `CALLS`.

    Raises:
        InputError: TRITON_INTERPRET was not set.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise InputError("Triton's interpreter: set TRITON_INTERPRET=1 before Python starts")
    from triton.runtime import interpreter

    ran: Counter = Counter()

    def launcher(launch: Launch) -> tuple:
        def run(*arrays):
            ran[launch.kernel.fn.__name__] += 1
            return tuple(interpret(replace(launch, args=arrays)))

        if not any(isinstance(x, Tracer) for x in launch.args):
            return tuple(map(jnp.asarray, run(*launch.args)))
        written = [jax.ShapeDtypeStruct(launch.args[i].shape, launch.args[i].dtype) for i in launch.in_place]
        return tuple(jax.pure_callback(run, (*written, *launch.out), *launch.args))

    def implementation(*args, kernels, results, aliases):
        def run(*arrays):
            # Arguments that are overwritten are their results, too.
            overwritten = dict(aliases)
            buffers = [np.array(x) if i in overwritten else x for i, x in enumerate(arrays)]
            places = {j: i for i, j in aliases}
            buffers += [buffers[places[j]] if j in places else _unwritten(x) for j, x in enumerate(results)]
            for kernel in kernels:
                ran[kernel.kernel.fn.__name__] += 1
                tensors = [_to_torch(buffers[i]) for i in kernel.buffers]
                meta = dict(kernel.meta)
                # Here a kernel begins after the one before it has ended.
                meta |= {DEPENDENT: False} if DEPENDENT in meta else {}
                with _LOCK:
                    kernel.kernel[kernel.grid](*tensors, **meta)
                for i, tensor in zip(kernel.buffers, tensors, strict=True):
                    if i >= len(arrays) or i in overwritten:
                        buffers[i][...] = _to_numpy(tensor).reshape(buffers[i].shape)
            return tuple(buffers[len(arrays) :])

        ran[CALLS] += 1
        return jax.pure_callback(run, tuple(results), *args)

    def patch_tensor(tensor, scope):
        original_patch(tensor, scope)
        # A loop's bound may be an array of one element, which NumPy no longer takes for a number.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    def dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        truncated = emulate_tf32 and str(input_precision).endswith("TF32")
        a, b = _operand(a, truncated), _operand(b, truncated)
        if d.dtype.scalar != interpreter.tl.float32:
            return original_dot(self, a, b, d, input_precision, None)
        # In float64, and rounded once: a library's product in float32 adds a row in an order that depends on the row's
        # place, and on the processor.
        wide = interpreter.TensorHandle(d.data.astype(np.float64), interpreter.tl.float64)
        product = original_dot(self, a, b, wide, input_precision, None)
        return interpreter.TensorHandle(product.data.astype(np.float32), interpreter.tl.float32)

    def dot_scaled(self, a, a_scale, a_format, b, b_scale, b_format, fast_math, a_packed, b_packed, d):
        # The interpreter takes every scale for a power of two, those in float8 too.
        a, b = _fp4(a.data, a_scale.data), _fp4(b.data.T, b_scale.data)
        return interpreter.TensorHandle((a @ b.T + d.data).astype(np.float32), interpreter.tl.float32)

    def binary_op(self, a, b, op):
        if a.dtype.scalar != interpreter.tl.bfloat16:
            return original_op(self, a, b, op)
        bits = op(_operand(a, False).data, _operand(b, False).data).astype(jnp.bfloat16).view(np.uint16)
        return interpreter.TensorHandle(bits, interpreter.tl.bfloat16)

    original_patch, builder = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder
    original_dot, original_op = builder.create_dot, builder.binary_op
    with ExitStack() as stack:
        for of, name, value in (
            (interpreter, "_patch_lang_tensor", patch_tensor),
            (builder, "create_dot", dot),
            (builder, "create_dot_scaled", dot_scaled),
            (builder, "binary_op", binary_op),
        ):
            stack.enter_context(mock.patch.object(of, name, value))
        stack.enter_context(launching(launch_by_default if joined else launcher))
        stack.enter_context(calling(implementation))
        yield ran


@contextmanager
def small_grids() -> Iterator[None]:
    """Gives kernels few programs, which the interpreter runs one after another, inside the context.

    Chunks of choices whose counts need a kernel by themselves are smaller too, and of small models only the routers
    have so few outputs that each row is a program's.
    """
    from dflash_jax.ops.kernels.triton import attention as triton_attention
    from dflash_jax.ops.kernels.triton import experts as triton_experts
    from dflash_jax.ops.kernels.triton import linear as triton_linear
    from dflash_jax.ops.kernels.triton import routing as triton_routing

    with ExitStack() as stack:
        for module, name, value in (
            (triton_attention, "PROGRAMS", 12),
            (triton_attention, "LONG_PROGRAMS", 12),
            (triton_experts, "GATE_UP_ONE", (16, 1, 1)),
            (triton_experts, "DOWN_ONE", (32, 1, 1)),
            (triton_linear, "BY_ROW_OUTPUTS", 32),
            (triton_routing, "MAX_COUNTED_CHUNKS", 2),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def _fp4(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Pairs of codes of e2m1 [R, K / 2] by scales in float8_e4m3fn [R, K / 16], float64 [R, K]."""
    pairs = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
    numbers = pairs.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return numbers * scale.view(ml_dtypes.float8_e4m3fn).astype(np.float64).repeat(16, axis=1)


def _operand(x, truncated: bool):
    """An operand of a product: bfloat16, which the interpreter holds as integers, as float32; float32 as TF32."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    if x.dtype.scalar == tl.bfloat16:
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
    if truncated and x.dtype.scalar == tl.float32:
        bits = np.ascontiguousarray(x.data).view(np.uint32) & np.uint32(0xFFFFE000)
        return TensorHandle(bits.view(np.float32), tl.float32)
    return x

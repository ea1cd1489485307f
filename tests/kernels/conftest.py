"""Triton's interpreter runs the kernels: NumPy under the hood, torch tensors at the surface."""

from importlib import import_module

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
interpreter = pytest.importorskip("triton.runtime.interpreter")

MODULES = [f"triton_{name}" for name in ("attention", "chunks", "delta", "experts", "project", "routing")]


def to_torch(x):
    x = np.asarray(x)
    if x.dtype == jnp.float8_e4m3fn:
        return torch.from_numpy(x.view(np.uint8).copy()).view(torch.float8_e4m3fn)
    return torch.from_numpy(np.array(x))


def interpreted(kernel, args, out, grid, num_warps=4, num_stages=2, input_output_aliases=None, **meta):
    """`launch.triton_call` without a GPU. What no program writes is NaN, or an integer that is no index."""
    held, aliases = [to_torch(x) for x in args], input_output_aliases or {}
    made = {i: held[argument] for argument, i in aliases.items()}
    for i in set(range(len(out))) - set(made):
        dtype = getattr(torch, jnp.dtype(out[i].dtype).name)
        made[i] = torch.full(out[i].shape, float("nan") if dtype.is_floating_point else 1 << 30, dtype=dtype)
    made = [made[i] for i in range(len(out))]
    kernel[grid](*held, *(m for i, m in enumerate(made) if i not in aliases.values()), **meta)
    return tuple(jnp.asarray(m.numpy()) for m in made)


@pytest.fixture(scope="module", autouse=True)
def interpreter_for_cpu():
    patch = pytest.MonkeyPatch()
    # It reads a loop's bound from an array of one element, which NumPy takes from scalars only.
    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    patch.setattr(interpreter, "_patch_lang_tensor", patched)
    modules = [import_module(f"dflash_jax.kernels.{name}") for name in MODULES]
    for module in modules:
        patch.setattr(module, "triton_call", interpreted)
    triton_attention, _, _, triton_experts, _, triton_routing = modules
    patch.setattr(triton_routing, "_COUNTED", 4)
    # Programs run one after another.
    patch.setattr(triton_attention, "PROGRAMS", 12)
    patch.setattr(triton_experts, "GATE_UP_ONE", (16, 1, 1))
    patch.setattr(triton_experts, "DOWN_ONE", (32, 1, 1))
    yield
    patch.undo()

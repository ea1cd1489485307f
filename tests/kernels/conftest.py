"""Triton's interpreter runs the kernels: NumPy under the hood, torch tensors at the surface."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton.runtime.interpreter")

from triton_interpreter import interpreting


@pytest.fixture(scope="module", autouse=True)
def interpreter_for_cpu():
    from dflash_jax.kernels import triton_attention, triton_experts, triton_routing

    with pytest.MonkeyPatch.context() as patch, interpreting():
        patch.setattr(triton_routing, "_COUNTED", 4)
        # Programs run one after another.
        patch.setattr(triton_attention, "PROGRAMS", 12)
        patch.setattr(triton_experts, "GATE_UP_ONE", (16, 1, 1))
        patch.setattr(triton_experts, "DOWN_ONE", (32, 1, 1))
        yield

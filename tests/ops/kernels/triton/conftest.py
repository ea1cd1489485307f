"""Triton's interpreter runs the kernels: NumPy under the hood, torch tensors at the surface."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton.runtime.interpreter")

from dflash_jax.tools.triton_interpreter import interpreting, small_grids


@pytest.fixture(scope="module", autouse=True)
def interpreter_for_cpu():
    with interpreting(), small_grids():
        yield

"""Triton's interpreter runs the kernels: NumPy under the hood, torch tensors at the surface."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def interpreter_for_cpu():
    # Here, so that the folder is collected where Triton is not installed: its files are skipped one by one.
    from tools.triton_interpreter import interpreting, small_grids

    with interpreting(), small_grids():
        yield

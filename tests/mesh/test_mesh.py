"""Runs `cases.py` in a process of its own: the number of CPU devices is fixed when JAX starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_jax import InputError
from dflash_jax.sharding import Cut, Layout

HERE = Path(__file__).parent
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"


def test_eight_devices():
    command = [sys.executable, "-m", "pytest", "-x", str(HERE / "cases.py"), f"--rootdir={HERE.parents[1]}"]
    done = subprocess.run(command, env={**os.environ, "XLA_FLAGS": FLAGS}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("tensor", "size ''"),
        ("tensor=0", "size '0'"),
        ("tensor=-2", "size '-2'"),
        ("rows=2", "mesh axis 'rows' is not known"),
        ("data=2,data=2", "gives data twice"),
    ],
)
def test_a_mesh_that_makes_no_sense(text, fault):
    with pytest.raises(InputError, match=fault):
        Layout.parse(text)


def test_dimensions_are_cut_as_far_as_they_divide():
    eight = Layout.parse("tensor=8")
    assert str(eight) == "data=1,expert=1,tensor=8"
    assert eight.wide(248_320) == Cut(("tensor0", "tensor1", "tensor2"))
    assert eight.wide(12) == Cut(("tensor0", "tensor1"))
    assert eight.wide(9) == Cut()
    # Two KV heads: halves of four copies each; the query heads go on.
    assert (eight.kv_heads(16, 2), eight.heads(16, 2)) == (Cut(("tensor0",)), eight.wide(8))
    # Six KV heads: a device has three of them, and the twelve query heads that read those.
    assert eight.kv_heads(24, 6) == eight.heads(24, 6) == Cut(("tensor0",))
    assert Layout.parse("expert=4,tensor=2").wide(8) == Cut(("tensor0", "expert0", "expert1"))

"""Runs `eight_devices.py` in a process of its own: the number of CPU devices is fixed when JAX starts."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"


def test_eight_devices():
    command = [sys.executable, "-m", "pytest", "-x", str(HERE / "eight_devices.py"), f"--rootdir={HERE.parents[1]}"]
    done = subprocess.run(command, env={**os.environ, "XLA_FLAGS": FLAGS}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]

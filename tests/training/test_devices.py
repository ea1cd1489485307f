"""Training on eight devices, and in two processes: each in processes of their own, for the number of CPU devices is
fixed when JAX starts."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from dflash_jax.checkpoint.files import TensorFiles

HERE = Path(__file__).parent
FLAGS = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count={}"


@pytest.mark.parametrize("chosen", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_training_on_eight_devices_equals_one(chosen):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-m",
        chosen,
        str(HERE / "eight_devices.py"),
        f"--rootdir={HERE.parents[1]}",
    ]
    done = subprocess.run(command, env={**os.environ, "XLA_FLAGS": FLAGS.format(8)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.long
def test_two_processes_train_as_one(tmp_path):
    """What the target answers, its features, and the drafter."""
    data = tmp_path / "text.jsonl"
    data.write_text("".join(json.dumps({"text": f"def f{i}(x):\n    return {i} * x\n" * 3}) + "\n" for i in range(8)))
    options = ["--data", str(data), "--layers", "1", "--block-size", "4", "--taps", "1", "3", "--sequence-length", "64"]
    options += ["--rows", "4", "--anchors", "8", "--steps", "3", "--save-every", "2"]
    script = "import json, sys; from dflash_jax.train import main; sys.exit(max(map(main, json.loads(sys.argv[1]))))"

    def command(name: str, *mesh: str, distributed: tuple[str, ...] = ()) -> list[str]:
        """Answers, features and training, one after the other in one process."""
        output, cache = ["--output", str(tmp_path / name)], ["--features", str(tmp_path / name / "features")]
        asked = ["--data", str(data), "--max-new-tokens", "8", "--temperature", "0"]
        runs = [["regenerate", *asked, *output, *distributed], ["cache", *options, *cache], ["fit", *options, *output]]
        return [sys.executable, "-c", script, json.dumps([[*run, *mesh] for run in runs])]

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    together = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": FLAGS.format(2),
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": "2",
    }
    processes = [
        subprocess.Popen(
            command("two", "--mesh", "data=2,tensor=2", distributed=("--distributed",)),
            env={**together, "JAX_PROCESS_ID": str(i)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    said = [p.communicate()[0] for p in processes]
    assert [p.returncode for p in processes] == [0, 0], said[0][-3000:] + said[1][-3000:]
    done = subprocess.run(command("one"), env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0
    a, b = (TensorFiles(tmp_path / name / "draft") for name in ("one", "two"))
    for name in a:
        np.testing.assert_allclose(a.read(name).astype(np.float32), b.read(name).astype(np.float32), atol=5e-4)
    one, two = (tmp_path / name for name in ("one", "two"))
    assert (one / "regenerated.jsonl").read_text() == (two / "regenerated.jsonl").read_text()
    a, b = (np.fromfile(path / "features" / "features.bin", ml_dtypes.bfloat16) for path in (one, two))
    np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), rtol=0.01, atol=0.02)

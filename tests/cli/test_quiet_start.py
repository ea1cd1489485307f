"""What the commands write to stderr on a CPU without torch: their own lines alone."""

import os
import re
import subprocess
import sys
import threading

import pytest

from tests.helpers import without_kernels_line

HIDE_TORCH = """
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec
PathFinder.find_spec = staticmethod(
    lambda name, *args: None if name.partition(".")[0] == "torch" else find_spec(name, *args)
)
"""


@pytest.fixture
def environment(tmp_path):
    """Of a machine without torch that chooses its platform itself; the tests' flags of XLA compile in less time."""
    (tmp_path / "sitecustomize.py").write_text(HIDE_TORCH)
    found = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "TRANSFORMERS_"))}
    return {**found, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}


def test_generate_on_a_cpu_writes_one_line_to_stderr(environment):
    command = [sys.executable, "-m", "dflash_jax.generate", "--prompt", "def main(", "--chat", "--max-new-tokens", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    (line,) = without_kernels_line(done.stderr).splitlines()
    assert " | prompt " in line
    assert done.returncode == 0


def test_generate_without_a_writable_home_writes_one_more_line(environment, tmp_path):
    # Root could write a read-only directory; no user can write below a file.
    (tmp_path / "home").touch()
    environment = {k: v for k, v in environment.items() if not k.startswith(("XDG_", "HF_"))}
    # Kernels would be built anew, too.
    environment |= {"HOME": str(tmp_path / "home"), "CXX": "/bin/false"}
    command = [sys.executable, "-m", "dflash_jax.generate", "--prompt", "def main(", "--max-new-tokens", "2"]
    command += ["--draft", "none"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    cache, statistics = without_kernels_line(done.stderr).splitlines()
    assert re.fullmatch(r".*compiled programs are not kept: .*dflash_jax: Not a directory", cache), cache
    assert " | prompt " in statistics
    assert done.returncode == 0


def test_serve_on_a_cpu_writes_its_own_lines_to_stderr(environment):
    pytest.importorskip("uvicorn")
    command = [sys.executable, "-m", "dflash_jax.serve", "--bundled", "--port", "0", "--max-len", "256", "--slots", "1"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(600, process.kill)
        timer.start()
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "listening on" in line:
                process.terminate()
        timer.cancel()
    assert any("listening on http://127.0.0.1:" in line for line in lines)
    for line in lines:
        assert re.match(r"\d{4}-\d\d-\d\d \S+ (INFO|WARNING) ", line), line
        assert not re.search("Unable to initialize|PyTorch|transformers", line), line

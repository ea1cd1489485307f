"""scripts/cluster/check.py as it runs, with few and short requests."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.docs.pages import ROOT

SHORT = {
    "kill": ["--seeds", "1"],
    "update": ["--versions", "1"],
    "scale": ["--rounds", "1"],
    "throughput": ["--turns", "2"],
}


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.parametrize("what", SHORT)
def test_check_finds_no_answer_lost_too_long_or_changed(what):
    command = [sys.executable, "scripts/cluster/check.py", what, "--requests", "24", "--new-tokens", "40", *SHORT[what]]
    command += ["--", "--prefix-bytes", "0", "--platform", "cpu"]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)

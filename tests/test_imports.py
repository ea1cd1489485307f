"""The directions of imports, as pyproject.toml's [tool.importlinter] has them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What the command lint-imports does, wherever it is installed.
LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"


def test_imports_keep_their_directions():
    done = subprocess.run([sys.executable, "-c", LINT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout

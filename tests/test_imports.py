"""The directions of imports, as pyproject.toml's [tool.importlinter] has them."""

import re
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


def test_a_module_is_imported_by_name_only_for_commands_and_public_names():
    """No contract sees such an import."""
    package = ROOT / "dflash_jax"
    by_name = [path for path in package.rglob("*.py") if re.search(r'import_module\(f?"dflash_jax', path.read_text())]
    assert set(by_name) == {package / "__init__.py", package / "cli" / "main.py"}

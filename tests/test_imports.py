"""The directions of imports, as pyproject.toml's [tool.importlinter] has them."""

from pathlib import Path

from importlinter.cli import lint_imports

CONFIG = Path(__file__).parents[1] / "pyproject.toml"


def test_imports_keep_their_directions(capsys):
    code = lint_imports(config_filename=str(CONFIG), no_cache=True)
    assert code == 0, capsys.readouterr().out

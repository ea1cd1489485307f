"""Who may import whom: the order of the rooms, and what must not be imported where."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "dflash_jax"
# A module may import modules of its own level or below.
LEVELS = [
    ("errors", "sampling_params", "stop_strings"),
    ("parallel", "ops"),
    ("models",),
    ("checkpoint", "decoding"),
    ("engine",),
    ("frontend",),
    ("planner",),
    ("server", "training", "benchmarking"),
    ("cli",),
    ("generate", "serve", "train", "plan", "benchmark", "batch"),
]
LEVEL = {name: i for i, names in enumerate(LEVELS) for name in names}
FILES = sorted(ROOT.rglob("*.py"))


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room(module: str) -> str:
    return module.split(".")[1]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_imports_go_down(path):
    if path == ROOT / "__init__.py":
        return
    mine = path.relative_to(ROOT).with_suffix("").parts[0]
    assert mine in LEVEL, f"{mine} has no level: give it one in this test"
    ours = {m for m in imports(path) if m.startswith("dflash_jax.")}
    above = {m for m in ours if LEVEL[room(m)] > LEVEL[mine]}
    assert not above


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_forbidden_imports(path):
    found = imports(path)
    assert not {m for m in found if m.split(".")[0] == "torch"}
    assert not {m for m in found if m.startswith("jax._src")}
    if path.parent.name == "engine":
        assert not {m for m in found if m.startswith(("tokenizers", "transformers", "dflash_jax.frontend.tokenizer"))}
    if path.parent.name == "server":
        assert not {m for m in found if m.split(".")[0] == "jax"}
    if path.name == "speculative.py":
        assert not {m for m in found if m.startswith(("numpy", "transformers", "dflash_jax.models.families"))}

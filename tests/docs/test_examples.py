"""The scripts of examples/ run on the bundled pair, and the notebook's cells in order."""

import json
import runpy

import pytest

from tests.docs.pages import ROOT

EXAMPLES = ROOT / "examples"
# What each prints, of what it claims.
SAID = {
    "offline_batch.py": "tokens a round",
    "chat.py": "> Write the function `mean`",
    "async_streaming.py": "length",
    "server_and_client.py": "64 tokens",
    "custom_drafter.py": "48 tokens in",
    "train_drafter.py": "tokens a round",
}


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAID)
    assert [path.name for path in EXAMPLES.glob("*.ipynb")] == ["drafting_round_by_round.ipynb"]


@pytest.mark.parametrize("name", SAID)
def test_example_runs_and_prints_its_result(name, tmp_path, monkeypatch, capsys):
    """In this process, which has imported JAX; processes that an example starts are its own."""
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert SAID[name] in capsys.readouterr().out


def test_the_notebook_runs_and_is_kept_without_output(capsys):
    cells = json.loads((EXAMPLES / "drafting_round_by_round.ipynb").read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    namespace: dict = {}
    for i, cell in enumerate(code):
        exec(compile("".join(cell["source"]), f"cell {i}", "exec"), namespace)
    assert "drafts accepted" in capsys.readouterr().out

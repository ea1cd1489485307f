"""The scripts of examples/ run on the bundled pair, and the notebook's cells in order."""

import json
import os
import runpy
import subprocess
import sys

import pytest

from dflash_jax.cli.train import make_parser, read_config
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
    "grpo.py": "step 2: reward",
}
# Fewer steps than a reader's.
ARGUMENTS = {"grpo.py": ("--steps", "2")}


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAID)
    others = {path.name for path in EXAMPLES.iterdir() if path.is_file() and path.suffix != ".py"}
    assert others == {"drafting_round_by_round.ipynb", "train_over_hosts.sbatch"}


@pytest.mark.parametrize("name", SAID)
def test_example_runs_and_prints_its_result(name, tmp_path, monkeypatch, capsys):
    """In this process, which has imported JAX; processes that an example starts are its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *ARGUMENTS.get(name, ())])
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


@pytest.mark.parametrize(("code", "is_requeued"), [(0, False), (1, False), (75, True)])
def test_a_training_job_that_was_stopped_is_queued_again(tmp_path, code, is_requeued):
    """With Slurm's commands in place of which what they are called with is written down."""
    for name, exit_code in (("srun", code), ("scontrol", 0)):
        command = tmp_path / name
        command.write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/calls\nexit {exit_code}\n')
        command.chmod(0o755)
    words = ["fit", "--config", "qwen3.6-35b-a3b", "--data", "data.jsonl", "--output", "run"]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", EXAMPLES / "train_over_hosts.sbatch", *words], env=environment, check=False)
    assert done.returncode == code
    started, *queued = (tmp_path / "calls").read_text().splitlines()
    assert queued == (["scontrol requeue 7"] if is_requeued else [])
    srun, option, dflash, train, *rest = started.split()
    assert (srun, option, dflash, train) == ("srun", "--kill-on-bad-exit=1", "dflash", "train")
    args = make_parser().parse_args(rest)
    assert args.distributed
    assert read_config(args)[0].output == "run"

import sys

import pytest

from tests.helpers import load_script

plot_grpo = load_script("bench/plot_grpo.py")


@pytest.fixture
def runs(tmp_path):
    lines = [f"{i},{0.1 * i},2.0,{100 + i}" for i in range(1, 13)]
    for name in ("moving", "off"):
        text = "\n".join(["step,reward,acceptance_length,tokens_per_s", *lines]) + "\n"
        (tmp_path / f"{name}.csv").write_text(text)
    return [tmp_path / "moving.csv", tmp_path / "off.csv"]


def test_a_point_is_the_mean_of_five_steps(runs):
    steps, rewards = plot_grpo.means(plot_grpo.read(runs[0]), "reward")
    assert steps == [5, 10, 12]
    assert rewards == pytest.approx([0.3, 0.8, 1.15])


def test_plot_of_two_runs_writes_a_picture(runs, tmp_path):
    pytest.importorskip("matplotlib")
    assert plot_grpo.main([*map(str, runs), "--out", str(tmp_path / "new/x.png")]) == 0
    assert (tmp_path / "new/x.png").read_bytes().startswith(b"\x89PNG")


def test_plot_of_another_file_or_of_none_is_an_error(tmp_path, capsys):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    assert plot_grpo.main([str(tmp_path / "x.csv")]) == 2
    assert plot_grpo.main([str(tmp_path / "y.csv")]) == 2
    said = capsys.readouterr().err
    assert "x.csv has no steps" in said
    assert "y.csv cannot be read" in said


def test_plot_without_matplotlib_names_the_extra(runs, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plot_grpo.main([str(runs[0]), "--out", "x.png"]) == 2
    assert 'pip install "dflash-jax[plot]"' in capsys.readouterr().err

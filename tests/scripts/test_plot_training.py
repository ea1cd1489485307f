"""Curves of runs, one behind the other."""

import sys

import pytest

from tests.helpers import load_script

plot_training = load_script("bench/plot_training.py")


@pytest.fixture
def runs(tmp_path):
    for name, first in (("a", 8.0), ("b", 4.0)):
        (tmp_path / name).mkdir()
        lines = [f"{10 * i},{first - 0.1 * i},{0.01 * i}" for i in range(1, 21)]
        (tmp_path / name / "metrics.csv").write_text("\n".join(["step,loss,slot_1", *lines]) + "\n")
        (tmp_path / name / "acceptance.csv").write_text("step,temperature,mean\n100,0.0,1.5\n200,0.0,1.7\n")
    return [tmp_path / "a", tmp_path / "b"]


def test_a_later_run_goes_on_where_the_earlier_ended(runs):
    rows = plot_training.joined(runs, "acceptance.csv", [200.0, 400.0])
    assert [row["step"] for row in rows] == [100, 200, 300, 400]
    steps, losses = plot_training.means(plot_training.joined(runs, "metrics.csv", [200.0, 400.0]), "loss")
    assert steps == [100, 200, 300, 400]
    assert losses == pytest.approx([7.45, 6.45, 3.45, 2.45])


def test_plot_of_two_runs_writes_a_picture(runs, tmp_path):
    pytest.importorskip("matplotlib")
    assert plot_training.main([*map(str, runs), "--out", str(tmp_path / "new/x.png")]) == 0
    assert (tmp_path / "new/x.png").read_bytes().startswith(b"\x89PNG")


def test_plot_without_a_run_is_an_error(tmp_path, capsys):
    assert plot_training.main([str(tmp_path)]) == 2
    assert f"{tmp_path} has no metrics.csv" in capsys.readouterr().err


def test_plot_without_matplotlib_names_the_extra(runs, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plot_training.main([str(runs[0]), "--out", "x.png"]) == 2
    assert 'pip install "dflash-jax[plot]"' in capsys.readouterr().err


def test_bench_engine_names_the_extra_before_it_measures(capsys, monkeypatch):
    engine = load_script("bench/engine.py")
    monkeypatch.setattr(engine, "find_spec", lambda _: None)
    monkeypatch.setattr(engine, "run", lambda _: pytest.fail("it measures"))
    monkeypatch.setattr(sys, "argv", ["engine.py", "--out", "x"])
    with pytest.raises(SystemExit):
        engine.main()
    assert 'pip install "dflash-jax[plot]"' in capsys.readouterr().err

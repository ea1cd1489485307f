"""Compiled programs are code: they are read only where no other user can write them, or where the user says so."""

import os
import stat
import threading

import jax
import pytest

from dflash_jax import user_cache
from dflash_jax.engine import compile_cache
from dflash_jax.engine.compile_cache import enable_disk_cache

NAMES = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The directory of the programs, not there yet, of a user who has set nothing."""
    saved = {name: jax.config.values[name] for name in NAMES}
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr("platformdirs.user_cache_path", lambda _: tmp_path / "cache")
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path / "cache" / "xla"
    for name, value in saved.items():
        jax.config.update(name, value)


def is_used() -> bool:
    enable_disk_cache()
    return jax.config.values["jax_enable_compilation_cache"]


def test_the_directory_is_the_users_alone(cache, caplog):
    umask = os.umask(0)
    try:
        assert is_used()
    finally:
        os.umask(umask)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert jax.config.values["jax_compilation_cache_dir"] == str(cache)
    assert not caplog.records


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_directory_that_others_can_write_is_not_used_unless_the_user_names_it(mode, cache, caplog, monkeypatch):
    cache.mkdir(parents=True)
    cache.chmod(mode)
    assert [is_used(), is_used()] == [False, False]
    (line,) = caplog.messages
    assert f"{cache}: they are not used: chmod 700" in line
    other = cache.parent / "other"
    other.mkdir()
    other.chmod(mode)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(other))
    jax.config.update("jax_compilation_cache_dir", str(other))
    assert [is_used(), is_used()] == [True, True]
    (line,) = caplog.messages[1:]
    assert f"{other}: they run in this process" in line


def test_a_directory_of_another_user_is_not_used(cache, monkeypatch, caplog):
    cache.mkdir(parents=True, mode=0o700)
    monkeypatch.setattr("dflash_jax.engine.compile_cache.is_private", lambda status: False)
    assert not is_used()
    assert len(caplog.messages) == 1


def test_whose_files_are_trusted(tmp_path, monkeypatch):
    def status(uid: int, mode: int) -> os.stat_result:
        return os.stat_result((mode, 0, 0, 1, uid, 0, 0, 0, 0, 0))

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert all(user_cache.is_private(status(uid, 0o755)) for uid in (0, 1000))
    assert not user_cache.is_private(status(1001, 0o700))
    assert not any(user_cache.is_private(status(1000, mode)) for mode in (0o720, 0o702, 0o777))


@pytest.mark.parametrize(
    ("directory", "says"),
    [
        # Of no storage that JAX knows; of one whose package is not here.
        ("nostorage://bucket/x", "KeyError"),
        ("s3://bucket/x", "s3fs"),
    ],
)
def test_a_storage_that_is_not_there_is_one_line(directory, says, cache, caplog, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", directory)
    jax.config.update("jax_compilation_cache_dir", directory)
    assert [is_used(), is_used()] == [False, False]
    (line,) = caplog.messages
    assert line.startswith(f"compiled programs are not kept: {directory}: ")
    assert says in line
    assert jax.jit(lambda x: x + 1)(1) == 2


def test_a_storage_that_does_not_answer_is_one_line(cache, caplog, monkeypatch):
    waits = threading.Event()
    monkeypatch.setattr("etils.epath.Path", lambda _: waits.wait())
    monkeypatch.setattr(compile_cache, "STORAGE_S", 0.1)
    jax.config.update("jax_compilation_cache_dir", "gs://silent/x")
    assert not is_used()
    waits.set()
    assert caplog.messages == ["compiled programs are not kept: gs://silent/x: no answer in 0.1 s"]


def test_a_storage_that_others_write_is_read(cache, caplog, monkeypatch, tmp_path):
    """Its directories have no modes of this machine's; what cannot be written there is read all the same."""
    made = type("Stored", (type(tmp_path),), {"write_bytes": lambda *_: (_ for _ in ()).throw(PermissionError("no"))})
    monkeypatch.setattr("etils.epath.Path", lambda _: made(tmp_path / "stored"))
    jax.config.update("jax_compilation_cache_dir", "gs://read-only/x")
    assert is_used()
    assert jax.config.values["jax_persistent_cache_min_compile_time_secs"] == float("inf")
    assert caplog.messages == ["compiled programs are not kept: gs://read-only/x: PermissionError: no"]

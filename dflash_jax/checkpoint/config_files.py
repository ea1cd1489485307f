"""Reads config.json of a Hugging Face directory and TOML configs, with the standard library alone."""

import json
import reprlib
import tomllib
from difflib import get_close_matches
from pathlib import Path

from dflash_jax.errors import InputError

# A table of all tensors of a large checkpoint takes some MB.
MOST_BYTES = 2**27
# The package's own configs: configs/ of a checkout, by a link.
CONFIGS = Path(__file__).parents[1] / "configs"


def read_json(path: Path) -> dict:
    """A JSON object from a file, or an InputError that names it."""
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise InputError(f"{path} has {size} bytes: at most {MOST_BYTES} are read")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except OSError as e:
        raise InputError(f"{path} cannot be read: {e.strerror}") from None
    except ValueError as e:
        raise InputError(f"{path} is not JSON: {e}") from None
    except RecursionError:
        raise InputError(f"{path} is nested too deeply") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} must hold a JSON object, it holds a {type(value).__name__}")
    return value


def read_raw(path: Path) -> dict:
    """The config of a directory, or of a config.json file by any name."""
    if path.is_dir() or path.suffix != ".json":
        if not (path / "config.json").exists():
            raise InputError(f"{path} is not a checkpoint: it has no config.json")
        path = path / "config.json"
    raw = read_json(path)
    text = raw.get("text_config", {})
    if not isinstance(text, dict):
        raise InputError(f"{path}: text_config is {reprlib.repr(text)}: it must be an object")
    return raw


def parsed(read, raw: dict, path: Path):
    """``read`` of a raw config; its InputErrors name the file, which is ``path`` or the config.json in it."""
    try:
        return read(raw)
    except InputError as e:
        file = path if path.suffix == ".json" and not path.is_dir() else path / "config.json"
        raise InputError(f"{file}: {e.args[0]}", *e.args[1:]) from None


def read_config_file(path: Path, read):
    """(raw config, ``read`` of it) of a directory or of a config.json file by any name."""
    raw = read_raw(path)
    return raw, parsed(read, raw, path)


def find_config(name: str | Path, folder: str = "") -> Path:
    """The TOML file that ``--config`` names.

    Args:
        name: A path, or the name of one of the package's own configs, such as ``qwen3.6-35b-a3b``.
        folder: Where the package's configs of this kind are, below configs/: "" for systems, "train" for training runs.

    Raises:
        InputError: A name without a path that is neither a file nor a config of the package.
    """
    path = Path(name)
    if path.suffix == ".toml" or len(path.parts) > 1 or path.is_file():
        return path
    known = sorted(p.stem for p in (CONFIGS / folder).glob("*.toml"))
    if path.name in known:
        return CONFIGS / folder / f"{path.name}.toml"
    near = get_close_matches(path.name, known, n=4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}"
    raise InputError(f"config {str(name)!r} is neither a file nor a known name: {hint}")


def read_toml_file(path: Path) -> dict:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise InputError(f"config {path} cannot be read: {e.strerror}") from None
    except ValueError as e:
        raise InputError(f"config {path} is not TOML: {e}") from None

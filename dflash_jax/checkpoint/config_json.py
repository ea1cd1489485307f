"""config.json of a Hugging Face directory: read with clear words, and without a package beyond the standard library."""

import json
from pathlib import Path

from dflash_jax.errors import InputError


def read_json(path: Path) -> dict:
    """A JSON object from a file, or an InputError that names it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except OSError as e:
        raise InputError(f"{path} cannot be read: {e.strerror}") from None
    except ValueError as e:
        raise InputError(f"{path} is not JSON: {e}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} must hold a JSON object, it holds a {type(value).__name__}")
    return value


def read_raw(directory: Path) -> dict:
    if not (directory / "config.json").exists():
        raise InputError(f"{directory} is not a checkpoint: it has no config.json")
    raw = read_json(directory / "config.json")
    text = raw.get("text_config", {})
    if not isinstance(text, dict):
        raise InputError(f"{directory / 'config.json'}: text_config must be an object, it is {text!r}")
    return raw


def parsed(read, raw: dict, directory: Path):
    """JSON has any type anywhere: what the reader did not expect is told in one line too."""
    try:
        return read(raw)
    except InputError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError) as e:
        raise InputError(f"{directory / 'config.json'} is malformed: {type(e).__name__}: {e}") from None


def read_config_file(path: Path, read):
    """(raw config, ``read`` of it) of a directory or of a config.json file by any name."""
    if path.is_dir() or path.suffix != ".json":
        raw = read_raw(path)
        return raw, parsed(read, raw, path)
    raw = read_json(path)
    return raw, parsed(read, raw, path.parent)

"""Reads config.json of a Hugging Face directory and TOML configs, with the standard library alone."""

import json
import reprlib
import tomllib
from pathlib import Path

from dflash_jax.argument_checks import suggestion
from dflash_jax.errors import InputError

# Largest JSON file that is read. The table of tensors of a large checkpoint has some MB.
MOST_BYTES = 2**27
# Bytes of a TOML file at most, so that reading a device such as /dev/zero ends.
MAX_TOML_BYTES = 2**18
# The package's own configs: configs/ of a checkout, by a link.
CONFIGS = Path(__file__).parents[1] / "configs"


def read_json(path: Path) -> dict:
    """Reads a JSON object.

    Raises:
        InputError: The file is missing, too large, unreadable or no JSON object; the message names it.
    """
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


def read_raw(path: Path, overrides: dict | None = None) -> dict:
    """Reads ``path/config.json``, or ``path`` itself if it is a JSON file.

    Args:
        path: A directory or a JSON file.
        overrides: Values in place of the file's; an object is merged with the file's.

    Raises:
        InputError: There is no such file, or it is no valid config.
    """
    if path.is_dir() or path.suffix != ".json":
        if not (path / "config.json").exists():
            raise InputError(f"{path} is not a checkpoint: it has no config.json")
        path = path / "config.json"
    raw = _merged(read_json(path), overrides or {})
    text = raw.get("text_config", {})
    if not isinstance(text, dict):
        raise InputError(f"{path}: text_config is {reprlib.repr(text)}: it must be an object")
    return raw


def _merged(raw: dict, overrides: dict) -> dict:
    both = {k: _merged(raw[k], v) for k, v in overrides.items() if isinstance(v, dict) and isinstance(raw.get(k), dict)}
    return raw | overrides | both


def parsed(read, raw: dict, path: Path):
    """Returns ``read(raw)``; its InputErrors get the file's name, ``path`` or the config.json in it."""
    try:
        return read(raw)
    except InputError as e:
        file = path if path.suffix == ".json" and not path.is_dir() else path / "config.json"
        raise InputError(f"{file}: {e.args[0]}", *e.args[1:]) from None


def read_config_file(path: Path, read, overrides: dict | None = None):
    """Returns the raw config of ``path`` (see `read_raw`), and ``read`` of it."""
    raw = read_raw(path, overrides)
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
    raise InputError(f"config {str(name)!r} is neither a file nor a known name: {suggestion(path.name, known, 4)}")


def published_drafters(target: str | Path) -> list[str]:
    """The drafters that the package's configs name for a target, the one that is taken first.

    Args:
        target: A repo id, in any case of letters.
    """
    for path in sorted(CONFIGS.glob("*.toml")):
        system = read_toml_file(path)
        if str(system["target"]).lower() == str(target).lower():
            return [system["draft"], *system.get("drafters", ())]
    return []


def read_toml_file(path: Path) -> dict:
    """Reads a TOML file.

    Raises:
        InputError: The file is unreadable, no TOML, or larger than MAX_TOML_BYTES.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TOML_BYTES + 1)
    except OSError as e:
        raise InputError(f"config {path} cannot be read: {e.strerror}") from None
    if len(data) > MAX_TOML_BYTES:
        raise InputError(f"config {path} has more than {MAX_TOML_BYTES} bytes: it is no config of this package")
    try:
        return tomllib.loads(data.decode())
    except ValueError as e:
        raise InputError(f"config {path} is not TOML: {e}") from None
    except RecursionError:
        raise InputError(f"config {path}: its values are nested too deeply") from None

"""Results on disk, written atomically."""

import json
from pathlib import Path

from dflash_jax.errors import InputError


def read_record(path: Path) -> dict:
    """The JSON object in a file; {} where the file does not exist.

    Raises:
        InputError: It is no JSON object.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as e:
        raise InputError(f"{path} is not JSON ({e}): remove it, or give another --out") from None
    if not isinstance(record, dict):
        raise InputError(f"{path} is no record of results: remove it, or give another --out")
    return record


def write_record(path: Path, record: dict) -> None:
    """Writes a record atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)


def beside(out: Path, suffix: str) -> Path:
    """``out`` with ``suffix`` appended to its name. Names of models have dots, so `Path.with_suffix` would cut them."""
    return out.with_name(out.name + suffix)

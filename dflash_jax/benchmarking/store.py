"""Results on disk: written whole or not at all, and read back with clear words."""

import json
from pathlib import Path

from dflash_jax.errors import InputError


def read_record(path: Path) -> dict:
    """The JSON object in a file; {} where there is none. Raises InputError for anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as e:
        raise InputError(f"{path} is not JSON ({e}): remove it, or give another --out") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} is no record of results: remove it, or give another --out")
    return found


def write_record(path: Path, record: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)


def beside(out: Path, suffix: str) -> Path:
    """OUT with ``suffix`` behind it: names of models have dots, which are no suffixes."""
    return out.with_name(out.name + suffix)

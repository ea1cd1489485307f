"""Tensors of a Hugging Face directory: one safetensors file, or several with an index."""

import json
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dflash_jax.errors import InputError

INDEX = "model.safetensors.index.json"
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


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


class TensorFiles(Mapping):
    """name → shape of every tensor in a directory; `read` gives one as a NumPy array. Files are mapped, not loaded."""

    def __init__(self, directory: Path):
        self._handles, self._shapes = {}, {}
        for path in self._paths(directory):
            try:
                handle = safe_open(path, framework="np")
                for name in sorted(handle.keys()):
                    self._shapes[name] = tuple(handle.get_slice(name).get_shape())
                    self._handles[name] = (path, handle)
            except (SafetensorError, OSError) as e:
                raise InputError(f"{path} is not a whole safetensors file (truncated or corrupt?): {e}") from None

    @staticmethod
    def _paths(directory: Path) -> list[Path]:
        if (directory / INDEX).exists():
            weight_map = read_json(directory / INDEX).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(n, str) for n in weight_map.values()):
                raise InputError(f"{directory / INDEX} has no weight_map of tensor names to file names")
            names = sorted(set(weight_map.values()))
            missing = [n for n in names if not (directory / n).exists()]
            if missing:
                raise InputError(
                    f"{directory / INDEX} names {len(missing)} files that do not exist, first {missing[0]!r}"
                )
            return [directory / n for n in names]
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise InputError(f"{directory} is not a checkpoint: it has no .safetensors file")
        return paths

    def __getitem__(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def __iter__(self):
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def read(self, name: str) -> np.ndarray:
        path, handle = self._handles[name]
        kind = handle.get_slice(name).get_dtype()
        if kind not in DTYPES:
            raise InputError(f"{path}: tensor {name!r} has dtype {kind}: known are {', '.join(DTYPES)}")
        array = handle.get_tensor(name)
        return array if array.dtype == DTYPES[kind] else array.view(DTYPES[kind])


def write_tensors(directory: Path, tensors: dict[str, np.ndarray]) -> None:
    """One ``model.safetensors`` that transformers reads."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    # The library makes it private; a checkpoint is for everyone who can read its directory.
    path.chmod(0o644)

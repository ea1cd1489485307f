"""Tensors of a Hugging Face directory: one safetensors file, or several with an index."""

import json
import math
from collections.abc import Callable, Mapping
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


def stream_tensors(
    path: Path, dtype: np.dtype, tensors: dict[str, tuple[tuple[int, ...], Callable[[], np.ndarray]]]
) -> None:
    """A safetensors file, made a tensor at a time: each is its shape and what gives it, to be cast to ``dtype``."""
    (kind,) = (k for k, d in DTYPES.items() if d == dtype)
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (shape, _) in tensors.items():
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (shape, make) in tensors.items():
            with np.errstate(over="ignore"):
                array = np.ascontiguousarray(make().astype(dtype))
            if array.shape != shape:
                raise AssertionError(f"{name} has the shape {array.shape}, not {shape}")
            if not np.isfinite(array).all():
                raise InputError(f"tensor {name!r} has numbers that are not finite in {dtype.name}")
            file.write(array.view(np.uint8))

"""Tensors of a Hugging Face directory: one safetensors file, or several with an index; and an MTP head's own file."""

import json
import math
import mmap
import os
import shutil
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from dflash_jax.checkpoint.config_files import read_json
from dflash_jax.checkpoint.torch_file import find_tensor
from dflash_jax.errors import InputError
from dflash_jax.progress import bar

INDEX = "model.safetensors.index.json"
# Files of an MTP head that some checkpoints have beside those of the index, such as mtp.safetensors.
HEADS = "*mtp*.safetensors"
# A file of a mask token's embedding beside a drafter's tensors, and its name among them.
MASK_FILE, MASK = "mask_embedding.pt", "mask_embedding"
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True)
class _Place:
    """The bytes of a tensor in a mapped file."""

    data: np.memmap
    start: int
    end: int
    dtype: str
    shape: tuple[int, ...]


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Names ``path`` in errors of the operating system, such as that of a full disk, which names no file.

    Raises:
        InputError: In place of an OSError in the block.
    """
    try:
        yield
    except OSError as e:
        raise InputError(f"{path} cannot be written: {e.strerror or e}") from None


def write_json(path: Path, value: dict) -> None:
    """Writes a JSON file atomically: also after a crash of the machine a reader sees the old or the whole new file.

    Raises:
        InputError: It cannot be written.
    """
    half = path.with_name(f"{path.name}.half")
    with writing(path):
        with half.open("w", encoding="utf-8") as file:
            file.write(json.dumps(value, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        half.replace(path)


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A directory that appears as ``target`` when the block has ended without an error.

    Yields:
        A temporary directory to fill.

    Raises:
        InputError: ``target`` exists and is not empty, or cannot be written.
    """
    target = target.expanduser().absolute()
    half = target.with_name(f".{target.name}.{os.getpid()}.half")
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise InputError(f"{target} exists and is not an empty directory: give a new one")
        half.mkdir(parents=True)
        yield half
        if target.exists():
            target.rmdir()
        half.rename(target)
    except OSError as e:
        raise InputError(f"{target} cannot be written: {e.strerror or e}") from None
    finally:
        shutil.rmtree(half, ignore_errors=True)


class Tensors(Mapping[str, tuple[int, ...]]):
    """Name → shape of every tensor of a checkpoint, whatever stores them."""

    @abstractmethod
    def dtype(self, name: str) -> str:
        """The dtype in safetensors' notation, such as "BF16" or "F8_E4M3"."""

    @abstractmethod
    def read(self, name: str) -> np.ndarray:
        """The array.

        Raises:
            InputError: It cannot be read.
        """

    def section(self, name: str, shape: Sequence[int], rows: slice, columns: slice) -> np.ndarray:
        """A part of a tensor that has ``shape``, its axes before the last taken as one: some rows, some columns."""
        return np.require(self._view(name).reshape(-1, shape[-1])[rows, columns], requirements="A")

    def _view(self, name: str) -> np.ndarray:
        """As `read`; the array need not be aligned."""
        return self.read(name)

    def release(self) -> None:
        """Frees what reading occupied."""


class DescribedTensors(Tensors):
    """Shapes and dtypes of tensors that are in no file of their own.

    Args:
        tensors: Name → dtype, as `Tensors.dtype`, and shape.
    """

    def __init__(self, tensors: Mapping[str, Sequence]):
        self._tensors = dict(tensors)

    def __getitem__(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name][1])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def dtype(self, name: str) -> str:
        """See `Tensors`."""
        return self._tensors[name][0]

    def read(self, name: str) -> np.ndarray:
        """See `Tensors`."""
        raise AssertionError(f"{name} is in no file of its own")


class TensorFiles(Tensors):
    """The tensors of a Hugging Face directory. Files are mapped, not loaded.

    The files are those of the index, else model.safetensors, else all; and of `HEADS`, the tensors that those lack. The
    embedding of a mask token in the file `MASK_FILE` is the tensor `MASK`.
    """

    def __init__(self, directory: Path):
        """Maps the files of ``directory``.

        Raises:
            InputError: A file is missing or corrupt, or two files have the same tensor.
        """
        self._places: dict[str, _Place] = {}
        self._files: list[np.memmap] = []
        paths = self._paths(directory)
        for path in paths:
            self._map(path)
        listed = frozenset(self._places)
        for path in sorted(directory.glob(HEADS)):
            if path not in paths:
                self._map(path, listed)
        if (path := directory / MASK_FILE).exists() and MASK not in self._places:
            dtype, shape, start = find_tensor(path)
            # A row of a table is an embedding.
            shape, size = (math.prod(shape),), math.prod(shape) * DTYPES[dtype].itemsize
            self._places[MASK] = _Place(np.memmap(path, np.uint8, "r"), start, start + size, dtype, shape)

    def _map(self, path: Path, others: Collection[str] = ()) -> None:
        """Maps a file, of which the tensors ``others`` are left out."""
        # A local import: planning reads only shapes from configs, without this package.
        from safetensors import SafetensorError, safe_open

        try:
            # The library validates the file. Tensors are read without it, since it has no float8 for NumPy.
            with safe_open(path, framework="np"):
                pass
            data = np.memmap(path, np.uint8, "r")
        except OSError as e:
            raise InputError(f"{path} cannot be read: {e.strerror or e}") from None
        except (SafetensorError, ValueError) as e:
            raise InputError(f"{path} is not a whole safetensors file (truncated or corrupt?): {e}") from None
        self._files.append(data)
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8:start].tobytes())
        for name, entry in sorted(header.items()):
            if name in others or name == "__metadata__":
                continue
            if name in self._places:
                raise InputError(f"{path} and {self._places[name].data.filename} both have tensor {name!r}")
            first, last = entry["data_offsets"]
            shape = tuple(entry["shape"])
            self._places[name] = _Place(data, start + first, start + last, entry["dtype"], shape)

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
        if (directory / "model.safetensors").exists():
            return [directory / "model.safetensors"]
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise InputError(f"{directory} is not a checkpoint: it has no .safetensors file")
        return paths

    def __getitem__(self, name: str) -> tuple[int, ...]:
        return self._places[name].shape

    def __iter__(self):
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def dtype(self, name: str) -> str:
        """See `Tensors`."""
        return self._places[name].dtype

    def release(self) -> None:
        """Drops the pages that were read, since mapped pages count as memory of the process."""
        for data in self._files:
            if isinstance(data.base, mmap.mmap):
                data.base.madvise(mmap.MADV_DONTNEED)

    def read(self, name: str) -> np.ndarray:
        """A view of the mapped file where it is aligned there, else a copy.

        Raises:
            InputError: The dtype is not in `DTYPES`.
        """
        return np.require(self._view(name), requirements="A")

    def _view(self, name: str) -> np.ndarray:
        place = self._places[name]
        if place.dtype not in DTYPES:
            path = place.data.filename
            raise InputError(f"{path}: tensor {name!r} has dtype {place.dtype}: known are {', '.join(DTYPES)}")
        return np.asarray(place.data[place.start : place.end]).view(DTYPES[place.dtype]).reshape(place.shape)


def tensor_names(directory: Path) -> Collection[str]:
    """Names of the tensors of a directory, by its index where it has one; none where there are no weights."""
    if (directory / INDEX).exists():
        names = read_json(directory / INDEX).get("weight_map")
        masks = [MASK] * (directory / MASK_FILE).exists()
        return [*names, *masks] if isinstance(names, dict) else ()
    return TensorFiles(directory) if any(directory.glob("*.safetensors")) else ()


def write_tensors(directory: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes one ``model.safetensors`` that transformers reads.

    Raises:
        InputError: It cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "model.safetensors"
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as e:  # a full disk, which the library does not report as an OSError
        raise InputError(f"{path} cannot be written: {e}") from None
    # The library makes the file private. The directory's permissions decide who can read a checkpoint.
    path.chmod(0o644)


@dataclass(frozen=True)
class Streamed:
    """A tensor that is written a piece at a time.

    Attributes:
        shape: Its shape.
        dtype: Its dtype on disk.
        pieces: Yields its numbers in order, some at a time, of any dtype.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: Callable[[], Iterator[np.ndarray]]


def stream_tensors(
    path: Path, tensors: Mapping[str, Streamed], source: str | Path, check: Callable[[], object]
) -> None:
    """Writes a safetensors file of little memory.

    Args:
        path: The file.
        tensors: Name → tensor.
        source: The file that they are made of, for errors.
        check: Is called when the file has its header and its size, before the long part.

    Raises:
        InputError: A number is not finite in its dtype.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        end = at + math.prod(tensor.shape) * tensor.dtype.itemsize
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
        file.flush()
        check()
        for name, tensor in bar(tensors.items(), description="converting", total=len(tensors), unit="tensor"):
            left = math.prod(tensor.shape)
            for piece in tensor.pieces():
                with np.errstate(over="ignore", invalid="ignore"):
                    array = np.ascontiguousarray(piece.astype(tensor.dtype, copy=False))
                if not np.isfinite(array).all():
                    what = f"tensor {name!r} made of it has numbers that are not finite in {tensor.dtype.name}"
                    raise InputError(f"{source}: {what}")
                left -= array.size
                file.write(array.reshape(-1).view(np.uint8).data)
            if left:
                raise AssertionError(f"{name} has not the shape {tensor.shape}")

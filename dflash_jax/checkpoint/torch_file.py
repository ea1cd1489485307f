"""The one tensor of a file that ``torch.save`` wrote, found without torch and without running what the file says.

Such a file is a ZIP archive: a pickle that describes tensors, and their bytes, uncompressed. The pickle is read by an
unpickler that knows the few names of a tensor only, and nothing that it could call.
"""

import io
import math
import pickle
import pickletools
import struct
import zipfile
from pathlib import Path
from typing import Any

from dflash_jax.errors import InputError

# Most bytes and operations of a pickle: that of one tensor has some hundreds of bytes.
MOST_PICKLE_BYTES, MOST_OPERATIONS = 2**16, 1000
# What describes a tensor: texts and names, which may be repeated, and what is made of them once.
REPEATED = {"BINUNICODE", "SHORT_BINUNICODE", "GLOBAL", "STACK_GLOBAL"}
STORE, RECALL = {"BINPUT", "LONG_BINPUT", "MEMOIZE"}, {"BINGET", "LONG_BINGET"}
KNOWN = {
    *("PROTO", "FRAME", "MARK", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_TUPLE", "EMPTY_DICT", "SETITEM"),
    *(
        "SETITEMS",
        "EMPTY_LIST",
        "APPEND",
        "APPENDS",
        "BINFLOAT",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "NEWTRUE",
        "NEWFALSE",
        "NONE",
        "BINPERSID",
        "REDUCE",
        "STOP",
    ),
    *(REPEATED | STORE | RECALL),
}
# Names of storages, and their dtypes in safetensors' notation.
STORAGES = {"FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16"}
BYTES = {"F32": 4, "F16": 2, "BF16": 2}
LOCAL_HEADER_BYTES = 30


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> dict[str, Any]:
    return {"storage": storage, "offset": offset, "shape": shape, "stride": stride}


class _Unpickler(pickle.Unpickler):
    """Reads numbers, texts, containers and descriptions of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda tensor, *_: tensor
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no tensor")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def check_operations(data: bytes) -> None:
    """Checks that a pickle does what describes a tensor, and takes no more time and memory than its bytes.

    Raises:
        pickle.UnpicklingError: It does something else, or repeats what it has made: tuples of the same tuples are
            exponential in its bytes.
    """
    made, memo = "", {}
    for number, (operation, value, _) in enumerate(pickletools.genops(data)):
        name = operation.name
        if name not in KNOWN or number == MOST_OPERATIONS:
            raise pickle.UnpicklingError(f"it has the operation {name} in place {number}")
        if name in STORE:
            index = len(memo) if value is None else value
            # The unpickler has room up to the largest index.
            if index > MOST_OPERATIONS:
                raise pickle.UnpicklingError(f"its memo has the index {index}")
            memo[index] = made
        elif name in RECALL and memo.get(value) not in REPEATED:
            raise pickle.UnpicklingError("it repeats what is no text and no name")
        else:
            made = memo[value] if name in RECALL else name


def find_tensor(path: Path) -> tuple[str, tuple[int, ...], int]:
    """The tensor of a file, or the one under the key "embedding" of its dictionary.

    Args:
        path: The file.

    Returns:
        Its dtype in safetensors' notation, its shape, and where its bytes begin in the file.

    Raises:
        InputError: The file is of another form, or damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            described = next((i for i in archive.infolist() if i.filename.endswith("/data.pkl")), None)
            if described is None or described.file_size > MOST_PICKLE_BYTES:
                raise InputError(f"{path} is no file of one tensor that torch.save has written")
            with archive.open(described) as file:
                data = file.read(MOST_PICKLE_BYTES)
            check_operations(data)
            value: Any = _Unpickler(io.BytesIO(data)).load()
            value = value["embedding"] if isinstance(value, dict) and "embedding" in value else value
            kind, dtype, key, _, _ = value["storage"]
            shape, offset = tuple(value["shape"]), value["offset"]
            is_sized = all(type(n) is int and n > 0 for n in (*shape, offset + 1))
            is_whole = kind == "storage" and dtype in BYTES and is_sized
            stored = archive.getinfo(f"{described.filename.removesuffix('data.pkl')}data/{key}")
            size = BYTES[dtype] * (offset + math.prod(shape))
            is_plain = stored.compress_type == zipfile.ZIP_STORED and stored.file_size >= size
            strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
            if not (is_whole and is_plain and list(value["stride"]) == strides):
                raise InputError(f"{path} has a tensor that is not stored in one piece: save it with .contiguous()")
        with path.open("rb") as file:
            file.seek(stored.header_offset)
            name_bytes, extra_bytes = struct.unpack("<HH", file.read(LOCAL_HEADER_BYTES)[26:30])
        return (
            dtype,
            shape,
            stored.header_offset + LOCAL_HEADER_BYTES + name_bytes + extra_bytes + BYTES[dtype] * offset,
        )
    except InputError:
        raise
    except OSError as e:
        raise InputError(f"{path} cannot be read: {e.strerror or e}") from None
    except Exception as e:  # a file from outside may be damaged anywhere
        raise InputError(f"{path} is no file of one tensor that torch.save has written: {e}") from None

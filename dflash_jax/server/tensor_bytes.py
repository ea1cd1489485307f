"""Tensors in the bytes of a safetensors file that a client has sent."""

from math import prod

import msgspec
import numpy as np

from dflash_jax.argument_checks import shown
from dflash_jax.checkpoint.files import DTYPES
from dflash_jax.errors import InputError

# Bytes of a header: of some forty thousand tensors. It is parsed at once.
MOST_HEADER_BYTES = 2**22
# Axes of a tensor, and positions of an axis.
MOST_AXES, MOST_SIZE = 8, 2**40
# How the files begin that torch writes: pickles, alone or in an archive.
PICKLES = (b"\x80", b"PK")
PICKLE = "this is a pickle, which could run any code: only safetensors are read"


class _Tensor(msgspec.Struct):
    """An entry of the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def tensors_of(data: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file, as views of its bytes where these are aligned.

    Args:
        data: The bytes, uint8 [n].

    Raises:
        InputError: It is no such file, or one that leaves bytes out or uses some twice.
    """
    if data[:2].tobytes().startswith(PICKLES):
        raise InputError(PICKLE)
    size = int.from_bytes(data[:8].tobytes(), "little")
    if len(data) < 8 or size > len(data) - 8:
        raise InputError(f"{len(data)} bytes are no whole safetensors file")
    if size > MOST_HEADER_BYTES:
        raise InputError(f"the header of the safetensors has {size} bytes: at most {MOST_HEADER_BYTES} are possible")
    try:
        header = msgspec.json.decode(data[8 : 8 + size].data, type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(raw, type=_Tensor) for name, raw in header.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise InputError(f"the header of the safetensors is malformed: {e}") from None
    if not entries:
        raise InputError("the safetensors have no tensor")
    content, at, tensors = data[8 + size :], 0, dict[str, np.ndarray]()
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if entry.dtype not in DTYPES:
            raise InputError(f"{shown(name)} has dtype {shown(entry.dtype)}: known are {', '.join(DTYPES)}")
        shape, (begin, end) = entry.shape, entry.data_offsets
        if len(shape) > MOST_AXES or any(not 0 <= n <= MOST_SIZE for n in shape):
            raise InputError(f"{shown(name)} has shape {shown(shape)}: that is no tensor's")
        if begin != at or end - begin != prod(shape) * DTYPES[entry.dtype].itemsize:
            raise InputError(
                f"{shown(name)} has data_offsets {shown([begin, end])}: its bytes must follow the last one's"
            )
        at = end
        if at > len(content):
            break
        array = content[begin:end].view(DTYPES[entry.dtype]).reshape(shape)
        tensors[name] = np.require(array, requirements="A")
    if at != len(content):
        raise InputError(f"the tensors of the safetensors have {at} bytes, and {len(content)} follow the header")
    return tensors

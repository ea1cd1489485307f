"""Matrices of a GGUF file that stay in few bits: Q4_0 and Q8_0, as compressed-tensors packs whole numbers.

Both have one float16 scale for each 32 inputs and codes around the middle one, as its groups of 32 have them.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import numpy as np

from dflash_jax.checkpoint.files import Streamed
from dflash_jax.checkpoint.gguf_file import BITS, split_blocks
from dflash_jax.checkpoint.gguf_tensors import CHUNK, Output
from dflash_jax.checkpoint.parameters import FEW_BITS
from dflash_jax.models.families.names import Entry

GROUP = 32
# Most layers that one pattern names.
MOST_LAYERS = 100


def packed_bits(entries: Iterable[Entry], outputs: Mapping[str, Output]) -> dict[str, int]:
    """The tensors that stay packed, and their bits: all of a parameter alike, or none.

    Args:
        entries: The model's parameters.
        outputs: Its tensors.
    """
    bits: dict[str, int] = {}
    mixed: set[str] = set()
    for entry in entries:
        names = [tensor.name for tensor in entry.tensors]
        found = {_bits(outputs.get(name)) for name in names}
        if entry.path.rsplit(".", 1)[-1] not in FEW_BITS or len(found) > 1 or None in found:
            mixed |= set(names)
        else:
            bits |= dict.fromkeys(names, found.pop() or 0)
    return {name: each for name, each in bits.items() if name not in mixed}


def _bits(output: Output | None) -> int | None:
    """The bits of a tensor whose stored rows are whole groups of its rows; None where they are not."""
    if output is None or len(output.shape) != 2 or output.value is not None:
        return None
    if any(source.factor != 1 for source in output.sources) or (output.columns is not None and _groups(output) is None):
        return None
    kinds = {source.kind for source in output.sources}
    return BITS.get(kinds.pop()) if len(kinds) == 1 else None


def _groups(output: Output) -> np.ndarray | None:
    """The order of a tensor's groups of columns; None where they are torn."""
    assert output.columns is not None
    index = output.columns.index().reshape(-1, GROUP) if output.width % GROUP == 0 else np.ones((1, 1), np.int64)
    is_whole = (index[:, :1] % GROUP == 0).all() and (index == index[:, :1] + np.arange(GROUP)).all()
    return index[:, 0] // GROUP if is_whole else None


def packed(name: str, output: Output, bits: int) -> dict[str, Streamed]:
    """The tensors of a matrix that stays packed.

    Args:
        name: The matrix's name.
        output: The matrix.
        bits: Of its codes.
    """
    rows, columns = output.shape
    words, scales = (rows, columns * bits // 32), (rows, columns // GROUP)
    return {
        f"{name}_packed": Streamed(words, np.dtype(np.int32), partial(_blocks, output, partial(_words, bits))),
        f"{name}_scale": Streamed(scales, np.dtype(np.float16), partial(_blocks, output, lambda _, scale: scale)),
        f"{name.removesuffix('weight')}weight_shape": Streamed(
            (2,), np.dtype(np.int64), lambda: iter([np.array(output.shape)])
        ),
    }


def _blocks(output: Output, of: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Iterator[np.ndarray]:
    """Yields what ``of`` makes of codes [N, I / 32, 32] and scales [N, I / 32], some rows at a time."""
    groups = None if output.columns is None else _groups(output)
    for parts in output.stored(max(1, CHUNK // output.width)):
        count = sum(len(source.data) for _, source in parts)
        codes = np.empty((count, output.width // GROUP, GROUP), np.uint8)
        scale = np.empty(codes.shape[:2], np.float16)
        for mask, source in parts:
            found, scale[mask] = split_blocks(source.data, source.kind)
            codes[mask] = found.reshape(len(source.data), -1, GROUP)
        yield of(codes, scale) if groups is None else of(codes[:, groups], scale[:, groups])


def _words(bits: int, codes: np.ndarray, _: np.ndarray) -> np.ndarray:
    """Codes in words of 32 bits, of which the low ones are the first."""
    flat = codes.reshape(len(codes), -1)
    if bits == 4:
        flat = flat[:, ::2] | flat[:, 1::2] << 4
    return np.ascontiguousarray(flat).view("<i4")


def quantization_config(bits: Mapping[str, int], names: Iterable[str]) -> dict:
    """``quantization_config`` of a checkpoint.

    Args:
        bits: The tensors that are packed, and their bits.
        names: All tensors.
    """
    groups = {}
    for i, count in enumerate(sorted(set(bits.values()))):
        weights = {"num_bits": count, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
        targets = _patterns([name for name, each in bits.items() if each == count], names)
        groups[f"group_{i}"] = {
            "targets": targets,
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
            "format": "pack-quantized",
        }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if len(groups) < 2 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [],
        "kv_cache_scheme": None,
    }


def _patterns(chosen: Iterable[str], names: Iterable[str]) -> list[str]:
    """Patterns of the modules of some tensors, which match no module of the others.

    The experts of a layer are alike. A pattern has any layer where all layers are, else the numbers of some.
    """
    layers: dict[tuple[str, str], dict[str, None]] = {}
    for name in chosen:
        before, layer, after = _module(name)
        layers.setdefault((before, after), {})[layer] = None
    others = dict.fromkeys(_module(name) for name in names)
    total: dict[tuple[str, str], int] = {}
    for before, _, after in others:
        total[before, after] = total.get((before, after), 0) + 1
    patterns = []
    for (before, after), numbers in layers.items():
        if len(numbers) == total[before, after]:
            patterns.append(f"re:{before}{r'[0-9]+' if '' not in numbers else ''}{after}$")
            continue
        each = list(numbers)
        for first in range(0, len(each), MOST_LAYERS):
            patterns.append(f"re:{before}(?:{'|'.join(each[first : first + MOST_LAYERS])}){after}$")
    return patterns


def _module(name: str) -> tuple[str, str, str]:
    """A tensor's module as expressions: what is before the number of its layer, that number, and what is after it."""
    module = re.escape(name.removesuffix(".weight"))
    found = re.fullmatch(r"((?:.*\\\.)?layers\\\.)([0-9]+)(\\\..*)", module)
    before, layer, after = found.groups() if found else (module, "", "")
    return before, layer, re.sub(r"(experts\\\.)[0-9]+", r"\1[0-9]+", after)

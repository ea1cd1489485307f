"""Weights in few bits, as checkpoints have them: FP8, NVFP4, MXFP4, and integers of four and eight bits.

O outputs, I inputs, g inputs of a group, M the module's name, X its weight's; b e2m1, in four bits, of which the low
half of a byte is an even input; c codes in 32-bit words (`words.Words`), without a sign:

    FP8: w · s              w = X float8_e4m3fn [O, I], s = X_scale or X_scale_inv, one a tensor, row, block or group
    NVFP4: b · s · t        b = X uint8 [O, I/2], s = X_scale float8_e4m3fn [O, I/16], t = X_scale_2 float32
    NVFP4: b · (s / t)      b = X_packed, s = X_scale alike, t = X_global_scale float32
    MXFP4: b · 2^(e - 127)  b = X_packed or X, e = X_scale uint8 [O, I/32]
    INT8: (w - z) · s       w = X int8 [O, I], s = X_scale, z = X_zero_point int8 of the same shape
    INT: (c - z) · s        c = X_packed [O, I in words], s = X_scale [O, I/g], z = X_zero_point [O in words, I/g]
    GPTQ: (c - z) · s       c = M.qweight [I in words, O], s = M.scales [I/g, O], z = M.qzeros [I/g, O in words]
    AWQ: (c - z) · s        c = M.qweight [I, O in words], s and z as GPTQ

The first form of NVFP4 is ModelOpt's, the second that of compressed-tensors, which has the integers in X, too. GPTQ's
first version has z - 1. Where z is the middle of the codes, or 0 without words, there is none here. What only repeats
shapes and places of inputs (X_shape, X_g_idx, M.g_idx, a z in the middle) is `Stored.constants`. With act-order g_idx
tells the group of an input, whose neighbours may be of other groups. Scales of activations, keys and values
(`is_unused`) change no weight.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dflash_jax.checkpoint.disk_array import DiskArray, combined, joined
from dflash_jax.checkpoint.files import DTYPES, Tensors
from dflash_jax.checkpoint.quantization import (
    AWQ,
    COMPRESSED,
    FP8,
    GPTQ,
    GROUP,
    INT4,
    INT8,
    INTEGERS,
    MX_GROUP,
    MXFP4,
    NVFP4,
    Claim,
    Quantization,
)
from dflash_jax.checkpoint.words import AWQ_ORDER, BFLOAT16, PLAIN, Exponents, Layout, Plain, Words
from dflash_jax.errors import InputError
from dflash_jax.models.families.names import Entry, Tensor
from dflash_jax.models.families.reading import shown
from dflash_jax.ops.weights import CODES, QuantizedWeight

PACKED, QWEIGHT = "_packed", ".qweight"
# Kind → code of `QuantizedWeight`, of kinds in four bits, and dtype of the values of the others.
CODES_OF = {NVFP4: "e2m1", MXFP4: "e2m1", INT4: "int4"}
DTYPES_OF = {FP8: "float8_e4m3fn", INT8: "int8"}
FLOATS, WHOLE = ("F32", "BF16", "F16"), ("I32", "I64")
# Scales of activations, after the name of a module; scales of keys and values, after that of an attention.
OF_INPUTS = ("input_scale", "input_global_scale", "input_zero_point")
OF_CACHES = ("k_scale", "v_scale", "q_scale", "k_proj.k_scale", "v_proj.v_scale")
# Least scale of keys and values; the largest is its reciprocal.
LEAST_SCALE = 1e-18


@dataclass(frozen=True)
class Part:
    """A tensor on disk: the values of a weight [..., O, I], or numbers of which each is of a block of its matrices.

    Attributes:
        name: Its name.
        shape: Its shape here.
        dtypes: The dtypes that it may have on disk, as `Tensors.dtype`.
        block: Rows and columns of a block.
        layout: How it is laid out on disk.
        shapes: The shapes that it may have on disk; none: that of the layout.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    block: tuple[int, int] = (1, 1)
    layout: Layout = PLAIN
    shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def disk_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes that it may have on disk."""
        return self.shapes or (self.layout.disk_shape(self.shape),)

    def dtype(self, files: Tensors) -> np.dtype:
        """The dtype of the array as it is here."""
        if isinstance(self.layout, Words):
            return np.dtype(np.int8 if self.layout.is_zero or self.layout.bits == 8 else np.uint8)
        return BFLOAT16 if isinstance(self.layout, Exponents) else DTYPES[files.dtype(self.name)]

    def section(self, files: Tensors, rows: slice, columns: slice) -> np.ndarray:
        """A part of the array as it is here, its axes before the last taken as one: some rows, some columns."""
        layout, (*lead, height, width) = self.layout, self.shape
        if lead and not layout.has_rows:
            # Whole matrices.
            begin, end = rows.start // height, -(-rows.stop // height)
            disk = layout.disk_shape(self.shape)
            array = files.section(self.name, disk, slice(begin * disk[-2], end * disk[-2]), slice(0, disk[-1]))
            array = layout.read(array.reshape(-1, *disk[-2:]), (end - begin, height, width)).reshape(-1, width)
            return array[rows.start - begin * height : rows.stop - begin * height, columns]
        first = [s.start - s.start % step for s, step in zip((rows, columns), layout.steps, strict=True)]
        ends = layout.disk_shape(first), layout.disk_shape((rows.stop, columns.stop))
        places = [slice(*both) for both in zip(*ends, strict=True)]
        array = files.section(self.name, layout.disk_shape(self.shape), *places)
        array = layout.read(array, (rows.stop - first[0], columns.stop - first[1]))
        return array[rows.start - first[0] :, columns.start - first[1] :]


@dataclass(frozen=True)
class Stored:
    """A tensor of a parameter in few bits.

    Attributes:
        tensor: The tensor, or some of its rows, with the weight's shape.
        kind: `FP8`, `NVFP4`, `MXFP4`, `INT4` or `INT8`; empty: this one is not in few bits.
        values: Its values.
        scales: Role → numbers of its blocks. "scale" and "factor" multiply the values, "divisor" divides them, and
            "zero" is subtracted before.
        constants: Role → tensors that say nothing else: "zero", "shape", and "places", the group of each input, in
            order; with act-order "order" in place of "places", in any order.
    """

    tensor: Tensor
    kind: str
    values: Part
    scales: dict[str, Part]
    constants: dict[str, Part] = dataclasses.field(default_factory=dict)

    @property
    def parts(self) -> list[Part]:
        """Its tensors, those of the constants apart."""
        return [self.values, *self.scales.values()]

    def problems(self, files: Tensors) -> Iterator[str]:
        """What is wrong with its tensors."""
        for part in (*self.parts, *self.constants.values()):
            name, shapes = part.name, part.disk_shapes
            if name not in files:
                yield f"missing {name!r} {list(shapes[0])}"
            elif files[name] not in shapes:
                right = " or ".join(str(list(s)) for s in shapes)
                yield f"{name!r} has shape {list(files[name])}, it must be {right}"
            elif files.dtype(name) not in part.dtypes:
                yield f"{name!r} has dtype {files.dtype(name)}, it must be {' or '.join(part.dtypes)}"

    def order(self, files: Tensors) -> np.ndarray | None:
        """The group of each input; None where they are in order."""
        if "order" not in self.constants:
            return None
        groups = files.read(self.constants["order"].name)
        return None if self._are_in_order(groups) else groups

    def _are_in_order(self, groups: np.ndarray) -> bool:
        places = np.arange(len(groups)) // self.scales["scale"].block[1]
        # compressed-tensors has -1 where no order was made.
        return np.array_equal(groups, places) or bool((groups == -1).all())

    def check_constants(self, files: Tensors) -> None:
        """Raises InputError where a tensor of `constants` says something else."""
        for role, part in self.constants.items():
            array = files.read(part.name)
            if role == "shape":
                is_right = np.array_equal(array, self.tensor.disk_shape)
                right = f"it must be {list(self.tensor.disk_shape)}"
            elif role == "zero":
                layout, middles = part.layout, [0]
                if isinstance(layout, Words) and layout.is_transposed and not layout.order:
                    # Files of either version of GPTQ have the other's middle, too.
                    middles.append(2 * layout.less - 1)
                numbers = layout.read(array, part.shape)
                is_right = any((numbers == middle).all() for middle in middles)
                right = "it must be the middle of the codes, since the quantization config has symmetric weights"
            else:
                count, is_right = self.scales["scale"].shape[-1], self._are_in_order(array)
                right = f"it must be {count} groups in order, since the quantization config has no act-order"
                if role == "order":
                    is_right = is_right or bool(((array >= 0) & (array < count)).all())
                    right = f"it must have groups from 0 to {count - 1}"
            if not is_right:
                raise InputError(f"tensor {part.name!r} begins with {array.reshape(-1)[:4].tolist()}: {right}")


def plain_names(names: Iterable[str]) -> Collection[str]:
    """Names of tensors as a table of weight names has them: those of packed values as if they were not packed."""
    return dict.fromkeys(
        f"{name.removesuffix(QWEIGHT)}.weight" if name.endswith(QWEIGHT) else name.removesuffix(PACKED)
        for name in names
    )


def stored(tensor: Tensor, files: Tensors, quantization: Quantization) -> Stored | None:
    """How a tensor is stored; None where it is not in few bits.

    Raises:
        InputError: The configuration says otherwise, or the form is not read here.
    """
    name = tensor.name
    if len(tensor.shape) < 2:
        return None
    module, (*_, columns) = name.removesuffix(".weight"), tensor.disk_shape
    claim = quantization.claim(module)
    has_words = module != name and f"{module}{QWEIGHT}" in files
    kind = _kind(tensor, files, claim, has_words)
    if kind is None:
        return None
    packing = COMPRESSED if not has_words else AWQ if claim is not None and claim.packing == AWQ else GPTQ
    by_tensors = kind if packing == COMPRESSED else f"{kind} in {module}{QWEIGHT}"
    # A number of four bits may have a byte of its own.
    kinds = (INT4, INT8) if kind == INT8 and not (has_words or _is_packed(name, files)) else (kind,)
    if claim is None or claim.packing.removesuffix("_v2") != packing or claim.kind not in kinds:
        said = f"{claim.kind} of {claim.packing}" if claim and claim.kind in (INT4, INT8) else claim and claim.kind
        raise InputError(
            f"{module!r} is {by_tensors} by its tensors, and {said or 'not quantized'} by {quantization.key} of the "
            f"quantization config: they must agree"
        )
    if kind in CODES_OF and columns % 2:
        raise InputError(f"{name!r} has {columns} inputs in four bits: it must have an even number of them")
    if has_words:
        return _in_qweight(tensor, module, kind, files, claim)
    if kind in (INT4, INT8):
        return _in_integers(tensor, kind, files, claim)
    return _in_floats(tensor, kind, files, claim, quantization.is_official)


def _is_packed(name: str, files: Tensors) -> bool:
    return name + PACKED in files


def _kind(tensor: Tensor, files: Tensors, claim: Claim | None, has_words: bool) -> str | None:
    """The kind of a tensor by its tensors."""
    name, (*_, columns) = tensor.name, tensor.disk_shape
    has = {s for s in ("_scale", "_scale_inv", "_scale_2", "_global_scale", PACKED) if name + s in files}
    dtype = files.dtype(name) if name in files else None
    packed = f"{name.removesuffix('.weight')}{QWEIGHT}" if has_words else name + PACKED
    if has_words or (PACKED in has and files.dtype(packed) == "I32" and not has & {"_scale_2", "_global_scale"}):
        if claim is not None and claim.packing == AWQ:
            return INT4
        count = files[packed][-2 if has_words else -1] if len(files[packed]) > 1 else 0
        sizes = {-(-columns * bits // 32): kind for bits, kind in INTEGERS.items()}
        return sizes.get(count, claim.kind if claim is not None and claim.kind in (INT4, INT8) else INT4)
    if PACKED in has or dtype == "U8" or has & {"_scale_2", "_global_scale"}:
        is_mx = "_scale" in has and files.dtype(f"{name}_scale") == "U8" and not has & {"_scale_2", "_global_scale"}
        return MXFP4 if is_mx else NVFP4
    if dtype == "I8":
        return INT8
    return FP8 if dtype == "F8_E4M3" or has else None


def _of_blocks(name: str, shape: tuple[int, ...], block: tuple[int, int] | None, files: Tensors) -> Part:
    """A number for each block of a weight of ``shape``; without ``block`` of the whole or of rows, as it is on disk."""
    *lead, rows, columns = shape
    if block is not None:
        grid = (*lead, -(-rows // block[0]), -(-columns // block[1]))
        return Part(name, grid, FLOATS, block)
    of_tensor = tuple((*lead, *ones) for ones in ((), (1,), (1, 1)))
    of_rows = ((*lead, rows, 1), (*lead, rows))
    if files.get(name) in of_rows:
        return Part(name, of_rows[0], FLOATS, (1, columns), shapes=of_rows)
    return Part(name, (*lead, 1, 1), FLOATS, (rows, columns), shapes=(*of_tensor, *of_rows))


def _in_floats(tensor: Tensor, kind: str, files: Tensors, claim: Claim, is_official: bool) -> Stored:
    """FP8, NVFP4 and MXFP4."""
    name, shape = tensor.name, tensor.disk_shape
    *lead, rows, columns = shape
    size = {NVFP4: GROUP, MXFP4: MX_GROUP}.get(kind, 1)
    if columns % size:
        raise InputError(f"{name!r} has {columns} inputs: {kind} has groups of {size}")
    if kind == FP8:
        is_inverse = f"{name}_scale_inv" in files or (is_official and f"{name}_scale" not in files)
        scale = _of_blocks(f"{name}_scale{'_inv' * is_inverse}", shape, claim.block, files)
        if claim.block == (1, MX_GROUP) and scale.name in files and files.dtype(scale.name) == "U8":
            scale = dataclasses.replace(scale, dtypes=("U8",), layout=Exponents())
        return Stored(tensor, FP8, Part(name, shape, ("F8_E4M3",)), {"scale": scale})
    values = Part(name + PACKED * _is_packed(name, files), (*lead, rows, columns // 2), ("U8",))
    scale = Part(f"{name}_scale", (*lead, rows, columns // size), ("F8_E4M3",), (1, size))
    if kind == MXFP4:
        return Stored(tensor, kind, values, {"scale": dataclasses.replace(scale, dtypes=("U8",), layout=Exponents())})
    role, suffix = ("divisor", "_global_scale") if _is_packed(name, files) else ("factor", "_scale_2")
    of_tensor = tuple((*lead, *ones) for ones in ((), (1,), (1, 1)))
    whole = Part(name + suffix, (*lead, 1, 1), ("F32",), (rows, columns), shapes=of_tensor)
    return Stored(tensor, kind, values, {"scale": scale, role: whole})


def _check_groups(name: str, columns: int, claim: Claim) -> None:
    if claim.block and claim.block[0] == 1 and columns % claim.block[1]:
        raise InputError(f"{name!r} has {columns} inputs: they must be whole groups of {claim.block[1]}")


def _in_integers(tensor: Tensor, kind: str, files: Tensors, claim: Claim) -> Stored:
    """compressed-tensors' integers."""
    name, shape = tensor.name, tensor.disk_shape
    *lead, rows, columns = shape
    _check_groups(name, columns, claim)
    scale = _of_blocks(f"{name}_scale", shape, claim.block, files)
    constants = {}
    zero = dataclasses.replace(scale, name=f"{name}_zero_point", dtypes=("I8",))
    if not _is_packed(name, files):
        values = Part(name, shape, ("I8",))
    else:
        bits = 4 if kind == INT4 else 8
        columns = columns // 2 if bits == 4 else columns
        values = Part(name + PACKED, (*lead, rows, columns), ("I32",), layout=Words(bits))
        if scale.block[0] == 1:
            layout = Words(bits, of_outputs=True, is_zero=True)
            zero = dataclasses.replace(zero, dtypes=("I32",), layout=layout, shapes=())
        constants["shape"] = Part(f"{name}_shape", (len(shape),), WHOLE, shapes=((len(shape),),))
    found = Stored(tensor, kind, values, {"scale": scale}, constants)
    return _with_zeros(found, zero, f"{name}_g_idx", files, claim)


def _in_qweight(tensor: Tensor, module: str, kind: str, files: Tensors, claim: Claim) -> Stored:
    """GPTQ's and AWQ's integers, whose matrices are transposed."""
    shape = tensor.disk_shape
    *lead, rows, columns = shape
    _check_groups(tensor.name, columns, claim)
    bits, is_awq = 4 if kind == INT4 else 8, claim.packing == AWQ
    order = AWQ_ORDER if is_awq else ()
    layout = Words(bits, is_awq, True, order)
    values = Part(module + QWEIGHT, (*lead, rows, columns // (8 // bits)), ("I32",), layout=layout)
    block = claim.block or (1, columns)
    grid = (*lead, rows, columns // block[1])
    scale = Part(f"{module}.scales", grid, FLOATS, block, Plain(is_transposed=True))
    layout = Words(bits, True, True, order, less=int(claim.packing == GPTQ), is_zero=True)
    zero = Part(f"{module}.qzeros", grid, ("I32",), block, layout)
    return _with_zeros(Stored(tensor, kind, values, {"scale": scale}), zero, f"{module}.g_idx", files, claim)


def _with_zeros(found: Stored, zero: Part, groups: str, files: Tensors, claim: Claim) -> Stored:
    """Integers with their zero points and, of the name ``groups``, the group of each input."""
    scales, constants, inputs = dict(found.scales), dict(found.constants), found.tensor.disk_shape[-1:]
    if claim.has_order or groups in files:
        constants["order" if claim.has_order else "places"] = Part(groups, inputs, WHOLE, shapes=(inputs,))
    if not claim.is_symmetric:
        scales["zero"] = zero
    elif zero.name in files:
        constants["zero"] = zero
    return dataclasses.replace(found, scales=scales, constants=constants)


def stored_of(entry: Entry, files: Tensors, quantization: Quantization | None) -> tuple[Stored, ...]:
    """How the tensors of a parameter are stored; none where none is in few bits.

    Raises:
        InputError: As of `stored`.
    """
    if quantization is None or entry.is_integer:
        return ()
    found = [(t, stored(t, files, quantization)) for t in entry.tensors]
    if all(s is None for _, s in found):
        return ()
    return tuple(s or Stored(t, "", Part(t.name, t.disk_shape, FLOATS), {}) for t, s in found)


def are_packed(parts: Sequence[Stored], files: Tensors) -> bool:
    """Whether a parameter can stay in few bits: its tensors are alike, and their inputs in the order of groups."""
    return len({(part.kind, *part.scales) for part in parts}) == 1 and all(p.order(files) is None for p in parts)


def all_stored(
    entries: Iterable[Entry], files: Tensors, quantization: Quantization | None
) -> dict[str, tuple[Stored, ...]]:
    """Path → `stored_of` of the parameters in few bits."""
    return {e.path: parts for e in entries if (parts := stored_of(e, files, quantization))}


def is_unused(name: str, weights: Collection[str]) -> bool:
    """Whether a tensor is a scale of activations, keys or values beside the tensors ``weights``."""
    for suffix in OF_INPUTS:
        if name.endswith(f".{suffix}"):
            return f"{name.removesuffix(suffix)}weight" in weights
    return any(name.endswith(f".{s}") and f"{name.removesuffix(s)}k_proj.weight" in weights for s in OF_CACHES)


def kv_scales(entries: Iterable[Entry], files: Tensors) -> dict[str, np.ndarray]:
    """The scales of keys and values among ``files``, float32 [1] or [K], by path, as ``layers.3.mixer.k_scale``.

    Raises:
        InputError: A scale is out of range, or its shape is another one.
    """
    found = {}
    for entry in entries:
        what = entry.path.rpartition(".")[2]
        if what not in ("k", "v") or not entry.tensors[0].name.endswith(f".{what}_proj.weight"):
            continue
        module = entry.tensors[0].name.removesuffix(f"{what}_proj.weight")
        names = [name for s in OF_CACHES if s.endswith(f"{what}_scale") and (name := module + s) in files]
        for name in names[:1]:
            scales, heads = files.read(name).astype(np.float32).reshape(-1), entry.shape[0]
            if len(scales) not in (1, heads):
                raise InputError(
                    f"{name!r} has shape {list(files[name])}: it must be one scale, or one a head, {heads}"
                )
            # Products with smaller and larger ones would not be finite.
            if not (is_right := (scales >= LEAST_SCALE) & (scales <= 1 / LEAST_SCALE)).all():
                wrong = scales[~is_right][0].item()
                raise InputError(
                    f"tensor {name!r} has the scale {wrong:g}: it must be from {LEAST_SCALE:g} to {1 / LEAST_SCALE:g}"
                )
            found[f"{entry.path}_scale"] = scales
    return found


def is_of_caches(name: str) -> bool:
    """Whether a tensor that `is_unused` is a scale of keys or values."""
    return not name.endswith(OF_INPUTS)


def counted(unused: Iterable[str]) -> list[str]:
    """What `is_unused` found, in words: each kind and how many there are."""
    counts = Counter(name.rpartition(".")[2] for name in unused)
    return [f"{count:,} x {kind}" for kind, count in sorted(counts.items())]


def _run(inputs: int, blocks: Iterable[tuple[int, int]]) -> int:
    """Inputs of the runs, equal ones each within one block, of a last axis of ``inputs``."""
    return math.gcd(inputs, *(columns for _, columns in blocks))


def read(entry: Entry, parts: Sequence[Stored], files: Tensors) -> dict[str, DiskArray]:
    """The arrays of a parameter of which tensors are in few bits, as conversions keep them.

    Args:
        entry: The parameter.
        parts: How its tensors are stored.
        files: The tensors.

    Returns:
        "values" or, in four bits, the name of their code, as `QuantizedWeight` has them; and "scale", "zero", and
        "factor" or "divisor", for each run of the last axis. Where not `are_packed`: "array", multiplied out, float32.
        What is read from them raises InputError where a scale is no scale.

    Raises:
        InputError: A tensor of `Stored.constants` says something else.
    """
    for part in {part.values.name: part for part in parts}.values():
        part.check_constants(files)
    if not are_packed(parts, files):

        def multiplied_out(i: int, rows: slice, columns: slice) -> np.ndarray:
            return _multiplied_out(parts[i], files, rows, columns)

        return {"array": joined(entry, [np.dtype(np.float32)] * len(parts), multiplied_out)}

    def values(i: int, rows: slice, columns: slice) -> np.ndarray:
        return parts[i].values.section(files, parts[i].tensor.rows_on_disk(rows), columns)

    code = CODES_OF.get(parts[0].kind)
    dtypes = [part.values.dtype(files) for part in parts]
    arrays = {code or "values": joined(entry, dtypes, values, entry.shape[-1] // (2 if code else 1))}
    for role in parts[0].scales:
        run = _run(entry.shape[-1], (part.scales[role].block for part in parts))
        dtypes = [part.scales[role].dtype(files) for part in parts]

        def scales(i: int, rows: slice, columns: slice, role: str = role, run: int = run) -> np.ndarray:
            return _scales(parts[i], role, run, files, rows, columns)

        of_all = dtypes[0] if len({*dtypes}) == 1 else np.dtype(np.float32)
        arrays[role] = joined(entry, dtypes, scales, entry.shape[-1] // run, of_all)
    return arrays


def _multiplied_out(part: Stored, files: Tensors, rows: slice, columns: slice) -> np.ndarray:
    """Some rows and columns of the numbers of a tensor, float32."""
    inputs, on_disk, code = part.tensor.shape[-1], part.tensor.rows_on_disk(rows), CODES_OF.get(part.kind)
    each = 2 if code else 1
    begin, end = columns.start // each, -(-columns.stop // each)
    values = part.values.section(files, on_disk, slice(begin, end))
    if not part.kind:
        return values.astype(np.float32)
    arrays = {code or "values": values}
    for role, scales in part.scales.items():
        run = 1 if part.order(files) is not None else _run(inputs, [scales.block])
        if run == inputs:
            arrays[role] = _scales(part, role, run, files, rows, slice(0, 1))
            continue
        # Parts of runs, of which these inputs are whole ones.
        run = math.gcd(run, begin * each, end * each)
        arrays[role] = _scales(part, role, run, files, rows, slice(begin * each // run, end * each // run))
    arrays = {name: np.asarray(array) for name, array in without_divisor(arrays, is_exact=True).items()}
    dense = np.asarray(QuantizedWeight.of(arrays).dense(np.float32))
    return dense[:, columns.start - begin * each : columns.stop - begin * each]


def _scales(stored: Stored, role: str, run: int, files: Tensors, rows: slice, columns: slice) -> np.ndarray:
    """The numbers of blocks, for some rows of a tensor and some runs of its inputs, of ``run`` each.

    Raises:
        InputError: A scale is not finite, or is negative where values have signs, or is 0 where it divides; or its
            product with the scale of scales is not finite.
    """
    part, (outputs, inputs), order = stored.scales[role], stored.tensor.disk_shape[-2:], stored.order(files)
    on_disk = stored.tensor.rows_on_disk(rows)
    matrix, row = np.divmod(np.arange(on_disk.start, on_disk.stop), outputs)
    down = matrix * part.shape[-2] + row // part.block[0]
    places = np.arange(columns.start, columns.stop)
    across = places * run // part.block[1] if order is None else order[places]
    first = down[0], across.min()
    array = part.section(files, slice(first[0], down[-1] + 1), slice(first[1], across.max() + 1))
    if role != "zero":
        numbers = array.astype(np.float32)
        # The scale of integers has a sign in AutoRound's files.
        has_sign = stored.kind in (INT4, INT8)
        if not np.isfinite(numbers).all() or not (has_sign or (numbers >= 0).all()):
            what, right = ("", "") if has_sign else ("negative or ", ", 0 or more")
            raise InputError(f"tensor {part.name!r} has a scale that is {what}not finite: it must be a number{right}")
    array = array[down - first[0]][:, across - first[1]]
    for other in stored.scales.keys() & {"factor", "divisor"} if role == "scale" else ():
        whole = _scales(stored, other, inputs, files, rows, slice(0, 1))[:, 0]
        largest = array.astype(np.float32).max(1, initial=0 if other == "factor" else 1)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            products = largest * whole if other == "factor" else largest / whole
        if not (is_finite := np.isfinite(products)).all():
            name, number = stored.scales[other].name, whole[~is_finite][0].item()
            raise InputError(f"tensor {name!r} has {shown(number)}: its scales must be finite numbers")
    return array


def without_divisor(arrays: Mapping[str, Any], is_exact: bool) -> dict[str, Any]:
    """The arrays of `read` with a factor, or with float32 quotients, in place of a divisor.

    They are computed on the host: quotients of compiled programs are not the nearest numbers on every device.

    Args:
        arrays: Those of `read`, or of NumPy.
        is_exact: Whether scales are the quotients; else they stay in 8 bits, with the reciprocal as their factor, which
            changes a weight by at most two units of float32's last place.
    """
    rest = {name: array for name, array in arrays.items() if name != "divisor"}
    if "divisor" not in arrays:
        return rest
    if not is_exact:
        return rest | {"factor": combined(lambda divisor: np.float32(1) / divisor, arrays["divisor"])}
    quotient = combined(lambda scale, divisor: scale.astype(np.float32) / divisor, arrays["scale"], arrays["divisor"])
    return rest | {"scale": quotient}


def as_compressed(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of a `QuantizedWeight`, by their names, as compressed-tensors has them: a factor is a divisor."""
    rest = {name: array for name, array in arrays.items() if name != "factor"}
    return rest | {"divisor": 1 / arrays["factor"]} if "factor" in arrays else rest


def write(entry: Entry, parts: Sequence[Stored], arrays: dict[str, np.ndarray]) -> Iterator[tuple[Tensor, np.ndarray]]:
    """Yields the tensors of a parameter as they are here, of some only rows: the inverse of `read`.

    `on_disk` makes of whole ones what the disk has; the constants are tensors of their own in a conversion.
    """
    code = CODES_OF.get(parts[0].kind)
    for part, values in zip(parts, _divided(entry, arrays[code or "values"], 2 if code else 1), strict=True):
        yield dataclasses.replace(part.tensor, name=part.values.name), values
    for role in parts[0].scales:
        run = entry.shape[-1] // arrays[role].shape[-1]
        for part, array in zip(parts, _divided(entry, arrays[role], run), strict=True):
            scales = part.scales[role]
            # Of rows, the scales of blocks that begin in them.
            begin = -part.tensor.first % scales.block[0]
            array = array[..., begin :: scales.block[0], :: max(1, scales.block[1] // run)]
            yield dataclasses.replace(part.tensor, name=scales.name), np.ascontiguousarray(array)


def on_disk(part: Part, array: np.ndarray, dtype: str) -> np.ndarray:
    """What the disk has of a tensor of `write`, whose dtype on disk is ``dtype``."""
    return np.ascontiguousarray(part.layout.write(array.reshape(part.shape)).astype(DTYPES[dtype], copy=False))


def _divided(entry: Entry, array: np.ndarray, inputs: int) -> list[np.ndarray]:
    """The arrays of the tensors of a parameter that has one number for so many inputs of its last axis."""
    short = [dataclasses.replace(t, shape=(*t.shape[:-1], t.shape[-1] // inputs)) for t in entry.tensors]
    return dataclasses.replace(entry, tensors=tuple(short)).write(array)


@dataclass(frozen=True)
class Form:
    """What a parameter in few bits takes of memory.

    Attributes:
        values: Dtype of its values, or the code of four bits.
        columns: Inputs that share a scale; 0 for all of a row.
        scale: Dtype of its scales.
        has_factor: Whether each row has a factor, too.
        has_zero: Whether each scale has a zero point.
    """

    values: str
    columns: int
    scale: str
    has_factor: bool = False
    has_zero: bool = False

    def abstract(self, shape: tuple[int, ...]) -> QuantizedWeight:
        """A weight of ``shape`` in this form, of shape structs."""
        *rows, size = shape
        is_coded, runs = self.values in CODES, (*rows, size // math.gcd(size, self.columns))
        arrays = {self.values: ((*rows, size // 2), "uint8")} if is_coded else {"values": (shape, self.values)}
        arrays["scale"] = runs, self.scale
        if self.has_zero:
            arrays["zero"] = runs, "int8"
        if self.has_factor:
            arrays["factor"] = (*rows, 1), "float32"
        return QuantizedWeight.of({name: jax.ShapeDtypeStruct(*array) for name, array in arrays.items()})


def form(parts: Sequence[Stored], files: Tensors) -> Form:
    """The form of a parameter as it is loaded."""
    scales = [part.scales["scale"] for part in parts]
    dtypes = {BFLOAT16 if isinstance(s.layout, Exponents) else DTYPES[files.dtype(s.name)] for s in scales}
    return Form(
        _values(parts[0].kind),
        math.gcd(*(s.block[1] for s in scales)),
        dtypes.pop().name if len(dtypes) == 1 else "float32",
        has_factor=not parts[0].scales.keys().isdisjoint(("factor", "divisor")),
        has_zero="zero" in parts[0].scales,
    )


def _values(kind: str) -> str:
    return CODES_OF.get(kind) or DTYPES_OF[kind]


def claimed_form(entry: Entry, quantization: Quantization) -> Form | None:
    """The form of a parameter as the configuration alone tells it; None where it is not in few bits."""
    claims = {quantization.claim(t.name.removesuffix(".weight")) for t in entry.tensors if len(t.shape) > 1}
    claim = claims.pop() if len(claims) == 1 else None
    is_said = entry.path != "head" or quantization.has_head or claim is not quantization.default
    if claim is None or not is_said:
        return None
    values = _values(claim.kind)
    if claim.kind == NVFP4:
        return Form(values, GROUP, "float8_e4m3fn", has_factor=True)
    if claim.kind == MXFP4:
        return Form(values, MX_GROUP, "bfloat16")
    if claim.packing != COMPRESSED:
        return Form(values, claim.block[1] if claim.block else 0, "float16", has_zero=not claim.is_symmetric)
    # Scales of published checkpoints in blocks and groups are bfloat16.
    dtype = "bfloat16" if claim.block or claim.kind != FP8 else "float32"
    return Form(values, claim.block[1] if claim.block else 0, dtype, has_zero=not claim.is_symmetric)

"""Weights in few bits, as checkpoints have them: FP8 with scales, and NVFP4.

O outputs, I inputs, X the tensor's name; b e2m1, in four bits, of which the low half of a byte is an even input:

    FP8: w · s              w = X float8_e4m3fn [O, I], s = X_scale or X_scale_inv, one a tensor, a row or a block
    NVFP4: b · s · t        b = X uint8 [O, I/2], s = X_scale float8_e4m3fn [O, I/16], t = X_scale_2 float32
    NVFP4: b · (s / t)      b = X_packed, s = X_scale alike, t = X_global_scale float32

The first form of NVFP4 is ModelOpt's, the second that of compressed-tensors. Scales of activations, keys and values
(`is_unused`) change no weight.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from dflash_jax.checkpoint.files import DTYPES, Tensors
from dflash_jax.checkpoint.quantization import FP8, GROUP, NVFP4, Quantization
from dflash_jax.errors import InputError
from dflash_jax.models.families.names import Entry, Tensor
from dflash_jax.models.families.reading import shown
from dflash_jax.ops.weights import CODES, QuantizedWeight

PACKED = "_packed"
# Kind → code of `QuantizedWeight`, of kinds in four bits.
OF_KINDS = {NVFP4: "e2m1"}
FLOATS = ("F32", "BF16", "F16")
# Scales of activations, after the name of a module; scales of keys and values, after that of an attention.
OF_INPUTS = ("input_scale", "input_global_scale")
OF_CACHES = ("k_scale", "v_scale", "q_scale", "k_proj.k_scale", "v_proj.v_scale")


@dataclass(frozen=True)
class Scales:
    """A tensor of scales: one for each block of the matrices of a weight [..., O, I].

    Attributes:
        name: Its name.
        block: Rows and columns of a block.
        shapes: The shapes that it may have on disk.
        dtypes: Its dtypes likewise, as `Tensors.dtype`.
    """

    name: str
    block: tuple[int, int]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...] = FLOATS


@dataclass(frozen=True)
class Stored:
    """A tensor in few bits.

    Attributes:
        tensor: The tensor, or some of its rows, with the weight's shape.
        kind: `FP8` or `NVFP4`.
        name: The name of its values on disk.
        scales: Role → scales. "scale" and "factor" multiply the values, "divisor" divides them.
    """

    tensor: Tensor
    kind: str
    name: str
    scales: dict[str, Scales]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its values on disk."""
        *lead, columns = self.tensor.disk_shape
        return (*lead, columns // 2 if self.kind == NVFP4 else columns)

    @property
    def dtype(self) -> str:
        """The dtype of its values on disk."""
        return "U8" if self.kind == NVFP4 else "F8_E4M3"

    @property
    def companions(self) -> list[str]:
        """The names of its scales."""
        return [scales.name for scales in self.scales.values()]

    def problems(self, files: Tensors) -> Iterator[str]:
        """What is wrong with its tensors."""
        parts = [(self.name, (self.shape,), (self.dtype,))]
        parts += [(s.name, s.shapes, s.dtypes) for s in self.scales.values()]
        for name, shapes, dtypes in parts:
            if name not in files:
                yield f"missing {name!r} {list(shapes[0])}"
            elif files[name] not in shapes:
                yield f"{name!r} has shape {list(files[name])}, it must be {' or '.join(str(list(s)) for s in shapes)}"
            elif files.dtype(name) not in dtypes:
                yield f"{name!r} has dtype {files.dtype(name)}, it must be {' or '.join(dtypes)}"


def plain_names(names: Iterable[str]) -> Collection[str]:
    """Names of tensors as a table of weight names has them: those of packed values without their suffix."""
    return dict.fromkeys(name.removesuffix(PACKED) for name in names)


def stored(tensor: Tensor, files: Tensors, quantization: Quantization) -> Stored | None:
    """How a tensor is stored; None where it is not in few bits.

    Raises:
        InputError: The configuration says otherwise, or the form is not read here.
    """
    name, shape = tensor.name, tensor.disk_shape
    if len(shape) < 2:
        return None
    has = {suffix for suffix in ("_scale", "_scale_inv", "_scale_2", "_global_scale", PACKED) if name + suffix in files}
    dtype = files.dtype(name) if name in files else None
    if PACKED in has or dtype == "U8" or has & {"_scale_2", "_global_scale"}:
        kind = NVFP4
    elif dtype == "F8_E4M3" or has:
        kind = FP8
    else:
        return None
    module = name.removesuffix(".weight")
    claim = quantization.claim(module)
    if claim is None or claim.kind != kind:
        said = claim.kind if claim else "not quantized"
        raise InputError(
            f"{module!r} is {kind} by its tensors, and {said} by {quantization.key} of the quantization config: they "
            f"must agree"
        )
    *lead, rows, columns = shape
    of_tensor = tuple((*lead, *ones) for ones in ((), (1,), (1, 1)))
    if kind == FP8:
        suffix = "_scale_inv" if "_scale_inv" in has or ("_scale" not in has and quantization.is_official) else "_scale"
        scale = _of_fp8(Scales(name + suffix, (rows, columns), of_tensor), files, shape, claim.block)
        return Stored(tensor, FP8, name, {"scale": scale})
    if columns % GROUP:
        raise InputError(f"{name!r} has {columns} inputs: NVFP4 has groups of {GROUP}")
    scale = Scales(f"{name}_scale", (1, GROUP), ((*lead, rows, columns // GROUP),), ("F8_E4M3",))
    role, suffix = ("divisor", "_global_scale") if PACKED in has else ("factor", "_scale_2")
    whole = Scales(name + suffix, (rows, columns), of_tensor, ("F32",))
    return Stored(tensor, NVFP4, name + PACKED * (PACKED in has), {"scale": scale, role: whole})


def _of_fp8(whole: Scales, files: Tensors, shape: tuple[int, ...], block: tuple[int, int] | None) -> Scales:
    """The scales of an FP8 tensor, as their shape says: of the whole, of rows, or of blocks."""
    *lead, rows, columns = shape
    if block is not None:
        grid = (*lead, -(-rows // block[0]), -(-columns // block[1]))
        return dataclasses.replace(whole, block=block, shapes=(grid,))
    of_rows = ((*lead, rows, 1), (*lead, rows))
    if files.get(whole.name) in of_rows:
        return dataclasses.replace(whole, block=(1, columns), shapes=of_rows)
    return dataclasses.replace(whole, shapes=(*whole.shapes, *of_rows))


def stored_of(entry: Entry, files: Tensors, quantization: Quantization | None) -> tuple[Stored, ...]:
    """How the tensors of a parameter are stored; none where they are not in few bits.

    Raises:
        InputError: They differ.
    """
    if quantization is None or entry.is_integer:
        return ()
    found = [stored(t, files, quantization) for t in entry.tensors]
    parts = tuple(s for s in found if s is not None)
    forms = sorted({f"{part.kind} ({', '.join(part.scales)})" for part in parts})
    if len(forms) > 1 or 0 < len(parts) < len(found):
        rest = f"some in {forms[1]}" if len(forms) > 1 else "some are not"
        raise InputError(
            f"some tensors of {entry.path} are in {forms[0]} and {rest}, first {entry.tensors[0].name!r}: they must be "
            f"alike"
        )
    return parts


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


def counted(unused: Iterable[str]) -> list[str]:
    """What `is_unused` found, in words: each kind and how many there are."""
    counts = Counter(name.rpartition(".")[2] for name in unused)
    return [f"{count:,} x {kind}" for kind, count in sorted(counts.items())]


def _grid(scales: Scales, shape: tuple[int, ...], files: Tensors) -> np.ndarray:
    """The scales of a tensor [..., O, I], one for each row and column of blocks.

    Raises:
        InputError: One is negative or not finite, or is 0 where it divides.
    """
    *lead, rows, columns = shape
    array = files.read(scales.name)
    numbers = array.astype(np.float32)
    if not np.isfinite(numbers).all() or (numbers < 0).any():
        raise InputError(f"tensor {scales.name!r} has a scale that is negative or not finite: it must be 0 or more")
    return array.reshape(*lead, -(-rows // scales.block[0]), -(-columns // scales.block[1]))


def _run(inputs: int, blocks: Iterable[tuple[int, int]]) -> int:
    """Inputs of the runs, equal ones each within one block, of a last axis of ``inputs``."""
    return math.gcd(inputs, *(columns for _, columns in blocks))


def read(entry: Entry, parts: Sequence[Stored], files: Tensors) -> dict[str, np.ndarray]:
    """The arrays of a parameter in few bits, as conversions keep them.

    Args:
        entry: The parameter.
        parts: How its tensors are stored.
        files: The tensors.

    Returns:
        "values" or, in four bits, the name of their code, as `QuantizedWeight` has them; and "scale" and "factor" or
        "divisor", for each run of the last axis.

    Raises:
        InputError: A scale is no scale.
    """
    code = OF_KINDS.get(parts[0].kind)
    values = [part.tensor.of(files.read(part.name)) for part in parts]
    arrays = {code or "values": entry.read(values, entry.shape[-1] // (2 if code else 1))}
    for role in parts[0].scales:
        run = _run(entry.shape[-1], (part.scales[role].block for part in parts))
        spread = [_spread(part.tensor, part.scales[role], run, files) for part in parts]
        arrays[role] = entry.read(spread, entry.shape[-1] // run)
    if len(arrays) > 2:
        _check_products(entry, parts, files)
    return arrays


def _spread(tensor: Tensor, scales: Scales, run: int, files: Tensors) -> np.ndarray:
    """The scales of a tensor, one for each of its rows and runs."""
    rows, columns = tensor.disk_shape[-2:]
    grid = np.repeat(_grid(scales, tensor.disk_shape, files), scales.block[0], axis=-2)[..., :rows, :]
    return np.repeat(tensor.of(grid), scales.block[1] // run, axis=-1)[..., : columns // run]


def _check_products(entry: Entry, parts: Sequence[Stored], files: Tensors) -> None:
    """Raises InputError where a product or quotient of two scales, or a reciprocal of one, is not finite."""
    for part in parts:
        (role, whole), scale = list(part.scales.items())[1], part.scales["scale"]
        largest = files.read(scale.name).astype(np.float32).max(initial=0 if role == "factor" else 1)
        numbers = files.read(whole.name)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            products = largest * numbers if role == "factor" else largest / numbers
        if not (is_finite := np.isfinite(products)).all():
            number = numbers[~is_finite].flat[0].item()
            raise InputError(f"tensor {whole.name!r} has {shown(number)}: its scales must be finite numbers")


def without_divisor(arrays: dict[str, np.ndarray], is_exact: bool) -> dict[str, np.ndarray]:
    """The arrays of `read` with a factor, or with float32 quotients, in place of a divisor.

    They are computed on the host: quotients of compiled programs are not the nearest numbers on every device.

    Args:
        arrays: Those of `read`.
        is_exact: Whether scales are the quotients; else they stay in 8 bits, with the reciprocal as their factor, which
            changes a weight by at most two units of float32's last place.
    """
    if "divisor" not in arrays:
        return arrays
    rest = {name: array for name, array in arrays.items() if name != "divisor"}
    if not is_exact:
        return rest | {"factor": np.float32(1) / arrays["divisor"]}
    return rest | {"scale": arrays["scale"].astype(np.float32) / arrays["divisor"]}


def as_compressed(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of a `QuantizedWeight`, by their names, as compressed-tensors has them: a factor is a divisor."""
    rest = {name: array for name, array in arrays.items() if name != "factor"}
    return rest | {"divisor": 1 / arrays["factor"]} if "factor" in arrays else rest


def write(
    entry: Entry, parts: Sequence[Stored], arrays: dict[str, np.ndarray], files: Tensors
) -> Iterator[tuple[Tensor, np.ndarray]]:
    """Yields the tensors of a parameter, of some only rows: the inverse of `read`; ``files`` need only have dtypes."""
    code = OF_KINDS.get(parts[0].kind)
    for part, values in zip(parts, _divided(entry, arrays[code or "values"], 2 if code else 1), strict=True):
        yield dataclasses.replace(part.tensor, name=part.name), values
    for role in parts[0].scales:
        run = entry.shape[-1] // arrays[role].shape[-1]
        for part, array in zip(parts, _divided(entry, arrays[role], run), strict=True):
            scales = part.scales[role]
            # Of rows, the scales of blocks that begin in them.
            begin = -part.tensor.first % scales.block[0]
            array = array[..., begin :: scales.block[0], :: max(1, scales.block[1] // run)]
            array = np.ascontiguousarray(array).astype(DTYPES[files.dtype(scales.name)])
            yield dataclasses.replace(part.tensor, name=scales.name), array


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
    """

    values: str
    columns: int
    scale: str
    has_factor: bool = False

    def abstract(self, shape: tuple[int, ...]) -> QuantizedWeight:
        """A weight of ``shape`` in this form, of shape structs."""
        *rows, size = shape
        is_coded = self.values in CODES
        arrays = {self.values: ((*rows, size // 2), "uint8")} if is_coded else {"values": (shape, self.values)}
        arrays["scale"] = (*rows, size // math.gcd(size, self.columns)), self.scale
        if self.has_factor:
            arrays["factor"] = (*rows, 1), "float32"
        return QuantizedWeight.of({name: jax.ShapeDtypeStruct(*array) for name, array in arrays.items()})


# Of NVFP4, in both dialects.
OF_NVFP4 = Form("e2m1", GROUP, "float8_e4m3fn", has_factor=True)


def form(parts: Sequence[Stored], files: Tensors) -> Form:
    """The form of a parameter as it is loaded."""
    if parts[0].kind == NVFP4:
        return OF_NVFP4
    scales = [part.scales["scale"] for part in parts]
    dtype = np.result_type(*(DTYPES[files.dtype(s.name)] for s in scales))
    return Form("float8_e4m3fn", math.gcd(*(s.block[1] for s in scales)), dtype.name)


def claimed_form(entry: Entry, quantization: Quantization) -> Form | None:
    """The form of a parameter as the configuration alone tells it; None where it is not in few bits."""
    claims = {quantization.claim(t.name.removesuffix(".weight")) for t in entry.tensors if len(t.shape) > 1}
    claim = claims.pop() if len(claims) == 1 else None
    if claim is None:
        return None
    if claim.kind == NVFP4:
        return OF_NVFP4
    # Scales of published checkpoints in blocks are bfloat16.
    return Form("float8_e4m3fn", claim.block[1], "bfloat16") if claim.block else Form("float8_e4m3fn", 0, "float32")

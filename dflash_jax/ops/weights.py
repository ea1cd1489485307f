"""Weights that are not plain arrays: in 8 or 4 bits, in panels for the C++ kernels, or of experts for a TPU."""

# jax's own annotations are partial: members such as jnp.where have unknown parameter types.
# pyright: reportUnknownMemberType=false

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import EllipsisType
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

W = TypeVar("W")
# Outputs in a panel of a `PackedWeight`.
LANES = 16
# For more tokens, or shorter runs, the products of all runs, float32 [T, runs, O], are larger than the weight in
# bfloat16.
FEW_TOKENS = 64
# Outputs that share their scales in checkpoints in FP8 with blocks of 128 x 128.
SCALED_OUTPUTS = 128
# What four bits stand for: see `QuantizedWeight`.
CODES = ("int4", "e2m1")
# What `quantize` makes in four bits → inputs that share a scale.
GROUPS = {"int4": 32, "int4-64": 64, "int4-128": 128, "nvfp4": 16}
# The magnitude that the largest of a run gets, which may be clipped: the scales that `quantize` tries.
_RATIOS = {
    "int4": tuple(sign * n / 2 for n in range(12, 20) for sign in (1, -1)),
    "e2m1": tuple(n / 2 for n in range(8, 15)),
}
# What the C++ kernels read (`PanelForm`), in the order of the enumerations in kernels/cpu/panels.h.
NUMBERS = ("int8", "fp8", "int4", "e2m1")
SCALES = ("float32", "bfloat16", "float16", "float8_e4m3fn")


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scale", "zero", "factor"], meta_fields=["code"])
@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [..., I] in 8 or 4 bits: (number - zero) · scale · factor, with one scale for each of N equal runs of I.

    It stands where a weight array stands: `ops.linear.project` and the experts compute with it without a dequantized
    copy.

    Attributes:
        values: The numbers, [..., I], float8_e4m3fn or int8; or, with ``code``, uint8 [..., I / 2], two codes a byte,
            of which the low half is that of the even input.
        scale: [..., N].
        zero: The number that stands for 0, int8 [..., N]; None: 0.
        factor: A scale of the scales, float32 [..., M], for each of M equal runs; None: 1.
        code: What four bits stand for: "int4" for -8 to 7, in this order from 0 on; "e2m1" for a sign, two bits of
            exponent and one of mantissa (OCP Microscaling Formats 1.0). None: ``values`` are numbers.
    """

    values: Shaped[Array, "*out I"]
    scale: Float[Array, "*out N"]
    zero: Int[Array, "*out N"] | None = None
    factor: Float[Array, "*out M"] | None = None
    code: str | None = None

    @classmethod
    def of(cls, arrays: Mapping[str, Any]) -> "QuantizedWeight":
        """The weight of `arrays`."""
        code = next((c for c in CODES if c in arrays), None)
        rest = {name: array for name, array in arrays.items() if name not in ("values", *CODES)}
        return cls(arrays[code or "values"], **rest, code=code)

    def arrays(self) -> dict[str, Array]:
        """Its arrays by their names, those of the values by that of their code, if they have one."""
        more = {"scale": self.scale, "zero": self.zero, "factor": self.factor}
        return {self.code or "values": self.values} | {n: array for n, array in more.items() if array is not None}

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape."""
        *out, size = self.values.shape
        return (*out, size if self.code is None else 2 * size)

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return self.values.ndim

    @property
    def run(self) -> int:
        """Inputs that share a scale."""
        return self.shape[-1] // self.scale.shape[-1]

    def __getitem__(self, index: Any) -> "QuantizedWeight":
        """Indexes leading axes only."""
        return _map(lambda array: array[index], self)

    def reshape(self, *shape: int) -> "QuantizedWeight":
        """Reshapes leading axes; the last axis, whose size is given, stays, or takes in those before it."""
        values = self.values.reshape(*shape[:-1], shape[-1] if self.code is None else shape[-1] // 2)
        shaped = _map(lambda array: array.reshape(*values.shape[:-1], -1), self)
        return replace(shaped, values=values)

    def spread(self, parts: int) -> "QuantizedWeight":
        """The same weight with a scale for each run in each of ``parts`` equal parts of the last axis.

        A run that reaches into several parts becomes shorter ones with copies of its scale, so that a device which
        holds one part has all of its scales.
        """
        size = self.shape[-1]

        def copied(scales: Array) -> Array:
            run = size // scales.shape[-1]
            return scales.repeat(run // math.gcd(run, size // parts), axis=-1)

        return replace(_map(copied, self), values=self.values)

    def numbers(self, dtype: DTypeLike) -> Float[Array, "*out N run"]:
        """The numbers less their zeros, in runs: of 16 bits or more ``dtype`` has them exactly."""
        numbers = self.values if self.code is None else _numbers(self.values, self.code)
        runs = numbers.astype(dtype).reshape(*self.scale.shape, -1)
        return runs if self.zero is None else runs - self.zero.astype(dtype)[..., None]

    def scales(self) -> Float[Array, "*out N"]:
        """The scale of each run with its factor, float32."""
        scale = self.scale.astype(jnp.float32)
        if self.factor is None:
            return scale
        *out, factors = self.factor.shape
        return (scale.reshape(*out, factors, -1) * self.factor[..., None]).reshape(scale.shape)

    def dense(self, dtype: DTypeLike) -> Array:
        """The weight as an array in ``dtype``: elementwise, so that it fuses into its consumer."""
        return (self.numbers(jnp.float32) * self.scales()[..., None]).astype(dtype).reshape(self.shape)

    def matmul(
        self, x: Float[Array, "T I"], dtype: DTypeLike | None = None, converts_first: bool = False
    ) -> Float[Array, "T O"]:
        """The product of x and the transpose of this matrix [O, I].

        With one run, or with long ones and up to `FEW_TOKENS` tokens, the products of the runs are scaled, not the
        weight.

        Args:
            x: [T, I].
            dtype: Dtype of the result; None: x's.
            converts_first: Whether the numbers are written to memory in x's dtype. Otherwise XLA may convert them
                inside the product, once for each tile of tokens.

        Returns:
            [T, O].
        """
        runs = self.scale.shape[-1]
        if runs > 1 and (x.shape[0] > FEW_TOKENS or self.run < FEW_TOKENS):
            return jnp.einsum("ti,oi->to", x, self.dense(x.dtype), preferred_element_type=dtype)
        numbers = self.numbers(x.dtype)
        if converts_first:
            numbers = jax.lax.optimization_barrier(numbers)
        x = x.reshape(x.shape[0], runs, -1)
        parts = jnp.einsum("tni,oni->nto", x, numbers, preferred_element_type=jnp.float32)
        return jnp.einsum("nto,on->to", parts, self.scales()).astype(dtype or x.dtype)


def _map(function: Callable[[Array], Array], weight: W) -> W:
    """The weight with ``function`` of each of its arrays."""
    mapped: W = jax.tree.map(function, weight)
    return mapped


def _numbers(values: Array, code: str) -> Array:
    """The numbers of packed codes, uint8 [..., I / 2] → int8 or bfloat16 [..., I]."""
    return _numbers_of(jnp.stack([values & 15, values >> 4], axis=-1).reshape(*values.shape[:-1], -1), code)


def _numbers_of(codes: Array, code: str) -> Array:
    """The numbers of codes, int8 or bfloat16."""
    codes = codes.astype(jnp.int8)
    if code == "int4":
        return codes - 8
    # Twice the number is whole. From 1 on it has a bit of mantissa after a leading 1.
    size = codes & 7
    size = jnp.where(size < 2, size, (size & 1 | 2) << (size >> 1) - 1)
    return jnp.where(codes > 7, -size, size).astype(jnp.bfloat16) * 0.5


@dataclass(frozen=True)
class PanelForm:
    """What the panels of a `QuantizedWeight` have of each output: its arrays' bytes, each padded to whole words.

    Attributes:
        numbers: One of `NUMBERS`.
        runs: Equal runs of inputs, each with a scale.
        scale: Dtype of the scales, one of `SCALES`.
        has_zero: Whether each run has a zero point.
        factors: Scales of the scales, each for as many runs.
    """

    numbers: str
    runs: int
    scale: str
    has_zero: bool
    factors: int

    @classmethod
    def of(cls, weight: QuantizedWeight) -> "PanelForm":
        """The form of a weight [O, I], arrays or shape structs."""
        numbers = weight.code or ("int8" if weight.values.dtype == jnp.int8 else "fp8")
        scale = jnp.dtype(weight.scale.dtype).name
        factors = 0 if weight.factor is None else weight.factor.shape[-1]
        scale = scale if scale in SCALES else "float32"
        return cls(numbers, weight.scale.shape[-1], scale, weight.zero is not None, factors)

    def fields(self) -> tuple[int, ...]:
        """The fields of `Form` in kernels/cpu/panels.h."""
        return 1 + NUMBERS.index(self.numbers), self.runs, SCALES.index(self.scale), int(self.has_zero), self.factors

    def arrays(self, inputs: int) -> dict[str, tuple[int, np.dtype[Any]]]:
        """Size and dtype of each array of an output, in order, by their names in `QuantizedWeight.arrays`."""
        arrays: dict[str, tuple[int, np.dtype[Any]]]
        if self.numbers in CODES:
            arrays = {self.numbers: (inputs // 2, np.dtype(np.uint8))}
        else:
            arrays = {"values": (inputs, np.dtype(jnp.int8 if self.numbers == "int8" else jnp.float8_e4m3fn))}
        arrays["scale"] = self.runs, np.dtype(self.scale)
        if self.has_zero:
            arrays["zero"] = self.runs, np.dtype(np.int8)
        if self.factors:
            arrays["factor"] = self.factors, np.dtype(np.float32)
        return arrays

    def words(self, inputs: int) -> int:
        """Words of an output."""
        return sum(-(-size * dtype.itemsize // 4) for size, dtype in self.arrays(inputs).values())


@partial(jax.tree_util.register_dataclass, data_fields=["panels", "index"], meta_fields=["shape", "contracted", "form"])
@dataclass(frozen=True)
class PackedWeight:
    """A float32 weight or a `QuantizedWeight`, as a matrix [O, I], in panels of 16 outputs for the C++ kernels.

    It stands where a weight array stands. Padding past the last output, and of an odd I, is zero. Panels of 16-bit
    values have dtype uint32, not bfloat16: of rows of a bfloat16 array XLA's CPU compiler first makes a float32 copy of
    the whole array.

    Attributes:
        panels: float32 [O / 16, I, 16]; or, where the weight is exact in bfloat16, as one from a bfloat16 checkpoint
            is, uint32 [O / 16, I / 2, 16], whose low halves are even inputs; or uint32 [O / 16, words, 16] of ``form``.
        shape: The weight's shape, [*out, *in].
        contracted: How many axes *in has.
        form: What panels of a `QuantizedWeight` have; None: those of a float32 weight.
        index: Which weight of a stack this is, int32 []; None: ``panels`` are those of one weight. The kernel reads a
            stack in place, where XLA would copy the weight out of it for each product.
    """

    panels: Shaped[Array, "blocks I 16"]
    shape: tuple[int, ...]
    contracted: int = 1
    form: PanelForm | None = None
    index: Int[Array, ""] | None = None

    dtype = jnp.float32

    @classmethod
    def of(
        cls,
        weight: "np.ndarray[Any, np.dtype[np.float32]] | QuantizedWeight",
        contracted: int,
        has_float_panels: bool = False,
    ) -> "PackedWeight":
        """Packs a weight; the panels are a NumPy array.

        Args:
            weight: The weight, [*out, *in].
            contracted: How many axes *in has.
            has_float_panels: Whether panels of a float32 weight are float32 in any case.
        """
        inputs = math.prod(weight.shape[weight.ndim - contracted :])
        if isinstance(weight, QuantizedWeight):
            rows = jax.tree.map(np.asarray, weight).reshape(math.prod(weight.shape) // inputs, inputs)
            form = PanelForm.of(rows)
            rows = _with_nan_scales(rows) if form.numbers == "fp8" else rows
            typed = zip(rows.arrays().values(), form.arrays(inputs).values(), strict=True)
            words = _words_of_rows([np.asarray(array).astype(dtype) for array, (_, dtype) in typed])
            return cls(_panels(words), weight.shape, contracted, form)
        matrix = weight.reshape(-1, inputs)
        if inputs % 2:
            matrix = np.pad(matrix, ((0, 0), (0, 1)))
        bits = matrix.view(np.uint32)
        if not has_float_panels and is_exact(bits):
            matrix = bits[..., ::2] >> 16 | bits[..., 1::2]
        return cls(_panels(matrix), weight.shape, contracted)

    @classmethod
    def abstract(cls, weight: "jax.ShapeDtypeStruct | QuantizedWeight", contracted: int) -> "PackedWeight":
        """A packed weight with a shape struct in place of its panels, of shape structs."""
        shape = weight.shape
        outputs, inputs = (math.prod(part) for part in (shape[:-contracted], shape[-contracted:]))
        form, words, dtype = None, inputs + inputs % 2, jnp.float32
        if isinstance(weight, QuantizedWeight):

            def flat(weight: QuantizedWeight) -> QuantizedWeight:
                return weight.reshape(outputs, inputs)

            form = PanelForm.of(jax.eval_shape(flat, weight))
            words, dtype = form.words(inputs), jnp.uint32
        panels: Any = jax.ShapeDtypeStruct((-(-outputs // LANES), words, LANES), dtype)
        return cls(panels, shape, contracted, form)

    @property
    def has_float_panels(self) -> bool:
        """Whether panels are of float32 numbers."""
        return self.panels.dtype == jnp.float32

    @property
    def ndim(self) -> int:
        """How many axes the weight has."""
        return len(self.shape)

    def __getitem__(self, index: Any) -> "Weight":
        """This weight for ``...``; rows of a weight [O, I], as `unpacked` has them, for an array of valid indices."""
        if isinstance(index, EllipsisType):
            return self
        if self.ndim != 2 or self.index is not None:
            raise IndexError(f"rows of a weight of shape {self.shape}: it must have two axes, and be of no stack")
        return self._rows(self.panels[index // LANES, :, index % LANES], self.shape[1])

    def reshape(self, outputs: int, inputs: int) -> "PackedWeight":
        """The weight as a matrix [outputs, inputs]; ``outputs`` follows from ``inputs`` and may be -1."""
        return replace(self, shape=(math.prod(self.shape) // inputs, inputs), contracted=1)

    def of_stack(self, index: Int[Array, ""]) -> "PackedWeight":
        """One weight [*out, *in] of a stack [n, *out, *in].

        Raises:
            ValueError: Its outputs are no multiple of a panel's, so that two weights share a panel.
        """
        if (outputs := math.prod(self.shape[1 : -self.contracted])) % LANES:
            raise ValueError(f"{outputs} outputs of a weight of a stack: they must be a multiple of {LANES}")
        return replace(self, shape=self.shape[1:], index=index)

    def unpacked(self) -> "Array | QuantizedWeight":
        """What was packed: an array float32 [*out, *in], or a `QuantizedWeight`."""
        panels = self.panels
        if self.index is not None:
            count = math.prod(self.shape[: -self.contracted]) // LANES
            panels = jax.lax.dynamic_slice_in_dim(panels, self.index * count, count)
        inputs = math.prod(self.shape[-self.contracted :])
        rows = panels.transpose(0, 2, 1).reshape(-1, panels.shape[1])[: math.prod(self.shape) // inputs]
        weight = self._rows(rows, inputs)
        return _map(lambda array: array.reshape(*self.shape[:-1], -1), weight)

    def dense(self) -> Float[Array, "..."]:
        """The weight as an array float32 [*out, *in]."""
        return dense(self.unpacked())

    def _rows(self, rows: Array, inputs: int) -> "Array | QuantizedWeight":
        """Words of outputs [..., words] → the outputs [..., inputs]."""
        if self.form is not None:
            arrays: dict[str, Array] = {}
            for name, (size, dtype) in self.form.arrays(inputs).items():
                count = -(-size * dtype.itemsize // 4)
                words, rows = rows[..., :count], rows[..., count:]
                parts = jax.lax.bitcast_convert_type(words, dtype).reshape(*words.shape[:-1], -1)
                arrays[name] = parts[..., :size]
            return QuantizedWeight.of(arrays)
        if rows.dtype == jnp.uint32:
            pairs = jnp.stack([rows << 16, rows & jnp.uint32(0xFFFF0000)], axis=-1)
            rows = jax.lax.bitcast_convert_type(pairs, jnp.float32).reshape(*rows.shape[:-1], -1)
        return rows[..., :inputs]


def _with_nan_scales(weight: QuantizedWeight) -> QuantizedWeight:
    """A weight of FP8 with NaN for the scale of each run that has one: the kernels take numbers for numbers."""
    if np.max(np.asarray(weight.values).view(np.uint8) << 1) < 0xFE:
        return weight
    is_nan = np.isnan(np.asarray(weight.values).astype(np.float32)).reshape(*weight.scale.shape, -1).any(-1)
    scale: Any = np.where(is_nan, np.asarray(np.nan, weight.scale.dtype), weight.scale)
    return replace(weight, scale=scale)


def _words_of_rows(arrays: "list[np.ndarray[Any, Any]]") -> "np.ndarray[Any, np.dtype[np.uint32]]":
    """The bytes of arrays [O, …] side by side, each array's padded to whole words: [O, words]."""
    parts = [np.ascontiguousarray(array).view(np.uint8) for array in arrays]
    return np.concatenate([np.pad(part, ((0, 0), (0, -part.shape[1] % 4))) for part in parts], axis=1).view(np.uint32)


def _panels(matrix: "np.ndarray[Any, Any]") -> Any:
    """A matrix [O, words] in panels [O / 16, words, 16]."""
    if len(matrix) % LANES:
        matrix = np.pad(matrix, ((0, -len(matrix) % LANES), (0, 0)))
    return np.ascontiguousarray(matrix.reshape(-1, LANES, matrix.shape[1]).transpose(0, 2, 1))


# A weight [*out, *in] in any form that linear maps take.
Weight: TypeAlias = Array | QuantizedWeight | PackedWeight


@partial(jax.tree_util.register_dataclass, data_fields=["matrices", "scale"], meta_fields=["is_pair"])
@dataclass(frozen=True)
class TransposedWeight:
    """Weights of experts, [E, F, I] or as pairs [E, 2, F, I], with their inputs before their outputs.

    A TPU multiplies rows with the matrices of several experts in this order only (`jax.lax.ragged_dot`), and copies
    weights in another order in each call. Each device of a mesh has the parts of both weights of a pair side by side.

    Weights in eight bits have scales, which the matrices are without. Where each output has one scale, it is for the
    product. Where runs of inputs have scales, outputs that share them are a matrix of their own, and the scales are
    for the rows before the product.

    Attributes:
        matrices: [E, I, F], or of pairs [E, I, 2 F]; with scales of inputs [E, parts, I, F / parts], parts of pairs
            likewise.
        is_pair: Whether a matrix has two weights.
        scale: Of outputs [E, 1, F], or of pairs [E, 1, 2 F]; or of runs of inputs [E, parts, runs]; None for 16 bits
            or more.
    """

    matrices: Shaped[Array, "E *parts I O"]
    is_pair: bool
    scale: Float[Array, "E _ _"] | None = None

    @classmethod
    def of(cls, weight: "Array | QuantizedWeight", width: int = 0) -> "TransposedWeight":
        """Weights [E, F, I] or [E, 2, F, I] of one device, with the ``width`` of `common_outputs`."""
        experts, *_, inputs = weight.shape
        scale: Array | None = None
        if isinstance(weight, QuantizedWeight):
            values, scale = weight.values, weight.scale.reshape(experts, -1, weight.scale.shape[-1])
        else:
            values = weight
        is_pair = values.ndim > 3
        if width:
            matrices = values.reshape(experts, -1, width, inputs).swapaxes(2, 3)
            return cls(matrices, is_pair, None if scale is None else scale[:, ::width])
        matrices = values.reshape(experts, -1, inputs).swapaxes(1, 2)
        return cls(matrices, is_pair, None if scale is None else scale.swapaxes(1, 2))

    def untransposed(self) -> "Array | QuantizedWeight":
        """The weights that `of` was given."""
        values = self.matrices.swapaxes(-1, -2).reshape(self.shape)
        if self.scale is None:
            return values
        scale = self.scale.repeat(self.matrices.shape[3], axis=1) if self.has_parts else self.scale.swapaxes(1, 2)
        return QuantizedWeight(values, scale.reshape(*self.shape[:-1], -1))

    @property
    def has_parts(self) -> bool:
        """Whether the scales are of inputs."""
        return self.matrices.ndim > 3

    @property
    def parts(self) -> int:
        """How many matrices an expert has."""
        return self.matrices.shape[1] if self.has_parts else 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights."""
        experts, *parts, inputs, outputs = self.matrices.shape
        outputs *= math.prod(parts)
        return (experts, 2, outputs // 2, inputs) if self.is_pair else (experts, outputs, inputs)

    @property
    def ndim(self) -> int:
        """How many axes they have."""
        return len(self.shape)

    def __getitem__(self, index: EllipsisType) -> "TransposedWeight":
        """These weights."""
        return self


def common_outputs(weight: "Array | QuantizedWeight", outputs: int, cut: int = 1) -> int:
    """How many outputs of a weight of experts should share their scales, where these are of inputs; 0: of outputs.

    `shares_scales` says whether they do.

    Args:
        weight: The weight of all devices.
        outputs: Outputs of one device.
        cut: Parts that the inputs are divided into.
    """
    is_of_inputs = isinstance(weight, QuantizedWeight) and weight.scale.shape[-1] > cut
    return math.gcd(outputs, SCALED_OUTPUTS) if is_of_inputs else 0


def shares_scales(weight: QuantizedWeight, width: int) -> Bool[Array, ""]:
    """Whether each ``width`` outputs have the same scales."""
    scale = weight.scale.reshape(-1, width, weight.scale.shape[-1])
    first = scale[:, :1]
    return jnp.all((scale == first) | (jnp.isnan(scale) & jnp.isnan(first)))


def can_pack_experts(gate_up: Weight, down: Weight) -> bool:
    """Whether experts' weights [E, 2, F, H] and [E, H, F] can be packed: each matrix is a number of panels."""
    return all(n % LANES == 0 for n in down.shape[1:])


def is_exact(weight: np.ndarray) -> bool:
    """Whether numbers of float32, or their bits, are exact in bfloat16."""
    return not np.bitwise_or.reduce(weight.view(np.uint32), axis=None) & 0xFFFF


def is_weight(x: object) -> bool:
    """Whether x is one of this module's weights, not an array."""
    return isinstance(x, QuantizedWeight | PackedWeight | TransposedWeight)


def dense(weight: Array | QuantizedWeight, dtype: DTypeLike | None = None) -> Array:
    """A weight array as it is (cast, where ``dtype`` is given), a `QuantizedWeight` multiplied out."""
    if isinstance(weight, QuantizedWeight):
        return weight.dense(dtype or jnp.float32)
    return weight if dtype is None else weight.astype(dtype)


def quantize(weight: Float[Array, "*out I"], kind: str, runs: int = 1) -> QuantizedWeight:
    """Quantizes a weight symmetrically.

    In 8 bits a scale is for the largest magnitude of its run. In 4 bits it is the one of `_RATIOS` with the least
    squared error.

    Args:
        weight: [*out, I].
        kind: "int8", "fp8" (float8_e4m3fn) or a key of `GROUPS`.
        runs: In 8 bits: scales for each index of the leading axes.

    Returns:
        The weight: in 8 bits with float32 scales [*out, runs]; int4 with bfloat16 scales, of either sign; nvfp4 with
        float8_e4m3fn scales and one power of two as the factor of all. An odd number of inputs, of which no two share a
        byte, is int8.
    """
    if kind in GROUPS and weight.shape[-1] % 2 == 0:
        return _in_four_bits(weight, kind)
    dtype, largest = (jnp.float8_e4m3fn, 448.0) if kind == "fp8" else (jnp.int8, 127.0)
    split = weight.astype(jnp.float32).reshape(*weight.shape[:-1], runs, -1)
    top = jnp.max(jnp.abs(split), axis=-1)
    scale = jnp.where(top == 0, 1.0, top) / largest
    values = split / scale[..., None]
    if dtype == jnp.int8:
        values = jnp.round(values)
    return QuantizedWeight(values.astype(dtype).reshape(weight.shape), scale)


def _in_four_bits(weight: Float[Array, "*out I"], kind: str) -> QuantizedWeight:
    code, dtype = ("e2m1", jnp.float8_e4m3fn) if kind == "nvfp4" else ("int4", jnp.bfloat16)
    *rows, size = weight.shape
    split = weight.reshape(*rows, -1, math.gcd(size, GROUPS[kind]))
    top, factor = jnp.max(jnp.abs(split), axis=-1).astype(jnp.float32), None
    if code == "e2m1":
        # A power of two: its products and quotients are exact, also by others' readers.
        factor = _factor_of(jnp.max(top), 4)

    def whole(scale: Array) -> Array:
        scale = scale.astype(jnp.float32)
        return scale if factor is None else scale * factor

    def codes(scale: Array) -> Array:
        return _codes_of(split, whole(scale), code)

    def tried(best: tuple[Array, Array], ratio: Array) -> tuple[tuple[Array, Array], None]:
        scale = (top / ratio / (1 if factor is None else factor)).astype(dtype)
        error = _numbers_of(codes(scale), code).astype(jnp.float32) * whole(scale)[..., None] - split
        error /= jnp.where(top > 0, top, 1.0)[..., None]
        # Sums of whole numbers: of floats they depend on their order, and so on the mesh.
        error = jnp.sum(jnp.round(error * error * 2**20).astype(jnp.int32), axis=-1)
        return (jnp.minimum(error, best[0]), jnp.where(error < best[0], scale, best[1])), None

    worst = jnp.full(top.shape, jnp.iinfo(jnp.int32).max), top.astype(dtype)
    (_, scale), _ = jax.lax.scan(tried, worst, jnp.asarray(_RATIOS[code], jnp.float32))
    factor = None if factor is None else jnp.broadcast_to(factor, (*rows, 1))
    return QuantizedWeight(_in_pairs(codes(scale), size), scale, None, factor, code)


def is_nvfp4(weight: Weight) -> bool:
    """Whether a weight is in NVFP4: e2m1, a scale in float8_e4m3fn for each 16 inputs, and a factor."""
    if isinstance(weight, PackedWeight):
        form = weight.form
        inputs = math.prod(weight.shape[weight.ndim - weight.contracted :])
        of_scales = form is not None and (form.numbers, form.scale, inputs // form.runs, form.has_zero)
        return form is not None and form.factors > 0 and of_scales == ("e2m1", "float8_e4m3fn", GROUPS["nvfp4"], False)
    if not isinstance(weight, QuantizedWeight) or weight.factor is None or weight.zero is not None:
        return False
    is_float8 = weight.scale.dtype == jnp.float8_e4m3fn
    return weight.code == "e2m1" and is_float8 and weight.run == GROUPS["nvfp4"]


def activations_in_nvfp4(x: Float[Array, "*batch I"], axes: Sequence[str] = ()) -> QuantizedWeight:
    """Activations in NVFP4: a scale for each 16 inputs, for the largest of them, and a factor for each token.

    The factor is a power of two, so that bfloat16 has the rounded activations exactly.

    Args:
        x: [..., I].
        axes: The mesh axes that I is divided over: a token's factor is the same on all of its devices.

    Returns:
        The activations in the place of a weight: codes [..., I / 2], scales [..., I / 16], factors [..., 1].
    """
    run = GROUPS["nvfp4"]
    split = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // run, run)
    top = jnp.max(jnp.abs(split), axis=-1)
    largest = jnp.max(top, axis=-1, keepdims=True)
    factor = _factor_of(jax.lax.pmax(largest, tuple(axes)) if axes else largest, 6)
    # XLA may divide by a constant, or multiply by its inverse.
    scale = (top / factor * np.float32(1 / 6)).astype(jnp.float8_e4m3fn)
    codes = _codes_of(split, scale.astype(jnp.float32) * factor, "e2m1")
    return QuantizedWeight(_in_pairs(codes, x.shape[-1]), scale, None, factor, "e2m1")


def _factor_of(largest: Array, number: float) -> Array:
    """The power of two with which the scale that gives ``largest`` this number is below 448, the largest of a scale."""
    return jnp.ldexp(jnp.float32(1), jnp.frexp(largest * np.float32(1 / (number * 448)))[1])


def _codes_of(split: Array, scale: Array, code: str) -> Array:
    """The codes, int8, of the numbers that are the nearest to runs [..., N, run], by the scale of each [..., N]."""
    scale = jnp.where(scale == 0, 1, scale)[..., None]
    if code == "int4":
        return jnp.clip(jnp.round(split / scale), -8, 7).astype(jnp.int8) + 8
    # Between two numbers the one with an even code is the nearest. The products are exact, while XLA may divide by
    # multiplying with an inverse.
    size = jnp.abs(split)
    odd, even = (size > n * scale for n in (0.25, 1.25, 2.5, 5.0)), (size >= n * scale for n in (0.75, 1.75, 3.5))
    return sum(n.astype(jnp.int8) for n in (*odd, *even)) + jnp.where(split < 0, jnp.int8(8), jnp.int8(0))


def _in_pairs(codes: Array, size: int) -> Array:
    """Codes of ``size`` inputs a row, two in a byte."""
    pairs = codes.astype(jnp.uint8).reshape(*codes.shape[:-2], size // 2, 2)
    return pairs[..., 0] | pairs[..., 1] << 4

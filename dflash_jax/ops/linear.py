"""Operation: linear maps of one input by several weights, with the norm before them and what follows them.

    y_i = act(norm(x) · W_iᵀ + b_i) + residual,    act: identity, GELU, or silu(a) · b of the two halves of W_i

The norm is RMSNorm (arXiv 1910.07467) or LayerNorm (arXiv 1607.06450), SwiGLU that of arXiv 2002.05202, GELU that of
arXiv 1606.08415; the reference implementation is transformers' Qwen3MLP, Qwen3RMSNorm and Qwen3_5VisionMLP. Weights are
stored ``[*out, *in]``: arrays, or `ops.weights.QuantizedWeight` and `ops.weights.PackedWeight` in their place.

Dimension letters: B batch, T tokens of this call, H hidden, F features of an MLP, I inputs, O outputs.
"""

# jax's own annotations are partial: members such as jnp.where have unknown parameter types.
# pyright: reportUnknownMemberType=false

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float, Int

from dflash_jax.ops.backend import Backend, Implementation, choose, supports_everything, with_gradient_of
from dflash_jax.ops.kernels.cpu import calls as cpp
from dflash_jax.ops.weights import (
    FEW_TOKENS,
    LANES,
    PackedWeight,
    QuantizedWeight,
    Weight,
    activations_in_nvfp4,
    is_nvfp4,
)

# Bytes of the unpacked copy that XLA makes of a part of a head in few bits: such a copy stays in the cache of a card.
UNPACKED_BYTES = 2**26


def rms_norm(x: Float[Array, "*batch H"], weight: Float[Array, " H"], eps: float, offset: float = 0.0) -> Array:
    """RMSNorm (arXiv 1910.07467): ``(offset + weight) · x / sqrt(mean(x²) + eps)`` over the last axis.

    Args:
        x: [..., H].
        weight: [H].
        eps: Added to the mean of squares.
        offset: Added to the weight; 1 for models that store the weight's distance from 1.

    Returns:
        [..., H] in x's dtype, computed in float32.
    """
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * (offset + weight.astype(jnp.float32))).astype(x.dtype)


def layer_norm(
    x: Float[Array, "*batch H"], weight: Float[Array, " H"], bias: Float[Array, " H"], eps: float
) -> Float[Array, "*batch H"]:
    """LayerNorm (arXiv 1607.06450): ``weight · (x - mean(x)) / sqrt(variance(x) + eps) + bias`` over the last axis.

    Args:
        x: [..., H].
        weight: [H].
        bias: [H].
        eps: Added to the variance.

    Returns:
        [..., H] in x's dtype, computed in float32.
    """
    x32 = x.astype(jnp.float32)
    x32 -= jnp.mean(x32, axis=-1, keepdims=True)
    x32 *= jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


@partial(jax.tree_util.register_dataclass, data_fields=["x", "weight", "bias"], meta_fields=["eps", "offset"])
@dataclass(frozen=True)
class DeferredNorm:
    """An input whose norm is left to `linear`, so that one kernel can compute both.

    Attributes:
        x: The input, [..., H].
        weight: The norm's weight, [H].
        eps: Added to the mean of squares, or to the variance.
        offset: Added to the weight of RMSNorm.
        bias: The bias of LayerNorm, [H]; None: RMSNorm.
    """

    x: Float[Array, "*batch H"]
    weight: Float[Array, " H"]
    eps: float
    offset: float = 0.0
    bias: Float[Array, " H"] | None = None

    def apply(self) -> Float[Array, "*batch H"]:
        """The normed input, [..., H]."""
        if self.bias is not None:
            return layer_norm(self.x, self.weight, self.bias, self.eps)
        return rms_norm(self.x, self.weight, self.eps, self.offset)

    @property
    def shape(self) -> tuple[int, ...]:
        """The input's shape."""
        return self.x.shape


@partial(jax.tree_util.register_dataclass, data_fields=["x", "squares"], meta_fields=["eps"])
@dataclass(frozen=True)
class DeferredDivision:
    """Heads whose division by their root mean square is left to `linear`: several programs may compute a head.

    Attributes:
        x: The heads, multiplied by all else already, [..., D].
        squares: Sums of squares of P parts of each head before that, float32 [..., P].
        eps: Added to the mean of squares.
    """

    x: Float[Array, "*batch D"]
    squares: Float[Array, "*batch P"]
    eps: float

    def apply(self) -> Float[Array, "*batch D"]:
        """The divided heads, [..., D] in x's dtype."""
        mean = jnp.sum(self.squares, axis=-1, keepdims=True) / self.x.shape[-1]
        return (self.x.astype(jnp.float32) * jax.lax.rsqrt(mean + self.eps)).astype(self.x.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the heads."""
        return self.x.shape


Deferred = DeferredNorm | DeferredDivision
# Rows of a product that a TPU's matrix unit takes at least. Of one row the compiler makes a sum by the vector unit,
# which takes two to five times as long by its own estimate (libtpu 0.0.48; 31,040 outputs of 2,048 inputs: 3.3 times).
TPU_ROWS = 8


# Products of arrays.


def _dot(backend: Backend, x: Array, y: Array, axes: tuple[int, int], dtype: DTypeLike) -> Array:
    """The product of two bfloat16 matrices over these axes, summed in float32, in ``dtype``."""
    # XLA's CPU multiplies in bfloat16, several times as fast, only where the result is float32.
    accumulated = jnp.float32 if backend.platform == "cpu" else dtype
    y = jax.lax.dot_general(x, y, (((axes[0],), (axes[1],)), ((), ())), preferred_element_type=accumulated)
    return y.astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def _bfloat16_product(backend: Backend, x: Array, matrix: Array, dtype: DTypeLike) -> Array:
    return _dot(backend, x, matrix, (1, 1), dtype)


def _bfloat16_product_forward(
    backend: Backend, x: BFloat16[Array, "T I"], matrix: BFloat16[Array, "O I"], dtype: DTypeLike
) -> tuple[Array, tuple[Array, Array]]:
    return _dot(backend, x, matrix, (1, 1), dtype), (x, matrix)


def _bfloat16_product_backward(
    backend: Backend, dtype: DTypeLike, saved: tuple[Array, Array], gradient: Float[Array, "T O"]
) -> tuple[Array, Array]:
    x, matrix = saved
    gradient = gradient.astype(x.dtype)
    return _dot(backend, gradient, matrix, (1, 0), x.dtype), _dot(backend, gradient, x, (0, 0), matrix.dtype)


_bfloat16_product.defvjp(_bfloat16_product_forward, _bfloat16_product_backward)


def product(
    backend: Backend, x: Float[Array, "T I"], matrix: Float[Array, "O I"], dtype: DTypeLike | None = None
) -> Float[Array, "T O"]:
    """The product of x and the transpose of a weight array.

    Where both are bfloat16, their gradients are products in bfloat16 too, whatever ``dtype`` is: a float32 gradient is
    rounded first, as PyTorch's autocast does. Forward-mode derivatives exist for other dtypes only.

    Args:
        backend: Where it runs.
        x: [T, I].
        matrix: [O, I].
        dtype: Dtype of the result; by default the wider of the two dtypes.

    Returns:
        [T, O].
    """
    if x.dtype == matrix.dtype == jnp.bfloat16:
        return _bfloat16_product(backend, x, matrix, jnp.dtype(dtype or x.dtype))
    return jnp.einsum("ti,oi->to", x, matrix, preferred_element_type=dtype)


def project(
    backend: Backend,
    x: Float[Array, "..."],
    weight: Weight,
    contracted: int = 1,
    dtype: DTypeLike | None = None,
) -> Float[Array, "..."]:
    """Linear map by one weight, without a norm.

    It has no list of implementations: packed weights go through the C++ kernel, all others through XLA. `reference`
    consists of it, and `logits` calls it for arrays, so that ``dflash ops`` does not list those.

    Args:
        backend: Where it runs.
        x: [..., *in].
        weight: [*out, *in], an array or one of `ops.weights`.
        contracted: How many axes *in has.
        dtype: Dtype of the result; by default the wider of x's and the weight's for arrays, x's for other weights.

    Returns:
        [..., *out].
    """
    out, inner = weight.shape[: weight.ndim - contracted], weight.shape[weight.ndim - contracted :]
    # Flattened to a matrix, which is free. A product over several axes of a weight makes XLA transpose, and so copy,
    # the whole weight at every call.
    matrix, x2 = weight.reshape(math.prod(out), math.prod(inner)), x.reshape(-1, math.prod(inner))
    if backend.platform == "tpu" and len(x2) == 1:
        x2 = jnp.pad(x2, ((0, TPU_ROWS - 1), (0, 0)))
    if isinstance(matrix, PackedWeight):
        y = cpp.linear(x2, [matrix])[0].astype(dtype or x.dtype)
    elif isinstance(matrix, QuantizedWeight):
        y = matrix.matmul(
            x2, dtype, converts_first=backend.is_gpu and backend.kernels == "all" and len(x2) > FEW_TOKENS
        )
    else:
        y = product(backend, x2, matrix, dtype)
    return y[: x.size // math.prod(inner)].reshape(*x.shape[: x.ndim - contracted], *out)


# The operation.


def reference(
    backend: Backend,
    x: Array | Deferred,
    weights: Sequence[Weight],
    contracted: int = 1,
    *,
    dtype: DTypeLike | None = None,
    return_normed: bool = False,
    swiglu: bool = False,
    biases: Sequence[Array] | None = None,
    gelu: bool = False,
    residual: Array | None = None,
    live: Array | None = None,
    axes: Sequence[str] = (),
) -> tuple[Array, ...]:
    """`linear` by XLA, of all rows: the norm, then one product for each weight."""
    x = x.apply() if isinstance(x, Deferred) else x
    inputs = rounded(backend, x, weights[0], contracted, axes)
    if biases is None:
        outputs = [project(backend, inputs, w, contracted, dtype) for w in weights]
    else:
        outputs = [project(backend, inputs, w, contracted, jnp.float32) for w in weights]
        outputs = _biased(outputs, biases, dtype or x.dtype)
    if swiglu:
        outputs = [jax.nn.silu(y[..., 0, :]) * y[..., 1, :] for y in outputs]
    if gelu:
        outputs = [jax.nn.gelu(y.astype(jnp.float32), approximate=True).astype(y.dtype) for y in outputs]
    if residual is not None:
        outputs = [residual + y for y in outputs]
    return (*outputs, x) if return_normed else tuple(outputs)


def takes_fp4(backend: Backend, weight: Weight) -> bool:
    """Whether a product with this weight takes its inputs in FP4."""
    return backend.fp4_activations and is_nvfp4(weight)


def rounded(backend: Backend, x: Array, weight: Weight, contracted: int = 1, axes: Sequence[str] = ()) -> Array:
    """Activations as a product with this weight takes them: rounded to NVFP4 where it `takes_fp4`.

    Args:
        backend: Where it runs.
        x: [..., *in].
        weight: [*out, *in].
        contracted: How many axes *in has.
        axes: The mesh axes that *in is divided over.

    Returns:
        [..., *in] in x's dtype.
    """
    if not takes_fp4(backend, weight):
        return x
    flat = x.reshape(*x.shape[: x.ndim - contracted], -1)
    return activations_in_nvfp4(flat, axes).dense(x.dtype).reshape(x.shape)


def _biased(outputs: Sequence[Array], biases: Sequence[Array], dtype: DTypeLike) -> list[Array]:
    """float32 products with their biases, rounded to ``dtype``."""
    return [(y + b.astype(jnp.float32)).astype(dtype) for y, b in zip(outputs, biases, strict=True)]


def _matrix_shape(x: Array | Deferred, contracted: int) -> tuple[int, int]:
    """Rows and inputs of x as a matrix."""
    split = len(x.shape) - contracted
    return math.prod(x.shape[:split]), math.prod(x.shape[split:])


def _unflattened(
    x: Array, weights: Sequence[Weight], contracted: int, swiglu: bool, outputs: Sequence[Array], normed: Array | None
) -> tuple[Array, ...]:
    """``outputs`` [rows, O] in the shapes of x and the weights, then ``normed``, where given, in x's shape."""
    batch = x.shape[: len(x.shape) - contracted]
    shaped = [y.reshape(*batch, *w.shape[swiglu : w.ndim - contracted]) for y, w in zip(outputs, weights, strict=False)]
    return tuple(shaped) if normed is None else (*shaped, normed.reshape(x.shape))


def _supports_cpp(
    backend: Backend,
    x: Array | Deferred,
    weights: Sequence[Weight],
    contracted: int = 1,
    *,
    swiglu: bool = False,
    **options: Any,
) -> str | None:
    packed = [w for w in weights if isinstance(w, PackedWeight)]
    if len(packed) < len(weights):
        return backend.no_cpp or "the weights are not packed"
    if takes_fp4(backend, weights[0]):
        return "the kernel rounds no activations"
    # Packed weights exist only where the kernels do, so that no_cpp is not consulted for them.
    if swiglu and not all(cpp.can_fuse_swiglu(w) for w in packed):
        return f"halves of {[list(w.shape) for w in packed]}: they share a panel of {LANES} outputs"
    return None


def _cpp(
    backend: Backend,
    x: Array | Deferred,
    weights: Sequence[PackedWeight],
    contracted: int = 1,
    *,
    dtype: DTypeLike | None = None,
    return_normed: bool = False,
    swiglu: bool = False,
    biases: Sequence[Array] | None = None,
    gelu: bool = False,
    residual: Array | None = None,
    live: Array | None = None,
    axes: Sequence[str] = (),
) -> tuple[Array, ...]:
    rows, inner = _matrix_shape(x, contracted)
    norm: dict[str, Any] = {}
    x = x.apply() if isinstance(x, DeferredDivision) else x
    if isinstance(x, DeferredNorm):
        x, norm = x.x, {"norm": x.weight, "eps": x.eps, "offset": x.offset, "norm_bias": x.bias}
    matrices = [w.reshape(-1, inner) for w in weights]
    residual = None if residual is None else residual.reshape(rows, -1)
    outputs = cpp.linear(
        x.reshape(rows, inner), matrices, **norm, return_normed=return_normed, swiglu=swiglu,
        biases=None if biases is None else [b.reshape(-1) for b in biases], gelu=gelu, residual=residual, live=live,
    )  # fmt: skip
    return _unflattened(x, weights, contracted, swiglu, outputs, outputs[-1] if return_normed else None)


def _supports_triton(
    backend: Backend,
    x: Array | Deferred,
    weights: Sequence[Weight],
    contracted: int = 1,
    *,
    gelu: bool = False,
    biases: Sequence[Array] | None = None,
    residual: Array | None = None,
    return_normed: bool = False,
    **options: Any,
) -> str | None:
    if not backend.has_triton:
        return backend.no_triton
    if takes_fp4(backend, weights[0]):
        return "the kernel rounds no activations"
    if biases is not None and residual is not None:
        return "the kernel adds the residual before biases, which are rounded otherwise"
    if gelu or (isinstance(x, DeferredNorm) and x.bias is not None):
        return "the kernel computes no GELU or LayerNorm"
    from dflash_jax.ops.kernels.triton import linear as triton_linear

    size = x.shape[-1]
    if isinstance(x, DeferredDivision) and (return_normed or size & (size - 1) or size > triton_linear.MAX_HEAD):
        return f"heads of {size}: the kernel divides those of a power of two, and does not return them"
    return triton_linear.why_not(*_matrix_shape(x, contracted), weights)


def _triton(
    backend: Backend,
    x: Array | Deferred,
    weights: Sequence[Array | QuantizedWeight],
    contracted: int = 1,
    *,
    dtype: DTypeLike | None = None,
    return_normed: bool = False,
    swiglu: bool = False,
    biases: Sequence[Array] | None = None,
    gelu: bool = False,
    residual: Array | None = None,
    live: Array | None = None,
    axes: Sequence[str] = (),
    in_sums: bool = False,
) -> tuple[Array, ...]:
    from dflash_jax.ops.kernels.triton import linear as triton_linear

    rows, inner = _matrix_shape(x, contracted)
    # XLA adds biases to the kernel's results, which then are not rounded.
    of_kernel = dtype if biases is None else jnp.float32

    def plain(
        x: Array | Deferred, weights: Sequence[Weight], biases: Sequence[Array] | None, residual: Array | None
    ) -> tuple[Array, ...]:
        return reference(
            backend, x, weights, contracted, dtype=dtype, return_normed=return_normed, swiglu=swiglu, biases=biases,
            residual=residual,
        )  # fmt: skip

    def kernel(
        x: Array | Deferred,
        weights: Sequence[Array | QuantizedWeight],
        biases: Sequence[Array] | None,
        residual: Array | None,
    ) -> tuple[Array, ...]:
        norm: dict[str, Any] = {}
        if isinstance(x, DeferredNorm) and triton_linear.fuses_norm(x.x.dtype, rows, inner, weights):
            x, norm = x.x, {"norm": x.weight, "eps": x.eps, "offset": x.offset, "return_normed": return_normed}
        elif isinstance(x, DeferredDivision):
            x, norm = x.x, {"squares": x.squares.reshape(rows, -1, x.squares.shape[-1]), "eps": x.eps}
        elif isinstance(x, DeferredNorm) and backend.kernels == "all":
            rows_of_x = x.x.reshape(rows, inner)
            x = triton_linear.norm_triton(rows_of_x, x.weight, x.eps, x.offset, backend.triton_card).reshape(x.shape)
        elif isinstance(x, DeferredNorm):
            x = x.apply()
        outputs = triton_linear.project_triton(
            x.reshape(rows, inner), [w.reshape(-1, inner) for w in weights], **norm, swiglu=swiglu,
            residual=None if residual is None else residual.reshape(rows, -1), dtype=of_kernel,
            card=backend.triton_card, in_sums=in_sums,
        )  # fmt: skip
        normed = (outputs[-1] if "norm" in norm else x) if return_normed else None
        if biases is not None:
            outputs = _biased(outputs[: len(weights)], [b.reshape(-1) for b in biases], dtype or x.dtype)
        return _unflattened(x, weights, contracted, swiglu, outputs, normed)

    return with_gradient_of(plain, kernel)(x, weights, biases, residual)


def _supports_triton_sums(
    backend: Backend,
    x: Array | Deferred,
    weights: Sequence[Weight],
    contracted: int = 1,
    *,
    swiglu: bool = False,
    **options: Any,
) -> str | None:
    if reason := _supports_triton(backend, x, weights, contracted, swiglu=swiglu, **options):
        return reason
    if swiglu or isinstance(x, DeferredNorm):
        return "the sums have neither a norm before them nor SwiGLU after them"
    from dflash_jax.ops.kernels.triton import linear as triton_linear

    head = x.shape[-1] if isinstance(x, DeferredDivision) else 0
    unpacked = [w for w in weights if not isinstance(w, PackedWeight)]
    return triton_linear.why_not_sums(*_matrix_shape(x, contracted), unpacked, head, backend.triton_card)


def _supports_triton_fp4(
    backend: Backend,
    x: Array | Deferred,
    weights: Sequence[Weight],
    contracted: int = 1,
    *,
    swiglu: bool = False,
    gelu: bool = False,
    **options: Any,
) -> str | None:
    if not backend.has_triton:
        return backend.no_triton
    if not takes_fp4(backend, weights[0]):
        return "activations are not in FP4"
    if gelu:
        return "the kernel computes no GELU"
    from dflash_jax.ops.kernels.triton import fp4

    return fp4.why_not(backend.triton_card, _matrix_shape(x, contracted)[1], weights, swiglu)


def _triton_fp4(
    backend: Backend,
    x: Array | Deferred,
    weights: Sequence[QuantizedWeight],
    contracted: int = 1,
    *,
    dtype: DTypeLike | None = None,
    return_normed: bool = False,
    swiglu: bool = False,
    biases: Sequence[Array] | None = None,
    gelu: bool = False,
    residual: Array | None = None,
    live: Array | None = None,
    axes: Sequence[str] = (),
) -> tuple[Array, ...]:
    from dflash_jax.ops.kernels.triton import fp4

    x = x.apply() if isinstance(x, Deferred) else x
    rows, inner = _matrix_shape(x, contracted)
    inputs, card = activations_in_nvfp4(x.reshape(rows, inner), axes), backend.triton_card
    outputs = [fp4.project(card, inputs, w.reshape(-1, inner), swiglu) for w in weights]
    if biases is not None:
        outputs = [y + b.reshape(-1).astype(jnp.float32) for y, b in zip(outputs, biases, strict=True)]
    outputs = [y.astype(dtype or x.dtype) for y in outputs]
    if residual is not None:
        outputs = [residual.reshape(rows, -1) + y for y in outputs]
    return _unflattened(x, weights, contracted, swiglu, outputs, x if return_normed else None)


IMPLEMENTATIONS = (
    Implementation("cpp", _supports_cpp, _cpp),
    Implementation("triton, FP4", _supports_triton_fp4, _triton_fp4, is_tried=False),
    Implementation("triton, in sums", _supports_triton_sums, partial(_triton, in_sums=True), is_tried=False),
    Implementation("triton", _supports_triton, _triton),
    Implementation("reference", supports_everything, reference),
)


def linear(
    backend: Backend,
    x: Float[Array, "..."] | Deferred,
    weights: Sequence[Weight],
    contracted: int = 1,
    *,
    dtype: DTypeLike | None = None,
    return_normed: bool = False,
    swiglu: bool = False,
    biases: Sequence[Float[Array, "..."]] | None = None,
    gelu: bool = False,
    residual: Float[Array, "..."] | None = None,
    live: Int[Array, ""] | None = None,
    axes: Sequence[str] = (),
) -> tuple[Float[Array, "..."], ...]:
    """One input by each of several weights.

    Args:
        backend: Where it runs.
        x: [..., *in], an array, `DeferredNorm` or `DeferredDivision`.
        weights: [*out, *in] each, or [2, F, H] each with ``swiglu``.
        contracted: How many axes *in has.
        dtype: Dtype of the results; by default the wider of x's and the weight's for arrays, x's for other weights and
            with biases.
        return_normed: Whether the normed x follows the results.
        swiglu: The first half of each weight's outputs, through silu, multiplies the second half.
        biases: [*out] for each weight, added in float32 to its result before that is rounded; without ``swiglu``.
        gelu: Whether GELU by tanh follows, computed in float32.
        residual: [..., *out] ([..., F] with ``swiglu``), added to each result.
        live: int []: the first rows that count; the results of the others may be undefined. None: all rows count.
        axes: The mesh axes that *in is divided over, where the caller sums the results of the devices.

    Returns:
        [..., *out] ([..., F] with ``swiglu``) for each weight, then x after its norm if ``return_normed``.

    Raises:
        ValueError: There are biases with ``swiglu``, or not one for each weight.
    """
    if biases is not None and (swiglu or len(biases) != len(weights)):
        how = "SwiGLU" if swiglu else f"{len(weights)} weights"
        raise ValueError(f"{len(biases)} biases with {how}: each weight has one, and none with SwiGLU")
    options: dict[str, Any] = {"dtype": dtype, "return_normed": return_normed, "swiglu": swiglu}
    options |= {"biases": biases, "gelu": gelu, "residual": residual, "live": live, "axes": axes}
    in_fp4 = [takes_fp4(backend, w) for w in weights]
    if any(in_fp4) and not all(in_fp4):
        return _by_activations(backend, x, weights, contracted, in_fp4, options)
    implementation = choose("linear", IMPLEMENTATIONS, backend, x, weights, contracted, **options)
    return implementation.call(backend, x, weights, contracted, **options)


def _by_activations(
    backend: Backend,
    x: Array | Deferred,
    weights: Sequence[Weight],
    contracted: int,
    in_fp4: Sequence[bool],
    options: dict[str, Any],
) -> tuple[Array, ...]:
    """`linear` by weights that take activations in FP4, and by others: those of a kind by one operation."""
    x, biases = x.apply() if isinstance(x, Deferred) else x, options["biases"]
    results: dict[int, Array] = {}
    for kind in (False, True):
        places = [i for i, fp4 in enumerate(in_fp4) if fp4 == kind]
        of_kind = None if biases is None else [biases[i] for i in places]
        chosen: dict[str, Any] = options | {"return_normed": False, "biases": of_kind}
        outputs = linear(backend, x, [weights[i] for i in places], contracted, **chosen)
        results |= dict(zip(places, outputs, strict=True))
    outputs = tuple(results[i] for i in range(len(weights)))
    return (*outputs, x) if options["return_normed"] else outputs


def logits(backend: Backend, x: Float[Array, "... H"], head: Weight) -> Float[Array, "... V"]:
    """Logits of hidden states: `project` by an array, `linear` by a head in few bits.

    Of a head in few bits XLA unpacks `UNPACKED_BYTES` at a time, not all of it, which may take gigabytes. Its inputs
    are not rounded to FP4, even where those of other weights are: no layer after it makes up for the error.

    Args:
        backend: Where it runs.
        x: Hidden states after the final norm, [..., H].
        head: [V, H].

    Returns:
        float32 [..., V].
    """
    if not isinstance(head, QuantizedWeight):
        return project(backend, x, head, dtype=jnp.float32)
    backend = replace(backend, fp4_activations=False)
    chosen = choose("linear", IMPLEMENTATIONS, backend, x, (head,), dtype=jnp.float32)
    outputs, inputs = head.shape
    parts = -(-outputs * inputs * x.dtype.itemsize // UNPACKED_BYTES)
    if chosen.call is not reference or parts == 1:
        return chosen.call(backend, x, (head,), dtype=jnp.float32)[0]
    x2, size = x.reshape(-1, inputs), -(-outputs // parts)

    def add(i: Array, y: Array) -> Array:
        def rows(array: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(array, i * size, size)

        # The last part begins within the one before it where it would reach past the end: both slices do.
        part: QuantizedWeight = jax.tree.map(rows, head)
        return jax.lax.dynamic_update_slice(y, project(backend, x2, part, dtype=jnp.float32), (0, i * size))

    y = cast(Array, jax.lax.fori_loop(0, parts, add, jnp.zeros((x2.shape[0], outputs), jnp.float32)))
    return y.reshape(*x.shape[:-1], outputs)

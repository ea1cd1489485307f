"""The vision tower of Qwen3.5 and Qwen3.6: patches of images and frames → rows in place of their tokens' embeddings.

It is a module of its own: a `Decoder` does not contain it, and its program runs apart from the decoder's. The reference
implementation is transformers' `Qwen3_5VisionModel`. Every device of a mesh has all of it.

Dimension letters: N patches, H the tower's hidden size, M merge blocks (tokens), T width of a token.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dflash_jax.models.config import VisionConfig
from dflash_jax.models.layers import constant, normal
from dflash_jax.models.rope import CosSin
from dflash_jax.ops.backend import XLA, Backend
from dflash_jax.ops.frame_attention import frame_attention
from dflash_jax.ops.linear import DeferredNorm, linear
from dflash_jax.ops.weights import LANES, PackedWeight, is_weight


class LayerNorm(nnx.Module):
    """LayerNorm (arXiv 1607.06450), computed in float32.

    Attributes:
        weight: [H], or [depth, H] of the norms of a stack of blocks.
        bias: Likewise.
        eps: Added to the variance.
    """

    def __init__(self, shape: tuple[int, ...], eps: float, rngs: nnx.Rngs | None, dtype: DTypeLike):
        self.weight = constant(rngs, shape, dtype, 1.0)
        self.bias = constant(rngs, shape, dtype, 0.0)
        self.eps = eps

    def deferred(self, x: Float[Array, "N H"]) -> DeferredNorm:
        """An input [N, H] whose norm the linear map that takes it computes."""
        return DeferredNorm(x, self.weight[...], self.eps, bias=self.bias[...])

    def __call__(self, x: Float[Array, "N H"]) -> Float[Array, "N H"]:
        """Normalises x [N, H]."""
        return self.deferred(x).apply()


class Linear(nnx.Module):
    """A linear map with a bias.

    Attributes:
        weight: [*out, *inner], or [depth, *out, *inner] of the maps of a stack of blocks.
        bias: [*out], or [depth, *out].
        backend: Where it runs.
        contracted: How many axes *inner has.
        can_pack: Whether the weight can be a `PackedWeight`.
    """

    def __init__(
        self,
        out: tuple[int, ...],
        inner: tuple[int, ...],
        rngs: nnx.Rngs | None,
        dtype: DTypeLike,
        backend: Backend,
        depth: int | None = None,
    ):
        stack = () if depth is None else (depth,)
        self.weight = normal(rngs, (*stack, *out, *inner), dtype)
        self.bias = constant(rngs, (*stack, *out), dtype, 0.0)
        self.backend, self.contracted = backend, len(inner)
        # The maps of a stack must share no panel.
        self.can_pack = depth is None or math.prod(out) % LANES == 0

    def matrices(self) -> dict[str, int]:
        """Parameter → number of contracted last axes."""
        return {"weight": self.contracted} if self.can_pack else {}

    def __call__(
        self,
        x: Float[Array, "N ..."] | DeferredNorm,
        live: Int[Array, ""],
        *,
        gelu: bool = False,
        residual: Float[Array, "N ..."] | None = None,
    ) -> Float[Array, "N ..."]:
        """Maps x.

        Args:
            x: [N, *inner], an array or `DeferredNorm`.
            live: int []: the first rows that count; the others of the result mean nothing.
            gelu: Whether GELU by tanh follows.
            residual: [N, *out], added last.

        Returns:
            [N, *out] in x's dtype.
        """
        (y,) = linear(
            self.backend, x, [self.weight[...]], self.contracted,
            biases=[self.bias[...]], gelu=gelu, residual=residual, live=live,
        )  # fmt: skip
        return y


class VisionBlock(nnx.Module):
    """Norm, attention within a frame, norm, MLP, with residuals around both.

    The tower has one object for all its blocks, whose parameters have a leading axis, [depth, …]. A loop slices it:
    a program has one block's instructions and temporary arrays, however deep the tower is.

    Attributes:
        norm1: Norm before the attention.
        norm2: Norm before the MLP.
        qkv: Projection of queries, keys and values, [3, heads, head, H].
        proj: Output projection of the attention, [H, heads, head].
        fc1: First projection of the MLP.
        fc2: Second projection of the MLP.
        backend: Where it runs.
    """

    def __init__(self, config: VisionConfig, rngs: nnx.Rngs | None, dtype: DTypeLike, backend: Backend):
        depth, hidden, mlp = config.depth, config.hidden_size, config.intermediate_size
        heads = (config.num_heads, config.head_dim)
        self.norm1 = LayerNorm((depth, hidden), config.norm_eps, rngs, dtype)
        self.norm2 = LayerNorm((depth, hidden), config.norm_eps, rngs, dtype)
        self.qkv = Linear((3, *heads), (hidden,), rngs, dtype, backend, depth)
        self.proj = Linear((hidden,), heads, rngs, dtype, backend, depth)
        self.fc1 = Linear((mlp,), (hidden,), rngs, dtype, backend, depth)
        self.fc2 = Linear((hidden,), (mlp,), rngs, dtype, backend, depth)
        self.backend = backend

    def __call__(
        self, x: Float[Array, "N H"], angles: CosSin, low: Int[Array, " N"], high: Int[Array, " N"]
    ) -> Float[Array, "N H"]:
        """One block.

        Args:
            x: [N, H].
            angles: Rotary angles of the patches, [N, head / 2] each.
            low: First patch that each patch sees, int [N].
            high: The one after the last, int [N].

        Returns:
            [N, H].
        """
        live = jnp.max(high)
        y = frame_attention(self.backend, self.qkv(self.norm1.deferred(x), live), angles, low, high)
        x = self.proj(y, live, residual=x)
        return self.fc2(self.fc1(self.norm2.deferred(x), live, gelu=True), live, residual=x)


class PatchMerger(nnx.Module):
    """Makes one token of the patches of a merge block.

    Attributes:
        norm: Norm of each patch.
        fc1: First projection, of a block's patches side by side.
        fc2: Second projection.
        backend: Where it runs.
    """

    def __init__(self, config: VisionConfig, rngs: nnx.Rngs | None, dtype: DTypeLike, backend: Backend):
        merged = config.merged_size
        self.norm = LayerNorm((config.hidden_size,), config.norm_eps, rngs, dtype)
        self.fc1 = Linear((merged,), (merged,), rngs, dtype, backend)
        self.fc2 = Linear((config.out_hidden_size,), (merged,), rngs, dtype, backend)
        self.backend = backend

    def __call__(self, x: Float[Array, "N H"], live_tokens: Int[Array, ""]) -> Float[Array, "M T"]:
        """Maps patches [N, H] in the order of their blocks to tokens [M, T], of which ``live_tokens`` count."""
        y = self.fc1(self.norm(x).reshape(-1, self.fc1.bias.get_value().shape[0]), live_tokens)
        # GELU (arXiv 1606.08415), here without an approximation.
        return self.fc2(jax.nn.gelu(y.astype(jnp.float32), approximate=False).astype(x.dtype), live_tokens)


class VisionTower(nnx.Module):
    """The vision tower. Patches of many images and frames run in one pass, each seeing its own frame.

    Attributes:
        config: Its configuration.
        backend: Where it runs.
        patch: Embedding of patches.
        positions: Table of positions, [grid side², H].
        blocks: Its blocks, stacked.
        merger: Makes tokens.
    """

    def __init__(
        self,
        config: VisionConfig,
        *,
        rngs: nnx.Rngs | None,
        dtype: DTypeLike = jnp.float32,
        backend: Backend | None = None,
    ):
        self.config, self.backend = config, backend or Backend.detect()
        backend = self.backend
        self.patch = Linear((config.hidden_size,), (config.patch_dim,), rngs, dtype, backend)
        self.positions = normal(rngs, (config.num_positions, config.hidden_size), dtype)
        self.blocks = VisionBlock(config, rngs, dtype, backend)
        self.merger = PatchMerger(config, rngs, dtype, backend)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of parameters and activations."""
        return self.positions.get_value().dtype

    def __call__(
        self,
        x: Float[Array, "N H"],
        first: int | Int[Array, ""],
        last: int | Int[Array, ""],
        patches: Float[Array, "N patch"],
        rows: Int[Array, " N"],
        columns: Int[Array, " N"],
        heights: Int[Array, " N"],
        widths: Int[Array, " N"],
        low: Int[Array, " N"],
        high: Int[Array, " N"],
    ) -> tuple[Float[Array, "N H"], Float[Array, "M T"]]:
        """Some blocks of a pass over the patches of frames; a still image is one frame.

        A pass may take several calls, between which a device runs other programs. The first one embeds the patches, and
        the last one makes the tokens.

        The patches of a frame follow one another in the order of its merge blocks (`patch_places`), and
        N is a multiple of a block's patches. Padding is patches with ``low`` equal to ``high``: no patch sees them, and
        their rows of the result mean nothing.

        Args:
            x: What the call before returned, [N, H], in the tower's dtype; anything where ``first`` is 0.
            first: The first block that runs.
            last: The block after the last that runs.
            patches: float32 [N, patch_dim].
            rows: Row of each patch in its frame, int [N].
            columns: Its column, int [N].
            heights: Rows of its frame, int [N].
            widths: Columns of its frame, int [N].
            low: First patch of its frame, int [N].
            high: The patch after its frame's last, int [N].

        Returns:
            What block ``last`` takes, [N, H]; and where ``last`` is the depth, a row for each merge block,
            [N / merge², out_hidden_size], in the tower's dtype, else zeros.
        """
        live = jnp.max(high)

        def embedded() -> Array:
            places = self._position_embeddings(rows, columns, heights, widths)
            return self.patch(patches.astype(self.dtype), live, residual=places.astype(self.dtype))

        angles = self._angles(rows, columns)

        def through(i: Array, x: Array) -> Array:
            def sliced(stack: Array | PackedWeight) -> Array | PackedWeight:
                if isinstance(stack, PackedWeight):
                    return stack.of_stack(i)
                return jax.lax.dynamic_index_in_dim(stack, i, keepdims=False)

            return jax.tree.map(sliced, self.blocks, is_leaf=is_weight)(x, angles, low, high)

        x = jax.lax.cond(first == 0, embedded, lambda: x)
        x = jax.lax.fori_loop(first, last, through, x)
        tokens = (len(x) // self.config.block_patches, self.config.out_hidden_size)
        done = last == self.config.depth
        return x, jax.lax.cond(
            done, lambda: self.merger(x, live // self.config.block_patches), lambda: jnp.zeros(tokens, x.dtype)
        )

    def _position_embeddings(
        self, rows: Int[Array, " N"], columns: Int[Array, " N"], heights: Int[Array, " N"], widths: Int[Array, " N"]
    ) -> Float[Array, "N H"]:
        """The table of positions stretched over each frame, corners on corners, bilinear, float32 [N, H]."""
        side, table = self.config.side, self.positions[...]

        def taps(at: Array, size: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
            place = at * (side - 1) / jnp.maximum(size - 1, 1)
            first = jnp.clip(jnp.floor(place).astype(jnp.int32), 0, side - 1)
            share = place - first
            return (first, jnp.minimum(first + 1, side - 1)), (1 - share, share)

        row_taps, column_taps = taps(rows, heights), taps(columns, widths)
        terms = [
            (row_share * column_share)[:, None] * table[row * side + column].astype(jnp.float32)
            for row, row_share in zip(*row_taps, strict=True)
            for column, column_share in zip(*column_taps, strict=True)
        ]
        return sum(terms[1:], terms[0])

    def _angles(self, rows: Int[Array, " N"], columns: Int[Array, " N"]) -> CosSin:
        """The first half of a head's frequencies follow the row, the second half the column."""
        half = self.config.head_dim // 2
        frequencies = self.config.rope_theta ** (-jnp.arange(0, half, 2, dtype=jnp.float32) / half)
        at = jnp.stack([rows, columns], axis=1).astype(jnp.float32)
        angles = (at[:, :, None] * frequencies).reshape(-1, half)
        return jnp.cos(angles), jnp.sin(angles)


def patch_places(height: int, width: int, merge: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of a frame's patches, in the order of its merge blocks, int32 [height · width] each."""
    places = np.indices((height, width), np.int32)
    blocks = places.reshape(2, height // merge, merge, width // merge, merge)
    rows, columns = blocks.transpose(0, 1, 3, 2, 4).reshape(2, -1)
    return rows, columns


def frame_arrays(frames: Sequence[tuple[int, int]], size: int, merge: int) -> dict[str, np.ndarray]:
    """The arguments of `VisionTower.__call__` that describe frames, padded.

    Args:
        frames: Height and width in patches of each frame, in the order of their patches.
        size: Patches with padding.
        merge: Side of a merge block.

    Returns:
        Argument → int32 [size].
    """
    names = ("rows", "columns", "heights", "widths", "low", "high")
    # Frames of padding have one row and one column.
    arrays = {name: np.full(size, name in ("heights", "widths"), np.int32) for name in names}
    start = 0
    for height, width in frames:
        end = start + height * width
        rows, columns = patch_places(height, width, merge)
        for name, value in zip(names, (rows, columns, height, width, start, end), strict=True):
            arrays[name][start:end] = value
        start = end
    return arrays


def abstract_tower(config: VisionConfig, dtype: DTypeLike = jnp.float32, backend: Backend = XLA) -> VisionTower:
    """A tower with shapes in place of arrays, for loaders to fill and for plans to count without memory."""
    return VisionTower(config, rngs=None, dtype=dtype, backend=backend)

"""Gated DeltaNet on a TPU, its tokens in chunks.

    S ← e^g S;   δ = β (v - Sᵀk);   S ← S + k ⊗ δ;   o = Sᵀq

Letters as in `ops.gated_delta`. A program has some key heads H of a row of the batch. Arrays of tokens are as products
of matrices leave them, [B, T, heads · size], so that a head is a slice of lanes and nothing is transposed.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dflash_jax.ops.cache import DeltaState
from dflash_jax.ops.delta_rule import l2_normalise, split_cumsum
from dflash_jax.ops.kernels.tpu.rule import chunk_rule, dot

# Tokens of a round at most, which are one chunk, and of a chunk of more. A round of fewer tokens is computed as one of
# TOKENS: its products have one shape, and a token's result the same bits at any block length.
TOKENS, CHUNK = 16, 64
# Value heads of a program at most, of a round and of more tokens: one fills the other's latencies, and their states are
# read while the program before computes.
VALUE_HEADS = (16, 8)
# Rows before a chunk's in the window of the convolution: whole tiles of float32.
BEFORE = 8
LANES = 128


def why_not(dtype: DTypeLike, state: DeltaState) -> str | None:
    """The reason why `mix` does not support tokens in ``dtype`` over a state, or None."""
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"{jnp.dtype(dtype).name}: the kernel takes bfloat16 and float32"
    return why_not_sizes(state)


def why_not_sizes(state: DeltaState) -> str | None:
    """The reason why the kernels do not support the sizes of a state, or None."""
    if any(n % LANES for n in state.recurrent.shape[-2:]):
        return f"heads of {list(state.recurrent.shape[-2:])}: sizes are multiples of {LANES}"
    if state.conv_inputs.shape[1] > BEFORE:
        return f"a convolution over {state.conv_inputs.shape[1] + 1} tokens: the kernel takes {BEFORE + 1} at most"
    return None


def heads_of_program(tokens: int, state: DeltaState) -> int:
    """H, a divisor of G."""
    (_, g, r, *_), most = state.recurrent.shape, VALUE_HEADS[tokens > TOKENS]
    return max(n for n in range(1, g + 1) if g % n == 0 and (n == 1 or n * r <= most))


def _chunk(
    rows, count,
    x, conv, weight, decays, norm, state, y, k_out, delta_out, state_out, carried, window,
    *, tokens: int, taps: int, eps: float, exact: bool,
):  # fmt: skip
    """A chunk of M tokens of H key heads.

    Scalars, int32 [B]: ``rows`` of the state, ``count`` tokens that count. Arrays: x [1, M, H (C + R Dv)], conv [1, W,
    H C], weight [taps, H C], decays [1, 1, 1, 3, H R, M] (both parts of `split_cumsum`, then β), norm [1, Dv], state
    [1, H, R, Dk, Dv]; y [1, M, H R Dv], the record's k and δ likewise or None, and the state after the chunk or None;
    the state that is carried from chunk to chunk, and the window of the convolution, [BEFORE + M, H C].
    """
    del rows
    chunk, size = pl.program_id(2), x.shape[1]
    _, heads, r, dk, dv = state.shape
    m, channels = decays.shape[-1], 2 * dk + r * dv
    first = BEFORE - taps + 1

    @pl.when(chunk == 0)
    def _():
        if tokens > m:
            carried[...] = state[0]
        window[first:BEFORE] = conv[0].astype(jnp.float32)

    left = jnp.minimum(count[pl.program_id(1)], tokens) - chunk * m
    is_counted = jax.lax.broadcasted_iota(jnp.int32, (size, channels), 0) < left
    if size < m:
        window[BEFORE + size :] = jnp.zeros((m - size, window.shape[1]), jnp.float32)
    keys, values = [], []
    for head in range(heads):
        here, start = slice(head * channels, (head + 1) * channels), head * (channels + r * dv)
        # Tokens that do not count may be anything.
        inputs = x[0, :, start : start + channels].astype(jnp.float32)
        window[BEFORE : BEFORE + size, here] = jnp.where(is_counted, inputs, 0.0)
        mixed = sum(window[first + j : first + j + m, here] * weight[j : j + 1, here] for j in range(taps))
        mixed = mixed * jax.nn.sigmoid(mixed)
        q, k = l2_normalise(mixed[:, :dk]) * dk**-0.5, l2_normalise(mixed[:, dk : 2 * dk])
        if k_out is not None:
            k_out[0, :, head * dk : (head + 1) * dk] = k[:size]
        keys.append(jnp.concatenate([k, q]))
        values += [mixed[:, start : start + dv] for start in range(2 * dk, channels, dv)]

    def of_values(x: Array) -> Array:
        """[H, ...] → [H R, ...]."""
        return jnp.broadcast_to(x[:, None], (heads, r, *x.shape[1:])).reshape(heads * r, *x.shape[1:])

    kq = jnp.stack(keys)
    products = dot(kq, kq[:, :m], exact, (2, 2))
    before = (carried[...] if tokens > m else state[0]).reshape(heads * r, dk, dv)
    out, delta, after = chunk_rule(
        of_values(kq), of_values(products), jnp.stack(values), decays[0, 0, 0], before, tokens, exact
    )
    if tokens > m:
        carried[...] = after.reshape(carried.shape)
    out = out * jax.lax.rsqrt(jnp.mean(out * out, axis=2, keepdims=True) + eps) * norm[...]
    for i in range(heads * r):
        value, gate = i * dv, i // r * (channels + r * dv) + channels + i % r * dv
        if delta_out is not None:
            delta_out[0, :, value : value + dv] = delta[i, :size]
        z = x[0, :, gate : gate + dv].astype(jnp.float32)
        y[0, :, value : value + dv] = (out[i, :size] * (z * jax.nn.sigmoid(z))).astype(y.dtype)
    if tokens > m:
        window[:BEFORE] = window[m : m + BEFORE]
    if state_out is not None:
        state_out[0] = after.reshape(carried.shape)


def mix(
    qkvz: Float[Array, "B T G CZ"],
    beta: Float[Array, "B T G R"],
    log_decay: Float[Array, "B T G R"],
    state: DeltaState,
    conv_weight: Float[Array, "G C W"],
    norm: Float[Array, " Dv"],
    eps: float,
    n: Int[Array, " B"] | None = None,
) -> tuple[Array, ...]:
    """Convolution, delta rule and gated norm.

    Args:
        qkvz: As in `ops.gated_delta.gated_delta`.
        beta: Step sizes, float32.
        log_decay: Logarithms of the decays, float32.
        state: The state before the tokens.
        conv_weight: As in `ops.gated_delta.Weights`.
        norm: As there.
        eps: Epsilon of the norm.
        n: Tokens that count, int32 [B]. None: all, and there is a record.

    Returns:
        y [B, T, G, R, Dv]; and the record's k and δ, or S of the B rows after n tokens.
    """
    b, t, g = qkvz.shape[:3]
    _, _, r, dk, dv = state.recurrent.shape
    channels, taps = conv_weight.shape[1:]
    h, m = heads_of_program(t, state), TOKENS if t <= TOKENS else CHUNK
    count, size = -(-t // m), min(t, m)
    rows = jnp.minimum(state.row_indices(), len(state.recurrent) - 1)
    counted = jnp.full(b, t, jnp.int32) if n is None else n.astype(jnp.int32)
    if n is not None:
        is_counted = (jnp.arange(t)[None] < n[:, None])[..., None, None]
        beta, log_decay = (jnp.where(is_counted, x, 0.0) for x in (beta, log_decay))

    def chunks(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, count * m - t), (0, 0), (0, 0)))
        return jnp.einsum("bcmjn->bcjnm", x.reshape(b, count, m, g // h, h * r))

    decays = jnp.stack([*split_cumsum(chunks(log_decay)), chunks(beta)], axis=3)

    def lanes(rows: int, of_head: int, is_chunked: bool = True) -> pl.BlockSpec:
        return pl.BlockSpec((1, rows, h * of_head), lambda j, i, c, *_: (i, c if is_chunked else 0, j))

    states = pl.BlockSpec((1, h, r, dk, dv), lambda j, i, c, rows, _: (rows[i], j, 0, 0, 0))
    shapes = [((b, t, g * r * dv), qkvz.dtype), ((b, t, g * dk), jnp.float32), ((b, t, g * r * dv), jnp.float32)]
    specs = [lanes(size, r * dv), lanes(size, dk), lanes(size, r * dv)]
    if n is not None:
        shapes[1:] = [((b, *state.recurrent.shape[1:]), jnp.float32)]
        specs[1:] = [pl.BlockSpec((1, h, r, dk, dv), lambda j, i, c, *_: (i, j, 0, 0, 0))]
    options = {"tokens": t, "taps": taps, "eps": eps, "exact": qkvz.dtype == jnp.float32}

    def kernel(*refs: Any) -> None:
        *given, carried, window = refs
        # There is no state after the tokens, or no record.
        given = [*given, None] if n is None else [*given[:-1], None, None, given[-1]]
        _chunk(*[*given, carried, window], **options)

    y, *rest = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(*x) for x in shapes],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            # Weights of heads stay where they are for all rows.
            grid=(g // h, b, count),
            in_specs=[
                lanes(size, channels + r * dv),
                lanes(taps - 1, channels, False),
                pl.BlockSpec((taps, h * channels), lambda j, i, c, *_: (0, j)),
                pl.BlockSpec((1, 1, 1, 3, h * r, m), lambda j, i, c, *_: (i, c, j, 0, 0, 0)),
                pl.BlockSpec((1, dv), lambda *_: (0, 0)),
                states,
            ],
            out_specs=specs,
            scratch_shapes=[
                pltpu.VMEM((h, r, dk, dv), jnp.float32),
                pltpu.VMEM((BEFORE + m, h * channels), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        name="mix",
    )(
        rows, counted, qkvz.reshape(b, t, -1), state.conv_inputs[rows].reshape(b, taps - 1, -1),
        conv_weight.astype(jnp.float32).transpose(2, 0, 1).reshape(taps, -1), decays,
        norm.astype(jnp.float32)[None], state.recurrent,
    )  # fmt: skip
    y = y.reshape(b, t, g, r, dv)
    return (y, *rest) if n is not None else (y, rest[0].reshape(b, t, g, dk), rest[1].reshape(y.shape))

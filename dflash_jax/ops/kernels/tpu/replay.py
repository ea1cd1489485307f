"""The replay of Gated DeltaNet's records on a TPU, in place. Letters as in `ops.gated_delta`, H as in `tpu.delta`."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from dflash_jax.ops.cache import DeltaRecord, DeltaState
from dflash_jax.ops.kernels.tpu.delta import TOKENS, heads_of_program, why_not_sizes


def why_not(tokens: int, state: DeltaState) -> str | None:
    """The reason why `replay` does not support a record of this many tokens over a state, or None."""
    return f"{tokens} tokens: the kernel takes {TOKENS} at most" if tokens > TOKENS else why_not_sizes(state)


def _replay(order, rows, n, k, delta, decay, state, out, keys, columns, *, tokens: int):
    """The recurrence of a row's first ``n`` tokens, one after another, whatever blocks they came in.

    Scalars: ``order`` of the rows of the batch, the others of each, int32 [B]; decay [1, 1, tokens, H R]. Arrays: k [1,
    tokens, H Dk], delta [1, tokens, H R Dv], the state before and after, [1, H, R, Dk, Dv]; keys of a head, [TOKENS,
    Dk], and of all as columns, [H, Dk, TOKENS].
    """
    del rows
    count = n[order[pl.program_id(1)]]
    _, heads, r, dk, dv = state.shape
    out[...] = state[...]
    for head in range(heads):
        keys[:tokens] = k[0, :, head * dk : (head + 1) * dk]
        columns[head] = keys[...].T
    for j in range(tokens):
        # All heads together, so that one fills the other's latencies.
        @pl.when(j < count)
        def _(j=j):
            for head in range(heads):
                key = jnp.broadcast_to(columns[head, :, j : j + 1], (dk, dv))
                for i in range(r):
                    value = head * r + i
                    added = key * delta[0, j : j + 1, value * dv : (value + 1) * dv]
                    out[0, head, i] = out[0, head, i] * decay[0, 0, j, value] + added


def replay(state: DeltaState, record: DeltaRecord, n: Int[Array, " B"]) -> Float[Array, "rows G R Dk Dv"]:
    """S after the first n recorded tokens, in place; rows without a token are neither read nor written."""
    b, t, g, dk = record.k.shape
    r, dv = record.delta.shape[3:]
    h, rows = heads_of_program(t, state), state.row_indices()
    is_written = (rows < len(state.recurrent)) & (n > 0)
    order = jnp.argsort(jnp.logical_not(is_written)).astype(jnp.int32)
    decay = jnp.exp(record.log_decay).reshape(b, t, g // h, h * r).swapaxes(1, 2)

    def lanes(of_head: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, t, h * of_head), lambda j, i, order, *_: (order[i], 0, j))

    states = pl.BlockSpec((1, h, r, dk, dv), lambda j, i, order, rows, _: (rows[order[i]], j, 0, 0, 0))
    return pl.pallas_call(
        partial(_replay, tokens=t),
        out_shape=jax.ShapeDtypeStruct(state.recurrent.shape, jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            # Only as many programs as there are rows to write.
            grid=(g // h, is_written.sum(dtype=jnp.int32)),
            in_specs=[
                lanes(dk),
                lanes(r * dv),
                pl.BlockSpec((1, 1, t, h * r), lambda j, i, order, *_: (order[i], j, 0, 0), memory_space=pltpu.SMEM),
                states,
            ],
            out_specs=states,
            scratch_shapes=[pltpu.VMEM((TOKENS, dk), jnp.float32), pltpu.VMEM((h, dk, TOKENS), jnp.float32)],
        ),
        input_output_aliases={6: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="replay",
    )(
        order, rows, n.astype(jnp.int32), record.k.reshape(b, t, -1), record.delta.reshape(b, t, -1), decay,
        state.recurrent,
    )  # fmt: skip

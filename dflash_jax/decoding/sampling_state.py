"""Sampling options and token counts of a batch as arrays."""

# Most functions of JAX have partial annotations: results of jax.lax.cond, jax.tree.map and others are unknown.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false

from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from dflash_jax.ops.argmax import argmax
from dflash_jax.ops.backend import XLA, Backend
from dflash_jax.ops.top_k import top_k
from dflash_jax.parallel.sharding import UNSHARDED, AxisSharding
from dflash_jax.sampling_params import MAX_LOGPROBS


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingState:
    """Sampling options and token counts of B sequences.

    Options are runtime data, one value a sequence. The tables have one row of V a slot. With ``slots``, the options are
    those of some slots, and the tables are those of the larger state, which are read and written in place.

    Attributes:
        temperature: float32 [B]; 0 is greedy.
        top_k: int32 [B]; 0 is off.
        top_p: float32 [B]; 1 is off.
        min_p: float32 [B]; 0 is off.
        repetition: Repetition penalty over prompt and output, float32 [B]; 1 is off.
        frequency: Frequency penalty over the output, float32 [B]; 0 is off.
        presence: Presence penalty over the output, float32 [B]; 0 is off.
        seed: uint32 [B].
        wants_logprobs: Whether log-probabilities are recorded, bool [B].
        logprobs_mode: What they are: an index of LOGPROBS_MODES, or `SCALED_PROMPT`, int32 [B].
        logprob_ids: Tokens whose log-probabilities are recorded beside the most likely ones, int32 [B, MAX_LOGPROBS],
            padded with -1.
        logit_bias: Table, float32 [slots, V].
        prompt_counts: Table of the tokens of the prompt, int32 [slots, V].
        output_counts: Table of the tokens of the output, int32 [slots, V].
        slots: Rows of the tables, int32 [B]; indices past the end are padding. None: row i for sequence i.
        vocab: How V is divided over devices, here and in all logits.
        backend: Where draws run.
    """

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    repetition: Float[Array, " B"]
    frequency: Float[Array, " B"]
    presence: Float[Array, " B"]
    seed: UInt32[Array, " B"]
    wants_logprobs: Bool[Array, " B"]
    logprobs_mode: Int[Array, " B"]
    logprob_ids: Int[Array, "B named"]
    logit_bias: Float[Array, "slots V"]
    prompt_counts: Int[Array, "slots V"]
    output_counts: Int[Array, "slots V"]
    slots: Int[Array, " B"] | None = None
    vocab: AxisSharding = field(default=UNSHARDED, metadata={"static": True})
    backend: Backend = field(default=XLA, metadata={"static": True})

    @classmethod
    def greedy(
        cls, slots: int, vocab_size: int, vocab: AxisSharding = UNSHARDED, backend: Backend | None = None
    ) -> "SamplingState":
        """Greedy decoding without penalties.

        Args:
            slots: B.
            vocab_size: V.
            vocab: How V is divided over devices.
            backend: Where draws run; None detects it.

        Returns:
            The state, with empty counts.
        """

        def full(value: float, dtype: Any = np.float32) -> Array:
            return jnp.asarray(np.full((slots,), value, dtype))

        return cls(
            temperature=full(0),
            top_k=full(0, np.int32),
            top_p=full(1),
            min_p=full(0),
            repetition=full(1),
            frequency=full(0),
            presence=full(0),
            seed=full(0, np.uint32),
            wants_logprobs=full(True, bool),
            logprobs_mode=full(RAW, np.int32),
            logprob_ids=jnp.full((slots, MAX_LOGPROBS), -1, jnp.int32),
            logit_bias=jnp.zeros((slots, vocab_size)),
            prompt_counts=jnp.zeros((slots, vocab_size), jnp.int32),
            output_counts=jnp.zeros((slots, vocab_size), jnp.int32),
            vocab=vocab,
            backend=backend or Backend.detect(),
        )

    def argmax(self, logits: Float[Array, "*n V"]) -> tuple[Int[Array, "*n"], Float[Array, "*n"]]:
        """The largest logit.

        Args:
            logits: float [..., V], divided as ``vocab``.

        Returns:
            Token ids int [...], and their logits.
        """
        return self.vocab.argmax(logits, partial(argmax, self.backend))

    def largest(self, logits: Float[Array, "*n V"], k: int) -> tuple[Float[Array, "*n k"], Int[Array, "*n k"]]:
        """The k largest logits.

        Args:
            logits: float [..., V], divided as ``vocab``.
            k: Their number; at most all are given.

        Returns:
            The logits [..., k], the largest first, and their token ids int [..., k].
        """
        return self.vocab.top_k(logits, k, partial(top_k, self.backend))

    def for_tokens(self, ids: Int[Array, " N"]) -> "SamplingState":
        """The state for logits of the tokens ``ids`` int [N] only, of which every device has all."""
        rows = self.table_rows()[:, None]
        local, is_local = self.vocab.local(ids, self.logit_bias.shape[1])

        def columns(name: str) -> Array:
            return self.vocab.sum(jnp.where(is_local, getattr(self, name)[rows, jnp.where(is_local, local, 0)], 0))

        return replace(self, slots=None, vocab=UNSHARDED, **{name: columns(name) for name in TABLES})

    def table_rows(self) -> Int[Array, " B"]:
        """int32 [B]: the row of each sequence in the tables; padding gets the last row."""
        return jnp.arange(len(self.seed)) if self.slots is None else jnp.minimum(self.slots, len(self.logit_bias) - 1)

    def table(self, name: str) -> Array:
        """The sequences' rows [B, V] of the table ``name``, one of `TABLES`."""
        table = getattr(self, name)
        return table if self.slots is None else table[self.table_rows()]

    def count_output(self, tokens: Int[Array, "B T"], is_output: Bool[Array, "B T"]) -> "SamplingState":
        """Adds tokens to the output counts.

        Args:
            tokens: int [B, T].
            is_output: Which of them to add, bool [B, T].

        Returns:
            The state with the new counts.
        """
        size = self.output_counts.shape[1]
        local, is_local = self.vocab.local(tokens, size)
        rows = jnp.arange(len(tokens)) if self.slots is None else self.slots
        at = rows[:, None], jnp.where(is_output & is_local, local, size)
        return replace(self, output_counts=self.output_counts.at[at].add(1, mode="drop"))

    def take(self, slots: Int[Array, " b"]) -> "SamplingState":
        """The options of the slots int [b], over the same tables."""
        inside = jnp.minimum(slots, len(self.seed) - 1)
        return replace(self, slots=slots, **{name: getattr(self, name)[inside] for name in OPTIONS})

    def put(self, part: "SamplingState") -> "SamplingState":
        """Writes back what `take` gave, after a step on it."""
        options = {name: getattr(self, name).at[part.slots].set(getattr(part, name), mode="drop") for name in OPTIONS}
        return replace(part, slots=None, **options)

    def with_tables(
        self, logit_bias: Float[Array, "B V"], prompt_counts: Int[Array, "B V"], output_counts: Int[Array, "B V"]
    ) -> "SamplingState":
        """Replaces the sequences' rows of the three tables, [B, V] each."""
        new = dict(zip(TABLES, (logit_bias, prompt_counts, output_counts), strict=True))
        if self.slots is not None:
            new = {name: getattr(self, name).at[self.slots].set(x, mode="drop") for name, x in new.items()}
        return replace(self, **new)


TABLES = ("logit_bias", "prompt_counts", "output_counts")
OPTIONS = tuple(f.name for f in fields(SamplingState) if f.name not in (*TABLES, "slots", "vocab", "backend"))

# Values of logprobs_mode, in the order of LOGPROBS_MODES. SCALED_PROMPT is that of a prompt that is only scored, by its
# temperature.
RAW, PROCESSED, SCALED, RAW_LOGITS, PROCESSED_LOGITS, SCALED_PROMPT = range(6)
# Values of `sampling_mode`.
GREEDY, RANDOM, PENALISED = range(3)


def sampling_mode(sampling: SamplingState) -> Int[Array, " B"]:
    """How much work the draw of each sequence is.

    All devices that share a sequence get the same mode, although each has a part of the bias: `draw` branches on the
    mode, and its branches have collectives. Reads the whole bias table, so it runs once a dispatch, not once a round.

    Args:
        sampling: Options of B sequences.

    Returns:
        int32 [B]: GREEDY for the arg-max of the logits, RANDOM for a random draw, PENALISED where bias or penalties
        change the logits first.
    """
    is_biased = (sampling.table("logit_bias") != 0).any(-1).astype(jnp.int32)
    is_biased = sampling.vocab.max(is_biased) > 0
    penalised = (sampling.repetition != 1) | (sampling.frequency != 0) | (sampling.presence != 0)
    return jnp.where(is_biased | penalised, PENALISED, jnp.where(sampling.temperature > 0, RANDOM, GREEDY))

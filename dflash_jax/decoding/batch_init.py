"""Prompts as the arrays of a decode state: a whole batch at once, or one prompt into a slot of a running state."""

# Most functions of JAX have partial annotations: results of jax.lax.cond, jax.tree.map and others are unknown.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int, Int32

from dflash_jax.decoding.sampling_state import SamplingState
from dflash_jax.decoding.state import PLAIN_SETTINGS, DecodeState, Settings, empty_state, put_slots, take_slots
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.drafting import Drafting
from dflash_jax.ops.cache import KVCache
from dflash_jax.sampling_params import MAX_BIAS, MAX_LOGPROBS, MAX_STOPS


def check_prompts(
    prompts: Sequence[Sequence[int]], vocab_size: int, capacity: int, longest: int, stops: Sequence[Sequence[int]]
) -> None:
    """Checks that prompts fit into the arrays of a state.

    Args:
        prompts: Token ids of each prompt.
        vocab_size: V.
        capacity: Positions of a slot.
        longest: Tokens of the longest prompt with its new tokens.
        stops: Stop token ids of each prompt.

    Raises:
        ValueError: A prompt is too long, an id is not in the vocabulary, or there are more than MAX_STOPS stop ids.
    """
    if capacity < longest:
        raise ValueError(f"capacity {capacity}: the longest prompt and its new tokens are {longest}")
    outside = [i for p in prompts for i in p if not 0 <= i < vocab_size]
    if outside:
        raise ValueError(f"prompt id {outside[0]} is out of vocabulary: ids are 0 to {vocab_size - 1}")
    if any(len(ids) > MAX_STOPS for ids in stops):
        raise ValueError(f"{max(map(len, stops))} stop token ids: at most {MAX_STOPS} are possible")


def init_state(
    target: Decoder,
    drafter: Drafting | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    *,
    settings: Settings = PLAIN_SETTINGS,
    block_sizes: int | Sequence[int] | None = None,
    stops: Sequence[Sequence[int]] = (),
    sampling: SamplingState | None = None,
    capacity: int | None = None,
    empty: DecodeState | None = None,
) -> DecodeState:
    """A state for a batch of prompts.

    Args:
        target: The target.
        drafter: The drafter, or None.
        prompts: Token ids of each prompt; an empty prompt makes an idle slot.
        max_new_tokens: New tokens at most, for all or for each.
        settings: What is compiled in.
        block_sizes: Tokens that a round may yield, for all or for each, at most ``settings.block_size``. The default is
            that with a drafter, and 1 without one.
        stops: Stop token ids of each prompt.
        sampling: Sampling options; None decodes greedily. Its prompt counts are replaced.
        capacity: Positions of a slot; None takes what the longest prompt needs.
        empty: An `empty_state` to fill, for callers that make it under a jit of their own.

    Returns:
        The state. Host arrays are only transferred, so nothing is compiled for their shapes.

    Raises:
        ValueError: A prompt does not fit, or a block size is out of range.
    """
    batch, vocab_size = len(prompts), target.config.vocab_size
    num_new = [max_new_tokens] * batch if isinstance(max_new_tokens, int) else list(max_new_tokens)
    longest = max(len(p) + n for p, n in zip(prompts, num_new, strict=True))
    capacity = longest if capacity is None else capacity
    check_prompts(prompts, vocab_size, capacity, longest, stops)
    if empty is None:
        empty = empty_state(target, drafter, batch, capacity, settings)
    if block_sizes is None:
        block_sizes = 1 if drafter is None else settings.block_size
    sizes = np.array(block_sizes, np.int32)
    if (sizes < 1).any() or (sizes > settings.block_size).any():
        raise ValueError(f"block size {sizes.tolist()}: it must be 1 to {settings.block_size}, the compiled block size")
    lengths = np.array([len(p) for p in prompts], np.int32)
    tokens, counts = np.zeros((batch, capacity), np.int32), np.zeros((batch, vocab_size), np.int32)
    stop_ids = np.full((batch, MAX_STOPS), -1, np.int32)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)] = prompt
        np.add.at(counts[i], np.array(prompt, np.int32), 1)
    for i, ids in enumerate(stops):
        stop_ids[i, : len(ids)] = ids
    return replace(
        empty,
        tokens=jnp.asarray(tokens),
        length=jnp.asarray(lengths),
        # A copy: both are donated.
        prompt_length=jnp.array(lengths),
        limit=jnp.asarray(lengths + np.array(num_new, np.int32)),
        done=jnp.asarray(lengths == 0),
        block_sizes=jnp.asarray(np.broadcast_to(sizes, (batch,))),
        stops=jnp.asarray(stop_ids),
        sampling=replace(
            sampling or empty.sampling, prompt_counts=jnp.asarray(counts), vocab=target.vocab, backend=target.backend
        ),
    )


_INTS = (
    "prompt_length",
    "num_resumed",
    "limit",
    "rope_delta",
    "draft_window",
    "draft_sinks",
    "top_k",
    "seed",
    "logprobs_mode",
)
_FLAGS = ("wants_logprobs",)
_FLOATS = ("temperature", "top_p", "min_p", "repetition", "frequency", "presence")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Admission:
    """One prompt and its options, packed into few arrays for the transfer to the device.

    `pack` makes NumPy arrays; a step function reads them as JAX's.

    Attributes:
        tokens: Token ids, int32 [L], padded with 0.
        stops: Stop token ids, int32 [MAX_STOPS], padded with -1.
        bias_ids: Tokens with a logit bias, int32 [MAX_BIAS], padded with -1.
        bias_values: Their biases, float32 [MAX_BIAS].
        logprob_ids: Tokens whose log-probabilities are recorded, int32 [MAX_LOGPROBS], padded with -1.
        ints: int32: prompt_length, num_resumed (the last tokens of the prompt, which count as output), limit,
            rope_delta, draft_window, draft_sinks, top_k, the bits of seed, and logprobs_mode.
        flags: bool: wants_logprobs.
        floats: float32: temperature, top_p, min_p, repetition, frequency, presence.
    """

    tokens: Int32[Array, " L"]
    stops: Int32[Array, " stops"]
    bias_ids: Int32[Array, " biased"]
    bias_values: Float32[Array, " biased"]
    logprob_ids: Int32[Array, " named"]
    ints: Int32[Array, " ints"]
    flags: Bool[Array, " flags"]
    floats: Float32[Array, " floats"]

    @classmethod
    def pack(
        cls,
        prompt: Sequence[int],
        capacity: int,
        stops: Sequence[int],
        bias: Mapping[int, int | float],
        logprob_ids: Sequence[int],
        **numbers: int | float,
    ) -> "Admission":
        """Packs a prompt.

        Args:
            prompt: Token ids.
            capacity: L, positions of a slot.
            stops: Stop token ids.
            bias: Token id → value added to its logit.
            logprob_ids: Tokens whose log-probabilities are recorded.
            **numbers: A value for each name of ``ints`` (but prompt_length), ``flags`` and ``floats``.

        Returns:
            The admission.
        """

        def padded(values: Sequence[int | float], size: int, fill: int, dtype: Any = np.int32) -> Any:
            array = np.full(size, fill, dtype)
            array[: len(values)] = values
            return array

        seed = int(np.uint32(numbers["seed"]).view(np.int32))
        values = numbers | {"prompt_length": len(prompt), "seed": seed}

        def numbered(names: Sequence[str], dtype: Any) -> Any:
            return np.array([values[name] for name in names], dtype)

        # Devices differ in whether an operation takes a denormal for 0, so none sees one.
        floats = numbered(_FLOATS, np.float32)
        floats[np.abs(floats) < np.finfo(np.float32).tiny] = 0

        return cls(
            padded(prompt, capacity, 0),
            padded(stops, MAX_STOPS, -1),
            padded(list(bias), MAX_BIAS, -1),
            padded(list(bias.values()), MAX_BIAS, 0, np.float32),
            padded(logprob_ids, MAX_LOGPROBS, -1),
            numbered(_INTS, np.int32),
            numbered(_FLAGS, bool),
            floats,
        )


def admit(target: Decoder, state: DecodeState, slots: Int[Array, "1"], admission: Admission) -> DecodeState:
    """Puts a prompt into a slot, and clears what the slot held before.

    Args:
        target: The target.
        state: The whole state.
        slots: The slot, int [1]; past the end, the state stays as it is.
        admission: The prompt.

    Returns:
        The whole state.
    """
    ints, flags, floats = (
        {name: packed[i][None] for i, name in enumerate(names)}
        for names, packed in ((_INTS, admission.ints), (_FLAGS, admission.flags), (_FLOATS, admission.floats))
    )
    one = take_slots(target.backend, state, slots)
    vocab, size = target.vocab, state.sampling.logit_bias.shape[1]

    def local(ids: Int[Array, " n"], is_valid: Bool[Array, " n"]) -> Int[Array, " n"]:
        """Indices in this device's part of the vocabulary; past its end for padding and other devices' tokens."""
        index, is_local = vocab.local(ids, size)
        return jnp.where(is_valid & is_local, index, size)

    place, num_resumed = jnp.arange(len(admission.tokens)), ints.pop("num_resumed")
    is_known, is_prompt = place < ints["prompt_length"], place < ints["prompt_length"] - num_resumed

    def counts(is_counted: Bool[Array, " L"]) -> Int[Array, "1 V"]:
        return jnp.zeros((size,), jnp.int32).at[local(admission.tokens, is_counted)].add(1, mode="drop")[None]

    biased = local(admission.bias_ids, admission.bias_ids >= 0)
    bias = jnp.zeros((size,)).at[biased].set(admission.bias_values, mode="drop")
    seed = jax.lax.bitcast_convert_type(ints.pop("seed"), jnp.uint32)
    sampling = replace(
        one.sampling,
        **floats,
        **flags,
        seed=seed,
        logprob_ids=admission.logprob_ids[None],
        top_k=ints.pop("top_k"),
        logprobs_mode=ints.pop("logprobs_mode"),
    ).with_tables(bias[None], counts(is_prompt), counts(is_known & ~is_prompt))
    zero = jnp.zeros_like(one.num_cached)
    target_caches = tuple(c if isinstance(c, KVCache) else c.cleared() for c in one.target)
    fresh = replace(
        one,
        **ints,
        tokens=admission.tokens[None],
        length=ints["prompt_length"],
        num_cached=zero,
        draft_start=jnp.zeros_like(one.draft_start),
        done=jnp.zeros_like(one.done),
        stops=admission.stops[None],
        target=target_caches,
        sampling=sampling,
        rounds=zero,
        yielded=jnp.zeros_like(one.yielded),
        verified=jnp.zeros_like(one.verified),
    )
    return put_slots(state, fresh)

"""Prompts as the arrays of a decode state: all at once, or one into a row of a state that is under way."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.decoding.sampling import SamplingRows
from dflash_jax.decoding.state import PLAIN_SETTINGS, DecodeState, Settings, empty_state, put_rows, take_rows
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.drafter import Drafting
from dflash_jax.ops.cache import KVCache
from dflash_jax.sampling_params import MAX_BIAS, MAX_LOGPROBS, MAX_STOPS


def check_prompts(prompts, vocab: int, capacity: int, need: int, stops) -> None:
    """Raises ValueError for what the arrays could not hold."""
    if capacity < need:
        raise ValueError(f"capacity {capacity}: the longest prompt and its new tokens are {need}")
    outside = [i for p in prompts for i in p if not 0 <= i < vocab]
    if outside:
        raise ValueError(f"prompt id {outside[0]} is out of vocabulary: ids are 0 to {vocab - 1}")
    if any(len(ids) > MAX_STOPS for ids in stops):
        raise ValueError(f"{max(map(len, stops))} stop token ids: at most {MAX_STOPS} are possible")


def init_state(
    target: Decoder,
    drafter: Drafting | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    *,
    settings: Settings = PLAIN_SETTINGS,
    width: int | Sequence[int] | None = None,
    stops: Sequence[Sequence[int]] = (),
    sampling: SamplingRows | None = None,
    capacity: int | None = None,
    empty: DecodeState | None = None,
) -> DecodeState:
    """A fresh state for ``prompts`` (token ids; an empty one makes an idle row). Decodes greedily unless ``sampling``
    says more. ``empty``: an `empty_state` to fill, where that is made under a jit of the caller's own."""
    rows, vocab = len(prompts), target.config.vocab_size
    new = [max_new_tokens] * rows if isinstance(max_new_tokens, int) else list(max_new_tokens)
    need = max(len(p) + n for p, n in zip(prompts, new, strict=True))
    capacity = need if capacity is None else capacity
    check_prompts(prompts, vocab, capacity, need, stops)
    if empty is None:
        empty = empty_state(target, drafter, rows, capacity, settings)
    widths = np.array(width if width is not None else 1 if drafter is None else settings.window, np.int32)
    if (widths < 1).any() or (widths > settings.window).any():
        raise ValueError(f"width {widths.tolist()}: it must be 1 to {settings.window}, the window")
    # Host arrays: nothing is compiled for them.
    lengths = np.array([len(p) for p in prompts], np.int32)
    tokens, counts = np.zeros((rows, capacity), np.int32), np.zeros((rows, vocab), np.int32)
    stop_ids = np.full((rows, MAX_STOPS), -1, np.int32)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)] = prompt
        np.add.at(counts[i], np.array(prompt, np.int32), 1)
    for i, ids in enumerate(stops):
        stop_ids[i, : len(ids)] = ids
    return replace(
        empty,
        tokens=jnp.asarray(tokens),
        length=jnp.asarray(lengths),
        prompt_length=jnp.array(lengths),
        limit=jnp.asarray(lengths + np.array(new, np.int32)),
        done=jnp.asarray(lengths == 0),
        width=jnp.asarray(np.broadcast_to(widths, (rows,))),
        stops=jnp.asarray(stop_ids),
        sampling=replace(
            sampling or empty.sampling, prompt_counts=jnp.asarray(counts), vocab=target.vocab, backend=target.backend
        ),
    )


_INTS = ("prompt_length", "limit", "draft_window", "draft_sinks", "top_k", "seed")
_FLAGS = ("wants_logprobs", "processed_logprobs")
_FLOATS = ("temperature", "top_p", "min_p", "repetition", "frequency", "presence")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Admission:
    """One prompt on its way into a row, packed into few arrays: tokens [L], stops [MAX_STOPS], bias_ids and
    bias_values [MAX_BIAS], logprob_ids [MAX_LOGPROBS], and the numbers of `_INTS`, `_FLAGS` and `_FLOATS`."""

    tokens: np.ndarray
    stops: np.ndarray
    bias_ids: np.ndarray
    bias_values: np.ndarray
    logprob_ids: np.ndarray
    ints: np.ndarray
    flags: np.ndarray
    floats: np.ndarray

    @classmethod
    def pack(
        cls,
        prompt: Sequence[int],
        capacity: int,
        stops: Sequence[int],
        bias: dict[int, float],
        logprob_ids: Sequence[int],
        **numbers,
    ) -> "Admission":
        """``numbers``: one for each of the names above but prompt_length. What is past the end of ids is -1."""

        def padded(values, size, fill, dtype=np.int32):
            array = np.full(size, fill, dtype)
            array[: len(values)] = values
            return array

        numbers = numbers | {"prompt_length": len(prompt), "seed": np.uint32(numbers["seed"]).view(np.int32)}
        return cls(
            padded(prompt, capacity, 0),
            padded(stops, MAX_STOPS, -1),
            padded(list(bias), MAX_BIAS, -1),
            padded(list(bias.values()), MAX_BIAS, 0, np.float32),
            padded(logprob_ids, MAX_LOGPROBS, -1),
            np.array([numbers[n] for n in _INTS], np.int32),
            np.array([numbers[n] for n in _FLAGS], bool),
            np.array([numbers[n] for n in _FLOATS], np.float32),
        )


def admit(target: Decoder, state: DecodeState, rows, admission: Admission) -> DecodeState:
    """``state`` with a fresh prompt in the row ``rows`` [1] (past the end: in none), and no trace of who was there."""
    ints, flags, floats = (
        {name: packed[i][None] for i, name in enumerate(names)}
        for names, packed in (
            (_INTS, admission.ints),
            (_FLAGS, admission.flags),
            (_FLOATS, admission.floats),
        )
    )
    one = take_rows(target.backend, state, rows)
    vocab, size = target.vocab, state.sampling.logit_bias.shape[1]

    def at(ids, keep):
        """Places in this device's part of the vocabulary; past its end where there is nothing to write."""
        own, mine = vocab.own(ids, size)
        return jnp.where(keep & mine, own, size)

    known = jnp.arange(len(admission.tokens)) < ints["prompt_length"]
    counts = jnp.zeros((size,), jnp.int32).at[at(admission.tokens, known)].add(1, mode="drop")
    biased = at(admission.bias_ids, admission.bias_ids >= 0)
    bias = jnp.zeros((size,)).at[biased].set(admission.bias_values, mode="drop")
    seed = jax.lax.bitcast_convert_type(ints.pop("seed"), jnp.uint32)
    sampling = replace(
        one.sampling,
        **floats,
        **flags,
        seed=seed,
        logprob_ids=admission.logprob_ids[None],
        top_k=ints.pop("top_k"),
    ).with_tables(bias[None], counts[None], jnp.zeros_like(counts)[None])
    zero = jnp.zeros_like(one.base)
    target_caches = tuple(c if isinstance(c, KVCache) else c.cleared() for c in one.target)
    fresh = replace(
        one,
        **ints,
        tokens=admission.tokens[None],
        length=ints["prompt_length"],
        base=zero,
        rope_delta=zero,
        draft_start=zero,
        done=jnp.zeros_like(one.done),
        stops=admission.stops[None],
        target=target_caches,
        sampling=sampling,
        rounds=zero,
        accepted=jnp.zeros_like(one.accepted),
    )
    return put_rows(state, fresh)

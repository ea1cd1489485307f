"""Prompts as the arrays of a decode state: the host's part of a start."""

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from dflash_jax.config import MAX_STOPS
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.drafter import Drafting
from dflash_jax.sampling import SamplingRows
from dflash_jax.speculative import PLAIN_SETTINGS, DecodeState, Settings, empty_state


def check_prompts(prompts, vocab: int, capacity: int, need: int, stops) -> None:
    """Raises ValueError for what the arrays could not hold."""
    if capacity < need:
        raise ValueError(f"capacity {capacity}: the longest prompt and its new tokens are {need}")
    outside = [i for p in prompts for i in p if not 0 <= i < vocab]
    if outside:
        raise ValueError(f"prompt id {outside[0]} is outside the vocabulary: ids are 0 to {vocab - 1}")
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
        sampling=replace(sampling or empty.sampling, prompt_counts=jnp.asarray(counts), vocab=target.vocab),
    )

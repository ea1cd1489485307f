"""Tiny targets and drafters for the speculative loop, and the loop itself, compiled once for all test files."""

from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
from helpers import random_decoder, random_drafter, tiny_config, tiny_draft_config

from dflash_jax.decoding import speculative
from dflash_jax.decoding.batch_init import init_state
from dflash_jax.decoding.sampling import SamplingRows
from dflash_jax.decoding.state import DecodeState, Settings
from dflash_jax.models.config import LayerSpec, MlpSpec
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.drafter import Drafter, Proposal

VOCAB = 61


def target(
    pattern: str = "ddda", vocab: int = VOCAB, hidden: int = 36, moe: str | None = None, seed: int = 0
) -> Decoder:
    """A random hybrid; ``moe``: the numbers of the layers with experts, e.g. "13" (all by default)."""
    config = tiny_config(pattern, vocab_size=vocab, hidden_size=hidden)
    if moe is not None:
        layers = (spec if str(i) in moe else LayerSpec(spec.mixer, MlpSpec(29)) for i, spec in enumerate(config.layers))
        config = replace(config, layers=tuple(layers))
    return random_decoder(config, seed)


def drafter(target: Decoder, window: int = 10, seed: int = 1) -> Drafter:
    """A random (so: bad) drafter of one sliding causal and one full layer."""
    return random_drafter(tiny_draft_config(target.config, windows=(window, None)), seed)


def cast(module, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), module)


@partial(jax.tree_util.register_dataclass, data_fields=["drafter", "tokens", "runs"], meta_fields=["vocab"])
@dataclass(frozen=True)
class Coached:
    """A drafter that is told the continuation, and how often to be right.

    tokens [B, L]: whole texts; runs [B, L]: how many drafts are right behind a last known token at that position (the
    next one is wrong, later ones are right again); negative: the proposal is ``drafter``'s. Implements `Drafting`.
    """

    drafter: Drafter
    tokens: jax.Array
    runs: jax.Array
    vocab: int

    @property
    def taps(self):
        return self.drafter.taps

    def init_cache(self, *args):
        return self.drafter.init_cache(*args)

    def cache_specs(self, cache):
        return self.drafter.cache_specs(cache)

    def extend(self, *args):
        return self.drafter.extend(*args)

    def propose(self, cache, last, start, width, slots, borrowed, window):
        own = self.drafter.propose(cache, last, start, width, slots, borrowed, window).tokens
        order = jnp.arange(slots - 1)[None]
        places = jnp.minimum(start[:, None] + 1 + order, self.tokens.shape[1] - 1)
        right = jnp.take_along_axis(self.tokens, places, axis=1)
        run = jnp.take_along_axis(self.runs, start[:, None], axis=1)
        return Proposal(jnp.where(run < 0, own, jnp.where(order == run, (right + 1) % self.vocab, right)))


def coach(drafter: Drafter, tokens, runs=-1) -> Coached:
    """``runs`` broadcasts to [B, L]."""
    tokens = jnp.asarray(tokens, jnp.int32)
    runs = jnp.asarray(np.broadcast_to(np.array(runs, np.int32), tokens.shape))
    return Coached(drafter, tokens, runs, drafter.config.vocab_size)


def yields(coach: Coached, state: DecodeState, row: int) -> list[int]:
    """What each round of a finished run of unaligned windows must have yielded."""
    runs, width = np.asarray(coach.runs[row]), int(state.width[row])
    at, end, found = int(state.prompt_length[row]), int(state.length[row]), []
    while at < end:
        found.append(min(int(runs[at - 1]) + 1, width, end - at))
        at += found[-1]
    return found


def sampling(rows: int, vocab: int = VOCAB, **options) -> SamplingRows:
    """Greedy but for ``options``, one value a row."""
    base = SamplingRows.greedy(rows, vocab)
    return replace(base, **{k: jnp.asarray(np.asarray(v), getattr(base, k).dtype) for k, v in options.items()})


class Loop:
    """The loop's functions under jit. ``fast``: compiled without optimisation, in half the time; else by the code
    generator that users have, where bits count."""

    def __init__(self, fast: bool):
        # jax 0.11 has no other.
        emitters = {"xla_cpu_use_fusion_emitters": True} if version("jax") < "0.11" else {}
        options = {"xla_backend_optimization_level": 0} if fast else emitters
        jit = partial(jax.jit, compiler_options=options)
        self.prefill_chunk = jit(speculative.prefill_chunk, static_argnames="size")
        self.decode = jit(speculative.decode, static_argnames="settings")
        self.decode_round = jit(speculative.decode_round, static_argnames="settings")

    def prefill(self, target, drafter, state: DecodeState, size: int = 8) -> DecodeState:
        while (state.base < state.prompt_length - 1).any():
            state = self.prefill_chunk(target, drafter, state, size=size)
        return state

    def generate(self, target, drafter, prompts, new, settings: Settings, chunk: int = 8, **options) -> DecodeState:
        state = init_state(target, drafter, prompts, new, settings=settings, **options)
        state = self.prefill(target, drafter, state, chunk)
        # To the host, where slicing compiles nothing.
        return jax.device_get(self.decode(target, drafter, state, 10_000, None, settings=settings))


fast = Loop(fast=True)
exact = Loop(fast=False)

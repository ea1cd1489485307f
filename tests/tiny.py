"""Tiny targets and drafters for the speculative loop, and the loop itself, compiled once for all test files."""

from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.decoding import speculative
from dflash_jax.decoding.batch_init import init_state
from dflash_jax.decoding.prefill import prefill_chunk
from dflash_jax.decoding.sampling_state import SamplingState
from dflash_jax.decoding.state import DecodeState, Settings
from dflash_jax.models.config import LayerSpec, MlpSpec
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.drafting import DrafterWrapper, Proposal
from dflash_jax.models.mtp import Mtp
from tests.helpers import random_decoder, random_drafter, random_head, tiny_config, tiny_draft_config

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


def head(target: Decoder, seed: int = 1) -> Mtp:
    """A random (so: bad) MTP head."""
    return random_head(target.config, seed)


def cast(module, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), module)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Coached(DrafterWrapper):
    """Drafts a given continuation with a given number of correct tokens a round.

    Attributes:
        tokens: Whole texts, int32 [B, L].
        runs: Correct drafts behind a last known token at each position, int32 [B, L]. The next draft is wrong and
            later ones are correct again; a negative number takes the proposal of the inner drafter.
        vocab: Tokens of the vocabulary.
    """

    tokens: jax.Array
    runs: jax.Array
    vocab: int = field(metadata={"static": True})

    def propose(self, cache, last, start, block_sizes, size, heads, window):
        drafted = super().propose(cache, last, start, block_sizes, size, heads, window).tokens
        order = jnp.arange(size - 1)[None]
        places = jnp.minimum(start[:, None] + 1 + order, self.tokens.shape[1] - 1)
        right = jnp.take_along_axis(self.tokens, places, axis=1)
        run = jnp.take_along_axis(self.runs, start[:, None], axis=1)
        return Proposal(jnp.where(run < 0, drafted, jnp.where(order == run, (right + 1) % self.vocab, right)))


def coach(drafter: Drafter | Mtp, tokens, runs=-1) -> Coached:
    """``runs`` broadcasts to [B, L]."""
    tokens = jnp.asarray(tokens, jnp.int32)
    runs = jnp.asarray(np.broadcast_to(np.array(runs, np.int32), tokens.shape))
    return Coached(drafter, tokens, runs, drafter.config.vocab_size)


def yields(coach: Coached, state: DecodeState, row: int) -> list[int]:
    """What each round of a finished run of unaligned blocks must have yielded."""
    runs, width = np.asarray(coach.runs[row]), int(state.block_sizes[row])
    at, end, found = int(state.prompt_length[row]), int(state.length[row]), []
    while at < end:
        found.append(min(int(runs[at - 1]) + 1, width, end - at))
        at += found[-1]
    return found


def sampling(rows: int, vocab: int = VOCAB, **options) -> SamplingState:
    """Greedy but for ``options``, one value a row."""
    base = SamplingState.greedy(rows, vocab)
    return replace(base, **{k: jnp.asarray(np.asarray(v), getattr(base, k).dtype) for k, v in options.items()})


class Loop:
    """The loop's functions under jit.

    Args:
        options: XLA's options by name.
    """

    def __init__(self, **options):
        jit = partial(jax.jit, compiler_options=options)
        self.prefill_chunk = jit(prefill_chunk, static_argnames="size")
        self.decode = jit(speculative.decode, static_argnames="settings")
        self.decode_round = jit(speculative.decode_round, static_argnames="settings")

    def prefill(self, target, drafter, state: DecodeState, size: int = 8) -> DecodeState:
        while (state.num_cached < state.prompt_length - 1).any():
            state = self.prefill_chunk(target, drafter, state, size=size)
        return state

    def generate(self, target, drafter, prompts, new, settings: Settings, chunk: int = 8, **options) -> DecodeState:
        state = init_state(target, drafter, prompts, new, settings=settings, **options)
        state = self.prefill(target, drafter, state, chunk)
        # To the host, where slicing compiles nothing.
        return jax.device_get(self.decode(target, drafter, state, 10_000, None, settings=settings))


# Compiled in half the time; `optimised` is for what runs long.
fast = Loop(xla_backend_optimization_level=0)
optimised = Loop(xla_backend_optimization_level=1)
# By the code generator that users have, where bits count; jax 0.11 has no other.
exact = Loop(**({"xla_cpu_use_fusion_emitters": True} if version("jax") < "0.11" else {}))

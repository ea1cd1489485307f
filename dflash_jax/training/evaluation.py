"""How good a drafter is: the acceptance length of real decoding on prompts it has not seen."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.engine.executables import Executables
from dflash_jax.errors import InputError
from dflash_jax.frontend.llm import LLM
from dflash_jax.frontend.outputs import Completion
from dflash_jax.models.drafter import Drafter
from dflash_jax.sampling_params import SamplingParams
from dflash_jax.training.data import messages_of


def is_degenerate(token_ids: Sequence[int], order: int = 4, least: float = 0.5) -> bool:
    """Repetition: fewer than ``least`` of the n-grams are distinct. Such text is easy to draft and says nothing."""
    grams = [tuple(token_ids[i : i + order]) for i in range(len(token_ids) - order + 1)]
    return bool(grams) and len(set(grams)) < least * len(grams)


@dataclass(frozen=True)
class Acceptance:
    """Mean acceptance length over all rounds of ``kept`` completions; how many repeat themselves (``degenerate``)."""

    mean: float
    rounds: int
    kept: int
    degenerate: int


def acceptance(completions: Sequence[Completion], keep_all: bool = False) -> Acceptance:
    """``keep_all``: text that repeats itself counts, as it does in the published tables."""
    good = [c for c in completions if not is_degenerate(c.token_ids)]
    kept = completions if keep_all else good
    lengths = [n for c in kept for n in c.acceptance_lengths]
    return Acceptance(
        float(np.mean(lengths)) if lengths else 0.0, len(lengths), len(kept), len(completions) - len(good)
    )


def prompt_of(record: dict, where: str, llm: LLM) -> list[int]:
    """What a line of held-out data asks, as token ids: prompt_ids, prompt or text, or a conversation up to its first
    answer."""
    if isinstance(record.get("prompt_ids"), list):
        return llm.encode(record["prompt_ids"])
    if isinstance(text := record.get("prompt", record.get("text")), str):
        return llm.encode(text)
    if "messages" not in record:
        raise InputError(f"{where}: a line must have messages, prompt, text or prompt_ids")
    messages = messages_of(record, where)
    first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    return llm.encode_chat(messages[:first])


def held_out_prompts(streams: Sequence[Sequence[int]], length: int, most: int, seed: int = 0) -> list[list[int]]:
    """Up to ``most`` cuts of ``length`` token ids from documents, at random places."""
    rng = np.random.default_rng(seed)
    cuts = [(s, i) for s, ids in enumerate(streams) for i in range(0, len(ids) - 2 * length, 4 * length)]
    chosen = [cuts[i] for i in rng.permutation(len(cuts))[:most]]
    return [list(streams[s][i : i + length]) for s, i in chosen]


def measure(
    llm: LLM, prompts: Sequence[list[int]], params: SamplingParams, block_size: int | str | None = None
) -> Acceptance:
    """Decodes every prompt and averages; statistics of the drafter only, whatever the text is worth."""
    return acceptance(llm.generate(prompts, params, block_size))


@partial(jax.tree_util.register_dataclass, data_fields=["drafter"], meta_fields=[])
@dataclass(frozen=True)
class GreedyDrafts:
    """A drafter that proposes its likeliest tokens at any temperature: what drafting with shared noise is measured
    against. Implements `Drafting`."""

    drafter: Drafter

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
        def largest(logits, positions, ids=None):
            places = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            return places if ids is None else ids[places]

        return self.drafter.propose(cache, last, start, width, slots, replace(borrowed, choose=largest), window)


def with_greedy_drafts(llm: LLM) -> LLM:
    """The same pair, drafting greedily."""
    return llm.with_programs(Executables(llm.target, GreedyDrafts(llm.drafter)))

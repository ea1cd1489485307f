"""A drafter of one's own: it repeats what followed the last token earlier in the text (prompt lookup).

A drafter is anything with the methods of `dflash_jax.models.drafting.Drafting`. Whatever it drafts, the text is the
target's own: a bad drafter costs time only. Run: python examples/custom_drafter.py
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

import dflash_jax as d
from dflash_jax.models.drafting import Proposal

PROMPT = "def area(width, height):\n    return width * height\n\ndef area("
NEW_TOKENS, BLOCK = 48, 8


@jax.tree_util.register_static
@dataclass(frozen=True)
class PromptLookup:
    """Drafts the tokens after the latest earlier occurrence of the last token. Its cache is the text so far."""

    taps: tuple[int, ...] = ()  # It reads no layer of the target.

    def init_cache(self, slots, capacity, dtype, window):
        return (jnp.zeros((slots, capacity), jnp.int32),)

    def cache_specs(self, cache):
        """Slots are divided over the data axis of a mesh."""
        return (jax.sharding.PartitionSpec("data"),)

    def extend(self, cache, new):
        """Adds verified tokens [B, T] at their positions [B, T] where they are valid [B, T]."""
        (known,) = cache
        places = jnp.where(new.valid, new.positions, known.shape[1])  # Out of range: dropped.
        return (known.at[jnp.arange(len(known))[:, None], places].set(new.tokens, mode="drop"),)

    def propose(self, cache, last, start, block_sizes, size, heads, window):
        """Drafts [B, size - 1] after ``last`` [B], the token at position start [B]."""
        (known,) = cache
        places = jnp.arange(known.shape[1])[None]
        matches = (known == last[:, None]) & (places < start[:, None])
        found = jnp.where(matches, places, -1).max(1)
        # Where the token is new, found is -1 and the drafts are the text's beginning: wrong, and so not accepted.
        wanted = found[:, None] + 1 + jnp.arange(size - 1)[None]
        return Proposal(jnp.take_along_axis(known, jnp.minimum(wanted, known.shape[1] - 1), axis=1))


def main() -> None:
    llm = d.LLM(draft=PromptLookup(), max_block_size=BLOCK)
    params = d.SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    (plain,) = llm.generate([PROMPT], params, block_size=1)
    (drafted,) = llm.generate([PROMPT], params, block_size=BLOCK)
    assert drafted.token_ids == plain.token_ids
    print(f"{PROMPT}{drafted.text}")
    print(f"--- {len(drafted.token_ids)} tokens in rounds of {drafted.mean_acceptance_length:.2f}")


if __name__ == "__main__":
    main()

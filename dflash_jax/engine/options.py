"""How an engine is set up, and what it counts."""

from collections import Counter
from dataclasses import dataclass, field

PREFILL_SIZES = (16, 64, 256, 1024)
# On a GPU a chunk of 1,024 tokens takes hardly longer than one of 16, for either reads every expert: chunks are larger
# there, where a kernel keeps attention's scores out of memory. A TPU computes every expert for every token.
LARGEST_PREFILL = 4096
# What part of a chunk may be padding. A CPU takes as long for a token of nobody as for another; an accelerator reads
# weights all the while, and is done sooner with one chunk that is half empty than with two.
PADDING = {"cpu": 0.25}
# Short prompts are read together, at most so many, and so many tokens in all (those of nobody among them).
PREFILL_ROWS, TOGETHER = 8, {"gpu": 2048, "tpu": 256}
# Temporaries of a prefill program, bytes for each feature of a token (compiled for B200 and H100: 87 of
# Qwen3.6-35B-A3B, 58 of Qwen3.5-27B; 236 of Qwen3.5-397B-A17B over eight, which what is left unused has room for).
PREFILL_BYTES = 120


def largest_prefill(kernels: bool) -> int:
    """Tokens of the largest chunk, by whether programs have Triton kernels."""
    return LARGEST_PREFILL if kernels else PREFILL_SIZES[-1]


def prefill_options(
    platform: str, kernels: bool, alone: bool = False, max_num_batched_tokens: int | None = None
) -> dict:
    """Fields of `Options` that suit a platform, "cpu", "gpu" or "tpu", and whether it has Triton ``kernels``;
    ``alone``: a prompt's arithmetic must not depend on others."""
    most = max_num_batched_tokens or max(2048, largest_prefill(kernels))
    sizes = sorted({*PREFILL_SIZES, largest_prefill(kernels)})
    return {
        "prefill_sizes": tuple(s for s in sizes if s <= max(most, sizes[0])),
        "prefill_padding": PADDING.get(platform, 0.5),
        "prefill_together": 0 if alone else min(TOGETHER.get(platform, 0), most),
        "max_num_batched_tokens": most,
    }


@dataclass(frozen=True)
class Options:
    """widths: compiled ones, ascending, from 1 (the drafter's own block at most); prefill_sizes: tokens of a
    prompt that a program takes, ascending; prefill_padding: less than this part of one is padding;
    prefill_together: tokens of one that takes several prompts of a data shard, at most; max_num_batched_tokens: of
    prefill and one round, in a step; max_queue: requests that may wait; rows_per_dispatch: decoded together (1
    makes a row's arithmetic independent of the others); prefix_bytes: for prefixes, 0 for none; markers: token ids
    that open a message; adaptive: whether "auto" chooses, or takes the widest; masks: whether requests may bring
    some, so that warm-up compiles what these need."""

    widths: tuple[int, ...] = (1,)
    prefill_sizes: tuple[int, ...] = PREFILL_SIZES
    prefill_padding: float = 0.5
    prefill_together: int = 0
    max_num_batched_tokens: int = 2048
    max_queue: int | None = None
    rows_per_dispatch: int | None = None
    prefix_bytes: int = 0
    markers: frozenset[int] = frozenset()
    adaptive: bool = True
    masks: bool = False

    def rows_of(self, size: int) -> int:
        """Prompts of a data shard that a program of ``size`` tokens takes at most."""
        return max(1, min(PREFILL_ROWS, self.prefill_together // size))


@dataclass
class Statistics:
    """Totals since the start. dispatches: by (compiled rows, width); accepted: rounds by the tokens they yielded;
    drafts, draft_tokens: rounds that had drafts, and these; host_s: seconds of a step without waiting for the device;
    wait_s: waiting."""

    requests: Counter = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    rounds: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted: Counter = field(default_factory=Counter)
    dispatches: Counter = field(default_factory=Counter)
    host_s: float = 0.0
    wait_s: float = 0.0

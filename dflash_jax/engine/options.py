"""How an engine is set up, and what it counts."""

from collections import Counter
from dataclasses import dataclass, field

PREFILL_SIZES = (16, 64, 256, 1024)
# Off the CPU a chunk of 1,024 tokens takes hardly longer than one of 16, for either reads every expert: chunks are
# larger there, and short prompts are read together.
LARGEST_PREFILL, PREFILL_ROWS = 4096, 8
# Temporaries of a prefill program, bytes for each feature of a token (compiled for B200 and H100: 118 of
# Qwen3.6-35B-A3B, 69 of Qwen3.5-27B).
PREFILL_BYTES = 120


def prefill_options(on_cpu: bool, alone: bool, max_num_batched_tokens: int | None = None) -> dict:
    """Fields of `Options` that suit a platform; ``alone``: a prompt's arithmetic must not depend on others."""
    sizes = PREFILL_SIZES if on_cpu else (*PREFILL_SIZES, LARGEST_PREFILL)
    most = max_num_batched_tokens or (2048 if on_cpu else LARGEST_PREFILL)
    return {
        "prefill_sizes": tuple(s for s in sizes if s <= max(most, sizes[0])),
        "prefill_rows": 1 if on_cpu or alone else PREFILL_ROWS,
        "max_num_batched_tokens": most,
    }


@dataclass(frozen=True)
class Options:
    """widths: compiled ones, ascending, from 1 (the drafter's own block at most); prefill_sizes: tokens of a prompt
    that a program takes, ascending; prefill_rows: prompts of a data shard that one takes, at most, where they are
    short; max_num_batched_tokens: of prefill and one round, in a step; max_queue: requests that may wait;
    rows_per_dispatch: decoded together (1 makes a row's arithmetic independent of the others); prefix_bytes: for
    prefixes, 0 for none; markers: token ids that open a message; adaptive: whether "auto" chooses, or takes the widest;
    masks: whether requests may bring some, so that warm-up compiles what these need."""

    widths: tuple[int, ...] = (1,)
    prefill_sizes: tuple[int, ...] = PREFILL_SIZES
    prefill_rows: int = 1
    max_num_batched_tokens: int = 2048
    max_queue: int | None = None
    rows_per_dispatch: int | None = None
    prefix_bytes: int = 0
    markers: frozenset[int] = frozenset()
    adaptive: bool = True
    masks: bool = False

    def rows_of(self, size: int) -> int:
        """Prompts of a data shard that a program of ``size`` tokens takes at most: never more tokens than the largest
        program takes of one."""
        return max(1, min(self.prefill_rows, self.prefill_sizes[-1] // size))


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

"""How an engine is set up, and what it counts."""

from collections import Counter
from dataclasses import dataclass, field

PREFILL_SIZES = (16, 64, 256, 1024)


@dataclass(frozen=True)
class Options:
    """widths: compiled ones, ascending, from 1 (the drafter's own block at most); max_num_batched_tokens: of prefill
    and one round, in a step; max_queue: requests that may wait; rows_per_dispatch: decoded together (1 makes a row's
    arithmetic independent of the others); prefix_bytes: for prefixes, 0 for none; markers: token ids that open a
    message; adaptive: whether "auto" chooses, or takes the widest; masks: whether requests may bring some, so that
    warm-up compiles what these need."""

    widths: tuple[int, ...] = (1,)
    prefill_sizes: tuple[int, ...] = PREFILL_SIZES
    max_num_batched_tokens: int = 2048
    max_queue: int | None = None
    rows_per_dispatch: int | None = None
    prefix_bytes: int = 0
    markers: frozenset[int] = frozenset()
    adaptive: bool = True
    masks: bool = False


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

"""Where a prompt is cut into chunks, and what is remembered of prefixes.

Both follow from the tokens before a place alone, so that a prompt that finds its beginning in the store goes on with
the very chunks that a full prefill would have run, and, where prompts are read one by one, computes the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

# Without message boundaries, a prefix is kept every so many tokens.
GRID = 4096
# A message shorter than this is not worth a snapshot of its own.
LEAST = 16


def cut_points(tokens: Sequence[int], last: int, markers: frozenset[int]) -> list[int]:
    """Places in 1 … last at which a prefix is kept: before a token of ``markers`` (which open a message), on the grid,
    and at the end."""
    cuts, before = [], 0
    for place in range(1, last):
        if place % GRID == 0 or (tokens[place] in markers and place - before >= LEAST):
            cuts.append(place)
            before = place
    return [*cuts, last] if last else []


def chunks(start: int, end: int, sizes: Sequence[int], padding: float = 0.5) -> list[tuple[int, int, int]]:
    """(start, tokens, size of the program) of each chunk between two cuts; ``sizes`` ascend. Less than ``padding`` of a
    program is tokens of nobody, but for the smallest."""
    found = []
    while start < end:
        left = end - start
        size = next((s for s in reversed(sizes) if left > s * (1 - padding)), sizes[0])
        found.append((start, min(left, size), size))
        start += min(left, size)
    return found


def keys(tokens: Sequence[int], cuts: Sequence[int], salt: str = "") -> list[bytes]:
    """What each prefix is known by. Prefixes of different ``salt`` share nothing."""
    digest, at, found = blake2b(digest_size=16, key=_salted(salt)), 0, []
    for cut in cuts:
        digest.update(np.asarray(tokens[at:cut], np.int32).tobytes())
        found.append(digest.digest())
        at = cut
    return found


def _salted(salt: str) -> bytes:
    """A key for the digest; none without a salt. JSON may have written halves of characters."""
    return blake2b(salt.encode("utf-8", "surrogatepass")).digest() if salt else b""


@dataclass(eq=False)
class Prefix:
    """A prefix up to a cut: its own segments (start and device arrays) behind those of ``parent``, and the snapshot at
    its end."""

    key: bytes
    length: int
    parent: "Prefix | None"
    segments: list[tuple[int, Any]]
    snapshot: Any
    size: int
    children: int = 0
    used: int = field(default=0)

    def chain(self) -> list["Prefix"]:
        """From the first one to this."""
        return [*(self.parent.chain() if self.parent else []), self]


class PrefixCache:
    """Prefixes by key, at most ``budget`` bytes of them; the least recently used goes first, children before
    parents."""

    def __init__(self, budget: int):
        self.budget, self.size = budget, 0
        self.queries = self.hits = 0
        self._held: dict[bytes, Prefix] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._held)

    def find(self, key: bytes) -> Prefix | None:
        """The prefix, which with all before it counts as used now."""
        found = self._held.get(key)
        self._clock += 1
        at = found
        while at is not None:
            at.used, at = self._clock, at.parent
        return found

    def add(self, key: bytes, length: int, parent: Prefix | None, segments: list, snapshot, size: int) -> Prefix | None:
        """Keeps a prefix; None where it cannot: it is larger than the budget, or what it builds on is gone."""
        if size > self.budget or (parent is not None and self._held.get(parent.key) is not parent):
            return None
        if (known := self.find(key)) is not None:
            return known
        kept = Prefix(key, length, parent, segments, snapshot, size)
        if parent is not None:
            parent.children += 1
            self.find(parent.key)
        self._held[key] = kept
        self.find(key)
        self.size += size
        while self.size > self.budget:
            leaves = [p for p in self._held.values() if not p.children and p is not kept]
            if not leaves:
                self._drop(kept)
                return None
            self._drop(min(leaves, key=lambda p: p.used))
        return kept

    def _drop(self, prefix: Prefix) -> None:
        del self._held[prefix.key]
        self.size -= prefix.size
        if prefix.parent is not None:
            prefix.parent.children -= 1

    def clear(self) -> None:
        self._held.clear()
        self.size = 0

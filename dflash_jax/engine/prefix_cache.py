"""Where a prompt is cut into chunks, and the cache of prefixes.

Cuts and chunks depend only on the tokens before them: a prompt that continues from a cached prefix runs the same chunks
that a full prefill would run, and computes the same bits where prompts are prefilled one by one.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from dflash_jax.engine.media import PromptMedia

# Tokens between two cached prefixes where there are no message boundaries.
GRID = 4096
# Messages of fewer tokens do not get a snapshot of their own.
MIN_MESSAGE = 16


def cut_points(
    tokens: Sequence[int], last: int, markers: frozenset[int], media: PromptMedia | None = None
) -> list[int]:
    """Positions in 1 … last at which a prefix is cached, ascending.

    Those are the positions of ``markers`` (token ids that open a message), of the grid, and the last one; none divides
    an image or a frame.
    """
    cuts, before = [], 0
    inside = np.zeros(last, bool)
    for span in media.spans if media else ():
        inside[span.start + 1 : span.end] = True
    for place in range(1, last):
        if inside[place]:
            continue
        if place % GRID == 0 or (tokens[place] in markers and place - before >= MIN_MESSAGE):
            cuts.append(place)
            before = place
    return [*cuts, last] if last else []


def chunks(start: int, end: int, sizes: Sequence[int], padding: float = 0.5) -> list[tuple[int, int, int]]:
    """Divides the tokens between two cuts into chunks.

    Args:
        start: The first position.
        end: The position behind the last.
        sizes: Sizes of the prefill programs, ascending.
        padding: Less than this share of a program is padding, except in the smallest.

    Returns:
        (start, tokens, size of the program) of each chunk.
    """
    result = []
    while start < end:
        left = end - start
        size = next((s for s in reversed(sizes) if left > s * (1 - padding)), sizes[0])
        result.append((start, min(left, size), size))
        start += min(left, size)
    return result


def keys(tokens: Sequence[int], cuts: Sequence[int], salt: str = "", media: PromptMedia | None = None) -> list[bytes]:
    """The cache key of the prefix up to each cut.

    Prefixes of different ``salt`` have different keys, and so have those with other pixels under equal tokens.
    """
    digest, start, result = blake2b(digest_size=16, key=_digest_key(salt)), 0, []
    spans = deque(media.spans if media else ())
    for cut in cuts:
        digest.update(np.asarray(tokens[start:cut], np.int32).tobytes())
        while spans and spans[0].start < cut:
            span = spans.popleft()
            digest.update(b"%d %d %s" % (span.start, len(span.key), span.key))
        result.append(digest.digest())
        start = cut
    return result


def _digest_key(salt: str) -> bytes:
    """A key for the digest; empty without a salt."""
    # JSON strings may have unpaired surrogates.
    return blake2b(salt.encode("utf-8", "surrogatepass")).digest() if salt else b""


@dataclass(eq=False)
class Prefix:
    """A cached prefix up to a cut.

    Attributes:
        key: Its cache key.
        length: Tokens.
        parent: The prefix up to an earlier cut that this one continues, or None.
        segments: (start, device arrays) of keys and values behind the parent.
        snapshot: The memory that is not by position, behind the last token.
        size: Bytes of segments and snapshot on one device.
        children: Number of prefixes whose parent this is.
        used: Value of the cache's clock at the last use.
    """

    key: bytes
    length: int
    parent: "Prefix | None"
    segments: list[tuple[int, Any]]
    snapshot: Any
    size: int
    children: int = 0
    used: int = field(default=0)

    def chain(self) -> list["Prefix"]:
        """All prefixes from the first to this one."""
        return [*(self.parent.chain() if self.parent else []), self]


class PrefixCache:
    """Prefixes by key. The least recently used is evicted first, children before parents.

    Args:
        budget: Bytes at most; 0 caches nothing.

    Attributes:
        size: Bytes in use.
        queries: Requests that looked for a prefix.
        hits: Requests that found one.
    """

    def __init__(self, budget: int):
        self.budget, self.size = budget, 0
        self.queries = self.hits = 0
        self._prefixes: dict[bytes, Prefix] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._prefixes)

    def find(self, key: bytes) -> Prefix | None:
        """The prefix of a key. It and all prefixes before it count as used now."""
        prefix = self._prefixes.get(key)
        self._clock += 1
        ancestor = prefix
        while ancestor is not None:
            ancestor.used, ancestor = self._clock, ancestor.parent
        return prefix

    def add(self, key: bytes, length: int, parent: Prefix | None, segments: list, snapshot, size: int) -> Prefix | None:
        """Adds a prefix, with the fields of `Prefix`.

        Returns:
            The prefix; the one that has this key already where there is one. None where it cannot be cached: it is
            larger than the budget, or its parent is evicted.
        """
        if size > self.budget or (parent is not None and self._prefixes.get(parent.key) is not parent):
            return None
        if (existing := self.find(key)) is not None:
            return existing
        prefix = Prefix(key, length, parent, segments, snapshot, size)
        if parent is not None:
            parent.children += 1
            self.find(parent.key)
        self._prefixes[key] = prefix
        self.find(key)
        self.size += size
        while self.size > self.budget:
            leaves = [p for p in self._prefixes.values() if not p.children and p is not prefix]
            if not leaves:
                self._evict(prefix)
                return None
            self._evict(min(leaves, key=lambda p: p.used))
        return prefix

    def _evict(self, prefix: Prefix) -> None:
        del self._prefixes[prefix.key]
        self.size -= prefix.size
        if prefix.parent is not None:
            prefix.parent.children -= 1

    def clear(self) -> None:
        """Evicts all prefixes."""
        self._prefixes.clear()
        self.size = 0

"""Where a prompt is cut into chunks, and the cache of prefixes.

Cuts and chunks depend only on the tokens before them: a prompt that continues from a cached prefix runs the same chunks
that a full prefill would run, and computes the same bits where prompts are prefilled one by one.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from dflash_jax.engine.media import PromptMedia
from dflash_jax.engine.prefix_tiers import BROUGHT_SHARE, Copies, Piece, PrefixTiers

# Tokens between two cached prefixes where there are no message boundaries.
GRID = 4096
# Messages of fewer tokens do not get a snapshot of their own.
MIN_MESSAGE = 16
# A snapshot between two others is dropped where the distance of these is at most `SPACING` times their distance from
# either end of the conversation: then a prompt that diverges there prefills at most `SPACING` times what it shares or
# drops.
SPACING = 3


def cut_points(
    tokens: Sequence[int], last: int, markers: frozenset[int], media: PromptMedia | None = None
) -> list[int]:
    """Positions in 1 … last at which a prefix is cached, ascending.

    Those are the positions of ``markers`` (token ids that open a message), of the grid, and the last one; none divides
    an image or a frame.
    """
    cuts, before = [], 0
    possible = np.isin(np.asarray(tokens[:last], np.int32), sorted(markers))
    possible[::GRID] = True
    possible[:1] = False
    for span in media.spans if media else ():
        possible[span.start + 1 : span.end] = False
    for place in np.flatnonzero(possible).tolist():
        if place % GRID == 0 or place - before >= MIN_MESSAGE:
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
        segments: The keys and values behind the parent, in pages of which the first may have some of the parent too.
        snapshot: What a slot has beside them, behind the last token; None where it is no longer stored. Then only
            prefixes that continue this one can be restored.
        children: The prefixes whose parent this is.
        pins: Users of this prefix and of those that continue it.
    """

    key: bytes
    length: int
    parent: "Prefix | None" = field(repr=False)
    segments: Piece = field(init=False)
    snapshot: Piece | None = None
    children: "list[Prefix]" = field(default_factory=list, repr=False)
    pins: int = 0

    def chain(self) -> "list[Prefix]":
        """All prefixes from this one back to the first."""
        result, prefix = [], self
        while prefix is not None:
            result.append(prefix)
            prefix = prefix.parent
        return result


class PrefixCache:
    """Prefixes by key, in a tier on the device and one on the host.

    The prefix used longest ago goes first, children before parents. Of one conversation few snapshots stay: the newest
    two, those where prompts diverge, and others whose distances grow with the distance from both ends.

    Args:
        budget: Bytes of the device tier at most; 0 caches nothing.
        host_budget: Bytes of the host tier at most; 0 for none.
        copies: What is kept on the device, and copies between the tiers.

    Attributes:
        tiers: The memory, with the numbers of hits, misses and evictions of each tier.
    """

    def __init__(self, budget: int, host_budget: int, copies: Copies):
        self.tiers = PrefixTiers(budget, host_budget, copies, self._lose)
        self._prefixes: dict[bytes, Prefix] = {}

    def __len__(self) -> int:
        return sum(prefix.snapshot is not None for prefix in self._prefixes.values())

    @property
    def budget(self) -> int:
        """Bytes of the device tier at most."""
        return self.tiers.device.budget

    @property
    def size(self) -> int:
        """Bytes of the device in use."""
        return self.tiers.device.size

    def find(self, key: bytes) -> Prefix | None:
        """The prefix of a key, if it can be restored. It and all prefixes before it count as used now."""
        prefix = self._prefixes.get(key)
        if prefix is None or prefix.snapshot is None:
            return None
        self._touch(prefix)
        return prefix

    def _touch(self, prefix: Prefix) -> None:
        # What continues others is used before them, so that it goes before them.
        for part in prefix.chain():
            if part.snapshot is not None:
                self.tiers.touch(part.snapshot)
            self.tiers.touch(part.segments)

    def pin(self, prefix: Prefix) -> None:
        """Keeps a prefix, and those before it, until `unpin`."""
        for part in prefix.chain():
            part.pins += 1

    def unpin(self, prefix: Prefix) -> None:
        """Undoes one `pin`."""
        for part in prefix.chain():
            part.pins -= 1
        if self._is_cached(prefix):
            self._prune(prefix)

    def _is_cached(self, prefix: Prefix) -> bool:
        return self._prefixes.get(prefix.key) is prefix

    def add(
        self,
        key: bytes,
        length: int,
        parent: Prefix | None,
        segments: Any,
        snapshot: Any,
        segments_size: int,
        snapshot_size: int,
    ) -> Prefix | None:
        """Adds a prefix.

        Args:
            key: Its cache key.
            length: Tokens.
            parent: The prefix that it continues, or None.
            segments: The keys and values behind the parent, as the copies keep them.
            snapshot: What a slot has beside them, likewise.
            segments_size: Bytes of the segments on one device.
            snapshot_size: Bytes of the snapshot on one device.

        Returns:
            The prefix; the one that has this key already where there is one. None where it cannot be cached: there is
            no room for it, or its parent is evicted.
        """
        if parent is not None and not self._is_cached(parent):
            return None
        if (existing := self.find(key)) is not None:
            return existing
        prefix = self._prefixes.get(key)
        size = snapshot_size + (segments_size if prefix is None else 0)
        # Room must not be made by what the new prefix needs.
        needed = prefix or parent
        if needed is not None:
            self._touch(needed)
            self.pin(needed)
        has_room = self.tiers.has_room(size)
        if has_room and prefix is None:
            prefix = Prefix(key, length, parent)
            prefix.segments = Piece(prefix, segments_size, segments)
            self._prefixes[key] = prefix
            self.tiers.add(prefix.segments)
            if parent is not None:
                parent.children.append(prefix)
        if has_room and prefix is not None:
            prefix.snapshot = Piece(prefix, snapshot_size, snapshot)
            self.tiers.add(prefix.snapshot)
            self.pin(prefix)
            self._touch(prefix)
            self._thin(prefix)
            self.tiers.save()
            self.unpin(prefix)
        if needed is not None:
            self.unpin(needed)
        return prefix if has_room else None

    def _thin(self, prefix: Prefix) -> None:
        """Removes snapshots that a new prefix makes dispensable."""
        parent = prefix.parent
        if parent is not None and prefix.length - parent.length >= MIN_MESSAGE:
            for sibling in list(parent.children):
                # The end of an earlier prompt, such as the header of an answer: to prefill it again takes less than to
                # store it, and it would make each turn of a conversation a point where prompts diverge.
                is_short = sibling.length - parent.length < MIN_MESSAGE
                if is_short and not sibling.children and not sibling.pins:
                    self._remove(sibling)
        _, *inner = [part for part in prefix.chain() if part.snapshot is not None]
        following = prefix
        for part, before in zip(inner, [*(p.length for p in inner[1:]), 0], strict=False):
            allowed = SPACING * min(before, prefix.length - following.length)
            if part.snapshot is not None and len(part.children) == 1 and following.length - before <= allowed:
                self.tiers.remove(part.snapshot)
                part.snapshot = None
            else:
                following = part

    def is_on_device(self, prefix: Prefix, length: int) -> bool:
        """Whether all of `parts` is on the device."""
        assert prefix.snapshot is not None
        parts = [part.segments for part in prefix.chain() if part.length > length]
        return all(piece.device is not None for piece in (prefix.snapshot, *parts))

    def parts(self, prefix: Prefix, length: int) -> Iterator[tuple[Piece, bool]]:
        """The pieces of a prefix behind its first ``length`` tokens, and whether each may stay on the device."""
        brought, limit = 0, self.budget // BROUGHT_SHARE
        for part in reversed(prefix.chain()):
            if part.length > length:
                brought += part.segments.size if part.segments.device is None else 0
                yield part.segments, brought <= limit
        assert prefix.snapshot is not None
        yield prefix.snapshot, True

    def _lose(self, piece: Piece) -> None:
        """Forgets a piece that is in no tier any more, and what cannot be used without it."""
        prefix = piece.owner
        assert isinstance(prefix, Prefix)
        if piece is prefix.snapshot:
            prefix.snapshot = None
            self._prune(prefix)
        else:
            self._remove(prefix)

    def _prune(self, prefix: Prefix | None) -> None:
        """Removes a prefix that serves none any more, and those before it for which that is true then."""
        while prefix is not None and prefix.snapshot is None and not prefix.children and not prefix.pins:
            self._drop(prefix)
            prefix = prefix.parent

    def _remove(self, prefix: Prefix) -> None:
        """Removes a prefix and all that continue it, and what served only these."""
        removed = [prefix]
        for part in removed:
            removed += part.children
        for part in reversed(removed):
            self._drop(part)
        self._prune(prefix.parent)

    def _drop(self, prefix: Prefix) -> None:
        """Removes a prefix that none continues."""
        for piece in (prefix.segments, prefix.snapshot):
            if piece is not None:
                self.tiers.remove(piece)
        prefix.snapshot = None
        del self._prefixes[prefix.key]
        if prefix.parent is not None:
            prefix.parent.children.remove(prefix)

    def clear(self) -> None:
        """Evicts all prefixes."""
        self._prefixes.clear()
        self.tiers.clear()

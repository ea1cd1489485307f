"""The cuts of a prompt into chunks, and the cache of prefixes.

In the reproducible mode cuts follow from the tokens before them alone, and only prefixes at cuts are used: a prompt
that goes on from one runs the chunks that a full prefill would run, and computes the same bits. Otherwise there are
also cuts at the end of a prompt and where it parts from another one, and any prefix is used.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from dflash_jax.engine.media import PromptMedia
from dflash_jax.engine.prefix_tiers import BROUGHT_SHARE, Copies, Piece, PrefixTiers

# The shortest first message that ends with a cut. Prefixes that end fewer tokens after another one are headers.
MIN_MESSAGE = 16
# A snapshot between two others is dropped where the distance of these is at most `SPACING` times their distance from
# either end of the conversation: then a prompt that diverges there prefills at most `SPACING` times what it shares or
# drops.
SPACING = 3
# Tokens that are digested at once, and among whose ends a prefix is looked for.
BLOCK = 256
# Precedes the keys of prefixes without the drafter's part.
TARGET_ONLY = b"alone "


def cut_points(
    tokens: Sequence[int],
    last: int,
    markers: frozenset[int],
    spacing: tuple[int, int],
    media: PromptMedia | None = None,
    aligned: bool = False,
) -> list[int]:
    """Positions in 1 … last at which a prefix is cached, ascending.

    The first message ends with a cut, since system prompts and tools are shared. After it, each cut is at a marker
    within the spacing, or else about as far away as that allows. None but the last divides an image or a frame.

    Args:
        tokens: The prompt.
        last: The last position, which is a cut.
        markers: Token ids that open a message.
        spacing: The least and the largest distance of two cuts.
        media: The images and videos of the prompt.
        aligned: Whether every prompt with these tokens has the same cuts: each is at the first marker within the
            spacing. Otherwise it is at the last one, so that chunks are large, and the last marker of the prompt is a
            cut, too, at the least distance or more: there the next turn of a conversation goes on if its template
            drops the thoughts of this one.
    """
    nearest, farthest = spacing
    spans = media.spans if media else ()
    opens = np.isin(np.asarray(tokens[:last], np.int32), sorted(markers))
    for span in spans:
        opens[span.start + 1 : span.end] = False
    places = np.flatnonzero(opens).tolist()

    opening = next((place for place in places if place >= MIN_MESSAGE), last)
    cuts, before = [], 0
    while True:
        limit = before + farthest if before >= opening else min(before + farthest, opening)
        near = places[bisect_left(places, before + nearest) : bisect_right(places, limit)] if before >= opening else []
        if near and (aligned or limit < last):
            before = near[0 if aligned else -1]
        elif limit < last:
            # A cut at the border of two pages divides none.
            border = limit - limit % BLOCK
            before = outside(border if border >= before + nearest and limit != opening else limit, before, media)
        else:
            break
        cuts.append(before)
    if not aligned and places and places[-1] >= max(before + nearest, opening):
        cuts.append(places[-1])
    return [*(cut for cut in cuts if cut < last), last] if last else []


def outside(place: int, before: int, media: PromptMedia | None) -> int:
    """A position after ``before`` that divides no image: ``place``, or the start or the end of the image around it."""
    spans = media.spans if media else ()
    span = next((span for span in spans if span.start < place < span.end), None)
    if span is None:
        return place
    return span.start if span.start > before else span.end


def chunks(start: int, end: int, sizes: Sequence[int], padding: float = 0.5) -> list[tuple[int, int, int]]:
    """Divides the tokens between two cuts into chunks.

    Args:
        start: The first position.
        end: The position after the last.
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


class PrefixKey(NamedTuple):
    """The cache key of a prefix.

    Attributes:
        block_digest: Digest of its whole blocks of `BLOCK` tokens.
        length: Tokens.
        digest: Digest of all of them.
    """

    block_digest: bytes
    length: int
    digest: bytes


class PrefixKeys:
    """The cache keys of a prompt's prefixes, by length.

    Prefixes of different salts have different keys, and so have those with other pixels under equal tokens.

    Args:
        tokens: The prompt.
        salt: Only prompts with the same salt share prefixes.
        media: The images and videos of the prompt.
        drafting: Whether its prefixes have the drafter's part. Prefixes without that part are used only where it is
            not needed.
    """

    def __init__(self, tokens: Sequence[int], salt: str = "", media: PromptMedia | None = None, drafting: bool = True):
        self.kinds = (b"",) if drafting else (TARGET_ONLY, b"")
        self._tokens, self._spans = np.asarray(tokens, np.int32), media.spans if media else ()
        # At the end of each block, the digest of all tokens before it. JSON strings may have unpaired surrogates.
        self._block_digests = [blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()]
        for end in range(BLOCK, len(self._tokens) + 1, BLOCK):
            self._block_digests.append(self._digest(end - BLOCK, end))

    def __len__(self) -> int:
        return len(self._tokens)

    def _digest(self, start: int, end: int) -> bytes:
        """The digest of the first ``end`` tokens; ``start``: the end of a block, up to which they are digested."""
        digest = blake2b(b"%d " % (end - start), digest_size=16, key=self._block_digests[start // BLOCK])
        digest.update(self._tokens[start:end].tobytes())
        for span in self._spans[bisect_left(self._spans, start, key=lambda span: span.start) :]:
            if span.start >= end:
                break
            digest.update(b"%d %d %s" % (span.start, len(span.key), span.key))
        return digest.digest()

    def of(self, length: int, kind: bytes | None = None) -> PrefixKey:
        """The key of the first ``length`` tokens; ``kind``: one of `kinds`, the first by default."""
        kind, start = self.kinds[0] if kind is None else kind, length // BLOCK * BLOCK
        digest = self._block_digests[length // BLOCK]
        return PrefixKey(kind + digest, length, kind + (self._digest(start, length) if start < length else digest))

    def block_digest(self, blocks: int, kind: bytes) -> bytes:
        """`PrefixKey.block_digest` of the prefixes with ``blocks`` whole blocks."""
        return kind + self._block_digests[blocks]

    def block_digests(self, start: int, end: int) -> list[bytes]:
        """`PrefixKey.block_digest` at the end of each block that ends after ``start`` tokens and not after ``end``."""
        return [self.block_digest(n, self.kinds[0]) for n in range(start // BLOCK + 1, end // BLOCK + 1)]


@dataclass(eq=False)
class Prefix:
    """A cached prefix up to a cut.

    Attributes:
        key: Its cache key.
        parent: The prefix up to an earlier cut that this one continues, or None.
        block_digests: `PrefixKey.block_digest` at the end of each whole block that ends after the parent.
        segments: The keys and values after the parent's, in pages of which the first may have some of the parent too.
        snapshot: A slot's arrays beside them, after the last token; None where they are no longer stored. Then only
            prefixes that continue this one can be restored.
        children: The prefixes whose parent this is.
        headers: Children that end fewer than `MIN_MESSAGE` tokens later.
        may_thin: Whether its snapshot may be dropped where its neighbours' snapshots serve.
        stored: Earlier prefixes of its chain whose snapshot was stored when this one was added, newest first.
        pins: Number of its users, and of its children that have users.
    """

    key: PrefixKey
    parent: "Prefix | None" = field(repr=False)
    block_digests: Sequence[bytes] = ()
    may_thin: bool = True
    segments: Piece = field(init=False)
    snapshot: Piece | None = None
    children: "dict[Prefix, None]" = field(default_factory=dict, repr=False)
    headers: "dict[Prefix, None]" = field(default_factory=dict, repr=False)
    stored: "list[Prefix]" = field(default_factory=list, repr=False)
    pins: int = 0

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.key.length

    def chain(self) -> "list[Prefix]":
        """All prefixes from this one back to the first."""
        result, prefix = [], self
        while prefix is not None:
            result.append(prefix)
            prefix = prefix.parent
        return result


class PrefixCache:
    """Prefixes by key, in a tier on the device and one on the host.

    The prefix used longest ago goes first, children before parents; a prefix is in use while it is pinned. Of one
    conversation few snapshots stay: the newest two, those where prompts diverge, and others whose distances grow with
    the distance from both ends.

    Args:
        budget: Bytes of the device tier at most; 0 caches nothing.
        host_budget: Bytes of the host tier at most; 0 for none.
        copies: The arrays on the device, and copies between the tiers.

    Attributes:
        tiers: The memory, with the numbers of hits, misses and evictions of each tier.
    """

    def __init__(self, budget: int, host_budget: int, copies: Copies):
        self.tiers = PrefixTiers(budget, host_budget, copies, self._lose)
        self._prefixes: dict[PrefixKey, Prefix] = {}
        # Numbers of prefixes of each length, by `PrefixKey.block_digest`.
        self._lengths: dict[bytes, Counter[int]] = {}
        # Numbers of prefixes that have a digest among their `block_digests`.
        self._block_digests: Counter[bytes] = Counter()

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

    def find(self, key: PrefixKey) -> Prefix | None:
        """The prefix of a key, if it can be restored."""
        prefix = self._prefixes.get(key)
        return None if prefix is None or prefix.snapshot is None else prefix

    def longest(self, keys: PrefixKeys, longer_than: int, lengths: Collection[int] | None = None) -> Prefix | None:
        """The longest prefix of a prompt that can be restored, or None.

        Args:
            keys: The prompt's keys.
            longer_than: Tokens that it must exceed.
            lengths: Possible lengths; None for any.
        """
        for blocks in range(self.shared(keys) // BLOCK, longer_than // BLOCK - 1, -1):
            lengths_of = {kind: self._lengths.get(keys.block_digest(blocks, kind), {}) for kind in keys.kinds}
            for length in sorted(set().union(*lengths_of.values()), reverse=True):
                if longer_than < length <= len(keys) and (lengths is None or length in lengths):
                    for kind in keys.kinds:
                        if length in lengths_of[kind] and (prefix := self.find(keys.of(length, kind))) is not None:
                            return prefix
        return None

    def shared(self, keys: PrefixKeys) -> int:
        """Tokens of a prompt that are cached, in whole blocks, whether they can be restored or not."""

        def is_unknown(blocks: int) -> bool:
            return not any(keys.block_digest(blocks, kind) in self._block_digests for kind in keys.kinds)

        # Where a block is known, all blocks before it are known.
        return BLOCK * bisect_left(range(1, len(keys) // BLOCK + 1), True, key=is_unknown)

    def _touch(self, prefix: Prefix) -> None:
        for piece in (prefix.snapshot, prefix.segments):
            if piece is not None:
                self.tiers.touch(piece)

    def pin(self, prefix: Prefix) -> None:
        """Keeps a prefix, and those before it, until `unpin`."""
        part: Prefix | None = prefix
        while part is not None:
            part.pins += 1
            if part.pins > 1:
                break
            # A continuation counts as used before its parent, so that it is evicted first.
            self._touch(part)
            part = part.parent

    def unpin(self, prefix: Prefix) -> None:
        """Undoes one `pin`. Prefixes that have no user then count as used now."""
        part: Prefix | None = prefix
        while part is not None:
            part.pins -= 1
            if part.pins:
                break
            self._touch(part)
            part = part.parent
        if self._is_cached(prefix):
            self._prune(prefix)

    def _is_cached(self, prefix: Prefix) -> bool:
        return self._prefixes.get(prefix.key) is prefix

    def add(
        self,
        key: PrefixKey,
        parent: Prefix | None,
        segments: Any,
        snapshot: Any,
        segments_size: int,
        snapshot_size: int,
        block_digests: Sequence[bytes] = (),
        may_thin: bool = True,
    ) -> Prefix | None:
        """Adds a prefix.

        Args:
            key: Its cache key.
            parent: The prefix that it continues, or None.
            segments: The keys and values after the parent's, as the copies keep them.
            snapshot: A slot's arrays beside them, likewise.
            segments_size: Bytes of the segments on one device.
            snapshot_size: Bytes of the snapshot on one device.
            block_digests: As in `Prefix`.
            may_thin: As in `Prefix`.

        Returns:
            The prefix, or the existing one of this key. None where it cannot be cached: there is no room for it, or its
            parent is evicted.
        """
        if parent is not None and not self._is_cached(parent):
            return None
        if (existing := self._prefixes.get(key)) is not None:
            existing.may_thin = existing.may_thin and may_thin
            if existing.snapshot is not None:
                return existing
        prefix = self._prefixes.get(key)
        size = snapshot_size + (segments_size if prefix is None else 0)
        # Room must not be made by what the new prefix needs.
        needed = prefix or parent
        if needed is not None:
            self.pin(needed)
        has_room = self.tiers.has_room(size)
        if has_room and prefix is None:
            prefix = Prefix(key, parent, block_digests, may_thin)
            prefix.segments = Piece(prefix, segments_size, segments)
            self._prefixes[key] = prefix
            self._lengths.setdefault(key.block_digest, Counter())[key.length] += 1
            self._block_digests.update(block_digests)
            self.tiers.add(prefix.segments)
            if parent is not None:
                parent.children[prefix] = None
                if key.length - parent.length < MIN_MESSAGE:
                    parent.headers[prefix] = None
        if has_room and prefix is not None:
            prefix.snapshot = Piece(prefix, snapshot_size, snapshot)
            self.tiers.add(prefix.snapshot)
            self.pin(prefix)
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
            for header in list(parent.headers):
                # The end of an earlier prompt, such as the header of an answer: to prefill it again takes less than to
                # store it, and it would make each turn of a conversation a point where prompts diverge.
                if not header.children and not header.pins:
                    self._remove(header)
        inner = [part for part in ([parent, *parent.stored] if parent else ()) if part.snapshot is not None]
        following, prefix.stored = prefix, []
        for part, before in zip(inner, [*(p.length for p in inner), 0][1:], strict=True):
            allowed = SPACING * min(before, prefix.length - following.length)
            if part.may_thin and len(part.children) == 1 and following.length - before <= allowed:
                assert part.snapshot is not None
                self.tiers.remove(part.snapshot)
                part.snapshot = None
            else:
                following = part
                prefix.stored.append(part)

    def is_on_device(self, prefix: Prefix, length: int) -> bool:
        """Whether all of `parts` is on the device."""
        assert prefix.snapshot is not None
        parts = [part.segments for part in prefix.chain() if part.length > length]
        return all(piece.device is not None for piece in (prefix.snapshot, *parts))

    def parts(self, prefix: Prefix, length: int) -> Iterator[tuple[Piece, bool]]:
        """The pieces of a prefix after its first ``length`` tokens, and whether each may stay on the device."""
        brought, limit = 0, self.budget // BROUGHT_SHARE
        for part in reversed(prefix.chain()):
            if part.length > length:
                brought += part.segments.size if part.segments.device is None else 0
                yield part.segments, brought <= limit
        assert prefix.snapshot is not None
        yield prefix.snapshot, True

    def _lose(self, piece: Piece) -> None:
        """Forgets a piece that is in no tier any more, and prefixes that cannot be used without it."""
        prefix = piece.owner
        assert isinstance(prefix, Prefix)
        if piece is prefix.snapshot:
            prefix.snapshot = None
            self._prune(prefix)
        else:
            self._remove(prefix)

    def _prune(self, prefix: Prefix | None) -> None:
        """Removes a prefix that no longer serves any other, and then its parents of which that has become true."""
        while prefix is not None and prefix.snapshot is None and not prefix.children and not prefix.pins:
            self._drop(prefix)
            prefix = prefix.parent

    def _remove(self, prefix: Prefix) -> None:
        """Removes a prefix, all its continuations, and prefixes that served only these."""
        removed = [prefix]
        for part in removed:
            removed += part.children
        for part in reversed(removed):
            self._drop(part)
        self._prune(prefix.parent)

    def _drop(self, prefix: Prefix) -> None:
        """Removes a prefix without continuations."""
        for piece in (prefix.segments, prefix.snapshot):
            if piece is not None:
                self.tiers.remove(piece)
        prefix.snapshot = None
        del self._prefixes[prefix.key]
        lengths = self._lengths[prefix.key.block_digest]
        lengths[prefix.length] -= 1
        if not lengths[prefix.length]:
            del lengths[prefix.length]
            if not lengths:
                del self._lengths[prefix.key.block_digest]
        for digest in prefix.block_digests:
            self._block_digests[digest] -= 1
            if not self._block_digests[digest]:
                del self._block_digests[digest]
        if prefix.parent is not None:
            del prefix.parent.children[prefix]
            prefix.parent.headers.pop(prefix, None)

    def clear(self) -> None:
        """Evicts all prefixes."""
        self._prefixes.clear()
        self._lengths.clear()
        self._block_digests.clear()
        self.tiers.clear()

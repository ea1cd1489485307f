"""The memory of cached prefixes: a tier on the device, and a tier in pinned host memory for the rest."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

# One part in `UNSAVED_SHARE` of the device tier may be without a copy on the host.
UNSAVED_SHARE = 2
# One hit brings back from the host at most one part in `BROUGHT_SHARE` of the device tier. Where it brings more, as for
# a long conversation, the rest is copied to the slot alone, and other prefixes stay on the device.
BROUGHT_SHARE = 4


class Copies(Protocol):
    """Arrays of pieces on the device, and copies of them on the host, which nothing waits for. `Pages` implements it.

    Attributes:
        devices: Devices of this host, each of which has its part, or its copy, of all arrays.
    """

    @property
    def devices(self) -> int:
        """See the class."""
        ...

    def keep(self, kept: Any) -> None:
        """Counts a piece as a user of its arrays on the device."""

    def drop(self, kept: Any) -> None:
        """Undoes `keep`."""

    def has_idle_pages(self, kept: Any, shard: int, kinds: Sequence[int]) -> bool:
        """Whether ``kept`` has pages of a data shard and of one of ``kinds`` that no sequence uses."""
        ...

    def to_host(self, kept: Any) -> Any:
        """Starts a copy to the host; None where the host has no memory for it."""

    def to_device(self, copy: Any, shard: int) -> Any:
        """Starts a copy of what `to_host` returned to a data shard, which has room for it, and keeps it."""


class Owner(Protocol):
    """The owner of a piece, a prefix."""

    pins: int


@dataclass(eq=False)
class Piece:
    """A part of a prefix that is stored and lost as a whole: its segments or its snapshot.

    Attributes:
        owner: While its ``pins`` are not 0, the piece is not lost.
        size: Bytes on one device.
        device: Its arrays on the device, or None.
        host: Its copy on the host, or None. The copying may be under way.
    """

    owner: Owner = field(repr=False)
    size: int
    device: Any = field(default=None, repr=False)
    host: Any = field(default=None, repr=False)


class Tier:
    """Pieces within a budget, in the order of their last use.

    Args:
        budget: Bytes at most.
        copies: How often a piece is stored: 1 on the device; on a host, once for each of its devices.

    Attributes:
        size: Bytes in use.
        hits: Requests whose prefix came from this tier; for the host tier, at least a part of it.
        misses: Requests that had to look further.
        evictions: Pieces that left for lack of room.
    """

    def __init__(self, budget: int, copies: int = 1):
        self.budget, self.copies, self.size = budget, copies, 0
        self.hits = self.misses = self.evictions = 0
        self.pieces: OrderedDict[Piece, None] = OrderedDict()

    def __contains__(self, piece: Piece) -> bool:
        return piece in self.pieces

    def has_room(self, piece: Piece) -> bool:
        """Whether a piece fits beside the pieces of the tier."""
        return self.size + piece.size * self.copies <= self.budget

    def add(self, piece: Piece) -> None:
        """Adds a piece as the most recently used one."""
        self.pieces[piece] = None
        self.size += piece.size * self.copies

    def remove(self, piece: Piece) -> None:
        """Removes a piece, if it is here."""
        if piece in self.pieces:
            del self.pieces[piece]
            self.size -= piece.size * self.copies

    def touch(self, piece: Piece) -> None:
        """Counts a piece, if it is here, as used now."""
        if piece in self.pieces:
            self.pieces.move_to_end(piece)

    def clear(self) -> None:
        """Removes all pieces."""
        self.pieces.clear()
        self.size = 0


class PrefixTiers:
    """Stores pieces on the device, and on the host the pieces for which the device has no room.

    The pieces used longest ago are copied to the host while they are still on the device, so that a new piece takes the
    room of pieces whose copies are complete or nearly so. Nothing waits for a copy: until it is complete, the runtime
    keeps its source. All decisions follow from the calls alone, so that they do not depend on how fast copies are.

    Args:
        device_budget: Bytes of one device.
        host_budget: Bytes of the host; 0 for no host tier.
        copies: The pieces' arrays on the device, and copies between both tiers.
        lost: Called with each piece that is in no tier any more.

    Attributes:
        device: The device tier.
        host: The host tier; some of its pieces are on the device too.
    """

    def __init__(self, device_budget: int, host_budget: int, copies: Copies, lost: Callable[[Piece], None]):
        self.device = Tier(device_budget)
        self.host = Tier(host_budget, copies.devices)
        # Pieces of the device without a copy on the host.
        self._unsaved = Tier(device_budget // UNSAVED_SHARE)
        # All pieces, in the order of their last use.
        self._all = Tier(device_budget + host_budget)
        self._copies, self._lost = copies, lost

    @property
    def _tiers(self) -> tuple[Tier, ...]:
        return self.device, self.host, self._unsaved, self._all

    def count(self, is_on_device: bool | None) -> None:
        """Counts a request by whether its prefix was on the device; None: it had no prefix."""
        if is_on_device:
            self.device.hits += 1
            return
        self.device.misses += 1
        if is_on_device is None:
            self.host.misses += 1
        else:
            self.host.hits += 1

    def has_room(self, size: int) -> bool:
        """Makes room for ``size`` bytes on the device; False where that would take a piece that may not be lost."""
        limit = self.device.budget - size
        if 0 <= limit < self.device.size:
            for piece in self._oldest_first():
                self._free(piece)
                if self.device.size <= limit:
                    break
        return self.device.size <= limit

    def _oldest_first(self) -> Iterator[Piece]:
        """The pieces of the device in the order of their last use; some may leave it between two of them."""
        seen: set[Piece] = set()
        count = -1
        while count != len(self.device.pieces):
            count = len(self.device.pieces)
            for piece in self.device.pieces:
                if piece not in seen:
                    seen.add(piece)
                    yield piece
                    if count != len(self.device.pieces):
                        break

    def give_up_host_memory(self) -> bool:
        """Drops the oldest copy on the host; False where none may be dropped."""
        oldest = next((p for p in self._all.pieces if p in self.host and not p.owner.pins), None)
        if oldest is None:
            return False
        if oldest in self.device:
            self._forget_copy(oldest)
        else:
            self._lose(self.host, oldest)
        return True

    def give_up_pages(self, shard: int, kinds: Sequence[int]) -> bool:
        """Lets a piece leave the device that keeps pages of a data shard and of one of ``kinds`` for itself.

        Returns:
            False where none may.
        """
        count = len(self.device.pieces)
        for piece in self._oldest_first():
            if self._copies.has_idle_pages(piece.device, shard, kinds) and self._free(piece):
                break
        return len(self.device.pieces) < count

    def _free(self, piece: Piece) -> bool:
        """Lets a piece leave the device; False where it may not."""
        if piece not in self.device:
            # The piece was lost with another one.
            return True
        # What the host has, or takes, is not lost; what it displaces there may be.
        if piece in self.host or self._save(piece, replaces=True) or piece not in self.device:
            self._leave_device(piece)
            return True
        if piece.owner.pins:
            return False
        self._lose(self.device, piece)
        return True

    def _leave_device(self, piece: Piece) -> None:
        if piece in self.device:
            self.device.remove(piece)
            self.device.evictions += 1
            self._drop(piece)

    def _drop(self, piece: Piece) -> None:
        """Frees a piece's arrays on the device."""
        kept, piece.device = piece.device, None
        if kept is not None:
            self._copies.drop(kept)

    def add(self, piece: Piece) -> None:
        """Adds a piece that is on the device, after `has_room` has made room for it."""
        self._copies.keep(piece.device)
        for tier in (self.device, self._unsaved, self._all):
            tier.add(piece)

    def touch(self, piece: Piece) -> None:
        """Counts a piece as used now."""
        # The order of the host tier is that of all pieces.
        for tier in (self.device, self._unsaved, self._all):
            tier.touch(piece)

    def remove(self, piece: Piece) -> None:
        """Removes a piece."""
        for tier in self._tiers:
            tier.remove(piece)
        self._drop(piece)
        piece.host = None

    def clear(self) -> None:
        """Removes all pieces."""
        for piece in self._all.pieces:
            self._drop(piece)
        for tier in self._tiers:
            tier.clear()

    def on_device(self, piece: Piece, shard: int, keep: bool = True) -> tuple[Any, bool]:
        """The arrays of a piece on the device, copied from the host where necessary.

        Args:
            piece: The piece.
            shard: The data shard that it comes to, where it comes from the host; it has free pages for it.
            keep: Whether it stays on the device then, in place of others that the host has too.

        Returns:
            The arrays, and whether they are the piece's: otherwise the caller calls ``drop`` of the copies.
        """
        if piece.device is not None:
            return piece.device, True
        kept = self._copies.to_device(piece.host, shard)
        if not keep or self._unsaved.size + piece.size > self.device.budget:
            return kept, False
        while self.device.size + piece.size > self.device.budget:
            # Not of the same prefix: the caller counts on what is here.
            oldest = next((p for p in self.device.pieces if p in self.host and not p.owner.pins), None)
            if oldest is None:
                return kept, False
            self._leave_device(oldest)
        piece.device = kept
        self.device.add(piece)
        return kept, True

    def save(self) -> None:
        """Starts copying the oldest pieces to the host, as many as should have a copy there."""
        while self._unsaved.size > self._unsaved.budget:
            piece = next(iter(self._unsaved.pieces))
            if not self._save(piece, replaces=False) and piece in self._unsaved:
                return

    def _save(self, piece: Piece, replaces: bool) -> bool:
        """Starts copying a piece to the host.

        Args:
            piece: A piece of the device.
            replaces: Whether it takes the room of copies of others that are still on the device. Those stay there.

        Returns:
            False where the host does not take it, or the piece is lost meanwhile.
        """
        if not self.host.budget or piece.size * self.host.copies > self.host.budget:
            return False
        while not self.host.has_room(piece):
            # A piece may have been copied to the host after others that were used later.
            oldest = next((p for p in self._all.pieces if p in self.host and not p.owner.pins), None)
            if oldest is None:
                return False
            if oldest not in self.device:
                self._lose(self.host, oldest)
            elif replaces:
                self._forget_copy(oldest)
            else:
                return False
            if piece not in self.device:
                # With a prefix, those that continue it are lost, and what only they needed.
                return False
        piece.host = self._copies.to_host(piece.device)
        if piece.host is None:
            # The host's memory ends before the budget does.
            self.host.budget = self.host.size
            return False
        self._unsaved.remove(piece)
        self.host.add(piece)
        return True

    def _forget_copy(self, piece: Piece) -> None:
        """Drops the host's copy of a piece that is on the device too."""
        self.host.remove(piece)
        self.host.evictions += 1
        piece.host = None
        self._unsaved.add(piece)
        # It is older than most of the others.
        self._unsaved.pieces.move_to_end(piece, last=False)

    def _lose(self, tier: Tier, piece: Piece) -> None:
        tier.evictions += 1
        self.remove(piece)
        self._lost(piece)

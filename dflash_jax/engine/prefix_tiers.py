"""The memory of cached prefixes: a tier on the device, and one in pinned host memory behind it."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

# The part of the device tier, one in so many, that may be without a copy on the host.
UNSAVED_SHARE = 2
# The part of the device tier that one hit brings back from the host at most. Where it brings more, as for a long
# conversation, the rest is copied to the slot alone, and other prefixes stay on the device.
BROUGHT_SHARE = 4


class Copies(Protocol):
    """Copies between the device and the host, none of which is waited for; `HostCopies` has real ones.

    Attributes:
        devices: Devices of this host, each of which has its part, or its copy, of all arrays.
    """

    devices: int

    def to_host(self, arrays: Any) -> Any:
        """Starts a copy to the host: arrays there, or None where the host has no memory for them."""

    def to_device(self, arrays: Any) -> Any:
        """Starts a copy of what `to_host` returned: arrays on the device."""


class Owner(Protocol):
    """What a piece belongs to."""

    pins: int


@dataclass(eq=False)
class Piece:
    """Arrays that are stored and lost together.

    Attributes:
        owner: While its ``pins`` are not 0, the piece is not lost.
        size: Bytes on one device.
        device: The arrays on the device, or None.
        host: The arrays on the host, or None. The copy to the host may be under way.
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
        """Whether a piece fits beside those that are here."""
        return self.size + piece.size * self.copies <= self.budget

    def add(self, piece: Piece) -> None:
        """Adds a piece, as the one used last."""
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
    """Stores pieces on the device, and on the host those that the device has no room for.

    The pieces used longest ago are copied to the host while they are still on the device, so that a new piece takes the
    room of pieces whose copies are complete or nearly so. Nothing waits for a copy: until it is complete, the runtime
    keeps its source. All decisions follow from the calls alone, so that they do not depend on how fast copies are.

    Args:
        device_budget: Bytes of one device.
        host_budget: Bytes of the host; 0 for no host tier.
        copies: Copies between both; None without a host tier.
        lost: Called with each piece that is in no tier any more.

    Attributes:
        device: The device tier.
        host: The host tier; some of its pieces are on the device too.
    """

    def __init__(self, device_budget: int, host_budget: int, copies: Copies | None, lost: Callable[[Piece], None]):
        self.device = Tier(device_budget)
        self.host = Tier(host_budget, copies.devices) if copies else Tier(0)
        # Pieces of the device that the host does not have.
        self._unsaved = Tier(device_budget // UNSAVED_SHARE)
        # All pieces, in the order of their last use.
        self._all = Tier(device_budget + host_budget)
        self._copies, self._lost = copies, lost

    @property
    def _tiers(self) -> tuple[Tier, ...]:
        return self.device, self.host, self._unsaved, self._all

    def count(self, is_on_device: bool | None) -> None:
        """Counts a request: whether its prefix was on the device; None where it had none."""
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
        if size > self.device.budget:
            return False
        while self.device.size + size > self.device.budget:
            # What the host has, or takes, is not lost.
            for piece in list(self.device.pieces):
                if piece not in self.device:
                    # Lost with another one.
                    break
                if piece in self.host or self._save(piece, replaces=True) or piece not in self.device:
                    self._leave_device(piece)
                    break
                if not piece.owner.pins:
                    self._lose(self.device, piece)
                    break
            else:
                return False
        return True

    def _leave_device(self, piece: Piece) -> None:
        if piece in self.device:
            self.device.remove(piece)
            self.device.evictions += 1
            piece.device = None

    def add(self, piece: Piece) -> None:
        """Adds a piece that is on the device, for which `has_room`."""
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
        piece.device = piece.host = None

    def clear(self) -> None:
        """Removes all pieces."""
        for tier in self._tiers:
            tier.clear()

    def on_device(self, piece: Piece, keep: bool = True) -> Any:
        """The arrays of a piece on the device; ``keep``: they stay there, in place of others that the host has too."""
        if piece.device is not None:
            return piece.device
        assert self._copies is not None
        arrays = self._copies.to_device(piece.host)
        if keep and self._unsaved.size + piece.size <= self.device.budget:
            while self.device.size + piece.size > self.device.budget:
                self._leave_device(next(p for p in self.device.pieces if p in self.host))
            piece.device = arrays
            self.device.add(piece)
        return arrays

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
        assert self._copies is not None
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

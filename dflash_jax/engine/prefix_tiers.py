"""The memory of cached prefixes: a tier on the device, and one in pinned host memory behind it."""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

# Share of the device tier that is kept free where there is a host tier: what moves to the host takes device memory until
# its copy is complete, and new prefixes do not wait for that.
FREE_SHARE = 4


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

    def is_ready(self, arrays: Any) -> bool:
        """Whether the copy is complete."""

    def agree(self, value: int) -> int:
        """The first host's ``value``, on all hosts."""


class Owner(Protocol):
    """What a piece belongs to."""

    pins: int


@dataclass(eq=False)
class Piece:
    """Arrays that are in one tier, and move between tiers, together.

    Attributes:
        owner: While its ``pins`` are not 0, the piece is not lost.
        arrays: The arrays, on the device or the host.
        size: Their bytes on one device.
        on_host: Where they are.
    """

    owner: Owner
    arrays: Any
    size: int
    on_host: bool = False


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
        self._pieces: OrderedDict[Piece, None] = OrderedDict()

    def __contains__(self, piece: Piece) -> bool:
        return piece in self._pieces

    def __len__(self) -> int:
        return len(self._pieces)

    def bytes(self, piece: Piece) -> int:
        """Bytes that a piece takes."""
        return piece.size * self.copies

    def add(self, piece: Piece) -> None:
        """Adds a piece, as the one used last."""
        self._pieces[piece] = None
        self.size += self.bytes(piece)

    def remove(self, piece: Piece) -> None:
        """Removes a piece."""
        del self._pieces[piece]
        self.size -= self.bytes(piece)

    def touch(self, piece: Piece) -> None:
        """Counts a piece as used now."""
        self._pieces.move_to_end(piece)

    def oldest(self, pinned: bool = False) -> Piece | None:
        """The piece whose last use is the longest ago; ``pinned``: even where it may not be lost."""
        return next((p for p in self._pieces if pinned or not p.owner.pins), None)

    def clear(self) -> None:
        """Removes all pieces."""
        self._pieces.clear()
        self.size = 0


@dataclass
class _Transfer:
    """A copy under way: its source stays until it is complete."""

    source: Any
    target: Any
    size: int


class PrefixTiers:
    """Places pieces: new ones on the device, those used longest ago on the host, and no more than both hold.

    Pieces move to the host before their room is needed, so that a new piece finds room without waiting for a copy. A
    piece is in one tier at a time; what moves to the host counts for both until its copy is complete. Where copies do
    not keep up, the oldest pieces are lost instead.

    All of it follows from the calls alone, but for how far copies are: all hosts follow the first one there.

    Args:
        device_budget: Bytes of one device.
        host_budget: Bytes of the host; 0 for no host tier.
        copies: Copies between both; None without a host tier.
        lost: Called with each piece that is lost.

    Attributes:
        device: The device tier, without what is being moved away.
        host: The host tier.
    """

    def __init__(
        self,
        device_budget: int,
        host_budget: int,
        copies: Copies | None,
        lost: Callable[[Piece], None],
    ):
        self.device = Tier(device_budget)
        self.host = Tier(host_budget, copies.devices) if copies else Tier(0)
        self._copies, self._lost = copies, lost
        self._transfers: deque[_Transfer] = deque()

    @property
    def device_size(self) -> int:
        """Bytes of the device in use, with those that are being moved away."""
        return self.device.size + sum(t.size for t in self._transfers)

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
        """Makes room for ``size`` bytes on the device; False where there cannot be any now."""
        if size > self.device.budget:
            return False
        self._finish_transfers()
        while self.device_size + size > self.device.budget:
            oldest = self.device.oldest()
            if oldest is None:
                return False
            self._evict(self.device, oldest)
        return True

    def add(self, piece: Piece) -> None:
        """Adds a piece to the device, for which `has_room`."""
        self.device.add(piece)

    def touch(self, piece: Piece) -> None:
        """Counts a piece as used now."""
        (self.host if piece.on_host else self.device).touch(piece)

    def remove(self, piece: Piece) -> None:
        """Removes a piece."""
        for tier in (self.device, self.host):
            if piece in tier:
                tier.remove(piece)

    def clear(self) -> None:
        """Removes all pieces."""
        self.device.clear()
        self.host.clear()

    def on_device(self, piece: Piece) -> Any:
        """The arrays of a piece on the device. It stays there where there is room, else the host keeps it."""
        if not piece.on_host:
            return piece.arrays
        assert self._copies is not None
        arrays = self._copies.to_device(piece.arrays)
        if self.device_size + piece.size + self._margin() // 2 <= self.device.budget:
            self._transfers.append(_Transfer(piece.arrays, arrays, 0))
            self.host.remove(piece)
            piece.arrays, piece.on_host = arrays, False
            self.device.add(piece)
        return arrays

    def settle(self, size: int = 0) -> None:
        """Moves the oldest pieces to the host, until ``size`` bytes and a share of the device tier are free."""
        if not self.host.budget:
            return
        self._finish_transfers()
        while self.device.size > self.device.budget - max(self._margin(), size):
            oldest = self.device.oldest(pinned=True)
            if oldest is None or not self._move(oldest):
                return

    def _margin(self) -> int:
        return self.device.budget // FREE_SHARE

    def _move(self, piece: Piece) -> bool:
        """Moves a piece to the host, or loses it where the host has no room; False where it may not be lost."""
        assert self._copies is not None
        while self.host.size + self.host.bytes(piece) > self.host.budget:
            oldest = self.host.oldest()
            if oldest is None or self.host.bytes(piece) > self.host.budget:
                return self._give_up(piece)
            self._evict(self.host, oldest)
            if piece not in self.device:
                # With a prefix, those that continue it are lost, and what only they needed.
                return True
        arrays = self._copies.to_host(piece.arrays)
        if arrays is None:
            # The host's memory ends before the budget does.
            self.host.budget = self.host.size
            return self._give_up(piece)
        self.device.remove(piece)
        self.device.evictions += 1
        self._transfers.append(_Transfer(piece.arrays, arrays, piece.size))
        piece.arrays, piece.on_host = arrays, True
        self.host.add(piece)
        return True

    def _give_up(self, piece: Piece) -> bool:
        if piece.owner.pins:
            return False
        self._evict(self.device, piece)
        return True

    def _evict(self, tier: Tier, piece: Piece) -> None:
        tier.remove(piece)
        tier.evictions += 1
        self._lost(piece)

    def _finish_transfers(self) -> None:
        """Frees the sources of complete copies."""
        if not self._transfers:
            return
        assert self._copies is not None
        ready = 0
        while ready < len(self._transfers) and self._copies.is_ready(self._transfers[ready].target):
            ready += 1
        for _ in range(self._copies.agree(ready)):
            self._transfers.popleft()

"""Pages of keys and values: which are free, which slot has which, and the copies that prefixes and swapping keep.

A page belongs to one of two kinds: those of caches that keep all positions, and those of caches with a window. It may
have several users, sequences and prefixes. A position is written once, by the sequence whose page it was first; others
share the page for the positions before those that they write themselves.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from dflash_jax.engine.config import COPIED_PAGES, IN_FLIGHT
from dflash_jax.engine.model_runner import ModelRunner


def batched(pages: Iterable[int]) -> Iterator[list[int]]:
    """Groups of pages as programs save and load them at once."""
    iterator = iter(pages)
    while group := list(islice(iterator, COPIED_PAGES[-1])):
        yield group


class PagePool:
    """The pages of one kind, numbered through the data shards.

    Args:
        count: Pages of a data shard.
        shards: Data shards.

    Attributes:
        live: Pages of each data shard that sequences have.
    """

    def __init__(self, count: int, shards: int):
        self.count, self.live = count, [0] * shards
        self._free = [list(range((shard + 1) * count - 1, shard * count - 1, -1)) for shard in range(shards)]
        # Users of each page: sequences, and prefixes.
        self._sequences, self._prefixes = ([0] * (count * shards) for _ in range(2))

    def free(self, shard: int) -> int:
        """Pages of a shard without a user."""
        return len(self._free[shard])

    def is_idle(self, page: int) -> bool:
        """Whether no sequence has a page."""
        return not self._sequences[page]

    def take(self, shard: int) -> int:
        """A free page of a shard, which gets a sequence as its user."""
        page = self._free[shard].pop()
        self._sequences[page], self.live[shard] = 1, self.live[shard] + 1
        return page

    def share(self, page: int) -> None:
        """Gives a page a further sequence."""
        self.live[page // self.count] += self._sequences[page] == 0
        self._sequences[page] += 1

    def give_back(self, page: int) -> None:
        """Takes a sequence from a page."""
        self._sequences[page] -= 1
        self.live[page // self.count] -= self._sequences[page] == 0
        self._free_unused(page)

    def keep(self, page: int) -> None:
        """Gives a page a further prefix."""
        self._prefixes[page] += 1

    def drop(self, page: int) -> None:
        """Takes a prefix from a page."""
        self._prefixes[page] -= 1
        self._free_unused(page)

    def _free_unused(self, page: int) -> None:
        assert self._sequences[page] >= 0
        assert self._prefixes[page] >= 0
        if not self._sequences[page] and not self._prefixes[page]:
            self._free[page // self.count].append(page)


@dataclass(frozen=True, eq=False)
class Kept:
    """What a prefix, or a sequence that is swapped out, keeps on the device.

    Attributes:
        shard: The data shard of the pages.
        pages: Index in a table → page, of caches that keep all positions.
        windowed: The same for caches with a window.
        snapshot: Arrays of a slot beside its pages; None where it is not kept.
    """

    shard: int
    pages: dict[int, int]
    windowed: dict[int, int] = field(default_factory=dict)
    snapshot: Any = field(default=None, repr=False)


@dataclass(frozen=True, eq=False)
class OnHost:
    """A copy of what was `Kept`, on the host: the contents of the pages in place of their numbers.

    Attributes:
        pages: Indices in a table, of caches that keep all positions.
        windowed: The same of caches with a window.
        segments: The contents of the pages of both kinds, in groups.
        snapshot: As in `Kept`.
    """

    pages: tuple[int, ...]
    windowed: tuple[int, ...]
    segments: list[list[Any]] = field(repr=False)
    snapshot: Any = field(repr=False)

    @property
    def counts(self) -> tuple[int, int]:
        """Pages of both kinds."""
        return len(self.pages), len(self.windowed)


class Pages:
    """The pages of an engine's slots.

    Args:
        runner: The device's work.
        make_room: ``make_room(slot, kinds)`` takes pages of one of these kinds from requests or prefixes that need
            them less than the slot; False where there are none.
    """

    def __init__(self, runner: ModelRunner, make_room: Callable[[int, Sequence[int]], bool]):
        self._runner, self._make_room = runner, make_room
        self.size = runner.page_size
        counts = runner.pages
        self.pools = tuple(PagePool(count, runner.shards) for count in counts)
        self._window, self._sinks = runner.window
        # The pages of each slot: index → page, for each kind.
        self._slots: list[tuple[dict[int, int], dict[int, int]]] = [({}, {}) for _ in range(runner.slots)]
        width = -(-runner.capacity // self.size)
        self._tables = tuple(np.full((runner.slots, width), count, np.int32) for count in counts)
        self._has_changed = True

    @property
    def usage(self) -> float:
        """The share of pages that sequences have, of the kind of which more are in use."""
        return max(sum(pool.live) / max(pool.count * len(pool.live), 1) for pool in self.pools)

    @property
    def devices(self) -> int:
        """As in `prefix_tiers.Copies`."""
        return self._runner.devices

    def _indices(self, known: int, positions: int) -> tuple[range, list[int]]:
        """The indices that a sequence needs of both kinds.

        Args:
            known: Positions that are certainly in the caches.
            positions: Positions that may be in the caches.
        """
        count = -(-positions // self.size)
        if not self.pools[1].count:
            return range(count), []
        first = max(known - self._window, 0) // self.size
        sinks = min(-(-self._sinks // self.size), first)
        return range(count), [*range(sinks), *range(first, count)]

    def need(self, positions: int) -> tuple[int, int]:
        """Pages of both kinds for ``positions`` positions."""
        full, windowed = self._indices(positions, positions)
        return len(full), len(windowed)

    def fits(self, shard: int, needs: tuple[int, int], promised: tuple[int, int]) -> bool:
        """Whether a sequence fits beside the sequences of a shard.

        Args:
            shard: The data shard.
            needs: Pages of both kinds that the sequence needs.
            promised: Pages of both kinds that the other sequences need soon.
        """
        kinds = zip(needs, promised, self.pools, strict=True)
        return all(not n or n + more <= pool.count - pool.live[shard] for n, more, pool in kinds)

    def cover(self, slot: int, known: int, positions: int) -> bool:
        """Gives a slot the pages that it needs, and takes back pages that it no longer needs.

        Args:
            slot: The slot.
            known: Positions that are certainly in its caches.
            positions: Positions that may be in them after the next programs.

        Returns:
            False where pages are missing; the slot then gets none.
        """
        full, windowed = self._indices(known, positions)
        for index in self._slots[slot][1].keys() - set(windowed):
            self._remove(slot, 1, index)
        # A slot has the first pages of caches that keep all positions.
        missing = full[len(self._slots[slot][0]) :], [i for i in windowed if i not in self._slots[slot][1]]
        if not self.has_room(slot, *map(len, missing)):
            return False
        for kind, indices in enumerate(missing):
            for index in indices:
                self._put(slot, kind, index, self.pools[kind].take(self._runner.shard(slot)))
        return True

    def has_room(self, slot: int, full: int, windowed: int) -> bool:
        """Frees enough pages of both kinds for a slot; False where that is not possible."""
        shard, needs = self._runner.shard(slot), (full, windowed)
        while kinds := [kind for kind, n in enumerate(needs) if self.pools[kind].free(shard) < n]:
            if not self._make_room(slot, kinds):
                return False
        return True

    def _put(self, slot: int, kind: int, index: int, page: int) -> None:
        """Puts a page, whose user the slot is already, in place of the slot's page at an index."""
        if index in self._slots[slot][kind]:
            self.pools[kind].give_back(self._slots[slot][kind][index])
        self._slots[slot][kind][index] = page
        self._tables[kind][slot, index] = page % self.pools[kind].count
        self._has_changed = True

    def _remove(self, slot: int, kind: int, index: int) -> None:
        self.pools[kind].give_back(self._slots[slot][kind].pop(index))
        self._tables[kind][slot, index] = self.pools[kind].count
        self._has_changed = True

    def counts(self, slot: int) -> tuple[int, int]:
        """Pages of both kinds that a slot has."""
        full, windowed = self._slots[slot]
        return len(full), len(windowed)

    def release(self, slot: int) -> None:
        """Takes all pages from a slot."""
        for kind in (0, 1):
            for index in list(self._slots[slot][kind]):
                self._remove(slot, kind, index)

    def send(self) -> None:
        """Sends the tables to the device, where they have changed."""
        if self._has_changed:
            # The tables are copied, since they may change while the transfer is under way.
            self._runner.set_tables(*(table.copy() for table in self._tables))
            self._has_changed = False

    # Pages and snapshots that prefixes keep.

    def of_slot(self, slot: int, start: int, end: int) -> Kept:
        """The pages of a slot's positions from ``start`` to ``end``, in caches that keep all positions."""
        first, last = start // self.size, -(-end // self.size)
        pages = self._slots[slot][0]
        return Kept(self._runner.shard(slot), {i: pages[i] for i in range(first, last)})

    def snapshot(self, slot: int, length: int) -> Kept:
        """The snapshot and the window's pages of a slot after ``length`` positions."""
        windowed = self._slots[slot][1]
        needed = [i for i in self._indices(length, length)[1] if i in windowed]
        kept = {i: windowed[i] for i in needed}
        return Kept(self._runner.shard(slot), {}, kept, self._runner.snapshot(slot))

    def bytes(self, kept: Kept) -> int:
        """Bytes on one device."""
        arrays = 0 if kept.snapshot is None else self._runner.bytes(kept.snapshot)
        return self.bytes_of((len(kept.pages), len(kept.windowed))) + arrays

    def bytes_of(self, counts: tuple[int, int]) -> int:
        """Bytes of ``counts`` pages of both kinds on one device."""
        return sum(n * size for n, size in zip(counts, self._runner.page_bytes, strict=True))

    def keep(self, kept: Kept) -> None:
        """Adds a prefix to the users of the pages."""
        for pool, pages in zip(self.pools, (kept.pages, kept.windowed), strict=True):
            for page in pages.values():
                pool.keep(page)

    def drop(self, kept: Kept) -> None:
        """Undoes `keep`."""
        for pool, pages in zip(self.pools, (kept.pages, kept.windowed), strict=True):
            for page in pages.values():
                pool.drop(page)

    def has_idle_pages(self, kept: Kept, shard: int, kinds: Sequence[int]) -> bool:
        """Whether ``kept`` has pages of a data shard and of one of ``kinds`` that no sequence uses."""
        if kept.shard != shard:
            return False
        pages = kept.pages, kept.windowed
        return any(self.pools[kind].is_idle(page) for kind in kinds for page in pages[kind].values())

    def to_host(self, kept: Kept) -> OnHost | None:
        """Starts a copy to the host; None where the host has no memory for it.

        With many pages, it waits for the first ones, so that their copies on the device take little memory.
        """
        in_flight: deque[Any] = deque()
        segments: list[list[Any]] = [[], []]
        for kind, pages in enumerate((kept.pages, kept.windowed)):
            for group in batched(pages.values()):
                copy = self._runner.to_host(self._runner.save(group, bool(kind)))
                if copy is None:
                    return None
                segments[kind].append(copy)
                self._limit(in_flight, copy)
        snapshot = None if kept.snapshot is None else self._runner.to_host(kept.snapshot)
        if kept.snapshot is not None and snapshot is None:
            return None
        return OnHost(tuple(kept.pages), tuple(kept.windowed), segments, snapshot)

    def to_device(self, copy: OnHost, shard: int) -> Kept:
        """Starts a copy to free pages of a shard, which get a prefix as their user. It waits as `to_host` does."""
        in_flight: deque[Any] = deque()

        def brought(kind: int, number: int) -> Any:
            arrays = self._runner.to_device(copy.segments[kind][number])
            self._limit(in_flight, arrays)
            return arrays

        snapshot = None if copy.snapshot is None else self._runner.to_device(copy.snapshot)
        return self._loaded(shard, (copy.pages, copy.windowed), brought, snapshot)

    def _limit(self, in_flight: deque[Any], copy: Any) -> None:
        """Adds a copy to those in flight, and waits for the oldest where there are too many."""
        in_flight.append(copy)
        if len(in_flight) > IN_FLIGHT:
            self._runner.wait(in_flight.popleft())

    def in_shard(self, kept: Kept, shard: int) -> Kept:
        """Copies ``kept`` to free pages of another shard, which get a prefix as their user."""
        kinds = kept.pages, kept.windowed
        groups = [list(batched(pages.values())) for pages in kinds]

        def saved(kind: int, number: int) -> Any:
            return self._runner.save(groups[kind][number], bool(kind))

        return self._loaded(shard, (tuple(kinds[0]), tuple(kinds[1])), saved, kept.snapshot)

    def _loaded(
        self, shard: int, kinds: Sequence[Sequence[int]], segments: Callable[[int, int], Any], snapshot: Any
    ) -> Kept:
        """Writes segments into free pages of a shard; ``segments(kind, number)`` gives them, some pages at a time."""
        taken: list[dict[int, int]] = []
        for kind, indices in enumerate(kinds):
            pages = [self.pools[kind].take(shard) for _ in indices]
            for number, group in enumerate(batched(pages)):
                self._runner.load(group, segments(kind, number), bool(kind))
            taken.append(dict(zip(indices, pages, strict=True)))
        kept = Kept(shard, taken[0], taken[1], snapshot)
        self.keep(kept)
        for pool, pages in zip(self.pools, taken, strict=True):
            for page in pages.values():
                pool.give_back(page)
        return kept

    def adopt(self, slot: int, kept: Kept) -> None:
        """Lets a slot share pages of its own data shard, in place of its pages at the same indices."""
        for kind, pages in enumerate((kept.pages, kept.windowed)):
            for index, page in pages.items():
                self.pools[kind].share(page)
                self._put(slot, kind, index, page)

    def own(self, slot: int, length: int) -> None:
        """Gives a slot free pages in place of shared ones that have its next position.

        Args:
            slot: The slot.
            length: Positions in its caches.
        """
        for kind, pages in enumerate(self._slots[slot]):
            shared = pages.get(length // self.size)
            if length % self.size and shared is not None:
                page = self.pools[kind].take(self._runner.shard(slot))
                self._runner.load([page], self._runner.save([shared], bool(kind)), bool(kind))
                self._put(slot, kind, length // self.size, page)

    # Swapping.

    def swap_out(self, slot: int, length: int | None = None) -> OnHost | None:
        """Copies all pages of a slot to the host, and takes them from the slot.

        Args:
            slot: The slot.
            length: Positions in its caches, where what the slot has beside pages is copied, too, so that another slot
                may have it. Pages of later positions are then left out.

        Returns:
            The copy; None where the host has no memory for it.
        """
        kinds, snapshot = self._slots[slot], None
        if length is not None:
            snapshot, needed = self._runner.snapshot(slot), self._indices(length, length)
            kinds = [{i: pages[i] for i in indices if i in pages} for pages, indices in zip(kinds, needed, strict=True)]
        full, windowed = kinds
        copy = self.to_host(Kept(self._runner.shard(slot), dict(full), dict(windowed), snapshot))
        if copy is not None:
            self.release(slot)
        return copy

    def swap_in(self, slot: int, copy: OnHost, length: int) -> bool:
        """Undoes `swap_out`; False where pages are missing.

        Args:
            slot: The slot: the same, or, with all that the copy has, any.
            copy: What `swap_out` gave.
            length: Positions in its caches.
        """
        if not self.has_room(slot, len(copy.pages), len(copy.windowed)):
            return False
        kept = self.to_device(copy, self._runner.shard(slot))
        self.adopt(slot, kept)
        self.drop(kept)
        if kept.snapshot is not None:
            self.send()
            self._runner.restore(slot, length, kept.snapshot)
        return True

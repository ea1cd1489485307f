"""`FairCapacity`: memory or workers that clients share by turns."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable

from dflash_jax.server.errors import ApiError
from dflash_jax.server.request_scope import current_client


class Share:
    """What one request has of a `FairCapacity`. As a context manager, it is returned at the end."""

    def __init__(self, capacity: "FairCapacity", client: Hashable, count: int):
        self._capacity, self._client, self._count = capacity, client, count

    def keep(self, count: int) -> None:
        """Returns all but ``count``, where there is more."""
        returned, self._count = max(self._count - count, 0), min(self._count, count)
        self._capacity.give(self._client, returned)

    def release(self) -> None:
        """Returns everything."""
        self.keep(0)

    def __enter__(self) -> "Share":
        return self

    def __exit__(self, *_) -> None:
        self.release()


class FairCapacity:
    """A number of bytes or workers that requests share; those that do not fit wait.

    Requests of one client are served in order, and clients by turns. One client has at most half of the capacity and of
    the places to wait, or one request where that is more: it cannot keep the others out.

    Attributes:
        most: The capacity.
        used: What is in use.
    """

    def __init__(self, most: int, name: str, waiting: int | None = None):
        """Prepares an unused capacity.

        Args:
            most: The capacity.
            name: What requests wait for, in errors.
            waiting: Requests that may wait; None: any number.
        """
        self.most, self.used, self._name, self._most_waiting = most, 0, name, waiting
        self._used_by: Counter[Hashable] = Counter()
        # By client. The one whose turn is next comes first.
        self._waiting: OrderedDict[Hashable, deque[tuple[int, asyncio.Future]]] = OrderedDict()

    async def take(self, count: int) -> Share:
        """Waits for ``count`` of the capacity, for all of it where that is more.

        Raises:
            ApiError: Too many requests wait: 429 where they are this client's, else 503.
        """
        client, count, granted = current_client(), min(count, self.most), asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append((count, granted))
        self._grant()
        try:
            if not granted.done():
                self._check_waiting(client)
            await granted
        except BaseException:
            if granted.done() and not granted.cancelled():
                self.give(client, count)
            else:
                self._withdraw(client, granted)
            raise
        return Share(self, client, count)

    def give(self, client: Hashable, count: int) -> None:
        """Returns what a client has."""
        self.used -= count
        self._used_by[client] -= count
        if not self._used_by[client]:
            del self._used_by[client]
        self._grant()

    def _check_waiting(self, client: Hashable) -> None:
        if self._most_waiting is None:
            return
        own, total = len(self._waiting[client]), sum(map(len, self._waiting.values()))
        if own > max(1, _half(self._most_waiting)):
            raise ApiError(429, f"{own - 1} requests of this client wait for {self._name}: try again later")
        if total > self._most_waiting:
            raise ApiError(503, f"{total - 1} requests wait for {self._name}: try again later")

    def _withdraw(self, client: Hashable, granted: asyncio.Future) -> None:
        entries = self._waiting[client]
        entries.remove(next(entry for entry in entries if entry[1] is granted))
        if not entries:
            del self._waiting[client]
        self._grant()

    def _grant(self) -> None:
        while turn := next((item for item in self._waiting.items() if self._is_within_half(*item)), None):
            client, entries = turn
            count, granted = entries[0]
            # Smaller ones do not overtake, or it might wait for ever. A cancelled one is about to withdraw.
            if granted.cancelled() or self.used + count > self.most:
                return
            entries.popleft()
            self._waiting.move_to_end(client)
            if not entries:
                del self._waiting[client]
            self.used += count
            self._used_by[client] += count
            granted.set_result(None)

    def _is_within_half(self, client: Hashable, entries: deque[tuple[int, asyncio.Future]]) -> bool:
        used = self._used_by.get(client, 0)
        return not used or used + entries[0][0] <= _half(self.most)


def _half(count: int) -> int:
    return (count + 1) // 2

"""`FairCapacity`: memory or workers that clients share by turns."""

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Executor
from typing import TypeVar

from dflash_jax.server.errors import ApiError
from dflash_jax.server.request_context import current

T = TypeVar("T")


class Share:
    """What one request has of a `FairCapacity`. As a context manager, it is released at the end."""

    def __init__(self, capacity: "FairCapacity", client: Hashable, count: int):
        self._capacity, self._client, self._count = capacity, client, count

    def release(self) -> None:
        """Releases it, once."""
        count, self._count = self._count, 0
        self._capacity._give(self._client, count)

    def __enter__(self) -> "Share":
        return self

    def __exit__(self, *_) -> None:
        self.release()


class FairCapacity:
    """A number of bytes or workers that requests share.

    Requests wait for what is in use: those of one client in order, and clients by turns. One client has at most half of
    the capacity, and where the places to wait are full, the client that has most of them loses its newest. A request
    must not wait while it has a share: what it keeps longer is taken by `take_now`, which does not wait.

    Attributes:
        most: The capacity.
        used: What is in use.
        used_by: The same by client.
    """

    def __init__(self, most: int, name: str, waiting: int | None = None):
        """Prepares an unused capacity.

        Args:
            most: The capacity.
            name: What requests wait for, in errors.
            waiting: Requests that may wait; None: any number.
        """
        self.most, self.used, self._name, self._most_waiting = most, 0, name, waiting
        self.used_by: Counter[Hashable] = Counter()
        # By client. The one whose turn is next comes first.
        self._waiting: OrderedDict[Hashable, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()

    @property
    def half(self) -> int:
        """The most that one client has, rounded up."""
        return (self.most + 1) // 2

    @property
    def waiting(self) -> list[Hashable]:
        """Clients whose requests wait."""
        return list(self._waiting)

    async def take(self, count: int, client: Hashable = None) -> Share:
        """Waits for ``count`` of the capacity; at most half is counted, so that two clients always fit.

        Args:
            count: How much.
            client: Whose request it is; None: that of the current one.

        Raises:
            ApiError: 503, too many requests wait.
        """
        client, count = current().client if client is None else client, min(count, self.half)
        granted = asyncio.get_running_loop().create_future()
        try:
            self._waiting.setdefault(client, deque()).append((count, granted))
            self._grant()
            if not granted.done():
                self._drop_beyond_limit()
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled() and granted.exception() is None:
                self._give(client, count)
            raise
        finally:
            self._forget(client, granted)
        return Share(self, client, count)

    def take_now(self, count: int, client: Hashable = None) -> Share:
        """Takes ``count`` of the capacity without waiting; arguments as of `take`.

        Raises:
            ApiError: 503, it does not fit; 429, this client has its half.
        """
        client = current().client if client is None else client
        if self.used_by.get(client, 0) + count > self.half:
            raise ApiError(429, f"this client's requests take too much of {self._name}")
        if self.used + count > self.most:
            raise ApiError(503, f"other requests take too much of {self._name}")
        self._add(client, count)
        return Share(self, client, count)

    async def run(self, executor: Executor, work: Callable[[], T], client: Hashable = None) -> T:
        """Runs ``work`` on a thread when it is this client's turn, which ends with the thread, not with the request.

        Raises:
            ApiError: As of `take`.
        """
        share, loop = await self.take(1, client), asyncio.get_running_loop()

        def ended(_) -> None:
            # The server may have stopped.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(share.release)

        future = executor.submit(work)
        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)

    def _add(self, client: Hashable, count: int) -> None:
        self.used += count
        self.used_by[client] += count

    def _give(self, client: Hashable, count: int) -> None:
        self._add(client, -count)
        if not self.used_by[client]:
            del self.used_by[client]
        self._grant()

    def _drop_beyond_limit(self) -> None:
        """Refuses the newest request of the client that has most of those that wait, where too many do."""
        total = sum(map(len, self._waiting.values()))
        if self._most_waiting is not None and total > self._most_waiting:
            _, refused = max(self._waiting.values(), key=len).pop()
            message = f"{self._most_waiting} requests wait for {self._name}"
            # Its client may have left in this turn of the loop.
            if not refused.done():
                refused.set_exception(ApiError(503, message))

    def _forget(self, client: Hashable, granted: asyncio.Future[None]) -> None:
        """Removes a request from those that wait, if it is one, and what its removal leaves behind."""
        entries = self._waiting.get(client, deque())
        for entry in [each for each in entries if each[1] is granted]:
            entries.remove(entry)
        if client in self._waiting and not entries:
            del self._waiting[client]
        self._grant()

    def _grant(self) -> None:
        while turn := next((item for item in self._waiting.items() if self._is_within_half(*item)), None):
            client, entries = turn
            count, granted = entries[0]
            # Smaller ones do not overtake, or it might wait for ever. A cancelled one is about to be removed.
            if granted.cancelled() or self.used + count > self.most:
                return
            entries.popleft()
            self._waiting.move_to_end(client)
            if not entries:
                del self._waiting[client]
            self._add(client, count)
            granted.set_result(None)

    def _is_within_half(self, client: Hashable, entries: deque[tuple[int, asyncio.Future[None]]]) -> bool:
        return bool(entries) and self.used_by.get(client, 0) + entries[0][0] <= self.half

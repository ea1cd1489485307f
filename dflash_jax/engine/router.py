"""Delivery of the engine's events to the receivers of their requests."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable

from dflash_jax.engine.request import Event, Request

Message = Event | Exception
Receive = Callable[[Message], None]


class EventRouter:
    """Delivers events and errors to the receivers of their requests; those without a receiver are dropped.

    A request has a receiver until its last message is on its way, however late that is read.
    """

    def __init__(self):
        self._clients: Counter[Hashable] = Counter()
        self._lock = threading.Lock()
        self._receivers: dict[Request, tuple[Receive, asyncio.AbstractEventLoop | None]] = {}

    def __len__(self) -> int:
        return len(self._receivers)

    @property
    def requests(self) -> list[Request]:
        """Requests that have a receiver."""
        return list(self._receivers)

    @property
    def unfinished(self) -> Counter[Hashable]:
        """How many these are, by client."""
        with self._lock:
            return self._clients.copy()

    def add(self, request: Request, receive: Receive, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Delivers the messages of a request to ``receive``, in the thread of ``loop`` or else in `send`."""
        with self._lock:
            self._clients[request.client] += request not in self._receivers
            self._receivers[request] = receive, loop

    def remove(self, request: Request) -> bool:
        """Ends delivery to a request; False where it had no receiver."""
        with self._lock:
            if self._receivers.pop(request, None) is None:
                return False
            self._clients[request.client] -= 1
            if not self._clients[request.client]:
                del self._clients[request.client]
            return True

    def send(self, messages: Iterable[tuple[Request, Message]]) -> None:
        """Delivers messages, to each event loop in one call."""
        by_loop: dict = {}
        for request, message in messages:
            if (entry := self._receivers.get(request)) is not None:
                if isinstance(message, Exception) or message.finish_reason is not None:
                    self.remove(request)
                receive, loop = entry
                by_loop.setdefault(loop, []).append((receive, message))
        for loop, deliveries in by_loop.items():
            if loop is None:
                _deliver(deliveries)
                continue
            try:
                loop.call_soon_threadsafe(_deliver, deliveries)
            except RuntimeError:  # The loop is closed, and its receivers with it.
                continue

    def send_all(self, message: Message) -> None:
        """Delivers one message to all receivers."""
        self.send([(request, message) for request in self.requests])


def _deliver(deliveries: list[tuple[Receive, Message]]) -> None:
    for receive, message in deliveries:
        receive(message)

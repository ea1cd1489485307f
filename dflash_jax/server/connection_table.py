"""The open connections of a server, and which of them is closed for a new one."""

from asyncio import Transport
from collections import OrderedDict
from itertools import islice
from typing import Protocol

# Connections beyond the limit that get an answer (503) at a time; further ones are closed.
MOST_REFUSED = 64
# Connections with an unread answer that `enter` looks at, so that its time does not grow with their number.
MOST_LOOKS = 64


class Connection(Protocol):
    """A connection in the table."""

    @property
    def transport(self) -> Transport:
        """The connection below."""
        ...

    @property
    def is_unread(self) -> bool:
        """Whether an answer waits for the client to read it."""
        ...


class ConnectionTable:
    """At most ``most`` connections.

    Connections that may be closed are in queues, in the order in which they began to wait or to send a body, so that
    `enter` takes the same time for any number of them. A connection whose request is being answered is never closed.
    """

    def __init__(self, most: int):
        self._most = most
        # Aborted connections are removed at once, although asyncio reports their loss one turn later.
        self._open: set[Connection] = set()
        # Queues in the order in which they are closed, each from its first: without a request; without a request, but
        # with an unread answer; with a body that still arrives.
        self._idle: OrderedDict[Connection, None] = OrderedDict()
        self._unread: OrderedDict[Connection, None] = OrderedDict()
        self._arriving: OrderedDict[Connection, None] = OrderedDict()

    def enter(self, new: Connection) -> bool:
        """Adds a connection. Where there are too many, another one that is not being answered is closed.

        Returns:
            Whether the new connection may send requests. False: it is to be refused, or was closed where too many are
            refused already.
        """
        self._open.add(new)
        if len(self._open) <= self._most:
            return True
        if not self._idle:
            # Connections whose answer was read meanwhile are idle now.
            for connection in [c for c in islice(self._unread, MOST_LOOKS) if not c.is_unread]:
                self._idle[connection] = self._unread.pop(connection)
        if queue := self._idle or self._unread or self._arriving:
            self._abort(next(iter(queue)))
            return True
        if len(self._open) > self._most + MOST_REFUSED:
            self._abort(new)
        return False

    def set_waiting(self, connection: Connection) -> None:
        """Marks a connection as waiting for a request."""
        self.set_busy(connection)
        if connection in self._open:
            (self._unread if connection.is_unread else self._idle)[connection] = None

    def set_arriving(self, connection: Connection) -> None:
        """Marks a connection whose only request's body is arriving."""
        self.set_busy(connection)
        if connection in self._open:
            self._arriving[connection] = None

    def set_busy(self, connection: Connection) -> None:
        """Marks a connection whose request is being answered."""
        for queue in (self._idle, self._unread, self._arriving):
            queue.pop(connection, None)

    def leave(self, connection: Connection) -> None:
        """Removes a connection that is closed or about to be."""
        self.set_busy(connection)
        self._open.discard(connection)

    def _abort(self, connection: Connection) -> None:
        self.leave(connection)
        connection.transport.abort()

"""The open connections of a server, and which of them gives way to a new one."""

from collections import OrderedDict
from itertools import islice
from typing import Protocol

# Connections beyond the limit that get an answer (503) at a time; further ones are closed.
MOST_REFUSED = 64
# Connections with an unread answer that a new connection looks at: how long it takes does not grow with their number.
MOST_LOOKS = 64


class Connection(Protocol):
    """What the table needs to know.

    Attributes:
        transport: It has ``abort``.
        is_unread: Whether an answer waits for the client to read it.
    """

    transport: object
    is_unread: bool


class ConnectionTable:
    """At most ``most`` connections. Those that may give way are kept in the order in which they began to wait or to
    send a body, so that a new connection costs the same however many there are. A connection whose request is being
    answered never gives way."""

    def __init__(self, most: int):
        self._most = most
        # Neither lost nor aborted: what is aborted is lost only in the event loop's next turn.
        self._open: set[Connection] = set()
        # The first of a queue gives way first, and each queue before the next one: without a request; without a
        # request, but with an unread answer; with a body that still arrives.
        self._idle: OrderedDict[Connection, None] = OrderedDict()
        self._unread: OrderedDict[Connection, None] = OrderedDict()
        self._arriving: OrderedDict[Connection, None] = OrderedDict()

    def enter(self, new: Connection) -> bool:
        """Adds a connection, and says whether there is room for it: one that is not being answered gives way to it.
        Closes it where there are too many even to be refused."""
        self._open.add(new)
        if len(self._open) <= self._most:
            return True
        if not self._idle:
            # Those that have been read since count as idle from now on.
            for connection in [c for c in islice(self._unread, MOST_LOOKS) if not c.is_unread]:
                self._idle[connection] = self._unread.pop(connection)
        if queue := self._idle or self._unread or self._arriving:
            self._abort(next(iter(queue)))
            return True
        if len(self._open) > self._most + MOST_REFUSED:
            self._abort(new)
        return False

    def set_waiting(self, connection: Connection) -> None:
        """The connection waits for a request from now on."""
        self.set_busy(connection)
        if connection in self._open:
            (self._unread if connection.is_unread else self._idle)[connection] = None

    def set_arriving(self, connection: Connection) -> None:
        """The body of the connection's only request arrives from now on."""
        self.set_busy(connection)
        if connection in self._open:
            self._arriving[connection] = None

    def set_busy(self, connection: Connection) -> None:
        """A request of the connection is being answered."""
        for queue in (self._idle, self._unread, self._arriving):
            queue.pop(connection, None)

    def leave(self, connection: Connection) -> None:
        """The connection is gone, or about to be."""
        self.set_busy(connection)
        self._open.discard(connection)

    def _abort(self, connection: Connection) -> None:
        self.leave(connection)
        connection.transport.abort()

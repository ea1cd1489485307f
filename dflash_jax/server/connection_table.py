"""The open connections of a server, and which of them gives way to a new one."""

from collections import OrderedDict
from typing import Protocol

# Connections beyond the limit that get an answer (503) at a time; further ones are closed.
MOST_REFUSED = 64


class Connection(Protocol):
    """What the table needs to know.

    Attributes:
        transport: It has ``abort``.
        is_unread: Whether an answer waits for the client to read it.
    """

    transport: object
    is_unread: bool


class ConnectionTable:
    """At most ``most`` connections. Those without a request are kept in the order in which they began to wait, so that
    a new connection costs the same however many there are."""

    def __init__(self, most: int):
        self._most = most
        # Neither lost nor aborted: what is aborted is lost only in the event loop's next turn.
        self._open: set[Connection] = set()
        # Without a request, the first to give way first; with an unread answer, after all others.
        self._idle: OrderedDict[Connection, None] = OrderedDict()
        self._unread: OrderedDict[Connection, None] = OrderedDict()

    def enter(self, new: Connection) -> bool:
        """Adds a connection, and says whether there is room for it: one without a request gives way to it. Closes it
        where there are too many even to be refused."""
        self._open.add(new)
        if len(self._open) <= self._most:
            return True
        # Those that have been read since count as idle from now on.
        while self._unread and not (first := next(iter(self._unread))).is_unread:
            self._idle[first] = self._unread.pop(first)
        if waiting := self._idle or self._unread:
            self._abort(next(iter(waiting)))
            return True
        if len(self._open) > self._most + MOST_REFUSED:
            self._abort(new)
        return False

    def set_waiting(self, connection: Connection) -> None:
        """The connection waits for a request from now on."""
        self.set_busy(connection)
        if connection in self._open:
            (self._unread if connection.is_unread else self._idle)[connection] = None

    def set_busy(self, connection: Connection) -> None:
        """A request of the connection is being received or answered."""
        self._idle.pop(connection, None)
        self._unread.pop(connection, None)

    def leave(self, connection: Connection) -> None:
        """The connection is gone, or about to be."""
        self.set_busy(connection)
        self._open.discard(connection)

    def _abort(self, connection: Connection) -> None:
        self.leave(connection)
        connection.transport.abort()

"""Leaders that accept followers, for the tests of the handshake and of the group."""

import socket
import threading

import pytest

from dflash_jax.parallel.handshake import Listener, connect

SECRET = b"s" * 32


class Opening:
    """A leader that accepts followers on a thread.

    Attributes:
        port: Its port.
        opened: Connections that are closed at the end.
    """

    def __init__(self, count: int, opened: list):
        listener = Listener("127.0.0.1", SECRET, count)
        self.port, self.opened, self._followers = listener.port, opened, None

        def run():
            self._followers = listener.accept()
            opened.extend(connection for connection, _ in self._followers.values())

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def follow(self, index: int, free: int = 7) -> socket.socket:
        self.opened.append(connect([("127.0.0.1", self.port)], SECRET, index, free))
        return self.opened[-1]

    def followers(self) -> dict:
        self._thread.join(60)
        return self._followers


@pytest.fixture
def opening():
    """Opens leaders, and closes what was opened."""
    opened = []
    yield lambda count=2: Opening(count, opened)
    for connection in opened:
        connection.close()

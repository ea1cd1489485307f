"""A server of asyncio's streams that leaves no connection open."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable


class StreamServer:
    """Answers each connection with a task, and closes all connections at its end.

    ``asyncio.start_server`` leaves those open that it accepts in the turn of the event loop in which it is closed, and
    those whose task is cancelled before its first step. The garbage collector reports them, in the middle of some later
    test.

    Attributes:
        port: Its port on 127.0.0.1.
    """

    def __init__(
        self,
        answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
        tls: ssl.SSLContext | None = None,
    ):
        self._answer, self._tls, self._is_closed = answer, tls, False
        self._tasks, self._begun = set(), set()

    async def __aenter__(self):
        self._loop = asyncio.get_running_loop()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.setblocking(False)
        self.port = self._listening.getsockname()[1]
        self._loop.add_reader(self._listening, self._accept)
        return self

    async def __aexit__(self, *_):
        self.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            connection, _ = self._listening.accept()
            self._tasks.add(asyncio.create_task(self._serve(connection)))

    async def _serve(self, connection: socket.socket) -> None:
        with connection:
            if self._is_closed:
                return
            self._begun.add(asyncio.current_task())
            connection.setblocking(False)
            reader = asyncio.StreamReader()
            protocol = asyncio.StreamReaderProtocol(reader)
            # A TLS handshake that fails is an OSError too.
            with contextlib.suppress(OSError):
                transport, _ = await self._loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._tls)
                writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
                try:
                    await self._answer(reader, writer)
                    writer.close()
                    await writer.wait_closed()
                finally:
                    transport.abort()

    def close(self) -> None:
        """Ends the server, its tasks and its connections."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._listening)
            self._listening.close()
            for task in self._begun:
                task.cancel()

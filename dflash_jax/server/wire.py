"""Records between processes: frames of msgpack over a stream socket.

A frame is a header and a body of as many bytes as the header says: the record as msgpack, then the contents of its
NumPy arrays, so that these are neither encoded nor copied. Arrays of a record that was received are views of its frame.
"""

import asyncio
import logging
import mmap
import os
import shutil
import socket
import struct
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

log = logging.getLogger("dflash_jax.server")

# The bytes of a body, and of the msgpack at its beginning.
_HEADER = struct.Struct("!QQ")
# Arrays begin at multiples of this many bytes of the body.
ALIGNMENT = 64
# Bytes that are received at a time. A longer frame is received in place.
BUFFER_BYTES = 2**18
# Bytes that the transport gets at a time, since it copies what the system does not take at once.
PIECE_BYTES = 2**18
# Seconds of the event loop's turn after which further frames wait for the next turn.
TURN_S = 0.002
# Bytes of a frame, at most.
MOST_BYTES = 2**31
# Bytes of the path of a Unix socket, at most: macOS takes 103, Linux 107.
PATH_BYTES = 100


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Encoder:
    """Encodes records of any type as the pieces of a frame."""

    def __init__(self):
        self._encoder, self._arrays, self._at = msgspec.msgpack.Encoder(enc_hook=self._place), [], 0

    def pieces(self, record: Any) -> list[bytes | memoryview]:
        """The frame of a record, in pieces.

        Raises:
            TypeError: A value of the record cannot be sent.
        """
        self._arrays, self._at = [], 0
        payload = self._encoder.encode(record)
        if not self._arrays:
            return [_HEADER.pack(len(payload), len(payload)) + payload]
        # Places count from the first multiple of the alignment after the msgpack.
        first = _aligned(len(payload))
        pieces: list = [_HEADER.pack(first + self._at, len(payload)) + payload + bytes(first - len(payload))]
        for content in self._arrays:
            pieces += [content, bytes(_aligned(len(content)) - len(content))]
        return [piece for piece in pieces if len(piece)]

    def _place(self, value: Any) -> tuple:
        import numpy as np

        if not isinstance(value, np.ndarray):
            raise TypeError(f"a {type(value).__name__} cannot be sent")
        content = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
        at, self._at = self._at, self._at + _aligned(len(content))
        self._arrays.append(content)
        return value.dtype.name, value.shape, at


class _Decoder:
    """Decodes the bodies of frames as records of one type."""

    def __init__(self, kind: Any):
        self._decoder, self._contents = msgspec.msgpack.Decoder(kind, dec_hook=self._array), memoryview(b"")

    def record(self, body: memoryview, size: int) -> Any:
        """The record of a body whose msgpack has ``size`` bytes.

        Raises:
            ValueError: The body is no record.
        """
        self._contents = body[_aligned(size) :]
        try:
            return self._decoder.decode(body[:size])
        except (msgspec.MsgspecError, TypeError, OverflowError) as e:
            raise ValueError(str(e)) from None
        finally:
            self._contents = memoryview(b"")

    def _array(self, kind: type, value: Any) -> Any:
        import numpy as np

        name, shape, at = value
        return np.ndarray(tuple(shape), np.dtype(name), self._contents, at)


class Channel(asyncio.BufferedProtocol):
    """One end of a connection, over which records go both ways. Only the event loop's thread may use it.

    Args:
        kind: The type of the records that are received: a union of tagged structs.
        on_record: Called with each record.
        on_end: Called once, when the connection has ended.

    Attributes:
        has_ended: Whether the connection has ended.
    """

    def __init__(self, kind: Any, on_record: Callable[[Any], None], on_end: Callable[[], None] = lambda: None):
        self.on_record, self.on_end = on_record, on_end
        self._encoder, self._decoder = _Encoder(), _Decoder(kind)
        self._transport: asyncio.Transport | None = None
        # What the transport does not have yet.
        self._unsent: deque[bytes | memoryview] = deque()
        self._is_full, self._is_closing, self.has_ended = False, False, False
        # The receive buffer, and the part of it that has bytes.
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._begin = self._end = 0
        # A frame that is received in place, the bytes of its msgpack, and those that have arrived.
        self._long: memoryview | None = None
        self._long_size = self._long_end = 0
        self._is_paused = False

    # What its owner calls.
    def send(self, record: Any) -> None:
        """Sends a record, once there is a connection; without effect after its end.

        Arrays of the record must not change until they are sent.

        Raises:
            TypeError: A value of the record cannot be sent.
        """
        pieces = self._encoder.pieces(record)
        if self._is_closing or self.has_ended:
            return
        for piece in pieces:
            for at in range(0, len(piece), PIECE_BYTES):
                self._unsent.append(piece if len(piece) <= PIECE_BYTES else memoryview(piece)[at : at + PIECE_BYTES])
        self._flush()

    def close(self) -> None:
        """Closes the connection when all records are sent."""
        self._is_closing = True
        self._flush()

    def abort(self) -> None:
        """Closes the connection at once."""
        self._is_closing = True
        if self._transport is not None:
            self._transport.abort()

    # asyncio's callbacks.
    def connection_made(self, transport: Any) -> None:
        """The connection is there."""
        self._transport = transport
        transport.set_write_buffer_limits(high=PIECE_BYTES)
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self.has_ended = True
        self._unsent.clear()
        self.on_end()

    def pause_writing(self) -> None:
        """The transport has enough."""
        self._is_full = True

    def resume_writing(self) -> None:
        """The transport takes more."""
        self._is_full = False
        self._flush()

    def eof_received(self) -> bool:
        """The other end is closed: so is this one."""
        return False

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return self._buffer[self._end :] if self._long is None else self._long[self._long_end :]

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have arrived."""
        if self._long is None:
            self._end += nbytes
        else:
            self._long_end += nbytes
        self._read()

    def _flush(self) -> None:
        transport = self._transport
        if transport is None or self.has_ended:
            return
        while self._unsent and not self._is_full:
            transport.write(self._unsent.popleft())
        if self._is_closing and not self._unsent:
            transport.close()

    def _read(self) -> None:
        """Passes on the records that are complete, until the turn has taken `TURN_S`."""
        if self.has_ended or self._transport is None or self._transport.is_closing():
            return
        until = time.perf_counter() + TURN_S
        try:
            while (frame := self._next()) is not None:
                self.on_record(self._decoder.record(*frame))
                if self._transport.is_closing():
                    return
                if time.perf_counter() >= until:
                    self._wait()
                    return
        except ValueError as e:
            log.error("a connection between processes ends: %s", e)
            self.abort()
        except Exception:
            log.exception("a connection between processes ends: a record cannot be handled")
            self.abort()

    def _wait(self) -> None:
        """Goes on with the next frame in the next turn."""

        def go_on() -> None:
            self._is_paused = False
            self._read()
            if not (self._is_paused or self._transport is None or self._transport.is_closing()):
                self._transport.resume_reading()

        self._is_paused = True
        assert self._transport is not None
        self._transport.pause_reading()
        asyncio.get_running_loop().call_soon(go_on)

    def _next(self) -> tuple[memoryview, int] | None:
        """The next complete body, and the bytes of its msgpack; None where there is none yet.

        Raises:
            ValueError: The frame is too long, or none.
        """
        if self._long is not None:
            if self._long_end < len(self._long):
                return None
            frame, self._long = (self._long.toreadonly(), self._long_size), None
            return frame
        if self._end - self._begin < _HEADER.size:
            self._move()
            return None
        total, size = _HEADER.unpack_from(self._buffer, self._begin)
        if total > MOST_BYTES:
            raise ValueError(f"a frame has {total} bytes: at most {MOST_BYTES} are possible")
        if size > total:
            raise ValueError(f"a frame of {total} bytes cannot have a record of {size}")
        first = self._begin + _HEADER.size
        here = self._end - first
        if here >= total:
            self._begin = first + total
            # A copy: the buffer is used again.
            return memoryview(bytes(self._buffer[first : self._begin])), size
        if _HEADER.size + total <= BUFFER_BYTES:
            self._move()
            return None
        # Its pages are made as they are written, unlike those of a bytearray.
        self._long, self._long_size, self._long_end = memoryview(mmap.mmap(-1, total)), size, here
        self._long[:here] = self._buffer[first : self._end]
        self._begin = self._end = 0
        return None

    def _move(self) -> None:
        """Moves an incomplete frame to the beginning of the buffer."""
        if self._begin:
            rest = bytes(self._buffer[self._begin : self._end])
            self._buffer[: len(rest)] = rest
            self._begin, self._end = 0, len(rest)


async def over(connection: socket.socket, channel: Channel) -> Channel:
    """A channel over a connected socket."""
    loop = asyncio.get_running_loop()
    make = loop.create_unix_connection if connection.family == socket.AF_UNIX else loop.create_connection
    await make(lambda: channel, sock=connection)
    return channel


@contextmanager
def folder() -> Iterator[Path]:
    """A fresh directory for Unix sockets and temporary files, which only this user can enter. It is removed at the end.

    It is in /tmp where the path of the temporary directory is too long for a socket.
    """
    # The directory's own name and a socket's take up to 35 bytes.
    is_short = len(os.fsencode(tempfile.gettempdir())) <= PATH_BYTES - 35
    path = Path(tempfile.mkdtemp(prefix="dflash-", dir=None if is_short else "/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)

"""Records between processes: whatever is sent arrives, in order, in turns; what is no record ends the connection."""

import asyncio
import socket
import struct
import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.server import wire


class Text(msgspec.Struct, tag=True, array_like=True):
    number: int
    content: bytes


class Arrays(msgspec.Struct, tag=True, array_like=True):
    number: int
    arrays: list[np.ndarray]
    view: memoryview


class Unknown(msgspec.Struct, tag=True, array_like=True):
    number: int


Record = Text | Arrays


class Ends:
    """Both ends of a connection, the records of each, and whether it has ended."""

    def __init__(self, on_record=None):
        self.records = ([], [])
        self.ended = asyncio.Event(), asyncio.Event()
        self.arrived = asyncio.Event()
        self.sockets = socket.socketpair()
        self.channels = [
            wire.Channel(Record, on_record or (lambda record, i=i: self._take(i, record)), self.ended[i].set)
            for i in range(2)
        ]

    def _take(self, i: int, record) -> None:
        self.records[i].append(record)
        self.arrived.set()

    async def __aenter__(self):
        for connection, channel in zip(self.sockets, self.channels, strict=True):
            await wire.over(connection, channel)
        return self

    async def __aexit__(self, *_):
        for channel in self.channels:
            channel.abort()
        await asyncio.gather(*(ended.wait() for ended in self.ended))

    async def until(self, i: int, count: int) -> list:
        while len(self.records[i]) < count:
            self.arrived.clear()
            await self.arrived.wait()
        return self.records[i]


SIZES = st.one_of(
    st.integers(0, 200),
    st.integers(wire.BUFFER_BYTES - 200, wire.BUFFER_BYTES + 200),
    st.integers(wire.PIECE_BYTES * 3, wire.PIECE_BYTES * 3 + 100),
)
DTYPES = st.sampled_from(["float32", "int32", "uint8", "bool", "float64"])


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.lists(st.tuples(SIZES, DTYPES), max_size=3), SIZES), min_size=1, max_size=8))
def test_records_of_any_size_arrive_as_they_were_in_order_both_ways(described):
    rng = np.random.default_rng(0)
    sent = []
    for number, (arrays, size) in enumerate(described):
        made = [rng.integers(0, 2, n).astype(dtype) for n, dtype in arrays]
        sent += [Arrays(number, made, memoryview(rng.bytes(size))), Text(number, rng.bytes(size))]

    async def main():
        async with Ends() as ends:
            for record in sent:
                for channel in ends.channels:
                    channel.send(record)
            for i in range(2):
                received = await ends.until(i, len(sent))
                for before, after in zip(sent, received, strict=True):
                    assert type(before) is type(after)
                    assert before.number == after.number
                    if isinstance(before, Text):
                        assert before.content == after.content
                        continue
                    assert before.view == after.view
                    for array, other in zip(before.arrays, after.arrays, strict=True):
                        assert array.dtype == other.dtype
                        assert not other.flags.writeable
                        assert other.flags.aligned
                        np.testing.assert_array_equal(array, other)

    asyncio.run(main())


def test_arrays_keep_shape_and_order_and_types_of_accelerators():
    import ml_dtypes

    arrays = [
        np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(2, 0, 1),
        np.zeros((0, 5), np.int32),
        np.array(3, np.float32),
        np.arange(5).astype(ml_dtypes.bfloat16),
    ]

    async def main():
        async with Ends() as ends:
            ends.channels[0].send(Arrays(0, arrays, memoryview(b"")))
            (received,) = await ends.until(1, 1)
            for array, other in zip(arrays, received.arrays, strict=True):
                assert (array.dtype, array.shape) == (other.dtype, other.shape)
                assert array.tobytes() == other.tobytes()

    asyncio.run(main())


def test_no_turn_of_a_long_frame_or_of_many_short_ones_takes_long():
    """In processor time of the thread, beside the records' own: what the sender, the receiver and a reader get."""
    pixels, count = np.ones(2**26, np.uint8), 2000

    async def longest() -> float:
        async with Ends() as ends:
            ends.channels[0].send(Arrays(0, [pixels], memoryview(b"")))
            for number in range(count):
                ends.channels[0].send(Text(number, bytes(100)))
            turns = []
            while len(ends.records[1]) < count + 1:
                before = time.thread_time()
                await asyncio.sleep(0)
                turns.append(time.thread_time() - before)
            assert not ends.channels[0]._unsent
            return max(turns)

    # A turn of both ends takes about 0.3 ms; one copy of the array takes 20 ms, each time. A collection of garbage, or
    # memory that the system gives, takes as long once.
    assert any(asyncio.run(longest()) < 0.01 for _ in range(5))


def test_records_that_take_long_leave_turns_for_others():
    """The others of the buffer wait; none is lost, and none waits for further bytes."""
    turns, seen = 0, []

    def slow(record) -> None:
        time.sleep(wire.TURN_S)
        seen.append((record.number, turns))

    async def main():
        nonlocal turns
        async with Ends(on_record=slow) as ends:
            for number in range(20):
                ends.channels[0].send(Text(number, b"x"))
            while len(seen) < 20:
                turns += 1
                await asyncio.sleep(0)

    asyncio.run(main())
    assert [number for number, _ in seen] == list(range(20))
    assert len({turn for _, turn in seen}) == 20


def test_what_was_sent_before_a_close_arrives_and_both_ends_learn_of_the_end():
    async def main():
        async with Ends() as ends:
            ends.channels[0].send(Arrays(1, [np.ones(2**22, np.uint8)], memoryview(b"")))
            ends.channels[0].send(Text(2, b""))
            ends.channels[0].close()
            ends.channels[0].send(Text(3, b""))
            await asyncio.gather(*(ended.wait() for ended in ends.ended))
            assert [record.number for record in ends.records[1]] == [1, 2]
            ends.channels[1].send(Text(4, b""))

    asyncio.run(main())


HEADER = struct.Struct("!QQ")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (HEADER.pack(2**20 + 1, 1), "a frame has 1048577 bytes: at most 1048576 are possible"),
        (HEADER.pack(4, 5) + bytes(4), "a frame of 4 bytes cannot have a record of 5"),
        (HEADER.pack(4, 4) + b"\xc1abc", "MessagePack data is malformed"),
        (HEADER.pack(len(m := msgspec.msgpack.encode(Unknown(1))), len(m)) + m, "Invalid value 'Unknown'"),
        (HEADER.pack(len(m := msgspec.msgpack.encode(Text("1", b""))), len(m)) + m, "Expected `int`, got `str`"),
        (HEADER.pack(len(m := msgspec.msgpack.encode(["Arrays", 1, [1], b""])), len(m)) + m, "int"),
        (
            HEADER.pack(len(m := msgspec.msgpack.encode(["Arrays", 1, [["int8", [9], 0]], b""])), len(m)) + m,
            "too small",
        ),
    ],
)
def test_what_is_no_record_ends_the_connection_with_a_line(data, message, caplog, monkeypatch):
    monkeypatch.setattr(wire, "MOST_BYTES", 2**20)

    async def main():
        async with Ends() as ends:
            ends.sockets[0].setblocking(True)
            ends.channels[0]._transport.write(data)
            await asyncio.gather(*(ended.wait() for ended in ends.ended))
            assert not ends.records[1]

    asyncio.run(main())
    (line,) = caplog.messages
    assert line.startswith("a connection between processes ends: ")
    assert message in line


def test_a_record_that_cannot_be_handled_ends_the_connection(caplog):
    def fail(record):
        raise KeyError("x")

    async def main():
        async with Ends(on_record=fail) as ends:
            for number in range(3):
                ends.channels[0].send(Text(number, b""))
            await asyncio.gather(*(ended.wait() for ended in ends.ended))

    asyncio.run(main())
    assert caplog.messages == ["a connection between processes ends: a record cannot be handled"]


def test_the_death_of_a_process_ends_its_connection_at_once():
    async def main():
        ended, sockets = asyncio.Event(), socket.socketpair()
        command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[sockets[1].fileno()])
        sockets[1].close()
        channel = await wire.over(sockets[0], wire.Channel(Record, lambda record: None, ended.set))
        child.kill()
        await ended.wait()
        child.communicate()
        channel.send(Text(1, b""))

    asyncio.run(main())


def test_a_socket_of_the_folder_connects_and_only_its_owner_enters(monkeypatch, tmp_path):
    async def main(path):
        records, channels, ended = [], [], asyncio.Event()

        def make():
            channels.append(wire.Channel(Record, records.append, ended.set))
            return channels[-1]

        channel, loop = wire.Channel(Record, lambda record: None), asyncio.get_running_loop()
        server = await loop.create_unix_server(make, str(path))
        await loop.create_unix_connection(lambda: channel, str(path))
        channel.send(Text(7, b"x"))
        channel.close()
        await ended.wait()
        server.close()
        assert records == [Text(7, b"x")]

    with wire.folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        asyncio.run(main(folder / "engine"))
    assert not folder.exists()
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(wire.tempfile, "tempdir", str(long))
    with wire.folder() as folder:
        asyncio.run(main(folder / "engine"))
    assert not list(long.iterdir())

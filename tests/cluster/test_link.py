"""Connections between fronts and engines: who does not know the secret gets nothing, and costs nothing."""

import asyncio
import contextlib
import secrets
import socket
import ssl

import pytest
import trustme

from dflash_jax import protocol
from dflash_jax.cluster import link
from dflash_jax.cluster.fleet import Fleet
from dflash_jax.cluster.front_process import ClusterFront, Engines
from dflash_jax.cluster.link import MAGIC, OPENING, Link, Listener, StrangerError, connect, tls_of
from dflash_jax.cluster.options import parse
from dflash_jax.parallel.handshake import NONCE, PROOF, proof_of
from dflash_jax.server import wire

SECRET = b"s" * 32


class Engine:
    """A listener whose channels answer each question with its name, and the one for figures with some.

    Attributes:
        channels: Of fronts, in the order in which they came.
        address: Where it listens.
    """

    def __init__(self, secret=SECRET, tls=None):
        self.channels = []
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = self.listening.getsockname()
        self.listener = Listener(self.listening, secret, self._new, tls)

    def _new(self):
        def answer(record):
            figures = {"running": 0, "waiting": 0}
            channel.send(protocol.Answered(record.number, figures if record.question == "figures" else record.question))

        channel = wire.Channel(protocol.FromFront, answer)
        channel.send(protocol.State(True, None))
        self.channels.append(channel)
        return channel


@contextlib.asynccontextmanager
async def listening(**options):
    engine = Engine(**options)
    serving = asyncio.ensure_future(engine.listener.serve())
    try:
        yield engine
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        for channel in engine.channels:
            channel.abort()
        await asyncio.sleep(0)


class Front:
    """A front's end of a connection."""

    def __init__(self):
        self.records, self.ended = asyncio.Queue(), asyncio.Event()
        self.channel = wire.Channel(protocol.FromEngine, self.records.put_nowait, self.ended.set)

    async def ask(self, question):
        self.channel.send(protocol.Ask(7, question))
        while not isinstance(record := await self.records.get(), protocol.Answered):
            pass
        return record


def check(coroutine, *args):
    asyncio.run(asyncio.wait_for(coroutine(*args), 100))


async def answers(engine, secret=SECRET, tls=None):
    """Whether a front that connects gets answers."""
    front = Front()
    await connect(engine.address, secret, front.channel, tls)
    assert (await front.ask("who")).value == "who"
    front.channel.close()
    await front.ended.wait()


def test_records_go_both_ways_once_both_ends_have_proved_the_secret():
    async def main():
        async with listening() as engine:
            await answers(engine)
            assert len(engine.channels) == 1

    check(main)


def test_a_front_with_another_secret_gets_no_channel():
    async def main():
        async with listening() as engine:
            with pytest.raises((StrangerError, ConnectionError)):
                await answers(engine, b"another" * 5)
            assert engine.channels == []
            await answers(engine)

    check(main)


OWN = MAGIC + bytes(NONCE)


async def stranger(address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
    """A connection that has begun as a front's, and what the engine says to that."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(OWN)
    answer = await reader.readexactly(OPENING + PROOF)
    assert answer.startswith(MAGIC)
    return reader, writer, answer


async def is_closed(reader) -> bool:
    """Whether nothing comes any more."""
    with contextlib.suppress(ConnectionError):
        return await reader.read() == b""
    return True


def record(**_) -> bytes:
    """What a front sends after its proof."""
    (frame,) = wire._Encoder().pieces(protocol.Ask(1, "figures"))
    return frame


ATTACKS = {
    "garbage": lambda answer: secrets.token_bytes(PROOF),
    "a record": lambda answer: record() * 10,
    "half of it": lambda answer: secrets.token_bytes(PROOF // 2),
    "nothing": lambda answer: b"",
    "the proof of the engine": lambda answer: answer[OPENING:],
    "the proof of another connection": lambda answer: proof_of(SECRET, b"front", OWN, OWN),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_who_proves_nothing_is_closed_without_a_channel(name, monkeypatch):
    monkeypatch.setattr(link, "GREETING_S", 2.0)

    async def main():
        async with listening() as engine:
            reader, writer, answer = await stranger(engine.address)
            writer.write(ATTACKS[name](answer))
            # Meanwhile, a front has its turn.
            await answers(engine)
            assert await is_closed(reader)
            writer.close()
            assert len(engine.channels) == 1

    check(main)


def test_another_protocol_is_closed_without_a_word():
    async def main():
        async with listening() as engine:
            reader, writer = await asyncio.open_connection(*engine.address)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + b"x" * 100)
            assert await is_closed(reader)
            writer.close()

    check(main)


def test_many_silent_connections_keep_no_front_out_and_the_oldest_are_closed(monkeypatch):
    monkeypatch.setattr(link, "GREETINGS", 8)

    async def main():
        async with listening() as engine:
            strangers = [await stranger(engine.address) for _ in range(20)]
            await answers(engine)
            assert len(engine.listener._greetings) <= 8
            for reader, _, _ in strangers[:12]:
                assert await is_closed(reader)
            for _, writer, _ in strangers:
                writer.close()
            assert len(engine.channels) == 1

    check(main)


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n" * 4, OWN + bytes(PROOF)])
def test_a_front_believes_nothing_that_proves_nothing(says, monkeypatch):
    """Who has taken an engine's address gets no request."""
    monkeypatch.setattr(link, "CONNECT_S", 0.2)
    got = []

    async def serve(reader, writer):
        writer.write(says)
        got.append(await reader.read(1000))
        writer.close()

    async def main():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        front = Front()
        with pytest.raises((StrangerError, TimeoutError, ConnectionError)):
            await connect(server.sockets[0].getsockname(), SECRET, front.channel)
        server.close()
        assert front.records.empty()
        # No proof.
        assert all(len(data) == OPENING for data in got)

    check(main)


def words_of(path, name: str, authority: trustme.CA) -> list[str]:
    """The options of a new certificate, whose file has its authority's, too."""
    made, paths = authority.issue_cert("localhost"), (str(path / f"{name}.pem"), str(path / f"{name}.key"))
    made.cert_chain_pems[0].write_to_path(paths[0])
    authority.cert_pem.write_to_path(paths[0], append=True)
    made.private_key_pem.write_to_path(paths[1])
    return ["--ssl-certfile", paths[0], "--ssl-keyfile", paths[1]]


def tls(words: list[str]) -> link.Tls:
    tls = tls_of(parse([*words, "--address", "auto"])[0])
    assert tls is not None
    return tls


def test_tls_is_of_a_certificate_of_the_file(tmp_path):
    words = words_of(tmp_path, "one", trustme.CA())
    own, others = tls(words), tls(words_of(tmp_path, "two", trustme.CA()))

    async def main():
        async with listening(tls=own) as engine:
            await answers(engine, tls=own)
            with pytest.raises(OSError, match=r"certificate verify failed|CERTIFICATE_VERIFY_FAILED"):
                await answers(engine, tls=others)
            with pytest.raises((StrangerError, ConnectionError)):
                # A front without TLS is no front, though it knows the secret.
                await answers(engine)
            await answers(engine, tls=own)
            assert len(engine.channels) == 2
        async with listening() as engine:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await answers(engine, tls=own)
            assert engine.channels == []

    check(main)
    assert tls_of(parse([])[0]) is None
    assert tls_of(parse(words)[0]) is None


@pytest.mark.parametrize("has_key", [False, True], ids=["its own certificate", "the engine's certificate"])
def test_who_relays_the_proofs_of_both_ends_is_refused_unless_it_has_the_engines_key(tmp_path, has_key):
    """Its certificate is of an authority in the front's file, so that TLS alone lets it pass."""
    authority, passed = trustme.CA(), asyncio.Event()
    own, relays = (tls(words_of(tmp_path, name, authority)) for name in ("engine", "relay"))
    relays = own if has_key else relays

    async def main():
        async with listening(tls=own) as engine:

            async def pump(reader, writer):
                with contextlib.suppress(OSError):
                    while data := await reader.read(2**16):
                        writer.write(data)
                        passed.set()
                writer.close()

            async def relay(reader, writer):
                there = await asyncio.open_connection(*engine.address, ssl=own.fronts)
                await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

            server = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=relays.engines)
            front = Front()
            connecting = connect(server.sockets[0].getsockname(), SECRET, front.channel, own)
            if has_key:
                await connecting
                assert (await front.ask("who")).value == "who"
                front.channel.close()
                await front.ended.wait()
            else:
                with pytest.raises(StrangerError, match="passes on another"):
                    await connecting
            assert passed.is_set()
            assert len(engine.channels) == has_key
            server.close()

    check(main)


async def until(holds):
    while not holds():
        await asyncio.sleep(0.01)


def test_a_link_connects_again_until_it_is_left(monkeypatch):
    monkeypatch.setattr(link, "AGAIN_S", 0.01)

    async def main():
        fleet = Fleet()
        engine = Engine()
        kept = Link(fleet, "a", engine.address, SECRET, None)
        running = asyncio.ensure_future(kept.run())
        serving = asyncio.ensure_future(engine.listener.serve())
        await until(lambda: fleet.replicas.open)
        engine.channels[0].abort()
        await until(lambda: len(engine.channels) == 2 and fleet.replicas.open)
        # Nothing listens for a while.
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        engine.channels[1].abort()
        await until(lambda: not fleet.replicas.open)
        engine.listening = socket.create_server(engine.address)
        engine.listener = Listener(engine.listening, SECRET, engine._new)
        serving = asyncio.ensure_future(engine.listener.serve())
        await until(lambda: fleet.replicas.open)
        fleet.set_leaving(kept, True)
        assert not fleet.replicas.open
        await asyncio.sleep(0.05)
        assert not running.done()
        engine.channels[2].abort()
        await running
        assert fleet.replicas.all == []
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    check(main)


def test_an_engine_that_is_announced_again_gets_requests_again(monkeypatch):
    """Over its connection while there is one, else over a new one."""
    monkeypatch.setattr(link, "AGAIN_S", 0.05)

    async def main():
        front = ClusterFront()
        front.args = parse([])[0]
        replicas = front.new_client().replicas
        async with listening() as engine:
            there, gone = Engines(SECRET, [("a", *engine.address)]), Engines(SECRET, [])
            front.receive(there)
            await until(lambda: replicas.open)
            front.receive(gone)
            assert not replicas.open
            front.receive(there)
            assert replicas.open
            assert len(engine.channels) == 1
            # Before its link has ended, and after that.
            for i, is_over in enumerate((False, True)):
                front.receive(gone)
                engine.channels[i].abort()
                await until(lambda is_over=is_over: not any(is_over or a.client.state.is_ready for a in replicas.all))
                front.receive(there)
                await until(lambda: replicas.open)
                assert len(engine.channels) == i + 2

    check(main)

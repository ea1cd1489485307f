"""A fleet of engines in this process, whose connections break where a test says."""

import asyncio
import contextlib

from dflash_jax import protocol
from dflash_jax.cluster.fleet import Engine, Fleet
from dflash_jax.server.engine_host import EngineHost
from dflash_jax.server.request_context import RequestContext


class Member:
    """An engine of a fleet, as one connection has it.

    Attributes:
        engine: As the fleet knows it.
        has_submitted: Whether it got requests.
    """

    def __init__(self, world: "World", name: str, host: EngineHost):
        self.world, self.host, self.is_alive, self.is_silent = world, host, True, False
        self.has_submitted = False
        self._submissions: set[int] = set()
        self.engine = Engine(name, self._send, self.kill)
        world.fleet.replicas.join(self.engine)
        self._front = host.connect(self._receive)

    def _send(self, record):
        if not self.is_alive:
            self.engine.client.lost("killed by the test")
            return
        if isinstance(record, protocol.Submit):
            self.has_submitted = True
            self._submissions.add(record.number)
            self.world.choices += [choice for prompt in record.prompts for choice in prompt.choices]
            if self.world.is_cut(self):
                return
        asyncio.get_running_loop().call_soon(self._front.receive, record)

    def _receive(self, record):
        is_part = isinstance(record, protocol.Scores | protocol.Events)
        is_part |= isinstance(record, protocol.Answered) and record.number in self._submissions
        if self.is_alive and not self.is_silent and not (is_part and self.world.is_cut(self)):
            self.world.fleet.receive(self.engine, record)

    def kill(self):
        """Ends the connection, as the death of the engine's process does."""
        if self.is_alive:
            self.is_alive = False
            self._front.close()
            self.world.fleet.lose(self.engine, "killed by the test")
            self.world.fleet.replicas.remove(self.engine)


class World:
    """A fleet in the running event loop.

    Attributes:
        fleet: The fleet.
        members: Its engines.
        cuts: For each cut that is to come: the number of records of requests before it.
        cut: Cuts so far.
        replaces: Whether another engine takes the place of one that dies.
        choices: What engines got.
    """

    def __init__(self, hosts: dict[str, EngineHost], wait_s: float = 60.0):
        self.fleet, self.cuts, self.cut, self.replaces = Fleet(wait_s), [], 0, True
        self.choices: list[protocol.Choice] = []
        self.members = [Member(self, name, host) for name, host in hosts.items()]

    def is_cut(self, member: Member) -> bool:
        """Whether the connection breaks in place of a record."""
        if not self.cuts:
            return False
        self.cuts[0] -= 1
        if self.cuts[0] >= 0:
            return False
        self.cuts.pop(0)
        self.cut += 1
        # Within the call that sends: as a write to a broken connection.
        asyncio.get_running_loop().call_soon(self._replace, member)
        member.is_silent = True
        return True

    def _replace(self, member: Member) -> None:
        member.kill()
        if self.replaces:
            self.members.append(Member(self, f"{member.engine.name}'", member.host))


@contextlib.contextmanager
def request(owner: bytes = b"me", **options):
    """A request of a client, in the context of the caller."""
    context = RequestContext(owner=owner, **options)
    context.enter()
    try:
        yield context
    finally:
        context.end()

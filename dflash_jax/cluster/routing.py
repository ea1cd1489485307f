"""The replicas that a front knows, and which one gets a request."""

import asyncio
import hashlib
import math
import random
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

# A replica that has a beginning gets at most BOUND times the mean of all, as in consistent hashing with bounded loads
# (arXiv 1608.01350). It gets LEAST requests in any case.
BOUND, LEAST = 1.5, 2
# Of all other requests, a replica gets one that has the fewest among so many.
SAMPLE = 16
# Tokens of a piece of a prompt, pieces that are looked at, and tokens that two prompts may share without a use: less
# than a cache keeps.
PIECE, PIECES, USELESS = 32, 2048, 16
# Beginnings that are known, and those that one request adds after and before the end of what it shares with others.
KNOWN, ADDED, TOUCHED = 2**17, 32, 4
# Replicas of a beginning, with which it counts as common and says nothing.
COMMON = 4
# A hash of a prompt's beginning, or a digest of a session.
Beginning = int | bytes


def session(name: str) -> list[Beginning]:
    """The only beginning of all requests of a session."""
    return [hashlib.blake2b(name.encode(), digest_size=16).digest()]


def beginnings_of(prompt: Sequence[int], markers: frozenset[int] = frozenset()) -> list[Beginning]:
    """Hashes of a prompt's beginnings, from the shortest to the longest.

    Two prompts have the same first hashes as far as their tokens are the same, beyond `USELESS` of them.

    Args:
        prompt: Token ids.
        markers: Token ids that open a message. A piece ends before them, so that the end of a message is one's.
    """
    beginnings: list[Beginning] = []
    begin = before = 0
    for _ in range(PIECES):
        piece = prompt[begin : begin + PIECE]
        if not piece:
            break
        if not markers.isdisjoint(piece[1:]):
            piece = piece[: next(i for i in range(1, len(piece)) if piece[i] in markers)]
        begin += len(piece)
        # Of whole numbers: the same in every process.
        before = hash((before, *piece))
        if begin > USELESS:
            beginnings.append(before)
    return beginnings


@dataclass(eq=False)
class Replica:
    """What gets requests.

    Attributes:
        name: Its name.
        is_open: Whether it takes requests.
        own: Its requests of this front.
        others: Those of other fronts, as far as they are known.
    """

    name: str
    is_open: bool = False
    own: int = 0
    others: int = 0

    @property
    def requests(self) -> int:
        """All its requests."""
        return self.own + self.others


R = TypeVar("R", bound=Replica)


class Replicas(Generic[R]):
    """All replicas of a front.

    Attributes:
        open: Those that take requests.
        has_begun: Whether there ever was one.
    """

    def __init__(self):
        self._replicas: dict[str, R] = {}
        self._changed, self._requests = asyncio.Event(), 0
        # Names of the replicas that had requests with a beginning, for the `KNOWN` beginnings that were last in use.
        self._names: OrderedDict[Beginning, tuple[str, ...]] = OrderedDict()
        self.open: list[R] = []
        self.has_begun = False

    def join(self, replica: R) -> None:
        """Adds a replica, in place of one of the same name."""
        self._replicas[replica.name] = replica
        self._change()

    def remove(self, replica: R) -> None:
        """Removes a replica."""
        if self._replicas.get(replica.name) is replica:
            del self._replicas[replica.name]
        self.observe(replica, 0)
        self.set_open(replica, False)

    def set_open(self, replica: R, is_open: bool) -> None:
        """Gives a replica requests, or no further ones. Those that it has go on."""
        if replica.is_open != is_open:
            replica.is_open = is_open
            self._change()

    def _change(self) -> None:
        self.open = [replica for replica in self._replicas.values() if replica.is_open]
        self.has_begun = self.has_begun or bool(self.open)
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def all(self) -> list[R]:
        """All replicas, by name."""
        return sorted(self._replicas.values(), key=lambda replica: replica.name)

    def count(self, replica: R, requests: int) -> None:
        """Counts requests of this front that a replica gets, or with a negative number those that end."""
        replica.own += requests
        self._requests += requests

    def observe(self, replica: R, requests: int) -> None:
        """Takes the number of requests that a replica says it has of all fronts."""
        others = max(0, requests - replica.own)
        self._requests += others - replica.others
        replica.others = others

    def choose(self, beginnings: Sequence[Beginning], tried: Collection[R] = ()) -> R | None:
        """The replica for a request: one that had its longest known beginning, unless that has too many requests.

        Args:
            beginnings: Of its prompt, or of its session.
            tried: Replicas to avoid, unless there is no other.
        """
        if all(replica in tried for replica in self.open):
            tried = ()
        choices = [replica for replica in self.open if replica not in tried] if tried else self.open
        if not choices:
            return None
        most = max(LEAST, math.ceil(BOUND * (self._requests + 1) / len(self.open)))
        for names in self._known(beginnings):
            replicas = (replica for name in names if (replica := self._replicas.get(name)) is not None)
            if having := [r for r in replicas if r.is_open and r not in tried and r.requests < most]:
                choices = having
                break
        else:
            choices = random.sample(choices, min(SAMPLE, len(choices)))
        replica = min(choices, key=lambda replica: replica.requests)
        self.learn(beginnings, replica)
        return replica

    def _known(self, beginnings: Sequence[Beginning]) -> Iterator[tuple[str, ...]]:
        """Yields the names of each known beginning from the longest one, up to one that is `COMMON`."""
        for beginning in reversed(beginnings):
            names = self._names.get(beginning, ())
            if len(names) == COMMON:
                return
            if names:
                yield names

    def learn(self, beginnings: Sequence[Beginning], replica: Replica) -> None:
        """Takes the beginnings of a request that a replica gets. A session is at its last request's replica only."""
        shared = next((i for i in range(len(beginnings), 0, -1) if beginnings[i - 1] in self._names), 0)
        for beginning in beginnings[max(0, shared - TOUCHED) : shared + ADDED]:
            others = () if isinstance(beginning, bytes) else self._names.get(beginning, ())
            self._names[beginning] = (replica.name, *(name for name in others if name != replica.name))[:COMMON]
            self._names.move_to_end(beginning)
        while len(self._names) > KNOWN:
            self._names.popitem(last=False)

    async def changed(self, seconds: float) -> None:
        """Waits until replicas come, go, open or close, for ``seconds`` at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def wait(self, beginnings: Sequence[Beginning], tried: Collection[R], seconds: float) -> R | None:
        """`choose`, as soon as there is a replica; None where none takes requests within ``seconds``."""
        until = time.monotonic() + seconds
        while (replica := self.choose(beginnings, tried)) is None and (left := until - time.monotonic()) > 0:
            await self.changed(left)
        return replica

"""The replicas that the ingress knows: which are alive, and which one gets a request."""

import asyncio
import hashlib
import logging
import math
import random
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice

log = logging.getLogger("dflash_jax.cluster")

# Seconds between two looks at a replica, seconds that it has to answer, and looks without an answer after which it
# counts as dead. After the first of them it gets no requests.
LOOK_S, ANSWER_S, LOOKS = 1.0, 3.0, 10
# A replica that has a beginning gets at most BOUND times the mean of all, as in consistent hashing with bounded loads
# (arXiv 1608.01350). It gets LEAST requests in any case.
BOUND, LEAST = 1.5, 2
# Of all other requests, a replica gets one that has the fewest among so many.
SAMPLE = 16
# Bytes of a body in which the prompt may begin, pieces of a prompt that are looked at, and bytes that two prompts may
# share without a use: JSON's names, and less than a cache keeps.
HEAD, PIECES, USELESS = 2**16, 2048, 64
# Beginnings that are known, and those that one request adds after and before the end of what it shares with others.
KNOWN, ADDED, TOUCHED = 2**17, 32, 4
# Replicas of a beginning, with which it counts as common and says nothing.
COMMON = 4
# A hash of a prompt's beginning, or a digest of a session.
Beginning = int | bytes
_PROMPT = re.compile(rb'"(?:messages|prompt|input|input_ids|text)"\s*:')
# A piece ends at a quotation mark, where it can. So the end of a short message is the end of a piece.
_PIECE = re.compile(rb'(?s).{8}[^"]{0,120}"?')


def beginnings_of(headers: dict[bytes, bytes], body: bytes) -> Sequence[Beginning]:
    """Hashes of the beginnings of a request's prompt, from the shortest to the longest.

    Two requests have the same first hashes as far as their prompts are the same bytes, beyond `USELESS` of them. With
    x-session-id a digest of the session is the only beginning.
    """
    if (session := headers.get(b"x-session-id")) is not None:
        return [hashlib.blake2b(session, digest_size=16).digest()]
    match = _PROMPT.search(body, 0, HEAD)
    begin = match.end() if match else 0
    pieces = list(islice(_PIECE.finditer(body, begin), PIECES))
    hashes = accumulate((hash(piece[0]) for piece in pieces), lambda before, piece: hash((before, piece)))
    return [each for each, piece in zip(hashes, pieces, strict=True) if piece.end() - begin > USELESS]


class Beginnings:
    """Names of the replicas that had requests with a beginning, for the `KNOWN` beginnings that were last in use."""

    def __init__(self):
        self._names: OrderedDict[Beginning, tuple[str, ...]] = OrderedDict()

    def known(self, beginnings: Sequence[Beginning]) -> Iterator[tuple[str, ...]]:
        """Yields the names of each known beginning from the longest one, up to one that is `COMMON`."""
        for beginning in reversed(beginnings):
            names = self._names.get(beginning, ())
            if len(names) == COMMON:
                return
            if names:
                yield names

    def add(self, beginnings: Sequence[Beginning], name: str) -> None:
        """Adds the replica that gets a request. A session is at one replica only, that of its last request."""
        shared = next((i for i in range(len(beginnings), 0, -1) if beginnings[i - 1] in self._names), 0)
        for beginning in beginnings[max(0, shared - TOUCHED) : shared + ADDED]:
            names = () if isinstance(beginning, bytes) else self._names.get(beginning, ())
            self._names[beginning] = (name, *(each for each in names if each != name))[:COMMON]
            self._names.move_to_end(beginning)
        while len(self._names) > KNOWN:
            self._names.popitem(last=False)


@dataclass(eq=False)
class Replica:
    """One server.

    Attributes:
        name: Its name.
        url: Where it listens.
        is_open: Whether it takes requests.
        attempts: Tasks that wait for its answers, which its death cancels.
        missed: Looks without an answer, one after the other.
        looking: The last look.
    """

    name: str
    url: str
    is_open: bool = True
    attempts: set[asyncio.Task] = field(default_factory=set)
    missed: int = 0
    looking: asyncio.Task | None = None


class Replicas:
    """All replicas of an ingress.

    Args:
        look: ``look(replica)`` returns whether it takes requests; it raises OSError where it does not answer.
    """

    def __init__(self, look: Callable[[Replica], Awaitable[bool]]):
        self._look = look
        self._replicas: dict[str, Replica] = {}
        self._changed = asyncio.Event()
        self._beginnings, self._requests = Beginnings(), 0
        self.open: list[Replica] = []
        self.has_begun = False

    def join(self, name: str, url: str) -> None:
        """Adds a replica that takes requests; one that is known stays as it is."""
        known = self._replicas.get(name)
        if known is None or known.url != url:
            log.info("replica %s joins at %s", name, url)
            self._replicas[name] = Replica(name, url)
            self.has_begun = True
            self._change()

    def leave(self, name: str) -> None:
        """Gives a replica no further requests. Those that it has go on."""
        if (replica := self._replicas.get(name)) is not None:
            self._set_open(replica, False)

    def _looking(self, replica: Replica) -> asyncio.Task:
        """The look at a replica that is under way, or else a new one."""
        if replica.looking is None or replica.looking.done():
            replica.looking = asyncio.ensure_future(self._check(replica))
        return replica.looking

    async def is_ready(self, replica: Replica) -> bool:
        """Looks at once whether a replica takes requests. One that does not gets none until the next good look."""
        await asyncio.wait({self._looking(replica)})
        return replica.is_open

    def _set_open(self, replica: Replica, is_open: bool) -> None:
        if replica.is_open != is_open:
            replica.is_open = is_open
            self._change()

    def _change(self) -> None:
        self.open = [replica for replica in self._replicas.values() if replica.is_open]
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def all(self) -> list[Replica]:
        """All replicas that are alive, by name."""
        return sorted(self._replicas.values(), key=lambda replica: replica.name)

    def begin(self, replica: Replica, task: asyncio.Task) -> None:
        """Counts a request of a replica, whose answer ``task`` waits for."""
        replica.attempts.add(task)
        self._requests += 1

    def end(self, replica: Replica, task: asyncio.Task) -> None:
        """Ends what `begin` began, once."""
        if task in replica.attempts:
            replica.attempts.remove(task)
            self._requests -= 1

    def choose(self, beginnings: Sequence[Beginning], tried: Collection[Replica] = ()) -> Replica | None:
        """The replica for a request: one that had its longest known beginning, unless that has too many requests.

        Args:
            beginnings: What `beginnings_of` returns.
            tried: Replicas to avoid, unless there is no other.
        """
        if all(replica in tried for replica in self.open):
            tried = ()
        choices = [replica for replica in self.open if replica not in tried] if tried else self.open
        if not choices:
            return None
        most = max(LEAST, math.ceil(BOUND * (self._requests + 1) / len(self.open)))
        for names in self._beginnings.known(beginnings):
            replicas = (replica for name in names if (replica := self._replicas.get(name)) is not None)
            if having := [r for r in replicas if r.is_open and r not in tried and len(r.attempts) < most]:
                choices = having
                break
        else:
            choices = random.sample(choices, min(SAMPLE, len(choices)))
        replica = min(choices, key=lambda replica: len(replica.attempts))
        self._beginnings.add(beginnings, replica.name)
        return replica

    async def wait(self, beginnings: Sequence[Beginning], tried: Collection[Replica], seconds: float) -> Replica | None:
        """`choose`, as soon as there is a replica; None where none takes requests within ``seconds``."""
        until = time.monotonic() + seconds
        while (replica := self.choose(beginnings, tried)) is None and (left := until - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                return None
        return replica

    def lose(self, replica: Replica, reason: str) -> None:
        """Removes a dead replica, and ends what waits for its answers."""
        if self._replicas.get(replica.name) is replica:
            log.warning("replica %s is lost: %s", replica.name, reason)
            del self._replicas[replica.name]
        self._set_open(replica, False)
        for task in list(replica.attempts):
            task.cancel()

    async def watch(self) -> None:
        """Looks at all replicas, for ever. One that does not answer delays no look at another."""
        try:
            while True:
                for replica in self.all:
                    self._looking(replica)
                await asyncio.sleep(LOOK_S)
        finally:
            looks = [replica.looking for replica in self.all if replica.looking is not None]
            for look in looks:
                look.cancel()
            await asyncio.gather(*looks, return_exceptions=True)

    async def _check(self, replica: Replica) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                is_open = await self._look(replica)
        except ConnectionRefusedError as e:
            self.lose(replica, str(e))
        except (OSError, TimeoutError) as e:
            replica.missed += 1
            reason = str(e) or type(e).__name__
            if replica.missed == 1:
                log.warning("replica %s gets no requests until it answers: %s", replica.name, reason)
            self._set_open(replica, False)
            if replica.missed >= LOOKS:
                self.lose(replica, f"{LOOKS} looks without an answer: {reason}")
        else:
            replica.missed = 0
            self._set_open(replica, is_open)

"""The replicas that the ingress knows: which are alive, and which one gets a request."""

import asyncio
import hashlib
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

log = logging.getLogger("dflash_jax.cluster")

# Seconds between two looks at a replica, seconds that it has to answer, and looks without an answer behind which it
# counts as dead.
LOOK_S, ANSWER_S, LOOKS = 1.0, 10.0, 3
# A replica gets at most BOUND times the mean of all, as in consistent hashing with bounded loads (arXiv 1608.01350).
# It gets LEAST requests in any case.
BOUND, LEAST = 1.25, 2
# Bytes of a prompt's beginning that choose a replica.
BEGINNING = 512
_PROMPT = re.compile(rb'"(?:messages|prompt|input|input_ids|text)"\s*:')


def session_of(headers: dict[bytes, bytes], body: bytes) -> bytes:
    """What requests of one conversation have in common: x-session-id, or else the beginning of the prompt."""
    if (session := headers.get(b"x-session-id")) is not None:
        return session
    match = _PROMPT.search(body)
    return b"" if match is None else body[match.end() : match.end() + BEGINNING]


@dataclass(eq=False)
class Replica:
    """One server.

    Attributes:
        name: Its name.
        url: Where it listens.
        is_open: Whether it takes requests.
        attempts: Tasks that wait for its answers, which its death cancels.
        missed: Looks without an answer.
        joined: When it joined, on the monotonic clock.
    """

    name: str
    url: str
    is_open: bool = True
    attempts: set[asyncio.Task] = field(default_factory=set)
    missed: int = 0
    joined: float = field(default_factory=time.monotonic)

    def end(self) -> None:
        """Ends what waits for its answers."""
        self.is_open = False
        for task in list(self.attempts):
            task.cancel()


class Replicas:
    """All replicas of an ingress.

    Args:
        look: ``look(replica)`` returns whether it takes requests; it raises OSError where it does not answer.
    """

    def __init__(self, look: Callable[[Replica], Awaitable[bool]]):
        self._look = look
        self._replicas: dict[str, Replica] = {}
        self._changed = asyncio.Event()
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
            replica.is_open = False

    async def is_ready(self, replica: Replica) -> bool:
        """Looks at once whether a replica takes requests. One that does not gets none until the next good look."""
        try:
            async with asyncio.timeout(ANSWER_S):
                is_ready = await self._look(replica)
        except (OSError, TimeoutError):
            is_ready = False
        if not is_ready:
            replica.is_open = False
        return is_ready

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def open(self) -> list[Replica]:
        """Replicas that take requests."""
        return [replica for replica in self._replicas.values() if replica.is_open]

    @property
    def all(self) -> list[Replica]:
        """All replicas that are alive, by name."""
        return sorted(self._replicas.values(), key=lambda replica: replica.name)

    def choose(self, session: bytes, tried: Collection[Replica] = ()) -> Replica | None:
        """The replica for a request: the same one for a session, unless that one has too many requests.

        Args:
            session: What `session_of` returns.
            tried: Replicas to avoid, unless there is no other.
        """
        choices = self.open
        choices = [replica for replica in choices if replica not in tried] or choices
        if not choices:
            return None
        if not session:
            return min(choices, key=lambda replica: len(replica.attempts))
        requests = sum(len(replica.attempts) for replica in choices) + 1
        most = max(LEAST, math.ceil(BOUND * requests / len(choices)))
        choices.sort(key=lambda replica: hashlib.blake2b(session + b" " + replica.name.encode()).digest())
        return next(replica for replica in choices if len(replica.attempts) < most)

    async def wait(self, session: bytes, tried: Collection[Replica], seconds: float) -> Replica | None:
        """`choose`, as soon as there is a replica; None where none takes requests within ``seconds``."""
        until = time.monotonic() + seconds
        while (replica := self.choose(session, tried)) is None and (left := until - time.monotonic()) > 0:
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
        replica.end()

    async def watch(self) -> None:
        """Looks at all replicas, for ever."""
        while True:
            await asyncio.gather(*map(self._check, self.all))
            await asyncio.sleep(LOOK_S)

    async def _check(self, replica: Replica) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                is_open = await self._look(replica)
        except ConnectionRefusedError as e:
            self.lose(replica, str(e))
        except (OSError, TimeoutError) as e:
            replica.missed += 1
            if replica.missed >= LOOKS:
                self.lose(replica, f"{LOOKS} looks without an answer: {e or type(e).__name__}")
        else:
            replica.missed = 0
            if is_open and not replica.is_open:
                replica.is_open = True
                self._change()
            replica.is_open = is_open

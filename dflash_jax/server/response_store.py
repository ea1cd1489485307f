"""Responses that a later request may continue, in memory, bounded in number and bytes.

Each API key sees its own responses only.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

# Most bytes of all entries together.
MOST_BYTES = 256 * 2**20
# The key of an entry: owner and id.
Name = tuple[bytes, str]


@dataclass(frozen=True)
class StoredResponse:
    """A response and the conversation before it. The next turn needs no other entry.

    Attributes:
        response: The response as JSON, without log-probabilities.
        input: All items of the conversation before it, as JSON, one a line.
        run: The key of the request's runs; None outside of a cluster.
    """

    response: bytes
    input: bytes
    run: str | None = None

    @property
    def items(self) -> list[bytes]:
        """Each item of ``input`` as JSON."""
        return self.input.splitlines()

    @property
    def count(self) -> int:
        """Number of `items`."""
        return self.input.count(b"\n") + 1

    @property
    def nbytes(self) -> int:
        """Bytes of the entry."""
        return len(self.response) + len(self.input)


class Responses(Protocol):
    """What the server needs of stored responses; see `ResponseStore`.

    Attributes:
        size: Most entries.
    """

    size: int

    async def get(self, owner: bytes, response_id: str) -> StoredResponse | None:
        """The entry of an owner; None where there is none."""

    async def put(self, owner: bytes, response_id: str, entry: StoredResponse, client: Hashable = None) -> bool:
        """Stores an entry: whether it is stored."""
        ...

    async def delete(self, owner: bytes, response_id: str) -> bool:
        """Deletes an entry; whether there was one."""
        ...


class ResponseStore:
    """Stored responses of all clients.

    When the store is full, the client with the most entries loses its least recently used one, so that no client can
    displace others' responses by storing many. It is one of `Responses`: another one may be shared by several servers.

    Attributes:
        size: Most entries.
        most_bytes: Most bytes of all entries.
    """

    def __init__(self, size: int = 1024, most_bytes: int = MOST_BYTES):
        self.size, self.most_bytes = size, most_bytes
        # The client that stored an entry, and the entry.
        self._entries: dict[Name, tuple[Hashable, StoredResponse]] = {}
        # The entries of each client; clients and entries are ordered from the least recently used.
        self._names: OrderedDict[Hashable, OrderedDict[Name, None]] = OrderedDict()
        self._nbytes: dict[Hashable, int] = {}

    async def get(self, owner: bytes, response_id: str) -> StoredResponse | None:
        """The entry of an owner; None where there is none."""
        name = (owner, response_id)
        if name not in self._entries:
            return None
        client, entry = self._entries[name]
        self._names.move_to_end(client)
        self._names[client].move_to_end(name)
        return entry

    async def put(self, owner: bytes, response_id: str, entry: StoredResponse, client: Hashable = None) -> bool:
        """Stores an entry.

        Args:
            owner: Who may read it.
            response_id: Its id, which clients may choose.
            entry: The entry.
            client: Who stores it, for servers without keys, where the owner does not identify the client.

        Returns:
            Whether it is stored: not where the id is taken or the entry is too large. A later run of a request takes
            the place of an earlier one.
        """
        name, client = (owner, response_id), owner if client is None else client
        if name in self._entries:
            known = self._entries[name][1]
            if known.run is None or known.run != entry.run:
                return False
            self._drop(name)
        self._entries[name] = client, entry
        self._names.setdefault(client, OrderedDict())[name] = None
        self._names.move_to_end(client)
        self._nbytes[client] = self._nbytes.get(client, 0) + entry.nbytes
        while len(self._entries) > self.size:
            self._evict(max(self._names, key=lambda c: len(self._names[c])))
        while sum(self._nbytes.values()) > self.most_bytes:
            self._evict(max(self._names, key=self._nbytes.__getitem__))
        return name in self._entries

    async def delete(self, owner: bytes, response_id: str) -> bool:
        """Deletes an entry; whether there was one."""
        return self._drop((owner, response_id))

    def _evict(self, client: Hashable) -> None:
        self._drop(next(iter(self._names[client])))

    def _drop(self, name: Name) -> bool:
        if name not in self._entries:
            return False
        client, entry = self._entries.pop(name)
        self._nbytes[client] -= entry.nbytes
        del self._names[client][name]
        if not self._names[client]:
            del self._names[client], self._nbytes[client]
        return True

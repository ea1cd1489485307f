"""Responses that a later request may continue, in memory: bounded in number and bytes, apart for each API key."""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

# Of all entries together.
MOST_BYTES = 256 * 2**20
# Owner and id.
Name = tuple[bytes, str]


@dataclass(frozen=True)
class StoredResponse:
    """As JSON: the ``response`` without its log-probabilities, and ``input``, all items of the conversation before it,
    each on a line. The next turn needs no other entry."""

    response: bytes
    input: bytes

    @property
    def items(self) -> list[bytes]:
        """Each item of ``input`` as JSON."""
        return self.input.splitlines()

    @property
    def nbytes(self) -> int:
        return len(self.response) + len(self.input)


class ResponseStore:
    """At most ``size`` entries, of ``most_bytes`` together; of the client that holds the most, the least recently used
    entry gives way, so that no client can push out another's by storing many.

    `get`, `put` and `delete` are all that callers use, and are coroutines: a store that several servers share can
    stand in for this one.
    """

    def __init__(self, size: int = 1024, most_bytes: int = MOST_BYTES):
        self.size, self.most_bytes = size, most_bytes
        # By owner and id: who stored it, and the entry.
        self._entries: dict[Name, tuple[Hashable, StoredResponse]] = {}
        # Of each client, the names of its entries; clients and names, the least recently used ones first.
        self._names: OrderedDict[Hashable, OrderedDict[Name, None]] = OrderedDict()
        self._nbytes: dict[Hashable, int] = {}

    async def get(self, owner: bytes, response_id: str) -> StoredResponse | None:
        name = (owner, response_id)
        if name not in self._entries:
            return None
        client, entry = self._entries[name]
        self._names.move_to_end(client)
        self._names[client].move_to_end(name)
        return entry

    async def put(self, owner: bytes, response_id: str, entry: StoredResponse, client: Hashable = None) -> bool:
        """Whether it is kept: there is room for it, and no other response of that id, which clients may choose.

        ``client``: who stores it, where that says more than the owner. A server without keys takes any for an owner.
        """
        name, client = (owner, response_id), owner if client is None else client
        if name in self._entries:
            return False
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
        """Whether there was such an entry."""
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

"""Responses that a later request may continue, in memory: bounded in number and bytes, apart for each API key."""

from collections import OrderedDict
from dataclasses import dataclass

# Of all entries together.
MOST_BYTES = 256 * 2**20


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
    """At most ``size`` entries, of ``most_bytes`` together; of the owner that holds the most, the least recently used
    entry gives way, so that no client can push out another's by storing many.

    `get`, `put` and `delete` are all that callers use, and are coroutines: a store that several servers share can
    stand in for this one.
    """

    def __init__(self, size: int = 1024, most_bytes: int = MOST_BYTES):
        self.size, self.most_bytes = size, most_bytes
        # Owners and their entries, the least recently used ones first.
        self._entries: OrderedDict[bytes, OrderedDict[str, StoredResponse]] = OrderedDict()
        self._nbytes: dict[bytes, int] = {}

    async def get(self, owner: bytes, response_id: str) -> StoredResponse | None:
        entries = self._entries.get(owner, {})
        if response_id not in entries:
            return None
        self._entries.move_to_end(owner)
        entries.move_to_end(response_id)
        return entries[response_id]

    async def put(self, owner: bytes, response_id: str, entry: StoredResponse) -> bool:
        """Whether it is kept: there is room for it, and no other response of that id, which clients may choose."""
        if response_id in self._entries.get(owner, ()):
            return False
        self._entries.setdefault(owner, OrderedDict())[response_id] = entry
        self._entries.move_to_end(owner)
        self._nbytes[owner] = self._nbytes.get(owner, 0) + entry.nbytes
        while sum(map(len, self._entries.values())) > self.size:
            self._evict(max(self._entries, key=lambda o: len(self._entries[o])))
        while sum(self._nbytes.values()) > self.most_bytes:
            self._evict(max(self._entries, key=self._nbytes.__getitem__))
        return response_id in self._entries.get(owner, ())

    async def delete(self, owner: bytes, response_id: str) -> bool:
        """Whether there was such an entry."""
        return self._drop(owner, response_id)

    def _evict(self, owner: bytes) -> None:
        self._drop(owner, next(iter(self._entries[owner])))

    def _drop(self, owner: bytes, response_id: str) -> bool:
        entries = self._entries.get(owner, {})
        if response_id not in entries:
            return False
        self._nbytes[owner] -= entries.pop(response_id).nbytes
        if not entries:
            del self._entries[owner], self._nbytes[owner]
        return True

"""Choice of the next request: clients take turns by the tokens that they were served.

A client's account is that of a virtual token counter (Sheng et al., Fairness in Serving Large Language Models, OSDI
2024): a token of a prompt counts once, a new token twice. The next request is of the client with the lowest count. An
idle client earns no credit: when it returns, its count is raised to the lowest one of the active clients. When all
clients are idle, all counts are equal again.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Hashable, Iterator

from dflash_jax.engine.request import Request

# Weight of a new token, in tokens of a prompt.
NEW_TOKEN = 2.0
# Idle clients whose accounts are kept.
KEPT_ACCOUNTS = 4096


class Turns:
    """Accounts of clients.

    Attributes:
        active: Requests of each client that have not ended.
    """

    def __init__(self):
        self.active: Counter[Hashable] = Counter()
        self._served: dict[Hashable, float] = {}

    def begin(self, client: Hashable) -> None:
        """Counts a new request of a client."""
        if not self.active[client]:
            least = min((self._served[each] for each in self.active if each != client), default=0.0)
            # Idle accounts are in the order in which they became idle.
            self._served[client] = max(self._served.pop(client, 0.0), least)
        self.active[client] += 1

    def end(self, client: Hashable) -> None:
        """Counts the end of a client's request."""
        self.active[client] -= 1
        if self.active[client]:
            return
        del self.active[client]
        if not self.active:
            self._served.clear()
            return
        self._served[client] = self._served.pop(client)
        if len(self._served) > KEPT_ACCOUNTS + len(self.active):
            del self._served[next(each for each in self._served if each not in self.active)]

    def spend(self, client: Hashable, tokens: float) -> None:
        """Adds tokens that a client was served."""
        self._served[client] += tokens

    def served(self, client: Hashable) -> float:
        """Tokens that an active client was served."""
        return self._served[client]


class WaitingRequests:
    """Requests without a slot, by turns of their clients, and of one client by priority and arrival.

    Args:
        turns: The clients' accounts.
    """

    def __init__(self, turns: Turns):
        self._turns = turns
        self._by_client: dict[Hashable, list[tuple[int, int, Request]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        # Other threads read the requests, too.
        return (entry[-1] for entries in list(self._by_client.values()) for entry in list(entries))

    def push(self, request: Request) -> None:
        """Adds a request."""
        insort(self._by_client.setdefault(request.client, []), _entry(request))
        self._count += 1

    def remove(self, request: Request) -> None:
        """Takes a request out, if it is there."""
        entries = self._by_client.get(request.client, [])
        place = bisect_left(entries, _entry(request)[:2], key=lambda entry: entry[:2])
        if place < len(entries) and entries[place][-1] is request:
            del entries[place]
            self._count -= 1
            if not entries:
                del self._by_client[request.client]

    def first(self) -> Request:
        """The next request; at least one must wait."""
        firsts = (entries[0][-1] for entries in self._by_client.values())
        return min(firsts, key=lambda each: (*self.turn(each), each.order))

    def turn(self, request: Request) -> tuple[int, float]:
        """The sort key of a request among several clients: lower goes first."""
        return request.level, self._turns.served(request.client)


def _entry(request: Request) -> tuple[int, int, Request]:
    return request.priority, request.order, request

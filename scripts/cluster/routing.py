"""How many turns of conversations find the replica of the turn before, and what choosing a replica costs.

    python scripts/cluster/routing.py --out FILE

It simulates clients and replicas. Conversations share a system prompt and have no x-session-id. A number of requests is
always under way: whenever one ends, any of the conversations that wait sends its next turn. The cost is processor time,
of a prompt's beginnings and of the choice among a thousand replicas.
"""

import argparse
import heapq
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash_jax.cluster.routing import ADDED, BOUND, LEAST, Replica, Replicas, beginnings_of, session
from tools.server_process import machine

# The tokens of a vocabulary, and one that opens a message.
VOCABULARY, OPEN = 2**17, 2**17
MARKERS = frozenset((OPEN,))


class Talk:
    """A conversation, whose turns get longer.

    Args:
        rng: What its texts and its length are drawn from.
        system: The tokens of the system prompt.
    """

    def __init__(self, rng: random.Random, system: list[int]):
        self._rng, self.prompt = rng, list(system)
        self.turns = rng.randint(2, 8)
        self.name: str | None = None
        self._add(50)

    def _add(self, most: int) -> None:
        count = self._rng.randint(1, most)
        self.prompt += [OPEN, 1, *(self._rng.randrange(VOCABULARY) for _ in range(count)), 2]

    def turn(self) -> list[int]:
        """The prompt of its next turn, with the beginning of an answer."""
        return [*self.prompt, OPEN, 1, 3, 4]

    def go_on(self) -> None:
        """Adds an answer, and what the user says to it."""
        self.turns -= 1
        self._add(200)
        self._add(50)


@dataclass
class Outcome:
    """What a simulation counts.

    Attributes:
        turns: Turns after the first of a conversation.
        returned: Those that got the replica of the turn before.
        most: The most requests that a replica had, as a part of its bound when it got the last of them.
    """

    turns: int = 0
    returned: int = 0
    most: float = 0.0


def simulated(
    seed: int, replicas: int = 16, under_way: int = 128, talks: int = 400, requests: int = 4000, fronts: int = 1
) -> Outcome:
    """Sends requests of conversations with a system prompt of 500 tokens.

    Args:
        seed: Of everything that is drawn.
        replicas: The number of replicas.
        under_way: Requests at a time.
        talks: Conversations at a time, those that wait for their user included.
        requests: How many of them are sent.
        fronts: How many fronts there are, of which each turn gets any. They tell each other the beginnings of requests.
            An engine tells all of them how many requests it has whenever it gets one.
    """
    rng, fleets, outcome = random.Random(seed), [replicas_of(replicas) for _ in range(fronts)], Outcome()
    system = [rng.randrange(VOCABULARY) for _ in range(500)]
    waiting, ends = [Talk(rng, system) for _ in range(talks)], []

    def send(now: float) -> None:
        talk = waiting.pop(rng.randrange(len(waiting)))
        beginnings, fleet = beginnings_of(talk.turn(), MARKERS), rng.choice(fleets)
        replica = fleet.choose(beginnings)
        assert replica is not None, "all replicas are open"
        outcome.turns += talk.name is not None
        outcome.returned += talk.name == replica.name
        loads = Counter()
        for one in fleets:
            loads.update({each.name: each.own for each in one.all})
        fleet.count(replica, 1)
        bound = max(LEAST, math.ceil(BOUND * (loads.total() + 1) / replicas))
        outcome.most = max(outcome.most, (loads[replica.name] + 1) / bound)
        for other in fleets:
            if other is not fleet:
                same = next(each for each in other.all if each.name == replica.name)
                other.learn(beginnings[-ADDED:], same)
                other.observe(same, loads[replica.name] + 1)
        talk.name = replica.name
        heapq.heappush(ends, (now + rng.expovariate(1), rng.random(), talk, fleet, replica))

    for _ in range(under_way):
        send(0)
    for _ in range(requests - under_way):
        now, _, talk, fleet, replica = heapq.heappop(ends)
        fleet.count(replica, -1)
        talk.go_on()
        waiting.append(talk if talk.turns else Talk(rng, system))
        send(now)
    return outcome


def replicas_of(count: int) -> Replicas:
    """Replicas that take requests."""
    replicas = Replicas()
    for i in range(count):
        replicas.join(Replica(f"replica-{i}", is_open=True))
    return replicas


def cost_us(call: Callable[[], object]) -> float:
    """Microseconds of processor time, the median of 1,000 calls."""
    times = []
    for _ in range(1000):
        began = time.thread_time_ns()
        call()
        times.append(time.thread_time_ns() - began)
    return statistics.median(times) / 1000


def costs(replicas: int = 1000) -> list[tuple[str, float, float]]:
    """(request, µs of its beginnings, µs of the choice) with eight requests at each replica."""
    rng, fleet = random.Random(0), replicas_of(replicas)
    for replica in rng.choices(fleet.all, k=8 * replicas):
        fleet.count(replica, 1)
    talk, rows = Talk(rng, [rng.randrange(VOCABULARY) for _ in range(500)]), []
    first = talk.turn()
    for _ in range(9):
        talk.go_on()
    long = [token for _ in range(2000) for token in (OPEN, *range(63))]
    for name, read in (
        (f"first turn, {len(first)} tokens", lambda: beginnings_of(first, MARKERS)),
        (f"tenth turn, {len(talk.turn())} tokens", lambda: beginnings_of(talk.turn(), MARKERS)),
        (f"{len(long)} tokens in 2,000 messages", lambda: beginnings_of(long, MARKERS)),
        ("with x-session-id", lambda: session("0123456789abcdef")),
    ):
        beginnings = read()
        rows.append((name, cost_us(read), cost_us(lambda beginnings=beginnings: fleet.choose(beginnings))))
    return rows


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seeds", type=int, default=5)
    p.add_argument("--out", type=Path, help="write the report here too")
    args = p.parse_args()
    lines = [f"16 replicas, 128 requests under way, 400 conversations of 2 to 8 turns, on {machine()}.", ""]
    lines += ["| fronts, seed | turns after the first | back at their replica | fullest, of its bound |"]
    lines += ["| ---: | ---: | ---: | ---: |"]
    for fronts, seed in [(fronts, seed) for fronts in (1, 4) for seed in range(args.seeds)]:
        outcome = simulated(seed, fronts=fronts)
        share = f"{100 * outcome.returned / outcome.turns:.1f} %"
        lines += [f"| {fronts}, {seed} | {outcome.turns} | {share} | {outcome.most:.2f} |"]
    lines += ["", "| request, 1,000 replicas | beginnings, µs | choice, µs |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {reading:.0f} | {choice:.0f} |" for name, reading, choice in costs()]
    report = "\n".join([*lines, ""])
    print(report)
    if args.out:
        args.out.write_text(report)


if __name__ == "__main__":
    main()

"""How many turns of conversations find the replica of the turn before, and what choosing a replica costs.

    python scripts/cluster/routing.py --out FILE

It simulates clients and replicas. Conversations share a system prompt and have no x-session-id. A number of requests is
always under way: whenever one ends, any of the conversations that wait sends its next turn. The cost is processor time,
of a prompt's beginnings and of the choice among a thousand replicas.
"""

import argparse
import heapq
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_jax.cluster.routing import BOUND, LEAST, Replica, Replicas, beginnings_of
from tools.server_process import machine


class Talk:
    """A conversation, whose turns get longer.

    Args:
        rng: What its texts and its length are drawn from.
        system: The system prompt.
    """

    def __init__(self, rng: random.Random, system: str):
        self._rng, self._messages = rng, [{"role": "system", "content": system}]
        self.turns = rng.randint(2, 8)
        self.replica: Replica | None = None
        self._add("user", 200)

    def _add(self, role: str, most: int) -> None:
        content = self._rng.randbytes(self._rng.randint(5, most // 2)).hex()
        self._messages.append({"role": role, "content": content})

    def body(self) -> bytes:
        """The body of its next turn, other fields included."""
        fields = {"model": "m", "seed": self._rng.random(), "messages": self._messages, "max_tokens": 100}
        return json.dumps(fields).encode()

    def go_on(self) -> None:
        """Adds an answer, and what the user says to it."""
        self.turns -= 1
        self._add("assistant", 800)
        self._add("user", 200)


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


def simulated(seed: int, replicas: int = 16, under_way: int = 128, talks: int = 400, requests: int = 4000) -> Outcome:
    """Sends requests of conversations with a system prompt of 2 kB.

    Args:
        seed: Of everything that is drawn.
        replicas: The number of replicas.
        under_way: Requests at a time.
        talks: Conversations at a time, those that wait for their user included.
        requests: How many of them are sent.
    """
    rng, fleet, outcome = random.Random(seed), Replicas(_never), Outcome()
    for i in range(replicas):
        fleet.join(f"replica-{i}", "")
    system = rng.randbytes(1000).hex()
    waiting, ends = [Talk(rng, system) for _ in range(talks)], []

    def send(now: float) -> None:
        talk = waiting.pop(rng.randrange(len(waiting)))
        replica = fleet.choose(beginnings_of({}, talk.body()))
        assert replica is not None, "all replicas are open"
        outcome.turns += talk.replica is not None
        outcome.returned += talk.replica is replica
        bound = max(LEAST, math.ceil(BOUND * (sum(len(each.attempts) for each in fleet.all) + 1) / replicas))
        talk.replica, task = replica, _a_task()
        fleet.begin(replica, task)
        outcome.most = max(outcome.most, len(replica.attempts) / bound)
        heapq.heappush(ends, (now + rng.expovariate(1), rng.random(), talk, task))

    for _ in range(under_way):
        send(0)
    for _ in range(requests - under_way):
        now, _, talk, task = heapq.heappop(ends)
        fleet.end(talk.replica, task)
        talk.go_on()
        waiting.append(talk if talk.turns else Talk(rng, system))
        send(now)
    return outcome


def _a_task() -> Any:
    """Stands for the task of a request."""
    return object()


async def _never(_: Replica) -> bool:
    raise AssertionError("nothing looks at these replicas")


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
    rng, fleet = random.Random(0), Replicas(_never)
    for i in range(replicas):
        fleet.join(f"replica-{i}", "")
    for replica in rng.choices(fleet.all, k=8 * replicas):
        fleet.begin(replica, _a_task())
    talk, rows = Talk(rng, rng.randbytes(1000).hex()), []
    first = talk.body()
    for _ in range(9):
        talk.go_on()
    large = json.dumps({"messages": [{"role": "user", "content": "x" * 200}] * 40_000}).encode()
    session = {b"x-session-id": b"0123456789abcdef"}
    for name, headers, body in (
        ("first turn, 2 kB", {}, first),
        ("tenth turn", {}, talk.body()),
        ("10 MB in 40,000 messages", {}, large),
        ("with x-session-id", session, first),
    ):
        beginnings = beginnings_of(headers, body)
        reading = cost_us(lambda headers=headers, body=body: beginnings_of(headers, body))
        rows.append((name, reading, cost_us(lambda beginnings=beginnings: fleet.choose(beginnings))))
    return rows


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seeds", type=int, default=5)
    p.add_argument("--out", type=Path, help="write the report here too")
    args = p.parse_args()
    lines = [f"16 replicas, 128 requests under way, 400 conversations of 2 to 8 turns, on {machine()}.", ""]
    lines += ["| seed | turns after the first | back at their replica | fullest, of its bound |"]
    lines += ["| ---: | ---: | ---: | ---: |"]
    for seed in range(args.seeds):
        outcome = simulated(seed)
        share = f"{100 * outcome.returned / outcome.turns:.1f} %"
        lines += [f"| {seed} | {outcome.turns} | {share} | {outcome.most:.2f} |"]
    lines += ["", "| request, 1,000 replicas | beginnings, µs | choice, µs |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {reading:.0f} | {choice:.0f} |" for name, reading, choice in costs()]
    report = "\n".join([*lines, ""])
    print(report)
    if args.out:
        args.out.write_text(report)


if __name__ == "__main__":
    main()

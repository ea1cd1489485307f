"""Replicas that die, are replaced, come and go under load: each answer is that of a cluster without a disturbance.

The short form of scripts/cluster/check.py, without Ray: replicas are servers in this process.
"""

import asyncio

import pytest

from tests.cluster.conftest import Cluster
from tests.helpers import load_script
from tests.server.conftest import wait_until

check = load_script("cluster/check.py")
# Completions: a chat would start each replica's process of templates.
REQUESTS = [each for i in range(40) if (each := check.wanted(i, 40))[0] == "/v1/completions"][:8]
# Requests, clients, and the i-th request.
LOAD = len(REQUESTS), 4, REQUESTS.__getitem__


def is_busy(cluster, name: str) -> bool:
    return cluster.replicas[name].serving.in_flight > 0


def kill(cluster) -> None:
    """Kills a replica that has sent a part of a stream; another one where the stream has ended just before."""
    names = []

    def has_streams() -> bool:
        # More than the two messages of a whole answer.
        names[:] = [name for (name, _), count in list(cluster.cut.sent.items()) if count > 2]
        return any(name in cluster.replicas for name in names)

    while not cluster.counts.resumed:
        assert wait_until(has_streams)
        cluster.replicas.pop(next(name for name in names if name in cluster.replicas)).kill()
        cluster.start_replica()


def replace(cluster) -> None:
    """Ends the replicas one after the other, and starts one of the next version for each."""
    for name in list(cluster.replicas):
        cluster.end_replica(name)
        started = cluster.start_replica()
        assert wait_until(lambda started=started: is_busy(cluster, started))


def grow_and_shrink(cluster) -> None:
    started = cluster.start_replica()
    assert wait_until(lambda: is_busy(cluster, started))
    cluster.end_replica(started)


@pytest.mark.parametrize(("disturb", "replicas"), [(kill, 2), (replace, 2), (grow_and_shrink, 1)])
def test_answers_under_load_are_those_without_a_disturbance(llm, engine, disturb, replicas):
    cluster = Cluster(llm, engine, replicas)

    async def work(over):
        try:
            await asyncio.to_thread(disturb, cluster)
        finally:
            over.set()

    async def main():
        expected, over = await check.expected_of(cluster.url, *LOAD), asyncio.Event()
        _, answers = await asyncio.gather(work(over), check.send_all(cluster.url, *LOAD, over))
        return check.compared(answers, expected, disturb.__name__)

    try:
        requests, *wrong = asyncio.run(main())
        assert requests >= LOAD[0]
        assert wrong == [0, 0, 0]
        assert cluster.counts.failed == 0
        assert (cluster.counts.resumed > 0) == (disturb is kill)
    finally:
        cluster.stop()

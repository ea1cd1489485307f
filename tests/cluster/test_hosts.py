"""A replica over several hosts on a stand-in for Ray, whose actors are threads of this process."""

import queue
import sys
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import ModuleType, SimpleNamespace

import pytest

from dflash_jax.cluster import hosts
from dflash_jax.cluster.options import parse
from dflash_jax.errors import EngineError


class RayError(Exception):
    """As Ray raises what an actor has raised."""


class Actor:
    """What a `Host` is to a `HostGroup`: calls of its methods are those of a `World`."""

    def __init__(self, world, index):
        self.world, self.index = world, index

    def __getattr__(self, name):
        def submit(*args):
            return self.world.pool.submit(getattr(self.world, name), self.index, *args)

        return SimpleNamespace(remote=submit)


class World:
    """What each call of an actor does, and what was reserved and given back."""

    def __init__(self):
        self.pool, self.reserved, self.released, self.calls = ThreadPoolExecutor(8), None, 0, []
        self.ended: Future = Future()

    def ready(self):
        pass

    def coordinator(self, index):
        return "10.0.0.1:1234"

    def lead(self, index, coordinator, count):
        self.calls.append(("lead", index, coordinator, count))
        return "10.0.0.1", 5

    def follow(self, index, coordinator, count, number):
        self.calls.append(("follow", index, coordinator, count, number))
        self.ended.result()

    def state(self, index):
        return 3, None

    def stop(self, index):
        self.calls.append(("stop", index))
        self.ended.set_result(None)


@pytest.fixture
def world(monkeypatch):
    """A stand-in for Ray in place of the module."""
    found, made = World(), []

    def get(futures, timeout=None):
        try:
            return futures.result(timeout)
        except EngineError as e:
            raise RayError(str(e)) from None

    def wait_for(futures, num_returns):
        done = wait(futures, return_when=FIRST_COMPLETED).done
        return [next(f for f in futures if f in done)], []

    def make(*_):
        made.append(Actor(found, len(made)))
        return made[-1]

    def reserve(bundles, strategy):
        found.reserved = bundles, strategy
        return SimpleNamespace(bundle_count=len(bundles), ready=lambda: found.pool.submit(found.ready))

    def release(_):
        found.released += 1

    ray = ModuleType("ray")
    ray.get, ray.wait, ray.exceptions = get, wait_for, SimpleNamespace(RayError=RayError)
    ray.remote = lambda _: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=make))
    scheduling = ModuleType("ray.util.scheduling_strategies")
    scheduling.PlacementGroupSchedulingStrategy = lambda group, index: index
    groups = ModuleType("ray.util.placement_group")
    groups.placement_group, groups.remove_placement_group = reserve, release
    modules = {"ray": ray, "ray.util": ModuleType("ray.util"), scheduling.__name__: scheduling, groups.__name__: groups}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield found
    if not found.ended.done():
        found.ended.set_result(None)
    found.pool.shutdown()


def group(*words: str) -> hosts.HostGroup:
    args, _ = parse(["--replica-hosts", "2", "--mesh", "tensor=4", *words])
    return hosts.HostGroup(args, None, b"secret", "", 2.0)


def test_the_first_host_leads_and_the_others_follow_until_it_stops(world, monkeypatch):
    monkeypatch.setattr(hosts, "LOOK_S", 0.01)
    replica = group("--replica-cpus", "3")
    assert world.reserved == ([{"CPU": 3.0, "GPU": 2.0}] * 2, "SPREAD")
    replica.start()
    assert replica.address == ("10.0.0.1", 5)
    assert replica.failure is None
    replica.stop()
    assert sorted(world.calls) == [
        ("follow", 1, "10.0.0.1:1234", 2, 1), ("lead", 0, "10.0.0.1:1234", 2), ("stop", 0),
    ]  # fmt: skip
    assert world.released == 1


@pytest.mark.parametrize("which", ["lead", "follow"])
def test_a_host_that_fails_while_it_loads_ends_the_start_and_gives_back_the_hosts(world, monkeypatch, which):
    """Whatever the others wait for."""

    def fails(*_):
        raise EngineError("out of memory")

    def waits(*_):
        world.ended.result()

    monkeypatch.setattr(world, "lead", waits)
    monkeypatch.setattr(world, which, fails)
    replica = group()
    with pytest.raises(EngineError, match=r"a replica over 2 hosts cannot start: out of memory"):
        replica.start()
    assert world.released == 1


def test_hosts_that_cannot_be_reserved_are_given_back(world, monkeypatch):
    def fails():
        raise EngineError("a node has ended")

    monkeypatch.setattr(world, "ready", fails)
    with pytest.raises(EngineError, match="a replica over 2 hosts cannot start: a node has ended"):
        group().start()
    assert world.released == 1


def test_a_replica_ends_when_its_first_host_is_lost(world, monkeypatch):
    """Its process: Serve starts another one at once."""
    said = queue.Queue()
    monkeypatch.setattr(hosts, "LOOK_S", 0.01)
    monkeypatch.setattr(hosts, "end_process", said.put)

    def is_lost(_):
        raise EngineError("gone")

    monkeypatch.setattr(world, "state", is_lost)
    replica = group()
    replica.start()
    assert said.get(timeout=60) == "the first host of a replica is lost: RayError"
    replica.stop()

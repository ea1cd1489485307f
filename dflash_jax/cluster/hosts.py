"""A replica over several hosts: one actor of Ray on each of them, in a placement group of the replica's own."""
# Ray is not installed everywhere.
# pyright: reportMissingImports=false

import os
import threading
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from dflash_jax.cluster.replica import ReplicaServer
from dflash_jax.errors import EngineError
from dflash_jax.process import end_process
from dflash_jax.server import transport
from dflash_jax.server.launch import load, set_logging

# Seconds between two looks at the first host, and until one without an answer counts as lost.
LOOK_S, LOST_S = 1.0, 30.0
# Seconds that the first host may take to stop after its drain.
STOP_S = 5.0
# What a host without a reservation reserves: a bundle of a placement group is never empty.
LEAST_CPUS = 0.001


class Host:
    """The process of one host, as an actor of Ray. The first one has the engine and leads, the others follow.

    Args:
        args: The arguments of `dflash cluster`.
        system: The `System` of its config, or None.
        secret: What fronts and engines prove to each other.
        threads: OMP_NUM_THREADS of the process that started the cluster, or "".
    """

    def __init__(self, args: Namespace, system, secret: bytes, threads: str):
        import ray

        if not args.replica_cpus:
            # Ray sets it to 1 for an actor that reserves no CPU.
            os.environ["OMP_NUM_THREADS"] = threads
        self._args, self._system, self._secret = args, system, secret
        self._address = ray.util.get_node_ip_address()
        self._server: ReplicaServer | None = None

    def coordinator(self) -> str:
        """Where the processes of the replica may find its first one, HOST:PORT."""
        with transport.listen(self._address, 0) as free:
            return f"{self._address}:{free.getsockname()[1]}"

    def number_in_slice(self) -> int:
        """The number that this host has in its TPU slice, by Ray's label."""
        import ray

        return int(ray.get_runtime_context().get_node_labels()["ray.io/tpu-worker-id"])

    def _join(self, coordinator: str, count: int, index: int) -> None:
        """Joins the ``count`` processes of the replica as number ``index``."""
        os.environ |= {
            "JAX_COORDINATOR_ADDRESS": coordinator,
            "JAX_NUM_PROCESSES": str(count),
            "JAX_PROCESS_ID": str(index),
        }
        from dflash_jax.parallel import distributed

        distributed.start()
        if distributed.is_first() != (index == 0):
            raise EngineError(f"process {index} of a replica: JAX numbers its processes otherwise")

    def lead(self, coordinator: str, count: int) -> tuple[str, int]:
        """Starts the engine on the ``count`` processes of the replica, and returns where it listens."""
        self._join(coordinator, count, 0)
        self._server = ReplicaServer(self._args, self._system, self._secret, self._address)
        self._server.start()
        return self._server.address

    def follow(self, coordinator: str, count: int, index: int) -> None:
        """Makes the calls of the first process until it ends."""
        set_logging(self._args)
        self._join(coordinator, count, index)
        with load(self._args, self._system).leading():
            pass

    def state(self) -> tuple[int, str | None]:
        """`ReplicaServer.ongoing` and `ReplicaServer.failure` of the first host."""
        assert self._server is not None
        return self._server.ongoing, self._server.failure

    def stop(self) -> None:
        """`ReplicaServer.stop` of the first host. The others end with it."""
        if self._server is not None:
            self._server.stop()


def bundle(args: Namespace, gpus: float) -> dict[str, float]:
    """What one host of a replica reserves, by resource."""
    wanted = {"CPU": args.replica_cpus, "GPU": gpus, **args.replica_resources}
    return {name: value for name, value in wanted.items() if value} or {"CPU": LEAST_CPUS}


class HostGroup:
    """The engine of a replica over several hosts, with what `ReplicaServer` has.

    Args:
        args, system, secret, threads: As `Host` takes them.
        gpus: GPUs of a host.

    Attributes:
        address: Where the first host listens.
        ongoing: Requests that have not ended, at the last look.
        failure: Why the replica does not work; None while it does.
    """

    def __init__(self, args: Namespace, system, secret: bytes, threads: str, gpus: float):
        from ray.util.placement_group import placement_group, remove_placement_group

        self._args, self.ongoing, self.failure, self.address = args, 0, None, ("", 0)
        self._arguments = (args, system, secret, threads)
        self._has_ended = threading.Event()
        if args.replica_slice is None:
            # What each host reserves.
            self._each = bundle(args, gpus)
            self._group = placement_group([self._each] * args.replica_hosts, strategy="SPREAD")
            self._release: Callable[[], None] = partial(remove_placement_group, self._group)
        else:
            from ray.util.tpu import SlicePlacementGroup

            version, topology = args.replica_slice
            whole = SlicePlacementGroup(topology, version)
            self._each, self._group, self._release = whole.bundle_resources, whole.placement_group, whole.shutdown

    def start(self) -> None:
        """Starts all hosts, and returns when the first one answers requests.

        Raises:
            EngineError: A host has ended.
        """
        import ray

        count = self._group.bundle_count
        try:
            first, *others = self._hosts = self._actors()
            coordinator = ray.get(first.coordinator.remote())
            followers = [host.follow.remote(coordinator, count, 1 + i) for i, host in enumerate(others)]
            leader = first.lead.remote(coordinator, count)
            (ended,), _ = ray.wait([leader, *followers], num_returns=1)
            address = ray.get(ended)
            if ended != leader:
                raise EngineError("another host than the first has ended")
        except BaseException as e:
            self._release()
            if not isinstance(e, ray.exceptions.RayError | EngineError):
                raise
            raise EngineError(f"a replica over {count} hosts cannot start: {str(e)[-500:]}") from None
        self.address = address
        threading.Thread(target=self._look, name="look", daemon=True).start()

    def _actors(self) -> list[Any]:
        """A `Host` on every bundle of the placement group, in the order in which JAX numbers them."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray.get(self._group.ready())
        resources, actor = dict(self._each), ray.remote(Host)
        options = {"num_cpus": resources.pop("CPU", 0), "num_gpus": resources.pop("GPU", 0), "resources": resources}
        places = [PlacementGroupSchedulingStrategy(self._group, i) for i in range(self._group.bundle_count)]
        hosts = [
            actor.options(max_concurrency=8, scheduling_strategy=place, **options).remote(*self._arguments)
            for place in places
        ]
        if self._args.replica_slice is None:
            return hosts
        # JAX takes the numbers that a slice gives its hosts.
        numbers = ray.get([host.number_in_slice.remote() for host in hosts])
        return [host for _, host in sorted(zip(numbers, hosts, strict=True), key=lambda pair: pair[0])]

    def _look(self) -> None:
        import ray

        while not self._has_ended.wait(LOOK_S):
            try:
                self.ongoing, self.failure = ray.get(self._hosts[0].state.remote(), timeout=LOST_S)
            except ray.exceptions.RayError as e:
                if not self._has_ended.is_set():
                    # Without this process Serve starts another replica at once, and Ray ends the other hosts.
                    end_process(f"the first host of a replica is lost: {type(e).__name__}")

    def stop(self) -> None:
        """Takes no further requests, returns when those under way have ended or the drain's time has, and ends all."""
        import ray

        self._has_ended.set()
        with suppress(ray.exceptions.RayError):
            ray.get(self._hosts[0].stop.remote(), timeout=self._args.drain_s + STOP_S)
        self._release()

"""The replicas as an application of Ray Serve: ``dflash_jax.cluster.app:build`` for ``serve deploy``.

Ray is imported where it is used, since the module can be read without it.
"""
# Ray is not installed everywhere.
# pyright: reportMissingImports=false

import asyncio
import logging
import math
import os
import secrets
import threading
from argparse import Namespace
from contextlib import suppress
from functools import partial
from typing import Any

from dflash_jax.cluster import options
from dflash_jax.cluster.hosts import HostGroup
from dflash_jax.cluster.ingress import IngressServer
from dflash_jax.cluster.replica import ReplicaServer
from dflash_jax.errors import InputError

log = logging.getLogger("dflash_jax.cluster")

# Of the ingresses' actors.
NAMESPACE = "dflash"
# A resource that only the head node of a cluster has, and the part of it that the ingress takes.
HEAD = {"node:__internal_head__": 0.001}
# Seconds between two messages of a replica to the ingresses, and between two looks of an ingress at its application.
BEAT_S, LOOK_S = 2.0, 20.0
# Seconds of Serve's shutdown of a replica beyond those of its drain.
END_S = 10.0
LOOPBACK = "127.0.0.1"


def names_of(args: Namespace) -> list[str]:
    """The names of the ingresses' actors."""
    return [f"{args.name}-ingress", *(f"{args.name}-ingress-{i}" for i in range(1, args.ingresses))]


def actor_of(name: str) -> Any:
    """An ingress's actor. Raises ValueError where there is none."""
    import ray

    return ray.get_actor(name, NAMESPACE)


class Ingress:
    """The process of an address of the cluster: an actor of Ray, which Ray starts again where it dies.

    Args:
        args: The arguments of `dflash cluster`.
        secret: What fronts and engines prove to each other.
        name: The actor's name.
    """

    def __init__(self, args: Namespace, secret: bytes, name: str):
        self._args, self._secret, self._name, self._server = args, secret, name, IngressServer(args, secret)
        self._server.start()
        threading.Thread(target=self._end_with_application, name="end", daemon=True).start()

    def url(self) -> str:
        """Where clients reach it."""
        return self._server.url

    def secret(self) -> bytes:
        """What fronts and engines prove to each other."""
        return self._secret

    def join(self, name: str, host: str, port: int) -> None:
        """An engine takes requests, or still does."""
        self._server.join(name, host, port)

    def leave(self, name: str) -> None:
        """An engine takes no further requests."""
        self._server.leave(name)

    def stop(self, seconds: float) -> None:
        """See `IngressServer.stop`."""
        self._server.stop(seconds)

    def _end_with_application(self) -> None:
        """Ends the actor when its application is deleted: ``serve shutdown`` does not know it."""
        import ray
        from ray import serve
        from ray.exceptions import RayError

        has_begun, wait = False, threading.Event()
        while not wait.wait(LOOK_S):
            if self._server.engines:
                has_begun = True
            elif has_begun:
                with suppress(RayError):
                    if self._args.name not in serve.status().applications:
                        ray.kill(actor_of(self._name))


class Replica:
    """One replica, as Serve starts, checks and ends it.

    Args:
        args: The arguments of `dflash cluster`.
        system: The `System` of its config, or None.
        threads: OMP_NUM_THREADS of the process that started the cluster, or None.
    """

    # Serve awaits it. Where it blocked its thread for long, Serve would take the replica for dead.
    async def __init__(self, args: Namespace, system, threads: str | None):
        import ray
        from ray import serve

        context = serve.get_replica_context()
        if context.app_name != args.name:
            raise InputError(
                f"--name {args.name}: the application is {context.app_name!r}, and must have the same name"
            )
        self._ingresses, self._name = names_of(args), context.replica_id.unique_id
        secret = await actor_of(self._ingresses[0]).secret.remote()
        if args.replica_hosts > 1 or args.replica_slice is not None:
            make = partial(HostGroup, args, system, secret, threads or "", gpus_of(args) / args.replica_hosts)
        else:
            if not args.replica_cpus:
                # Ray sets it to 1 for an actor that reserves no CPU.
                os.environ["OMP_NUM_THREADS"] = threads or ""
            host = LOOPBACK if args.address is None else ray.util.get_node_ip_address()
            make = partial(ReplicaServer, args, system, secret, host)
        self._server: ReplicaServer | HostGroup = await asyncio.to_thread(make)
        await asyncio.to_thread(self._server.start)
        self._has_ended = threading.Event()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def _tell(self, method: str, *arguments: Any) -> None:
        """Calls a method of all ingresses that are there."""
        for name in self._ingresses:
            with suppress(ValueError):
                getattr(actor_of(name), method).remote(*arguments)

    def _beat(self) -> None:
        """Tells the ingresses again and again that this engine is there: a new one knows none."""
        while not self._has_ended.is_set():
            self._tell("join", self._name, *self._server.address)
            self._has_ended.wait(BEAT_S)

    def check_health(self) -> None:
        """Serve calls it, and replaces a replica that raises."""
        if (failure := self._server.failure) is not None:
            raise RuntimeError(f"the engine failed: {failure}")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve calls it: what `replicas_for_load` gets of each replica."""
        return {"ongoing": float(self._server.ongoing)}

    async def __del__(self):
        """Serve awaits it when the replica is to end. Returns when its requests have ended."""
        if hasattr(self, "_has_ended") and not self._has_ended.is_set():
            self._has_ended.set()
            self._tell("leave", self._name)
            await asyncio.to_thread(self._server.stop)


def replicas_for_load(context: Any) -> tuple[float, dict]:
    """The number of replicas that Serve aims at: (it, nothing to keep).

    Args:
        context: Serve's AutoscalingContext, with what `Replica.record_autoscaling_stats` returned.
    """
    ongoing = sum((context.aggregated_metrics or {}).get("ongoing", {}).values())
    return math.ceil(ongoing / context.config.get_target_ongoing_requests()), {}


def gpus_of(args: Namespace) -> float:
    """GPUs that a replica reserves, on all of its hosts."""
    if args.replica_gpus is not None:
        return args.replica_gpus
    import ray

    if args.platform == "cpu" or not ray.cluster_resources().get("GPU"):
        return 0
    return options.devices_of(args.mesh)


def deployment(args: Namespace, system) -> Any:
    """The application of parsed arguments, without the ingress."""
    from ray import serve

    least, most = args.replicas
    count: dict = {"num_replicas": least}
    if most > least:
        look_back = max(1.0, min(args.scale_up_s, 10.0))
        count = {
            "autoscaling_config": {
                "min_replicas": least,
                "max_replicas": most,
                "target_ongoing_requests": args.target_ongoing,
                "upscale_delay_s": args.scale_up_s,
                "downscale_delay_s": args.scale_down_s,
                "look_back_period_s": look_back,
                # Serve wants more than one measurement in that time. Its default is 10 s.
                "metrics_interval_s": look_back / 2,
                "policy": {"policy_function": "dflash_jax.cluster.app:replicas_for_load"},
            }
        }
    reserved: dict = {"num_cpus": args.replica_cpus, "num_gpus": gpus_of(args), "resources": args.replica_resources}
    if args.replica_hosts > 1 or args.replica_slice is not None:
        # Its hosts reserve.
        reserved = {"num_cpus": 0}
    return serve.deployment(
        Replica,
        name="Replica",
        max_ongoing_requests=2 * args.slots,
        graceful_shutdown_timeout_s=args.drain_s + END_S,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=5.0,
        max_constructor_retry_count=2,
        ray_actor_options=reserved,
        **count,
    ).bind(args, system, os.environ.get("OMP_NUM_THREADS"))


def start_ingresses(args: Namespace, may_run: bool) -> list[Any]:
    """Starts the ingresses' actors, and returns them.

    Args:
        args: The arguments of `dflash cluster`.
        may_run: Whether those that run are taken, as they are.

    Raises:
        InputError: One runs, or an application of the same name, and may not; or there are fewer nodes than ingresses.
    """
    import ray
    from ray import serve

    if not may_run and args.name in serve.status().applications:
        raise _taken(args.name)
    places, actors, secret = _places(args.ingresses), [], secrets.token_bytes(32)
    for name, place in zip(names_of(args), places, strict=True):
        actor = ray.remote(Ingress).options(
            name=name,
            namespace=NAMESPACE,
            get_if_exists=may_run,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=64,
            **place,
        )
        try:
            actors.append(actor.remote(args, secret, name))
        except ValueError:
            # Ray gives each name once, however many commands ask for it at the same time.
            for started in actors:
                ray.kill(started)
            raise _taken(args.name) from None
        if len(places) > 1:
            # That of an ingress that ran already is another one.
            secret = ray.get(actors[0].secret.remote())
    return actors


def _places(count: int) -> list[dict[str, Any]]:
    """Options of actors on as many nodes, of which the head node is the first one."""
    if count == 1:
        return [{"resources": HEAD}]
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"]]
    nodes.sort(key=lambda node: (next(iter(HEAD)) not in node["Resources"], node["NodeID"]))
    if len(nodes) < count:
        raise InputError(f"--ingresses {count}: this Ray cluster has {len(nodes)} nodes, and each has one at most")
    return [
        {"scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)} for node in nodes[:count]
    ]


def _taken(name: str) -> InputError:
    import ray

    try:
        by = f" by {ray.get(actor_of(f'{name}-ingress').url.remote())}"
    except ValueError:
        by = ", and not by a cluster of ours"
    return InputError(f"--name {name} is taken on this Ray cluster{by}: end that one first, or give another --name")


def build(config: dict) -> Any:
    """The application for a config file of Serve.

    Args:
        config: ``args`` of the file: ``argv``, the words of `dflash cluster`.
    """
    args, system = options.parse([str(word) for word in config["argv"]])
    args.address = args.address or "auto"
    # The same file again is an update.
    start_ingresses(args, may_run=True)
    return deployment(args, system)

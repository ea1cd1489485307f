"""`dflash cluster`: starts Ray or joins it, runs the replicas, and ends everything at a signal."""
# Ray is not installed everywhere.
# pyright: reportMissingImports=false

import logging
import os
import signal
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, NoReturn

from dflash_jax.cluster.options import make_parser, parse
from dflash_jax.errors import EngineError, InputError
from dflash_jax.process import exit_code, leave
from dflash_jax.server import cors, transport
from dflash_jax.server.launch import check_extra, name_model, set_logging, warn_of_open_access

__all__ = ["main", "make_parser"]

log = logging.getLogger("dflash_jax.cluster")

# Seconds of each step of the end, after the drain.
STEP_S = 8.0
# Bytes of Ray's store of objects, which only messages between processes use.
STORE_BYTES = 200 * 2**20


class _Stopped(BaseException):
    """A signal asks for the end."""


def _hear(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _on_signal(number: int, frame) -> None:
    # A second one has the process end as usual; the other one is not to interrupt the end of Ray's processes.
    for other in (signal.SIGTERM, signal.SIGINT):
        signal.signal(other, signal.SIG_DFL if other == number else signal.SIG_IGN)
    raise _Stopped(signal.Signals(number).name)


def _check_address(args: Namespace) -> None:
    """Checks that the cluster's address is free, and replaces a port of 0. Raises InputError."""
    transport.tls_context(args)
    listening = transport.listen(args.host, args.port, args.uds)
    if args.uds is None:
        args.port = listening.getsockname()[1]
    transport.close(listening, args.uds)


def _start_ray(args: Namespace) -> None:
    """Starts Ray on this machine, or joins a cluster. Raises InputError."""
    # Nothing is reported to anyone.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    options: dict[str, Any] = {"address": args.address}
    if args.address is None:
        options = {"address": "local", "include_dashboard": False, "object_store_memory": STORE_BYTES}
    try:
        ray.init(logging_level=logging.WARNING, **options)
    except Exception as e:
        # Ray raises plain exceptions, too.
        reason = " ".join(str(e).split())[:300]
        if args.address is None:
            raise EngineError(f"Ray cannot start: {reason}") from None
        raise InputError(f"--address {args.address}: {reason}") from None


def run(args: Namespace, system) -> NoReturn:
    """Runs the cluster until a signal, and ends the process."""
    set_logging(args)
    check_extra()
    if find_spec("ray") is None:
        raise InputError('the cluster needs its extra: pip install "dflash-jax[ray]"')
    cors.of_arguments(args)
    if args.address is None:
        _check_address(args)
    warn_of_open_access(args)
    # Here, not in each replica, which may have another network.
    name_model(args)
    before, drain_s, ingresses = _children(), 0.0, []
    _hear(_on_signal)
    try:
        _start_ray(args)
        # Ray has replaced a handler.
        _hear(_on_signal)
        from dflash_jax.cluster import app

        ingresses = app.start_ingresses(args, may_run=False)
        _serve(app, args, system, ingresses)
    except _Stopped as e:
        log.info("%s: ending", e)
        drain_s = args.drain_s
    finally:
        _hear(signal.SIG_IGN)
        _end(args, drain_s, before, ingresses)
        _hear(signal.SIG_DFL)
    # All other processes have ended. Ray would wait for them at the end of the interpreter.
    leave(0)


def _serve(app, args: Namespace, system, ingresses: list) -> None:
    """Starts replicas, and waits for a signal."""
    import ray
    from ray import serve

    try:
        urls = ray.get([ingress.url.remote() for ingress in ingresses])
    except ray.exceptions.RayActorError as e:
        raise InputError(f"an ingress cannot start: {' '.join(str(e).split())[-300:]}") from None
    log.info("listening on %s, starting %d replicas", ", ".join(urls), args.replicas[0])
    serve.start(proxy_location="Disabled")
    try:
        serve.run(app.deployment(args, system), name=args.name, route_prefix=None)
    except RuntimeError as e:
        raise EngineError(f"the replicas cannot start: {' '.join(str(e).split())[-500:]}") from None
    log.info("%d replicas are ready", args.replicas[0])
    while True:
        time.sleep(1.0)


def _children() -> set:
    """The processes below this one."""
    import psutil

    return set(psutil.Process().children(recursive=True))


def _end(args: Namespace, drain_s: float, before: set, ingresses: list) -> None:
    """Ends the application and the ingresses that this process has started, and Ray where it has started that, too."""
    import psutil
    import ray

    if ingresses:
        from ray import serve

        with suppress(Exception):
            ray.get([ingress.stop.remote(drain_s) for ingress in ingresses], timeout=drain_s + STEP_S)
        _within(STEP_S, serve.shutdown if args.address is None else lambda: serve.delete(args.name))
        for ingress in ingresses:
            with suppress(Exception):
                ray.kill(ingress)
    # A start that was interrupted has processes, too.
    started = _children() - before if args.address is None else set()
    _within(STEP_S, ray.shutdown)
    for process in psutil.wait_procs(started, timeout=STEP_S)[1]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _within(seconds: float, work: Callable) -> None:
    """Does ``work``, and leaves it behind where it takes longer."""

    def quietly() -> None:
        with suppress(Exception):
            work()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(seconds)


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return exit_code(lambda: run(*parse(argv)))

"""The parts of a server, made of the arguments of `dflash serve`: a model, its engine, an application, HTTP."""

import asyncio
import gc
import logging
import math
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from importlib.util import find_spec
from typing import cast

from dflash_jax.errors import InputError
from dflash_jax.options.systems import llm_keywords
from dflash_jax.parallel.devices import set_platform
from dflash_jax.progress import starting
from dflash_jax.server import transport
from dflash_jax.server.limits import Additions

log = logging.getLogger("dflash_jax.server")

# Below this, a shorter context is no longer tried on its own.
LEAST_LEN = 4096
# Seconds for the errors of requests that a stop ends.
ERRORS_S = 5.0
# Open files beside connections: checkpoints, caches, worker processes.
OTHER_FILES = 512


def allow_connections(wanted: int) -> int:
    """How many connections there may be: ``wanted``, or as many as the system's limit of open files allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    possible = wanted if most == resource.RLIM_INFINITY else max(most - OTHER_FILES, 1)
    if possible < wanted:
        log.warning("at most %d connections: the limit of open files is %d", possible, most)
    return min(wanted, possible)


def follows(args) -> bool:
    """Joins the processes that ``--distributed`` makes one server of: whether this one follows the first."""
    if not args.distributed:
        return False
    if args.target is None and not args.bundled:
        raise InputError("--distributed: name a model, or --bundled, so that every process has the same")
    from dflash_jax.parallel import distributed

    distributed.start()
    return not distributed.is_first()


def follow(args, system) -> int:
    """Makes the calls of the first process until it ends: the exit code."""

    def wait(number: int, _) -> None:
        # A signal to all processes has the first one drain, which needs the others until then.
        os.write(2, f"{signal.Signals(number).name}: this process ends with the first one\n".encode())
        signal.signal(number, signal.SIG_DFL)

    llm = load(args, system)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, wait)
    with llm.leading():
        return 0


def name_model(args) -> None:
    """Names SmolLM2 or the bundled pair where the arguments name no model, so that all processes have the same."""
    if args.target is None and not args.bundled:
        from dflash_jax.checkpoint.smollm2 import smollm2_or_bundled

        args.target = smollm2_or_bundled(log.warning)
        args.bundled = args.target is None


def load(args, system):
    """The `LLM` that the arguments describe, as `name_model` changes them."""
    with starting():
        set_platform(args.platform)
        from dflash_jax.frontend.llm import LLM

    name_model(args)
    return LLM(**llm_keywords(args, system))


def engine_of(args, llm):
    """An engine of the length that the arguments ask for; without one, of the longest half of the model's that fits."""
    capacity, slots = llm.max_len, llm.programs.data * -(-args.slots // llm.programs.data)
    options = {"max_queue": args.max_queue, "max_num_batched_tokens": args.max_num_batched_tokens, "masks": True}
    options |= {"max_total_tokens": args.max_total_tokens, "trusts_priority": args.trust_priority}
    while True:
        try:
            return llm.new_engine(llm.programs, slots, capacity, **options)
        except InputError:
            if args.max_len is not None or args.max_total_tokens is not None or capacity // 2 < LEAST_LEN:
                raise
            capacity //= 2
            log.warning("one request of the model's %d tokens does not fit: %d at most", llm.max_len, capacity)


def response_store(args, temporary: str | None = None):
    """The store of responses that the arguments describe.

    Args:
        args: The arguments of `serve`.
        temporary: The path of a temporary file that several processes share; None: of this process alone.
    """
    from dflash_jax.server.response_store import ResponseStore

    path = args.response_store_path
    return ResponseStore(args.response_store, path=path or temporary, is_temporary=path is None)


def model_names(args) -> list[str]:
    """The names under which clients know the model."""
    return args.served_model_name or [args.target or "dflash-tiny"]


def host_of(args, llm):
    """The `EngineHost` of a model that the arguments describe. Nothing runs yet."""
    from dflash_jax.engine.service import AsyncEngine
    from dflash_jax.server.engine_host import EngineHost

    device, engine = set_platform(args.platform), engine_of(args, llm)
    info = {
        "model_path": str(args.target or "bundled"),
        "speculative_draft_model_path": ", ".join(args.draft) if isinstance(args.draft, list) else str(args.draft),
        "speculative_algorithm": llm.drafting_method,
        "speculative_num_draft_tokens": llm.largest_block,
        "block_size": llm.block_size,
        "device": device,
        "dtype": llm.dtype,
        "slots": engine.runner.slots,
        "max_queue": args.max_queue,
        "max_num_batched_tokens": engine.config.max_num_batched_tokens,
        "mem_fraction": args.mem_fraction,
    }
    return EngineHost(llm, AsyncEngine(engine, restarts=int(args.restart_on_failure)), model_names(args)[0], info)


def serving_of(args, llm, engine, store, fronts: int = 1):
    """The `Serving` that the arguments describe.

    Args:
        args: The arguments of `serve`.
        llm: The model as a front knows it.
        engine: Its `EngineClient`.
        store: The store of responses.
        fronts: How many processes share limits of memory.
    """
    from dflash_jax.server.limits import DEFAULT_LIMITS, Limits
    from dflash_jax.server.serving import Serving

    limits = Limits(
        media_body_bytes=args.max_media_body,
        total_body_bytes=max(DEFAULT_LIMITS.total_body_bytes // fronts, args.max_media_body),
        logprobs=args.max_logprobs,
        unknown_fields=args.unknown_fields,
        trust_request_chat_template=args.trust_request_chat_template,
    )
    options = {"response_store": store, "stream_interval": args.stream_interval}
    options["keep_alive_s"] = args.sse_keep_alive_interval
    return Serving(llm, engine, model_names(args), limits, additions=Additions.of_arguments(args), **options)


def assemble(args, llm, store):
    """The `EngineHost` and the `Serving` of a model in one process."""
    from dflash_jax.server.engine_host import in_process

    host = host_of(args, llm)
    return host, serving_of(args, llm, in_process(host), store)


def around(app, serving, args, tracer):
    """The application with what the arguments put around it: the log of requests, their spans, a proxy's path."""
    from dflash_jax.server.observe import Observer, RequestLog

    begin, end = [], [] if tracer is None else [tracer.end]
    if args.enable_log_requests:
        tokenizer = serving.llm.tokenizer
        requests = RequestLog(tokenizer.decode if args.log_prompts and tokenizer else None, args.max_log_len)
        begin, end = [requests.begin], [requests.end, *end]
    if end:
        app = Observer(app, begin, end)
    return transport.UnderPath(app, args.root_path) if args.root_path else app


def set_logging(args) -> None:
    """Has this process log to stderr, as the arguments say."""
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr, force=True
    )
    # At INFO, JAX lists the backends that this machine does not have, which is no fault.
    logging.getLogger("jax").setLevel(max(logging.WARNING, logging.getLogger().level))


def check_extra() -> None:
    """Raises InputError where the server's extra is not installed."""
    if find_spec("uvicorn") is None:
        raise InputError('the server needs its extra: pip install "dflash-jax[server]"')


def warn_of_open_access(args) -> None:
    """Logs a warning where the arguments open the server to a network without a key."""
    if not (args.api_keys or args.uds is not None or transport.is_loopback(args.host)):
        log.warning("anyone who reaches %s can use this server: --api-key-file demands a key", args.host)


def allowed_hosts(args):
    """The Host names that the arguments allow; None for any."""
    from dflash_jax.server.access import default_hosts

    if args.allowed_hosts is not None:
        return args.allowed_hosts.split(",")
    # No page in a browser reaches a Unix socket.
    return default_hosts(args.host) if args.uds is None else None


def http_config(app, limits, tls=None):
    """Uvicorn's configuration of an application.

    Args:
        app: The application.
        limits: `ConnectionLimits`.
        tls: The TLS context; None for plain HTTP.
    """
    import uvicorn

    from dflash_jax.server.connections import protocol

    return uvicorn.Config(
        app,
        # uvicorn calls it, and a class is not needed for that.
        http=cast("type[asyncio.Protocol]", protocol(limits, tls)),
        ws="none",
        # Its own would close all handlers of the process, Ray Serve's among them, which a new controller asks for.
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=int(limits.idle_s),
        # A local client could choose its address by a header.
        proxy_headers=False,
    )


class WarmUpThread(threading.Thread):
    """Compiles an engine's programs and starts the engine; what is not needed at once is compiled beside requests.

    Args:
        host: The engine's side.
        prepare: What is done beside the first compilations.
        is_full: Whether every program is compiled before the first request.
        on_ready: Called on the thread when requests are taken.
        on_failure: Called on the thread when they never will be.
    """

    def __init__(
        self,
        host,
        prepare: Callable[[], None],
        is_full: bool,
        on_ready: Callable[[], object] = lambda: None,
        on_failure: Callable[[], object] = lambda: None,
    ):
        super().__init__(name="warm-up", daemon=True)
        self._host, self._prepare, self._is_full = host, prepare, is_full
        self._on_ready, self._on_failure = on_ready, on_failure

    def run(self) -> None:
        """The thread."""
        host, warm = self._host, self._host.warm_up
        try:
            self._compile_first()
        except Exception:
            log.exception("warm-up failed")
            self._on_failure()
            return
        leave_out_of_collections()
        host.set_ready()
        self._on_ready()
        if host.tower is not None and not self._is_full:
            threading.Thread(target=self._compile_media, name="vision-warm-up", daemon=True).start()
        if warm.compiled < warm.total:
            log.info("compiling %d programs beside requests", warm.total - warm.compiled)
            began = time.monotonic()
            try:
                warm.others()
            except Exception:
                log.exception("the other programs are not compiled: requests go on with those that are")
            log.info("%d of %d programs compiled after %.0f s", warm.compiled, warm.total, time.monotonic() - began)
        host.engine.engine.policy.keep()

    def _compile_first(self) -> None:
        with ThreadPoolExecutor(1, "prepare") as beside:
            prepared = beside.submit(self._prepare)
            if self._is_full:
                self._host.warm_up.all()
                if self._host.tower is not None:
                    self._compile_media()
            else:
                self._host.warm_up.first(prepared.result)
            prepared.result()

    def _compile_media(self) -> None:
        self._host.tower.compile(self._host.engine.engine.runner.capacity)


def leave_out_of_collections() -> None:
    """Leaves what the start has made out of collections of garbage, which stop all threads: 0.15 s less each."""
    gc.collect()
    gc.freeze()


def end_engine(host) -> None:
    """Ends an engine and what runs beside it; open requests get an error."""
    host.warm_up.stop()
    if host.is_ready:
        host.engine.stop()
        host.engine.engine.policy.keep()
    host.stop_workers()


class HttpServer:
    """An application's HTTP server, in an event loop that has other work, too.

    Args:
        config: Uvicorn's configuration.
        serving: What the application serves.
    """

    def __init__(self, config, serving):
        import uvicorn

        self._serving, self._server, self._is_stopping = serving, uvicorn.Server(config), False
        # Signals are not the server's.
        self._server.capture_signals = nullcontext  # pyright: ignore[reportAttributeAccessIssue]

    async def serve(self, listening: socket.socket) -> None:
        """Serves a listening socket until `drain` or `stop` has ended."""
        await self._server.serve(sockets=[listening])

    async def drain(self, drain_s: float = math.inf) -> bool:
        """Takes no further requests, and ends when those under way have ended.

        Returns:
            Whether they have ended within ``drain_s``; False too where `stop` is asked for meanwhile.
        """
        self._serving.is_draining = True
        if not await self._until_idle(drain_s):
            return False
        self._server.should_exit = True
        return True

    async def stop(self) -> None:
        """Ends when open requests have the error that their engine sends, or after some seconds."""
        self._serving.is_draining = self._is_stopping = True
        if not await self._until_idle(ERRORS_S, until_stop=False):
            # uvicorn would report what it cancels as errors of the application.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            self._server.force_exit = True
        self._server.should_exit = True

    async def _until_idle(self, seconds: float, until_stop: bool = True) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self._serving.in_flight and loop.time() < deadline and not (until_stop and self._is_stopping):
            await asyncio.sleep(0.02)
        return not self._serving.in_flight

"""The server's life: a model and its engine behind HTTP, from the arguments of `dflash serve` to its exit code."""

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from dflash_jax.errors import InputError
from dflash_jax.options.systems import llm_keywords
from dflash_jax.parallel.devices import set_platform
from dflash_jax.process import leave
from dflash_jax.progress import starting
from dflash_jax.server import cors, transport
from dflash_jax.server.additions import Additions

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


def response_store(args):
    """The store of responses that the arguments describe."""
    from dflash_jax.server.response_store import ResponseStore

    return ResponseStore(args.response_store, path=args.response_store_path)


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


def serving_of(args, llm, engine, store):
    """The `Serving` that the arguments describe.

    Args:
        args: The arguments of `serve`.
        llm: The model as a front knows it.
        engine: Its `EngineClient`.
        store: The store of responses.
    """
    from dflash_jax.server.limits import Limits
    from dflash_jax.server.serving import Serving

    limits = Limits(
        media_body_bytes=args.max_media_body,
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
    try:
        import uvicorn  # noqa: F401
    except ImportError:
        raise InputError('the server needs its extra: pip install "dflash-jax[server]"') from None


def warn_of_open_access(args) -> None:
    """Logs a warning where the arguments open the server to a network without a key."""
    from dflash_jax.server.access import is_loopback

    if not (args.api_keys or args.uds is not None or is_loopback(args.host)):
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


def run(args, system) -> int:
    """Serves until a signal: the exit code."""
    set_logging(args)
    check_extra()
    if follows(args):
        return follow(args, system)
    from dflash_jax.server.tracing import Tracer

    tls, origins = transport.tls_context(args), cors.of_arguments(args)
    tracer = Tracer(args.otlp_traces_endpoint) if args.otlp_traces_endpoint else None
    store, listening = response_store(args), transport.listen(args.host, args.port, args.uds)
    try:
        llm = load(args, system)
        with llm.leading():
            return serve(args, llm, store, listening, tls, origins, tracer)
    except BaseException:
        store.close()
        transport.close(listening, args.uds)
        raise


def serve(args, llm, store, listening: socket.socket, tls, origins: cors.Cors | None, tracer) -> int:
    """Serves a model on a socket until a signal: the exit code."""
    from dflash_jax.server.app import build
    from dflash_jax.server.connections import ConnectionLimits

    limits = ConnectionLimits(connections=allow_connections(args.max_connections))
    host, serving = assemble(args, llm, store)
    warn_of_open_access(args)
    app = around(build(serving, args.api_keys, allowed_hosts(args), origins), serving, args, tracer)
    config = http_config(app, limits, tls)
    runner = Runner(config, host, serving, args.drain_s, args.exit_on_failure, args.warm_up == "full")
    try:
        code = asyncio.run(runner.serve_until_drained(listening, transport.url(listening, tls is not None)))
    finally:
        # First: another signal may end the process here.
        store.close()
        host.stop_workers()
        serving.stop_workers()
        transport.close(listening, args.uds)
        if tracer is not None:
            tracer.flush()
    if runner.is_warming:
        # A compilation cannot be interrupted, and the interpreter would crash or wait.
        leave(code)
    return code


class Runner:
    """The HTTP server's life: warm-up beside it, then requests.

    A first SIGTERM or SIGINT drains; a second one ends the requests with an error, a third ends the process at once.

    Args:
        config: Uvicorn's configuration.
        host: The engine's side.
        serving: The front's side.
        drain_s: Seconds that a drain may take.
        exit_on_failure: Whether a failure of the engine drains too, and ends with code 1.
        is_full: Whether every program is compiled before the first request.
    """

    def __init__(self, config, host, serving, drain_s: float, exit_on_failure: bool = False, is_full: bool = False):
        import uvicorn

        self.host, self.serving, self.drain_s, self.is_full, self.code = host, serving, drain_s, is_full, 0
        self.server = uvicorn.Server(config)
        self._is_stopping = False
        self._warming = threading.Thread(target=self._warm_up, name="warm-up", daemon=True)
        # Ours, so that a first signal drains.
        self.server.handle_exit = self._on_signal
        if exit_on_failure:
            self.host.engine.on_failure = self._on_failure

    async def serve_until_drained(self, listening: socket.socket, url: str) -> int:
        """Serves ``listening``, which clients reach at ``url``: the exit code."""
        self._loop = asyncio.get_running_loop()
        log.info("listening on %s, warming up", url)
        self._warming.start()
        await self.server.serve(sockets=[listening])
        self.host.warm_up.stop()
        if self.host.is_ready:
            await asyncio.to_thread(self.host.engine.stop)
            self.host.engine.engine.policy.keep()
        return self.code

    @property
    def is_warming(self) -> bool:
        """Whether programs are still being compiled."""
        return self._warming.is_alive()

    def _warm_up(self) -> None:
        host, serving, warm = self.host, self.serving, self.host.warm_up
        try:
            with ThreadPoolExecutor(1, "prepare") as beside:
                prepared = beside.submit(self._prepare)
                if self.is_full:
                    warm.all()
                    if host.tower is not None:
                        host.tower.compile(serving.capacity)
                else:
                    warm.first(prepared.result)
                prepared.result()
        except Exception:
            log.exception("warm-up failed")
            self.code, self.server.should_exit = 1, True
            return
        # Collections of garbage stop all threads. Leaving out what the start has made saves 0.15 s each.
        gc.collect()
        gc.freeze()
        host.set_ready()
        log.info("ready: %d of %d programs compiled; as %s", warm.compiled, warm.total, serving.name)
        if host.tower is not None and not self.is_full:
            arguments = {"target": host.tower.compile, "args": (serving.capacity,)}
            threading.Thread(**arguments, name="vision-warm-up", daemon=True).start()
        if warm.compiled < warm.total:
            log.info("compiling %d programs beside requests", warm.total - warm.compiled)
            began = time.monotonic()
            try:
                warm.others()
            except Exception:
                log.exception("the other programs are not compiled: requests go on with those that are")
            log.info("%d of %d programs compiled after %.0f s", warm.compiled, warm.total, time.monotonic() - began)
        host.engine.engine.policy.keep()

    def _prepare(self) -> None:
        self.serving.prepare()
        self.host.start_workers()

    def _on_signal(self, sig: int, frame) -> None:
        if self.serving.is_draining and not self._is_stopping:
            # Before the message: another signal may interrupt this handler.
            self._is_stopping = True
            log.warning("stopped with %d requests in flight", self.serving.in_flight)
            return
        if self.serving.is_draining or not self.serving.is_ready:
            log.warning("%s: ended at once", signal.Signals(sig).name)
            self.serving.response_store.remove()
            # A compilation cannot be interrupted.
            os._exit(128 + sig)
        # Before the message: a second signal may interrupt this handler.
        self.begin_draining()
        log.info("%s: finishing %d requests", signal.Signals(sig).name, self.serving.in_flight)

    def _on_failure(self) -> None:
        log.error("exiting: the engine has failed")
        self.code = 1
        self.begin_draining()

    def begin_draining(self) -> None:
        """Ends the server when its requests have ended. Any thread may call it."""
        self.serving.is_draining = True
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._drain()))

    async def _drain(self) -> None:
        deadline = self._loop.time() + self.drain_s
        while self.serving.in_flight and self._loop.time() < deadline and not self._is_stopping:
            await asyncio.sleep(0.02)
        if self.serving.in_flight:
            if not self._is_stopping:
                log.warning("%d requests did not end within %g s", self.serving.in_flight, self.drain_s)
                self.code = 1
            await self._end_requests()
        self.server.should_exit = True

    async def _end_requests(self) -> None:
        """Answers open requests with an error, and has the server cancel those that remain."""
        stopping = asyncio.ensure_future(asyncio.to_thread(self.host.engine.stop))
        deadline = self._loop.time() + ERRORS_S
        while (self.serving.in_flight or not stopping.done()) and self._loop.time() < deadline:
            await asyncio.sleep(0.02)
        # uvicorn would report what it cancels as errors of the application.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self.server.force_exit = True

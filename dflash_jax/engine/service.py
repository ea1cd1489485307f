"""An engine on a thread of its own, for asyncio."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import TypeVar

from dflash_jax.engine.engine import Engine, QueueFullError
from dflash_jax.engine.request import Event, Request
from dflash_jax.errors import EngineError, UnavailableError

log = logging.getLogger("dflash_jax")

T = TypeVar("T")


class AsyncEngine:
    """``async with AsyncEngine(engine) as running: async for event in running.submit(request)``.

    The thread alone touches the engine. Whoever stops listening aborts the request. After a failure of the device,
    `submit` raises UnavailableError until `restart`.

    restarts: failures after which the engine restarts by itself. on_failure: called on the thread after any other one,
    when all requests have their error.
    """

    def __init__(self, engine: Engine, restarts: int = 0, on_failure: Callable[[], None] = lambda: None):
        self.engine, self.restarts, self.on_failure = engine, restarts, on_failure
        self._wake = threading.Condition()
        self._commands: deque = deque()
        self._inboxes: dict[Request, tuple[asyncio.AbstractEventLoop, asyncio.Queue]] = {}
        self._stopping, self._has_ended = False, False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> "AsyncEngine":
        self._thread.start()
        return self

    def stop(self, drain_s: float = 0.0) -> None:
        """Ends the thread: after what is under way, or ``drain_s`` seconds."""
        if drain_s:
            with self._wake:
                self._wake.wait_for(lambda: not self._inboxes and not self._commands, drain_s)
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    async def __aenter__(self) -> "AsyncEngine":
        return self.start()

    async def __aexit__(self, *_) -> None:
        await asyncio.to_thread(self.stop)

    def _command(self, function, *args) -> None:
        with self._wake:
            self._commands.append((function, args))
            self._wake.notify_all()

    def restart(self) -> None:
        """An empty engine after a failure."""
        self._command(self.engine.restart)

    def abort(self, request: Request) -> None:
        """Ends a request wherever it is; its last event has the finish_reason "abort"."""
        self._command(self.engine.abort, request)

    async def call(self, function: Callable[[], T]) -> T:
        """The result of ``function()``, which runs on the engine's thread between two steps. Raises UnavailableError
        where the thread has ended."""
        if self._stopping or not self._thread.is_alive():
            raise UnavailableError("the engine is not running")
        loop = asyncio.get_running_loop()
        result = loop.create_future()

        def deliver(value: T | None, error: Exception | None) -> None:
            if result.done():
                # The caller has left.
                return
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(value)

        def run() -> None:
            try:
                value, error = function(), None
            except Exception as e:
                value, error = None, e
            # A closed loop waits for no result.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(deliver, value, error)

        self._command(run)
        return await result

    def submit(self, request: Request) -> AsyncGenerator[Event, None]:
        """The request's events; the last one has a finish_reason. Raises InputError, QueueFullError and
        UnavailableError at once; the two latter may also come in place of the first event. Either way the request is
        closed."""
        try:
            self._check(request)
        except Exception:
            request.close()
            raise
        return self._events(request)

    def _check(self, request: Request) -> None:
        self.engine.check(request)
        if self.engine.failure is not None:
            raise UnavailableError(self.engine.failure)
        if self._stopping or not self._thread.is_alive():
            raise UnavailableError("the engine is not running")
        most = self.engine.options.max_queue
        pending = sum(function == self._submit for function, _ in list(self._commands))
        if most is not None and self.engine.waiting + pending >= most + self.engine.free_slots:
            raise QueueFullError(f"{self.engine.waiting + pending} requests are waiting: {most} may")

    async def _events(self, request: Request) -> AsyncGenerator[Event, None]:
        inbox: asyncio.Queue = asyncio.Queue()
        self._inboxes[request] = asyncio.get_running_loop(), inbox
        self._command(self._submit, request)
        try:
            if self._stopping or self._has_ended or not self._thread.is_alive():
                # The thread ended meanwhile, perhaps before it knew of the inbox.
                raise UnavailableError(self.engine.failure or "the engine is not running")
            while True:
                found = await inbox.get()
                if isinstance(found, Exception):
                    raise found
                yield found
                if found.finish_reason is not None:
                    return
        finally:
            self._inboxes.pop(request, None)
            if request.finish_reason is None:
                self.abort(request)
                if self._has_ended or not self._thread.is_alive():
                    request.close()

    def _submit(self, request: Request) -> None:
        try:
            self.engine.submit(request)
        except (ValueError, RuntimeError) as e:
            request.close()
            self._tell([(request, e)])

    def _tell(self, told: list[tuple[Request, Event | Exception]]) -> None:
        """To each loop at once what is for it."""
        by_loop: dict = {}
        for request, what in told:
            if (place := self._inboxes.get(request)) is not None:
                by_loop.setdefault(place[0], []).append((place[1], what))
        for loop, messages in by_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver, messages)
            except RuntimeError:  # the loop is closed: nobody listens
                continue

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as e:
            self.engine.failure = f"{type(e).__name__}: {e}"
            self._tell_the_end()
            self.on_failure()
            raise
        self._tell_the_end()

    def _tell_the_end(self) -> None:
        """Also closes all requests: what their masks hold would else wait for the garbage collector."""
        # From here on, `_events` closes those that it adds.
        self._has_ended = True
        gone = EngineError(self.engine.failure or "the engine was stopped")
        self._tell([(request, gone) for request in list(self._inboxes)])
        self.engine.close()
        for function, args in list(self._commands):
            if function == self._submit:
                args[0].close()

    def _serve(self) -> None:
        while True:
            with self._wake:
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._stopping or self._commands or self._has_work())
                if self._stopping:
                    break
                commands = [self._commands.popleft() for _ in range(len(self._commands))]
            for function, args in commands:
                function(*args)
            if self._has_work():
                self._tell([(event.request, event) for event in self.engine.step()])
                if self.engine.failure is not None:
                    self._after_failure()

    def _after_failure(self) -> None:
        if not self.restarts:
            self.on_failure()
            return
        self.restarts -= 1
        log.warning("restarting the engine after: %s", self.engine.failure)
        self.engine.restart()

    def _has_work(self) -> bool:
        return self.engine.failure is None and self.engine.has_work


def _deliver(messages) -> None:
    for inbox, what in messages:
        inbox.put_nowait(what)

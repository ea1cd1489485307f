"""An engine on its own thread, for asyncio."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, TypeVar

from dflash_jax.engine.engine import Engine
from dflash_jax.engine.request import Event, Request
from dflash_jax.engine.router import EventRouter, Message
from dflash_jax.errors import EngineError, UnavailableError

log = logging.getLogger("dflash_jax")

T = TypeVar("T")
# Gets the result of a call, or its error. Any thread may call it.
Deliver = Callable[[Any, Exception | None], None]

# Events of a request that a slow consumer gets at once.
MOST_EVENTS = 64


class AsyncEngine:
    """An engine for asyncio: ``async with AsyncEngine(engine) as running: async for event in running.submit(request)``.

    Only the engine's thread touches the engine. A consumer that stops listening aborts its request. After a failure of
    the device, `submit` raises UnavailableError until `restart`.

    Args:
        engine: The engine.
        restarts: Failures after which the engine restarts by itself.
        on_failure: Called on the thread after any further failure, when all requests have their error.

    Attributes:
        on_change: Called on the thread when the engine has failed or was restarted.
    """

    def __init__(self, engine: Engine, restarts: int = 0, on_failure: Callable[[], None] = lambda: None):
        self.engine, self.restarts, self.on_failure = engine, restarts, on_failure
        self.on_change: Callable[[], None] = lambda: None
        self._wake = threading.Condition()
        self._commands: deque = deque()
        # What waits for the end of all requests. Only the thread touches it.
        self._idle: list[Deliver] = []
        self._router = EventRouter()
        # Held while places are counted and taken.
        self._places = threading.RLock()
        self._stopping, self._has_ended = False, False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> "AsyncEngine":
        """Starts the thread."""
        self._thread.start()
        return self

    def stop(self, drain_s: float = 0.0) -> None:
        """Ends the thread when all requests have ended, or after ``drain_s`` seconds."""
        if drain_s:
            with self._wake:
                self._wake.wait_for(lambda: not self._router and not self._commands, drain_s)
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
        """Empties the engine after a failure."""
        self._command(self.engine.restart)

    def abort(self, request: Request) -> None:
        """Ends a request at any stage; its last event has the finish reason "abort"."""
        self._command(self.engine.abort, request)

    async def until_idle(self) -> None:
        """Returns when all requests have ended.

        Raises:
            UnavailableError: The thread has ended before.
        """
        await self._answer(lambda deliver: self._command(self._idle.append, deliver))

    async def call(self, function: Callable[[], T]) -> T:
        """Runs ``function()`` on the engine's thread between two steps, and returns its result.

        Raises:
            UnavailableError: The thread has ended.
        """

        def run(deliver: Deliver) -> None:
            try:
                value, error = function(), None
            except Exception as e:
                value, error = None, e
            deliver(value, error)

        return await self._answer(lambda deliver: self._command(run, deliver))

    async def _answer(self, ask: Callable[[Deliver], None]) -> Any:
        """What the thread gives to the function that ``ask`` gets."""
        if self._stopping or self._has_ended or not self._thread.is_alive():
            raise UnavailableError("the engine is not running")
        loop = asyncio.get_running_loop()
        result = loop.create_future()

        def settle(value: Any, error: Exception | None) -> None:
            if result.done():
                # The caller has left.
                return
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(value)

        def deliver(value: Any, error: Exception | None) -> None:
            # A closed loop waits for no result.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, value, error)

        ask(deliver)
        return await result

    async def submit(self, request: Request) -> AsyncGenerator[Event, None]:
        """Submits a request: its events one by one, otherwise as `submit_batched`."""
        async with aclosing(self.submit_batched(request)) as batches:
            async for events in batches:
                for event in events:
                    yield event

    async def submit_batched(self, request: Request) -> AsyncGenerator[list[Event], None]:
        """Submits a request when it is iterated. The request is closed on every path.

        Yields:
            Its events, each time those that have come since the last time, at most `MOST_EVENTS`; the last one has a
            finish_reason.

        Raises:
            InputError: The request can never run.
            QueueFullError: The queue is full.
            UnavailableError: The engine has failed or was stopped.
        """
        inbox: asyncio.Queue = asyncio.Queue()
        self.begin([request], lambda _, message: inbox.put_nowait(message))
        try:
            while True:
                messages = [await inbox.get()]
                while not inbox.empty() and len(messages) < MOST_EVENTS:
                    messages.append(inbox.get_nowait())
                events = [message for message in messages if isinstance(message, Event)]
                if events:
                    yield events
                if isinstance(messages[-1], Exception):
                    raise messages[-1]
                if messages[-1].finish_reason is not None:
                    return
        finally:
            self.leave([request])

    def begin(self, requests: Sequence[Request], receive: Callable[[Request, Message], None]) -> None:
        """Submits requests, all of them or none. Those that are refused are closed.

        Args:
            requests: The requests, of one client.
            receive: Gets each request with its events, in the running event loop; after an exception, or an event with
                a finish_reason, there are no further ones.

        Raises:
            InputError: One can never run, or they are more than may ever wait.
            QueueFullError: The queue has not as many places now.
            UnavailableError: The engine has failed or was stopped.
        """
        loop = asyncio.get_running_loop()
        try:
            # Requests with a receiver count, also those whose submission waits for the end of a long step.
            with self._places:
                self.check(requests)
                for request in requests:
                    self._router.add(request, partial(receive, request), loop)
            for request in requests:
                self._command(self._submit, request)
            if self._stopping or self._has_ended or not self._thread.is_alive():
                # The thread may have ended before the router had these requests.
                raise UnavailableError(self.engine.failure or "the engine is not running")
        except Exception:
            for request in requests:
                self._router.remove(request)
                request.close()
            raise

    def leave(self, requests: Iterable[Request]) -> None:
        """Ends the delivery of events. Requests that have not ended are aborted."""
        for request in requests:
            self._router.remove(request)
            if request.finish_reason is None:
                self.abort(request)
                if self._has_ended or not self._thread.is_alive():
                    request.close()

    def check(self, requests: Sequence[Request]) -> None:
        """Raises what `begin` would for requests of one client."""
        for request in requests:
            self.engine.check(request)
        if self.engine.failure is not None:
            raise UnavailableError(self.engine.failure)
        if self._stopping or not self._thread.is_alive():
            raise UnavailableError("the engine is not running")
        if requests:
            self.engine.check_queue(self._router.unfinished, requests[0].client, len(requests))

    def _submit(self, request: Request) -> None:
        try:
            self.engine.submit(request, has_place=True)
        except (ValueError, RuntimeError) as e:
            request.close()
            self._router.send([(request, e)])

    @property
    def open_requests(self) -> int:
        """Requests that have not ended, and whose events a consumer waits for."""
        return len(self._router)

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive()

    @property
    def takes_requests(self) -> bool:
        """Whether the engine's thread runs, and is not about to end."""
        return self._thread.is_alive() and not self._has_ended

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as e:
            self.engine.failure = f"{type(e).__name__}: {e}"
            self._end_all()
            self.on_failure()
            self.on_change()
            raise
        self._end_all()
        self.on_change()

    def _end_all(self) -> None:
        """Sends the end of the thread to all receivers, and closes all requests: their masks may hold processes."""
        # From here on, `_batches` closes the requests that it adds.
        self._has_ended = True
        failure = self.engine.failure
        self._router.send_all(EngineError(failure) if failure else UnavailableError("the engine was stopped"))
        self.engine.close()
        stopped = UnavailableError("the engine was stopped")
        self._tell_idle(stopped)
        for function, args in list(self._commands):
            if function == self._submit:
                args[0].close()
            elif args and callable(args[-1]):
                args[-1](None, stopped)

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
                self._router.send([(event.request, event) for event in self.engine.step()])
                if self.engine.failure is not None:
                    self._after_failure()
            if not self.engine.unfinished:
                self._tell_idle()

    def _tell_idle(self, error: Exception | None = None) -> None:
        while self._idle:
            self._idle.pop()(None, error)

    def _after_failure(self) -> None:
        if not self.restarts:
            self.on_failure()
        else:
            self.restarts -= 1
            log.warning("restarting the engine after: %s", self.engine.failure)
            self.engine.restart()
        self.on_change()

    def _has_work(self) -> bool:
        return self.engine.failure is None and self.engine.has_work

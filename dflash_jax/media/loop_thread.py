"""An event loop in a thread of its own, for work that may keep a loop busy."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines of other event loops in one that starts with the first of them."""

    def __init__(self, name: str):
        """Describes the thread, which has this ``name``."""
        self._name, self._lock = name, threading.Lock()
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs ``coroutine``, and cancels it where the caller is cancelled."""
        return await asyncio.wrap_future(self.submit(coroutine))

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts ``coroutine``."""
        with self._lock:
            if self._running is None:
                started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
                threading.Thread(target=lambda: asyncio.run(_serve(started)), name=self._name, daemon=True).start()
                self._running = started.result()
            loop, _ = self._running
            return asyncio.run_coroutine_threadsafe(coroutine, loop)

    def stop(self) -> None:
        """Cancels all coroutines and ends the thread. It starts again with the next coroutine."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            loop, stopped = running
            loop.call_soon_threadsafe(stopped.set)


async def _serve(started: Future) -> None:
    stopped = asyncio.Event()
    started.set_result((asyncio.get_running_loop(), stopped))
    await stopped.wait()

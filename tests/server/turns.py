"""The turns of an event loop, by processor time: which of them take long, and in which function."""

import asyncio
import gc
import json
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

# Most processor time of a turn, in seconds, on a core that does `_work` in WORK_S.
MOST_S, WORK_S = 0.05, 0.01
# Seconds between two looks at what a turn does.
LOOK_S = 0.004


@dataclass
class Turn:
    """A turn of the event loop.

    Attributes:
        name: What it ran.
        seconds: Its processor time.
        gc_s: The part of garbage collection.
        places: Where it was seen, with how often.
    """

    name: str
    seconds: float
    gc_s: float
    places: Counter[str]

    def __str__(self):
        places = "; ".join(f"{count} x {place}" for place, count in self.places.most_common(3))
        return f"{1e3 * self.seconds:.0f} ms, {1e3 * self.gc_s:.0f} of them garbage collection: {self.name} ({places})"


@dataclass
class Turns:
    """Measures the turns of the event loop that runs on a thread, while the context is open.

    Attributes:
        thread: The thread.
        count: Turns so far.
        longest: The longest one.
    """

    thread: threading.Thread
    count: int = 0
    longest: Turn | None = None
    _began: float = 0.0
    _gc_began: float = 0.0
    _gc_s: float = 0.0
    _places: Counter[str] = field(default_factory=Counter)
    _is_over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self):
        self._run = run = asyncio.events.Handle._run

        def measured(handle: Any) -> None:
            if threading.get_ident() != self.thread.ident:
                run(handle)
                return
            self._gc_s, self._places, self._began = 0.0, Counter(), time.perf_counter()
            began = time.thread_time()
            run(handle)
            seconds, self._began = time.thread_time() - began, 0.0
            self.count += 1
            if self.longest is None or seconds > self.longest.seconds:
                self.longest = Turn(_named(handle), seconds, self._gc_s, self._places)

        handles: Any = asyncio.events.Handle
        handles._run = measured
        gc.callbacks.append(self._collects)
        self._looker = threading.Thread(target=self._look, daemon=True)
        self._looker.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._looker.join()
        gc.callbacks.remove(self._collects)
        asyncio.events.Handle._run = self._run

    def _collects(self, phase: str, _) -> None:
        if threading.get_ident() == self.thread.ident:
            now = time.thread_time()
            self._gc_s += now - self._gc_began if phase == "stop" else 0.0
            self._gc_began = now

    def _look(self) -> None:
        while not self._is_over.wait(LOOK_S):
            began, places = self._began, self._places
            if began and time.perf_counter() - began > MOST_S / 4:
                frame = sys._current_frames().get(self.thread.ident or 0)
                if began == self._began and frame is not None:
                    places[_place(frame)] += 1


def slowness() -> float:
    """How many times longer than WORK_S this core takes now, which others may share; at least 1."""
    began = time.thread_time()
    _work()
    return max(1.0, (time.thread_time() - began) / WORK_S)


def _work() -> None:
    """What turns do: JSON is made and read, and many small objects with it."""
    for _ in range(27):
        json.loads(json.dumps([{"id": i, "text": f"token {i}", "values": [i / 7] * 4} for i in range(100)]))


def _named(handle: asyncio.Handle) -> str:
    """The coroutine of a task's step, or the function."""
    task = getattr(handle._callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        return getattr(task.get_coro(), "__qualname__", repr(task))
    return getattr(handle._callback, "__qualname__", None) or repr(handle._callback)


def _place(frame: FrameType) -> str:
    """The innermost functions of the package, and the one that they call."""
    names, at = [_function(frame)], frame.f_back
    while at is not None and len(names) < 3:
        if "dflash_jax" in at.f_code.co_filename:
            names.append(_function(at))
        at = at.f_back
    return " < ".join(names)


def _function(frame: FrameType) -> str:
    file = frame.f_code.co_filename.rsplit("/", 1)[-1]
    return f"{frame.f_code.co_qualname} ({file}:{frame.f_lineno})"

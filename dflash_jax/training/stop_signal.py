"""SIGTERM and SIGINT as requests to stop at the end of a step."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stop_signal() -> Iterator[Callable[[], str | None]]:
    """Catches SIGTERM and SIGINT; a second signal raises KeyboardInterrupt.

    Yields:
        A function that returns the name of the signal that arrived, or None.
    """
    received: list[int] = []

    def handle(number, frame):
        if received:
            raise KeyboardInterrupt
        received.append(number)

    previous = {s: signal.signal(s, handle) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: signal.Signals(received[0]).name if received else None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

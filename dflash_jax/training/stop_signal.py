"""Signals as requests to stop at the end of a step."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stop_signal(number: int) -> Iterator[Callable[[], str | None]]:
    """Catches a signal; a second one raises KeyboardInterrupt.

    Args:
        number: The signal.

    Yields:
        A function that returns the signal's name once it has arrived, None before.
    """
    count = 0

    def handle(number, frame):
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt

    previous = signal.signal(number, handle)
    try:
        yield lambda: signal.Signals(number).name if count else None
    finally:
        signal.signal(number, previous)

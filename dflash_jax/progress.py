"""Progress of long steps on stderr: a bar on a terminal; for commands, one line where stderr is no terminal.

Steps of less than `DELAY_S` show nothing. In a library call only loading shows a bar, and only on a terminal. A
process that runs a command calls `enable`: then every step is shown.
"""

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

# Seconds before a step is shown.
DELAY_S = 2.0
# Seconds between two updates of the time of a step without a count.
TICK_S = 0.5

_is_enabled = _is_hidden = False
_written: set[str] = set()


def enable() -> None:
    """Shows every step: for a process that runs a command."""
    global _is_enabled
    _is_enabled = True


def disable() -> None:
    """Back to what a library call shows."""
    global _is_enabled, _is_hidden
    _is_enabled = _is_hidden = False
    _written.clear()


def hide() -> None:
    """Shows nothing from here on: text is written to the same terminal, and a bar would overwrite its line."""
    global _is_hidden
    _is_hidden = True


def is_terminal() -> bool:
    """Whether stderr is a terminal."""
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:
        # stderr is closed.
        return False


def _columns() -> int:
    """Columns of a bar. A terminal inside a container may report none."""
    try:
        return min(os.get_terminal_size(sys.stderr.fileno()).columns or 80, 100)
    except (OSError, ValueError):
        return 80


def _write_line(text: str) -> None:
    """Writes a line to stderr, once for each text."""
    if text not in _written and not _is_hidden:
        _written.add(text)
        print(text, file=sys.stderr, flush=True)


class Bar(tqdm):
    """A tqdm that writes one line where stderr is no terminal; see `bar`."""

    def __init__(self, *args, line: str | None, delay: float, **options):
        self._timer: threading.Timer | None = None
        if line is not None and not options.get("disable"):
            self._timer = threading.Timer(delay, _write_line, (line,))
            self._timer.daemon = True
            self._timer.start()
            options["disable"] = True
        super().__init__(*args, delay=delay, **options)

    def __iter__(self):
        # tqdm does not close a disabled bar at the end of an iteration.
        try:
            yield from super().__iter__()
        finally:
            self.close()

    def close(self) -> None:
        """Ends the bar, or the wait for the line."""
        timer = getattr(self, "_timer", None)
        if timer is not None:
            timer.cancel()
        super().close()


def bar(
    items: Iterable | None = None,
    *,
    description: str,
    total: float | None = None,
    unit: str = "",
    delay: float | None = None,
    leave: bool = False,
    in_library: bool = False,
    line: str | None = None,
    disable: bool = False,
    **options,
) -> Bar:
    """A bar with the remaining time, over ``items`` or for calls of ``update``; a context manager.

    Args:
        items: What is iterated over; None: the caller calls ``update``.
        description: What the step does.
        total: Units in all; None: the length of ``items``.
        unit: The name of a unit; "B" is shown in MB and GB.
        delay: Seconds before the step is shown; None: `DELAY_S`.
        leave: Whether the bar stays when the step ends.
        in_library: Whether a library call shows the bar, on a terminal.
        line: The line where stderr is no terminal; None: ``description``.
        disable: Whether nothing is shown.
        **options: Further options of tqdm.
    """
    scale = {"unit_scale": True, "unit_divisor": 1000} if unit == "B" else {}
    is_shown = (_is_enabled or in_library) and not _is_hidden and not disable
    has_bar = is_shown and is_terminal()
    line = (line or description) if is_shown and _is_enabled and not has_bar else None
    return Bar(
        items,
        desc=description,
        total=total,
        unit=unit if unit == "B" else f" {unit}",
        delay=DELAY_S if delay is None else delay,
        leave=leave,
        file=sys.stderr,
        ncols=_columns(),
        nrows=24,
        line=line,
        disable=not has_bar and line is None,
        **(scale | options),
    )


@contextmanager
def step(
    description: str,
    expected_s: float | None = None,
    in_library: bool = False,
    line: str | None = None,
    disable: bool = False,
) -> Iterator[None]:
    """Shows the seconds of a step that has nothing to count.

    Args:
        description: What the step does. It is the line where stderr is no terminal.
        expected_s: Seconds that the step is expected to take; None: unknown.
        in_library: Whether a library call shows them, on a terminal.
        line: The line where stderr is no terminal; None: ``description``.
        disable: Whether nothing is shown.
    """
    about = "" if expected_s is None or expected_s < 1 else f" of about {expected_s:.0f} s"
    bar_format = f"{{desc}} ({{elapsed_s:.0f}} s{about})"
    options = {"in_library": in_library, "line": line, "disable": disable, "bar_format": bar_format, "miniters": 0}
    with bar(description=description, **options) as shown:
        if shown.disable:
            yield
            return
        is_over = threading.Event()

        def tick() -> None:
            while not is_over.wait(TICK_S):
                shown.update(0)

        ticker = threading.Thread(target=tick, daemon=True)
        ticker.start()
        try:
            yield
        finally:
            is_over.set()
            ticker.join()

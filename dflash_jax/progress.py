"""Progress of long steps on stderr: a bar on a terminal; for commands, one line where stderr is no terminal.

Steps of less than `DELAY_S` show nothing. In a library call only loading shows a bar, and only on a terminal. A
process that runs a command calls `enable`: then every step is shown. DFLASH_PROGRESS=0 shows nothing.
"""

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from os import environ
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
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
    """Shows nothing until `show`: text is written to the same terminal, and a bar would overwrite its line."""
    global _is_hidden
    _is_hidden = True


def show() -> None:
    """Ends `hide`: the line of text is complete."""
    global _is_hidden
    _is_hidden = False


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


class QuietBar:
    """A bar that writes one line, or nothing. It does not import tqdm, which machines with JAX alone lack.

    Args:
        items: What is iterated over.
        line: The line; None writes nothing.
        delay: Seconds before it is written; it is not written where the bar ends before.
    """

    def __init__(self, items: Iterable | None, line: str | None, delay: float):
        self._items, self.n, self._timer = items, 0.0, None
        if line is not None:
            self._timer = threading.Timer(delay, _write_line, (line,))
            self._timer.daemon = True
            self._timer.start()

    def __iter__(self) -> Iterator:
        with self:
            yield from self._items or ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def update(self, n: float | None = 1) -> None:
        """Adds ``n`` units."""
        self.n += n or 0

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        """Shows nothing."""

    def write(self, s: str, file: TextIO | None = None) -> None:
        """Writes a line, to stdout if ``file`` is None."""
        print(s, file=file, flush=True)


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
) -> "tqdm | QuietBar":
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
    delay = DELAY_S if delay is None else delay
    is_shown = (_is_enabled or in_library) and not (_is_hidden or disable or environ.get("DFLASH_PROGRESS") == "0")
    if not (is_shown and is_terminal()):
        return QuietBar(items, (line or description) if is_shown and _is_enabled else None, delay)
    from tqdm import tqdm

    scale = {"unit_scale": True, "unit_divisor": 1000} if unit == "B" else {}
    return tqdm(
        items,
        desc=description,
        total=total,
        unit=unit if unit == "B" else f" {unit}",
        delay=delay,
        leave=leave,
        file=sys.stderr,
        ncols=_columns(),
        nrows=24,
        **(scale | options),
    )


@contextmanager
def step(
    description: str,
    expected_s: float | None = None,
    in_library: bool = False,
    line: str | None = None,
    disable: bool = False,
    delay: float | None = None,
) -> Iterator[None]:
    """Shows the seconds of a step that has nothing to count.

    Args:
        description: What the step does. It is the line where stderr is no terminal.
        expected_s: Seconds that the step is expected to take; None: unknown.
        in_library: Whether a library call shows them, on a terminal.
        line: The line where stderr is no terminal; None: ``description``.
        disable: Whether nothing is shown.
        delay: Seconds before the step is shown; None: `DELAY_S`.
    """
    about = "" if expected_s is None or expected_s < DELAY_S else f" of about {expected_s:.0f} s"
    bar_format = f"{{desc}} ({{elapsed_s:.0f}} s{about})"
    options = {"in_library": in_library, "line": line, "disable": disable, "delay": delay}
    options |= {"bar_format": bar_format, "miniters": 0}
    with bar(description=description, **options) as shown:
        if isinstance(shown, QuietBar):
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


def starting() -> AbstractContextManager[None]:
    """Shows on a terminal, at once, that a command starts: for the imports of JAX and of models, which take seconds."""
    return step("starting", disable=not is_terminal(), delay=0.0)

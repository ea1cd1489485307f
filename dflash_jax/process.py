"""The life of a process: errors as one line and an exit code, interrupts, the end."""

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn, TypeVar

from dflash_jax import progress
from dflash_jax.errors import EngineError, InputError

# The exit code after Ctrl-C, as a shell gives it.
INTERRUPTED = 130
# Seconds that a process has to end by itself after an interrupt.
INTERRUPT_S = 2.0
# Seconds in which the last line of a process is written.
LINE_S = 2.0
T = TypeVar("T")


def silence_stdout() -> None:
    """Redirects stdout to /dev/null, so that the flush at exit cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_stderr() -> None:
    """Opens /dev/null as stderr where stderr is closed; print(file=None) would write to stdout."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def line_of(error: InputError | EngineError | OSError) -> tuple[str, int]:
    """An error as one line, and the exit code of a process that it ends."""
    if isinstance(error, InputError):
        return " ".join(str(error.args[0]).splitlines()), 2
    if isinstance(error, EngineError):
        return str(error), 1
    return f"{error.filename or 'stdout'}: {error.strerror}", 2


def exit_code(command: Callable[[], int]) -> int:
    """Runs a command line: bad input, and a failure of the device, is one line on stderr."""
    _open_stderr()
    try:
        if sys.stdout is None:
            raise InputError("stdout is closed: there is nowhere to write to")
        code = command()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe.
        silence_stdout()
        return 141
    except (InputError, EngineError, OSError) as e:
        line, code = line_of(e)
        print(f"error: {line}", file=sys.stderr)
        if isinstance(e, OSError):
            silence_stdout()
        return code


def end_process(line: str) -> NoReturn:
    """Ends the process at once, whatever its threads and devices wait for: one line, and exit code 1."""

    def write() -> None:
        with suppress(OSError):
            os.write(2, f"error: {line}\n".encode())

    try:
        # A full pipe that is not read blocks the thread, not the end.
        writer = threading.Thread(target=write, name="last line", daemon=True)
        writer.start()
        writer.join(LINE_S)
    finally:
        os._exit(1)


def _is_importing(frame: FrameType | None) -> bool:
    """Whether ``frame`` runs inside an import."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


# Whether `run_async` has given SIGINT to asyncio.
_is_in_loop = False


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt, or, inside an import, ends the process.

    An extension module that an exception interrupts while it is imported crashes, or reports another error.
    """
    if _is_importing(frame):
        _end_interrupted()
    signal.default_int_handler(number, frame)


def _end_interrupted() -> NoReturn:
    """Writes the line of an interrupt and ends the process, on any thread and inside a handler."""
    with suppress(OSError):
        os.write(2, b"\ninterrupted\n")
    os._exit(INTERRUPTED)


def _watch_interrupts(received: int) -> None:
    """Ends the process where an interrupt has not done so: the main thread compiles, or waits for a thread that does.

    Other handlers than `exit_process`'s and asyncio's finish what runs: training saves its step.

    Args:
        received: A descriptor from which the numbers of signals are read.
    """
    while numbers := os.read(received, 1):
        is_ours = _is_in_loop or signal.getsignal(signal.SIGINT) is _on_interrupt
        if numbers[0] == signal.SIGINT and is_ours:
            time.sleep(INTERRUPT_S)
            _end_interrupted()


def _handle_interrupts() -> None:
    """Installs what handles interrupts of this process."""
    signal.signal(signal.SIGINT, _on_interrupt)
    sys.unraisablehook = _on_unraisable
    received, sent = os.pipe()
    os.set_blocking(sent, False)
    # Python's handlers run between two instructions of the main thread; this descriptor gets the signal at once.
    signal.set_wakeup_fd(sent, warn_on_full_buffer=False)
    threading.Thread(target=_watch_interrupts, args=(received,), name="interrupts", daemon=True).start()


def _on_unraisable(unraisable) -> None:
    """`sys.unraisablehook`: interrupts again where an interrupt was lost.

    Python drops an exception that is raised in a finalizer or in a callback of the garbage collector, such as JAX's.
    """
    if unraisable.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(unraisable)
        return
    # A signal, unlike _thread.interrupt_main, ends a wait of the main thread.
    again = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    again.daemon = True
    again.start()


def exit_process(main: Callable[[], int]) -> NoReturn:
    """Runs ``main`` as this process, and ends the process with its exit code.

    After an interrupt the process ends at once: threads may still compile or run programs, and the interpreter would
    crash or wait when it ends before them.
    """
    _open_stderr()
    progress.enable()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        _handle_interrupts()
    try:
        code = main()
    except KeyboardInterrupt:
        # Outside `exit_code`.
        print("\ninterrupted", file=sys.stderr)
        code = INTERRUPTED
    if code == INTERRUPTED:
        leave(code)
    sys.exit(code)


def leave(code: int) -> NoReturn:
    """Ends the process at once, with what was written to its streams, whatever its threads do."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        # A closed stream raises ValueError.
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def leave_out_of_collections() -> None:
    """Leaves what the start has made out of collections of garbage, which stop all threads: 0.15 s less each."""
    gc.collect()
    gc.freeze()


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine by `asyncio.run`, so that an interrupt cancels its task at an await.

    asyncio handles SIGINT so only where Python's own handler is installed: it replaces that of `exit_process`.
    """
    import asyncio

    handler = signal.getsignal(signal.SIGINT)
    if handler is not _on_interrupt:
        return asyncio.run(main)
    global _is_in_loop
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _is_in_loop = True
    try:
        return asyncio.run(main)
    finally:
        _is_in_loop = False
        signal.signal(signal.SIGINT, handler)

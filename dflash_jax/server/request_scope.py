"""The life of an HTTP request: work that ends when its client disconnects, and sequences that it must close."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Hashable
from contextvars import ContextVar

from starlette.requests import Request as HttpRequest

from dflash_jax.frontend.sequence import TextSequence
from dflash_jax.server.errors import ClientGoneError

# Sequences of the current request that are not submitted to the engine yet.
_prepared: ContextVar[dict[TextSequence, None] | None] = ContextVar("prepared", default=None)
# Set when the engine has all sequences of the current request.
_submitted: ContextVar[asyncio.Event | None] = ContextVar("submitted", default=None)
# Called at the end of the current request.
_endings: ContextVar[list[Callable[[], None]] | None] = ContextVar("endings", default=None)
# Who sent the current request.
_client: ContextVar[Hashable] = ContextVar("client", default=None)


def begin_client(client: Hashable) -> None:
    """Sets who sent the current request: its key and address."""
    _client.set(client)


def current_client() -> Hashable:
    """Who sent the current request; None outside of requests."""
    return _client.get()


def begin_endings() -> list[Callable[[], None]]:
    """Starts to collect what `at_end` is given, for the caller to call at the end of the current request."""
    _endings.set(endings := [])
    return endings


def at_end(ending: Callable[[], None]) -> None:
    """Has ``ending`` called at the end of the current request, however it ends."""
    if (endings := _endings.get()) is not None:
        endings.append(ending)


def begin_tracking() -> Collection[TextSequence]:
    """Starts to track the sequences that the current request prepares; each is a member until it is submitted."""
    _prepared.set(sequences := {})
    _submitted.set(asyncio.Event())
    return sequences


def track(sequence: TextSequence) -> TextSequence:
    """Has a sequence closed at the end of its request unless it is submitted by then."""
    if (sequences := _prepared.get()) is not None:
        sequences[sequence] = None
    return sequence


async def until_gone(receive: Callable) -> None:
    """Waits until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(http: HttpRequest, work: Awaitable):
    """Awaits ``work``.

    Returns:
        Its result.

    Raises:
        ClientGoneError: The client disconnected first, and the work was cancelled.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(http.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def untrack(sequence: TextSequence) -> None:
    """Ends the tracking of a sequence, which the engine now has."""
    if (sequences := _prepared.get()) is not None:
        sequences.pop(sequence, None)


def note_submitted() -> None:
    """Ends `until_submitted` once no sequence is tracked any more."""
    if not _prepared.get() and (submitted := _submitted.get()) is not None:
        submitted.set()


async def until_submitted() -> None:
    """Waits until the engine has taken all sequences of the current request: no value of it is wrong then."""
    if (submitted := _submitted.get()) is not None:
        await submitted.wait()

"""What an administrator does with a running engine: new weights, pauses, its memory for others.

Everything here runs in the event loop of the engine host. Weights are read on a thread, and take their place on the
engine's, between two steps.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np

from dflash_jax import protocol
from dflash_jax.argument_checks import wrong
from dflash_jax.engine.service import AsyncEngine
from dflash_jax.errors import EngineError, InputError, UnavailableError
from dflash_jax.frontend.lifecycle import PAUSES, TAGS
from dflash_jax.frontend.llm import LLM
from dflash_jax.server.tensor_bytes import tensors_of

T = TypeVar("T")

# Whose tensors an update has.
SELECTORS = ("target", "draft")
# Bytes of the tensors of an update that is under way, for each byte of the model's weights: those may have four bits,
# and these 32.
MOST_GIVEN = 8
# Bytes that are possible for any model.
LEAST_GIVEN = 2**26
# Numbers of a tensor that an answer may have.
MOST_NUMBERS = 2**20
ENDED = "another call has ended this pause"


class Management:
    """The actions of `protocol.Manage`.

    Args:
        llm: The model.
        engine: Its engine on a thread.
        tell: Called when `rest`, `refuses` or the version of the weights has changed.

    Attributes:
        mode: How requests are paused, as of `LLM.pause`; None: they are not.
    """

    def __init__(self, llm: LLM, engine: AsyncEngine, tell: Callable[[], None]):
        self._llm, self._engine, self._tell = llm, engine, tell
        self.mode: str | None = None
        weights = (self.begin, self.give, self.finish, self.update, self.name, self.read, self.checksums)
        actions = (self.pause, self.resume, self.sleep, self.release, self.wake, *weights)
        self._actions: dict[str, Callable[..., Coroutine]] = {each.__name__: each for each in actions}
        # Calls that wait for the end of all requests.
        self._waiting = 0
        # Set when another mode takes the place of this one.
        self._changed = asyncio.Event()
        # Held while weights change or move.
        self._turn = asyncio.Lock()
        # What an update that is under way has got, by whose it is, and whose comes next.
        self._given: dict[str, dict[str, np.ndarray]] = {}
        self._selector: str | None = None

    @property
    def rest(self) -> str:
        """As of `protocol.State`."""
        return "sleeping" if self._llm.is_sleeping else "paused" if self.mode is not None else ""

    @property
    def refuses(self) -> bool:
        """Whether new requests are refused."""
        return self.mode in ("abort", "wait")

    def check(self) -> None:
        """Raises UnavailableError where new requests are refused."""
        if self.refuses:
            raise UnavailableError(f"the server is {self.rest}")

    def check_awake(self) -> None:
        """Raises UnavailableError where there are no weights."""
        if self._llm.is_sleeping:
            raise UnavailableError("the server is sleeping")

    async def answer(self, record: protocol.Manage) -> Any:
        """The answer to a record. A caller who leaves takes back what waits, or is only read.

        Raises:
            InputError: The call is not possible.
            UnavailableError: The engine does not answer.
        """
        arguments: dict[str, Any] = {**record.arguments}
        if record.tensors is not None:
            arguments["tensors"] = record.tensors
        try:
            return await self._actions[record.action](**arguments)
        except EngineError as e:
            # The engine works: the call is wrong, as that of a sleeping one.
            raise e if type(e) is not EngineError or self._engine.engine.failure else InputError(str(e)) from None

    # Pauses.

    def _set(self, mode: str | None) -> None:
        if mode != self.mode:
            self.mode = mode
            self._changed.set()
            self._changed = asyncio.Event()
        self._tell()

    async def pause(self, mode: str) -> None:
        """Lets nothing be generated until `resume`. New requests wait with "keep", and are refused otherwise.

        Args:
            mode: As of `LLM.pause`. With "wait", it returns when the last request has ended.
        """
        if mode not in PAUSES:
            raise wrong("mode", mode, f"one of {', '.join(PAUSES)}")
        is_paused = self._llm.is_paused or self.mode in ("abort", "keep")
        if mode == "wait" and is_paused and (kept := self._engine.open_requests):
            raise InputError(f"{kept} requests wait in the pause before, and cannot end: resume or abort them first")
        self._set(mode)
        if mode == "wait" and not is_paused:
            self._waiting += 1
            try:
                await self._until_idle()
            except BaseException:
                if self.mode == "wait" and self._waiting == 1:
                    self._set(None)
                raise
            finally:
                self._waiting -= 1
        await self._on_engine(partial(self._llm.pause, "abort" if mode == "abort" else "keep"))

    async def _until_idle(self) -> None:
        """Returns when all requests have ended. Raises InputError where another call changes the mode before."""
        idle = asyncio.ensure_future(self._engine.until_idle())
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait({idle, changed}, return_when=asyncio.FIRST_COMPLETED)
            if changed.done():
                raise InputError(ENDED)
            idle.result()
        finally:
            for future in (idle, changed):
                future.cancel()
            await asyncio.gather(idle, changed, return_exceptions=True)

    async def resume(self) -> None:
        """Ends a pause; nothing where there is none."""
        await self._on_engine(self._llm.resume)
        self._set(None)

    # Memory.

    async def sleep(self, level: int, mode: str) -> None:
        """As `LLM.sleep`; see `pause`."""
        if level not in (0, 1, 2):
            raise wrong("level", level, "0, 1 or 2")
        if level:
            self._llm.check_alone()
        await self.pause(mode)
        if level:
            await self.release(TAGS, keeps_weights=level == 1)

    async def release(self, tags: Collection[str], keeps_weights: bool = True) -> None:
        """As `LLM.release`. Requests wait where there is no pause. Nothing without tags."""
        if not tags:
            return
        self._llm.check_alone()
        if not self._llm.is_paused:
            await self.pause("keep")
        async with self._turn:
            await self._on_engine(partial(self._llm.release, tags, keeps_weights))
        self._tell()

    async def wake(self, tags: Collection[str] | None = None) -> None:
        """As `LLM.wake`."""
        async with self._turn:
            await self._on_engine(partial(self._llm.wake, tags))
        self._set(self.mode if self._llm.is_paused else None)

    # Weights.

    async def begin(self, selector: str) -> None:
        """Begins an update of several parts. Those of an update before it that has not ended are dropped."""
        _check_selector(selector)
        if selector == "target":
            self._given.clear()
        self._given[selector], self._selector = {}, selector

    async def give(self, tensors: np.ndarray, has_begun: bool = False) -> int:
        """Adds tensors to the update that has begun, or is one where none has: how many.

        Args:
            tensors: The bytes of a safetensors file.
            has_begun: Whether one must have begun.
        """
        if self._selector is None:
            if has_begun:
                raise InputError("no update of weights has begun here: begin it again")
            return (await self.update(tensors=tensors))["tensors"]
        selector = self._selector
        given, more = self._given[selector], await self._in_thread(partial(tensors_of, tensors))
        if self._given.get(selector) is not given:
            raise InputError("the update of these tensors has ended, or began anew, while they were read")
        sizes = sum(each.nbytes for group in (*self._given.values(), more) for each in group.values())
        most = max(LEAST_GIVEN, MOST_GIVEN * self._llm.loaded_bytes)
        if sizes > most:
            raise InputError(f"the tensors of this update have {sizes} bytes: at most {most} are possible")
        given |= more
        return len(more)

    async def finish(self, version: str | None = None, in_flight: str = "recompute") -> dict[str, Any]:
        """Ends the update that has begun, as `update`: all of its tensors take their places at once, or none."""
        given, self._given, self._selector = self._given, {}, None
        if not any(given.values()):
            raise InputError("no tensor was given since an update of weights has begun, or none has begun")
        return await self._take(given, version, in_flight)

    async def update(
        self,
        selector: str = "target",
        path: str | None = None,
        tensors: np.ndarray | None = None,
        version: str | None = None,
        in_flight: str = "recompute",
    ) -> dict[str, Any]:
        """Replaces weights, as `LLM.update_weights`.

        Args:
            selector: "target" or "draft".
            path: A directory, or a repository's name.
            tensors: The bytes of a safetensors file; other tensors stay.
            version: The name of the weights; None: the number of the update.
            in_flight: "recompute" or "abort".

        Returns:
            ``version``; ``requests``, those that had not ended; ``tensors``, how many were given by name.
        """
        _check_selector(selector)
        given: Any = path
        if tensors is not None:
            given = await self._in_thread(partial(tensors_of, tensors))
        return await self._take({selector: given}, version, in_flight)

    async def _take(self, given: dict[str, Any], version: str | None, in_flight: str) -> dict[str, Any]:
        async with self._turn:
            target, drafter = given.get("target") or None, given.get("draft") or None
            # Of a model without weights, none can stay.
            is_partial = not self._llm.lacks_weights and not any(isinstance(each, str) for each in (target, drafter))
            new = partial(self._llm.new_weights, target, drafter=drafter, partial=is_partial)
            models, requests = await self._in_thread(new), self._engine.engine.unfinished
            take = partial(self._llm.take_weights, models, version=version, in_flight=in_flight)
            version = await self._on_engine(take)
        self._tell()
        named = (each for each in given.values() if isinstance(each, dict))
        return {"version": version, "requests": requests, "tensors": sum(map(len, named))}

    async def name(self, version: str) -> None:
        """Gives the weights another version."""
        await self._on_engine(partial(self._llm.name_weights, version))
        self._tell()

    async def read(self, name: str, most: int) -> dict[str, Any]:
        """The beginning of a tensor of the target: its shape, and its numbers as float32.

        Args:
            name: As the checkpoint has it.
            most: Positions of its first axis.
        """

        def read() -> np.ndarray:
            array = self._llm.read_weights([name])[name]
            part = array[:most] if array.ndim else array
            if part.size > MOST_NUMBERS:
                raise InputError(
                    f"{most} rows of {name!r} have {part.size} numbers: at most {MOST_NUMBERS} are possible"
                )
            return np.ascontiguousarray(part, np.float32)

        array = await self._in_thread(read)
        return {"shape": list(array.shape), "numbers": array.tobytes()}

    async def checksums(self) -> dict[str, str]:
        """See `LLM.checksums`."""
        return await self._in_thread(self._llm.checksums)

    async def _on_engine(self, function: Callable[[], T]) -> T:
        """Calls a function on the engine's thread. It is not taken back: what follows it must follow."""
        work = asyncio.ensure_future(self._engine.call(function))
        await _ended(work)
        return work.result()

    async def _in_thread(self, function: Callable[[], T]) -> T:
        """Calls a function on a thread. A caller that leaves waits for it: threads cannot be cancelled."""
        work = asyncio.ensure_future(asyncio.to_thread(function))
        work.add_done_callback(lambda work: work.exception())
        try:
            return await asyncio.shield(work)
        finally:
            await _ended(work)


async def _ended(work: asyncio.Future) -> None:
    """Waits for the end of what cannot be cancelled."""
    while not work.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait({work})


def _check_selector(selector: str) -> None:
    if selector not in SELECTORS:
        raise wrong("selector", selector, f"one of {', '.join(SELECTORS)}")

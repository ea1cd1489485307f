"""A front's side of the protocol: requests to the engine, their events, and questions to it."""

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dflash_jax import protocol
from dflash_jax.engine.request import Event
from dflash_jax.errors import UnavailableError
from dflash_jax.frontend.sequence import TextSequence
from dflash_jax.server.errors import ApiError
from dflash_jax.server.request_context import current

# Events of a request that a slow consumer gets at once.
MOST_EVENTS = 64


class RemoteSequence(TextSequence):
    """A sequence whose request an engine runs elsewhere: its tokens come in records.

    Attributes:
        prompt: The prompt of the record, which all choices share.
    """

    prompt: protocol.Prompt
    _proposals: list[list[int]] | None = None
    _version: str = ""

    def receive(self, event: protocol.Event) -> None:
        """Takes an event of the request."""
        request = self.request
        if event.times is not None:
            request.times, request.cached = event.times, event.cached
        if event.tokens and request.monitor is not None:
            request.monitor(event.tokens)
        request.tokens += event.tokens
        self._version = event.version or self._version
        error = None if event.failure is None else exception_of(event.failure)
        request.finish_reason, self._proposals = event.finish_reason or (error and "error"), event.proposals
        self.take(
            Event(
                request,
                event.tokens,
                event.yielded,
                event.logprobs,
                request.finish_reason,
                error,
                event.drafted,
                event.drafter,
                self._version,
            )
        )

    def proposals(self, event: Event) -> list[list[int]] | None:
        """See `TextSequence`."""
        return self._proposals


def exception_of(failure: protocol.Failure) -> Exception:
    """The exception that a record says."""
    if failure.kind == "api":
        return ApiError(failure.status, failure.message, failure.field)
    return protocol.FAILURES[failure.kind](failure.message)


class LostError(UnavailableError):
    """The connection to the engine has ended: what became of a call is unknown."""


# Takes an event of the request at a place of a submission.
Put = Callable[[int, protocol.Event], None]


@dataclass
class _Taker:
    """Where the records of a request go.

    Attributes:
        put: Takes its events.
        place: Its place in the submission.
        sequence: Its sequence.
        scores: Log-probabilities of prompt tokens that the engine has sent.
    """

    put: Put
    place: int
    sequence: "RemoteSequence"
    scores: int = 0

    def take_scores(self, entries: list[dict[str, Any]]) -> None:
        """Takes log-probabilities of prompt tokens, but for those that an earlier engine has sent."""
        known = self.sequence.request.prompt_entries
        known += entries[max(0, len(known) - self.scores) :]
        self.scores += len(entries)


class Inbox:
    """The events of the requests of one submission."""

    def __init__(self):
        self._events: deque[tuple[int, protocol.Event]] = deque()
        self._has_some = asyncio.Event()

    def put(self, place: int, event: protocol.Event) -> None:
        """Adds an event of the request at a place of the submission."""
        self._events.append((place, event))
        self._has_some.set()

    @property
    def has_some(self) -> bool:
        """Whether `get` returns at once."""
        return bool(self._events)

    async def get(self) -> tuple[int, list[protocol.Event]]:
        """Waits for events of one request, and returns its place and all that follow one another, up to a limit."""
        while not self._events:
            self._has_some.clear()
            await self._has_some.wait()
        place, event = self._events.popleft()
        events = [event]
        while self._events and self._events[0][0] == place and len(events) < MOST_EVENTS:
            events.append(self._events.popleft()[1])
        return place, events


class EngineClient:
    """The engine as a front knows it.

    Args:
        send: Sends a record to the engine, in the event loop of the caller.

    Attributes:
        hello: What the engine said first; None before.
        has_hello: Set when there is one.
        state: Whether it takes requests, and why it has failed.
        clock: Its clock at its last events, in seconds.
        plain_round_s: Measured seconds of a plain round at its last events; None: not measured.
        submits_again: Whether a submission may be sent again, with its media.
    """

    submits_again = False

    def __init__(self, send: Callable[[protocol.FromFront], None]):
        self._send = send
        self.hello: protocol.Hello | None = None
        self.has_hello = asyncio.Event()
        self.state = protocol.State(False, None)
        self.clock, self.plain_round_s = 0.0, None
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future] = {}
        self._takers: dict[int, _Taker] = {}

    @property
    def takes_requests(self) -> bool:
        """Whether requests may come: the engine is ready."""
        return self.state.is_ready

    def receive(self, record: protocol.FromEngine) -> None:
        """Takes a record of the engine."""
        match record:
            case protocol.Events():
                self.clock, self.plain_round_s = record.clock, record.plain_round_s
                for event in record.events:
                    self._deliver(event)
            case protocol.Scores():
                if (entry := self._takers.get(record.number)) is not None:
                    entry.take_scores(record.entries)
            case protocol.Hello():
                self.hello = record
                self.has_hello.set()
            case protocol.State():
                self.state = record
            case protocol.Failed():
                self._settle(record.number, lambda call: call.set_exception(exception_of(record.failure)))
            case protocol.Answered():
                self._settle(record.number, lambda call: call.set_result(record.value))

    def lost(self, reason: str) -> None:
        """The engine is gone: all calls and requests fail, until there is a new one."""
        self.state = protocol.State(False, None)
        for number in list(self._calls):
            self._settle(number, lambda call: call.set_exception(LostError(reason)))
        failure = protocol.Failure("engine", reason)
        for number in list(self._takers):
            self._deliver(protocol.Event(number, failure=failure))

    def _settle(self, number: int, settle: Callable[[asyncio.Future], None]) -> None:
        call = self._calls.pop(number, None)
        if call is not None and not call.done():
            settle(call)

    def _deliver(self, event: protocol.Event) -> None:
        is_last = event.finish_reason is not None or event.failure is not None
        entry = self._takers.pop(event.number, None) if is_last else self._takers.get(event.number)
        if entry is not None:
            entry.put(entry.place, event)

    async def _call(self, number: int, record: protocol.FromFront, requests: Sequence[int] = ()) -> Any:
        self._calls[number] = call = asyncio.get_running_loop().create_future()
        try:
            self._send(record)
            return await call
        except asyncio.CancelledError:
            self._send(protocol.Leave(number, list(requests)))
            raise
        finally:
            self._calls.pop(number, None)

    async def ask(self, question: str) -> Any:
        """The engine's answer to a question.

        Raises:
            UnavailableError: The engine does not answer.
        """
        number = next(self._numbers)
        return await self._call(number, protocol.Ask(number, question))

    async def manage(self, action: str, tensors: np.ndarray | None = None, **arguments: Any) -> Any:
        """Does what an administrator asks for, as `protocol.Manage`.

        Raises:
            InputError: It is not possible. Nothing is changed then.
            UnavailableError: The engine does not answer.
        """
        number = next(self._numbers)
        return await self._call(number, protocol.Manage(number, action, arguments, tensors))

    async def compile(self, form: protocol.Form) -> list[str]:
        """Compiles the form of a text, which a submission will have: what it does not enforce.

        Raises:
            InputError: The form is invalid, or exceeds a limit.
            ApiError: 503, the server is busy.
        """
        number = next(self._numbers)
        return await self._call(number, protocol.Compile(number, current().client, form))

    def abort(self, owner: bytes, name: str | None) -> None:
        """Ends all requests of an owner; with a name only those of that name. Their answers say so."""
        self._send(protocol.Abort(owner, name))

    @contextlib.asynccontextmanager
    async def submitted(self, sequences: Sequence[RemoteSequence]) -> AsyncIterator[Inbox]:
        """Submits sequences, all of them or none; those that have not ended when the context ends are aborted.

        Yields:
            Their events.

        Raises:
            InputError: One can never run, or they are more than may ever wait.
            QueueFullError: The queue has not as many places now.
            UnavailableError: The engine has failed or was stopped.
        """
        inbox = Inbox()
        leave = await self.submit(sequences, inbox.put)
        try:
            yield inbox
        finally:
            leave()

    async def submit(
        self,
        sequences: Sequence[RemoteSequence],
        put: Put,
        done: Sequence[tuple[list[int], int]] = (),
        beginnings: Sequence[int | bytes] = (),
    ) -> Callable[[], None]:
        """Submits sequences, all of them or none.

        Args:
            sequences: The sequences.
            put: Takes their events; the first ones may come before this returns.
            done: For each sequence, the tokens after which it goes on, and how many engines have lost it; empty: none.
            beginnings: As of `protocol.Submit`.

        Returns:
            What aborts those that have not ended. There are no further events of them.

        Raises:
            InputError, QueueFullError, UnavailableError: As of `submitted`.
        """
        context, number = current(), next(self._numbers)
        prompts: dict[int, protocol.Prompt] = {}
        numbers = []
        for place, sequence in enumerate(sequences):
            prompt = prompts.setdefault(id(sequence.prompt), sequence.prompt.without_choices())
            tokens, losses = done[place] if done else ([], 0)
            request = next(self._numbers)
            name = context.ids.get(sequence, context.answer_id)
            prompt.choices.append(protocol.Choice(request, name, sequence.request.params.seed or 0, tokens, losses))
            numbers.append(request)
            self._takers[request] = _Taker(put, place, sequence)
        if sequences:
            record = protocol.Submit(number, context.client, context.owner, list(prompts.values()), list(beginnings))
            try:
                seconds = await self._call(number, record, numbers)
            except BaseException:
                for request in numbers:
                    self._takers.pop(request, None)
                raise
            for prompt, tower_s in zip(record.prompts, seconds, strict=True):
                # The choices share it.
                prompt.preparation["tower"] = tower_s
        return partial(self._leave, number, numbers)

    def _leave(self, number: int, requests: Sequence[int]) -> None:
        if unfinished := [request for request in requests if self._takers.pop(request, None) is not None]:
            self._send(protocol.Leave(number, unfinished))

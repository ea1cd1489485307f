"""The engine's side of the protocol, without a front."""

import asyncio

import numpy as np
import pytest

from dflash_jax import protocol
from dflash_jax.errors import InputError
from tests.server.conftest import hosted, wait_until


@pytest.mark.parametrize("has_begun", [True, False])
def test_what_is_aborted_while_it_is_prepared_ends_at_once(server, llm, has_begun):
    """Its form may take seconds to compile. Both records may come in one turn of the loop."""

    async def main() -> list:
        host, gate, records, ended = hosted(llm, server.host.engine), asyncio.Event(), [], asyncio.Event()
        form = protocol.Form("regex", '"[ab]{4}"', "regex")
        compiled = await server_grammar.grammar(form)

        class Held:
            async def grammar(self, form):
                await gate.wait()
                return compiled

        def send(record) -> None:
            records.append(record)
            if isinstance(record, protocol.Events) and any(event.finish_reason for event in record.events):
                ended.set()

        host.grammar = Held()
        front = host.connect(send)
        choices = [protocol.Choice(1, "mine", 0, [])]
        prompt = protocol.Prompt(np.array([5, 6], np.int32), {"max_tokens": 200}, "auto", form=form, choices=choices)
        front.receive(protocol.Submit(0, None, b"owner", [prompt]))
        if has_begun:
            await asyncio.sleep(0)
        front.receive(protocol.Abort(b"other", None))
        front.receive(protocol.Abort(b"owner", "mine"))
        gate.set()
        await ended.wait()
        front.close()
        return [event for record in records if isinstance(record, protocol.Events) for event in record.events]

    server_grammar = server.host.grammar
    events = asyncio.run(main())
    assert events[-1].finish_reason == "abort"


def test_an_event_that_cannot_be_sent_ends_its_request_and_no_other(server, llm):
    """Log-probabilities of another type, say: the encoder refuses the record that has them."""

    async def main() -> list[protocol.Event]:
        host, events, ended = hosted(llm, server.host.engine), [], asyncio.Event()

        def send(record) -> None:
            if isinstance(record, protocol.Answered):
                # Several events of each request come in the next turn.
                assert wait_until(lambda: server.host.engine.engine.statistics.new_tokens >= before + 20)
            if isinstance(record, protocol.Events):
                if any(event.number == 1 and event.failure is None for event in record.events):
                    raise TypeError("a float32 cannot be sent")
                events.extend(record.events)
                if any(event.number == 2 and event.finish_reason for event in record.events):
                    ended.set()

        front, before = host.connect(send), server.host.engine.engine.statistics.new_tokens
        choices = [protocol.Choice(number, "mine", 0, []) for number in (1, 2)]
        prompt = protocol.Prompt(np.array([5, 6], np.int32), {"max_tokens": 20, "ignore_eos": True}, "auto")
        prompt.choices = choices
        front.receive(protocol.Submit(0, None, b"owner", [prompt]))
        await ended.wait()
        assert not front.live
        front.close()
        return events

    events = asyncio.run(main())
    assert [event.failure.message for event in events if event.number == 1] == ["TypeError: a float32 cannot be sent"]
    assert sum(len(event.tokens) for event in events if event.number == 2) == 20


@pytest.mark.parametrize("is_compiling", [False, True])
def test_an_engine_that_ends_is_unavailable_and_does_not_blame_the_request(server, llm, is_compiling):
    """A client that sends the request again may find another engine."""

    class Compiles:
        """Its process is ended in the middle of a compilation."""

        def __init__(self):
            self.begun, self.ended = asyncio.Event(), asyncio.Event()

        async def grammar(self, form):
            self.begun.set()
            await self.ended.wait()
            raise InputError("it needs more than the limits")

        def stop(self):
            self.ended.set()

    async def main() -> protocol.Failure:
        host, failed = hosted(llm, server.host.engine), asyncio.Queue()
        front = host.connect(lambda record: isinstance(record, protocol.Failed) and failed.put_nowait(record))
        if is_compiling:
            host.grammar = Compiles()
        else:
            host.stop_workers()
        front.receive(protocol.Compile(0, None, protocol.Form("regex", '"[ab]{4}"', "regex")))
        if is_compiling:
            await host.grammar.begun.wait()
            host.stop_workers()
        return (await failed.get()).failure

    assert asyncio.run(main()) == protocol.Failure("unavailable", "the server has been stopped")

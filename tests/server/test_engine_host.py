"""The engine's side of the protocol, without a front."""

import asyncio

import numpy as np
import pytest

from dflash_jax import protocol
from tests.server.conftest import hosted


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

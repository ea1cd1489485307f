"""Which engine gets a request, and what refusals, losses, aborts and questions do; a test speaks for the engines."""

import asyncio
import math
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from dflash_jax import SamplingParams, protocol
from dflash_jax.cluster import fleet as fleet_module
from dflash_jax.cluster import routing
from dflash_jax.cluster.fleet import ATTEMPTS, MOST_LOSSES, Engine, Fleet
from dflash_jax.engine.request import Times
from dflash_jax.errors import EngineError, InputError, QueueFullError, UnavailableError
from dflash_jax.server import prepare
from dflash_jax.server.engine_client import EngineClient, RemoteSequence, exception_of
from dflash_jax.server.errors import ApiError
from tests.cluster.fleets import request

FULL = protocol.failure_of(QueueFullError("9 requests are waiting"))
HELLO = protocol.Hello(100, 1, False, {"directory": "m"}, {"model_path": "m"})


class Script:
    """An engine whose records a test writes.

    Attributes:
        engine: As the fleet knows it.
        got: Records that it got.
        is_broken: Whether the fleet has broken the connection off.
        refusal: The answer to each submission; None accepts it.
        answers: Answers to questions, by question; none where there is no entry.
        says: Called after it has accepted a submission, before anything else runs.
        refused: Called before it refuses one.
    """

    def __init__(self, fleet, name):
        self.fleet, self.got, self.is_broken, self.refusal, self.answers = fleet, [], False, None, {}
        self.says = self.refused = lambda: None
        self.engine = Engine(name, self._take, self.break_off)
        fleet.replicas.join(self.engine)
        self.say(HELLO)
        self.say(protocol.State(True, None))

    def say(self, record):
        self.fleet.receive(self.engine, record)

    def break_off(self):
        self.is_broken = True
        self.die()

    def die(self):
        self.fleet.lose(self.engine, "it is dead")

    def _take(self, record):
        self.got.append(record)
        match record:
            case protocol.Submit(number, prompts=prompts) if self.refusal is not None:
                self.refused()
                asyncio.get_running_loop().call_soon(self.say, protocol.Failed(number, self.refusal))
            case protocol.Submit(number, prompts=prompts):
                asyncio.get_running_loop().call_soon(self._accept, protocol.Answered(number, [0.0] * len(prompts)))
            case protocol.Ask(number, question) if question in self.answers:
                answer = protocol.Answered(number, self.answers[question])
                asyncio.get_running_loop().call_soon(self.say, answer)

    def _accept(self, record):
        self.say(record)
        self.says()

    def of(self, kind) -> list:
        return [record for record in self.got if isinstance(record, kind)]

    @property
    def choices(self) -> list[protocol.Choice]:
        """Those of the last submission."""
        return [choice for prompt in self.of(protocol.Submit)[-1].prompts for choice in prompt.choices]

    def event(self, *tokens, choice=0, clock=0.0, **fields):
        event = protocol.Event(self.choices[choice].number, list(tokens), [len(tokens)], **fields)
        self.say(protocol.Events(clock, None, [event]))


def sequences(n=1, ids=(1, 2, 3)):
    prompt = protocol.Prompt(list(ids), {}, "auto")
    found = [RemoteSequence(list(ids), SamplingParams(seed=i, max_tokens=9), [0], None) for i in range(n)]
    for sequence in found:
        sequence.prompt = prompt
    return found


@asynccontextmanager
async def engines(*names, wait_s=60.0):
    fleet = Fleet(wait_s)
    yield fleet, *(Script(fleet, name) for name in names)
    await settled()
    assert [engine.own for engine in fleet.replicas.all] == [0] * len(names)


async def settled():
    """Lets everything run that waits for no clock."""
    for _ in range(30):
        await asyncio.sleep(0)


def check(coroutine):
    asyncio.run(asyncio.wait_for(coroutine(), 100))


def holder(*scripts):
    """The engine that has the last submission."""
    (found,) = (script for script in scripts if script.engine.own)
    return found


def test_a_refusal_for_want_of_places_goes_to_the_next_engine_and_is_the_answer_where_none_has_one():
    async def main():
        async with engines("a", "b", "c") as (fleet, *scripts):
            for script in scripts[:2]:
                script.refusal = FULL
            with request():
                async with fleet.submitted(sequences()):
                    assert holder(*scripts) is scripts[2]
            scripts[2].refusal = protocol.failure_of(UnavailableError("the engine was stopped"))
            with request(), pytest.raises((QueueFullError, UnavailableError)):
                async with fleet.submitted(sequences()):
                    pass
            assert all(len(script.of(protocol.Submit)) >= 1 for script in scripts)

    check(main)


@pytest.mark.parametrize("last", [{"finish_reason": "stop"}, {"failure": protocol.failure_of(EngineError("NaN"))}])
def test_events_that_arrive_with_the_acceptance_are_not_lost(last):
    """As those of one piece of a connection's bytes."""

    async def main():
        async with engines("a", "b") as (fleet, *scripts):
            for script in scripts:
                script.says = lambda script=script: (script.event(1), script.event(2, **last))
            with request():
                async with fleet.submitted(sequences()) as inbox:
                    if "failure" in last:
                        for script in scripts:
                            script.says = lambda: None
                        await settled()
                        assert holder(*scripts).choices[0].tokens == [1]
                        holder(*scripts).event(2, finish_reason="stop")
                    _, events = await inbox.get()
                    assert [event.tokens for event in events] == [[1], [2]]

    check(main)


@pytest.mark.parametrize("failure", [protocol.failure_of(InputError("no")), protocol.Failure("api", "no", 400)])
def test_a_request_at_fault_is_tried_once(failure):
    async def main():
        async with engines("a", "b") as (fleet, *scripts):
            for script in scripts:
                script.refusal = failure
            with request(), pytest.raises(type(exception_of(failure)), match="no"):
                async with fleet.submitted(sequences()):
                    pass
            assert sum(len(script.of(protocol.Submit)) for script in scripts) == 1

    check(main)


def test_a_lost_request_waits_for_a_place_and_goes_on_after_tokens_that_nobody_has_read():
    async def main():
        async with engines("a", "b") as (fleet, *scripts):
            with request():
                async with fleet.submitted(sequences(2)) as inbox:
                    first = holder(*scripts)
                    other = next(script for script in scripts if script is not first)
                    other.refusal = FULL
                    first.event(5, 6)
                    first.event(7, choice=1)
                    first.event(8, choice=1, finish_reason="stop")
                    first.die()
                    await settled()
                    assert other.of(protocol.Submit)
                    other.refusal = None
                    # What opens or closes an engine wakes who waits.
                    other.say(protocol.State(False, None))
                    other.say(protocol.State(True, None))
                    await settled()
                    (choice,) = other.choices
                    assert (choice.tokens, choice.losses, choice.seed) == ([5, 6], 1, 0)
                    other.event(9, finish_reason="length")
                    got = [await inbox.get() for _ in range(3)]
                    texts = [(place, [event.tokens for event in events]) for place, events in got]
                    assert texts == [(0, [[5, 6]]), (1, [[7], [8]]), (0, [[9]])]
            assert not other.of(protocol.Leave)

    check(main)


def test_a_request_that_waits_longer_than_wait_s_ends_with_the_last_refusal():
    async def main():
        async with engines("a", "b", wait_s=0.05) as (fleet, *scripts):
            with request():
                async with fleet.submitted(sequences()) as inbox:
                    first = holder(*scripts)
                    next(script for script in scripts if script is not first).refusal = FULL
                    first.die()
                    _, (event,) = await inbox.get()
                    assert event.failure == FULL

    check(main)


@pytest.mark.parametrize("brings_token", [True, False])
@pytest.mark.parametrize("before", [True, False], ids=["before its acceptance", "after it"])
def test_engines_that_lose_a_request_one_after_the_other_end_it_unless_they_bring_tokens(brings_token, before):
    async def main():
        async with engines("a") as (fleet, script):
            with request():
                if before and not brings_token:
                    script._take = lambda record: (script.got.append(record), script.die())
                    script.engine.client._send = script._take
                async with fleet.submitted(sequences()) as inbox:
                    for i in range(1, 3 * ATTEMPTS):
                        await settled()
                        if brings_token:
                            assert script.choices[0].tokens == list(range(1, i))
                            script.event(i)
                        elif i <= ATTEMPTS:
                            assert len(script.of(protocol.Submit)) == i
                        script.die()
                        await settled()
                        script.say(protocol.State(True, None))
                    if not brings_token:
                        _, (event,) = await inbox.get()
                        assert "the engine of this request was lost" in event.failure.message
                        assert len(script.of(protocol.Submit)) == ATTEMPTS

    check(main)


def test_a_request_that_ends_engine_after_engine_is_given_up():
    """It may be what ends them, also where each brings a token of it."""

    async def main():
        async with engines("a") as (fleet, script):
            with request():
                async with fleet.submitted(sequences()) as inbox:
                    for i in range(1, MOST_LOSSES + 1):
                        await settled()
                        script.event(i)
                        script.die()
                        await settled()
                        script.say(protocol.State(True, None))
                    await settled()
                    events = (await inbox.get())[1]
                    assert "the engine of this request was lost" in events[-1].failure.message
                    assert len(script.of(protocol.Submit)) == MOST_LOSSES

    check(main)


def test_an_abort_whose_engine_dies_before_it_answers_ends_the_request():
    async def main():
        async with engines("a") as (fleet, script):
            with request() as context:
                async with fleet.submitted(sequences()) as inbox:
                    await settled()
                    script.event(1)
                    fleet.abort(context.owner, None)
                    script.die()
                    await settled()
                    script.say(protocol.State(True, None))
                    await settled()
                    events = (await inbox.get())[1]
                    assert events[-1].finish_reason == "abort"
                    assert len(script.of(protocol.Submit)) == 1

    check(main)


def test_an_engine_that_fails_without_dying_loses_its_request():
    async def main():
        async with engines("a", "b") as (fleet, *scripts):
            with request():
                async with fleet.submitted(sequences()) as inbox:
                    first = holder(*scripts)
                    first.event(4)
                    first.event(finish_reason="error", failure=protocol.failure_of(EngineError("NaN")))
                    await settled()
                    second = holder(*scripts)
                    assert second is not first
                    assert second.choices[0].tokens == [4]
                    second.event(failure=protocol.failure_of(InputError("no token is left")))
                    _, events = await inbox.get()
                    assert [event.tokens for event in events] == [[4], []]
                    assert events[-1].failure.kind == "input"

    check(main)


def managed(script) -> list[protocol.Manage]:
    return script.of(protocol.Manage)


def test_new_weights_go_to_one_engine_after_the_other_and_a_pause_to_all():
    async def main():
        async with engines("a", "b") as (fleet, *scripts):
            update = asyncio.ensure_future(fleet.manage("update", None, path="new"))
            await settled()
            assert [len(managed(script)) for script in scripts] == [1, 0]
            scripts[0].say(protocol.State(True, None, "new"))
            assert fleet.state.version == "new, default"
            scripts[0].say(protocol.Answered(managed(scripts[0])[0].number, {"version": "new"}))
            await settled()
            (record,) = managed(scripts[1])
            # One version for all engines, although each has its own count of updates.
            assert (record.action, record.arguments) == ("update", {"path": "new", "version": "1"})
            scripts[1].say(protocol.State(True, None, "new"))
            scripts[1].say(protocol.Answered(record.number, {"version": "new"}))
            assert await update == {"version": "new"}
            assert fleet.state.version == "new"

            pause = asyncio.ensure_future(fleet.manage("abort", names=None))
            await settled()
            for script, count in zip(scripts, (2, 3), strict=True):
                script.say(protocol.Answered(managed(script)[-1].number, count))
            assert await pause == 5

    check(main)


def test_an_administrator_ends_requests_that_have_no_engine_now():
    async def main():
        async with engines("a", "b") as (fleet, *scripts):
            with request(owner=b"another's"):
                async with fleet.submitted(sequences()) as inbox:
                    await settled()
                    for script in scripts:
                        script.die()
                    await settled()
                    with pytest.raises(UnavailableError, match="no engine is ready"):
                        await fleet.manage("abort", names=None)
                    assert (await inbox.get())[1][-1].finish_reason == "abort"

    check(main)


def test_the_rest_of_a_fleet_is_that_of_all_engines():
    async def main():
        async with engines("a", "b") as (fleet, *scripts):
            scripts[0].say(protocol.State(True, None, rest="sleeping", refuses=True))
            assert (fleet.state.rest, fleet.state.refuses) == ("", False)
            scripts[1].say(protocol.State(True, None, rest="paused"))
            assert (fleet.state.rest, fleet.state.refuses) == ("sleeping", False)

    check(main)


def test_an_update_that_fails_at_a_later_engine_says_at_which():
    async def main():
        async with engines("a", "b", "c") as (fleet, *scripts):
            update = asyncio.ensure_future(fleet.manage("update", None, path="new"))
            await settled()
            scripts[0].say(protocol.Answered(managed(scripts[0])[0].number, {"version": "1"}))
            await settled()
            failure = protocol.failure_of(InputError("new is no directory"))
            scripts[1].say(protocol.Failed(managed(scripts[1])[0].number, failure))
            with pytest.raises(ApiError, match="1 of 3 engines have done it, and not b: new is no directory") as error:
                await update
            assert error.value.status_code == 409
            assert not managed(scripts[2])
            update = asyncio.ensure_future(fleet.manage("update", None, path="new"))
            await settled()
            scripts[0].say(protocol.Failed(managed(scripts[0])[1].number, failure))
            with pytest.raises(InputError, match="new is no directory"):
                await update
            sums = asyncio.ensure_future(fleet.manage("checksums"))
            await settled()
            for i, script in enumerate(scripts):
                script.say(protocol.Answered(managed(script)[-1].number, {"a": str(i)}))
            with pytest.raises(ApiError, match="different weights"):
                await sums
        async with engines() as (fleet,):
            with pytest.raises(UnavailableError, match="no engine is ready"):
                await fleet.manage("resume")

    check(main)


def test_a_request_that_moves_says_which_weights_drew_its_tokens():
    async def main():
        async with engines("a", "b") as (fleet, *scripts):
            with request():
                (sequence,) = given = sequences()
                async with fleet.submitted(given) as inbox:
                    first = holder(*scripts)
                    first.event(4, 5, version="1")
                    first.event(6)
                    first.die()
                    await settled()
                    second = holder(*scripts)
                    second.event(7, version="2")
                    second.event(8, finish_reason="length")
                    events = []
                    while not (events and events[-1].finish_reason):
                        events += (await inbox.get())[1]
                    for event in events:
                        sequence.receive(event)
                    assert sequence.versions == [("1", 0, 3), ("2", 3, 5)]

    check(main)


def test_before_the_first_engine_requests_are_refused_and_later_they_wait():
    async def main():
        async with engines() as (fleet,):
            assert not fleet.takes_requests
            with request(), pytest.raises(UnavailableError, match="no engine is ready yet"):
                async with fleet.submitted(sequences()):
                    pass
            script = Script(fleet, "a")
            assert fleet.state.is_ready
            script.die()
            assert not fleet.state.is_ready
            assert fleet.takes_requests

            async def ask():
                with request():
                    async with fleet.submitted(sequences()):
                        return holder(script)

            asking = asyncio.ensure_future(ask())
            await settled()
            script.say(protocol.State(True, None))
            assert await asking is script
            await settled()
            fleet.replicas.remove(script.engine)

    check(main)


@pytest.mark.parametrize("name", [None, "mine"])
def test_an_abort_reaches_a_request_between_two_engines_and_one_that_is_about_to_be_accepted(name):
    async def main():
        async with engines("a") as (fleet, script):
            with request(owner=b"me", answer_id="mine"):
                async with fleet.submitted(sequences()) as inbox:
                    script.die()
                    await settled()
                    fleet.abort(b"you", name)
                    fleet.abort(b"me", "other")
                    assert not inbox._events
                    fleet.abort(b"me", name)
                    _, (event,) = await inbox.get()
                    assert event.finish_reason == "abort"
                    script.say(protocol.State(True, None))
                    await settled()
                    assert len(script.of(protocol.Submit)) == 1
                async with fleet.submitted(sequences(2)) as inbox:
                    script.die()
                    script.says = lambda: script.event(9)
                    script.say(protocol.State(True, None))
                    while len(script.of(protocol.Submit)) < 3:
                        await asyncio.sleep(0)
                    # The engine has it, has not said so, and ends one choice of it before it dies.
                    fleet.abort(b"me", name)
                    assert script.of(protocol.Abort)[-1] == protocol.Abort(b"me", name)
                    await settled()
                    script.event(finish_reason="abort")
                    script.die()
                    got = [await inbox.get() for _ in range(2)]
                    reasons = {place: [event.finish_reason for event in events] for place, events in got}
                    assert reasons == {0: [None, "abort"], 1: ["abort"]}
                    script.say(protocol.State(True, None))
                    await settled()
                    assert not inbox._events
                    assert len(script.of(protocol.Submit)) == 3
                    script.says = lambda: None
                async with fleet.submitted(sequences()) as inbox:
                    # The next engine has no place for it.
                    script.refusal = FULL
                    script.refused = lambda: fleet.abort(b"me", name)
                    script.die()
                    script.say(protocol.State(True, None))
                    assert (await inbox.get())[1][0].finish_reason == "abort"

    check(main)


def test_an_abort_goes_to_all_engines():
    async def main():
        async with engines("a", "b") as (fleet, *scripts):
            fleet.abort(b"me", "mine")
            for script in scripts:
                assert script.of(protocol.Abort) == [protocol.Abort(b"me", "mine")]

    check(main)


def test_a_client_that_leaves_leaves_nothing_at_any_engine():
    async def main():
        async with engines("a", "b") as (fleet, *scripts):
            with request():
                async with fleet.submitted(sequences(2)):
                    first = holder(*scripts)
                    first.event(1, finish_reason="stop")
                    left = first.choices[1].number
                assert first.of(protocol.Leave)[-1].requests == [left]
                async with fleet.submitted(sequences()):
                    holder(*scripts).die()
                    await asyncio.sleep(0)
            await settled()
            for script in scripts:
                if script.of(protocol.Submit):
                    ended = {choice.number for choice in script.choices if choice.losses}
                    left = {number for leave in script.of(protocol.Leave) for number in leave.requests}
                    assert ended <= left

    check(main)


def test_times_are_of_one_clock_and_the_first_engine_says_when_it_began():
    async def main():
        async with engines("a", "b") as (fleet, *scripts):
            with request():
                async with fleet.submitted(sequences()) as inbox:
                    first, before = holder(*scripts), fleet.clock
                    first.event(1, clock=1000.0, times=Times(999.0, 999.0, 999.5, 999.9), cached=3)
                    first.die()
                    await settled()
                    second = holder(*scripts)
                    second.event(2, clock=5.0, times=Times(1.0, 2.0, 3.0, 4.0), cached=9)
                    second.event(3, clock=6.0, times=Times(1.0, 2.0, 3.0, 4.0, 6.0), cached=9, finish_reason="stop")
                    _, (one, two, three) = await inbox.get()
                    after = fleet.clock
                    assert before - 1.0 <= one.times.submitted <= after - 1.0
                    assert (two.times.submitted, two.times.admitted) == (one.times.submitted, one.times.admitted)
                    assert three.times.first_token == one.times.first_token
                    assert before <= three.times.finished <= after
                    assert {event.cached for event in (one, two, three)} == {3}

    check(main)


@pytest.mark.parametrize("known", [0, 1, 2, 3])
def test_scores_of_a_prompt_that_an_engine_has_sent_are_not_sent_twice(known):
    entries = [{"token_id": i} for i in range(3)]

    async def main():
        async with engines("a", "b") as (fleet, *scripts):
            with request():
                (sequence,) = asked = sequences()
                async with fleet.submitted(asked) as inbox:
                    first = holder(*scripts)
                    first.say(protocol.Scores(first.choices[0].number, entries[:known]))
                    first.die()
                    await settled()
                    second = holder(*scripts)
                    for part in (entries[:2], entries[2:]):
                        second.say(protocol.Scores(second.choices[0].number, part))
                    second.event(4, finish_reason="stop")
                    await inbox.get()
                assert sequence.request.prompt_entries == entries

    check(main)


def test_a_session_stays_at_its_engine_whatever_its_prompt():
    async def main():
        async with engines("a", "b", "c") as (fleet, *scripts):
            chosen = set()
            for i in range(9):
                with request(headers={"x-session-id": "me"}):
                    async with fleet.submitted(sequences(ids=range(i, i + 99))):
                        chosen.add(holder(*scripts))
            assert len(chosen) == 1

    check(main)


@pytest.mark.parametrize(
    "info",
    [{"model_path": "other"}, {"kv_cache_dtype": "fp8_e4m3"}, {"quantization": "int8"}, {"activations": "fp4"}],
    ids=lambda info: min(info),
)
def test_an_engine_of_another_model_gets_no_requests(info, caplog):
    """Also of one with other numbers, which would go on with other tokens."""

    async def main():
        async with engines("a") as (fleet, script):
            other = Engine("b", script._take, lambda: None)
            fleet.replicas.join(other)
            fleet.receive(other, protocol.Hello(100, 1, False, {"directory": "m"}, {"model_path": "m"} | info))
            (value,) = info.values()
            assert value in caplog.text
            fleet.receive(other, protocol.State(True, None))
            assert fleet.replicas.open == [script.engine]
            fleet.replicas.remove(other)

    check(main)


def test_questions_to_all_are_answered_by_all_and_name_who_does_not(monkeypatch):
    monkeypatch.setattr(fleet_module, "ALL_S", 1.0)

    async def main():
        async with engines("a", "b") as (fleet, a, b):
            a.answers, b.answers = {"flush": True, "reset": None}, {"flush": False, "reset": None}
            assert await fleet.ask("flush") is False
            assert await fleet.ask("reset") is None
            b.answers["flush"] = True
            assert await fleet.ask("flush") is True
            b.answers = {}
            with pytest.raises(ApiError, match="1 of 2 engines have answered, and not b: try again in 1s") as e:
                await fleet.ask("reset")
            assert e.value.status_code == 503
            # One that dies meanwhile has nothing any more that the question is of.
            asking = asyncio.ensure_future(fleet.ask("flush"))
            await settled()
            b.die()
            assert await asking is True
            a.die()
            with pytest.raises(UnavailableError):
                await fleet.ask("flush")
            assert (await fleet.ask("metrics")).endswith(b"\ndflash:replicas 0\n")

    check(main)


def test_figures_are_sums_and_each_engine_has_its_own():
    figures = {"running": 1, "waiting": 2, "usage": 0.5, "positions": 100, "dispatches": {"1x2": 3}, "slots": 4}
    other = figures | {"usage": 1.0, "positions": 300, "dispatches": {"1x2": 1, "2x2": 5}}

    async def main():
        async with engines("a", "b") as (fleet, a, b):
            a.answers, b.answers = {"figures": figures}, {"figures": other}
            total = await fleet.ask("figures")
            assert (total["running"], total["slots"], total["positions"]) == (2, 8, 400)
            assert total["dispatches"] == {"1x2": 4, "2x2": 5}
            assert total["usage"] == (50 + 300) / 400
            assert total["engines"] == [figures, other]

    check(main)


def test_an_engine_that_does_not_answer_gets_no_requests_until_it_does_and_is_broken_off_after_several(monkeypatch):
    # However late a busy machine's timers are.
    monkeypatch.setattr(fleet_module, "LATE_S", math.inf)

    async def look(fleet, script, seconds):
        monkeypatch.setattr(fleet_module, "ANSWER_S", seconds)
        await fleet._look(script.engine)

    async def main():
        async with engines("a", "b") as (fleet, a, b):
            a.answers = {"figures": {"running": 0, "waiting": 0}}
            for misses in (fleet_module.LOOKS - 1, fleet_module.LOOKS):
                for _ in range(misses):
                    await look(fleet, b, 0.001)
                    await look(fleet, a, 60)
                    assert fleet.replicas.open == [a.engine]
                assert b.is_broken == (misses == fleet_module.LOOKS)
                if not b.is_broken:
                    b.answers = a.answers
                    await look(fleet, b, 60)
                    assert fleet.replicas.open == [a.engine, b.engine]
                    b.answers = {}

    check(main)


def test_an_answer_that_this_process_had_no_processor_to_read_is_no_miss(monkeypatch):
    monkeypatch.setattr(fleet_module, "ANSWER_S", 0.01)
    monkeypatch.setattr(fleet_module, "LATE_S", 0.01)

    async def main():
        async with engines("a") as (fleet, a):
            looking = asyncio.ensure_future(fleet._look(a.engine))
            while not a.of(protocol.Ask):
                await asyncio.sleep(0)
            # The timer is late.
            time.sleep(0.1)
            await looking
            assert (a.engine.missed, fleet.replicas.open) == (0, [a.engine])
            monkeypatch.setattr(fleet_module, "LATE_S", math.inf)
            await fleet._look(a.engine)
            assert (a.engine.missed, fleet.replicas.open) == (1, [])

    check(main)


def test_a_form_is_compiled_at_another_engine_where_the_first_one_dies():
    async def main():
        async with engines("a", "b") as (fleet, *scripts):
            with request():
                compiling = asyncio.ensure_future(fleet.compile(protocol.Form("regex", '"a"', "regex")))
            await settled()
            first = next(script for script in scripts if script.of(protocol.Compile))
            first.die()
            await settled()
            second = next(script for script in scripts if script is not first)
            (record,) = second.of(protocol.Compile)
            second.say(protocol.Answered(record.number, ["a note"]))
            assert await compiling == ["a note"]

    check(main)


def test_requests_of_other_fronts_lead_and_count():
    async def main():
        async with engines("a", "b", "c") as (fleet, *scripts):
            there = scripts[1]
            there.say(protocol.Begun(1, routing.session("me")))
            with request(headers={"x-session-id": "me"}):
                async with fleet.submitted(sequences()):
                    assert scripts.index(holder(*scripts)) == 1 or there.engine.others
                    assert there.of(protocol.Submit)[-1].beginnings == routing.session("me")
            # Too many for its session.
            there.say(protocol.Begun(9, []))
            with request(headers={"x-session-id": "me"}):
                async with fleet.submitted(sequences()):
                    assert len(there.of(protocol.Submit)) == 1
            there.say(protocol.Begun(0, []))

    check(main)


@pytest.mark.parametrize("kind", [Fleet, EngineClient])
def test_media_stay_as_long_as_they_may_be_sent_again(kind):
    released = []
    media = SimpleNamespace(prompt=["pixels"], seconds={}, memory=SimpleNamespace(release=lambda: released.append(1)))
    prompts = SimpleNamespace(
        config=SimpleNamespace(vocab_size=100),
        block_size="auto",
        sequence=lambda ids, params, *_, **__: RemoteSequence(ids, params, [0], None),
    )

    async def main():
        serving = SimpleNamespace(llm=prompts, engine=SimpleNamespace(submits_again=kind.submits_again))
        with request() as context:
            (sequence,) = await prepare.sequences(serving, [1], SamplingParams(seed=1), 1, media=media)
            context.submit([sequence])
            assert (released, sequence.prompt.media) == (([], ["pixels"]) if kind is Fleet else ([1], None))
        assert (released, sequence.prompt.media) == ([1], None)

    check(main)

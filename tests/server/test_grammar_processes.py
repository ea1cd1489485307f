"""Grammars in processes of their own: what one of them does, no other request sees."""

import asyncio
import contextlib
import json
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from dflash_jax.errors import InputError
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.protocol import Form
from dflash_jax.server import grammar_walk
from dflash_jax.server.errors import ApiError
from dflash_jax.server.grammar import CompilationQueue, GrammarProcesses, grammar_tokens
from dflash_jax.server.grammar_masks import LEAST_MASKS, GrammarLimits
from dflash_jax.server.grammar_walk import GrammarWalk
from dflash_jax.server.request_context import RequestContext
from dflash_jax.workers.memory import WorkerMemory
from dflash_jax.workers.process import STUCK_S
from tests.server.conftest import wait_until
from tests.server.hostile import chained_rules, linked_definitions, many_terms, slow_expression

LIMITS = GrammarLimits(compile_s=60, step_s=120)
EASY = Form.of("regex", "[ab]{2,40}c", "f")


@pytest.fixture(scope="module")
def tokens():
    return grammar_tokens(Tokenizer(TINY / "target"), 512, (2, 0))


@pytest.fixture
def processes(tokens):
    """Starts them with limits, for one test."""
    every = []

    def start(**limits) -> GrammarProcesses:
        every.append(GrammarProcesses(tokens, replace(LIMITS, **limits)))
        return every[-1]

    yield start
    for each in every:
        each.stop()


@pytest.fixture(scope="module")
def shared(tokens):
    """As ``processes``, but for all tests with the same limits: each start reads the tokenizer."""
    every = {}

    def start(**limits) -> GrammarProcesses:
        given = replace(LIMITS, **limits)
        if given not in every:
            every[given] = GrammarProcesses(tokens, given)
        return every[given]

    yield start
    for each in every.values():
        each.stop()


def compiled(processes: GrammarProcesses, *forms: Form) -> list:
    """Grammars, or the errors in their places."""

    async def grammar(form: Form):
        return await processes.grammar(form)

    async def main():
        return await asyncio.gather(*map(grammar, forms), return_exceptions=True)

    return asyncio.run(main())


def answered(mask, drafts=()) -> np.ndarray:
    mask.ask(drafts)
    while (masks := mask.answer(0.1)) is None:
        pass
    # The next answer takes its memory.
    return masks.copy()


def eventually(condition) -> None:
    assert wait_until(condition)


def is_gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split()[2] == "Z"
    except OSError:
        return True


def test_masks_are_those_of_the_grammar(shared):
    p = shared()
    (grammar,) = compiled(p, EASY)
    (walk, _) = p.tokens.matcher("regex", "[ab]{2,40}c", "f")
    letters = {letter: Tokenizer(TINY / "target").encode_plain(letter)[0] for letter in "abc"}
    mask, other = grammar.mask(), grammar.mask()
    masks = answered(mask, [letters["a"], letters["b"], letters["c"], 2, 77, 78])
    assert masks.shape == (7, 16)
    assert masks[0].tobytes() == p.tokens.mask(walk)
    # Behind the end, and behind what is forbidden, anything.
    assert masks[4].tobytes() == masks[6].tobytes() == p.tokens.anything
    mask.take([letters["a"], letters["b"]])
    np.testing.assert_array_equal(answered(mask)[0], masks[2])
    # The other sequence is where it was.
    np.testing.assert_array_equal(answered(other)[0], masks[0])
    mask.take(Tokenizer(TINY / "target").encode_plain("\n"))
    with pytest.raises(InputError, match="refuses token"):
        answered(mask)


def test_compiled_grammars_are_kept_by_their_content(shared):
    p = shared()
    first, again, other = compiled(p, EASY, EASY, Form.of("regex", "x", "f"))
    assert first is again
    assert first is not other
    assert compiled(p, EASY) == [first]


@pytest.mark.parametrize(
    "form",
    [
        Form.of("schema", linked_definitions(500), "f"),
        Form.of("grammar", chained_rules(500), "f"),
        Form.of("choice", [f"item number {i}" for i in range(1000)], "f"),
        Form.of("schema", {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(500)}}, "f"),
    ],
    ids=["definitions", "rules", "choices", "properties"],
)
def test_what_is_large_works(shared, form):
    (grammar,) = compiled(shared(), form)
    mask = grammar.mask()
    for _ in range(8):
        allowed = np.flatnonzero(np.unpackbits(answered(mask)[0].view(np.uint8), bitorder="little"))
        mask.take([int(allowed[-1])])


HOSTILE = {
    "definitions": Form.of("schema", linked_definitions(1490), "f"),
    "rules": Form.of("grammar", chained_rules(4500), "f"),
    "terms": Form.of("grammar", many_terms(), "f"),
    "a slow step": Form.of("grammar", slow_expression(), "f"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_hostile_is_refused_or_served_and_the_next_is_served(shared, name):
    p = shared(compile_s=2, memory_bytes=2**28)
    hostile, easy = compiled(p, HOSTILE[name], EASY)
    if isinstance(hostile, InputError):
        assert str(hostile).startswith("f")
    else:
        answered(hostile.mask())
    answered(easy.mask())
    if name in ("terms", "a slow step"):
        assert isinstance(hostile, InputError)


def test_a_compilation_whose_process_crashes_is_refused(shared):
    p = shared()

    async def main():
        task = asyncio.create_task(p.grammar(HOSTILE["terms"]))
        while not p._queue.compiling or next(iter(p._queue.compiling)).pid is None:
            await asyncio.sleep(0.01)
        os.kill(next(iter(p._queue.compiling)).pid, signal.SIGSEGV)
        with pytest.raises(InputError, match="f cannot be compiled"):
            await task
        answered((await p.grammar(EASY)).mask())

    asyncio.run(main())


def test_a_compilation_ends_with_the_client_that_waits_for_it(shared):
    p = shared()

    async def main():
        task = asyncio.create_task(p.grammar(HOSTILE["terms"]))
        while not p._queue.compiling or next(iter(p._queue.compiling)).pid is None:
            await asyncio.sleep(0.01)
        pid = next(iter(p._queue.compiling)).pid
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        while not is_gone(pid):
            await asyncio.sleep(0.01)
        assert not p._tasks

    asyncio.run(main())


def test_a_compilation_that_has_had_its_time_makes_room(processes):
    p = processes(compilations=2, sure_s=0.2)
    hostile = [structs.replace(HOSTILE["terms"], value=HOSTILE["terms"].value + " " * i) for i in range(2)]
    *given_up, easy = compiled(p, *hostile, EASY)
    assert any(isinstance(e, ApiError) and e.status_code == 503 for e in given_up)
    answered(easy.mask())


def test_more_than_may_wait_are_told_to_come_again(processes):
    p = processes(compilations=1, waiting=1, sure_s=600.0)

    async def main():
        first = [asyncio.create_task(p.grammar(structs.replace(HOSTILE["terms"], field=f"f{i}"))) for i in range(1)]
        others = [asyncio.create_task(p.grammar(Form.of("regex", f"x{i}", "f"))) for i in range(8)]
        while sum(t.done() for t in others) < 6:
            await asyncio.sleep(0.01)
        assert all(t.exception().status_code == 503 for t in others if t.done())
        for task in first + others:
            task.cancel()
        await asyncio.gather(*first, *others, return_exceptions=True)

    asyncio.run(main())


def test_the_nursery_is_started_again(processes):
    before = children(os.getpid())
    p = processes()
    (grammar,) = compiled(p, EASY)
    own = (pid for pid in children(os.getpid()) if pid not in before)
    (nursery,) = [int(pid) for pid in own if b"grammar_worker" in command(pid)]
    os.kill(nursery, signal.SIGKILL)
    eventually(lambda: is_gone(nursery))
    (other,) = compiled(p, Form.of("regex", "x+y", "f"))
    answered(other.mask())
    # What was compiled before goes on.
    answered(grammar.mask())


def children(pid: int) -> list[str]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        direct = file.read().split()
    threads = os.listdir(f"/proc/{pid}/task")
    for thread in threads:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
            direct += file.read().split()
    return sorted(set(direct), key=int)


def command(pid: str) -> bytes:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()
    return b""


def test_sequences_whose_process_dies_go_on_and_one_that_dies_alone_ends_its_request_only(shared):
    (grammar,) = compiled(shared(), EASY)
    mask, other = grammar.mask(), grammar.mask()
    a, b = (Tokenizer(TINY / "target").encode_plain(letter)[0] for letter in "ab")
    expected = answered(mask, [a, b, b])
    mask.take([a, b])
    answered(other)
    assert mask.walker is other.walker
    os.kill(mask.walker.process.pid, signal.SIGKILL)
    np.testing.assert_array_equal(answered(mask, [b]), expected[2:])
    np.testing.assert_array_equal(answered(other)[0], expected[0])
    assert mask.walker is not other.walker
    os.kill(mask.walker.process.pid, signal.SIGKILL)
    with pytest.raises(InputError, match="needed more than"):
        answered(mask)
    answered(other)


def test_a_dead_grammar_is_compiled_again(shared):
    p = shared()
    (grammar,) = compiled(p, EASY)
    os.kill(grammar.process.pid, signal.SIGKILL)
    eventually(lambda: not grammar.is_alive)
    (again,) = compiled(p, EASY)
    assert again is not grammar
    answered(again.mask())


def test_a_step_without_processor_time_is_waited_for_until_it_is_stuck(shared):
    (grammar,) = compiled(shared(), EASY)
    mask = grammar.mask()
    expected = answered(mask)
    pid = mask.walker.process.pid
    os.kill(pid, signal.SIGSTOP)
    mask.ask(())
    mask._requested_at -= STUCK_S - 60
    assert mask.answer(0.0) is None
    os.kill(pid, signal.SIGCONT)
    while (masks := mask.answer(0.1)) is None:
        pass
    np.testing.assert_array_equal(masks, expected)
    os.kill(pid, signal.SIGSTOP)
    mask.ask(())
    mask._requested_at -= 2 * STUCK_S
    with pytest.raises(InputError, match="did not answer for 600 s"):
        mask.answer(0.0)
    mask.close()
    eventually(lambda: is_gone(pid))


def of(client: str, processes: GrammarProcesses, form: Form) -> asyncio.Task:
    """A client's request for a grammar."""

    async def grammar():
        RequestContext(client=client).enter()
        return await processes.grammar(form)

    return asyncio.create_task(grammar())


def hostile(i: int) -> Form:
    return structs.replace(HOSTILE["terms"], value=HOSTILE["terms"].value + " " * i)


async def ended(tasks) -> list:
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_slow_grammars_of_a_client_leave_room_for_those_of_another(processes):
    """The first client's compilations never end, and none is dropped."""
    p = processes(compilations=2, waiting=4, sure_s=600.0)

    async def main():
        slow = [of("a", p, hostile(i)) for i in range(8)]
        while not p._queue.waiting:
            await asyncio.sleep(0.01)
        # Also one that the first client waits for.
        answered((await of("b", p, EASY)).mask())
        other = of("b", p, hostile(3))
        async with asyncio.timeout(60):
            while list(p._queue.compiling.values()) != ["a", "b"]:
                await asyncio.sleep(0.01)
        results = await ended([other, *slow])
        # Of more than may wait, the client that has most of them loses its own.
        assert [e.status_code for e in results if isinstance(e, ApiError)] == [503] * 3

    asyncio.run(main())


class Compiling:
    """A compilation that has used so much processor time."""

    def __init__(self, seconds: float):
        self.seconds, self.reason = seconds, None

    def processor_s(self) -> float:
        return self.seconds

    def kill(self, reason: str) -> None:
        self.reason = reason


@pytest.mark.parametrize(
    ("running", "waiting", "dropped"),
    [
        # Together a client has its time before another one, each before one of its own client.
        ([("a", 0.9), ("a", 0.8), ("b", 0.1)], "c", None),
        ([("a", 1.4), ("a", 0.8), ("b", 9.0)], "c", 0),
        ([("a", 1.4), ("a", 0.8), ("b", 9.0)], "a", None),
        ([("a", 1.4), ("a", 2.1), ("b", 9.0)], "a", 1),
        # Of clients that have as many, the one that has used most.
        ([("a", 0.5), ("b", 2.5), ("c", 0.5)], "d", 1),
    ],
)
def test_one_of_the_client_that_has_most_makes_room(running, waiting, dropped):
    async def main():
        queue = CompilationQueue(GrammarLimits(compilations=3, sure_s=2.0))
        for client, seconds in running:
            await queue.take(1, client)
            queue.compiling[Compiling(seconds)] = client
        task = asyncio.create_task(queue.take(1, waiting))
        await asyncio.sleep(0)
        for _ in range(3):
            queue._drop()
        assert [i for i, process in enumerate(queue.compiling) if process.reason] == [dropped] * (dropped is not None)
        await ended([task])

    asyncio.run(main())


def test_the_cache_is_shared_by_clients(processes):
    """However many a client has compiled since, a grammar of another one is kept."""
    p = processes(cached=3, grace_s=0.0)

    async def main():
        kept = await of("b", p, EASY)
        for i in range(6):
            await of("a", p, Form.of("regex", f"x{i}", "f"))
        assert await of("b", p, EASY) is kept
        assert len(p._cache) <= 4

    asyncio.run(main())


def test_memory_is_taken_from_the_client_that_has_most(processes, monkeypatch):
    """Its largest process ends, though another client has a larger one."""
    p, sizes = processes(), {}
    monkeypatch.setattr(WorkerMemory, "sizes", lambda _, processes: {p: sizes.get(p, 0) for p in processes})

    async def main():
        own = [await of("a", p, Form.of("regex", f"x{i}", "f")) for i in range(3)]
        other = await of("b", p, EASY)
        return own, other

    own, other = asyncio.run(main())
    # More than 2 GiB, less without the largest of the first client.
    sizes.update({other.process: 1000 << 20} | {each.process: (400 << 20) + i for i, each in enumerate(own)})
    eventually(lambda: not own[2].is_alive)
    assert own[2].process.reason
    assert not any(each.process.reason for each in (other, *own[:2]))


def test_a_process_has_some_sequences_of_one_client(processes):
    p = processes(sequences=2)

    async def main():
        for client in "aaabb":
            RequestContext(client=client).enter()
            masks.append((await p.grammar(EASY)).mask())

    masks = []
    asyncio.run(main())
    first = [answered(mask) for mask in masks]
    assert all((masks == first[0]).all() for masks in first)
    a, b, c, d, e = (mask.walker for mask in masks)
    assert a is b
    assert d is e
    assert len({a, c, d}) == 3
    # A process without sequences ends.
    masks[0].close()
    masks[2].close()
    pid = c.process.pid
    eventually(lambda: is_gone(pid))
    answered(masks[1])


def test_an_answer_for_a_sequence_that_is_gone_is_not_taken_for_the_next_one(shared):
    (grammar,) = compiled(shared(), EASY)
    a, c = (Tokenizer(TINY / "target").encode_plain(letter)[0] for letter in "ac")
    stays, gone = grammar.mask(), grammar.mask()
    expected = answered(stays)
    answered(gone)
    pid = gone.walker.process.pid
    os.kill(pid, signal.SIGSTOP)
    gone.take([a, a, c])
    gone.ask(())
    assert gone.answer(0.0) is None
    gone.close()
    assert not any(mask is gone for mask in grammar.exchange._asked.values())
    new = grammar.mask()
    new.ask(())
    assert new.answer(0.0) is None
    os.kill(pid, signal.SIGCONT)
    while (masks := new.answer(0.1)) is None:
        pass
    assert new.walker is stays.walker
    np.testing.assert_array_equal(masks, expected)


def test_a_process_that_does_not_read_delays_nobody(shared):
    """Where a message has no room, its rest is sent later."""
    (grammar,) = compiled(shared(), Form.of("regex", "a*", "f"))
    mask, (a,) = grammar.mask(), Tokenizer(TINY / "target").encode_plain("a")
    expected = answered(mask)
    pid = mask.walker.process.pid
    os.kill(pid, signal.SIGSTOP)
    mask.take([a] * 100_000)
    mask.ask(())
    for _ in range(3):
        assert mask.answer(0.0) is None
    os.kill(pid, signal.SIGCONT)
    while (masks := mask.answer(0.1)) is None:
        pass
    np.testing.assert_array_equal(masks, expected)


def test_more_drafts_than_a_process_has_memory_for_go_to_another_one(shared):
    (grammar,) = compiled(shared(), Form.of("regex", "a*", "f"))
    mask, other, (a,) = grammar.mask(), grammar.mask(), Tokenizer(TINY / "target").encode_plain("a")
    expected, first = answered(mask), mask.walker
    answered(other)
    mask.take([a])
    masks = answered(mask, [a] * 2 * LEAST_MASKS)
    assert mask.walker is not first
    assert len(masks) == 2 * LEAST_MASKS + 1
    assert (masks == expected).all()
    answered(other)
    assert other.walker is first


def test_only_processor_time_counts_for_making_room(processes):
    """A compilation that has not run yet is not given up for another one, however long it waits for a processor."""
    p = processes(compilations=1, sure_s=0.2)
    forked, stopped = p._nursery.forked, []

    async def stopped_at_once():
        process = await forked()
        while process.pid is None:
            process.poll()
            await asyncio.sleep(0.01)
        if not stopped:
            os.kill(process.pid, signal.SIGSTOP)
        stopped.append(process)
        return process

    p._nursery.forked = stopped_at_once

    async def main():
        first = asyncio.create_task(p.grammar(EASY))
        while not p._queue.compiling:
            await asyncio.sleep(0.01)
        stopped[0].began -= 60.0
        second = asyncio.create_task(p.grammar(Form.of("regex", "x", "f")))
        while not p._queue.waiting:
            await asyncio.sleep(0.01)
        for _ in range(10):
            await asyncio.sleep(0)
        assert stopped[0].reason is None
        os.kill(stopped[0].pid, signal.SIGCONT)
        await asyncio.gather(first, second)

    asyncio.run(main())


def test_all_of_them_together_are_bounded(processes):
    p = processes(total_bytes=1)
    (grammar,) = compiled(p, EASY)
    pid = grammar.process.pid
    eventually(lambda: is_gone(pid))
    assert grammar.process.reason


def test_idle_grammars_are_let_go_and_used_ones_are_not(processes):
    p = processes(cached=2, grace_s=0.0)
    (used,) = compiled(p, EASY)
    mask = used.mask()
    # One after the other: the oldest is let go.
    others = [grammar for i in range(4) for grammar in compiled(p, Form.of("regex", f"x{i}", "f"))]
    assert len(p._cache) <= 3
    assert used.is_alive
    answered(mask)
    pid = others[0].process.pid
    eventually(lambda: is_gone(pid))


def test_a_grammar_is_kept_until_its_request_has_had_time_for_a_mask(processes):
    p = processes(cached=0, grace_s=600.0)
    (first,) = compiled(p, EASY)
    compiled(p, *(Form.of("regex", f"x{i}", "f") for i in range(3)))
    answered(first.mask())


def test_nothing_is_left_behind(processes):
    p = processes()
    (grammar,) = compiled(p, EASY)
    masks = [grammar.mask() for _ in range(5)]
    pids = [answered(mask) is not None and mask.walker.process.pid for mask in masks]
    p.stop()
    eventually(lambda: all(is_gone(pid) for pid in (*pids, grammar.process.pid)))


def test_a_step_without_a_server_ends(processes):
    """Nothing else would end a sequence's process that is in the middle of a step when its server is killed."""
    (grammar,) = compiled(processes(shared_s=7), EASY)
    mask = grammar.mask()
    answered(mask)
    with open(f"/proc/{mask.walker.process.pid}/limits") as file:
        (line,) = [line.split() for line in file if line.startswith("Max cpu time")]
    assert 7 <= int(line[3]) <= 60


def test_objects_are_closed_and_what_is_left_out_is_told(shared):
    closed = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = Form.of("schema", closed | {"not": {"required": ["b"]}}, "f")
    (grammar,) = compiled(shared(), wanted)
    assert len(grammar.notes) == 1
    assert "not" in grammar.notes[0]
    tokenizer, mask = Tokenizer(TINY / "target"), grammar.mask()
    ids = tokenizer.encode_plain('{"a": 1')
    mask.take(ids)
    allowed = answered(mask)[0]
    comma, brace = (tokenizer.encode_plain(c)[0] for c in ",}")
    assert not allowed[comma // 32] >> comma % 32 & 1
    assert allowed[brace // 32] >> brace % 32 & 1


@pytest.mark.parametrize("value", ["x" * 70_000, json.dumps("x" * 66_000)])
def test_too_many_characters_are_refused_by_number(value):
    with pytest.raises(InputError, match="at most 65536 are possible"):
        Form.of("regex", value, "f")


def test_a_limit_behind_a_draft_is_no_error_before_the_draft_is_drawn(monkeypatch):
    """Without a drafter, nothing would have looked there."""
    monkeypatch.setitem(grammar_walk._LIMITS, "max_items_in_row", 100)
    tokenizer = Tokenizer(TINY / "target")
    tokens = grammar_tokens(tokenizer, 512, (2, 0))
    many = " | ".join(f'"{i}" r{i}' for i in range(300))
    rules = "\n".join(f'r{i}: "x{i}"' for i in range(300))
    (matcher, _) = tokens.matcher("grammar", f'start: "z"? ("a" "c" | "b" many)\nmany: {many}\n{rules}', "f")
    a, b, c, z = (tokenizer.encode_plain(letter)[0] for letter in "abcz")
    walk = GrammarWalk(tokens, matcher)
    walk.take([z])
    first, behind = walk.masks([b, c])
    assert first[b // 8] >> b % 8 & 1
    assert not any(behind)
    # The walk is where it was.
    assert walk.masks([]) == [first]
    walk.take([a])
    (last,) = walk.masks([])
    assert [i for i in range(512) if last[i // 8] >> i % 8 & 1] == [c]
    # Drawn, it is an error.
    other = GrammarWalk(tokens, tokens.matcher("grammar", f'start: "b" many\nmany: {many}\n{rules}', "f")[0])
    with pytest.raises(InputError, match="cannot be kept any longer"):
        other.take([b])

"""Grammars in processes of their own: what one of them does, no other request sees."""

import asyncio
import contextlib
import json
import os
import signal
from dataclasses import replace

import numpy as np
import pytest

from dflash_jax.errors import InputError
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.server import grammar_walk
from dflash_jax.server.constraint import Constraint, grammar_tokens
from dflash_jax.server.errors import ApiError
from dflash_jax.server.grammar import GrammarLimits, GrammarProcesses
from dflash_jax.server.grammar_walk import GrammarWalk
from dflash_jax.workers.process import STUCK_S
from tests.server.conftest import wait_until
from tests.server.hostile import chained_rules, linked_definitions, many_terms, slow_expression

LIMITS = GrammarLimits(compile_s=60, step_s=120)
EASY = Constraint("regex", "[ab]{2,40}c", "f")


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


def compiled(processes: GrammarProcesses, *constraints: Constraint) -> list:
    """Grammars, or the errors in their places."""

    async def grammar(constraint: Constraint):
        return await processes.grammar(constraint.form())

    async def main():
        return await asyncio.gather(*map(grammar, constraints), return_exceptions=True)

    return asyncio.run(main())


def answered(mask, drafts=()) -> np.ndarray:
    mask.ask(drafts)
    while (masks := mask.answer(0.1)) is None:
        pass
    return masks


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
    first, again, other = compiled(p, EASY, EASY, Constraint("regex", "x", "f"))
    assert first is again
    assert first is not other
    assert compiled(p, EASY) == [first]


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("schema", linked_definitions(500), "f"),
        Constraint("grammar", chained_rules(500), "f"),
        Constraint("choice", [f"item number {i}" for i in range(1000)], "f"),
        Constraint("schema", {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(500)}}, "f"),
    ],
    ids=["definitions", "rules", "choices", "properties"],
)
def test_what_is_large_works(shared, constraint):
    (grammar,) = compiled(shared(), constraint)
    mask = grammar.mask()
    for _ in range(8):
        allowed = np.flatnonzero(np.unpackbits(answered(mask)[0].view(np.uint8), bitorder="little"))
        mask.take([int(allowed[-1])])


HOSTILE = {
    "definitions": Constraint("schema", linked_definitions(1600), "f"),
    "rules": Constraint("grammar", chained_rules(4500), "f"),
    "terms": Constraint("grammar", many_terms(), "f"),
    "a slow step": Constraint("grammar", slow_expression(), "f"),
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
        task = asyncio.create_task(p.grammar(HOSTILE["terms"].form()))
        while not p._queue.compiling or p._queue.compiling[0].pid is None:
            await asyncio.sleep(0.01)
        os.kill(p._queue.compiling[0].pid, signal.SIGSEGV)
        with pytest.raises(InputError, match="f cannot be compiled"):
            await task
        answered((await p.grammar(EASY.form())).mask())

    asyncio.run(main())


def test_a_compilation_ends_with_the_client_that_waits_for_it(shared):
    p = shared()

    async def main():
        task = asyncio.create_task(p.grammar(HOSTILE["terms"].form()))
        while not p._queue.compiling or p._queue.compiling[0].pid is None:
            await asyncio.sleep(0.01)
        pid = p._queue.compiling[0].pid
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        while not is_gone(pid):
            await asyncio.sleep(0.01)
        assert not p._tasks

    asyncio.run(main())


def test_a_compilation_that_has_had_its_time_makes_room(processes):
    p = processes(compilations=2, sure_s=0.2)
    hostile = [replace(HOSTILE["terms"], value=HOSTILE["terms"].value + " " * i) for i in range(2)]
    *given_up, easy = compiled(p, *hostile, EASY)
    assert any(isinstance(e, ApiError) and e.status_code == 503 for e in given_up)
    answered(easy.mask())


def test_more_than_may_wait_are_told_to_come_again(processes):
    p = processes(compilations=1, waiting=1, sure_s=600.0)

    async def main():
        first = [asyncio.create_task(p.grammar(replace(HOSTILE["terms"], field=f"f{i}").form())) for i in range(1)]
        others = [asyncio.create_task(p.grammar(Constraint("regex", f"x{i}", "f").form())) for i in range(8)]
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
    (other,) = compiled(p, Constraint("regex", "x+y", "f"))
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


def test_a_dead_sequence_ends_its_request_only(shared):
    (grammar,) = compiled(shared(), EASY)
    mask, other = grammar.mask(), grammar.mask()
    answered(mask)
    answered(other)
    os.kill(mask._process.pid, signal.SIGKILL)
    with pytest.raises(InputError, match="needed more than"):
        answered(mask)
    answered(other)


def test_a_dead_grammar_is_compiled_again(shared):
    p = shared()
    (grammar,) = compiled(p, EASY)
    os.kill(grammar._process.pid, signal.SIGKILL)
    eventually(lambda: not grammar.is_alive)
    (again,) = compiled(p, EASY)
    assert again is not grammar
    answered(again.mask())


def test_a_step_without_processor_time_is_waited_for_until_it_is_stuck(shared):
    (grammar,) = compiled(shared(), EASY)
    mask = grammar.mask()
    expected = answered(mask)
    pid = mask._process.pid
    os.kill(pid, signal.SIGSTOP)
    mask.ask(())
    mask._mask_requested_at -= STUCK_S - 60
    assert mask.answer(0.0) is None
    os.kill(pid, signal.SIGCONT)
    while (masks := mask.answer(0.1)) is None:
        pass
    np.testing.assert_array_equal(masks, expected)
    os.kill(pid, signal.SIGSTOP)
    mask.ask(())
    mask._mask_requested_at -= 2 * STUCK_S
    with pytest.raises(InputError, match="did not answer for 600 s"):
        mask.answer(0.0)
    mask.close()
    eventually(lambda: is_gone(pid))


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
        first = asyncio.create_task(p.grammar(EASY.form()))
        while not p._queue.compiling:
            await asyncio.sleep(0.01)
        stopped[0].began -= 60.0
        second = asyncio.create_task(p.grammar(Constraint("regex", "x", "f").form()))
        while not p._queue._queued:
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
    pid = grammar._process.pid
    eventually(lambda: is_gone(pid))
    assert grammar._process.reason


def test_idle_grammars_are_let_go_and_used_ones_are_not(processes):
    p = processes(cached=2, grace_s=0.0)
    (used,) = compiled(p, EASY)
    mask = used.mask()
    # One after the other: the oldest is let go.
    others = [grammar for i in range(4) for grammar in compiled(p, Constraint("regex", f"x{i}", "f"))]
    assert len(p._cache) <= 3
    assert used.is_alive
    answered(mask)
    pid = others[0]._process.pid
    eventually(lambda: is_gone(pid))


def test_a_grammar_is_kept_until_its_request_has_had_time_for_a_mask(processes):
    p = processes(cached=0, grace_s=600.0)
    (first,) = compiled(p, EASY)
    compiled(p, *(Constraint("regex", f"x{i}", "f") for i in range(3)))
    answered(first.mask())


def test_nothing_is_left_behind(processes):
    p = processes()
    (grammar,) = compiled(p, EASY)
    masks = [grammar.mask() for _ in range(5)]
    pids = [answered(mask) is not None and mask._process.pid for mask in masks]
    p.stop()
    eventually(lambda: all(is_gone(pid) for pid in (*pids, grammar._process.pid)))


def test_a_step_without_a_server_ends(processes):
    """Nothing else would end a sequence's process that is in the middle of a step when its server is killed."""
    (grammar,) = compiled(processes(step_s=7), EASY)
    mask = grammar.mask()
    answered(mask)
    with open(f"/proc/{mask._process.pid}/limits") as file:
        (line,) = [line.split() for line in file if line.startswith("Max cpu time")]
    assert 7 <= int(line[3]) <= 60


def test_objects_are_closed_and_what_is_left_out_is_told(shared):
    closed = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = Constraint("schema", closed | {"not": {"required": ["b"]}}, "f")
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
        Constraint("regex", value, "f").form()


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

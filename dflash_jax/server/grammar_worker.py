"""The processes that compile and walk grammars: ``python -m dflash_jax.server.grammar_worker FD``.

A grammar comes from outside, and llguidance's native code may overflow its stack, take gigabytes or never return.
Separate processes keep one request's grammar from affecting others:

- The *nursery* reads the tokenizer once, then only forks.
- Each grammar has a process, which compiles it within limits of time and memory, then only forks.
- Some sequences of a client with the grammar have a process, which computes their masks.

A process that exceeds a limit dies, which closes its socket; the server (`grammar.py`, `grammar_masks.py`) has the
other end. A fork shares its parent's memory, so it costs milliseconds and a few pages.

Frames of JSON go in. Frames of JSON come out of compilations; masks come out through shared memory.
"""

import json
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from dflash_jax.errors import InputError
from dflash_jax.server.grammar_source import openings
from dflash_jax.server.grammar_trigger import TriggeredWalk, Triggers
from dflash_jax.server.grammar_walk import GrammarTokens, GrammarWalk
from dflash_jax.workers.loop import NICENESS, Frames, fork_for_each, limit_memory, limit_seconds, run_nursery

# Rules may nest thousands of levels deep, and llguidance walks them recursively.
STACK_BYTES = 2**29
# An answer about masks: the number of the step, and how many masks it has; of an error, its bytes below zero.
ANSWER = "<Ii"
# Seconds of steps after which their answers are sent before the other steps of the same message.
ANSWERED_S = 0.001


def _prepare(fields: dict) -> Callable[[Frames], None]:
    os.nice(NICENESS)
    arguments: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}
    tokens = GrammarTokens(**arguments)
    tokens.load()
    return partial(_compile, tokens)


def _compile(tokens: GrammarTokens, frames: Frames) -> None:
    """A grammar's process: one answer, then forks that walk sequences."""
    request = frames.read()
    os.nice(request["niceness"])
    limit_memory(request["memory_bytes"])
    limit_seconds(request["compile_s"])
    try:
        value = json.loads(request["value"])
        matcher, notes = tokens.matcher(request["kind"], value, request["field"], request["blanks"])
        # The first mask costs more than all others, and is the same for all sequences.
        tokens.mask(matcher)
    except (InputError, MemoryError) as e:
        frames.send(json.dumps({"error": str(e) or "it needs too much memory"}).encode())
        return
    words = openings(request["kind"], value)
    triggers = Triggers(tokens, matcher, words) if words else None
    frames.send(json.dumps({"notes": notes}).encode())
    limit_seconds(None)

    def begin(thought: str) -> GrammarWalk | TriggeredWalk:
        return TriggeredWalk(triggers, thought) if triggers else GrammarWalk(tokens, matcher.deep_copy(), thought)

    fork_for_each(frames.socket, partial(_walk, begin))


def _walk(begin: Callable[[str], GrammarWalk | TriggeredWalk], frames: Frames) -> None:
    """A process of sequences: masks after their taken tokens, and after each draft."""
    _, (memory, answers), _, _ = socket.recv_fds(frames.socket, 1, 2)
    start = frames.read()
    shared, size = mmap.mmap(memory, start["bytes"]), start["bytes"] // start["sequences"]
    limit_memory(start["memory_bytes"])
    walks: dict[int, GrammarWalk | TriggeredWalk] = {}
    while True:
        answered, began = b"", 0.0
        for number, place, thought, taken, drafts in frames.read():
            if time.monotonic() - began > ANSWERED_S:
                os.write(answers, answered)
                limit_seconds(start["step_s"])
                answered, began = b"", time.monotonic()
            if thought is not None:
                walks[place] = begin(thought)
            try:
                walks[place].take(taken)
                masks = walks[place].masks(drafts)
                count, payload = len(masks), b"".join(masks)
            except InputError as e:
                payload = str(e).encode()[:size]
                count = -len(payload)
            shared[place * size : place * size + len(payload)] = payload
            answered += struct.pack(ANSWER, number, count)
        os.write(answers, answered)


if __name__ == "__main__":
    run_nursery(_prepare, STACK_BYTES)

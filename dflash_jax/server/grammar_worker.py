"""The processes in which grammars are compiled and walked: ``python -m dflash_jax.server.grammar_worker FD``.

A grammar comes from outside, and llguidance works on it in native code that may overflow its stack, take gigabytes or
never return. So that no request can do this to another:

- The *nursery* reads the tokenizer once and does nothing but fork.
- Each grammar has a process, which compiles it within limits of time and memory and then does nothing but fork.
- Each sequence that follows the grammar has a process, which computes its masks.

A process that exceeds a limit dies, which closes its socket; the server (`grammar.py`) has the other end and sees no
more of it than that. A fork shares its memory with what it was forked from, so a sequence costs milliseconds and a few
pages.

Frames of JSON go in, and frames of JSON or masks come out.
"""

import json
import os

from dflash_jax.errors import InputError
from dflash_jax.server.grammar_walk import GrammarTokens, GrammarWalk
from dflash_jax.server.worker_loop import (
    NICENESS,
    Frames,
    fork_for_each,
    limit_memory,
    limit_seconds,
    prepared_nursery,
)

# Grammars may refer to each other thousands of levels deep, and are walked recursively.
STACK_BYTES = 2**29
# The first byte of an answer about masks.
MASKS, REFUSAL = b"\0", b"\1"


def main() -> None:
    control = prepared_nursery(STACK_BYTES)
    os.nice(NICENESS)
    frames = Frames(control)
    given = frames.read()
    tokens = GrammarTokens(**{key: tuple(v) if isinstance(v, list) else v for key, v in given.items()})
    tokens.load()
    frames.send(str(os.getpid()).encode())
    fork_for_each(control, lambda frames: _compile(tokens, frames))


def _compile(tokens: GrammarTokens, frames: Frames) -> None:
    """A grammar's process: one answer, and then a fork for each sequence."""
    wanted = frames.read()
    limit_memory(wanted["memory_bytes"])
    limit_seconds(wanted["compile_s"])
    try:
        matcher, notes = tokens.matcher(wanted["kind"], wanted["value"], wanted["field"])
        # The first mask costs more than all others, and is the same for all sequences.
        tokens.mask(matcher)
    except (InputError, MemoryError) as e:
        frames.send(json.dumps({"error": str(e) or "it needs too much memory"}).encode())
        return
    frames.send(json.dumps({"notes": notes}).encode())
    limit_seconds(None)
    fork_for_each(frames.socket, lambda frames: _walk(tokens, matcher, frames))


def _walk(tokens: GrammarTokens, matcher, frames: Frames) -> None:
    """A sequence's process: masks behind what was taken, and behind each draft."""
    wanted = frames.read()
    limit_memory(wanted["memory_bytes"])
    walk = GrammarWalk(tokens, matcher, wanted["thought"])
    while True:
        asked = frames.read()
        # The server ends a step that takes longer, unless it is gone itself.
        limit_seconds(int(wanted["step_s"]) + 1)
        try:
            walk.take(asked["taken"])
            answer = MASKS + b"".join(walk.masks(asked["drafts"]))
        except (InputError, MemoryError) as e:
            answer = REFUSAL + (str(e) or "the text's form needs too much memory").encode()
        frames.send(answer)


if __name__ == "__main__":
    main()

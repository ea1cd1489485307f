"""The processes that compile and walk grammars: ``python -m dflash_jax.server.grammar_worker FD``.

A grammar comes from outside, and llguidance's native code may overflow its stack, take gigabytes or never return.
Separate processes keep one request's grammar from affecting others:

- The *nursery* reads the tokenizer once, then only forks.
- Each grammar has a process, which compiles it within limits of time and memory, then only forks.
- Each sequence with the grammar has a process, which computes its masks.

A process that exceeds a limit dies, which closes its socket; the server (`grammar.py`) has the other end. A fork shares
its parent's memory, so a sequence costs milliseconds and a few pages.

Frames of JSON go in; frames of JSON or masks come out.
"""

import json
import os
from typing import Any

from dflash_jax.errors import InputError
from dflash_jax.server.grammar_walk import GrammarTokens, GrammarWalk
from dflash_jax.workers.loop import (
    NICENESS,
    Frames,
    fork_for_each,
    limit_memory,
    limit_seconds,
    prepared_nursery,
)

# Rules may nest thousands of levels deep, and llguidance walks them recursively.
STACK_BYTES = 2**29
# The first byte of an answer about masks.
MASKS, REFUSAL = b"\0", b"\1"


def main() -> None:
    """The nursery."""
    control = prepared_nursery(STACK_BYTES)
    os.nice(NICENESS)
    frames = Frames(control)
    fields = frames.read()
    arguments: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}
    tokens = GrammarTokens(**arguments)
    tokens.load()
    frames.send(str(os.getpid()).encode())
    fork_for_each(control, lambda frames: _compile(tokens, frames))


def _compile(tokens: GrammarTokens, frames: Frames) -> None:
    """A grammar's process: one answer, then a fork for each sequence."""
    request = frames.read()
    limit_memory(request["memory_bytes"])
    limit_seconds(request["compile_s"])
    try:
        matcher, notes = tokens.matcher(request["kind"], json.loads(request["value"]), request["field"])
        # The first mask costs more than all others, and is the same for all sequences.
        tokens.mask(matcher)
    except (InputError, MemoryError) as e:
        frames.send(json.dumps({"error": str(e) or "it needs too much memory"}).encode())
        return
    frames.send(json.dumps({"notes": notes}).encode())
    limit_seconds(None)
    fork_for_each(frames.socket, lambda frames: _walk(tokens, matcher, frames))


def _walk(tokens: GrammarTokens, matcher, frames: Frames) -> None:
    """A sequence's process: masks after the taken tokens and after each draft."""
    start = frames.read()
    limit_memory(start["memory_bytes"])
    walk = GrammarWalk(tokens, matcher, start["thought"])
    while True:
        request = frames.read()
        limit_seconds(start["step_s"])
        try:
            walk.take(request["tokens"])
            answer = MASKS + b"".join(walk.masks(request["drafts"]))
        except (InputError, MemoryError) as e:
            answer = REFUSAL + (str(e) or "the text's form needs too much memory").encode()
        frames.send(answer)


if __name__ == "__main__":
    main()

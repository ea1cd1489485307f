"""The processes that tokenise data: ``python -m dflash_jax.training.token_worker FD``; see `token_cache`.

The nursery loads the tokenizer and forks a process for each core. Frames of JSON go in, each with a part of a file; the
bytes of a `Part` come out.
"""

import os
from contextlib import suppress
from pathlib import Path

from dflash_jax.errors import InputError
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.training.tokenising import tokenise_part
from dflash_jax.workers.loop import Frames, fork_for_each, prepared_nursery


def main() -> None:
    """The nursery."""
    control = prepared_nursery()
    frames = Frames(control)
    given = frames.read()
    tokenizer = None
    if (arguments := given["tokenizer"]) is not None:
        tokenizer = Tokenizer(**arguments | {"directory": Path(arguments["directory"])})
        # What templates need takes seconds to load. Texts need none, and tell of it for each line.
        with suppress(InputError):
            _ = tokenizer.chat_template
    frames.send(str(os.getpid()).encode())

    def work(frames: Frames) -> None:
        while True:
            asked = frames.read()
            part = tokenise_part(Path(asked["path"]), asked["start"], asked["size"], tokenizer, given["vocab_size"])
            frames.send(part.to_bytes())

    fork_for_each(control, work)


if __name__ == "__main__":
    main()

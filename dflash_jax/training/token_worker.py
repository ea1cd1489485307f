"""The processes that tokenise data: ``python -m dflash_jax.training.token_worker FD``; see `token_cache`.

The nursery loads the tokenizer and forks a process for each core. Frames of JSON go in, each with a part of a file; the
bytes of a `Part` come out.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dflash_jax.errors import InputError
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.training.tokenising import tokenise_part
from dflash_jax.workers.loop import Frames, run_nursery


def _prepare(given: dict) -> Callable[[Frames], None]:
    tokenizer = None
    if (arguments := given["tokenizer"]) is not None:
        tokenizer = Tokenizer(**arguments | {"directory": Path(arguments["directory"])})
        # What templates need takes seconds to load. Texts need none, and tell of it for each line.
        with suppress(InputError):
            _ = tokenizer.chat_template

    def work(frames: Frames) -> None:
        while True:
            asked = frames.read()
            part = tokenise_part(Path(asked["path"]), asked["start"], asked["size"], tokenizer, given["vocab_size"])
            frames.send(part.to_bytes())

    return work


if __name__ == "__main__":
    run_nursery(_prepare)

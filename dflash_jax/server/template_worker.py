"""The processes in which chat templates run: ``python -m dflash_jax.server.template_worker FD``.

A template is a program. It may come from a checkpoint or from a request, and jinja's sandbox bounds what it may touch
but neither its time nor its memory: ``{{ 'a' * 10**9 }}``. The nursery imports jinja and transformers' environment,
and forks a process for each template that is needed at a time; `templates.py` has the other ends of their sockets.

Frames of JSON go in; a byte and the text, or the reason of a failure, come out.
"""

import os

from dflash_jax.frontend.tokenizer import REFUSALS, reason
from dflash_jax.server.worker_loop import (
    NICENESS,
    Frames,
    fork_for_each,
    limit_memory,
    limit_seconds,
    prepared_nursery,
)

# The first byte of an answer.
TEXT, REFUSAL = b"\0", b"\1"


def main() -> None:
    control = prepared_nursery()
    frames = Frames(control)
    frames.read()
    # Costs half a second.
    from transformers.utils import chat_template_utils

    frames.send(str(os.getpid()).encode())
    fork_for_each(control, lambda frames: _render(chat_template_utils.render_jinja_template, frames))


def _render(render, frames: Frames) -> None:
    """Renders what is asked for, one conversation after the other."""
    wanted = frames.read()
    limit_memory(wanted["memory_bytes"])
    os.nice(0 if wanted["is_own"] else NICENESS)
    while True:
        limit_seconds(wanted["seconds"])
        try:
            texts, _ = render(conversations=[wanted["messages"]], **wanted["arguments"])
            text = texts[0].encode("utf-8", "surrogatepass")
            most = wanted["characters"]
            refused = None if len(texts[0]) <= most else f"it writes more than {most} characters"
        except (*REFUSALS, MemoryError) as e:
            refused = "it needs too much memory" if isinstance(e, MemoryError) else reason(e)
        if refused is None:
            frames.send(TEXT + text)
        else:
            frames.send(REFUSAL + refused[:1000].encode("utf-8", "replace"))
        wanted = frames.read()


if __name__ == "__main__":
    main()

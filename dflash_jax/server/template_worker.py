"""The processes that render chat templates: ``python -m dflash_jax.server.template_worker FD``.

A template is a program, from a checkpoint or from a request. jinja's sandbox limits its access but not its time or
memory: ``{{ 'a' * 10**9 }}``. The nursery imports jinja and transformers' environment, and forks a process for each
concurrent rendering; `templates.py` has the other ends of their sockets.

Frames of JSON go in; a byte and the text, or the reason of a failure, come out.
"""

import os
from collections.abc import Callable
from functools import partial

from dflash_jax.frontend.messages import template_forms
from dflash_jax.frontend.tokenizer import REFUSALS, reason
from dflash_jax.workers.loop import NICENESS, Frames, limit_memory, limit_seconds, run_nursery

# The first byte of an answer.
TEXT, REFUSAL = b"\0", b"\1"


def _prepare(_: dict) -> Callable[[Frames], None]:
    # The import takes half a second.
    from transformers.utils import chat_template_utils

    return partial(_render, chat_template_utils.render_jinja_template)


def _render(render, frames: Frames) -> None:
    """Renders conversations, one after the other."""
    request = frames.read()
    limit_memory(request["memory_bytes"])
    os.nice(0 if request["is_default"] else NICENESS)
    while True:
        limit_seconds(request["seconds"])
        frames.send(_answer(render, request))
        request = frames.read()


def _answer(render, request: dict) -> bytes:
    refusals, characters = [], request["characters"]
    for messages, arguments in template_forms(request["messages"], request["arguments"]):
        try:
            (text,), _ = render(conversations=[messages], **arguments)
            if len(text) <= characters:
                return TEXT + text.encode("utf-8", "surrogatepass")
            refusals.append(f"it writes more than {characters} characters")
            break
        except MemoryError:
            refusals.append("it needs too much memory")
            break
        except REFUSALS as e:
            refusals.append(reason(e))
    # What it says of the conversation as it is.
    return REFUSAL + refusals[0][:1000].encode("utf-8", "replace")


if __name__ == "__main__":
    run_nursery(_prepare)

"""Observers of requests, which log or trace ids, sampling parameters, counts and times."""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict

from dflash_jax.frontend.sequence import TextSequence
from dflash_jax.server.request_context import RequestContext

log = logging.getLogger("dflash_jax.requests")

# Most sequences of a request that are logged, and most ids of a prompt that are decoded for the log.
MOST_LOGGED, MOST_DECODED = 16, 4096


class RequestLog:
    """Lines of the log: one when a sequence begins, one when a request ends."""

    def __init__(self, decode: Callable | None = None, max_length: int = 2048):
        """Prepares the log.

        Args:
            decode: Decodes prompts for the log; None: prompts are not logged.
            max_length: Most characters of a prompt.
        """
        self._decode, self._max_length = decode, max_length

    def begin(self, context: RequestContext, sequence: TextSequence) -> None:
        """Logs a sequence."""
        number = len(context.sequences) - 1
        if number >= MOST_LOGGED:
            return
        request = sequence.request
        params = json.dumps({k: self._shown(v) for k, v in asdict(request.params).items() if _is_given(v)})
        line = f"request {_plain(context.answer_id)}-{number}: {len(request.prompt)} prompt tokens, params {params}"
        if self._decode is not None:
            text = self._decode(request.prompt[:MOST_DECODED])
            line += f", prompt {json.dumps(text[: self._max_length])}"
        log.info("%s", line)

    def _shown(self, value):
        """A parameter for the log: a list, which has text of the client, by its length."""
        if isinstance(value, (list, tuple, dict)) and self._decode is None:
            return f"{len(value)} given"
        return value if isinstance(value, (bool, int, float)) else str(value)[: self._max_length]

    def end(self, context: RequestContext) -> None:
        """Logs a finished request."""
        tokens = sum(len(sequence.request.tokens) for sequence in context.sequences)
        reasons = ", ".join(sorted({sequence.request.finish_reason or "aborted" for sequence in context.sequences}))
        seconds = time.time() - context.began
        accepted = [
            f", {rounds.accepted_tokens} of {rounds.draft_tokens} drafts of {_plain(name)} accepted"
            for name, rounds in context.rounds.by_drafter().items()
        ]
        line = "request %s: status %d, %d sequences, %d new tokens, %s, %.3f s%s"
        values = (_plain(context.answer_id), context.status, len(context.sequences), tokens, reasons, seconds)
        log.info(line, *values, "".join(accepted))


def _is_given(value) -> bool:
    return value is not None and value is not False and value not in ((), [], {}, "")


def _plain(text: str) -> str:
    return json.dumps(text)[1:-1]

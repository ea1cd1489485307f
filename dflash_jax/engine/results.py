"""From the results of a dispatch to the events of its requests."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isnan

from dflash_jax.decoding.sampling import NOTHING_ALLOWED, Logprobs
from dflash_jax.engine.config import EngineConfig
from dflash_jax.engine.dispatch import Outcome
from dflash_jax.engine.masking import Masking
from dflash_jax.engine.model_runner import ModelRunner
from dflash_jax.engine.prefix_cache import PrefixCache
from dflash_jax.engine.request import Event, Request
from dflash_jax.engine.scheduler import DecodeScheduler
from dflash_jax.engine.statistics import Statistics
from dflash_jax.errors import EngineError, InputError

log = logging.getLogger("dflash_jax")


class Results:
    """Applies the results of dispatches to their requests.

    Args:
        runner: Has the clock.
        scheduler: Gets the acceptance of drafts.
        masking: The masks of all requests.
        prefix_cache: Cleared where logits are not finite.
        statistics: Gets the totals.
        config: Has the drafters' names.
        event: ``event(request, **fields)`` makes an event.
        end: ``end(request, reason, **fields of the event)`` ends a request, and returns its last event.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: DecodeScheduler,
        masking: Masking,
        prefix_cache: PrefixCache,
        statistics: Statistics,
        config: EngineConfig,
        event: Callable[..., Event],
        end: Callable[..., Event],
    ):
        self._runner, self._scheduler, self._masking, self._prefix_cache = runner, scheduler, masking, prefix_cache
        self._statistics, self._config, self._event, self._end = statistics, config, event, end

    def events(self, request: Request, outcome: Outcome, i: int, block_size: int, drafter: int | None) -> list[Event]:
        """The events of the request of slot ``i`` of a dispatch; ``block_size``: its own in its rounds."""
        tokens, yielded, done = outcome.tokens[i], outcome.yielded[i], outcome.done[i]
        if not tokens:
            return []
        record = outcome.logprobs[i] if outcome.logprobs and request.params.wants_logprobs else None
        verified = [block_size] * len(yielded) if outcome.verified is None else outcome.verified[i]
        if tokens[-1] >= 0:
            return [self._take(request, tokens, yielded, done, record, block_size, drafter, verified)]
        # A negative token is a fault. The tokens before it count: a stop string among them ends the text first.
        *tokens, fault = tokens
        yielded = trimmed(yielded, len(tokens))
        events: list[Event] = []
        if tokens:
            events.append(self._take(request, tokens, yielded, False, record, block_size, drafter, verified))
        if request.finish_reason is None:
            events.append(self._end(request, "error", error=self._no_token(request, fault)))
        return events

    def _take(
        self,
        request: Request,
        tokens: list[int],
        yielded: list[int],
        done: bool,
        record: Logprobs | None,
        block_size: int,
        drafter: int | None,
        verified: list[int],
    ) -> Event:
        self._scheduler.observe_rounds(request, yielded, block_size, drafter)
        if isnan(request.times.first_token):
            request.times = replace(request.times, first_token=self._runner.clock)
        try:
            count = request.monitor(tokens) if request.monitor else None
        except Exception as e:
            # The request is at fault, not the device: the others go on.
            return self._end(request, "error", error=as_failure(e))
        reason = None
        if count is not None:
            tokens, yielded, reason = tokens[:count], trimmed(yielded, count), "stop"
        elif done:
            reason = "stop" if tokens[-1] in request.stops else "length"
        params, entries = request.params, None
        if record is not None:
            entries = logprob_entries(tokens, record, params.logprobs or 0, params.logprob_token_ids)
        request.tokens += tokens
        fields = {"tokens": tokens, "yielded": yielded, "logprobs": entries}
        if block_size > 1 and drafter is not None:
            drafted = [count - 1 for count in verified[: len(yielded)]]
            fields |= {"drafted": drafted, "drafter": self._config.drafter_name(drafter)}
        event = self._event(request, **fields) if reason is None else self._end(request, reason, **fields)
        self._statistics.new_tokens += len(tokens)
        self._statistics.rounds.update(event.rounds)
        return event

    def advance_mask(self, request: Request, tokens: Sequence[int]) -> None:
        """Advances a request's masks, if it has some, by tokens; a negative one is a fault.

        May raise what `MaskProvider.take` raises.
        """
        known = [token for token in tokens if token >= 0]
        if request.mask is None or not known:
            return
        request.mask.take(known)
        if request.mask.is_over:
            # Without a mask, a dispatch has many rounds.
            self.close_mask(request)

    def close_mask(self, request: Request) -> None:
        """Ends the masks of a request, if it has some."""
        self._masking.forget(request)
        mask, request.mask = request.mask, None
        if mask is not None:
            mask.close()

    def _no_token(self, request: Request, fault: int) -> Exception:
        """Why no token follows a request's own; ``fault``: the code that `sampling.checked` puts in its place."""
        count = len(request.tokens)
        if fault == NOTHING_ALLOWED:
            return InputError(f"the text's form, penalties or biases leave no token after {count} new ones")
        log.error("a request ended: the model's logits are not finite")
        # Prefixes may have been computed from the same numbers.
        self._prefix_cache.clear()
        return EngineError(f"the model's logits after {count} new tokens are NaN or infinite")


def take_scores(request: Request, record: Logprobs) -> None:
    """Adds the log-probabilities of a chunk to a request's prompt_entries."""
    start = 1 + len(request.prompt_entries)
    tokens = request.prompt[start : start + len(record.chosen)]
    ids = request.params.logprob_token_ids
    request.prompt_entries += logprob_entries(tokens, record, request.prompt_logprobs or 0, ids)


def as_failure(error: Exception) -> Exception:
    """The error of a request whose monitor or mask raised."""
    if isinstance(error, InputError):
        return error
    log.error("a request's monitor or mask failed", exc_info=error)
    return EngineError(reason(error))


def reason(error: BaseException) -> str:
    """Type and first line of an error."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"


def trimmed(yielded: list[int], tokens: int) -> list[int]:
    """What rounds yielded of the first ``tokens`` tokens."""
    result = []
    for n in yielded:
        if tokens > 0:
            result.append(min(n, tokens))
        tokens -= n
    return result


def logprob_entries(tokens: Sequence[int], record: Logprobs, top: int, named: Sequence[int]) -> list[dict]:
    """Log-probabilities as in `Event.logprobs`: of each token, the ``top`` likeliest, and those of ``named`` ids."""
    entries = []
    for j, token in enumerate(tokens):
        best = zip(record.ids[j, :top].tolist(), record.values[j, :top].tolist(), strict=True)
        entry = {"token_id": token, "logprob": float(record.chosen[j]), "top": dict(best)}
        if named:
            entry["named"] = dict(zip(named, record.named[j].tolist(), strict=False))
        entries.append(entry)
    return entries

"""Which sequences decode together, with which block size, for how many rounds."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from dflash_jax.engine.acceptance import Acceptances
from dflash_jax.engine.config import NO_DRAFTER, EngineConfig, Speculation
from dflash_jax.engine.dispatch import Dispatch
from dflash_jax.engine.draft_length import DraftLengthPolicy
from dflash_jax.engine.model_runner import ModelRunner
from dflash_jax.engine.request import Request

# Rounds of a dispatch, and the seconds that it should take.
MAX_ROUNDS, MIN_ROUNDS, DISPATCH_S = 32, 2, 0.02
# Rounds before the cost of one is known, plain and drafting.
UNKNOWN_ROUNDS = (16, 4)


def rounds_within(seconds: float, cost: float) -> int:
    """Rounds of ``cost`` seconds each that a dispatch of ``seconds`` has."""
    return max(MIN_ROUNDS, min(int(seconds / cost), MAX_ROUNDS))


class DecodeScheduler:
    """Plans decoding dispatches.

    Args:
        runner: The device's work.
        config: The engine's configuration.
        policy: Chooses block sizes and drafters.

    Attributes:
        requests: Requests that decode; those at the front have their turn first.
        is_drafting: Whether the last dispatch updated the drafter's context; at first, whether the next one will.
    """

    def __init__(self, runner: ModelRunner, config: EngineConfig, policy: DraftLengthPolicy):
        self._runner, self._config, self._policy = runner, config, policy
        self.requests: list[Request] = []
        self.is_drafting = not config.adaptive or policy.choose(1, [Acceptances()]) != NO_DRAFTER
        self._acceptances: dict[Request, Acceptances] = {}

    def add(self, request: Request) -> None:
        """Starts decoding a request whose prompt is in the caches."""
        self.requests.append(request)
        self._acceptances[request] = Acceptances()

    def remove(self, request: Request) -> None:
        """Ends decoding a request."""
        self.requests = [r for r in self.requests if r is not request]
        self._acceptances.pop(request, None)

    def observe_rounds(self, request: Request, yielded: Sequence[int], block_size: int, drafter: int | None) -> None:
        """Adds what rounds yielded to the request's acceptance; ``block_size``: its own in them."""
        self._policy.observe_rounds(self._acceptance(request), yielded, block_size, drafter)

    def _acceptance(self, request: Request) -> Acceptances:
        acceptances = self._acceptances[request]
        acceptances.length = len(request.prompt) + len(request.tokens)
        return acceptances

    def can_mask(self) -> bool:
        """Whether rounds with masks may run."""
        return bool(self._sizes(True))

    def _sizes(self, masked: bool) -> dict[int, list[Speculation]]:
        """What rounds may run, by batch size."""
        return self._runner.decode_sizes(
            masked, self._config.masked_speculations if masked else self._config.speculations
        )

    def batch(self, late: Sequence[Request]) -> list[Request]:
        """The requests of the next dispatch: without those whose masks are ``late``, and in turns where not all fit."""
        candidates = [r for r in self.requests if r not in late]
        if not candidates:
            return []
        ready, count = candidates, self._runner.largest_shard([r.slot for r in candidates])
        is_masked = {r.mask is not None for r in candidates}
        if len(is_masked) == 2 and max(self._sizes(True)) < count:
            # Rounds with masks are compiled for fewer: requests with and without masks take turns.
            ready = [r for r in candidates if (r.mask is None) == (candidates[0].mask is None)]
            count = self._runner.largest_shard([r.slot for r in ready])
        limit = self._config.max_decode_batch or len(ready)
        room = self._room(any(r.mask for r in ready), count)
        used, batch = Counter(), []
        for request in ready:
            shard = self._runner.shard(request.slot)
            if len(batch) < limit and used[shard] < room:
                used[shard] += 1
                batch.append(request)
        if len(batch) < len(candidates):
            waiting = [r for r in candidates if r not in batch]
            self.requests = waiting + batch + [r for r in late if r.finish_reason is None]
        return batch

    def _room(self, masked: bool, count: int) -> int:
        """How many of ``count`` sequences of a data shard decode together: all, or fewer where that is faster."""
        sizes = self._sizes(masked)
        every = self._runner.masked_batch_sizes() if masked else self._runner.batch_sizes()
        if (nearest := next(n for n in every if n >= count)) in sizes:
            return nearest

        def speed(n: int) -> float:
            return min(n, count) / self._policy.estimate(n, sizes[n][0])

        return max(sizes, key=speed)

    def plan(self, batch: Sequence[Request]) -> Dispatch:
        """The next dispatch of a batch."""
        slots = tuple(r.slot for r in batch)
        sizes, count = self._sizes(any(r.mask for r in batch)), self._runner.largest_shard(slots)
        batch_size = next(n for n in sizes if n >= count)
        speculation = self._speculation(batch, batch_size, sizes[batch_size])
        cost = self._policy.cost(batch_size, speculation)
        # Dispatches stay short until every sequence has its first token.
        seconds = DISPATCH_S if all(r.tokens for r in batch) else DISPATCH_S / 4
        rounds = UNKNOWN_ROUNDS[speculation.block_size > 1] if cost is None else rounds_within(seconds, cost)
        if (batch_size, speculation) not in self._policy.seconds:
            rounds = min(rounds, UNKNOWN_ROUNDS[speculation.block_size > 1])
        self.is_drafting, largest = speculation != NO_DRAFTER, speculation.block_size
        block_sizes = tuple(largest if r.block_size == "auto" else min(r.block_size, largest) for r in batch)
        dispatch = Dispatch(slots, block_sizes, rounds, speculation, batch_size)
        if not self._runner.settings.has_widths or largest == 1 or any(r.mask for r in batch):
            return dispatch
        lengths = [self._acceptance(r).length for r in batch]
        rates, price = self._policy.widths(count, batch_size, speculation, lengths)
        prices = tuple(price if r.block_size == "auto" else 0.0 for r in batch)
        return replace(dispatch, rates=rates, prices=prices)

    def _speculation(self, batch: Sequence[Request], batch_size: int, allowed: Sequence[Speculation]) -> Speculation:
        """What the rounds of a batch are compiled for, one of ``allowed``."""
        fixed = [r.block_size for r in batch if r.block_size != "auto"]
        minimum = max(fixed, default=1)
        if not self._config.adaptive and len(fixed) < len(batch):
            return allowed[-1]
        if len(fixed) == len(batch) and minimum == 1:
            # No request of the batch leaves the choice to the engine.
            return allowed[0]
        # Until those asked for are compiled, smaller ones serve.
        large = [each for each in allowed if each.block_size >= minimum] or [allowed[-1]]
        choices = large if minimum > 1 else allowed
        if len(fixed) == len(batch):
            # The smallest of each drafter.
            with_all = [each for each in large if not each.is_alone] or large
            choices = list({each.drafter: each for each in reversed(with_all)}.values())
        if len(choices) == 1:
            return choices[0]
        acceptances = [self._acceptance(r) for r in batch]
        compile_s = self._runner.last_compile_s
        return self._policy.choose(batch_size, acceptances, choices, self._runner.is_compiled, compile_s)

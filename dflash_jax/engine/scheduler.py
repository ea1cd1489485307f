"""Which sequences decode together, with which block size, for how many rounds."""

from collections.abc import Sequence

from dflash_jax.engine.config import EngineConfig
from dflash_jax.engine.dispatch import Dispatch
from dflash_jax.engine.draft_length import NO_DRAFTER, Acceptance, DraftLengthPolicy
from dflash_jax.engine.model_runner import ModelRunner
from dflash_jax.engine.request import Request

# Rounds of a dispatch, and the seconds that it should take.
MAX_ROUNDS, MIN_ROUNDS, DISPATCH_S = 32, 2, 0.02
# Rounds before the cost of one is known, plain and drafting.
UNKNOWN_ROUNDS = (16, 4)
# Seconds of decoding, at least, before another block size is compiled.
PATIENCE_S = 2.0


class DecodeScheduler:
    """Plans decoding dispatches.

    Args:
        runner: The device's work.
        config: The engine's configuration.
        policy: Chooses block sizes.

    Attributes:
        requests: Requests that decode; those at the front have their turn first.
        is_drafting: Whether the last dispatch updated the drafter's context.
    """

    def __init__(self, runner: ModelRunner, config: EngineConfig, policy: DraftLengthPolicy):
        self._runner, self._config, self._policy = runner, config, policy
        self.requests: list[Request] = []
        self.is_drafting = True
        self._acceptance: dict[Request, Acceptance] = {}

    def add(self, request: Request) -> None:
        """Starts decoding a request whose prompt is in the caches."""
        self.requests.append(request)
        self._acceptance[request] = Acceptance()

    def remove(self, request: Request) -> None:
        """Ends decoding a request."""
        self.requests = [r for r in self.requests if r is not request]
        self._acceptance.pop(request, None)

    def observe_rounds(self, request: Request, accepted: Sequence[int], block_size: int) -> None:
        """Adds what rounds of ``block_size`` yielded to the request's acceptance."""
        for n in accepted:
            self._policy.observe_round(self._acceptance[request], n, block_size)

    def batch(self, late: Sequence[Request]) -> list[Request]:
        """The requests of the next dispatch: without those whose masks are ``late``, and in turns where not all fit."""
        batch = [r for r in self.requests if r not in late]
        limit = self._config.max_decode_batch
        if limit is not None and len(batch) > limit:
            batch, rest = batch[:limit], batch[limit:]
            self.requests = rest + batch + [r for r in late if r.finish_reason is None]
        return batch

    def plan(self, batch: Sequence[Request]) -> Dispatch:
        """The next dispatch of a batch."""
        slots = tuple(r.slot for r in batch)
        batch_size = self._runner.batch_size_of(slots)
        block_size = self._block_size(batch, batch_size)
        cost = self._policy.cost(batch_size, block_size)
        # Dispatches stay short until every sequence has its first token.
        seconds = DISPATCH_S if all(r.tokens for r in batch) else DISPATCH_S / 4
        rounds = UNKNOWN_ROUNDS[block_size > 1] if cost is None else int(seconds / cost)
        rounds = max(MIN_ROUNDS, min(rounds, MAX_ROUNDS))
        # Each host measures different times: all follow the first one.
        block_size, rounds = divmod(self._runner.agree(block_size * 1024 + rounds), 1024)
        self.is_drafting = block_size != NO_DRAFTER
        largest = max(block_size, 1)
        block_sizes = tuple(largest if r.block_size == "auto" else min(r.block_size, largest) for r in batch)
        return Dispatch(slots, block_sizes, rounds, block_size)

    def _block_size(self, batch: Sequence[Request], batch_size: int) -> int:
        """The compiled block size for a batch."""
        compiled = self._config.block_sizes
        fixed = [r.block_size for r in batch if r.block_size != "auto"]
        minimum = max(fixed, default=1)
        if not self._config.adaptive and len(fixed) < len(batch):
            block_size = compiled[-1]
        elif len(fixed) == len(batch):
            # No request of the batch leaves the choice to the engine.
            is_plain = minimum == 1 and compiled[-1] > 1
            block_size = NO_DRAFTER if is_plain else next(b for b in compiled if b >= minimum)
        else:
            acceptances = [self._acceptance[r] for r in batch]
            patience = max(PATIENCE_S, self._runner.last_compile_s)
            block_size = self._policy.choose(batch_size, acceptances, minimum, self._runner.is_compiled, patience)
        if any(r.mask for r in batch):
            # Only two block sizes are compiled for masks.
            block_size = 1 if block_size <= 1 else compiled[-1]
        return block_size

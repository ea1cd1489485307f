"""What a decoding round costs before one is measured: from the sizes of the models, and a table of platforms.

Costs are bytes: those of the weights that a round reads, or those that the device reads in the time of the round's
arithmetic where that is longer. Only their ratios are used.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_jax.decoding.speculative import DEFERRED_SIZE, EXTENSION_SIZE
from dflash_jax.engine.config import Speculation
from dflash_jax.engine.model_size import Weights, weigh

if TYPE_CHECKING:
    from dflash_jax.models.decoder import Decoder
    from dflash_jax.models.drafter import Drafter
    from dflash_jax.models.mtp import Mtp


@dataclass(frozen=True)
class Platform:
    """How a platform computes.

    Attributes:
        operations: Arithmetic operations in the time of reading a byte of weights.
        layer: Bytes that are read in the time that a layer takes apart from weights and arithmetic.
        cache: Bytes of weights that stay in the processor's cache.
        cache_speed: How many times as fast weights in the cache are read.
        small_share: Share of the operations that models in the cache reach, whose matrices are small.
    """

    operations: float
    layer: float
    cache: float = 0.0
    cache_speed: float = 1.0
    small_share: float = 1.0


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def platform_named(name: str) -> Platform:
    """The table: rough figures of a platform, as `jax.default_backend` names it.

    A CPU's are fitted to rounds of 1 to 16 of two models on two cores (SmolLM2-135M and the bundled pair: 50 GB/s, 60
    GFLOP/s a core, 10 µs a layer). A GPU's layers are fitted to rounds of 1 to 16 of Qwen3.6-35B-A3B on an H200 (21 µs
    at 4.3 TB/s); its arithmetic is about half of what makers state for an H100 or a B200 (290 operations a byte). No
    TPU was measured.
    """
    if name == "cpu":
        return Platform(1.2 * processors(), 0.5e6, 32e6, 3.0, 0.75)
    return Platform(150.0, 90e6)


class RoundCosts:
    """Predicts the costs of rounds of a target and its drafters.

    Args:
        target: The target.
        drafters: Its drafters.
        platform: How the device computes.
    """

    def __init__(self, target: "Decoder", drafters: "Sequence[Drafter | Mtp]", platform: Platform):
        self._platform, self._parts = platform, target.layout.tensor * target.layout.expert
        self._target, self._target_layers = weigh(target, target.layout, frozenset()), len(target.config.layers)
        self._weights = [weigh(drafter, target.layout, frozenset()) for drafter in drafters]
        self._configs = [drafter.config for drafter in drafters]
        listed = [drafter.vocabulary for drafter in drafters]
        shares = [1.0 if v is None else len(v.ids) / target.config.vocab_size for v in listed]
        self._heads = [share * self._target.head for share in shares]
        is_cached = self._target.total + sum(weights.total for weights in self._weights) < platform.cache
        self._read_speed = platform.cache_speed if is_cached else 1.0
        self._operations = platform.operations * (platform.small_share if is_cached else 1.0)
        # Of a step of an extension, which takes the tokens of several rounds.
        self._contexts = [weights.context / self._read_speed for weights in self._weights]

    def _pass(self, weights: Weights, layers: int, tokens: int, head: float = 0.0) -> float:
        """The cost of a pass over ``tokens`` tokens; ``head``: bytes of a head that ``weights`` does not have."""
        item = weights.total * self._parts / weights.parameters
        arithmetic = 2 * tokens * (weights.read(1) + head) / item / self._operations
        return max((weights.read(tokens) + head) / self._read_speed, arithmetic) + layers * self._platform.layer

    def __call__(self, batch_size: int, speculation: Speculation) -> float:
        """The cost of a round of ``batch_size`` sequences on a data shard."""
        verification = self._pass(self._target, self._target_layers, batch_size * speculation.block_size)
        if speculation.drafter is None:
            return verification
        contexts = [self._contexts[speculation.drafter]] if speculation.is_alone else self._contexts
        if speculation.block_size == 1:
            return verification + sum(contexts) / EXTENSION_SIZE
        weights, config = self._weights[speculation.drafter], self._configs[speculation.drafter]
        passes, tokens = config.passes(speculation.block_size)
        draft = self._pass(weights, len(config.layers), batch_size * tokens, self._heads[speculation.drafter])
        # Its own extension reads a part of its weights again, which is left out; of the others as if all were accepted.
        others = sum(contexts) - self._contexts[speculation.drafter]
        return verification + passes * draft + others * min(1.0, speculation.block_size / DEFERRED_SIZE)

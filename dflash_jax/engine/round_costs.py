"""What a decoding round costs: on record from earlier processes, or predicted before one is measured.

Predicted costs are bytes: those of the weights that a round reads, or those that the device reads in the time of the
round's arithmetic where that is longer. They follow from the sizes of the models and a table of platforms, and only
their ratios are used.
"""

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_jax.decoding.speculative import DEFERRED_SIZE, EXTENSION_SIZE
from dflash_jax.engine.config import Speculation
from dflash_jax.engine.model_size import Weights, weigh
from dflash_jax.models.drafters import config_of, vocabulary_of

if TYPE_CHECKING:
    from dflash_jax.models.decoder import Decoder
    from dflash_jax.models.drafting import Drafting


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

    def __init__(self, target: "Decoder", drafters: "Sequence[Drafting]", platform: Platform):
        self._platform, self._parts = platform, target.layout.tensor * target.layout.expert
        self._target, self._target_layers = weigh(target, target.layout), len(target.config.layers)
        self._weights = [weigh(drafter, target.layout) for drafter in drafters]
        self._configs = [config_of(drafter) for drafter in drafters]
        listed = [vocabulary_of(drafter) for drafter in drafters]
        # What a pass reads of a head beside all of the drafter's weights, of which its own and a shortlist are parts.
        self._heads = [
            (0.0 if vocabulary else weights.head or self._target.head) - weights.head
            for vocabulary, weights in zip(listed, self._weights, strict=True)
        ]
        is_cached = self._target.total + sum(weights.total for weights in self._weights) < platform.cache
        self._read_speed = platform.cache_speed if is_cached else 1.0
        self._operations = platform.operations * (platform.small_share if is_cached else 1.0)
        # Of a step of an extension, which takes the tokens of several rounds.
        self._contexts = [weights.context / self._read_speed for weights in self._weights]

    def _pass(self, weights: Weights, layers: int, tokens: int, head: float = 0.0) -> float:
        """The cost of a pass over ``tokens`` tokens; ``head``: bytes of a head that ``weights`` does not have."""
        if not weights.parameters:
            # A drafter that only looks tokens up.
            return 0.0
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

    def saved(self, places: int, verified: float) -> float:
        """The cost of the experts of drafts that are not verified, which are not read.

        Args:
            places: Tokens of a pass on a data shard, whose other weights and products they share in any case.
            verified: Those that are verified.
        """
        weights = self._target
        dense, item = weights.read(0), weights.total * self._parts / weights.parameters

        def cost(tokens: float) -> float:
            operations = 2 * (places * dense + tokens * (weights.read(1) - dense)) / item
            return max(weights.read(tokens) / self._read_speed, operations / self._operations)

        return cost(places) - cost(verified)


# Days after which a cost is measured anew, and after which one that was measured again is written, the least change of
# one that is written before, the least seconds of a round, and how many processes must have measured a known cost.
RECORD_DAYS, RENEWAL_DAYS, LEAST_CHANGE, LEAST_S, KNOWN_PROCESSES = 7, 1, 0.1, 1e-9, 2

# How many times too high a cost of one process may be, and one of several, the least of which counts most.
RECORD_ERROR, KNOWN_ERROR = 2.0, 1.1

# By (batch size, speculation): seconds of a round.
Seconds = Mapping[tuple[int, Speculation], float]


class CostRecord:
    """Measured costs of rounds in a file beside the compiled programs, which later processes begin with.

    A file that cannot be read has no costs, and one that cannot be written is left out.

    Args:
        directory: The directory of compiled programs; None keeps nothing.
        identity: Whatever the costs depend on, with a ``repr`` that is the same in other processes: device, models,
            versions. Each has a file of its own.
    """

    def __init__(self, directory: Path | None, *identity: object):
        digest = blake2b(repr(identity).encode(), digest_size=16).hexdigest()
        self._path = None if directory is None else directory / f"round-costs-{digest}.json"
        # By key: seconds, the time of their measurement, and how many processes measured them; as it was loaded, too.
        self._entries: dict[tuple[int, Speculation], tuple[float, float, int]] = {}
        self._loaded: dict[tuple[int, Speculation], tuple[float, float, int]] = {}

    def load(self) -> dict[tuple[int, Speculation], float]:
        """Seconds of a round by (batch size, speculation), measured within `RECORD_DAYS`."""
        now, lines = time.time(), []
        with suppress(OSError, ValueError, RecursionError):
            lines = json.loads(self._path.read_bytes()) if self._path else []
        for line in lines if isinstance(lines, list) else ():
            with suppress(TypeError, ValueError, OverflowError):
                batch_size, block_size, drafter, is_alone, seconds, measured, processes = line
                is_valid = type(batch_size) is int and type(block_size) is int and type(is_alone) is bool
                is_valid = is_valid and (drafter is None or type(drafter) is int) and type(processes) is int
                is_valid = is_valid and batch_size > 0 and LEAST_S <= seconds < 1 / LEAST_S
                if is_valid and 0 <= now - measured < RECORD_DAYS * 86_400:
                    key = batch_size, Speculation(block_size, drafter, is_alone)
                    self._entries[key] = float(seconds), float(measured), processes
        self._loaded = dict(self._entries)
        return {key: seconds for key, (seconds, *_) in self._entries.items()}

    def error(self, key: tuple[int, Speculation]) -> float:
        """How many times too high a cost that was loaded may be: less where several processes measured it lately."""
        _, written, processes = self._loaded.get(key, (0.0, 0.0, 0))
        is_old = time.time() - written > RENEWAL_DAYS * 86_400
        return RECORD_ERROR if is_old or processes < KNOWN_PROCESSES else KNOWN_ERROR

    def save(self, seconds: Seconds) -> None:
        """Writes what this process has measured, where it is new, has changed, or was written a day ago.

        What runs beside the engine makes rounds longer, so a longer measurement counts half.
        """
        if self._path is None:
            return
        now, entries = time.time(), dict(self._entries)
        for key, value in seconds.items():
            loaded, _, processes = self._loaded.get(key, (value, now, 0))
            value, (before, written, count) = min(value, (value + loaded) / 2), entries.get(key, (0.0, 0.0, 0))
            is_changed = abs(value - before) > LEAST_CHANGE * before
            if is_changed or count <= min(processes, KNOWN_PROCESSES - 1) or now - written > RENEWAL_DAYS * 86_400:
                entries[key] = value, now, processes + 1
        if entries == self._entries:
            return
        self._entries = entries
        lines: list[list[Any]] = [[n, *speculation, *entry] for (n, speculation), entry in entries.items()]
        with suppress(OSError), tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False) as file:
            try:
                json.dump(lines, file)
                file.close()
                Path(file.name).replace(self._path)
            except OSError:
                Path(file.name).unlink(missing_ok=True)


NO_RECORD = CostRecord(None)

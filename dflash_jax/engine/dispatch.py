"""What the engine asks of a `ModelRunner` for decoding, and what it gets back."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from dflash_jax.decoding.sampling import Logprobs
from dflash_jax.decoding.state import Settings
from dflash_jax.engine.config import Speculation
from dflash_jax.engine.request import Request
from dflash_jax.engine.steps import REPORT_SIZE


def round_settings(settings: Settings, speculation: Speculation) -> Settings:
    """What is compiled into rounds; ``settings``: what all programs of an engine share."""
    size = max(speculation.block_size, settings.block_size) if settings.aligned else speculation.block_size
    has_widths = settings.has_widths and speculation.block_size > 1
    kind = {"drafter": speculation.drafter, "is_alone": speculation.is_alone}
    return replace(settings, block_size=size, has_widths=has_widths, **kind)


@dataclass(frozen=True)
class Dispatch:
    """Several decoding rounds that the host starts at once.

    Attributes:
        slots: The batch: slots that take part.
        block_sizes: Tokens that a round of each slot may yield.
        rounds: Rounds at most.
        speculation: What the rounds are compiled for.
        batch_size: The compiled batch size of a data shard; each has at most as many of the slots.
        prices: The price of a verified token for each slot, as `choose_widths` takes it; () verifies all drafts.
        rates: As `choose_widths` takes them, with ``prices``.
    """

    slots: tuple[int, ...]
    block_sizes: tuple[int, ...]
    rounds: int
    speculation: Speculation
    batch_size: int
    prices: tuple[float, ...] = ()
    rates: np.ndarray | None = field(default=None, compare=False)

    @property
    def most_tokens(self) -> int:
        """New tokens of a slot at most."""
        size = self.speculation.block_size
        return min(self.rounds * size, max(REPORT_SIZE, size))


@dataclass(frozen=True)
class Outcome:
    """Results of a dispatch, one entry for each slot.

    Attributes:
        tokens: New tokens.
        yielded: Tokens that each round yielded.
        done: Whether the sequence has ended.
        logprobs: Log-probabilities of the new tokens, where they were asked for.
        verified: Tokens that each round might have yielded; None: those of the dispatch's ``block_sizes``.
        outcomes: The sum of `count_outcomes` of all rounds and slots; None where widths are not chosen.
    """

    tokens: list[list[int]]
    yielded: list[list[int]]
    done: list[bool]
    logprobs: list[Logprobs] | None
    verified: list[list[int]] | None = None
    outcomes: np.ndarray | None = None


@dataclass(frozen=True)
class StepTicket:
    """A step that the device works on.

    Attributes:
        prefills: (request, ticket of the runner) of each prefill chunk.
        batch: Requests of the dispatch.
        dispatch: Decoding, or None.
        handle: The runner's ticket of the dispatch.
        started: When the step was started, on the engine's clock.
    """

    prefills: list
    batch: list[Request]
    dispatch: Dispatch | None
    handle: object
    started: float


class RoundMasks(Protocol):
    """The masks of a round, for the slots of a dispatch in their order."""

    @abstractmethod
    def ask(self, blocks: np.ndarray) -> np.ndarray:
        """Gets the blocks that are about to be verified, int [slots, block], and returns the ones to verify."""

    @abstractmethod
    def answer(self, is_verified: Callable[[], bool]) -> tuple[np.ndarray, np.ndarray]:
        """The masks of the blocks.

        Args:
            is_verified: Whether the device has verified the blocks and waits for the masks.

        Returns:
            Packed masks uint32 [slots, block, words], and bool [slots]: slots whose masks are late, which skip the
            round.
        """

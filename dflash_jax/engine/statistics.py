"""What an engine counts."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import NamedTuple


class Round(NamedTuple):
    """A round of one sequence.

    Attributes:
        drafter: The name of the drafter; None where the round has no draft.
        drafted: Drafts that the round verifies.
        yielded: Tokens that it yields: the accepted drafts and the target's own token.
    """

    drafter: str | None
    drafted: int
    yielded: int


# Equal rounds are one object: a long text has thousands.
_round = cache(Round)


def rounds_of(drafter: str | None, drafted: Iterable[int], yielded: Iterable[int]) -> list[Round]:
    """Rounds of one sequence and drafter, from what each drafted and yielded."""
    return [_round(drafter if n else None, n, m) for n, m in zip(drafted, yielded, strict=True)]


class Rounds(Counter[Round]):
    """Numbers of rounds."""

    @property
    def drafts(self) -> int:
        """Rounds that have drafts."""
        return sum(count for each, count in self.items() if each.drafted)

    @property
    def draft_tokens(self) -> int:
        """Drafts of all rounds."""
        return sum(each.drafted * count for each, count in self.items())

    @property
    def tokens(self) -> int:
        """Tokens that all rounds yielded."""
        return sum(each.yielded * count for each, count in self.items())

    @property
    def accepted_tokens(self) -> int:
        """Drafts that were accepted."""
        return self.tokens - self.total()

    @property
    def acceptance_length(self) -> float:
        """Tokens of a round; 0 without rounds."""
        return self.tokens / max(self.total(), 1)

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts, 1 for all; 0 without drafts."""
        return self.accepted_tokens / max(self.draft_tokens, 1)

    def by_drafter(self, names: Iterable[str] = ()) -> dict[str, "Rounds"]:
        """The rounds that have drafts, by drafter; ``names``: drafters that may have no rounds."""
        result = {name: Rounds() for name in names}
        for each, count in self.items():
            if each.drafter is not None:
                result.setdefault(each.drafter, Rounds())[each] = count
        return result

    def histogram(self, places: int = 0) -> list[int]:
        """Numbers of rounds by how many of their drafts were accepted: 0 to ``places`` at least."""
        return self._counted([each.yielded - 1 for each in self], places)

    def by_place(self, places: int = 0) -> tuple[list[int], list[int]]:
        """Drafts, and those of them that were accepted, by their place in the block.

        Args:
            places: The least length of both lists.
        """
        places = max([places, *(max(each.drafted, each.yielded - 1) for each in self)])
        rounds = self._counted([each.drafted for each in self], places), self.histogram(places)
        # At a place are all rounds that come as far or farther.
        drafted, accepted = ([*accumulate(reversed(counts))][-2::-1] for counts in rounds)
        return drafted, accepted

    def _counted(self, numbers: list[int], most: int) -> list[int]:
        """How many rounds have each number, 0 to ``most`` at least; ``numbers``: one for each kind of round."""
        counts = [0] * (max([most, *numbers]) + 1)
        for number, count in zip(numbers, self.values(), strict=True):
            counts[number] += count
        return counts


@dataclass
class Statistics:
    """Totals since the engine was made.

    Attributes:
        requests: Ended requests by finish reason.
        prompt_tokens: Prompt tokens of admitted requests.
        cached_tokens: Prompt tokens that came from the prefix cache.
        new_tokens: Generated tokens.
        prefilled_tokens: Tokens of prompts that were computed, padding included.
        step_tokens: Steps by the tokens of prompts that they computed and those that they generated, together.
        preemptions: How often a request's pages were moved to the host, or given up and computed again.
        rounds: Decoding rounds of all sequences.
        dispatches: Dispatches by (batch size of a data shard, `Speculation`).
        host_s: Seconds of steps, less those of waiting for the device.
        wait_s: Seconds of waiting for the device.
    """

    requests: Counter = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    prefilled_tokens: int = 0
    step_tokens: Counter = field(default_factory=Counter)
    preemptions: int = 0
    rounds: Rounds = field(default_factory=Rounds)
    dispatches: Counter = field(default_factory=Counter)
    host_s: float = 0.0
    wait_s: float = 0.0

    @property
    def computed_tokens(self) -> int:
        """Tokens of prompts that were computed, and generated tokens."""
        return self.prefilled_tokens + self.new_tokens

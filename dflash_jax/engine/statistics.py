"""What an engine counts."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

# The drafter's name, which says nothing where there are no drafts, the drafts that the round verified, and the tokens
# that it yielded: the accepted drafts and the target's own.
Round = tuple[str | None, int, int]


class Rounds(Counter[Round]):
    """Numbers of rounds."""

    @property
    def drafts(self) -> int:
        """Rounds that have drafts."""
        return sum(count for (_, drafted, _), count in self.items() if drafted)

    @property
    def draft_tokens(self) -> int:
        """Drafts of all rounds."""
        return sum(drafted * count for (_, drafted, _), count in self.items())

    @property
    def tokens(self) -> int:
        """Tokens that all rounds yielded."""
        return sum(yielded * count for (_, _, yielded), count in self.items())

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
            if each[0] is not None and each[1]:
                result.setdefault(each[0], Rounds())[each] = count
        return result

    def histogram(self, places: int = 0) -> list[int]:
        """Numbers of rounds by how many of their drafts were accepted: 0 to ``places`` at least."""
        return self._counted([yielded - 1 for _, _, yielded in self], places)

    def by_place(self, places: int = 0) -> tuple[list[int], list[int]]:
        """Drafts, and those of them that were accepted, by their place in the block.

        Args:
            places: The least length of both lists.
        """
        places = max([places, *(max(drafted, yielded - 1) for _, drafted, yielded in self)])
        rounds = self._counted([drafted for _, drafted, _ in self], places), self.histogram(places)
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

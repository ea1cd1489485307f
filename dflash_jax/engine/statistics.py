"""What an engine counts."""

from collections import Counter
from dataclasses import dataclass, field


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
        rounds: Decoding rounds, summed over sequences.
        drafts: Rounds that had drafts.
        draft_tokens: Tokens drafted in them.
        yielded: Rounds by the number of tokens that they yielded.
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
    rounds: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    yielded: Counter = field(default_factory=Counter)
    dispatches: Counter = field(default_factory=Counter)
    host_s: float = 0.0
    wait_s: float = 0.0

    @property
    def computed_tokens(self) -> int:
        """Tokens of prompts that were computed, and generated tokens."""
        return self.prefilled_tokens + self.new_tokens

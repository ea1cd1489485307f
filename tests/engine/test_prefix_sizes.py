"""The engine and its prefix cache with the sizes of large models, and no arrays: conversations of 128k tokens."""

from dataclasses import dataclass

import pytest

from dflash_jax.engine.config import EngineConfig
from dflash_jax.engine.dispatch import Outcome
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.request import Request
from dflash_jax.sampling_params import SamplingParams
from tests.engine.mock_runner import END, CheckedRunner, Slot, run

GB = 10**9
MARKER, TURNS = 1, 40
# Tokens of a system prompt, of a tool's result, of an answer, and of the header before it.
SYSTEM, RESULT, ANSWER, HEADER = 6000, 2780, 280, [MARKER, 7, 8, 9]


@dataclass(frozen=True)
class Sizes:
    """Bytes in bfloat16, with the drafter's.

    Attributes:
        token: Of one token's keys and values, but for layers with a window.
        windowed: Of one token's keys and values in those layers, which see 4,096 positions.
        snapshot: Of recurrent states.
    """

    token: int
    windowed: int
    snapshot: int


SIZES = {"35B": Sizes(24_576, 20_480, 64_400_000), "27B": Sizes(69_632, 20_480, 153_900_000)}
PAGE = 256
# The distances of cuts on an accelerator.
CUTS = EngineConfig().cut_spacing


class SizedRunner(CheckedRunner):
    """Computes nothing: each slot has a number of tokens."""

    page_size = PAGE

    def __init__(self, slots: int, sizes: Sizes):
        self.prefilled, self.snapshot_bytes = 0, sizes.snapshot
        super().__init__(slots, 2**18, window=(4096, 0))
        self.page_bytes = PAGE * sizes.token, PAGE * sizes.windowed
        # Eight conversations of 128k tokens, and what the prefix cache has beside them.
        most = 8 * 530
        self.pages = most + 4_250_000_000 // self.page_bytes[0], 8 * 20 + 4_250_000_000 // self.page_bytes[1]

    def _clear(self):
        self.rows, self.tables = [Slot() for _ in range(self.slots)], None

    def set_tables(self, *tables):
        self.tables = tables

    def admit(self, slot, request):
        self.rows[slot].known, self.rows[slot].prompt = 0, request.prompt

    def prefill(self, slots, tokens, size, batch=1, drafting=True, media=None):
        for slot, n in zip(slots, tokens, strict=True):
            self.rows[slot].known += n
            self.prefilled += n
        return self.work(1e-6 * size)

    def decode(self, dispatch, masks=None):
        for slot in dispatch.slots:
            # All but the last token of the prompt is in the caches.
            assert self.rows[slot].known == len(self.rows[slot].prompt) - 1
        n = len(dispatch.slots)
        return self.work(1e-3), Outcome([[END]] * n, [[1]] * n, [True] * n, None)

    def save(self, pages, is_windowed):
        assert all(0 <= page < self.pages[is_windowed] for page in pages)
        return len(pages)

    def load(self, pages, segments, is_windowed):
        assert segments == len(pages)

    def snapshot(self, slot):
        return self.rows[slot].known

    def restore(self, slot, length, snapshot):
        assert snapshot == length
        table, windowed = self.tables
        assert (table[slot, : -(-length // PAGE)] < self.pages[0]).all()
        assert (windowed[slot, max(length - 4096, 0) // PAGE : -(-length // PAGE)] < self.pages[1]).all()
        self.rows[slot].known = length


class Agents:
    """Conversations on one engine, each of which sends what it had, the answer, and a tool's result."""

    def __init__(self, sizes: Sizes, host_bytes: int = 64 * GB):
        self.runner = SizedRunner(8, sizes)
        config = EngineConfig(
            prefill_sizes=(16, 64, 256, 1024, 4096),
            max_num_batched_tokens=4096,
            prefix_bytes=4_250_000_000,
            prefix_host_bytes=host_bytes,
            markers=frozenset([MARKER]),
        )
        self.engine = Engine(self.runner, config)
        self.prompts: dict[int, list[int]] = {}

    def turn(self, names) -> list[tuple[int, int]]:
        """One turn of each at the same time: (tokens of the prompt that are new, tokens that were prefilled)."""
        requests, new = [], []
        for name in names:
            # Texts of different conversations differ behind the system prompt.
            before = self.prompts.get(name)
            text = [MARKER, 20 + name, *[3] * RESULT]
            # The header's last token is not in what follows, as a template drops thinking.
            start = [MARKER, *[2] * SYSTEM] if before is None else [*before[:-1], *[4] * ANSWER]
            prompt = self.prompts[name] = [*start, *text, *HEADER]
            new.append(len(prompt) - len(before or ()))
            params = SamplingParams(max_tokens=1, temperature=0.0)
            requests.append(Request(prompt, params, (END,)))
            self.engine.submit(requests[-1])
        run(self.engine)
        cache = self.engine.prefix_cache
        assert cache.size <= cache.budget
        assert cache.tiers.host.size <= cache.tiers.host.budget
        return [(n, len(r.prompt) - 1 - r.cached) for n, r in zip(new, requests, strict=True)]


@pytest.mark.parametrize(("model", "count"), [("35B", 8), ("27B", 5)])
def test_interleaved_conversations_prefill_their_new_tokens_and_at_most_one_cut(model, count):
    """27B: eight of 128k have 71 GB of keys and values, more than both tiers, and each cut may divide a page."""
    agents = Agents(SIZES[model])
    agents.turn([0])
    for turn in range(TURNS):
        for new, prefilled in agents.turn(range(1, count + 1)):
            # The system prompt is shared from the first turn on.
            assert prefilled <= (new if turn else new - SYSTEM) + CUTS[1]
    assert len(agents.prompts[1]) > 128_000
    # Hardly more than the new tokens: the header is prefilled again.
    assert agents.runner.prefilled < len(agents.prompts[0]) + count * (TURNS * 3070 + 100)
    tiers = agents.engine.prefix_cache.tiers
    assert tiers.host.hits > TURNS
    assert tiers.device.hits + tiers.device.misses == 1 + count * TURNS
    # Few snapshots of each conversation.
    assert len(agents.engine.prefix_cache) <= 14 * (count + 1)


def test_conversations_that_begin_and_end_at_different_times_are_kept_while_they_last():
    """Eight at a time of the 27B, the next one beginning where one ends."""
    agents = Agents(SIZES["27B"])
    for step in range(60):
        names = [name for name in range(12) if 5 * name <= step < 5 * name + TURNS]
        assert len(names) <= 8
        for name, (new, prefilled) in zip(names, agents.turn(names), strict=True):
            assert prefilled <= new + CUTS[1], (step, name)


def test_without_a_host_tier_a_long_conversation_is_kept_while_the_device_has_room_for_it():
    agents = Agents(SIZES["35B"], host_bytes=0)
    for _ in range(30):
        for new, prefilled in agents.turn([0]):
            assert prefilled <= new + CUTS[1]
    # A second one has no room beside it.
    assert max(prefilled for _ in range(10) for _, prefilled in agents.turn([0, 1])) > 20_000

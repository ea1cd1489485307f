"""How many conversations fit at a time, with the sizes of large models and no arrays: pages beside dense slots."""

import random

import pytest

from dflash_jax.engine.config import EngineConfig
from dflash_jax.engine.dispatch import Outcome
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.request import Request
from dflash_jax.ops.cache import window_pages
from dflash_jax.sampling_params import SamplingParams
from tests.engine.mock_runner import END, run
from tests.engine.test_prefix_sizes import PAGE, SIZES, SizedRunner, Sizes

GB, WINDOW, ANSWER = 10**9, 4096, 256
# What weights, drafter and workspace of FP8 checkpoints leave of an H100's 80 GiB (`dflash plan`, 95 % of it usable).
ROOM = {"35B": 38 * GB, "27B": 43 * GB}


class LongRunner(SizedRunner):
    """Each request's text ends at a length of its own; up to then each round yields what it may."""

    def __init__(self, slots: int, capacity: int, sizes: Sizes, pages: tuple[int, int]):
        super().__init__(slots, sizes)
        self.capacity, self.pages, self.ends_at = capacity, pages, {}

    def admit(self, slot, request):
        super().admit(slot, request)
        self.rows[slot].tokens, self.rows[slot].limit = [*request.prompt], self.ends_at[request]

    def decode(self, dispatch, masks=None):
        tokens, yielded, done = [], [], []
        for slot, block_size in zip(dispatch.slots, dispatch.block_sizes, strict=True):
            row = self.rows[slot]
            n = min(row.limit - len(row.tokens), dispatch.rounds * block_size, dispatch.most_tokens)
            self.check(slot, len(row.tokens) + n - 1)
            row.tokens += [2] * n
            ended = len(row.tokens) == row.limit
            tokens.append([2] * (n - 1) + [END] if ended else [2] * n)
            yielded.append([block_size] * (n // block_size) + ([n % block_size] if n % block_size else []))
            done.append(ended)
        return self.work(1e-3), Outcome(tokens, yielded, done, None)

    def check(self, slot, length):
        """All that is written and read of a slot has pages."""
        table, windowed = self.tables
        assert (table[slot, : -(-length // PAGE)] < self.pages[0]).all()
        assert (windowed[slot, max(length - WINDOW, 0) // PAGE : -(-length // PAGE)] < self.pages[1]).all()


def at_a_time(model: str, capacity: int, lengths: list[int], slots: int) -> tuple[int, float, Engine]:
    """Dense slots that fit, conversations that run at a time in as many bytes (on average, of the busy time), and the
    engine. All answers are of the same length, so that those that run are as mixed as those that come."""
    sizes, room = SIZES[model], ROOM[model]
    # A ring of the window's positions, as a dense slot had it.
    dense = room // (sizes.snapshot + sizes.windowed * WINDOW + sizes.token * capacity)
    # As `plan_memory` divides the room: as many pages of both kinds, but no more with a window than the slots can use.
    left, most = room - slots * sizes.snapshot, slots * window_pages(WINDOW, 0, 512, capacity)
    windowed = min(most, left // (PAGE * (sizes.token + sizes.windowed)))
    full = (left - windowed * PAGE * sizes.windowed) // (PAGE * sizes.token)
    runner = LongRunner(slots, capacity, sizes, (full, windowed))
    config = EngineConfig(prefill_sizes=(4096,), max_num_batched_tokens=10**6)
    engine = Engine(runner, config)
    for length in lengths:
        prompt = length - ANSWER
        request = Request([3] * prompt, SamplingParams(max_tokens=capacity - prompt, temperature=0.0), (END,))
        runner.ends_at[request] = length
        engine.submit(request)
    running = []
    while engine.waiting:
        engine.step()
        running.append(engine.running - engine.swapped)
    run(engine, 10**6)
    assert engine.statistics.requests["stop"] == len(lengths)
    busy = running[len(running) // 4 :]
    return dense, sum(busy) / len(busy), engine


@pytest.mark.parametrize("model", SIZES)
def test_chats_of_a_server_with_a_long_maximum(model):
    """At most 32k tokens each, 3k on average."""
    rng = random.Random(0)
    lengths = [rng.randrange(1500, 4500) for _ in range(900)]
    dense, found, engine = at_a_time(model, 32768, lengths, {"35B": 190, "27B": 100}[model])
    assert found >= 3.5 * dense
    # Hardly any moved to the host.
    assert engine.statistics.preemptions < 0.05 * len(lengths)


@pytest.mark.parametrize("model", SIZES)
def test_a_mix_of_lengths_on_a_server_of_262k(model):
    """70, 20, 9 and 1 of a hundred of 4k, 32k, 128k and 262k, each 60 % full."""
    rng = random.Random(0)
    lengths = [rng.choices([4096, 32768, 131072, 262144], [70, 20, 9, 1])[0] * 6 // 10 for _ in range(400)]
    dense, found, engine = at_a_time(model, 262144, lengths, {"35B": 90, "27B": 40}[model])
    assert found >= 10 * dense
    assert engine.statistics.preemptions < 0.2 * len(lengths)

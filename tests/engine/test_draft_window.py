"""A drafter that sees a window of a context many times as long: its memory, its drafts, and the tokens."""

from dataclasses import replace

import numpy as np
import pytest

from dflash_jax.decoding.state import Settings
from dflash_jax.engine.config import EngineConfig, Speculation, speculations_of
from dflash_jax.engine.dispatch import Dispatch
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.executables import Executables
from dflash_jax.engine.model_runner import ModelRunner
from dflash_jax.engine.pages import Pages
from dflash_jax.engine.request import Request
from dflash_jax.models.drafting import NO_WINDOW, DraftWindow
from dflash_jax.ops.cache import PAGE_SIZE
from tests import tiny
from tools.token_runs import Remembering, requests

# The last new tokens are in another page than the first. The drafter itself drafts the first block: see `Remembering`.
PROMPT, NEW, WINDOW, CHUNK, BLOCK = 2033, 40, 128, 256, 8
CAPACITY = 9 * PAGE_SIZE
# The window and the new tokens of a dispatch are shorter than a page.
PAGES = (9, 2)


def asked(**options) -> Request:
    (request,) = requests([PROMPT], 0.0, NEW, tiny.VOCAB)
    return replace(request, **options)


def run(runner: ModelRunner, request: Request) -> tuple[list[int], tuple[int, int]]:
    """Tokens that rounds yielded, and the most pages of both kinds that the request had."""
    config = EngineConfig(speculations=speculations_of((BLOCK,)), prefill_sizes=(CHUNK,), max_num_batched_tokens=CHUNK)
    engine, yielded, most = Engine(runner, config), [], (0, 0)
    engine.submit(request)
    while engine.has_work:
        for event in engine.step():
            yielded += event.yielded
        if request.is_resident:
            most = tuple(map(max, most, engine.pages.counts(request.slot)))
    assert [pool.free(0) for pool in engine.pages.pools] == list(runner.pages)
    return yielded, most


@pytest.fixture(scope="module")
def case():
    """Runners with a windowed cache and with one that keeps everything, and a request that was decoded plainly."""
    target = tiny.target("a", moe="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executables, "compiler_options", {"xla_backend_optimization_level": 0})
        plain = asked(block_size=1)
        run(ModelRunner(Executables(target, None), 1, CAPACITY, Settings(), (9, 0)), plain)
        drafter = tiny.drafter(target)
        # Sharp attention with a large part in the output: drafts depend on which positions are seen.
        mixer = drafter.layers[-1].mixer
        for parameter in (mixer.q_norm.weight, mixer.o):
            parameter[...] = 8 * parameter[...]
        drafter = Remembering.of(drafter, [plain], wide=BLOCK, capacity=CAPACITY)

        def runner(window: DraftWindow) -> ModelRunner:
            return ModelRunner(Executables(target, drafter), 1, CAPACITY, Settings(draft_window=window), PAGES)

        yield runner(DraftWindow(WINDOW)), runner(NO_WINDOW), plain


def test_far_behind_the_window_tokens_are_plain_decodings_and_pages_those_of_the_window(case):
    windowed, _, plain = case
    drafted = asked(block_size=BLOCK)
    yielded, most = run(windowed, drafted)
    assert drafted.tokens == plain.tokens
    assert max(yielded) > 2
    assert most == PAGES


def drafts(runner: ModelRunner, request: Request) -> np.ndarray:
    """What the drafter proposes behind the prompt, on pages that are given up behind the window."""
    runner.reset()
    pages = Pages(runner, lambda slot, kinds: False)
    runner.admit(0, request)
    for start in range(0, PROMPT - 1, CHUNK):
        end = min(start + CHUNK, PROMPT - 1)
        assert pages.cover(0, end, end)
        pages.send()
        runner.prefill([0], [end - start], CHUNK)
    assert pages.cover(0, end, end + BLOCK)
    pages.send()
    return runner.read_blocks(runner.propose(Dispatch((0,), (BLOCK,), 1, Speculation(BLOCK), 1)))


def test_drafts_behind_given_up_pages_are_those_of_a_cache_that_keeps_everything(case):
    """A request that names no window, or a larger one, has that of the caches."""
    windowed, whole, _ = case
    expected = drafts(whole, asked(draft_window_size=WINDOW))
    assert (expected != drafts(whole, asked())).any()
    for request in (asked(), asked(draft_window_size=10 * WINDOW, draft_sink_size=600)):
        np.testing.assert_array_equal(drafts(windowed, request), expected)


def test_two_windows_of_equally_many_pages_have_programs_of_their_own():
    target = tiny.target("a", moe="")
    programs = Executables(target, tiny.drafter(target))
    for size in (WINDOW, 2 * WINDOW):
        runner = ModelRunner(programs, 1, CAPACITY, Settings(draft_window=DraftWindow(size)), PAGES)
        runner.set_tables(*(np.full((1, PAGES[0]), count, np.int32) for count in PAGES))
        assert runner.window == (size, 0)
    assert [key[0] for key in programs.compiled].count("set_tables") == 2

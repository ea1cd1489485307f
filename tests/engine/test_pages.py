"""Pages: fewer than the slots could use, shared with prefixes, and moved to the host when they run out."""

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.engine import model_runner
from dflash_jax.engine.config import copied_pages
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.executables import Executables
from dflash_jax.engine.pages import PagePool
from dflash_jax.engine.request import Request
from dflash_jax.engine.slots import Slots
from dflash_jax.models.drafting import DraftWindow
from dflash_jax.ops import cache
from tests import tiny
from tests.engine.load import CAPACITY, alone, copying_out, engine_for, some_requests, under_load
from tests.engine.mock_runner import CheckedRunner, engine, expected, request, run
from tools.token_runs import Remembering

PAGE = 4


def assert_no_page_is_lost(pages, prefix_cache) -> None:
    """Without sequences and prefixes, all pages are free."""
    for pool in pages.pools:
        assert pool.live == [0] * len(pool.live)
    prefix_cache.clear()
    for pool in pages.pools:
        assert [pool.free(shard) for shard in range(len(pool.live))] == [pool.count] * len(pool.live)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    slots=st.integers(1, 6),
    shards=st.integers(1, 2),
    spare=st.tuples(st.integers(0, 12), st.integers(0, 4)),
    window=st.sampled_from([(0, 0), (3, 0), (9, 2), (16, 5)]),
    prefix_bytes=st.sampled_from([0, 300, 3000]),
    host_bytes=st.sampled_from([0, 500, 10**6]),
    has_memory=st.booleans(),
    swap_bytes=st.sampled_from([None, 0, 400]),
)
def test_whatever_comes_gets_its_tokens_and_no_page_is_lost(
    seed, slots, shards, spare, window, prefix_bytes, host_bytes, has_memory, swap_bytes
):
    """The mock runner computes from what the pages have, and so notices each page that is another's."""
    rng, capacity = random.Random(seed), 48
    full = capacity // PAGE + 1 + spare[0]
    windowed = min(full, capacity // PAGE + spare[1]) if window[0] else 0
    loaded = engine(
        slots * shards, capacity, seed, shards, pages=(full, windowed), window=window,
        prefix_bytes=prefix_bytes, prefix_host_bytes=host_bytes, swap_bytes=swap_bytes, markers=frozenset([1]),
        prefill_batch_tokens=rng.choice([16, 64]), max_num_batched_tokens=rng.choice([16, 64, 160]),
    )  # fmt: skip
    loaded.runner.has_memory = has_memory
    system, live = [1, *range(2, 12)], []
    for _ in range(25):
        start = rng.choice([[], system, system[:6]])
        prompt = [*start, 1, *(rng.randrange(2, 50) for _ in range(rng.randrange(20)))]
        new = rng.randrange(1, capacity - len(prompt) + 1)
        one = request(prompt, new, priority=rng.choice([0, 0, 1, 2]))
        if rng.random() < 0.15:
            right = expected(prompt, new)
            one.tokens = right[: rng.randrange(len(right))]
        live.append(one)
        loaded.submit(one)
        for _ in range(rng.randrange(4)):
            loaded.step()
        if rng.random() < 0.1:
            loaded.abort(rng.choice(live))
    run(loaded)
    assert loaded.failure is None
    for r in live:
        if r.finish_reason != "abort":
            assert r.tokens == expected(r.prompt, r.params.max_tokens)
    assert_no_page_is_lost(loaded.pages, loaded.prefix_cache)


def test_a_short_request_does_not_wait_for_a_long_one_that_has_left_the_device():
    loaded = engine(8, 4096, pages=1025, max_num_batched_tokens=4000, prefill_sizes=(256,))
    loaded.runner.ends = False
    long = [request([5 + i] * 1000, 3000) for i in range(2)]
    for each in long:
        loaded.submit(each)
    while not loaded.swapped:
        loaded.step()
    short = request([7] * 8, 2)
    loaded.submit(short)
    for _ in range(10):
        loaded.step()
    assert short.finish_reason is not None
    assert loaded.swapped == 1
    run(loaded)
    assert all(len(each.tokens) == 3000 for each in long)


def test_requests_that_may_become_long_do_not_wait_for_each_other():
    """Each may need all pages but one, and they begin together."""
    loaded = engine(8, 64, pages=26)
    requests = [request(range(2, 6 + i), 50) for i in range(8)]
    for each in requests:
        loaded.submit(each)
    loaded.step()
    assert loaded.running == 8
    run(loaded)
    assert [r.tokens for r in requests] == [expected(r.prompt, 50) for r in requests]
    assert loaded.statistics.preemptions > 0


def test_the_last_request_of_the_lowest_priority_gives_its_pages():
    loaded = engine(3, 64, pages=18, max_num_batched_tokens=1000, prefill_sizes=(64,))
    first, urgent = request(range(2, 22), 40), request(range(3, 23), 40, priority=-1)
    last = request(range(4, 24), 40)
    for each in (first, urgent, last):
        loaded.submit(each)
    swapped = set()
    while loaded.has_work:
        loaded.step()
        swapped |= {r for r in (first, urgent, last) if r.swapped is not None}
    assert last in swapped
    assert urgent not in swapped
    assert all(r.tokens == expected(r.prompt, 40) for r in (first, urgent, last))


def test_where_the_host_has_no_memory_left_a_request_computes_its_tokens_again():
    loaded = engine(2, 256, pages=65)
    loaded.runner.has_memory, loaded.runner.ends = False, False
    first, last = request(range(2, 22), 230), request(range(4, 24), 230)
    for each in (first, last):
        loaded.submit(each)
    events = run(loaded)
    assert loaded.statistics.preemptions > 0
    assert loaded.statistics.prompt_tokens == 40
    for each in (first, last):
        assert each.tokens == expected(each.prompt, 230, ends=False)
        # Each token comes once.
        assert [t for event in events if event.request is each for t in event.tokens] == each.tokens
        t = each.times
        assert t.submitted <= t.admitted <= t.prefilled <= t.first_token <= t.finished
    assert {entry[2] for entry in loaded.runner.log if entry[0] == "admit"} == {first, last}
    assert sum(entry[0] == "admit" for entry in loaded.runner.log) > 2
    assert_no_page_is_lost(loaded.pages, loaded.prefix_cache)


def test_log_probabilities_of_a_prompt_stay_where_its_request_is_computed_again():
    """A server's event loop reads them with the first token, while the engine goes on."""
    loaded = engine(2, 256, pages=65)
    loaded.runner.has_memory, loaded.runner.ends = False, False
    first, last = request(range(2, 22), 230), request(range(4, 24), 230, prompt_logprobs=0)
    for each in (first, last):
        loaded.submit(each)
    while loaded.has_work:
        loaded.step()
        assert len(last.prompt_entries) == 19 or not last.tokens
    assert loaded.statistics.preemptions > 0
    assert last.tokens == expected(last.prompt, 230, ends=False)


def test_what_is_computed_again_is_no_hit_of_the_prefix_cache():
    """The first reading counts: with the second there could be more known tokens than prompt tokens."""
    loaded = engine(2, 256, pages=65, prefix_bytes=10**7, markers=frozenset([1]))
    loaded.runner.has_memory, loaded.runner.ends = False, False
    system = [1, *range(2, 19)]
    loaded.submit(request([*system, 1, 20], 1))
    run(loaded)
    first, last = (request([*system, 1, *range(start, start + 20)], 200) for start in (20, 21))
    for each in (first, last):
        loaded.submit(each)
    while not last.must_recompute:
        loaded.step()
    # It stores the system prompt again, whose pages were given up, before the other goes on.
    third = request([*system, 1, 22], 1, priority=-1)
    loaded.submit(third)
    run(loaded)
    assert [entry[0] for entry in loaded.runner.log].count("restore") == 3
    assert (third.cached, last.is_recomputed) == (0, True)
    # The system prompt, and the token that opens the message after it.
    assert first.cached == last.cached == len(system) + 1
    assert loaded.statistics.cached_tokens == 2 * (len(system) + 1)


@pytest.mark.parametrize("seed", range(30))
def test_requests_that_lose_their_pages_in_the_middle_of_a_prefill_are_computed_again(seed, monkeypatch):
    """In the middle of a prefill of several, or when its own is complete."""
    monkeypatch.setattr(Slots, "_need", lambda self, request: self.pages.need(1))
    rng = random.Random(seed)
    pages, budget = 17 + rng.randrange(4), rng.choice([64, 160])
    loaded = engine(4, 64, pages=pages, prefill_batch_tokens=64, max_num_batched_tokens=budget)
    loaded.runner.has_memory = False
    requests = []
    for _ in range(6):
        prompt = [rng.randrange(1, 50) for _ in range(rng.choice([3, 20, 34, 60]))]
        options = {"priority": rng.choice([0, 1, 2]), "prompt_logprobs": rng.choice([None, None, 0])}
        requests.append(request(prompt, rng.randrange(5), **options))
        loaded.submit(requests[-1])
        for _ in range(rng.randrange(3)):
            loaded.step()
    run(loaded, 1000)
    assert loaded.failure is None
    assert [r.tokens for r in requests] == [expected(r.prompt, r.params.max_tokens) for r in requests]
    for each in [r for r in requests if r.prompt_logprobs is not None]:
        assert [entry["logprob"] for entry in each.prompt_entries] == each.prompt[1:]
    assert_no_page_is_lost(loaded.pages, loaded.prefix_cache)


def test_the_host_keeps_as_many_pages_as_may_swap():
    """The third request has no room there beside the second."""
    swapped, page = [], CheckedRunner.page_bytes[0]
    # A copy of two to eight pages takes eight.
    loaded = engine(3, 64, pages=17, swap_bytes=8 * page)
    requests = [request(range(2 + i, 18 + i), 44) for i in range(3)]
    for each in requests:
        loaded.submit(each)
    while loaded.has_work:
        loaded.step()
        swapped.append(sum(page * copied_pages(r.swapped.counts[0]) for r in requests if r.swapped is not None))
    assert max(swapped) == 8 * page
    assert sum(entry[0] == "admit" for entry in loaded.runner.log) > 3
    assert [r.tokens for r in requests] == [expected(r.prompt, 44) for r in requests]
    assert_no_page_is_lost(loaded.pages, loaded.prefix_cache)


@pytest.mark.parametrize("is_queued", [False, True])
def test_a_request_that_lost_its_pages_may_be_aborted(is_queued):
    loaded = engine(2, 512, pages=129, swap_bytes=0)
    loaded.runner.ends = False
    first, last = request([5] * 100, 400), request([6] * 100, 400)
    for each in (first, last):
        loaded.submit(each)
    while not last.must_recompute:
        loaded.step()
    while is_queued and not loaded.waiting:
        loaded.step()
    assert loaded.waiting == is_queued
    loaded.abort(last)
    run(loaded)
    assert last.finish_reason == "abort"
    assert len(first.tokens) == 400
    assert_no_page_is_lost(loaded.pages, loaded.prefix_cache)


def test_a_request_that_is_swapped_out_may_be_aborted():
    loaded = engine(2, 64, pages=17)
    first, last = request(range(2, 22), 44), request(range(4, 24), 44)
    loaded.submit(first)
    loaded.submit(last)
    while last.swapped is None:
        loaded.step()
    assert loaded.swapped == 1
    loaded.abort(last)
    run(loaded)
    assert last.finish_reason == "abort"
    assert first.tokens == expected(first.prompt, 44)
    assert_no_page_is_lost(loaded.pages, loaded.prefix_cache)


def test_a_hit_copies_the_one_page_that_is_partly_shared():
    loaded = engine(2, 64, prefix_bytes=10**6, markers=frozenset([1]))
    system = [1, *range(2, 19)]
    for text in (range(20, 40), range(21, 41)):
        loaded.submit(request([*system, 1, *text], 4))
        before = len(loaded.runner.log)
        run(loaded)
    # 18 tokens: four pages are shared, and two positions of the fifth are copied.
    assert [entry[1] for entry in loaded.runner.log[before:] if entry[0] == "load"] == [1]
    assert [entry[2] for entry in loaded.runner.log[before:] if entry[0] == "restore"] == [18]


def test_a_page_has_as_many_users_as_take_and_share_it():
    pool = PagePool(3, 2)
    page = pool.take(1)
    assert page >= 3
    pool.share(page)
    pool.keep(page)
    pool.give_back(page)
    assert (pool.live, pool.free(1)) == ([0, 1], 2)
    pool.give_back(page)
    assert (pool.live, pool.free(1), pool.is_idle(page)) == ([0, 0], 2, True)
    pool.drop(page)
    assert (pool.free(0), pool.free(1)) == (3, 3)
    with pytest.raises(AssertionError):
        pool.drop(page)


class Patient:
    """Masks that allow everything, once they are ready."""

    is_over, is_ready = False, True

    def take(self, tokens):
        pass

    def ask(self, drafts):
        self._count = len(drafts) + 1

    def answer(self, timeout_s):
        return np.full((self._count, 2), 2**32 - 1, np.uint32) if self.is_ready else None

    def close(self):
        pass


def test_a_request_whose_mask_is_late_while_its_pages_are_away_is_decoded_once(monkeypatch):
    loaded = engine(slots=5, prefill_sizes=(4, 16), max_num_batched_tokens=64, max_decode_batch=2)
    loaded.runner.ends = False
    masked = request([2, 7], 60, mask=(mask := Patient()))
    requests = [*(request([i, 7], 900) for i in (1, 5, 6, 8)), masked]
    for each in requests:
        loaded.submit(each)
    while not all(each.tokens for each in requests):
        loaded.step()
    mask.is_ready = False
    for _ in range(3):
        loaded.step()
    loaded._collect_all()
    loaded._slots.swap_out(masked)
    with monkeypatch.context() as patch:
        patch.setattr(loaded._slots, "_swap_in", lambda: None)
        for _ in range(3):
            loaded.step()
            assert loaded._scheduler.requests.count(masked) == 1
    mask.is_ready = True
    run(loaded)
    assert all(each.tokens == expected(each.prompt, each.params.max_tokens, False) for each in requests)


COUNT = 60


@pytest.fixture(scope="module")
def small_pages():
    """Pages of 16 positions, and one batch size: each costs seconds to compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "BATCH_SIZES", (8,))
        patch.setattr(cache, "PAGE_SIZE", 16)
        yield


@pytest.fixture(scope="module")
def drafting(small_pages):
    """A hybrid target with a drafter, requests, and what each gives alone."""
    target = tiny.target("da", moe="")
    wanted, plain = some_requests(0, 30, tiny.VOCAB), Executables(target, None)
    right = alone(engine_for(plain, (1,), slots=8, prefix_bytes=0), wanted)
    drafter = Remembering.of(tiny.drafter(target), [r for r, _ in right], wide=8, capacity=CAPACITY)
    return Executables(target, drafter), wanted, right


@pytest.mark.parametrize(("host_bytes", "swap_bytes"), [(0, None), (10**8, None), (0, 0)])
def test_under_load_with_few_pages_requests_give_what_they_give_alone(drafting, host_bytes, swap_bytes, monkeypatch):
    """A drafter with and without windows, prefixes in both tiers; the slots could use 48 pages.

    Without room on the host, requests compute their tokens again.
    """
    # Requests come without regard to what they will need, so that many move to the host.
    monkeypatch.setattr(Slots, "_need", lambda self, request: self.pages.need(1))
    programs, wanted, right = drafting
    loaded = engine_for(
        programs, slots=8, pages=(10, 10), draft_window=DraftWindow(20, 3),
        prefix_bytes=200_000, prefix_host_bytes=host_bytes, swap_bytes=swap_bytes,
    )  # fmt: skip
    assert (loaded.runner.window, loaded.runner.pages) == ((20, 3), (10, 10))
    under_load(loaded, programs.pair[0], wanted, right, COUNT, seed=3)
    s = loaded.statistics
    assert s.preemptions > 3
    assert s.cached_tokens > 0
    assert_no_page_is_lost(loaded.pages, loaded.prefix_cache)


def test_the_state_after_swapping_is_the_same_to_the_bit(small_pages):
    target = tiny.target("a", moe="")
    loaded = engine_for(Executables(target, None), (1,), slots=2, pages=(12, 0), prefix_bytes=0)
    pages, runner = loaded.pages, loaded.runner
    assert pages.cover(0, 0, 50)
    assert pages.cover(1, 0, 70)
    before = pages.of_slot(0, 0, 50)
    k = runner.state.target[0].k
    rng = np.random.default_rng(0)
    runner.state.target[0].k.delete()
    changed = jax.device_put(rng.standard_normal(k.shape).astype(np.float32), k.sharding)
    object.__setattr__(runner.state.target[0], "k", changed)
    contents = np.asarray(changed)[list(before.pages.values())]
    copy = pages.swap_out(0)
    # Other pages than before.
    assert pages.cover(1, 0, 90)
    assert pages.swap_in(0, copy, 50)
    after = pages.of_slot(0, 0, 50)
    assert after.pages.keys() == before.pages.keys()
    assert after.pages != before.pages
    np.testing.assert_array_equal(np.asarray(runner.state.target[0].k)[list(after.pages.values())], contents)


def test_requests_that_are_copied_out_of_their_slots_give_what_they_give_alone(drafting):
    """They come back to any slot."""
    programs, wanted, right = drafting
    loaded = engine_for(programs, slots=8, draft_window=DraftWindow(20, 3), prefix_bytes=200_000)
    copied = copying_out(loaded, seed=0)
    under_load(loaded, programs.pair[0], wanted, right, COUNT, seed=5)
    assert len(copied) > 10
    assert len({request for request, _ in copied}) < len(set(copied)), "all came back to the same slots"
    assert_no_page_is_lost(loaded.pages, loaded.prefix_cache)


def contents_of(loaded: Engine, slot: int, length: int) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """All that a slot has: caches up to a position, states, options and counts."""
    runner, (full, windowed) = loaded.runner, loaded.pages._slots[slot]
    segments = [
        np.asarray(x)[: length - index * runner.page_size]
        for is_windowed, pages in enumerate((full, windowed))
        for index, page in sorted(pages.items())
        if index * runner.page_size < length
        for x in jax.tree.leaves(
            jax.tree.map(lambda x: jnp.swapaxes(x[0], 0, 1), runner.save([page], bool(is_windowed)))
        )
    ]
    state = jax.device_get(runner.state)
    names = (
        "length",
        "num_cached",
        "limit",
        "rope_delta",
        "done",
        "stops",
        "draft_window",
        "draft_sinks",
        "draft_start",
    )
    values = {name: getattr(state, name)[slot] for name in names} | {"tokens": state.tokens[slot][: length + 1]}
    options = jax.tree.map(lambda x: x[slot], state.sampling)
    values |= {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(options)}
    return [*segments, *map(np.asarray, jax.tree.leaves(runner.snapshot(slot)))], values


def test_what_a_slot_has_is_the_same_to_the_bit_in_another_slot(drafting):
    """Keys, values, recurrent states, the drafter's context, options and counts."""
    programs, wanted, _ = drafting
    loaded = engine_for(programs, slots=8, draft_window=DraftWindow(20, 3), prefix_bytes=0)
    longest = max(wanted, key=lambda each: len(each["prompt"]))
    longest |= {"params": replace(longest["params"], max_tokens=26, ignore_eos=True), "stops": ()}
    one, other = (Request(**longest, block_size=3) for _ in range(2))
    loaded.submit(one)
    while not one.tokens:
        loaded.step()
    loaded._events += loaded._collect(keep=0)
    length = len(one.prompt) + len(one.tokens) - 1
    before, slot = contents_of(loaded, one.slot, length), one.slot
    assert loaded._slots.copy_out(one)
    loaded._slots.waiting.remove(one)
    loaded.submit(other)
    loaded._slots._admit()
    loaded._slots.waiting.push(one)
    loaded._slots._admit()
    loaded._slots._swap_in()
    assert (other.slot, one.slot != slot, one.is_resident) == (slot, True, True)
    after = contents_of(loaded, one.slot, length)
    for x, y in zip(before[0], after[0], strict=True):
        np.testing.assert_array_equal(x, y)
    assert before[1].keys() == after[1].keys()
    for name, x in before[1].items():
        np.testing.assert_array_equal(x, after[1][name], name)
    run(loaded)
    assert one.tokens == other.tokens
    assert len(one.tokens) == 26

"""The engine's decisions, on a runner without a model."""

import random
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.decoding.state import Settings
from dflash_jax.engine import turns
from dflash_jax.engine.config import EngineConfig, has_large_chunks, prefill_config
from dflash_jax.engine.prefix_cache import BLOCK
from dflash_jax.engine.request import ReadyMasks
from dflash_jax.errors import EngineError, InputError, QueueFullError
from tests.engine.mock_runner import END, VOCAB, engine, expected, request, run


def told(events, request) -> list[int]:
    return [t for e in events if e.request is request for t in e.tokens]


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1, VOCAB) for _ in range(length)]


@pytest.mark.parametrize("seed", range(30))
def test_every_request_gets_its_own_tokens(seed):
    """Random arrivals, lengths, widths, shared beginnings, aborts at any moment, more requests than slots."""
    rng = random.Random(seed)
    shards = rng.choice([1, 1, 2])
    e = engine(
        slots=rng.choice([1, 2, 5]) * shards,
        seed=seed,
        shards=shards,
        prefix_bytes=rng.choice([0, 60, 500, 10**6]),
        markers=frozenset([1, 2]),
        cut_spacing=rng.choice([(4, 8), (16, 30), (512, 1024)]),
        max_decode_batch=rng.choice([None, None, 1, 2]),
        prefill_batch_tokens=rng.choice([0, 16]),
        adaptive=rng.random() < 0.8,
    )
    shared, events, live, aborted = prompt_of(rng, 50), [], [], set()
    for _ in range(60):
        for _ in range(rng.randrange(3)):
            prompt = shared[: rng.randrange(50)] + prompt_of(rng, rng.choice([1, 1, 3, 20, 90]))
            live.append(request(prompt, rng.randrange(1, 40), block_size=rng.choice(["auto", 1, 5, 16])))
            e.submit(live[-1])
        if live and rng.random() < 0.1:
            victim = rng.choice(live)
            if victim.finish_reason is None:
                aborted.add(victim)
            e.abort(victim)
        events += e.step()
    events += run(e)
    for r in live:
        text = expected(r.prompt, r.params.max_tokens)
        ends = [x.finish_reason for x in events if x.request is r and x.finish_reason]
        assert len(ends) == 1
        assert told(events, r) == r.tokens == text[: len(r.tokens)]
        assert sum(n for x in events if x.request is r for n in x.yielded) == len(r.tokens)
        if r not in aborted:
            assert r.tokens == text
            assert ends == ["stop" if text[-1] == END else "length"]
    assert e.free_slots == e.runner.slots
    assert e.running == e.waiting == 0
    assert e.prefix_cache.size <= e.prefix_cache.budget
    assert e.statistics.new_tokens == sum(len(r.tokens) for r in live)


def test_a_long_prompt_stalls_nobody():
    e = engine(prefix_bytes=0)
    quick = request([3, 4], 200)
    e.submit(quick)
    e.step()
    e.submit(request(range(1, 3000), 5))
    e.submit(late := request([5, 6, 7], 3))
    gaps, steps = [], 0
    while late.finish_reason is None:
        before = e.runner.clock
        e.step()
        steps += 1
        chunks = [entry for entry in e.runner.log if entry[0] == "prefill"]
        e.runner.log.clear()
        # Never more than the budget beside the rows that decode.
        assert sum(size for _, _, size in chunks) <= 64
        gaps.append(e.runner.clock - before)
    # The late one had its turn beside the long one, not behind it.
    assert steps < 5
    assert len(quick.tokens) > 10


def test_prompts_take_turns_and_priority_goes_first():
    e = engine(slots=8, max_num_batched_tokens=16)
    first, second, urgent = request(range(1, 200)), request(range(2, 200)), request(range(3, 68), priority=-1)
    for r in (first, second, urgent):
        e.submit(r)
    run(e)
    order = [slot for kind, slot, *_ in e.runner.log if kind == "prefill"]
    assert order[:4] == [urgent.slot] * 4
    rest = order[4:20]
    assert rest.count(first.slot) == rest.count(second.slot) == 8


def test_priority_goes_first_in_the_queue():
    e = engine(slots=1)
    requests = [request([i + 1], 3, priority=p) for i, p in enumerate([5, 0, 5, -1])]
    for r in requests:
        e.submit(r)
    run(e)
    admitted = [entry[2] for entry in e.runner.log if entry[0] == "admit"]
    assert admitted == [requests[3], requests[1], requests[0], requests[2]]


def test_long_prompt_beside_many_short_ones_finishes():
    e = engine(slots=2, max_num_batched_tokens=16)
    waiting = request(range(1, 100), 5)
    e.submit(waiting)
    for i in range(200):
        e.submit(request([1 + i % 40, 2, 3], 4))
    for _ in range(60):
        e.step()
    assert waiting.finish_reason == "length"
    assert waiting.tokens == expected(waiting.prompt, 5)


def test_submit_to_a_full_queue_raises_queue_full_error():
    e = engine(slots=2, max_queue=3)
    for _ in range(5):
        e.submit(request([1, 2]))
    with pytest.raises(QueueFullError, match="3"):
        e.submit(request([1, 2]))
    e.step()
    run(e)
    e.submit(request([1, 2]))


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (lambda: request(range(1, 90), 20), "89 prompt tokens and 20 new ones are 109: at most 100 fit"),
        (lambda: request([1], 4, block_size=17), "block size 17"),
        (lambda: request([], 4), "empty"),
    ],
)
def test_what_can_never_run_is_refused(made, named):
    e = engine(capacity=100)
    with pytest.raises(InputError, match=named):
        e.submit(made())
    assert not e.has_work


def test_aborts_at_every_moment():
    """In the queue, in prefill, in decode, in the very dispatch that finishes the request, and afterwards."""
    for after in range(12):
        e = engine(slots=1, max_num_batched_tokens=8)
        running, queued = request(range(1, 40), 40), request([7, 8], 20)
        e.submit(running)
        e.submit(queued)
        events = [x for _ in range(after) for x in e.step()]
        e.abort(running)
        e.abort(running)
        events += run(e)
        ends = [x.finish_reason for x in events if x.request is running and x.finish_reason]
        assert len(ends) == 1
        assert queued.tokens == expected([7, 8], 20)
        assert running.tokens == expected(running.prompt, 40)[: len(running.tokens)]


def test_a_failure_ends_all_and_the_engine_can_start_again():
    for moment in (0, 1, 3):
        e = engine(slots=2, prefix_bytes=1000)
        requests = [request(range(1, 30 + i), 60) for i in range(5)]
        for r in requests:
            e.submit(r)
        for _ in range(moment):
            e.step()
        e.runner.fail = True
        events = []
        while not e.failure:
            events += e.step()
        errors = [x for x in events if x.finish_reason == "error"]
        assert {x.request for x in errors} == {r for r in requests if r.finish_reason == "error"}
        assert all(r.finish_reason for r in requests)
        assert all("out of memory" in str(x.error) for x in errors)
        with pytest.raises(EngineError, match="out of memory"):
            e.submit(request([1]))
        with pytest.raises(EngineError):
            e.step()
        e.runner.fail = False
        e.restart()
        e.submit(again := request([4, 5], 9))
        run(e)
        assert again.tokens == expected([4, 5], 9)


def test_a_monitor_ends_a_request_inside_a_dispatch():
    text = expected([9, 9], 30)
    seen = []

    def monitor(tokens):
        before = len(seen)
        seen.extend(tokens)
        return 7 - before if len(seen) >= 7 else None

    e = engine()
    e.submit(r := request([9, 9], 30, monitor=monitor, block_size=16))
    e.submit(other := request([9, 8], 30))
    events = run(e)
    assert r.tokens == told(events, r) == text[:7]
    assert r.finish_reason == "stop"
    assert other.tokens == expected([9, 8], 30)


class Only(ReadyMasks):
    """A provider that allows one token at each place: 3, 4, 5, …"""

    def __init__(self):
        self.taken = []

    def take(self, tokens):
        self.taken += tokens

    def masks(self, drafts):
        masks = np.zeros((len(drafts) + 1, 2), np.uint32)
        masks[:, 0] = 1 << (3 + len(self.taken))
        return masks


def test_a_mask_sees_every_token_before_it():
    e = engine()
    masks = Only()
    e.submit(r := request([9, 9], 5, mask=masks, block_size=1))
    run(e)
    assert r.tokens == masks.taken == [3, 4, 5, 6, 7]
    # One round at a time while it was there.
    assert all(d.rounds == 1 for kind, d, *_ in e.runner.log if kind == "decode")


def prefilled(e) -> int:
    return sum(size for kind, _, size in (x for x in e.runner.log if x[0] == "prefill"))


def test_prompts_with_one_beginning_share_its_prefill():
    marker, system = 2, list(range(5, 45))
    prompts = [[marker, *system, marker, 30 + i, 31, 32] for i in range(4)]
    e = engine(prefix_bytes=10**6, markers=frozenset([marker]))
    requests = [request(p, 5) for p in prompts]
    for r in requests:
        e.submit(r)
    run(e)
    # 41 tokens once (16 + 16 + 16), the rest four times in a chunk of 4.
    assert prefilled(e) == 48 + 4 * 4
    assert [r.cached for r in requests] == [0, 41, 41, 41]
    assert all(r.tokens == expected(r.prompt, 5) for r in requests)
    e.runner.log.clear()
    e.submit(again := request(prompts[2], 7))
    run(e)
    assert prefilled(e) == 0
    assert again.cached == len(again.prompt) - 1
    assert again.tokens == expected(prompts[2], 7)


def test_who_waits_for_anothers_prefix_goes_on_when_that_one_is_gone():
    prompt = [2, *range(5, 45), 2, 30]
    e = engine(prefix_bytes=10**6, markers=frozenset([2]), max_num_batched_tokens=16)
    e.submit(first := request(prompt, 5))
    e.submit(second := request([*prompt, 31], 5))
    e.step()
    e.abort(first)
    run(e)
    assert second.tokens == expected(second.prompt, 5)


def test_short_prompts_are_read_together():
    """As many as a program takes, of the same size, on every shard; no more tokens than the budget."""
    e = engine(slots=8, shards=2, prefill_batch_tokens=16, max_num_batched_tokens=400)
    requests = [request(range(i + 1, i + n), 5) for i, n in enumerate((4, 4, 4, 4, 4, 4, 14, 14))]
    for r in requests:
        e.submit(r)
    run(e)
    # Chunks of 4 tokens, of both shards' three; then those of 16, one of each shard.
    assert e.runner.calls == [(6, 4, 4), (2, 16, 1)]
    assert all(r.tokens == expected(r.prompt, 5) for r in requests)
    e = engine(slots=8, prefill_batch_tokens=16, max_num_batched_tokens=16)
    urgent, later = [request(range(1, n)) for n in (5, 14)], [request(range(i, i + 4), priority=5) for i in range(1, 4)]
    for r in (*later, *urgent):
        e.submit(r)
    e.step()
    # Nobody of a lower priority goes along while one of a higher waits.
    assert e.runner.calls == [(1, 4, 1), (1, 16, 1)]
    e = engine(slots=8, prefill_batch_tokens=16, max_num_batched_tokens=24)
    for i in range(8):
        e.submit(request(range(i + 1, i + 5)))
    e.step()
    assert e.runner.calls == [(4, 4, 4), (2, 4, 4)]


def test_who_needs_anothers_prefix_is_not_read_beside_it():
    e = engine(prefix_bytes=10**6, prefill_batch_tokens=16, markers=frozenset([2]))
    requests = [request([2, 5, 6, 10 + i, 3], 5) for i in range(3)]
    same = [request(requests[0].prompt, 5) for _ in range(2)]
    for r in (*requests, *same):
        e.submit(r)
    run(e)
    assert e.runner.calls == [(3, 4, 4)]
    assert [r.cached for r in same] == [4, 4]
    assert all(r.tokens == expected(r.prompt, 5) for r in (*requests, *same))


def test_reproducible_rows_decode_alone():
    e = engine(max_decode_batch=1)
    requests = [request([i + 1, 2], 30) for i in range(3)]
    for r in requests:
        e.submit(r)
    run(e)
    assert all(len(d.slots) == 1 for kind, d, *_ in e.runner.log if kind == "decode")
    assert all(r.tokens == expected(r.prompt, 30) for r in requests)


def test_large_chunks_need_a_kernel_or_many_tpus_that_divide_the_heads():
    assert [has_large_chunks("tpu", False, n) for n in (1, 2, 4, 8)] == [False, False, True, True]
    assert [has_large_chunks("gpu", kernels, 8) for kernels in (False, True)] == [False, True]
    assert not has_large_chunks("cpu", False, 8)


@pytest.mark.parametrize(
    ("platform", "kernels", "alone", "most", "sizes", "together"),
    [
        ("cpu", False, False, None, (16, 64, 256, 1024), 0),
        ("gpu", True, False, None, (16, 64, 256, 1024, 4096), 2048),
        ("gpu", True, True, None, (16, 64, 256, 1024, 4096), 0),
        ("gpu", False, False, None, (16, 64, 256, 1024), 2048),
        ("gpu", True, False, 300, (16, 64, 256), 300),
        ("gpu", True, False, 8, (16,), 8),
        ("tpu", False, False, None, (16, 64, 256, 1024), 2048),
    ],
)
def test_chunks_suit_the_platform(platform, kernels, alone, most, sizes, together):
    options = EngineConfig(**prefill_config(platform, kernels, alone, most))
    assert (options.prefill_sizes, options.prefill_batch_tokens) == (sizes, together)
    assert options.max_num_batched_tokens == (most or max(2048, sizes[-1]))
    assert all(size * options.prefill_batch(size) <= max(together, size) for size in sizes)
    assert max(map(options.prefill_batch, sizes)) <= 8


def test_the_longest_prefix_is_used_wherever_an_earlier_prompt_ended():
    """In the reproducible mode only where the new prompt has a cut itself, since other chunks may give other bits."""
    rng = random.Random(0)
    prompt = [1, *(rng.randrange(3, VOCAB) for _ in range(1500))]
    for aligned, cached in ((False, len(prompt) - 1), (True, 1024)):
        e = engine(prefix_bytes=10**7, markers=frozenset([1]))
        e.runner.settings = Settings(8, aligned)
        for text in (prompt, [*prompt, *range(3, 40)], prompt[:1200]):
            e.submit(r := request(text, 5))
            run(e)
            assert r.tokens == expected(text, 5)
            assert r.cached == (0 if text is prompt else 1024 if len(text) < len(prompt) else cached)


def prefills(e, requests) -> list[tuple]:
    """For each request at the start of its decoding: the chunks that computed its state, and its positions' chunks."""
    found, decode = {}, e.runner.decode

    def look(dispatch):
        for slot in dispatch.slots:
            row = e.runner.rows[slot]
            found.setdefault(tuple(row.prompt), (row.chunks, e.runner.written(slot)[: len(row.prompt) - 1]))
        return decode(dispatch)

    e.runner.decode = look
    for r in requests:
        e.submit(r)
    run(e)
    e.runner.decode = decode
    assert all(r.tokens == expected(r.prompt, r.params.max_tokens) for r in requests)
    return [found[tuple(r.prompt)] for r in requests]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=12),
    turns=st.lists(
        st.lists(
            st.tuples(st.integers(0, 12), st.integers(-1, 1) | st.integers(2, 70), st.sampled_from([(), (1,), (1, 2)])),
            min_size=1,
            max_size=3,
        ),
        min_size=2,
        max_size=5,
    ),
    spacing=st.tuples(st.integers(1, 40), st.integers(0, 60)),
    prefix_bytes=st.sampled_from([300, 10**6]),
)
def test_in_the_reproducible_mode_a_hit_has_the_chunks_of_a_cold_prefill(lengths, turns, spacing, prefix_bytes):
    """Whatever was there: prompts that end anywhere in a conversation, go on after another one's end, or part."""
    rng = random.Random(0)
    messages = [[1, *(rng.randrange(3, VOCAB) for _ in range(n))] for n in lengths]
    text, starts = [token for each in messages for token in each], [0, *accumulate(map(len, messages))]
    options = {
        "markers": frozenset([1]),
        "cut_spacing": (spacing[0], sum(spacing)),
        "prefill_sizes": (4, 16, 64),
        "max_decode_batch": 1,
    }
    warm = engine(prefix_bytes=prefix_bytes, **options)
    warm.runner.settings = Settings(8, aligned=True)
    for ends in turns:
        places = {max(starts[min(i, len(messages))] + n, 2): tail for i, n, tail in ends}
        prompts = [[*text[:end], *tail] for end, tail in places.items()]
        found = prefills(warm, [request(prompt, 1) for prompt in prompts])
        for prompt, chunks in zip(prompts, found, strict=True):
            cold = engine(prefix_bytes=0, **options)
            cold.runner.settings = Settings(8, aligned=True)
            (alone,) = prefills(cold, [request(prompt, 1)])
            assert chunks == alone


@pytest.mark.parametrize(
    ("platform", "kernels", "aligned", "chunk", "shares"),
    [
        ("gpu", True, False, 4096, True),
        # A cut at the first message after 512 tokens.
        ("gpu", True, True, 512, False),
        ("gpu", False, False, 1024, True),
        ("tpu", False, False, 1024, True),
        ("cpu", False, False, 256, False),
    ],
)
def test_a_chat_of_100_messages_costs_what_its_tokens_cost(platform, kernels, aligned, chunk, shares):
    """By programs of prefill, which take an accelerator a time of their own, whatever they hold."""
    rng, marker = random.Random(4), 1

    def message(length: int) -> list[int]:
        return [marker, *(rng.randrange(4, VOCAB) for _ in range(length - 1))]

    config = prefill_config(platform, kernels, aligned)
    e = engine(slots=8, capacity=8192, prefix_bytes=10**8, markers=frozenset([marker]), **config)
    e.runner.settings = Settings(8, aligned)
    text = [*message(300), *(token for _ in range(100) for token in message(40))]

    def programs(*prompts: list[int]) -> int:
        e.runner.calls.clear()
        for prompt in prompts:
            e.submit(request(prompt, 1))
        run(e)
        return len(e.runner.calls)

    # The first message has programs of its own; on a CPU a chunk that would be half empty is several.
    allowed = -(-len(text) // chunk) + (8 if platform == "cpu" else 3)
    assert programs(text) <= allowed
    assert programs([*text, *message(40), *message(40)]) <= (6 if platform == "cpu" else 3)
    # The next turns of eight chats: what is new of all of them, in as many programs as one of them takes.
    turns = [[*text, *message(20)] for _ in range(8)]
    assert programs(*turns) <= (3 if shares else 24)


@pytest.mark.parametrize("aligned", [False, True])
def test_the_next_turn_prefills_what_is_new_where_the_thoughts_of_the_last_one_are_dropped(aligned):
    rng, marker, ended = random.Random(1), 1, 0
    header, thinks = [marker, 2], [3, 3]

    def message(length: int) -> list[int]:
        return [marker, *(rng.randrange(4, VOCAB) for _ in range(length))]

    e = engine(capacity=8192, prefix_bytes=10**8, markers=frozenset([marker]), cut_spacing=(16, 256))
    e.runner.settings = Settings(8, aligned)
    text = [*message(300), *message(40)]
    for _ in range(20):
        e.submit(r := request([*text, *header, *thinks], 5))
        run(e)
        assert r.cached == ended, "the end of the last turn's messages is not known"
        ended = len(text)
        text += [*header, *message(30)[1:], *message(rng.choice([20, 60, 400]))]


def test_aborted_requests_leave_the_queue_without_a_look_at_the_others(monkeypatch):
    e, count, seen = engine(slots=1), 3000, []
    entry = turns._entry
    monkeypatch.setattr(turns, "_entry", lambda request: (seen.append(request), entry(request))[1])
    waiting = [request([1, 2, 3], priority=i % 5) for i in range(count)]
    for r in waiting:
        e.submit(r)
    random.Random(0).shuffle(waiting)
    for i, r in enumerate(waiting[:-1]):
        e.abort(r)
        assert e.waiting == len(list(e._waiting)) == count - i - 1
    assert len(seen) <= 4 * count
    run(e)
    assert waiting[-1].tokens == expected([1, 2, 3], 10)


def test_prompts_with_a_long_beginning_in_common_hit_it_from_the_third_on():
    """Examples and a question, without messages between them, and more messages than there are cuts."""
    rng, marker = random.Random(2), 1
    for opens in (0, marker):
        e = engine(capacity=8192, prefix_bytes=10**8, markers=frozenset([marker]), cut_spacing=(512, 4096))
        examples = [marker, *(rng.randrange(4, VOCAB) if i % 40 else opens for i in range(1, 3000))]
        cached = []
        for _ in range(5):
            question = [*(rng.randrange(4, VOCAB) for _ in range(60)), opens, 5]
            e.submit(r := request([*examples, *question], 5))
            run(e)
            assert r.tokens == expected(r.prompt, 5)
            cached.append(r.cached)
        assert cached[0] == 0
        assert cached[1] <= 40
        assert all(n == len(examples) // BLOCK * BLOCK for n in cached[2:])


def test_a_prompt_gets_no_cut_of_its_own_in_the_reproducible_mode():
    rng = random.Random(3)
    e = engine(prefix_bytes=10**7, markers=frozenset([1]), prefill_sizes=(4, 100), max_num_batched_tokens=100)
    e.runner.settings = Settings(8, aligned=True)
    examples = [1, *(rng.randrange(3, VOCAB) for _ in range(900))]
    chunks = []
    for last in range(4, 9):
        e.runner.log.clear()
        e.submit(request([*examples, last, 3], 5))
        run(e)
        chunks.append([entry[2] for entry in e.runner.log if entry[0] == "prefill"])
    assert chunks == [chunks[0]] * 5

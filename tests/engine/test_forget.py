"""What an engine does where weights change under its requests, and in a pause."""

import random

import pytest

from dflash_jax.engine.request import NO_SLOT, Request
from dflash_jax.sampling_params import SamplingParams
from tests.engine.mock_runner import engine, expected, request, run

# Prompts whose texts do not end by themselves.
LONG = [[i] * 9 for i in range(1, 50) if len(expected([i] * 9, 100)) == 100]


def finished(events):
    return {event.request: event.finish_reason for event in events if event.finish_reason}


@pytest.mark.parametrize("pages", [None, 40])
@pytest.mark.parametrize("seed", range(12))
def test_requests_go_on_after_their_tokens_whenever_all_is_forgotten(seed, pages):
    rng = random.Random(seed)
    eng = engine(slots=4, seed=seed, pages=pages, prefix_bytes=10**6)
    system, requests, events = list(range(1, 30)), [], []
    for step in range(200):
        if rng.random() < 0.2 and len(requests) < 20:
            prompt = rng.choice([[], system]) + [rng.randrange(1, 50) for _ in range(rng.choice([1, 5, 40]))]
            requests.append(request(prompt, rng.choice([1, 8, 60])))
            eng.submit(requests[-1])
        if rng.random() < 0.15:
            eng.version = str(step)
            eng.forget()
            # Nothing is left in any cache.
            assert (eng.running, eng.usage) == (0, 0.0)
        if rng.random() < 0.05:
            eng.is_paused = True
            eng.release_caches()
            assert not eng.has_caches
            events += run(eng)
            eng.restore_caches()
            eng.is_paused = False
        if eng.has_work:
            events += eng.step()
    events += run(eng)
    assert len(finished(events)) == len(requests)
    for each in requests:
        assert each.tokens == expected(each.prompt, each.params.max_tokens), each.prompt
        told = [token for event in events if event.request is each for token in event.tokens]
        assert told == each.tokens


def test_the_events_of_tokens_have_the_version_that_drew_them():
    eng = engine()
    one = request(LONG[0], 100)
    eng.submit(one)
    before = [event for _ in range(3) for event in eng.step()]
    eng.forget()
    held = len(one.tokens)
    eng.version = "second"
    after = run(eng)
    told = [(event.version, len(event.tokens)) for event in before + after if event.tokens]
    assert sum(count for version, count in told if version == "default") <= held
    assert {version for version, _ in told} == {"default", "second"}


def test_a_prompt_that_is_scored_is_not_read_again():
    eng = engine()
    one = Request([1, 2, 3, 4, 5], SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0), ())
    eng.submit(one)
    while not (one.is_read and one.slot != NO_SLOT and one in eng._scheduler.requests):
        eng.step()
    calls = len(eng.runner.log)
    eng.forget()
    assert finished(run(eng)) == {one: "length"}
    assert len(one.prompt_entries) == 4
    assert len(eng.runner.log) == calls


def test_a_pause_keeps_requests_and_starts_nothing():
    eng = engine()
    one, two = (request(prompt, 100) for prompt in LONG[:2])
    eng.submit(one)
    eng.submit(two)
    events = eng.step() + eng.step() + eng.step()
    eng.is_paused = True
    events += run(eng)
    known = len(one.tokens)
    three = request([7], 3)
    eng.submit(three)
    assert not eng.has_work
    assert (len(one.tokens), eng.unfinished) == (known, 3)
    eng.abort(two)
    assert finished(run(eng)) == {two: "abort"}
    eng.is_paused = False
    run(eng)
    assert one.tokens == expected(LONG[0], 100)
    assert three.tokens == expected([7], 3)


def test_a_failure_while_all_is_forgotten_ends_the_requests():
    eng = engine()
    one = request(LONG[0], 100)
    eng.submit(one)
    eng.step()
    eng.runner.fail = True
    eng.step()
    eng.runner.set_tables = lambda *_: 1 / 0
    eng.runner.read = lambda *_: 1 / 0
    eng.forget()
    assert finished(run(eng)) in ({one: "error"}, {})
    assert eng.failure is not None
    assert one.finish_reason == "error"

"""The leader's calls of a runner, which a follower makes, too: from the messages it gets the same arrays."""

import gc
import random
from contextlib import nullcontext
from dataclasses import replace

import jax
import numpy as np
import pytest

from dflash_jax.decoding.prefill import MediaChunk
from dflash_jax.decoding.state import Settings
from dflash_jax.decoding.widths import BINS, LENGTHS
from dflash_jax.engine import lead, model_runner
from dflash_jax.engine.config import Speculation
from dflash_jax.engine.dispatch import Dispatch
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.executables import Executables
from dflash_jax.engine.lead import CODEC, Follower, Leader, LeadingRunner
from dflash_jax.engine.media import empty_chunk
from dflash_jax.engine.model_runner import ModelRunner
from dflash_jax.engine.request import Request
from dflash_jax.engine.token_rules import Rules, TokenRules
from dflash_jax.errors import EngineError
from dflash_jax.sampling_params import SamplingParams
from tests import tiny
from tests.engine.load import CAPACITY, alone, engine_for, some_requests, under_load
from tools.token_runs import Remembering


class FailedError(Exception):
    """In place of the end of all processes."""


class Tape:
    """A group without processes: a leader's messages, for a follower later on."""

    def __init__(self, messages=()):
        self.messages = list(messages)
        self._left = iter(self.messages)

    def send(self, message):
        self.messages.append(message)

    def next(self):
        return next(self._left, None)

    def turn(self):
        return nullcontext()

    def fail(self, reason):
        raise FailedError(reason)


def follow(tape, *programs) -> Follower:
    follower = Follower(Tape(tape.messages), programs)
    follower.run()
    return follower


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.fixture(scope="module")
def pair():
    """(target, executables with a drafter, requests, what each gives alone)."""
    target = tiny.target("da", moe="1")
    wanted = some_requests(0, 20, tiny.VOCAB)
    expected = alone(engine_for(Executables(target, None), (1,), slots=4, prefix_bytes=0), wanted)
    drafter = Remembering.of(tiny.drafter(target), [r for r, _ in expected], wide=8, capacity=CAPACITY)
    with pytest.MonkeyPatch.context() as patch:
        # Each costs seconds to compile.
        patch.setattr(model_runner, "BATCH_SIZES", (4,))
        yield target, Executables(target, drafter), wanted, expected


def leading_engine(leader: Leader, programs: Executables, **options) -> Engine:
    """The engine of `engine_for` on a runner whose calls are sent."""
    plain = engine_for(programs, slots=4, **options)
    runner = leader.runner(programs, 4, CAPACITY, plain.runner.settings, plain.runner.pages)
    return Engine(runner, plain.config, plain.policy)


def test_a_follower_gets_the_leaders_arrays_under_load(pair):
    """Prefixes in both tiers, masks, scores, aborts, windows, drafts of all sizes."""
    target, programs, wanted, expected = pair
    tape, rng = Tape(), random.Random(0)
    leader = Leader(tape, (programs,))
    engine = leading_engine(leader, programs, prefix_bytes=300_000, prefix_host_bytes=10**7)

    def choose(batch_size, acceptances, allowed=engine.config.speculations, *_):
        return rng.choice(allowed)

    engine.policy.choose = choose
    under_load(engine, target, wanted, expected, 40, seed=1)
    for i in range(4):
        engine.submit(Request(**wanted[i], mask=TokenRules(Rules(min_tokens=3, stop_ids=(5,)), tiny.VOCAB)))
        engine.submit(Request(**wanted[i] | {"params": replace(wanted[i]["params"], prompt_logprobs=2)}))
    while engine.has_work:
        engine.step()
    assert engine.prefix_cache.tiers.host.hits
    follower = follow(tape, programs)
    methods = {CODEC.decode(message)[3] for message in tape.messages}
    assert methods >= lead.METHODS - {"recompute", "reset", "next_token_scores"}
    (runner,) = (x for x in follower._kept.values() if isinstance(x, ModelRunner))
    assert_equal(engine.runner.state, runner.state)


def test_the_rest_of_the_calls(pair):
    _, programs, wanted, _ = pair
    tape = Tape()
    leader = Leader(tape, (programs, programs))
    runner = leader.runner(programs, 2, CAPACITY, Settings(1, top_logprobs=0))
    request = Request(list(range(2, 20)), wanted[0]["params"])
    runner.admit(1, request)
    size, dtype = runner.embedding
    embeddings, is_media, positions = empty_chunk(8, size, dtype)
    embeddings[0, 2:5], is_media[0, 2:5] = 0.5, True
    runner.prefill([1], [8], 8, media=MediaChunk(embeddings, is_media, positions))
    runner.wait(runner.recompute(1, 3))
    scores = runner.next_token_scores()
    assert np.isfinite(scores[0][1]).all()
    follower = follow(tape, programs, programs)
    assert_equal(runner.state, follower._kept[runner._handle.number].state)
    runner.reset()
    assert_equal(runner.state, follow(tape, programs, programs)._kept[runner._handle.number].state)


def test_followers_keep_what_the_leader_keeps(pair):
    _, programs, _, _ = pair
    tape = Tape()
    leader = Leader(tape, (programs,))
    runner = leader.runner(programs, 2, CAPACITY, Settings(1, top_logprobs=0))
    first, second = runner.snapshot(0), runner.save([0, 1], False)
    leaves = jax.tree.leaves([first, second])
    assert len(leaves) == len(jax.tree.leaves([first.arrays, second.arrays]))
    assert runner.bytes([first]) == ModelRunner.bytes(runner, first.arrays)
    numbers = [x.handle.number for x in (first, second)]
    # Another view of the same arrays.
    copy = jax.tree.map(lambda x: x, second)
    del first, second
    runner.reset()
    assert set(follow(tape, programs)._kept) == {runner._handle.number, numbers[1]}
    del copy
    runner.reset()
    assert set(follow(tape, programs)._kept) == {runner._handle.number}
    last = runner._handle.number
    del runner
    gc.collect()
    other = leader.runner(programs, 1, CAPACITY, Settings(1, top_logprobs=0))
    assert last not in follow(tape, programs)._kept
    assert other.slots == 1


def test_a_failure_of_the_leader_ends_all(pair, monkeypatch):
    _, programs, _, _ = pair
    leader = Leader(Tape(), (programs,))
    runner = leader.runner(programs, 2, CAPACITY, Settings(1, top_logprobs=0))

    def fail(*_):
        raise RuntimeError("out of memory")

    for method, args in (("snapshot", (0,)), ("wait", (0,)), ("read", (0, False)), ("read_scores", (0,))):
        monkeypatch.setattr(ModelRunner, method, fail)
        with pytest.raises(FailedError, match="RuntimeError: out of memory"):
            getattr(runner, method)(*args)


def test_an_interrupt_while_a_message_is_sent_ends_all(pair, monkeypatch):
    """The followers may have a part of it."""
    _, programs, _, _ = pair
    tape = Tape()
    runner = Leader(tape, (programs,)).runner(programs, 2, CAPACITY, Settings(1, top_logprobs=0))

    def interrupted(message):
        raise KeyboardInterrupt

    monkeypatch.setattr(tape, "send", interrupted)
    with pytest.raises(FailedError, match="KeyboardInterrupt"):
        runner.reset()


def test_a_message_that_cannot_be_sent_changes_nothing(pair, monkeypatch):
    _, programs, _, _ = pair
    tape = Tape()
    runner = Leader(tape, (programs,)).runner(programs, 2, CAPACITY, Settings(1, top_logprobs=0))
    kept = runner.snapshot(0)
    number = kept.handle.number
    del kept
    with pytest.raises(TypeError, match="a value of type int64 cannot be sent"):
        runner.save([np.int64(0)], False)
    with monkeypatch.context() as small:
        small.setattr(lead, "MAX_CALL", 9)
        with pytest.raises(EngineError, match=r"save: a message of \d+ bytes; the most is 9"):
            runner.save([0, 1], False)
    runner.reset()
    assert number not in follow(tape, programs)._kept


def test_an_error_of_a_followers_device_ends_all(pair, monkeypatch):
    """It is raised where the result is waited for, which only the leader does."""
    _, programs, _, _ = pair
    tape = Tape()
    runner = Leader(tape, (programs,)).runner(programs, 2, CAPACITY, Settings(1, top_logprobs=0))
    runner.prefill([1], [8], 8)
    reasons = []

    class Failing:
        def block_until_ready(self):
            raise RuntimeError("the device is gone")

    class Followed(Tape):
        def fail(self, reason):
            reasons.append(reason)

    monkeypatch.setattr(ModelRunner, "prefill", lambda *_: (Failing(), [0]))
    Follower(Followed(tape.messages), (programs,)).run()
    assert reasons == ["RuntimeError: the device is gone"]


def test_what_makes_other_programs_has_another_fingerprint(pair, monkeypatch):
    target, programs, _, _ = pair
    same = lead.fingerprint([programs])
    assert lead.fingerprint([Executables(*programs.pair)]) == same
    others = [lead.fingerprint([Executables(target, None)])]
    changes = (
        (programs, "compiler_options", {"xla_cpu_enable_fast_math": True}),
        (target, "config", replace(target.config, norm_eps=0.1)),
        (target, "backend", replace(target.backend, kernels="other")),
    )
    for one, name, value in changes:
        with monkeypatch.context() as changed:
            changed.setattr(one, name, value)
            others.append(lead.fingerprint([programs]))
    assert len({same, *others}) == len(others) + 1
    # Not the words of a reason.
    monkeypatch.setattr(target, "backend", replace(target.backend, no_triton="another reason"))
    assert lead.fingerprint([programs]) == same


def test_a_runner_of_another_turn_or_model_is_refused(pair):
    _, programs, _, _ = pair
    leader = Leader(Tape(), (programs,))
    runner = leader.runner(programs, 2, CAPACITY, Settings(1, top_logprobs=0))
    leader.close()
    with pytest.raises(EngineError, match="a turn that is over"):
        runner.snapshot(0)
    with pytest.raises(EngineError, match="do not have this model"):
        leader.runner(Executables(*programs.pair), 2, CAPACITY, Settings(1))


WRONG = {
    "a gap": ((3, (), 0, "begin", ("x",)), "call 3 follows call 0"),
    "another model": ((1, (), 0, "begin", ("x",)), "not the leader's"),
    "no method": ((1, (), 0, "on", ()), "on is no call of a runner"),
    "a private method": ((1, (), 0, "__init__", ()), "__init__ is no call"),
    "no runner": ((1, (), 7, "reset", ()), "KeyError"),
    "no such arrays": ((1, (8,), 0, "begin", ()), "KeyError"),
    "no programs": ((1, (), 0, "new", (5, 1, 8, Settings())), "IndexError"),
    "no message": (7, "TypeError"),
}


@pytest.mark.parametrize(("message", "reason"), WRONG.values(), ids=WRONG)
def test_a_wrong_message_ends_all(pair, message, reason):
    _, programs, _, _ = pair
    with pytest.raises(FailedError, match=reason):
        follow(Tape([CODEC.encode(message)]), programs)


def test_bytes_that_are_no_message_end_all(pair):
    with pytest.raises(FailedError, match="DecodingError"):
        follow(Tape([b"garbage"]), pair[1])


def test_every_call_that_starts_a_program_is_sent():
    """Those of the runner that are not sent start none, or only read."""
    local = {
        "on",
        "admit",
        "decode_masked",
        "propose_next",
        "batch_sizes",
        "masked_batch_sizes",
        "allow",
        "mark_failed",
        "has_failed",
    }
    # An engine of several processes does not release its memory.
    local |= {"release"}
    local |= {"can_run", "decode_sizes", "first_slots", "is_compiled", "shard", "largest_shard", "bytes"}
    public = {name for name, x in vars(ModelRunner).items() if callable(x) and not name.startswith("_")}
    assert public - local == lead.METHODS | set(lead.WAITS)
    assert public - local <= set(vars(LeadingRunner))


def test_messages_are_small(pair):
    """Full batches go in a few bytes a slot."""
    dispatch = Dispatch(tuple(range(256)), (16,) * 256, 8, Speculation(16), 256)
    assert len(CODEC.encode((2**40, (), 1, "decode", (dispatch,)))) < 256 * 2 * 8 + 120
    rates = np.ones((LENGTHS, 15, BINS), np.float32)
    priced = replace(dispatch, prices=(0.1,) * 256, rates=rates)
    assert len(CODEC.encode((2**40, (), 1, "decode", (priced,)))) < 256 * 3 * 9 + rates.nbytes + 120
    assert CODEC.decode(CODEC.encode(priced)) == priced
    np.testing.assert_array_equal(CODEC.decode(CODEC.encode(priced)).rates, rates)
    params = SamplingParams(temperature=0.0, top_p=1.0, min_p=0.0, seed=0, repetition_penalty=1.0)
    tape = Tape()
    runner = Leader(tape, (pair[1],)).runner(pair[1], 1, CAPACITY, Settings(1, top_logprobs=0))
    runner.admit(0, Request([1, 2, 3], replace(params, max_tokens=3)))
    assert len(tape.messages[-1]) < 4 * CAPACITY + 10_000

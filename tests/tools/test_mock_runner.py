"""The mock device: its times, its texts, and the engine on it."""

import asyncio

import numpy as np
import pytest

from dflash_jax.decoding.sampling import NOTHING_ALLOWED
from dflash_jax.engine.config import EngineConfig, Speculation, speculations_of
from dflash_jax.engine.dispatch import Dispatch
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.request import ReadyMasks, Request
from dflash_jax.engine.service import AsyncEngine
from dflash_jax.engine.warm_up_tasks import AllAllowed
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.sampling_params import SamplingParams
from tools.mock_runner import PERIOD, FakeClock, MockRunner, Scripts

STREAMS, NEW = 8, 203
ROUNDS = Dispatch((0, 1), (8, 8), 3, Speculation(8), 2)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(TINY / "target")


def request(seed: int, new: int = NEW, **options) -> Request:
    return Request([1, 2, 3], SamplingParams(max_tokens=new, temperature=0.0, seed=seed), **options)


def runner(**options) -> MockRunner:
    return MockRunner(STREAMS, 1024, clock=FakeClock(), **options)


def admitted(**options) -> MockRunner:
    made = runner(**options)
    for slot in ROUNDS.slots:
        made.admit(slot, request(slot))
    return made


def engine() -> Engine:
    return Engine(runner(), EngineConfig(speculations_of((8,)), masks=True))


def test_a_dispatch_starts_when_the_one_before_is_done():
    device = admitted()
    first, second = device.decode(ROUNDS), device.decode(ROUNDS)
    device.read(second, False)
    assert device.clock == second[0] == pytest.approx(2 * 3 * device.round_s)
    assert first[0] == pytest.approx(3 * device.round_s)
    assert device.gaps == [0.0, 0.0]


def test_a_device_without_work_counts_the_time_until_the_next():
    device = admitted()
    device.read(device.decode(ROUNDS), False)
    device.time.wait_until(device.clock + 0.25)
    began = device.clock
    device.wait(device.prefill([2], [5], 16))
    assert device.clock - began == pytest.approx(16 * device.prefill_s)
    assert device.gaps == [0.0, pytest.approx(0.25)]


def test_a_round_yields_its_tokens_until_the_request_has_all():
    device = admitted()
    device.admit(1, request(1, 6))
    outcome = device.read(device.decode(ROUNDS), False)
    assert outcome.tokens == [device.text(0, 0, 12), device.text(1, 0, 6)]
    assert outcome.yielded == [[4, 4, 4], [4, 2]]
    assert outcome.done == [False, True]
    assert device.text(0, PERIOD, 9) == device.text(0, 0, 9)


class Forbids(ReadyMasks):
    """One token is forbidden at each place; or all are."""

    def __init__(self, token: int | None):
        self.token = token

    def take(self, tokens):
        assert self.token not in tokens

    def masks(self, drafts):
        if self.token is None:
            return np.zeros((len(drafts) + 1, 2), np.uint32)
        row = np.full(2, 0xFFFFFFFF, np.uint32)
        row[self.token // 32] -= 1 << self.token % 32
        return np.tile(row, (len(drafts) + 1, 1))


def test_a_round_with_masks_ends_where_a_draft_is_forbidden():
    device = admitted()
    forbidden = device.text(0, 2, 1)[0]
    masks = AllAllowed(2)
    blocks = masks.ask(device.read_blocks(device.propose(ROUNDS)))
    allowed, is_late = masks.answer(lambda: True)
    allowed = allowed.copy()
    allowed[0] = Forbids(forbidden).masks([0] * 7)
    first, second = device.drawn(ROUNDS, blocks, allowed, is_late)
    assert first == ([*device.text(0, 0, 2), 0], [3], False)
    assert second == (device.text(1, 0, 4), [4], False)


def test_a_round_whose_mask_is_late_is_skipped_and_one_that_allows_nothing_is_a_fault():
    device = admitted()
    nothing = np.zeros((2, 8, 2), np.uint32)
    first, second = device.drawn(ROUNDS, device.read_blocks(device.propose(ROUNDS)), nothing, np.array([False, True]))
    assert first == ([NOTHING_ALLOWED], [1], True)
    assert second == ([], [], False)


def texts_of(engine: Engine, requests: list[Request]) -> list[list[int]]:
    for each in requests:
        engine.submit(each)
    while engine.has_work:
        engine.step()
    return [each.tokens for each in requests]


def test_the_engine_gives_each_request_its_own_text_and_the_same_again():
    found = []
    for _ in range(2):
        e = engine()
        requests = [request(seed, NEW + seed) for seed in range(3 * STREAMS)]
        texts = texts_of(e, requests)
        assert texts == [e.runner.text(seed, 0, NEW + seed) for seed in range(3 * STREAMS)]
        found.append((e.runner.clock, dict(e.statistics.dispatches), e.policy.seconds))
    assert found[0] == found[1]
    # The policy has found out that drafting pays.
    assert max(e.statistics.dispatches, key=e.statistics.dispatches.__getitem__)[1] == Speculation(8)
    assert e.policy.seconds[STREAMS, Speculation(8)] == pytest.approx(e.runner.round_s)


def test_the_engine_gives_requests_with_masks_their_texts_without_the_forbidden_token():
    e = engine()
    texts = texts_of(e, [request(seed, mask=Forbids(7)) for seed in range(STREAMS)])
    for seed, text in enumerate(texts):
        assert text == [0 if token == 7 else token for token in e.runner.text(seed, 0, NEW)]
    assert e.statistics.new_tokens / e.statistics.rounds.total() > 3


def test_tokens_reach_a_stream_whole():
    e = engine()

    async def stream():
        async with AsyncEngine(e) as running:
            return [event async for event in running.submit(request(5))]

    events = asyncio.run(stream())
    assert [token for event in events for token in event.tokens] == e.runner.text(5, 0, NEW)
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]


def test_a_script_says_its_turns_one_after_the_other(tokenizer):
    turns = ["A.\n</think>\n\n<tool_call>1</tool_call>", "B.\n</think>\n\nThoughts: {thoughts}."]
    scripts, ask = Scripts(tokenizer, {"Session: x.": turns}), "<|im_start|>assistant\n<think>\n"
    first = "<|im_start|>assistant\n<|im_end|>\n<tools>\n<|im_start|>user\nSession: x.<|im_end|>\n"
    said = f"{first}{ask}{turns[0]}<|im_end|>\n"

    def answered(prompt: str) -> str:
        return tokenizer.decode(scripts.answer(tokenizer.encode(prompt)), skip_special_tokens=False)

    assert answered(first + ask) == f"{turns[0]}<|im_end|>"
    assert answered(said + ask) == "B.\n</think>\n\nThoughts: 1.<|im_end|>"
    assert "no turn 4" in answered(f"{said}{said}{ask}")
    # Without a thought.
    assert answered(f"{said}{ask}\n</think>\n\n") == "Thoughts: 1.<|im_end|>"
    # A summary, with tools or without, tells how many turns there were.
    asked = f"{said}<|im_start|>user\nA summary, please.<|im_end|>\n{ask}"
    summary = answered(said.replace("<tools>", "") + ask)
    assert summary == answered(asked) == "Well.\n</think>\n\nSession: x. Turns: 1.<|im_end|>"
    user = f"<tools>\n<|im_start|>user\nThe summary: {summary.partition('</think>')[2]}\n"
    assert answered(user + ask).startswith("B.")
    assert "no script" in answered(ask)


def test_a_device_says_a_text_of_its_own_and_ends_with_it():
    device = runner(answer=lambda prompt: list(range(2, 9)))
    for slot in ROUNDS.slots:
        device.admit(slot, request(slot, 5 if slot else NEW))
    outcome = device.read(device.decode(ROUNDS), False)
    assert outcome.tokens == [[2, 3, 4, 5, 6, 7, 8], [2, 3, 4, 5, 6]]
    assert outcome.done == [True, True]
    assert device.following(device.rows[0], 2) == [8, 8]

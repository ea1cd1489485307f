"""The bundled target with its MTP head and its DFlash drafter, on text that neither was trained on."""

import json
import shutil
from collections import Counter

import jax
import jsonschema_rs
import numpy as np
import pytest

from dflash_jax import LLM, SamplingParams
from dflash_jax.engine import model_runner
from dflash_jax.engine.acceptance import Calibration
from dflash_jax.engine.config import NO_DRAFTER, Speculation
from dflash_jax.engine.draft_length import DraftLengthPolicy
from dflash_jax.engine.model_size import weigh
from dflash_jax.engine.request import ReadyMasks, Request
from dflash_jax.engine.service import AsyncEngine
from dflash_jax.frontend.compare import divergence
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.models.packing import unpack_weights
from dflash_jax.server.engine_host import in_process
from dflash_jax.server.serving import Serving
from dflash_jax.training.corpus import standard_library
from dflash_jax.training.evaluation import acceptance, held_out_prompts
from tests.mtp_context import assert_contexts
from tests.server.conftest import SCHEMA, Running, hosted

HEAD, DRAFTER = Speculation(4, 0), Speculation(4, 1)
HEAD_ALONE, DRAFTER_ALONE = HEAD._replace(is_alone=True), DRAFTER._replace(is_alone=True)
PARAMS = {t: SamplingParams(temperature=t, max_tokens=96, seed=1) for t in (0.0, 0.7)}


@pytest.fixture(scope="module")
def llm():
    return LLM(draft=["mtp", TINY / "draft"], max_block_size=4, slots=4, prefix_bytes=0)


@pytest.fixture(scope="module")
def prompts(llm):
    """Parts of eight files of the standard library that are held out of all training."""
    documents = [d for d in standard_library()[1] if len(d.text) > 2000][:8]
    return [held_out_prompts([llm.encode(d.text[:2000])], 64, 1)[0] for d in documents]


@pytest.fixture(scope="module")
def plain(llm, prompts):
    return {t: [c.token_ids for c in llm.generate(prompts, params, 1)] for t, params in PARAMS.items()}


@pytest.fixture
def rounds(monkeypatch):
    """Every dispatch has the next of these rounds."""
    chosen = []

    def choose(self, batch_size, acceptances, allowed=None, *_):
        chosen.append(chosen.pop(0))
        return chosen[-1]

    monkeypatch.setattr(DraftLengthPolicy, "choose", choose)
    return chosen


def check_texts(llm, prompts, completions, expected, temperature):
    """Equal, or parted at a tie."""
    for prompt, completion, tokens in zip(prompts, completions, expected, strict=True):
        parting = divergence(llm, prompt, tokens, completion.token_ids, PARAMS[temperature])
        assert parting is None or parting.is_tie


@pytest.mark.parametrize(("temperature", "floor"), [(0.0, 1.9), (0.7, 1.6)])
def test_the_head_drafts_unseen_text(llm, prompts, plain, rounds, temperature, floor):
    """Measured: see benchmarks/cpu.md. A head that is wired wrongly accepts next to nothing."""
    rounds.append(HEAD)
    completions = llm.generate(prompts, PARAMS[temperature], "auto")
    check_texts(llm, prompts, completions, plain[temperature], temperature)
    measured = acceptance(completions, keep_all=True)
    assert measured.rounds > 100
    assert measured.mean > floor


def test_texts_are_plain_decodings_whichever_drafter_a_dispatch_has(llm, prompts, plain, rounds):
    """Contexts are compared in tests/engine/test_two_drafters.py."""
    rounds[:] = [HEAD, DRAFTER, HEAD_ALONE, Speculation(1), DRAFTER, DRAFTER_ALONE]
    completions = llm.generate(prompts, PARAMS[0.0], "auto")
    check_texts(llm, prompts, completions, plain[0.0], 0.0)
    assert llm.drafting_method == "NEXTN,DFLASH"
    assert llm.draft_places == llm.engine.config.draft_places == {"mtp": 3, "draft": 3}
    rounds = llm.engine.statistics.rounds
    assert rounds.by_drafter().keys() == {"mtp", "draft"}
    assert rounds.accepted_tokens == llm.engine.statistics.new_tokens - rounds.total()


def test_a_drafter_without_drafts_leaves_the_others_their_names(prompts, rounds, tmp_path):
    shutil.copytree(TINY / "draft", tmp_path / "one")
    raw = json.loads((tmp_path / "one" / "config.json").read_text())
    (tmp_path / "one" / "config.json").write_text(json.dumps(raw | {"block_size": 1}))
    llm = LLM(draft=[tmp_path / "one", TINY / "draft"], max_block_size=4, slots=4, prefix_bytes=0)
    rounds.append(DRAFTER_ALONE)
    llm.generate(prompts[:1], SamplingParams(temperature=0, max_tokens=8), "auto")
    assert llm.draft_places == llm.engine.config.draft_places == {"draft": 3}
    assert llm.engine.statistics.rounds.by_drafter().keys() == {"draft"}


@pytest.mark.parametrize("temperature", PARAMS)
def test_drafts_that_are_not_worth_it_are_not_verified(llm, prompts, plain, rounds, monkeypatch, temperature):
    """The price is forced; one request has a fixed block size, and all of its drafts are verified."""
    rounds[:] = [HEAD, DRAFTER]
    choose, verified = DraftLengthPolicy.widths, {"auto": [], 3: []}
    monkeypatch.setattr(DraftLengthPolicy, "widths", lambda self, *key: (choose(self, *key)[0], 0.4))
    engine, params = llm.new_engine(llm.programs, 4, 256), llm.defaults.fill(PARAMS[temperature])
    assert engine.runner.settings.has_widths
    requests = [
        Request(prompt, params, block_size=size) for prompt, size in zip(prompts, ["auto", 3, "auto"], strict=False)
    ]
    for request in requests:
        engine.submit(request)
    measure = engine._measure

    def seen(ticket, outcome, done):
        measure(ticket, outcome, done)
        for request, widths, yielded in zip(ticket.batch, outcome.verified, outcome.yielded, strict=True):
            assert all(n <= width for n, width in zip(yielded, widths, strict=True))
            verified[request.block_size] += widths

    monkeypatch.setattr(engine, "_measure", seen)
    while engine.has_work:
        engine.step()
    for request, prompt, tokens in zip(requests, prompts, plain[temperature], strict=False):
        parting = divergence(llm, prompt, tokens, request.tokens, PARAMS[temperature])
        assert parting is None or parting.is_tie
    assert {*verified[3]} == {3}
    assert {*verified["auto"]} == {1, 2, 3, 4}
    assert engine.statistics.rounds.draft_tokens == sum(n - 1 for widths in verified.values() for n in widths)
    # What was learned is not what drafters say of themselves.
    for i, record in engine.policy.drafters.items():
        rates = record.calibration.rates(3)
        assert np.abs(rates - Calibration(3).rates(3)).max() > 0.05, i


@pytest.mark.parametrize("options", [{"reproducible": True}, {"block_size": 4}], ids=str)
def test_whole_blocks_are_verified_where_the_block_size_is_fixed(options):
    fixed = LLM(draft=TINY / "draft", max_block_size=4, slots=1, prefix_bytes=0, **options)
    engine = fixed.new_engine(fixed.programs, 1, 64)
    assert not engine.runner.settings.has_widths


@pytest.mark.parametrize("speculation", [HEAD, DRAFTER])
def test_predicted_costs_have_the_context_of_the_other_drafter(llm, speculation):
    """However the weights are packed on this machine."""
    predict = llm._new_policy(llm.programs)._predict
    assert predict(1, speculation) > predict(1, speculation._replace(is_alone=True))


def test_experts_are_weighed_however_they_are_packed(llm):
    found = weigh(llm.target, llm.target.layout)
    plain = weigh(unpack_weights(llm.target), llm.target.layout)
    # Two bytes an element where the values are those of bfloat16.
    assert found.expert in (plain.expert, plain.expert / 2)
    assert found.read(1) < found.read(8)


class NotAgain(ReadyMasks):
    """Forbids the last few tokens, as a grammar does by all tokens before."""

    def __init__(self, vocab: int, count: int = 4):
        self._vocab, self._count, self._tokens = vocab, count, []

    def take(self, tokens):
        self._tokens += tokens

    def masks(self, drafts):
        allowed = np.ones((len(drafts) + 1, -(-self._vocab // 32) * 32), bool)
        for i, each in enumerate(allowed):
            # In the place of a draft that must not be accepted stands a negative number.
            each[[token for token in [*self._tokens, *drafts[:i]][-self._count :] if token >= 0]] = False
        return np.packbits(allowed, axis=1, bitorder="little").view(np.uint32)


def test_masked_texts_are_plain_decodings_and_drafters_of_one_block_size_share_programs(
    llm, prompts, plain, rounds, monkeypatch
):
    monkeypatch.setattr(model_runner, "BATCH_SIZES", (4,))
    params, vocab = llm.defaults.fill(PARAMS[0.0]), llm.config.vocab_size
    rounds.append(Speculation(1))
    engine, texts = llm.new_engine(llm.programs, 4, 256, masks=True), []
    for specs in ([Speculation(1)], [HEAD, DRAFTER, Speculation(1), DRAFTER]):
        rounds[:] = specs
        requests = [Request(prompt, params, mask=NotAgain(vocab)) for prompt in prompts[:4]]
        for request in requests:
            engine.submit(request)
        while engine.has_work:
            engine.step()
        texts.append([request.tokens for request in requests])
    assert texts[0] == texts[1]
    assert texts[0] != plain[0.0][:4]
    rounds_by_accepted = engine.statistics.rounds.histogram(3)
    assert sum(rounds_by_accepted[2:4]) > 10, "drafts were not accepted"
    compiled = Counter(key[0] for key in llm.programs.compiled)
    # Of plain rounds and of those of 4 tokens.
    assert (compiled["propose"], compiled["verify"], compiled["finish"]) == (3, 2, 2)
    state = jax.device_get(engine.runner.state)
    # At least the one that ended last has its pages still.
    assert_contexts(llm.target, llm.drafters, state)


def test_a_servers_grammar_gives_the_plain_text_with_both(llm, rounds, monkeypatch):
    monkeypatch.setattr(model_runner, "BATCH_SIZES", (4,))
    rounds.append(Speculation(1))
    engine = AsyncEngine(llm.new_engine(llm.programs, 4, 256, masks=True)).start()
    host = hosted(llm, engine, info={"model_path": "bundled"})
    serving = Serving(llm, in_process(host), ["tiny"])
    running, texts = Running(serving, host), []
    try:
        for specs in ([Speculation(1)], [HEAD, DRAFTER]):
            rounds[:] = specs
            answer = running.chat(
                model="tiny", max_tokens=96, temperature=0, chat_template_kwargs={"enable_thinking": False},
                response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
            )  # fmt: skip
            texts.append(answer["choices"][0]["message"]["content"])
    finally:
        running.stop()
        engine.stop()
    jsonschema_rs.validate(SCHEMA, json.loads(texts[0]))
    assert texts[0] == texts[1]
    assert max(yielded for _, _, yielded in engine.engine.statistics.rounds) > 1, "no draft was accepted"


def modelled_seconds(llm, prompts, costs: dict[Speculation, float]) -> tuple[float, list[list[int]]]:
    """Seconds of answers one after the other where rounds take ``costs``, which the engine has measured; the tokens."""
    policy = DraftLengthPolicy(tuple(costs), lambda batch_size, spec: costs[spec])
    engine = llm.new_engine(llm.programs, 1, 256, policy)
    runner, observe, spent, texts = engine.runner, policy.observe_seconds, 0.0, []
    # Else what is not compiled yet would be tried late, and the first choice stay.
    runner.is_compiled = lambda *_: True
    for spec, seconds in costs.items():
        for _ in range(3):
            observe(1, spec, seconds)
    policy.observe_seconds = lambda batch_size, spec, _, *more: observe(batch_size, spec, costs[spec], *more)
    decode, read = runner.decode, runner.read

    def counted(ticket, logprobs):
        nonlocal spent
        outcome = read(ticket[0], logprobs)
        spent += costs[ticket[1]] * max(map(len, outcome.yielded))
        return outcome

    runner.decode, runner.read = lambda dispatch: (decode(dispatch), dispatch.speculation), counted
    for prompt in prompts:
        request = Request(prompt, llm.defaults.fill(PARAMS[0.7]))
        engine.submit(request)
        while engine.has_work:
            engine.step()
        texts.append(request.tokens)
    return spent, texts


# Milliseconds of rounds of 2 and 4 with the head, and of 4 with the drafter; of a plain one 2.0.
@pytest.mark.long
@pytest.mark.parametrize(("head", "drafter"), [((2.2, 2.6), 3.4), ((2.8, 3.6), 2.6), ((2.3, 2.9), 2.9)])
def test_with_both_auto_is_as_fast_as_with_the_better_one(llm, prompts, head, drafter):
    plain = {NO_DRAFTER: 1.9, Speculation(1): 2.0}
    of_head, of_drafter = dict(zip((Speculation(2, 0), HEAD), head, strict=True)), {DRAFTER: drafter}
    both = {spec: (plain | of_head | of_drafter)[spec] for spec in (*plain, Speculation(2, 0), HEAD, DRAFTER)}
    (seconds, tokens), *alone = (
        modelled_seconds(llm, prompts, {spec: ms / 1000 for spec, ms in costs.items()})
        for costs in (both, plain | of_head, plain | of_drafter)
    )
    assert all(other == tokens for _, other in alone)
    assert seconds < 1.05 * min(other for other, _ in alone)

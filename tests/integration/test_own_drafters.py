"""A drafter of the caller's own: an object with the members of `Drafting`, beside the bundled target."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from dflash_jax import LLM, InputError, SamplingParams
from dflash_jax.checkpoint.load import load_drafter
from dflash_jax.engine.config import Speculation
from dflash_jax.engine.service import AsyncEngine
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.models.drafting import DrafterWrapper, Proposal
from dflash_jax.server.engine_host import in_process
from dflash_jax.server.serving import Serving
from tests.server.conftest import Running, hosted

BLOCK = 4
PROMPTS = ["def area(w, h):", "class Parser:", "import os", "x = 1", "for i in", "return", "# TODO"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Nonsense:
    """Drafts by what the context adds up to. It reads two layers, and its weights are in a dict and in a list."""

    weights: dict
    more: list

    @property
    def taps(self):
        return 0, 2

    def init_cache(self, slots, capacity, dtype, window):
        return jnp.zeros((slots, 3), jnp.float32), jnp.full((slots, capacity), -1, jnp.int32)

    def cache_specs(self, cache):
        return PartitionSpec("data"), PartitionSpec("data")

    def extend(self, cache, new):
        sums, known = cache
        assert new.features.shape[2] == len(self.taps)
        read = jnp.abs(new.features[..., :3]).sum(2) * self.weights["a.b.c"]
        places = jnp.where(new.valid, new.positions, known.shape[1])
        known = known.at[jnp.arange(len(known))[:, None], places].set(new.tokens, mode="drop")
        return sums + jnp.where(new.valid[..., None], read, 0).sum(1), known

    def propose(self, cache, last, start, block_sizes, size, heads, window):
        sums, known = cache
        vocab = heads.logits(heads.embed(last[:, None])).shape[-1]
        base = last + start + sums.sum(-1).astype(jnp.int32) + known.max(1)
        return Proposal((base[:, None] * self.more[0] + jnp.arange(size - 1)) % vocab)


def nonsense():
    return Nonsense({"a.b.c": jnp.ones(3)}, [jnp.asarray(7), {5: jnp.zeros(2)}])


@pytest.fixture(scope="module")
def llm():
    return LLM(draft=nonsense(), max_block_size=BLOCK, block_size=BLOCK, slots=4)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_of_a_batch_and_of_a_stream_are_plain_ones(llm, temperature):
    """More prompts than slots, so that slots have another context before."""
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=24, ignore_eos=True)
    plain = [c.token_ids for c in llm.generate(PROMPTS, params, 1)]
    drafted = llm.generate(PROMPTS, params, BLOCK)
    assert [c.token_ids for c in drafted] == plain
    assert all(len(c.acceptance_lengths) > 12 for c in drafted), "nonsense was accepted"
    text = "".join(llm.stream(PROMPTS[1], params))
    assert text == drafted[1].text
    assert (llm.largest_block, llm.drafting_method) == (BLOCK, "Nonsense")


def test_auto_begins_with_predicted_costs(llm):
    predict = llm._new_policy(llm.programs)._predict
    assert 0 < predict(1, Speculation(1, None)) <= predict(1, Speculation(1)) < predict(1, Speculation(BLOCK))


def test_a_server_of_that_llm_answers_with_the_plain_text(llm):
    engine = AsyncEngine(llm.new_engine(llm.programs, 4, 256)).start()
    host = hosted(llm, engine)
    serving = Serving(llm, in_process(host), ["tiny"])
    running = Running(serving, host)
    try:
        (plain,) = llm.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=24), 1)
        answer = running.post("/v1/completions", prompt=PROMPTS[0], temperature=0, max_tokens=24, block_size=BLOCK)
        assert answer.json()["choices"][0]["text"] == plain.text
        (drafter,) = answer.json()["usage"]["drafters"].items()
        assert drafter[0] == "Nonsense"
        assert drafter[1]["rounds"] == engine.engine.statistics.rounds.drafts > 12
    finally:
        running.stop()
        engine.stop()


class Whole(DrafterWrapper):
    """A DFlash drafter in another's hands."""


def test_with_drafter_takes_any_and_compiles_for_a_kind_once(llm):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    plain = llm.generate(PROMPTS[:1], params, 1)[0].token_ids
    wrapped = jax.tree_util.register_dataclass(Whole, ["drafter"], [])(load_drafter(TINY / "draft"))
    for drafter in (nonsense(), wrapped):
        others = [llm.with_drafter(drafter) for _ in range(2)]
        assert {tuple(each.generate(PROMPTS[:1], params, BLOCK)[0].token_ids) for each in others} == {tuple(plain)}
        assert others[0].programs.compiled is others[1].programs.compiled
        assert others[0].largest_block == BLOCK
        assert list(others[0].engine.config.draft_places) == [type(drafter).__name__]
    assert others[0].generate(PROMPTS[:1], params, BLOCK)[0].mean_acceptance_length > 1.2


class NoSpecs:
    taps = ()
    init_cache = extend = propose = lambda *_: ()


class NoTree(NoSpecs):
    cache_specs = NoSpecs.extend


class TooDeep(NoTree):
    taps = (0, 99)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        (NoSpecs, "which has cache_specs too"),
        (NoTree, "must be a pytree of arrays"),
        (TooDeep, r"taps target layers \[99\], the target's layers are 0 to"),
        (int, r"draft is .*0\]?: it must be"),
    ],
)
def test_what_is_no_drafter_is_refused_by_name(llm, kind, fault):
    with pytest.raises(InputError, match=fault):
        LLM(draft=kind())
    with pytest.raises(InputError, match=fault):
        llm.with_drafter(kind())
    with pytest.raises(InputError, match=fault):
        LLM(draft=["mtp", kind()])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Listed(Nonsense):
    """Has a field of the name that a `Drafter` has for something else."""

    vocabulary: int = 5


def test_costs_of_the_callers_code_are_on_no_record_and_its_fields_are_its_own(llm, tmp_path, monkeypatch):
    monkeypatch.setattr("dflash_jax.frontend.llm.cache_directory", lambda: tmp_path)
    other = llm.with_drafter(Listed(nonsense().weights, nonsense().more))
    for each in (llm, other, other.with_drafter(nonsense())):
        policy = each._new_policy(each.programs)
        for _ in range(3):
            policy.observe_seconds(1, Speculation(1), 0.01)
        policy.keep()
    assert not [*tmp_path.iterdir()]


def test_a_class_in_place_of_a_drafter_is_refused(llm):
    with pytest.raises(InputError, match=r"an object: Nonsense\(\.\.\.\)"):
        llm.with_drafter(Nonsense)


def test_an_llm_that_is_not_loaded_loads_when_it_is_used():
    params = SamplingParams(temperature=0, max_tokens=4)
    found = LLM.unloaded().with_drafter(nonsense()).generate(PROMPTS[:1], params, 1)
    assert found[0].token_ids == LLM.unloaded().generate(PROMPTS[:1], params, 1)[0].token_ids

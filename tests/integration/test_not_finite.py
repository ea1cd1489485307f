"""Logits that are no numbers, and masks that allow nothing, end their own request with an error."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_jax import LLM, SamplingParams
from dflash_jax.cli.generate import main
from dflash_jax.decoding.sampling import NOT_FINITE, NOTHING_ALLOWED, draw
from dflash_jax.decoding.sampling_state import SamplingState, sampling_mode
from dflash_jax.engine.request import ReadyMasks
from dflash_jax.errors import EngineError, InputError
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.frontend.sync_engine import SyncEngine

# One that the model does not write by itself.
POISON = 7
PARAMS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 3},
    "penalised": {"temperature": 0.0, "repetition_penalty": 1.2, "logit_bias": {5: 1.0}},
    "logprobs": {"temperature": 0.0, "logprobs": 2},
}
VOCAB = 70


def rows_of(**options) -> SamplingState:
    values = {name: jnp.full(1, value, jnp.float32) for name, value in options.items() if name != "top_k"}
    top_k = {"top_k": jnp.full(1, options["top_k"], jnp.int32)} if "top_k" in options else {}
    return replace(SamplingState.greedy(1, VOCAB), **values, **top_k)


@partial(jax.jit, static_argnames="top")
def drawn(logits, rows, positions, wants_logprobs=None, mask=None, top=0):
    """The tokens of `draw`, in one program for all options of sampling."""
    return draw(logits, rows, positions, sampling_mode(rows), mask=mask, wants_logprobs=wants_logprobs, top=top)[0]


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("where", ["one", "all"])
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 5}, {"temperature": 1.0, "top_p": 0.5}, {"presence": 1.0}],
    ids=str,
)
def test_a_draw_from_what_is_no_number(options, where, bad):
    """Not from one NaN among many logits either, which a filter might cut out."""
    logits, rows = np.random.default_rng(0).standard_normal((1, 3, VOCAB)).astype(np.float32), rows_of(**options)
    logits[0, 1, 40 if where == "one" else slice(None)] = bad
    positions = jnp.arange(3)[None]
    for wanted in (None, jnp.ones(1, bool)):
        tokens = drawn(jnp.asarray(logits), rows, positions, wanted, top=2)
        assert int(tokens[0, 1]) == NOT_FINITE
        assert (np.asarray(tokens)[0, [0, 2]] >= 0).all()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 5}], ids=str)
def test_a_draw_where_nothing_is_allowed(options):
    logits, rows = jnp.zeros((1, 2, VOCAB)), rows_of(**options)
    mask = jnp.asarray(np.array([[[0, 0, 0], [0, 1, 0]]], np.uint32))
    tokens = drawn(logits, rows, jnp.arange(2)[None], mask=mask)
    assert tokens.tolist() == [[NOTHING_ALLOWED, 32]]


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """The bundled target, in which one token is embedded as NaN."""
    path = tmp_path_factory.mktemp("poisoned")
    for file in (TINY / "target").iterdir():
        (path / file.name).symlink_to(file)
    (name,) = (TINY / "target").glob("*.safetensors")
    tensors = load_file(name)
    (embedding,) = (x for x in tensors if x.endswith("embed_tokens.weight"))
    tensors[embedding] = tensors[embedding].copy()
    tensors[embedding][POISON] = np.nan
    (path / name.name).unlink()
    save_file(tensors, path / name.name, metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def llm(poisoned):
    return LLM(poisoned, TINY / "draft", slots=4)


@pytest.fixture(scope="module")
def engine(llm):
    return SyncEngine(llm)


def ended(engine, llm, rows) -> None:
    is_plain = all(row.request.block_size == 1 for row in rows)
    engine.submit(rows, llm.plain_programs if is_plain else llm.programs)
    while any(row.request.finish_reason is None for row in rows):
        engine.step()


@pytest.mark.parametrize("block_size", [1, "auto", 16])
@pytest.mark.parametrize("name", PARAMS)
def test_only_its_own_request_ends(engine, llm, name, block_size):
    """In the prompt, alone and in its middle: the others of the batch, and what follows in the same slots, are as they
    are without it."""
    good = [[20, 30, 40], [50, 60, 61, 62], [70]]
    params = SamplingParams(max_tokens=24, ignore_eos=True, **PARAMS[name])
    expected = [c.token_ids for c in llm.generate(good, params, block_size)]
    for bad in ([POISON], [20, POISON, 40]):
        rows = [llm.new_sequence(prompt, params, block_size) for prompt in [*good, bad]]
        ended(engine, llm, rows)
        assert [row.request.tokens for row in rows[:3]] == expected
        assert rows[3].request.finish_reason == "error"
        assert rows[3].request.tokens == []
        with pytest.raises(EngineError, match="after 0 new tokens are NaN or infinite"):
            rows[3].raise_failure()
    # All slots have been used: nothing of the NaN is left in them.
    again = [llm.new_sequence(prompt, params, block_size) for prompt in [*good, good[0]]]
    ended(engine, llm, again)
    assert [row.request.tokens for row in again] == [*expected, expected[0]]


def test_a_nan_in_the_middle_of_an_answer(engine, llm):
    """The poison is the only token that may follow the third."""

    class Form(ReadyMasks):
        def __init__(self):
            self.taken = 0

        def masks(self, drafts):
            found = np.zeros((len(drafts) + 1, -(-llm.config.vocab_size // 32)), np.uint32)
            for i in range(len(drafts) + 1):
                found[i, 0] = 1 << (POISON if self.taken + i == 3 else 9)
            return found

        def take(self, tokens):
            self.taken += len(tokens)

    for block_size in (1, 16):
        (row,) = rows = [
            llm.new_sequence([20, 30], SamplingParams(max_tokens=20, ignore_eos=True), block_size, mask=Form())
        ]
        ended(engine, llm, rows)
        assert row.request.tokens == [9, 9, 9, POISON]
        with pytest.raises(EngineError, match="after 4 new tokens"):
            row.raise_failure()


def test_a_form_that_allows_nothing(engine, llm):
    class Nothing(ReadyMasks):
        def masks(self, drafts):
            return np.zeros((len(drafts) + 1, -(-llm.config.vocab_size // 32)), np.uint32)

    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=20, temperature=temperature)
        rows = [
            llm.new_sequence([20, 30], params, 16, mask=Nothing()),
            llm.new_sequence([20, 30], replace(params, seed=1), 16),
        ]
        ended(engine, llm, rows)
        with pytest.raises(InputError, match="leave no token after 0 new ones"):
            rows[0].raise_failure()
        assert len(rows[1].request.tokens) > 1


def test_the_largest_penalties_do_not_overflow(llm):
    """Beyond these, they are refused."""
    for penalties in (
        {"repetition_penalty": 1e-30},
        {"repetition_penalty": 1e30},
        {"frequency_penalty": -1e30, "presence_penalty": -1e30, "logit_bias": {20: 1e30}},
    ):
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, **penalties)
        (found,) = llm.generate([[20, 30]], params)
        assert len(found.token_ids) == 4


def test_the_command_line_says_so(poisoned, capsys):
    assert main(["--target", str(poisoned), "--prompt-ids", f"20,{POISON}", "--max-new-tokens", "4"]) == 1
    assert (
        capsys.readouterr().err.splitlines()[-1] == "error: the model's logits after 0 new tokens are NaN or infinite"
    )

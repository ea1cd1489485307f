"""The whole engine with all Triton kernels, in Triton's interpreter, against XLA's forms: equal tokens.

A hybrid of experts whose heads are of the sizes that the kernels take (256 in attention, 128 in the drafter and the
delta rule), so that no kernel is passed over.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decoding import speculative
from dflash_jax.decoding.batch_init import init_state
from dflash_jax.decoding.prefill import prefill_chunk
from dflash_jax.decoding.sampling_state import SamplingState
from dflash_jax.decoding.state import Settings
from dflash_jax.models.config import ConvSpec, SelectorSpec
from dflash_jax.models.drafters import abstract_drafter
from dflash_jax.models.kv_scales import with_fp8_caches
from dflash_jax.models.layers import with_backend
from tests import few_bits
from tools import token_runs
from tools.token_runs import Remembering

pytest.importorskip("torch")
pytest.importorskip("triton.runtime.interpreter")

from tools.triton_interpreter import CALLS, INTERPRETED, interpreting, small_grids

NEW, WIDE, CAPACITY = 4, 8, 384
PROMPTS = (17, 40, 75, 300)
# Of float32 models the delta rule of many tokens is XLA's.
BFLOAT16_ONLY = {"_prepare", "_chunks"}
KERNELS = {
    *("_attend", "_join", "_rotate", "_write", "_mix", "_mix_one", "_replay", "_project", "_project_one", "_route"),
    *("_gate_up", "_down", "_gate_up_one", "_down_one", "_count", "_before", "_align", "_norm", "_sum"),
}


@pytest.fixture(scope="module")
def models():
    """A target of a recurrent layer and one of attention, and a drafter of one layer."""
    return token_runs.random_pair(token_runs.small())


@pytest.fixture(autouse=True)
def few_programs():
    with small_grids():
        yield


def on_cuda(module):
    return with_backend(module, replace(INTERPRETED, kernels="all"))


def requests(lengths, temperature: float):
    return token_runs.requests(lengths, temperature, NEW, token_runs.VOCAB)


def run(target, drafter, wanted, width: int, together: bool, reproducible: bool = False):
    wanted = token_runs.run(
        target, drafter, wanted, width, together=together, reproducible=WIDE if reproducible else 0, capacity=CAPACITY,
        prefill_sizes=(32, 128), prefill_batch_tokens=128,
    )  # fmt: skip
    assert [len(request.tokens) for request in wanted] == [NEW] * len(wanted)
    return wanted


# (block size, whether all prompts run together, or the first alone).
PLAIN_ALONE, WIDE_ALONE, WIDE_TOGETHER = (1, False), (WIDE, False), (WIDE, True)


def compared(
    models,
    temperature: float,
    lengths: tuple[int, ...],
    runs=(PLAIN_ALONE, WIDE_ALONE, WIDE_TOGETHER),
    joined: bool = False,
) -> set[str]:
    """Asserts that the tokens of each run are those of XLA, and returns the kernels that ran."""
    target, drafter = models
    expected = run(target, None, requests(lengths, temperature), 1, True)
    coached = Remembering.of(drafter, expected, WIDE, CAPACITY)
    target, coached = on_cuda(target), replace(coached, drafter=on_cuda(drafter))
    with interpreting(joined=joined) as ran:
        for width, together in runs:
            some = lengths if together else lengths[:1]
            found = run(target, coached if width > 1 else None, requests(some, temperature), width, together)
            for one, other in zip(found, expected, strict=False):
                assert one.tokens == other.tokens, (width, together)
    return set(ran)


@pytest.mark.long
@pytest.mark.parametrize("joined", [False, True])
def test_tokens_are_those_of_xla(models, joined):
    """The shortest form: drawn tokens of two prompts. A kernel that did not run fails the test."""
    assert compared(models, 0.8, (17, 75), (PLAIN_ALONE, WIDE_TOGETHER), joined) - {CALLS} == KERNELS


def drafts(target, drafter, temperature: float) -> np.ndarray:
    """What the drafter itself proposes behind two prompts, int [2, WIDE]."""
    settings = Settings(WIDE)
    prompts = [request.prompt for request in requests((17, 40), 0.0)]
    sampling = replace(SamplingState.greedy(2, token_runs.VOCAB), temperature=jnp.full(2, temperature, jnp.float32))
    state = init_state(target, drafter, prompts, NEW, settings=settings, sampling=sampling, capacity=CAPACITY)
    state = jax.jit(partial(prefill_chunk, size=40))(target, drafter, state)
    return np.asarray(jax.jit(partial(speculative.propose, settings=settings))(target, drafter, state))


@pytest.mark.parametrize("is_dflash2", [False, True], ids=["dflash", "dflash2"])
def test_drafts_are_those_of_xla(models, is_dflash2):
    """Which tokens are accepted cannot show a wrong drafter: so its proposals are compared too."""
    if is_dflash2:
        config = replace(models[1].config, conv=ConvSpec(2, 4), selector=SelectorSpec(8, 4))
        models = models[0], token_runs.drawn(abstract_drafter(config), 1, 0.0)
    expected = drafts(*models, temperature=0.8)
    with interpreting() as ran:
        found = drafts(*map(on_cuda, models), temperature=0.8)
    np.testing.assert_array_equal(found, expected)
    assert {"_attend", "_project", "_rotate"} <= set(ran)
    assert ("_convolve" in ran) == is_dflash2


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_of_long_prompts_are_those_of_xla(models, temperature):
    """Prompts of 17 to 300 tokens, one row and four."""
    assert compared(models, temperature, PROMPTS) == KERNELS


@pytest.mark.long
def test_tokens_in_float8_are_those_of_xla(models):
    target, drafter = models
    assert compared((few_bits.quantized(target, "fp8"), drafter), 0.0, PROMPTS[:3]) == KERNELS


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_with_caches_in_fp8_are_those_of_xla(models, temperature):
    assert compared(tuple(map(with_fp8_caches, models)), temperature, PROMPTS[:3]) == KERNELS


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_reproducible_tokens_in_bfloat16(models, temperature):
    """With the drafter and without, alone and together: the kernels' own tokens, which may be others than XLA's."""
    target, drafter = (on_cuda(jax.tree.map(lambda x: x.astype(jnp.bfloat16), m)) for m in models)
    with interpreting() as ran:
        expected = run(target, None, requests(PROMPTS, temperature), 1, True, reproducible=True)
        coached = Remembering.of(drafter, expected, WIDE, CAPACITY)
        for lengths in (PROMPTS[:1], PROMPTS):
            found = run(target, coached, requests(lengths, temperature), WIDE, True, reproducible=True)
            for one, other in zip(found, expected, strict=False):
                assert one.tokens == other.tokens
    # Windows are all of one width: kernels of one token have no part, except the router's, which takes several.
    assert set(ran) == {name for name in KERNELS if not name.endswith("_one")} | {"_project_one"} | BFLOAT16_ONLY

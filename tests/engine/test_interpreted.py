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
from helpers import random_decoder, random_drafter, tiny_config, tiny_draft_config
from load import Remembering

from dflash_jax import speculative
from dflash_jax.checkpoint.parameters import QUANTIZED
from dflash_jax.config import AttentionSpec, GatedDeltaSpec, LayerSpec, MoeSpec, RopeSpec
from dflash_jax.engine.device import Device
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.options import Options
from dflash_jax.engine.request import Request
from dflash_jax.models.weights import quantize
from dflash_jax.params import SamplingParams
from dflash_jax.programs import Programs
from dflash_jax.prompts import init_state
from dflash_jax.sampling import SamplingRows
from dflash_jax.sharding import parameter_paths
from dflash_jax.state import Settings

pytest.importorskip("torch")
pytest.importorskip("triton.runtime.interpreter")

from triton_interpreter import as_on_cuda, interpreting

from dflash_jax.kernels import triton_attention, triton_experts, triton_routing

VOCAB, HIDDEN, NEW, WIDE, CAPACITY = 64, 64, 4, 8, 384
PROMPTS = (17, 40, 75, 300)
# Of float32 models the delta rule of many tokens is XLA's.
BFLOAT16_ONLY = {"_prepare", "_chunks"}
KERNELS = {
    *("_attend", "_join", "_rotate", "_write", "_mix", "_mix_one", "_replay", "_project", "_project_one", "_route"),
    *("_gate_up", "_down", "_gate_up_one", "_down_one", "_count", "_before", "_align"),
}


@pytest.fixture(scope="module")
def models():
    """A target of two recurrent layers and one of attention, and a drafter of one layer."""
    attention = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=256, rope=RopeSpec(10000.0, 64), gated=True)
    delta = GatedDeltaSpec(num_key_heads=1, num_value_heads=2, key_dim=128, value_dim=128)
    experts = MoeSpec(num_experts=6, experts_per_token=2, intermediate_size=32, shared_intermediate_size=32)
    layers = tuple(LayerSpec(attention if letter == "a" else delta, experts) for letter in "dda")
    config = tiny_config("dda", vocab_size=VOCAB, hidden_size=HIDDEN, layers=layers)
    target = random_decoder(config)
    draft = tiny_draft_config(config, windows=(None,))
    attention = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=128, rope=RopeSpec(10000.0, 128))
    layers = tuple(replace(layer, attention=attention) for layer in draft.layers)
    return target, random_drafter(replace(draft, layers=layers), 1)


@pytest.fixture(autouse=True)
def small_grids(monkeypatch):
    """Programs run one after another: fewer of them, and chunks of choices whose counts need a kernel of their own."""
    monkeypatch.setattr(triton_attention, "PROGRAMS", 4)
    monkeypatch.setattr(triton_experts, "GATE_UP_ONE", (32, 1, 1))
    monkeypatch.setattr(triton_experts, "DOWN_ONE", (64, 1, 1))
    monkeypatch.setattr(triton_routing, "_COUNTED", 2)


def requests(lengths, temperature: float) -> list[Request]:
    rng = np.random.default_rng(0)
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "logit_bias": {}}
    neutral |= {"frequency_penalty": 0.0, "presence_penalty": 0.0, "temperature": temperature, "max_tokens": NEW}
    params = [SamplingParams(seed=i, **neutral) for i in range(len(lengths))]
    return [Request(rng.integers(2, VOCAB - 2, n).tolist(), p, []) for n, p in zip(lengths, params, strict=True)]


def run(target, drafter, wanted: list[Request], width: int, together: bool, reproducible: bool = False):
    """``wanted`` with their tokens, all at once or one after another."""
    settings = Settings(WIDE if reproducible else 1, reproducible)
    options = Options(
        widths=(1, width) if width > 1 else (1,),
        prefill_sizes=(32, 128),
        prefill_together=128,
        rows_per_dispatch=1 if reproducible else None,
        adaptive=False,
    )
    engine = Engine(Device(Programs(target, drafter), len(wanted), CAPACITY, settings), options)
    for request in wanted:
        engine.submit(request)
        while not together and engine.has_work:
            engine.step()
    while engine.has_work:
        engine.step()
    assert [len(request.tokens) for request in wanted] == [NEW] * len(wanted)
    return wanted


def compared(models, temperature: float, lengths: tuple[int, ...]) -> set[str]:
    """Asserts that tokens are those of XLA, plain and wide, alone and together; and returns the kernels that ran."""
    target, drafter = models
    expected = run(target, None, requests(lengths, temperature), 1, True)
    coached = Remembering.of(drafter, expected, WIDE, capacity=CAPACITY)
    with as_on_cuda(), interpreting() as ran:
        for width, some, together in ((1, lengths[:1], False), (WIDE, lengths[:1], False), (WIDE, lengths, True)):
            found = run(target, coached if width > 1 else None, requests(some, temperature), width, together)
            for one, other in zip(found, expected, strict=False):
                assert one.tokens == other.tokens, (width, together)
    return set(ran)


def test_tokens_are_those_of_xla(models):
    """The short form: drawn tokens of two prompts. A kernel that did not run fails the test."""
    assert compared(models, 0.8, (17, 75)) == KERNELS


def drafts(target, drafter, temperature: float) -> np.ndarray:
    """What the drafter itself proposes behind two prompts, int [2, WIDE]."""
    settings = Settings(WIDE)
    prompts = [request.prompt for request in requests((17, 40), 0.0)]
    sampling = replace(SamplingRows.greedy(2, VOCAB), temperature=jnp.full(2, temperature, jnp.float32))
    state = init_state(target, drafter, prompts, NEW, settings=settings, sampling=sampling, capacity=CAPACITY)
    state = jax.jit(partial(speculative.prefill_chunk, size=40))(target, drafter, state)
    return np.asarray(jax.jit(partial(speculative.propose, settings=settings))(target, drafter, state))


def test_drafts_are_those_of_xla(models):
    """Which tokens are accepted cannot show a wrong drafter: so its proposals are compared too."""
    expected = drafts(*models, temperature=0.8)
    jax.clear_caches()
    with as_on_cuda(), interpreting() as ran:
        found = drafts(*models, temperature=0.8)
    np.testing.assert_array_equal(found, expected)
    assert {"_attend", "_project", "_rotate"} <= set(ran)


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_of_long_prompts_are_those_of_xla(models, temperature):
    """Prompts of 17 to 300 tokens, one row and four."""
    assert compared(models, temperature, PROMPTS) == KERNELS


@pytest.mark.long
def test_tokens_in_float8_are_those_of_xla(models):
    target, drafter = models
    assert compared((in_float8(target), drafter), 0.0, PROMPTS[:3]) == KERNELS


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_reproducible_tokens_in_bfloat16(models, temperature):
    """With the drafter and without, alone and together: the kernels' own tokens, which may be others than XLA's."""
    target, drafter = (jax.tree.map(lambda x: x.astype(jnp.bfloat16), m) for m in models)
    with as_on_cuda(), interpreting() as ran:
        expected = run(target, None, requests(PROMPTS, temperature), 1, True, reproducible=True)
        coached = Remembering.of(drafter, expected, WIDE, capacity=CAPACITY)
        for lengths in (PROMPTS[:1], PROMPTS):
            found = run(target, coached, requests(lengths, temperature), WIDE, True, reproducible=True)
            for one, other in zip(found, expected, strict=False):
                assert one.tokens == other.tokens
    # Windows are all of one width: kernels of one token have no part.
    assert set(ran) == {name for name in KERNELS if not name.endswith("_one")} | BFLOAT16_ONLY


def in_float8(module):
    """``module`` with its matrices in float8."""
    leaves, structure = jax.tree.flatten(module)
    names = (path.rsplit(".", 1)[-1] for path in parameter_paths(module))
    held = [quantize(x, "fp8") if n in QUANTIZED else x for n, x in zip(names, leaves, strict=True)]
    return jax.tree.unflatten(structure, held)

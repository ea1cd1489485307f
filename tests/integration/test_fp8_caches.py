"""Keys and values in FP8: the text is that of a model whose every query reads rounded keys and values."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import LLM, InputError, SamplingParams
from dflash_jax.decoding.batch_init import init_state
from dflash_jax.decoding.state import Settings, is_kv_cache
from dflash_jax.engine import model_runner
from dflash_jax.engine.executables import Executables
from dflash_jax.engine.memory import on_device
from dflash_jax.frontend.compare import divergence
from dflash_jax.models.cache import init_cache
from dflash_jax.models.config import AttentionSpec
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.kv_scales import with_fp8_caches
from dflash_jax.ops.cache import FP8, LARGEST_FP8, rounded
from tests import tiny
from tests.engine import load
from tests.engine.load import alone, engine_for, some_requests, under_load
from tests.few_bits import of_e4m3
from tests.helpers import extend, random_decoder, tokens_of, verify
from tests.tiny import VOCAB, coach, exact, fast, sampling
from tools.equality import Reference, check_same
from tools.token_runs import Remembering

LENGTHS, NEW, CAPACITY = [1, 29, 7, 18], [20, 19, 23, 20], 48
PROMPTS = [np.random.default_rng(0).integers(0, VOCAB, n).tolist() for n in LENGTHS]
SAMPLING = {
    "greedy": sampling(4),
    "sampled": sampling(4, temperature=[0.8, 0.8, 0.0, 0.8], repetition=[1.0, 1.3, 1.4, 1.0], seed=[3, 1, 2, 7]),
}
DRAFTERS = {"dflash": tiny.drafter, "mtp": tiny.head}


@pytest.fixture(scope="module")
def target():
    return with_fp8_caches(tiny.target("da", moe="1"))


def generate(loop, target, drafter, mode: str, settings: Settings, **options):
    options = {"sampling": SAMPLING[mode], "capacity": CAPACITY} | options
    return loop.generate(target, drafter, PROMPTS, NEW, settings, **options)


def caches_of(tree) -> list:
    return [c for c in jax.tree.leaves(tree, is_leaf=is_kv_cache) if is_kv_cache(c)]


# Rounding.


def test_numbers_are_rounded_to_the_nearest_and_saturate():
    """To the formula of the format, by search among all its numbers; ties go to even codes."""
    rng = np.random.default_rng(0)
    codes = np.arange(127, dtype=np.uint8)
    numbers = of_e4m3(codes).astype(np.float64)
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = np.exp(rng.uniform(-9, 8, 4096)).astype(np.float32)
    x = np.concatenate([x, middles, numbers, [1e9, np.inf, 2.0**-12]]).astype(np.float32)
    scale = np.float32(0.25)
    found = np.asarray(jax.jit(rounded)(jnp.asarray(x * scale).reshape(1, -1, 1, 1), jnp.asarray([scale])))
    assert found.dtype == FP8
    nearest = np.searchsorted(middles, x, side="left")
    is_tie = np.isin(x, middles)
    nearest = np.where(is_tie & (nearest % 2 == 1), nearest + 1, nearest)
    np.testing.assert_array_equal(found.view(np.uint8).ravel(), codes[nearest])
    negative = jax.jit(rounded)(jnp.asarray(-x * scale).reshape(1, -1, 1, 1), jnp.asarray([scale]))
    np.testing.assert_array_equal(np.asarray(negative).view(np.uint8).ravel(), codes[nearest] | 128)


def modules():
    """(module, input sizes of its attention) with QK norms and without, with biases, a target, a drafter and a head."""
    plain = tiny.target("aa")
    spec = replace(plain.config.layers[0].mixer, qk_norm=False)
    for mixer in (plain.config.layers[0].mixer, spec, replace(spec, qkv_bias=True)):
        assert isinstance(mixer, AttentionSpec)
        layers = tuple(replace(layer, mixer=mixer) for layer in plain.config.layers)
        yield random_decoder(replace(plain.config, layers=layers))
    yield tiny.drafter(plain)
    yield tiny.head(plain)


@pytest.mark.parametrize("number", range(5))
def test_no_key_and_no_value_of_a_normed_input_is_too_large(number):
    """Inputs of one large number, whose norms are the largest possible, and random ones; scales are powers of two."""
    module = with_fp8_caches(list(modules())[number])
    rng = np.random.default_rng(number)
    for layer in module.layers:
        mixer = layer.mixer
        norms = [layer.input_norm, *([module.hidden_norm] if isinstance(module, Drafter) else [])]
        size = mixer.k[...].shape[-1]
        spikes = np.eye(size)[: min(size, 64)] * 1e4
        worst = np.asarray(mixer.v[...], np.float64).reshape(-1, size)
        x = np.concatenate([spikes, worst, rng.standard_normal((64, size))])[None].astype(np.float32)
        angles = rng.uniform(-3, 3, (1, x.shape[1], (mixer.spec.rope.dim or mixer.spec.head_dim) // 2))
        angles = tuple(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
        for norm in norms:
            # The worst input of a row is the row times the norm's weights.
            gained = jnp.asarray(x) * (norm.weight[...] + norm.offset)
            for inputs in (norm(jnp.asarray(x)), norm(gained)):
                for y, scale in zip(mixer.keys_values(inputs, angles), (mixer.k_scale, mixer.v_scale), strict=True):
                    largest = np.abs(np.asarray(y)).max((0, 1, 3)) / np.asarray(scale[...])
                    assert (largest <= LARGEST_FP8 * 1.0001).all()
                    assert (np.frexp(np.asarray(scale[...]))[0] == 0.5).all()


# Text.


@pytest.mark.parametrize("mode", SAMPLING)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_drafter_changes_nothing(mode, kind, target):
    plain = generate(fast, target, None, mode, Settings(block_size=1))
    reference = Reference(target, plain)
    runs = np.random.default_rng(0).integers(-1, 8, (len(PROMPTS), CAPACITY))
    drafter = with_fp8_caches(DRAFTERS[kind](target))
    drafted = generate(fast, target, coach(drafter, plain.tokens, runs), mode, Settings(block_size=8))
    assert all(c.k.dtype == c.v.dtype == FP8 for c in caches_of((drafted.target, drafted.draft)))
    assert int(drafted.rounds.max()) < int(plain.rounds.max())
    check_same(reference, drafted)


def test_aligned_blocks_give_the_same_bits_with_a_drafter_and_without(target):
    settings, modes = Settings(block_size=8, aligned=True, top_logprobs=2), "sampled"
    plain = generate(exact, target, None, modes, settings, block_sizes=1)
    drafter = coach(with_fp8_caches(tiny.drafter(target)), plain.tokens, 5)
    drafted = generate(exact, target, drafter, modes, settings)
    assert int(drafted.rounds.max()) < int(plain.rounds.max())
    for row, n in enumerate(plain.length):
        np.testing.assert_array_equal(drafted.tokens[row, :n], plain.tokens[row, :n])
        np.testing.assert_array_equal(drafted.logprobs.chosen[row, :n], plain.logprobs.chosen[row, :n])


def outputs(target, tokens, sizes):
    """Hidden states of tokens that are read in passes of so many each."""
    cache, at, parts = init_cache(target.config, 2, 64, jnp.float32, kv_dtype=target.kv_dtype), 0, []
    for size in sizes:
        length, count = jnp.full((2,), at, jnp.int32), jnp.full((2,), size, jnp.int32)
        hidden, _, _ = verify(target, tokens[:, at : at + size], cache, length, count)
        _, _, cache = extend(target, tokens[:, at : at + size], cache, length, count)
        parts.append(np.asarray(hidden))
        at += size
    return np.concatenate(parts, axis=1)


def test_tokens_read_one_another_as_the_cache_has_them(target):
    """Of a pass, of passes of a token each and of the definition: only where all round do all agree."""
    tokens = tokens_of(np.random.default_rng(0), 2, 12, vocab=VOCAB)
    single = outputs(target, tokens, [1] * 12)
    whole, _ = jax.jit(lambda target, tokens: target(tokens))(target, tokens)
    for other in (outputs(target, tokens, [12]), outputs(target, tokens, [5, 7]), np.asarray(whole)):
        np.testing.assert_allclose(other, single, atol=2e-5)
    unrounded, _ = jax.jit(lambda target, tokens: target(tokens))(tiny.target("da", moe="1"), tokens)
    assert np.abs(np.asarray(unrounded) - single).max() > 1e-3


def test_a_prompt_in_chunks_and_among_others_has_the_caches_of_the_prompt_alone(target):
    """Of the target and of both drafters; a number on the border of two steps of FP8 may be either."""
    both = tuple(with_fp8_caches(make(target)) for make in DRAFTERS.values())
    for drafter in both:
        states = []
        for chunk, prompts in ((4, PROMPTS), (32, PROMPTS), (32, [PROMPTS[1]])):
            rows = [sampling(len(prompts))]
            state = init_state(target, drafter, prompts, [1] * len(prompts), sampling=rows[0], capacity=CAPACITY)
            state = jax.device_get(fast.prefill(target, drafter, state, chunk))
            row = 0 if len(prompts) == 1 else 1
            caches = caches_of((state.target, state.draft))
            n = LENGTHS[1] - 1
            pages = [c.table[row] for c in caches]
            states.append(
                [
                    of_e4m3(np.asarray(x[p].swapaxes(1, 2)).reshape(-1, *x.shape[1::2])[:n])
                    for c, p in zip(caches, pages, strict=True)
                    for x in (c.k, c.v)
                ]
            )
        for other in states[1:]:
            for a, b in zip(states[0], other, strict=True):
                assert np.abs(a).max() > 0
                assert (a != b).mean() < 1e-3
                np.testing.assert_allclose(a, b, rtol=0.13, atol=2.0**-9)


# The engine.


def test_under_load_texts_are_those_alone(target, monkeypatch):
    """Prefixes are cached and restored, requests leave their slots and come back, and two drafters take turns."""
    monkeypatch.setattr(model_runner, "BATCH_SIZES", (4,))
    wanted = some_requests(0, 10, VOCAB)
    expected = alone(engine_for(Executables(target, None), (1,), slots=4, prefix_bytes=0), wanted)
    head = with_fp8_caches(tiny.head(target))
    drafter = Remembering.of(head, [request for request, _ in expected], wide=4, capacity=load.CAPACITY)
    engine = engine_for(Executables(target, drafter), (1, 4), slots=4, pages=(9, 9), prefix_bytes=10**5)
    under_load(engine, target, wanted, expected, 40, seed=1)
    assert engine.statistics.cached_tokens > 0
    assert max(yielded for _, _, yielded in engine.statistics.rounds) > 1, "no draft was accepted"
    assert all(c.k.dtype == FP8 for c in caches_of((engine.runner.state.target, engine.runner.state.draft)))


def test_pages_take_half_of_bfloat16s_memory():
    plain = tiny.cast(tiny.target("da"), jnp.bfloat16)
    drafter = tiny.cast(tiny.drafter(plain), jnp.bfloat16)

    def of_page(target, drafter) -> int:
        programs = Executables(target, drafter)
        sizes = [on_device(programs.abstract_state(4, 512, Settings(), (n, n))) for n in (0, 1)]
        return sizes[1] - sizes[0]

    assert of_page(plain, drafter) == 2 * of_page(with_fp8_caches(plain), with_fp8_caches(drafter))


@pytest.mark.parametrize("options", [{"reproducible": True}, {"draft": "mtp"}], ids=["reproducible", "mtp"])
def test_the_bundled_pair_drafts_the_plain_text(options):
    llm = LLM(kv_cache_dtype="fp8", **options)
    assert llm.target.kv_dtype == FP8
    for params in (SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=0.8, seed=3)):
        plain, drafted = (llm.generate(["def f(", "import os\n"], params, block_size=n) for n in (1, 4))
        for a, b in zip(plain, drafted, strict=True):
            parting = divergence(llm, a.prompt_ids, a.token_ids, b.token_ids, params)
            assert parting is None or (parting.is_tie and "reproducible" not in options)
        assert max(n for each in drafted for n in each.acceptance_lengths) > 1


def test_a_drafter_from_memory_is_cached_as_the_target():
    llm = LLM(kv_cache_dtype="fp8_e4m3")
    other = llm.with_drafter(llm.drafter)
    assert all(c.k.dtype == FP8 for c in other.drafter.init_cache(1, 64, jnp.float32))
    (a,), (b,) = (each.generate(["def f("], SamplingParams(max_tokens=8), block_size=4) for each in (llm, other))
    assert a.token_ids == b.token_ids
    plain = LLM().with_drafter(llm.drafter)
    assert all(c.k.dtype == jnp.float32 for c in plain.drafter.init_cache(1, 64, jnp.float32))


def test_another_dtype_than_the_weights_is_refused():
    with pytest.raises(InputError, match=r"kv_cache_dtype.*'bfloat16': it must be fp8, or float32"):
        LLM(dtype="float32", kv_cache_dtype="bfloat16")
    with pytest.raises(InputError, match="fp8_e5m2"):
        LLM(kv_cache_dtype="fp8_e5m2")
    assert LLM.unloaded(dtype="float32", kv_cache_dtype="float32").has_fp8_caches is False

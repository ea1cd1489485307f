"""Eight devices give one device's tokens. Collected by `test_mesh.py` only, in a process that has eight CPU devices."""

import json
import random
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflash_jax import LLM, InputError, SamplingParams
from dflash_jax.decoding.sampling import best_candidates, draw, draw_drafts
from dflash_jax.decoding.sampling_state import GREEDY, PENALISED, SamplingState, sampling_mode
from dflash_jax.decoding.state import Settings
from dflash_jax.engine import model_runner
from dflash_jax.engine.config import Speculation, speculations_of
from dflash_jax.engine.dispatch import Dispatch
from dflash_jax.engine.executables import Executables
from dflash_jax.engine.model_runner import ModelRunner
from dflash_jax.engine.request import Request
from dflash_jax.engine.slots import Slots
from dflash_jax.frontend import llm
from dflash_jax.frontend.compare import divergence
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.frontend.loading import draft_vocabulary
from dflash_jax.models import layers
from dflash_jax.models.config import ConvSpec, MoeSpec, SelectorSpec
from dflash_jax.models.decoder import abstract_decoder
from dflash_jax.models.drafters import abstract_drafter
from dflash_jax.models.drafting import together
from dflash_jax.models.kv_scales import SCALES
from dflash_jax.models.layers import Attention
from dflash_jax.models.moe import Moe
from dflash_jax.models.packing import transpose_experts, unpack_weights
from dflash_jax.ops import attention, cache, cache_write, moe
from dflash_jax.ops.backend import XLA, Backend
from dflash_jax.ops.cache import FP8, KVCache
from dflash_jax.ops.weights import QuantizedWeight, TransposedWeight, is_weight, quantize
from dflash_jax.parallel.sharding import AxisSharding, Layout, parameter_paths, parameter_specs, spec
from dflash_jax.sampling_params import LOGPROBS_MODES
from tests import few_bits
from tests.engine.load import alone, copying_out, engine_for, run_last, some_requests, under_load
from tests.families import OUTSIDE, VOCAB, examples_registered, family_config, save_example
from tests.helpers import random_decoder, random_drafter, random_head, randomise, tiny_draft_config
from tests.mtp_context import assert_context, of_one_device, rows_with_context
from tools.equality import Reference, check_same
from tools.float64_reference import assert_as_near
from tools.kernels import arguments
from tools.kernels.arguments import Source

SETTINGS = Settings(block_size=8, top_logprobs=2)
PROMPTS = [list(range(3, 20)), [5], list(range(40, 50)), [7, 8, 9], [], [1, 2], [60, 3], [9] * 12]
NEW = [20, 11, 30, 25, 0, 6, 17, 30]

LAYOUTS = [Layout(tensor=8), Layout(data=2, tensor=2, expert=2)]
# Of two KV heads, in place of copies.
DIVIDED = [replace(LAYOUTS[0], decode_context_parallel=4), replace(LAYOUTS[1], decode_context_parallel=2)]
# The one that says more, on all layouts; each is a minute of compilation. The families left out have no layer and no
# kind of division of their own. The other layout that divides pages is the engine's, below.
CASES = [
    ("qwen3_5_moe", DIVIDED[0]),
    ("qwen3_5_moe", LAYOUTS[1]),
    ("qwen3_5_moe", LAYOUTS[0]),
    ("qwen3_moe", LAYOUTS[1]),
    ("llama", LAYOUTS[0]),
]


def on(layout: Layout, module, abstract):
    """``module`` for another layout, the same weights."""
    leaves = jax.tree.leaves(module, is_leaf=is_weight)
    return jax.tree.unflatten(jax.tree.structure(abstract(module.config, layout=layout)), leaves)


def decode(programs: Executables, sampled: bool):
    """The state at the end of a batch of unequal rows through all programs."""
    slots, live = ModelRunner(programs, len(PROMPTS), 64, SETTINGS), [i for i, p in enumerate(PROMPTS) if p]
    cuts = {"top_k": 20, "top_p": 0.9, "min_p": 0.0}
    for i in live:
        options = cuts | {"temperature": 0.9 if sampled and i % 2 == 0 else 0.0, "seed": i, "max_tokens": NEW[i]}
        options |= {"repetition_penalty": 1.2, "presence_penalty": 0.3} if sampled else {"repetition_penalty": 1.0}
        options["logprobs_mode"] = LOGPROBS_MODES[i % 3 if sampled else 0]
        slots.admit(i, Request(PROMPTS[i], SamplingParams(logprobs=2, **options)))
        for start in range(0, len(PROMPTS[i]) - 1, 8):
            slots.prefill([i], [min(8, len(PROMPTS[i]) - 1 - start)], 8)
    ticket = slots.decode(Dispatch(tuple(live), (8,) * len(live), 1000, Speculation(8), len(live)))
    assert all(slots.read(ticket, True).done)
    assert ticket[0].done.sharding.is_fully_replicated
    return slots.state


@pytest.fixture(
    scope="module",
    params=[CASES[0], *(pytest.param(case, marks=pytest.mark.long) for case in CASES[1:])],
    ids=lambda case: " ".join(map(str, case)),
)
def family(request):
    """(target, programs on one device, layout, target on it, its programs), compiled once."""
    name, layout = request.param
    target = random_decoder(family_config(name))
    config = replace(tiny_draft_config(target.config), vocab_size=VOCAB)
    if layout == DIVIDED[0]:
        # The first case's has tables of its own, and is DFlash2.
        config = replace(config, own_embedding=True, own_head=True, conv=ConvSpec(2, 4), selector=SelectorSpec(5, 6))
    drafter = random_drafter(config)
    cut = on(layout, target, abstract_decoder)
    return target, Executables(target, drafter), layout, cut, Executables(cut, on(layout, drafter, abstract_drafter))


def values(state):
    return state.logprobs.chosen, state.logprobs.values


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_eight_devices_give_the_tokens_of_one(family, sampled):
    target, alone, layout, cut, programs = family
    expected = jax.device_get(decode(alone, sampled))
    state = decode(programs, sampled)
    check_shardings(layout, state, cut)
    check_no_whole_logits(layout, programs)
    found = jax.device_get(state)
    check_same(Reference(target, expected), found)
    for row, n in enumerate(found.length):
        if np.array_equal(found.tokens[row, :n], expected.tokens[row, :n]):
            for mine, theirs in zip(values(found), values(expected), strict=True):
                np.testing.assert_allclose(mine[row, :n], theirs[row, :n], atol=1e-4)


@pytest.mark.parametrize("layout", [Layout(expert=8), Layout(tensor=8), Layout(data=2, tensor=2, expert=2)], ids=str)
def test_transposed_experts_are_those_of_the_mesh(layout):
    """Placed as for a TPU: each device has the parts of both weights of a pair, and plain weights come back."""
    backend, rng = Backend.xla("tpu"), np.random.default_rng(0)
    spec = MoeSpec(num_experts=8, experts_per_token=3, intermediate_size=16, shared_intermediate_size=16)
    x, valid = jnp.asarray(rng.standard_normal((4, 5, 12)), jnp.float32), jnp.asarray(rng.random((4, 5)) < 0.8)
    alone = randomise(Moe(spec, 12, None, jnp.float32), 1)
    mixture = jax.tree.unflatten(
        jax.tree.structure(Moe(spec, 12, None, jnp.float32, layout, backend)), jax.tree.leaves(alone)
    )

    def placed(module):
        shardings = (NamedSharding(mesh, spec) for spec in parameter_specs(module))
        leaves = map(jax.device_put, jax.tree.leaves(module), shardings)
        return jax.tree.unflatten(jax.tree.structure(module), leaves)

    mesh = layout.mesh()
    transposed = transpose_experts(placed(mixture))
    is_divided = [not lies(w.matrices) for w in (transposed.gate_up[...], transposed.down[...])]
    assert is_divided == [True, True]
    structure = jax.tree.structure(transposed)

    def run(leaves, x, valid):
        return jax.tree.unflatten(structure, leaves)(x, valid)

    options = {"in_specs": (parameter_specs(transposed), P("data"), P("data")), "out_specs": P("data")}
    sharded = jax.jit(jax.shard_map(run, mesh=mesh, check_vma=False, **options))
    found = sharded(jax.tree.leaves(transposed), x, valid)
    expected = jax.jit(Moe.__call__)(alone, x, valid)
    np.testing.assert_allclose(np.asarray(found)[valid], np.asarray(expected)[valid], atol=1e-5)
    for got, want in zip(jax.tree.leaves(unpack_weights(transposed)), jax.tree.leaves(mixture), strict=True):
        np.testing.assert_array_equal(got, want)


def test_what_one_device_knows_of_a_row_all_branch_on():
    """A bias lies in one part of the vocabulary, and the branches have collectives: one alone would wait for ever."""
    layout = Layout(data=2, tensor=4)
    cut, rows = layout.wide(VOCAB), SamplingState.greedy(4, VOCAB)
    rows = replace(rows, logit_bias=rows.logit_bias.at[2, 3].set(50.0), vocab=cut)
    logits, positions = jax.random.normal(jax.random.key(0), (4, 3, VOCAB)), jnp.zeros((4, 3), jnp.int32)
    wide = {f: spec("data", cut) for f in ("logit_bias", "prompt_counts", "output_counts")}
    specs = replace(jax.tree.map(lambda _: spec("data"), rows), **wide)
    in_specs, each = (spec("data", None, cut), specs, spec("data")), (*layout.sizes,)

    def on_mesh(function, out):
        mapped = jax.shard_map(function, mesh=layout.mesh(), in_specs=in_specs, out_specs=out, check_vma=False)
        return jax.jit(mapped)(logits, rows, positions)

    known = np.asarray(on_mesh(lambda logits, rows, positions: sampling_mode(rows), P(each))).reshape(2, 4, 2)
    np.testing.assert_array_equal(known, np.broadcast_to([[[GREEDY, GREEDY]], [[PENALISED, GREEDY]]], known.shape))
    tokens = on_mesh(lambda *args: draw(*args, sampling_mode(args[1]))[0], spec("data"))
    expected = np.array(logits.argmax(-1))
    expected[2] = 3
    np.testing.assert_array_equal(tokens, expected)


def test_draws_from_some_tokens_and_best_candidates_are_those_of_one_device():
    """Penalties and bias of tokens lie in parts of the vocabulary, and logits of some tokens are whole everywhere."""
    layout, rng = Layout(data=2, tensor=4), np.random.default_rng(0)
    cut, alone = layout.wide(VOCAB), SamplingState.greedy(4, VOCAB)
    alone = replace(
        alone,
        temperature=jnp.array([0.0, 0.9, 0.7, 0.0]),
        repetition=jnp.array([1.0, 1.3, 1.0, 1.5]),
        presence=jnp.array([0.0, 0.4, 0.0, 0.8]),
        seed=jnp.arange(4, dtype=jnp.uint32),
        logit_bias=jnp.asarray(rng.normal(0, 2, (4, VOCAB)) * (rng.random((4, VOCAB)) < 0.3), jnp.float32),
        output_counts=jnp.asarray(rng.integers(0, 2, (4, VOCAB)), jnp.int32),
    )
    ids = jnp.arange(1, VOCAB, 3)
    logits, positions = jnp.asarray(rng.standard_normal((4, 3, VOCAB)), jnp.float32), jnp.arange(12).reshape(4, 3)
    wide = {f: spec("data", cut) for f in ("logit_bias", "prompt_counts", "output_counts")}
    divided = replace(alone, vocab=cut)
    specs = replace(jax.tree.map(lambda _: spec("data"), divided), **wide)
    in_specs = spec("data", None, cut), spec("data"), specs, spec("data")

    def all_of(logits, some, rows, positions):
        mode = sampling_mode(rows)
        part = best_candidates(some, rows, positions, mode, 4, ids)
        whole = best_candidates(logits, rows, positions, mode, 4)
        # More than a device's part has, and more than there are.
        many = [rows.vocab.top_k(logits, VOCAB + n, jax.lax.top_k) for n in (-1, 5)]
        drawn, scores = draw_drafts(some, rows, positions, mode, ids, has_scores=True)
        drafts, whole_scores = draw_drafts(logits, rows, positions, mode, has_scores=True)
        results = drawn, drafts, scores, whole_scores, part.tokens, part.scores, whole.tokens, whole.scores
        return *results, *jax.tree.leaves(many)

    expected = jax.jit(all_of)(logits, logits[..., ids], alone, positions)
    mapped = jax.shard_map(all_of, mesh=layout.mesh(), in_specs=in_specs, out_specs=spec("data"), check_vma=False)
    found = jax.jit(mapped)(logits, logits[..., ids], divided, positions)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)


@pytest.mark.parametrize(
    ("layout", "backend", "taken", "window", "sinks"),
    [
        (DIVIDED[0], Backend("cpu", no_cpp=None), "reference", 200, 50),
        (DIVIDED[1], Backend.xla("tpu"), "wide pieces", None, 0),
    ],
    ids=["four parts", "two parts"],
)
def test_attention_to_pages_that_are_divided_is_attention(layout, backend, taken, window, sinks):
    """What a device must not read is NaN, in its part too."""
    choices = []
    backend = replace(backend, on_choice=choices.append)
    heads, kv, positions = layout.heads(16, 2), layout.wide(2), layout.positions(16, 2)
    assert layout.parts(positions) == layout.decode_context_parallel
    q, k, v, whole, length, bounds = arguments.attention(Source(0), 3, 4, 16, 2, 16, 1000, window, sinks)
    args = (q, k, v, whole, length, bounds, Source(1).normal(3, 4, 16, 2, 16))
    divided = (*args[:3], replace(whole, positions=positions), *args[4:])
    each, pages = spec(None, None, heads), spec(None, kv, positions)
    of_cache = replace(jax.tree.map(lambda _: P(), divided[3]), k=pages, v=pages)
    specs = (each, spec(None, None, kv), spec(None, None, kv), of_cache, P(), jax.tree.map(lambda _: P(), bounds), each)

    def attend(backend, q, k, v, cache, length, bounds, gate):
        return attention.attention(backend, q, k, v, None, cache, length, bounds, gate)

    options = {"mesh": layout.mesh(), "in_specs": specs, "out_specs": each, "check_vma": False}
    found = jax.jit(jax.shard_map(partial(attend, backend), **options))(*divided)
    assert_as_near(found, partial(attend, XLA), *args)
    (choice,) = choices
    assert choice.implementation == taken
    assert taken != "reference" or choice.passed_over[0] == ("cpp", "pages are divided over devices")


def test_every_position_is_written_to_the_part_that_has_it():
    layout = DIVIDED[0]
    kv, positions = layout.wide(2), layout.positions(16, 2)
    whole, k, v, places = arguments.written(Source(0), 3, 70, 2, 16, 300)
    keep = jnp.arange(70)[None] % 7 != jnp.arange(3)[:, None]
    divided, pages = replace(whole, positions=positions), spec(None, kv, positions)
    of_cache = replace(jax.tree.map(lambda _: P(), divided), k=pages, v=pages)
    specs = (of_cache, spec(None, None, kv), spec(None, None, kv), P(), P())
    write = jax.shard_map(
        partial(cache_write.write, XLA), mesh=layout.mesh(), in_specs=specs, out_specs=of_cache, check_vma=False
    )
    found, expected = jax.jit(write)(divided, k, v, places, keep), cache_write.write(XLA, whole, k, v, places, keep)
    assert not np.array_equal(expected.k, whole.k)
    jax.tree.map(np.testing.assert_array_equal, (found.k, found.v), (expected.k, expected.v))


def lies(array, *spec) -> bool:
    """Whether an array is cut so over its mesh; an axis of size one cuts nothing."""
    return array.sharding.is_equivalent_to(NamedSharding(array.sharding.mesh, P(*spec)), array.ndim)


def check_shardings(layout: Layout, state, target) -> None:
    """What comes out of the loop lies as the table says."""
    wide = tuple(a for a in layout.sizes if a != "data")
    assert lies(state.tokens, "data")
    assert lies(state.sampling.output_counts, "data", wide)
    for layer, each in zip(target.layers, state.target, strict=True):
        if isinstance(each, KVCache):
            heads, parts = wide[:1] if layer.spec.mixer.num_kv_heads == 2 else None, layout.decode_context_parallel
            assert lies(each.k, "data", heads, wide[1:3] if parts == 4 else None)
        else:  # four key heads
            assert lies(each.recurrent, "data", wide[:2])
            assert lies(each.conv_inputs, "data", None, wide[:2])


def check_no_whole_logits(layout: Layout, programs: Executables) -> None:
    """No all-gather of the loop is as wide as the vocabulary."""
    (key,) = [k for k in programs.compiled if k[0] == "decode"]
    hlo = programs.compiled[key].as_text()
    assert "all-reduce" in hlo
    gathers = [line for line in hlo.splitlines() if "all-gather(" in line]
    assert gathers
    assert not [line for line in gathers if f",{VOCAB}]" in line.split("all-gather(")[0]]


PARAMETERS = {
    "embed": P(("tensor0", "tensor1", "tensor2")),
    "head": P(("tensor0", "tensor1", "tensor2")),
    "layers.0.mixer.qkvz": P(("tensor0",)),
    "layers.0.mixer.out": P(None, ("tensor0",)),
    "layers.0.ffn.router": P(),
    "layers.0.ffn.gate_up": P(None, None, ("tensor0", "tensor1", "tensor2")),
    "layers.0.ffn.shared.down": P(None, ("tensor0", "tensor1", "tensor2")),
    "layers.3.mixer.k": P(),
    # One KV head, which all have; four query heads, cut as far as they go.
    "layers.3.mixer.o": P(None, ("tensor0", "tensor1")),
}


def test_a_checkpoint_is_read_into_its_shards_and_generates_the_same_text(tmp_path):
    """In eight bits, the head by its checkpoint: a scale of a row of `down` is on all devices. Drafts are of a list."""
    sampled = SamplingParams(temperature=0.7, top_k=20, seed=4, max_tokens=24)
    target = few_bits.in_fp8(TINY / "target", tmp_path / "target", lambda name: name == "lm_head.weight")
    # One device without the drafter, which changes no text: fewer programs.
    one = LLM(target, None, quantize="int8")
    listed = list(range(0, 512, 2))
    (tmp_path / "ids.json").write_text(json.dumps(listed))
    options = {"decode_context_parallel_size": 4, "block_size": 8, "draft_tokens": tmp_path / "ids.json"}
    eight = LLM(target, TINY / "draft", mesh="tensor=8", quantize="int8", **options)
    vocabulary = eight.drafter.vocabulary
    assert all(map(lies, jax.tree.leaves(vocabulary)))
    np.testing.assert_array_equal(vocabulary.ids[...], listed)
    rows = one.target.head_rows(jnp.asarray(listed))
    jax.tree.map(np.testing.assert_array_equal, vocabulary.head[...], rows)
    leaves = dict(zip(parameter_paths(eight.target), jax.tree.leaves(eight.target), strict=True))
    for path, expected in PARAMETERS.items():
        parts = [path] if path in leaves else [f"{path}.values", f"{path}.scale"]
        assert all(lies(leaves[part], *expected) for part in parts), path
    embed = leaves["embed"]
    assert {s.data.shape for s in embed.addressable_shards} == {(embed.shape[0] // 8, embed.shape[1])}
    for params in (sampled, SamplingParams(temperature=0.0, max_tokens=24)):
        (expected,) = one.generate(["def f("], params)
        # With the drafter, and without it.
        for block_size in (8, 1):
            (found,) = eight.generate(["def f("], params, block_size=block_size)
            assert block_size == 1 or max(found.acceptance_lengths) > 1
            parting = divergence(eight, found.prompt_ids, expected.token_ids, found.token_ids, params)
            assert parting is None or parting.is_tie


def test_scores_of_prompts_and_continuations_are_those_of_one_device():
    """Slots and the vocabulary are divided."""
    one, eight = LLM(max_len=256), LLM(max_len=256, mesh="data=2,tensor=4")
    params = SamplingParams(temperature=0.7, logprobs_mode="scaled_logprobs", top_k=20, max_tokens=8, logprobs=2)
    (drawn,) = one.generate(["def f("], params)
    pairs = [drawn.prompt_ids, [2, 3], [5] * 90], [drawn.token_ids, [7] * 70, [9]]
    for mine, right in zip(eight.score(*pairs, params), one.score(*pairs, params), strict=True):
        np.testing.assert_allclose(mine, right, atol=1e-4)
    (found,) = eight.generate([drawn.prompt_ids], replace(params, seed=1, prompt_logprobs=2))
    scores = eight.score([found.prompt_ids], [found.token_ids], params)[0]
    np.testing.assert_allclose([entry["logprob"] for entry in found.logprobs], scores, atol=1e-4)
    raw = [entry[token].logprob for entry, token in zip(found.prompt_logprobs[1:], found.prompt_ids[1:], strict=True)]
    np.testing.assert_allclose(raw, one.score([found.prompt_ids[:1]], [found.prompt_ids[1:]])[0], atol=1e-4)


@pytest.mark.parametrize("draft", ["auto", pytest.param("mtp", marks=pytest.mark.long)])
def test_keys_and_values_in_fp8_give_the_text_and_have_the_scales_of_one_device(draft):
    """Pages go through the prefix cache of two data shards; heads and positions are divided."""
    one, prompt, cached = LLM(draft=None, kv_cache_dtype="fp8", max_len=512), "def f(" * 40, 0
    options = {"mesh": "data=2,tensor=4", "decode_context_parallel_size": 4}
    eight = LLM(draft=draft, kv_cache_dtype="fp8", max_len=512, **options)
    for mine, right in zip(eight.target.layers, one.target.layers, strict=True):
        for name in SCALES if isinstance(mine.mixer, Attention) else ():
            np.testing.assert_array_equal(*(getattr(layer.mixer, name)[...] for layer in (mine, right)))
    for params in (SamplingParams(temperature=0.7, top_k=20, seed=4, max_tokens=24), SamplingParams(max_tokens=24)):
        (expected,) = one.generate([prompt], params)
        # With the drafter, then from the prefix cache, and without the drafter.
        for block_size in (8, 8, 1):
            (found,) = eight.generate([prompt], params, block_size=block_size)
            cached += found.cached_tokens
            parting = divergence(eight, found.prompt_ids, expected.token_ids, found.token_ids, params)
            assert parting is None or parting.is_tie
            assert block_size == 1 or max(found.acceptance_lengths) > 1
    assert cached > 0
    state = eight.engine.runner.state
    caches = [c for each in (state.target, state.draft) for c in each if isinstance(c, KVCache)]
    assert all(c.k.dtype == c.v.dtype == FP8 for c in caches)


@pytest.mark.parametrize("part", ["linear map", "experts", "shared expert"])
def test_activations_that_devices_share_are_rounded_as_on_one(part):
    """What is tiny beside another device's inputs loses the same bits: only such inputs have weights."""
    source, backend = Source(1), replace(XLA, fp4_activations=True)
    tiny = np.exp2(-16.0 * (np.arange(64) >= 32)).astype(np.float32)
    down = quantize(source.normal(8, 64) * (tiny < 1), "nvfp4").spread(2)

    def apply(x, weight, axes=()):
        return layers.output(backend, x, weight, 1, AxisSharding(axes), None)

    def mix(x, experts, shared, axes=()):
        of_shared = (*shared, jnp.full(5, 9.0 if part == "shared expert" else -jnp.inf))
        options = {"experts_per_token": 1, "normalise": True, "axes": (axes, axes)}
        y = moe.mixture(
            backend, x, jnp.zeros((5, 1)), jnp.full(5, part == "experts"), 0, *experts, of_shared, **options
        )
        return AxisSharding(axes).sum(y)

    if part == "linear map":
        call, args, specs = apply, (source.normal(5, 64) * tiny, down), (P(None, "tensor"), P(None, "tensor"))
    else:
        x, gate_up = (jnp.abs(source.normal(*shape)) for shape in ((5, 8), (2, 64, 8)))
        weights = [quantize(gate_up * np.sqrt(tiny)[:, None], "int8"), down]
        call, args = mix, (x, [jax.tree.map(lambda a: a[None], w) for w in weights], weights)
        specs = P(), [P(None, None, "tensor"), P(None, None, "tensor")], [P(None, "tensor"), P(None, "tensor")]
    options = {
        "mesh": Mesh(np.array(jax.devices()[:2]), ("tensor",)),
        "in_specs": specs,
        "out_specs": P(),
        "check_vma": False,
    }
    found, right = jax.jit(jax.shard_map(partial(call, axes=("tensor",)), **options))(*args), jax.jit(call)(*args)
    assert jnp.abs(right).max() > 0
    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-4 * float(jnp.abs(right).max()))


def test_activations_in_fp4_give_the_text_of_one_device():
    """Heads, experts and the shared expert are divided; where a run of inputs would be, it is refused."""
    options = {"draft": None, "quantize": "nvfp4", "activations": "fp4", "max_len": 128}
    params = SamplingParams(max_tokens=32)
    (expected,) = LLM(**options).generate(["def f("], params)
    (found,) = (divided := LLM(mesh="data=2,expert=2", **options)).generate(["def f("], params)
    parting = divergence(divided, found.prompt_ids, expected.token_ids, found.token_ids, params)
    assert parting is None or parting.is_tie
    with pytest.raises(InputError, match="devices of mesh data=1,expert=1,tensor=8 share runs of inputs of layers"):
        LLM(mesh="tensor=8", **options)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("reduced", [None, 10], ids=["whole", "reduced"])
@pytest.mark.parametrize("form", [None, "fp8", "nvfp4"])
def test_a_list_of_tokens_has_the_rows_of_the_head_that_drafts(layout, reduced, form):
    """Of the target's head, which is divided, and of the drafter's own: all of the vocabulary, or some tokens of it."""

    def with_head(module):
        if form is not None:
            module.head = nnx.Param(quantize(module.head[...], form))
        return module

    target = with_head(random_decoder(family_config("qwen3_5_moe")))
    of_head, ids = np.arange(1, VOCAB, 2)[:reduced], np.array([1, 2, 5, VOCAB - 1])
    config = replace(tiny_draft_config(target.config), vocab_size=VOCAB, draft_vocab_size=reduced)
    for own in (True, False):
        drafter = random_drafter(replace(config, own_head=own), seed=1)
        drafter = with_head(drafter) if own else drafter
        if reduced:
            drafter.head_ids[...] = jnp.asarray(of_head, jnp.int32)
        cut, divided = on(layout, drafter, abstract_drafter), on(layout, target, abstract_decoder)
        for listed in (None, ids):
            expected, found = (
                draft_vocabulary(d, listed, t, "bfloat16") for d, t in ((drafter, target), (cut, divided))
            )
            if listed is None and (own or reduced is None):
                assert expected is found is None
                continue
            wanted = np.intersect1d(of_head if listed is None else ids, of_head if reduced else ids)
            assert expected.ids[...].tolist() == wanted.tolist()
            assert all(map(lies, jax.tree.leaves(found.head[...])))
            assert isinstance(found.head[...], QuantizedWeight) == (form is not None)
            jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.long
@pytest.mark.parametrize("draft", ["auto", "mtp"])
@pytest.mark.parametrize("mesh", ["tensor=2", "expert=2,tensor=4", "data=2,expert=2,tensor=2"])
def test_eight_bit_floats_generate_the_same_text_on_every_mesh(mesh, draft):
    params = SamplingParams(temperature=0.7, top_k=20, seed=4, max_tokens=24)
    (expected,) = LLM(draft=None, quantize="fp8").generate(["def f("], params)
    several = LLM(draft=draft, mesh=mesh, quantize="fp8", block_size=4)
    (found,) = several.generate(["def f("], params)
    parting = divergence(several, found.prompt_ids, expected.token_ids, found.token_ids, params)
    assert parting is None or parting.is_tie


@pytest.mark.parametrize(
    "mesh", ["expert=2,tensor=4", *(pytest.param(mesh, marks=pytest.mark.long) for mesh in ("", "data=2,tensor=4"))]
)
@pytest.mark.parametrize("form", [None, *(pytest.param(f, marks=pytest.mark.long) for f in ("fp8", "int4", "nvfp4"))])
@pytest.mark.parametrize("draft", ["auto", pytest.param("mtp", marks=pytest.mark.long)])
def test_the_implementations_for_a_tpu_give_the_text_of_a_cpu(mesh, form, draft, monkeypatch):
    params = SamplingParams(temperature=0.7, top_k=20, seed=4, max_tokens=24)
    (expected,) = LLM(draft=None, quantize=form, kernels="xla").generate(["def f("], params)
    monkeypatch.setattr(llm, "prepare_backend", lambda *_: Backend.xla("tpu"))
    there = LLM(draft=draft, mesh=mesh, quantize=form, block_size=4)
    is_transposed = [isinstance(w, TransposedWeight) for w in jax.tree.leaves(there.target, is_leaf=is_weight)]
    assert any(is_transposed) == (form is None)
    (found,) = there.generate(["def f("], params)
    parting = divergence(there, found.prompt_ids, expected.token_ids, found.token_ids, params)
    assert parting is None or parting.is_tie


@pytest.mark.parametrize("name", OUTSIDE)
def test_two_devices_divide_what_is_one_tensor_on_disk_and_biases(name, tmp_path):
    save_example(name, tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with examples_registered():
        one, two = (LLM(tmp_path, draft=None, mesh=mesh) for mesh in ("", "tensor=2"))
        (expected,), (found,) = (llm.generate([[5, 9, 77]], params) for llm in (one, two))
    parting = divergence(two, found.prompt_ids, expected.token_ids, found.token_ids, params)
    assert parting is None or parting.is_tie
    mixer = two.target.layers[0].mixer
    for path in ("q", "k", "v", *(f"{x}_bias" for x in "qkv" if mixer.spec.qkv_bias)):
        assert lies(getattr(mixer, path)[...], ("tensor0",)), path


def test_more_devices_than_there_are():
    with pytest.raises(InputError, match=r"needs 16 devices: there are 8"):
        LLM(mesh="tensor=16")


def test_pages_that_do_not_divide():
    message = "size is 8: it must be 1, 2 or 4, since on mesh data=1,expert=1,tensor=8 4 devices share one of the 1 KV"
    with pytest.raises(InputError, match=message):
        LLM(mesh="tensor=8", decode_context_parallel_size=8)


def test_experts_that_do_not_divide():
    with pytest.raises(InputError, match=r"8 experts cannot be divided among expert=3"):
        LLM(mesh="expert=3")


@pytest.mark.parametrize("layout", [DIVIDED[1], pytest.param(LAYOUTS[1], marks=pytest.mark.long)], ids=["divided", ""])
def test_the_engine_on_a_mesh_under_load(layout):
    """Data shards with slots of their own, prefixes shared among them, swaps, aborts; a DFlash drafter and an MTP head,
    of which either drafts."""
    target = random_decoder(family_config("qwen3_5_moe"))
    head = random_head(target.config)
    drafter = random_drafter(replace(tiny_draft_config(target.config), vocab_size=VOCAB))
    wanted, speculations, rng = some_requests(0, 24, VOCAB), speculations_of((8,), (8,)), random.Random(0)
    expected = alone(engine_for(Executables(target, None), (1,), slots=4, prefix_bytes=0), wanted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "BATCH_SIZES", (4,))
        # Requests come without regard to what they will need, so that many move to the host.
        patch.setattr(Slots, "_need", lambda self, request: self.pages.need(1))
        patch.setattr(cache, "PAGE_SIZE", 16)
        patch.setattr(Executables, "compiler_options", {"xla_backend_optimization_level": 0})
        cut = on(layout, target, abstract_decoder)
        options = {"prefix_bytes": 150_000, "prefix_host_bytes": 10**9, "pages": (12, 12)}
        both = together([on(layout, each, abstract_drafter) for each in (drafter, head)])
        engine = engine_for(Executables(cut, both), slots=8, speculations=speculations, **options)
        engine.policy.choose = lambda batch_size, acceptances, allowed=speculations, *_: rng.choice(allowed)
        under_load(engine, target, wanted, expected, 40, seed=1)
        swaps, copied = engine.statistics.preemptions, copying_out(engine, seed=0)
        under_load(engine, target, wanted, expected, 10, seed=2)
    shards = [(request, engine.runner.shard(slot)) for request, slot in copied]
    assert len({request for request, _ in shards}) < len(set(shards)), "all came back to the same data shards"
    k = engine.runner.state.target[-1].k
    each = 16 // layout.decode_context_parallel
    assert {part.data.shape for part in k.addressable_shards} == {(12, 1, each, k.shape[-1])}
    assert swaps > 0
    assert engine.statistics.cached_tokens > 0
    assert engine.prefix_cache.tiers.host.hits > 0
    assert engine.free_slots == 8
    assert {spec for _, spec in engine.statistics.dispatches} >= {Speculation(8, 0), Speculation(8, 1)}
    engine.policy.choose = lambda *_: speculations[-1]
    run_last(engine, wanted[:8])
    state = of_one_device(jax.device_get(engine.runner.state), layout.data)
    assert_context(target, head, replace(state, draft=state.draft[1]), rows_with_context(state, 1), 1)

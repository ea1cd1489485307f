"""Every mesh of eight devices has one device's weights. Collected by `test_mesh.py`, as `cases.py` is."""

import json
import shutil
from dataclasses import replace
from functools import cache
from itertools import product

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from dflash_jax import LLM, SamplingParams
from dflash_jax.checkpoint import orbax, parameters
from dflash_jax.checkpoint.export import to_hf
from dflash_jax.checkpoint.files import TensorFiles
from dflash_jax.checkpoint.load import DRAFT_TOKENS, load_drafter, load_target, open_any
from dflash_jax.checkpoint.parameters import FEW_BITS, QUANTIZED, spread
from dflash_jax.errors import InputError
from dflash_jax.frontend import llm
from dflash_jax.frontend.compare import divergence
from dflash_jax.frontend.loading import draft_vocabulary
from dflash_jax.models import families, packing
from dflash_jax.models.decoder import abstract_decoder
from dflash_jax.models.families import dflash, mtp, qwen3_5
from dflash_jax.models.layers import with_backend
from dflash_jax.models.packing import transpose_experts, unpack_weights
from dflash_jax.ops import weights as ops_weights
from dflash_jax.ops.backend import Backend
from dflash_jax.ops.weights import FEW_TOKENS, GROUPS, QuantizedWeight, TransposedWeight, is_weight
from dflash_jax.parallel.devices import DEVICES
from dflash_jax.parallel.sharding import ONE_DEVICE, Layout, parameter_paths, parameter_specs, spec
from dflash_jax.planner import make_plan, read_shapes
from tests import few_bits
from tests.checkpoint import test_draft_layouts as draft_layouts
from tests.checkpoint.conftest import DRAFT_JSON, TARGET_JSON
from tests.helpers import random_decoder, random_drafter, random_head
from tools.float64_reference import assert_as_near

# Eight parts of 64 features have less than a block's inputs each, eight of 96 begin within blocks; heads of 20 and of 6
# inputs are no whole blocks.
BLOCK = 32
SIZES = {"hidden_size": 64, "vocab_size": 64, "num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2}
TARGET = (
    TARGET_JSON
    | SIZES
    | {
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 8,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 12,
        "linear_value_head_dim": 6,
        "num_experts": 8,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
    }
)
DRAFT = (
    DRAFT_JSON
    | SIZES
    | {
        "layer_types": ["sliding_attention", "full_attention"],
        "intermediate_size": 96,
        "num_target_layers": 2,
        "dflash_config": {"mask_token_id": 62, "target_layer_ids": [0, 1]},
    }
)
# Every mesh of eight devices, and some of fewer: JAX names an axis of one factor otherwise than several axes.
LAYOUTS = [Layout(*sizes) for sizes in product((1, 2, 4, 8), repeat=3) if np.prod(sizes) == 8]
FEW = [Layout(tensor=2), Layout(tensor=8), Layout(expert=2, tensor=4), Layout(2, 2, 2)]
LAYOUTS += [Layout(tensor=n) for n in (2, 3, 6)] + [Layout(expert=2), Layout(data=2, tensor=2), Layout(2, 2, 1)]
EXPERTS = ("model.layers.0.mlp.experts.0.", "mtp.layers.0.mlp.experts.0.")
# Of forms that have the same arrays here, one.
OF_OTHERS = (
    *(*few_bits.FP8, "nvfp4 modelopt", "nvfp4 compressed", "mixed"),
    *("int4 asymmetric", "awq", "gptq eight", "mxfp4"),
)
# (dtype of the checkpoint, quantize)
FORMS = [
    ("float32", None),
    ("bfloat16", None),
    ("fp8", None),
    ("fp8", "none"),
    ("float32", "int8"),
    ("float32", "fp8"),
    ("fp8", "int8"),
    ("float32", "int4"),
    ("float32", "nvfp4"),
    *((form, None) for form in OF_OTHERS),
    ("mixed", "none"),
]
KINDS = ("target", "head", "drafter")
# Forms that each run loads on all meshes; the others are loaded on FEW, and by the long tests on all.
EVERYWHERE = (("fp8", None), ("mixed", None))
on_meshes = pytest.mark.parametrize("layouts", [FEW, pytest.param(LAYOUTS, marks=pytest.mark.long)], ids=["few", "all"])


def modules() -> dict:
    """Kind → (random module, its entries)."""
    config, draft = families.read_target(TARGET), replace(families.read_drafter(DRAFT), own_head=True)
    target, head, drafter = random_decoder(config, 1), random_head(config, 2), random_drafter(draft, 3)
    return {
        "target": (target, qwen3_5.weight_names(config, EXPERTS)),
        "head": (head, mtp.weight_names(head.config, EXPERTS)),
        "drafter": (drafter, dflash.weight_names(draft)),
    }


def is_in_few_bits(entry, form: str) -> bool:
    """Whether a parameter of a checkpoint of ``form`` is in few bits: large matrices, and the head of some."""
    return entry.path.rsplit(".", 1)[-1] in (FEW_BITS if form in few_bits.WITH_HEAD else QUANTIZED)


def in_blocks(weight: np.ndarray, rng) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float8 values [O, I], bfloat16 factors of their blocks, and the float32 product."""
    values, grid = weight.astype(ml_dtypes.float8_e4m3fn), [-(-n // BLOCK) for n in weight.shape]
    factors = rng.uniform(0.5, 2, grid).astype(ml_dtypes.bfloat16)
    spread = factors.astype(np.float32).repeat(BLOCK, 0).repeat(BLOCK, 1)
    return values, factors, values.astype(np.float32) * spread[: weight.shape[0], : weight.shape[1]]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """(dtype, kind) → (directory, the parameters in float32 by path)."""
    path, found = tmp_path_factory.mktemp("sources"), {}
    for dtype in ("float32", "bfloat16", "fp8", *OF_OTHERS):
        rng = np.random.default_rng(0)
        tensors: dict[str, dict] = {"target": {}, "draft": {}}
        for kind, (module, entries) in modules().items():
            folder = "draft" if kind == "drafter" else "target"
            leaves = dict(zip(parameter_paths(module), map(np.asarray, jax.tree.leaves(module)), strict=True))
            whole = {}
            for entry in entries:
                parts = dict(zip((t.name for t in entry.tensors), entry.write(leaves[entry.path]), strict=True))
                if dtype == "fp8" and entry.path.rsplit(".", 1)[-1] in QUANTIZED:
                    for name, part in parts.items():
                        tensors[folder][name], tensors[folder][f"{name}_scale_inv"], parts[name] = in_blocks(part, rng)
                elif dtype in OF_OTHERS and is_in_few_bits(entry, dtype):
                    for name, part in parts.items():
                        found_part = few_bits.stored(dtype, name, part, rng)
                        if found_part is None:
                            tensors[folder][name] = part
                        else:
                            more, parts[name] = found_part
                            tensors[folder] |= more
                elif entry.path != "final_norm.weight":
                    stored = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
                    tensors[folder] |= {name: part.astype(stored) for name, part in parts.items()}
                    parts = {name: part.astype(stored).astype(np.float32) for name, part in parts.items()}
                whole[entry.path] = entry.read(list(parts.values()))
            if kind == "head":
                whole["final_norm.weight"] = found[dtype, "target"][1]["norm.weight"]
            found[dtype, kind] = (path / dtype / folder, whole)
        for folder, raw in (("target", TARGET), ("draft", DRAFT)):
            directory = path / dtype / folder
            directory.mkdir(parents=True)
            if dtype == "fp8":
                raw = raw | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}}
            if dtype in OF_OTHERS:
                raw = raw | {"quantization_config": few_bits.config(dtype)}
            if dtype == "mixed":
                tensors[folder] |= few_bits.unused(tensors[folder])
            (directory / "config.json").write_text(json.dumps(raw))
            save_file(tensors[folder], directory / "model.safetensors")
    return found


@pytest.fixture(scope="module")
def conversion(sources, tmp_path_factory):
    """``conversion(dtype, kind, quantize, mesh)``: the Orbax directory."""

    @cache
    def convert(dtype: str, folder: str, quantize: str | None = None, layout: Layout = ONE_DEVICE):
        directory = sources[dtype, "drafter" if folder == "draft" else "target"][0]
        target = tmp_path_factory.mktemp("orbax") / folder
        source, module = open_any(directory, layout)
        orbax.convert(source, module, directory, target, layout, {"dtype": None, "quantize": quantize}, lambda x: x)
        return target

    return convert


def load(kind: str, directory, dtype: str, layout: Layout, quantize: str | None):
    """A module, in bfloat16 from a checkpoint in bfloat16."""
    options = {"dtype": jnp.bfloat16 if dtype == "bfloat16" else jnp.float32, "layout": layout, "quantize": quantize}
    module = (load_target if kind == "target" else load_drafter)(directory, **options)
    for leaf, cut in zip(jax.tree.leaves(module), parameter_specs(module), strict=True):
        assert leaf.sharding.is_equivalent_to(NamedSharding(layout.mesh(), cut), leaf.ndim)
    return module


def weights(module) -> dict:
    """Path → weight."""
    leaves = jax.tree.leaves(module, is_leaf=is_weight)
    return dict(zip(parameter_paths(module, is_weight), leaves, strict=True))


def parts_of(weight) -> list[tuple[tuple, np.ndarray]]:
    """(Index, float32 part) on each device, as a device multiplies its part out."""
    if not isinstance(weight, QuantizedWeight):
        return [(part.index, np.asarray(part.data, np.float32)) for part in weight.addressable_shards]
    arrays, structure = jax.tree.flatten(weight)
    found = []
    for shards in zip(*(array.addressable_shards for array in arrays), strict=True):
        assert len({shard.device for shard in shards}) == 1
        *rows, last = shards[0].index
        if weight.code and last != slice(None):
            last = slice(2 * (last.start or 0), 2 * last.stop)
        part = jax.tree.unflatten(structure, [np.asarray(shard.data) for shard in shards])
        found.append(((*rows, last), part.dense(np.float32)))
    return found


def check_weights(found: dict, expected: dict, layout: Layout) -> None:
    """Every device has its part of every weight, to the bit; where a divisor became a factor, to two units."""
    assert set(found) == set(expected)
    for path, weight in found.items():
        units = 2 if isinstance(weight, QuantizedWeight) and weight.factor is not None else 0
        for index, part in parts_of(weight):
            right = expected[path][index].astype(np.float32)
            assert (np.abs(part - right) <= units * np.spacing(np.abs(right))).all(), f"{path} on {layout}"


def of_one_device(sources, kind, dtype, quantize) -> dict:
    """What every mesh must have: the tensors' values, or what one device quantises them to."""
    directory, whole = sources[dtype, kind]
    if quantize in (None, "none") or kind == "drafter" or dtype == "fp8":
        return whole
    quantised = {p for p in whole if p.rsplit(".", 1)[-1] in QUANTIZED}
    one = weights(load(kind, directory, dtype, ONE_DEVICE, quantize))
    assert {path for path, weight in one.items() if isinstance(weight, QuantizedWeight)} == quantised
    if quantize in ("int8", "fp8"):
        assert all(one[path].scale.shape[-1] == 1 for path in quantised)
    found = {path: parts_of(weight)[0][1] for path, weight in one.items()}
    assert all(np.array_equal(found[path], whole[path]) != (path in quantised) for path in whole)
    return found


@on_meshes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "quantize"), FORMS)
def test_every_mesh_has_one_devices_weights(sources, kind, dtype, quantize, layouts):
    expected = of_one_device(sources, kind, dtype, quantize)
    if quantize in GROUPS and layouts is FEW:
        # To quantize so takes long: one mesh has all axes divided.
        layouts = FEW[-2:-1]
    for layout in LAYOUTS if (dtype, quantize) in EVERYWHERE else layouts:
        found = load(kind, sources[dtype, kind][0], dtype, layout, quantize)
        check_weights(weights(found), expected, layout)


@on_meshes
@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize("kind", draft_layouts.KINDS)
def test_a_drafter_of_speculators_has_one_devices_weights_on_every_mesh(kind, reduced, layouts, tmp_path):
    vocab, ids = draft_layouts.VOCAB, draft_layouts.IDS
    if reduced and kind == "dflash2":
        # speculators has these with whole vocabularies only.
        return
    count = len(ids) if reduced else vocab
    tensors = draft_layouts.tensors_of(kind, count)
    if reduced:
        head = np.random.default_rng(1).standard_normal((count, draft_layouts.HIDDEN)).astype(np.float32)
        tensors |= {"d2t": ids - np.arange(count), "lm_head.weight": head}
    path = draft_layouts.written(draft_layouts.speculators(kind, draft_vocab_size=count), tensors, tmp_path)
    expected = {name: np.asarray(leaf) for name, leaf in weights(load_drafter(path)).items()}
    for layout in layouts:
        check_weights(weights(load("drafter", path, "float32", layout, None)), expected, layout)


@pytest.mark.parametrize(("dtype", "quantize"), [("bfloat16", None), ("fp8", None)])
def test_a_head_alone_has_the_weights_of_the_same_head_in_the_targets_files(sources, dtype, quantize, tmp_path):
    directory, files = sources[dtype, "head"][0], TensorFiles(sources[dtype, "head"][0])
    shutil.copy(directory / "config.json", tmp_path)
    save_file({name: files.read(name) for name in files if name.startswith("mtp.")}, tmp_path / "model.safetensors")
    for layout in FEW:
        expected = load("head", directory, dtype, layout, quantize)
        norm = load("target", directory, dtype, layout, quantize).norm.weight[...]
        options = {"dtype": norm.dtype, "layout": layout, "quantize": quantize, "final_norm": norm}
        found = load_drafter(tmp_path, **options)
        for path, a, b in zip(parameter_paths(found), jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim), path
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32), err_msg=path)


@on_meshes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "quantize"), FORMS)
def test_every_mesh_has_one_devices_weights_from_orbax(sources, conversion, kind, dtype, quantize, layouts):
    expected = of_one_device(sources, kind, dtype, quantize)
    directory = conversion(dtype, "draft" if kind == "drafter" else "target")
    for layout in layouts:
        check_weights(weights(load(kind, directory, dtype, layout, quantize)), expected, layout)


@pytest.mark.parametrize("quantize", ["int8", "fp8", "int4", "nvfp4"])
def test_what_is_quantised_for_one_mesh_is_read_on_every_mesh(sources, conversion, quantize):
    expected = of_one_device(sources, "target", "float32", quantize)
    directory = conversion("float32", "target", quantize, Layout(tensor=4))
    for layout in (ONE_DEVICE, *FEW):
        check_weights(weights(load("target", directory, "float32", layout, None)), expected, layout)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of these checkpoints in the place of 128 outputs."""
    for module in (ops_weights, packing):
        monkeypatch.setattr(module, "SCALED_OUTPUTS", BLOCK)


def experts_of(module) -> list:
    return [w for path, w in weights(module).items() if path.endswith(("ffn.gate_up", "ffn.down"))]


@on_meshes
@pytest.mark.parametrize(
    ("dtype", "quantize", "tpu"),
    [
        ("float32", None, "TPU v6 lite"),
        ("fp8", None, "TPU7x"),
        ("fp8 channel", None, "TPU7x"),
        ("float32", "fp8", "TPU7x"),
        ("float32", "int8", "TPU v6 lite"),
    ],
)
def test_transposed_experts_are_one_devices_on_every_mesh(sources, small_blocks, dtype, quantize, tpu, layouts):
    expected = of_one_device(sources, "target", dtype, quantize)
    for layout in (ONE_DEVICE, *layouts):
        module = load("target", sources[dtype, "target"][0], dtype, layout, quantize)
        module = with_backend(module, Backend.for_tpu("xla", tpu))
        planned = transpose_experts(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), module))
        transposed = transpose_experts(module)
        assert len(experts_of(transposed)) == 4
        assert all(isinstance(weight, TransposedWeight) for weight in experts_of(transposed))
        leaves, shapes = map(jax.tree.leaves, (transposed, planned))
        for leaf, shape, cut in zip(leaves, shapes, parameter_specs(transposed), strict=True):
            assert leaf.sharding.is_equivalent_to(NamedSharding(layout.mesh(), cut), leaf.ndim)
            assert (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype)
        check_weights(weights(unpack_weights(transposed)), expected, layout)


@pytest.mark.parametrize("mesh", ["expert=2", "expert=2,tensor=4"])
def test_experts_in_blocks_of_eight_bits_give_a_tpu_the_text_of_a_cpu(sources, small_blocks, mesh, monkeypatch):
    directory, _ = sources["fp8", "target"]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    (expected,) = LLM(directory, draft=None, kernels="xla").generate([[5, 9, 41, 7]], params)
    monkeypatch.setattr(llm, "prepare_backend", lambda *_: Backend.for_tpu("xla", "TPU7x"))
    there = LLM(directory, draft=None, mesh=mesh)
    assert [w.has_parts for w in experts_of(there.target)] == [mesh == "expert=2", True] * 2
    (found,) = there.generate([[5, 9, 41, 7]], params)
    parting = divergence(there, found.prompt_ids, expected.token_ids, found.token_ids, params)
    assert parting is None or parting.is_tie


@pytest.mark.parametrize("is_old", [False, True], ids=["", "older"])
def test_scales_go_from_any_mesh_to_any_other_and_back(sources, conversion, tmp_path, monkeypatch, is_old):
    """An older conversion has its scales as the mesh's shards needed them."""
    if is_old:

        def spread_over_mesh(arrays, sharding, ndim):
            found = parameters.placed(arrays, sharding, ndim)
            return spread(QuantizedWeight(**found), sharding).arrays() if "values" in found else found

        monkeypatch.setattr(orbax, "placed", spread_over_mesh)
    directory = conversion("fp8", "target", None, Layout(expert=4, tensor=2) if is_old else Layout(tensor=8))
    (runs,) = {
        record["arrays"]["scale"][1][-1]
        for name, record in json.loads((directory / orbax.MANIFEST).read_text())["records"].items()
        if name.endswith("ffn.shared.down") and "layers.0." in name
    }
    assert runs == (24 if is_old else 3)
    for layout in (ONE_DEVICE, *FEW):
        check_weights(weights(load("target", directory, "fp8", layout, None)), sources["fp8", "target"][1], layout)
    to_hf(directory, tmp_path / "hf", 10**9, lambda tensors, _: tensors)
    before, after = TensorFiles(sources["fp8", "target"][0]), TensorFiles(tmp_path / "hf")
    assert set(before) == set(after)
    for name in before:
        assert before.read(name).tobytes() == after.read(name).tobytes(), name


# Products.


@pytest.mark.parametrize(
    ("dtype", "quantize", "layout", "tokens"),
    [
        ("float32", "int8", Layout(tensor=8), FEW_TOKENS + 20),
        ("fp8", None, Layout(2, 2, 2), 20),
        ("nvfp4 compressed", None, Layout(2, 2, 2), 20),
    ],
)
def test_products_of_spread_scales_are_those_of_the_whole_weight(sources, dtype, quantize, layout, tokens):
    """Parts of a row have copies of its scale, and their products are summed over devices."""
    module = load("target", sources[dtype, "target"][0], dtype, layout, quantize)
    expected = of_one_device(sources, "target", dtype, quantize)
    plain = abstract_decoder(module.config)
    plain = jax.tree.unflatten(jax.tree.structure(plain), [expected[path] for path in parameter_paths(plain)])
    ids = np.random.default_rng(0).integers(0, 64, (2, tokens)).astype(np.int32)

    def logits(target, ids):
        return target.logits(target(ids)[0])

    specs = jax.tree.unflatten(jax.tree.structure(module), parameter_specs(module))
    options = {"in_specs": (specs, spec("data")), "out_specs": spec("data", None, module.vocab), "check_vma": False}
    found = jax.jit(jax.shard_map(logits, mesh=layout.mesh(), **options))(module, ids)
    assert_as_near(found, logits, plain, ids)


# What `dflash plan` says.


def device_bytes(module) -> int:
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(module))


def planned(target, draft, layout: Layout, quantize: str | None) -> dict:
    numbers = {"slots": 8, "max_len": 64, "context": 64, "acceptance_length": 1.0, "block": 4}
    shapes = read_shapes(str(target), str(draft))
    return make_plan(shapes, layout, DEVICES["h100"], dtype=jnp.float32, quantize=quantize, **numbers)


@pytest.mark.parametrize(("dtype", "quantize"), [f for f in FORMS if f[0] != "bfloat16"])
def test_a_plan_has_the_bytes_that_are_loaded(sources, dtype, quantize):
    for layout, kind in product(FEW, ("head", "drafter")):
        (target, _), (draft, _) = sources[dtype, "target"], sources[dtype, kind]
        sizes = planned(target, draft, layout, quantize)["bytes_per_device"]
        assert sizes["target"] == device_bytes(load("target", target, dtype, layout, quantize)), layout
        assert sizes["drafter"] == device_bytes(load(kind, draft, dtype, layout, quantize)), layout


@pytest.mark.parametrize("quantize", [None, "none"])
@pytest.mark.parametrize("dtype", few_bits.WITH_HEAD)
def test_a_plan_counts_the_rows_of_a_draft_vocabulary(sources, dtype, quantize, tmp_path):
    """Of the target's head and of the drafter's own, in the form of either."""
    target, _ = sources[dtype, "target"]
    for layout, kind in product(FEW, ("head", "drafter")):
        directory = shutil.copytree(sources[dtype, kind][0], tmp_path / f"{kind} {layout}")
        (directory / DRAFT_TOKENS).write_text(json.dumps(list(range(1, 30))))
        both = load("target", target, dtype, layout, quantize), load(kind, directory, dtype, layout, quantize)
        both[1].vocabulary = draft_vocabulary(both[1], np.arange(1, 30), both[0], "bfloat16")
        sizes = planned(target, directory, layout, quantize)["bytes_per_device"]
        assert [sizes["target"], sizes["drafter"]] == list(map(device_bytes, both)), (kind, layout)


REFUSED = [
    ({}, Layout(expert=3), None),
    ({}, Layout(expert=5), "int8"),
    ({}, Layout(tensor=8, decode_context_parallel=8), None),
    ({}, Layout(tensor=2, decode_context_parallel=2), "fp8"),
    ({}, Layout(), "int3"),
    ({"quant_method": "awq", "bits": 3, "group_size": 32}, Layout(tensor=2), None),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, Layout(), None),
    ({"quant_method": "fp8", "weight_block_size": [BLOCK, 0]}, Layout(), "int8"),
]


@pytest.mark.parametrize(("quantization", "layout", "quantize"), REFUSED)
def test_a_plan_refuses_what_loading_refuses(sources, tmp_path, quantization, layout, quantize):
    directory = shutil.copytree(sources["float32", "target"][0], tmp_path / "target")
    (directory / "config.json").write_text(json.dumps(TARGET | {"quantization_config": quantization}))
    with pytest.raises(InputError) as refused:
        load("target", directory, "float32", layout, quantize)
    with pytest.raises(InputError) as said:
        planned(directory, directory, layout, quantize)
    assert str(said.value) == str(refused.value.args[0])


def halved(directory):
    """The tensors of a checkpoint; numbers, and scales of those in few bits, are half as large."""

    def half(array):
        is_code = array.dtype.itemsize == 1 or array.dtype.kind in "iub"
        return array if is_code else np.asarray(array / array.dtype.type(2), array.dtype)

    files = TensorFiles(directory)
    return {name: half(np.array(files.read(name))) for name in files}


def assert_same_models(llm, other):
    models, others = (llm.target, llm.drafters), (other.target, other.drafters)
    assert jax.tree.structure(models) == jax.tree.structure(others)
    for path, one, two in zip(parameter_paths(models), jax.tree.leaves(models), jax.tree.leaves(others), strict=True):
        assert one.sharding.is_equivalent_to(two.sharding, one.ndim), path
        np.testing.assert_array_equal(np.asarray(one), np.asarray(two), err_msg=path)


EVERY_PAIR = [(form, layout) for form in FORMS for layout in FEW]
# One form of each kind.
SOME_FORMS = (("float32", None), *EVERYWHERE, ("float32", "int8"), ("float32", "nvfp4"), ("int4 asymmetric", None))
SOME_PAIRS = [(form, FEW[i % len(FEW)]) for i, form in enumerate(SOME_FORMS)]


@pytest.mark.parametrize("pairs", [SOME_PAIRS, pytest.param(EVERY_PAIR, marks=pytest.mark.long)], ids=["some", "all"])
def test_an_llm_with_new_weights_has_those_of_a_fresh_one(sources, pairs, tmp_path):
    for number, ((dtype, quantize), layout) in enumerate(pairs):
        source, draft = sources[dtype, "target"][0], sources[dtype, "drafter"][0]
        second, new = tmp_path / str(number), halved(source)
        second.mkdir()
        shutil.copyfile(source / "config.json", second / "config.json")
        save_file(new, second / "model.safetensors")
        kind = "bfloat16" if dtype == "bfloat16" else "float32"
        options = {"quantize": quantize, "mesh": layout, "dtype": kind, "draft": [str(draft), "mtp"]}
        llm, fresh, first = (LLM(each, **options) for each in (source, second, source))
        placed = NamedSharding(Layout(tensor=4).mesh(), PartitionSpec())
        on_others = {name: jax.device_put(x, placed) for name, x in new.items() if x.dtype.kind in "fV"}
        given = {"arrays": new, "arrays of another mesh": new | on_others, "a directory": second}
        if not any(isinstance(x, QuantizedWeight) for x in weights(first.target).values()):
            given["a module"] = fresh.target
        for form, each in given.items():
            # An MTP head comes with its target's tensors, but not with a module.
            head = {"mtp": fresh.drafters[1]} if form == "a module" else None
            llm.update_weights(each, drafter=head)
            assert_same_models(llm, fresh)
            llm.update_weights(source)
            assert_same_models(llm, first)
        shutil.rmtree(second)

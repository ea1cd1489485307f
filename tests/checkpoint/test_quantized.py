"""Checkpoints in few bits as others publish them: the numbers, the configuration, damage. Meshes: tests/mesh."""

import json
import re
import shutil
import time
from collections import Counter

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from dflash_jax import LLM, SamplingParams
from dflash_jax.checkpoint import orbax, quantization, quantized, words
from dflash_jax.checkpoint.export import to_hf
from dflash_jax.checkpoint.files import DTYPES, TensorFiles, Tensors
from dflash_jax.checkpoint.load import load_target, open_any, open_target, read_kv_scales, save_module
from dflash_jax.checkpoint.parameters import FEW_BITS, QUANTIZED
from dflash_jax.errors import InputError
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.models import families
from dflash_jax.models.config import AttentionSpec
from dflash_jax.models.families.names import Entry, rows_of, same, whole_tensors
from dflash_jax.models.kv_scales import with_fp8_caches
from dflash_jax.ops.weights import QuantizedWeight, is_weight
from dflash_jax.parallel.devices import DEVICES
from dflash_jax.parallel.sharding import ONE_DEVICE, parameter_paths
from dflash_jax.planner import make_plan, read_shapes
from tests import few_bits
from tests.checkpoint.conftest import TARGET_JSON, change_config, says
from tests.checkpoint.test_hostile_config import changed
from tests.helpers import random_decoder

SIZES = {"hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "num_hidden_layers": 2}
# The words of GPTQ and AWQ have eight outputs.
SIZES |= {"vocab_size": 104}
TARGET = TARGET_JSON | SIZES | {"layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 4}
PER_EXPERT = ("model.layers.0.mlp.experts.0.",)
Q = "model.layers.1.self_attn.q_proj"
KV = "model.layers.1.self_attn.{}"
CONVERTED = ("fp8 modelopt", "nvfp4 modelopt", "nvfp4 compressed", "mixed")
UP = "model.layers.1.mlp.shared_expert.up_proj"


def weights(module) -> dict[str, np.ndarray]:
    """Path → float32 weight."""
    leaves = jax.tree.leaves(module, is_leaf=is_weight)
    paths = parameter_paths(module, is_weight)
    dense = (x.dense(np.float32) if isinstance(x, QuantizedWeight) else x for x in leaves)
    return {path: np.asarray(x, np.float32) for path, x in zip(paths, dense, strict=True)}


# Of other families. One has experts in one of its layers, and layers that share tensors on disk.
PLAIN = {"hidden_size": 64, "vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
PLAIN |= {"num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 64}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]}
OTHERS = {
    "qwen3": PLAIN | {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_moe": PLAIN | SPARSE | {"model_type": "qwen3_moe"},
    "qwen3_next": TARGET | {"model_type": "qwen3_next"},
    "qwen3_5": {k: v for k, v in TARGET.items() if "exper" not in k and k != "moe_intermediate_size"}
    | {"model_type": "qwen3_5_text", "intermediate_size": 96},
}


def save_in(form: str, path, is_fused: bool = False, raw: dict = TARGET) -> dict[str, np.ndarray]:
    """Writes a random target with its large matrices in few bits; path → what each parameter stands for."""
    target, rng = random_decoder(families.read_target(raw), 1), np.random.default_rng(0)
    leaves = dict(zip(parameter_paths(target), map(np.asarray, jax.tree.leaves(target)), strict=True))
    tensors, expected = {}, {}
    for entry in families.target_family(raw).weight_names(target.config, () if is_fused else PER_EXPERT):
        parts = dict(zip((t.name for t in entry.tensors), entry.write(leaves[entry.path]), strict=True))
        is_large = entry.path.rsplit(".", 1)[-1] in (FEW_BITS if form in few_bits.WITH_HEAD else QUANTIZED)
        for name, part in parts.items():
            few = few_bits.stored(form, name, part, rng) if is_large else None
            more, parts[name] = few or ({name: part}, part)
            tensors |= more
        expected[entry.path] = entry.read(list(parts.values()))
    if form == "mixed":
        tensors |= few_bits.unused(tensors)
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(raw | {"quantization_config": few_bits.config(form)}))
    return expected


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Form → (directory, what each parameter stands for)."""
    path = tmp_path_factory.mktemp("few bits")
    forms = (*CONVERTED, "int4 asymmetric", "gptq", "gptq eight", "awq", "mxfp4")
    return {form: (path / form.replace(" ", "_"), save_in(form, path / form.replace(" ", "_"))) for form in forms}


@pytest.fixture
def copied(sources, tmp_path):
    """``copied(form)``: a copy of a checkpoint, to be damaged."""
    return lambda form: shutil.copytree(sources[form][0], tmp_path / "target")


def check_equal(form: str, found: np.ndarray, expected: np.ndarray, path: str) -> None:
    """To the bit; where a divisor became a factor, to two units of the last place."""
    if form == "nvfp4 compressed":
        np.testing.assert_array_max_ulp(found, expected.astype(np.float32), 2)
    else:
        np.testing.assert_array_equal(found, expected, err_msg=path)


def change(path, tensors: dict[str, np.ndarray | None]) -> None:
    """Replaces tensors; None removes one."""
    old = TensorFiles(path)
    both = {name: old.read(name).copy() for name in old} | tensors
    save_file({name: x for name, x in both.items() if x is not None}, path / "model.safetensors")


def refused(path, *parts) -> None:
    with pytest.raises(InputError) as error:
        load_target(path)
    says(error, *parts)


# The numbers.


class Few(Tensors):
    """Tensors in memory."""

    def __init__(self, tensors: dict[str, np.ndarray]):
        self._tensors = tensors

    def __getitem__(self, name):
        return self._tensors[name].shape

    def __iter__(self):
        return iter(self._tensors)

    def __len__(self):
        return len(self._tensors)

    def dtype(self, name):
        return next(kind for kind, dtype in DTYPES.items() if dtype == self._tensors[name].dtype)

    def read(self, name):
        return self._tensors[name]


@pytest.mark.parametrize(("dialect", "whole"), [("modelopt", 0.01), ("compressed", 100.0)])
def test_worked_values_of_nvfp4(dialect, whole):
    """Byte 0xB6 is 4 and -1.5; with a block's scale of 1.5 and 0.01 of the tensor they are 0.06 and -0.0225."""
    packed, scale = np.full((1, 8), 0xB6, np.uint8), np.full((1, 1), 0x3C, np.uint8).view(few_bits.FLOAT8)
    assert few_bits.unpacked(packed)[0, :2].tolist() == [4, -1.5]
    names = {"modelopt": ("x.weight", "_scale_2"), "compressed": ("x.weight_packed", "_global_scale")}[dialect]
    tensors = {names[0]: packed, "x.weight_scale": scale, f"x.weight{names[1]}": np.float32([whole]).reshape(1)}
    found = read_one(tensors, (1, 16), few_bits.config(f"nvfp4 {dialect}"))
    np.testing.assert_allclose(found.dense(np.float32)[0, :2], [0.06, -0.0225], rtol=1e-6)
    np.testing.assert_array_equal(found.values, packed)


def read_one(tensors: dict[str, np.ndarray], shape: tuple[int, int], form: dict) -> QuantizedWeight:
    """The weight of one module x; its tensors are written again, to the byte."""
    entry, files = same("x", shape, "x.weight"), Few(tensors)
    parts = quantized.stored_of(entry, files, quantization.read({"quantization_config": form}, TINY))
    assert not [problem for part in parts for problem in part.problems(files)]
    arrays = {name: np.asarray(array) for name, array in quantized.read(entry, parts, files).items()}
    places = {part.name: part for part in parts[0].parts}
    for tensor, array in quantized.write(entry, parts, arrays):
        again = quantized.on_disk(places[tensor.name], array, files.dtype(tensor.name))
        assert again.tobytes() == tensors[tensor.name].tobytes(), tensor.name
    assert places.keys() | {part.name for part in parts[0].constants.values()} == tensors.keys()
    found = quantized.without_divisor(arrays, is_exact=False)
    return QuantizedWeight.of({name: np.asarray(array) for name, array in found.items()})


def column(word: int) -> np.ndarray:
    return np.uint32([[word]]).view(np.int32)


def test_worked_values_of_words():
    """0x76543210 is -8 to -1; GPTQ's first version stores 7 for a zero of 8; AWQ's 0x75316420 is outputs 0 to 7."""
    one, half = np.ones((1, 1), np.float16), np.full((1, 1), 0.5, np.float16)
    shape = np.int64([1, 8])
    tensors = {"x.weight_packed": column(0x76543210), "x.weight_scale": one, "x.weight_shape": shape}
    form = few_bits.config("int4 channel")
    np.testing.assert_array_equal(read_one(tensors, (1, 8), form).dense(np.float32), [np.arange(-8, 0)])
    for version, zero, is_symmetric in (
        ("gptq", 7, True),
        ("gptq", 7, False),
        ("gptq_v2", 8, False),
        ("gptq", 15, False),
    ):
        form = {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": is_symmetric, "checkpoint_format": version}
        tensors = {
            "x.qweight": column(0xA).repeat(8, 1),
            "x.qzeros": column(0x11111111 * zero),
            "x.scales": half.repeat(8, 1),
        }
        found = read_one(tensors, (8, 8), form)
        # A stored 15 is a zero of 0.
        assert found.dense(np.float32)[0, 0] == (1.0 if zero != 15 else 5.0)
        assert (found.zero is None) == is_symmetric
    form = {"quant_method": "awq", "bits": 4, "group_size": -1, "zero_point": True, "version": "GEMM"}
    tensors = {"x.qweight": column(0x75316420).repeat(2, 0), "x.qzeros": column(0), "x.scales": one.repeat(8, 1)}
    np.testing.assert_array_equal(read_one(tensors, (8, 2), form).dense(np.float32)[:, 0], np.arange(8))
    exponents = {"x.weight_packed": np.full((1, 16), 0xB6, np.uint8), "x.weight_scale": np.uint8([[126]])}
    found = read_one(exponents, (1, 32), few_bits.config("mxfp4")).dense(np.float32)
    np.testing.assert_array_equal(found[0, :2], [2, -0.75])


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    bits=st.sampled_from([4, 8]),
    rows=st.integers(1, 20),
    columns=st.integers(1, 20),
    layout=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
    lead=st.sampled_from([(), (2,)]),
    seed=st.integers(0, 99),
)
def test_words_go_there_and_back(bits, rows, columns, layout, lead, seed):
    of_outputs, is_transposed, is_zero, is_ordered = layout
    order = words.AWQ_ORDER if is_ordered and bits == 4 and of_outputs else ()
    less = int(is_zero and is_transposed)
    made = words.Words(bits, of_outputs, is_transposed, order, less, is_zero)
    integers = np.random.default_rng(seed).integers(0, 256, (*lead, rows, columns), np.uint8)
    if is_zero or bits == 8:
        integers = ((integers & np.uint8(2**bits - 1)) - np.uint8(2 ** (bits - 1))).view(np.int8)
    disk = made.write(integers)
    assert (disk.dtype, disk.shape) == (np.int32, made.disk_shape(integers.shape))
    np.testing.assert_array_equal(made.read(disk, integers.shape), integers)


def test_every_power_of_two_is_exact():
    exponents = np.arange(255, dtype=np.uint8)[None]
    found = words.Exponents().read(exponents, exponents.shape)
    np.testing.assert_array_equal(found.astype(np.float64), 2.0 ** (exponents.astype(np.float64) - 127))
    np.testing.assert_array_equal(words.Exponents().write(found), exponents)
    assert np.isnan(words.Exponents().read(np.uint8([255]), (1,)).astype(np.float32))


def test_every_code_and_every_scale_has_its_value():
    codes, bits = np.arange(16, dtype=np.uint8), np.arange(256, dtype=np.uint8)
    every = np.pad(codes[::2] | codes[1::2] << 4, (0, 8))[None]
    weight = QuantizedWeight(every, np.ones((1, 1), np.float32), code="e2m1")
    np.testing.assert_array_equal(weight.dense(np.float32)[0, :16], few_bits.of_e2m1(codes))
    weight = QuantizedWeight(every, np.ones((1, 1), np.float32), code="int4")
    np.testing.assert_array_equal(weight.dense(np.float32)[0, :16], codes.astype(np.float32) - 8)
    numbers = bits[(bits & 127) != 127]
    np.testing.assert_array_equal(numbers.view(few_bits.FLOAT8).astype(np.float32), few_bits.of_e4m3(numbers))


@pytest.mark.parametrize("form", few_bits.FORMS)
def test_every_form_is_read(form, tmp_path):
    """With stacked experts, where the form has them; another order of inputs is multiplied out."""
    has_order = form in few_bits.ACT_ORDER
    expected = save_in(form, tmp_path, is_fused=form not in few_bits.PACKED and not has_order)
    found = load_target(tmp_path)
    assert isinstance(found.layers[0].ffn.gate_up[...], QuantizedWeight) != has_order
    for path, weight in weights(found).items():
        check_equal(form, weight, expected[path], path)


@pytest.mark.parametrize("form", ["int4 asymmetric", "gptq asymmetric", "awq", "mxfp4"])
@pytest.mark.parametrize("family", OTHERS)
def test_every_family_is_read(family, form, tmp_path):
    expected = save_in(form, tmp_path, raw=OTHERS[family])
    target = load_target(tmp_path)
    for path, weight in weights(target).items():
        check_equal(form, weight, expected[path], path)
    assert all(w.code for w in jax.tree.leaves(target, is_leaf=is_weight) if isinstance(w, QuantizedWeight))
    assert sum(isinstance(w, QuantizedWeight) for w in jax.tree.leaves(target, is_leaf=is_weight)) > 5


class Counted(Few):
    """Tensors in memory, and the bytes that were read of each."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.read_bytes = Counter()

    def section(self, name, *args):
        array = super().section(name, *args)
        self.read_bytes[name] += array.nbytes
        return array


@pytest.mark.parametrize("form", few_bits.FORMS)
def test_columns_that_are_multiplied_out_are_those_of_the_whole(form):
    weight, rng = np.random.default_rng(0).standard_normal((16, 128)).astype(np.float32), np.random.default_rng(1)
    tensors, _ = few_bits.stored(form, f"{Q}.weight", weight, rng)
    files, found = Counted(tensors), quantization.read({"quantization_config": few_bits.config(form)}, TINY)
    (part,) = quantized.stored_of(same("q", weight.shape, f"{Q}.weight"), files, found)
    rows, values = slice(3, 11), part.values.name
    whole = quantized._multiplied_out(part, files, rows, slice(0, 128))
    of_whole = files.read_bytes.pop(values)
    for begin, end in ((0, 32), (32, 128)):
        numbers = quantized._multiplied_out(part, files, rows, slice(begin, end))
        np.testing.assert_array_equal(numbers, whole[:, begin:end])
    assert files.read_bytes[values] == of_whole
    for begin, end in ((16, 48), (3, 7), (127, 128)):
        numbers = quantized._multiplied_out(part, files, rows, slice(begin, end))
        np.testing.assert_array_equal(numbers, whole[:, begin:end])


@pytest.mark.parametrize("form", ["int4 asymmetric", "int8 asymmetric"])
def test_zero_points_of_stacked_matrices_are_read_once(form):
    weight, rng = np.random.default_rng(0).standard_normal((5, 16, 64)).astype(np.float32), np.random.default_rng(1)
    tensors, _ = few_bits.stored(form, f"{Q}.weight", weight, rng)
    files, found = Counted(tensors), quantization.read({"quantization_config": few_bits.config(form)}, TINY)
    entry = same("q", weight.shape, f"{Q}.weight")
    parts = quantized.stored_of(entry, files, found)
    zero = quantized.read(entry, parts, files)["zero"]
    name, whole = parts[0].scales["zero"].name, np.asarray(zero)
    files.read_bytes.clear()
    for i in range(5):
        np.testing.assert_array_equal(zero[i : i + 1, 3:9, :], whole[i : i + 1, 3:9])
    assert files.read_bytes[name] == tensors[name].nbytes


@pytest.mark.parametrize("form", ["gptq asymmetric", "gptq eight", "awq", "int4 asymmetric", "int8 asymmetric"])
def test_parameters_may_be_rows_of_one_tensor(form):
    """Of words of several outputs, too, which no parameter has for itself."""
    weight = np.random.default_rng(0).standard_normal((48, 64)).astype(np.float32)
    tensors, expected = few_bits.integers(form, "x.weight", weight, np.random.default_rng(1))
    files, found = Few(tensors), quantization.read({"quantization_config": few_bits.config(form)}, TINY)
    written, places = [], {}
    for tensor in rows_of("x.weight", (12, 3, 33), 64):
        entry = Entry("q", tensor.shape, (tensor,))
        parts = quantized.stored_of(entry, files, found)
        arrays = {name: np.asarray(array) for name, array in quantized.read(entry, parts, files).items()}
        rows = slice(tensor.first, tensor.first + tensor.shape[0])
        np.testing.assert_array_equal(QuantizedWeight.of(arrays).dense(np.float32), expected[rows])
        written += quantized.write(entry, parts, arrays)
        places |= {part.name: part for part in parts[0].parts}
    whole = dict(whole_tensors(written))
    assert whole.keys() == places.keys()
    for name, array in whole.items():
        assert quantized.on_disk(places[name], array, files.dtype(name)).tobytes() == tensors[name].tobytes(), name


def test_what_is_not_in_few_bits_is_read_as_it_is(sources):
    """Of a mixed checkpoint: gates, router and norms."""
    path, _ = sources["mixed"]
    target = load_target(path)
    kept = {
        p
        for p, w in zip(parameter_paths(target, is_weight), jax.tree.leaves(target, is_leaf=is_weight), strict=True)
        if isinstance(w, QuantizedWeight)
    }
    assert {p.rsplit(".", 1)[-1] for p in kept} == set(FEW_BITS)
    assert target.layers[0].mixer.qkvz[...].values.dtype == few_bits.FLOAT8
    assert target.layers[0].ffn.gate_up[...].code == target.head[...].code == "e2m1"


def test_gptqs_head_may_be_said_apart_from_the_layers(copied):
    """GPTQModel's and AutoRound's keys for it, where a list names blocks of layers."""
    path = copied("gptq eight")
    for keys in ({"lm_head": True}, {"lm_head": None, "quant_lm_head": True}):
        blocks = {"block_name_to_quantize": "model.layers"}
        change_config(path, quantization_config=few_bits.config("gptq eight") | blocks | keys)
        assert is_in_few_bits(load_target(path).head)
    change_config(path, quantization_config=few_bits.config("gptq eight") | blocks | {"lm_head": False})
    refused(path, "lm_head", "not quantized by dynamic and block_name_to_quantize")


@pytest.mark.parametrize("draft", [TINY / "draft", "mtp"], ids=["dflash", "mtp"])
def test_drafting_changes_no_token_of_a_target_in_few_bits(draft, tmp_path):
    """The bundled target with its matrices and its head in FP8: drafted from all tokens or some, and plain."""
    (tmp_path / "ids.json").write_text(json.dumps(list(range(0, 512, 2))))
    directory = few_bits.in_fp8(
        TINY / "target", tmp_path / "target", lambda n: n.endswith("_proj.weight") or n == "lm_head.weight"
    )
    params, texts = SamplingParams(max_tokens=24, ignore_eos=True), []
    for draft_tokens in (None, tmp_path / "ids.json"):
        llm = LLM(directory, draft, quantize="compressed-tensors", draft_tokens=draft_tokens)
        assert is_in_few_bits(llm.target.head)
        assert draft_tokens is None or is_in_few_bits(llm.drafter.vocabulary.head)
        for size in (1, 4):
            (completion,) = llm.generate(["def f("], params, block_size=size)
            texts.append(completion.token_ids)
            assert size == 1 or max(completion.acceptance_lengths) > 1
    assert texts == texts[:1] * 4


def is_in_few_bits(parameter) -> bool:
    """Whether a parameter is in few bits, in panels of a CPU too."""
    weight = parameter[...]
    return isinstance(weight, QuantizedWeight) or getattr(weight, "form", None) is not None


def test_the_name_of_a_format_must_be_that_of_the_checkpoint():
    """vLLM's and SGLang's ``--quantization``, which changes nothing here."""
    for form, name in (("gptq", "gptq"), ("awq", "awq"), ("mixed", "modelopt"), ("mxfp4 modelopt", "auto-round")):
        raw = {"quantization_config": few_bits.config(form)}
        assert quantization.without_format(name, raw, TINY) is None
        with pytest.raises(InputError, match=r"quantize is 'compressed-tensors': .* is quantized by"):
            quantization.without_format("compressed-tensors", raw, TINY)
    with pytest.raises(InputError, match=r"quantize is 'awq': .* is not quantized"):
        LLM(quantize="awq")
    assert [quantization.without_format(name, {}, TINY) for name in (None, "fp8")] == [None, "fp8"]


# Plans, logs, conversions.


def test_a_plan_without_tensors_follows_the_config(sources, tmp_path):
    for form, (path, _) in sources.items():
        (tmp_path / "config.json").write_text((path / "config.json").read_text())
        of_config, of_files = (read_shapes(str(p), None).forms for p in (tmp_path, path))
        large = {p: f.values for p, f in of_config.parameters if p.rsplit(".", 1)[-1] in FEW_BITS}
        known = {p: f.values for p, f in of_files.parameters if p.rsplit(".", 1)[-1] in FEW_BITS}
        assert known.items() <= large.items(), form
        assert ("head" in large) == ("head" in known) == (form in few_bits.WITH_HEAD)


def test_scales_that_are_not_used_are_named(sources, caplog):
    path = sources["mixed"][0]
    count = sum(name.endswith("input_scale") for name in TensorFiles(path))
    with caplog.at_level("INFO"):
        load_target(path)
    assert f"not used, since only weights are in few bits: {count} x input_scale\n" in caplog.text
    said = "the checkpoint asks for keys and values as numbers with scales: kv_cache_dtype 'fp8' has them in FP8"
    assert said in caplog.text
    numbers = {"slots": 1, "max_len": 64, "context": 64, "acceptance_length": 1.0, "block": 1, "dtype": np.float32}

    def not_used(**options) -> list[str]:
        return make_plan(read_shapes(str(path), None), ONE_DEVICE, DEVICES["h100"], **numbers, **options)["not_used"]

    assert not_used() == [f"{count} x input_scale", "1 x k_scale", "1 x v_scale", "--kv-cache-dtype fp8 is off"]
    assert not_used(has_fp8_caches=True) == [f"{count} x input_scale"]


@pytest.mark.parametrize("is_converted", [False, True])
def test_scales_of_keys_and_values_are_the_checkpoints(is_converted, copied, tmp_path):
    """One of a layer or one a head; what a checkpoint does not have follows from its weights."""
    path, k_proj = copied("mixed"), KV.format("k_proj.k_scale")
    opened = open_target(path)
    (layer,) = [i for i, spec in enumerate(opened.config.layers) if isinstance(spec.mixer, AttentionSpec)]
    heads = opened.config.layers[layer].mixer.num_kv_heads
    each = np.linspace(0.5, 2, heads).astype(np.float32)
    change(path, {k_proj: np.array(0.0371, np.float32), KV.format("v_proj.v_scale"): each})
    if is_converted:
        opened, module = open_any(path)
        options = {"dtype": None, "quantize": None}
        orbax.convert(opened, module, path, tmp_path / "o", ONE_DEVICE, options, lambda x: x)
        path = tmp_path / "o"
    target = load_target(path)
    mixer = with_fp8_caches(target, read_kv_scales(path, target.config)).layers[layer].mixer
    np.testing.assert_array_equal(mixer.k_scale[...], np.full(heads, np.float32(0.0371)))
    np.testing.assert_array_equal(mixer.v_scale[...], each)
    assert parameter_paths(with_fp8_caches(target)) != parameter_paths(target)
    llm = LLM(path, draft=None, kv_cache_dtype="fp8", max_len=64, slots=1)
    np.testing.assert_array_equal(llm.target.layers[layer].mixer.v_scale[...], each)


KV_ALONE = {
    "modelopt": ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8", "ignore": ["*"]}, None),
    "modelopt scheme": (
        {"quant_method": "modelopt", "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
        None,
    ),
    "file of modelopt": (None, {"quant_algo": None, "kv_cache_quant_algo": "FP8", "exclude_modules": ["*"]}),
    "both of modelopt": ({"quant_method": "modelopt", "quant_algo": None}, {"kv_cache_quant_algo": "FP8"}),
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": None,
            "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        },
        None,
    ),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "NVFP4"}, None),
    "int8": (
        {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "int", "strategy": "tensor"}},
        None,
    ),
}


@pytest.mark.parametrize("form", KV_ALONE)
def test_keys_and_values_alone_may_be_quantized(form, tmp_path):
    """Weights are plain, and scales are used with FP8 where they are FP8's: those of NVFP4 would cut numbers off."""
    config, own = KV_ALONE[form]
    target = random_decoder(families.read_target(TARGET), 1)
    raw = TARGET | ({"quantization_config": config} if config else {})
    entries = families.target_family(TARGET).weight_names(target.config, ())
    save_module(target, entries, raw, tmp_path, np.float32)
    if own:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": own}))
    change(tmp_path, {KV.format(f"{x}_proj.{x}_scale"): np.array(0.125, np.float32) for x in "kv"})
    loaded = load_target(tmp_path)
    for path, weight in weights(loaded).items():
        np.testing.assert_array_equal(weight, weights(target)[path], err_msg=path)
    is_fp8 = form not in ("nvfp4", "int8")
    forms = read_shapes(str(tmp_path), None).forms
    assert forms.not_used(has_fp8_caches=True) == ([] if is_fp8 else ["1 x k_scale", "1 x v_scale"])
    assert forms.not_used(has_fp8_caches=False)[:2] == ["1 x k_scale", "1 x v_scale"]
    found = with_fp8_caches(loaded, read_kv_scales(tmp_path, loaded.config))
    right = with_fp8_caches(loaded).layers[1].mixer
    for name in ("k_scale", "v_scale"):
        scale = np.asarray(getattr(found.layers[1].mixer, name)[...])
        assert (scale == 0.125).all() == is_fp8
        assert is_fp8 or np.array_equal(scale, getattr(right, name)[...])


@pytest.mark.parametrize("value", [0, -1, np.nan, np.inf, -np.inf, 1e-38, 3e38])
def test_scales_of_keys_that_are_none_are_refused(value, copied):
    """Numbers divided by those of them that are above 0 would be NaN, or queries times them infinite."""
    path = copied("mixed")
    change(path, {KV.format("k_proj.k_scale"): np.array(value, np.float32)})
    message = (
        f"config.json: tensor '{KV.format('k_proj.k_scale')}' has the scale {value:g}: it must be from 1e-18 to 1e+18"
    )
    with pytest.raises(InputError, match=re.escape(message)):
        read_kv_scales(path, open_target(path).config)


def test_scales_of_keys_of_another_shape_are_refused(copied):
    path = copied("mixed")
    change(path, {KV.format("k_proj.k_scale"): np.ones(3, np.float32)})
    with pytest.raises(InputError, match=r"has shape \[3\]: it must be one scale, or one a head"):
        read_kv_scales(path, open_target(path).config)


def test_scales_of_unknown_modules_are_not_passed_over(copied):
    path = copied("mixed")
    change(path, {"model.layers.9.mlp.up_proj.input_scale": np.ones((), np.float32)})
    refused(path, "unexpected 'model.layers.9.mlp.up_proj.input_scale'")


def test_modelopts_own_file_stands_for_the_configs_entry(copied, caplog):
    path = copied("nvfp4 modelopt")
    config = json.loads((path / "config.json").read_text())
    entry = config.pop("quantization_config")
    (path / "config.json").write_text(json.dumps(config))
    refused(path, "it must be [")
    entry = {"quant_algo": entry["quant_algo"], "kv_cache_quant_algo": "FP8", "exclude_modules": entry["ignore"]}
    (path / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": entry}))
    with caplog.at_level("INFO"):
        load_target(path)
    assert "asks for keys and values as 'FP8': kv_cache_dtype 'fp8' has them in FP8" in caplog.text
    asked = ["keys and values as 'FP8'", "--kv-cache-dtype fp8 is off"]
    assert read_shapes(str(path), None).forms.not_used(has_fp8_caches=False) == asked
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": entry | {"quant_algo": "INT4_AWQ"}}))
    refused(path, f"{path}/hf_quant_config.json: quant_algo is 'INT4_AWQ'")


@pytest.mark.parametrize(
    "form", [*CONVERTED, "int4 asymmetric", "int8 naive", "gptq asymmetric", "gptq eight", "awq", "mxfp8"]
)
def test_conversions_keep_every_byte(form, tmp_path):
    source = tmp_path / "source"
    expected = save_in(form, source)
    target = load_target(source)
    for path, weight in weights(target).items():
        check_equal(form, weight, expected[path], path)
    check_conversion(source, tmp_path, target)


# Damage.

NAN, MINUS = np.uint8(0x7F), np.uint8(0xB8)
# The group of each input, two of which changed places.
ORDER = np.int32([1, *[0] * 31, 0, *[1] * 31])


DAMAGE = [
    ("nvfp4 modelopt", {f"{Q}.weight_scale_2": None}, [f"missing '{Q}.weight_scale_2' []"]),
    ("nvfp4 modelopt", {f"{Q}.weight_scale": None}, [f"missing '{Q}.weight_scale' [160, 4]"]),
    ("nvfp4 compressed", {f"{Q}.weight_global_scale": None}, [f"missing '{Q}.weight_global_scale'"]),
    ("nvfp4 compressed", {f"{Q}.weight_packed": None}, [f"missing '{Q}.weight"]),
    ("fp8 modelopt", {f"{Q}.weight_scale": None}, [f"missing '{Q}.weight_scale' []"]),
    ("fp8 modelopt", {f"{Q}.weight_scale": np.ones(3, np.float32)}, ["shape [3]", "[] or [1] or [1, 1] or [160, 1]"]),
    ("fp8 modelopt", {f"{Q}.weight_scale": np.ones((), np.int32)}, ["dtype I32", "F32 or BF16 or F16"]),
    ("fp8 modelopt", {f"{Q}.weight_scale": np.float32(np.nan)}, [f"'{Q}.weight_scale'", "not finite"]),
    ("fp8 modelopt", {f"{Q}.weight_scale": np.float32(-1)}, [f"'{Q}.weight_scale'", "negative"]),
    ("fp8 modelopt", {f"{Q}.weight": np.ones((160, 64), np.float32)}, ["dtype F32, it must be F8_E4M3"]),
    ("nvfp4 modelopt", {f"{Q}.weight_scale": np.ones((160, 3), few_bits.FLOAT8)}, ["[160, 3], it must be [160, 4]"]),
    ("nvfp4 modelopt", {f"{Q}.weight_scale": np.ones((160, 4), np.uint8)}, ["dtype U8, it must be F8_E4M3"]),
    ("nvfp4 modelopt", {f"{Q}.weight_scale_2": np.float32(np.inf)}, [f"'{Q}.weight_scale_2'", "not finite"]),
    ("nvfp4 modelopt", {f"{Q}.weight_scale_2": np.float32(3e38)}, [f"'{Q}.weight_scale_2'", "finite"]),
    ("nvfp4 modelopt", {f"{Q}.weight_scale_2": np.float32(-0.1)}, [f"'{Q}.weight_scale_2'", "negative"]),
    ("nvfp4 compressed", {f"{Q}.weight_global_scale": np.zeros(1, np.float32)}, [f"'{Q}.weight_global_scale'", "0"]),
    # The reciprocal, which is the factor, is not finite; the quotients are.
    (
        "nvfp4 compressed",
        {
            f"{Q}.weight_global_scale": np.float32([1e-39]),
            f"{Q}.weight_scale": np.ones((160, 4), np.uint8).view(few_bits.FLOAT8),
        },
        [f"'{Q}.weight_global_scale' has 1.0", "finite"],
    ),
    ("nvfp4 compressed", {f"{Q}.weight_packed": np.zeros((160, 8), np.int32)}, ["[160, 8], it must be [160, 32]"]),
    ("nvfp4 compressed", {f"{Q}.weight_packed": np.zeros((160, 32), np.int32)}, ["dtype I32, it must be U8"]),
    ("nvfp4 modelopt", {f"{Q}.pre_quant_scale": np.ones(64, np.float32)}, [f"unexpected '{Q}.pre_quant_scale'"]),
    ("nvfp4 modelopt", {"model.norm.weight": np.ones(64, np.uint8)}, ["dtype U8", "floating-point"]),
    ("int4 asymmetric", {f"{Q}.weight_zero_point": None}, [f"missing '{Q}.weight_zero_point' [20, 2]"]),
    ("int4 asymmetric", {f"{Q}.weight_shape": None}, [f"missing '{Q}.weight_shape' [2]"]),
    ("int4 asymmetric", {f"{Q}.weight_shape": np.int64([160, 63])}, ["begins with [160, 63]: it must be [160, 64]"]),
    ("int4 asymmetric", {f"{Q}.weight_packed": np.zeros((160, 7), np.int32)}, ["[160, 7], it must be [160, 8]"]),
    ("int4 asymmetric", {f"{Q}.weight_packed": np.zeros((160, 8), np.float32)}, ["is NVFP4 by its tensors"]),
    ("int4 asymmetric", {f"{Q}.weight_scale": np.ones((160, 1), np.float32)}, ["[160, 1], it must be [160, 2]"]),
    ("int4 asymmetric", {f"{Q}.weight_zero_point": np.ones((160, 2), np.int8)}, ["[160, 2], it must be [20, 2]"]),
    ("int4 asymmetric", {f"{Q}.weight_g_idx": ORDER}, ["begins with [1, 0, 0, 0]: it must be 2 groups in order"]),
    ("int4 asymmetric", {f"{Q}.weight_g_idx": np.zeros(64, np.float32)}, ["dtype F32, it must be I32 or I64"]),
    ("gptq", {f"{Q}.g_idx": ORDER}, [f"'{Q}.g_idx' begins with [1, 0, 0, 0]", "act-order"]),
    ("gptq", {f"{Q}.g_idx": np.full(64, 2**31 - 1, np.int32)}, ["groups in order"]),
    ("gptq", {f"{Q}.g_idx": np.zeros(63, np.int32)}, ["[63], it must be [64]"]),
    ("gptq", {f"{Q}.qzeros": np.full((2, 20), 0x66666666, np.int32)}, [f"'{Q}.qzeros'", "middle of the codes"]),
    ("gptq", {f"{Q}.scales": np.full((2, 160), np.nan, np.float16)}, [f"'{Q}.scales'", "not finite"]),
    ("gptq", {f"{Q}.scales": np.full((2, 160), np.inf, np.float16)}, [f"'{Q}.scales'", "not finite"]),
    ("gptq", {f"{Q}.scales": None}, [f"missing '{Q}.scales' [2, 160]"]),
    ("gptq", {f"{Q}.scales": np.ones((160, 2), np.float16)}, ["[160, 2], it must be [2, 160]"]),
    ("gptq", {f"{Q}.qweight": None}, [f"missing '{Q}.weight' [160, 64]"]),
    ("gptq", {f"{Q}.qweight": np.zeros((16, 160), np.int32)}, ["is INT8 in", "INT4 of gptq by dynamic"]),
    ("gptq", {f"{Q}.qweight": np.zeros(0, np.int32)}, ["has shape [0], it must be [8, 160]"]),
    ("gptq", {f"{Q}.weight": np.zeros((160, 64), np.float32)}, [f"unexpected '{Q}.weight'"]),
    ("awq", {f"{Q}.qzeros": None}, [f"missing '{Q}.qzeros' [2, 20]"]),
    ("awq", {f"{Q}.qweight": np.zeros((8, 160), np.int32)}, ["[8, 160], it must be [64, 20]"]),
    ("awq", {f"{Q}.qweight": np.zeros((64, 20), np.int64)}, ["dtype I64, it must be I32"]),
    ("mxfp4", {f"{Q}.weight_scale": np.full((160, 2), 255, np.uint8)}, [f"'{Q}.weight_scale'", "not finite"]),
    ("mxfp4", {f"{Q}.weight_scale": np.ones((160, 2), np.float32)}, ["is NVFP4 by its tensors, and MXFP4"]),
]


@pytest.mark.parametrize(("form", "tensors", "parts"), DAMAGE)
def test_damaged_tensors_are_named(form, tensors, parts, copied):
    path = copied(form)
    change(path, {name: None if x is None else np.asarray(x) for name, x in tensors.items()})
    refused(path, *parts)
    if "missing" in parts[0]:
        with pytest.raises(InputError, match="missing"):
            read_shapes(str(path), None)


def test_scales_of_blocks_must_be_numbers(copied):
    for value, word in ((NAN, "not finite"), (MINUS, "negative")):
        path = copied("nvfp4 modelopt")
        change(path, {f"{Q}.weight_scale": np.full((160, 4), value, np.uint8).view(few_bits.FLOAT8)})
        refused(path, f"'{Q}.weight_scale'", word)
        shutil.rmtree(path)


def test_blocks_of_zeros_have_a_scale_of_zero(copied):
    path = copied("nvfp4 modelopt")
    change(
        path,
        {f"{Q}.weight_scale": np.zeros((160, 4), few_bits.FLOAT8), f"{UP}.weight_scale_2": np.zeros((), np.float32)},
    )
    target = load_target(path)
    assert not np.asarray(target.layers[1].mixer.q[...].dense(np.float32)).any()
    assert not np.asarray(target.layers[1].ffn.shared.gate_up[...].dense(np.float32))[1].any()


@pytest.mark.parametrize("form", ["mixed", "nvfp4 compressed", "gptq", "awq"])
def test_a_parameter_whose_tensors_are_not_alike_is_multiplied_out(form, sources, copied, tmp_path, caplog):
    """One is left unquantised. Plans count the array, and conversions keep every byte."""
    path, expected = copied(form), dict(sources[form][1])
    own = {name: None for name in TensorFiles(path) if name.startswith(f"{UP}.")}
    values = np.random.default_rng(5).standard_normal((48, 64)).astype(ml_dtypes.bfloat16)
    change(path, own | {f"{UP}.weight": values})
    with caplog.at_level("WARNING"):
        target = load_target(path)
    assert "1 parameters are multiplied out, since their tensors are not alike" in caplog.text
    gate_up, found = "layers.1.ffn.shared.gate_up", weights(target)
    expected[gate_up] = np.stack([expected[gate_up][0], values.astype(np.float32)])
    for name, weight in expected.items():
        check_equal(form, found[name], weight, name)
    assert not isinstance(target.layers[1].ffn.shared.gate_up[...], QuantizedWeight)
    check_plan(path, target)
    check_conversion(path, tmp_path, target)


@pytest.mark.parametrize("form", few_bits.ACT_ORDER)
def test_plans_and_conversions_of_another_order_of_inputs(form, tmp_path):
    save_in(form, tmp_path / "source")
    target = load_target(tmp_path / "source")
    assert not isinstance(target.layers[1].mixer.q[...], QuantizedWeight)
    # Its inputs are one group.
    assert isinstance(target.layers[1].ffn.down[...], QuantizedWeight)
    check_plan(tmp_path / "source", target)
    check_conversion(tmp_path / "source", tmp_path, target)


def check_plan(path, target) -> None:
    """A plan counts what is loaded."""
    numbers = {"slots": 1, "max_len": 64, "context": 64, "acceptance_length": 1.0, "block": 1, "dtype": np.float32}
    planned = make_plan(read_shapes(str(path), None), ONE_DEVICE, DEVICES["h100"], **numbers)["bytes_per_device"]
    assert planned["target"] == sum(leaf.nbytes for leaf in jax.tree.leaves(target))


def check_conversion(path, tmp_path, target) -> None:
    """A conversion is read as ``target``, has its plan, and comes back to the byte."""
    opened, module = open_any(path)
    orbax.convert(opened, module, path, tmp_path / "o", ONE_DEVICE, {"dtype": None, "quantize": None}, lambda x: x)
    for name, weight in weights(load_target(tmp_path / "o")).items():
        np.testing.assert_array_equal(weight, weights(target)[name], err_msg=name)
    check_plan(tmp_path / "o", target)
    to_hf(tmp_path / "o", tmp_path / "hf", 10**9, lambda tensors, _: tensors)
    before, after = TensorFiles(path), TensorFiles(tmp_path / "hf")
    assert set(before) == set(after)
    for name in before:
        assert (before[name], before.dtype(name)) == (after[name], after.dtype(name)), name
        assert before.read(name).tobytes() == after.read(name).tobytes(), name


@pytest.mark.parametrize("form", ["nvfp4 modelopt", "nvfp4 compressed", "gptq"])
def test_what_was_multiplied_out_has_no_way_back(form, sources, tmp_path):
    opened, module = open_any(sources[form][0])
    options = {"dtype": None, "quantize": "none"}
    orbax.convert(opened, module, sources[form][0], tmp_path / "o", ONE_DEVICE, options, lambda x: x)
    with pytest.raises(InputError, match="was multiplied out when it was converted: that has no way back"):
        to_hf(tmp_path / "o", tmp_path / "hf", 10**9, lambda tensors, _: tensors)
    assert not (tmp_path / "hf").exists()


def test_a_group_that_is_none_is_named(tmp_path):
    save_in("gptq act-order", tmp_path)
    change(tmp_path, {f"{Q}.g_idx": np.int32([2, *[0] * 63])})
    refused(tmp_path, f"'{Q}.g_idx' begins with [2, 0, 0, 0]: it must have groups from 0 to 1")


# The configuration.


def configured(**changes) -> dict:
    return few_bits.config("mixed") | changes


LAYERS = configured()["quantized_layers"]
CT = few_bits.config("nvfp4 compressed")
GROUP = CT["config_groups"]["group_0"]
CONFIGS = [
    (
        "mixed",
        configured(ignore=["*self_attn*"]),
        [f"'{Q}' is FP8 by its tensors, and not quantized by quantized_layers"],
    ),
    ("mixed", configured(quantized_layers=LAYERS | {f"{Q}": {"quant_algo": "NVFP4"}}), [f"'{Q}' is FP8", "NVFP4"]),
    ("mixed", configured(quantized_layers={"lm_head": {"quant_algo": "NVFP4"}}), ["not quantized by quantized_layers"]),
    ("mixed", configured(quantized_layers=[1]), ["quantized_layers is [1]: it must be an object"]),
    ("mixed", configured(quantized_layers={"x": 1}), ["quantized_layers['x'] is 1"]),
    ("mixed", configured(quantized_layers={"x": {"quant_algo": "INT4_AWQ"}}), ["quant_algo is 'INT4_AWQ'"]),
    ("mixed", configured(quantized_layers={"x": {"quant_algo": "NVFP4", "group_size": 32}}), ["group_size is 32"]),
    ("mixed", configured(ignore=[1]), ["ignore is [1]: it must be a list of strings"]),
    ("mixed", configured(quant_algo=None), ["quant_algo is None"]),
    (
        "nvfp4 modelopt",
        few_bits.config("fp8 modelopt"),
        ["is NVFP4 by its tensors, and FP8 by quant_algo and ignore of"],
    ),
    ("nvfp4 modelopt", {"quant_method": "fp8", "weight_block_size": [128, 128]}, ["is NVFP4 by its tensors, and FP8"]),
    ("nvfp4 compressed", CT | {"ignore": ["re:.*q_proj"]}, [f"'{Q}' is NVFP4", "not quantized by config_groups"]),
    ("nvfp4 compressed", CT | {"config_groups": {}}, ["not quantized by config_groups"]),
    ("nvfp4 compressed", CT | {"config_groups": None}, ["config_groups is None"]),
    ("nvfp4 compressed", CT | {"transform_config": {"config_groups": {"u": {}}}}, ["transform_config", "numbers"]),
    ("nvfp4 compressed", CT | {"ignore": ["re:(?=x)"]}, ["ignore has 're:(?=x)'", "RE2"]),
    ("nvfp4 compressed", CT | {"ignore": ["re:\ud800"]}, ["ignore has", "RE2"]),
    ("nvfp4 compressed", CT | {"ignore": ["re:" + "a" * 5000]}, ["5003 characters", "2000"]),
    (
        "nvfp4 compressed",
        CT | {"config_groups": {"g": GROUP | {"weights": {"num_bits": 3, "type": "int", "strategy": "channel"}}}},
        ["config_groups['g'].weights has 3 bits, type 'int'", "FP8, NVFP4, MXFP4, INT4 and INT8 are read here"],
    ),
    (
        "nvfp4 compressed",
        CT | {"config_groups": {"g": GROUP | {"weights": {"num_bits": 8, "type": "float", "strategy": "block"}}}},
        ["block_structure is None", "two sizes"],
    ),
]


GPTQ, AWQ, INT = few_bits.config("gptq"), few_bits.config("awq"), few_bits.config("int4 asymmetric")
WEIGHTS = INT["config_groups"]["group_0"]["weights"]


def integers(**changes) -> dict:
    return INT | {"config_groups": {"g": {"targets": ["Linear"], "weights": WEIGHTS | changes}}}


CONFIGS += [
    ("gptq", GPTQ | {"bits": 3}, ["bits is 3: it must be 4 or 8"]),
    ("gptq", GPTQ | {"bits": True}, ["bits is True"]),
    ("gptq", GPTQ | {"bits": "4"}, ["bits is '4'"]),
    ("gptq", GPTQ | {"group_size": 0}, ["group_size is 0: it must be a number of inputs, or -1 for a whole row"]),
    ("gptq", GPTQ | {"group_size": 10**30}, ["group_size", "it must be a number of inputs"]),
    ("gptq", GPTQ | {"group_size": 24}, ["has 64 inputs: they must be whole groups of 24"]),
    ("gptq", GPTQ | {"sym": "yes"}, ["sym is 'yes': it must be true or false"]),
    ("gptq", GPTQ | {"checkpoint_format": "marlin"}, ["checkpoint_format is 'marlin': gptq and gptq_v2"]),
    ("gptq", GPTQ | {"rotation": "hadamard"}, ["rotation is 'hadamard': it changes the numbers"]),
    ("gptq", GPTQ | {"dynamic": {"-:.*self_attn.*": {}}}, [f"'{Q}' is INT4 in {Q}.qweight by its tensors, and not"]),
    ("gptq", GPTQ | {"dynamic": {"+:.*q_proj": {"bits": 8}}}, ["INT8 of gptq by dynamic"]),
    ("gptq", GPTQ | {"dynamic": {".*": {"bits": 2}}}, ["bits is 2"]),
    ("gptq", GPTQ | {"dynamic": {"-:(?!x)": {}}}, ["dynamic has", "RE2"]),
    ("gptq", GPTQ | {"dynamic": [1]}, ["dynamic is [1]: it must be an object"]),
    ("gptq", GPTQ | {"modules_in_block_to_quantize": [["linear_attn", "mlp"]]}, [f"'{Q}' is INT4", "not quantized"]),
    ("gptq", AWQ, ["must be"]),
    ("gptq", CT, ["is INT4 in", "NVFP4 by config_groups"]),
    ("awq", GPTQ | {"sym": False}, ["must be"]),
    ("awq", AWQ | {"version": "gemv"}, ["version is 'gemv': AWQ's gemm is read here"]),
    ("awq", AWQ | {"bits": 8}, ["bits is 8: it must be 4"]),
    ("awq", AWQ | {"modules_to_not_convert": ["self_attn"]}, [f"'{Q}' is INT4", "not quantized by modules_to_not"]),
    ("awq", AWQ | {"modules_to_not_convert": [{}]}, ["modules_to_not_convert is [{}]: it must be a list of strings"]),
    ("int4 asymmetric", integers(symmetric=1), ["weights.symmetric is 1: it must be true or false"]),
    ("int4 asymmetric", integers(num_bits=2), ["weights has 2 bits, type 'int'"]),
    ("int4 asymmetric", integers(num_bits=8), ["is INT4 by its tensors, and INT8 of compressed-tensors"]),
    ("int4 asymmetric", integers(group_size=-32), ["group_size is -32"]),
    (
        "int4 asymmetric",
        integers(actorder="group"),
        ["missing 'model.layers.0.linear_attn.in_proj_qkv.weight_g_idx' [64]"],
    ),
    ("int4 asymmetric", integers(actorder="random"), ["actorder is 'random': it must be weight, group or null"]),
    ("mxfp4", {"quant_method": "auto-round", "data_type": "mx_fp", "bits": 6}, ["data_type is 'mx_fp' with 6 bits"]),
    (
        "mxfp4",
        {"quant_method": "mxfp4"},
        ["is quantized by 'mxfp4': fp8, awq, gptq, auto-round, compressed-tensors, modelopt are read here"],
    ),
]


@pytest.mark.parametrize(
    ("form", "config"),
    [
        ("gptq", GPTQ | {"dynamic": {"-:.*mlp[.]gate.*": {}, "+:^model.*": {"group_size": 32}, ".*": {"bits": 8}}}),
        # Symmetric weights have one middle, whatever version wrote the zero points.
        ("gptq", GPTQ | {"checkpoint_format": "gptq_v2", "desc_act": True, "static_groups": True, "damp_percent": 0.1}),
        ("gptq", GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn"], ["linear_attn", "mlp"]]}),
        (
            "gptq",
            {"quant_method": "intel/auto-round", "bits": 4, "group_size": 32, "backend": "auto_round:gptq:exllamav2"},
        ),
        ("gptq", {"quant_method": "auto-round", "bits": 4, "group_size": 32, "block_name_to_quantize": "model.layers"}),
        ("awq", AWQ | {"modules_to_not_convert": ["gate", "mlp.gate", "visual", "lm_head"], "w_bit": 4}),
        (
            "awq",
            {
                "quant_method": "auto-round",
                "packing_format": "auto_round:auto_awq",
                "bits": 4,
                "group_size": 32,
                "sym": False,
            },
        ),
        (
            "int4 asymmetric",
            integers(observer="mse", observer_kwargs={}, actorder="static", scale_dtype="torch.bfloat16"),
        ),
        (
            "int4 asymmetric",
            {
                "quant_method": "auto-round",
                "packing_format": "auto_round:llm_compressor",
                "bits": 16,
                "sym": False,
                "extra_config": {"model": {"bits": 4, "group_size": 32}, ".*gate$": {"bits": 16}},
            },
        ),
        ("mxfp4", {"quant_method": "auto-round", "data_type": "mx_fp4", "bits": 4, "group_size": 32}),
    ],
)
def test_keys_of_other_writers_and_hints_are_read(form, config, copied):
    path = copied(form)
    expected = weights(load_target(path))
    change_config(path, quantization_config=config)
    for name, weight in weights(load_target(path)).items():
        np.testing.assert_array_equal(weight, expected[name], err_msg=name)


@pytest.mark.parametrize(
    ("form", "config", "name"),
    [("awq", AWQ | {"zero_point": False}, "down_proj."), ("int4 asymmetric", integers(symmetric=True), "lm_head.")],
)
def test_symmetric_weights_with_zero_points_are_refused(form, config, name, copied):
    path = copied(form)
    change_config(path, quantization_config=config)
    refused(path, name, "must be the middle of the codes")


def test_the_version_of_gptq_changes_asymmetric_weights(tmp_path):
    """AutoRound's own packing has no offset."""
    save_in("gptq_v2 asymmetric", tmp_path)
    expected = weights(load_target(tmp_path))
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False}
    for packing, is_same in (("auto_round", True), ("auto_round:gptqmodel", True), ("auto_round:auto_gptq", False)):
        change_config(tmp_path, quantization_config=config | {"packing_format": packing})
        found = weights(load_target(tmp_path))
        assert np.array_equal(found["layers.1.mixer.q"], expected["layers.1.mixer.q"]) == is_same


@pytest.mark.parametrize(("form", "config", "parts"), CONFIGS)
def test_contradictory_and_hostile_configs_are_refused_by_name(form, config, parts, copied):
    path = copied(form)
    change_config(path, quantization_config=config)
    refused(path, path, *parts)


@pytest.mark.parametrize(
    ("changes", "is_read"),
    [
        ({"config_groups": {"g": GROUP | {"targets": ["re:.*_proj", "lm_head"]}}}, True),
        ({"config_groups": {"g": GROUP | {"targets": ["re:.*mlp.*"]}}}, False),
        ({"ignore": ["re:.*linear_attn.*", "re:model.visual.*", "mtp"]}, False),
        ({"ignore": []}, True),
        # Another spelling of the prefix.
        ({"config_groups": {"g": GROUP | {"targets": ["re:^model.language_model.layers.*", "lm_head"]}}}, True),
    ],
)
def test_targets_and_ignored_modules_are_names_classes_and_expressions(changes, is_read, copied):
    path = copied("nvfp4 compressed")
    change_config(path, quantization_config=CT | changes)
    if is_read:
        open_target(path)
    else:
        refused(path, "not quantized by config_groups")


CATASTROPHIC = [
    "re:(a+)+~",
    "re:(.*)*~",
    "re:(.|.)*~",
    "re:((.*)(.*)(.*)(.*)(.*))*~",
    "re:" + "(?:" * 60 + "a" + ")*" * 60 + "~",
]


def test_patterns_and_lists_of_any_length_end_soon(copied):
    many = [f"model.layers.{i}.mlp.gate" for i in range(200_000)]
    patterns = {pattern.removeprefix("re:"): {} for pattern in CATASTROPHIC}
    configs = {
        "nvfp4 compressed": CT | {"ignore": [*CATASTROPHIC, *many]},
        "gptq": GPTQ | {"dynamic": patterns, "extra_config": {name: {} for name in many}, **dict.fromkeys(many, 1)},
        "awq": AWQ | {"modules_to_not_convert": [*patterns, [[many[:50_000]]]]},
    }
    for form, config in configs.items():
        path = copied(form)
        started = time.process_time()
        change_config(path, quantization_config=config)
        open_target(path)
        assert time.process_time() - started < 10
        shutil.rmtree(path)


def test_too_many_patterns_are_refused_in_time(copied, monkeypatch):
    monkeypatch.setattr(quantization, "MOST_SECONDS", 0.05)
    path = copied("nvfp4 compressed")
    change_config(path, quantization_config=CT | {"ignore": [f"re:.*{i}" for i in range(50_000)]})
    started = time.process_time()
    refused(path, path, "more than 0.05 s", "fewer")
    assert time.process_time() - started < 10


def test_the_time_of_one_pattern_counts(monkeypatch):
    found = quantization.read({"quantization_config": CT | {"ignore": ["re:.*[a-m].{60}[n-z]~"]}}, TINY)
    monkeypatch.setattr(quantization, "MOST_SECONDS", 0.02)
    with pytest.raises(InputError, match=r"more than 0\.02 s"):
        list(map(found.claim, (f"model.layers.{i}.mlp.experts.7.gate_proj" for i in range(8000))))


def test_as_many_modules_as_the_largest_checkpoints_have_take_little_time(monkeypatch):
    """As NVIDIA's Qwen3.5-397B-A17B: three wildcards a layer, and experts by the thousand, of which none matches."""
    monkeypatch.setattr(quantization, "MOST_SECONDS", 2.0)
    parts = ("self_attn*", "mlp.shared_expert*", "mlp.shared_expert_gate*")
    ignored = [f"model.language_model.layers.{i}.{part}" for i in range(60) for part in parts]
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [*ignored, "mtp*"]}
    found = quantization.read({"quantization_config": config}, TINY)
    layers = [f"model.language_model.layers.{i}." for i in range(0, 60, 6)]
    for layer in layers:
        assert all(found.claim(f"{layer}mlp.experts.{i}.{x}_proj") for i in range(512) for x in ("gate", "up", "down"))
        assert not found.claim(f"{layer}self_attn.q_proj")


def test_the_first_of_many_patterns_tells_what_a_module_is():
    """Whatever they are: what is quoted without an end, alternatives, flags, what takes much memory."""
    eight, four = {"bits": 8}, {"bits": 4}
    large = {f"+:layers[.]{i}[.](?:x{{0,400}}){{2}}": eight for i in range(40)}
    dynamic = {
        "+:a|b": eight,
        r"+:\Qc": eight,
        r"+:\Qz\E|y": eight,
        "+:(?i)D": eight,
        "+:c|d|E": four,
        "+:.*e$": eight,
        **large,
    }
    found = quantization.read({"quantization_config": GPTQ | {"dynamic": dynamic | {"-:.*": {}}}}, TINY)
    kinds = {"a": "INT8", "b": "INT8", "c": "INT8", "d": "INT8", "D": "INT8", "C": None, "E": "INT4", "xe": "INT8"}
    for name, kind in (kinds | {"layers.7.xxx": "INT8", "layers.39.": "INT8", "layers.40.": None}).items():
        claim = found.claim(name)
        assert (claim and claim.kind) == kind, name


@pytest.mark.parametrize(
    "form",
    ["nvfp4 modelopt", "fp8 block", "nvfp4 compressed", "mixed", "int4 asymmetric", "gptq", "awq", "mxfp4 modelopt"],
)
def test_hostile_values_at_every_place_give_an_input_error_or_a_quantisation(form, tmp_path):
    messages = []
    for path, value, text in changed({"quantization_config": few_bits.config(form)}):
        try:
            found = quantization.read(json.loads(text), tmp_path)
            if found is not None:
                found.claim(Q)
        except InputError as e:
            messages.append(str(e.args[0]))
        except BaseException as e:
            raise AssertionError(f"{path} = {str(value)[:60]}: {type(e).__name__}: {e}") from e
    assert len(messages) > 50
    assert all(str(tmp_path) in message and len(message) < 1000 for message in messages)

"""Checkpoints in FP8 and NVFP4 as others publish them: the numbers, the configuration, damage. Meshes: tests/mesh."""

import json
import shutil
import time

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_jax import LLM, SamplingParams
from dflash_jax.checkpoint import orbax, quantization, quantized
from dflash_jax.checkpoint.export import to_hf
from dflash_jax.checkpoint.files import TensorFiles, Tensors
from dflash_jax.checkpoint.load import load_target, open_any, open_target
from dflash_jax.checkpoint.parameters import QUANTIZED
from dflash_jax.errors import InputError
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.models import families
from dflash_jax.models.families import qwen3_5
from dflash_jax.models.families.names import same
from dflash_jax.ops.weights import QuantizedWeight, is_weight
from dflash_jax.parallel.devices import DEVICES
from dflash_jax.parallel.sharding import ONE_DEVICE, parameter_paths
from dflash_jax.planner import make_plan, read_shapes
from tests import few_bits
from tests.checkpoint.conftest import TARGET_JSON, change_config, says
from tests.checkpoint.test_hostile_config import changed
from tests.helpers import random_decoder

SIZES = {"hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "num_hidden_layers": 2}
TARGET = TARGET_JSON | SIZES | {"layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 4}
PER_EXPERT = ("model.layers.0.mlp.experts.0.",)
Q = "model.layers.1.self_attn.q_proj"
UP = "model.layers.1.mlp.shared_expert.up_proj"


def weights(module) -> dict[str, np.ndarray]:
    """Path → float32 weight."""
    leaves = jax.tree.leaves(module, is_leaf=is_weight)
    paths = parameter_paths(module, is_weight)
    dense = (x.dense(np.float32) if isinstance(x, QuantizedWeight) else x for x in leaves)
    return {path: np.asarray(x, np.float32) for path, x in zip(paths, dense, strict=True)}


def save_in(form: str, path, is_fused: bool = False) -> dict[str, np.ndarray]:
    """Writes a random target with its large matrices in few bits; path → what each parameter stands for."""
    target, rng = random_decoder(families.read_target(TARGET), 1), np.random.default_rng(0)
    leaves = dict(zip(parameter_paths(target), map(np.asarray, jax.tree.leaves(target)), strict=True))
    tensors, expected = {}, {}
    for entry in qwen3_5.weight_names(target.config, () if is_fused else PER_EXPERT):
        parts = dict(zip((t.name for t in entry.tensors), entry.write(leaves[entry.path]), strict=True))
        is_large = entry.path.rsplit(".", 1)[-1] in QUANTIZED or (form == "mixed" and entry.path == "head")
        for name, part in parts.items():
            few = few_bits.stored(form, name, part, rng) if is_large else None
            more, parts[name] = few or ({name: part}, part)
            tensors |= more
        expected[entry.path] = entry.read(list(parts.values()))
    if form == "mixed":
        tensors |= few_bits.unused(tensors)
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(TARGET | {"quantization_config": few_bits.config(form)}))
    return expected


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Form → (directory, what each parameter stands for)."""
    path = tmp_path_factory.mktemp("few bits")
    forms = ("fp8 modelopt", "nvfp4 modelopt", "nvfp4 compressed", "mixed")
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
        return {"uint8": "U8", "float8_e4m3fn": "F8_E4M3", "float32": "F32"}[self._tensors[name].dtype.name]

    def read(self, name):
        return self._tensors[name]


@pytest.mark.parametrize(("dialect", "whole"), [("modelopt", 0.01), ("compressed", 100.0)])
def test_worked_values_of_nvfp4(dialect, whole):
    """Byte 0xB6 is 4 and -1.5; with a block's scale of 1.5 and 0.01 of the tensor they are 0.06 and -0.0225."""
    packed, scale = np.full((1, 8), 0xB6, np.uint8), np.full((1, 1), 0x3C, np.uint8).view(few_bits.FLOAT8)
    assert few_bits.unpacked(packed)[0, :2].tolist() == [4, -1.5]
    names = {"modelopt": ("x.weight", "_scale_2"), "compressed": ("x.weight_packed", "_global_scale")}[dialect]
    tensors = {names[0]: packed, "x.weight_scale": scale, f"x.weight{names[1]}": np.float32([whole]).reshape(1)}
    form, entry = few_bits.config(f"nvfp4 {dialect}"), same("x", (1, 16), "x.weight")
    files = Few(tensors)
    parts = quantized.stored_of(entry, files, quantization.read({"quantization_config": form}, TINY))
    found = QuantizedWeight.of(quantized.without_divisor(quantized.read(entry, parts, files), is_exact=False))
    np.testing.assert_allclose(found.dense(np.float32)[0, :2], [0.06, -0.0225], rtol=1e-6)
    np.testing.assert_array_equal(found.values, packed)


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
def test_stacked_experts_are_read(form, tmp_path):
    expected = save_in(form, tmp_path, is_fused=True)
    found = load_target(tmp_path)
    assert isinstance(found.layers[0].ffn.gate_up[...], QuantizedWeight)
    for path, weight in weights(found).items():
        check_equal(form, weight, expected[path], path)


def test_what_is_not_in_few_bits_is_read_as_it_is(sources):
    """Of a mixed checkpoint: the head is multiplied out, and gates, router and norms are what they are."""
    path, expected = sources["mixed"]
    target = load_target(path)
    kept = {
        p
        for p, w in zip(parameter_paths(target, is_weight), jax.tree.leaves(target, is_leaf=is_weight), strict=True)
        if isinstance(w, QuantizedWeight)
    }
    assert {p.rsplit(".", 1)[-1] for p in kept} == set(QUANTIZED)
    assert target.layers[0].mixer.qkvz[...].values.dtype == few_bits.FLOAT8
    assert target.layers[0].ffn.gate_up[...].code == "e2m1"
    np.testing.assert_array_equal(target.head[...], expected["head"])


def test_drafting_changes_no_token_of_a_target_in_few_bits(tmp_path):
    """The bundled target with its matrices in NVFP4 and FP8, drafted and plain."""
    directory, rng = shutil.copytree(TINY / "target", tmp_path / "target"), np.random.default_rng(0)
    tensors, few = load_file(directory / "model.safetensors"), {}
    for name in [n for n in tensors if n.startswith("model.layers.") and n.endswith("_proj.weight")]:
        few |= few_bits.fp8(name, tensors.pop(name).astype(np.float32), rng, "channel")[0]
    save_file(tensors | few, directory / "model.safetensors")
    change_config(directory, quantization_config=few_bits.config("fp8 channel"))
    llm, params = LLM(directory, TINY / "draft"), SamplingParams(max_tokens=24, ignore_eos=True)
    (plain,), (drafted,) = (llm.generate(["def f("], params, block_size=n) for n in (1, 8))
    assert drafted.token_ids == plain.token_ids


# Plans, logs, conversions.


def test_a_plan_without_tensors_follows_the_config(sources, tmp_path):
    for form, (path, _) in sources.items():
        (tmp_path / "config.json").write_text((path / "config.json").read_text())
        of_config, of_files = (read_shapes(str(p), None).forms for p in (tmp_path, path))
        large = {p: f.values for p, f in of_config.parameters if p.rsplit(".", 1)[-1] in QUANTIZED}
        known = {p: f.values for p, f in of_files.parameters if p.rsplit(".", 1)[-1] in QUANTIZED}
        assert known.items() <= large.items(), form


def test_scales_that_are_not_used_are_named(sources, caplog):
    path = sources["mixed"][0]
    count = sum(name.endswith("input_scale") for name in TensorFiles(path))
    with caplog.at_level("INFO"):
        load_target(path)
    assert (
        f"not used, since only weights are in few bits: {count} x input_scale, 1 x k_scale, 1 x v_scale" in caplog.text
    )
    numbers = {"slots": 1, "max_len": 64, "context": 64, "acceptance_length": 1.0, "block": 1, "dtype": np.float32}
    plan = make_plan(read_shapes(str(path), None), ONE_DEVICE, DEVICES["h100"], **numbers)
    assert plan["not_used"] == [f"{count} x input_scale", "1 x k_scale", "1 x v_scale"]


def test_scales_of_unknown_modules_are_not_passed_over(copied):
    path = copied("mixed")
    change(path, {"model.layers.9.mlp.up_proj.input_scale": np.ones((), np.float32)})
    refused(path, "unexpected 'model.layers.9.mlp.up_proj.input_scale'")


def test_modelopts_own_file_stands_for_the_configs_entry(copied):
    path = copied("nvfp4 modelopt")
    config = json.loads((path / "config.json").read_text())
    entry = config.pop("quantization_config")
    (path / "config.json").write_text(json.dumps(config))
    refused(path, "it must be [")
    entry = {"quant_algo": entry["quant_algo"], "kv_cache_quant_algo": "FP8", "exclude_modules": entry["ignore"]}
    (path / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": entry}))
    load_target(path)
    assert read_shapes(str(path), None).forms.not_used == ["keys and values as 'FP8'"]
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": entry | {"quant_algo": "INT4_AWQ"}}))
    refused(path, f"{path}/hf_quant_config.json: quant_algo is 'INT4_AWQ'")


@pytest.mark.parametrize("form", ["fp8 modelopt", "nvfp4 modelopt", "nvfp4 compressed", "mixed"])
def test_conversions_keep_every_byte(form, sources, tmp_path):
    source, expected = sources[form]
    opened, module = open_any(source)
    orbax.convert(opened, module, source, tmp_path / "o", ONE_DEVICE, {"dtype": None, "quantize": None}, lambda x: x)
    for path, weight in weights(load_target(tmp_path / "o")).items():
        check_equal(form, weight, expected[path], path)
    to_hf(tmp_path / "o", tmp_path / "hf", 10**9, lambda tensors, _: tensors)
    before, after = TensorFiles(source), TensorFiles(tmp_path / "hf")
    assert set(before) == set(after)
    for name in before:
        assert (before[name], before.dtype(name)) == (after[name], after.dtype(name)), name
        assert before.read(name).tobytes() == after.read(name).tobytes(), name


# Damage.

NAN, MINUS = np.uint8(0x7F), np.uint8(0xB8)


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


def test_half_a_parameter_in_another_form(copied):
    path = copied("mixed")
    z = "model.layers.0.linear_attn.in_proj_z.weight"
    change(path, {z: TensorFiles(path).read(z).astype(np.float32), f"{z}_scale": None})
    refused(path, "some tensors of layers.0.mixer.qkvz are in FP8 (scale) and some are not")


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
        CT | {"config_groups": {"g": GROUP | {"weights": {"num_bits": 4, "type": "int", "strategy": "group"}}}},
        ["config_groups['g'].weights has 4 bits, type 'int'", "FP8 and NVFP4 are read here"],
    ),
    (
        "nvfp4 compressed",
        CT | {"config_groups": {"g": GROUP | {"weights": {"num_bits": 8, "type": "float", "strategy": "block"}}}},
        ["block_structure is None", "two sizes"],
    ),
]


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
        ({"config_groups": {"g": GROUP | {"targets": ["re:^model.language_model.layers.*"]}}}, True),
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
    path = copied("nvfp4 compressed")
    many = [f"model.layers.{i}.mlp.gate" for i in range(200_000)]
    started = time.process_time()
    change_config(path, quantization_config=CT | {"ignore": [*CATASTROPHIC, *many]})
    open_target(path)
    assert time.process_time() - started < 10


def test_too_many_patterns_are_refused_in_time(copied, monkeypatch):
    monkeypatch.setattr(quantization, "MOST_SECONDS", 0.05)
    path = copied("nvfp4 compressed")
    change_config(path, quantization_config=CT | {"ignore": [f"re:.*{i}" for i in range(50_000)]})
    started = time.process_time()
    refused(path, path, "more than 0.05 s", "fewer")
    assert time.process_time() - started < 10


@pytest.mark.parametrize("form", ["nvfp4 modelopt", "fp8 block", "nvfp4 compressed", "mixed"])
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

"""Official FP8 checkpoints against transformers' dequantisation, and quantisation on loading."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import FineGrainedFP8Config, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

from dflash_jax.checkpoint.files import TensorFiles
from dflash_jax.checkpoint.load import load_target
from dflash_jax.checkpoint.parameters import QUANTIZED as QUANTIZED_ON_LOADING
from dflash_jax.errors import InputError
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.ops.weights import QuantizedWeight, dense, quantize
from dflash_jax.parallel.sharding import parameter_paths
from tests.float64 import assert_near
from tests.parity.oracle import oracle, randomise

COMMON = {
    "vocab_size": 101,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
}
# Blocks that divide everything, which is all that transformers reads; and blocks that divide nothing, heads smaller
# and larger than one. (hidden, head_dim, key_dim, value_dim, experts' and shared features)
SIZES = {16: (96, 32, 16, 32, 48, 64), 128: (320, 192, 48, 40, 144, 136)}
NAMES = (
    "hidden_size",
    "head_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
QUANTIZED = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj", "gate_proj", "up_proj")
TOKENS = np.random.default_rng(0).integers(0, 101, 90)


def in_blocks(weight: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float8 values, the factor that makes each block's largest value 448, and their product."""
    rows, columns = (-(-n // block) for n in weight.shape)
    values, scale = np.zeros(weight.shape, ml_dtypes.float8_e4m3fn), np.zeros((rows, columns), np.float32)
    product = np.zeros(weight.shape, np.float32)
    for i in range(rows):
        for j in range(columns):
            at = np.s_[i * block : (i + 1) * block, j * block : (j + 1) * block]
            scale[i, j] = np.abs(weight[at]).max() / 448
            values[at] = (weight[at] / scale[i, j]).astype(values.dtype)
            product[at] = values[at].astype(np.float32) * scale[i, j]
    return values, scale, product


def write(path, tensors, raw) -> None:
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(raw))


@pytest.fixture(scope="module", params=SIZES)
def checkpoints(request, tmp_path_factory):
    """(a random model on disk as the official FP8 checkpoints are: per expert, every large matrix in blocks; the same
    dequantised)"""
    path, block = tmp_path_factory.mktemp("fp8"), request.param
    config = Qwen3_5MoeTextConfig(**COMMON, **dict(zip(NAMES, SIZES[block], strict=True)))
    randomise(Qwen3_5MoeForCausalLM(config), 0).save_pretrained(path)
    raw, plain = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    tensors = dict(plain)
    for name, weight in plain.items():
        if any(name.endswith(f"{part}.weight") for part in (*QUANTIZED, "down_proj")):
            tensors[name], tensors[f"{name}_scale_inv"], plain[name] = in_blocks(weight, block)
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
        "modules_to_not_convert": ["lm_head", "in_proj_a", "in_proj_b", "gate", "shared_expert_gate", "conv1d"],
    }
    write(path / "fp8", tensors, {**raw, "quantization_config": quantization})
    write(path / "plain", plain, raw)
    return path / "fp8", path / "plain"


@pytest.fixture(scope="module")
def checkpoint(checkpoints):
    return checkpoints[0]


@pytest.fixture(scope="module")
def reference(checkpoints):
    """transformers' logits of the dequantised model."""
    return oracle(read(checkpoints[1]), TOKENS)[0]


def read(path, **options):
    model = Qwen3_5MoeForCausalLM.from_pretrained(path, dtype="float32", **options)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    return model.eval()


# transformers reads only sizes that the blocks divide.
@pytest.mark.parametrize("checkpoints", [16], indirect=True)
def test_logits_of_transformers_dequantised_model_equal_reference(checkpoint, reference):
    theirs = read(checkpoint, quantization_config=FineGrainedFP8Config(dequantize=True))
    assert_near(oracle(theirs, TOKENS)[0].single, reference, "logits")


def scores(target) -> np.ndarray:
    return np.asarray(jax.jit(lambda m, t: m.logits(m(t)[0]))(target, jnp.asarray(TOKENS[None], jnp.int32)))[0]


def weights(target) -> dict:
    leaves = jax.tree.leaves(target, is_leaf=lambda x: isinstance(x, QuantizedWeight))
    return dict(
        zip(
            dict.fromkeys(p.removesuffix(".values").removesuffix(".scale") for p in parameter_paths(target)),
            leaves,
            strict=True,
        )
    )


def test_weights_stay_in_eight_bits_and_give_the_logits_of_the_dequantised_model(checkpoint, reference):
    target = load_target(checkpoint)
    held = {name for name, w in weights(target).items() if isinstance(w, QuantizedWeight)}
    assert len(held) == 2 + 4 + 2 * 4  # qkvz and out; q, k, v, o; gate_up and down of experts and shared
    assert all(w.values.dtype == jnp.float8_e4m3fn for w in weights(target).values() if isinstance(w, QuantizedWeight))
    assert_near(scores(target), reference, "logits")


def test_quantize_none_loads_the_dequantised_weights(checkpoint, reference):
    target = load_target(checkpoint, quantize="none")
    mine, theirs = weights(target), weights(load_target(checkpoint))
    assert not any(isinstance(w, QuantizedWeight) for w in mine.values())
    for name, weight in mine.items():
        np.testing.assert_array_equal(weight, dense(theirs[name]), err_msg=name)
    assert_near(scores(target), reference, "logits")


def change(checkpoint, tmp_path, edit):
    files = TensorFiles(checkpoint)
    tensors = {name: files.read(name) for name in files}
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    return tmp_path


SCALE = "model.layers.1.self_attn.q_proj.weight_scale_inv"


def test_a_scale_of_a_wrong_shape(checkpoint, tmp_path):
    path = change(checkpoint, tmp_path, lambda t: t.update({SCALE: t[SCALE][:, :1].copy()}))
    with pytest.raises(InputError, match=r"q_proj.weight_scale_inv' has shape \[\d+, 1\], it must be \[\d+, [36]\]"):
        load_target(path)


def test_missing_scale_tensor_is_named(checkpoint, tmp_path):
    path = change(checkpoint, tmp_path, lambda t: t.pop(SCALE))
    with pytest.raises(InputError, match=r"missing 'model.layers.1.self_attn.q_proj.weight_scale_inv'"):
        load_target(path)


def test_half_a_parameter_in_fp8(checkpoint, tmp_path):
    """It is multiplied out: one half by its scales, the other one as it is."""
    changed = {}

    def edit(tensors):
        name = "model.layers.0.mlp.shared_expert.up_proj.weight"
        changed["up"] = tensors[name] = tensors[name].astype(np.float32)
        del tensors[f"{name}_scale_inv"]

    half, whole = (load_target(path) for path in (change(checkpoint, tmp_path, edit), checkpoint))
    gate, up = half.layers[0].ffn.shared.gate_up[...]
    np.testing.assert_array_equal(gate, dense(whole.layers[0].ffn.shared.gate_up[...])[0])
    np.testing.assert_array_equal(up, changed["up"])


@pytest.mark.parametrize(("kind", "error"), [("int8", 0.5 / 127), ("fp8", 2**-4)])
@pytest.mark.parametrize("runs", [1, 3])
def test_quantize_is_as_near_as_its_bits_allow(kind, error, runs):
    weight = np.random.default_rng(0).standard_normal((4, 5, 12)).astype(np.float32)
    weight[0, 0] = 0
    found = quantize(jnp.asarray(weight), kind, runs)
    assert found.scale.shape == (4, 5, runs)
    top = np.abs(weight.reshape(4, 5, runs, -1)).max(-1, keepdims=True)
    apart = np.abs(np.asarray(dense(found)) - weight).reshape(4, 5, runs, -1)
    # int8: half a step of the largest; fp8: half a unit in the last of three bits, of the value itself.
    scale = top if kind == "int8" else np.abs(weight).reshape(4, 5, runs, -1) + top / 448
    assert (apart <= error * scale * 1.001).all()


@pytest.mark.parametrize(("kind", "error"), [("int8", 0.02), ("fp8", 0.08)])
def test_quantized_on_loading_keeps_logits_within_error(kind, error):
    """The bundled target: every large matrix in eight bits, logits as far off as that many bits mean."""
    whole, target = load_target(TINY / "target"), load_target(TINY / "target", quantize=kind)
    for name, weight in weights(target).items():
        assert isinstance(weight, QuantizedWeight) == (name.rsplit(".", 1)[-1] in QUANTIZED_ON_LOADING), name
    expected, found = scores(whole), scores(target)
    apart = np.sqrt(np.mean((found - expected) ** 2)) / expected.std()
    assert 0 < apart < error

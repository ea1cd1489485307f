"""The published systems: exact parameter counts, and a checkpoint that carries every real tensor name, without data."""

import json
import math
import struct
from pathlib import Path

import jax
import pytest

from dflash_jax.checkpoint.load import open_drafter, open_target, open_tower
from dflash_jax.models import families
from dflash_jax.models.config import MediaTokens
from dflash_jax.models.decoder import abstract_decoder
from dflash_jax.models.drafters import abstract_drafter
from dflash_jax.models.families import dflash
from dflash_jax.models.families import mtp as mtp_family
from dflash_jax.models.families.vision import vision_entries
from dflash_jax.models.vision import abstract_tower

CONFIGS = Path(__file__).parents[2] / "configs" / "hf"
# Text and vision tower together, and the vision tower.
TARGETS = {
    "Qwen3.6-35B-A3B": (35_107_181_936, 446_571_248),
    "Qwen3.8-27B": (27_356_728_560, 460_730_096),
    "Qwen3.6-27B": (27_356_728_560, 460_730_096),
    "Qwen3.5-27B": (27_356_728_560, 460_730_096),
    "Qwen3.5-122B-A10B": (122_562_817_776, 451_290_864),
    "Qwen3.5-397B-A17B": (396_802_360_816, 456_010_480),
    "Qwen3-Coder-Next": (79_674_391_296, 0),
    "Qwen3-Coder-30B-A3B": (30_532_122_624, 0),
    "Qwen3-8B": (8_190_735_360, 0),
}
DRAFTERS = {
    "Qwen3.6-35B-A3B-DFlash": 385_906_176,
    "Qwen3.6-35B-A3B-DFlash-8-layer": 473_995_264,
    # By hand: Qwen3.6-35B-A3B-DFlash's, 12,681,216 of the convolutions and 127,664,128 of the selector.
    "Qwen3.6-35B-A3B-DFlash2": 526_251_520,
    "Qwen3.6-27B-DFlash": 1_730_213_120,
    # By hand: Qwen3.6-27B-DFlash's, 65,740,800 of the convolutions and 128,450,560 of the selector.
    "Qwen3.8-27B-DFlash2": 1_924_404_480,
    "Qwen3.5-27B-DFlash": 2_128_682_496,
    "Qwen3-Coder-Next-DFlash": 473_995_264,
    "Qwen3-8B-DFlash-b16": 1_048_626_432,
    "Qwen3.5-122B-A10B-DFlash": None,
    "Qwen3.5-397B-A17B-DFlash": None,
    "Qwen3-Coder-30B-A3B-DFlash": None,
}


# By hand from hidden size, heads and experts: fc, norms, attention, router, experts.
HEADS = {
    "Qwen3.6-35B-A3B": 844_640_768,
    "Qwen3.8-27B": 424_699_392,
    "Qwen3.6-27B": 424_699_392,
    "Qwen3.5-27B": 424_699_392,
    "Qwen3.5-122B-A10B": 2_523_679_232,
    "Qwen3.5-397B-A17B": 6_595_568_128,
    "Qwen3-Coder-Next": 1_650_471_424,
}


def read(name: str) -> dict:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def count(module) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(module))


@pytest.mark.parametrize("name", TARGETS)
def test_published_target_has_the_exact_parameter_count(name):
    raw = read(name)
    config = families.target_family(raw).read_config(raw)
    text = count(abstract_decoder(config))
    vision = count(abstract_tower(config.vision)) if config.vision else 0
    assert (text + vision, vision) == TARGETS[name]
    table = families.target_family(raw).weight_names(config)
    assert sum(math.prod(t.shape) for entry in table for t in entry.tensors) == text
    assert (config.vision is None) == (config.media_tokens is None) == (vision == 0)
    if config.vision:
        table = vision_entries(config.vision)
        assert sum(math.prod(t.shape) for entry in table for t in entry.tensors) == vision
        assert config.media_tokens == MediaTokens(248056, 248057, 248053, 248054)


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafter_counts_and_fit(name):
    published = read(name)
    config = dflash.read_config(published)
    parameters = count(abstract_drafter(config))
    assert parameters == (DRAFTERS[name] or parameters)
    sliding = [kind == "sliding_attention" for kind in published["layer_types"]]
    assert [s.window for s in config.layers] == [published["sliding_window"] if x else None for x in sliding]
    assert [s.causal for s in config.layers] == [published.get("is_causal", slides) for slides in sliding]
    assert config.target_layer_ids == tuple(published["dflash_config"]["target_layer_ids"])
    assert config.mask_token_id == published["dflash_config"]["mask_token_id"]
    for spec in config.layers:
        assert (spec.attention.num_heads, spec.attention.head_dim) == (32, 128)
        rope = published.get("rope_parameters", published)
        assert spec.attention.rope.theta == rope["rope_theta"]
        assert (spec.attention.rope.scaling is not None) == (published.get("rope_scaling") is not None)
    raw = read(name.partition("-DFlash")[0])
    config.check_fits(families.target_family(raw).read_config(raw))


@pytest.mark.parametrize("name", HEADS)
def test_published_head_has_the_exact_parameter_count(name):
    raw = read(name)
    config = families.read_drafter(raw)
    table = [t for entry in mtp_family.weight_names(config) for t in entry.tensors]
    assert sum(math.prod(t.shape) for t in table if t.name.startswith("mtp.")) == HEADS[name]
    # The copy of the target's final norm.
    assert count(abstract_drafter(config)) == HEADS[name] + config.hidden_size
    config.check_fits(families.target_family(raw).read_config(raw))


def headers_only(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file of bfloat16 tensors whose data is a hole."""
    header, at = {}, 0
    for name, shape in tensors.items():
        end = at + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)


def layer_35b(i: int) -> dict[str, tuple[int, ...]]:
    """The 35B's layer as its checkpoint names it."""
    tensors = {"input_layernorm.weight": (2048,), "post_attention_layernorm.weight": (2048,)}
    if (i + 1) % 4:
        tensors |= {
            "linear_attn.in_proj_qkv.weight": (8192, 2048),
            "linear_attn.in_proj_z.weight": (4096, 2048),
            "linear_attn.in_proj_b.weight": (32, 2048),
            "linear_attn.in_proj_a.weight": (32, 2048),
            "linear_attn.conv1d.weight": (8192, 1, 4),
            "linear_attn.A_log": (32,),
            "linear_attn.dt_bias": (32,),
            "linear_attn.norm.weight": (128,),
            "linear_attn.out_proj.weight": (2048, 4096),
        }
    else:
        tensors |= {
            "self_attn.q_proj.weight": (8192, 2048),
            "self_attn.k_proj.weight": (512, 2048),
            "self_attn.v_proj.weight": (512, 2048),
            "self_attn.o_proj.weight": (2048, 4096),
            "self_attn.q_norm.weight": (256,),
            "self_attn.k_norm.weight": (256,),
        }
    tensors |= {
        "mlp.gate.weight": (256, 2048),
        "mlp.experts.gate_up_proj": (256, 1024, 2048),
        "mlp.experts.down_proj": (256, 2048, 512),
        "mlp.shared_expert.gate_proj.weight": (512, 2048),
        "mlp.shared_expert.up_proj.weight": (512, 2048),
        "mlp.shared_expert.down_proj.weight": (2048, 512),
        "mlp.shared_expert_gate.weight": (1, 2048),
    }
    return {f"model.language_model.layers.{i}.{name}": shape for name, shape in tensors.items()}


def vision_27_blocks(hidden: int = 2048) -> dict[str, tuple[int, ...]]:
    """The vision tower of a target of this hidden size as its checkpoint names it; the 35B's by default."""

    def biased(name: str, *shape: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}

    tensors = biased("patch_embed.proj", 1152, 3, 2, 16, 16) | {"pos_embed.weight": (2304, 1152)}
    tensors |= biased("merger.norm", 1152) | biased("merger.linear_fc1", 4608, 4608)
    tensors |= biased("merger.linear_fc2", hidden, 4608)
    for i in range(27):
        tensors |= biased(f"blocks.{i}.norm1", 1152) | biased(f"blocks.{i}.norm2", 1152)
        tensors |= biased(f"blocks.{i}.attn.qkv", 3456, 1152) | biased(f"blocks.{i}.attn.proj", 1152, 1152)
        tensors |= biased(f"blocks.{i}.mlp.linear_fc1", 4304, 1152) | biased(f"blocks.{i}.mlp.linear_fc2", 1152, 4304)
    return {f"model.visual.{name}": shape for name, shape in tensors.items()}


def test_a_checkpoint_with_every_real_name(tmp_path):
    """Qwen3.6-35B-A3B: 1045 tensors, of which the text model reads 693, its vision tower 333, and its MTP head 19."""
    text = {
        "model.language_model.embed_tokens.weight": (248_320, 2048),
        "model.language_model.norm.weight": (2048,),
        "lm_head.weight": (248_320, 2048),
    }
    for i in range(40):
        text |= layer_35b(i)
    raw = read("Qwen3.6-35B-A3B")
    vision = vision_27_blocks()
    mtp = {name.replace("model.language_model.layers.3", "mtp.layers.0"): s for name, s in layer_35b(3).items()}
    mtp |= {"mtp.fc.weight": (2048, 4096)}
    mtp |= {f"mtp.{n}.weight": (2048,) for n in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    assert (len(text), len(vision), len(mtp)) == (693, 333, 19)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    headers_only(tmp_path / "model.safetensors", text | vision | mtp)
    source = open_target(tmp_path)
    assert {t.name for entry in source.entries for t in entry.tensors} == set(text)
    assert set(source.skipped) == set(vision) | set(mtp)
    head = open_drafter(tmp_path, source.config)
    assert {t.name for e in head.entries for t in e.tensors} == {*mtp, "model.language_model.norm.weight"}
    tower = open_tower(tmp_path)
    assert {t.name for entry in tower.entries for t in entry.tensors} == set(vision)
    assert set(tower.skipped) == set(text) | set(mtp)


def layer_27b(i: int) -> dict[str, tuple[int, ...]]:
    """The 27B's layer as its checkpoint names it."""
    tensors = {"input_layernorm.weight": (5120,), "post_attention_layernorm.weight": (5120,)}
    if (i + 1) % 4:
        tensors |= {
            "linear_attn.in_proj_qkv.weight": (10_240, 5120),
            "linear_attn.in_proj_z.weight": (6144, 5120),
            "linear_attn.in_proj_b.weight": (48, 5120),
            "linear_attn.in_proj_a.weight": (48, 5120),
            "linear_attn.conv1d.weight": (10_240, 1, 4),
            "linear_attn.A_log": (48,),
            "linear_attn.dt_bias": (48,),
            "linear_attn.norm.weight": (128,),
            "linear_attn.out_proj.weight": (5120, 6144),
        }
    else:
        tensors |= {
            "self_attn.q_proj.weight": (12_288, 5120),
            "self_attn.k_proj.weight": (1024, 5120),
            "self_attn.v_proj.weight": (1024, 5120),
            "self_attn.o_proj.weight": (5120, 6144),
            "self_attn.q_norm.weight": (256,),
            "self_attn.k_norm.weight": (256,),
        }
    tensors |= {
        "mlp.gate_proj.weight": (17_408, 5120),
        "mlp.up_proj.weight": (17_408, 5120),
        "mlp.down_proj.weight": (5120, 17_408),
    }
    return {f"model.language_model.layers.{i}.{name}": shape for name, shape in tensors.items()}


def test_qwen3_8_27b_has_every_real_name(tmp_path):
    """1,199 tensors: 851 of the text, 333 of the vision tower, and 15 of the MTP head, here in a file of its own."""
    text = {
        "model.language_model.embed_tokens.weight": (248_320, 5120),
        "model.language_model.norm.weight": (5120,),
        "lm_head.weight": (248_320, 5120),
    }
    for i in range(64):
        text |= layer_27b(i)
    vision = vision_27_blocks(5120)
    mtp = {name.replace("model.language_model.layers.3", "mtp.layers.0"): s for name, s in layer_27b(3).items()}
    mtp |= {"mtp.fc.weight": (5120, 10_240)}
    mtp |= {f"mtp.{n}.weight": (5120,) for n in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    assert (len(text), len(vision), len(mtp)) == (851, 333, 15)
    (tmp_path / "config.json").write_text(json.dumps(read("Qwen3.8-27B")))
    headers_only(tmp_path / "model-00001-of-00001.safetensors", text | vision)
    headers_only(tmp_path / "mtp.safetensors", mtp)
    index = {"weight_map": dict.fromkeys(text | vision, "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    source = open_target(tmp_path)
    assert len(source.files) == 1199
    assert {t.name for entry in source.entries for t in entry.tensors} == set(text)
    head = open_drafter(tmp_path, source.config)
    assert {t.name for e in head.entries for t in e.tensors} == {*mtp, "model.language_model.norm.weight"}
    assert {t.name for entry in open_tower(tmp_path).entries for t in entry.tensors} == set(vision)

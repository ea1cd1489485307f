"""Converts a GGUF file to a Hugging Face directory."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_jax.checkpoint.files import DTYPES, new_directory, stream_tensors, write_json
from dflash_jax.checkpoint.gguf_file import GgufFile
from dflash_jax.checkpoint.gguf_tokenizer import ids_of, save_tokenizer
from dflash_jax.checkpoint.load import open_target, read_target_config
from dflash_jax.errors import InputError
from dflash_jax.models.config import Llama3Spec, RopeSpec
from dflash_jax.models.families.reading import LIMIT, LIMITS, integer, number, shown
from dflash_jax.models.rope import rope_frequencies

DTYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp in Hugging Face's terms.

    Attributes:
        model_type: Of config.json.
        class_name: Of ``architectures`` in config.json.
        tensors: llama.cpp's tensor name → Hugging Face's. {i} is the layer; {e} is the expert, stacked in one tensor in
            GGUF.
        paired: Whether rows of q and k are stored for RoPE on neighbours, not on halves.
        extra: Further fields of config.json.
    """

    model_type: str
    class_name: str
    tensors: dict[str, str]
    paired: bool = False
    extra: tuple[tuple[str, object], ...] = ()

    @property
    def has_experts(self) -> bool:
        """Whether its feed-forwards are mixtures of experts."""
        return "blk.{i}.ffn_gate_inp.weight" in self.tensors


LAYER = "model.layers.{i}."
ATTENTION = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.{i}.attn_norm.weight": LAYER + "input_layernorm.weight",
    "blk.{i}.ffn_norm.weight": LAYER + "post_attention_layernorm.weight",
    "blk.{i}.attn_q.weight": LAYER + "self_attn.q_proj.weight",
    "blk.{i}.attn_k.weight": LAYER + "self_attn.k_proj.weight",
    "blk.{i}.attn_v.weight": LAYER + "self_attn.v_proj.weight",
    "blk.{i}.attn_output.weight": LAYER + "self_attn.o_proj.weight",
}
QK_NORM = {f"blk.{{i}}.attn_{x}_norm.weight": f"{LAYER}self_attn.{x}_norm.weight" for x in "qk"}
DENSE = {f"blk.{{i}}.ffn_{x}.weight": f"{LAYER}mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
EXPERTS = {"blk.{i}.ffn_gate_inp.weight": LAYER + "mlp.gate.weight"} | {
    f"blk.{{i}}.ffn_{x}_exps.weight": f"{LAYER}mlp.experts.{{e}}.{x}_proj.weight" for x in ("gate", "up", "down")
}
ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", ATTENTION | DENSE, True, (("mlp_bias", False),)),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", ATTENTION | QK_NORM | DENSE),
    # llama.cpp has no key for norm_topk_prob: it always normalises here.
    "qwen3moe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", ATTENTION | QK_NORM | EXPERTS, extra=(("norm_topk_prob", True),)
    ),
}
# The tensor of divisors of the rotary frequencies; it becomes rope_scaling.
FREQUENCIES = "rope_freqs.weight"


class _Keys:
    """Metadata of a file's architecture, by names without its prefix."""

    def __init__(self, file: GgufFile, prefix: str):
        self._file, self._prefix = file, prefix
        self.names = [k.removeprefix(f"{prefix}.") for k in file.metadata if k.startswith(f"{prefix}.")]

    def integer(self, name: str, key: str, default: int | None = None, minimum: int = 1) -> int:
        """A count or a size, in the range that ``key`` has in a config.json."""
        return self._checked(name, default, lambda where, value: integer(where, value, minimum, LIMITS.get(key, LIMIT)))

    def number(self, name: str, default: float | None = None, minimum: float = 0.0, maximum: float = 1e15) -> float:
        return self._checked(name, default, lambda where, value: number(where, value, minimum, maximum))

    def _checked(self, name: str, default, check: Callable):
        where = f"{self._prefix}.{name}"
        value = self._file.metadata.get(where, default)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]
        if value is None:
            raise InputError(f"{self._file.path} lacks {where}")
        if isinstance(value, list):
            raise InputError(f"{self._file.path}: {where} is a value for each layer, it must be one number")
        return check(f"{self._file.path}: {where}", value)


def architecture_of(file: GgufFile) -> Architecture:
    """The architecture of a file.

    Raises:
        InputError: It is unknown, or the file is one of several parts.
    """
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise InputError(f"{file.path}: unknown architecture {shown(name)}: known are {', '.join(ARCHITECTURES)}")
    parts = file.metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise InputError(f"{file.path} is one of {parts} parts: join them first (llama-gguf-split --merge)")
    return ARCHITECTURES[name]


def read_config(file: GgufFile) -> dict:
    """The ``config.json`` of a GGUF file.

    Raises:
        InputError: A key is missing, out of range or not supported.
    """
    arch, keys = architecture_of(file), _Keys(file, str(file.metadata["general.architecture"]))
    if "token_embd.weight" not in file.tensors:
        raise InputError(f"{file.path} lacks the tensor 'token_embd.weight'")
    rows, tokens = file.tensors["token_embd.weight"].shape[0], file.metadata.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list):
        raise InputError(f"{file.path}: tokenizer.ggml.tokens is {shown(tokens)}, it must be a list")
    if len(tokens) > rows:
        raise InputError(f"{file.path} has {len(tokens)} tokens, but 'token_embd.weight' has only {rows} rows")
    heads = keys.integer("attention.head_count", "num_attention_heads")
    hidden = keys.integer("embedding_length", "hidden_size")
    kv_heads = keys.integer("attention.head_count_kv", "num_key_value_heads", heads)
    name = file.metadata["general.architecture"]
    if heads % kv_heads:
        message = f"{name}.attention.head_count_kv is {kv_heads}: it must divide {name}.attention.head_count, {heads}"
        raise InputError(f"{file.path}: {message}")
    if "attention.key_length" not in keys.names and hidden % heads:
        message = f"{name}.embedding_length is {hidden} and no multiple of {name}.attention.head_count, {heads}"
        raise InputError(f"{file.path}: {message}: then {name}.attention.key_length must be there")
    head_dim = keys.integer("attention.key_length", "head_dim", hidden // heads)
    positions = keys.integer("context_length", "max_position_embeddings")
    known = {"attention.value_length": head_dim, "rope.dimension_count": head_dim, "rope.scale_linear": 1.0}
    for key, value in known.items():
        if (given := keys.number(key, value)) != value:
            raise InputError(f"{file.path}: {name}.{key} is {given:g}: here it must be {value:g}")
    window = keys.integer("attention.sliding_window", "sliding_window", 0, 0)
    if 0 < window < positions:
        raise InputError(
            f"{file.path}: {name}.attention.sliding_window is {window}: only 0 is known, or {positions} or more"
        )
    config = {
        "architectures": [arch.class_name],
        "model_type": arch.model_type,
        "vocab_size": rows,
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length", "intermediate_size"),
        "num_hidden_layers": keys.integer("block_count", "num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", None, 0.0, 0.1),
        "rope_theta": keys.number("rope.freq_base", 10000.0, 1.0 + 1e-6),
        "rope_scaling": _rope_scaling(file, keys, head_dim),
        "attention_bias": False,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **dict(arch.extra),
        **token_ids(file),
    }
    if arch.has_experts:
        config |= {
            "num_experts": keys.integer("expert_count", "num_experts"),
            "num_experts_per_tok": keys.integer("expert_used_count", "num_experts_per_tok"),
            "moe_intermediate_size": keys.integer("expert_feed_forward_length", "moe_intermediate_size"),
        }
    return config


def _rope_scaling(file: GgufFile, keys: _Keys, head_dim: int) -> dict | None:
    kind = file.metadata.get(f"{file.metadata['general.architecture']}.rope.scaling.type", "none")
    if FREQUENCIES in file.tensors:
        return llama3_scaling(file.read(FREQUENCIES), keys.number("rope.freq_base", 10000.0, 1.0 + 1e-6), head_dim)
    if kind == "none":
        return None
    known = {"type", "factor", "original_context_length", "finetuned"}
    unknown = sorted({k.removeprefix("rope.scaling.") for k in keys.names if k.startswith("rope.scaling.")} - known)
    if kind != "yarn" or unknown:
        raise InputError(f"{file.path}: rope.scaling {' with '.join([str(kind)[:64], *unknown])} is not known")
    return {
        "rope_type": "yarn",
        "factor": keys.number("rope.scaling.factor", None, 1.0, 1e6),
        "original_max_position_embeddings": keys.integer(
            "rope.scaling.original_context_length", "original_max_position_embeddings"
        ),
    }


def llama3_scaling(divisors: np.ndarray, theta: float, head_dim: int) -> dict | None:
    """Recovers the parameters of Llama 3's RoPE scaling from llama.cpp's divisors of the frequencies.

    Only the ratios of low_freq_factor, high_freq_factor and the original context have an effect, so the first is 1, as
    in every published checkpoint.

    Args:
        divisors: ``rope_freqs.weight``, float32 [head_dim / 2].
        theta: Base of the frequencies.
        head_dim: Dimensions of a head.

    Returns:
        ``rope_scaling`` of config.json; None where nothing is scaled.

    Raises:
        InputError: The divisors are of another scaling.
    """
    unknown = InputError(f"{FREQUENCIES} is not the scaling of Llama 3: no other is known")
    if np.all(divisors == 1):
        return None
    if not (np.all(divisors >= 1) and np.all(divisors <= 1e6)):
        raise unknown
    factor = float(divisors.max())
    plain = np.asarray(rope_frequencies(RopeSpec(theta, head_dim))[0], np.float64)
    # 1 where a frequency is unscaled, 0 where it is divided by the whole factor, linear in the frequency in between.
    unscaled_share = (1 / divisors.astype(np.float64) - 1 / factor) / (1 - 1 / factor)
    between = (unscaled_share > 1e-3) & (unscaled_share < 1 - 1e-3)
    if divisors.shape == plain.shape and between.sum() >= 2:
        slope, offset = np.polyfit(plain[between], unscaled_share[between], 1)
        if not offset < 0 < slope:
            raise unknown
        high = round(1 - 1 / offset, 3)
        spec = Llama3Spec(factor, 1.0, high, round(slope * 2 * math.pi * (high - 1)))
        scaled = np.asarray(rope_frequencies(RopeSpec(theta, head_dim, None, spec))[0])
        if np.allclose(plain / scaled, divisors, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                "original_max_position_embeddings": spec.original_max_positions,
            }
    raise unknown


def token_ids(file: GgufFile) -> dict:
    """The ids of bos, eos and padding under Hugging Face's names; eos includes the ends of turns and messages."""
    stops, bos, pad = (
        ids_of(file.metadata, str(file.path), names) for names in (("eos", "eot", "eom"), ("bos",), ("padding",))
    )
    ids = {
        "bos_token_id": bos[0] if bos else None,
        "eos_token_id": stops[0] if len(stops) == 1 else stops or None,
        "pad_token_id": pad[0] if pad else None,
    }
    return {k: v for k, v in ids.items() if v is not None}


def unpair(array: np.ndarray, heads: int) -> np.ndarray:
    """Reorders rows of q or k from llama.cpp's RoPE pairs to Hugging Face's.

    llama.cpp rotates rows 2j and 2j + 1 of a head together, Hugging Face j and j + D / 2.
    """
    return array.reshape(heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def hf_tensors(file: GgufFile, config: dict) -> dict[str, tuple[tuple[int, ...], Callable[[], np.ndarray]]]:
    """The tensors under Hugging Face's names.

    Returns:
        Name → (shape, function that reads it as float32).

    Raises:
        InputError: A tensor is unknown, or its shape does not fit the config.
    """
    arch = architecture_of(file)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]} if arch.paired else {}
    tensors = {}
    for name, tensor in file.tensors.items():
        if name == FREQUENCIES:
            continue
        layer = re.match(r"blk\.(\d+)\.(\w+)", name)
        pattern = f"blk.{{i}}.{name[layer.start(2) :]}" if layer else name
        if pattern not in arch.tensors:
            raise InputError(f"{file.path}: tensor {name!r} is not known for {arch.model_type}")
        target = arch.tensors[pattern].replace("{i}", layer[1] if layer else "")
        pairs = heads.get(layer[2]) if layer else None
        if pairs and (len(tensor.shape) != 2 or tensor.shape[0] % (2 * pairs)):
            raise InputError(f"{file.path}: tensor {name!r} {list(tensor.shape)} does not divide into {pairs} heads")
        if "{e}" in target and tensor.shape[0] != config["num_experts"]:
            raise InputError(
                f"{file.path}: {name!r} has {tensor.shape[0]} experts, expert_count says {config['num_experts']}"
            )
        for e in range(tensor.shape[0]) if "{e}" in target else (None,):
            shape = tensor.shape if e is None else tensor.shape[1:]
            tensors[target.replace("{e}", str(e))] = (shape, _reader(file, name, e, pairs))
    return tensors


def _reader(file: GgufFile, name: str, index: int | None, pairs: int | None) -> Callable[[], np.ndarray]:
    def read():
        array = file.read(name, index)
        return unpair(array, pairs) if pairs else array

    return read


def convert(source: str | Path, target: str | Path, dtype: str = "float32") -> dict:
    """Writes a Hugging Face directory from a GGUF file, one tensor in memory at a time.

    Args:
        source: A GGUF file.
        target: A new or empty directory. It appears when it is complete.
        dtype: "float32", "bfloat16" or "float16".

    Returns:
        The ``config.json``.

    Raises:
        InputError: The file is invalid or not supported, or ``target`` cannot be written.
    """
    if dtype not in DTYPE_NAMES:
        raise InputError(f"dtype {dtype!r}: it must be one of {', '.join(DTYPE_NAMES)}")
    file = GgufFile(source)
    config = {**read_config(file), "dtype": dtype}
    tensors = hf_tensors(file, config)
    with new_directory(Path(target)) as half:
        write_json(half / "config.json", config)
        # Checks that the model is supported before the long part.
        read_target_config(half)
        save_tokenizer(file.metadata, half, config["max_position_embeddings"], str(source))
        write_json(half / "generation_config.json", token_ids(file))
        stream_tensors(half / "model.safetensors", DTYPES[DTYPE_NAMES[dtype]], tensors)
        open_target(half)
    return config

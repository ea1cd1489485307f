"""The ``config.json`` of a GGUF file's metadata."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dflash_jax.checkpoint.gguf_file import GgufFile
from dflash_jax.checkpoint.gguf_tokenizer import ids_of
from dflash_jax.errors import InputError
from dflash_jax.models.config import Llama3Spec, RopeSpec
from dflash_jax.models.families.reading import LIMIT, LIMITS, flag, integer, number, shown
from dflash_jax.models.rope import rope_frequencies


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp in Hugging Face's terms.

    Attributes:
        model_type: Of config.json.
        class_name: Of ``architectures`` in config.json.
        is_paired: Whether rows of q and k are stored for RoPE on neighbours, not on halves.
        is_hybrid: Whether layers are of Gated DeltaNet but for some with gated attention. Norms have 1 added.
        is_tiled: Whether value heads of Gated DeltaNet are stored tiled over key heads, not grouped by them.
        has_experts: Whether feed-forwards are mixtures of experts.
        is_drafter: Whether it is a DFlash drafter.
        extra: Further fields of config.json.
    """

    model_type: str
    class_name: str
    is_paired: bool = False
    is_hybrid: bool = False
    is_tiled: bool = False
    has_experts: bool = False
    is_drafter: bool = False
    extra: tuple[tuple[str, object], ...] = ()


DFLASH = Architecture("qwen3", "DFlashDraftModel", is_drafter=True)
ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", is_paired=True, extra=(("mlp_bias", False),)),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    # llama.cpp has no key for norm_topk_prob: it always normalises here.
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", has_experts=True, extra=(("norm_topk_prob", True),)),
    "qwen3next": Architecture(
        "qwen3_next", "Qwen3NextForCausalLM", is_hybrid=True, has_experts=True, extra=(("norm_topk_prob", True),)
    ),
    "qwen35": Architecture("qwen3_5_text", "Qwen3_5ForCausalLM", is_hybrid=True, is_tiled=True),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", is_hybrid=True, is_tiled=True, has_experts=True
    ),
    "dflash": DFLASH,
    # Of forks of llama.cpp.
    "dflash-draft": DFLASH,
    "qwen35-dflash-draft": DFLASH,
}
# The tensor of divisors of the rotary frequencies; it becomes rope_scaling.
FREQUENCIES = "rope_freqs.weight"
# Keys that change the numbers, and their values without effect.
NEUTRAL = {
    **dict.fromkeys(("attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias"), (0,)),
    **dict.fromkeys(("attn_logit_softcapping", "router_logit_softcapping", "hyper_connection_count"), (0,)),
    **dict.fromkeys(("residual_scale", "expert_weights_scale", "expert_gating_func"), (0, 1)),
    **dict.fromkeys(("expert_group_count", "moe_every_n_layers", "attention.value_scale"), (0, 1)),
    **dict.fromkeys(("leading_dense_block_count", "use_parallel_residual"), (0,)),
    "expert_weights_norm": (1,),
    "rope.scale_linear": (1,),
}
# Keys that change the numbers of drafters only, where they are read.
OF_DRAFTERS = {
    **dict.fromkeys(("logit_scale", "embedding_scale"), (0, 1)),
    "final_logit_softcapping": (0,),
    "attention.causal": (1,),
}
# The tensors of a drafter whose rows are tokens, and the kinds of drafters that others tell of.
TABLES = ("token_embd.weight", "selector_predecessor.weight", "selector.pred_codebook", "markov_w1.weight")
MARKOV, CONFIDENCE, TOKENS = "markov_w1.weight", "conf_proj.weight", "d2t"
# Where forks of llama.cpp have the keys of drafters, after the prefix of the architecture.
SPELLINGS = ("", "dflash.", "dflash.dflash2.", "dflash2.")


class Keys:
    """Metadata of a file's architecture, by names without its prefix."""

    def __init__(self, file: GgufFile, prefix: str):
        self.file, self.prefix = file, prefix
        self.names = [k.removeprefix(f"{prefix}.") for k in file.metadata if k.startswith(f"{prefix}.")]

    def where(self, name: str) -> str:
        """A key as messages have it."""
        return f"{self.file.path}: {self.prefix}.{name}"

    def get(self, name: str, default=None):
        """The value of a key as it is."""
        return self.file.metadata.get(f"{self.prefix}.{name}", default)

    def integer(self, name: str, key: str, default: int | None = None, minimum: int = 1) -> int:
        """A count or a size, in the range that ``key`` has in a config.json."""
        return self._checked(name, default, lambda where, value: integer(where, value, minimum, LIMITS.get(key, LIMIT)))

    def number(self, name: str, default: float | None = None, minimum: float = 0.0, maximum: float = 1e15) -> float:
        """A number."""
        return self._checked(name, default, lambda where, value: number(where, value, minimum, maximum))

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        return self._checked(name, default, flag)

    def each(self, name: str, count: int) -> list | None:
        """A list of ``count`` booleans, or one for all; None where the key is missing."""
        value = self.get(name)
        if value is None:
            return None
        values = value if isinstance(value, list) else [value] * count
        if len(values) != count or not all(isinstance(v, bool) for v in values):
            raise InputError(
                f"{self.where(name)} is {shown(value)}: it must be true or false for each of {count} layers"
            )
        return values

    def spelled(self, name: str) -> str:
        """The name of a drafter's key as the file has it; ``name`` where it is missing."""
        return next((s + name for s in SPELLINGS if s + name in self.names), name)

    def check_neutral(self, neutral: dict[str, tuple[int, ...]]) -> None:
        """Checks that keys have values without effect.

        Raises:
            InputError: One changes the numbers.
        """
        for name in self.names:
            if (right := neutral.get(name)) is None:
                continue
            value = self.get(name)
            if not isinstance(value, (int, float)) or value not in right:
                known = " or ".join(map(str, right))
                raise InputError(
                    f"{self.where(name)} is {shown(value)}: it changes the numbers, here it must be {known}"
                )

    def _checked(self, name: str, default, check: Callable):
        value = self.get(name, default)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]
        if value is None:
            raise InputError(f"{self.file.path} lacks {self.prefix}.{name}")
        if isinstance(value, list):
            raise InputError(f"{self.where(name)} is a value for each layer, it must be one number")
        return check(self.where(name), value)


def architecture_of(file: GgufFile) -> Architecture:
    """The architecture of a file.

    Raises:
        InputError: It is unknown.
    """
    name = file.metadata.get("general.architecture")
    if name == "clip":
        raise InputError(f"{file.path} is a vision tower (mmproj) alone: the towers of GGUF files are not read here")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise InputError(f"{file.path}: unknown architecture {shown(name)}: known are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def read_config(file: GgufFile) -> dict:
    """The ``config.json`` of a GGUF file.

    Raises:
        InputError: A key is missing, out of range or not supported.
    """
    arch, keys = architecture_of(file), Keys(file, str(file.metadata["general.architecture"]))
    name = keys.prefix
    heads = keys.integer("attention.head_count", "num_attention_heads")
    hidden = keys.integer("embedding_length", "hidden_size")
    kv_heads = keys.integer("attention.head_count_kv", "num_key_value_heads", heads)
    if heads % kv_heads:
        message = f"{name}.attention.head_count_kv is {kv_heads}: it must divide {name}.attention.head_count, {heads}"
        raise InputError(f"{file.path}: {message}")
    if "attention.key_length" not in keys.names and hidden % heads:
        message = f"{name}.embedding_length is {hidden} and no multiple of {name}.attention.head_count, {heads}"
        raise InputError(f"{file.path}: {message}: then {name}.attention.key_length must be there")
    head_dim = keys.integer("attention.key_length", "head_dim", hidden // heads)
    keys.check_neutral(NEUTRAL if arch.is_drafter else NEUTRAL | OF_DRAFTERS)
    known = {"attention.value_length": head_dim}
    if not arch.is_hybrid:
        known["rope.dimension_count"] = head_dim
    for key, value in known.items():
        if (given := keys.number(key, value)) != value:
            raise InputError(f"{keys.where(key)} is {given:g}: here it must be {value:g}")
    heads_alone = keys.integer("nextn_predict_layers", "num_hidden_layers", 0, 0) if arch.is_hybrid else 0
    depth = keys.integer("block_count", "num_hidden_layers")
    if heads_alone > 1 or heads_alone >= depth:
        raise InputError(
            f"{keys.where('nextn_predict_layers')} is {heads_alone}: only MTP heads of one layer are known"
        )
    config = {
        "architectures": [arch.class_name],
        "model_type": arch.model_type,
        "vocab_size": _vocab_size(file, keys, arch),
        "hidden_size": hidden,
        "num_hidden_layers": depth - heads_alone,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": keys.integer("context_length", "max_position_embeddings"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", None, 0.0, 0.1),
        "attention_bias": False,
        **_rope(file, keys, arch, head_dim),
        **dict(arch.extra),
        **token_ids(file),
    }
    if arch.has_experts:
        config |= {
            "num_experts": keys.integer("expert_count", "num_experts"),
            "num_experts_per_tok": keys.integer("expert_used_count", "num_experts_per_tok"),
            "moe_intermediate_size": keys.integer("expert_feed_forward_length", "moe_intermediate_size"),
        }
    # A file whose feed-forwards are all mixtures of experts may lack it.
    if not arch.has_experts or "feed_forward_length" in keys.names:
        config["intermediate_size"] = keys.integer("feed_forward_length", "intermediate_size")
    if arch.is_drafter:
        return config | _of_drafter(file, keys, config)
    window = keys.integer("attention.sliding_window", "sliding_window", 0, 0)
    if 0 < window < config["max_position_embeddings"]:
        where = keys.where("attention.sliding_window")
        raise InputError(f"{where} is {window}: only 0 is known, or {config['max_position_embeddings']} or more")
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    return config | (_of_hybrid(keys, arch, depth, heads_alone) if arch.is_hybrid else {})


def _vocab_size(file: GgufFile, keys: Keys, arch: Architecture) -> int:
    """Rows of the embedding; of a drafter without one, of another table, or the tokens."""
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list):
        raise InputError(f"{file.path}: tokenizer.ggml.tokens is {shown(tokens)}, it must be a list")
    name = next((n for n in (TABLES if arch.is_drafter else TABLES[:1]) if n in file.tensors), None)
    if name is not None:
        rows = file.tensors[name].shape[0]
        if len(tokens) > rows:
            raise InputError(f"{file.path} has {len(tokens)} tokens, but {name!r} has only {rows} rows")
        return rows
    if not arch.is_drafter:
        raise InputError(f"{file.path} lacks the tensor 'token_embd.weight'")
    return keys.integer("vocab_size", "vocab_size", len(tokens) or None)


def _rope(file: GgufFile, keys: Keys, arch: Architecture, head_dim: int) -> dict:
    """The fields of the rotary embedding."""
    theta, scaling = keys.number("rope.freq_base", 10000.0, 1.0 + 1e-6), _rope_scaling(file, keys, head_dim)
    sections = keys.get("rope.dimension_sections")
    if sections is not None:
        sections = sections if isinstance(sections, list) else [sections]
        if not 1 <= len(sections) <= 4 or any(type(n) is not int or not 0 <= n <= LIMIT for n in sections):
            raise InputError(f"{keys.where('rope.dimension_sections')} is {shown(sections)}: it must be up to 4 sizes")
        sections = [*sections, 0, 0, 0, 0][:4]
    if not arch.is_hybrid:
        if sections is not None and any(sections[1:]):
            raise InputError(
                f"{keys.where('rope.dimension_sections')} is {sections}: here only the first may be above 0"
            )
        return {"rope_theta": theta, "rope_scaling": scaling}
    rotated = keys.integer("rope.dimension_count", "head_dim", head_dim)
    if rotated > head_dim or rotated % 2:
        raise InputError(f"{keys.where('rope.dimension_count')} is {rotated}: it must be even, and {head_dim} at most")
    # The share that gives this number again when it is multiplied and rounded down.
    share = next(s for s in (rotated / head_dim, math.nextafter(rotated / head_dim, 1)) if int(head_dim * s) == rotated)
    rope = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": share} | (scaling or {})
    if sections is not None:
        if sections[3] or sum(sections) not in (0, rotated // 2):
            message = f"it must be three sizes with the sum {rotated // 2}, and 0"
            raise InputError(f"{keys.where('rope.dimension_sections')} is {sections}: {message}")
        if any(sections):
            rope |= {"mrope_section": sections[:3], "mrope_interleaved": True}
    return {"rope_parameters": rope}


def _of_hybrid(keys: Keys, arch: Architecture, depth: int, heads_alone: int) -> dict:
    """The fields of a hybrid of Gated DeltaNet and attention."""
    interval, layers = keys.integer("full_attention_interval", "num_hidden_layers", 4), depth - heads_alone
    recurrent = keys.each("attention.recurrent_layers", depth) or [(i + 1) % interval != 0 for i in range(layers)]
    values = keys.integer("ssm.time_step_rank", "linear_num_value_heads")
    inner = keys.integer("ssm.inner_size", "intermediate_size")
    if inner % values:
        message = f"{inner}: it must be a multiple of {keys.prefix}.ssm.time_step_rank, {values}"
        raise InputError(f"{keys.where('ssm.inner_size')} is {message}")
    fields = {
        "layer_types": ["linear_attention" if r else "full_attention" for r in recurrent[:layers]],
        "linear_num_key_heads": keys.integer("ssm.group_count", "linear_num_key_heads"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": keys.integer("ssm.state_size", "linear_key_head_dim"),
        "linear_value_head_dim": inner // values,
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel", "linear_conv_kernel_dim", None, 2),
    }
    if arch.has_experts:
        key = "shared_expert_intermediate_size"
        fields[key] = keys.integer("expert_shared_feed_forward_length", key)
    return fields | ({"mtp_num_hidden_layers": heads_alone} if heads_alone else {})


def _of_drafter(file: GgufFile, keys: Keys, config: dict) -> dict:
    """The fields of a DFlash drafter.

    llama.cpp counts from 1 the layers of the target whose outputs are features; forks count from 0.
    """
    own: dict = {"target_layer_ids": _taps(keys)}
    mask = next((n for n in ("dflash.mask_token_id", "mask_token_id") if n in keys.names), None)
    where = f"{keys.prefix}.{mask}" if mask else "tokenizer.ggml.mask_token_id"
    if where not in file.metadata:
        raise InputError(f"{file.path} lacks {where}")
    own["mask_token_id"] = integer(f"{file.path}: {where}", file.metadata[where], 0, LIMITS["vocab_size"])
    if "target_hidden_size" in keys.names:
        own["target_hidden_size"] = keys.integer("target_hidden_size", "hidden_size")
    class_name = DFLASH.class_name
    for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        if (spelled := keys.spelled(key)) in keys.names and keys.get(spelled) != 0:
            own[key], class_name = keys.integer(spelled, key), "DFlash2DraftModel"
    if MARKOV in file.tensors:
        rank, class_name = file.tensors[MARKOV].shape[-1], "DSparkDraftModel"
        own |= {"markov_rank": rank, "sample_from_anchor": keys.flag("sample_from_anchor", True)}
        if CONFIDENCE in file.tensors:
            with_token = file.tensors[CONFIDENCE].shape[-1] != config["hidden_size"]
            own |= {"enable_confidence_head": True, "confidence_head_with_markov": with_token}
    for name, key in (("logit_scale", "output_multiplier"), ("embedding_scale", "input_embedding_scale")):
        if keys.number(name, 0.0, -1e6, 1e6):
            own[key] = keys.number(name, 0.0, -1e6, 1e6)
    if cap := keys.number("final_logit_softcapping", 0.0, 0.0, 1e6):
        own["final_logit_softcapping"] = cap
    fields = {
        "architectures": [class_name],
        "block_size": keys.integer(keys.spelled("block_size"), "block_size", 16),
        "is_causal": keys.flag("attention.causal", False),
        "dflash_config": own,
    }
    if TOKENS in file.tensors:
        fields["draft_vocab_size"] = file.tensors[TOKENS].shape[0]
    if window := keys.integer("attention.sliding_window", "sliding_window", 0, 0):
        key = "attention.sliding_window_pattern"
        sliding = keys.each(key, config["num_hidden_layers"])
        if sliding is None:
            raise InputError(f"{file.path} has {keys.prefix}.attention.sliding_window, and lacks {keys.prefix}.{key}")
        kinds = ["sliding_attention" if slides else "full_attention" for slides in sliding]
        fields |= {"layer_types": kinds} | ({"sliding_window": window} if any(sliding) else {})
    return fields


def _taps(keys: Keys) -> list[int]:
    name = next((n for n in ("target_layers", "dflash.target_layer_ids", "target_layer_ids") if n in keys.names), None)
    if name is None:
        raise InputError(f"{keys.file.path} lacks {keys.prefix}.target_layers")
    first, layers = int(name == "target_layers"), keys.get(name)
    most = LIMITS["num_target_layers"]
    if not isinstance(layers, list) or not 1 <= len(layers) <= most or any(type(i) is not int for i in layers):
        raise InputError(f"{keys.where(name)} is {shown(layers)}: it must be a list of up to {most} layers")
    return [integer(keys.where(name), i, first, most) - first for i in layers]


def _rope_scaling(file: GgufFile, keys: Keys, head_dim: int) -> dict | None:
    kind = keys.get("rope.scaling.type", "none")
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

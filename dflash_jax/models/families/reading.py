"""Reads ``config.json``: numbers in their ranges, unknown keys, rotary embeddings, kinds of layers.

The file is untrusted input. Type and range of every value are checked before anything is sized by it.
"""

import reprlib
from collections.abc import Callable
from typing import Any

from dflash_jax.errors import InputError
from dflash_jax.models.config import AttentionSpec, GatedDeltaSpec, Llama3Spec, MlpSpec, MoeSpec, RopeSpec, YarnSpec

# The largest value of each count or size. The limits are well above every published model, and small enough that names
# and shapes can be listed before they are compared with the checkpoint's tensors.
LIMITS = {
    "num_hidden_layers": 1024,
    "num_target_layers": 1024,
    "depth": 1024,
    "block_size": 1024,
    "hidden_size": 2**17,
    "out_hidden_size": 2**17,
    "vocab_size": 2**22,
    "num_heads": 2**12,
    "patch_size": 1024,
    "temporal_patch_size": 64,
    "spatial_merge_size": 64,
    "in_channels": 64,
    "head_dim": 2**12,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "linear_num_key_heads": 2**12,
    "linear_num_value_heads": 2**12,
    "linear_key_head_dim": 2**12,
    "linear_value_head_dim": 2**12,
    "linear_conv_kernel_dim": 64,
    "num_experts": 2**14,
    "num_local_experts": 2**14,
    "max_position_embeddings": 2**30,
    "original_max_position_embeddings": 2**30,
    "sliding_window": 2**30,
    "swa_window_size": 2**30,
    "conv_kernel_size": 64,
    "conv_group_size": 2**17,
    "selector_rank": 2**14,
    "selector_top_k": 256,
    "markov_rank": 2**14,
    "dspark_draft_topk": 256,
    "draft_vocab_size": 2**22,
}
LIMIT = 2**20
# Most experts of all layers together. Checkpoints that do not stack experts list their tensors one by one.
MAX_EXPERTS = 2**17
MISSING = object()
# Keys that change no number of a forward pass: names, dtypes (the caller chooses them), training, sampling and what
# transformers' classes write of tasks and outputs. Keys that begin with "_" or end in "_token_id" are others.
_NAMES = """
    model_type architectures auto_map name_or_path model_name transformers_version torch_dtype dtype mamba_ssm_dtype
    use_cache quantization_config language_model_only acceptance_length acceptance_rates unsloth_fixed
    unsloth_version attention_dropout hidden_dropout initializer_range output_router_logits router_aux_loss_coef
    pretraining_tp max_window_layers torchscript use_bfloat16 tf_legacy_loss chunk_size_feed_forward return_dict
    output_hidden_states output_attentions is_decoder finetuning_task id2label label2id num_labels problem_type
    tokenizer_class prefix task_specific_params max_length min_length do_sample early_stopping num_beams
    num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size bad_words_ids encoder_no_repeat_ngram_size num_return_sequences output_scores
    return_dict_in_generate remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens is_llama_config attn_implementation transformers.js_config neftune_noise_alpha
    gradient_checkpointing model_max_length max_sequence_length seq_length
"""
WITHOUT_EFFECT = frozenset(_NAMES.split())
# Keys that no model here supports, and their values without effect.
NEUTRAL = {
    "attention_bias": (False,),
    "qkv_bias": (False,),
    "mlp_bias": (False,),
    "rope_interleaved": (False,),
    "scoring_func": ("softmax",),
    "routed_scaling_factor": (1,),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
}


def shown(value) -> str:
    """The repr of a value for a message, cut where it is long or deep."""
    return reprlib.repr(value)


def integer(key: str, value, minimum: int = 1, maximum: int | None = None) -> int:
    """Returns ``value``.

    Raises:
        InputError: It is no whole number from ``minimum`` to ``maximum`` (None: the key's limit).
    """
    maximum = LIMITS.get(key, LIMIT) if maximum is None else maximum
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise InputError(f"{key} is {shown(value)}: it must be a whole number from {minimum} to {maximum}")
    return value


def number(key: str, value, minimum: float, maximum: float) -> float:
    """Returns ``value`` as a float.

    Raises:
        InputError: It is no number in [minimum, maximum].
    """
    # The comparison also refuses NaN.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not minimum <= value <= maximum:
        raise InputError(f"{key} is {shown(value)}: it must be a number from {minimum:g} to {maximum:g}")
    return float(value)


def flag(key: str, value) -> bool:
    """Returns ``value``.

    Raises:
        InputError: It is neither true nor false.
    """
    if not isinstance(value, bool):
        raise InputError(f"{key} is {shown(value)}: it must be true or false")
    return value


def words(key: str, value) -> list[str]:
    """Returns ``value``.

    Raises:
        InputError: It is no list of strings.
    """
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise InputError(f"{key} is {shown(value)}: it must be a list of strings")
    return value


def section(key: str, value) -> dict:
    """Returns ``value``.

    Raises:
        InputError: It is no object.
    """
    if not isinstance(value, dict):
        raise InputError(f"{key} is {shown(value)}: it must be an object")
    return value


class Raw(dict):
    """A raw config or a part of one. Its methods check the values that they read; ``null`` counts as a missing key.

    It records the keys that are read, so that `refuse_unread` finds the others.

    Attributes:
        model_type: The config's ``model_type``, for errors.
    """

    def __init__(self, raw: dict, model_type: str | None = None):
        super().__init__(raw)
        self.model_type = model_type or raw.get("model_type")
        self._neutral: dict[str, tuple] = dict(NEUTRAL)
        self._is_read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """As `dict.get`; the key counts as read."""
        self._is_read.add(key)
        return super().get(key, default)

    def allow(self, key: str, *values: Any) -> None:
        """Names a key that is not read and has no effect where it is one of ``values`` (none: whatever it is)."""
        self._neutral[key] = values

    def refuse_unread(self, name: Callable[[str], str] = str, same: dict | None = None) -> None:
        """Checks that every key was read or has no effect.

        Args:
            name: Key → its name in messages.
            same: Another part of the config, whose keys may be repeated here with their values.

        Raises:
            InputError: A key may change the numbers.
        """
        for key, value in self.items():
            is_named = key in self._is_read or key in WITHOUT_EFFECT or key.startswith("_") or key.endswith("_token_id")
            if value is None or is_named or (same is not None and key in same and same[key] == value):
                continue
            right = self._neutral.get(key)
            if right is not None and (not right or value in right):
                continue
            written = name(key if key.isidentifier() and len(key) <= 64 else shown(key))
            if right is not None:
                known = " or ".join(map(shown, right))
                reason = f"it changes the numbers, and only {known} is known for model_type {shown(self.model_type)}"
            else:
                reason = (
                    f"the key is not known for model_type {shown(self.model_type)} and may change the numbers; if it "
                    f"does not, set it to null"
                )
            raise InputError(f"{written} is {shown(value)}: {reason}")

    def _read(self, check: Callable[..., Any], key: str, default: Any, *limits: float) -> Any:
        value = self.get(key)
        if value is None:
            if default is MISSING:
                raise InputError(f"{key} is missing: a config of model_type {shown(self.model_type)} must have it")
            return default
        return check(key, value, *limits)

    def need(self, key: str, minimum: int = 1) -> int:
        """A required count or size."""
        return self._read(integer, key, MISSING, minimum)

    def integer(self, key: str, default, minimum: int = 1):
        """A count or size; ``default`` where it is missing."""
        return self._read(integer, key, default, minimum)

    def number(self, key: str, default, minimum: float, maximum: float):
        """A float; ``default`` where it is missing."""
        return self._read(number, key, default, minimum, maximum)

    def flag(self, key: str, default: bool | None = False) -> Any:
        """A boolean; ``default`` where it is missing."""
        return self._read(flag, key, default)

    def words(self, key: str, default):
        """A list of strings; ``default`` where it is missing."""
        return self._read(words, key, default)

    def section(self, key: str) -> dict:
        """An object; empty where it is missing."""
        return self._read(section, key, {})

    @property
    def norm_eps(self) -> float:
        """The epsilon of RMSNorm."""
        # A null is refused here, unlike elsewhere: without an epsilon, a norm may divide by zero.
        return number("rms_norm_eps", self.get("rms_norm_eps", 1e-6), 0.0, 0.1)

    @property
    def heads(self) -> tuple[int, int, int]:
        """(Query heads, key and value heads, dimensions of a head)."""
        heads = self.need("num_attention_heads")
        kv_heads = self.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise InputError(f"num_key_value_heads is {kv_heads}: it must divide num_attention_heads, {heads}")
        return heads, kv_heads, self.integer("head_dim", None) or self.need("hidden_size") // heads


def check_activation(raw: dict) -> None:
    """Checks that the MLP's activation is SiLU.

    Raises:
        InputError: It is another one.
    """
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise InputError(f"hidden_act is {shown(raw['hidden_act'])}: only silu is known")


def read_rope(raw: Raw, head_dim: int, partial: float = 1.0) -> RopeSpec:
    """Reads the rotary embedding from ``rope_parameters``, or from top-level keys and ``rope_scaling``.

    Args:
        raw: The config.
        head_dim: Dimensions of a head.
        partial: The rotated share of a head where the config does not name it.

    Raises:
        InputError: The scaling is unknown or a value is invalid.
    """
    parameters = raw.section("rope_parameters")
    scaling = Raw(raw.section("rope_scaling") | parameters, raw.model_type)
    top = raw.number("rope_theta", 10000.0, 1.0 + 1e-6, 1e15)
    theta = Raw(parameters).number("rope_theta", top, 1.0 + 1e-6, 1e15)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    readers = {"default": lambda *_: None, "mrope": lambda *_: None, "yarn": _yarn, "llama3": _llama3}
    if not isinstance(kind, str) or kind not in readers:
        raise InputError(f"rope_type {shown(kind)} is not known: known are default, llama3 and yarn")
    share = scaling.number("partial_rotary_factor", raw.number("partial_rotary_factor", partial, 0.0, 1.0), 0.0, 1.0)
    dim = int(head_dim * share)
    if dim < 2 or dim % 2:
        raise InputError(
            f"head_dim is {head_dim} and partial_rotary_factor {share:g}: {dim} dimensions of a head rotate, "
            f"which must be an even number from 2"
        )
    rope = RopeSpec(theta, dim, _sections(scaling, dim), readers[kind](scaling, raw))
    # Read above, from the section that they are in.
    scaling.allow("rope_theta")
    scaling.refuse_unread(lambda key: f"{'rope_parameters' if key in parameters else 'rope_scaling'}.{key}")
    return rope


def read_positions(raw: Raw, rope: RopeSpec) -> int:
    """Positions of the context: ``max_position_embeddings``; under YaRN its factor times the original positions."""
    positions = raw.need("max_position_embeddings")
    if isinstance(rope.scaling, YarnSpec):
        extended = int(rope.scaling.factor * rope.scaling.original_max_positions)
        return integer("max_position_embeddings under YaRN", extended, 1, LIMITS["max_position_embeddings"])
    return positions


def _sections(scaling: Raw, dim: int) -> tuple[int, int, int] | None:
    value = scaling.get("mrope_section")
    scaling.allow("mrope_interleaved", True)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 3:
        raise InputError(f"mrope_section is {shown(value)}: it must be three whole numbers")
    time, height, width = (integer("mrope_section", v, 0, dim // 2) for v in value)
    return time, height, width


def _yarn(scaling: Raw, raw: Raw) -> YarnSpec:
    unknown = sorted(k for k in ("mscale", "mscale_all_dim") if scaling.get(k)) + ["truncate"] * (
        scaling.get("truncate") is False
    )
    if unknown or scaling.get("factor") is None:
        fault = f"has {', '.join(unknown)}" if unknown else "lacks a factor"
        raise InputError(f"the YaRN scaling {fault}: known are factor, beta_fast, beta_slow, attention_factor")
    return YarnSpec(
        factor=scaling.number("factor", MISSING, 1e-3, 1e6),
        original_max_positions=scaling.integer("original_max_position_embeddings", None)
        or raw.need("max_position_embeddings"),
        beta_fast=scaling.number("beta_fast", 32.0, 1e-6, 1e6),
        beta_slow=scaling.number("beta_slow", 1.0, 1e-6, 1e6),
        attention_factor=scaling.number("attention_factor", None, 1e-3, 1e3),
    )


def _llama3(scaling: Raw, raw: Raw) -> Llama3Spec:
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [k for k in keys if scaling.get(k) is None]
    if missing:
        raise InputError(f"the llama3 RoPE scaling lacks {', '.join(missing)}")
    factor, low, high = (scaling.number(k, MISSING, 1e-3, 1e6) for k in keys[:3])
    if not low < high:
        raise InputError(f"high_freq_factor is {high:g}: it must be above low_freq_factor, {low:g}")
    return Llama3Spec(factor, low, high, scaling.need(keys[3]))


def read_attention(
    text: Raw, *, gated: bool = False, qk_norm: bool = True, qkv_bias: bool = False, partial: float = 1.0
) -> AttentionSpec:
    """Reads the attention layers.

    Args:
        text: The config.
        gated: Whether the output is gated.
        qk_norm: Whether queries and keys are normed.
        qkv_bias: Whether the projections of queries, keys and values have biases.
        partial: As in `read_rope`.
    """
    check_activation(text)
    refuse_window(text)
    text.allow("use_qk_norm", qk_norm)
    text.allow("attn_output_gate", gated)
    text.allow("qkv_bias", qkv_bias)
    heads, kv_heads, head_dim = text.heads
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=read_rope(text, head_dim, partial),
        gated=gated,
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
    )


def refuse_window(raw: Raw) -> None:
    """Checks that no layer slides: ``sliding_window`` is without effect only where ``use_sliding_window`` is false.

    Raises:
        InputError: Layers may slide.
    """
    used, window = raw.flag("use_sliding_window", None), raw.integer("sliding_window", None)
    if used or (window is not None and used is None):
        key = "use_sliding_window" if used else "sliding_window"
        raise InputError(
            f"{key} is {shown(raw[key])}: it changes the numbers, and no layer slides here; where none shall, set "
            f"use_sliding_window to false"
        )


def read_delta(text: Raw) -> GatedDeltaSpec:
    """Reads the Gated DeltaNet layers."""
    # vLLM's key for the activation of the gate of their output; transformers computes SiLU whatever it says.
    text.allow("output_gate_type", "silu", "swish")
    spec = GatedDeltaSpec(
        num_key_heads=text.need("linear_num_key_heads"),
        num_value_heads=text.need("linear_num_value_heads"),
        key_dim=text.need("linear_key_head_dim"),
        value_dim=text.need("linear_value_head_dim"),
        conv_kernel=text.integer("linear_conv_kernel_dim", 4, minimum=2),
    )
    if spec.num_value_heads % spec.num_key_heads:
        raise InputError(
            f"linear_num_value_heads is {spec.num_value_heads}: it must be a multiple of linear_num_key_heads, "
            f"{spec.num_key_heads}"
        )
    return spec


def read_ffns(text: Raw, *, shared: bool, normalise: bool) -> list[MlpSpec | MoeSpec]:
    """Reads the feed-forward of each layer.

    Args:
        text: The config.
        shared: Whether mixtures of experts have a shared expert.
        normalise: Whether the weights of the chosen experts sum to one.
    """
    depth, step = text.need("num_hidden_layers"), text.integer("decoder_sparse_step", 1)
    dense = text.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise InputError(f"mlp_only_layers is {shown(dense)}: it must be a list of layers")
    dense = {integer("mlp_only_layers", i, 0, depth - 1) for i in dense}
    # transformers writes the second name.
    counts = [text.integer(key, 0, minimum=0) for key in ("num_experts", "num_local_experts")]
    experts = counts[0] or counts[1]
    # Sizes of feed-forwards that no layer has.
    for key in ("intermediate_size", "moe_intermediate_size", "num_experts_per_tok"):
        text.allow(key)
    text.allow("shared_expert_intermediate_size", *([] if shared else [0]))
    if not experts:
        return [MlpSpec(text.need("intermediate_size"))] * depth
    if experts * depth > MAX_EXPERTS:
        raise InputError(f"num_experts is {experts} in {depth} layers: at most {MAX_EXPERTS} in all are possible")
    moe = MoeSpec(
        num_experts=experts,
        experts_per_token=text.need("num_experts_per_tok"),
        intermediate_size=text.need("moe_intermediate_size"),
        shared_intermediate_size=text.need("shared_expert_intermediate_size") if shared else None,
        normalise_top_k=normalise,
    )
    if moe.experts_per_token > experts:
        raise InputError(f"num_experts_per_tok is {moe.experts_per_token}, there are {experts} experts")
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(depth)]
    return [moe if s else MlpSpec(text.need("intermediate_size")) for s in sparse]


def read_kinds(text: Raw, known: tuple[str, ...], default: list[str]) -> list[str]:
    """The kind of each layer: ``layer_types``, or ``default`` where that is missing.

    Raises:
        InputError: The length is wrong, or a kind is not in ``known``.
    """
    kinds = text.words("layer_types", []) or default
    if len(kinds) != len(default):
        raise InputError(f"layer_types has {len(kinds)} entries, num_hidden_layers is {len(default)}: they must agree")
    unknown = sorted(set(kinds) - set(known))
    if unknown:
        raise InputError(f"layer_types has {shown(unknown)}: known are {sorted(known)}")
    return kinds

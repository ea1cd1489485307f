"""Reading ``config.json``: keys that must be there, options that are not known, rotary embeddings, layer kinds."""

from dflash_jax.config import AttentionSpec, GatedDeltaSpec, Llama3Spec, MlpSpec, MoeSpec, RopeSpec, YarnSpec
from dflash_jax.errors import InputError


class Raw(dict):
    """A raw config, or a part of one, that names its model type in errors."""

    def __init__(self, raw: dict, model_type=None):
        super().__init__(raw)
        self.model_type = model_type or raw.get("model_type")

    def need(self, key: str) -> int:
        """A count or a size: a whole number from 1."""
        if self.get(key) is None:
            raise InputError(f"config.json of model_type {self.model_type!r} lacks {key!r}")
        return whole(key, self[key])

    @property
    def norm_eps(self) -> float:
        value = self.get("rms_norm_eps", 1e-6)
        if not isinstance(value, (int, float)) or not 0 <= value < 1:
            raise InputError(f"config.json: rms_norm_eps is {value!r}: it must be a small number such as 1e-6")
        return float(value)

    def refuse(self, *options: str) -> None:
        """Raises InputError where one of ``options`` is set: no model here has them."""
        for option in options:
            if self.get(option):
                raise InputError(f"{option} {self[option]!r} is not known for model_type {self.model_type!r}")

    @property
    def head_dim(self) -> int:
        if self.get("head_dim") is not None:
            return self.need("head_dim")
        return self.need("hidden_size") // self.need("num_attention_heads")


def whole(key: str, value, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"config.json: {key} is {value!r}: it must be a whole number from {least}")
    return value


def check_activation(raw: dict) -> None:
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise InputError(f"config.json: hidden_act is {raw['hidden_act']!r}: only silu is known")


def read_rope(raw: dict, head_dim: int, partial: float = 1.0) -> RopeSpec:
    """The rotary embedding, from ``rope_parameters`` or from top-level keys and ``rope_scaling``.

    ``partial``: the rotated share of a head where the config does not say.
    """
    parameters = raw.get("rope_parameters") or {}
    scaling = {**(raw.get("rope_scaling") or {}), **parameters}
    theta = float(parameters.get("rope_theta", raw.get("rope_theta", 10000.0)))
    share = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", partial))
    sections = tuple(scaling["mrope_section"]) if scaling.get("mrope_section") else None
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    readers = {"default": lambda *_: None, "mrope": lambda *_: None, "yarn": _yarn, "llama3": _llama3}
    if kind not in readers:
        raise InputError(f"rope_type {kind!r} is not known: known are default, llama3 and yarn")
    return RopeSpec(theta, int(head_dim * share), sections, readers[kind](scaling, raw))


def _yarn(scaling: dict, raw: dict) -> YarnSpec:
    unknown = sorted(k for k in ("mscale", "mscale_all_dim") if scaling.get(k)) + ["truncate"] * (
        scaling.get("truncate") is False
    )
    if unknown or not scaling.get("factor"):
        fault = f"has {', '.join(unknown)}" if unknown else "lacks a factor"
        raise InputError(f"the YaRN scaling {fault}: known are factor, beta_fast, beta_slow, attention_factor")
    return YarnSpec(
        factor=float(scaling["factor"]),
        original_max_positions=int(scaling.get("original_max_position_embeddings") or raw["max_position_embeddings"]),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=scaling.get("attention_factor"),
    )


def _llama3(scaling: dict, raw: dict) -> Llama3Spec:
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [k for k in keys if not scaling.get(k)]
    if missing:
        raise InputError(f"the llama3 RoPE scaling lacks {', '.join(missing)}")
    factor, low, high, original = (scaling[k] for k in keys)
    return Llama3Spec(float(factor), float(low), float(high), int(original))


def read_attention(text: Raw, *, gated: bool = False, qk_norm: bool = True, partial: float = 1.0) -> AttentionSpec:
    text.refuse("attention_bias", "use_sliding_window")
    check_activation(text)
    heads = text.need("num_attention_heads")
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.head_dim,
        rope=read_rope(text, text.head_dim, partial),
        gated=gated,
        qk_norm=qk_norm,
    )


def read_delta(text: Raw) -> GatedDeltaSpec:
    return GatedDeltaSpec(
        num_key_heads=text.need("linear_num_key_heads"),
        num_value_heads=text.need("linear_num_value_heads"),
        key_dim=text.need("linear_key_head_dim"),
        value_dim=text.need("linear_value_head_dim"),
        conv_kernel=text.get("linear_conv_kernel_dim", 4),
    )


def read_ffns(text: Raw, *, shared: bool, normalise: bool) -> list[MlpSpec | MoeSpec]:
    """The feed-forward of each layer. ``shared``: its experts have a shared one beside them; ``normalise``: the chosen
    experts' weights are made to sum to one."""
    depth, step, dense = text.need("num_hidden_layers"), text.get("decoder_sparse_step", 1), text.get("mlp_only_layers")
    # transformers writes the second name.
    experts = text.get("num_experts") or text.get("num_local_experts")
    if not experts:
        return [MlpSpec(text.need("intermediate_size"))] * depth
    moe = MoeSpec(
        num_experts=experts,
        experts_per_token=text.need("num_experts_per_tok"),
        intermediate_size=text.need("moe_intermediate_size"),
        shared_intermediate_size=text.need("shared_expert_intermediate_size") if shared else None,
        normalise_top_k=normalise,
    )
    if moe.experts_per_token > experts:
        raise InputError(f"config.json: num_experts_per_tok is {moe.experts_per_token}, there are {experts} experts")
    sparse = [i not in (dense or ()) and (i + 1) % step == 0 for i in range(depth)]
    return [moe if s else MlpSpec(text.need("intermediate_size")) for s in sparse]


def read_kinds(text: Raw, known: tuple[str, ...], default: list[str]) -> list[str]:
    """``layer_types``, or ``default``."""
    kinds = text.get("layer_types") or default
    if len(kinds) != len(default):
        raise InputError(f"layer_types has {len(kinds)} entries, num_hidden_layers is {len(default)}: they must agree")
    unknown = sorted(set(kinds) - set(known))
    if unknown:
        raise InputError(f"layer_types has {unknown}: known are {sorted(known)}")
    return kinds

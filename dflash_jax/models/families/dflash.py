"""DFlash, DFlash2 and DSpark drafters: their ``config.json`` and weight names, in every published layout."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Literal, TypeGuard

import numpy as np

from dflash_jax.errors import InputError
from dflash_jax.models.config import AttentionSpec, ConvSpec, DraftConfig, DraftLayerSpec, SelectorSpec
from dflash_jax.models.families.draft_layouts import as_published, is_speculators
from dflash_jax.models.families.names import Entry, Tensor, same
from dflash_jax.models.families.reading import (
    LIMITS,
    Raw,
    check_activation,
    read_positions,
    read_rope,
    refuse_window,
    shown,
)
from dflash_jax.models.families.tables import attention_entries, mlp_entries

# Candidates of a place where a DSpark drafter does not say how many.
DRAFT_TOP_K = 16
# Classes with DFlash's tensors and mathematics (z-lab's, NeMo Automodel's, vLLM's and speculators'), and those of
# DFlash2 and DSpark, which have more.
ARCHITECTURES = (
    *("DFlashDraftModel", "Qwen3DFlashDraftModel", "DFlashQwen3ForCausalLM", "DFlashSpeculator"),
    *("DFlash2DraftModel", "Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator"),
)
# The tensor of a learned embedding of the mask token.
MASK = "mask_embedding"
# Names of two tensors of DFlash in Muse's drafters.
ALIASES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
# The tensor of a reduced head's tokens: token j is j + d2t[j]. Its counterpart follows from it.
TOKENS, DERIVED = "d2t", "t2d"
MARKOV, CONFIDENCE = "markov_head.", "confidence_head.proj."
# Tensors of an embedding and a head of the drafter's own.
EMBEDDINGS, HEAD = ("embed_tokens.weight", "model.embed_tokens.weight"), "lm_head.weight"
# Keys of ``dflash_config`` that are supported. JetSpec's drafters differ from DFlash's in ``causal_head`` only.
KEYS = (
    *("block_size", "mask_token_id", "num_target_layers", "target_layer_ids", "target_hidden_size"),
    *("is_causal", "causal", "causal_head", "use_swa", "swa_window_size"),
    # DFlash2's.
    *("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    *("output_multiplier", "final_logit_softcapping", "input_embedding_scale"),
    # DSpark's.
    *("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
    *("sample_from_anchor", "dspark_draft_topk", "draft_vocab_size"),
    # Names of what the other keys say, training and Muse's.
    *("projector_type", "num_anchors", "use_aux_hidden_state", "logit_scale"),
    # SpecForge's: what the numbers of heads say, and a weight in training.
    *("attention_mode", "confidence_head_alpha"),
)
# The class of MTP heads in speculators.
MTP_CLASS = "MTPDraftModel"
PROJECTORS = (None, "dflash", "dflash2", "dspark")
# Other block drafters, which are refused by name: the prefix of their architectures, and the keys that only they
# have. A key that is null, false or 0 has no effect.
OTHERS = {
    "LiLiCorr": (
        *("lilicorr_enabled", "lilicorr_candidate_topk", "lilicorr_hidden_size", "lilicorr_num_layers"),
        *("lilicorr_num_heads", "lilicorr_mlp_ratio", "lilicorr_factor_dim", "lilicorr_vector_eps"),
        "lilicorr_logit_scale",
    ),
    "XPress": ("xpress_rank", "xpress_topk", "xpress_passes"),
    "Domino": ("shift_label", "gru_hidden_dim", "emb_dim", "pure_draft_prefix_len"),
}


def architectures(raw: dict) -> list[str]:
    """The list ``architectures`` of a config; empty where it is missing."""
    return Raw(raw).words("architectures", [])


def is_drafter(raw: dict) -> bool:
    """Whether a config is a block drafter's, including the kinds that `read_config` refuses."""
    named = any(a in ARCHITECTURES or (a.endswith("DraftModel") and a != MTP_CLASS) for a in architectures(raw))
    return "dflash_config" in raw or is_speculators(raw) or named


def check_method(raw: dict, section: dict) -> None:
    """Checks that a drafter is of a known kind and has only known options.

    Args:
        raw: The config.
        section: Its ``dflash_config``.

    Raises:
        InputError: It is another method (the message names it), or an option is unknown.
    """
    named = [a for a in architectures(raw) if a not in ARCHITECTURES]
    options = {key for key, value in (raw | section).items() if value}
    for method, keys in OTHERS.items():
        evidence = [a for a in named if a.lower().startswith(method.lower())]
        evidence += sorted(k for k in options if k in keys or k.startswith(f"{method.lower()}_"))
        if evidence:
            known = "only DFlash, DFlash2 and DSpark are known here"
            raise InputError(f"this is a {method} drafter ({', '.join(evidence)}): {known}")
    if (projector := section.get("projector_type")) not in PROJECTORS:
        known = ", ".join(map(str, PROJECTORS[1:]))
        raise InputError(f"projector_type is {shown(projector)}: the kinds known here are {known}")
    if named:
        raise InputError(f"architectures is {shown(named)}: the drafters known here are {', '.join(ARCHITECTURES)}")
    if raw.get("head_type") not in (None, "auto"):
        raise InputError(f"head_type is {shown(raw['head_type'])}: it is not known here, dflash_config.causal_head is")
    known = {*KEYS, *(key for keys in OTHERS.values() for key in keys)}
    unknown = sorted(section.keys() - known)
    if unknown:
        raise InputError(f"dflash_config has {', '.join(map(shown, unknown[:5]))}: known are {', '.join(KEYS)}")


def default_taps(num_target: int, num_draft: int) -> tuple[int, ...]:
    """The reference's evenly spread taps, for configs that do not list them."""
    if num_draft == 1:
        return (num_target // 2,)
    return tuple(round(1 + i * (num_target - 4) / (num_draft - 1)) for i in range(num_draft))


def read_taps(merged: Raw, depth: int) -> tuple[int, ...]:
    """The target layers whose outputs the drafter reads.

    Raises:
        InputError: ``target_layer_ids`` is no list of layers, or too long.
    """
    ids = merged.get("target_layer_ids")
    if ids is None or ids == []:
        return default_taps(merged.need("num_target_layers"), depth)
    if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise InputError(f"target_layer_ids is {shown(ids)}: it must be a list of layers")
    if len(ids) > LIMITS["num_target_layers"]:
        raise InputError(f"target_layer_ids has {len(ids)} layers: at most {LIMITS['num_target_layers']} are possible")
    return tuple(ids)


def read_layers(merged: Raw, depth: int) -> list[tuple[int | None, bool]]:
    """Window and causality of every layer.

    Sliding layers are those of ``layer_types``; where that names none, ``use_swa`` makes all layers slide. Without
    either, ``use_sliding_window`` is refused. Causality within the block is ``is_causal``, else ``causal``, else
    ``causal_head`` (JetSpec's, for all layers), else the sliding layers are causal.

    Args:
        merged: The config with the keys of ``dflash_config`` over those at top level.
        depth: Layers.

    Returns:
        (window or None, causal) of each layer.

    Raises:
        InputError: A value is invalid, or a window is missing.
    """
    named = merged.words("layer_types", [])
    kinds = named or ["full_attention"] * depth
    if len(kinds) != depth:
        raise InputError(f"the drafter's layer_types has {len(kinds)} entries, num_hidden_layers is {depth}")
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise InputError(
            f"the drafter's layer_types has {shown(unknown)}: known are full_attention and sliding_attention"
        )
    sliding = [kind == "sliding_attention" for kind in kinds]
    if merged.flag("use_swa") and not any(sliding):
        sliding = [True] * depth
    window = None
    merged.allow("swa_window_size")
    # Where the layers are named, or swa_window_size wins, these are not read.
    merged.allow("sliding_window")
    merged.allow("use_sliding_window")
    if not any(sliding):
        if not named:
            refuse_window(merged)
    else:
        window = merged.integer("swa_window_size", None) or merged.integer("sliding_window", None)
        if window is None:
            raise InputError(
                "the drafter has sliding layers but neither dflash_config.swa_window_size nor sliding_window"
            )
    flags = [merged.flag(key, None) for key in ("is_causal", "causal", "causal_head")]
    causal = next((c for c in flags if c is not None), None)
    return [(window if slides else None, slides if causal is None else causal) for slides in sliding]


def read_conv(merged: Raw, hidden: int) -> ConvSpec | None:
    """The convolutions of DFlash2; None without them.

    Raises:
        InputError: One of the two keys is missing, or the group does not divide the hidden size.
    """
    taps, group = _both(merged, "conv_kernel_size", "conv_group_size")
    if taps is None or group is None:
        return None
    if hidden % group:
        raise InputError(f"conv_group_size is {group}: it must divide hidden_size, {hidden}")
    return ConvSpec(taps, group)


def read_selector(merged: Raw) -> SelectorSpec | None:
    """The selector of DFlash2, or the Markov head of DSpark; None without either.

    Raises:
        InputError: A key that comes with another is missing, or both are there.
    """
    rank, top_k = _both(merged, "selector_rank", "selector_top_k")
    markov_rank = merged.integer("markov_rank", 0, minimum=0)
    kind = merged.get("markov_head_type", "vanilla")
    drafted = merged.integer("dspark_draft_topk", DRAFT_TOP_K)
    if not markov_rank:
        return None if rank is None or top_k is None else SelectorSpec(rank, top_k)
    if rank is not None:
        raise InputError(f"markov_rank is {markov_rank} and selector_rank {rank}: a drafter has one of them")
    if kind not in ("vanilla", "gated", "rnn"):
        raise InputError(f"markov_head_type is {shown(kind)}: it must be vanilla, gated or rnn")
    return SelectorSpec(markov_rank, drafted, kind)


def read_confidence(merged: Raw, selector: SelectorSpec | None) -> Literal["state", "state and token"] | None:
    """What the head for the drafts' probabilities reads; None without one."""
    with_token = merged.flag("confidence_head_with_markov")
    if not merged.flag("enable_confidence_head"):
        return None
    if with_token and selector is None:
        raise InputError("confidence_head_with_markov is True: the drafter has no Markov head, whose rows it reads")
    return "state and token" if with_token else "state"


def _both(merged: Raw, *keys: str) -> list[int | None]:
    """The values of keys that come together, or None for each."""
    values = [merged.integer(key, None) for key in keys]
    missing = [key for key, value in zip(keys, values, strict=True) if value is None]
    if missing and len(missing) < len(keys):
        raise InputError(f"{missing[0]} is missing: it comes with {next(key for key in keys if key not in missing)}")
    return values


def equal_rates(acceptance_length: float, block_size: int) -> tuple[float, ...]:
    """`DraftConfig.acceptance_rates` r, r², … with which rounds yield ``acceptance_length`` tokens on average."""
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        is_less = sum(middle**i for i in range(block_size)) < acceptance_length
        low, high = (middle, high) if is_less else (low, middle)
    return tuple(high**i for i in range(1, block_size))


def recorded_acceptance(raw: dict, block_size: int) -> tuple[float, ...] | None:
    """`DraftConfig.acceptance_rates` of a config with ``acceptance_rates`` or with ``acceptance_length`` alone.

    Returns:
        None where there is neither, or none that a block of this size can have.
    """

    def is_number(value: object) -> TypeGuard[float]:
        return isinstance(value, (int, float)) and not isinstance(value, bool)

    rates, length = raw.get("acceptance_rates"), raw.get("acceptance_length")
    if (
        isinstance(rates, list)
        and 0 < len(rates) < block_size
        and all(map(is_number, rates))
        and all(a >= b for a, b in pairwise([1, *rates, 0]))
    ):
        return tuple(map(float, rates))
    if is_number(length) and 1 <= length <= block_size and block_size > 1:
        return equal_rates(length, block_size)
    return None


def read_config(raw: dict) -> DraftConfig:
    """Reads a drafter's ``config.json``. Keys inside ``dflash_config`` override those at top level.

    Raises:
        InputError: The drafter is of a kind that is not known here, or a value is invalid.
    """
    raw = as_published(raw)
    section = Raw(raw).section("dflash_config")
    check_method(raw, section)
    merged = Raw({**raw, **{k: v for k, v in section.items() if v is not None}})
    check_activation(merged)
    depth, hidden = merged.need("num_hidden_layers"), merged.need("hidden_size")
    heads, kv_heads, head_dim = merged.heads
    rope = read_rope(merged, head_dim)
    attention = AttentionSpec(heads, kv_heads, head_dim, rope)
    target_size = merged.integer("target_hidden_size", hidden)
    if target_size != hidden:
        raise InputError(f"target_hidden_size is {target_size}: it must be the drafter's hidden_size, {hidden}")
    # DSpark's block size counts the drafts; ours has the last known token, too.
    is_shifted = merged.flag("sample_from_anchor")
    block_size = merged.need("block_size") + is_shifted
    vocab, selector = merged.need("vocab_size"), read_selector(merged)
    drafted = merged.integer("draft_vocab_size", vocab)
    if drafted > vocab:
        raise InputError(f"draft_vocab_size is {drafted}: vocab_size is {vocab}")
    config = DraftConfig(
        hidden_size=hidden,
        vocab_size=vocab,
        layers=tuple(
            DraftLayerSpec(attention, merged.need("intermediate_size"), window, causal)
            for window, causal in read_layers(merged, depth)
        ),
        block_size=block_size,
        mask_token_id=merged.need("mask_token_id", minimum=0),
        target_layer_ids=read_taps(merged, depth),
        num_target_layers=merged.integer("num_target_layers", None),
        norm_eps=merged.norm_eps,
        max_positions=read_positions(merged, rope),
        conv=read_conv(merged, hidden),
        draft_vocab_size=None if drafted == vocab else drafted,
        is_shifted=is_shifted,
        selector=selector,
        confidence=read_confidence(merged, selector),
        output_multiplier=merged.number("output_multiplier", merged.number("logit_scale", 1.0, -1e6, 1e6), -1e6, 1e6),
        logit_cap=merged.number("final_logit_softcapping", 0.0, 0.0, 1e6),
        embedding_scale=merged.number("input_embedding_scale", 1.0, -1e6, 1e6),
        acceptance_rates=recorded_acceptance(raw, block_size),
    )
    # Checked above: the keys of other methods are off.
    for key in ("dflash_config", "head_type", *(key for keys in OTHERS.values() for key in keys)):
        merged.allow(key)
    merged.allow("use_qk_norm", True)
    merged.allow("use_aux_hidden_state", True)
    for key in ("tie_word_embeddings", "projector_type", "num_anchors", "attention_mode", "confidence_head_alpha"):
        merged.allow(key)
    merged.refuse_unread()
    return config


def with_tables(config: DraftConfig, raw: dict, names: Collection[str]) -> DraftConfig:
    """``config`` with the embedding, the head and the mask's embedding that are among a checkpoint's tensors ``names``.

    A head that is tied to an embedding of the drafter's own is that table. A reduced head without rows in the files has
    the target's.

    Args:
        config: What `read_config` read.
        raw: The drafter's ``config.json``.
        names: The tensors; empty where there are no files.

    Raises:
        InputError: The tokens of a reduced vocabulary are missing.
    """
    embedding, is_whole = any(name in names for name in EMBEDDINGS), config.draft_vocab_size is None
    head = HEAD in names or (embedding and is_whole and Raw(raw).flag("tie_word_embeddings"))
    if names and not is_whole and TOKENS not in names:
        right = f"draft_vocab_size is {config.draft_vocab_size} of {config.vocab_size} tokens"
        raise InputError(f"the drafter has no tensor {TOKENS}: {right}")
    return replace(config, own_embedding=embedding, own_head=head, own_mask=MASK in names)


def weight_names(config: DraftConfig, names: Collection[str] = ()) -> list[Entry]:
    """The table of a drafter's parameters for a checkpoint with the tensors ``names`` (default: as it is written)."""
    hidden, taps = config.hidden_size, len(config.target_layer_ids)
    table, embedding = (config.vocab_size, hidden), next((n for n in EMBEDDINGS if n in names), EMBEDDINGS[0])
    drafted = config.draft_vocab_size or config.vocab_size
    fc, norm = (ALIASES[name] if ALIASES[name] in names else name for name in ALIASES)
    entries = [
        Entry("fc", (hidden, taps, hidden), (Tensor(fc, (hidden, taps * hidden)),)),
        same("hidden_norm.weight", (hidden,), norm),
        same("norm.weight", (hidden,), "norm.weight"),
    ]
    if config.draft_vocab_size is not None:
        tokens = partial(_tokens, config.vocab_size)
        entries.append(Entry("head_ids", (drafted,), (Tensor(TOKENS, (drafted,)),), tokens, _offsets, True))
    if config.own_mask:
        entries.append(same("mask", (hidden,), MASK))
    if config.own_embedding:
        entries.append(same("embed", table, embedding))
    if config.own_head:
        entries.append(same("head", (drafted, hidden), HEAD if HEAD in names or not names else embedding))
    for i, spec in enumerate(config.layers):
        at = f"layers.{i}."
        entries.append(same(f"{at}input_norm.weight", (hidden,), f"{at}input_layernorm.weight"))
        entries.append(same(f"{at}post_norm.weight", (hidden,), f"{at}post_attention_layernorm.weight"))
        entries += attention_entries(f"{at}mixer.", f"{at}self_attn.", spec.attention, hidden)
        entries += mlp_entries(f"{at}ffn.", f"{at}mlp.", spec.intermediate_size, hidden)
        if config.conv is not None:
            taps, group = config.conv.taps, config.conv.group
            for side in ("attention_conv", "mlp_conv"):
                shape, disk = (2, taps, hidden // group, hidden), (2 * taps * hidden // group, hidden)
                entries.append(same(f"{at}{side}.base", (2, taps, hidden), f"{at}{side}.base_kernel"))
                entries.append(same(f"{at}{side}.projection", shape, f"{at}{side}.kernel_projection.weight", disk))
    if config.selector is not None:
        entries += _selector_entries(config, config.selector, drafted, names)
    if config.confidence is not None:
        inputs = hidden + (config.selector.rank if config.selector and config.confidence != "state" else 0)
        entries.append(same("confidence", (1, inputs), f"{CONFIDENCE}weight"))
        entries.append(same("confidence_bias", (1,), f"{CONFIDENCE}bias"))
    return entries


def _selector_entries(config: DraftConfig, spec: SelectorSpec, drafted: int, names: Collection[str]) -> list[Entry]:
    """The entries of `Selector`."""
    shape, before, after = spec.gate_shape(config.hidden_size), (config.vocab_size, spec.rank), (drafted, spec.rank)
    if spec.kind == "dflash2":
        assert shape is not None
        at = "candidate_selector."
        return [
            same("selector.gate", shape, f"{at}hidden_projection.weight"),
            same("selector.predecessor", before, _named(f"{at}predecessor_codebook", names)),
            same("selector.successor", after, _named(f"{at}successor_codebook", names)),
        ]
    entries = [
        same("selector.predecessor", before, f"{MARKOV}markov_w1.weight"),
        same("selector.successor", after, f"{MARKOV}markov_w2.weight"),
    ]
    if shape is not None:
        projection = f"{MARKOV}{'gate' if spec.kind == 'gated' else 'joint'}_proj"
        entries.append(same("selector.gate", shape, f"{projection}.weight"))
        entries.append(same("selector.gate_bias", shape[:1], f"{projection}.bias"))
    return entries


def is_skipped(config: DraftConfig, name: str, read: Callable[[str], np.ndarray]) -> bool:
    """Whether a tensor follows from the others: which tokens a reduced head has, or that a head has all in order.

    Args:
        config: The drafter's configuration.
        name: The tensor.
        read: Reads a tensor.
    """
    if config.draft_vocab_size is not None or name not in (TOKENS, DERIVED):
        return name == DERIVED and config.draft_vocab_size is not None
    array = read(name)
    return array.shape == (config.vocab_size,) and bool((array == (name == DERIVED)).all())


def _tokens(vocab_size: int, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Token ids of the offsets ``d2t``.

    Raises:
        InputError: They are not ascending, or not of the vocabulary.
    """
    (offsets,) = arrays
    ids = np.arange(len(offsets)) + offsets.astype(np.int64)
    if (np.diff(ids) <= 0).any() or (len(ids) and ids[0] < 0):
        raise InputError(f"the tensor {TOKENS} gives tokens that do not ascend from 0")
    if len(ids) and ids[-1] >= vocab_size:
        raise InputError(f"the tensor {TOKENS} gives the token {ids[-1]}: vocab_size is {vocab_size}")
    return ids.astype(np.int32)


def _offsets(ids: np.ndarray) -> list[np.ndarray]:
    return [ids.astype(np.int64) - np.arange(len(ids))]


def _named(name: str, names: Collection[str]) -> str:
    """``name``, or with ".weight" after it where the checkpoint has that."""
    return f"{name}.weight" if f"{name}.weight" in names else name

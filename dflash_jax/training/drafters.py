"""The drafter that is trained: fresh, or from a checkpoint; and its export as a Hugging Face directory."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_jax.checkpoint.config_files import read_config_file
from dflash_jax.checkpoint.hub import resolve
from dflash_jax.checkpoint.load import check_copies, load_drafter, open_drafter, save_module
from dflash_jax.errors import InputError
from dflash_jax.frontend.llm import LLM
from dflash_jax.models import families
from dflash_jax.models.config import AttentionSpec, DraftConfig
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.families import dflash, mtp
from dflash_jax.models.families.draft_layouts import as_published
from dflash_jax.models.layers import Attention
from dflash_jax.models.mtp import Mtp
from dflash_jax.models.mtp_config import MtpConfig
from dflash_jax.models.packing import plain_weight
from dflash_jax.ops.weights import dense, is_weight
from dflash_jax.options.train import FIELDS, TrainConfig
from dflash_jax.parallel.sharding import parameter_paths

MASK = "<|mask|>"
# Places of a block that an MTP head is trained for, by default and at most.
MTP_BLOCK_SIZE, MAX_MTP_BLOCK_SIZE = 4, 8
# Options of numbers of a part, and the options that give a drafter the part.
NUMBERS_OF_PARTS = {
    **dict.fromkeys(("convolution_taps", "convolution_group"), "convolutions"),
    **dict.fromkeys(("rank", "candidates"), "selector or markov"),
}


def fresh_config(config: TrainConfig, llm: LLM) -> dict:
    """The ``config.json`` of a fresh drafter: numbers from ``config``, heads from the target's attention.

    Raises:
        InputError: The target has no attention layer, or no mask token is known.
    """
    target = llm.config
    attention = next((s.mixer for s in target.layers if isinstance(s.mixer, AttentionSpec)), None)
    if attention is None:
        raise InputError("the target has no attention layer to take the heads from: give a draft_config")
    mask = config.mask_token_id
    if mask is None:
        ids = llm.tokenizer.encode_plain(MASK) if llm.tokenizer else []
        if len(ids) != 1:
            raise InputError(f"the target's vocabulary has no {MASK}: give mask_token_id, a token that no text has")
        mask = ids[0]
    slides, depth = config.sliding_window is not None, len(target.layers)
    taps = list(config.taps) or spread_taps(depth, config.layers)
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": config.intermediate_size or 3 * target.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": target.norm_eps,
        "rope_theta": attention.rope.theta,
        "rope_scaling": None,
        "max_position_embeddings": target.max_positions,
        "tie_word_embeddings": False,
        "num_target_layers": depth,
        "block_size": config.block_size,
        "layer_types": ["sliding_attention" if slides else "full_attention"] * (config.layers - 1) + ["full_attention"],
        "sliding_window": config.sliding_window,
        "use_sliding_window": slides,
        "dtype": "bfloat16",
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": taps},
    }


def spread_taps(depth: int, count: int) -> list[int]:
    """``count`` layers spread from the second to the third last of ``depth``, as in the published drafters."""
    last = max(depth - 3, 0)
    first = min(1, last)
    taps = [round(first + i * (last - first) / max(count - 1, 1)) for i in range(count)]
    return sorted(set(taps))


def raw_config(config: TrainConfig, llm: LLM) -> dict:
    """The drafter's ``config.json``, checked against the target.

    Raises:
        InputError: It does not fit the target, or a number in ``config`` contradicts a given drafter.
    """
    if config.mtp:
        mtp_block_size(config)
        for name in ("convolutions", "selector", "markov", "confidence", *NUMBERS_OF_PARTS):
            if (value := getattr(config, name)) != FIELDS[name].default:
                raise InputError(f"{name} {value}: with mtp there is none, since an MTP head has no such part")
        given = (
            llm.directory
            if config.draft in (None, "mtp")
            else resolve(config.draft, config.draft_revision, config.download_dir)
        )
        raw, parsed = read_config_file(given, families.read_drafter)
        if not isinstance(parsed, MtpConfig):
            raise InputError(f"draft {config.draft}: it is a DFlash drafter, and mtp trains a target's MTP head")
        parsed.check_fits(llm.config)
        return mtp.of_target(raw)
    if config.draft is not None:
        raw, parsed = read_config_file(
            resolve(config.draft, config.draft_revision, config.download_dir), dflash.read_config
        )
    elif config.draft_config is not None:
        raw, parsed = read_config_file(Path(config.draft_config), dflash.read_config)
    else:
        raw = fresh_config(config, llm)
        parsed = dflash.read_config(raw)
    parsed.check_fits(llm.config)
    source = config.draft if config.draft is not None else config.draft_config
    if source is not None:
        check_numbers(config, parsed, source)
    raw = with_parts(config, raw, parsed)
    draft = dflash.read_config(raw)
    check_trainable(draft)
    for name, part in NUMBERS_OF_PARTS.items():
        if getattr(config, name) != FIELDS[name].default and name not in part_numbers(draft):
            raise InputError(f"{name} {getattr(config, name)}: it comes with {part}")
    if config.body_rate == 0 and (draft.conv, draft.selector, draft.confidence) == (None, None, None):
        raise InputError("body_rate 0: nothing would be learned, without convolutions, selector and Markov head")
    return raw


def part_numbers(draft: DraftConfig) -> dict[str, int]:
    """The numbers of a drafter's convolutions and selector, by the options of training that give them."""
    numbers = {}
    if draft.conv is not None:
        numbers |= {"convolution_taps": draft.conv.taps, "convolution_group": draft.conv.group}
    if draft.selector is not None:
        numbers |= {"rank": draft.selector.rank, "candidates": draft.selector.top_k}
    return numbers


def with_parts(config: TrainConfig, raw: dict, draft: DraftConfig) -> dict:
    """A drafter's ``config.json`` with the parts that ``config`` gives it.

    Raises:
        InputError: It has another selector already.
    """
    added: dict = {}
    if config.convolutions and draft.conv is None:
        added |= {"conv_kernel_size": config.convolution_taps, "conv_group_size": config.convolution_group}
    kind = "dflash2" if config.selector else config.markov
    if kind is not None and draft.selector is None:
        keys = ("selector_rank", "selector_top_k") if config.selector else ("markov_rank", "dspark_draft_topk")
        added |= dict(zip(keys, (config.rank, config.candidates), strict=True))
        if config.markov is not None:
            added |= {"markov_head_type": config.markov}
    elif kind is not None and draft.selector is not None and draft.selector.kind != kind:
        raise InputError(f"the drafter has a {draft.selector.kind} selector: it cannot get a {kind} one, too")
    if config.confidence and draft.confidence is None:
        added |= dict.fromkeys(("enable_confidence_head", "confidence_head_with_markov"), True)
    if not added:
        return raw
    raw = as_published(raw)
    architecture = "DSparkDraftModel" if config.markov is not None else "DFlash2DraftModel"
    # A DSpark drafter that does not say is shifted.
    section = (raw.get("dflash_config") or {}) | added | {"sample_from_anchor": draft.is_shifted}
    return raw | {"architectures": [architecture], "dflash_config": section}


def check_trainable(draft: DraftConfig) -> None:
    """Checks that a drafter is of a form that is trained here.

    Raises:
        InputError: It runs here, and is not trained.
    """
    forms = {
        "draft_vocab_size": draft.draft_vocab_size is not None,
        "sample_from_anchor": draft.is_shifted,
        "markov_head_type rnn": draft.selector is not None and draft.selector.kind == "rnn",
    }
    if found := [name for name, is_there in forms.items() if is_there]:
        raise InputError(f"the drafter has {found[0]}: drafters of this form are run here, and not trained")


def mtp_block_size(config: TrainConfig) -> int:
    """Places of a block in the training of an MTP head: a step more than drafts.

    Raises:
        InputError: A head has fewer.
    """
    if config.block_size == FIELDS["block_size"].default:
        return MTP_BLOCK_SIZE
    if config.block_size > MAX_MTP_BLOCK_SIZE:
        raise InputError(f"block_size {config.block_size}: it must be 2 to {MAX_MTP_BLOCK_SIZE} with mtp")
    return config.block_size


def check_numbers(config: TrainConfig, draft: DraftConfig, source: str) -> None:
    """Checks that ``config`` asks for no number that a given drafter does not have.

    Args:
        config: Numbers other than a field's default must match.
        draft: The given drafter's configuration.
        source: Where the given drafter is from, for errors.

    Raises:
        InputError: A number differs.
    """
    windows = [layer.window for layer in draft.layers if layer.window is not None]
    actual = {
        "layers": len(draft.layers),
        "block_size": draft.block_size,
        "taps": tuple(draft.target_layer_ids),
        "intermediate_size": draft.layers[0].intermediate_size,
        "sliding_window": windows[0] if windows else None,
        "mask_token_id": draft.mask_token_id,
        **part_numbers(draft),
    }
    for name, value in actual.items():
        if (given := getattr(config, name)) not in (FIELDS[name].default, value):
            raise InputError(f"{name} {given}: that of {source} is {value}, and stays")


def starting_drafter(config: TrainConfig, raw: dict, target: Decoder, directory: Path) -> Drafter | Mtp:
    """The drafter at step 0: loaded, or random.

    With ``start_layers``, a random drafter's layers are copies of the target's. A fresh MTP head begins as the target's
    last layer of its kind.

    Args:
        config: The run.
        raw: The drafter's ``config.json``.
        target: The target.
        directory: The target's directory.
    """
    if config.mtp and config.draft is None:
        return fresh_head(config, families.read_drafter(raw), target)
    if config.draft is not None:
        is_own = config.draft == "mtp"
        source = directory if is_own else resolve(config.draft, config.draft_revision, config.download_dir)
        given = load_drafter(source, quantize="none", final_norm=target.norm.weight[...])
        if isinstance(given, Mtp):
            check_copies(source, directory)
            return given
        if given.config.own_mask:
            raise InputError("the drafter has a learned mask embedding: it is run here, and not trained")
        return with_fresh_parts(given, dflash.read_config(raw), config.seed)
    drafter = Drafter(dflash.read_config(raw), rngs=nnx.Rngs(config.seed))
    if config.start_layers:
        copy_layers(drafter, target, config.start_layers)
    return drafter


def with_fresh_parts(given: Drafter, draft: DraftConfig, seed: int) -> Drafter:
    """The drafter ``given`` with the parts that ``draft`` has beyond it, which change nothing yet."""
    parts = {name: getattr(draft, name) for name in ("conv", "selector", "confidence")}
    if all(getattr(given.config, name) == part for name, part in parts.items()):
        return given
    drafter = Drafter(replace(given.config, **parts), rngs=nnx.Rngs(seed))
    arrays = dict(zip(parameter_paths(given), jax.tree.leaves(given), strict=True))
    leaves, structure = jax.tree.flatten(drafter)
    paths = zip(parameter_paths(drafter), leaves, strict=True)
    return jax.tree.unflatten(structure, [arrays.get(path, leaf) for path, leaf in paths])


def fresh_head(config: TrainConfig, draft: DraftConfig | MtpConfig, target: Decoder) -> Mtp:
    """An MTP head whose layer and norms are the target's, and whose projection is random."""
    assert isinstance(draft, MtpConfig)
    head = Mtp(draft, rngs=nnx.Rngs(config.seed))
    (spec,) = draft.layers
    alike = [i for i, layer in enumerate(target.config.layers) if layer == spec]
    weights = parameter_paths(target, is_weight), jax.tree.leaves(target, is_leaf=is_weight)
    arrays = dict(zip(*weights, strict=True))
    sources = {"final_norm.weight": "norm.weight", "norm.weight": "norm.weight"}
    leaves, structure = jax.tree.flatten(head)
    paths = parameter_paths(head)
    if alike:
        sources |= {p: p.replace("layers.0.", f"layers.{alike[-1]}.", 1) for p in paths if p.startswith("layers.0.")}
    started = [
        dense(plain_weight(arrays[sources[path]]), leaf.dtype) if sources.get(path) in arrays else leaf
        for path, leaf in zip(paths, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, started)


def copy_layers(drafter: Drafter, target: Decoder, layers: Sequence[int]) -> None:
    """Copies weights of the target into the drafter.

    Args:
        drafter: Its layers and its last norm are overwritten.
        target: Where the weights are from.
        layers: The target layer of each drafter layer.

    Raises:
        InputError: The number of layers or a shape does not fit.
    """
    depth, count = len(target.layers), len(drafter.layers)
    if len(layers) != count or not all(0 <= i < depth for i in layers):
        raise InputError(f"start_layers {list(layers)}: give {count}, each 0 to {depth - 1}")

    def copy(to, of, offset: float = 0.0):
        to[...] = dense(of[...], to[...].dtype) + offset

    offset = target.config.norm_offset
    for layer, i in zip(drafter.layers, layers, strict=True):
        source = target.layers[i]
        pairs = [(layer.mixer, source.mixer, "q k v o"), (layer.ffn, source.ffn, "gate_up down")]
        for to, of, names in pairs:
            for name in names.split():
                shape, source_shape = getattr(to, name).shape, getattr(getattr(of, name, None), "shape", None)
                if shape != source_shape:
                    raise InputError(
                        f"start_layers {i}: {name} is {source_shape} in the target, {shape} in the drafter"
                    )
                copy(getattr(to, name), getattr(of, name))
        for name in ("input_norm", "post_norm"):
            copy(getattr(layer, name).weight, getattr(source, name).weight, offset)
        # Gated DeltaNet has no q, k, v and o: it failed above.
        assert isinstance(source.mixer, Attention)
        for name, matrix in (("q_norm", source.mixer.q), ("k_norm", source.mixer.k)):
            norm = getattr(layer.mixer, name).weight
            if hasattr(source.mixer, name):
                copy(norm, getattr(source.mixer, name).weight, offset)
                continue
            # A target without these norms: the norm's weight is about the size of its queries and keys.
            rows = dense(matrix[...], jnp.float32) * (layer.input_norm.weight[...])
            norm[...] = jnp.full(norm.shape, jnp.sqrt(jnp.mean(jnp.sum(rows**2, -1))), norm[...].dtype)
    copy(drafter.norm.weight, target.norm.weight, offset)


def export(drafter: Drafter | Mtp, raw: dict, directory: Path) -> None:
    """Writes the published layout: ``model.safetensors`` in bfloat16 and ``config.json``.

    Of an MTP head those are its tensors, the target's final norm and the target's config.
    """
    # The config may be that of a checkpoint in few bits.
    raw = {key: value for key, value in raw.items() if key != "quantization_config"}
    if isinstance(drafter, Drafter) and drafter.config.own_head:
        # Both tables were trained.
        raw = raw | {"tie_word_embeddings": False}
    entries = mtp.weight_names(drafter.config) if isinstance(drafter, Mtp) else dflash.weight_names(drafter.config)
    save_module(drafter, entries, raw, directory, jnp.bfloat16)
    if open_drafter(directory).config != drafter.config:
        raise AssertionError(f"{directory / 'config.json'} does not describe the drafter that was trained")

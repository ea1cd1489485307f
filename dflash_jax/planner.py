"""What a system takes of a device: bytes of weights and of a slot, what fits, and the tokens a second at most."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_jax.engine.config import PREFILL_BYTES, has_large_chunks, largest_prefill
from dflash_jax.engine.model_size import Weights, weigh

if TYPE_CHECKING:
    from dflash_jax.checkpoint.load import Forms
    from dflash_jax.models.config import DraftConfig, ModelConfig
    from dflash_jax.models.decoder import Decoder
    from dflash_jax.models.drafter import Drafter
    from dflash_jax.models.mtp import Mtp
    from dflash_jax.models.mtp_config import MtpConfig
    from dflash_jax.ops.backend import Backend
    from dflash_jax.parallel.devices import Device
    from dflash_jax.parallel.sharding import Layout

# Share of a device's memory that can be used. The runtime and fragmentation take the remainder.
USABLE = 0.95


@dataclass(frozen=True)
class Slot:
    """A slot of the decoding state on one device, in bytes.

    Attributes:
        fixed: What does not depend on the length.
        per_position: For each position.
        state: Recurrent states, which a round reads and writes.
        target_kv: Keys and values of the target for each position, which a round and a plain step read.
        draft_kv: Keys and values of the drafter for each position, which a round reads.
        windowed: Of ``fixed``, those of layers with a window.
        windowed_kv: For each position of the window.
    """

    fixed: float
    per_position: float
    state: float
    target_kv: float
    draft_kv: float
    windowed: float = 0.0
    windowed_kv: float = 0.0

    @property
    def kv(self) -> float:
        """Keys and values of target and drafter for each position."""
        return self.target_kv + self.draft_kv

    def read(self, context: int, drafts: bool) -> float:
        """Bytes of keys and values that a round, or a plain step, reads after ``context`` tokens."""
        if not drafts:
            return self.target_kv * context
        return self.kv * context + min(self.windowed, self.windowed_kv * context)

    def bytes(self, length: int, used: int | None = None) -> float:
        """Bytes of a slot of at most ``length`` positions, of which ``used`` (None: all) have pages."""
        if used is None:
            return self.fixed + self.per_position * length
        from dflash_jax.ops.cache import PAGE_SIZE

        pages = -(-used // PAGE_SIZE) * PAGE_SIZE
        windowed = min(self.windowed, self.windowed_kv * pages)
        return self.fixed - self.windowed + windowed + (self.per_position - self.kv) * length + self.kv * pages


def measure_slot(
    target: "Decoder", drafter: "Drafter | Mtp | None", layout: "Layout", draft_window_size: int | None = None
) -> Slot:
    """Measures a slot of a pair of models, from shapes.

    Args:
        target: The target.
        drafter: The drafter; None without one.
        layout: The mesh.
        draft_window_size: The last positions that the drafter sees; None: as its layers do.
    """
    import jax

    from dflash_jax.decoding.state import DecodeState, Settings, empty_state, is_kv_cache, state_specs
    from dflash_jax.models.drafting import DraftWindow
    from dflash_jax.ops.cache import PAGE_SIZE, DeltaState, window_pages
    from dflash_jax.parallel.sharding import parts_of

    settings = Settings(draft_window=DraftWindow(draft_window_size))

    def size(tree, specs) -> float:
        leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(specs), strict=True)
        return sum(math.prod(x.shape) * x.dtype.itemsize / parts_of(layout.sizes, s) * layout.data for x, s in leaves)

    def shapes(length: int, pages: tuple[int, int]) -> DecodeState:
        return jax.eval_shape(partial(empty_state, target, drafter, layout.data, length, settings, pages))

    def measure(state: DecodeState) -> tuple[float, float, float, list[float]]:
        """Bytes of the state, of its target's and its drafter's caches, and of each recurrent state."""
        specs = state_specs(target, drafter, state)
        states = [size(c, s) for c, s in zip(state.target, specs.target, strict=True) if isinstance(c, DeltaState)]
        parts = (state, specs), (state.target, specs.target), (state.draft, specs.draft)
        whole, targets, drafts = (size(*part) / layout.data for part in parts)
        return whole, targets, drafts, [s / layout.data for s in states]

    # Linear in the length, but for pages.
    length = 2**16
    empty = shapes(length, (0, 0))
    bare, bare_target, bare_draft, recurrent = measure(empty)
    slope = (measure(shapes(2 * length, (0, 0)))[0] - bare) / length
    whole, targets, drafts, _ = measure(shapes(length, (1, 0)))
    caches = jax.tree.leaves(empty.draft, is_leaf=is_kv_cache)
    windows = [(c.window, c.sinks) for c in caches if is_kv_cache(c) and c.window is not None]
    # A state's shapes are a trace of all layers: none for pages that no cache has.
    windowed_kv = (measure(shapes(length, (0, 1)))[0] - bare) / PAGE_SIZE if windows else 0.0
    last, first = max((w for w, _ in windows), default=0), max((n for _, n in windows), default=0)
    windowed = windowed_kv * PAGE_SIZE * window_pages(last, first, 0, length) if windows else 0
    return Slot(
        bare - slope * length + windowed,
        slope + (whole - bare) / PAGE_SIZE,
        sum(recurrent),
        (targets - bare_target) / PAGE_SIZE,
        (drafts - bare_draft) / PAGE_SIZE,
        windowed,
        windowed_kv,
    )


@dataclass(frozen=True)
class Shapes:
    """What a plan or a compile report reads of a system.

    Attributes:
        target: The target's config.
        draft: The drafter's config; None without a drafter.
        forms: The target's parameters in few bits.
        draft_forms: Likewise, of the drafter's checkpoint.
        language_model_only: Whether the target's vision tower is left out.
        draft_tokens: Tokens of the list in the drafter's directory; None without one.
    """

    target: "ModelConfig"
    draft: "DraftConfig | MtpConfig | None"
    forms: "Forms"
    draft_forms: "Forms | None" = None
    language_model_only: bool = False
    draft_tokens: int | None = None

    @property
    def shortlist(self) -> int | None:
        """Tokens whose rows of a head the drafter has beside its weights, at most; None for none."""
        counts = (self.draft_tokens, getattr(self.draft, "draft_vocab_size", None))
        return None if self.draft_tokens is None else min(count for count in counts if count is not None)


def read_shapes(target: str, draft: str | None, *, overrides: dict | None = None) -> Shapes:
    """Reads the configs of a system from directories with config.json, or from config.json files themselves.

    Args:
        target: The target's.
        draft: The drafter's, or a target's for its MTP head; None without a drafter.
        overrides: Values in place of those of the target's config.json.

    Raises:
        InputError: A loader would refuse the configs: unknown or unfit models, or a quantisation that is not read.
    """
    from dflash_jax.checkpoint.config_files import read_config_file
    from dflash_jax.checkpoint.load import DRAFT_TOKENS, draft_tensor_names, read_draft_tokens, read_forms
    from dflash_jax.models import families
    from dflash_jax.models.config import DraftConfig
    from dflash_jax.models.families import dflash

    raw, config = read_config_file(Path(target), families.read_target, overrides)
    forms = read_forms(Path(target), raw, config, overrides)
    drafter, draft_forms, listed = None, None, None
    if draft is not None:
        of_head = overrides if Path(draft).resolve() == Path(target).resolve() else None
        draft_raw, drafter = read_config_file(Path(draft), families.read_drafter, of_head)
        if isinstance(drafter, DraftConfig):
            drafter = dflash.with_tables(drafter, draft_raw, draft_tensor_names(Path(draft)))
        drafter.check_fits(config)
        draft_forms = read_forms(Path(draft), draft_raw, drafter, of_head)
        if (file := Path(draft) / DRAFT_TOKENS).exists():
            listed = len(read_draft_tokens(file, config.vocab_size))
        elif isinstance(drafter, DraftConfig) and drafter.draft_vocab_size is not None and not drafter.own_head:
            # The rows of a reduced head are the target's, in the form of its head.
            drafter, rows = replace(drafter, own_head=True), [each for each in forms.parameters if each[0] == "head"]
            draft_forms = replace(draft_forms, parameters=(*draft_forms.parameters, *rows))
    return Shapes(config, drafter, forms, draft_forms, draft_tokens=listed)


@lru_cache(maxsize=64)
def vision_parameters(target: "ModelConfig") -> int:
    """Parameters of a target's vision tower; 0 without one."""
    import jax

    from dflash_jax.models.vision import abstract_tower

    return sum(x.size for x in jax.tree.leaves(abstract_tower(target.vision))) if target.vision else 0


def abstract_pair(
    shapes: Shapes,
    layout: "Layout",
    dtype,
    quantize: str | None,
    backend: "Backend",
    has_fp8_caches: bool = False,
) -> tuple["Decoder", "Drafter | Mtp | None"]:
    """Target and drafter (or None), with shapes for weights.

    Args:
        shapes: The configs of the pair.
        layout: The mesh.
        dtype: Dtype of the weights that are not quantized.
        quantize: As `load_target` and `load_drafter` take it.
        backend: The backend of the device.
        has_fp8_caches: Whether keys and values are in FP8.
    """
    import jax
    import jax.numpy as jnp

    from dflash_jax.checkpoint.parameters import of_drafter
    from dflash_jax.models.decoder import abstract_decoder
    from dflash_jax.models.drafter import DraftVocabulary
    from dflash_jax.models.drafters import abstract_drafter
    from dflash_jax.models.kv_scales import with_fp8_caches
    from dflash_jax.models.packing import transpose_experts
    from dflash_jax.ops.moe import transposes_experts

    target = _as_loaded(abstract_decoder(shapes.target, dtype, layout, backend), layout, quantize, shapes.forms)
    drafter = None
    if shapes.draft is not None:
        drafter = abstract_drafter(shapes.draft, dtype, layout, backend)
        drafter = _as_loaded(drafter, layout, of_drafter(shapes.draft, quantize), shapes.draft_forms)
        if (count := shapes.shortlist) is not None:
            ids = jax.ShapeDtypeStruct((count,), jnp.int32)
            owner = drafter if getattr(shapes.draft, "own_head", False) else target
            drafter.vocabulary = jax.eval_shape(
                lambda owner, ids: DraftVocabulary(ids, owner.head_weight[ids], backend), owner, ids
            )
    if transposes_experts(backend):
        target, drafter = transpose_experts(target), drafter and transpose_experts(drafter)
    return (with_fp8_caches(target), drafter and with_fp8_caches(drafter)) if has_fp8_caches else (target, drafter)


def has_few_bits(quantize: str | None, forms: "Forms | None") -> bool:
    """Whether large matrices are loaded in few bits: quantized on loading, or as their checkpoint has them."""
    return quantize not in (None, "none") or (quantize is None and forms is not None and bool(forms.parameters))


def _as_loaded(module, layout: "Layout", quantize: str | None, forms: "Forms | None"):
    """An abstract module with its large matrices as a loader leaves them; arguments as of `has_few_bits`."""
    if not has_few_bits(quantize, forms):
        return module
    import jax

    from dflash_jax.checkpoint.parameters import FEW_BITS, QUANTIZED
    from dflash_jax.ops.weights import QuantizedWeight
    from dflash_jax.ops.weights import quantize as quantize_array
    from dflash_jax.parallel.sharding import parameter_paths, parameter_specs, parts_of

    known = dict(forms.parameters if forms else ())
    leaves, structure = jax.tree.flatten(module)
    weights = []
    for path, leaf, spec in zip(parameter_paths(module), leaves, parameter_specs(module), strict=True):
        name = path.rsplit(".", 1)[-1]
        form = known.get(path) if name in FEW_BITS else None
        if form is None and (name not in QUANTIZED or quantize is None):
            weights.append(leaf)
            continue
        if form is not None:
            weight = form.abstract(leaf.shape)
        else:
            assert quantize is not None
            weight = jax.eval_shape(partial(quantize_array, kind=quantize), leaf)
        parts = parts_of(layout.sizes, spec, leaf.ndim - 1)
        weights.append(jax.eval_shape(partial(QuantizedWeight.spread, parts=parts), weight))
    return jax.tree.unflatten(structure, weights)


@lru_cache(maxsize=64)
def _measure(
    shapes: Shapes,
    layout: "Layout",
    dtype,
    quantize: str | None,
    draft_window_size: int | None,
    has_fp8_caches: bool,
) -> tuple[Weights, Weights | None, Slot, float]:
    """What plans for several devices or lengths share.

    Returns:
        The target's weights, the drafter's, a slot, and bytes of a slot's `deferred_features`.
    """
    from dflash_jax.decoding.speculative import deferred_features
    from dflash_jax.ops.backend import XLA

    target, drafter = abstract_pair(shapes, layout, dtype, quantize, XLA, has_fp8_caches)
    draft_weights = weigh(drafter, layout) if drafter else None
    # Of several drafters other rounds keep more; a plan has one.
    kept = deferred_features(target, drafter, 1, 1)
    deferred = 0.0 if kept is None else math.prod(kept.shape) * kept.dtype.itemsize
    slot = measure_slot(target, drafter, layout, draft_window_size)
    return weigh(target, layout), draft_weights, slot, deferred


def make_plan(
    shapes: Shapes,
    layout: "Layout",
    device: "Device",
    *,
    dtype,
    slots: int,
    max_len: int,
    context: int,
    acceptance_length: float,
    block: int,
    quantize: str | None = None,
    draft_window_size: int | None = None,
    has_fp8_caches: bool = False,
) -> dict:
    """Plans a system.

    Args:
        shapes: The configs of the pair.
        layout: The mesh.
        device: The device.
        dtype: Dtype of the weights that are not quantized.
        slots: Slots, over all devices.
        max_len: Positions of a slot.
        context: Tokens in the caches of each slot, for the tokens a second.
        acceptance_length: Tokens that a round yields, for the tokens a second.
        block: Block size of a round.
        quantize: As `load_target` takes it.
        draft_window_size: The last positions that the drafter sees; None: as its layers do.
        has_fp8_caches: Whether keys and values are in FP8.

    Returns:
        The figures, as one JSON object; bytes are per device. ``not_used`` is what checkpoints in few bits have beside
        weights, such as scales of activations. ``max_slots`` are sequences of ``max_len`` tokens that
        fit, and ``sequences`` those of ``context`` tokens, which may grow to as many. ``floor_tokens_per_s`` and
        ``floor_tokens_per_s_autoregressive`` are the tokens a second at most, drafted and plain: a round takes no less
        than the time to read its weights and caches. They are None for a device whose bandwidth is not known.

    Raises:
        InputError: A loader would refuse the mesh for these configs, or ``quantize``.
    """
    import jax.numpy as jnp

    from dflash_jax.checkpoint.parameters import check_quantize
    from dflash_jax.engine.vision_encoder import workspace

    check_quantize(quantize)
    weights, draft_weights, slot, deferred = _measure(
        shapes, layout, dtype, quantize, draft_window_size, has_fp8_caches
    )
    drafting = draft_weights.total if draft_weights else 0.0
    vision_count = vision_parameters(shapes.target)
    # Every device has all of the tower.
    tower = None if shapes.language_model_only else shapes.target.vision
    vision = vision_count * jnp.dtype(dtype).itemsize if tower else 0
    window = block if draft_weights else 1
    batch = math.ceil(slots / layout.data)
    vocab = shapes.target.vocab_size / layout.parts(layout.wide(shapes.target.vocab_size))

    # Temporaries, roughly: activations of a prefill chunk and of the largest image in the vision tower, float32 logits
    # of each slot's block three times over, and features that a dispatch keeps for the drafter's context.
    is_large = has_large_chunks(device.platform, device.platform == "gpu", layout.tensor * layout.expert)
    passes = PREFILL_BYTES * largest_prefill(is_large) * shapes.target.hidden_size
    passes += workspace(tower) if tower else 0
    rounds = 3 * 4 * window * vocab + deferred
    room = USABLE * device.memory - weights.total - drafting - vision - passes
    max_batch = max(0, int(room // (slot.bytes(max_len) + rounds)))
    room_per_slot = room / batch - rounds - slot.fixed
    longest = int(room_per_slot // slot.per_position) if room_per_slot > 0 else 0
    used = weights.total + drafting + vision + passes + batch * (slot.bytes(max_len) + rounds)

    def tokens_per_second(tokens: int, drafts: bool) -> float | None:
        if not device.bandwidth:
            return None
        extra = 0.0
        if drafts and draft_weights and shapes.draft:
            draft_passes, per_pass = shapes.draft.passes(tokens)
            of_drafts = slot.read(context, True) - slot.read(context, False)
            # The drafter's weights have its own head and the shortlist, of which one is read.
            head = (0.0 if shapes.shortlist else draft_weights.head or weights.head) - draft_weights.head
            extra = draft_passes * (draft_weights.read(batch * per_pass) + head + batch * of_drafts)
        read = weights.read(batch * tokens) + extra + batch * (2 * slot.state + slot.read(context, False))
        return slots * (acceptance_length if drafts else 1) * device.bandwidth / read

    replicated = weights.replicated | (draft_weights.replicated if draft_weights else {})
    if vision and layout.devices > layout.data:
        replicated["vision"] = vision
    plain = tokens_per_second(1, False)
    return {
        "parameters": {
            "target": weights.parameters,
            "vision": vision_count,
            "drafter": draft_weights.parameters if draft_weights else 0,
        },
        "mesh": str(layout),
        "decode_context_parallel_size": layout.decode_context_parallel,
        "devices": layout.devices,
        "bytes_per_device": {
            "target": int(weights.total),
            "drafter": int(drafting),
            "vision": int(vision),
            "slots": int(batch * slot.bytes(max_len)),
            "cache_per_slot": int(slot.bytes(max_len)),
            "cache_per_token": slot.per_position,
            "workspace": int(passes + batch * rounds),
            "all": int(used),
            "memory": device.memory,
        },
        "slots": slots,
        "length": max_len,
        "fits": used <= USABLE * device.memory,
        "max_slots": max_batch * layout.data,
        "max_len": min(longest, shapes.target.max_positions),
        "replicated": {name: int(size) for name, size in replicated.items()},
        "not_used": [
            text for forms in (shapes.forms, shapes.draft_forms) if forms for text in forms.not_used(has_fp8_caches)
        ],
        "sequences": max(0, int(room // (slot.bytes(max_len, context) + rounds))) * layout.data,
        "floor_tokens_per_s": tokens_per_second(window, True) if draft_weights else plain,
        "floor_tokens_per_s_autoregressive": plain,
    }

"""What a system takes of a device: bytes of weights and of a slot, what fits, and the bandwidth floor."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dflash_jax.engine.config import PREFILL_BYTES, largest_prefill

# Of a device's memory: the rest is the runtime's, and fragmentation's.
USABLE = 0.95


@dataclass(frozen=True)
class Weights:
    """One model on one device, in bytes. ``expert``: one routed expert over all layers (``held`` of ``experts`` lie
    here); ``lookup``: the embedding table where only rows of it are read; ``head``; ``copied``: parameter → bytes that
    several devices of a row hold alike."""

    parameters: int
    total: float
    expert: float
    experts: int
    per_token: int
    held: float
    lookup: float
    head: float
    copied: dict[str, float]

    def read(self, tokens: float, touched: float | None = None) -> float:
        """Bytes that a pass over ``tokens`` tokens reads, with ``touched`` experts a layer (None: as if by chance)."""
        if touched is None:
            touched = self.experts * (1 - (1 - self.per_token / self.experts) ** tokens) if self.experts else 0.0
        share = self.held / self.experts if self.experts else 0.0
        return self.total - self.lookup - self.held * self.expert + touched * share * self.expert


def parts_of(layout, spec) -> int:
    axes = [a for cut in spec if cut for a in ((cut,) if isinstance(cut, str) else cut)]
    return math.prod(layout.sizes[a] for a in axes)


def weigh(module, layout, eight_bits: frozenset[str]) -> Weights:
    """``module``: abstract, in its dtype; ``eight_bits``: last names of parameters held as eight bits and scales."""
    import jax

    from dflash_jax.models.config import MoeSpec
    from dflash_jax.parallel.sharding import parameter_paths, parameter_specs

    moe = next((s.ffn for s in module.config.layers if isinstance(getattr(s, "ffn", None), MoeSpec)), None)
    experts = moe.num_experts if moe else 0
    sums = dict.fromkeys(("count", "total", "expert", "lookup", "head"), 0.0)
    copied: dict[str, float] = {}
    for path, leaf, spec in zip(parameter_paths(module), jax.tree.leaves(module), parameter_specs(module), strict=True):
        # Of a weight in few bits: the parameter's name, not that of its values or scales.
        name = path.removesuffix(".values").removesuffix(".scale").rsplit(".", 1)[-1]
        size, parts = math.prod(leaf.shape) * leaf.dtype.itemsize, parts_of(layout, spec)
        if name in eight_bits:
            # A bfloat16 scale for each 128 inputs of an output.
            size = math.prod(leaf.shape) + 2 * math.prod(leaf.shape[:-1]) * math.ceil(leaf.shape[-1] / 128)
        sums["count"] += math.prod(leaf.shape)
        sums["total"] += size / parts
        if experts and leaf.shape[0] == experts and name in ("gate_up", "down"):
            sums["expert"] += size / experts / (parts / layout.parts(layout.experts(experts)))
        tied = path == "embed" and getattr(module.config, "tied_embeddings", False)
        if path == "head" or tied:
            sums["head"] = size / parts
        elif path == "embed":
            sums["lookup"] = size / parts
        if parts < layout.tensor * layout.expert:
            short = ".".join("*" if p.isdecimal() else p for p in path.split("."))
            copied[short] = copied.get(short, 0.0) + size / parts
    held = experts / layout.parts(layout.experts(experts)) if experts else 0.0
    per_token = moe.experts_per_token if moe else 0
    return Weights(
        int(sums["count"]),
        sums["total"],
        sums["expert"],
        experts,
        per_token,
        held,
        sums["lookup"],
        sums["head"],
        copied,
    )


@dataclass(frozen=True)
class Slot:
    """A row of the decode state on one device: bytes at any length, and for each position; of those read in a round:
    ``state`` (recurrent, read and written) and ``per_token`` (keys and values of target and drafter)."""

    fixed: float
    per_position: float
    state: float
    kv: float

    def bytes(self, length: int) -> float:
        return self.fixed + self.per_position * length


def measure_slot(target, drafter, layout) -> Slot:
    import jax

    from dflash_jax.decoding.state import Settings, empty_state, state_specs
    from dflash_jax.ops.cache import DeltaState

    def size(tree, specs) -> float:
        leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(specs), strict=True)
        return sum(math.prod(x.shape) * x.dtype.itemsize / parts_of(layout, s) * layout.data for x, s in leaves)

    # Linear between two lengths past every ring.
    lengths, sizes, kv = (2**16, 2**17), [], []
    for length in lengths:
        state = jax.eval_shape(partial(empty_state, target, drafter, layout.data, length, Settings()))
        specs = state_specs(target, drafter, state)
        sizes.append(size(state, specs) / layout.data)
        kv.append(size((state.target, state.draft), (specs.target, specs.draft)) / layout.data)
    slope = (sizes[1] - sizes[0]) / (lengths[1] - lengths[0])
    recurrent = [
        size(c, s) / layout.data for c, s in zip(state.target, specs.target, strict=True) if isinstance(c, DeltaState)
    ]
    return Slot(sizes[0] - slope * lengths[0], slope, sum(recurrent), (kv[1] - kv[0]) / (lengths[1] - lengths[0]))


@dataclass(frozen=True)
class Shapes:
    """What a plan or a compile report needs of a system: configs, and whether the target is in FP8."""

    target: object
    draft: object
    fp8: bool
    vision: int


def read_shapes(target: str, draft: str | None) -> Shapes:
    """From directories with config.json, or from config.json files themselves."""
    from dflash_jax.checkpoint.config_files import parsed, read_config_file
    from dflash_jax.models import families
    from dflash_jax.models.families import dflash
    from dflash_jax.models.families.reading import Raw
    from dflash_jax.models.families.vision import vision_tensors

    raw, config = read_config_file(Path(target), families.read_target)
    drafter = None
    if draft is not None:
        drafter = read_config_file(Path(draft), dflash.read_config)[1]
        drafter.check_fits(config)
    vision = parsed(lambda raw: vision_tensors(Raw(raw).section("vision_config")), raw, Path(target))
    quantized = raw.get("quantization_config") or raw.get("text_config", {}).get("quantization_config")
    return Shapes(config, drafter, bool(quantized), sum(map(math.prod, vision.values())))


def abstract_pair(shapes: Shapes, layout, dtype, quantize: str | None, backend) -> tuple:
    """Target and drafter, or None, with shapes for weights.

    Args:
        shapes: Of the pair.
        layout: The mesh.
        dtype: Of the weights that are not quantized.
        quantize: None: FP8 as the checkpoint is; "int8" or "fp8": quantized as a loader would.
        backend: Where it will run.
    """
    import jax
    import jax.numpy as jnp

    from dflash_jax.checkpoint.parameters import QUANTIZED
    from dflash_jax.models.decoder import abstract_decoder
    from dflash_jax.models.drafter import abstract_drafter
    from dflash_jax.ops.weights import QuantizedWeight
    from dflash_jax.parallel.sharding import parameter_paths, parameter_specs

    target = abstract_decoder(shapes.target, dtype, layout, backend)
    drafter = abstract_drafter(shapes.draft, dtype, layout, backend) if shapes.draft else None
    if quantize is None and not shapes.fp8:
        return target, drafter
    leaves, structure = jax.tree.flatten(target)
    weights = []
    for path, leaf, spec in zip(parameter_paths(target), leaves, parameter_specs(target), strict=True):
        if path.rsplit(".", 1)[-1] not in QUANTIZED:
            weights.append(leaf)
            continue
        last = spec[leaf.ndim - 1] if len(spec) == leaf.ndim else None
        parts = 1
        for axis in last or ():
            parts *= layout.sizes[axis]
        per_part = leaf.shape[-1] // parts
        runs = parts if quantize in ("int8", "fp8") else parts * -(-per_part // 128)
        kind = jnp.int8 if quantize == "int8" else jnp.float8_e4m3fn
        scale = jax.ShapeDtypeStruct((*leaf.shape[:-1], runs), jnp.float32 if quantize else jnp.bfloat16)
        weights.append(QuantizedWeight(jax.ShapeDtypeStruct(leaf.shape, kind), scale))
    return jax.tree.unflatten(structure, weights), drafter


def make_plan(
    shapes: Shapes, layout, device, *, dtype, slots, max_len, context, acceptance_length, block, quantize=None
):
    """The figures, as one JSON object; bytes are per device."""
    from dflash_jax.checkpoint.parameters import QUANTIZED
    from dflash_jax.models.decoder import abstract_decoder
    from dflash_jax.models.drafter import abstract_drafter

    target = abstract_decoder(shapes.target, dtype, layout)
    drafter = abstract_drafter(shapes.draft, dtype, layout) if shapes.draft else None
    eight = frozenset(QUANTIZED) if quantize in ("int8", "fp8") or (shapes.fp8 and quantize != "none") else frozenset()
    mine = weigh(target, layout, eight)
    theirs = weigh(drafter, layout, frozenset()) if drafter else None
    slot = measure_slot(target, drafter, layout)
    drafting = theirs.total if theirs else 0.0
    window = block if drafter else 1
    rows = math.ceil(slots / layout.data)
    vocab = shapes.target.vocab_size / layout.parts(target.vocab)

    # Temporaries, roughly: activations of a prefill chunk, and, of each row, float32 logits of a window three times
    # over.
    prefill = PREFILL_BYTES * largest_prefill(device.platform == "gpu") * shapes.target.hidden_size
    logits = 3 * 4 * window * vocab
    room = USABLE * device.memory - mine.total - drafting - prefill
    most_rows = max(0, int(room // (slot.bytes(max_len) + logits)))
    per_row = room / rows - logits - slot.fixed
    longest = int(per_row // slot.per_position) if per_row > 0 else 0
    used = mine.total + drafting + prefill + rows * (slot.bytes(max_len) + logits)

    def seconds(tokens: int, drafts: bool) -> float:
        kept = rows * (2 * slot.state + slot.kv * context)
        extra = drafting + mine.head if drafts else 0.0
        return (mine.read(rows * tokens) + extra + kept) / device.bandwidth

    plain = slots / seconds(1, False)
    floor = slots * acceptance_length / seconds(window, True) if drafter else plain
    return {
        "parameters": {
            "target": mine.parameters,
            "vision": shapes.vision,
            "drafter": theirs.parameters if theirs else 0,
        },
        "mesh": str(layout),
        "devices": layout.devices,
        "bytes_per_device": {
            "target": int(mine.total),
            "drafter": int(drafting),
            "cache_per_slot": int(slot.bytes(max_len)),
            "cache_per_token": slot.per_position,
            "workspace": int(prefill + rows * logits),
            "all": int(used),
            "memory": device.memory,
        },
        "slots": slots,
        "length": max_len,
        "fits": used <= USABLE * device.memory,
        "max_slots": most_rows * layout.data,
        "max_len": min(longest, shapes.target.max_positions),
        "replicated": {name: int(size) for name, size in (mine.copied | (theirs.copied if theirs else {})).items()},
        "dense_slots": int(rows * slot.bytes(max_len)),
        "exact_lengths_half_full": int(rows * slot.bytes(max_len // 2)),
        "floor_tokens_per_s": floor,
        "floor_tokens_per_s_autoregressive": plain,
    }

"""The points that `bench` measures, and a pair of real shapes that fits the card."""

import math
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product

import jax
import jax.numpy as jnp

from dflash_jax.checkpoint.config_files import find_config
from dflash_jax.engine.config import PREFILL_SIZES
from dflash_jax.errors import InputError
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.models.config import MoeSpec
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.mtp import Mtp
from dflash_jax.ops.backend import XLA, Backend
from dflash_jax.ops.weights import is_weight
from dflash_jax.options.systems import read_system
from dflash_jax.parallel.sharding import Layout, parameter_paths, parameter_specs
from dflash_jax.planner import Shapes, Slot, abstract_pair, measure_slot, read_shapes
from tools.compile_report import shorten

# Room after the context for the rounds of all measurements.
ROOM = 1024
# Share of the backend's memory that a pair may use.
USABLE = 0.92


@dataclass(frozen=True)
class Point:
    """Work that a measurement decodes; block size 1 is plain decoding.

    Attributes:
        batch: Sequences.
        block_size: Tokens of each that a round verifies.
        context: Tokens before them.
        quantize: The form of the weights, where that is not the pair's own.
        experts: Experts of each layer to which the batch's tokens are sent; None for as many as the router of random
            weights chooses.
    """

    batch: int
    block_size: int
    context: int
    quantize: str | None = None
    experts: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Point":
        """A point from BATCH,WIDTH,CONTEXT.

        Raises:
            InputError: The text has another form, or the context is too short.
        """
        numbers = text.split(",")
        if len(numbers) != 3 or not all(n.strip().isdecimal() and int(n) for n in numbers):
            raise InputError(f"point {text!r}: it must be BATCH,WIDTH,CONTEXT, three numbers from 1 on")
        if int(numbers[2]) <= PREFILL_SIZES[0]:
            raise InputError(f"point {text!r}: the context must be more than {PREFILL_SIZES[0]} tokens")
        batch, block_size, context = map(int, numbers)
        return cls(batch, block_size, context)

    def __str__(self) -> str:
        where = f"batch {self.batch}, width {self.block_size}, context {self.context}"
        where += f", {self.quantize}" if self.quantize else ""
        return where + (f", {self.experts} experts" if self.experts else "")


def experts_used(tokens: int, spec: MoeSpec) -> int:
    """Experts of a layer that ``tokens`` are sent to by a router that uses all of them evenly, as training makes it."""
    return round(spec.num_experts * (1 - (1 - spec.experts_per_token / spec.num_experts) ** tokens))


def grid(name: str, is_small: bool) -> list[Point]:
    """The points of a grid by its name; ``is_small``: for the bundled pair."""
    if is_small:
        batches, contexts = ((1, 8), (256,)) if name == "default" else ((1, 8, 16, 32), (256, 2048))
        return [Point(*p) for p in product(batches, (1, 8, 16), contexts)]
    if name == "full":
        return [Point(*p) for p in product((1, 8, 16, 32), (1, 8, 16), (2048, 16384, 131072))]
    few = [Point(*p) for p in product((1, 32), (1, 8, 16), (2048,))]
    return [*few, Point(1, 16, 16384), Point(32, 8, 16384)]


def random_leaf(path: str, shape: jax.ShapeDtypeStruct, sharding, seed: int) -> jax.Array:
    """Small numbers, so that nothing overflows; scales and norms near what checkpoints have."""
    name = path.rsplit(".", 1)[-1]
    constant = {"scale": 2e-4, "factor": 2e-4, "weight": 1.0, "a_log": 1.0, "dt_bias": 1.0}.get(name)
    if name == "scale" and shape.dtype.itemsize == 1:
        constant = 1.0
    return _leaf_program(shape.shape, shape.dtype, constant, sharding)(seed)


@lru_cache(maxsize=128)
def _leaf_program(shape: tuple[int, ...], dtype, constant: float | None, sharding):
    """The program that makes leaves of one kind, of which a model has one in every layer."""

    def make(seed):
        if jnp.issubdtype(dtype, jnp.integer):
            return jax.random.randint(jax.random.key(seed), shape, -127, 128).astype(dtype)
        if constant is not None:
            return jnp.full(shape, constant, dtype)
        size = 1.0 if dtype.itemsize == 1 else 0.02
        return (size * jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)).astype(dtype)

    return jax.jit(make, out_shardings=sharding)


def random_weights(module, mesh, seed: int):
    """An abstract ``module`` with random weights."""
    leaves, structure = jax.tree.flatten(module)
    each = zip(parameter_paths(module), leaves, parameter_specs(module), strict=True)
    weights = [
        random_leaf(path, leaf, jax.sharding.NamedSharding(mesh, cut), seed + i)
        for i, (path, leaf, cut) in enumerate(each)
    ]
    return jax.tree.unflatten(structure, weights)


@dataclass
class Pair:
    """A pair to measure, and what was cut or changed so that it fits."""

    name: str
    target: Decoder
    drafter: Drafter | Mtp
    note: str


@cache
def _sizes(shapes: Shapes, layout: Layout, quantize: str | None) -> tuple[int, Slot]:
    """Bytes of the weights of a pair in bfloat16, and of a slot."""
    target, drafter = abstract_pair(shapes, layout, jnp.bfloat16, quantize, XLA)
    weight_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves((target, drafter)))
    return weight_bytes, measure_slot(target, drafter, layout)


def fitting(shapes, layout: Layout, points: list[Point], memory: float, quantize: str | None) -> tuple:
    """The largest form of a system that fits: (shapes, quantize, note).

    bfloat16 where every layer and the largest point's state fit, then FP8, then fewer layers.
    """
    num_layers = len(shapes.target.layers)
    step = math.lcm(*{shapes.target.layers.index(s) + 1 for s in set(shapes.target.layers)})

    def needs(shapes, quantize) -> float:
        weight_bytes, slot = _sizes(shapes, layout, quantize)

        def rows(p: Point) -> float:
            logits = 12 * p.batch * p.block_size * shapes.target.vocab_size
            return slot.fixed * p.batch + slot.per_position * p.batch * (p.context + ROOM) + logits

        return weight_bytes / layout.tensor / layout.expert + max(map(rows, points))

    for kind in (quantize,) if quantize or shapes.forms.parameters else (None, "fp8"):
        if needs(shapes, kind) <= USABLE * memory:
            return shapes, kind, "" if kind == quantize else "held in FP8: bfloat16 does not fit"
    for count in range(num_layers - num_layers % step, 0, -step):
        cut = shorten(shapes, count)
        if needs(cut, kind) <= USABLE * memory:
            return cut, kind, f"{count} of {num_layers} layers{', in FP8' if kind == 'fp8' else ''}: more do not fit"
    raise InputError(f"not even {step} layers fit into {memory / 1e9:.0f} GB")


def layout_of(args) -> Layout:
    """The mesh that the arguments give."""
    if args.config is None:
        return Layout()
    devices = jax.devices()
    mesh = read_system(args.config).mesh(devices[0].device_kind, len(devices)) if args.mesh is None else args.mesh
    return Layout.parse(mesh)


def shapes_of(args) -> Shapes:
    """The configs of the pair that the arguments name."""
    of = {k: TINY / k for k in ("target", "draft")} if args.config is None else read_system(args.config).shapes
    shapes = read_shapes(*(str(of[k]) for k in ("target", "target" if args.draft else "draft")))
    return shorten(shapes, args.layers) if args.layers else shapes


def parameters(args) -> int:
    """Parameters of target and drafter."""
    pair = abstract_pair(shapes_of(args), Layout(), jnp.bfloat16, None, XLA)
    return sum(math.prod(x.shape) for x in jax.tree.leaves(pair, is_leaf=is_weight))


def in_fp8(args, points: list[Point]) -> list[Point]:
    """The same points with weights in FP8, unless the checkpoint's are."""
    return [] if shapes_of(args).forms.parameters else [replace(p, quantize="fp8") for p in points]


def _fitting(args, points: list[Point]) -> tuple:
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 16e9)
    return fitting(shapes_of(args), layout_of(args), points, limit, points[0].quantize or args.quantize)


def groups(args, points: list[Point]) -> list[list[Point]]:
    """Points in their order, grouped by the pair of models that serves them."""
    if args.config is None:
        return [points] if points else []
    found: dict = {}
    for point in points:
        shapes, kind, _ = _fitting(args, [point])
        found.setdefault((len(shapes.target.layers), kind, point.quantize), []).append(point)
    return list(found.values())


def open_pair(args, points: list[Point]) -> Pair:
    """A pair that fits all of ``points``, which have one ``quantize``."""
    if args.config is None:
        from dflash_jax.frontend.llm import LLM

        llm = LLM(dtype=args.dtype, kernels=args.kernels)
        assert isinstance(llm.drafter, Drafter), "the bundled pair"
        return Pair("bundled", llm.target, llm.drafter, "")
    layout = layout_of(args)
    shapes, quantize, note = _fitting(args, points)
    dtype, backend = jnp.dtype(args.dtype or "bfloat16"), Backend.detect(args.kernels)
    if args.draft_tokens:
        shapes = replace(shapes, draft_tokens=args.draft_tokens)
    target, drafter = abstract_pair(shapes, layout, dtype, quantize, backend)
    mesh = layout.mesh()
    target, drafter = random_weights(target, mesh, 0), random_weights(drafter, mesh, 10**6)
    if args.draft_tokens:
        # The first tokens.
        drafter.vocabulary.ids[...] = jnp.arange(args.draft_tokens, dtype=jnp.int32)
    return Pair(find_config(args.config).stem, target, drafter, note)

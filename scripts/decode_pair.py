"""What bench_decode.py measures: points of its grid, and a pair of real shapes that fits the card."""

import math
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import compile_report
import jax
import jax.numpy as jnp

from dflash_jax import LLM
from dflash_jax.errors import InputError
from dflash_jax.fit import measure_slot, read_shapes
from dflash_jax.sharding import Layout, parameter_paths, parameter_specs
from dflash_jax.system import read_system

# Room behind the context for the rounds of all measurements.
ROOM = 1024
# Of the memory that a backend gives.
USABLE = 0.92


@dataclass(frozen=True)
class Point:
    """A batch of rows that verify ``width`` tokens each behind ``context`` others; width 1 is plain decoding."""

    batch: int
    width: int
    context: int

    def __str__(self) -> str:
        return f"batch {self.batch}, width {self.width}, context {self.context}"


def grid(name: str, is_small: bool) -> list[Point]:
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

    def make():
        if jnp.issubdtype(shape.dtype, jnp.integer):
            return jax.random.randint(jax.random.key(seed), shape.shape, -127, 128).astype(shape.dtype)
        if name in ("weight", "scale", "a_log", "dt_bias"):
            return jnp.full(shape.shape, 2e-4 if name == "scale" else 1.0, shape.dtype)
        size = 1.0 if shape.dtype.itemsize == 1 else 0.02
        return (size * jax.random.normal(jax.random.key(seed), shape.shape, jnp.bfloat16)).astype(shape.dtype)

    return jax.jit(make, out_shardings=sharding)()


def random_weights(module, mesh, seed: int):
    """``module``, abstract, with weights."""
    leaves, structure = jax.tree.flatten(module)
    each = zip(parameter_paths(module), leaves, parameter_specs(module), strict=True)
    made = [
        random_leaf(path, leaf, jax.sharding.NamedSharding(mesh, cut), seed + i)
        for i, (path, leaf, cut) in enumerate(each)
    ]
    return jax.tree.unflatten(structure, made)


@dataclass
class Pair:
    """What is measured, and what was cut or changed so that it fits."""

    name: str
    target: object
    drafter: object
    note: str


def fitting(shapes, layout: Layout, points: list[Point], memory: float, quantize: str | None) -> tuple:
    """(shapes, quantize, note): bfloat16 if every layer and state fits, then FP8, then fewer layers."""
    longest = max((p.batch * (p.context + ROOM) for p in points), default=0)
    widest = max(p.batch * p.width for p in points)
    whole = len(shapes.target.layers)
    step = math.lcm(*{shapes.target.layers.index(s) + 1 for s in set(shapes.target.layers)})

    def needs(shapes, quantize) -> float:
        target, drafter = compile_report.abstract_pair(shapes, layout, jnp.bfloat16, quantize)
        held = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves((target, drafter)))
        slot = measure_slot(target, drafter, layout)
        batch = max(p.batch for p in points)
        logits = 12 * widest * shapes.target.vocab_size
        return held / layout.tensor / layout.expert + (slot.fixed * batch + slot.per_position * longest + logits)

    for kind in (quantize,) if quantize or shapes.fp8 else (None, "fp8"):
        if needs(shapes, kind) <= USABLE * memory:
            return shapes, kind, "" if kind == quantize else "held in FP8: bfloat16 does not fit"
    for count in range(whole - whole % step, 0, -step):
        cut = compile_report.shorten(shapes, count)
        if needs(cut, kind) <= USABLE * memory:
            return cut, kind, f"{count} of {whole} layers{', in FP8' if kind == 'fp8' else ''}: more do not fit"
    raise InputError(f"not even {step} layers fit into {memory / 1e9:.0f} GB")


def open_pair(args, points: list[Point]) -> Pair:
    if args.config is None:
        llm = LLM(dtype=args.dtype)
        return Pair("bundled", llm.target, llm.drafter, "trained weights")
    system = read_system(args.config)
    shapes = read_shapes(*(str(system.shapes[k]) for k in ("target", "draft")))
    devices = jax.devices()
    layout = Layout.parse(args.mesh if args.mesh is not None else system.mesh(devices[0].device_kind, len(devices)))
    stats = devices[0].memory_stats() or {}
    if args.layers:
        shapes = compile_report.shorten(shapes, args.layers)
    shapes, quantize, note = fitting(shapes, layout, points, stats.get("bytes_limit", 16e9), args.quantize)
    target, drafter = compile_report.abstract_pair(shapes, layout, jnp.dtype(args.dtype or "bfloat16"), quantize)
    mesh = layout.mesh()
    note = "; ".join(filter(None, ["random weights", f"first {args.layers} layers" if args.layers else "", note]))
    return Pair(Path(args.config).stem, random_weights(target, mesh, 0), random_weights(drafter, mesh, 10**6), note)

"""What XLA makes of a system at full size, for accelerators that this machine need not have.

    python scripts/compile/report.py --config configs/qwen3.6-35b-a3b.toml --device b200 [--devices 8] [--slots 32]

Compiles prefill, the plain step and the DFlash round with abstract weights, and reports bytes per device, kernels and
collectives per layer, graph breaks in the loop and compile seconds. It needs Python 3.12 and jax 0.11 or later with the
compilers: jax-cuda13-plugin, jax-cuda13-pjrt and nvidia-cuda-nvcc for NVIDIA, libtpu for TPUs. Devices: h100, h200,
b200, or a TPU slice such as v6e:2x4.
"""

import argparse
import json
import math
import sys
from dataclasses import replace

from dflash_jax.checkpoint.config_files import find_config
from dflash_jax.checkpoint.quantize import QUANTIZE
from dflash_jax.engine.model_size import weigh
from dflash_jax.errors import InputError
from dflash_jax.ops.card import CHOICES
from dflash_jax.options.parser import Parser
from dflash_jax.options.systems import read_system
from dflash_jax.parallel.devices import DEVICES
from dflash_jax.planner import abstract_pair, measure_slot, read_shapes
from dflash_jax.process import exit_code
from tools.compile_report import backend_of, measure, prepare, shorten, topology
from tools.xla_costs import REVISION, Program, Slice, costliest


def pool_sizes(caches, slots: int) -> dict[int, int]:
    """Positions that a slot has in a device's part of each pool of keys or values, by the part's elements."""
    parts = [(cache.k.sharding.shard_shape(cache.k.shape), cache.page_size) for cache in caches]
    return {math.prod(part): part[0] * page // slots for part, page in parts}


def floor(programs, layout, slice_: Slice, tokens: int, context: int, slots: int) -> dict:
    """What a pass cannot do without, by the chip's figures: weights, caches and states read once, and the products.

    Activations are in bfloat16, so the products are at its rate, whatever the weights are in.

    Args:
        programs: The models' executables.
        layout: The mesh.
        slice_: Where it runs.
        tokens: Tokens of the pass on a device.
        context: Positions in the caches.
        slots: Slots, over all devices.

    Returns:
        ``bytes`` and ``operations`` of a device, and ``seconds``: for each kind of product and for the caches the
        longer of both, added up. Experts are those that tokens choose by chance.
    """
    target, drafter = programs.pair
    batch = slots // layout.data
    drafts = drafter is not None and tokens > batch and context > 0
    work, slot = weigh(target, layout).work(tokens), measure_slot(target, drafter, layout)
    if drafter is not None and drafts:
        passes, per_pass = drafter.config.passes(tokens // batch)
        work += passes * weigh(drafter, layout).work(batch * per_pass)
    # A prefill chunk writes what a step reads.
    work.append((batch * (2 * slot.state + slot.read(context, drafts)) if context else 0.0, 0.0))
    bandwidth, rate = slice_.device.bandwidth, slice_.rate("bf16")
    return {
        "bytes": sum(size for size, _ in work),
        "operations": sum(operations for _, operations in work),
        "seconds": sum(max(size / bandwidth, n / rate) for size, n in work),
    }


def report(shapes, layout, devices, args) -> dict:
    """Compiles the programs of a system for a device that need not be here, and returns their figures."""
    import jax
    import jax.numpy as jnp

    from dflash_jax.decoding.state import Settings
    from dflash_jax.engine.config import has_large_chunks, largest_prefill
    from dflash_jax.engine.executables import Executables, compiler_options
    from dflash_jax.engine.memory import pages_of_slots
    from dflash_jax.ops.cache import KVCache
    from dflash_jax.sampling_params import MAX_LOGPROBS

    # Executables for absent devices are written to the cache and cannot be read back.
    jax.config.update("jax_enable_compilation_cache", False)
    backend = backend_of(devices[0], args.kernels)
    if args.draft_tokens:
        shapes = replace(shapes, draft_tokens=args.draft_tokens)
    target, drafter = abstract_pair(shapes, layout, jnp.bfloat16, args.quantize, backend)
    mesh = layout.mesh(devices)
    options = compiler_options(devices[0])
    window = 1
    if drafter is not None:
        window = args.block_size or shapes.draft.block_size
    with_drafter, without = Executables(target, drafter, mesh), Executables(target, None, mesh)
    layers = len(shapes.target.layers)

    def is_kv(cache) -> bool:
        return isinstance(cache, KVCache)

    reports = {}
    for name in args.programs:
        programs = without if name == "plain" else with_drafter
        settings = Settings(window if name == "round" else 1, top_logprobs=MAX_LOGPROBS)
        pages = pages_of_slots(programs, args.slots, args.max_len, settings)
        state = programs.abstract_state(args.slots, args.max_len, settings, pages)
        caches = [c for c in (*state.target, *jax.tree.leaves(state.draft, is_leaf=is_kv)) if is_kv(c)]
        arrays = {
            "keys_and_values": caches,
            "recurrent_state": [c for c in state.target if not is_kv(c)],
            "weights": programs.weights,
        }
        is_large = has_large_chunks(backend.platform, backend.has_triton, layout.tensor * layout.expert)
        chunk = args.chunk or largest_prefill(is_large)
        if name == "prefill":
            lowered = programs.lower_prefill(state, layout.data, chunk)
        else:
            lowered = programs.lower_decode(state, args.slots, settings)
        depth = layers + (len(shapes.draft.layers) if drafter is not None and name == "round" else 0)
        figures, hlo = measure(lowered, depth, arrays, backend.platform, options)
        reports[name] = figures
        if ":" in args.device and "failed" not in figures:
            context = 0 if name == "prefill" else min(args.context or args.max_len, args.max_len)
            program = Program(hlo, Slice.of(args.device), context, pool_sizes(caches, args.slots))
            figures["counted"] = {"context": context} | program.figures()
            figures["tokens"] = chunk if name == "prefill" else settings.block_size
            tokens = figures["tokens"] * (1 if name == "prefill" else args.slots // layout.data)
            figures["floor"] = floor(programs, layout, program.slice, tokens, context, args.slots)
            if args.operations:
                figures["costliest"] = costliest(program, args.operations)
    memory = DEVICES[args.device.partition(":")[0]].memory
    for figures in reports.values():
        if "failed" in figures:
            continue
        used = figures["arguments"] + figures["temporaries"] + figures["outputs"] - figures["donated"]
        figures |= {"all": used, "fits": used <= memory}
    return {
        "config": find_config(args.config).stem,
        "device": args.device,
        "mesh": str(layout),
        "slots": args.slots,
        "max_len": args.max_len,
        "jax": jax.__version__,
        "kernels": "triton" if backend.has_triton else "xla",
        "memory": memory,
        "programs": reports,
    } | ({"revision": REVISION} if ":" in args.device else {})


def describe_counted(c: dict, floor: dict) -> str:
    """What was counted of a program, for people."""
    once = c.get("once")
    loops = ", ".join(f"{n} of {loop}" if n > 1 else loop for loop, n in c["loops"].items())
    return (
        f"  predicted {1e3 * c['predicted_s']:.2f} ms with a context of {c['context']:,}: "
        f"{(c['read'] + c['written']) / 1e9:.3f} GB of HBM, {c['operations'] / 1e9:.1f} GFLOP, {c['collectives']} "
        f"collectives of {c['sent'] / 1e6:.2f} MB in {1e3 * c['collective_s']:.2f} ms, of which "
        f"{1e3 * c['hidden_s']:.2f} hidden\n"
        f"  floor {1e3 * floor['seconds']:.2f} ms: {floor['bytes'] / 1e9:.3f} GB, "
        f"{floor['operations'] / 1e9:.1f} GFLOP\n"
        f"  the compiler's estimate of its {c['runs']:,} operations, with the same collectives: "
        f"{1e3 * c['compiler_s']:.2f} ms\n"
        + (
            f"  once a dispatch: {1e3 * once['predicted_s']:.2f} ms, {(once['read'] + once['written']) / 1e9:.3f} GB; "
            f"the compiler's estimate {1e3 * once['compiler_s']:.2f} ms\n"
            if once
            else ""
        )
        + f"  loops: {loops}"
    )


def describe(figures: dict) -> str:
    """The report for people."""
    lines = [
        f"{figures['config']} on {figures['device']}, mesh {figures['mesh']}, "
        f"{figures['slots']} x {figures['max_len']:,}"
    ]
    for name, f in figures["programs"].items():
        if "failed" in f:
            lines.append(f"{name}: {f['failed']}")
            continue
        line = f"{name}: {f['all'] / 1e9:.2f} GB {'fits' if f['fits'] else 'DOES NOT FIT'} ("
        line += f"arguments {f['arguments'] / 1e9:.2f}, temporaries {f['temporaries'] / 1e9:.3f}), "
        if "kernels_per_layer" in f:
            line += f"{f['kernels_per_layer']:.1f} kernels a layer in {f['calls_per_layer']:.1f} calls, "
            line += f"{f['kernels_in_branches']} in branches, "
            line += f"{f['graphs']} graphs, "
        line += f"{f['collectives_per_layer']:.1f} collectives a layer, "
        copied = ", ".join(f"{n / 1e6:.1f} MB of {name.replace('_', ' ')}" for name, n in f["copied"].items() if n)
        line += f"copied: {copied or 'no cache, state or weight'}, compiled in {f['compile_s']} s"
        lines.append(line)
        if "counted" in f:
            lines.append(describe_counted(f["counted"], f["floor"]))
        if "costliest" in f:
            lines += ["", f["costliest"], ""]
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--config", required=True, metavar="NAME|FILE", help="a name of configs/, or a TOML")
    p.add_argument("--device", required=True, metavar="NAME", help="h100, h200, b200, or a TPU slice such as v6e:2x4")
    p.add_argument("--devices", type=int, default=1, metavar="N", help="GPUs (default: %(default)s)")
    p.add_argument("--mesh", metavar="tensor=8", help="default: the config's for these devices")
    p.add_argument("--decode-context-parallel-size", type=int, default=1, metavar="N", help="default: %(default)s")
    p.add_argument("--slots", type=int, default=1, metavar="N", help="rows (default: %(default)s)")
    p.add_argument("--max-len", type=int, default=8192, metavar="N", help="default: %(default)s")
    p.add_argument("--context", type=int, metavar="N", help="positions in the caches (default: as --max-len)")
    p.add_argument("--chunk", type=int, metavar="N", help="tokens of a prefill (default: the largest chunk)")
    p.add_argument("--operations", type=int, metavar="N", help="list the N costliest operations of a TPU's program")
    p.add_argument("--quantize", choices=QUANTIZE[1:])
    p.add_argument(
        "--kernels",
        choices=CHOICES,
        default="auto",
        help="all: also those that no card has run; xla: none",
    )
    p.add_argument("--draft", choices=["mtp"], help="the target's own MTP head in place of the config's drafter")
    p.add_argument("--block-size", type=int, metavar="B", help="tokens of a round (default: the drafter's)")
    p.add_argument("--draft-tokens", type=int, metavar="N", help="number of tokens that are drafted (default: all)")
    p.add_argument("--layers", type=int, metavar="N", help="only the first N layers of the target")
    p.add_argument(
        "--programs", nargs="+", choices=["prefill", "plain", "round"], default=["prefill", "plain", "round"]
    )
    p.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    return p


def run(args) -> int:
    """Prints a report: the exit code."""
    from dflash_jax.parallel.sharding import Layout

    name = args.device.partition(":")[0]
    if name not in DEVICES:
        raise InputError(f"device {args.device!r}: it must be one of {', '.join(DEVICES)}, TPUs with a slice")
    system = read_system(args.config)
    shapes = read_shapes(*(str(system.shapes[k]) for k in ("target", "target" if args.draft else "draft")))
    largest = 1 if shapes.draft is None else shapes.draft.block_size
    if args.block_size is not None and not 1 <= args.block_size <= largest:
        raise InputError(f"block size {args.block_size}: it must be 1 to {largest}")
    depth = len(shapes.target.layers)
    if args.layers:
        shapes = shorten(shapes, args.layers)
    devices = topology(args.device, args.devices)
    mesh = args.mesh if args.mesh is not None else system.mesh(DEVICES[name].kind, len(devices))
    layout = replace(Layout.parse(mesh), decode_context_parallel=args.decode_context_parallel_size)
    figures = report(shapes, layout, devices, args) | {"depth": depth}
    print(json.dumps(figures) if args.json else describe(figures))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    prepare()
    return exit_code(lambda: run(make_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())

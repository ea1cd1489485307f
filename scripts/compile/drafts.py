"""The kernels of a drafter's proposal, as DFlash and as DFlash2, for a GPU that this machine need not have.

    python scripts/compile/drafts.py --config qwen3.8-27b --device b200 [--slots 32] [--kernels all]

Compiles the proposal with abstract weights, once for greedy sequences and once for draws, of a drafter in both forms:
the system's own, without its convolutions and selector or, where it has none, with those of the published DFlash2
drafters (2 taps, groups of 16, rank 256, 16 candidates). A second program without the last layer says what a layer
takes; what remains are the embedding, the head, and the choice of drafts. It needs what report.py needs.
"""

import argparse
import json
import sys
from dataclasses import replace

from dflash_jax.checkpoint.config_files import find_config
from dflash_jax.errors import InputError
from dflash_jax.ops.card import CHOICES
from dflash_jax.options.parser import Parser
from dflash_jax.options.systems import read_system
from dflash_jax.parallel.devices import DEVICES
from dflash_jax.planner import abstract_pair, read_shapes
from dflash_jax.process import exit_code
from tools.compile_report import backend_of, measure, prepare, shorten, topology

# Seconds of a small kernel within a graph, from the shortest on (benchmarks/NOTES.md).
KERNEL_S = (1.0e-6, 2.5e-6)


def forms(draft) -> dict:
    """The config of a drafter as DFlash and as DFlash2."""
    from dflash_jax.models.config import ConvSpec, SelectorSpec

    conv, selector = draft.conv or ConvSpec(2, 16), draft.selector or SelectorSpec(256, 16)
    return {
        "dflash": replace(draft, conv=None, selector=None),
        "dflash2": replace(draft, conv=conv, selector=selector),
    }


def extra_bytes(draft, slots: int) -> int:
    """Bytes of bfloat16 that a proposal of a DFlash2 drafter reads beyond DFlash's."""
    conv, selector, hidden = draft.conv, draft.selector, draft.hidden_size
    of_conv = 2 * conv.taps * (hidden // conv.group * hidden + hidden)
    rows = slots * (draft.block_size - 1) * 2 * selector.top_k
    return 2 * (2 * len(draft.layers) * of_conv + selector.rank * hidden + rows * selector.rank)


def proposal(shapes, backend, device, slots: int, max_len: int, is_greedy: bool):
    """The lowered proposal of sequences that are all greedy, or all drawn."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    from dflash_jax.decoding import speculative
    from dflash_jax.decoding.sampling_state import GREEDY, RANDOM
    from dflash_jax.decoding.state import Settings, take_slots
    from dflash_jax.engine import steps
    from dflash_jax.engine.executables import Executables
    from dflash_jax.engine.memory import pages_of_slots
    from dflash_jax.parallel.sharding import ONE_DEVICE

    settings = Settings(shapes.draft.block_size)

    @steps.step(steps.BATCH, changes=False)
    def propose(target, drafter, state, slots):
        mode = jnp.full(slots.shape, GREEDY if is_greedy else RANDOM)
        return speculative.propose(target, drafter, take_slots(target.backend, state, slots), settings, mode)

    target, drafter = abstract_pair(shapes, ONE_DEVICE, jnp.bfloat16, None, backend)
    programs = Executables(target, drafter, ONE_DEVICE.mesh([device]))
    state = programs.abstract_state(slots, max_len, settings, pages_of_slots(programs, slots, max_len, settings))
    batch = jax.ShapeDtypeStruct((slots,), jnp.int32, sharding=NamedSharding(programs.mesh, steps.BATCH))
    return programs.lower(propose, state, batch)


def count(lowered) -> dict:
    """Kernels and loops of a program: those that always run, and kernels in branches."""
    from dflash_jax.engine.executables import GPU_OPTIONS

    figures, _ = measure(lowered, 1, {}, "cuda", GPU_OPTIONS)
    if "failed" in figures:
        raise InputError(figures["failed"])
    return {
        "kernels": round(figures["kernels_per_layer"]),
        "in_branches": figures["kernels_in_branches"],
        "loops": figures["thunks"].get("While", 0),
    }


def report(shapes, device, args) -> dict:
    """The figures of both forms, greedy and drawn, and what DFlash2 adds."""
    backend, programs = backend_of(device, args.kernels), {}

    def counted(draft, is_greedy: bool) -> dict:
        # The target's layers take no part.
        pair = shorten(replace(shapes, draft=draft), 1)
        return count(proposal(pair, backend, device, args.slots, args.max_len, is_greedy))

    draft = replace(shapes.draft, block_size=args.block_size or shapes.draft.block_size)
    for form, config in forms(draft).items():
        for how in ("greedy", "drawn"):
            whole, shorter = (
                counted(replace(config, layers=layers), how == "greedy")
                for layers in (config.layers, config.layers[:-1])
            )
            programs[f"{form}, {how}"] = whole | {"of_a_layer": whole["kernels"] - shorter["kernels"]}
    added, bandwidth = {}, DEVICES[args.device].bandwidth
    for how in ("greedy", "drawn"):
        of_dflash, of_dflash2 = (programs[f"{form}, {how}"] for form in ("dflash", "dflash2"))
        more, bytes_read = of_dflash2["kernels"] - of_dflash["kernels"], extra_bytes(config, args.slots)
        added[how] = {
            "of_a_layer": of_dflash2["of_a_layer"] - of_dflash["of_a_layer"],
            "kernels": more,
            "bytes": bytes_read,
            "predicted_s": [bytes_read / bandwidth + more * seconds for seconds in KERNEL_S],
        }
    return {
        "config": find_config(args.config).stem,
        "device": args.device,
        "slots": args.slots,
        "max_len": args.max_len,
        "layers": len(draft.layers),
        "programs": programs,
        "added": added,
    }


def describe(figures: dict) -> str:
    """The report for people."""
    lines = [f"{figures['config']} on {figures['device']}, {figures['slots']} x {figures['max_len']:,}"]
    for name, f in figures["programs"].items():
        line = f"{name}: {f['kernels']} kernels, {f['of_a_layer']} of them of each of {figures['layers']} layers, "
        lines.append(f"{line}{f['in_branches']} in branches, {f['loops']} loops")
    for how, more in figures["added"].items():
        least, most = (1e3 * s for s in more["predicted_s"])
        line = f"DFlash2, {how}: {more['kernels']} kernels more, {more['of_a_layer']} of them of each layer, "
        lines.append(f"{line}{more['bytes'] / 1e6:.0f} MB more; {least:.3f} to {most:.3f} ms a round (predicted)")
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--config", required=True, metavar="NAME|FILE", help="a name of configs/, or a TOML")
    p.add_argument("--device", choices=("h100", "h200", "b200"), required=True)
    p.add_argument("--slots", type=int, default=1, metavar="N", help="rows (default: %(default)s)")
    p.add_argument("--max-len", type=int, default=8192, metavar="N", help="default: %(default)s")
    p.add_argument("--block-size", type=int, metavar="B", help="tokens of a round (default: the drafter's)")
    p.add_argument("--kernels", choices=CHOICES, default="auto", help="all: also those that no card has run")
    p.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    return p


def run(args) -> int:
    """Prints a report: the exit code."""
    import jax

    # Executables for absent devices are written to the cache and cannot be read back.
    jax.config.update("jax_enable_compilation_cache", False)
    shapes = read_shapes(*(str(read_system(args.config).shapes[k]) for k in ("target", "draft")))
    device = topology(args.device, 1)[0]
    figures = report(shapes, device, args)
    print(json.dumps(figures) if args.json else describe(figures))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    prepare()
    return exit_code(lambda: run(make_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())

"""What Triton makes of every kernel at the published models' shapes, for cards that this machine need not have.

    python scripts/compile/kernels.py --out benchmarks/kernels.json
    python scripts/compile/kernels.py --config configs/qwen3.6-27b.toml --card 90

Traces a system's programs with abstract weights, records every launch of a kernel, and compiles each for each card with
Triton and its assembler: registers of a thread, bytes of its stack (spilled registers, as a rule), shared memory and
columns of tensor memory of a program. It needs triton (x86_64 Linux), and no card. Launches of equal figures are in the
file once, and of each system's launches their number and digest.
"""

import argparse
import json
import sys
from pathlib import Path

from dflash_jax.checkpoint.config_files import find_config
from dflash_jax.checkpoint.quantize import QUANTIZE
from dflash_jax.errors import InputError
from dflash_jax.ops.card import SHARED_MEMORY, Card
from dflash_jax.options.parser import Parser
from dflash_jax.parallel.devices import versions
from dflash_jax.process import exit_code
from tools.compile_kernels import SYSTEMS, compiled, digest, launches, over_limit, prepare

CARDS = (80, 89, 90, 100, 120)


def report(systems: dict[str, str], args) -> tuple[dict, dict]:
    """Figures by capability: (launches of different figures, each system's `digest`).

    Failures are printed to stderr as they occur.
    """
    figures: dict[str, list[dict]] = {}
    digests: dict[str, dict[str, str]] = {}
    for capability in args.card:
        rows: dict[str, dict] = {}
        digests[str(capability)] = {}
        for config, mesh in systems.items():
            name = config if config in SYSTEMS else find_config(config).stem
            card, fp8 = Card.of_capability(capability), args.kv_cache_dtype == "fp8"
            traced = launches(config, mesh, card, args.dtype, args.quantize, has_fp8_caches=fp8)
            digests[str(capability)][name] = digest(traced)
            for launch in traced:
                used = compiled(launch, capability)
                if why := over_limit(used, capability):
                    print(f"sm_{capability}: {launch['kernel']} of {name}: {why}", file=sys.stderr)
                same = json.dumps([launch["kernel"], launch["num_warps"], used])
                rows.setdefault(same, launch | used | {"system": name})
        figures[str(capability)] = sorted(rows.values(), key=lambda row: row["kernel"])
    return figures, digests


def table(figures: dict) -> str:
    """The most that any launch of a kernel takes, by card."""
    lines = [
        "| kernel | card | registers | stack bytes | shared bytes | tensor memory |",
        "|---|---|---|---|---|---|",
    ]
    for capability, rows in figures.items():
        for kernel in sorted({row["kernel"] for row in rows}):
            compiled_rows = [row for row in rows if row["kernel"] == kernel and "failed" not in row]
            largest = (
                max((row[n] for row in compiled_rows), default=0)
                for n in ("registers", "stack", "shared", "tensor_memory")
            )
            lines.append(f"| {kernel} | sm_{capability} | " + " | ".join(map(str, largest)) + " |")
    return "\n".join(lines)


def assemblers(cards: list[int]) -> str:
    """Triton's own, by their CUDA releases: it has one for older cards and one for Blackwell."""
    from triton.backends.nvidia.compiler import get_ptxas

    return ", ".join(sorted({f"ptxas {get_ptxas(card).version} of Triton" for card in cards}))


def run(args) -> int:
    """Writes the figures of the kernels: the exit code."""
    if args.mesh and not args.config:
        raise InputError("--mesh is the mesh of --config: name a config too")
    systems = {args.config: args.mesh} if args.config else SYSTEMS
    if unknown := set(args.card) - set(SHARED_MEMORY):
        raise InputError(f"card {min(unknown)}: it must be one of {', '.join(map(str, SHARED_MEMORY))}")
    figures, digests = report(systems, args)
    if args.out:
        rows = {c: [json.dumps(row) for row in rows] for c, rows in figures.items()}
        blocks = (f'"{c}": [\n' + ",\n".join(lines) + "\n]" for c, lines in rows.items())
        about = json.dumps({"versions": f"{versions()}; {assemblers(args.card)}", "launches": digests})
        args.out.write_text(f'{{"about": {about}, "cards": {{\n' + ",\n".join(blocks) + "\n}}\n")
    print(table(figures))
    return int(any(over_limit(row, int(c)) for c, rows in figures.items() for row in rows))


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--config", metavar="NAME|FILE", help="a name of configs/, or a TOML (default: five systems)")
    p.add_argument("--mesh", default="", metavar="tensor=8", help="of --config (default: one device)")
    text = "compute capability, 10 times major plus minor (default: %(default)s)"
    p.add_argument("--card", nargs="+", type=int, default=list(CARDS), metavar="N", help=text)
    p.add_argument(
        "--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"], help="default: %(default)s"
    )
    p.add_argument("--quantize", choices=QUANTIZE[1:], help="weights in few bits (default: as the config has them)")
    p.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto", help="default: %(default)s")
    p.add_argument("--out", type=Path, metavar="FILE", help="JSON")
    return p


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    prepare()
    return exit_code(lambda: run(make_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())

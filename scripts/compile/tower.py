"""The vision tower, compiled at full size for accelerators that this machine need not have.

    python scripts/compile/tower.py --device b200 [--config NAME] [--patches 4096 16384 65536] [--kernels xla]

Prints, for calls of each number of patches, the kernels of one block with those around the blocks, GB of arguments and
temporaries, and which implementation the attention takes. It needs what report.py needs. One call of 65,536 patches is
the largest image of the published checkpoints.
"""

import argparse
import json
import sys

from dflash_jax.errors import InputError
from dflash_jax.ops.card import CHOICES
from dflash_jax.options.parser import Parser
from dflash_jax.options.systems import read_system
from dflash_jax.planner import read_shapes
from dflash_jax.process import exit_code
from tools import compile_report as report


def measure(config, device, kernels: str, patches: int, options: dict | None) -> dict:
    """Figures of a call of ``patches`` patches on a device of a topology."""
    from dataclasses import replace

    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from dflash_jax.engine.vision_encoder import call_arguments, lowered, workspace
    from dflash_jax.models.vision import abstract_tower

    choices = {}
    backend = replace(report.backend_of(device, kernels), on_choice=lambda c: choices.update({c.op: c.implementation}))

    mesh = Mesh(np.array([device]), ("data",))

    def placed(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    tower = jax.tree.map(placed, abstract_tower(config, jnp.bfloat16, backend))
    # Triton's compiler asks JAX's mesh for the card.
    with jax.set_mesh(mesh):
        program = lowered(tower, jax.tree.map(placed, call_arguments(tower, patches)))
    figures, _ = report.measure(program, 1, {"weights": tower}, backend.platform, options)
    return {"patches": patches, **choices, "planned_workspace": workspace(config, patches), **figures}


def describe(f: dict) -> str:
    """A line for people."""
    if "failed" in f:
        return f"{f['patches']} patches: {f['failed']}"
    kernels = f"{f['kernels_per_layer']:.0f} kernels, {f['graphs']} graphs, " if "kernels_per_layer" in f else ""
    return (
        f"{f['patches']} patches: attention {f['frame_attention']}, {kernels}arguments "
        f"{f['arguments'] / 1e9:.3f} GB, temporaries {f['temporaries'] / 1e9:.3f} GB (planned with the input "
        f"{f['planned_workspace'] / 1e9:.3f}), weights copied {f['copied']['weights'] / 1e6:.1f} MB, compiled in "
        f"{f['compile_s']} s"
    )


def run(args) -> int:
    import jax

    from dflash_jax.engine.executables import compiler_options

    # Executables for absent devices are written to the cache and cannot be read back.
    jax.config.update("jax_enable_compilation_cache", False)
    shapes = read_shapes(*(str(read_system(args.config).shapes[k]) for k in ("target", "draft")))
    if (config := shapes.target.vision) is None:
        raise InputError(f"config {args.config}: the model has no vision tower")
    devices = report.topology(args.device, 1)
    options = compiler_options(devices[0])
    for patches in args.patches:
        figures = {"device": args.device} | measure(config, devices[0], args.kernels, patches, options)
        print(json.dumps(figures) if args.json else describe(figures), flush=True)
    return 0


def main(argv: list[str] | None = None) -> int:
    report.prepare()
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--config", default="qwen3.6-35b-a3b", metavar="NAME|FILE", help="default: %(default)s")
    p.add_argument("--device", required=True, metavar="NAME", help="h100, h200, b200, or a TPU slice such as v6e:1x1")
    p.add_argument("--patches", nargs="+", type=int, default=[4096, 16384, 65536], metavar="N", help="of a call")
    p.add_argument(
        "--kernels",
        choices=CHOICES,
        default="auto",
        help="all: also those that no card has run; xla: none",
    )
    p.add_argument("--json", action="store_true", help="a JSON object a line")
    return exit_code(lambda: run(p.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())

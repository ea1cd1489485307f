"""A sharded Orbax checkpoint from a Hugging Face directory or repo id, target or drafter.

    python convert/hf_to_orbax.py SRC DST [--mesh tensor=8] [--dtype bfloat16] [--quantize int8]

A parameter at a time, so that memory stays small; killed at any moment, the same command goes on where it was. LLM and
the command lines read DST as they read SRC.
"""

import argparse
import sys

from dflash_jax.cli.options import Parser, exit_code
from dflash_jax.parallel.sharding import Layout


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("src", metavar="SRC", help="directory or repo id")
    parser.add_argument("dst", metavar="DST", help="directory to write, or to go on with")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: each tensor's own")
    parser.add_argument("--mesh", default="", metavar="data=2,tensor=4", help="shards for such a mesh")
    parser.add_argument("--quantize", choices=["none", "int8", "fp8"], help="as for python -m dflash_jax.generate")
    parser.add_argument("--revision", help="of the repo")
    return parser


def run(args) -> int:
    from pathlib import Path

    import jax
    from tqdm import tqdm

    layout = Layout.parse(args.mesh)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", layout.devices)

    from dflash_jax.checkpoint import orbax
    from dflash_jax.checkpoint.hub import resolve
    from dflash_jax.checkpoint.load import open_any

    directory = resolve(args.src, args.revision)
    source, module = open_any(directory, layout)
    options = {"dtype": args.dtype, "quantize": args.quantize}
    orbax.convert(source, module, directory, Path(args.dst), layout, options, lambda todo: tqdm(todo, unit="tensor"))
    print(f"{args.dst}: {len(source.entries)} parameters, {len(source.skipped)} other tensors, mesh {layout}")
    return 0


def main(argv: list[str] | None = None) -> int:
    return exit_code(lambda: run(make_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())

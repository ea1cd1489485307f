"""A Hugging Face directory from a checkpoint that hf_to_orbax.py made, every tensor as it was.

python convert/orbax_to_hf.py SRC DST
"""

import argparse
import sys
from pathlib import Path

from dflash_jax.cli.options import Parser, exit_code


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("src", metavar="SRC", help="Orbax directory")
    parser.add_argument("dst", metavar="DST", help="directory to write; it must not exist, or be empty")
    parser.add_argument("--max-shard-size", type=float, default=2.0, metavar="GB", help="default: %(default)s")
    return parser


def run(args) -> int:
    import jax

    jax.config.update("jax_platforms", "cpu")
    from tqdm import tqdm

    from dflash_jax.checkpoint.export import to_hf

    size = int(args.max_shard_size * 1e9)
    count = to_hf(Path(args.src), Path(args.dst), size, lambda tensors, count: tqdm(tensors, total=count))
    print(f"{args.dst}: {count} tensors")
    return 0


def main(argv: list[str] | None = None) -> int:
    return exit_code(lambda: run(make_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())

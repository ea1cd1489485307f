"""A Hugging Face directory from a GGUF file, for dflash_jax and transformers alike.

    python convert/gguf_to_hf.py model.gguf DST [--dtype bfloat16]

Architectures: llama, qwen3, qwen3moe. Quantised tensors are unpacked; float32 keeps what they say exactly.
"""

import argparse
import sys

from dflash_jax.checkpoint.gguf import DTYPE_NAMES, convert
from dflash_jax.cli.options import Parser, exit_code


def run(argv: list[str] | None) -> int:
    parser = Parser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="FILE", help="the GGUF file")
    parser.add_argument("dst", metavar="DST", help="the directory to write; it must not exist, or be empty")
    parser.add_argument("--dtype", choices=list(DTYPE_NAMES), default="float32", help="default: %(default)s")
    args = parser.parse_args(argv)
    config = convert(args.file, args.dst, args.dtype)
    print(f"{args.dst}: {config['model_type']}, {config['num_hidden_layers']} layers, {args.dtype}")
    return 0


def main(argv: list[str] | None = None) -> int:
    return exit_code(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())

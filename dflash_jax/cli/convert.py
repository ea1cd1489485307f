"""Converts checkpoints: Hugging Face to Orbax and back, and GGUF to Hugging Face.

`LLM` and the command lines read the results as they read the sources.
"""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

from dflash_jax import progress
from dflash_jax.options.parser import Parser, program
from dflash_jax.process import exit_code


def _add(commands, name: str, run: Callable[[argparse.Namespace], int], help: str, more: str = "", **paths: str):
    p = commands.add_parser(name, help=help, description=f"{help}. {more}".strip(), allow_abbrev=False)
    p.set_defaults(run=run)
    for path, text in paths.items():
        p.add_argument(path, metavar=path.upper(), help=text)
    return p


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = Parser(prog=program("convert"), description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(title="conversions", metavar="CONVERSION", required=True)

    p = _add(
        commands,
        "hf-to-orbax",
        hf_to_orbax,
        "A sharded Orbax checkpoint from a Hugging Face directory or repo id, target or drafter",
        "Converts one parameter at a time, so that memory stays small. After a stop, the same command resumes.",
        src="directory or repo id",
        dst="directory to write, or to resume",
    )
    p.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: each tensor's own")
    p.add_argument("--mesh", default="", metavar="data=2,tensor=4", help="shards for such a mesh")
    p.add_argument("--quantize", choices=["none", "int8", "fp8"], help=f"as for {program('generate')}")
    p.add_argument("--revision", metavar="REV", help="branch, tag or commit of the repo")
    p.add_argument("--download-dir", metavar="DIR", help="where repos are kept (default: Hugging Face's cache)")

    p = _add(
        commands,
        "orbax-to-hf",
        orbax_to_hf,
        "A Hugging Face directory from a checkpoint that hf-to-orbax wrote, every tensor unchanged",
        src="Orbax directory",
        dst="directory to write; it must not exist, or be empty",
    )
    p.add_argument("--max-shard-size", type=float, default=2.0, metavar="GB", help="default: %(default)s")

    p = _add(
        commands,
        "gguf-to-hf",
        gguf_to_hf,
        "A Hugging Face directory from a GGUF file, which transformers reads too",
        "Architectures: llama, qwen3, qwen3moe. Quantised tensors are unpacked; float32 keeps their values exactly.",
        file="the GGUF file",
        dst="directory to write; it must not exist, or be empty",
    )
    p.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="default: %(default)s"
    )
    return parser


def bar_of_tensors(tensors: Iterable, count: int | None = None) -> Iterable:
    """``tensors`` with a bar."""
    return progress.bar(tensors, description="converting", total=count, unit="tensor")


def hf_to_orbax(args) -> int:
    """Converts a Hugging Face directory to Orbax."""
    import jax

    from dflash_jax.parallel.sharding import Layout

    layout = Layout.parse(args.mesh)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", layout.devices)

    from dflash_jax.checkpoint import orbax
    from dflash_jax.checkpoint.hub import resolve
    from dflash_jax.checkpoint.load import open_any

    directory = resolve(args.src, args.revision, args.download_dir)
    source, module = open_any(directory, layout)
    options = {"dtype": args.dtype, "quantize": args.quantize}
    orbax.convert(source, module, directory, Path(args.dst), layout, options, bar_of_tensors)
    print(f"{args.dst}: {len(source.entries)} parameters, {len(source.skipped)} other tensors, mesh {layout}")
    return 0


def orbax_to_hf(args) -> int:
    """Converts an Orbax directory back to the files that it was made from."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from dflash_jax.checkpoint.export import to_hf

    size = int(args.max_shard_size * 1e9)
    count = to_hf(Path(args.src), Path(args.dst), size, bar_of_tensors)
    print(f"{args.dst}: {count} tensors")
    return 0


def gguf_to_hf(args) -> int:
    """Converts a GGUF file to a Hugging Face directory."""
    from dflash_jax.checkpoint.gguf import convert

    config = convert(args.file, args.dst, args.dtype)
    print(f"{args.dst}: {config['model_type']}, {config['num_hidden_layers']} layers, {args.dtype}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""

    def command() -> int:
        args = make_parser().parse_args(argv)
        return args.run(args)

    return exit_code(command)

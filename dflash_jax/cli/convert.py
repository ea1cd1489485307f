"""Converts checkpoints: Hugging Face to Orbax and back, GGUF to Hugging Face, and weights to four bits.

`LLM` and the command lines read the results as they read the sources.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dflash_jax import progress
from dflash_jax.checkpoint.quantization import FOUR_BITS, QUANTIZE
from dflash_jax.options.option import option
from dflash_jax.options.parser import Parser, program
from dflash_jax.process import exit_code


def bar_of_tensors(tensors: Iterable, count: int | None = None) -> Iterable:
    """``tensors`` with a bar."""
    return progress.bar(tensors, description="converting", total=count, unit="tensor")


_path = partial(option, None, is_required=True)
_DIRECTORY = "directory to write; it must not exist, or be empty"


@dataclass(frozen=True)
class HfToOrbax:
    """A sharded Orbax checkpoint from a Hugging Face directory or repo id, target or drafter.

    Converts one parameter at a time, so that memory stays small. After a stop, the same command resumes.
    """

    src: str = _path("directory or repo id", "SRC", flag="src")
    dst: str = _path("directory to write, or to resume", "DST", flag="dst")
    dtype: str | None = option(None, "default: each tensor's own", choices=("float32", "bfloat16"))
    mesh: str = option("", "shards for such a mesh", "data=2,tensor=4")
    quantize: str | None = option(None, "as for dflash generate", choices=QUANTIZE)
    revision: str | None = option(None, "branch, tag or commit of the repo", "REV")
    download_dir: str | None = option(None, "where repos are kept (default: Hugging Face's cache)", "DIR")

    def run(self) -> int:
        """Converts: the exit code."""
        import jax

        from dflash_jax.parallel.sharding import Layout

        layout = Layout.parse(self.mesh)
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", layout.devices)

        from dflash_jax.checkpoint import orbax
        from dflash_jax.checkpoint.hub import resolve
        from dflash_jax.checkpoint.load import open_any

        directory = resolve(self.src, self.revision, self.download_dir)
        source, module = open_any(directory, layout)
        options = {"dtype": self.dtype, "quantize": self.quantize}
        orbax.convert(source, module, directory, Path(self.dst), layout, options, bar_of_tensors)
        print(f"{self.dst}: {len(source.entries)} parameters, {len(source.skipped)} other tensors, mesh {layout}")
        return 0


@dataclass(frozen=True)
class OrbaxToHf:
    """A Hugging Face directory from a checkpoint that hf-to-orbax wrote, every tensor unchanged."""

    src: str = _path("Orbax directory", "SRC", flag="src")
    dst: str = _path(_DIRECTORY, "DST", flag="dst")
    max_shard_size: float = option(2.0, "of a file", "GB")

    def run(self) -> int:
        """Converts: the exit code."""
        import jax

        jax.config.update("jax_platforms", "cpu")
        from dflash_jax.checkpoint.export import to_hf

        size = int(self.max_shard_size * 1e9)
        count = to_hf(Path(self.src), Path(self.dst), size, bar_of_tensors)
        print(f"{self.dst}: {count} tensors")
        return 0


@dataclass(frozen=True)
class GgufToHf:
    """A Hugging Face directory from a GGUF file, which transformers reads too.

    Architectures: llama, qwen3, qwen3moe. Quantised tensors are unpacked; float32 keeps their values exactly.
    """

    file: str = _path("the GGUF file", "FILE", flag="file")
    dst: str = _path(_DIRECTORY, "DST", flag="dst")
    dtype: str = option("float32", "of the tensors", choices=("float32", "bfloat16", "float16"))

    def run(self) -> int:
        """Converts: the exit code."""
        from dflash_jax.checkpoint.gguf import convert

        config = convert(self.file, self.dst, self.dtype)
        print(f"{self.dst}: {config['model_type']}, {config['num_hidden_layers']} layers, {self.dtype}")
        return 0


@dataclass(frozen=True)
class Quantize:
    """A Hugging Face directory of a target with its large matrices in four bits, in compressed-tensors' format.

    They have the numbers that --quantize has on loading. Head, router, norms, MTP head and vision tower stay as they
    are.
    """

    src: str = _path("directory or repo id of a target", "SRC", flag="src")
    dst: str = _path(_DIRECTORY, "DST", flag="dst")
    to: str = option("nvfp4", "as for --quantize of dflash generate", choices=FOUR_BITS)
    max_shard_size: float = option(2.0, "of a file", "GB")
    revision: str | None = option(None, "branch, tag or commit of the repo", "REV")
    download_dir: str | None = option(None, "where repos are kept (default: Hugging Face's cache)", "DIR")

    def run(self) -> int:
        """Converts: the exit code."""
        import jax

        jax.config.update("jax_platforms", "cpu")
        from dflash_jax.checkpoint.export import quantize_to_hf
        from dflash_jax.checkpoint.hub import resolve

        directory = resolve(self.src, self.revision, self.download_dir)
        size = int(self.max_shard_size * 1e9)
        count = quantize_to_hf(directory, Path(self.dst), self.to, size, bar_of_tensors)
        print(f"{self.dst}: {count:,} matrices in {self.to}")
        return 0


CONVERSIONS = {"hf-to-orbax": HfToOrbax, "orbax-to-hf": OrbaxToHf, "gguf-to-hf": GgufToHf, "quantize": Quantize}


def make_parser() -> Parser:
    """The parser of the command line."""
    parser = Parser(prog=program("convert"), description=__doc__)
    commands = parser.add_subparsers(title="conversions", dest="conversion", metavar="CONVERSION", required=True)
    for name, cls in CONVERSIONS.items():
        summary = str(cls.__doc__).splitlines()[0].rstrip(".")
        commands.add_parser(name, help=summary, description=cls.__doc__).add_options(cls)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""

    def command() -> int:
        args = vars(make_parser().parse_args(argv))
        return CONVERSIONS[args.pop("conversion")](**args).run()

    return exit_code(command)

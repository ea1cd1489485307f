"""`dflash completion`: the script of bash, in bash."""

import shutil
import subprocess
import sys

import pytest

from dflash_jax.cli.completion import script
from dflash_jax.cli.main import COMMANDS


@pytest.fixture(scope="module")
def completed(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "dflash"
    path.write_text(script("bash"))
    bash = shutil.which("bash")
    assert bash, "tests of commands run in bash too"

    def complete(*words: str) -> list[str]:
        """What the last word may become."""
        run = f'source {path}; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _dflash; printf "%s\\n" "${{COMPREPLY[@]}}"'
        done = subprocess.run([bash, "-uc", run, "bash", *words], capture_output=True, text=True, check=True)
        return done.stdout.split()

    return complete


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        (["ser"], ["serve"]),
        (["help", "gen"], ["generate"]),
        (["plan", "--dev"], ["--device", "--device-memory", "--devices"]),
        (["plan", "--device", "h"], ["h200", "h100"]),
        (["serve", "--port", "80", "--bund"], ["--bundled"]),
        (["generate", "--dtype", "b"], ["bfloat16"]),
        (["train", "ev"], ["evaluate"]),
        (["train", "fit", "--held"], ["--held-out"]),
        (["convert", "gguf"], ["gguf-to-hf"]),
        (["convert", "gguf-to-hf", "--dtype", "fl"], ["float32", "float16"]),
        # Files, which bash itself completes.
        (["plan", "Makef"], []),
    ],
)
def test_words_are_completed(completed, words, completions):
    assert completed("dflash", *words) == completions


def test_an_empty_word_becomes_any_command(completed):
    assert completed("dflash", "") == ["help", *COMMANDS]


def test_zsh_reads_the_same_script():
    assert script("zsh").endswith(script("bash"))
    assert "bashcompinit\n_dflash() {" in script("zsh")


def test_the_script_is_made_without_jax():
    code = "import sys\nfrom dflash_jax.cli.main import main\nmain(['completion', 'bash'])\n"
    code += "assert not {'jax', 'numpy', 'pydantic'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == script("bash")

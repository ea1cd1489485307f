"""`dflash demo`, with the bundled pair."""

import re
import sys

import pytest

from dflash_jax.checkpoint import smollm2
from dflash_jax.cli import draft_marks
from dflash_jax.cli.demo import duration, main
from dflash_jax.errors import InputError
from dflash_jax.frontend import compare

pytestmark = pytest.mark.usefixtures("shared_models")

LAST = (
    r"Plain [\d.]+ m?s, drafted [\d.]+ m?s: \d+\.\d times as fast, the same 160 tokens\n"
    r"(Commands decode plainly .*\n)?$"
)


@pytest.fixture(autouse=True)
def no_colour_variables(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def test_a_pipe_has_the_prompt_both_texts_and_the_figures_without_colour(capsys):
    assert main(["--bundled"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "\033" not in out
    prompt, drafted, plain, last = out.removesuffix("\n").split("\n\n", 1)[0], *parts(out)
    assert prompt == "> def read_config(path):"
    assert drafted == plain
    assert drafted.startswith("def read_config(path):")
    assert re.fullmatch(LAST, last)


def test_the_demo_says_why_commands_decode_plainly(capsys, monkeypatch):
    monkeypatch.setattr(compare, "why_plain", lambda llm, measured: "drafting is slower")
    assert main(["--bundled", "--prompt", "import os"]) == 0
    assert capsys.readouterr().out.endswith("tokens\nCommands decode plainly with this pair here: drafting is slower\n")


def parts(out: str) -> tuple[str, str, str]:
    """The drafted text, the plain one and the last line."""
    _, _, rest = out.partition("\nwith the drafter:\n")
    drafted, _, rest = rest.partition("\n\nthe same, plainly:\n")
    plain, _, last = rest[: rest.rindex("\n\n") + 2], None, rest[rest.rindex("\n\n") + 2 :]
    return drafted.rstrip("\n"), plain.rstrip("\n"), last


@pytest.mark.parametrize(
    ("variable", "start", "legend"), [("NO_COLOR", "[", "[brackets]"), ("FORCE_COLOR", "\033[32m", "green")]
)
def test_marks_of_drafts_follow_the_environment(capsys, monkeypatch, variable, start, legend):
    monkeypatch.setenv(variable, "1")
    assert main(["--bundled", "--prompt", "import os"]) == 0
    out, _ = capsys.readouterr()
    drafted, plain, last = parts(out)
    assert start in drafted
    assert "\033" not in plain
    assert last.startswith(f"{legend} = guessed by the drafter and confirmed by the model. Plain ")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (smollm2.NoConnectionError("x"), "no connection to the package index"),
        (InputError("no pip\nhere"), "no pip here"),
    ],
)
def test_without_the_model_the_bundled_pair_answers_and_one_line_says_so(capsys, monkeypatch, error, line):
    def fail(tell):
        raise error

    monkeypatch.setattr(smollm2, "cached_smollm2", fail)
    assert main(["--prompt", "import os"]) == 0
    out, err = capsys.readouterr()
    assert err == f"{line}: the bundled pair of tiny models instead of SmolLM2-135M-Instruct\n"
    assert "> import os\n" in out


def test_bad_input_is_one_line(capsys):
    for argv, named in ((["--prompt", ""], "empty"), (["--no-such"], "--no-such")):
        assert main(argv) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert named in err


@pytest.mark.parametrize(
    ("variables", "is_terminal", "marks"),
    [
        ({}, True, draft_marks.GREEN),
        ({}, False, draft_marks.NONE),
        ({"NO_COLOR": "1"}, True, draft_marks.BRACKETS),
        ({"NO_COLOR": "1"}, False, draft_marks.BRACKETS),
        ({"NO_COLOR": ""}, True, draft_marks.GREEN),
        ({"FORCE_COLOR": "1"}, False, draft_marks.GREEN),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, draft_marks.BRACKETS),
        ({"TERM": "dumb"}, True, draft_marks.BRACKETS),
    ],
)
def test_marks_by_variables_and_stream(monkeypatch, variables, is_terminal, marks):
    monkeypatch.delenv("TERM", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    assert draft_marks.draft_marks() == marks


def test_short_times_are_in_milliseconds():
    assert (duration(1.147), duration(0.0126)) == ("1.15 s", "13 ms")

"""The command line, in this process where possible."""

import io
import json
import re
import signal
import subprocess
import sys

import jax
import pytest

from dflash_jax import LLM, progress
from dflash_jax.cli.generate import main, with_rate
from tests.helpers import without_kernels_line

pytestmark = pytest.mark.usefixtures("shared_models")

PROMPT = ["--prompt", "def main(", "--max-new-tokens", "24"]


def run(capsys, *argv):
    code = main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


def test_text_on_stdout_statistics_on_stderr(capsys):
    code, out, err = run(capsys, *PROMPT, "--block-size", "16")
    assert code == 0
    assert out.strip()
    assert err.count("\n") == 1
    for part in ("cpu float32", "prompt", "tok/s", "acceptance length", "compiled in", "GB/s"):
        assert part in err


def test_a_prompt_of_one_token_is_singular_and_has_no_rate(capsys):
    # It is not prefilled: its only token is the input of the first round.
    _, _, err = run(capsys, "--prompt-ids", "5", "--max-new-tokens", "4")
    assert " | prompt 1 token | decode 4 tokens, " in err


@pytest.mark.parametrize(
    ("tokens", "seconds", "note", "timed", "text"),
    [
        (12, 0.5, "", None, "12 tokens, 24 tok/s"),
        (1, 0.5, "", None, "1 token, 2 tok/s"),
        (12, 0.0, "", None, "12 tokens"),
        (12, 1e-9, "", None, "12 tokens"),
        (12, 0.5, " (12 known)", 0, "12 tokens (12 known)"),
        (12, 0.5, " (2 known)", 10, "12 tokens (2 known), 20 tok/s"),
    ],
)
def test_a_rate_is_shown_only_where_it_was_measured(tokens, seconds, note, timed, text):
    assert with_rate(tokens, seconds, note, timed) == text


def test_json_has_the_promised_keys_and_nothing_else(capsys):
    code, out, _ = run(capsys, *PROMPT, "--prompt-ids", "5,6,7", "--json", "--logprobs", "2", "--compare")
    assert code == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert set(line) == {
            "prompt_ids", "token_ids", "text", "finish_reason", "acceptance_lengths", "logprobs", "timings", "baseline",
            "equal", "speedup", "comparison",
        }  # fmt: skip
        assert set(line["timings"]) == {"prefill_s", "decode_s", "compile_s"}
        assert set(line["baseline"]) == {"token_ids", "decode_s"}
        comparison = {k: line["comparison"][k] for k in ("block_size", "repeats")}
        assert comparison["block_size"] > 1
        assert comparison["repeats"] == 3
        rates = line["comparison"]["tokens_per_s"], line["comparison"]["baseline_tokens_per_s"]
        assert rates[0] == pytest.approx(len(line["token_ids"]) / line["timings"]["decode_s"])
        assert rates[1] == pytest.approx(len(line["baseline"]["token_ids"]) / line["baseline"]["decode_s"])
        assert line["speedup"] == pytest.approx(rates[0] / rates[1])
        assert line["equal"] == (line["baseline"]["token_ids"] == line["token_ids"])
        assert [set(entry) for entry in line["logprobs"]] == [{"token_id", "logprob", "top"}] * len(line["token_ids"])
        assert sum(line["acceptance_lengths"]) == len(line["token_ids"])
    assert lines[1]["prompt_ids"] == [5, 6, 7]


def test_show_drafts_colours_and_keeps_the_text(capsys, monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    _, plain, _ = run(capsys, *PROMPT)
    _, piped, _ = run(capsys, *PROMPT, "--block-size", "16", "--show-drafts")
    assert piped == plain
    monkeypatch.setenv("NO_COLOR", "1")
    _, bracketed, _ = run(capsys, *PROMPT, "--block-size", "16", "--show-drafts")
    assert len(bracketed) > len(plain)
    assert sorted(bracketed.replace("[", "").replace("]", "")) == sorted(plain.replace("[", "").replace("]", ""))
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, coloured, _ = run(capsys, *PROMPT, "--block-size", "16", "--show-drafts")
    assert "\033[32m" in coloured
    assert coloured.replace("\033[32m", "").replace("\033[0m", "") == plain


def test_compare_names_block_size_rates_and_ratio_behind_the_text(capsys):
    code, out, err = run(capsys, *PROMPT, "--block-size", "8", "--compare")
    _, text, _ = run(capsys, *PROMPT)
    assert (code, out) == (0, text)
    line = (
        r"compare: block size 8: \d+ against \d+ tokens/s, \d+\.\d\d times as fast \(median of 3 runs\); equal tokens"
    )
    assert re.search(f"^{line}$", err, re.MULTILINE)
    assert "acceptance length" in err


def test_compare_says_why_auto_decodes_plainly(capsys, monkeypatch):
    from dflash_jax.frontend import compare

    monkeypatch.setattr(compare, "why_plain", lambda *_: "two cores")
    _, out, err = run(capsys, *PROMPT, "--compare", "--json")
    assert 'compare: block size "auto" decodes plainly here: two cores\n' in err
    assert json.loads(out)["comparison"]["why_plain"] == "two cores"


def test_progress_is_shown_again_behind_the_text(capsys, monkeypatch):
    hidden, pieces = [], LLM.pieces

    def watched(*args):
        hidden.append(progress._is_hidden)
        return pieces(*args)

    monkeypatch.setattr(LLM, "pieces", watched)
    run(capsys, *PROMPT, "--compare")
    assert hidden == [False] * 8


def test_compare_fails_where_tokens_part_beyond_a_tie(capsys, monkeypatch):
    from dflash_jax.frontend import compare

    monkeypatch.setattr(compare, "divergence", lambda *_: compare.Divergence(3, 1, 2, 0.5))
    code, _, err = run(capsys, *PROMPT, "--compare")
    assert code == 1
    assert "part at new token 3" in err


def test_stdin_file_and_system_prompts(capsys, monkeypatch, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("import sys\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("class A:"))
    argv = ["--prompt", "-", "--prompt-file", str(file), "--max-new-tokens", "3", "--json"]
    code, out, _ = run(capsys, *argv)
    assert code == 0
    assert len(out.splitlines()) == 2
    code, out, _ = run(capsys, "--chat", "--no-thinking", "--system", "Be brief.", *PROMPT)
    assert code == 0


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "no prompt"),
        (["--prompt", ""], "empty"),
        (["--prompt", "x", "--temperature", "-1"], "-1"),
        (["--prompt", "x", "--temperature", "hot"], "hot"),
        (["--prompt", "x", "--top-p", "0"], "top_p"),
        (["--prompt", "x", "--block-size", "0"], "block size 0"),
        (["--prompt", "x", "--block-size", "17"], "block size 17"),
        (["--prompt", "x", "--target", "/no/such"], "/no/such"),
        (["--prompt", "x", "--draft", "/no/such"], "/no/such"),
        (["--prompt", "x", "--max-new-tokens", "9999"], "9999"),
        (["--prompt", "x", "--no-such-flag"], "--no-such-flag"),
        (["--prompt", "x", "--platform", "tpu"], "tpu"),
        (["--prompt", "x", "--draft", "none", "--compare"], "--draft"),
        (["--prompt", "x", "--logprobs", "2"], "--json"),
        (["--prompt", "x", "--system", "y"], "--chat"),
        (["--prompt-ids", "1,b"], "1,b"),
        (["--prompt-ids", "1,99999"], "99999"),
        (["--prompt-file", "/no/such"], "/no/such"),
        (["--prompt", "x", "--logit-bias", "7"], "ID=VALUE"),
        (["--prompt", "x", "--logit-bias", "7=nan"], "logit_bias 7: nan"),
        (["--prompt", "x", "--target", ""], "empty"),
        (["--prompt", "x", "--target", "a\nb"], "a b does not exist"),
        (["--prompt", "x", "--draft-sink-size", "4"], "without a draft_window_size"),
        (["--prompt", "x\udcff"], "not UTF-8"),
        (["--prompt", "fine", "--prompt-ids", "99999"], "99999"),
        (["--prompt", "x", "--mesh", "rows=2"], "rows"),
        (["--prompt", "x", "--mesh", "tensor=64"], "needs 64 devices"),
    ],
    ids=lambda v: " ".join(v)[-30:] if isinstance(v, list) else None,
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, argv, named):
    platforms = jax.config.jax_platforms
    code, out, err = run(capsys, *argv)
    jax.config.update("jax_platforms", platforms)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert named in err


def test_options_of_drafting_leave_equal_tokens(capsys):
    window = ["--draft-window-size", "16", "--draft-sink-size", "4", "--reproducible", "--seed", "3", "--compare"]
    code, _, err = run(capsys, *PROMPT, *window, "--temperature", "0.8", "--top-k", "4000000000")
    assert code == 0
    assert "equal tokens" in err


def test_stop_text_is_not_shown(capsys):
    _, whole, _ = run(capsys, *PROMPT)
    code, out, _ = run(capsys, *PROMPT, "--stop", whole[9:12])
    assert code == 0
    assert out == whole[: whole.index(whole[9:12])] + "\n"


def test_no_platform_is_one_line():
    """In a process where JAX has not started."""
    command = [sys.executable, "-m", "dflash_jax.generate", "--prompt", "x", "--platform", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        pytest.skip("there is a GPU")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "platform 'cuda' is not there" in done.stderr


@pytest.mark.parametrize(
    ("shell", "named"),
    [
        ("{} --prompt x --max-new-tokens 2 >&-", "stdout is closed"),
        ("{} --prompt x --max-new-tokens 2 > /dev/full", "No space left"),
        ("{} --prompt - <&-", "stdin is closed"),
        ("printf '\\377' | {} --prompt -", "not UTF-8"),
    ],
)
def test_closed_and_full_streams(shell, named):
    command = shell.format(f"{sys.executable} -m dflash_jax.generate")
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = without_kernels_line(done.stderr).splitlines()
    assert line.startswith("error: ")
    assert named in line


def test_help_does_not_wait_for_jax():
    code = "import sys, dflash_jax.generate as g\n"
    code += "try: g.main(['--help'])\nexcept SystemExit: pass\nassert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_closed_pipe_is_quiet():
    generate = f"{sys.executable} -m dflash_jax.generate --prompt "
    command = generate + "'def f(' --max-new-tokens 200 --ignore-eos | head -c 5"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert len(done.stdout) == 5
    assert without_kernels_line(done.stderr) == ""


def test_an_interrupt_is_one_line():
    # A shell's background jobs ignore SIGINT, and so would their children.
    heed = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    run_it = f"{heed}; runpy.run_module('dflash_jax.generate', run_name='__main__')"
    options = ["--prompt", "def f(", "--max-new-tokens", "8000", "--ignore-eos"]
    process = subprocess.Popen(
        [sys.executable, "-c", run_it, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert without_kernels_line(err) == "\ninterrupted\n"

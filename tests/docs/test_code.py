"""Code in README.md and docs/: Python blocks run, commands parse, and what is marked to run does."""

import importlib
import os
import subprocess
import sys

import httpx
import pytest

from dflash_jax.cli.main import COMMANDS, module_of
from dflash_jax.errors import InputError
from tests.docs.pages import PAGES, ROOT, blocks, commands

WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]
SHELL = [block for page in PAGES for block in blocks(page, "bash")]
ADDRESS = "http://127.0.0.1:30000"


def name(page) -> str:
    return page.name


def place(block) -> str:
    return f"{block.page.name}:{block.line}"


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name)
def test_python_of_a_page_runs_from_top_to_bottom(page, request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for block in blocks(page, "python"):
        code = block.code
        if ADDRESS in code:
            code = code.replace(ADDRESS, request.getfixturevalue("server").url)
        # Errors then name the page's own line.
        exec(compile("\n" * (block.line - 1) + code, str(page), "exec"), namespace)


def parse(command: str, words: list[str]) -> None:
    if command == "serve":
        importlib.import_module("dflash_jax.options.serve").parse(words)
        return
    module_of(command).make_parser().parse_args(words)


def check_script(path: str, words: list[str]) -> None:
    """A script's options are in its own file, or in a module of `tools` that it imports."""
    assert (ROOT / path).exists(), path
    files = [ROOT / path, *(ROOT / "tools").rglob("*.py")]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    for option in (word for word in words if word.startswith("--")):
        assert f'"{option}"' in text, f"{path} has no {option}"


@pytest.mark.parametrize("block", SHELL, ids=place)
def test_commands_of_a_page_are_known_and_their_options_too(block, monkeypatch, tmp_path):
    (tmp_path / "keys.txt").write_text("key\n")
    (tmp_path / "admin.txt").write_text("other\n")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    for words in commands(block):
        program, *rest = words
        if program.rpartition("/")[2] == "dflash":
            command, *options = rest
            assert command in COMMANDS
            parse(command, options)
        elif words[:2] == ["python", "-m"]:
            importlib.import_module(words[2])
        elif program == "python":
            check_script(rest[0], rest[1:])


@pytest.mark.parametrize("block", [block for block in SHELL if block.runs], ids=place)
def test_commands_that_are_marked_to_run_do(block, tmp_path):
    script = 'dflash() { command=$1; shift; "$PYTHON" -m "dflash_jax.$command" "$@"; }\n' + block.code
    environment = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_requests_by_curl_are_answered(server):
    """Every curl of the pages, with the test's server in place of the one that they name."""
    bodies = 0
    for block in SHELL:
        for words in commands(block):
            if words[0] != "curl":
                continue
            url = words[1].replace(ADDRESS, server.url)
            headers = dict([words[words.index("-H") + 1].split(": ")])
            answer = httpx.post(url, headers=headers, content=words[words.index("-d") + 1], timeout=120)
            assert answer.status_code == 200, (words, answer.text)
            bodies += 1
    assert bodies >= 4


def test_a_wrong_option_of_a_page_would_be_seen():
    with pytest.raises(InputError, match="no-such-option"):
        parse("serve", ["--no-such-option"])

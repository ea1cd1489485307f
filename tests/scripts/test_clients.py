"""scripts/clients/check.py with a client that is not installed: a tool loop in a few lines."""

import json
import sys
from dataclasses import replace

import pytest

from tests.helpers import load_script

check = load_script("clients/check.py")

LOOP = """
import json, subprocess, sys, urllib.request
from pathlib import Path
url, task = sys.argv[1:]
messages = [{"role": "user", "content": task}]
parameters = {"type": "object", "properties": {name: {"type": "string"} for name in ("path", "old", "new", "command")}}
names = "read_file", "edit_file", "run_command"
tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in names]
while True:
    body = json.dumps({"model": "qwen", "messages": messages, "tools": tools}).encode()
    request = urllib.request.Request(url + "/v1/chat/completions", body, {"Content-Type": "application/json"})
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages.append(message)
    for call in message.get("tool_calls") or ():
        given = json.loads(call["function"]["arguments"])
        match call["function"]["name"]:
            case "read_file":
                result = Path(given["path"]).read_text()
            case "edit_file":
                result = Path(given["path"]).read_text().replace(given["old"], given["new"])
                Path(given["path"]).write_text(result)
            case "run_command":
                result = str(subprocess.run(given["command"], shell=True).returncode)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    if not message.get("tool_calls"):
        print(message["content"])
        break
"""


INSTALLED = check.Installation("loop", ("loop==1",))
CLIENT = check.Client("loop", INSTALLED, "/v1/chat/completions", check.loop_script, lambda session: [])


def test_a_good_session_is_recorded_and_cut_down(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "CACHE", tmp_path)
    monkeypatch.setattr(check.Installation, "install", lambda self: None)
    command = lambda session: [sys.executable, "-c", LOOP, session.url, session.task]  # noqa: E731
    found = check.run(replace(CLIENT, command=command), tmp_path / "record", tmp_path / "fixtures")
    assert not found.problems
    assert (found.turns, found.thoughts) == (6, "5 of 5")
    assert found.row.endswith("| good |")
    assert len(list((tmp_path / "record/loop").iterdir())) == 6
    session = json.loads((tmp_path / "fixtures/loop.json").read_text())
    assert len(session["turns"]) == 6


def exchange(cached: int, **fields):
    body = json.dumps({"tools": [{}], "messages": [{"content": "loop"}]})
    answer = json.dumps({"prompt_tokens": 1000, "cached_tokens": cached})
    return replace(check.Exchange("POST", "/v1", {}, body, 200, answer), **fields)


def test_what_is_wrong_with_a_session_is_told():
    script, said = ["<tool_call>", "x"], f"{check.LAST}1."
    good = [exchange(0), exchange(999)]
    assert not check.judged(CLIENT, script, good, said, [])[0].problems
    title = exchange(0, body='{"messages": [{"content": "loop"}]}')
    assert check.judged(CLIENT, script, [title, *good], said, [])[1] == good
    for exchanges, words, problem in (
        (good[:1], said, "1 turns of 2"),
        ([*good, exchange(0, status=400)], said, "POST /v1: 400"),
        ([exchange(0), exchange(100)], said, "a turn finds less than 90% of the last one's prompt"),
        (good, "", "the last words are missing"),
    ):
        (found,) = check.judged(CLIENT, script, exchanges, words, [])[0].problems
        assert found.startswith(problem)


def test_a_client_that_cannot_be_installed_is_told(monkeypatch):
    def install(self):
        raise check.subprocess.CalledProcessError(1, "pip", b"first\nno such version\n")

    monkeypatch.setattr(check.Installation, "install", install)
    found = check.run(CLIENT, None, None)
    assert found.problems == ["cannot be installed: no such version"]
    assert "loop==1" in found.row


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        ('{"prompt_tokens":7,"x":{"cached_tokens": 3}}', (7, 3)),
        ('{"input_tokens": 4, "cache_read_input_tokens": 3}', (7, 3)),
        ('{"prompt_tokens": 7}', None),
    ],
)
def test_tokens_of_an_answer(answer, tokens):
    assert check.Exchange("POST", "/", {}, "", 200, answer).tokens == tokens

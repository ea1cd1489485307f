"""Sessions of agents, as scripts/clients/check.py records them: each is asked again, turn by turn."""

import json
import re
from pathlib import Path

import pytest

from dflash_jax import LLM
from dflash_jax.engine.service import AsyncEngine
from dflash_jax.server.engine_host import in_process
from dflash_jax.server.serving import Serving
from tests.server.conftest import Running, hosted
from tools.mock_runner import MockDevice
from tools.recorded import bodies, names

HERE = Path(__file__).parent
SESSIONS = {path.stem: json.loads(path.read_text()) for path in sorted((HERE / "recorded").iterdir())}
POSITIONS = 65536


@pytest.fixture(scope="module")
def scripted():
    template = HERE.parent.parent / "scripts/clients/template.jinja"
    llm = LLM(chat_template=str(template), hf_overrides={"max_position_embeddings": POSITIONS})
    scripts = {f"Session: {name}.": session["script"] for name, session in SESSIONS.items()}
    host = hosted(llm, AsyncEngine(MockDevice(4, POSITIONS, 0.0, 8, scripts=scripts).engine(llm)).start())
    running = Running(Serving(llm, in_process(host), ["qwen"]), host)
    yield running
    running.stop()
    host.engine.stop()


def events(text: str) -> list[dict]:
    """Of a stream, or the answer itself."""
    if not text.startswith(("data:", "event:")):
        return [json.loads(text)]
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def of_chat(text: str) -> tuple[str, list]:
    """(text, calls) of an answer, as clients read it."""
    content, calls = "", {}
    for event in events(text):
        for choice in event["choices"]:
            said = choice.get("delta") or choice["message"]
            content += said.get("content") or ""
            for place, call in enumerate(said.get("tool_calls") or ()):
                known = calls.setdefault(call.get("index", place), ["", ""])
                known[0] += call["function"].get("name") or ""
                known[1] += call["function"].get("arguments") or ""
    return content, [(name, json.loads(arguments)) for name, arguments in calls.values()]


def of_responses(text: str) -> tuple[str, list]:
    """See `of_chat`."""
    last = events(text)[-1]
    items = last.get("output") or [e["item"] for e in events(text) if e["type"] == "response.output_item.done"]
    content, calls = "", []
    for item in items:
        match item["type"]:
            case "message":
                content += "".join(part["text"] for part in item["content"])
            case "function_call":
                calls.append((item["name"], json.loads(item["arguments"])))
            case "custom_tool_call":
                calls.append((item["name"], {"input": item["input"]}))
    return content, calls


def of_messages(text: str) -> tuple[str, list]:
    """See `of_chat`."""
    content, calls = "", []
    for event in events(text):
        match event:
            case {"type": "content_block_start", "content_block": {"type": "tool_use", "name": name}}:
                calls.append([name, ""])
            case {"delta": {"type": "input_json_delta", "partial_json": piece}}:
                calls[-1][1] += piece
            case {"delta": {"type": "text_delta", "text": piece}}:
                content += piece
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


READERS = {"/v1/chat/completions": of_chat, "/v1/responses": of_responses, "/v1/messages": of_messages}


def of_script(text: str) -> tuple[str, list]:
    """What the model says in a turn; see `of_chat`."""
    said, *calls = text.partition("</think>\n\n")[2].split("<tool_call>\n")
    found = []
    for call in calls:
        name = re.match("<function=(.+)>", call)[1]
        found.append((name, dict(re.findall("<parameter=(.+?)>\n(.*?)\n</parameter>", call, re.DOTALL))))
    return said.strip(), found


def as_texts(calls: list) -> list:
    """Calls, whose arguments are texts as in a script."""
    return [(n, {k: v if isinstance(v, str) else json.dumps(v) for k, v in found.items()}) for n, found in calls]


def tokens(text: str) -> tuple[int, int] | None:
    """(tokens of the prompt, of which from the prefix cache), if an answer says it."""
    keys = "prompt_tokens|input_tokens", "cached_tokens|cache_read_input_tokens"
    prompt, cached = (re.findall(f'"(?:{key})": ?(\\d+)', text) for key in keys)
    if not cached:
        return None
    return int(prompt[-1]) + ("cache_read" in text) * int(cached[-1]), int(cached[-1])


@pytest.mark.parametrize("name", SESSIONS)
def test_a_session_goes_on_as_it_was_recorded(scripted, name):
    session = SESSIONS[name]
    read = READERS[session["path"].partition("?")[0]]
    known, last = {}, (0, 0)
    for turn, body in enumerate(bodies(session, known)):
        # With "auto" the times of rounds decide whether the drafter's context is a part of cached prefixes.
        body |= {"block_size": 8}
        answer = scripted.http.post(session["path"], json=body, headers=session["headers"])
        assert answer.status_code == 200, answer.text
        known |= names(answer.text, turn)
        expected, expected_calls = of_script(session["script"][turn])
        said, calls = read(answer.text)
        assert re.sub(r"\d+\.(?=\W*$)", "{thoughts}.", said.strip()) == expected
        assert as_texts(calls) == expected_calls
        if count := tokens(answer.text):
            # All of a prompt but its last token is kept. A summary takes the place of a conversation.
            length = session["turns"][turn]["length"]
            assert count[1] >= last[1] - 1 or length < last[0]
            last = length, count[0]
    assert turn == len(session["script"]) - 1

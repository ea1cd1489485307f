"""``/v1/responses`` as Codex asks it: its tools, its items, and what its parser reads of a stream."""

import json

import pytest

from dflash_jax.server.chat_schema import Tool
from dflash_jax.server.errors import ApiError
from dflash_jax.server.responses_input import InputItem, ResponsesTool, Tools, as_function_item, as_messages
from tests.server.conftest import OFF

TOOLS = [
    {"type": "function", "name": "exec_command", "description": "Runs a command.", "strict": False,
     "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}},
    {"type": "custom", "name": "apply_patch", "description": "Edits files.",
     "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
    {"type": "namespace", "name": "mcp__docs", "description": "Docs.",
     "tools": [{"type": "function", "name": "search", "parameters": {"type": "object", "properties": {}}}]},
    {"type": "web_search", "external_web_access": True},
    {"type": "local_shell"},
    {"type": "tool_search"},
    {"type": "image_generation"},
]  # fmt: skip
TEXT = "input_text"
INPUT = [
    {"type": "message", "role": "developer", "id": "msg_1", "content": [{"type": TEXT, "text": "rules"}]},
    {"type": "message", "role": "developer", "content": [{"type": TEXT, "text": "a"}, {"type": TEXT, "text": "b"}]},
    {"type": "message", "role": "user", "content": [{"type": TEXT, "text": "<environment_context/>"}]},
    {"type": "message", "role": "user", "content": [{"type": TEXT, "text": "Fix it."}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "gAAAA"},
    {"type": "function_call", "call_id": "c1", "name": "exec_command", "arguments": '{"cmd": "ls"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
    {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "*** Begin"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
    {"type": "function_call", "call_id": "c3", "namespace": "mcp__docs", "name": "search", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c3", "output": [{"type": TEXT, "text": "found"}]},
    {"type": "local_shell_call", "call_id": "c4", "status": "completed", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "local_shell_call_output", "call_id": "c4", "output": "a.py"},
    {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
    {"type": "compaction", "encrypted_content": "gAAAA"},
    {"type": "message", "role": "developer", "content": [{"type": TEXT, "text": "late"}]},
    {"type": "message", "role": "user", "content": [{"type": TEXT, "text": "And now?"}]},
]
BODY = {
    "input": INPUT,
    "tools": TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "b6a1",
    "client_metadata": {"x": "1", "turn": "{}"},
    "chat_template_kwargs": OFF,
    "max_output_tokens": 60,
    "temperature": 0,
}


def events(server, **body) -> list[dict]:
    with server.http.stream("POST", "/v1/responses", json=BODY | body | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        return [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]


def test_a_request_of_codex_is_answered(quiet):
    answer = quiet.post("/v1/responses", **BODY)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["status"] in ("completed", "incomplete")
    assert [tool["type"] for tool in found["tools"]] == [tool["type"] for tool in TOOLS]
    note = answer.headers["x-dflash-note"]
    assert all(name in note for name in ("web_search", "local_shell", "tool_search", "image_generation"))


def test_items_are_messages_of_a_chat():
    messages = as_messages(None, [as_function_item(InputItem(**item)) for item in INPUT])
    roles = [message["role"] for message in messages]
    assert roles == ["developer"] * 2 + ["user"] * 2 + ["assistant", "tool"] * 4 + ["developer", "user"]
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("exec_command", {"cmd": "ls"}),
        ("apply_patch", {"input": "*** Begin"}),
        ("mcp__docs__search", {}),
        ("local_shell", {"type": "exec", "command": ["ls"]}),
    ]
    assert messages[4]["reasoning_content"] == "Hm."
    assert not any("gAAAA" in str(message) for message in messages)


def test_tools_are_functions_by_flat_names():
    tools = Tools.of([ResponsesTool(**tool) for tool in TOOLS])
    names = [tool[tool["type"]]["name"] for tool in tools.functions]
    assert names == ["exec_command", "apply_patch", "mcp__docs__search"]
    assert (tools.customs, tools.namespaces) == ({"apply_patch"}, {"mcp__docs__search": ("mcp__docs", "search")})
    assert "start: /.+/" in Tool(**tools.functions[1]).function.description


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "magic", "name": "x"}, "tools[0].type"),
        ({"type": "function"}, "tools[0].name"),
        ({"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "x"}]}, "tools[0].tools[0]"),
        ({"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "x"}] * 10**5}, "tools"),
    ],
)
def test_other_tools_are_refused_by_name(tool, param):
    with pytest.raises(ApiError) as error:
        Tools.of([ResponsesTool(**tool)])
    assert error.value.param == param


def test_a_custom_tool_is_called_with_a_text(quiet):
    found = events(quiet, tool_choice={"type": "custom", "name": "apply_patch"}, max_output_tokens=200, temperature=0.9)
    kinds = [event["type"] for event in found]
    (done,) = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert (done["type"], done["name"]) == ("custom_tool_call", "apply_patch")
    assert isinstance(done["input"], str)
    assert done["id"].startswith("ctc_")
    (delta,) = [event for event in found if event["type"] == "response.custom_tool_call_input.delta"]
    assert (delta["delta"], delta["item_id"]) == (done["input"], done["id"])
    assert "response.function_call_arguments.delta" not in kinds
    # It goes on.
    output = {"type": "custom_tool_call_output", "call_id": done["call_id"], "output": "ok"}
    later = quiet.post("/v1/responses", **BODY | {"input": [*INPUT, done, output]})
    assert later.status_code == 200, later.text


def test_a_function_of_a_namespace_is_called_by_both_names(quiet):
    choice = {"type": "function", "name": "mcp__docs__search"}
    found = events(quiet, tool_choice=choice, max_output_tokens=100, store=True)
    (done,) = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert (done["type"], done["namespace"], done["name"]) == ("function_call", "mcp__docs", "search")
    # Also where the conversation is the server's.
    output = {"type": "function_call_output", "call_id": done["call_id"], "output": "ok"}
    body = BODY | {"input": [output], "previous_response_id": found[-1]["response"]["id"]}
    assert quiet.post("/v1/responses", **body).status_code == 200


def test_a_request_without_input_is_answered_by_its_instructions(quiet):
    answer = quiet.post("/v1/responses", input=[], instructions="Be brief.", max_output_tokens=4)
    assert answer.status_code == 200, answer.text
    assert quiet.post("/v1/responses", input=[], max_output_tokens=4).status_code == 400

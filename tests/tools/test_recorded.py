"""Sessions are recorded without the client's texts, and asked again with the server's own names."""

import json

from tools.recorded import as_text, bodies, names, recorded

TASK, LONG = "Fix a.py. Session: x.", "You are an agent, and this is what you must know."
SCRIPT = [
    "Hm.\n</think>\n\nI look.\n\n<tool_call>\n<function=read>\n</function>\n</tool_call>",
    "So.\n</think>\n\nDone.",
]


def tool(name: str) -> dict:
    parameters = {"type": "object", "properties": {"p": {"type": "string", "description": LONG}}}
    return {"type": "function", "function": {"name": name, "description": LONG, "parameters": parameters}}


def exchange(messages: list, answer: str, **fields) -> dict:
    tools = [tool("read"), tool("other"), {"type": "web_search"}]
    body = {"model": "m", "messages": messages, "tools": tools} | fields
    return {
        "path": "/v1/x",
        "headers": {"Anthropic-Beta": "b", "Cookie": LONG},
        "body": json.dumps(body),
        "answer": answer,
    }


FIRST = [{"role": "system", "content": LONG}, {"role": "user", "content": f"{LONG} {TASK} {LONG}"}]
LATER = [
    {"role": "assistant", "content": "I look.", "tool_calls": [{"id": "call_1f", "function": {"name": "read"}}]},
    {"role": "tool", "tool_call_id": "call_1f", "content": f"{LONG} /tmp/folder"},
]
EXCHANGES = [
    exchange(FIRST, '{"id": "chat-1", "x": {"id": "call_1f"}}', user="one text"),
    # The client changes what it said.
    exchange([FIRST[0] | {"content": f"{LONG}!"}, *FIRST[1:], *LATER], '{"id": "chat-2"}', user="another text"),
]


def test_a_session_has_its_shape_and_not_the_texts_of_the_client():
    session = recorded(EXCHANGES, SCRIPT, TASK, "/tmp/folder")
    text = as_text(session)
    assert json.loads(text) == json.loads(json.dumps(session))
    assert LONG not in text
    assert "/tmp/folder" not in text
    assert session["headers"] == {"anthropic-beta": "b"}
    first, second = bodies(session, {"<call 0.1>": "call_9"})
    assert [each["function"]["name"] for each in first["tools"] if "function" in each] == ["read"]
    assert first["tools"][-1] == {"type": "web_search"}
    assert first["messages"][1]["content"] == TASK
    assert first["user"] != second["user"]
    assert first["messages"][0] != second["messages"][0]
    assert first["messages"][1] == second["messages"][1]
    assert second["messages"][2]["tool_calls"][0]["id"] == second["messages"][3]["tool_call_id"] == "call_9"
    assert second["messages"][2]["content"] == "I look."


def test_names_of_two_servers_have_the_same_placeholders():
    answer = (
        '{"id": "msg_%s", "a": [{"id": "call_%s"}, {"call_id": "call_%s"}, {"signature": "%s"}], "item_id": "msg_%s"}'
    )
    first, second = (names(answer % (x, x, f"{x}2", f"sig{x}", x), 3) for x in ("a", "b"))
    assert first.keys() == second.keys() == {"<msg 3.1>", "<call 3.1>", "<call 3.2>", "<signature 3.1>"}
    assert second["<call 3.2>"] == "call_b2"

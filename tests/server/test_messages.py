"""/v1/messages, driven by Anthropic's own client."""

import base64
import json
import re

import anthropic
import pytest

from dflash_jax.server import prepare
from dflash_jax.server.conversation import Delta
from dflash_jax.server.engine_host import EngineHost, in_process
from dflash_jax.server.errors import ApiError
from dflash_jax.server.messages import Content
from dflash_jax.server.messages_input import (
    Block,
    MessagesRequest,
    MessagesTool,
    Tools,
    TurnMessage,
    as_chat,
    as_messages,
)
from dflash_jax.server.serving import Serving
from dflash_jax.server.tools import CallDelta
from tests.frontend.test_messages import STRICT
from tests.server.conftest import MESSAGES, NAME, OFF, SCHEMA, TOOL, Running, alone

HI = [{"role": "user", "content": "hi"}]
GREEDY = {"extra_body": {"temperature": 0}}
THINKS_NOT = {"type": "disabled"}
FUNCTION = TOOL["function"]
READ = {"name": "read_file", "description": "Reads a file", "input_schema": FUNCTION["parameters"]}


@pytest.fixture
def client(quiet):
    with anthropic.Anthropic(base_url=quiet.url, api_key="EMPTY", max_retries=0) as client:
        yield client


def test_an_answer_is_the_librarys(client, llm):
    expected = alone(llm, max_tokens=60)
    thought, _, answer = expected.text.partition("</think>")
    options = {"model": NAME, "messages": MESSAGES, "max_tokens": 60, **GREEDY}
    message = client.messages.create(**options)
    blocks = {block.type: block for block in message.content}
    assert blocks["thinking"].thinking == thought.strip()
    assert blocks["thinking"].signature
    assert "".join(b.text for b in message.content if b.type == "text") == answer.lstrip()
    assert message.stop_reason == ("end_turn" if expected.finish_reason == "stop" else "max_tokens")
    assert message.usage.output_tokens == len(expected.token_ids)
    prompt = message.usage.input_tokens + message.usage.cache_read_input_tokens
    assert prompt == len(llm.encode_chat(MESSAGES))
    plain = client.messages.create(**options | {"extra_body": {"temperature": 0, "block_size": 1}})
    assert plain.content == message.content
    with client.messages.stream(**options) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert events[0] == "message_start"
    assert events[-2:] == ["message_delta", "message_stop"]
    assert streamed.model_dump(exclude={"id", "usage"}) == message.model_dump(exclude={"id", "usage"})
    assert streamed.usage.output_tokens == message.usage.output_tokens
    assert streamed.usage.output_tokens_details.thinking_tokens == expected.token_ids.index(*llm.encode("</think>")) + 1
    hidden = client.messages.create(**options, thinking={"type": "adaptive", "display": "omitted"})
    assert hidden.content[0].thinking == ""
    assert hidden.content[1:] == message.content[1:]


def test_models_have_anthropics_shape_for_its_client(client, quiet):
    models = client.models.list()
    assert [model.id for model in models] == [NAME, "tiny"]
    assert (models.has_more, models.first_id, models.last_id) == (False, NAME, "tiny")
    one = client.models.retrieve(NAME)
    assert (one.type, one.display_name, one.created_at.utcoffset().seconds) == ("model", NAME, 0)
    assert one == models.data[0]
    with pytest.raises(anthropic.NotFoundError) as error:
        client.models.retrieve("other")
    assert (error.value.body["type"], error.value.body["error"]["type"]) == ("error", "not_found_error")
    # OpenAI's without the header.
    assert quiet.http.get("/v1/models").json()["object"] == "list"
    assert quiet.http.get("/v1/models/other").json()["error"]["code"] == 404


def test_without_thinking_and_up_to_a_stop_sequence(client, llm):
    expected = alone(llm, thinking=False, max_tokens=60).text
    options = {"model": NAME, "messages": MESSAGES, "max_tokens": 60, "thinking": THINKS_NOT, **GREEDY}
    message = client.messages.create(**options)
    assert [b.type for b in message.content] == ["text"]
    assert message.content[0].text == expected
    stop = expected[20:24]
    cut = client.messages.create(**options, stop_sequences=[stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == expected.partition(stop)[0]
    with client.messages.stream(**options, stop_sequences=[stop]) as stream:
        assert "".join(stream.text_stream) == cut.content[0].text
        assert stream.get_final_message().stop_sequence == stop


@pytest.mark.parametrize("choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool"}])
def test_tools_there_and_back(client, choice):
    if choice["type"] == "tool":
        choice = {**choice, "name": "read_file"}
    options = {"model": NAME, "max_tokens": 400, "tools": [READ], "thinking": THINKS_NOT, **GREEDY}
    asked = client.messages.create(**options, messages=HI, tool_choice=choice)
    (call,) = asked.content
    assert (call.type, call.name, asked.stop_reason) == ("tool_use", "read_file", "tool_use")
    assert "path" in call.input
    with client.messages.stream(**options, messages=HI, tool_choice=choice) as stream:
        (again,) = stream.get_final_message().content
    assert again.input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "x = 1"}]}
    turns = [*HI, {"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(**options | {"max_tokens": 8}, messages=turns, tool_choice={"type": "none"})
    assert [block.type for block in answer.content] == ["text"]
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 8)


def test_a_turn_that_is_continued(client, quiet):
    turns = [*MESSAGES, {"role": "assistant", "content": "def clamp(value"}]
    answer = client.messages.create(model=NAME, max_tokens=20, messages=turns, thinking=THINKS_NOT, **GREEDY)
    options = {"continue_final_message": True, "add_generation_prompt": False, "chat_template_kwargs": OFF}
    expected = quiet.post("/v1/chat/completions", messages=turns, max_tokens=20, temperature=0, **options).json()
    assert answer.content[0].text == expected["choices"][0]["message"]["content"]


def test_a_form_and_the_fields_that_change_nothing(client):
    formed = client.messages.create(
        model=NAME,
        max_tokens=80,
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Say.", "cache_control": {"type": "ephemeral"}}]}
        ],
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        thinking=THINKS_NOT,
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
        metadata={"user_id": "x"},
        service_tier="auto",
        extra_headers={"anthropic-beta": "context-management-2025-06-27"},
        extra_body={"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    )
    assert set(json.loads(formed.content[0].text)) == {"kind", "n"}


def test_counted_tokens_are_those_of_the_prompt(client):
    prompts = [
        {"messages": HI},
        {"messages": HI, "system": "Be brief.", "tools": [READ]},
        {"messages": HI, "tools": [READ], "tool_choice": {"type": "none"}, "thinking": THINKS_NOT},
    ]
    for prompt in prompts:
        counted = client.messages.count_tokens(model=NAME, **prompt).input_tokens
        spent = client.messages.create(model=NAME, max_tokens=1, **prompt).usage
        assert counted == spent.input_tokens + spent.cache_read_input_tokens


def test_history_as_a_chat_has_it():
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "redacted_thinking", "data": "?"},
                {"type": "text", "text": "c", "citations": None},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}, "caller": {"type": "direct"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "1",
                    "is_error": True,
                    "content": [{"type": "text", "text": "d", "cache_control": {"type": "ephemeral"}}],
                },
                {"type": "text", "text": "e"},
            ],
        },
    ]
    body = MessagesRequest(max_tokens=1, messages=turns, system=[{"type": "text", "text": "z"}])
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert as_messages(body) == [
        {"role": "system", "content": "z"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c", "reasoning_content": "t", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "d"},
        {"role": "user", "content": "e"},
    ]


def read(*turns, **body) -> list[dict]:
    return as_messages(MessagesRequest(max_tokens=1, messages=list(turns), **body))


def test_documents_and_results_of_searches_are_text():
    blocks = [
        document(type="text", media_type="text/plain", data="one") | {"title": "T", "context": "C"},
        document(type="content", content=[{"type": "text", "text": "two"}]),
        document(type="content", content="three"),
        document(type="base64", media_type="text/markdown", data=base64.b64encode("vier ö".encode()).decode()),
        {"type": "search_result", "source": "https://a", "title": "S", "content": [{"type": "text", "text": "five"}]},
    ]
    (message,) = read(USER | {"content": blocks})
    assert message["content"] == (
        "<document>\nTitle: T\nContext: C\none\n</document>\n"
        "<document>\ntwo\n</document>\n<document>\nthree\n</document>\n<document>\nvier ö\n</document>\n"
        "<search_result>\nTitle: S\nSource: https://a\nfive\n</search_result>\n"
    )
    result = {"type": "tool_result", "tool_use_id": "1", "content": blocks}
    assert read(USER | {"content": [result]})[0]["content"] == message["content"]


def test_blocks_of_other_servers_are_left_out_with_a_note(quiet):
    said = [
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": {"error_code": "x"}},
        {"type": "mcp_tool_use", "id": "m1", "name": "f", "server_name": "s", "input": {}},
        {"type": "mcp_tool_result", "tool_use_id": "m1", "is_error": False, "content": [{"type": "text", "text": "r"}]},
        {"type": "code_execution_tool_result", "tool_use_id": "c", "content": {"stdout": "1"}},
        {"type": "text", "text": "It is so."},
    ]
    turns = [*HI, {"role": "assistant", "content": said}, *HI]
    assert read(*turns)[1] == {"role": "assistant", "content": "It is so."}
    found = quiet.post("/v1/messages", messages=turns, max_tokens=1)
    assert found.status_code == 200, found.text
    assert "server_tool_use, web_search_tool_result" in found.headers["x-dflash-note"]


def test_empty_turns_of_clients():
    empty = [{"type": "text", "text": ""}]
    turns = [USER | {"content": []}, {"role": "assistant", "content": []}, USER | {"content": empty}]
    turns += [{"role": "system", "content": [], "output_config": {"effort": "low"}}]
    turns += [{"role": "assistant", "content": empty}]
    expected = [USER | {"content": ""}, {"role": "assistant", "content": ""}, USER | {"content": ""}]
    assert read(*turns) == expected
    with pytest.raises(ApiError, match="messages is empty"):
        read({"role": "assistant", "content": ""})


def test_an_open_call_is_not_continued(quiet):
    """Claude Code counts the tokens of such beginnings."""
    call = {"type": "tool_use", "id": "1", "name": "read_file", "input": {"path": "a"}}
    body = {"messages": [*HI, {"role": "assistant", "content": [call]}], "tools": [READ]}
    assert not as_chat(MessagesRequest(max_tokens=1, **body)).continue_final_message
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        assert quiet.post(path, **body, max_tokens=1, stream=False).status_code == 200


def test_a_tool_is_described_where_the_conversation_refers_to_it(quiet):
    """The beginning stays as it is, however many tools there are, and the tool can be called."""
    late = READ | {"name": "late", "defer_loading": True}
    found = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "tool_reference", "tool_name": "late"}]}
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "read_file", "input": {}}]}
    body = {"messages": [*HI, call, USER | {"content": [found, *[found["content"][0]] * 2]}], "max_tokens": 200}
    body |= {"thinking": THINKS_NOT, "temperature": 0}
    messages = as_messages(MessagesRequest(**body, tools=[READ, late]), Tools.of([MessagesTool(**late)]))
    shown = json.dumps(
        {key: FUNCTION[key] for key in ("description",)} | {"name": "late", "parameters": FUNCTION["parameters"]}
    )
    assert messages[2]["content"] == f"<functions>\n<function>{shown}</function>\n</functions>\n"
    assert messages[3]["content"] == "<function>late</function>\n" * 2
    options = {"messages": HI, "max_tokens": 1}
    counts = [
        quiet.post("/v1/messages/count_tokens", **options, tools=tools).json()["input_tokens"]
        for tools in ([READ], [READ, late], [late, READ], [READ, READ | {"name": "late"}])
    ]
    assert counts[0] == counts[1] == counts[2] < counts[3]
    called = quiet.post("/v1/messages", **body, tools=[READ, late], tool_choice={"type": "tool", "name": "late"})
    assert called.json()["content"][0]["name"] == "late"


@pytest.mark.parametrize("role", ["system", "user"])
def test_a_message_may_add_and_remove_tools(quiet, role):
    reference = {"type": "tool_reference", "name": "read_file"}
    blocks = [addition(READ | {"name": "late"}), {"type": "tool_removal", "tool": reference}]
    blocks += [addition({"type": "web_search_20250305", "name": "web_search"})]
    turns = [*HI, {"role": role, "content": blocks, "clear_at": "next_user_message"}]
    options = {"max_tokens": 200, "thinking": THINKS_NOT, "tools": [READ], "temperature": 0}
    chat = as_chat(MessagesRequest(messages=turns, **options))
    text = chat.messages[-1].content
    assert "available now:\n<functions>\n<function>{" in text
    assert "not available any more: read_file" in text
    assert [(tool.function.name, tool.defer_loading) for tool in chat.tools] == [("read_file", False), ("late", True)]
    # One that is removed by its definition is not added.
    removed = addition(READ | {"name": "old"}) | {"type": "tool_removal"}
    chat = as_chat(MessagesRequest(messages=[*HI, {"role": role, "content": [removed]}], **options))
    assert "not available any more: old" in chat.messages[-1].content
    assert [tool.function.name for tool in chat.tools] == ["read_file"]
    # One that is there already stays at the beginning as it was.
    again = [*HI, {"role": role, "content": [addition(READ | {"description": "Reads well"})]}]
    tools = as_chat(MessagesRequest(messages=again, **options)).tools
    assert [(tool.function.description, tool.defer_loading) for tool in tools] == [
        ("Reads a file", False),
        ("Reads well", True),
    ]
    called = quiet.post("/v1/messages", messages=turns, **options, tool_choice={"type": "tool", "name": "late"})
    assert called.json()["content"][0]["name"] == "late"


def test_a_thought_that_is_left_out_comes_back_in_its_signature(quiet):
    options = {"messages": MESSAGES, "max_tokens": 60, "temperature": 0}
    shown, hidden = (
        quiet.post("/v1/messages", **options, thinking={"type": "adaptive", "display": display}).json()["content"][0]
        for display in ("summarized", "omitted")
    )
    assert (hidden["thinking"], shown["signature"]) == ("", "unsigned")
    assert shown["thinking"]
    turns = [read(*MESSAGES, {"role": "assistant", "content": [block]}, *HI) for block in (shown, hidden)]
    assert turns[0] == turns[1]
    assert turns[0][1]["reasoning_content"] == shown["thinking"]
    for foreign in ("EqQBCgIYAhIM", "dflash:?", "dflash:/w==", None, 5):
        block = {"type": "thinking", "thinking": "", "signature": foreign}
        assert "reasoning_content" not in read(*HI, {"role": "assistant", "content": [block]}, *HI)[1]


@pytest.mark.parametrize(
    ("thinking", "is_on", "budget"),
    [
        ({"type": "adaptive"}, True, None),
        ({"type": "adaptive", "budget_tokens": 0}, True, None),
        ({"type": "adaptive", "budget_tokens": -5, "display": "summarized"}, True, None),
        ({"type": "enabled", "budget_tokens": 3}, True, 3),
        ({"type": "enabled"}, True, None),
        ({"type": "disabled", "budget_tokens": 1024, "display": "of tomorrow"}, False, None),
    ],
)
def test_thinking_of_any_kind(quiet, thinking, is_on, budget):
    chat = as_chat(MessagesRequest(max_tokens=1, messages=HI, thinking=thinking))
    assert chat.template_options["enable_thinking"] is is_on
    assert prepare.budget(chat.budgets) == budget
    assert quiet.post("/v1/messages", messages=HI, max_tokens=1, thinking=thinking).status_code == 200


def test_what_anthropics_servers_do_is_left_out_with_notes(quiet):
    found = quiet.post(
        "/v1/messages?beta=true",
        messages=HI,
        max_tokens=1,
        tools=[
            SEARCH,
            {"type": "mcp_toolset", "mcp_server_name": "s"},
            {"type": "tool_search_tool_regex_20251119", "name": "tool_search"},
            READ | {"eager_input_streaming": True, "allowed_callers": ["direct"], "cache_control": {}, "strict": None},
        ],
        context_management={"edits": [{"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": 3}}]},
        output_config={"effort": "xhigh", "task_budget": {"type": "tokens", "total": 20000}},
        mcp_servers=[{"type": "url", "url": "https://a.example", "name": "s"}],
        betas=["of-tomorrow-2030-01-01"],
        metadata={"user_id": "{}"},
        speed="fast",
        container="c",
    )
    assert found.status_code == 200, found.text
    notes = found.headers.get_list("x-dflash-note")
    for words in (
        "web_search_20250305",
        "mcp_toolset",
        "tool_search_tool_regex",
        "clear_tool_uses",
        "task_budget",
        "mcp_s",
    ):
        assert any(words in note for note in notes), words
    keeps = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    found = quiet.post("/v1/messages", messages=HI, max_tokens=1, context_management=keeps)
    assert "x-dflash-note" not in found.headers
    chat = as_chat(MessagesRequest(messages=HI, max_tokens=1, context_management=keeps))
    assert chat.template_options["preserve_thinking"] is True


def test_names_of_tools_may_have_128_characters(quiet):
    tool = READ | {"name": "mcp__" + "x" * 123}
    found = quiet.post("/v1/messages", messages=HI, tools=[tool], max_tokens=1)
    assert found.status_code == 200, found.text
    found = quiet.post("/v1/messages", messages=HI, tools=[tool | {"name": "x" * 129}], max_tokens=1)
    assert found.status_code == 400
    assert found.json()["error"]["message"].startswith("tools[0].name")


def test_blocks_of_an_answer():
    """Arguments that are no object are wrapped, and text behind a call is a block of its own."""
    content = Content()
    events = content.take(Delta("hm", "", [CallDelta(0, "", "call_1", "f"), CallDelta(0, '{"x"')]))
    events += content.take(Delta("", "Here.", [CallDelta(0, ": }")]))
    events += content.close()
    assert [b["type"] for b in content.items] == ["thinking", "tool_use", "text"]
    assert content.items[1]["input"] == {"INVALID_JSON": '{"x": }'}
    names = [(e["type"].removeprefix("content_block_"), e["index"]) for e in events]
    assert names == [
        *[("start", 0), ("delta", 0), ("delta", 0), ("stop", 0)],
        *[("start", 1), ("delta", 1), ("delta", 1), ("stop", 1)],
        *[("start", 2), ("delta", 2), ("stop", 2)],
    ]


def document(**source) -> dict:
    return {"type": "document", "source": source}


def addition(definition: dict) -> dict:
    return {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": definition}}


SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
USER = {"role": "user"}
BAD = {
    "no max_tokens": ({"max_tokens": None}, "max_tokens"),
    "no messages": ({"messages": []}, "messages"),
    "an unknown field": ({"best_guess": 1}, "best_guess is not supported"),
    "an image": ({"messages": [USER | {"content": [IMAGE]}]}, "messages[0].content[0].type is 'image'"),
    "a PDF": (
        {"messages": [USER | {"content": [document(type="base64", media_type="application/pdf", data="AAAA")]}]},
        "messages[0].content[0].source is 'base64' of application/pdf",
    ),
    "a document by its address": (
        {"messages": [USER | {"content": [document(type="url", url="https://a.example")]}]},
        "messages[0].content[0].source is 'url'",
    ),
    "a document that is no base64": (
        {"messages": [USER | {"content": [document(type="base64", media_type="text/plain", data="?")]}]},
        "messages[0].content[0].source.data must be base64",
    ),
    "a document of what is no text": (
        {"messages": [USER | {"content": [document(type="content", content=[{"type": "video"}])]}]},
        "messages[0].content[0].source.content[0].type is 'video'",
    ),
    "a file": ({"messages": [USER | {"content": [{"type": "container_upload", "file_id": "f"}]}]}, "container_upload"),
    "a reference to nothing": (
        {"messages": [USER | {"content": [{"type": "tool_reference"}]}]},
        "messages[0].content[0].tool_name",
    ),
    "an addition of nothing": (
        {"messages": [*HI, {"role": "system", "content": [{"type": "tool_addition", "tool": {"type": "x"}}]}]},
        "messages[1].content[0].tool must be",
    ),
    "an addition without a name": (
        {"messages": [*HI, {"role": "system", "content": [addition({"description": "x"})]}]},
        "messages[1].content[0].tool.definition.name is missing",
    ),
    "an image as a result": (
        {"messages": [USER | {"content": [{"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}]}]},
        "messages[0].content[0].content[0].type is 'image'",
    ),
    "an image as instructions": ({"system": [IMAGE]}, "system[0].type is 'image'"),
    "a call of the user's": (
        {"messages": [USER | {"content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
        "messages[0].content[0].type is 'tool_use'",
    ),
    "a text without one": ({"messages": [USER | {"content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    "an unknown tool": ({"tools": [{"type": "magic", "name": "s"}]}, "tools[0].type is 'magic'"),
    "a tool without a name": ({"tools": [{"input_schema": {}}]}, "tools[0].name is missing"),
    "a choice of a tool that is left out": (
        {"tools": [READ, SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}},
        "this server has no web_search_20250305",
    ),
    "a tool without a schema": ({"tools": [{"name": "s"}]}, "tools[0].input_schema"),
    "a choice without tools": ({"tool_choice": {"type": "any"}}, "tool_choice"),
    "a choice without a name": ({"tools": [READ], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    "too long": ({"messages": [USER | {"content": "x " * 1500}]}, "prompt is too long: "),
    "half a character": ({"messages": [USER | {"content": "\ud800"}]}, "UTF-8"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_named_in_anthropics_shape(quiet, name):
    more, words = BAD[name]
    body = {"messages": HI, "max_tokens": 4, **more}
    answer = quiet.http.post("/v1/messages", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    value = answer.json()
    assert (value["type"], value["error"]["type"]) == ("error", "invalid_request_error")
    assert words in value["error"]["message"]
    assert value["request_id"]


def test_a_prompt_that_is_too_long_says_so_in_the_words_that_agents_know(quiet, llm):
    """Claude Code reads both numbers, and shortens the conversation."""
    for size in (1100, 10**6):
        found = quiet.post("/v1/messages", messages=[USER | {"content": "x " * size}], max_tokens=4).json()
        tokens, most = re.search(
            r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", found["error"]["message"]
        ).groups()
        assert int(tokens) > int(most) == 1023
    body = {"messages": [USER | {"content": "x " * 1500}]}
    error = quiet.post("/v1/chat/completions", **body).json()["error"]
    assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
    assert "maximum context length is 1024 tokens" in error["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_an_answer_ends_where_the_context_does(quiet, path):
    """Agents send the same max_tokens to every model."""
    found = quiet.post(path, messages=HI, max_tokens=32000, temperature=0)
    assert found.status_code == 200, found.text
    usage = found.json()["usage"]
    if path == "/v1/messages":
        total = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"]
        assert (total, found.json()["stop_reason"]) == (1024, "model_context_window_exceeded")
    else:
        assert (usage["total_tokens"], found.json()["choices"][0]["finish_reason"]) == (1024, "length")
    assert "max_tokens is 32000: " in found.headers["x-dflash-note"]


def test_ids_of_requests_are_where_the_client_looks(quiet):
    body = {"messages": HI, "max_tokens": 1}
    for path, more in (("/v1/messages", {}), ("/v1/messages/count_tokens", {}), ("/v1/messages", {"tools": 5})):
        found = quiet.post(path, **body | more)
        assert found.headers["request-id"].startswith("req_")
        if found.status_code != 200:
            assert found.json()["request_id"] == found.headers["request-id"]
    assert "request-id" not in quiet.post("/v1/chat/completions", **body).headers
    named = quiet.http.post("/v1/messages", json=body, headers={"X-Request-Id": "abc"})
    assert named.headers["request-id"] == "req_abc"


@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_the_probe_before_a_session_is_answered(quiet, method):
    assert quiet.http.request(method, "/").status_code == 200


def test_errors_that_the_client_knows(client, llm, quiet):
    with pytest.raises(anthropic.NotFoundError) as error:
        client.messages.create(model="other", max_tokens=1, messages=HI)
    assert error.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError):
        client.messages.count_tokens(model=NAME, messages=[USER | {"content": [IMAGE]}])
    body = json.dumps({"messages": [USER | {"content": "x" * (10 * 2**20)}]})
    large = quiet.http.post("/v1/messages", content=body)
    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
    warming = EngineHost(llm, quiet.host.engine, "tiny")
    running = Running(Serving(llm, in_process(warming), ["tiny"]), warming, "secret")
    try:
        refused = running.http.post("/v1/messages", json={"messages": HI, "max_tokens": 1})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        key = {"Authorization": "Bearer secret"}
        early = running.http.post("/v1/messages", json={"messages": HI, "max_tokens": 1}, headers=key)
        assert (early.status_code, early.json()["error"]["type"]) == (503, "overloaded_error")
    finally:
        running.stop()


def test_an_error_in_the_middle_of_a_stream(client, monkeypatch):
    real = Serving.pieces

    async def failing(self, row):
        async for piece in real(self, row):
            yield piece
            raise RuntimeError("the device is on fire")

    monkeypatch.setattr(Serving, "pieces", failing)
    options = {"model": NAME, "max_tokens": 60, "messages": HI, "extra_body": {"chat_template_kwargs": OFF}}
    with pytest.raises(anthropic.APIStatusError) as error, client.messages.stream(**options) as stream:
        stream.until_done()
    assert error.value.body["error"] == {"type": "api_error", "message": "internal error: RuntimeError"}
    with pytest.raises(anthropic.InternalServerError):
        client.messages.create(**options)


def test_texts_are_joined_once():
    """Adding them one by one would copy the first of 8,000 blocks 8,000 times."""

    class Text(str):
        def __radd__(self, other):
            raise AssertionError("a text is added to those before it")

    def block(text: str) -> Block:
        return Block.model_construct(type="text", text=Text(text))

    result = Block(type="tool_result", tool_use_id="1", content="r")
    turn = TurnMessage.model_construct(role="user", content=[block("a"), block("b"), result, block("c"), block("d")])
    user = [{"role": "user", "content": text} for text in ("ab", "cd")]
    tool = {"role": "tool", "tool_call_id": "1", "content": "r"}
    assert as_messages(MessagesRequest.model_construct(messages=[turn], system=None)) == [user[0], tool, user[1]]


def test_a_session_of_claude_code_keeps_its_beginning(llm):
    """Its header changes with each request, and system messages come late: what was rendered before stays as it was."""
    turns, texts = [{"role": "user", "content": "Fix it."}], []
    for i in range(3):
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={i:05x};"},
            {"type": "text", "text": "You are an agent."},
        ]
        body = MessagesRequest.model_validate({"model": NAME, "max_tokens": 9, "system": system, "messages": turns})
        messages = [message.model_dump(exclude_none=True) for message in as_chat(body).messages]
        texts.append(llm.tokenizer.render_chat(messages, chat_template=STRICT, ask=False))
        turns = [
            *turns,
            {"role": "assistant", "content": [{"type": "tool_use", "id": f"t{i}", "name": "Read", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"t{i}", "content": "text"}]},
            {"role": "system", "content": [{"type": "text", "text": f"Date: {i}"}]},
        ]
    assert texts[1].startswith(texts[0])
    assert texts[2].startswith(texts[1])
    assert "billing" not in texts[2]
    assert texts[2].count("<system-reminder>") == 2

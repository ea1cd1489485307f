"""/v1/messages, driven by Anthropic's own client."""

import json

import anthropic
import pytest

from dflash_jax.server.conversation import Delta
from dflash_jax.server.engine_host import EngineHost, in_process
from dflash_jax.server.messages import Content
from dflash_jax.server.messages_input import Block, MessagesRequest, TurnMessage, as_chat, as_messages
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


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
USER = {"role": "user"}
BAD = {
    "no max_tokens": ({"max_tokens": None}, "max_tokens"),
    "no messages": ({"messages": []}, "messages"),
    "an unknown field": ({"best_guess": 1}, "best_guess is not supported"),
    "an image": ({"messages": [USER | {"content": [IMAGE]}]}, "messages[0].content[0].type is 'image'"),
    "a document": (
        {"messages": [USER | {"content": [{"type": "document", "source": {}}]}]},
        "messages[0].content[0].type is 'document'",
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
    "no blocks": ({"messages": [USER | {"content": []}]}, "messages[0].content is empty"),
    "a call without a result": (
        {
            "messages": [
                *HI,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
            ]
        },
        "tool_result",
    ),
    "a budget alone": ({"thinking": {"type": "adaptive", "budget_tokens": 9}}, "thinking.budget_tokens"),
    "no budget": ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    "a tool of the server's": ({"tools": [{"type": "web_search_20250305", "name": "s"}]}, "tools[0].type"),
    "a tool without a schema": ({"tools": [{"name": "s"}]}, "tools[0].input_schema"),
    "a choice without tools": ({"tool_choice": {"type": "any"}}, "tool_choice"),
    "a choice without a name": ({"tools": [READ], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    "an edit of the history": (
        {"context_management": {"edits": [{"type": "compact_20260112"}]}},
        "context_management.edits[0].type",
    ),
    "too long": ({"max_tokens": 100_000}, "do not fit"),
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

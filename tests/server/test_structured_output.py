"""Structured output and tools, over HTTP."""

import json
import re

import pytest

from tests.server.conftest import MESSAGES, NAME, OFF, SCHEMA, TOOL


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("width", [1, 16])
def test_answer_follows_the_json_schema(client, thinking, width):
    found = client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        max_tokens=300,
        temperature=0.8,
        seed=5,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
        extra_body={"chat_template_kwargs": {"enable_thinking": thinking}, "block_size": width},
    )
    value = json.loads(found.choices[0].message.content)
    assert set(value) == {"kind", "n"}
    assert value["kind"] in "ab"
    assert 0 <= value["n"] <= 99
    assert found.choices[0].finish_reason == "stop"
    assert bool(found.choices[0].message.reasoning_content) is thinking


def test_a_grammar_does_not_care_about_drafts(client):
    options = {"model": NAME, "messages": MESSAGES, "max_tokens": 120, "temperature": 0.9}
    wanted = {"regex": "(def|class) [a-z_]{3,12}\\(\\):\n( {4}[a-z ]{1,20}\n){1,4}"}
    for seed in range(6):
        texts = {
            client.chat.completions.create(**options, seed=seed, extra_body={**wanted, "block_size": width})
            .choices[0]
            .message.content
            for width in (1, 8, 16)
        }
        assert len(texts) == 1


@pytest.mark.parametrize(
    ("wanted", "good"),
    [
        ({"regex": "[0-9]{4}"}, lambda t: len(t) == 4 and t.isdecimal()),
        ({"grammar": 'root ::= "yes" | "no"'}, lambda t: t in ("yes", "no")),
        ({"grammar": 'start: "a" NUMBER\nNUMBER: /[0-9]{2}/'}, lambda t: t[0] == "a" and len(t) == 3),
        ({"guided_choice": ["red", "green"]}, lambda t: t in ("red", "green")),
        ({"guided_choice": ["\ufffd" * 5 + "漢字"]}, lambda t: t == "\ufffd" * 5 + "漢字"),
        ({"guided_choice": ["e\u0301"]}, lambda t: t == "e\u0301"),
        ({"structured_outputs": {"choice": ["up", "down"]}}, lambda t: t in ("up", "down")),
        ({"guided_json": {"enum": [1, 2]}}, lambda t: t in "12"),
        ({"response_format": {"type": "json_object"}, "max_tokens": 200}, lambda t: t.startswith("{")),
    ],
)
def test_answer_follows_each_form_of_constraint(quiet, wanted, good):
    body = {"temperature": 1.0, "seed": 1, "max_tokens": 30, "chat_template_kwargs": OFF} | wanted
    message = quiet.chat(**body)["choices"][0]["message"]
    assert good(message["content"]), message


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "read_file"}}])
def test_a_tool_call_may_be_demanded(client, choice):
    options = {"model": NAME, "messages": MESSAGES, "tools": [TOOL], "tool_choice": choice, "max_tokens": 500}
    options |= {"temperature": 0.7, "seed": 2, "parallel_tool_calls": False, "reasoning_effort": "none"}
    found = client.chat.completions.create(**options).choices[0]
    assert found.finish_reason == "tool_calls"
    (call,) = found.message.tool_calls
    assert call.function.name == "read_file"
    assert len(json.loads(call.function.arguments)["path"]) <= 12
    arguments, name = "", None
    for chunk in client.chat.completions.create(**options, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or []:
            name = delta.function.name or name
            arguments += delta.function.arguments
    assert (name, arguments) == (call.function.name, call.function.arguments)
    # And the conversation goes on.
    answered = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "x = 1"},
    ]
    assert client.chat.completions.create(model=NAME, messages=answered, tools=[TOOL], max_tokens=8).choices


def test_no_tool_is_called_where_none_may_be(client):
    found = client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice="none",
        max_tokens=8,
        extra_body={"chat_template_kwargs": OFF},
    )
    assert found.choices[0].message.tool_calls is None


CITY = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-z]{1,8}$"}, "population": {"type": "integer"}},
    "required": ["name", "population"],
}
WHITESPACE = (" ", "\n", "    ")


@pytest.mark.parametrize("form", [{"json_schema": CITY}, {"json_schema": {"type": "array"}}])
def test_whitespace_of_json_is_bounded(quiet, llm, form):
    """A text that would be whitespace for ever, with drafts and without."""
    ids = [ids for text in WHITESPACE for ids in [llm.encode(text)] if len(ids) == 1]
    biases = {str(token): 40 for (token,) in ids}
    texts = []
    for width in (1, 8):
        sampling = {"temperature": 0, "max_new_tokens": 900, "logit_bias": biases, **form}
        texts.append(
            quiet.post("/generate", text="A city:\n", sampling_params=sampling, block_size=width).json()["text"]
        )
    assert texts[0] == texts[1]
    assert max(len(gap) for gap in re.findall(r"\s*", texts[0])) <= 64
    assert re.search(r"\s{32}", texts[0])
    if form["json_schema"] is CITY:
        assert set(json.loads(texts[0])) == {"name", "population"}


FIELDS = [
    ({"structured_outputs": {"json": CITY, "disable_any_whitespace": True}}, ""),
    ({"structured_outputs": {"json": CITY, "whitespace_pattern": "", "disable_additional_properties": False}}, ""),
    ({"guided_json": CITY, "guided_whitespace_pattern": "[ ]{0,2}"}, " "),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"disable_any_whitespace": True}}, ""),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": CITY}}], "tool_choice": "required"}, None),
]


@pytest.mark.parametrize(("fields", "blanks"), FIELDS)
def test_blanks_of_json_are_those_that_the_request_or_the_server_asks_for(quiet, llm, monkeypatch, fields, blanks):
    biases = {str(ids[0]): 40 for ids in map(llm.encode, (" ", "\n", "\t")) if len(ids) == 1}
    body = {"temperature": 0, "max_tokens": 300, "logit_bias": biases, "chat_template_kwargs": OFF} | fields
    if blanks is None:
        monkeypatch.setattr(quiet.serving, "json_blanks", "")
        monkeypatch.setattr(quiet.serving, "call_syntax", "json")
    message = quiet.chat(**body)["choices"][0]["message"]
    text = message["content"] or message["tool_calls"][0]["function"]["arguments"]
    found = set("".join(re.findall(r"\s+", re.sub(r'"(\\.|[^"\\])*"?', "", text))))
    # A member of arguments is read on its own.
    assert found <= set(" " if blanks is None else blanks)
    assert blanks != " " or found


def test_wrong_fields_of_blanks_are_named(quiet):
    for name, value in (("whitespace_pattern", 1), ("whitespace_pattern", "x" * 2000), ("disable_any_whitespace", "x")):
        wrong = {"structured_outputs": {"json": CITY, name: value}}
        found = quiet.post("/v1/chat/completions", messages=MESSAGES, **wrong)
        assert (found.status_code, found.json()["error"]["param"]) == (400, f"structured_outputs.{name}")


@pytest.mark.parametrize("syntax", ["xml", "json"])
@pytest.mark.parametrize("thinking", [True, False])
def test_a_text_with_a_form_and_tools_is_a_call_or_has_the_form(quiet, llm, monkeypatch, thinking, syntax):
    """As the model likes: other servers let no tool be called beside a form."""
    monkeypatch.setattr(quiet.serving, "call_syntax", syntax)
    (start,), (close,) = map(llm.tokenizer.encode_plain, ("<tool_call>", "</think>"))
    value = "<tool_call><function=read_file><parameter=path>x"
    schema = {"type": "object", "properties": {"<tool_call>": {"const": value}}, "required": ["<tool_call>"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"tools": [TOOL], "tool_choice": "auto", "response_format": form, "temperature": 0.9, "seed": 1}
    body |= {"max_tokens": 300, "chat_template_kwargs": {"enable_thinking": thinking}, "thinking_token_budget": 5}
    for bias, more in ((99, {}), (99, {"parallel_tool_calls": False}), (-99, {"parallel_tool_calls": False})):
        found = []
        for width in (1, 8):
            # In the thought, no call begins.
            biased = {"logit_bias": {str(start): bias, str(close): 0}} if not thinking or bias < 0 else {}
            choice = quiet.chat(**body, **more, **biased, block_size=width)["choices"][0]
            found.append({**choice["message"], "tool_calls": choice["message"].get("tool_calls"), "id": None})
            calls = choice["message"].get("tool_calls") or []
            if biased:
                assert bool(calls) == (bias > 0)
            if calls and choice["finish_reason"] != "length":
                assert all(json.loads(call["function"]["arguments"])["path"] is not None for call in calls)
                assert not (choice["message"]["content"] or "").strip()
                assert len(calls) == 1 or not more
            elif not calls:
                assert json.loads(choice["message"]["content"]) == {"<tool_call>": value}
        contents = [(each["content"], [c["function"] for c in each["tool_calls"] or ()]) for each in found]
        assert contents[0] == contents[1]


def test_choices_of_one_request_have_their_own_calls(quiet):
    """They are those of requests with successive seeds, whole and streamed."""
    body = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "temperature": 0.9, "max_tokens": 200}
    body |= {"chat_template_kwargs": OFF}
    single = [quiet.post("/v1/chat/completions", **body, seed=4 + i).json()["choices"][0] for i in range(3)]
    several = quiet.post("/v1/chat/completions", **body, seed=4, n=3).json()["choices"]
    right = [[call["function"] for call in choice["message"]["tool_calls"]] for choice in single]
    assert [[call["function"] for call in choice["message"]["tool_calls"]] for choice in several] == right
    assert len({json.dumps(calls) for calls in right}) > 1
    streamed = [{} for _ in range(3)]
    request = body | {"seed": 4, "n": 3, "stream": True}
    with quiet.http.stream("POST", "/v1/chat/completions", json=request) as answer:
        for line in answer.iter_lines():
            for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                for call in choice["delta"].get("tool_calls") or ():
                    known = streamed[choice["index"]].setdefault(call["index"], {"name": "", "arguments": ""})
                    known["name"] = call["function"].get("name") or known["name"]
                    known["arguments"] += call["function"].get("arguments") or ""
    assert [[*calls.values()] for calls in streamed] == right


ADDED = ["<think>", "<think>a</think>b", "</think> x <tool_call>", "a <tool_call>\n<function", "a<|im_end|>b"]


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("text", ADDED)
def test_a_form_with_the_text_of_an_added_token_gives_that_text(quiet, text, thinking):
    """It neither begins nor ends a thought, nor a call, after a thought or without one, with drafts or without."""
    body = {"temperature": 0.8, "seed": 3, "max_tokens": 400, "chat_template_kwargs": {"enable_thinking": thinking}}
    quoted, tools = json.dumps(text), {"tools": [TOOL], "tool_choice": "auto"}
    for form, right in (
        ({"guided_choice": [text]}, text),
        ({"guided_json": {"const": text}, "thinking_token_budget": 4}, quoted),
        ({"grammar": f"start: {quoted}", **tools}, text),
    ):
        for width in (1, 8):
            choice = quiet.chat(**body, **form, block_size=width)["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == (right, "stop")
            assert bool(choice["message"]["reasoning_content"]) is thinking
            with quiet.http.stream(
                "POST", "/v1/chat/completions", json=body | form | {"messages": MESSAGES, "stream": True}
            ) as answer:
                chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
            assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == right

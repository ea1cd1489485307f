"""``parallel_tool_calls: false``: a text ends behind its first call, wherever its drafts end."""

import json

import pytest

from dflash_jax.server.answer_splitter import FirstCall
from tests.server.conftest import MESSAGES, OFF, TOOL

# What a model that calls twice writes, with text around.
TWICE = r"""start: "Well.\n" one "\n" one "\nDone."
one: <tool_call> "\n{\"name\": \"read_file\", \"arguments\": {\"path\": \"" /[a-z]{1,9}/ "\"}}\n" </tool_call>
"""
RESPONSES_TOOL = {"type": "function", **TOOL["function"]}
MESSAGES_TOOL = {"name": "read_file", "input_schema": TOOL["function"]["parameters"]}
BOTH = pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "drawn"])


def choice_of(server, **body) -> dict:
    found = server.post(
        "/v1/chat/completions", messages=MESSAGES, tools=[TOOL], chat_template_kwargs=OFF, return_token_ids=True, **body
    )
    assert found.status_code == 200, found.text
    return found.json()["choices"][0] | {"completion_tokens": found.json()["usage"]["completion_tokens"]}


def calls(choice: dict) -> list[str]:
    return [call["function"]["arguments"] for call in choice["message"].get("tool_calls") or ()]


@BOTH
def test_the_text_ends_behind_the_first_call(quiet, llm, params):
    body = {"max_tokens": 120, "grammar": TWICE, **params}
    free = choice_of(quiet, **body)
    assert len(calls(free)) == 2
    for choice in ("auto", None):
        body |= {"parallel_tool_calls": False, "tool_choice": choice}
        found = [choice_of(quiet, **body, block_size=width) for width in (1, 8)]
        for each in found:
            ids = each["token_ids"]
            assert calls(each) == calls(free)[:1]
            assert each["message"]["content"] == "Well."
            assert ids == free["token_ids"][: len(ids)]
            assert ids[-1] == llm.tokenizer.encode_plain("</tool_call>")[-1]
            assert each["completion_tokens"] == len(ids)
            assert (each["finish_reason"], each["stop_reason"], each["matched_stop"]) == ("tool_calls", None, None)


@BOTH
@pytest.mark.parametrize("path", ["whole", "stream"])
def test_min_tokens_come_first(quiet, params, path):
    """As before stop strings: the text goes on, and ends where it is in no call. Further calls are left out."""
    body = {"max_tokens": 200, "grammar": TWICE, "parallel_tool_calls": False, **params}
    ask = choice_of if path == "whole" else streamed_choice
    first = choice_of(quiet, **body)
    free = choice_of(quiet, **body | {"parallel_tool_calls": True})
    end, ids = len(first["token_ids"]), free["token_ids"]
    second = end + ids[end:].index(ids[end - 1]) + 1
    for least, right in ((end - 1, end), (end, end + 1), (end + 6, second)):
        for width in (1, 8):
            found = ask(quiet, **body, min_tokens=least, block_size=width)
            assert found["token_ids"] == ids[:right]
            assert calls(found) == calls(free)[:1]
            assert found["message"]["content"] == "Well."
            assert (found["finish_reason"], found["matched_stop"]) == ("tool_calls", None)


def streamed_choice(server, **body) -> dict:
    """As `choice_of`, of a stream."""
    asked = {"messages": MESSAGES, "tools": [TOOL], "chat_template_kwargs": OFF, "return_token_ids": True, **body}
    content, arguments, ids = "", {}, []
    with server.http.stream("POST", "/v1/chat/completions", json=asked | {"stream": True}) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            (last,) = json.loads(line[6:])["choices"]
            content += last["delta"].get("content") or ""
            ids += last.get("token_ids") or []
            for call in last["delta"].get("tool_calls") or ():
                arguments[call["index"]] = arguments.get(call["index"], "") + call["function"]["arguments"]
    made = [{"function": {"arguments": text}} for text in arguments.values()]
    return last | {"message": {"content": content, "tool_calls": made}, "token_ids": ids}


@BOTH
@pytest.mark.parametrize("width", [1, 8])
def test_streamed_and_in_several_choices(quiet, params, width):
    body = {"max_tokens": 120, "grammar": TWICE, "parallel_tool_calls": False, "block_size": width, **params}
    right = calls(choice_of(quiet, **body))
    asked = {"messages": MESSAGES, "tools": [TOOL], "chat_template_kwargs": OFF, **body, "n": 2, "stream": True}
    arguments, reasons = ["", ""], [None, None]
    with quiet.http.stream("POST", "/v1/chat/completions", json=asked) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            (choice,) = json.loads(line[6:])["choices"]
            for call in choice["delta"].get("tool_calls") or ():
                assert call["index"] == 0
                arguments[choice["index"]] += call["function"]["arguments"]
            reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    assert arguments[0] == right[0]
    assert json.loads(arguments[1]).keys() == {"path"}
    assert reasons == ["tool_calls", "tool_calls"]


@pytest.mark.parametrize("tool_choice", ["required", {"type": "function", "function": {"name": "read_file"}}])
def test_a_forced_call_is_one(quiet, tool_choice):
    body = {"max_tokens": 200, "tool_choice": tool_choice, "parallel_tool_calls": False, "temperature": 0}
    found = [choice_of(quiet, **body, block_size=width) for width in (1, 8)]
    assert len(calls(found[0])) == 1
    assert found[0]["token_ids"] == found[1]["token_ids"]
    assert found[0]["finish_reason"] == "tool_calls"


def test_in_the_other_interfaces(quiet):
    body = {"temperature": 0, "chat_template_kwargs": OFF}
    right = json.loads(calls(choice_of(quiet, max_tokens=200, tool_choice="required", temperature=0))[0])
    options = {"max_output_tokens": 200, "tools": [RESPONSES_TOOL], "tool_choice": "required", **body}
    items = quiet.post("/v1/responses", input=MESSAGES, **options, parallel_tool_calls=False).json()["output"]
    assert [json.loads(item["arguments"]) for item in items] == [right]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    options = {"max_tokens": 200, "tools": [MESSAGES_TOOL], "tool_choice": choice, **body}
    blocks = quiet.post("/v1/messages", messages=MESSAGES, **options).json()["content"]
    assert [block["input"] for block in blocks] == [right]


@pytest.mark.parametrize(
    ("text", "ended"),
    [
        ("<tool_call>\n<function=f>\n</function>\n</tool_call>", True),
        ("<tool_call>\n<function=f>\n</function>\n</tool_call>\n", True),
        ("<tool_call>\n<function=f>\n</function>\n", False),
        ("<tool_call>\nno call\n</tool_call>", False),
        ("text", False),
        ("<think>\n<tool_call>\n<function=f>\n</function>\n</tool_call>", True),
        ("<think>\n</tool_call></think><tool_call>\n<function=f>\n</function>\n</tool_call>", True),
    ],
)
def test_where_a_first_call_ends(text, ended):
    """By characters. A call ends a thought."""
    first = FirstCall(False, False, json.dumps({"f": {}}), False)
    assert [first(character) for character in text][-1] is ended

"""Text that arrives in any pieces is read as if it came whole."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax import InputError, SamplingParams
from dflash_jax.frontend.reasoning import ReasoningSplitter, is_open
from dflash_jax.json_text import reworded
from dflash_jax.server.errors import JsonResponse, dumped
from dflash_jax.server.stream import frame, json_parts
from tests.server.conftest import MESSAGES, OFF, strict

THOUGHTS = {
    "Let me see.\nYes.\n</think>\n\nIt is 4.": (True, "Let me see.\nYes.", "It is 4."),
    "<think>\nHm.\n</think>\n\nIt is 4.": (False, "Hm.", "It is 4."),
    "It is < 4 > 3.": (False, "", "It is < 4 > 3."),
    "\n  It is 4.": (False, "", "\n  It is 4."),
    "never ends </thin": (True, "never ends </thin", ""),
    "a </think> b </think> c": (True, "a", "b </think> c"),
    "</think>\n\nAt once.": (True, "", "At once."),
    "<thin": (False, "", "<thin"),
    " \n</think>\n\nx </think>": (False, "", "x </think>"),
    "</thinker>": (False, "", "</thinker>"),
    "": (True, "", ""),
}
CUTS = st.lists(st.integers(0, 200), max_size=12)


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({min(c, len(text)) for c in cuts})
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@settings(max_examples=40, derandomize=True)
@given(st.sampled_from(sorted(THOUGHTS)), CUTS)
def test_splitter_separates_reasoning_from_content_at_any_cut(text, cuts):
    started, reasoning, content = THOUGHTS[text]
    splitter = ReasoningSplitter(started)
    found = [splitter.push(piece) for piece in pieces(text, cuts)]
    found.append(splitter.finish())
    assert "".join(r for r, _ in found) == reasoning
    assert "".join(c for _, c in found) == content


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<think>\n\n</think>\n\n", False),
        ("a <think> b </think> <think>", True),
        ("What is <think>?\nassistant\n", False),
    ],
)
def test_a_prompt_may_open_the_thought(prompt, found):
    assert is_open(prompt) is found


def test_what_leaves_the_server_is_json():
    value = {"a": [float("nan"), -float("inf"), (1.5, float("inf"))], "\ud800": {"b": float("inf")}}
    expected = {"a": [None, None, [1.5, None]], "\ud800": {"b": None}}
    assert strict(dumped(value)) == strict(JsonResponse(value).body) == expected
    assert strict(b"".join(json_parts(value))) == expected
    assert frame(value).startswith(b"data: ")
    assert strict(frame(value)[6:]) == expected


@pytest.mark.parametrize(("thinking", "has_thought"), [(None, True), (False, False)])
def test_the_library_splits_answers_as_the_server_does(quiet, llm, thinking, has_thought):
    """Whole, as one of several, and as a stream."""
    options = {} if thinking is None else {"chat_template_kwargs": OFF}
    found = quiet.post("/v1/chat/completions", messages=MESSAGES, max_tokens=60, temperature=0, **options)
    message = found.json()["choices"][0]["message"]
    params = SamplingParams(max_tokens=60, temperature=0)
    (answer,) = llm.chat(MESSAGES, params, thinking)
    assert (answer.reasoning, answer.text) == (message["reasoning_content"], message["content"])
    assert (answer.reasoning is not None, "</think>" in answer.text) == (has_thought, False)
    assert (answer.outputs[0].reasoning, answer.outputs[0].text) == (answer.reasoning, answer.text)
    pieces = list(llm.stream_chat(MESSAGES, params, thinking))
    assert len(pieces) > 1
    assert ("".join(p.reasoning for p in pieces) or None, "".join(p.text for p in pieces)) == (
        answer.reasoning,
        answer.text,
    )
    cut = [*MESSAGES, {"role": "assistant", "content": "<think>\nSo"}]
    (rest,) = llm.chat(cut, params, continue_final_message=True)
    assert rest.reasoning is not None


def test_a_stream_is_of_one_conversation(llm):
    with pytest.raises(InputError, match="2 conversations: a stream is of one"):
        llm.stream_chat([MESSAGES, MESSAGES])


def test_numbers_in_a_string_that_is_cut_stay_text():
    assert reworded('{"a": "call 007 no') == '{"a": "call 007 no'
    assert reworded('{"a": 007, "b": "x\\" 01') == '{"a": "007", "b": "x\\" 01'


@pytest.mark.parametrize("begins_in_thought", [False, True])
def test_an_answer_may_begin_in_a_thought_whatever_the_template_says(quiet, monkeypatch, begins_in_thought):
    """``--reasoning-parser deepseek_r1``."""
    monkeypatch.setattr(quiet.serving, "begins_in_thought", begins_in_thought)
    monkeypatch.setattr(quiet.serving, "limits", replace(quiet.serving.limits, trust_request_chat_template=True))
    body = {"messages": MESSAGES, "chat_template": "{{ messages[0]['content'] }}", "max_tokens": 8, "temperature": 0}
    message = quiet.post("/v1/chat/completions", **body).json()["choices"][0]["message"]
    assert (message["reasoning_content"] is not None, bool(message["content"])) == (
        begins_in_thought,
        not begins_in_thought,
    )

"""Messages of OpenAI's API as templates read them."""

import pytest

from dflash_jax.frontend.messages import call_arguments, template_messages


def call(arguments) -> dict:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_calls_have_objects_and_nothing_is_null():
    given = [
        {"role": "user", "content": "x", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call('{"a": 1}'), call(None)], "refusal": None},
        {"role": "assistant", "tool_calls": [call({"b": [2]})]},
        {"role": "assistant", "content": "y", "tool_calls": None},
    ]
    before = repr(given)
    assert template_messages(given) == [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call({"a": 1}), call({})]},
        {"role": "assistant", "content": "", "tool_calls": [call({"b": [2]})]},
        {"role": "assistant", "content": "y"},
    ]
    assert repr(given) == before


@pytest.mark.parametrize("text", ["{", "area(2)", "[" * 100_000])
def test_arguments_that_are_not_json_stay_as_a_model_wrote_them(text):
    assert call_arguments(text) == text
    assert call_arguments("") == {}

"""Messages of OpenAI's API as templates read them."""

from pathlib import Path

import pytest

from dflash_jax.errors import InputError
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.frontend.messages import RAW, call_arguments, template_messages
from dflash_jax.frontend.tokenizer import Tokenizer


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
def test_arguments_that_are_no_object_are_kept_under_a_name(text):
    assert call_arguments(text) == {RAW: text}
    assert call_arguments(7) == {RAW: 7}


@pytest.mark.parametrize("arguments", ["", " ", None, "null", "[]", "{}", '"{}"'])
def test_no_arguments_are_an_object(arguments):
    assert call_arguments(arguments) == {}


def test_arguments_that_were_encoded_twice_are_read():
    assert call_arguments('"{\\"a\\": 1}"') == call_arguments('{"a": 1}') == {"a": 1}
    assert call_arguments('{"a": "b\nc"}') == {"a": "b\nc"}


def result(name: str) -> dict:
    return {"role": "tool", "tool_call_id": name, "content": name}


def test_results_are_in_the_order_of_their_calls():
    calls = {"role": "assistant", "content": "", "tool_calls": [call({}) | {"id": name} for name in "abc"]}
    later = {"role": "user", "content": "x"}
    given = [calls, result("c"), result("a"), result("b"), later, result("b"), result("a")]
    assert template_messages(given) == [calls, *map(result, "abc"), later, result("b"), result("a")]
    # A result of no call: nothing is known of the order.
    assert template_messages([calls, result("z"), result("a")]) == [calls, result("z"), result("a")]


ROOT = Path(__file__).parents[2]
# Templates of Qwen's kind: what they refuse.
STRICT = """{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}
{%- endif %}
{%- if message.role == 'developer' %}{{ raise_exception('Unexpected message role.') }}{%- endif %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('No user query found.') }}
{%- endif %}
{%- if reasoning_effort is defined and reasoning_effort not in ('low', 'medium', 'xhigh') %}
{{- raise_exception('Unknown effort.') }}{%- endif %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' + (reasoning_effort or '') }}{% endif %}"""


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(TINY / "target")


def rendered(tokenizer, *turns: str, **options) -> str:
    messages = [dict(zip(("role", "content"), turn.split(":"), strict=True)) for turn in turns]
    return tokenizer.render_chat(messages, chat_template=STRICT, **options)


def test_late_system_messages_are_turns_in_their_places(tokenizer):
    before = "system:a", "system:b", "user:c", "assistant:d"
    text = rendered(tokenizer, *before, "system:e", "user:f")
    start, end = "<|im_start|>", "<|im_end|>\n"
    reminder = f"{start}user\n<system-reminder>\ne\n</system-reminder>{end}"
    assert text == rendered(tokenizer, *before, ask=False) + f"{reminder}{start}user\nf{end}{start}assistant\n"
    assert text.startswith(f"{start}system\na\n\nb{end}")


def test_a_late_system_message_in_a_loop_of_calls_leaves_the_thoughts_before_it(tokenizer):
    template = (ROOT / "scripts/clients/template.jinja").read_text()
    before = [{"role": "user", "content": "Fix it."}]
    for name in "ab":
        said = {
            "role": "assistant",
            "content": "",
            "reasoning_content": f"Thought {name}.",
            "tool_calls": [call({}) | {"id": name}],
        }
        before += [said, result(name)]
        short = tokenizer.render_chat(before, chat_template=template, ask=False)
        before.append({"role": "system", "content": f"Late {name}."})
        text = tokenizer.render_chat(before, chat_template=template)
        assert text.startswith(short.removesuffix("\n</tool_response><|im_end|>\n"))
        assert f"\n{name}\n\n<system-reminder>\nLate {name}.\n</system-reminder>\n</tool_response><|im_end|>" in text
    assert text.count("Thought") == 2


def test_a_template_that_takes_a_conversation_gets_it_as_it_is(tokenizer):
    messages = [{"role": role, "content": role} for role in ("system", "user", "system")]
    text = tokenizer.render_chat(messages, chat_template="{% for m in messages %}{{ m.role }} {% endfor %}")
    assert text.split() == ["system", "user", "system"]


def test_a_conversation_without_a_user_has_an_empty_turn(tokenizer):
    assert rendered(tokenizer, "system:a", "assistant:b").startswith(
        "<|im_start|>system\na<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\nb"
    )


@pytest.mark.parametrize(
    ("effort", "nearest"),
    [("minimal", "low"), ("low", "low"), ("medium", "medium"), ("high", "xhigh"), ("xhigh", "xhigh"), ("max", "xhigh")],
)
def test_an_effort_is_the_nearest_that_the_template_knows(tokenizer, effort, nearest):
    assert rendered(tokenizer, "user:a", reasoning_effort=effort).endswith(f"assistant\n{nearest}")
    late = rendered(tokenizer, "user:a", "system:b", reasoning_effort=effort)
    assert late.endswith(f"assistant\n{nearest}")
    assert "<system-reminder>" in late


def test_the_refusal_of_the_conversation_as_it_is_is_told(tokenizer):
    template = "{{ raise_exception(('first: ' if reasoning_effort == 'high' else 'later: ') + messages[0].role) }}"
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(InputError, match="first: user"):
        tokenizer.render_chat(messages, chat_template=template, reasoning_effort="high")

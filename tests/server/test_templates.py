"""Chat templates in processes of their own: they write what they write here, within limits."""

import asyncio
import os
import time

import pytest

from dflash_jax.errors import InputError
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.server.errors import ApiError
from dflash_jax.server.templates import TemplateLimits, Templates
from tests.frontend.test_messages import STRICT

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "é \ud800 {{ 1 }}"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
    },
    {"role": "tool", "content": "4"},
]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(TINY / "target")


@pytest.fixture
def start(tokenizer):
    every = []

    def new(**limits) -> Templates:
        every.append(Templates(tokenizer, TemplateLimits(**limits)))
        return every[-1]

    yield new
    for each in every:
        each.stop()


@pytest.fixture(scope="module")
def shared(tokenizer):
    """Templates with the limits that users have, for all tests that leave none behind: each start takes a process."""
    templates = Templates(tokenizer, TemplateLimits())
    yield templates
    templates.stop()


def rendered(templates: Templates, *templates_given: str | None, messages=TALK[:1], **options) -> list:
    """Texts, or the errors in their places."""

    async def main():
        each = (templates.render(messages, template=t, **options) for t in templates_given)
        return await asyncio.gather(*each, return_exceptions=True)

    return asyncio.run(main())


@pytest.mark.parametrize("options", [{}, {"tools": [TOOL]}, {"ask": False}, {"enable_thinking": False}])
@pytest.mark.parametrize("messages", [TALK[:1], TALK[:2], TALK])
def test_texts_are_those_of_the_tokenizer(shared, tokenizer, messages, options):
    try:
        expected = tokenizer.render_chat(messages, **options)
    except InputError as e:
        expected = str(e)
    (found,) = rendered(shared, None, messages=messages, **options)
    assert (str(found) if isinstance(found, InputError) else found) == expected


def test_given_template_is_rendered(shared):
    assert rendered(shared, "{{ messages[0].content }}!", "{{ eos_token }}", None, x=1)[:2] == [
        "Be brief.!",
        shared._tokenizer.special_tokens["eos_token"],
    ]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 'a' * 10**9 }}", "memory|MiB"),
        ("{{ '%0999999999d' % 1 }}", "memory|MiB"),
        ("{% for i in range(99999) %}{{ 'a' * 10**6 }}{% endfor %}", "memory|MiB"),
        ("{{ 'a' * 20_000_000 }}", "characters"),
        ("{{ raise_exception('no') }}", "no"),
        ("{{", "unexpected"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ (" + "[" * 500 + "]" * 500 + ") }}", "recursion|nested"),
        ("{% for i in range(10**9) %}{% endfor %}", "[Rr]ange"),
    ],
)
def test_a_template_that_goes_too_far(shared, template, reason):
    error, after = rendered(shared, template, None)
    assert isinstance(error, InputError)
    with pytest.raises(InputError, match=reason):
        raise error
    assert "Be brief." in after


def test_a_template_without_end(start):
    with pytest.raises(InputError, match="needs more than 1 s of processor time"):
        raise rendered(start(seconds=1), LOOP)[0]


def test_templates_without_end_do_not_delay_the_checkpoints_own(start):
    templates = start(seconds=600, renders=2)

    async def main():
        endless = [asyncio.create_task(templates.render(TALK[:1], template=LOOP)) for _ in range(6)]
        for _ in range(20):
            assert "Be brief." in await templates.render(TALK[:1])
        for task in endless:
            task.cancel()
        await asyncio.gather(*endless, return_exceptions=True)
        assert templates._places[False].used == 0

    asyncio.run(main())


def test_a_client_that_leaves_ends_the_process(start):
    templates, processes = start(seconds=600), []

    async def main():
        make = templates._process

        async def kept(own):
            processes.append(await make(own))
            return processes[-1]

        templates._process = kept
        task = asyncio.create_task(templates.render(TALK[:1], template=LOOP))
        while not processes or processes[0].pid is None:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    while is_running(processes[0].pid):
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split()[2] != "Z"
    except OSError:
        return False


def test_processes_are_kept_and_replaced(start):
    templates = start()
    rendered(templates, None)
    (kept,) = templates._idle
    rendered(templates, None)
    assert templates._idle == [kept]
    os.kill(kept.pid, 9)
    while is_running(kept.pid):
        time.sleep(0.01)
    assert "Be brief." in rendered(templates, None)[0]
    # So is the process that forks them.
    templates._idle.pop().end()
    lost = templates._nursery._socket
    templates._nursery.lose(lost)
    assert "Be brief." in rendered(templates, None)[0]
    # One that is lost twice, by two requests of its own, does not end its successor.
    successor = templates._nursery._socket
    templates._nursery.lose(lost)
    assert templates._nursery._socket is successor is not lost


def test_renders_beyond_the_waiting_limit_are_503(start):
    # Half of six run, four wait.
    found = rendered(start(waiting=4), *[None] * 9)
    assert sorted(isinstance(f, ApiError) and f.status_code for f in found) == [0] * 7 + [503] * 2


def test_a_template_that_refuses_a_conversation_is_given_other_forms(shared, tokenizer):
    messages = [{"role": role, "content": role} for role in ("system", "user", "system")]
    (text,) = rendered(shared, STRICT, messages=messages, reasoning_effort="max")
    assert text == tokenizer.render_chat(messages, chat_template=STRICT, reasoning_effort="max")
    assert text.endswith("assistant\nxhigh")
    (refusal,) = rendered(shared, "{{ raise_exception('no') }}", messages=messages, reasoning_effort="max")
    assert isinstance(refusal, InputError)
    assert str(refusal).endswith(": no")

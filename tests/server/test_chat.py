"""Chat as OpenAI's own package has it: text, streams, reasoning, usage."""

import json

import openai
import pytest

from tests.server.conftest import MESSAGES, NAME, OFF, alone


@pytest.mark.parametrize("more", [{}, {"temperature": 1.0, "top_p": 0.95}], ids=["greedy", "sampled"])
def test_the_model_cards_snippet(client, more):
    """As published, but for the length that the tiny model has room for."""
    response = client.chat.completions.create(
        model="Qwen/Qwen3.6-35B-A3B",
        messages=[{"role": "user", "content": "Write a quicksort in Python."}],
        max_tokens=200,
        **more,
    )
    assert response.model == NAME
    assert response.choices[0].finish_reason in ("stop", "length")
    assert response.usage.completion_tokens == response.usage.total_tokens - response.usage.prompt_tokens


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 7}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("width", ["auto", 1, 8, 16])
def test_chat_says_what_the_library_says(client, llm, params, width):
    expected = alone(llm, max_tokens=48, **params)
    found = client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        max_tokens=48,
        extra_body={"block_size": width, "return_token_ids": True},
        **params,
    )
    assert found.choices[0].token_ids == expected.token_ids
    thought, _, answer = expected.text.partition("</think>")
    message = found.choices[0].message
    assert message.reasoning_content == (thought.strip() or None)
    assert (message.content or "") == answer.lstrip()
    assert found.choices[0].finish_reason == expected.finish_reason


def test_streaming_adds_up_to_the_whole(client):
    options = {"model": NAME, "messages": MESSAGES, "max_tokens": 60, "seed": 3, "temperature": 0.8, "n": 2}
    options |= {"logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**options)
    text, thought, entries, reasons = ["", ""], ["", ""], [[], []], [None, None]
    last = None
    for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        last = chunk
        for choice in chunk.choices:
            text[choice.index] += choice.delta.content or ""
            thought[choice.index] += getattr(choice.delta, "reasoning_content", None) or ""
            entries[choice.index] += choice.logprobs.content if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    for i, choice in enumerate(whole.choices):
        assert text[i] == (choice.message.content or "")
        assert thought[i] == (choice.message.reasoning_content or "")
        assert reasons[i] == choice.finish_reason
        assert [e.token for e in entries[i]] == [e.token for e in choice.logprobs.content]
        assert all(len(e.top_logprobs) == 2 and e.logprob <= 0 for e in entries[i])
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert whole.choices[0].message != whole.choices[1].message


def test_async_requests_with_one_seed_give_one_text(quiet):
    import asyncio

    async def ask() -> list:
        async with openai.AsyncOpenAI(base_url=f"{quiet.url}/v1", api_key="x") as client:
            options = {"model": NAME, "messages": MESSAGES, "max_tokens": 30, "temperature": 2.0}
            options["reasoning_effort"] = "none"
            return await asyncio.gather(*(client.chat.completions.create(**options, seed=i % 6) for i in range(12)))

    texts = [a.choices[0].message.content for a in asyncio.run(ask())]
    assert texts[:6] == texts[6:]
    assert len(set(texts)) > 3


def test_thinking_may_be_off(client, llm):
    expected = alone(llm, thinking=False, max_tokens=40)
    found = client.chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=40, extra_body={"chat_template_kwargs": OFF}
    )
    assert found.choices[0].message.content == expected.text
    assert found.choices[0].message.reasoning_content is None
    none = client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=40, reasoning_effort="none")
    assert none.choices[0].message.content == expected.text


def test_stop_strings_seeds_and_the_rest_are_exact(client, llm):
    options = {"temperature": 0.9, "seed": 11, "frequency_penalty": 0.4, "presence_penalty": 0.3}
    more = {"min_p": 0.02, "top_k": 30, "repetition_penalty": 1.1, "ignore_eos": True}
    plain = alone(llm, thinking=False, max_tokens=64, logit_bias={300: -5.0}, **options, **more)
    stop = plain.text[20:24]
    expected = alone(llm, thinking=False, max_tokens=64, logit_bias={300: -5.0}, stop=(stop,), **options, **more)
    found = client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        max_tokens=64,
        stop=[stop],
        logit_bias={"300": -5},
        extra_body={"chat_template_kwargs": OFF, **more},
        **options,
    )
    assert found.choices[0].message.content == expected.text
    assert stop not in expected.text
    assert found.choices[0].finish_reason == "stop"


def test_usage_tells_cached_and_drafted_tokens(client):
    long = [{"role": "system", "content": "Be brief. " * 20}, *MESSAGES]
    options = {"model": NAME, "messages": long, "max_tokens": 64, "extra_body": {"block_size": 16}}
    client.chat.completions.create(**options)
    usage = client.chat.completions.create(**options).usage
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.draft_rounds == usage.completion_tokens
    # Drafts of the bundled pair are worth it: two of three tokens at least.
    assert details.accepted_prediction_tokens > 2 * details.draft_rounds
    assert details.rejected_prediction_tokens == 15 * details.draft_rounds - details.accepted_prediction_tokens
    found = usage.drafters["bundled"]
    assert found["drafted_per_pos"] == {str(i): details.draft_rounds for i in range(15)}
    assert sum(found["accepted_per_pos"].values()) == details.accepted_prediction_tokens


def test_clients_that_add_up_usages_get_the_sum(quiet):
    """Numbers, and dicts that have the same keys whatever was drafted: what adds them up fails at anything else."""

    def added(one, other):
        if isinstance(one, int):
            return one + other
        assert one.keys() == other.keys()
        return {name: added(value, other[name]) for name, value in one.items()}

    first, *others = [quiet.chat(max_tokens=20, block_size=size)["usage"] for size in (16, 1, 4)]
    total = added(added(first, others[0]), others[1])
    assert total["drafters"]["bundled"]["drafted_per_pos"]["14"] == first["completion_tokens_details"]["draft_rounds"]
    assert all(isinstance(value, int) for value in total["completion_tokens_details"].values())


@pytest.mark.parametrize("width", [1, 16])
def test_tokens_of_a_thought_are_counted_to_its_end(quiet, llm, width):
    """Also where a draft brings its end and what comes behind it."""
    body = {"max_tokens": 200, "temperature": 0.8, "block_size": width, "return_token_ids": True}
    ends = 0
    for seed in range(6):
        found = quiet.chat(**body, seed=seed)
        ids = found["choices"][0]["token_ids"]
        upto = next((i for i in range(len(ids)) if "</think>" in llm.tokenizer.decode(ids[: i + 1])), None)
        ends += upto is not None
        expected = len(ids) if upto is None else upto + 1
        assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == expected
    assert ends > 2


def test_drafts_may_be_told_apart(quiet):
    body = {"messages": MESSAGES, "max_tokens": 48, "stream": True, "return_drafts": True, "block_size": 16}
    text, segments = "", []
    with quiet.http.stream("POST", "/v1/chat/completions", json=body | {"chat_template_kwargs": OFF}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                text += choice["delta"].get("content", "")
                segments += choice.get("drafts", [])
    assert "".join(s for s, _ in segments) == text
    assert {is_draft for _, is_draft in segments} == {True, False}

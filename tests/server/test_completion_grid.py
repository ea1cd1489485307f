"""Completions in every combination of echo, log-probabilities, several prompts, several choices, text and token ids:
a stream brings what the whole answer has, as SGLang's own server tests read it, with drafts (8) and without (1)."""

import itertools
from collections import defaultdict

import pytest

from tests.server.conftest import MESSAGES
from tests.server.test_output_fields import joined, stream

PROMPT = "The capital of France is"


@pytest.mark.parametrize("is_text", [False, True], ids=["ids", "text"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("prompts", [1, 2])
@pytest.mark.parametrize("logprobs", [None, 5])
@pytest.mark.parametrize("echo", [False, True], ids=["new", "echo"])
def test_streams_and_whole_answers(quiet, llm, echo, logprobs, prompts, n, is_text):
    ids = llm.tokenizer.encode(PROMPT)
    prompt = PROMPT if is_text else ids
    body = {"prompt": prompt if prompts == 1 else [prompt] * prompts, "n": n, "temperature": 0, "max_tokens": 12}
    body |= {"echo": echo, "logprobs": logprobs, "return_token_ids": True}
    alone, drafted = (quiet.post("/v1/completions", **body, block_size=width).json() for width in (1, 8))
    texts = [choice["text"] for choice in drafted["choices"]]
    assert texts == [choice["text"] for choice in alone["choices"]]
    assert len(texts) == prompts * n
    assert all(text.startswith(PROMPT) for text in texts) is echo
    assert drafted["usage"]["prompt_tokens"] == len(ids) * prompts
    asked = body | {"block_size": 8, "stream_options": {"include_usage": True}}
    *events, last = stream(quiet, "/v1/completions", **asked)
    assert last["usage"]["completion_tokens"] == drafted["usage"]["completion_tokens"] == 12 * prompts * n
    parts = defaultdict(list)
    for event in events:
        parts[event["choices"][0]["index"]].append(event)
    for index, choice in itertools.zip_longest(sorted(parts), drafted["choices"]):
        whole = joined(parts[index])
        assert (whole["text"], whole["token_ids"]) == (choice["text"], choice["token_ids"])
        for place, event in enumerate(parts[index]):
            given = event["choices"][0]["logprobs"]
            assert (given is None) is (logprobs is None)
            if given is not None:
                assert isinstance(given["tokens"][0], str)
                assert given["top_logprobs"][0] or (echo and place == 0)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("logprobs", [None, 5])
@pytest.mark.parametrize("is_thinking", [False, True], ids=["answer", "thought"])
def test_streams_and_whole_answers_of_a_chat(quiet, is_thinking, logprobs, n):
    """The role comes first, one reason to end in each choice, with its last text, and log-probabilities in every
    chunk but the first."""
    body = {"messages": MESSAGES, "n": n, "temperature": 0, "max_tokens": 24, "return_token_ids": True}
    body |= {"logprobs": logprobs is not None, "top_logprobs": logprobs}
    body |= {"chat_template_kwargs": {"enable_thinking": is_thinking}, "thinking_token_budget": 5}
    alone, drafted = (quiet.post("/v1/chat/completions", **body, block_size=width).json() for width in (1, 8))
    assert [c["message"] for c in drafted["choices"]] == [c["message"] for c in alone["choices"]]
    assert all(bool(c["message"]["reasoning"]) is is_thinking for c in drafted["choices"])
    asked = body | {"block_size": 8, "stream_options": {"include_usage": True}}
    *events, last = stream(quiet, "/v1/chat/completions", **asked)
    assert last["usage"]["completion_tokens"] == drafted["usage"]["completion_tokens"]
    parts = defaultdict(list)
    for event in events:
        (choice,) = event["choices"]
        parts[choice["index"]].append(choice)
    for index, whole in itertools.zip_longest(sorted(parts), drafted["choices"]):
        first, *between = parts[index]
        assert first["delta"]["role"] == "assistant"
        assert [c["finish_reason"] for c in parts[index]] == [None] * len(between) + [whole["finish_reason"]]
        texts = {name: "".join(c["delta"].get(name) or "" for c in between) for name in ("content", "reasoning")}
        assert texts == {name: whole["message"][name] or "" for name in texts}
        for chunk in between:
            # The end of a thought and the text after it may come at once: two chunks, and the first has the tokens.
            assert (chunk["logprobs"] is None) is (logprobs is None or "token_ids" not in chunk)
            if chunk["logprobs"] is not None:
                assert all(len(entry["top_logprobs"]) == logprobs for entry in chunk["logprobs"]["content"])
        if logprobs is not None:
            entries = [entry for chunk in between if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
            assert [e["token"] for e in entries] == [e["token"] for e in whole["logprobs"]["content"]]

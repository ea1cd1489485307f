"""Completions in every combination of echo, log-probabilities, several prompts, several choices, text and token ids:
a stream brings what the whole answer has, as SGLang's own server tests read it, with drafts (8) and without (1)."""

import itertools
from collections import defaultdict

import pytest
from test_output_fields import joined, stream

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

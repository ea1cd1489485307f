"""What is shown of the reasoning: `separate_reasoning`, `stream_reasoning`, `include_reasoning`, and its tokens.

The tokens are the same whatever is shown, with drafts (block size 8) and without (1).
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.frontend.sequence import Piece
from dflash_jax.server.conversation import Parser
from tests.server.both_ways import BOTH, stream

HI = [{"role": "user", "content": "hi"}]
FIELDS = {
    "stream": {},
    "whole": {"stream_reasoning": False},
    "content": {"separate_reasoning": False},
    "none": {"include_reasoning": False},
}
TEXTS = [
    (True, "Let me see.\n\nYes.\n</think>\n\nIt is 4.\n"),
    (True, "never ends </thin"),
    (True, "a </think> b </think> c"),
    (True, "</think>"),
    (True, ""),
    (False, " \n<think>\nHm.\n</think>\n\nIt is 4."),
    (False, "<think>\n\n</think>\n\n"),
    (False, "It is < 4 > 3."),
    (False, "\n  <thin"),
]


def parsed(is_thinking: bool, shown: str, pieces: list[str]) -> list[tuple[str, str]]:
    """(reasoning, content) of each piece and of the end; every piece is a token."""
    parser = Parser(is_thinking, None, shown)
    deltas = [parser.push(Piece(text, [1], [1], [len(text)])) for text in pieces]
    return [(delta.reasoning, delta.content) for delta in [*deltas, parser.finish(None)]]


@pytest.mark.parametrize(("is_thinking", "text"), TEXTS)
@settings(max_examples=30)
@given(data=st.data())
def test_pieces_of_any_size(is_thinking, text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = {shown: parsed(is_thinking, shown, pieces) for shown in FIELDS}
    reasoning, content = ("".join(parts) for parts in zip(*found["stream"], strict=True))
    assert "".join(content for _, content in found["content"]) == text
    assert not any(thought for thought, _ in found["content"] + found["none"])
    assert "".join(part for _, part in found["none"]) == content
    thoughts = [thought for thought, _ in found["whole"] if thought]
    assert thoughts == [reasoning] * bool(reasoning)
    assert "".join(part for _, part in found["whole"]) == content


@BOTH
@pytest.mark.parametrize(("budget", "most"), [(12, 40), (1000, 5)])
def test_the_tokens_are_the_same(quiet, llm, params, budget, most):
    """With a thought that ends, and one that max_tokens cuts."""
    body = {"max_tokens": most, "thinking_token_budget": budget, "return_token_ids": True, **params}
    plain = quiet.chat(**body, block_size=1)
    expected, counted = plain["choices"][0], plain["usage"]
    reasoning, content = expected["message"]["reasoning_content"], expected["message"]["content"]
    assert reasoning
    assert bool(content) is (budget == 12)
    shown = {"stream": (reasoning, content), "whole": (reasoning, content), "none": (None, content)}
    shown["content"] = None, llm.tokenizer.decode(expected["token_ids"])
    # As many as the budget or max_tokens allows.
    thinking = min(budget, most)
    assert counted["reasoning_tokens"] == counted["completion_tokens_details"]["reasoning_tokens"] == thinking
    for name, more in FIELDS.items():
        for width in (1, 8):
            found = quiet.chat(**body, **more, block_size=width)
            choice, usage = found["choices"][0], found["usage"]
            assert choice["token_ids"] == expected["token_ids"]
            assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == shown[name]
            assert usage["reasoning_tokens"] == counted["reasoning_tokens"]
            asked = body | more | {"messages": HI, "block_size": width, "stream_options": {"include_usage": True}}
            *events, last = stream(quiet, "/v1/chat/completions", **asked)
            deltas = [event["choices"][0]["delta"] for event in events]
            assert all("reasoning_content" in delta for delta in deltas)
            thoughts = [delta["reasoning_content"] for delta in deltas if delta["reasoning_content"]]
            assert ("".join(thoughts) or None, "".join(d.get("content") or "" for d in deltas)) == shown[name]
            assert name != "whole" or len(thoughts) == 1
            ids = [i for event in events for i in event["choices"][0].get("token_ids") or []]
            assert ids == expected["token_ids"]
            assert last["usage"]["reasoning_tokens"] == counted["reasoning_tokens"]
    hidden = quiet.chat(**body, reasoning={"exclude": True})["choices"][0]["message"]
    assert (hidden["reasoning_content"], hidden["content"]) == shown["none"]


@BOTH
def test_a_text_that_begins_with_reasoning(quiet, llm, params):
    """/generate: its tokens up to </think> are counted, and a form is that of what follows."""
    prompt = llm.tokenizer.decode(llm.encode_chat(HI))
    sampling = {"max_new_tokens": 400, "temperature": params["temperature"], "sampling_seed": params.get("seed")}
    body = {"text": prompt, "sampling_params": {**sampling, "regex": "[ab]{4}"}, "require_reasoning": True}
    end = tuple(llm.tokenizer.encode_plain("</think>"))
    alone, drafted = (quiet.post("/generate", **body, block_size=width).json() for width in (1, 8))
    assert drafted["output_ids"] == alone["output_ids"]
    for found in (alone, drafted):
        ids = found["output_ids"]
        at = next(i for i in range(len(ids)) if tuple(ids[i : i + len(end)]) == end) + len(end)
        assert found["meta_info"]["reasoning_tokens"] == at
        assert found["text"].rpartition("</think>")[2].strip().strip("ab") == ""
    cut = quiet.post("/generate", **body | {"sampling_params": sampling | {"max_new_tokens": 3}}).json()
    assert cut["meta_info"]["reasoning_tokens"] == 3
    del body["require_reasoning"], body["sampling_params"]["regex"]
    assert quiet.post("/generate", **body).json()["meta_info"]["reasoning_tokens"] == 0

"""vLLM's batch of conversations, each as its own request gives it; and chat's echo."""

import json

import pytest

from tests.server.conftest import MESSAGES, OFF, SCHEMA, TOOL

OTHER = [{"role": "user", "content": "hi"}]
FIELDS = {"max_tokens": 12, "seed": 3, "temperature": 0.8, "logprobs": True, "top_logprobs": 2}


def test_each_conversation_is_answered_as_alone(server):
    body = {**FIELDS, "return_token_ids": True, "prompt_logprobs": 1, "block_size": 4}
    found = server.post("/v1/chat/completions/batch", messages=[MESSAGES, OTHER, MESSAGES], **body)
    assert found.status_code == 200, found.text
    found = found.json()
    alone = [
        server.post("/v1/chat/completions", messages=given, **body | {"block_size": width}).json()
        for given, width in ((MESSAGES, 1), (OTHER, 4), (MESSAGES, 4))
    ]
    for i, (choice, answer) in enumerate(zip(found["choices"], alone, strict=True)):
        assert choice["index"] == i
        (expected,) = answer["choices"]
        for field in ("message", "finish_reason", "token_ids"):
            assert choice[field] == expected[field]
        assert choice["prompt_token_ids"] == answer["prompt_token_ids"]
        assert len(choice["prompt_logprobs"]) == len(answer["prompt_logprobs"])
        tokens = [[e["token"] for e in c["logprobs"]["content"]] for c in (choice, expected)]
        assert tokens[0] == tokens[1]
    assert found["object"] == "chat.completion"
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found["usage"][count] == sum(answer["usage"][count] for answer in alone)


def test_a_form_holds_for_each(server):
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    body = {"messages": [MESSAGES, OTHER], "max_tokens": 64, "chat_template_kwargs": OFF, "response_format": form}
    found = server.post("/v1/chat/completions/batch", **body).json()
    for choice in found["choices"]:
        assert set(json.loads(choice["message"]["content"])) == {"kind", "n"}


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"tools": [TOOL]}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages[0]"),
        ({"messages": MESSAGES}, "messages[0]"),
        ({"messages": [OTHER, [{"role": "user"}]]}, "messages[1][0].content"),
        ({"messages": [OTHER] * 129}, "messages"),
        ({"messages": [OTHER, [{"role": "user", "content": [{"type": "image_url"}]}]]}, "messages[0].content[0].type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_named(server, more, named):
    found = server.post("/v1/chat/completions/batch", **{"messages": [OTHER], "max_tokens": 2} | more)
    assert (found.status_code, found.json()["error"]["param"]) == (400, named), found.text
    assert server.idle()


def test_what_does_not_fit_has_its_code(server):
    long = [{"role": "user", "content": "x" * 5000}]
    error = server.post("/v1/chat/completions/batch", messages=[OTHER, long], max_tokens=2).json()["error"]
    assert (error["code"], error["message"][:16]) == ("context_length_exceeded", "conversation 1: ")


SAYING = "An apple a day, keeps"
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False, "max_tokens": 6, "temperature": 0}


@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("content", [SAYING, [{"type": "text", "text": SAYING}]], ids=["text", "parts"])
def test_echo_of_the_message_that_is_continued(server, echo, content):
    body = {**CONTINUED, "messages": [*OTHER, {"role": "assistant", "content": content}], "ignore_eos": True}
    plain = server.post("/v1/chat/completions", **body).json()
    found = server.post("/v1/chat/completions", **body, echo=echo).json()
    text = found["choices"][0]["message"]["content"]
    assert text == (SAYING if echo else "") + plain["choices"][0]["message"]["content"]
    # Drafts and known prefixes depend on what ran before.
    counted = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [found["usage"][n] for n in counted] == [plain["usage"][n] for n in counted]
    streamed = server.post("/v1/chat/completions", **body, echo=echo, stream=True).text.splitlines()
    chunks = [json.loads(line[6:]) for line in streamed if line.startswith("data: {")]
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == text


def test_a_message_that_is_continued_by_its_own_field(server):
    """Each conversation for itself."""
    said = {"role": "assistant", "content": SAYING}
    talks = [[*OTHER, said | {"prefix": True}], [*OTHER, said]]
    body = {"max_tokens": 6, "temperature": 0}
    found = server.post("/v1/chat/completions/batch", messages=talks, **body).json()["choices"]
    alone = [server.post("/v1/chat/completions", messages=talk, **body).json()["choices"][0] for talk in talks]
    assert [choice["message"]["content"] for choice in found] == [choice["message"]["content"] for choice in alone]
    assert alone[0]["message"] != alone[1]["message"]


def test_echo_without_a_message_of_the_assistant(server):
    body = {"messages": OTHER, "max_tokens": 4, "temperature": 0}
    message = server.post("/v1/chat/completions", **body, echo=True).json()["choices"][0]["message"]
    assert message == server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]

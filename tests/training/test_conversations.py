"""Conversations of data files: what is wrong is told with file and line; paths begin where they should."""

import json
from pathlib import Path

import pytest

from dflash_jax import InputError
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.options.train import TrainConfig
from dflash_jax.training.conversations import (
    DIRECTORY,
    conversation_of,
    digest_of_files,
    directory_of,
    split_conversation,
)
from dflash_jax.training.data import as_document
from dflash_jax.training.regenerate import regenerate
from dflash_jax.training.remote import RemoteAnswer

URL = "data:image/png;base64,AAAA"
TEXT = {"type": "text", "text": "what?"}


def talk(*content) -> list[dict]:
    return [{"role": "user", "content": list(content)}]


def split(messages, where: str = "d.jsonl:3", directory: Path = Path("/nowhere")):
    return split_conversation(conversation_of({"messages": messages}, where).messages, where, directory)


def test_a_relative_path_begins_at_the_data_file(tmp_path, monkeypatch):
    (tmp_path / "images").mkdir()
    (tmp_path / "images/~a.png").write_bytes(b"a")
    monkeypatch.chdir(tmp_path)
    for where, record, name in (
        (f"{tmp_path}/d.jsonl:3", {}, "images/~a.png"),
        ("d.jsonl:3", {}, "images/~a.png"),
        ("run/r.jsonl:1", {DIRECTORY: "../images"}, "~a.png"),
        ("elsewhere/d.jsonl:1", {}, str(tmp_path / "images/~a.png")),
    ):
        (tmp_path / where).parent.mkdir(exist_ok=True)
        _, (part,) = split(talk({"type": "image", "image": name}, TEXT), where, directory_of(record, where))
        assert part.source.read_bytes() == b"a"
        assert part.where == f"{where}: messages[0].content[0]"


def test_templates_get_texts_joined_and_media_as_types(tmp_path):
    (tmp_path / "a.mp4").touch()
    given = [
        {"role": "system", "content": [TEXT, TEXT]},
        *talk({"type": "image_url", "image_url": {"url": URL}}, TEXT, {"type": "video", "video": "a.mp4", "fps": 1}),
        {"role": "assistant", "content": "that"},
    ]
    rendered, (image, video) = split(given, directory=tmp_path)
    assert rendered[0] == {"role": "system", "content": "what?what?"}
    assert rendered[1]["content"] == [{"type": "image"}, TEXT, {"type": "video"}]
    assert rendered[2] == given[2]
    assert (image.kind, image.source) == ("image", URL)
    assert (video.kind, video.source, video.fps) == ("video", tmp_path / "a.mp4", 1)
    # What is read is not changed.
    assert given[1]["content"][0] == {"type": "image_url", "image_url": {"url": URL}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([7], r"messages\[0\].content\[0\] is 7: a part is like"),
        ([{"text": "x"}], r"content\[0\] is .*a part is like"),
        ([{"type": "text"}], r"content\[0\] is .*it must be a text, an image or a video"),
        ([TEXT, {"type": "audio", "audio": "x"}], r"content\[1\] is .*it must be a text, an image or a video"),
        ([{"type": ["image"], "image": "x"}], r"content\[0\] is .*a part is like"),
        ([{"type": "text", "text": "ab\ud800"}], r"content\[0\]: .* at character 2 is no text"),
        ([{"type": "image"}], r"content\[0\]: a part of type image needs image"),
        ([{"type": "image", "image": 7}], r"content\[0\]: the image is 7: it must be a path or a data: URL"),
        ([{"type": "image", "image": ["a.png"]}], "it must be a path or a data: URL"),
        ([{"type": "image", "image": "https://a.b/c.png"}], "it must be a path or a data: URL"),
        ([{"type": "image", "image": "FILE:///etc/passwd"}], "it must be a path or a data: URL"),
        ([{"type": "image", "image": "a.png"}], r"content\[0\]: '/nowhere/a.png' is no file"),
        ([{"type": "image", "image": "a\0b"}], "is no file"),
        ([{"type": "image", "image": "a\ud800b"}], "is no file"),
        ([{"type": "image", "image": ""}], "is no file"),
        ([{"type": "image", "image": "/dev/zero"}], "is no file"),
        ([{"type": "image", "image": "x" * 5000}], "is no file"),
        ([{"type": "image", "image": "~nobody/a.png"}], "is no file"),
        ([{"type": "image", "image": URL, "detail": 3}], "detail is 3"),
        ([{"type": "video", "video": URL, "fps": "2"}], "fps is '2'"),
        (None, r"messages\[0\] must have a role and a content"),
    ],
)
def test_a_bad_part_is_named_by_file_and_line(content, message):
    with pytest.raises(InputError, match=f"^d.jsonl:3: .*{message}"):
        split([{"role": "user", "content": content}])


def test_a_directory_that_is_no_path_is_named():
    with pytest.raises(InputError, match=f"^d.jsonl:3: {DIRECTORY} is 5"):
        directory_of({DIRECTORY: 5}, "d.jsonl:3")


def test_the_digest_is_of_the_files_contents(tmp_path):
    def digest() -> str:
        parts = [{"type": "image", "image": name} for name in ("a", "b", URL)]
        return digest_of_files(split(talk(*parts), directory=tmp_path)[1])

    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b").write_bytes(b"23")
    before = digest()
    assert digest() == before
    # The same bytes, divided otherwise.
    (tmp_path / "a").write_bytes(b"12")
    (tmp_path / "b").write_bytes(b"3")
    assert digest() != before


FUNCTION = {"name": "area", "description": "Of a circle.", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
ARGUMENTS = {"r": 2, "unit": "m"}
TEXT_ARGUMENTS = json.dumps(ARGUMENTS)


def called(arguments: object = TEXT_ARGUMENTS, **fields) -> dict:
    call = {"id": "c1", "type": "function", "function": {"name": "area", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **fields}


def with_tools(*middle: dict) -> list[dict]:
    return [
        {"role": "system", "content": "Short."},
        {"role": "user", "content": "How large?"},
        *middle,
        {"role": "tool", "content": "12.6"},
        {"role": "assistant", "content": "12.6 m²"},
    ]


CALL = json.dumps({"name": "area", "arguments": ARGUMENTS})
SHAREGPT = [
    {"from": "human", "value": "How large?"},
    {"from": "function_call", "value": CALL},
    {"from": "observation", "value": "12.6"},
    {"from": "gpt", "value": "12.6 m²"},
]
SYSTEM = {"from": "system", "value": "Short."}
# One conversation in all its forms.
FORMS = {
    "arguments as text": {"messages": with_tools(called()), "tools": [TOOL]},
    "arguments as an object": {"messages": with_tools(called(ARGUMENTS)), "tools": [TOOL]},
    "no content": {"messages": with_tools({k: v for k, v in called().items() if k != "content"}), "tools": [TOOL]},
    "an empty content": {"messages": with_tools(called(content="")), "tools": [TOOL]},
    "nulls of Arrow": {"messages": with_tools(called(name=None, reasoning_content=None)), "tools": [TOOL]},
    "tools as text": {"messages": with_tools(called()), "tools": json.dumps([TOOL])},
    "functions": {"messages": with_tools(called()), "tools": [FUNCTION]},
    "ShareGPT": {"conversations": [SYSTEM, *SHAREGPT], "tools": json.dumps([FUNCTION])},
    "ShareGPT, system apart": {"conversations": SHAREGPT, "system": "Short.", "tools": [TOOL]},
    "ShareGPT, a list of calls": {
        "conversations": [SYSTEM, SHAREGPT[0], {"from": "function_call", "value": f"[{CALL}]"}, *SHAREGPT[2:]],
        "tools": [TOOL],
    },
    "messages as conversations": {"conversations": with_tools(called()), "tools": [TOOL]},
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TINY / "target")


@pytest.mark.parametrize("template", [None, "{% generation %}"])
@pytest.mark.parametrize("record", FORMS.values(), ids=FORMS)
def test_tools_and_calls_reach_the_template_in_any_form(record, template, monkeypatch):
    """The same tokens, of which the assistant's turns are learned: calls, too."""
    tokenizer = Tokenizer(TINY / "target")
    if template:
        whole = tokenizer.chat_template
        content, end = "{{- message.content }}", "{{- '<|im_end|>\\n' }}\n{%- endfor %}"
        assert (whole.count(content), whole.count(end)) == (1, 1)
        marked = whole.replace(content, "{%- generation %}" + content).replace(end, "{%- endgeneration %}" + end)
        tokenizer._full.chat_template = marked
    document = as_document(record, "d.jsonl:1", tokenizer)
    text, learned = (tokenizer.decode(ids.tolist()) for ids in (document.tokens, document.tokens[document.mask]))
    assert json.dumps(FUNCTION) in text
    assert "None" not in text
    call = '<tool_call>\n{"name": "area", "arguments": {"r": 2, "unit": "m"}}\n</tool_call>'
    assert call in text
    if template is None:
        assert call in learned
        assert learned.count("12.6") == 1
    assert document.tokens.tolist() == as_document(FORMS["no content"], "d.jsonl:1", tokenizer).tokens.tolist()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [{"role": "assistant", "content": None}]}, r"messages\[0\] must have a role and a content"),
        ({"messages": [called(7)]}, r"messages\[0\].tool_calls\[0\] is .*: a call is like"),
        ({"messages": [called(tool_calls=["x"])]}, r"tool_calls\[0\] is 'x': a call is like"),
        ({"messages": [called(tool_calls=3)]}, r"tool_calls\[0\] is 3: a call is like"),
        ({"messages": [called()], "tools": "{"}, "tools is text that is not JSON"),
        ({"messages": [called()], "tools": {"name": "x"}}, "tools is .*: it must be a list"),
        ({"messages": [called()], "tools": [{"type": "function"}]}, r"tools\[0\] is .*: a tool is like"),
        ({"messages": with_tools(called("\ud800"))}, "not text that UTF-8 can hold"),
        ({"conversations": []}, "conversations must be a list, and not empty"),
        ({"conversations": ["x"]}, r"conversations\[0\] is 'x': it must have a value"),
        ({"conversations": [{"from": "robot", "value": "x"}]}, r"conversations\[0\] is .*robot.*human"),
        ({"conversations": [{"from": "gpt", "value": None}]}, r"conversations\[0\] is .*it must have a value"),
        (
            {"conversations": [{"from": "function_call", "value": "area()"}]},
            r"conversations\[0\] is .*: a call is JSON",
        ),
    ],
)
def test_a_wrong_message_call_or_tool_is_named_by_file_and_line(tokenizer, record, message):
    with pytest.raises(InputError, match=f"^d.jsonl:3: .*{message}"):
        as_document(record, "d.jsonl:3", tokenizer)


class Parrot:
    """A target that answers "hm" to everything."""

    slots, max_len, media = 2, 4096, None

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.asked = tokenizer, []

    def encode_chat(self, messages, thinking=None, tools=None):
        self.asked.append(self.tokenizer.render_chat(messages, thinking, tools))
        return self.tokenizer.encode_plain(self.asked[-1])

    def generate(self, prompts, params, progress):
        return [RemoteAnswer(self.tokenizer.encode_plain("hm"), "hm") for _ in prompts]


@pytest.mark.parametrize("name", ["arguments as text", "ShareGPT"])
def test_regenerate_gives_tools_to_the_template_and_keeps_the_calls_that_have_results(tokenizer, tmp_path, name):
    data, path = tmp_path / "d.jsonl", tmp_path / "r.jsonl"
    data.write_text(json.dumps(FORMS[name]))
    target = Parrot(tokenizer)
    assert regenerate(TrainConfig(data=(str(data),)), target, path, print) == 1
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert all(json.dumps(FUNCTION) in text for text in target.asked)
    assert [m["role"] for m in first["messages"]] == ["system", "user", "assistant"]
    assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert second["messages"][2]["tool_calls"][0]["function"]["name"] == "area"
    assert first["messages"][-1]["content"] == second["messages"][-1]["content"] == "hm"
    assert second["tools"] == [TOOL]
    assert '"arguments": {"r": 2, "unit": "m"}' in target.asked[1]
    # Tools are what the answers depend on.
    data.write_text(json.dumps({**FORMS[name], "tools": [{**FUNCTION, "name": "round"}]}))
    with pytest.raises(InputError, match="other settings: data was"):
        regenerate(TrainConfig(data=(str(data),)), target, path, print)

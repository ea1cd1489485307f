"""Conversations of data files: what is wrong is told with file and line; paths begin where they should."""

from pathlib import Path

import pytest

from dflash_jax import InputError
from dflash_jax.training.conversations import (
    DIRECTORY,
    digest_of_files,
    directory_of,
    messages_of,
    split_conversation,
)

URL = "data:image/png;base64,AAAA"
TEXT = {"type": "text", "text": "what?"}


def talk(*content) -> list[dict]:
    return [{"role": "user", "content": list(content)}]


def split(messages, where: str = "d.jsonl:3", directory: Path = Path("/nowhere")):
    return split_conversation(messages_of({"messages": messages}, where), where, directory)


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

"""The id that a client gives its request: where it comes back, and what it may be."""

import re

import pytest

from tests.server.conftest import MESSAGES, posted

CHAT = {"messages": MESSAGES, "max_tokens": 2}
TEXT = {"prompt": "def f(", "max_tokens": 2}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("header", "more", "found_id", "told"),
    [
        (None, {"request_id": "a-1"}, "-a-1", "a-1"),
        ("h.2", {}, "-h.2", "h.2"),
        ("h.2", {"request_id": "a-1"}, "-h.2", "h.2"),
        ("h.2", {"rid": "r/3"}, "r/3", "r/3"),
        (None, {"rid": "r/3", "request_id": "a-1"}, "r/3", "r/3"),
    ],
)
def test_request_id_is_returned_in_body_header_and_stream(quiet, path, header, more, found_id, told):
    headers = {} if header is None else {"X-Request-Id": header}
    found = quiet.http.post(path, json=BODIES[path] | more, headers=headers)
    prefix = {"/v1/chat/completions": "chatcmpl", "/v1/completions": "cmpl"}[path]
    assert found.json()["id"] == (prefix + found_id if found_id.startswith("-") else found_id)
    assert found.headers["x-request-id"] == told
    lines = []
    with quiet.http.stream("POST", path, json=BODIES[path] | more | {"stream": True}, headers=headers) as stream:
        assert stream.headers["x-request-id"] == told
        lines = [line for line in stream.iter_lines() if line.startswith("data: {")]
    assert lines
    assert all(found.json()["id"] in line for line in lines)


def test_without_one_there_is_a_fresh_one(quiet):
    ids = {quiet.post("/v1/completions", **TEXT).json()["id"] for _ in range(2)}
    assert len(ids) == 2
    assert all(re.fullmatch("cmpl-[0-9a-f]{32}", each) for each in ids)
    assert "x-request-id" not in quiet.post("/v1/completions", **TEXT).headers


def test_errors_and_other_paths_tell_it_too(quiet):
    headers = {"X-Request-Id": "h.2"}
    assert quiet.http.post("/v1/completions", json={}, headers=headers).headers["x-request-id"] == "h.2"
    assert quiet.http.get("/health", headers=headers).headers["x-request-id"] == "h.2"


@pytest.mark.parametrize("bad", ["", "a b", "a\nb", "x" * 129, "é", "\ud800", 5, ["a"], {"a": 1}])
@pytest.mark.parametrize("name", ["request_id", "rid"])
def test_what_cannot_be_in_a_header_is_refused(quiet, name, bad):
    found = posted(quiet, "/v1/completions", (TEXT | {name: bad}))
    assert found.status_code == 400, found.text
    assert found.json()["error"]["param"] == name
    assert "x-request-id" not in found.headers


@pytest.mark.parametrize("bad", [b"", b"a b", b"x" * 129, b"\xc3\xa9"])
def test_a_bad_header_is_refused_where_it_would_be_used(quiet, bad):
    found = quiet.http.post("/v1/completions", json=TEXT, headers=[(b"X-Request-Id", bad)])
    assert found.status_code == 400
    assert "X-Request-Id" in found.json()["error"]["message"]
    assert "x-request-id" not in found.headers
    assert quiet.http.get("/health", headers=[(b"X-Request-Id", bad)]).status_code == 200


def test_generate_numbers_them_as_sglang_does(quiet):
    def ids(**body) -> list[str]:
        found = quiet.post("/generate", **body).json()
        return [each["meta_info"]["id"] for each in (found if isinstance(found, list) else [found])]

    params = {"max_new_tokens": 2}
    assert ids(text="x", rid="r", sampling_params=params) == ["r"]
    assert ids(text=["x", "y"], rid="r", sampling_params=params) == ["r_0", "r_1"]
    assert ids(text=["x", "y"], rid=["a", "b"], sampling_params=params) == ["a", "b"]
    assert ids(text=["x", "y"], rid=["a", "b"], sampling_params=params | {"n": 2}) == ["a_0", "a_1", "b_0", "b_1"]
    found = quiet.post("/generate", text=["x", "y"], rid=["a"], sampling_params=params)
    assert (found.status_code, found.json()["error"]["param"]) == (400, "rid")

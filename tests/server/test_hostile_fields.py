"""No value of any field of any endpoint is an error of the server's."""

import json
import random

import httpx
import pytest

from tests.server.test_robust import HI, JSON

NESTED, MAPPING = [], {}
for _ in range(60):
    NESTED, MAPPING = [NESTED], {"a": MAPPING}
VALUES = [
    *(None, True, -1, 0, 1, 2**31, 2**64, 10**400, 0.5, 1e308, float("nan"), float("inf")),
    *("", "x", "\0", "\ud800", "\U0010ffff", "x" * 3000, "(((((", "a{1,9}{1,9}", "{{ 1/0 }}", "\r\nX: y", "required"),
    *([], [None], [""], [[]], [{}], [2**63], ["x"] * 200, [True, 1.5, "a", {}], NESTED),
    *(
        {},
        {"": None},
        {"type": []},
        {"type": "object"},
        {"$ref": "#"},
        {"5": 1e308},
        {"-1": 1},
        {"99999999": 1},
        MAPPING,
    ),
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}},
    [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}],
    *([{"role": "tool"}], [{"role": "assistant", "tool_calls": [{}]}]),
    [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
]
GOOD = {
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/responses/compact": {"input": HI, "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": HI},
    "/v1/messages": {"messages": HI, "max_tokens": 2, "model": "default"},
    "/v1/messages/count_tokens": {"messages": HI, "model": "default"},
    "/generate": {"text": "x", "sampling_params": {"max_new_tokens": 2}},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}
# Values that each field is tried with.
TRIED = 2


def fields(document: dict, path: str) -> list[tuple[str, ...]]:
    """Names of a request's fields, those of its inner objects behind theirs."""
    schemas = document["components"]["schemas"]

    def walk(schema: dict, at: tuple[str, ...]) -> list[tuple[str, ...]]:
        parts = [schema, *schema.get("anyOf", ()), *schema.get("oneOf", ()), schema.get("items") or {}]
        found = []
        for part in parts:
            if "$ref" in part:
                part = schemas[part["$ref"].rpartition("/")[2]]
            for name, inner in part.get("properties", {}).items():
                found.append((*at, name))
                if len(at) < 2:
                    found += walk(inner, (*at, name))
        return found

    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return list(dict.fromkeys(walk(body, ())))


def with_field(body: dict, at: tuple[str, ...], value: object) -> dict:
    """A copy of the body with a field set; objects and lists of one object on the way are made."""
    body = inner = json.loads(json.dumps(body))
    for name in at[:-1]:
        if not isinstance(inner.get(name), dict | list) or not inner[name]:
            inner[name] = {}
        inner = inner[name][0] if isinstance(inner[name], list) else inner[name]
    inner[at[-1]] = value
    return body


@pytest.mark.parametrize("path", GOOD)
def test_hostile_values_of_each_field(quiet, path):
    chosen, found = random.Random(path), []
    for at in fields(quiet.http.get("/openapi.json").json(), path):
        for value in chosen.sample(VALUES, TRIED):
            body = with_field(GOOD[path], at, value)
            try:
                answer = quiet.http.post(path, content=json.dumps(body), headers=JSON)
            except httpx.HTTPError as e:
                found.append((at, value, repr(e)))
                continue
            # A stream's error comes behind its status.
            if answer.status_code >= 500 or '"code":500' in answer.text:
                found.append((at, value, answer.text[:200]))
    assert not found

"""Closed objects: what a schema of a client's lets in, against a validator of JSON Schema."""

import json

import jsonschema_rs
import pytest
from llguidance import LLMatcher

from dflash_jax.frontend.llm_config import TINY
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.server.grammar import grammar_tokens
from dflash_jax.server.grammar_source import closed

A, B = ({"type": "object", "properties": {k: {"type": "integer"}}, "required": [k]} for k in "ab")
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["v", "next"],
        }
    },
    "$ref": "#/$defs/node",
}
# (schema, values that it takes, values that only an open object takes)
CASES = {
    "properties": (A, [{"a": 1}], [{"a": 1, "b": 2}]),
    "nested": (
        {"type": "object", "properties": {"x": A, "y": {"type": "array", "items": A}}, "required": ["x", "y"]},
        [{"x": {"a": 1}, "y": [{"a": 2}]}],
        [{"x": {"a": 1}, "y": [{"a": 2, "b": 3}]}, {"x": {"a": 1, "b": 2}, "y": []}],
    ),
    "all of": ({"allOf": [A, B]}, [{"a": 1, "b": 2}], [{"a": 1, "b": 2, "c": 3}]),
    "any of, beside properties": (
        {"type": "object", "properties": {"k": {"enum": ["x"]}}, "required": ["k"], "anyOf": [A, B]},
        [{"k": "x", "a": 1}, {"k": "x", "b": 1}],
        [{"k": "x", "a": 1, "c": 1}],
    ),
    "a reference beside properties": (
        {"$defs": {"base": A}, "$ref": "#/$defs/base", "type": "object", "properties": {"b": {"type": "integer"}}},
        [{"b": 1, "a": 2}, {"a": 2}],
        [{"a": 2, "c": 3}],
    ),
    "recursion": (
        TREE,
        [{"v": 1, "next": {"v": 2, "next": None}}],
        [{"v": 1, "next": {"v": 2, "next": None, "w": 3}}],
    ),
    "no unevaluated properties": (A | {"unevaluatedProperties": False}, [{"a": 1}], [{"a": 1, "b": 1}]),
}
OPEN = {
    "by itself": ({"type": "object"}, {"b": [1]}),
    "by true": (A | {"additionalProperties": True}, {"a": 1, "b": 2}),
    "by an empty schema": (A | {"additionalProperties": {}}, {"a": 1, "b": 2}),
    "by a schema": (A | {"additionalProperties": {"type": "integer"}}, {"a": 1, "b": 2}),
    "by a pattern": (A | {"patternProperties": {"^x": {"type": "integer"}}}, {"a": 1, "x": 2}),
    "in one of several": ({"allOf": [A, B | {"additionalProperties": True}]}, {"a": 1, "b": 2, "c": 3}),
}
# Keywords that llguidance does not enforce: left out, and said so.
LEFT_OUT = {
    "uniqueItems": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "not": {"not": {"type": "string"}},
    "if": A | {"if": {"required": ["a"]}, "then": {"required": ["a"]}, "else": {}},
    "dependentRequired": A | {"dependentRequired": {"a": ["a"]}},
}


@pytest.fixture(scope="module")
def tokens():
    return grammar_tokens(Tokenizer(TINY / "target"), 512, (2, 0))


def takes(tokens, schema, value) -> bool:
    matcher: LLMatcher = tokens.matcher("schema", schema, "f")[0]
    ids = Tokenizer(TINY / "target").encode_plain(json.dumps(value))
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("name", CASES)
def test_closed_schema_accepts_no_additional_properties(tokens, name):
    schema, right, wrong = CASES[name]
    before = json.dumps(schema)
    for value in right:
        assert jsonschema_rs.is_valid(schema, value)
        assert jsonschema_rs.is_valid(closed(schema), value)
        assert takes(tokens, schema, value)
    for value in wrong:
        assert not jsonschema_rs.is_valid(closed(schema), value)
        assert not takes(tokens, schema, value)
    assert json.dumps(schema) == before


@pytest.mark.parametrize("name", OPEN)
def test_a_schema_may_open_them(tokens, name):
    schema, value = OPEN[name]
    assert jsonschema_rs.is_valid(schema, value)
    assert takes(tokens, schema, value)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_cannot_be_enforced_is_left_out_and_told(tokens, name):
    matcher, notes = tokens.matcher("schema", LEFT_OUT[name], "f")
    assert name in " ".join(notes)
    assert not matcher.is_error()


def test_a_schema_that_only_an_open_object_satisfies_stays_open(tokens):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "minProperties": 2}
    _, notes = tokens.matcher("schema", schema, "f")
    assert notes[0] == "further properties of objects are let in"


@pytest.mark.parametrize(
    "schema", [True, {}, {"properties": 1}, {"allOf": 1}, {"$ref": "#/x/y"}, {"$ref": 1}, {"items": [1]}]
)
def test_broken_schemas_are_left_to_the_compiler(schema):
    assert isinstance(closed(schema), type(schema))

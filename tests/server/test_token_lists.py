"""Long lists of token ids, parsed in pieces as the parser of JSON parses them at once."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.server import token_lists
from dflash_jax.server.native import GenerateRequest
from dflash_jax.server.schema import CompletionRequest, DetokenizeRequest
from dflash_jax.server.token_lists import STEP_BYTES, WholeNumbers, parse

IDS = [i * 7919 % 150_000 for i in range(60_000)]
BODIES = {
    "a list": {"prompt": IDS},
    "lists": {"prompt": [IDS[:20_000], IDS, [5], IDS[:3000]]},
    "a list alone": IDS,
    "beside texts": {"prompt": "[1, 2, 3], " * 20_000, "x": 'a \\" "' * 30_000, "y": IDS, "z": {"w": [[IDS], "\\"]}},
    "other numbers": {"prompt": [-1, *IDS, 1.5, *IDS, None, *IDS, 1e9, "text", *IDS, {"a": IDS}]},
    "a negative one": {"prompt": [*IDS, -1]},
    "short": {"prompt": [1, 2, 3]},
}
WRONG = {
    "nothing between commas": (b"[%b,,%b]", "Expecting value"),
    "space between commas": (b'["a",' + b" " * 5000 + b',"a",%b,%b]', "Expecting value"),
    "no comma": (b"[%b 5 %b]", "delimiter"),
    "a zero before": (b"[%b,05,%b]", "delimiter"),
    "members without names": (b'{"a": [%b], %b}', "delimiter"),
    "no end": (b"[%b, %b", "delimiter"),
}


def parsed(body: bytes):
    """What `parse` gives, and how many turns others have meanwhile."""

    async def main():
        turns, is_done = 0, False

        async def other():
            nonlocal turns
            while not is_done:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        value = await parse(body, json.loads)
        is_done = True
        await task
        return value, turns

    return asyncio.run(main())


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" \n,\t ", ":")])
@pytest.mark.parametrize("name", BODIES)
def test_a_body_in_pieces_is_the_same(name, separators):
    body = json.dumps(BODIES[name], separators=separators).encode()
    value, turns = parsed(body)
    assert value == BODIES[name]
    assert turns >= 2 * (len(body) // STEP_BYTES) or name == "beside texts"


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_json_is_none_in_pieces(name):
    form, message = WRONG[name]
    numbers = json.dumps(IDS)[1:-1].encode()
    with pytest.raises(json.JSONDecodeError, match=message):
        parsed(form % (numbers, numbers))


SHORT = st.recursive(
    st.none() | st.text('a"\\,1') | st.integers(-5, 10**6) | st.floats(allow_nan=False, allow_infinity=False),
    lambda each: st.lists(each) | st.dictionaries(st.text("ab", max_size=2), each) | st.lists(st.integers(0, 99)),
)


@given(SHORT, st.integers(1, 40))
def test_any_body_in_any_pieces_is_the_same(value, step):
    """Each run of numbers is long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_lists, "LONG_BODY", 0)
        patch.setattr(token_lists, "STEP_BYTES", step)
        patch.setattr(token_lists, "_NUMBERS", token_lists.re.compile(rb"[\d,\s]+"))
        assert parsed(json.dumps(value).encode())[0] == value


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (CompletionRequest, {"prompt": IDS}),
        (CompletionRequest, {"prompt": [IDS, IDS]}),
        (GenerateRequest, {"input_ids": IDS}),
        (GenerateRequest, {"input_ids": [IDS, IDS]}),
        (DetokenizeRequest, {"tokens": IDS}),
    ],
)
def test_numbers_that_are_known_are_not_validated_again(schema, body):
    """The list of the body is the one of the request: nothing has gone through it."""
    value, _ = parsed(json.dumps(body).encode())
    ((name, given),) = value.items()
    kept = getattr(schema.model_validate(value), name)
    lists = [(kept, given)] if isinstance(given, WholeNumbers) else list(zip(kept, given, strict=True))
    assert all(isinstance(each, WholeNumbers) and each is of_body for each, of_body in lists)


@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/detokenize"])
def test_a_server_reads_long_lists_in_pieces(quiet, monkeypatch, path):
    name = {"/v1/completions": "prompt", "/generate": "input_ids", "/detokenize": "tokens"}[path]
    runs, real = [], token_lists._numbers

    async def numbers(*args):
        runs.append(None)
        return await real(*args)

    monkeypatch.setattr(token_lists, "_numbers", numbers)
    found = quiet.post(path, **{name: IDS})
    assert found.status_code == 400
    assert f"{len(IDS)} tokens do not fit" in found.json()["error"]["message"]
    assert len(runs) > 2
    wrong = quiet.post(path, **{name: [*IDS, -1]})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"].startswith(name)

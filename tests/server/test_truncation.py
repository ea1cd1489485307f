"""``truncation: "auto"``: which items of a conversation give way."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.server.responses_input import InputItem, droppable
from tests.server.conftest import MESSAGES, TOOL

WORDS = MESSAGES[0]["content"]
SYSTEM, USER, ANSWER = ({"role": role, "content": role} for role in ("system", "user", "assistant"))
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


def call(name: str) -> dict:
    return {"type": "function_call", "call_id": name, "name": "read_file", "arguments": json.dumps({"path": name})}


def output(name: str, text: str = "x = 1") -> dict:
    return {"type": "function_call_output", "call_id": name, "output": text}


# Of an agent; some calls are parallel.
STEPS = [THOUGHT, call("a"), output("a"), call("b"), call("c"), output("c"), output("b")]
STEPS += [ANSWER, call("d"), output("d"), THOUGHT, call("e"), output("e")]


def groups_of(items: list[dict]) -> list[list[int]]:
    return droppable([InputItem(**item) for item in items])


CHAIN = st.lists(
    st.sampled_from([SYSTEM, SYSTEM | {"role": "developer"}, USER, USER, ANSWER, THOUGHT])
    | st.builds(call, st.sampled_from("abc"))
    | st.builds(output, st.sampled_from("abc")),
    min_size=1,
    max_size=24,
)


@settings(max_examples=500)
@given(CHAIN)
def test_droppable_groups_leave_a_valid_conversation(items):
    groups = groups_of(items)
    assert len({i for group in groups for i in group}) == sum(map(len, groups))
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    assert all(groups)
    is_model = [item.get("role") == "assistant" or item.get("type") in ("reasoning", "function_call") for item in items]
    last = max((i for i, of_model in enumerate(is_model) if of_model), default=-1)
    for count in range(len(groups) + 1):
        dropped = {i for group in groups[:count] for i in group}
        calls = {}
        for i, item in enumerate(items):
            if item.get("type") == "function_call":
                calls[item["call_id"]] = i
            elif item.get("type") == "function_call_output" and item["call_id"] in calls:
                # Neither an output without its call nor a call without its output.
                assert (i in dropped) == (calls[item["call_id"]] in dropped)
            if i > last or item.get("role") in ("system", "developer"):
                assert i not in dropped
        assert len(items) - 1 not in dropped
        if USER in items:
            assert any(item == USER and i not in dropped for i, item in enumerate(items))


@pytest.mark.parametrize(
    ("items", "right"),
    [
        # Turns of a conversation.
        ([SYSTEM, USER, ANSWER, USER, THOUGHT, ANSWER, SYSTEM, USER], [[1, 2], [3, 4, 5]]),
        # Steps with one question, which stays.
        ([SYSTEM, USER, *STEPS], [[2, 3, 4], [5, 6, 7, 8], [9, 10, 11]]),
        # An earlier turn is dropped with its calls, as a whole.
        ([USER, call("a"), output("a"), ANSWER, USER, call("b"), output("b"), ANSWER], [[0, 1, 2, 3], [5, 6]]),
        # The newest input answers a call, and says more.
        ([USER, call("a"), output("a"), call("b"), USER, output("b"), USER], [[1, 2]]),
        # An output that comes late is dropped with its call.
        ([USER, call("a"), USER, output("a"), ANSWER, USER], [[0, 1, 3], [2, 4]]),
        # Ids may come again.
        ([USER, call("a"), output("a"), call("a"), output("a")], [[1, 2]]),
        ([USER, USER, SYSTEM], []),
        ([output("a"), USER, ANSWER, USER], [[0], [1, 2]]),
    ],
)
def test_droppable_groups_keep_calls_with_their_outputs(items, right):
    assert groups_of(items) == right


TOOLS = [{"type": "function", **TOOL["function"]}]
BODY = {"tools": TOOLS, "temperature": 0, "max_output_tokens": 24, "reasoning": {"effort": "none"}}


def asked(server, status: int = 200, **body) -> dict:
    found = server.post("/v1/responses", **BODY | body)
    assert found.status_code == status, found.text
    return found.json()


def read(server, name: str) -> list[dict]:
    """The items of a conversation as it went on, without their ids."""
    page = server.http.get(f"/v1/responses/{name}/input_items", params={"limit": 100, "order": "asc"}).json()
    assert not page["has_more"]
    return [{key: value for key, value in item.items() if key not in ("id", "status")} for item in page["data"]]


def texts(response: dict) -> list:
    return [item.get("content") or item["arguments"] for item in response["output"]]


def test_an_agent_goes_on_with_its_question_and_its_latest_steps(quiet):
    """The text is that of the conversation that is left, whatever the drafts; one step more would not fit."""
    steps = [[call(f"call {i}"), output(f"call {i}", f"{i} " * 30)] for i in range(12)]
    items = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": WORDS}]
    items += [item for step in steps for item in step]
    assert "do not fit" in asked(quiet, 400, input=items)["error"]["message"]
    found = [asked(quiet, input=items, truncation="auto", block_size=width) for width in (1, 8)]
    left = read(quiet, found[0]["id"])
    count = len(left) - 2
    assert 2 <= count < len(items) - 2
    assert [item.get("role", item.get("call_id")) for item in left] == [
        item.get("role", item.get("call_id")) for item in items[:2] + items[-count:]
    ]
    right = asked(quiet, input=left)
    assert texts(found[0]) == texts(found[1]) == texts(right)
    assert found[0]["usage"]["input_tokens"] == right["usage"]["input_tokens"]
    more = quiet.post("/v1/responses", **BODY | {"input": items[:2] + items[-count - 2 :]})
    assert more.status_code == 400 or more.json()["usage"]["output_tokens"] < BODY["max_output_tokens"]


def test_a_chain_of_calls_goes_on(quiet):
    """The newest outputs are answered, and no output is without its call."""
    first = {"role": "user", "content": WORDS}
    response, counts = asked(quiet, input=[first, call("0")], truncation="auto", max_output_tokens=200), []
    options = {"truncation": "auto", "max_output_tokens": 200, "tool_choice": "required", "parallel_tool_calls": False}
    given = [output("0", "y " * 40)]
    for _ in range(8):
        response = asked(quiet, input=given, previous_response_id=response["id"], **options)
        items = read(quiet, response["id"])
        counts.append(len(items))
        assert items[0]["content"][0]["text"] == WORDS
        assert items[-1]["output"] == given[0]["output"]
        called = [item["call_id"] for item in items if item["type"] == "function_call"]
        assert all(item["call_id"] in called for item in items if item["type"] == "function_call_output")
        (made,) = (item for item in response["output"] if item["type"] == "function_call")
        given = [output(made["call_id"], "y " * 40)]
    assert counts[-1] <= max(counts[:-1])


@pytest.mark.parametrize("size", [1200, 10**6])
def test_a_newest_input_that_does_not_fit(quiet, size):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hi"}]
    new = {"role": "user", "content": "x " * size}
    error = asked(quiet, 400, input=[*turns, new], truncation="auto")
    assert error == asked(quiet, 400, input=[new], truncation="disabled")
    called = asked(quiet, input=[{"role": "user", "content": "hi"}, call("a")])
    asked(quiet, 400, input=[output("a", "x " * size)], previous_response_id=called["id"], truncation="auto")

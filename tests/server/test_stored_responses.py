"""Responses that are stored: turns that go on from them, and who may see them."""

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.server import body, responses, serving, stored_responses
from dflash_jax.server.capacity import FairCapacity
from dflash_jax.server.errors import dumped
from dflash_jax.server.limits import Limits
from dflash_jax.server.response_store import ResponseStore, StoredResponse
from dflash_jax.server.serving import STEP_ITEMS, Serving
from dflash_jax.server.stored_responses import item_id
from dflash_jax.server.texts import Texts
from tests.server.conftest import MESSAGES, NAME, TOOL, wait_until

SHORT = {"model": NAME, "max_output_tokens": 12, "temperature": 0}
HI = [{"role": "user", "content": "hi"}]
KEY = {"Authorization": "Bearer EMPTY"}
WORDS = MESSAGES[0]["content"]


@pytest.fixture
def store(quiet, monkeypatch):
    """A fresh store in the server."""

    def use(*args) -> ResponseStore:
        fresh = ResponseStore(*args)
        monkeypatch.setattr(quiet.serving, "response_store", fresh)
        return fresh

    use()
    return use


def test_a_turn_goes_on_from_an_earlier_one(client, store):
    """As if the whole conversation were sent; instructions are of one turn only."""
    first = client.responses.create(**SHORT, input=WORDS, instructions="Be brief.")
    assert (first.store, first.previous_response_id) == (True, None)
    second = client.responses.create(**SHORT, input="Again.", previous_response_id=first.id)
    third = client.responses.create(**SHORT, input="And again.", previous_response_id=second.id)
    assert third.previous_response_id == second.id
    turns = [{"role": "user", "content": WORDS}, *items(first), {"role": "user", "content": "Again."}, *items(second)]
    whole = client.responses.create(**SHORT, input=[*turns, {"role": "user", "content": "And again."}], store=False)
    assert [i.content for i in third.output] == [i.content for i in whole.output]
    assert third.usage.input_tokens == whole.usage.input_tokens
    # What a turn needs, its entry has.
    client.responses.delete(first.id)
    client.responses.delete(second.id)
    more = client.responses.create(**SHORT, input="Once more.", previous_response_id=third.id)
    assert more.usage.input_tokens > third.usage.input_tokens


def items(response) -> list[dict]:
    return [item.model_dump(exclude_none=True) for item in response.output]


def test_log_probabilities_are_not_stored(client, store):
    options = SHORT | {"reasoning": {"effort": "none"}}
    response = client.responses.create(**options, input=WORDS, include=["message.output_text.logprobs"])
    assert response.output[0].content[0].logprobs
    kept = client.responses.retrieve(response.id)
    assert kept.output_text == response.output_text
    assert kept.output[0].content[0].logprobs == []
    assert client.responses.create(**options, input="Again.", previous_response_id=response.id).output_text


def test_calls_are_continued_by_their_outputs(client, store):
    tool = {"type": "function", **TOOL["function"]}
    options = {"model": NAME, "max_output_tokens": 400, "reasoning": {"effort": "none"}, "tools": [tool]}
    called = client.responses.create(**options, input="Read it.", tool_choice="required", parallel_tool_calls=False)
    (call,) = called.output
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "x = 1"}
    after = client.responses.create(**options | SHORT, input=[output], previous_response_id=called.id)
    question = {"role": "user", "content": "Read it."}
    whole = client.responses.create(**options | SHORT, input=[question, *items(called), output])
    assert after.output_text == whole.output_text
    kinds = [i.type for i in client.responses.input_items.list(after.id, order="asc")]
    assert kinds == ["message", "function_call", "function_call_output"]


def test_streams_are_stored_when_they_end(client, store):
    *_, last = client.responses.create(**SHORT, input=WORDS, stream=True)
    kept = client.responses.retrieve(last.response.id)
    assert kept.to_dict() == last.response.to_dict()
    assert client.responses.create(**SHORT, input="Again.", previous_response_id=kept.id, stream=True)


def test_retrieve_list_and_delete(client, store, quiet):
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    given_items = [{"role": "user", "content": parts, "id": "msg_mine"}, {"role": "user", "content": "c", "mood": [1]}]
    response = client.responses.create(**SHORT, input=given_items)
    assert client.responses.retrieve(response.id).to_dict() == response.to_dict()
    listed = list(client.responses.input_items.list(response.id, order="asc", limit=1))
    assert [i.content[0].text for i in listed] == ["ab", "c"]
    assert listed[0].id == "msg_mine"
    assert not hasattr(listed[1], "mood")
    newest = client.responses.input_items.list(response.id, limit=1)
    assert (newest.data[0].id, newest.has_more) == (listed[1].id, True)
    assert client.responses.input_items.list(response.id, after="msg_mine", order="asc").data == listed[1:]
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(response.id)
    with pytest.raises(openai.BadRequestError, match="stream"):
        client.responses.retrieve(response.id, stream=True)
    path = f"/v1/responses/{response.id}"
    with ThreadPoolExecutor(8) as pool:
        deleted = list(pool.map(lambda _: quiet.http.delete(path, headers=KEY), range(8)))
    assert sorted(d.status_code for d in deleted) == [200] + [404] * 7
    answer = next(d.json() for d in deleted if d.status_code == 200)
    assert answer == {"id": response.id, "object": "response", "deleted": True}


def test_what_is_not_stored_is_not_there(client, store):
    response = client.responses.create(**SHORT, input="hi", store=False)
    assert response.store is False
    for missing in (response.id, "resp_0", "\n'"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(missing)
        with pytest.raises(openai.NotFoundError):
            client.responses.cancel(missing)
        with pytest.raises(openai.NotFoundError):
            client.responses.input_items.list(missing)
        with pytest.raises(openai.NotFoundError) as error:
            client.responses.create(**SHORT, input="hi", previous_response_id=missing)
        assert error.value.param == "previous_response_id"
    store(0)
    assert client.responses.create(**SHORT, input="hi").store is False
    with pytest.raises(openai.BadRequestError, match="--response-store"):
        client.responses.create(**SHORT, input="hi", store=True)


def test_a_response_is_private_to_its_key(client, store, quiet):
    response = client.responses.create(**SHORT, input="hi")
    answer = quiet.http.get(f"/v1/responses/{response.id}", headers={"x-api-key": "EMPTY"})
    assert answer.json()["id"] == response.id
    other = client.with_options(api_key="another")
    for ask in (other.responses.retrieve, other.responses.delete, other.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            ask(response.id)
    with pytest.raises(openai.NotFoundError):
        other.responses.create(**SHORT, input="hi", previous_response_id=response.id)
    assert client.responses.retrieve(response.id)


def references(response) -> list[dict]:
    return [{"type": "item_reference", "id": item.id} for item in response.output]


def test_items_are_referenced_as_if_they_were_sent(client, store):
    """As the AI SDK sends the items of earlier answers: by id, and without the response's."""
    options = SHORT | {"reasoning": {"effort": "none"}}
    question = {"role": "user", "content": WORDS}
    first = client.responses.create(**options, input=[question])
    turns = [question, *references(first), {"role": "user", "content": "Again."}]
    second = client.responses.create(**options, input=turns)
    more = [*references(second), {"role": "user", "content": "Once more."}]
    third = client.responses.create(**options, input=[*turns, *more])
    sent = [question, *items(first), turns[-1], *items(second), more[-1]]
    whole = client.responses.create(**options, input=sent, store=False)
    assert (third.usage.input_tokens, third.output_text) == (whole.usage.input_tokens, whole.output_text)
    assert [i.content for i in third.output] == [i.content for i in whole.output]
    # The type may be missing, and a turn that continues this one has its items without the first response.
    untyped = [{"id": item["id"]} if item.get("type") == "item_reference" else item for item in [*turns, *more]]
    assert client.responses.create(**options, input=untyped).usage.input_tokens == third.usage.input_tokens
    client.responses.delete(first.id)
    later = client.responses.create(**options, input="On.", previous_response_id=third.id)
    assert later.usage.input_tokens > third.usage.input_tokens
    listed = [i.id for i in client.responses.input_items.list(third.id, order="asc")]
    assert [i.id for i in (*first.output, *second.output)] == [listed[1], listed[3]]


def test_an_item_is_in_a_conversation_once(client, store):
    """A reference to what the conversation has, in the input or before it, is right and adds nothing."""
    options = SHORT | {"reasoning": {"effort": "none"}}
    first = client.responses.create(**options, input=WORDS)
    assert first.output_text
    again = {"role": "user", "content": "Again.", "id": "msg_mine"}
    plain = client.responses.create(**options, input=[again], previous_response_id=first.id)
    named = [*references(first) * 3, {"type": "item_reference", "id": "msg_mine"}, again]
    found = client.responses.create(**options, input=named, previous_response_id=first.id)
    assert found.usage.input_tokens == plain.usage.input_tokens
    once = client.responses.create(**options, input=[*references(first), again])
    often = client.responses.create(**options, input=[*references(first) * 2000, again])
    assert often.usage.input_tokens == once.usage.input_tokens


@pytest.mark.parametrize("name", ["msg_1", "\ud800", "", "rs_" + "0" * 32, "x" * 10**5, "msg_" + "0" * 31 + "\u0661"])
def test_a_reference_to_what_is_not_there_is_404_by_name(client, quiet, store, name):
    first = client.responses.create(**SHORT, input=WORDS)
    body = json.dumps(SHORT | {"input": [*HI, *references(first), {"type": "item_reference", "id": name}]})
    for _ in range(2):
        found = quiet.http.post("/v1/responses", content=body, headers=KEY | {"Content-Type": "application/json"})
        assert (found.status_code, found.json()["error"]["param"]) == (404, f"input[{1 + len(first.output)}].id")
    assert len(found.text) < 400
    for wrong in (5, None, [], {"a": 1}):
        found = quiet.post("/v1/responses", **SHORT, input=[{"type": "item_reference", "id": wrong}])
        assert (found.status_code, found.json()["error"]["param"]) == (400, "input[0].id")


def test_items_are_private_to_their_key_and_end_with_their_response(client, store):
    store(1)
    first = client.responses.create(**SHORT, input=WORDS)
    ask = SHORT | {"input": [*references(first), *HI], "store": False}
    assert client.responses.create(**ask).output
    with pytest.raises(openai.NotFoundError, match="not stored here"):
        client.with_options(api_key="another").responses.create(**ask)
    # A number that the answer does not have, of a key that it has.
    other = first.output[0].id[:-1] + "9"
    with pytest.raises(openai.NotFoundError, match="not stored here"):
        client.responses.create(**SHORT, input=[{"type": "item_reference", "id": other}, *HI])
    client.responses.create(**SHORT, input="hi")
    with pytest.raises(openai.NotFoundError, match="not stored here"):
        client.responses.create(**ask)
    second = client.responses.create(**SHORT, input=WORDS)
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError, match="not stored here"):
        client.responses.create(**SHORT, input=[*references(second), *HI])


def test_answers_that_are_referenced_count_as_the_body_that_names_them(client, quiet, store, monkeypatch):
    answers = [client.responses.create(**SHORT, input=WORDS) for _ in range(3)]
    named = [name for answer in answers for name in references(answer)]
    monkeypatch.setattr(quiet.serving, "limits", replace(quiet.serving.limits, body_bytes=450))
    assert client.responses.create(**SHORT, input=named[:1], store=False).output
    with pytest.raises(openai.BadRequestError, match=r"answers that input names .* at most 450 are") as error:
        client.responses.create(**SHORT, input=named, store=False)
    assert error.value.param == "input"


def test_a_conversation_is_bounded_in_bytes(client, store, quiet, monkeypatch):
    """Also where the template drops what is sent, so that the prompt stays short."""
    monkeypatch.setattr(quiet.serving, "limits", type(quiet.serving.limits)(body_bytes=2000))
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x" * 900}]}
    turn = [thought, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    first = client.responses.create(**SHORT, input=turn)
    with pytest.raises(openai.BadRequestError, match="at most 2000 are possible"):
        client.responses.create(**SHORT, input=turn, previous_response_id=first.id)


@pytest.mark.parametrize("bound", ["characters", "items"])
def test_a_chain_that_is_truncated_goes_on_within_bounds(quiet, store, monkeypatch, bound):
    """The oldest turns give way, whole ones; without truncation the chain ends with an error."""
    if bound == "characters":
        monkeypatch.setattr(Texts, "most_cut", 2000)
    else:
        monkeypatch.setattr(quiet.serving, "limits", replace(quiet.serving.limits, objects=9))
    body, name, sizes = {"max_output_tokens": 2, "truncation": "auto"}, None, []
    for turn in range(9):
        found = quiet.post("/v1/responses", **body, input=f"turn {turn} " + "x" * 200, previous_response_id=name)
        assert found.status_code == 200, found.text
        name = found.json()["id"]
        items = quiet.http.get(f"/v1/responses/{name}/input_items", params={"limit": 100, "order": "asc"}).json()[
            "data"
        ]
        sizes.append(len(items))
        assert items[0]["role"] == items[-1]["role"] == "user"
        assert items[-1]["content"][0]["text"].startswith(f"turn {turn} ")
        assert len(items) <= 9
    assert len(json.dumps(items)) < 4000
    assert sizes[-1] <= max(sizes[:-1])
    if bound == "items":
        found = quiet.post(
            "/v1/responses",
            max_output_tokens=2,
            input=[{"role": "user", "content": "x"}] * 5,
            previous_response_id=name,
        )
        assert (found.status_code, found.json()["error"]["param"]) == (400, "input")
        assert "truncation: auto" in found.json()["error"]["message"]


def test_hostile_items_of_a_response_get_a_status(quiet, store):
    deep = json.loads("[" * 300 + "]" * 300)
    for item, status in (
        ({"role": "user", "content": "hi", "id": deep, "summary": deep}, 200),
        ({"type": "function_call", "call_id": "1", "name": "f", "arguments": deep}, 400),
        ({"type": "reasoning", "summary": deep, "content": []}, 200),
        ({"type": "nothing", "id": "x"}, 400),
    ):
        hi = {"role": "user", "content": "hi"}
        answer = quiet.post("/v1/responses", input=[item, hi], max_output_tokens=4)
        assert answer.status_code == status, answer.text
        if status == 200:
            again = quiet.post(
                "/v1/responses", input="hi", max_output_tokens=4, previous_response_id=answer.json()["id"]
            )
            assert again.status_code == 200, again.text
    assert quiet.post("/v1/responses", input="hi", previous_response_id="x" * 10**6).status_code == 400


@given(st.text(st.characters(exclude_categories=()) | st.sampled_from('"\\,')))
def test_the_id_of_a_stored_item_is_read_whatever_it_is(name):
    assert item_id(dumped({"id": name, "type": "message", "content": '{"id":"x",'})) == name


def test_a_store_that_fails_stops_those_alone_that_need_it(client, quiet, store):
    full = store()
    kept = client.responses.create(**SHORT, input=WORDS)
    full._writer.execute("PRAGMA query_only = 1")
    for fields in ({}, {"previous_response_id": kept.id}, {"store": True}):
        found = quiet.http.post("/v1/responses", json=SHORT | fields | {"input": "hi"}, headers=KEY)
        assert found.status_code == 500
        assert "readonly database; a request with store: false can" in found.json()["error"]["message"]
    *_, last = client.responses.create(**SHORT, input="hi", stream=True)
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert "readonly database" in last.response.error.message
    assert quiet.http.delete(f"/v1/responses/{kept.id}", headers=KEY).status_code == 500
    # What needs no write goes on.
    assert client.responses.retrieve(kept.id).to_dict() == kept.to_dict()
    assert client.responses.create(**SHORT, input="hi", previous_response_id=kept.id, store=False).output
    assert quiet.chat(max_tokens=2)
    full._writer.execute("PRAGMA query_only = 0")
    assert client.responses.create(**SHORT, input="hi", previous_response_id=kept.id).store


# The store alone.


def entry(nbytes: int) -> StoredResponse:
    return StoredResponse(b"x" * nbytes, b"")


def run(work):
    return asyncio.run(work)


@pytest.mark.parametrize("truncation", ["auto", "disabled"])
def test_a_long_conversation_is_read_in_steps(client, store, truncation):
    """Between the steps, which may be of many requests, the event loop serves others."""
    thoughts = [{"type": "reasoning", "content": []}] * (3 * STEP_ITEMS)
    first = client.responses.create(**SHORT, input=[*thoughts, {"role": "user", "content": "hi"}])
    read, steps = 0, []

    def loads(text, original=stored_responses.from_json):
        nonlocal read
        read += 1
        return original(text)

    async def turn(self, original=Serving.turn):
        steps.append(read)
        await original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_responses, "from_json", loads)
        patch.setattr(Serving, "turn", turn)
        # A step is over after any time.
        patch.setattr(serving, "STEP_S", 0.0)
        client.responses.create(**SHORT, input="more", previous_response_id=first.id, truncation=truncation)
    assert read > 3 * STEP_ITEMS
    # Beside the one of a step, the request's own.
    assert max(after - before for before, after in pairwise([0, *steps, read])) < 20


def test_others_have_a_turn_between_two_steps():
    order, work = [], []

    async def main():
        serving = SimpleNamespace(_turns=asyncio.Lock())

        async def step():
            await Serving.turn(serving)
            order.append("step")
            work.append(1)

        async def other():
            while len(work) < 5:
                order.append("other")
                await asyncio.sleep(0)

        await asyncio.gather(*(step() for _ in range(5)), other())

    run(main())
    assert order.count("step") == 5
    assert "stepstep" not in "".join(order)


def test_between_two_long_steps_others_have_as_long_as_the_first():
    """Whatever asks for the interpreter in between, such as the engine, which needs it several times for a step."""
    order, pauses = [], []

    async def main():
        loop = asyncio.get_running_loop()
        serving = SimpleNamespace(
            _long_steps=FairCapacity(1, "x"), limits=Limits(body_bytes=9), turn=partial(asyncio.sleep, 0)
        )
        now = 0.0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "time", lambda: now)
            patch.setattr(loop, "call_later", lambda delay_s, call: pauses.append((delay_s, call)))

            async def step(name: str, takes_s: float):
                nonlocal now
                async with Serving.long_step(serving, 10):
                    order.append(name)
                    now += takes_s

            async with Serving.long_step(serving, 9):
                assert not pauses
            assert not pauses
            steps = [asyncio.create_task(step(name, takes_s)) for name, takes_s in (("a", 0.5), ("b", 2.0))]
            for name in "ab":
                for _ in range(20):
                    await asyncio.sleep(0)
                assert order[-1] == name
                pauses[-1][1]()
            await asyncio.gather(*steps)

    run(main())
    assert order == ["a", "b"]
    assert [delay_s for delay_s, _ in pauses] == [0.5, 2.0]


def test_long_conversations_are_parsed_in_turn_and_short_ones_do_not_wait(store, quiet, monkeypatch):
    """Many parsed items make collections of garbage long, which stop all threads."""
    thoughts = [{"type": "reasoning", "content": []}] * 20
    found = [quiet.post("/v1/responses", **SHORT, input=[*more, *HI]).json()["id"] for more in (thoughts, [])]
    long, short = found
    monkeypatch.setattr(responses, "STEP_ITEMS", 10)
    monkeypatch.setattr(quiet.serving, "long_conversations", FairCapacity(40, "long conversations"))
    counts, at_once, prepare = [], [0], responses.prepare_response
    may_end = asyncio.Event()

    async def counted(http, body, earlier):
        if len(earlier) <= 10:
            may_end.set()
            return await prepare(http, body, earlier)
        at_once[0] += 1
        counts.append(at_once[0])
        # The short one is prepared while a long one is.
        await may_end.wait()
        try:
            return await prepare(http, body, earlier)
        finally:
            at_once[0] -= 1

    monkeypatch.setattr(responses, "prepare_response", counted)

    def ask(name: str, text: str = "more"):
        return quiet.post("/v1/responses", **SHORT, input=text, previous_response_id=name).status_code

    with ThreadPoolExecutor(5) as pool:
        answers = [pool.submit(ask, long) for _ in range(3)] + [pool.submit(ask, long, "")]
        assert wait_until(lambda: counts)
        answers.append(pool.submit(ask, short))
        assert [each.result() for each in answers] == [200] * 5
    assert counts == [1] * 4
    assert quiet.serving.long_conversations.used == 0


def test_what_reads_a_large_stored_conversation_is_a_long_step(store, quiet, monkeypatch):
    first = quiet.post("/v1/responses", **SHORT, input="x" * 300).json()["id"]
    sizes, long_step = [], quiet.serving.long_step
    monkeypatch.setattr(quiet.serving, "long_step", lambda nbytes: sizes.append(nbytes) or long_step(nbytes))
    monkeypatch.setattr(quiet.serving, "limits", replace(quiet.serving.limits, body_bytes=400))
    quiet.post("/v1/responses", input="hi", max_output_tokens=2, previous_response_id=first)
    assert any(size > 400 for size in sizes)


def test_an_earlier_response_counts_as_the_body_that_names_it(store, quiet, monkeypatch):
    first = quiet.post("/v1/responses", **SHORT, input="x" * 300).json()["id"]
    ask = {"input": "hi", "max_output_tokens": 2, "previous_response_id": first}
    monkeypatch.setattr(body, "SMALL_BYTES", 100)
    monkeypatch.setattr(quiet.serving, "limits", replace(quiet.serving.limits, total_body_bytes=1000))
    assert quiet.post("/v1/responses", **ask).status_code == 429
    assert quiet.post("/v1/responses", input="hi", max_output_tokens=2).status_code == 200
    monkeypatch.setattr(quiet.serving, "limits", replace(quiet.serving.limits, total_body_bytes=10**6))
    assert quiet.post("/v1/responses", **ask).status_code == 200


def test_the_least_recently_used_gives_way():
    store = ResponseStore(2)
    for name in "ab":
        assert run(store.put(b"k", name, entry(1)))
    assert run(store.get(b"k", "a"))
    run(store.put(b"k", "c", entry(1)))
    assert [run(store.get(b"k", name)) is not None for name in "abc"] == [True, False, True]


def test_who_stores_much_pushes_out_its_own():
    store = ResponseStore(10, 1000)
    run(store.put(b"quiet", "mine", entry(100)))
    for i in range(50):
        run(store.put(b"loud", str(i), entry(1)))
    for i in range(50):
        run(store.put(b"loud", f"large {i}", entry(400)))
    assert run(store.get(b"quiet", "mine"))
    assert not run(store.put(b"loud", "x", entry(1001)))
    assert run(store.get(b"quiet", "mine"))


def test_keys_that_a_client_makes_up_are_one_client():
    """A server without keys takes any key for an owner, so that a client could be many."""
    store = ResponseStore(10)
    run(store.put(b"quiet", "mine", entry(1), client=(None, "127.0.0.2")))
    for i in range(50):
        run(store.put(f"key {i}".encode(), "x", entry(1), client=(None, "127.0.0.1")))
    assert run(store.get(b"quiet", "mine"))
    assert run(store.get(b"key 49", "x"))
    assert not run(store.get(b"key 1", "x"))


def test_an_output_is_found_by_the_key_of_its_items_and_is_used_then():
    value = StoredResponse(b'{"id":"a","output":[{"id":"x"}]}', b"y", len(b'[{"id":"x"}]'), b"k1")
    assert value.output == b'[{"id":"x"}]'
    store = ResponseStore(2)
    run(store.put(b"o", "a", value))
    run(store.put(b"o", "b", replace(value, item_key=b"k2")))
    assert run(store.get(b"o", "a")) == value
    for owner, key in ((b"p", b"k1"), (b"o", b"k3"), (b"o", b"")):
        assert run(store.output(owner, key)) is None
    assert run(store.output(b"o", b"k1")) == value.output
    run(store.put(b"o", "c", entry(1)))
    assert [run(store.output(b"o", key)) is not None for key in (b"k1", b"k2")] == [True, False]


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["get", "put", "delete"]), st.sampled_from([b"1", b"2", b"3"]), st.sampled_from("abcd"))
    | st.tuples(st.just("put"), st.sampled_from([b"1", b"2", b"3"]), st.sampled_from("abcd"), st.integers(0, 60))
)


@settings(max_examples=100)
@given(OPERATIONS, st.integers(1, 5), st.integers(1, 150))
def test_the_bounds_hold_and_entries_are_their_owners(operations, size, most_bytes):
    async def main(store, last):
        for kind, owner, name, *rest in operations:
            if kind == "put":
                before, value = await store.get(owner, name), entry(*rest or (7,))
                is_kept = await store.put(owner, name, value)
                if before is not None:
                    assert not is_kept
                    assert await store.get(owner, name) == before
                    continue
                last[owner, name] = value
                assert (await store.get(owner, name) == value) == is_kept
                assert is_kept or value.nbytes > most_bytes / 3
                kept = [value for key in last if (value := await store.get(*key)) is not None]
                assert len(kept) <= size
                assert sum(value.nbytes for value in kept) <= most_bytes
            elif kind == "get":
                assert await store.get(owner, name) in (None, last.get((owner, name)))
            else:
                was_there = await store.get(owner, name) is not None
                assert await store.delete(owner, name) == was_there
                assert await store.get(owner, name) is None

    run(main(ResponseStore(size, most_bytes), {}))


def test_the_id_of_an_item_is_read_in_a_time_that_its_length_bounds():
    """A pattern that looks back takes nine tenths of a second for nine megabytes."""
    item = b'{"id":"' + b"x" * 9_000_000 + b'\\"","type":"message"}'
    began = time.thread_time()
    assert len(item_id(item)) == 9_000_001
    assert time.thread_time() - began < 0.5

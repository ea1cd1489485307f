"""scripts/cluster: what counts as lost or changed, and what a router has to leave as it is."""

import asyncio
import json
import threading

import httpx
import pytest

from dflash_jax.cluster.fleet import merged
from tests.helpers import load_script

check, routers = load_script("cluster/check.py"), load_script("cluster/routers.py")


def chunk(text, tokens, reason=None) -> str:
    choice = {"index": 0, "text": text, "token_ids": tokens, "finish_reason": reason}
    return "data: " + json.dumps({"model": "m", "choices": [choice]}) + "\n\n"


DONE = "data: [DONE]\n\n"
WHOLE = chunk("a", [1]) + chunk("b", [2], "stop") + DONE


def answer(text: str, stream: bool = True, status: int = 200):
    transport = httpx.MockTransport(lambda request: httpx.Response(status, text=text))

    async def work():
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            return await check.answer(http, "/v1/completions", {"stream": stream})

    return asyncio.run(work())


def test_an_answer_has_all_tokens_and_the_whole_text():
    expected = check.Answer([1, 2], "ab", "m")
    assert answer(WHOLE) == expected
    choice = {"text": "ab", "token_ids": [1, 2], "finish_reason": "stop"}
    assert answer(json.dumps({"model": "m", "choices": [choice]}), stream=False) == expected


@pytest.mark.parametrize(
    "text",
    [
        chunk("a", [1]),
        chunk("a", [1], "stop"),
        chunk("a", [1]) + DONE,
        chunk("a", [1]) + 'data: {"error": {"message": "lost"}}\n\n' + DONE,
    ],
    ids=["cut", "without DONE", "without a reason", "an error"],
)
def test_a_stream_without_its_end_is_lost(text):
    with pytest.raises(RuntimeError):
        answer(text)


def test_lost_longer_and_changed_answers_are_counted(capsys):
    expected = [check.Answer([1, 2], "ab"), check.Answer([3], "c")]
    answers = [
        (0, check.Answer([1, 2], "ab", "another version")),
        (0, check.Answer([1, 2, 2], "abb")),
        (1, check.Answer([4], "c")),
        (1, httpx.ReadError("cut")),
    ]
    assert check.compared(answers, expected, "x") == [4, 1, 1, 2]
    assert "x: request 1: ReadError" in capsys.readouterr().err
    assert check.are_right([["x", *check.compared(answers[:1], expected, "x"), 0, 0, "1.0"]])
    for wrong in answers[1:]:
        assert not check.are_right([["x", *check.compared([wrong], expected, "x"), 0, 0, "1.0"]])


def test_the_state_of_a_cluster_is_read_from_its_metrics():
    text = b"# HELP dflash:cluster_%b_total A.\n# TYPE dflash:cluster_%b_total counter\n"
    text += b'dflash:cluster_%b_total{engine="0"} 3.0\n'
    text = b"".join(text % ((name,) * 3) for name in (b"resumed", b"repeated"))
    state = check.State.read(merged({"one": text, "two": text.replace(b"3.0", b"1.0")}).decode())
    assert state == check.State({"one", "two"}, 4, 4)


def cell(direct, other, routed, stream=False, path="/v1/completions"):
    def to(text):
        status, text = text if isinstance(text, tuple) else (200, text)
        transport = httpx.MockTransport(lambda request: httpx.Response(status, text=text))
        return httpx.Client(transport=transport, base_url="http://x")

    case = routers.Case("x", path, {"prompt": "x"}, True)
    return routers.result(to(routed), [to(direct), to(other)], case, stream)


def test_a_router_may_change_what_differs_from_server_to_server_and_nothing_else():
    first, second = '{"id": 1, "choices": [{"text": "a"}]}', '{"id": 2, "choices": [{"text": "a"}]}'
    assert cell(first, second, '{"id": 3, "choices": [{"text": "a"}]}') == "yes"
    assert cell(first, second, '{"id": 3, "choices": [{"text": "b"}]}') == "other: choices.0.text"
    assert cell(first, second, '{"id": 3, "choices": []}') == "other: choices.0.text"
    assert (
        cell(first, second, (400, '{"error": {"message": "no_stop_trim is unknown"}}')) == "400 no_stop_trim is unknown"
    )
    assert cell(first, second, (404, "")) == "404"


def test_a_stream_through_a_router_has_the_whole_text_and_its_end():
    pieces = chunk("ab", [1, 2], "stop") + DONE
    assert cell(WHOLE, WHOLE, pieces, stream=True) == "yes"
    assert cell(WHOLE, WHOLE, chunk("a", [1]) + DONE, stream=True) == "other: choices.0.text"
    assert cell(WHOLE, WHOLE, chunk("ab", [1, 2]), stream=True) == "a stream without its end"


BEGINNING = 'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        (200, BEGINNING * 2 + DONE, ("whole", "aa")),
        (200, BEGINNING, ("cut", "a")),
        (200, BEGINNING + 'data: {"error": {"message": "lost"}}\n\n' + DONE, ("error event", "a")),
        (502, "", ("status 502", "")),
    ],
)
def test_how_a_stream_ends_whose_server_is_killed(status, text, expected):
    transport = httpx.MockTransport(lambda request: httpx.Response(status, text=text))
    has_begun = threading.Semaphore(0)
    with httpx.Client(transport=transport, base_url="http://x") as http:
        assert routers.ended(http, {"stream": True}, has_begun) == expected
    assert has_begun.acquire(blocking=False)
    assert not has_begun.acquire(blocking=False)

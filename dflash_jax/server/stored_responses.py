"""/v1/responses/{id}: stored responses."""

import json
import re
from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from pydantic_core import from_json

from dflash_jax.server.answer_schema import DeletedResponse, InputItems, Response
from dflash_jax.server.content import has_media, text_of
from dflash_jax.server.errors import ApiError, JsonResponse, dumped
from dflash_jax.server.request_context import fresh_id
from dflash_jax.server.response_store import StoredResponse
from dflash_jax.server.responses_input import ADDED_TOOLS, COMPACTIONS, FOUND_TOOLS, InputItem
from dflash_jax.server.serving import Serving
from dflash_jax.server.stream import JsonAnswer

router = APIRouter()
# The id of a stored item, which is its first key.
_ID = re.compile(rb'\{"id":("(?:[^"\\]++|\\.)*+")')
IDS = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs", ADDED_TOOLS: "at"}
IDS |= {FOUND_TOOLS: "tso", **dict.fromkeys(COMPACTIONS, "cmp")}
# The id of an item of an answer: its kind, the key of the answer's items, and its number.
_OF_ANSWER = re.compile(r"[a-z]+_([0-9a-f]{24})[0-9a-f]{8}")


def _missing(response_id: str, param: str | None = None) -> ApiError:
    return ApiError(404, f"response {response_id!r} is not stored here; the least recently used are dropped", param)


async def stored_entry(http: Request, response_id: str, param: str | None = None) -> StoredResponse:
    """A response of this client.

    Raises:
        ApiError: There is none.
    """
    entry = await http.app.state.serving.response_store.get(http.state.owner, response_id)
    if entry is None:
        raise _missing(response_id, param)
    return entry


async def earlier_items(http: Request, response_id: str | None) -> list[bytes]:
    """The items of all turns up to a response, each as JSON; none without a response.

    Their bytes count as those of the request's body.

    Raises:
        ApiError: The response is not there, or exceeds the memory for bodies.
    """
    if response_id is None:
        return []
    serving: Serving = http.app.state.serving
    entry = await stored_entry(http, response_id, "previous_response_id")
    http.state.body.reserve(entry.nbytes)
    items = [entry.input[begin:end] async for begin, end in serving.in_steps(entry.places())]
    return items + [dumped(item) for item in loaded(entry.output)]


def answer_item_id(kind: str, item_key: str, number: int) -> str:
    """The id of an item of an answer, by which `referenced` finds it."""
    return f"{kind}_{item_key}{number:08x}"


async def referenced(http: Request, given: Sequence[InputItem], earlier: list[bytes]) -> list[InputItem]:
    """An input with the stored items that it names in place of their names.

    An item is in a conversation once: what names one that is there is left as it is, and adds nothing.

    Args:
        http: The request.
        given: The input.
        earlier: Items of earlier turns, as JSON.

    Raises:
        ApiError: 404, an item is not there; 400, they exceed the bytes that a body may have.
    """
    serving: Serving = http.app.state.serving
    if not any(item.is_reference for item in given):
        return list(given)
    known = {item.id for item in given if not item.is_reference and isinstance(item.id, str)}
    known |= {item_id(line) async for line in serving.in_steps(earlier)}
    outputs: dict[str, dict[str, dict]] = {}
    items, size, most = [], 0, serving.most_body_bytes("/v1/responses")
    async for i, item in serving.in_steps(enumerate(given)):
        where, name = f"input[{i}].id", item.id
        if not item.is_reference:
            items.append(item)
            continue
        if not isinstance(name, str):
            raise ApiError(400, f"{where} must be text", where)
        key = match[1] if (match := _OF_ANSWER.fullmatch(name)) else ""
        if name not in known and key not in outputs:
            output = await serving.response_store.output(http.state.owner, key.encode()) if key else None
            size += len(output or b"")
            if size > most:
                message = f"the answers that input names have {size} bytes: at most {most} are possible"
                raise ApiError(400, message, "input")
            http.state.body.reserve(len(output or b""))
            async with serving.long_step(len(output or b"")):
                outputs[key] = {stored["id"]: stored for stored in loaded(output or b"[]")}
        if name in known:
            items.append(InputItem(type="item_reference"))
        elif name in outputs[key]:
            known.add(name)
            items.append(InputItem(**outputs[key][name]))
        else:
            message = f"{where}: item {name[:64]!r} is not stored here; the least recently used responses are dropped"
            raise ApiError(404, message, where)
    return items


def item_id(item: bytes) -> str:
    """The id of a stored item."""
    match = _ID.match(item)
    assert match is not None, item[:100]
    return json.loads(match[1])


def loaded(item: bytes) -> dict:
    """A stored item or response."""
    try:
        # A fifth of the time of Python's own module: an image has tens of megabytes.
        return from_json(item)
    except ValueError:
        # Half of a surrogate pair.
        return json.loads(item)


async def stored_items(serving: Serving, earlier: list[bytes], given: Sequence[InputItem]) -> bytes:
    """The conversation in its stored form.

    Args:
        serving: The model and its engine.
        earlier: Items of earlier turns, as JSON.
        given: The input, which `as_messages` has validated.

    Raises:
        ApiError: The conversation has more bytes than a body may have. Its text can still be short, since templates
            drop old thoughts.
    """
    lines = earlier + [dumped(_item(item)) async for item in serving.in_steps(given)]
    if (size := sum(map(len, lines))) > (most := serving.most_body_bytes("/v1/responses")):
        raise ApiError(400, f"the conversation has {size} bytes: at most {most} are possible", "input")
    async with serving.long_step(size):
        return b"\n".join(lines)


def _item(item: InputItem) -> dict:
    """An input item as answers list it: with an id, and without unknown keys."""
    kind, more = item.type or "message", item.model_extra or {}
    given, fresh = more.get("id"), f"{IDS[kind]}_{fresh_id()}"
    value = {"id": given if isinstance(given, str) else fresh, "type": kind, "status": "completed"}
    if kind == "message":
        part = "output_text" if item.role == "assistant" else "input_text"
        if isinstance(item.content, list) and has_media(item.content):
            content = [each.model_dump(exclude_none=True) for each in item.content]
        else:
            content = [{"type": part, "text": text_of(item.content, "input")}]
        return value | {"role": item.role, "content": content}
    if kind == "reasoning":
        parts = item.content if isinstance(item.content, list) else ()
        thoughts = [{"type": "reasoning_text", "text": part.text or ""} for part in parts]
        return value | {"summary": [], "content": thoughts}
    if kind in COMPACTIONS:
        return {"id": value["id"], "type": COMPACTIONS[0], "encrypted_content": more["encrypted_content"]}
    return value | {name: more[name] for name in ("call_id", "name", "arguments", "output", "tools") if name in more}


def stored_response(response: dict, conversation: bytes, item_key: str) -> StoredResponse:
    """A response in its stored form.

    Log-probabilities are left out, since they are most of its bytes, and so are sealed thoughts: no later turn needs
    them.

    Args:
        response: The response.
        conversation: The conversation before it.
        item_key: What the ids of its items have in common.
    """
    output = []
    for item in response["output"]:
        if item["type"] == "message":
            item = item | {"content": [part | {"logprobs": []} for part in item["content"]]}
        if item["type"] == "reasoning":
            item = {name: value for name, value in item.items() if name != "encrypted_content"}
        output.append(item)
    head, end = dumped({name: value for name, value in response.items() if name != "output"}), dumped(output)
    return StoredResponse(b'%b,"output":%b}' % (head[:-1], end), conversation, len(end), item_key.encode("ascii"))


@router.get("/v1/responses/{response_id}", responses={200: {"model": Response}}, response_model=None)
async def retrieve(http: Request, response_id: str, stream: bool = False):
    """A stored response."""
    if stream:
        raise ApiError(400, "stream: only background responses can be streamed again, and there are none", "stream")
    return JsonAnswer((await stored_entry(http, response_id)).response)


@router.delete("/v1/responses/{response_id}", responses={200: {"model": DeletedResponse}}, response_model=None)
async def delete(http: Request, response_id: str):
    """Deletes a stored response."""
    if not await http.app.state.serving.response_store.delete(http.state.owner, response_id):
        raise _missing(response_id)
    return JsonResponse({"id": response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel", response_model=None)
async def cancel(http: Request, response_id: str):
    """Always an error: a response is stored when it has ended, so there is nothing to cancel."""
    await stored_entry(http, response_id)
    raise ApiError(400, "only background responses can be cancelled: to end another, close its connection")


@router.get("/v1/responses/{response_id}/input_items", responses={200: {"model": InputItems}}, response_model=None)
async def input_items(
    http: Request,
    response_id: str,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
):
    """The items before a response, those of earlier turns included."""
    entry = await stored_entry(http, response_id)
    items = entry.places(from_end=order == "desc")
    if after is not None:
        begin = b'{"id":%b,' % dumped(after)
        if not any(entry.input.startswith(begin, place) for place, _ in items):
            raise ApiError(404, f"after is {after!r}: there is no such item", "after")
    page = [entry.input[place:end] for place, end in islice(items, limit)]
    ends = page[:1] + page[-1:] if len(page) > 1 else page
    ids = [item_id(item) for item in ends] or [None]
    names = {"first_id": ids[0], "last_id": ids[-1], "has_more": next(items, None) is not None}
    return JsonAnswer({"object": "list", "data": iter(page), **names})

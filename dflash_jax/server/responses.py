"""/v1/responses: OpenAI's newer interface over the same conversations."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from fastapi import APIRouter, Request
from pydantic import ValidationError

from dflash_jax.server import chat_schema, responses_schema
from dflash_jax.server.answer_schema import Response
from dflash_jax.server.answers import request_metrics
from dflash_jax.server.body import MediaRoute
from dflash_jax.server.chat import prepare_chat, tools_in_use
from dflash_jax.server.conversation import Conversation, converse
from dflash_jax.server.engine_client import RemoteSequence
from dflash_jax.server.errors import ApiError, TooLongError, as_api_error, from_conversion_error
from dflash_jax.server.request_context import current
from dflash_jax.server.response_store import StoredResponse
from dflash_jax.server.responses_input import as_chat, takes_media
from dflash_jax.server.responses_output import Output, envelope, final_value
from dflash_jax.server.serving import STEP_ITEMS, Serving
from dflash_jax.server.stored_responses import (
    earlier_items,
    head,
    holds_media,
    least_characters,
    loaded,
    stored_items,
    stored_response,
)
from dflash_jax.server.stream import EventStream, Frame, JsonAnswer, Later, frame, frame_parts

router = APIRouter(route_class=MediaRoute)


@router.post("/v1/responses", responses={200: {"model": Response}}, response_model=None)
async def responses(http: Request, body: responses_schema.ResponsesRequest):
    """OpenAI's responses."""
    serving: Serving = http.app.state.serving
    store = serving.response_store
    if body.store and not store.size:
        raise ApiError(400, "store: this server stores no responses (--response-store 0)", "store")
    earlier = await earlier_items(http, body)
    if len(earlier) <= STEP_ITEMS:
        talk, sequences, stored = await prepare_response(http, body, earlier)
    else:
        with await serving.long_conversations.take(len(earlier)):
            talk, sequences, stored = await prepare_response(http, body, earlier)
    context = current()
    name = context.choose_id("resp_")
    context.answer_id = body.request_id or name
    is_stored = body.store is not False and store.size > 0
    value = envelope(body, serving.name, context.answer_id, context.created, is_stored)

    async def store_response(response: dict) -> None:
        if is_stored:
            entry = StoredResponse(stored_response(response), stored)
            response["store"] = await store.put(http.state.owner, response["id"], entry, http.state.client)

    events = response_events(serving, talk, sequences[0], value, store_response)
    answer = (
        EventStream(event_frames(events), last=b"", error=error_frame).start() if body.stream else full_response(events)
    )
    # The answer repeats tools and metadata of the parsed body, and the store's entry has the conversation.
    return Later(http, answer, keeps_parsed=True)


async def prepare_response(
    http: Request, body: responses_schema.ResponsesRequest, earlier: list[bytes]
) -> tuple[Conversation, list[RemoteSequence], bytes]:
    """Prepares a request after the items ``earlier``.

    Returns:
        The conversation, its sequence, and its items in their stored form. The parsed items are garbage then.

    Raises:
        ApiError: The request is invalid.
    """
    serving: Serving = http.app.state.serving
    input_items = (
        [responses_schema.InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    )
    if not input_items:
        raise ApiError(400, "input is empty", "input")
    count = len(earlier)
    parsed: dict[int, responses_schema.InputItem] = {}

    async def as_chat_of(places: Sequence[int]) -> chat_schema.ChatRequest:
        """The chat request of the items at these places. Each item is parsed once, and only if it is needed."""
        missing = [i for i in places if i < count and i not in parsed]
        async for i in serving.in_steps(missing):
            async with serving.long_step(len(earlier[i])):
                parsed[i] = responses_schema.InputItem(**loaded(earlier[i]))
        await serving.turn()
        return as_chat(
            body, [parsed[i] if i < count else input_items[i - count] for i in places], sum(i < count for i in places)
        )

    places: Sequence[int] = range(count + len(input_items))
    try:
        if body.truncation == "auto":
            # Validates the input first, so that errors name its items as they were sent.
            as_chat(body, input_items)
            heads, sizes, has_media = [], [], any(map(takes_media, input_items))
            async for item in serving.in_steps(earlier):
                heads.append(responses_schema.InputItem(**head(item)))
                sizes.append(least_characters(item))
                has_media = has_media or holds_media(item)
            if has_media:
                raise ApiError(400, "truncation: auto is not possible with images and videos", "truncation")
            heads, sizes = [*heads, *input_items], [*sizes, *map(characters, input_items)]
            places = await kept_items(serving, heads, sizes, as_chat_of)
        if len(places) > serving.limits.objects:
            message = f"the conversation has {len(places)} items: at most {serving.limits.objects} are possible"
            raise ApiError(400, f"{message}, or truncation: auto", "input")
        chat = await as_chat_of(places)
    except ValidationError as e:
        raise from_conversion_error(e) from None
    input_items = [input_items[i - count] for i in places if i >= count]
    earlier = [earlier[i] for i in places if i < count]
    stored = await stored_items(serving, earlier, input_items)
    talk, sequences = await prepare_chat(serving, chat)
    return talk, sequences, stored


async def full_response(events: AsyncGenerator[dict, None]) -> JsonAnswer:
    """Waits for all events, then answers."""
    async for event in events:
        last = event
    if last["type"] == "response.failed":
        raise last["cause"]
    return JsonAnswer(last["response"])


async def event_frames(events: AsyncGenerator[dict, None]) -> AsyncGenerator[Frame, None]:
    """Yields events as frames, with their sequence numbers."""
    number = 0
    async for event in events:
        event.pop("cause", None)
        event["sequence_number"] = number
        number += 1
        yield frame_parts(event, event["type"])


def error_frame(error: ApiError, number: int = 0) -> bytes:
    """The event of an error after ``number`` others. An error of a stream that has begun is ``response.failed``."""
    value = {"type": "error", "code": "server_error", "message": error.message, "param": error.param}
    return frame(value | {"sequence_number": number}, "error")


async def response_events(
    serving: Serving,
    talk: Conversation,
    sequence: RemoteSequence,
    value: dict,
    store_response: Callable[[dict], Awaitable[None]],
) -> AsyncGenerator[dict, None]:
    """Yields the events of a response.

    It is stored before the last event, so that a client that reads that event can continue it.
    """
    output, parser, has_begun = Output(serving.llm.tokenizer), talk.parser(), False
    try:
        async for piece in serving.pieces(sequence):
            if not has_begun:
                has_begun = True
                yield {"type": "response.created", "response": value}
                yield {"type": "response.in_progress", "response": value}
            for event in output.take(parser.push(piece), piece.logprobs):
                yield event
            if piece.finish_reason:
                for event in output.take(parser.finish(sequence), None):
                    yield event
        response = final_value(value, output, sequence, parser.reasoning_tokens)
        response |= request_metrics(serving, [sequence])
        for event in output.close("completed" if response["status"] == "completed" else "incomplete"):
            yield event
        await store_response(response)
    except Exception as e:
        if not has_begun:
            raise
        error = as_api_error(e)
        failed = {**value, "status": "failed", "error": {"code": "server_error", "message": error.message}}
        yield {"type": "response.failed", "response": failed, "cause": error}
        return
    yield {"type": f"response.{response['status']}", "response": response}


# ``truncation: "auto"``: a conversation that is too long continues without its oldest items.
CALL, OUTPUT = "function_call", "function_call_output"
OF_MODEL = ("assistant", "reasoning", CALL)
OF_SYSTEM = ("system", "developer")


def droppable(items: Sequence[responses_schema.InputItem]) -> list[list[int]]:
    """The items that may be dropped, as groups of indices, the oldest group first.

    A group is dropped as a whole, so that chat templates accept the remaining items. A group is a turn, which begins
    with a message of the user; in the latest turn it is a step: items of the model up to the outputs of its calls. The
    output of a call is in the group of the call. No group has system messages, the newest input (all items after the
    model's last one), the calls that the newest input answers, or the user's last message before it.
    """
    kinds = {i: _kind(item) for i, item in enumerate(items) if _kind(item) not in OF_SYSTEM}
    last = max((i for i, kind in kinds.items() if kind in OF_MODEL), default=-1)
    newest = {i for i in kinds if i > last} or set([*kinds][-1:])
    # Ids may repeat: an output belongs to the last call before it.
    calls = {_call_id(items[i]): i for i, kind in kinds.items() if kind == CALL}
    answered = {_call_id(items[i]) for i in newest if kinds[i] == OUTPUT} & set(calls)
    begin = min([*newest, *(calls[name] for name in answered)], default=0)
    user_turns = [i for i, kind in kinds.items() if kind == "user"]
    question = max((i for i in user_turns if i <= begin), default=max(user_turns, default=-1))

    groups: list[list[int]] = []
    group_of_call: dict[str | None, list[int]] = {}
    is_open = False
    for i, kind in kinds.items():
        name = _call_id(items[i])
        if i == question:
            is_open = False
        elif kind == OUTPUT and name in group_of_call:
            group_of_call[name].append(i)
            # In the latest turn, the model's next step begins a group.
            is_open = is_open and i < question
        else:
            if not is_open or kind in ("user", OUTPUT):
                groups.append([])
            groups[-1].append(i)
            is_open = True
            if kind == CALL:
                group_of_call[name] = groups[-1]
    return [group for group in groups if newest.isdisjoint(group)]


def _kind(item: responses_schema.InputItem) -> str | None:
    """The type of an item; of a message, its role."""
    return item.role if item.type in (None, "message") else item.type


def _call_id(item: responses_schema.InputItem) -> str | None:
    return (item.model_extra or {}).get("call_id")


def characters(item: responses_schema.InputItem) -> int:
    """Characters of an item's texts."""
    parts = item.content if isinstance(item.content, list) else ()
    texts = [item.content, *(part.text for part in parts), *(item.model_extra or {}).values()]
    return sum(len(text) for text in texts if isinstance(text, str))


async def kept_items(
    serving: Serving,
    items: Sequence[responses_schema.InputItem],
    sizes: Sequence[int],
    as_chat: Callable[[Sequence[int]], Awaitable[chat_schema.ChatRequest]],
) -> list[int]:
    """The items with which a conversation continues: as few of the oldest `droppable` groups as possible are dropped.

    Args:
        serving: The model and its engine.
        items: The whole conversation, valid; texts may be left out.
        sizes: Characters of each item's texts, or fewer.
        as_chat: Makes the request for the items at some places.

    Returns:
        Places of items. Where all groups are dropped, the rest may still be too long.
    """
    groups = droppable(items)

    def kept(count: int) -> list[int]:
        dropped = {i for group in groups[:count] for i in group}
        return [i for i in range(len(items)) if i not in dropped]

    async def fits(count: int) -> bool:
        chat = await as_chat(kept(count))
        try:
            talk = await converse(serving, chat.messages, tools_in_use(chat), chat)
            serving.check_room(talk.prompt, chat.max_completion_tokens, "messages")
        except TooLongError:
            return False
        return True

    # Groups are dropped without rendering while the conversation exceeds the limits of any request.
    low, size, count = 0, sum(sizes), len(items)
    while low < len(groups) and (size > serving.texts.most_cut or count > serving.limits.objects):
        size, count = size - sum(sizes[i] for i in groups[low]), count - len(groups[low])
        low += 1
    high = len(groups)
    if low == high or await fits(low):
        return kept(low)
    low += 1
    while low < high:
        middle = (low + high) // 2
        if await fits(middle):
            high = middle
        else:
            low = middle + 1
    return kept(low)

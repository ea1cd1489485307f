"""/v1/responses: OpenAI's newer interface over the same conversations."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response as HttpResponse

from dflash_jax.frontend.sequence import TextSequence
from dflash_jax.server import chat_schema, large_answers, request_id, responses_schema, resume
from dflash_jax.server.answer_schema import Response
from dflash_jax.server.answers import request_metrics
from dflash_jax.server.body import MediaRoute
from dflash_jax.server.chat import prepare_chat
from dflash_jax.server.conversation import Conversation
from dflash_jax.server.errors import ApiError, as_api_error, from_conversion_error
from dflash_jax.server.request_scope import while_connected
from dflash_jax.server.response_store import StoredResponse
from dflash_jax.server.responses_input import as_chat, takes_media
from dflash_jax.server.responses_output import Output, envelope, final_value
from dflash_jax.server.serving import STEP_ITEMS, Serving
from dflash_jax.server.stored_responses import (
    earlier_items,
    earlier_response,
    head,
    holds_media,
    least_characters,
    loaded,
    stored_items,
    stored_response,
)
from dflash_jax.server.stream import EventStream, Later, frame
from dflash_jax.server.truncation import characters, kept_items

router = APIRouter(route_class=MediaRoute)

# Stores a complete response if the request asks for that.
StoreResponse = Callable[[dict], Awaitable[None]]


@router.post("/v1/responses", responses={200: {"model": Response}}, response_model=None)
async def responses(http: Request, body: responses_schema.ResponsesRequest):
    """OpenAI's responses."""
    serving: Serving = http.app.state.serving
    store = serving.response_store
    if body.store and not store.size:
        raise ApiError(400, "store: this server stores no responses (--response-store 0)", "store")
    entry = await earlier_response(http, body)
    if entry is None or entry.count <= STEP_ITEMS:
        talk, sequences, stored = await prepare_response(http, body, entry)
    else:
        with await while_connected(http, serving.long_conversations.take(entry.count)):
            talk, sequences, stored = await prepare_response(http, body, entry)
    name = request_id.choose("resp_")
    is_stored = body.store is not False and store.size > 0
    value = envelope(body, serving.name, body.request_id or name, resume.current().created, is_stored)
    serving.register(sequences, value["id"], http.state.owner)

    async def store_response(response: dict) -> None:
        if is_stored:
            entry = StoredResponse(stored_response(response), stored, resume.current().key)
            response["store"] = await store.put(http.state.owner, response["id"], entry, http.state.client)

    events = numbered_events(serving, talk, sequences[0], value, store_response)
    answer = (
        EventStream.start(http, event_frames(events, sequences), last=b"", error=error_frame)
        if body.stream
        else full_response(http, events, sequences)
    )
    # The answer repeats tools and metadata of the parsed body, and the store's entry has the conversation.
    return Later(http, answer, keeps_parsed=True)


async def prepare_response(
    http: Request, body: responses_schema.ResponsesRequest, entry: StoredResponse | None
) -> tuple[Conversation, list[TextSequence], bytes]:
    """Prepares a request behind the response ``entry``.

    Returns:
        The conversation, its sequence, and its items in their stored form. The parsed items are garbage then.

    Raises:
        ApiError: The request is invalid.
    """
    serving: Serving = http.app.state.serving
    earlier = []
    if entry is not None:
        async with serving.long_step(entry.nbytes):
            earlier = earlier_items(entry)
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
        async for step in serving.in_steps(missing):
            async with serving.long_step(sum(len(earlier[i]) for i in step)):
                parsed.update((i, responses_schema.InputItem(**loaded(earlier[i]))) for i in step)
        await serving.turn()
        return as_chat(
            body, [parsed[i] if i < count else input_items[i - count] for i in places], sum(i < count for i in places)
        )

    places: Sequence[int] = range(count + len(input_items))
    try:
        if body.truncation == "auto":
            if any(map(takes_media, input_items)) or any(map(holds_media, earlier)):
                raise ApiError(400, "truncation: auto is not possible with images and videos", "truncation")
            # Validates the input first, so that errors name its items as they were sent.
            as_chat(body, input_items)
            heads = []
            async for items in serving.in_steps(earlier):
                heads += [responses_schema.InputItem(**head(item)) for item in items]
            heads += input_items
            sizes = [*map(least_characters, earlier), *map(characters, input_items)]
            places = await while_connected(http, kept_items(serving, heads, sizes, as_chat_of))
        if len(places) > serving.limits.objects:
            message = f"the conversation has {len(places)} items: at most {serving.limits.objects} are possible"
            raise ApiError(400, f"{message}, or truncation: auto", "input")
        chat = await as_chat_of(places)
    except ValidationError as e:
        raise from_conversion_error(e) from None
    input_items = [input_items[i - count] for i in places if i >= count]
    earlier = [earlier[i] for i in places if i < count]
    stored = await stored_items(serving, earlier, input_items)
    talk, sequences = await while_connected(http, prepare_chat(serving, chat))
    return talk, sequences, stored


async def full_response(
    http: Request, events: AsyncGenerator[dict, None], sequences: Sequence[TextSequence]
) -> HttpResponse:
    """Waits for all events, then answers."""
    value = await while_connected(http, final_response(events))
    return await large_answers.json_response(sequences, lambda: value)


async def final_response(events: AsyncGenerator[dict, None]) -> dict:
    """The response of the last event.

    Raises:
        ApiError: The generation failed.
    """
    async for event in events:
        last = event
    if last["type"] == "response.failed":
        raise last["cause"]
    return last["response"]


async def event_frames(
    events: AsyncGenerator[dict, None], sequences: Sequence[TextSequence]
) -> AsyncGenerator[bytes, None]:
    """Yields events as frames."""
    async for event in events:
        event.pop("cause", None)
        # All events but deltas may have the log-probabilities of the whole text.
        count = 0 if event["type"].endswith(".delta") else large_answers.logprob_count(sequences)
        yield await large_answers.event(count, lambda event=event: event, event["type"])


def error_frame(error: ApiError, number: int = 0) -> bytes:
    """The event of an error; ``number``: the events before it."""
    value = {"type": "error", "code": "server_error", "message": error.message, "param": error.param}
    return frame(value | {"sequence_number": number}, "error")


async def numbered_events(
    serving: Serving, talk: Conversation, sequence: TextSequence, value: dict, store_response: StoreResponse
) -> AsyncGenerator[dict, None]:
    """Yields the events of a response with their sequence numbers."""
    number = 0
    async for event in response_events(serving, talk, sequence, value, store_response):
        yield {**event, "sequence_number": number}
        number += 1


async def response_events(
    serving: Serving, talk: Conversation, sequence: TextSequence, value: dict, store_response: StoreResponse
) -> AsyncGenerator[dict, None]:
    """Yields the events of a response.

    The response is stored before the last event, so that a client that reads that event can continue it.
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
        if serving.additions.metrics:
            response |= request_metrics([sequence])
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

"""/v1/responses: OpenAI's newer interface over the same conversations."""

import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response as HttpResponse

from dflash_jax.frontend.sequence import TextSequence
from dflash_jax.server import chat_schema, large_answers, request_id, responses_schema
from dflash_jax.server.answer_schema import Response
from dflash_jax.server.answers import request_metrics
from dflash_jax.server.chat import prepared
from dflash_jax.server.conversation import Conversation
from dflash_jax.server.errors import ApiError, as_api_error, of_conversion
from dflash_jax.server.response_store import StoredResponse
from dflash_jax.server.responses_input import as_chat
from dflash_jax.server.responses_output import Output, ended, envelope
from dflash_jax.server.serving import Serving, while_connected
from dflash_jax.server.stored_responses import earlier_items, head, least_characters, stored_items, stored_response
from dflash_jax.server.stream import EventStream, Later
from dflash_jax.server.truncation import characters, kept_items

router = APIRouter()

# Stores a whole response, where that is asked for.
Keep = Callable[[dict], Awaitable[None]]


@router.post("/v1/responses", responses={200: {"model": Response}}, response_model=None)
async def responses(http: Request, body: responses_schema.ResponsesRequest):
    serving: Serving = http.app.state.serving
    store = serving.response_store
    if body.store and not store.size:
        raise ApiError(400, "store: this server stores no responses (--response-store 0)", "store")
    earlier = await earlier_items(http, body)
    given = [responses_schema.InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    if not given:
        raise ApiError(400, "input is empty", "input")
    count = len(earlier)
    parsed: dict[int, responses_schema.InputItem] = {}

    async def as_chat_of(kept: Sequence[int]) -> chat_schema.ChatRequest:
        """Of the items at these places of the conversation. Others are not parsed, and none twice."""
        missing = [i for i in kept if i < count and i not in parsed]
        async for places in serving.in_steps(missing):
            parsed.update((i, responses_schema.InputItem(**json.loads(earlier[i]))) for i in places)
        await serving.turn()
        return as_chat(body, [parsed[i] if i < count else given[i - count] for i in kept], sum(i < count for i in kept))

    kept: Sequence[int] = range(count + len(given))
    try:
        if body.truncation == "auto":
            # What is wrong is said of the input as it was sent.
            as_chat(body, given)
            heads = []
            async for items in serving.in_steps(earlier):
                heads += [responses_schema.InputItem(**head(item)) for item in items]
            heads += given
            sizes = [*map(least_characters, earlier), *map(characters, given)]
            kept = await while_connected(http, kept_items(serving, heads, sizes, as_chat_of))
        if len(kept) > serving.limits.objects:
            message = f"the conversation has {len(kept)} items: at most {serving.limits.objects} are possible"
            raise ApiError(400, f"{message}, or truncation: auto", "input")
        chat = await as_chat_of(kept)
    except ValidationError as e:
        raise of_conversion(e) from None
    given = [given[i - count] for i in kept if i >= count]
    earlier = [earlier[i] for i in kept if i < count]
    name = request_id.choose("resp_")
    is_stored = body.store is not False and store.size > 0
    stored = await stored_items(serving, earlier, given)
    talk, rows = await while_connected(http, prepared(serving, chat))
    value = envelope(body, serving.name, body.request_id or name, int(time.time()), is_stored)
    serving.register(rows, value["id"], http.state.owner)

    async def keep(whole: dict) -> None:
        if is_stored:
            entry = StoredResponse(stored_response(whole), stored)
            whole["store"] = await store.put(http.state.owner, whole["id"], entry, http.state.client)

    events = numbered(serving, talk, rows[0], value, keep)
    answer = EventStream.start(http, framed(events, rows), last=b"") if body.stream else whole(http, events, rows)
    # The answer repeats tools and metadata, and the store's entry has the conversation.
    return Later(http, answer, keeps_parsed=True)


async def whole(http: Request, events: AsyncGenerator[dict, None], rows: Sequence[TextSequence]) -> HttpResponse:
    value = await while_connected(http, last(events))
    return await large_answers.json_response(rows, lambda: value)


async def last(events: AsyncGenerator[dict, None]) -> dict:
    async for event in events:
        found = event
    if found["type"] == "response.failed":
        raise found["cause"]
    return found["response"]


async def framed(events: AsyncGenerator[dict, None], rows: Sequence[TextSequence]) -> AsyncGenerator[bytes, None]:
    async for event in events:
        event.pop("cause", None)
        # All but deltas may have the whole text's log-probabilities.
        count = 0 if event["type"].endswith(".delta") else large_answers.entries(rows)
        yield await large_answers.event(count, lambda event=event: event, event["type"])


async def numbered(
    serving: Serving, talk: Conversation, row: TextSequence, value: dict, keep: Keep
) -> AsyncGenerator[dict, None]:
    number = 0
    async for event in told(serving, talk, row, value, keep):
        yield {**event, "sequence_number": number}
        number += 1


async def told(
    serving: Serving, talk: Conversation, row: TextSequence, value: dict, keep: Keep
) -> AsyncGenerator[dict, None]:
    """The events of a response. It is stored before the last one, so that a client that reads that can continue it."""
    output, parser, begun = Output(serving.llm.tokenizer), talk.parser(), False
    try:
        async for piece in serving.pieces(row):
            if not begun:
                begun = True
                yield {"type": "response.created", "response": value}
                yield {"type": "response.in_progress", "response": value}
            for event in output.take(parser.push(piece), piece.logprobs):
                yield event
            if piece.finish_reason:
                for event in output.take(parser.finish(row), None):
                    yield event
    except Exception as e:
        if not begun:
            raise
        error = as_api_error(e)
        failed = {**value, "status": "failed", "error": {"code": "server_error", "message": error.message}}
        yield {"type": "response.failed", "response": failed, "cause": error}
        return
    whole = ended(value, output, row, parser.reasoning_tokens)
    if serving.additions.metrics:
        whole |= request_metrics([row])
    for event in output.close("completed" if whole["status"] == "completed" else "incomplete"):
        yield event
    await keep(whole)
    yield {"type": f"response.{whole['status']}", "response": whole}

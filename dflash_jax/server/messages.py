"""/v1/messages: Anthropic's Messages API over the same conversations."""

from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request

from dflash_jax.frontend.sequence import TextSequence
from dflash_jax.server import request_id
from dflash_jax.server.answer_schema import InputTokens, MessagesAnswer, MessagesError
from dflash_jax.server.answers import usage
from dflash_jax.server.body import MediaRoute
from dflash_jax.server.chat import prepare_chat, tools_in_use
from dflash_jax.server.conversation import Conversation, converse
from dflash_jax.server.errors import ApiError, JsonResponse
from dflash_jax.server.messages_input import as_chat
from dflash_jax.server.messages_output import Content, stop_fields, usage_fields
from dflash_jax.server.messages_schema import CountTokensRequest, MessagesRequest
from dflash_jax.server.request_scope import while_connected
from dflash_jax.server.serving import Serving
from dflash_jax.server.stream import EventStream, Later, frame

PATH = "/v1/messages"
# What a stream says while nothing comes.
PING = frame({"type": "ping"}, "ping")
router = APIRouter(route_class=MediaRoute, responses={"4XX": {"model": MessagesError}, "5XX": {"model": MessagesError}})


async def message_events(
    serving: Serving, talk: Conversation, sequence: TextSequence, message: dict, content: Content
) -> AsyncGenerator[dict, None]:
    """Yields the events of an answer, and fills ``message`` with the complete answer."""
    parser = talk.parser()
    async for piece in serving.pieces(sequence):
        if message["usage"] is None:
            message["usage"] = usage_fields(sequence, 0)
            yield {"type": "message_start", "message": dict(message)}
        for event in content.take(parser.push(piece)):
            yield event
        if piece.finish_reason:
            for event in content.take(parser.finish(sequence)) + content.close():
                yield event
    counted = usage([sequence], 1)["completion_tokens"]
    stop, totals = stop_fields(sequence, parser), usage_fields(sequence, counted, parser.reasoning_tokens)
    message |= {"content": content.blocks, **stop, "usage": totals}
    yield {"type": "message_delta", "delta": stop, "usage": totals}
    yield {"type": "message_stop"}


async def event_frames(events: AsyncGenerator[dict, None]) -> AsyncGenerator[bytes, None]:
    """Yields events as frames."""
    async for event in events:
        yield frame(event, event["type"])


def error_frame(error: ApiError) -> bytes:
    """The event of an error."""
    return frame(error.body_for(PATH), "error")


@router.post(PATH, responses={200: {"model": MessagesAnswer}}, response_model=None)
async def messages(http: Request, body: MessagesRequest):
    """Anthropic's messages."""
    serving: Serving = http.app.state.serving
    name = request_id.choose("msg_")
    talk, sequences = await while_connected(http, prepare_chat(serving, as_chat(body)))
    serving.register(sequences, name, http.state.owner)
    message = {
        "id": name,
        "type": "message",
        "role": "assistant",
        "model": body.model or serving.name,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": None,
    }
    content = Content(body.thinking is None or body.thinking.display != "omitted")
    events = message_events(serving, talk, sequences[0], message, content)
    if body.stream:
        answer = EventStream.start(http, event_frames(events), last=b"", idle=PING, error=error_frame)
    else:
        answer = while_connected(http, full_response(events, message))
    return Later(http, answer, keeps_parsed=bool(talk.tools))


async def full_response(events: AsyncGenerator[dict, None], message: dict) -> JsonResponse:
    """Waits for all events, then answers."""
    async for _ in events:
        pass
    return JsonResponse(message)


@router.post(f"{PATH}/count_tokens", responses={200: {"model": InputTokens}}, response_model=None)
async def count_tokens(http: Request, body: CountTokensRequest):
    """Counts the tokens of a prompt."""
    serving: Serving = http.app.state.serving
    serving.check_model(body.model)
    chat = as_chat(body)
    rendered = converse(serving, chat.messages, tools_in_use(chat), chat)
    return JsonResponse({"input_tokens": len((await while_connected(http, rendered)).prompt)})

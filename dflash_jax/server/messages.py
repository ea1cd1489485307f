"""/v1/messages: Anthropic's Messages API over the same conversations."""

from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request

from dflash_jax.json_text import loaded
from dflash_jax.server.answer_schema import InputTokens, MessagesAnswer, MessagesError
from dflash_jax.server.answers import ended_totals
from dflash_jax.server.body import MediaRoute
from dflash_jax.server.chat import prepare_chat, tools_in_use
from dflash_jax.server.conversation import Conversation, GrowingItems, converse
from dflash_jax.server.engine_client import RemoteSequence
from dflash_jax.server.errors import ApiError, JsonResponse
from dflash_jax.server.messages_input import CountTokensRequest, MessagesRequest, as_chat, sealed
from dflash_jax.server.request_context import current
from dflash_jax.server.serving import Serving
from dflash_jax.server.stream import EventStream, Later, event_frames, frame
from dflash_jax.server.tools import CallDelta

# Thoughts that clients send back are not verified, so they are not signed.
SIGNATURE = "unsigned"
# The reasons of answers that did not end by themselves. The interface has none for an aborted one; max_tokens is the
# nearest.
REASONS = {"length": "max_tokens", "abort": "max_tokens", "tool_calls": "tool_use"}
# The reason of one that ended because the context did.
FULL = "model_context_window_exceeded"
# The type and the field of the event of a text, by its kind.
DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "content": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class Content(GrowingItems):
    """The content blocks of an answer."""

    def __init__(self, shows_thoughts: bool = True):
        """An empty content; without ``shows_thoughts`` the text of thinking blocks is in their signatures only."""
        super().__init__()
        self._shows_thoughts = shows_thoughts

    def _begun(self, kind: str, call: CallDelta | None) -> list[dict]:
        if call is not None:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        elif kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            block = {"type": "text", "text": ""}
        self.items.append(block)
        return [self._event("content_block_start", content_block=dict(block))]

    def _grown(self, kind: str, text: str) -> list[dict]:
        if kind == "reasoning" and not self._shows_thoughts:
            return []
        name, field = DELTAS[kind]
        return [self._event("content_block_delta", delta={"type": name, field: text})]

    def _ended(self, kind: str, text: str, status: str) -> list[dict]:
        block, events = self.items[-1], []
        if kind == "call":
            block["input"] = _object(text)
        elif kind == "content":
            block["text"] = text
        else:
            signature = SIGNATURE if self._shows_thoughts else sealed(text)
            block |= {"thinking": text if self._shows_thoughts else "", "signature": signature}
            signed = {"type": "signature_delta", "signature": signature}
            events.append(self._event("content_block_delta", delta=signed))
        return [*events, self._event("content_block_stop")]

    def _event(self, kind: str, **fields) -> dict:
        return {"type": kind, "index": len(self.items) - 1, **fields}


def _object(arguments: str) -> dict:
    """The arguments of a call as an object.

    Text that is no object is wrapped as Anthropic advises clients to wrap it.
    """
    try:
        value = loaded(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}


def usage_fields(sequence: RemoteSequence, output_tokens: int, reasoning_tokens: int = 0) -> dict:
    """Token counts; ``input_tokens`` are those that were not in the prefix cache."""
    prompt, cached = len(sequence.request.prompt), sequence.request.cached
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output_tokens,
        "output_tokens_details": {"thinking_tokens": reasoning_tokens},
    }


PATH = "/v1/messages"
# The event that keeps a stream alive while it has no other.
PING = frame({"type": "ping"}, "ping")
router = APIRouter(route_class=MediaRoute, responses={"4XX": {"model": MessagesError}, "5XX": {"model": MessagesError}})


async def message_events(
    serving: Serving, talk: Conversation, sequence: RemoteSequence, message: dict, content: Content
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
    counted = ended_totals(serving, [sequence]).usage()
    tokens = counted["completion_tokens"]
    totals = usage_fields(sequence, tokens, parser.reasoning_tokens) | {"drafters": counted["drafters"]}
    matched = sequence.matched if isinstance(sequence.matched, str) else None
    reason = "stop_sequence" if matched is not None else REASONS.get(parser.reason(sequence) or "", "end_turn")
    if reason == "max_tokens" and len(sequence.request.prompt) + tokens == serving.capacity:
        reason = FULL
    stop = {"stop_reason": reason, "stop_sequence": matched}
    message |= {"content": content.items, **stop, "usage": totals}
    yield {"type": "message_delta", "delta": stop, "usage": totals}
    yield {"type": "message_stop"}


def error_frame(error: ApiError) -> bytes:
    """The event of an error."""
    return frame(error.anthropic_body(current().anthropic_id or ""), "error")


@router.post(PATH, responses={200: {"model": MessagesAnswer}}, response_model=None)
async def messages(http: Request, body: MessagesRequest):
    """Anthropic's messages."""
    serving: Serving = http.app.state.serving
    name = current().choose_id("msg_")
    talk, sequences = await prepare_chat(serving, as_chat(body))
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
        answer = EventStream(event_frames(events), last=b"", idle=PING, error=error_frame).start()
    else:
        answer = full_response(events, message)
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
    talk = await converse(serving, chat.messages, tools_in_use(chat), chat)
    return JsonResponse({"input_tokens": len(talk.prompt)})

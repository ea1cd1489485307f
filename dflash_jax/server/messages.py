"""/v1/messages: Anthropic's Messages API over the same conversations."""

from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request

from dflash_jax.json_text import loaded
from dflash_jax.server.answer_schema import InputTokens, MessagesAnswer, MessagesError
from dflash_jax.server.answers import usage
from dflash_jax.server.body import MediaRoute
from dflash_jax.server.chat import as_delta, prepare_chat, tools_in_use
from dflash_jax.server.conversation import Conversation, Delta, Parser, converse
from dflash_jax.server.engine_client import RemoteSequence
from dflash_jax.server.errors import ApiError, JsonResponse
from dflash_jax.server.messages_input import as_chat
from dflash_jax.server.messages_schema import CountTokensRequest, MessagesRequest
from dflash_jax.server.request_context import current
from dflash_jax.server.serving import Serving
from dflash_jax.server.stream import EventStream, Later, frame

# Thoughts that clients send back are not verified, so they are not signed.
SIGNATURE = "unsigned"


class Content:
    """The content blocks of an answer as they grow, and the events that report them.

    Attributes:
        blocks: The blocks so far.
    """

    def __init__(self, shows_thoughts: bool = True):
        """An empty content; without ``shows_thoughts`` the text of thinking blocks is left out."""
        self.blocks: list[dict] = []
        self._shows_thoughts = shows_thoughts
        # Parts of the current block's text or arguments.
        self._is_open, self._texts = False, []

    def take(self, delta: Delta) -> list[dict]:
        """Adds a piece.

        Returns:
            Its events.
        """
        events = []
        for part in as_delta(delta):
            if text := part.get("content"):
                events += self._open("text", {"text": ""})
                self._texts.append(text)
                events.append(self._delta("text_delta", text=text))
            elif thought := part.get("reasoning_content"):
                events += self._open("thinking", {"thinking": "", "signature": ""})
                if self._shows_thoughts:
                    self._texts.append(thought)
                    events.append(self._delta("thinking_delta", thinking=thought))
            for call in part.get("tool_calls", ()):
                if name := call["function"].get("name"):
                    events += self.close() + self._open("tool_use", {"id": call["id"], "name": name, "input": {}})
                if arguments := call["function"]["arguments"]:
                    self._texts.append(arguments)
                    events.append(self._delta("input_json_delta", partial_json=arguments))
        return events

    def _open(self, kind: str, fields: dict) -> list[dict]:
        if self._is_open and self.blocks[-1]["type"] == kind:
            return []
        events = self.close()
        self.blocks.append({"type": kind, **fields})
        self._is_open, self._texts = True, []
        start = {"type": "content_block_start", "index": len(self.blocks) - 1}
        # The event gets a copy, since the block still grows.
        return [*events, start | {"content_block": dict(self.blocks[-1])}]

    def _delta(self, kind: str, **fields) -> dict:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": {"type": kind, **fields}}

    def close(self) -> list[dict]:
        """Ends the current block.

        Returns:
            Its events.
        """
        if not self._is_open:
            return []
        self._is_open, block, events, text = False, self.blocks[-1], [], "".join(self._texts)
        if block["type"] == "tool_use":
            block["input"] = _object(text)
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
            events.append(self._delta("signature_delta", signature=SIGNATURE))
        return [*events, {"type": "content_block_stop", "index": len(self.blocks) - 1}]


def _object(arguments: str) -> dict:
    """The arguments of a call as an object.

    Text that is no object is wrapped as Anthropic advises clients to wrap it.
    """
    try:
        value = loaded(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}


def stop_fields(sequence: RemoteSequence, parser: Parser) -> dict:
    """Why an answer ended."""
    # The interface has no reason for an aborted answer; max_tokens is the nearest.
    reasons = {"length": "max_tokens", "abort": "max_tokens", "tool_calls": "tool_use"}
    reason, matched = reasons.get(parser.reason(sequence) or "", "end_turn"), None
    if isinstance(sequence.matched, str):
        reason, matched = "stop_sequence", sequence.matched
    return {"stop_reason": reason, "stop_sequence": matched}


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

"""/v1/responses: OpenAI's newer interface over the same conversations."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from pydantic import ValidationError

from dflash_jax.server.answer_schema import Response
from dflash_jax.server.answers import chat_logprobs, request_metrics, usage
from dflash_jax.server.body import MediaRoute
from dflash_jax.server.chat import prepare_chat
from dflash_jax.server.chat_schema import ChatRequest
from dflash_jax.server.conversation import Conversation, Delta, GrowingItems
from dflash_jax.server.engine_client import RemoteSequence
from dflash_jax.server.errors import ApiError, as_api_error, from_conversion_error
from dflash_jax.server.request_context import current, fresh_id
from dflash_jax.server.response_store import StoredResponse
from dflash_jax.server.responses_input import (
    LEFT_OUT,
    InputItem,
    ResponsesRequest,
    Tools,
    as_chat,
    as_function_item,
    kept_items,
    takes_media,
)
from dflash_jax.server.serving import STEP_ITEMS, Serving
from dflash_jax.server.stored_responses import earlier_items, loaded, stored_items, stored_response
from dflash_jax.server.stream import EventStream, JsonAnswer, Later, event_frames, frame
from dflash_jax.server.tools import CallDelta, input_of

router = APIRouter(route_class=MediaRoute)


@router.post("/v1/responses", responses={200: {"model": Response}}, response_model=None)
async def responses(http: Request, body: ResponsesRequest):
    """OpenAI's responses."""
    serving: Serving = http.app.state.serving
    store = serving.response_store
    if body.store and not store.size:
        raise ApiError(400, "store: this server stores no responses (--response-store 0)", "store")
    earlier = await earlier_items(http, body.previous_response_id)
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

    output = Output(serving.llm.tokenizer, Tools.of(body.tools or ()))
    events = response_events(serving, talk, sequences[0], value, store_response, bool(body.stream), output)
    if body.stream:
        answer = EventStream(event_frames(events, are_numbered=True), last=b"", error=error_frame).start()
    else:
        answer = full_response(events)
    # The answer repeats tools and metadata of the parsed body, and the store's entry has the conversation.
    return Later(http, answer, keeps_parsed=True)


async def prepare_response(
    http: Request, body: ResponsesRequest, earlier: list[bytes]
) -> tuple[Conversation, list[RemoteSequence], bytes]:
    """Prepares a request after the items ``earlier``.

    Returns:
        The conversation, its sequence, and its items in their stored form. The parsed items are garbage then.

    Raises:
        ApiError: The request is invalid.
    """
    serving: Serving = http.app.state.serving
    input_items = [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    if not (input_items or body.instructions or earlier):
        raise ApiError(400, "input is empty", "input")
    items: list[InputItem] = []
    async for item in serving.in_steps(earlier):
        async with serving.long_step(len(item)):
            items.append(as_function_item(InputItem(**loaded(item))))
    async for item in serving.in_steps(input_items):
        items.append(as_function_item(item))
    count, input_items = len(earlier), items[len(earlier) :]
    if left_out := Tools.of(body.tools or ()).left_out:
        current().note(f"tools: {', '.join(sorted(set(left_out)))} left out, since this server has none of them")

    async def chat_of(places: Sequence[int]) -> ChatRequest:
        """The chat request of the items at these places."""
        await serving.turn()
        return as_chat(body, [items[i] for i in places], sum(i < count for i in places))

    places: Sequence[int] = range(len(items))
    try:
        if body.truncation == "auto":
            # Validates the input first, so that errors name its items as they were sent.
            as_chat(body, input_items)
            if any(map(takes_media, items)):
                raise ApiError(400, "truncation: auto is not possible with images and videos", "truncation")
            places = await kept_items(serving, items, chat_of)
        if len(places) > serving.limits.objects:
            message = f"the conversation has {len(places)} items: at most {serving.limits.objects} are possible"
            raise ApiError(400, f"{message}, or truncation: auto", "input")
        chat = await chat_of(places)
    except ValidationError as e:
        raise from_conversion_error(e) from None
    lines = [earlier[i] for i in places if i < count]
    given = [items[i] for i in places if i >= count and items[i].type not in LEFT_OUT]
    stored = await stored_items(serving, lines, given)
    talk, sequences = await prepare_chat(serving, chat)
    return talk, sequences, stored


async def full_response(events: AsyncGenerator[dict, None]) -> JsonAnswer:
    """Waits for all events, then answers."""
    async for event in events:
        last = event
    return JsonAnswer(last["response"])


def error_frame(error: ApiError) -> bytes:
    """The event of an error before all others; a later one is ``response.failed``."""
    value = {"type": "error", "code": "server_error", "message": error.message, "param": error.param}
    return frame(value | {"sequence_number": 0}, "error")


async def response_events(
    serving: Serving,
    talk: Conversation,
    sequence: RemoteSequence,
    value: dict,
    store_response: Callable[[dict], Awaitable[None]],
    is_streamed: bool,
    output: "Output",
) -> AsyncGenerator[dict, None]:
    """Yields the events of a response. An error after the first one is the last event, where these are streamed.

    It is stored before the last event, so that a client that reads that event can continue it.
    """
    parser, has_begun = talk.parser(), False
    try:
        async for piece in serving.pieces(sequence):
            if not has_begun:
                has_begun = True
                yield {"type": "response.created", "response": value}
                yield {"type": "response.in_progress", "response": value}
            for event in output.take(parser.push(piece), piece.logprobs):
                yield event
            if piece.finish_reason:
                for event in output.take(parser.finish(sequence)):
                    yield event
        response = final_value(value, output, sequence, parser.reasoning_tokens)
        response |= request_metrics(serving, [sequence])
        for event in output.close(response["status"]):
            yield event
        await store_response(response)
    except Exception as e:
        if not (has_begun and is_streamed):
            raise
        error = {"code": "server_error", "message": as_api_error(e).message}
        yield {"type": "response.failed", "response": {**value, "status": "failed", "error": error}}
        return
    yield {"type": f"response.{response['status']}", "response": response}


class Output(GrowingItems):
    """The items of an answer.

    Args:
        tokenizer: The tokenizer.
        tools: The request's tools.
    """

    def __init__(self, tokenizer, tools: Tools):
        super().__init__()
        self._tokenizer, self._tools = tokenizer, tools
        # Log-probabilities of tokens whose text is held back wait for the text.
        self._logprobs: list[dict] = []

    def take(self, delta: Delta, logprobs: list[dict] | None = None) -> list[dict]:
        """Adds a piece, with log-probabilities of its tokens where asked for, and returns its events."""
        self._logprobs += logprobs or ()
        events = super().take(delta)
        if delta.content or delta.reasoning or delta.calls:
            self._logprobs = []
        return events

    def _begun(self, kind: str, call: CallDelta | None) -> list[dict]:
        part: dict[str, Any] | None = None
        item: dict[str, Any]
        if call is not None and call.name in self._tools.customs:
            item = {"id": f"ctc_{fresh_id()}", "type": "custom_tool_call", "call_id": call.id, "name": call.name}
            item |= {"input": "", "status": "in_progress"}
        elif call is not None:
            item = {"id": f"fc_{fresh_id()}", "type": "function_call", "call_id": call.id, "name": call.name}
            if call.name in self._tools.namespaces:
                item["namespace"], item["name"] = self._tools.namespaces[call.name]
            item |= {"arguments": "", "status": "in_progress"}
        elif kind == "content":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": f"msg_{fresh_id()}", "type": "message", "role": "assistant", "status": "in_progress"}
        else:
            part = {"type": "reasoning_text", "text": ""}
            item = {"id": f"rs_{fresh_id()}", "type": "reasoning", "summary": [], "status": "in_progress"}
        self.items.append(item)
        added = {"type": "response.output_item.added", "output_index": len(self.items) - 1}
        if part is None:
            return [added | {"item": dict(item)}]
        item["content"] = [part]
        copied = part | ({"logprobs": []} if kind == "content" else {})
        begun = self._event("response.content_part.added", content_index=0, part=copied)
        return [added | {"item": item | {"content": []}}, begun]

    def _grown(self, kind: str, text: str) -> list[dict]:
        if kind == "call" and "input" in self.items[-1]:
            # A text of JSON: it is known at its end.
            return []
        if kind == "call":
            return [self._event("response.function_call_arguments.delta", delta=text)]
        part, more = self.items[-1]["content"][0], {}
        if kind == "content":
            more["logprobs"] = list(chat_logprobs(self._tokenizer, self._logprobs))
            part["logprobs"] += more["logprobs"]
        return [self._event(f"response.{part['type']}.delta", content_index=0, delta=text, **more)]

    def _ended(self, kind: str, text: str, status: str) -> list[dict]:
        item = self.items[-1]
        item["status"] = status
        if kind == "call" and "input" in item:
            item["input"] = input_of(text)
            events = [
                self._event("response.custom_tool_call_input.delta", delta=item["input"]),
                self._event("response.custom_tool_call_input.done", input=item["input"]),
            ]
        elif kind == "call":
            item["arguments"] = text
            events = [self._event("response.function_call_arguments.done", arguments=text, name=item["name"])]
        else:
            part = item["content"][0]
            part["text"] = text
            more = {"logprobs": part["logprobs"]} if kind == "content" else {}
            events = [
                self._event(f"response.{part['type']}.done", content_index=0, text=text, **more),
                self._event("response.content_part.done", content_index=0, part=part),
            ]
        done = {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}
        return [*events, done]

    def _event(self, kind: str, **values) -> dict:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **values}


# Fields of a request that its response repeats.
REPEATED = {"instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p", "user"}


def envelope(body: ResponsesRequest, name: str, response_id: str, created: int, is_stored: bool) -> dict:
    """A response before its output is known."""
    choice = body.tool_choice or "auto"
    return {
        **body.model_dump(include=REPEATED),
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": body.model or name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": is_stored,
        "text": body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {"format": {"type": "text"}},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [
            t.model_dump(exclude={"format", "tools"}) if t.type == "function" else t.model_dump(exclude_unset=True)
            for t in body.tools or ()
        ],
        "truncation": body.truncation or "disabled",
        "usage": None,
        "metadata": body.metadata or {},
    }


def final_value(value: dict, output: Output, sequence: RemoteSequence, reasoning_tokens: int) -> dict:
    """The response of a finished sequence."""
    is_complete, reason = sequence.request.finish_reason == "stop", sequence.request.finish_reason
    tokens = usage([sequence], 1)
    return {
        **value,
        "status": "completed" if is_complete else "incomplete",
        "incomplete_details": None
        if is_complete
        else {"reason": "max_output_tokens" if reason == "length" else reason},
        "output": output.items,
        "usage": {
            "input_tokens": tokens["prompt_tokens"],
            "input_tokens_details": tokens["prompt_tokens_details"],
            "output_tokens": tokens["completion_tokens"],
            "output_tokens_details": tokens["completion_tokens_details"] | {"reasoning_tokens": reasoning_tokens},
            "total_tokens": tokens["total_tokens"],
        },
    }

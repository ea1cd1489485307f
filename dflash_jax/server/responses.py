"""/v1/responses: OpenAI's newer interface over the same conversations."""

import json
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response as HttpResponse

from dflash_jax.frontend.sequence import TextSequence
from dflash_jax.server import large_answers, request_id, schema
from dflash_jax.server.answer_schema import Response
from dflash_jax.server.answers import chat_logprobs, request_metrics, usage
from dflash_jax.server.chat import prepared
from dflash_jax.server.conversation import Conversation, Delta, text_of
from dflash_jax.server.errors import ApiError, as_api_error, of_conversion
from dflash_jax.server.response_store import StoredResponse
from dflash_jax.server.serving import Serving, while_connected
from dflash_jax.server.stored_responses import earlier_items, head, least_characters, stored_items, stored_response
from dflash_jax.server.stream import EventStream, Later
from dflash_jax.server.tools import CallDelta
from dflash_jax.server.truncation import characters, kept_items

router = APIRouter()
# Stores a whole response, where that is asked for.
Keep = Callable[[dict], Awaitable[None]]

AS_IN_CHAT = (
    *schema.Sampling.model_fields,
    "model",
    "seed",
    "stop",
    "logit_bias",
    "structured_outputs",
    "priority",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "cache_salt",
    "min_tokens",
    "include_stop_str_in_output",
    "block_size",
)


def as_messages(instructions: str | None, items: Sequence[schema.InputItem], earlier: int = 0) -> list[dict]:
    """Instructions and items as a chat's messages. ``earlier``: of the items, those before the input."""
    messages = [{"role": "system", "content": instructions}] if instructions else []
    # Only the input's own items can be wrong: earlier ones were read before.
    for i, item in enumerate(items, -earlier):
        where, more = f"input[{i}]", item.model_extra or {}
        kind = item.type or "message"
        if kind == "message":
            if item.role not in ("system", "developer", "user", "assistant"):
                raise ApiError(400, f"{where}.role is {item.role!r}: it must be system, user or assistant", where)
            messages.append({"role": item.role, "content": text_of(item.content, where)})
        elif kind == "function_call":
            function = {"name": _text(more, "name", where), "arguments": _text(more, "arguments", where)}
            call = {"id": _text(more, "call_id", where), "type": "function", "function": function}
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind == "function_call_output":
            output = more.get("output")
            if not isinstance(output, str):
                raise ApiError(400, f"{where}.output must be text", f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": _text(more, "call_id", where), "content": output})
        elif kind == "reasoning":
            thought = text_of([_part(p) for p in item.content or []] if isinstance(item.content, list) else "", where)
            messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
        else:
            raise ApiError(400, f"{where}.type {kind!r} is not supported", f"{where}.type")
    return _joined_thoughts(messages)


def _part(part: schema.Part) -> schema.Part:
    return schema.Part(type="text", text=part.text or "")


def _text(item: dict, name: str, where: str) -> str:
    if not isinstance(item.get(name), str):
        raise ApiError(400, f"{where}.{name} must be text", f"{where}.{name}")
    return item[name]


def _joined_thoughts(messages: list[dict]) -> list[dict]:
    """A thought belongs to the message behind it."""
    found: list[dict] = []
    for message in messages:
        before = found[-1] if found else {}
        is_thought = before.get("reasoning_content") is not None and not before["content"]
        if is_thought and not before.get("tool_calls") and message["role"] == "assistant":
            found[-1] = {**message, "reasoning_content": before["reasoning_content"]}
        else:
            found.append(message)
    return found


def _named(tool: schema.ResponsesToolName) -> schema.NamedTool:
    return schema.NamedTool(type="function", function=schema.FunctionName(name=tool.name))


def as_chat(body: schema.ResponsesRequest, items: Sequence[schema.InputItem], earlier: int = 0) -> schema.ChatRequest:
    """The same wish as a chat request of these items. ``earlier``: of the items, those before the input."""
    form, choice = body.text.format if body.text else None, body.tool_choice
    response_format = None
    if form is not None and form.type == "json_schema":
        named = schema.JsonSchema(name=form.name or "answer", schema=form.schema_, strict=form.strict)
        response_format = schema.ResponseFormat(type="json_schema", json_schema=named)
    elif form is not None:
        response_format = schema.ResponseFormat(type=form.type)
    if isinstance(choice, schema.ResponsesToolName):
        choice = _named(choice)
    elif isinstance(choice, schema.ResponsesAllowedTools):
        allowed = schema.AllowedTools(mode=choice.mode, tools=[_named(tool) for tool in choice.tools])
        choice = schema.AllowedToolsChoice(type="allowed_tools", allowed_tools=allowed)
    wants_logprobs = bool(body.top_logprobs) or "message.output_text.logprobs" in (body.include or ())
    tools = [
        schema.Tool(type="function", function=schema.Function(**t.model_dump(exclude={"type"})))
        for t in body.tools or ()
    ]
    return schema.ChatRequest(
        messages=[schema.Message(**m) for m in as_messages(body.instructions, items, earlier)],
        max_completion_tokens=body.max_output_tokens,
        **{name: getattr(body, name) for name in AS_IN_CHAT},
        logprobs=wants_logprobs or None,
        top_logprobs=body.top_logprobs if wants_logprobs else None,
        response_format=response_format,
        tools=tools or None,
        tool_choice=choice,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
    )


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


class Output:
    """The items of an answer as they grow, and the events that tell of it."""

    def __init__(self, tokenizer):
        self._tokenizer, self.items = tokenizer, []
        self._kind: str | None = None
        self._logprobs: list[dict] = []

    def take(self, delta: Delta, logprobs: list[dict] | None) -> list[dict]:
        """Events for a piece."""
        # Of tokens whose text is held back, until it comes.
        self._logprobs = [*self._logprobs, *(logprobs or ())]
        # What belongs to a call that has begun is before any content.
        begun = next((i for i, call in enumerate(delta.calls) if call.name is not None), len(delta.calls))
        events = self._take_calls(delta.calls[:begun])
        if delta.reasoning:
            events += self._open("reasoning") + self._grow("reasoning_text", delta.reasoning)
        if delta.content:
            events += self._open("message")
            events += self._grow("output_text", delta.content, chat_logprobs(self._tokenizer, self._logprobs))
        if delta.content or delta.reasoning or delta.calls:
            self._logprobs = []
        return events + self._take_calls(delta.calls[begun:])

    def _take_calls(self, calls: list[CallDelta]) -> list[dict]:
        events = []
        for call in calls:
            if call.name is not None:
                events += self.close() + self._open("function_call", call)
            if call.arguments:
                self.items[-1]["arguments"] += call.arguments
                events.append(self._event("response.function_call_arguments.delta", delta=call.arguments))
        return events

    def _event(self, kind: str, **values) -> dict:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **values}

    def _open(self, kind: str, call=None) -> list[dict]:
        if self._kind == kind and call is None:
            return []
        events = self.close()
        self._kind, part = kind, None
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": _id("msg"), "type": kind, "role": "assistant", "status": "in_progress", "content": []}
        elif kind == "reasoning":
            part = {"type": "reasoning_text", "text": ""}
            item = {"id": _id("rs"), "type": kind, "summary": [], "status": "in_progress", "content": []}
        else:
            item = {"id": _id("fc"), "type": kind, "call_id": call.id, "name": call.name, "arguments": ""}
            item["status"] = "in_progress"
        self.items.append(item)
        added = {"type": "response.output_item.added", "output_index": len(self.items) - 1}
        # Events are written before the item grows on: they get a copy.
        events.append(added | {"item": dict(item) | ({"content": []} if part else {})})
        if part:
            item["content"].append(part)
            events.append(self._event("response.content_part.added", content_index=0, part=dict(part)))
        return events

    def _grow(self, kind: str, text: str, logprobs: list[dict] = ()) -> list[dict]:
        part = self.items[-1]["content"][0]
        part["text"] += text
        more = {}
        if kind == "output_text":
            part["logprobs"] = [*part["logprobs"], *logprobs]
            more["logprobs"] = list(logprobs)
        return [self._event(f"response.{kind}.delta", content_index=0, delta=text, **more)]

    def close(self, status: str = "completed") -> list[dict]:
        """Ends the item under way."""
        if self._kind is None:
            return []
        item, self._kind = self.items[-1], None
        item["status"] = status
        events = []
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            events.append(self._event("response.function_call_arguments.done", **done))
        else:
            part = item["content"][0]
            more = {"logprobs": part["logprobs"]} if part["type"] == "output_text" else {}
            events.append(self._event(f"response.{part['type']}.done", content_index=0, text=part["text"], **more))
            events.append(self._event("response.content_part.done", content_index=0, part=part))
        done = {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}
        return [*events, done]


def envelope(body: schema.ResponsesRequest, name: str, response_id: str, created: int, is_stored: bool) -> dict:
    """A response before anything is known of it."""
    choice = body.tool_choice or "auto"
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": body.model or name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": is_stored,
        "temperature": body.temperature,
        "text": body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {"format": {"type": "text"}},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [t.model_dump() for t in body.tools or ()],
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def ended(value: dict, output: Output, row: TextSequence, reasoning_tokens: int) -> dict:
    is_whole, reason = row.request.finish_reason == "stop", row.request.finish_reason
    counted = usage([row], 1)
    return {
        **value,
        "status": "completed" if is_whole else "incomplete",
        "incomplete_details": None if is_whole else {"reason": "max_output_tokens" if reason == "length" else reason},
        "output": output.items,
        "usage": {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": counted["prompt_tokens_details"],
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": counted["completion_tokens_details"] | {"reasoning_tokens": reasoning_tokens},
            "total_tokens": counted["total_tokens"],
        },
    }


@router.post("/v1/responses", responses={200: {"model": Response}}, response_model=None)
async def responses(http: Request, body: schema.ResponsesRequest):
    serving: Serving = http.app.state.serving
    store = serving.response_store
    if body.store and not store.size:
        raise ApiError(400, "store: this server stores no responses (--response-store 0)", "store")
    earlier = await earlier_items(http, body)
    given = [schema.InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    if not given:
        raise ApiError(400, "input is empty", "input")
    count = len(earlier)
    parsed: dict[int, schema.InputItem] = {}

    async def as_chat_of(kept: Sequence[int]) -> schema.ChatRequest:
        """Of the items at these places of the conversation. Others are not parsed, and none twice."""
        missing = [i for i in kept if i < count and i not in parsed]
        async for places in serving.in_steps(missing):
            parsed.update((i, schema.InputItem(**json.loads(earlier[i]))) for i in places)
        await serving.turn()
        return as_chat(body, [parsed[i] if i < count else given[i - count] for i in kept], sum(i < count for i in kept))

    kept: Sequence[int] = range(count + len(given))
    try:
        if body.truncation == "auto":
            # What is wrong is said of the input as it was sent.
            as_chat(body, given)
            heads = []
            async for items in serving.in_steps(earlier):
                heads += [schema.InputItem(**head(item)) for item in items]
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

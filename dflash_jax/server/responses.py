"""/v1/responses: OpenAI's newer interface over the same conversations."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import ValidationError

from dflash_jax.server.answer_schema import CompactedResponse, Response, ResponseInputTokens
from dflash_jax.server.answers import chat_logprobs, ended_totals, request_metrics
from dflash_jax.server.body import MediaRoute
from dflash_jax.server.chat import prepare_chat, tools_in_use
from dflash_jax.server.chat_schema import ChatRequest
from dflash_jax.server.conversation import Conversation, Delta, GrowingItems, converse
from dflash_jax.server.engine_client import RemoteSequence
from dflash_jax.server.errors import (
    ApiError,
    JsonResponse,
    TooLongError,
    as_api_error,
    from_conversion_error,
)
from dflash_jax.server.request_context import current, fresh_id
from dflash_jax.server.responses_input import (
    COMPACTIONS,
    FOUND_TOOLS,
    LEFT_OUT,
    TRIGGER,
    InputItem,
    ResponsesRequest,
    Tools,
    added_tools,
    as_chat,
    as_chat_item,
    as_messages,
    as_summary_request,
    asks_for_summary,
    is_kept,
    kept_items,
    most_tokens,
    places_after,
    takes_media,
    with_trigger,
)
from dflash_jax.server.serving import STEP_ITEMS, Serving
from dflash_jax.server.stored_responses import (
    answer_item_id,
    earlier_items,
    loaded,
    referenced,
    stored_items,
    stored_response,
)
from dflash_jax.server.stream import EventStream, JsonAnswer, Later, event_frames
from dflash_jax.server.tools import START, CallDelta, input_of

T = TypeVar("T")

router = APIRouter(route_class=MediaRoute)


@router.post("/v1/responses", responses={200: {"model": Response}}, response_model=None)
async def responses(http: Request, body: ResponsesRequest):
    """OpenAI's responses."""
    serving: Serving = http.app.state.serving
    store = serving.response_store
    if body.store and not store.size:
        raise ApiError(400, "store: this server stores no responses (--response-store 0)", "store")
    context = current()
    name = context.choose_id("resp_")
    context.answer_id = body.request_id or name
    is_stored = body.store is not False and store.size > 0
    value = envelope(body, serving.name, context.answer_id, context.created, is_stored)
    most = None if asks_for_summary(body) else most_tokens(body, serving.capacity)
    try:
        try:
            prompt = await in_turn(http, body, prepare_response)
            comes_late = most is not None and len(prompt.talk.prompt) > most
        except TooLongError:
            if most is None:
                raise
            comes_late = True
        if comes_late:
            # The summary's length is its own.
            summed_up = with_trigger(body.model_copy(update={"max_output_tokens": None}))
            prompt = await in_turn(http, summed_up, prepare_response)
    except TooLongError as e:
        if not body.stream:
            raise
        # Codex compacts its conversation after this event, and ends after a status.
        return await EventStream(event_frames(failed_events(value, e), are_numbered=True), last=b"").start()

    async def store_response(response: dict, prompt: Prepared, output: "OutputItems") -> None:
        if is_stored:
            entry = stored_response(response, prompt.conversation, output.item_key)
            response["store"] = await store.put(http.state.owner, response["id"], entry, http.state.client)

    if comes_late:
        # Not its items, which the prompt has.
        stages = after_summary(http, body.model_copy(update={"input": []}), prompt)
    else:
        stages = at_once(prompt, output_of(http, body, prompt.tools))
    events = response_events(serving, stages, value, store_response, bool(body.stream))
    if body.stream:
        answer = EventStream(event_frames(events, are_numbered=True), last=b"").start()
    else:
        answer = full_response(events)
    # The answer repeats tools and metadata of the parsed body, and the store's entry has the conversation.
    return Later(http, answer, keeps_parsed=True)


@router.post("/v1/responses/compact", responses={200: {"model": CompactedResponse}}, response_model=None)
async def compact(http: Request, body: ResponsesRequest):
    """A conversation as the items that a summary does not replace, and a summary of the rest."""
    if body.stream:
        raise ApiError(400, "stream is not possible: the answer is one object", "stream")
    body, context = with_trigger(body), current()
    name = context.choose_id("resp_")
    context.answer_id = body.request_id or name
    prompt = await in_turn(http, body, prepare_response)
    return Later(http, compacted(http, prompt, output_of(http, body, prompt.tools)), keeps_parsed=True)


async def compacted(http: Request, prompt: "Prepared", output: "Output | Summary") -> JsonAnswer:
    """Waits for the summary, then answers."""
    serving, context = http.app.state.serving, current()

    async def store_response(*_) -> None:
        """Nothing is stored: the answer is the next conversation."""

    async for event in response_events(serving, at_once(prompt, output), {}, store_response, False):
        last = event
    usage = last["response"]["usage"]
    head = {"id": context.answer_id, "object": "response.compaction", "created_at": context.created}
    kept = await kept_of(serving, prompt.conversation)
    return JsonAnswer({**head, "output": iter([*kept, *output.items]), "usage": usage})


async def kept_of(serving: Serving, conversation: bytes) -> list[bytes]:
    """The items of a conversation that a summary does not replace, all as JSON."""
    kept = []
    async for line in serving.in_steps(conversation.split(b"\n") if conversation else ()):
        async with serving.long_step(len(line)):
            if is_kept(InputItem(**loaded(line))):
                kept.append(line)
    return kept


@router.post("/v1/responses/input_tokens", responses={200: {"model": ResponseInputTokens}}, response_model=None)
async def input_tokens(http: Request, body: ResponsesRequest):
    """Counts the tokens of a prompt."""
    serving: Serving = http.app.state.serving
    serving.check_model(body.model)

    async def count(http: Request, body: ResponsesRequest, earlier: list[bytes]) -> int:
        chat, *_ = await read_conversation(http, body, earlier)
        return len((await converse(serving, chat.messages, tools_in_use(chat), chat)).prompt)

    return JsonResponse({"object": "response.input_tokens", "input_tokens": await in_turn(http, body, count)})


async def in_turn(
    http: Request,
    body: ResponsesRequest,
    work: Callable[[Request, ResponsesRequest, list[bytes]], Awaitable[T]],
    earlier: list[bytes] | None = None,
) -> T:
    """What ``work`` makes of a request and the items before it, long conversations by turns."""
    if earlier is None:
        earlier = await earlier_items(http, body.previous_response_id)
    if len(earlier) <= STEP_ITEMS:
        return await work(http, body, earlier)
    with await http.app.state.serving.long_conversations.take(len(earlier)):
        return await work(http, body, earlier)


@dataclass
class Prepared:
    """A request that the engine can run.

    Attributes:
        talk: Its conversation.
        sequence: Its sequence.
        conversation: The items of the conversation in their stored form.
        tools: Its tools, with those that items have added.
    """

    talk: Conversation
    sequence: RemoteSequence
    conversation: bytes
    tools: Tools


async def prepare_response(http: Request, body: ResponsesRequest, earlier: list[bytes]) -> Prepared:
    """Prepares a request after the items ``earlier``. Its parsed items are garbage then.

    Raises:
        ApiError: The request is invalid.
    """
    chat, stored, tools = await read_conversation(http, body, earlier)
    # Items were left out to make room for all new tokens.
    talk, sequences = await prepare_chat(http.app.state.serving, chat, needs_room=body.truncation == "auto")
    return Prepared(talk, sequences[0], stored, tools)


# What runs for one answer, one after the other: a prompt, and what takes its text.
Stages = AsyncGenerator[tuple[Prepared, "Output | Summary"], None]


async def at_once(prompt: Prepared, output: "Output | Summary") -> Stages:
    """The one stage of a request."""
    yield prompt, output


async def after_summary(http: Request, body: ResponsesRequest, prompt: Prepared) -> Stages:
    """The summary of a conversation, whose prompt this is, and the answer after it."""
    serving: Serving = http.app.state.serving
    summary = output_of(http, with_trigger(body), prompt.tools)
    yield prompt, summary
    kept = await kept_of(serving, prompt.conversation)
    (item,) = summary.items
    shorter = body.model_copy(update={"input": [InputItem(**item)]})
    prompt = await in_turn(http, shorter, prepare_response, kept)
    output = output_of(http, body, prompt.tools)
    output.items, output.item_key = summary.items, summary.item_key
    yield prompt, output


async def read_conversation(
    http: Request, body: ResponsesRequest, earlier: list[bytes]
) -> tuple[ChatRequest, bytes, Tools]:
    """The request of a chat that continues after the items ``earlier``, all items in their stored form, and its tools.

    Raises:
        ApiError: The request is invalid.
    """
    serving: Serving = http.app.state.serving
    input_items = [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    if not (input_items or body.instructions or earlier):
        raise ApiError(400, "input is empty", "input")
    input_items = await referenced(http, input_items, earlier)
    for i, item in enumerate(input_items[:-1]):
        if item.type == TRIGGER:
            raise ApiError(400, f"input[{i}] is a {TRIGGER}: it must be the last item", f"input[{i}]")
    unseal = partial(serving.response_store.unseal, http.state.owner)
    items: list[InputItem] = []
    # Items that are stored as they were sent, by their places.
    originals: dict[int, InputItem] = {}

    def take(item: InputItem) -> None:
        items.append(as_chat_item(item, unseal))
        if item.type == FOUND_TOOLS or (item.type in COMPACTIONS and items[-1].type == "message"):
            originals[len(items) - 1] = item
        elif item.type in COMPACTIONS:
            current().note(f"{item.type}: left out, since this server has not sealed it or has another key now")

    async for line in serving.in_steps(earlier):
        async with serving.long_step(len(line)):
            take(InputItem(**loaded(line)))
    async for item in serving.in_steps(input_items):
        take(item)
    count, tools = len(earlier), Tools.of(body.tools or ())
    if tools.left_out:
        current().note(f"tools: {', '.join(sorted(set(tools.left_out)))} left out, since this server has none of them")
    places: Sequence[int] = places_after(items, [i for i, item in originals.items() if item.type in COMPACTIONS])
    is_truncated = body.truncation == "auto"
    if items and items[-1].type == TRIGGER:
        start = serving.llm.tokenizer.encode_plain(START) if serving.llm.tokenizer is not None else ()
        body = as_summary_request(body, serving.capacity, start if len(start) == 1 else ())
        # A summary of less is better than a conversation that cannot go on.
        is_truncated |= not any(map(takes_media, items))

    async def chat_of(places: Sequence[int]) -> ChatRequest:
        """The chat request of the items at these places."""
        await serving.turn()
        return as_chat(body, tools, [items[i] for i in places], sum(i < count for i in places))

    try:
        bringing = ((i, added_tools(originals.get(i, items[i]))) for i in places)
        added = ((f"input[{i - count}].tools[{j}]", tool) for i, some in bringing for j, tool in enumerate(some))
        async for where, tool in serving.in_steps(added):
            tools.add(tool, where)
        if is_truncated or len(places) < len(items):
            # Validates the input first, so that errors name its items as they were sent.
            as_messages(None, items[count:])
        if is_truncated:
            if any(takes_media(items[i]) for i in places):
                raise ApiError(400, "truncation: auto is not possible with images and videos", "truncation")
            whole = places
            kept = await kept_items(
                serving, [items[i] for i in whole], lambda chosen: chat_of([whole[j] for j in chosen])
            )
            places = [whole[j] for j in kept]
        if len(places) > serving.limits.objects:
            message = f"the conversation has {len(places)} items: at most {serving.limits.objects} are possible"
            raise ApiError(400, f"{message}, or truncation: auto", "input")
        chat = await chat_of(places)
    except ValidationError as e:
        raise from_conversion_error(e) from None
    lines = [earlier[i] for i in places if i < count]
    without = (*LEFT_OUT, TRIGGER)
    given = [originals.get(i, items[i]) for i in places if i >= count and items[i].type not in without]
    return chat, await stored_items(serving, lines, given), tools


async def full_response(events: AsyncGenerator[dict, None]) -> JsonAnswer:
    """Waits for all events, then answers."""
    async for event in events:
        last = event
    return JsonAnswer(last["response"])


async def failed_events(value: dict, error: ApiError, has_begun: bool = False) -> AsyncGenerator[dict, None]:
    """Yields the last events of a stream with an error, all of them unless it has begun."""
    if not has_begun:
        yield {"type": "response.created", "response": value}
        yield {"type": "response.in_progress", "response": value}
    code = error.code
    if isinstance(code, int):
        # Codex sends a request again unless its prompt is the reason.
        code = "invalid_prompt" if code < 500 else "server_error"
    failed = {"status": "failed", "error": {"code": code, "message": error.message}}
    yield {"type": "response.failed", "response": value | failed}


async def response_events(
    serving: Serving,
    stages: Stages,
    value: dict,
    store_response: Callable[[dict, Prepared, "OutputItems"], Awaitable[None]],
    is_streamed: bool,
) -> AsyncGenerator[dict, None]:
    """Yields the events of a response. Where these are streamed, an error after their beginning is the last event.

    It is stored before the last event, so that a client that reads that event can continue it.
    """
    response, has_begun = value, False
    try:
        async for prompt, output in stages:
            parser, sequence = prompt.talk.parser(), prompt.sequence
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
            response = final_value(serving, value, output, sequence, parser.reasoning_tokens)
            response |= request_metrics(serving, [sequence])
            for event in output.close(response["status"]):
                yield event
        await store_response(response, prompt, output)
    except Exception as e:
        # Before the engine has the request, an error has a status.
        if not (is_streamed and current().submitted.is_set()):
            raise
        async for event in failed_events(value, as_api_error(e), has_begun):
            yield event
        return
    yield {"type": f"response.{response['status']}", "response": response}


def output_of(http: Request, body: ResponsesRequest, tools: Tools) -> "Output | Summary":
    """The output of a request, before it begins."""
    serving = http.app.state.serving
    seal = partial(serving.response_store.seal, http.state.owner)
    if asks_for_summary(body):
        return Summary(seal)
    is_sealed = "reasoning.encrypted_content" in (body.include or ())
    return Output(serving.llm.tokenizer, tools, seal if is_sealed else None)


class OutputItems(GrowingItems):
    """The items of an answer.

    Attributes:
        item_key: What their ids have in common.
    """

    # Whether an answer that ends at its limit is complete.
    may_be_cut = False

    def __init__(self):
        super().__init__()
        self.item_key = fresh_id()[:24]

    def _next_id(self, kind: str) -> str:
        return answer_item_id(kind, self.item_key, len(self.items))

    def _event(self, kind: str, **values) -> dict:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **values}

    def _item_event(self, kind: str, item: dict) -> dict:
        return {"type": f"response.output_item.{kind}", "output_index": len(self.items) - 1, "item": item}


class Summary(OutputItems):
    """The one item of an answer that is a summary of the conversation, for this server to read.

    Args:
        seal: Seals a text of a kind.
    """

    may_be_cut = True

    def __init__(self, seal: Callable[[str, str], str]):
        super().__init__()
        self._seal = seal
        self._thoughts: list[str] = []

    def take(self, delta: Delta, logprobs: list[dict] | None = None) -> list[dict]:
        """Adds a piece, and returns its events."""
        events = [] if self.items else self._begun("content", None)
        self._texts.append(delta.content)
        self._thoughts.append(delta.reasoning)
        return events + self._grown("content", delta.content)

    def close(self, status: str = "completed") -> list[dict]:
        """Ends the summary, and returns its event. One that never left its thought is that thought.

        Raises:
            ApiError: 500, it is empty: the conversation would be lost.
        """
        text = "".join(self._texts).strip() or "".join(self._thoughts).strip()
        if not text:
            raise ApiError(500, "the model has written no summary, so that the conversation stays as it is")
        return self._ended("content", text, status)

    def _begun(self, kind: str, call: CallDelta | None) -> list[dict]:
        item = {"id": self._next_id("cmp"), "type": COMPACTIONS[0], "encrypted_content": ""}
        self.items.append(item)
        return [self._item_event("added", dict(item))]

    def _grown(self, kind: str, text: str) -> list[dict]:
        return [self._event("response.compaction.compacting")]

    def _ended(self, kind: str, text: str, status: str) -> list[dict]:
        self.items[-1]["encrypted_content"] = self._seal(COMPACTIONS[0], text)
        return [self._item_event("done", self.items[-1])]


class Output(OutputItems):
    """The items of an answer that goes to the user.

    Args:
        tokenizer: The tokenizer.
        tools: The request's tools.
        seal: Seals a text of a kind; None where thoughts are not sealed.
    """

    def __init__(self, tokenizer, tools: Tools, seal: Callable[[str, str], str] | None = None):
        super().__init__()
        self._tokenizer, self._tools, self._seal = tokenizer, tools, seal
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
            item = {"id": self._next_id("ctc"), "type": "custom_tool_call", "call_id": call.id, "name": call.name}
            item |= {"input": "", "status": "in_progress"}
        elif call is not None:
            item = {"id": self._next_id("fc"), "type": "function_call", "call_id": call.id, "name": call.name}
            if call.name in self._tools.namespaces:
                item["namespace"], item["name"] = self._tools.namespaces[call.name]
            item |= {"arguments": "", "status": "in_progress"}
        elif kind == "content":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": self._next_id("msg"), "type": "message", "role": "assistant", "status": "in_progress"}
        else:
            part = {"type": "reasoning_text", "text": ""}
            item = {"id": self._next_id("rs"), "type": "reasoning", "summary": [], "status": "in_progress"}
        self.items.append(item)
        if part is None:
            return [self._item_event("added", dict(item))]
        item["content"] = [part]
        copied = part | ({"logprobs": []} if kind == "content" else {})
        begun = self._event("response.content_part.added", content_index=0, part=copied)
        return [self._item_event("added", item | {"content": []}), begun]

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
            if kind == "reasoning" and self._seal is not None:
                item["encrypted_content"] = self._seal("reasoning", text)
            more = {"logprobs": part["logprobs"]} if kind == "content" else {}
            events = [
                self._event(f"response.{part['type']}.done", content_index=0, text=text, **more),
                self._event("response.content_part.done", content_index=0, part=part),
            ]
        return [*events, self._item_event("done", item)]


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


def final_value(
    serving: Serving, value: dict, output: OutputItems, sequence: RemoteSequence, reasoning_tokens: int
) -> dict:
    """The response of a finished sequence."""
    reason = sequence.request.finish_reason
    is_complete = reason == "stop" or (reason == "length" and output.may_be_cut)
    tokens = ended_totals(serving, [sequence]).usage(reasoning_tokens)
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
            "output_tokens_details": tokens["completion_tokens_details"],
            "total_tokens": tokens["total_tokens"],
            "drafters": tokens["drafters"],
        },
    }

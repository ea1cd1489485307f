"""/v1/messages: Anthropic's Messages API over the same conversations."""

import json
from collections.abc import AsyncGenerator, Sequence

from fastapi import APIRouter, Request
from pydantic import ValidationError

from dflash_jax.frontend.sequence import TextSequence
from dflash_jax.server import request_id, schema
from dflash_jax.server.answer_schema import InputTokens, MessagesAnswer, MessagesError
from dflash_jax.server.answers import usage
from dflash_jax.server.chat import as_delta, prepared, tools_in_use
from dflash_jax.server.conversation import Conversation, Delta, Parser, converse, text_of
from dflash_jax.server.errors import ApiError, JsonResponse, as_api_error, of_conversion
from dflash_jax.server.messages_schema import Block, CountTokensRequest, MessagesRequest, MessagesTool, TurnMessage
from dflash_jax.server.serving import Serving, while_connected
from dflash_jax.server.stream import EventStream, Later, frame

PATH = "/v1/messages"
router = APIRouter(responses={"4XX": {"model": MessagesError}, "5XX": {"model": MessagesError}})

BLOCKS = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Thoughts come back as they were sent, and are believed: there is nothing to sign.
SIGNATURE = "unsigned"


# A request as a chat request.


def as_messages(body: CountTokensRequest) -> list[dict]:
    """The system prompt and all turns as a chat's messages."""
    system = body.system if isinstance(body.system, str) else _joined(body.system or (), "system", "system")
    messages = [{"role": "system", "content": system}] if system else []
    for i, turn in enumerate(body.messages):
        where = f"messages[{i}].content"
        if isinstance(turn.content, str):
            messages.append({"role": turn.role, "content": turn.content})
        elif not turn.content:
            raise ApiError(400, f"{where} is empty", where)
        elif turn.role == "assistant":
            messages.append(_assistant(turn.content, where))
        else:
            messages += _user(turn, where)
    if messages[-1].get("tool_calls"):
        raise ApiError(400, "messages ends with tool_use: send its tool_result", "messages")
    return messages


def _check_type(block: Block, role: str, where: str) -> None:
    if block.type not in BLOCKS[role]:
        right = ", ".join(BLOCKS[role])
        raise ApiError(400, f"{where}.type is {block.type!r}: {role} content may have {right}", f"{where}.type")


def _given(block: Block, name: str, where: str):
    if (value := getattr(block, name)) is None:
        raise ApiError(400, f"{where}.{name} is missing", f"{where}.{name}")
    return value


def _joined(blocks: Sequence[Block], role: str, where: str) -> str:
    texts = []
    for i, block in enumerate(blocks):
        _check_type(block, role, f"{where}[{i}]")
        texts.append(_given(block, "text", f"{where}[{i}]"))
    return "".join(texts)


def _user(turn: TurnMessage, where: str) -> list[dict]:
    """A tool's result is a message of its own; texts between results are joined."""
    messages: list[dict] = []
    texts: list[str] = []

    def join() -> None:
        if texts:
            messages.append({"role": turn.role, "content": "".join(texts)})
            texts.clear()

    for i, block in enumerate(turn.content):
        at = f"{where}[{i}]"
        _check_type(block, turn.role, at)
        if block.type == "tool_result":
            name, content = _given(block, "tool_use_id", at), _result(block.content, at)
            join()
            messages.append({"role": "tool", "tool_call_id": name, "content": content})
        else:
            texts.append(_given(block, "text", at))
    join()
    return messages


def _result(content: str | list[schema.Part] | None, where: str) -> str:
    """A tool's result as text; keys of parts beside the text, such as cache_control, do not change it."""
    if isinstance(content, list):
        content = [schema.Part(type=part.type, text=part.text) for part in content]
    return text_of(content, where)


def _assistant(blocks: Sequence[Block], where: str) -> dict:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        at = f"{where}[{i}]"
        _check_type(block, "assistant", at)
        if block.type == "text":
            texts.append(_given(block, "text", at))
        elif block.type == "thinking":
            thoughts.append(_given(block, "thinking", at))
        elif block.type == "tool_use":
            function = {"name": _given(block, "name", at), "arguments": _given(block, "input", at)}
            calls.append({"id": _given(block, "id", at), "type": "function", "function": function})
        # A redacted thought is for its maker alone to read.
    message = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool(tool: MessagesTool, where: str) -> schema.Tool:
    if tool.type not in (None, "custom"):
        raise ApiError(400, f"{where}.type is {tool.type!r}: it must be custom, a tool of the client", f"{where}.type")
    if tool.input_schema is None:
        raise ApiError(400, f"{where}.input_schema is missing", f"{where}.input_schema")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return schema.Tool(type="function", function=schema.Function(**function, strict=tool.strict))


def _tool_choice(body: CountTokensRequest):
    choice = body.tool_choice
    if choice is None or choice.type != "tool":
        return choice and CHOICES[choice.type]
    if choice.name is None:
        raise ApiError(400, "tool_choice.name is missing", "tool_choice.name")
    return schema.NamedTool(type="function", function=schema.FunctionName(name=choice.name))


def as_chat(body: CountTokensRequest) -> schema.ChatRequest:
    """The same wish as a chat request."""
    thinking, output, fields = body.thinking, body.output_config, {}
    if thinking is not None:
        fields |= {"enable_thinking": thinking.type != "disabled", "thinking_token_budget": thinking.budget_tokens}
        if (thinking.type == "enabled") != (thinking.budget_tokens is not None):
            name = "thinking.budget_tokens"
            raise ApiError(400, f"{name} belongs to thinking.type enabled, and must be given with it", name)
    if isinstance(body, MessagesRequest):
        same = ("max_tokens", "stream", "temperature", "top_p", "top_k", "seed", "block_size")
        fields |= {name: getattr(body, name) for name in same} | {"stop": body.stop_sequences or None}
    if output is not None and output.format is not None:
        form = schema.JsonSchema(name="answer", schema=output.format.schema_)
        fields["response_format"] = schema.ResponseFormat(type="json_schema", json_schema=form)
    if output is not None:
        fields["reasoning_effort"] = output.effort
    chat = as_messages(body)
    try:
        return schema.ChatRequest(
            model=body.model,
            messages=[schema.Message(**m) for m in chat],
            # The answer goes on where an assistant's turn at the end stops.
            continue_final_message=chat[-1]["role"] == "assistant",
            tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())] or None,
            tool_choice=_tool_choice(body),
            parallel_tool_calls=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
            chat_template_kwargs=body.chat_template_kwargs,
            **fields,
        )
    except ValidationError as e:
        raise of_conversion(e) from None


# The answer.


class Content:
    """The blocks of an answer as they grow, and the events that tell of it. ``shows_thoughts``: else the text of
    thinking blocks is left out."""

    def __init__(self, shows_thoughts: bool = True):
        self.blocks: list[dict] = []
        self._shows_thoughts = shows_thoughts
        self._is_open, self._arguments = False, ""

    def take(self, delta: Delta) -> list[dict]:
        """Events for a piece."""
        events = []
        for part in as_delta(delta):
            if text := part.get("content"):
                events += self._open("text", {"text": ""})
                self.blocks[-1]["text"] += text
                events.append(self._delta("text_delta", text=text))
            elif thought := part.get("reasoning_content"):
                events += self._open("thinking", {"thinking": "", "signature": ""})
                if self._shows_thoughts:
                    self.blocks[-1]["thinking"] += thought
                    events.append(self._delta("thinking_delta", thinking=thought))
            for call in part.get("tool_calls", ()):
                if name := call["function"].get("name"):
                    events += self.close() + self._open("tool_use", {"id": call["id"], "name": name, "input": {}})
                if arguments := call["function"]["arguments"]:
                    self._arguments += arguments
                    events.append(self._delta("input_json_delta", partial_json=arguments))
        return events

    def _open(self, kind: str, fields: dict) -> list[dict]:
        if self._is_open and self.blocks[-1]["type"] == kind:
            return []
        events = self.close()
        self.blocks.append({"type": kind, **fields})
        self._is_open, self._arguments = True, ""
        start = {"type": "content_block_start", "index": len(self.blocks) - 1}
        # The block grows on: its event gets a copy.
        return [*events, start | {"content_block": dict(self.blocks[-1])}]

    def _delta(self, kind: str, **fields) -> dict:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": {"type": kind, **fields}}

    def close(self) -> list[dict]:
        """Ends the block under way."""
        if not self._is_open:
            return []
        self._is_open, block, events = False, self.blocks[-1], []
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
            events.append(self._delta("signature_delta", signature=SIGNATURE))
        elif block["type"] == "tool_use":
            block["input"] = _object(self._arguments)
        return [*events, {"type": "content_block_stop", "index": len(self.blocks) - 1}]


def _object(arguments: str) -> dict:
    """A call's arguments. ``input`` must be an object: what a model wrote otherwise is wrapped as Anthropic advises
    clients to wrap it."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}


def _stop(row: TextSequence, parser: Parser) -> dict:
    # An aborted answer has no reason of its own there: it is cut as by max_tokens.
    reasons = {"length": "max_tokens", "abort": "max_tokens", "tool_calls": "tool_use"}
    reason, matched = reasons.get(parser.reason(row), "end_turn"), None
    if isinstance(row.matched, str):
        reason, matched = "stop_sequence", row.matched
    return {"stop_reason": reason, "stop_sequence": matched}


def _usage(row: TextSequence, output_tokens: int, reasoning_tokens: int = 0) -> dict:
    """``input_tokens`` are those that were not in the prefix cache."""
    prompt, cached = len(row.request.prompt), row.request.cached
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output_tokens,
        "output_tokens_details": {"thinking_tokens": reasoning_tokens},
    }


async def told(
    serving: Serving, talk: Conversation, row: TextSequence, message: dict, content: Content
) -> AsyncGenerator[dict, None]:
    """The events of an answer; in the end ``message`` is the whole of it."""
    parser = talk.parser()
    async for piece in serving.pieces(row):
        if message["usage"] is None:
            message["usage"] = _usage(row, 0)
            yield {"type": "message_start", "message": dict(message)}
        for event in content.take(parser.push(piece)):
            yield event
        if piece.finish_reason:
            for event in content.take(parser.finish(row)) + content.close():
                yield event
    counted = usage([row], 1)["completion_tokens"]
    stop, totals = _stop(row, parser), _usage(row, counted, parser.reasoning_tokens)
    message |= {"content": content.blocks, **stop, "usage": totals}
    yield {"type": "message_delta", "delta": stop, "usage": totals}
    yield {"type": "message_stop"}


async def framed(events: AsyncGenerator[dict, None]) -> AsyncGenerator[bytes, None]:
    """An error before the first event has a status of its own; later ones are events."""
    is_begun = False
    try:
        async for event in events:
            is_begun = True
            yield frame(event, event["type"])
    except Exception as e:
        if not is_begun:
            raise
        yield frame(as_api_error(e).body_for(PATH), "error")


@router.post(PATH, responses={200: {"model": MessagesAnswer}}, response_model=None)
async def messages(http: Request, body: MessagesRequest):
    serving: Serving = http.app.state.serving
    name = request_id.choose("msg_")
    talk, rows = await while_connected(http, prepared(serving, as_chat(body)))
    serving.register(rows, name, http.state.owner)
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
    events = told(serving, talk, rows[0], message, content)
    if body.stream:
        answer = EventStream.start(http, framed(events), last=b"")
    else:
        answer = while_connected(http, whole(events, message))
    return Later(http, answer, keeps_parsed=bool(talk.tools))


async def whole(events: AsyncGenerator[dict, None], message: dict) -> JsonResponse:
    async for _ in events:
        pass
    return JsonResponse(message)


@router.post(f"{PATH}/count_tokens", responses={200: {"model": InputTokens}}, response_model=None)
async def count_tokens(http: Request, body: CountTokensRequest):
    serving: Serving = http.app.state.serving
    serving.check_model(body.model)
    chat = as_chat(body)
    rendered = converse(serving, chat.messages, tools_in_use(chat), chat)
    return JsonResponse({"input_tokens": len((await while_connected(http, rendered)).prompt)})

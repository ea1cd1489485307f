"""/v1/chat/completions."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request

from dflash_jax.errors import InputError
from dflash_jax.rows import Piece, Row
from dflash_jax.server import prepare, schema
from dflash_jax.server.answer_schema import ChatCompletion
from dflash_jax.server.answers import chat_logprobs, usage
from dflash_jax.server.errors import ApiError, JsonResponse
from dflash_jax.server.grammar import Constraint, tag_in_lark
from dflash_jax.server.reasoning import CLOSE, OPEN, ReasoningSplitter, is_open
from dflash_jax.server.serving import Serving, while_connected
from dflash_jax.server.stream import EventStream, frame
from dflash_jax.server.tools import END, START, CallDelta, ToolParser, is_xml, joined

router = APIRouter()

# What a part of an answer has beside its text, and may come back with.
OUTPUT_FIELDS = {"annotations", "logprobs"}


@dataclass
class Delta:
    """What a piece of text turns out to be."""

    reasoning: str
    content: str
    calls: list[CallDelta]


class Parser:
    """Text of a choice → reasoning, content and calls, as it arrives."""

    def __init__(self, is_thinking: bool, tools: ToolParser | None):
        self._splitter, self._tools = ReasoningSplitter(is_thinking), tools
        self.reasoning_tokens = 0

    def push(self, piece: Piece) -> Delta:
        reasoning, at = "", 0
        # A thought ends at a token, and may do so inside of a piece.
        for end in piece.ends:
            if self._splitter.is_content:
                break
            was_reasoning = self._splitter.is_reasoning
            thought, content = self._splitter.push(piece.text[at:end])
            self.reasoning_tokens += was_reasoning or self._splitter.is_reasoning
            reasoning, at = reasoning + thought, end
            if content:
                return self._parsed(reasoning, content + self._splitter.push(piece.text[at:])[1])
        thought, content = self._splitter.push(piece.text[at:])
        return self._parsed(reasoning + thought, content)

    def finish(self) -> Delta:
        delta = self._parsed(*self._splitter.finish())
        if self._tools is not None:
            last = self._tools.finish()
            delta.content += last.content
            delta.calls += last.calls
        return delta

    def _parsed(self, reasoning: str, content: str) -> Delta:
        if self._tools is None:
            return Delta(reasoning, content, [])
        found = self._tools.push(content)
        return Delta(reasoning, found.content, found.calls)

    def reason(self, row: Row) -> str:
        called = self._tools is not None and self._tools.count
        return "tool_calls" if called and row.request.finish_reason == "stop" else row.request.finish_reason


@dataclass
class Conversation:
    """A conversation as token ids, and how to read what follows."""

    prompt: list[int]
    thought: str
    tools: dict[str, dict]
    xml: bool

    def parser(self) -> Parser:
        return Parser(self.thought == "open", ToolParser(self.xml, self.tools) if self.tools else None)


def text_of(content: str | list[schema.Part] | None, where: str) -> str:
    """Text parts joined. Raises ApiError for others."""
    if isinstance(content, str) or content is None:
        return content or ""
    texts = []
    for i, part in enumerate(content):
        if part.type not in ("text", "input_text", "output_text") or part.text is None:
            name = f"{where}.content[{i}].type"
            raise ApiError(400, f"{name} is {part.type!r}: only text is possible, images and video are not", name)
        if unknown := set(part.model_extra or ()) - OUTPUT_FIELDS:
            name = f"{where}.content[{i}].{min(unknown)}"
            raise ApiError(400, f"{name} is not supported", name)
        texts.append(part.text)
    return "".join(texts)


def as_template(messages: Sequence[schema.Message]) -> list[dict]:
    """Messages as chat templates read them."""
    found = []
    for i, m in enumerate(messages):
        message = {
            "role": "system" if m.role == "developer" else m.role,
            "content": text_of(m.content, f"messages[{i}]"),
        }
        if (thought := m.reasoning_content or m.reasoning) is not None:
            message["reasoning_content"] = thought
        if m.tool_call_id is not None:
            message["tool_call_id"] = m.tool_call_id
        if m.name is not None:
            message["name"] = m.name
        if m.tool_calls:
            message["tool_calls"] = [_call(c, f"messages[{i}].tool_calls[{j}]") for j, c in enumerate(m.tool_calls)]
        found.append(message)
    return found


def _call(call: schema.Call, where: str) -> dict:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            # It came broken from a model: the template shows it as it was.
            arguments = call.function.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def check_parameters(schema: dict, where: str) -> None:
    """A tool's parameters are an object's, under names that both formats of calls can write."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if schema.get("type", "object") != "object":
        raise ApiError(400, f"{where}.type is {schema['type']!r}: it must be object", f"{where}.type")
    if not isinstance(properties, dict) or any(">" in name or "\n" in name for name in properties):
        raise ApiError(400, f"{where}.properties must be an object, its names without > and newlines", where)
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ApiError(400, f"{where}.required must be a list of names", f"{where}.required")


async def converse(
    serving: Serving,
    messages: Sequence[schema.Message],
    tools: Sequence[schema.Tool] | None = None,
    options: dict | None = None,
    effort: str | None = None,
) -> Conversation:
    """Renders a conversation, off the event loop."""
    tokenizer, options = serving.llm.tokenizer, dict(options or {})
    if tokenizer is None:
        raise ApiError(400, "this checkpoint has no tokenizer, so it has no chat template: use token ids", "messages")
    if len(tools or ()) > serving.limits.tools:
        raise ApiError(400, f"{len(tools)} tools: at most {serving.limits.tools} are possible", "tools")
    if reserved := {"tokenize", "chat_template", "messages", "tools", "add_generation_prompt", "ask"} & set(options):
        name = f"chat_template_kwargs.{min(reserved)}"
        raise ApiError(400, f"{name} is not an option of the template", name)
    if effort is not None:
        options.setdefault("enable_thinking", effort != "none")
    for i, tool in enumerate(tools or ()):
        check_parameters(tool.function.parameters or {}, f"tools[{i}].function.parameters")
    given = [t.model_dump(exclude_none=True) for t in tools or ()] or None

    def render() -> tuple[str, list[int]]:
        text = tokenizer.render_chat(as_template(messages), tools=given, **options)
        return text, serving.llm.encode(tokenizer.encode_plain(text))

    try:
        text, prompt = await asyncio.to_thread(render)
    except InputError as e:
        raise ApiError(400, str(e), "messages") from None
    except (TypeError, UnicodeEncodeError):
        raise ApiError(400, "messages are not text that UTF-8 can hold", "messages") from None
    template = tokenizer.chat_template or ""
    closed = text.rstrip().endswith(CLOSE)
    thought = "open" if is_open(text) else "possible" if OPEN in template and not closed else "none"
    schemas = {t.function.name: t.function.parameters or {} for t in tools or ()}
    return Conversation(prompt, thought, schemas, is_xml(template))


def tool_constraint(serving: Serving, body: schema.ChatRequest, xml: bool) -> Constraint | None:
    """What ``tool_choice`` demands."""
    choice, tools = body.tool_choice, [t.function.model_dump(exclude_none=True) for t in body.tools or ()]
    if choice in (None, "none", "auto"):
        return None
    if not tools:
        raise ApiError(400, "tool_choice asks for a call, and there are no tools", "tool_choice")
    if choice != "required":
        tools = [t for t in tools if t["name"] == choice.function.name]
        if not tools:
            name = "tool_choice.function.name"
            raise ApiError(400, f"{name} is {choice.function.name!r}: there is no such tool", name)
    several = choice == "required" and body.parallel_tool_calls is not False
    if serving.grammar is None:
        raise ApiError(400, "tool_choice needs a tokenizer.json, and this checkpoint has none", "tool_choice")
    start, end = (tag_in_lark(serving.llm.tokenizer, tag) for tag in (START, END))
    calls = {"tools": tools, "most": 8 if several else 1, "xml": xml, "start": start, "end": end}
    return Constraint("calls", calls, "tools")


def tools_in_use(body: schema.ChatRequest) -> list[schema.Tool] | None:
    return None if body.tool_choice == "none" else body.tools


async def prepared(serving: Serving, body: schema.ChatRequest) -> tuple[Conversation, list[Row]]:
    """The rows that a request asks for."""
    serving.check_model(body.model)
    n = prepare.check_counts(serving, body)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    talk = await converse(serving, body.messages, tools_in_use(body), body.chat_template_kwargs, body.reasoning_effort)
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    most = serving.check_room(talk.prompt, most, "messages")
    wanted, calls = prepare.constraint(body), tool_constraint(serving, body, talk.xml)
    if wanted and calls:
        raise ApiError(400, f"{wanted.field} and tool_choice each ask for a form: give one of them", wanted.field)
    params = prepare.sampling(body, most, body.seed, (body.top_logprobs or 0) if body.logprobs else None)
    grammar = await prepare.grammar(serving, wanted or calls)
    options = {"block_size": body.block_size, "priority": body.priority, "grammar": grammar}
    return talk, prepare.rows(serving, talk.prompt, params, n, thought=talk.thought, **options)


@router.post("/v1/chat/completions", responses={200: {"model": ChatCompletion}}, response_model=None)
async def chat_completions(http: Request, body: schema.ChatRequest):
    serving: Serving = http.app.state.serving
    talk, rows = await while_connected(http, prepared(serving, body))
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model or serving.name}
    if body.stream:
        return await EventStream.start(http, streamed(serving, body, talk, rows, head))
    return JsonResponse(await while_connected(http, whole(serving, body, talk, rows, head)))


async def whole(serving: Serving, body: schema.ChatRequest, talk: Conversation, rows: list[Row], head: dict) -> dict:
    parsers, deltas = [talk.parser() for _ in rows], [[] for _ in rows]
    async for i, piece in serving.merged(rows):
        deltas[i].append(parsers[i].push(piece))
    choices = []
    for i, row in enumerate(rows):
        deltas[i].append(parsers[i].finish())
        content = "".join(d.content for d in deltas[i])
        reasoning = "".join(d.reasoning for d in deltas[i])
        calls = joined([c for d in deltas[i] for c in d.calls])
        message = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
        message["reasoning_content"] = reasoning or None
        if calls:
            message["tool_calls"] = calls
        logprobs = None
        if row.logprobs is not None:
            logprobs = {"content": chat_logprobs(serving.llm.tokenizer, row.logprobs), "refusal": None}
        choice = {"index": i, "message": message, "logprobs": logprobs, "finish_reason": parsers[i].reason(row)}
        if body.return_token_ids:
            choice["token_ids"] = row.request.tokens
        choices.append(choice)
    counted = usage(rows, len(rows), sum(p.reasoning_tokens for p in parsers))
    return {**head, "object": "chat.completion", "choices": choices, "usage": counted, "system_fingerprint": None}


def as_delta(delta: Delta) -> list[dict]:
    """In the order in which they came: what belongs to a call that has begun is before any content."""
    begun = next((i for i, call in enumerate(delta.calls) if call.name is not None), len(delta.calls))
    found = [_as_call(call) for call in delta.calls[:begun]]
    if delta.reasoning:
        found.append({"reasoning_content": delta.reasoning})
    if delta.content:
        found.append({"content": delta.content})
    return found + [_as_call(call) for call in delta.calls[begun:]]


def _as_call(call: CallDelta) -> dict:
    function = {"arguments": call.arguments} | ({"name": call.name} if call.name is not None else {})
    first = {"id": call.id, "type": "function"} if call.id is not None else {}
    return {"tool_calls": [{"index": call.index, **first, "function": function}]}


async def streamed(
    serving: Serving, body: schema.ChatRequest, talk: Conversation, rows: list[Row], head: dict
) -> AsyncGenerator[bytes, None]:
    wants = body.stream_options or schema.StreamOptions()
    parsers, begun = [talk.parser() for _ in rows], [False] * len(rows)

    def chunk(i: int, delta: dict, reason: str | None = None, **more) -> bytes:
        choice = {"index": i, "delta": delta, "logprobs": more.pop("logprobs", None), "finish_reason": reason, **more}
        value = {**head, "object": "chat.completion.chunk", "choices": [choice], "system_fingerprint": None}
        if wants.include_usage:
            value["usage"] = usage(rows, len(rows)) if wants.continuous_usage_stats else None
        return frame(value)

    async for i, piece in serving.merged(rows):
        if not begun[i]:
            begun[i] = True
            yield chunk(i, {"role": "assistant", "content": ""})
        found, more = as_delta(parsers[i].push(piece)), {}
        if piece.finish_reason:
            found += as_delta(parsers[i].finish())
        if piece.logprobs is not None:
            more["logprobs"] = {"content": chat_logprobs(serving.llm.tokenizer, piece.logprobs), "refusal": None}
        if body.return_token_ids:
            more["token_ids"] = piece.token_ids
        if body.return_drafts:
            more["drafts"] = piece.segments
        for delta in found or [{}] * bool(more):
            yield chunk(i, delta, **more)
            more = {}
        if piece.finish_reason:
            yield chunk(i, {}, parsers[i].reason(rows[i]))
    if wants.include_usage:
        counted = usage(rows, len(rows), sum(p.reasoning_tokens for p in parsers))
        yield frame({**head, "object": "chat.completion.chunk", "choices": [], "usage": counted})

"""/v1/chat/completions."""

import time
from collections.abc import AsyncGenerator, Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from dflash_jax.frontend.sequence import TextSequence
from dflash_jax.server import chat_schema, prepare, request_id, schema
from dflash_jax.server.answer_schema import ChatCompletion
from dflash_jax.server.answers import chat_logprobs, prompt_logprobs, request_metrics, stop_reasons, timings, usage
from dflash_jax.server.constraint import Constraint, tag_in_lark
from dflash_jax.server.conversation import Conversation, Delta, Parser, converse, text_of
from dflash_jax.server.errors import ApiError
from dflash_jax.server.large_answers import json_response
from dflash_jax.server.serving import Serving, while_connected
from dflash_jax.server.stream import EventStream, Later, frame
from dflash_jax.server.tools import END, START, CallDelta, joined

router = APIRouter()


def tool_constraint(serving: Serving, body: chat_schema.ChatRequest, xml: bool) -> Constraint | None:
    """What ``tool_choice`` demands."""
    choice, tools = body.tool_choice, [t.function.model_dump(exclude_none=True) for t in body.tools or ()]
    if choice in (None, "none", "auto"):
        return None
    if not tools:
        raise ApiError(400, "tool_choice asks for a call, and there are no tools", "tool_choice")
    several, optional = body.parallel_tool_calls is not False, False
    if isinstance(choice, chat_schema.NamedTool):
        tools, several = _named(tools, [choice.function.name], "tool_choice.function.name"), False
    elif isinstance(choice, chat_schema.AllowedToolsChoice):
        names = [tool.function.name for tool in choice.allowed_tools.tools]
        tools, optional = _named(tools, names, "tool_choice.allowed_tools.tools"), choice.allowed_tools.mode == "auto"
    if serving.grammar is None:
        raise ApiError(400, "tool_choice needs a tokenizer.json, and this checkpoint has none", "tool_choice")
    start, end = (tag_in_lark(serving.llm.tokenizer, tag) for tag in (START, END))
    calls = {"tools": tools, "most": 8 if several else 1, "xml": xml, "start": start, "end": end, "optional": optional}
    return Constraint("calls", calls, "tools")


def _named(tools: list[dict], names: Sequence[str], where: str) -> list[dict]:
    """The tools of these names. Raises ApiError where one is missing."""
    known = {tool["name"]: tool for tool in tools}
    if missing := next((name for name in names if name not in known), None):
        raise ApiError(400, f"{where} is {missing[:64]!r}: there is no such tool", where)
    return [known[name] for name in dict.fromkeys(names)]


def tools_in_use(body: chat_schema.ChatRequest) -> list[chat_schema.Tool] | None:
    return None if body.tool_choice == "none" else body.tools


def check(serving: Serving, body: chat_schema.ChatRequest) -> None:
    """What fields demand of each other."""
    serving.check_model(body.model)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, "prompt_logprobs is not possible with stream: true", "prompt_logprobs")


async def prepared(serving: Serving, body: chat_schema.ChatRequest) -> tuple[Conversation, list[TextSequence]]:
    """The rows that a request asks for."""
    check(serving, body)
    n = prepare.check_counts(serving, body)
    talk = await converse(serving, body.messages, tools_in_use(body), body)
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    kept = prepare.truncated(serving, body, talk.prompt, most)
    if body.truncation_side == "right" and len(kept) < len(talk.prompt) and talk.thought == "open":
        # What opens the thought is cut off.
        talk.thought = "possible"
    talk.prompt = kept
    talk.echoed = echoed(body.messages) if body.echo else ""
    most = serving.check_room(talk.prompt, most, "messages")
    wanted, calls = prepare.constraint(body), tool_constraint(serving, body, talk.xml)
    if wanted and calls:
        raise ApiError(400, f"{wanted.field} and tool_choice each ask for a form: give one of them", wanted.field)
    talk.is_forced = calls is not None and not calls.value["optional"]
    talk.has_one_call = body.parallel_tool_calls is False
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = prepare.sampling(body, most, body.seed, logprobs, body.logprob_token_ids)
    options = {
        "block_size": body.block_size,
        "priority": body.priority,
        "grammar": await prepare.grammar(serving, wanted or calls),
        "thought": talk.thought,
        "budget": prepare.budget([body.thinking_token_budget, body.thinking_budget]),
        "prompt_logprobs": body.prompt_logprobs,
        "cache_salt": body.cache_salt,
        "ends": talk.ends,
    }
    return talk, await prepare.rows(serving, talk.prompt, params, n, **options)


@router.post("/v1/chat/completions", responses={200: {"model": ChatCompletion}}, response_model=None)
async def chat_completions(http: Request, body: chat_schema.ChatRequest):
    serving: Serving = http.app.state.serving
    name = request_id.choose("chatcmpl-", body.request_id, body.rid)
    talk, rows = await while_connected(http, prepared(serving, body))
    head = {"id": name, "created": int(time.time()), "model": body.model or serving.name}
    serving.register(rows, name, http.state.owner)
    body = body.without_large()
    if body.stream:
        answer = EventStream.start(http, streamed(serving, body, talk, rows, head))
    else:
        answer = while_connected(http, whole(serving, body, talk, rows, head))
    return Later(http, answer, keeps_parsed=bool(talk.tools))


async def whole(
    serving: Serving, body: chat_schema.ChatRequest, talk: Conversation, rows: list[TextSequence], head: dict
) -> Response:
    parsers, deltas = [talk.parser(body.shown_reasoning) for _ in rows], [[] for _ in rows]
    async for i, piece in serving.merged(rows):
        deltas[i].append(parsers[i].push(piece))
    return await json_response(rows, lambda: built(serving, body, talk, rows, head, parsers, deltas))


def built(
    serving: Serving,
    body: chat_schema.ChatRequest,
    talk: Conversation,
    rows: list[TextSequence],
    head: dict,
    parsers: list[Parser],
    deltas: list[list[Delta]],
) -> dict:
    """A whole answer."""
    choices = []
    for i, row in enumerate(rows):
        deltas[i].append(parsers[i].finish(row))
        content = talk.echoed + "".join(d.content for d in deltas[i])
        reasoning = "".join(d.reasoning for d in deltas[i])
        calls = joined([c for d in deltas[i] for c in d.calls])
        message = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
        message["reasoning_content"] = message["reasoning"] = reasoning or None
        if calls:
            message["tool_calls"] = calls
        logprobs = None
        if row.logprobs is not None:
            logprobs = logprobs_of(serving, body, row.logprobs)
        choice = {"index": i, "message": message, "logprobs": logprobs, "finish_reason": parsers[i].reason(row)}
        choice |= stop_reasons(row, serving.llm.defaults.stop_ids)
        choice["token_ids"] = row.request.tokens if body.return_token_ids else None
        if body.return_prompt_token_ids:
            choice["prompt_token_ids"] = talk.prompt
        choices.append(choice)
    counted = usage(rows, len(rows), sum(p.reasoning_tokens for p in parsers))
    value = {**head, "object": "chat.completion", "choices": choices, "usage": counted, "system_fingerprint": None}
    value["prompt_token_ids"] = talk.prompt if body.return_token_ids else None
    value["prompt_logprobs"] = prompt_logprobs(serving.llm.tokenizer, rows[0])
    return value | (request_metrics(rows) if serving.additions.metrics else {})


def echoed(messages: Sequence[chat_schema.Message]) -> str:
    """What an answer begins with under ``echo``: the text of the last message, if it is the assistant's."""
    last = messages[-1]
    return text_of(last.content, f"messages[{len(messages) - 1}]") if last.role == "assistant" else ""


def logprobs_of(serving: Serving, body: chat_schema.ChatRequest, entries: Sequence[dict]) -> dict:
    as_ids = serving.additions.as_ids(body.return_tokens_as_token_ids)
    content = chat_logprobs(serving.llm.tokenizer, entries, as_ids=as_ids)
    return {"content": content, "refusal": None}


def as_delta(delta: Delta) -> list[dict]:
    """In the order in which they came: what belongs to a call that has begun is before any content."""
    begun = next((i for i, call in enumerate(delta.calls) if call.name is not None), len(delta.calls))
    found = [_as_call(call) for call in delta.calls[:begun]]
    if delta.reasoning:
        found.append({"reasoning_content": delta.reasoning, "reasoning": delta.reasoning})
    if delta.content:
        found.append({"content": delta.content})
    return found + [_as_call(call) for call in delta.calls[begun:]]


def _as_call(call: CallDelta) -> dict:
    function = {"arguments": call.arguments} | ({"name": call.name} if call.name is not None else {})
    first = {"id": call.id, "type": "function"} if call.id is not None else {}
    return {"tool_calls": [{"index": call.index, **first, "function": function}]}


async def streamed(
    serving: Serving, body: chat_schema.ChatRequest, talk: Conversation, rows: list[TextSequence], head: dict
) -> AsyncGenerator[bytes, None]:
    wants = serving.additions.stream_options(body.stream_options or schema.StreamOptions())
    parsers, begun = [talk.parser(body.shown_reasoning) for _ in rows], []

    def chunk(i: int, delta: dict, reason: str | None = None, is_first: bool = False, **more) -> bytes:
        # SGLang's clients read the field of every delta.
        delta = {"reasoning_content": None, **delta}
        choice = {"index": i, "delta": delta, "logprobs": more.pop("logprobs", None), "finish_reason": reason, **more}
        value = {**head, "object": "chat.completion.chunk", "choices": [choice], "system_fingerprint": None}
        if wants.include_usage:
            thoughts = sum(p.reasoning_tokens for p in parsers)
            counted = usage(rows, len(rows), thoughts, new=[rows[i] for i in begun])
            value["usage"] = counted if wants.continuous_usage_stats else None
            if wants.include_timings and wants.continuous_usage_stats:
                value["timings"] = timings(rows, serving.clock)
        if is_first and body.return_token_ids:
            value["prompt_token_ids"] = talk.prompt
        return frame(value)

    async for i, piece in serving.merged(rows):
        if i not in begun:
            yield chunk(i, {"role": "assistant", "content": talk.echoed}, is_first=not begun)
            begun.append(i)
        found, more = as_delta(parsers[i].push(piece)), {}
        if piece.finish_reason:
            found += as_delta(parsers[i].finish(rows[i]))
        if piece.logprobs is not None:
            more["logprobs"] = logprobs_of(serving, body, piece.logprobs)
        if body.return_token_ids:
            more["token_ids"] = piece.token_ids
        if body.return_drafts:
            more["drafts"] = piece.segments
        found = found or [{}] * bool(more or piece.finish_reason)
        for place, delta in enumerate(found):
            reason = None
            if piece.finish_reason and place == len(found) - 1:
                # With the last text, as in vLLM, so that no chunk of a choice is without tokens.
                reason = parsers[i].reason(rows[i])
                more |= stop_reasons(rows[i], serving.llm.defaults.stop_ids)
            yield chunk(i, delta, reason, **more)
            more = {}
    if wants.include_usage:
        counted = usage(rows, len(rows), sum(p.reasoning_tokens for p in parsers))
        more = {"timings": timings(rows, serving.clock)} if wants.include_timings else {}
        more |= request_metrics(rows) if serving.additions.metrics else {}
        yield frame({**head, "object": "chat.completion.chunk", "choices": [], "usage": counted, **more})

"""/v1/chat/completions, and vLLM's /v1/chat/completions/batch: several conversations in one request."""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import count
from typing import Any

from fastapi import APIRouter, Request

from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.protocol import Form
from dflash_jax.server import chat_schema, prepare, schema
from dflash_jax.server.answer_schema import ChatCompletion
from dflash_jax.server.answers import (
    Totals,
    chat_logprobs,
    prompt_logprobs,
    proposals,
    request_metrics,
    stop_reasons,
    stream_totals,
    usage,
)
from dflash_jax.server.body import MediaRoute
from dflash_jax.server.content import text_of
from dflash_jax.server.conversation import Conversation, Delta, converse
from dflash_jax.server.engine_client import RemoteSequence
from dflash_jax.server.errors import ApiError
from dflash_jax.server.request_context import current
from dflash_jax.server.serving import Serving
from dflash_jax.server.stream import EventStream, Frame, JsonAnswer, Later, frame, frame_parts
from dflash_jax.server.tools import END, START, CallDelta, joined

router = APIRouter(route_class=MediaRoute)


def tag_in_lark(tokenizer: Tokenizer, tag: str) -> str:
    """A tag in Lark's notation: its token where it is one, else a string."""
    return tag if len(tokenizer.encode_plain(tag)) == 1 else json.dumps(tag)


def calls_form(serving: Serving, body: chat_schema.ChatRequest, syntax: str) -> Form | None:
    """The form of the calls that ``tool_choice`` asks for, in a syntax of `Serving.call_syntax`; None without one.

    Raises:
        ApiError: A tool is missing, or structured output is not available.
    """
    choice, tools = body.tool_choice, [t.function.model_dump(exclude_none=True) for t in body.tools or ()]
    if choice in (None, "none", "auto"):
        return None
    if not tools:
        raise ApiError(400, "tool_choice asks for a call, and there are no tools", "tool_choice")
    several = body.parallel_tool_calls is not False
    if isinstance(choice, chat_schema.NamedTool):
        tools, several = _named(tools, [choice.function.name], "tool_choice.function.name"), False
    elif isinstance(choice, chat_schema.AllowedToolsChoice):
        names = [tool.function.name for tool in choice.allowed_tools.tools]
        tools = _named(tools, names, "tool_choice.allowed_tools.tools")
    tokenizer = serving.llm.tokenizer
    if tokenizer is None or tokenizer.file is None:
        raise ApiError(400, "tool_choice needs a tokenizer.json, and this checkpoint has none", "tool_choice")
    start, end = (tag_in_lark(tokenizer, tag) for tag in (START, END))
    calls = {"tools": tools, "most": 8 if several else 1, "syntax": syntax, "start": start, "end": end}
    return prepare.checked_form("calls", calls | {"optional": not body.must_call}, "tools")


def _named(tools: list[dict], names: Sequence[str], where: str) -> list[dict]:
    """The tools with these names.

    Raises:
        ApiError: One is missing.
    """
    known = {tool["name"]: tool for tool in tools}
    if missing := next((name for name in names if name not in known), None):
        raise ApiError(400, f"{where} is {missing[:64]!r}: there is no such tool", where)
    return [known[name] for name in dict.fromkeys(names)]


def tools_in_use(body: chat_schema.ChatRequest) -> list[chat_schema.Tool] | None:
    """The tools that the template shows."""
    return None if body.tool_choice == "none" else body.tools


async def prepare_chat(
    serving: Serving, body: chat_schema.ChatRequest, needs_room: bool = True
) -> tuple[Conversation, list[RemoteSequence]]:
    """Prepares the conversation and the sequences of a request.

    Args:
        serving: The model and its engine.
        body: The request.
        needs_room: Whether all of ``max_tokens`` must fit; otherwise the answer ends where the context does. Agents
            send the same ``max_tokens`` to every model.

    Raises:
        ApiError: The request is invalid.
    """
    serving.check_model(body.model)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    prepare.check_stream(serving, body)
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, "prompt_logprobs is not possible with stream: true", "prompt_logprobs")
    n = prepare.check_counts(serving, body)
    talk = await converse(serving, body.messages, tools_in_use(body), body)
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    prompt = prepare.truncate(serving, body, talk.prompt, most)
    if body.truncation_side == "right" and len(prompt) < len(talk.prompt) and talk.thought == "open":
        # The tag that opens the thought was truncated.
        talk.thought = "possible"
    talk.prompt = prompt
    last, place = body.messages[-1], len(body.messages) - 1
    talk.echoed = text_of(last.content, f"messages[{place}]") if body.echo and last.role == "assistant" else ""
    # A prompt that is truncated to leave room for all new tokens would be one token where there are too many.
    needs_room = needs_room or body.truncate_prompt_tokens == -1
    room = serving.check_room(talk.prompt, most if needs_room else None, "messages")
    if most is not None and most > room:
        current().note(f"max_tokens is {most}: there is room for less, so the answer may end where the context does")
    most = room if most is None else min(most, room)
    form, calls = prepare.form_of(body), calls_form(serving, body, talk.syntax)
    if form and calls:
        raise ApiError(400, f"{form.field} and tool_choice each ask for a form: give one of them", form.field)
    talk.is_forced = body.must_call
    talk.has_one_call = body.parallel_tool_calls is False
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = prepare.sampling(body, most, body.seed, logprobs, body.logprob_token_ids)
    options = {
        "block_size": body.block_size,
        "priority": body.priority,
        "form": await prepare.compiled(serving, form or calls),
        "thought": talk.thought,
        "budget": prepare.budget(body.budgets),
        "prompt_logprobs": body.prompt_logprobs,
        "cache_salt": body.cache_salt or "",
        "records_drafts": body.return_proposals,
        "ends": talk.ends(),
        "media": talk.media,
    }
    return talk, await prepare.sequences(serving, talk.prompt, params, n, **options)


@router.post("/v1/chat/completions", responses={200: {"model": ChatCompletion}}, response_model=None)
async def chat_completions(http: Request, body: chat_schema.ChatRequest):
    """OpenAI's chat completions."""
    serving: Serving = http.app.state.serving
    name = current().choose_id("chatcmpl-", body.request_id, body.rid)
    talk, sequences = await prepare_chat(serving, body, needs_room=False)
    head = {"id": name, "created": current().created, "model": body.model or serving.name}
    body = body.without_large()
    if body.stream:
        answer = EventStream(stream_chunks(serving, body, talk, sequences, head)).start()
    else:
        answer = full_response(serving, body, [talk] * len(sequences), sequences, head)
    return Later(http, answer, keeps_parsed=bool(talk.tools))


@router.post("/v1/chat/completions/batch", responses={200: {"model": ChatCompletion}}, response_model=None)
async def chat_completions_batch(http: Request, body: chat_schema.ChatBatchRequest):
    """Chat completions of several conversations, vLLM's endpoint."""
    serving: Serving = http.app.state.serving
    name = current().choose_id("chatcmpl-", body.request_id, body.rid)
    talks, sequences = await prepare_batch(serving, body)
    head = {"id": name, "created": current().created, "model": body.model or serving.name}
    return Later(http, full_response(serving, body.without_large(), talks, sequences, head, is_batch=True))


async def prepare_batch(
    serving: Serving, body: chat_schema.ChatBatchRequest
) -> tuple[list[Conversation], list[RemoteSequence]]:
    """A conversation and a sequence for each list of messages.

    Raises:
        ApiError: A field is used that works for one conversation only, there are too many conversations, or one is
            invalid; the message has its number.
    """
    for field, is_wrong in {"stream": body.stream, "n": body.n not in (None, 1), "tools": body.tools}.items():
        if is_wrong:
            raise ApiError(400, f"{field} is not possible for several conversations", field)
    if len(body.messages) > serving.limits.prompts:
        message = f"{len(body.messages)} conversations: at most {serving.limits.prompts} are possible"
        raise ApiError(400, message, "messages")
    talks, all_sequences = [], []
    for i, messages in enumerate(body.messages):
        # The fields are validated already.
        is_continued = body.continue_final_message or messages[-1].is_begun
        fields: dict[str, Any] = dict(body) | {"messages": messages, "continue_final_message": is_continued}
        try:
            chat = chat_schema.ChatRequest.model_construct(None, **fields)
            talk, sequences = await prepare_chat(serving, chat, needs_room=False)
        except ApiError as e:
            e.message = f"conversation {i}: {e.message}"
            raise
        talks.append(talk)
        all_sequences += sequences
    return talks, all_sequences


async def full_response(
    serving: Serving,
    body: chat_schema.ChatRequest,
    talks: list[Conversation],
    sequences: list[RemoteSequence],
    head: dict,
    is_batch: bool = False,
) -> JsonAnswer:
    """Waits for all sequences, each of its conversation, then answers.

    ``is_batch``: each sequence has a prompt of its own.
    """
    parsers, deltas = [talk.parser(body.shown_reasoning) for talk in talks], [[] for _ in sequences]
    async with aclosing(serving.merged(sequences)) as merged:
        async for i, piece in merged:
            deltas[i].append(parsers[i].push(piece))

    def of_prompt(i: int) -> dict:
        scores = prompt_logprobs(serving.llm.tokenizer, sequences[i])
        return {"prompt_token_ids": talks[i].prompt if body.return_token_ids else None, "prompt_logprobs": scores}

    def choice(i: int, sequence: RemoteSequence) -> dict:
        deltas[i].append(parsers[i].finish(sequence))
        content = talks[i].echoed + "".join(d.content for d in deltas[i])
        reasoning = "".join(d.reasoning for d in deltas[i]) or None
        calls = joined([c for d in deltas[i] for c in d.calls])
        message = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls:
            message |= {"function_call": calls[0]["function"]} if body.has_functions else {"tool_calls": calls}
        entries = sequence.logprobs
        value = {
            "index": i,
            "message": message,
            "logprobs": None if entries is None else logprobs_of(serving, body, entries),
            "finish_reason": reason_of(body, parsers[i].reason(sequence)),
            **stop_reasons(sequence, serving.llm.defaults.stop_ids),
            "token_ids": sequence.request.tokens if body.return_token_ids else None,
        }
        if body.return_prompt_token_ids:
            value["prompt_token_ids"] = talks[i].prompt
        fields = of_prompt(i).items() if is_batch else ()
        return value | {name: field for name, field in fields if field is not None}

    counted = usage(sequences, 1 if is_batch else len(sequences), sum(parser.reasoning_tokens for parser in parsers))
    # Made when they are written.
    choices = map(choice, count(), sequences)
    value = {**head, "object": "chat.completion", "choices": choices, "usage": counted, "system_fingerprint": None}
    value |= {"prompt_token_ids": None, "prompt_logprobs": None} if is_batch else of_prompt(0)
    return JsonAnswer(value | request_metrics(serving, sequences[:1] if is_batch else sequences))


def logprobs_of(serving: Serving, body: chat_schema.ChatRequest, entries: Sequence[dict]) -> dict:
    """The field ``logprobs`` of a choice."""
    as_ids = serving.additions.as_ids(body.return_tokens_as_token_ids)
    content = chat_logprobs(serving.llm.tokenizer, entries, as_ids=as_ids)
    return {"content": content, "refusal": None}


def reason_of(body: chat_schema.ChatRequest, reason: str | None) -> str | None:
    """The finish_reason of a choice, by that of its parser."""
    return "function_call" if body.has_functions and reason == "tool_calls" else reason


def as_deltas(delta: Delta, has_functions: bool) -> list[dict]:
    """The deltas of a chat's message, one for each part of a piece; ``has_functions``: calls in OpenAI's older form."""
    deltas = [_as_delta(*part) for part in delta.parts()]
    calls = ((each, each.pop("tool_calls", None)) for each in deltas if has_functions)
    for each, call in calls:
        each |= {"function_call": call[0]["function"]} if call else {}
    return deltas


def _as_delta(kind: str, text: str, call: CallDelta | None) -> dict:
    if call is None:
        return {"content": text} if kind == "content" else {"reasoning_content": text, "reasoning": text}
    function = {"arguments": text} | ({"name": call.name} if call.name is not None else {})
    first = {"id": call.id, "type": "function"} if call.id is not None else {}
    return {"tool_calls": [{"index": call.index, **first, "function": function}]}


async def stream_chunks(
    serving: Serving, body: chat_schema.ChatRequest, talk: Conversation, sequences: list[RemoteSequence], head: dict
) -> AsyncGenerator[Frame, None]:
    """Yields the chunks of a streamed answer."""
    stream_options = serving.additions.stream_options(body.stream_options or schema.StreamOptions())
    parsers, started = [talk.parser(body.shown_reasoning) for _ in sequences], []
    totals = Totals(sequences, len(sequences))

    def chunk(i: int, delta: dict, reason: str | None = None, is_first: bool = False, **more) -> Frame:
        # SGLang's clients read this field of every delta.
        delta = {"reasoning_content": None, **delta}
        choice = {"index": i, "delta": delta, "logprobs": more.pop("logprobs", None), "finish_reason": reason, **more}
        value = {**head, "object": "chat.completion.chunk", "choices": [choice], "system_fingerprint": None}
        value |= stream_totals(serving, stream_options, totals, sum(p.reasoning_tokens for p in parsers))
        if is_first and body.return_token_ids:
            value["prompt_token_ids"] = talk.prompt
        return frame_parts(value) if is_first or choice["logprobs"] else frame(value)

    async for i, piece in serving.merged(sequences):
        if i not in started:
            totals.take_prompt(i)
            yield chunk(i, {"role": "assistant", "content": talk.echoed}, is_first=not started)
            started.append(i)
        totals.take(i)
        deltas, more = as_deltas(parsers[i].push(piece), body.has_functions), {}
        if piece.finish_reason:
            deltas += as_deltas(parsers[i].finish(sequences[i]), body.has_functions)
        if piece.logprobs is not None:
            more["logprobs"] = logprobs_of(serving, body, piece.logprobs)
        if body.return_token_ids:
            more["token_ids"] = piece.token_ids
        if body.return_drafts:
            more["drafts"] = piece.segments
        if piece.proposals is not None:
            more["proposals"] = proposals(serving.llm.tokenizer, piece)
        deltas = deltas or [{}] * bool(more or piece.finish_reason)
        for place, delta in enumerate(deltas):
            reason = None
            if piece.finish_reason and place == len(deltas) - 1:
                # The reason comes with the last text, as in vLLM: no chunk of a choice is without tokens.
                reason = reason_of(body, parsers[i].reason(sequences[i]))
                more |= stop_reasons(sequences[i], serving.llm.defaults.stop_ids)
            yield chunk(i, delta, reason, **more)
            more = {}
    if stream_options.include_usage:
        last = stream_totals(serving, stream_options, totals, sum(p.reasoning_tokens for p in parsers), is_last=True)
        last |= request_metrics(serving, sequences)
        yield frame({**head, "object": "chat.completion.chunk", "choices": [], **last})

"""/v1/chat/completions, and vLLM's /v1/chat/completions/batch: several conversations in one request."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from itertools import count
from typing import Any

from fastapi import APIRouter, Request

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
from dflash_jax.server.constraint import Constraint, tag_in_lark
from dflash_jax.server.content import text_of
from dflash_jax.server.conversation import Conversation, Delta, Parser, converse
from dflash_jax.server.engine_client import RemoteSequence
from dflash_jax.server.errors import ApiError
from dflash_jax.server.request_context import current
from dflash_jax.server.serving import Serving
from dflash_jax.server.stream import EventStream, Frame, JsonAnswer, Later, frame, frame_parts
from dflash_jax.server.tools import END, START, CallDelta, joined

router = APIRouter(route_class=MediaRoute)


def tool_constraint(serving: Serving, body: chat_schema.ChatRequest, xml: bool) -> Constraint | None:
    """The constraint of ``tool_choice``; None without one.

    Raises:
        ApiError: A tool is missing, or structured output is not available.
    """
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
    tokenizer = serving.llm.tokenizer
    if tokenizer is None or tokenizer.file is None:
        raise ApiError(400, "tool_choice needs a tokenizer.json, and this checkpoint has none", "tool_choice")
    start, end = (tag_in_lark(tokenizer, tag) for tag in (START, END))
    calls = {"tools": tools, "most": 8 if several else 1, "xml": xml, "start": start, "end": end, "optional": optional}
    return Constraint("calls", calls, "tools")


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


def check(serving: Serving, body: chat_schema.ChatRequest) -> None:
    """Checks fields that depend on each other.

    Raises:
        ApiError: They contradict each other, or the model is not served here.
    """
    serving.check_model(body.model)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    prepare.check_stream(serving, body)
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, "prompt_logprobs is not possible with stream: true", "prompt_logprobs")


async def prepare_chat(serving: Serving, body: chat_schema.ChatRequest) -> tuple[Conversation, list[RemoteSequence]]:
    """Prepares the conversation and the sequences of a request.

    Args:
        serving: The model and its engine.
        body: The request.

    Raises:
        ApiError: The request is invalid.
    """
    check(serving, body)
    n = prepare.check_counts(serving, body)
    talk = await converse(serving, body.messages, tools_in_use(body), body)
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    prompt = prepare.truncate(serving, body, talk.prompt, most)
    if body.truncation_side == "right" and len(prompt) < len(talk.prompt) and talk.thought == "open":
        # The tag that opens the thought was truncated.
        talk.thought = "possible"
    talk.prompt = prompt
    talk.echoed = echoed_text(body.messages) if body.echo else ""
    most = serving.check_room(talk.prompt, most, "messages")
    constraint, calls = prepare.constraint(body), tool_constraint(serving, body, talk.xml)
    if constraint and calls:
        raise ApiError(
            400, f"{constraint.field} and tool_choice each ask for a form: give one of them", constraint.field
        )
    talk.is_forced = calls is not None and not calls.value["optional"]
    talk.has_one_call = body.parallel_tool_calls is False
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = prepare.sampling(body, most, body.seed, logprobs, body.logprob_token_ids)
    options = {
        "block_size": body.block_size,
        "priority": body.priority,
        "form": await prepare.compiled(serving, constraint or calls),
        "thought": talk.thought,
        "budget": prepare.budget([body.thinking_token_budget, body.thinking_budget]),
        "prompt_logprobs": body.prompt_logprobs,
        "cache_salt": body.cache_salt,
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
    talk, sequences = await prepare_chat(serving, body)
    head = {"id": name, "created": current().created, "model": body.model or serving.name}
    body = body.without_large()
    if body.stream:
        answer = EventStream(stream_chunks(serving, body, talk, sequences, head)).start()
    else:
        answer = full_response(serving, body, talk, sequences, head)
    return Later(http, answer, keeps_parsed=bool(talk.tools))


async def full_response(
    serving: Serving, body: chat_schema.ChatRequest, talk: Conversation, sequences: list[RemoteSequence], head: dict
) -> JsonAnswer:
    """Waits for all sequences, then answers."""
    parsers, deltas = [talk.parser(body.shown_reasoning) for _ in sequences], [[] for _ in sequences]
    async for i, piece in serving.merged(sequences):
        deltas[i].append(parsers[i].push(piece))
    choices = (
        chat_choice(serving, body, talk, *choice) for choice in zip(count(), sequences, parsers, deltas, strict=False)
    )
    counted = usage(sequences, len(sequences), sum(p.reasoning_tokens for p in parsers))
    value = {**head, "object": "chat.completion", "choices": choices, "usage": counted, "system_fingerprint": None}
    value["prompt_token_ids"] = talk.prompt if body.return_token_ids else None
    value["prompt_logprobs"] = prompt_logprobs(serving.llm.tokenizer, sequences[0])
    return JsonAnswer(value | request_metrics(serving, sequences))


def chat_choice(
    serving: Serving,
    body: chat_schema.ChatRequest,
    talk: Conversation,
    i: int,
    sequence: RemoteSequence,
    parser: Parser,
    deltas: list[Delta],
) -> dict:
    """A complete choice.

    Args:
        serving: The model and its engine.
        body: The request.
        talk: Its conversation.
        i: The number of the choice.
        sequence: Its finished sequence.
        parser: Its parser.
        deltas: Its parsed pieces.
    """
    deltas.append(parser.finish(sequence))
    content = talk.echoed + "".join(d.content for d in deltas)
    reasoning = "".join(d.reasoning for d in deltas)
    calls = joined([c for d in deltas for c in d.calls])
    message = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
    message["reasoning_content"] = message["reasoning"] = reasoning or None
    if calls:
        message["tool_calls"] = calls
    logprobs = None
    if sequence.logprobs is not None:
        logprobs = logprobs_of(serving, body, sequence.logprobs)
    choice = {"index": i, "message": message, "logprobs": logprobs, "finish_reason": parser.reason(sequence)}
    choice |= stop_reasons(sequence, serving.llm.defaults.stop_ids)
    choice["token_ids"] = sequence.request.tokens if body.return_token_ids else None
    if body.return_prompt_token_ids:
        choice["prompt_token_ids"] = talk.prompt
    return choice


def echoed_text(messages: Sequence[chat_schema.Message]) -> str:
    """The beginning of an answer under ``echo``: the text of the last message if it is the assistant's."""
    last = messages[-1]
    return text_of(last.content, f"messages[{len(messages) - 1}]") if last.role == "assistant" else ""


def logprobs_of(serving: Serving, body: chat_schema.ChatRequest, entries: Sequence[dict]) -> dict:
    """The field ``logprobs`` of a choice."""
    as_ids = serving.additions.as_ids(body.return_tokens_as_token_ids)
    content = chat_logprobs(serving.llm.tokenizer, entries, as_ids=as_ids)
    return {"content": content, "refusal": None}


def as_delta(delta: Delta) -> list[dict]:
    """The deltas of a piece, in order.

    Arguments of a call that has begun precede reasoning and content; new calls follow.
    """
    first_new = next((i for i, call in enumerate(delta.calls) if call.name is not None), len(delta.calls))
    deltas = [_as_call(call) for call in delta.calls[:first_new]]
    if delta.reasoning:
        deltas.append({"reasoning_content": delta.reasoning, "reasoning": delta.reasoning})
    if delta.content:
        deltas.append({"content": delta.content})
    return deltas + [_as_call(call) for call in delta.calls[first_new:]]


def _as_call(call: CallDelta) -> dict:
    function = {"arguments": call.arguments} | ({"name": call.name} if call.name is not None else {})
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
        deltas, more = as_delta(parsers[i].push(piece)), {}
        if piece.finish_reason:
            deltas += as_delta(parsers[i].finish(sequences[i]))
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
                reason = parsers[i].reason(sequences[i])
                more |= stop_reasons(sequences[i], serving.llm.defaults.stop_ids)
            yield chunk(i, delta, reason, **more)
            more = {}
    if stream_options.include_usage:
        last = stream_totals(serving, stream_options, totals, sum(p.reasoning_tokens for p in parsers), is_last=True)
        last |= request_metrics(serving, sequences)
        yield frame({**head, "object": "chat.completion.chunk", "choices": [], **last})


def check_batch(serving: Serving, body: chat_schema.ChatBatchRequest) -> None:
    """Checks that no field is used that works for one conversation only.

    Raises:
        ApiError: One is, or there are too many conversations.
    """
    for field, is_wrong in {"stream": body.stream, "n": body.n not in (None, 1), "tools": body.tools}.items():
        if is_wrong:
            raise ApiError(400, f"{field} is not possible for several conversations", field)
    if len(body.messages) > serving.limits.prompts:
        message = f"{len(body.messages)} conversations: at most {serving.limits.prompts} are possible"
        raise ApiError(400, message, "messages")


async def prepare_batch(
    serving: Serving, body: chat_schema.ChatBatchRequest
) -> tuple[list[chat_schema.ChatRequest], list[Conversation], list[RemoteSequence]]:
    """A request, a conversation and a sequence for each list of messages.

    Raises:
        ApiError: A conversation is invalid; the message has its number.
    """
    check_batch(serving, body)
    # The fields are validated already.
    fields: dict[str, Any] = dict(body)
    each_fields = [fields | {"messages": given} for given in body.messages]
    bodies = [chat_schema.ChatRequest.model_construct(None, **given) for given in each_fields]
    talks, sequences = [], []
    for i, each in enumerate(bodies):
        try:
            talk, (sequence,) = await prepare_chat(serving, each)
        except ApiError as e:
            raise ApiError(e.status_code, f"conversation {i}: {e.message}", e.param) from None
        talks.append(talk)
        sequences.append(sequence)
    return bodies, talks, sequences


@router.post("/v1/chat/completions/batch", responses={200: {"model": ChatCompletion}}, response_model=None)
async def chat_completions_batch(http: Request, body: chat_schema.ChatBatchRequest):
    """Chat completions of several conversations, vLLM's endpoint."""
    serving: Serving = http.app.state.serving
    name = current().choose_id("chatcmpl-", body.request_id, body.rid)
    bodies, talks, sequences = await prepare_batch(serving, body)
    head = {"id": name, "created": current().created, "model": body.model or serving.name}
    bodies = [each.without_large() for each in bodies]
    return Later(http, full_batch_response(serving, bodies, talks, sequences, head))


async def full_batch_response(
    serving: Serving,
    bodies: list[chat_schema.ChatRequest],
    talks: list[Conversation],
    sequences: list[RemoteSequence],
    head: dict,
) -> JsonAnswer:
    """Waits for all sequences, then answers."""
    parsers = [talk.parser(body.shown_reasoning) for talk, body in zip(talks, bodies, strict=True)]
    deltas = [[] for _ in sequences]
    async with aclosing(serving.merged(sequences)) as pieces:
        async for i, piece in pieces:
            deltas[i].append(parsers[i].push(piece))

    def choices() -> Iterator[dict]:
        for i, (sequence, body, talk) in enumerate(zip(sequences, bodies, talks, strict=True)):
            choice = chat_choice(serving, body, talk, i, sequence, parsers[i], deltas[i])
            if body.return_token_ids:
                choice["prompt_token_ids"] = talk.prompt
            if (scores := prompt_logprobs(serving.llm.tokenizer, sequence)) is not None:
                choice["prompt_logprobs"] = scores
            yield choice

    counted = usage(sequences, 1, sum(parser.reasoning_tokens for parser in parsers))
    value = {**head, "object": "chat.completion", "choices": choices(), "usage": counted, "system_fingerprint": None}
    nothing = {"prompt_token_ids": None, "prompt_logprobs": None}
    return JsonAnswer(value | nothing | request_metrics(serving, sequences[:1]))

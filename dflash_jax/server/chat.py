"""/v1/chat/completions, and vLLM's /v1/chat/completions/batch: several conversations in one request."""

import json
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from itertools import count
from typing import Any

from fastapi import APIRouter, Request

from dflash_jax.protocol import Form
from dflash_jax.server import chat_schema, prepare, schema
from dflash_jax.server.answer_schema import ChatCompletion
from dflash_jax.server.answers import (
    Totals,
    chat_logprobs,
    end_of_stream,
    ended_totals,
    prompt_logprobs,
    proposals,
    request_metrics,
    sglext,
    stop_reasons,
    stream_totals,
)
from dflash_jax.server.body import MediaRoute
from dflash_jax.server.content import text_of
from dflash_jax.server.conversation import Conversation, Delta, converse
from dflash_jax.server.engine_client import RemoteSequence
from dflash_jax.server.errors import ApiError
from dflash_jax.server.request_context import current
from dflash_jax.server.serving import Serving
from dflash_jax.server.stream import EventStream, Frame, JsonAnswer, Later, frame, frame_parts
from dflash_jax.server.tools import CallDelta, input_of, joined

router = APIRouter(route_class=MediaRoute)


def calls_form(serving: Serving, body: chat_schema.ChatRequest, syntax: str) -> Form | None:
    """The form of the calls that ``tool_choice`` asks for, in a syntax of `Serving.call_syntax`; None without one.

    Raises:
        ApiError: A tool is missing, or structured output is not available.
    """
    choice, tools = body.tool_choice, [_called(tool, syntax) for tool in body.tools or ()]
    if choice in (None, "auto"):
        return inputs_form(serving, [tool for tool in tools if "grammar" in tool], syntax)
    if choice == "none":
        return None
    if not tools:
        raise ApiError(400, "tool_choice asks for a call, and there are no tools", "tool_choice")
    most = _most_calls(body)
    if isinstance(choice, chat_schema.NamedTool):
        tools, most = _named(tools, [choice.function.name], "tool_choice.function.name"), 1
    elif isinstance(choice, chat_schema.AllowedToolsChoice):
        names = [tool.function.name for tool in choice.allowed_tools.tools]
        tools = _named(tools, names, "tool_choice.allowed_tools.tools")
    tokenizer = serving.llm.tokenizer
    if tokenizer is None or tokenizer.file is None:
        raise ApiError(400, "tool_choice needs a tokenizer.json, and this checkpoint has none", "tool_choice")
    calls = {"tools": tools, "most": most, "syntax": syntax}
    return prepare.checked_form("calls", calls | {"optional": not body.must_call}, "tools")


def _called(tool: chat_schema.Tool, syntax: str) -> dict:
    """A tool as the form of its calls has it. Notes say which grammar the syntax cannot keep."""
    function, grammar = tool.function.model_dump(exclude_none=True), tool.custom.grammar if tool.custom else None
    if grammar is not None and syntax != "xml" and grammar["syntax"] == "lark":
        current().note(f"tools: the grammar of {tool.function.name} is not enforced, since calls are JSON")
        grammar = None
    return function if grammar is None else function | {"grammar": grammar}


async def either_form(serving: Serving, body: chat_schema.ChatRequest, syntax: str, form: Form) -> Form | None:
    """The form of a text that either has a ``form`` of JSON or consists of calls; None where it cannot be kept."""
    if not form.field.startswith("response_format") or form.kind not in ("schema", "json") or syntax == "bare":
        # A form in the words of vLLM is that of the whole text. Calls without tags cannot be told from JSON.
        return None
    answer = {"kind": form.kind, "value": json.loads(form.value)}
    value = {"tools": [_called(tool, syntax) for tool in body.tools or ()], "syntax": syntax, "answer": answer}
    try:
        calls = prepare.checked_form("calls", value | {"most": _most_calls(body)}, "tools")
        return await prepare.compiled(serving, calls)
    except ApiError as e:
        if e.status_code != 400:
            raise
        current().note(f"tools are not called, since their form and that of {form.field} exceed a limit: {e.message}")
        return None


def _most_calls(body: chat_schema.ChatRequest) -> int:
    """Calls of an answer that has a form, at most."""
    return 1 if body.parallel_tool_calls is False else 8


def inputs_form(serving: Serving, tools: list[dict], syntax: str) -> Form | None:
    """The form of a free text whose calls of custom ``tools`` keep their grammars; None without such tools."""
    if not tools:
        return None
    if serving.llm.tokenizer is None or serving.llm.tokenizer.file is None or not serving.hello.has_masks:
        current().note("tools: grammars are not enforced, since this server has no structured output")
        return None
    kept = [{name: tool[name] for name in ("name", "parameters", "grammar")} for tool in tools]
    return prepare.checked_form("inputs", {"tools": kept, "syntax": syntax}, "tools")


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
    serving: Serving, body: chat_schema.ChatRequest, needs_room: bool = False
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
    if form and body.tool_choice in (None, "auto"):
        calls = None
    if form and calls:
        raise ApiError(400, f"{form.field} and tool_choice each ask for a form: give one of them", form.field)
    form = await prepare.compiled(serving, form or calls)
    if form and talk.tools and calls is None and (either := await either_form(serving, body, talk.syntax, form)):
        form, talk.only_at_start = either, True
    if form and form.begins:
        # The grammar begins with the text, or after the thought that a token opens.
        talk.openings = prepare.openings(serving, talk.thought)
    talk.customs = frozenset(tool.function.name for tool in body.tools or () if tool.custom is not None)
    talk.is_forced = body.must_call
    talk.has_one_call = body.parallel_tool_calls is False
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = prepare.sampling(body, most, body.seed, logprobs, body.logprob_token_ids, body.prompt_logprobs)
    options = {
        "block_size": body.block_size,
        "priority": body.priority,
        "form": form,
        "thought": talk.thought,
        "budget": prepare.budget(body.budgets),
        "requires_answer": serving.requires_answer if body.require_answer is None else body.require_answer,
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
    talk, sequences = await prepare_chat(serving, body)
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
            talk, sequences = await prepare_chat(serving, chat)
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
        calls = [as_custom(call, talks[i].customs) for call in joined([c for d in deltas[i] for c in d.calls])]
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

    totals = ended_totals(serving, sequences, 1 if is_batch else len(sequences))
    counted = totals.usage(sum(parser.reasoning_tokens for parser in parsers))
    # Made when they are written.
    choices = map(choice, count(), sequences)
    value = {**head, "object": "chat.completion", "choices": choices, "usage": counted, "system_fingerprint": None}
    value |= {"prompt_token_ids": None, "prompt_logprobs": None} if is_batch else of_prompt(0)
    value |= request_metrics(serving, sequences[:1] if is_batch else sequences)
    return JsonAnswer(value | sglext(body, totals))


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


def as_custom(call: dict, customs: Collection[str]) -> dict:
    """A call of a message, of a custom tool in that tool's form."""
    function = call["function"]
    if function["name"] not in customs:
        return call
    custom = {"name": function["name"], "input": input_of(function["arguments"])}
    return {name: value for name, value in call.items() if name != "function"} | {"type": "custom", "custom": custom}


class CustomInputs:
    """Shows the calls of custom tools in the deltas of a stream, each when its input is complete."""

    def __init__(self, customs: Collection[str]):
        self._customs = customs
        self._call: dict | None = None

    def take(self, deltas: list[dict]) -> list[dict]:
        """The deltas to send in place of these."""
        shown = []
        for delta in deltas:
            (call,) = delta.get("tool_calls") or (None,)
            if call is not None and self._call is not None and call["index"] == self._call["index"]:
                self._call["function"]["arguments"] += call["function"]["arguments"]
                continue
            shown += self.finish()
            if call is not None and call["function"].get("name") in self._customs:
                self._call = call
            else:
                shown.append(delta)
        return shown

    def finish(self) -> list[dict]:
        """The delta of the call that has ended, if any."""
        call, self._call = self._call, None
        return [{"tool_calls": [as_custom(call, self._customs)]}] if call is not None else []


async def stream_chunks(
    serving: Serving, body: chat_schema.ChatRequest, talk: Conversation, sequences: list[RemoteSequence], head: dict
) -> AsyncGenerator[Frame, None]:
    """Yields the chunks of a streamed answer."""
    stream_options = serving.additions.stream_options(body.stream_options or schema.StreamOptions())
    parsers, started = [talk.parser(body.shown_reasoning) for _ in sequences], []
    inputs = [CustomInputs(talk.customs) for _ in sequences]
    totals = Totals(sequences, len(sequences), serving.llm.draft_places)

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
        deltas, more = inputs[i].take(as_deltas(parsers[i].push(piece), body.has_functions)), {}
        if piece.finish_reason:
            last = as_deltas(parsers[i].finish(sequences[i]), body.has_functions)
            deltas += inputs[i].take(last) + inputs[i].finish()
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
    reasoning_tokens = sum(parser.reasoning_tokens for parser in parsers)
    if last := end_of_stream(serving, body, stream_options, totals, sequences, reasoning_tokens):
        yield frame({**head, "object": "chat.completion.chunk", "choices": [], **last})

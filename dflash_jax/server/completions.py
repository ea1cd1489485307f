"""/v1/completions, with echo and the prompt's log-probabilities."""

import asyncio
import time
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request

from dflash_jax.rows import Row
from dflash_jax.server import prepare, request_id, schema
from dflash_jax.server.answer_schema import Completion
from dflash_jax.server.answers import completion_logprobs, prompt_entry, stop_reasons, usage
from dflash_jax.server.errors import ApiError, JsonResponse
from dflash_jax.server.serving import Serving, while_connected
from dflash_jax.server.stream import EventStream, frame

router = APIRouter()


def prompts_of(body: schema.CompletionRequest) -> list:
    """Each a text or token ids."""
    given = body.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given]
    if not given or any(not p and not isinstance(p, str) for p in given):
        raise ApiError(400, "prompt is empty", "prompt")
    return given


async def prepared(serving: Serving, body: schema.CompletionRequest) -> list[Row]:
    """All rows: those of the first prompt first."""
    serving.check_model(body.model)
    prompts = prompts_of(body)
    n = prepare.check_counts(serving, body, len(prompts))
    if body.stream and (body.echo or body.prompt_logprobs is not None or body.max_tokens == 0):
        name = "echo" if body.echo else "prompt_logprobs" if body.prompt_logprobs is not None else "max_tokens: 0"
        raise ApiError(400, f"{name} is not possible with stream: true", name)
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    wanted = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        wanted = max(wanted or 0, body.logprobs)
    encoded = [await asyncio.to_thread(serving.llm.encode, prompt) for prompt in prompts]
    grammar = await prepare.grammar(serving, prepare.constraint(body))
    found = []
    for ids in encoded:
        ids = prepare.truncated(serving, body, ids, body.max_tokens)
        # Where nothing new is wanted, the engine gives one token all the same: it is left out again.
        most = serving.check_room(ids, body.max_tokens and max(body.max_tokens, 1), "prompt", default=16)
        most = most or serving.check_room(ids, 1, "prompt")
        params = prepare.sampling(body, most, body.seed, body.logprobs)
        options = {"block_size": body.block_size, "priority": body.priority, "prompt_logprobs": wanted}
        options["cache_salt"] = body.cache_salt
        found += prepare.rows(serving, ids, params, n, grammar=grammar, **options)
    return found


@router.post("/v1/completions", responses={200: {"model": Completion}}, response_model=None)
async def completions(http: Request, body: schema.CompletionRequest):
    serving: Serving = http.app.state.serving
    rows = await while_connected(http, prepared(serving, body))
    head = {
        "id": request_id.choose("cmpl-", body.request_id, body.rid),
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model or serving.name,
    }
    serving.register(rows, head["id"], http.state.owner)
    if body.stream:
        return await EventStream.start(http, streamed(serving, body, rows, head))
    await while_connected(http, serving.run(rows))
    choices = [choice(serving, body, i, row) for i, row in enumerate(rows)]
    counted = usage(rows, body.n or 1, new=rows if body.max_tokens != 0 else ())
    return JsonResponse({**head, "choices": choices, "usage": counted, "system_fingerprint": None})


def choice(serving: Serving, body: schema.CompletionRequest, i: int, row: Row) -> dict:
    tokenizer, request, is_new = serving.llm.tokenizer, row.request, body.max_tokens != 0
    text = (row.text.text if row.text else "") if is_new else ""
    entries = list(row.logprobs or []) if is_new else []
    offset = 0
    if body.echo:
        text = (tokenizer.decode(request.prompt) if tokenizer else "") + text
        if body.logprobs is not None:
            entries = [{"token_id": request.prompt[0], "logprob": None, "top": {}}, *request.prompt_entries, *entries]
    logprobs = None
    if body.logprobs is not None:
        logprobs = completion_logprobs(tokenizer, entries, offset, body.logprobs > 0)
    found = {
        "index": i,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": request.finish_reason if is_new else "length",
        **(stop_reasons(row, serving.llm.defaults.stop_ids) if is_new else {"stop_reason": None, "matched_stop": None}),
    }
    if body.prompt_logprobs is not None:
        found["prompt_logprobs"] = [None, *(prompt_entry(tokenizer, e) for e in request.prompt_entries)]
    if body.return_token_ids:
        found["token_ids"], found["prompt_token_ids"] = request.tokens if is_new else [], request.prompt
    return found


async def streamed(
    serving: Serving, body: schema.CompletionRequest, rows: list[Row], head: dict
) -> AsyncGenerator[bytes, None]:
    wants, offsets = body.stream_options or schema.StreamOptions(), [0] * len(rows)
    async for i, piece in serving.merged(rows):
        logprobs = None
        if piece.logprobs is not None:
            logprobs = completion_logprobs(serving.llm.tokenizer, piece.logprobs, offsets[i], body.logprobs > 0)
        offsets[i] += len(piece.text)
        found = {"index": i, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}
        if piece.finish_reason:
            found |= stop_reasons(rows[i], serving.llm.defaults.stop_ids)
        if body.return_token_ids:
            found["token_ids"] = piece.token_ids
        if body.return_drafts:
            found["drafts"] = piece.segments
        value = {**head, "choices": [found]}
        if wants.include_usage:
            value["usage"] = usage(rows, body.n or 1) if wants.continuous_usage_stats else None
        yield frame(value)
    if wants.include_usage:
        yield frame({**head, "choices": [], "usage": usage(rows, body.n or 1)})

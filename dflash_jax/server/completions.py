"""/v1/completions, with echo and log-probabilities of the prompt."""

from collections.abc import AsyncGenerator, Iterator

from fastapi import APIRouter, Request

from dflash_jax.frontend.detokenizer import Detokenizer
from dflash_jax.frontend.sequence import Piece
from dflash_jax.server import prepare, schema
from dflash_jax.server.answer_schema import Completion
from dflash_jax.server.answers import (
    Totals,
    completion_logprobs,
    prompt_logprobs,
    proposals,
    request_metrics,
    stop_reasons,
    stream_totals,
    usage,
)
from dflash_jax.server.body import MediaRoute
from dflash_jax.server.engine_client import RemoteSequence
from dflash_jax.server.errors import ApiError
from dflash_jax.server.request_context import current
from dflash_jax.server.serving import Serving
from dflash_jax.server.stream import EventStream, Frame, JsonAnswer, Later, frame, frame_parts

router = APIRouter(route_class=MediaRoute)

# Tokens of a prompt that are decoded in one step.
STEP_TOKENS = 64
# The stop reasons of a choice without new tokens.
NO_STOP = {"stop_reason": None, "matched_stop": None}


def prompts_of(body: schema.CompletionRequest) -> list:
    """The prompts of a request, each a text or token ids.

    Raises:
        ApiError: There is none, or one is empty.
    """
    prompts = body.prompt
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]
    if not prompts or any(not p and not isinstance(p, str) for p in prompts):
        raise ApiError(400, "prompt is empty", "prompt")
    return prompts


async def prepare_completions(serving: Serving, body: schema.CompletionRequest) -> list[RemoteSequence]:
    """Prepares the sequences of a request, those of the first prompt first.

    Raises:
        ApiError: The request is invalid.
    """
    serving.check_model(body.model)
    prompts = prompts_of(body)
    n = prepare.check_counts(serving, body, len(prompts))
    prepare.check_stream(serving, body)
    prompt_logprobs = body.prompt_logprobs
    if body.echo and wants_logprobs(body):
        prompt_logprobs = max(prompt_logprobs or 0, body.logprobs or 0)
    is_truncated = body.truncate_prompt_tokens is not None
    encoded = [await serving.texts.prompt(prompt, "prompt", is_truncated=is_truncated) for prompt in prompts]
    form = await prepare.compiled(serving, prepare.constraint(body))
    budget, sequences = prepare.budget([body.thinking_token_budget]), []
    for ids in encoded:
        ids = prepare.truncate(serving, body, ids, body.max_tokens)
        # The engine generates at least one token; with max_tokens 0 the answer omits it.
        room = serving.check_room(ids, body.max_tokens and max(body.max_tokens, 1), "prompt", default=16)
        room = room or serving.check_room(ids, 1, "prompt")
        params = prepare.sampling(body, room, body.seed, body.logprobs, body.logprob_token_ids)
        options = {"block_size": body.block_size, "priority": body.priority, "prompt_logprobs": prompt_logprobs}
        options |= {"cache_salt": body.cache_salt, "budget": budget, "records_drafts": body.return_proposals}
        options["thought"] = prepare.thought(serving, ids, budget, "thinking_token_budget")
        sequences += await prepare.sequences(serving, ids, params, n, form=form, **options)
    return sequences


@router.post("/v1/completions", responses={200: {"model": Completion}}, response_model=None)
async def completions(http: Request, body: schema.CompletionRequest):
    """OpenAI's completions."""
    serving: Serving = http.app.state.serving
    sequences = await prepare_completions(serving, body)
    head = {
        "id": current().choose_id("cmpl-", body.request_id, body.rid),
        "object": "text_completion",
        "created": current().created,
        "model": body.model or serving.name,
    }
    body = body.without_large()
    if body.stream:
        return Later(http, EventStream(stream_chunks(serving, body, sequences, head)).start())
    return Later(http, full_response(serving, body, sequences, head))


async def full_response(
    serving: Serving, body: schema.CompletionRequest, sequences: list[RemoteSequence], head: dict
) -> JsonAnswer:
    """Waits for all sequences, then answers."""
    await serving.run(sequences)

    def choices() -> Iterator[dict | bytes]:
        opening = Opening(serving, body)
        for i, sequence in enumerate(sequences):
            if i % (body.n or 1) == 0:
                opening = Opening(serving, body)
                yield from opening.read(sequence)
            yield choice(serving, body, i, sequence, opening)

    counted = usage(sequences, body.n or 1, is_new=body.max_tokens != 0)
    more = {"usage": counted, "system_fingerprint": None, **request_metrics(serving, sequences)}
    return JsonAnswer({**head, "choices": choices(), **more})


class Opening:
    """The beginning of a choice, before new tokens.

    Attributes:
        text: The echoed prompt, special tokens by their names.
        starts: Where in the text each token of the prompt begins.
        entries: Log-probabilities of its tokens, where they are asked for.
    """

    def __init__(self, serving: Serving, body: schema.CompletionRequest):
        """An opening that is empty until it is read."""
        self._tokenizer, self._body = serving.llm.tokenizer, body
        self.text, self.starts, self.entries = "", list[int](), list[dict]()

    def read(self, sequence: RemoteSequence) -> Iterator[bytes]:
        """Reads the opening of a sequence, if ``echo`` asks for it: yields nothing, after each of many tokens."""
        request = sequence.request
        if self._body.echo and wants_logprobs(self._body):
            self.entries = [{"token_id": request.prompt[0], "logprob": None, "top": {}}, *request.prompt_entries]
        if self._body.echo and self._tokenizer is not None:
            echoed = Detokenizer(self._tokenizer, skip_special_tokens=False)
            for first in range(0, len(request.prompt), STEP_TOKENS):
                self.starts += [echoed.push(token) for token in request.prompt[first : first + STEP_TOKENS]]
                yield b""
            echoed.finish()
            self.text = echoed.text


def wants_logprobs(body: schema.CompletionRequest) -> bool:
    """Whether a request asks for log-probabilities."""
    return body.logprobs is not None or bool(body.logprob_token_ids)


def logprobs_of(
    serving: Serving, body: schema.CompletionRequest, entries: list[dict], starts: list[int]
) -> dict | None:
    """The field ``logprobs`` of a choice; None where it is not asked for."""
    if not wants_logprobs(body):
        return None
    return completion_logprobs(
        serving.llm.tokenizer,
        entries,
        starts,
        as_ids=serving.additions.as_ids(body.return_tokens_as_token_ids),
    )


def prompt_fields(serving: Serving, body: schema.CompletionRequest, sequence: RemoteSequence) -> dict:
    """Fields of a choice that describe its prompt, null where they are not asked for."""
    scores = prompt_logprobs(serving.llm.tokenizer, sequence) if body.prompt_logprobs is not None else None
    return {"prompt_logprobs": scores, "prompt_token_ids": sequence.request.prompt if body.return_token_ids else None}


def choice(serving: Serving, body: schema.CompletionRequest, i: int, sequence: RemoteSequence, begin: Opening) -> dict:
    """A complete choice, after what it begins with."""
    is_new = body.max_tokens != 0
    text = (sequence.text.text if sequence.text else "") if is_new else ""
    entries = list(sequence.logprobs or []) if is_new else []
    starts = [len(begin.text) + start for start in sequence.starts] if is_new else []
    value = {
        "index": i,
        "text": begin.text + text,
        "logprobs": logprobs_of(serving, body, [*begin.entries, *entries], [*begin.starts, *starts]),
        "finish_reason": sequence.request.finish_reason if is_new else "length",
        **(stop_reasons(sequence, serving.llm.defaults.stop_ids) if is_new else NO_STOP),
    }
    value["token_ids"] = (sequence.request.tokens if is_new else []) if body.return_token_ids else None
    return value | prompt_fields(serving, body, sequence)


async def stream_chunks(
    serving: Serving, body: schema.CompletionRequest, sequences: list[RemoteSequence], head: dict
) -> AsyncGenerator[Frame, None]:
    """Yields the chunks of a streamed answer."""
    stream_options = serving.additions.stream_options(body.stream_options or schema.StreamOptions())
    is_new, n = body.max_tokens != 0, body.n or 1
    # Of each prompt.
    openings: dict[int, Opening] = {}
    begun: set[int] = set()
    totals = Totals(sequences, n, is_new)

    def parts(i: int, piece: Piece, value: dict) -> Iterator[bytes]:
        """The chunk ``value`` of a choice that begins, or has log-probabilities."""
        begin, (choice,) = Opening(serving, body), value["choices"]
        is_first, opened = i not in begun, openings.get(i // n)
        begun.add(i)
        if opened is None:
            opened = openings[i // n] = Opening(serving, body)
            yield from opened.read(sequences[i])
        if is_first:
            begin = opened
            fields = prompt_fields(serving, body, sequences[i])
            choice |= {name: value for name, value in fields.items() if value is not None}
        choice["text"] = begin.text + choice["text"]
        entries = piece.logprobs or [] if is_new else []
        starts = [len(opened.text) + start for start in piece.starts] if is_new else []
        choice["logprobs"] = logprobs_of(serving, body, [*begin.entries, *entries], [*begin.starts, *starts])
        yield from frame_parts(value)

    async for i, piece in serving.merged(sequences):
        choice = {"index": i, "text": piece.text if is_new else "", "logprobs": None}
        choice["finish_reason"] = piece.finish_reason if is_new else "length"
        if choice["finish_reason"]:
            choice |= stop_reasons(sequences[i], serving.llm.defaults.stop_ids) if is_new else NO_STOP
        if body.return_token_ids:
            choice["token_ids"] = piece.token_ids if is_new else []
        if body.return_drafts:
            choice["drafts"] = piece.segments
        if piece.proposals is not None:
            choice["proposals"] = proposals(serving.llm.tokenizer, piece) if is_new else []
        totals.take(i)
        value = {**head, "choices": [choice], **stream_totals(serving, stream_options, totals)}
        yield frame(value) if i in begun and not wants_logprobs(body) else parts(i, piece, value)
    if stream_options.include_usage:
        last = stream_totals(serving, stream_options, totals, is_last=True)
        yield frame({**head, "choices": [], **last, **request_metrics(serving, sequences)})

"""/v1/completions, with echo and log-probabilities of the prompt."""

from collections.abc import AsyncGenerator, Iterator

from fastapi import APIRouter, Request

from dflash_jax.frontend.detokenizer import Detokenizer
from dflash_jax.frontend.sequence import Piece
from dflash_jax.sampling_params import MAX_STOPS
from dflash_jax.server import prepare, schema
from dflash_jax.server.answer_schema import Completion
from dflash_jax.server.answers import (
    Totals,
    completion_logprobs,
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
from dflash_jax.server.engine_client import RemoteSequence
from dflash_jax.server.errors import ApiError
from dflash_jax.server.request_context import current
from dflash_jax.server.serving import Serving
from dflash_jax.server.stream import EventStream, Frame, JsonAnswer, Later, frame, frame_parts

router = APIRouter(route_class=MediaRoute)

# The tokens before a prompt, before its suffix and before the text that fills the gap, of Qwen's code models.
INFILL = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
# Further tokens at which such a text ends.
INFILL_ENDS = ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
# Tokens of a prompt that are decoded in one step.
STEP_TOKENS = 64
# Fields of a whole choice where they are not asked for.
NOT_ASKED_FOR = {"token_ids": None, "prompt_token_ids": None, "prompt_logprobs": None}


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


async def infilled(
    serving: Serving, body: schema.CompletionRequest, prompts: list[list[int]]
) -> tuple[list[list[int]], schema.CompletionRequest]:
    """Prompts around their gap, before the suffix, and the request with the tokens that end the text.

    Raises:
        ApiError: The tokenizer has no tokens for it, or a field does not go with it.
    """
    for name in ("echo", "truncate_prompt_tokens"):
        if getattr(body, name) not in (None, False):
            raise ApiError(400, f"{name} is not possible with suffix", name)
    tokenizer = serving.llm.tokenizer
    known = {} if tokenizer is None else {tag: tokenizer.encode_plain(tag) for tag in (*INFILL, *INFILL_ENDS)}
    known = {tag: ids[0] for tag, ids in known.items() if len(ids) == 1}
    if not known.keys() >= set(INFILL):
        names = ", ".join(tag.strip("<|>") for tag in INFILL)
        raise ApiError(400, f"suffix needs tokens for infilling ({names}), and this tokenizer has none", "suffix")
    before, between, after = (known[tag] for tag in INFILL)
    suffix = await serving.texts.encode(body.suffix or "", "suffix")
    stops, own = body.stop_token_ids or [], serving.llm.defaults.stop_ids
    more = [i for i in known.values() if i not in stops and i not in own][: max(0, MAX_STOPS - len(stops) - len(own))]
    infill = [[before, *ids, between, *suffix, after] for ids in prompts]
    return infill, body.model_copy(update={"stop_token_ids": [*stops, *more]})


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
    if body.suffix:
        encoded, body = await infilled(serving, body, encoded)
    form = await prepare.compiled(serving, prepare.form_of(body))
    budget, sequences = prepare.budget([body.thinking_token_budget]), []
    for ids in encoded:
        ids = prepare.truncate(serving, body, ids, body.max_tokens)
        room, named = serving.check_room(ids, body.max_tokens, "prompt", default=16), body.logprob_token_ids
        params = prepare.sampling(body, room, body.seed, body.logprobs, named, prompt_logprobs)
        options = {"block_size": body.block_size, "priority": body.priority}
        options |= {"cache_salt": body.cache_salt or "", "budget": budget, "records_drafts": body.return_proposals}
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


class Choices:
    """Makes choices from the pieces of their sequences.

    With ``echo`` each begins with its prompt, whose text is decoded once for all choices of the prompt.
    """

    def __init__(self, serving: Serving, body: schema.CompletionRequest, sequences: list[RemoteSequence]):
        """Choices that have not begun."""
        self._serving, self._body, self._sequences, self._n = serving, body, sequences, body.n or 1
        # Of each prompt that is read: its echoed text, special tokens by their names; where in the text each token
        # begins; and log-probabilities of its tokens, where they are asked for.
        self._openings: dict[int, tuple[str, list[int], list[dict]]] = {}
        self._begun: set[int] = set()

    def is_small(self, i: int) -> bool:
        """Whether the next part of the choice ``i`` is: the first one has the prompt."""
        return i in self._begun and not wants_logprobs(self._body)

    def read(self, i: int) -> Iterator[bytes]:
        """Reads the prompt of the choice ``i``, unless it is read: yields nothing, after each of many tokens."""
        if i // self._n in self._openings:
            return
        prompt, tokenizer, text = self._sequences[i].request.prompt, self._serving.llm.tokenizer, ""
        starts, entries = list[int](), list[dict]()
        if self._body.echo and wants_logprobs(self._body):
            first = {"token_id": prompt[0], "logprob": None, "top": {}}
            entries = [first, *self._sequences[i].request.prompt_entries]
        if self._body.echo and tokenizer is not None:
            echoed = Detokenizer(tokenizer, skip_special_tokens=False)
            for place in range(0, len(prompt), STEP_TOKENS):
                starts += [echoed.push(token) for token in prompt[place : place + STEP_TOKENS]]
                yield b""
            echoed.finish()
            text = echoed.text
        self._openings[i // self._n] = text, starts, entries

    def part(self, i: int, piece: Piece) -> dict:
        """The part of the choice ``i`` that a piece brings. Its prompt is read."""
        body, sequence, tokenizer = self._body, self._sequences[i], self._serving.llm.tokenizer
        opening, starts, entries = self._openings[i // self._n]
        is_first = i not in self._begun
        self._begun.add(i)
        value = {"index": i, "text": opening * is_first + piece.text, "logprobs": None}
        value["finish_reason"] = piece.finish_reason
        if wants_logprobs(body):
            value["logprobs"] = completion_logprobs(
                tokenizer,
                entries * is_first + (piece.logprobs or []),
                starts * is_first + [len(opening) + start for start in piece.starts],
                as_ids=self._serving.additions.as_ids(body.return_tokens_as_token_ids),
            )
        if piece.finish_reason:
            value |= stop_reasons(sequence, self._serving.llm.defaults.stop_ids)
        if body.return_token_ids:
            value["token_ids"] = piece.token_ids
        if body.return_token_ids and is_first:
            value["prompt_token_ids"] = sequence.request.prompt
        if body.prompt_logprobs is not None and is_first:
            value["prompt_logprobs"] = prompt_logprobs(tokenizer, sequence)
        if body.return_drafts and body.stream:
            value["drafts"] = piece.segments
        if piece.proposals is not None:
            value["proposals"] = proposals(tokenizer, piece)
        return value


async def full_response(
    serving: Serving, body: schema.CompletionRequest, sequences: list[RemoteSequence], head: dict
) -> JsonAnswer:
    """Waits for all sequences, then answers."""
    await serving.run(sequences)
    choices = Choices(serving, body, sequences)

    def written() -> Iterator[dict | bytes]:
        for i, sequence in enumerate(sequences):
            yield from choices.read(i)
            text, request = sequence.text.text if sequence.text else "", sequence.request
            whole = Piece(text, request.tokens, [], [], sequence.starts, sequence.logprobs, request.finish_reason)
            yield NOT_ASKED_FOR | choices.part(i, whole)

    totals = ended_totals(serving, sequences, body.n or 1)
    more = {"usage": totals.usage(), "system_fingerprint": None, **request_metrics(serving, sequences)}
    return JsonAnswer({**head, "choices": written(), **more, **sglext(body, totals)})


async def stream_chunks(
    serving: Serving, body: schema.CompletionRequest, sequences: list[RemoteSequence], head: dict
) -> AsyncGenerator[Frame, None]:
    """Yields the chunks of a streamed answer."""
    stream_options = serving.additions.stream_options(body.stream_options or schema.StreamOptions())
    choices = Choices(serving, body, sequences)
    totals = Totals(sequences, body.n or 1, serving.llm.draft_places)

    def chunk(i: int, piece: Piece) -> dict:
        return {**head, "choices": [choices.part(i, piece)], **stream_totals(serving, stream_options, totals)}

    def large_chunk(i: int, piece: Piece) -> Iterator[bytes]:
        yield from choices.read(i)
        yield from frame_parts(chunk(i, piece))

    async for i, piece in serving.merged(sequences):
        totals.take(i)
        yield frame(chunk(i, piece)) if choices.is_small(i) else large_chunk(i, piece)
    if last := end_of_stream(serving, body, stream_options, totals, sequences):
        yield frame({**head, "choices": [], **last})


def wants_logprobs(body: schema.CompletionRequest) -> bool:
    """Whether a request asks for log-probabilities."""
    return body.logprobs is not None or bool(body.logprob_token_ids)

"""vLLM's generation from token ids to token ids: /inference/v1/generate."""

from collections.abc import AsyncGenerator, Iterator
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field, field_validator

from dflash_jax.frontend.sequence import Piece
from dflash_jax.server import prepare
from dflash_jax.server.answer_schema import GeneratedTokens
from dflash_jax.server.answers import Totals, ended_totals, finite, prompt_logprobs, stop_reasons, stream_totals
from dflash_jax.server.body import MediaRoute
from dflash_jax.server.engine_client import RemoteSequence
from dflash_jax.server.errors import ApiError, dumped
from dflash_jax.server.native import weight_versions, whole
from dflash_jax.server.request_context import current
from dflash_jax.server.schema import NamedTokens, Sampling, StreamOptions, ThinkingBudget
from dflash_jax.server.schema_base import Body, Items, Json, RequestId, Salt, neutral_table
from dflash_jax.server.serving import Serving
from dflash_jax.server.stream import EventStream, Frame, JsonAnswer, Later, frame, frame_parts
from dflash_jax.server.token_lists import TokenList

router = APIRouter(route_class=MediaRoute)


class TokenSampling(Sampling):
    """vLLM's ``sampling_params``."""

    neutral = neutral_table("token_sampling")

    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    n: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: str | Items[str] | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    logprob_token_ids: NamedTokens | None = None
    logit_bias: dict[str, float] | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: Json | None = None
    thinking_token_budget: ThinkingBudget = None

    @field_validator("allowed_token_ids", mode="before")
    @classmethod
    def _none_for_empty(cls, given: Any) -> Any:
        # As vLLM's render endpoints write it.
        return None if given == [] else given


class TokenRequest(Body):
    """vLLM's ``/inference/v1/generate``."""

    neutral = neutral_table("tokens")

    token_ids: TokenList
    sampling_params: TokenSampling
    request_id: RequestId | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Salt | None = None
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)


async def prepare_tokens(serving: Serving, body: TokenRequest) -> list[RemoteSequence]:
    """Prepares the sequences of a request.

    Raises:
        ApiError: The request is invalid.
    """
    serving.check_model(body.model)
    sampling = body.sampling_params
    n = prepare.check_counts(serving, sampling)
    ids = await serving.texts.prompt(body.token_ids, "token_ids")
    room = serving.check_room(ids, sampling.max_tokens, "sampling_params.max_tokens")
    counts = sampling.logprobs, sampling.logprob_token_ids, sampling.prompt_logprobs
    params = prepare.sampling(sampling, room, sampling.seed, *counts)
    form = await prepare.compiled(serving, prepare.form_of(sampling))
    budget = prepare.budget([sampling.thinking_token_budget])
    options = {"form": form, "priority": body.priority, "cache_salt": body.cache_salt or "", "budget": budget}
    options["thought"] = prepare.thought(serving, ids, budget, "sampling_params.thinking_token_budget")
    return await prepare.sequences(serving, ids, params, n, **options)


def token_logprobs(entries: list[dict]) -> Iterator[bytes]:
    """Yields vLLM's log-probabilities of tokens without their texts, each as JSON."""

    def one(token_id: int, logprob: float, rank: int | None) -> dict:
        return {"token": f"token_id:{token_id}", "token_id": token_id, "logprob": finite(logprob), "rank": rank}

    for entry in entries:
        ranks = {token: rank for rank, token in enumerate(entry["top"], 1)}
        values = entry["top"] | entry.get("named", {})
        likeliest = [one(token, logprob, ranks.get(token)) for token, logprob in values.items()]
        own = one(entry["token_id"], entry["logprob"], ranks.get(entry["token_id"]))
        yield dumped(own | {"top_logprobs": likeliest})


def choice_of(serving: Serving, sequence: RemoteSequence, index: int, piece: Piece) -> dict:
    """A choice, of what ``piece`` has; its last one says why the text ended, and the versions of all weights."""
    choice: dict[str, Any] = {"index": index, "token_ids": piece.token_ids, "logprobs": None}
    if piece.logprobs is not None:
        choice["logprobs"] = {"content": token_logprobs(piece.logprobs)}
    choice |= {"finish_reason": piece.finish_reason, "routed_experts": None, "sampling_mask": None}
    if piece.finish_reason:
        choice["stop_reason"] = stop_reasons(sequence, serving.llm.defaults.stop_ids)["stop_reason"]
        choice["weight_versions"] = weight_versions(serving, sequence)["weight_versions"]
    return choice


@router.post("/inference/v1/generate", responses={200: {"model": GeneratedTokens}}, response_model=None)
async def generate_tokens(http: Request, body: TokenRequest):
    """Continues token ids, as vLLM. No text is in the answer; its tokens have the versions of their weights."""
    serving: Serving = http.app.state.serving
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    sequences = await prepare_tokens(serving, body)
    name = current().choose_id("", body.request_id)
    body = body.without_large()
    if body.stream:
        return Later(http, EventStream(stream_events(serving, body, sequences, name)).start())
    return Later(http, full_response(serving, body, sequences, name))


async def full_response(serving: Serving, body: TokenRequest, sequences: list[RemoteSequence], name: str) -> JsonAnswer:
    """Waits for all sequences, then answers."""
    await serving.run(sequences)
    choices = (choice_of(serving, sequence, i, whole(sequence)) for i, sequence in enumerate(sequences))
    return JsonAnswer(
        {
            "request_id": name,
            "model": body.model or serving.name,
            "created": current().created,
            "choices": choices,
            "usage": ended_totals(serving, sequences, len(sequences)).usage(),
            "prompt_logprobs": prompt_logprobs(serving.llm.tokenizer, sequences[0]),
            "kv_transfer_params": None,
        }
    )


async def stream_events(
    serving: Serving, body: TokenRequest, sequences: list[RemoteSequence], name: str
) -> AsyncGenerator[Frame, None]:
    """Yields events, as vLLM's: each has the new tokens of a choice."""
    options = serving.additions.stream_options(body.stream_options or StreamOptions())
    totals = Totals(sequences, len(sequences), serving.llm.draft_places)
    async for i, piece in serving.merged(sequences):
        totals.take(i)
        event = {"request_id": name, "choices": [choice_of(serving, sequences[i], i, piece)]}
        yield frame_parts(event | {"usage": None} | stream_totals(serving, options, totals))
    if options.include_usage:
        yield frame({"request_id": name, "choices": [], **stream_totals(serving, options, totals, is_last=True)})

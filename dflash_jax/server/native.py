"""SGLang's own interface: /generate."""

import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from dflash_jax.frontend.reasoning import ThoughtTokens
from dflash_jax.frontend.sequence import Piece
from dflash_jax.media.parts import MediaPart
from dflash_jax.sampling_params import CLOSE
from dflash_jax.server import prepare
from dflash_jax.server.answer_schema import Generated
from dflash_jax.server.answers import drafters, finite, spec_tokens_details, token_text
from dflash_jax.server.body import MediaRoute
from dflash_jax.server.engine_client import RemoteSequence
from dflash_jax.server.errors import ApiError, dumped
from dflash_jax.server.media import url_part
from dflash_jax.server.request_context import current
from dflash_jax.server.schema import NamedTokens, Sampling, ThinkingBudget
from dflash_jax.server.schema_base import Body, Items, Json, RequestId, Salt, neutral_table
from dflash_jax.server.serving import Serving
from dflash_jax.server.stream import EventStream, Frame, JsonAnswer, Later, frame_parts
from dflash_jax.server.token_lists import TokenList

router = APIRouter(route_class=MediaRoute)
SCHEMES = ("data", "http", "https", "file")


class NativeSampling(Sampling):
    """SGLang's ``sampling_params``."""

    neutral = neutral_table("sampling")

    # With 0, only the prompt is read.
    max_new_tokens: int | None = Field(None, ge=0)
    stop: str | Items[str] | None = None
    n: int | None = Field(None, ge=1)
    min_new_tokens: int | None = Field(None, ge=0)
    json_schema: str | Json | None = None
    structural_tag: str | Json | None = None
    sampling_seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    logit_bias: dict[str, float] | None = None


class GenerateRequest(Body):
    """SGLang's ``/generate``."""

    neutral = neutral_table("generate")

    text: str | Items[str] | None = None
    input_ids: TokenList | Items[TokenList] | None = None
    # URLs or base64, one or a list; of several prompts, a list of these for each.
    image_data: str | Json | Items[Any] | None = None
    video_data: str | Json | Items[Any] | None = None
    sampling_params: NativeSampling | Items[NativeSampling] | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = Field(None, ge=-1)
    top_logprobs_num: int | None = Field(None, ge=0, le=20)
    token_ids_logprob: NamedTokens | Items[NamedTokens] | None = None
    return_text_in_logprobs: bool | None = None
    # Whether the text begins with reasoning, after which a grammar begins.
    require_reasoning: bool = False
    max_thinking_tokens: ThinkingBudget = None
    rid: RequestId | Items[RequestId] | None = None
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    cache_salt: Salt | Items[Salt] | None = None
    block_size: int | Literal["auto"] | None = None


@dataclass(frozen=True)
class RequestedText:
    """One text of a request.

    Attributes:
        sequence: Its sequence.
        name: Its id.
        thought: Counts the tokens of its reasoning; None where it has none.
    """

    sequence: RemoteSequence
    name: str
    thought: ThoughtTokens | None = None


def prompts_of(body: GenerateRequest) -> tuple[list, bool]:
    """The prompts of a request, and whether it asks for a list of answers.

    Raises:
        ApiError: There is none, or text and input_ids are both given.
    """
    if (body.text is None) == (body.input_ids is None):
        raise ApiError(400, "give text or input_ids, and one of them only", "text")
    prompts = body.text if body.text is not None else body.input_ids
    if isinstance(prompts, str):
        return [prompts], False
    if not prompts:
        raise ApiError(400, "there is no prompt", "text" if body.text is not None else "input_ids")
    return ([prompts], False) if isinstance(prompts[0], int) else (prompts, True)


def media_of(serving: Serving, body: GenerateRequest, count: int, several: bool) -> list[list[MediaPart]]:
    """The images and videos of each prompt.

    Raises:
        ApiError: They have another form, or the model takes none.
    """
    media: list[list[MediaPart]] = [[] for _ in range(count)]
    for name, kind in (("image_data", "image_url"), ("video_data", "video_url")):
        sources_of = getattr(body, name)
        if sources_of is None or sources_of == []:
            continue
        if serving.media is None:
            raise ApiError(400, f"{name} is not possible: the model is one of text", name)
        for i, of_prompt in enumerate(_each(sources_of, count, name) if several else [sources_of]):
            sources = of_prompt if isinstance(of_prompt, list) else [] if of_prompt is None else [of_prompt]
            for j, source in enumerate(sources):
                where = f"{name}[{i}][{j}]" if several else f"{name}[{j}]"
                if isinstance(source, str) and source[:8].partition(":")[0].lower() not in SCHEMES:
                    # No path: of the server's files, only file: URLs are read.
                    source = f"data:;base64,{source}"
                media[i].append(url_part({"type": kind, kind: source}, where))
    return media


async def prepare_generation(serving: Serving, body: GenerateRequest) -> tuple[list[RequestedText], bool]:
    """Prepares the texts of a request.

    Returns:
        The texts, and whether the answer is a list.

    Raises:
        ApiError: The request is invalid.
    """
    prompts, several = prompts_of(body)
    prepare.check_logprobs(serving, body)
    settings = _each(body.sampling_params, len(prompts), "sampling_params")
    _each(body.rid, len(prompts), "rid")
    salts, prepared = _each(body.cache_salt, len(prompts), "cache_salt"), []
    named = body.token_ids_logprob or []
    if not (named and isinstance(named[0], list)):
        named = [named] * len(prompts)
    named = _each(named, len(prompts), "token_ids_logprob")
    media = media_of(serving, body, len(prompts), several)
    default_mode = serving.llm.defaults.logprobs_mode or "scaled_logprobs"
    for i, (prompt, sampling) in enumerate(zip(prompts, settings, strict=True)):
        sampling = sampling or NativeSampling.model_validate({})
        n = prepare.check_counts(serving, sampling, len(prompts))
        placed, field = None, "text" if isinstance(prompt, str) else "input_ids"
        ids = await serving.texts.prompt(prompt, field)
        if media[i] and serving.media is not None:
            ids, placed = await serving.media.placed(ids, media[i], field)
        room = serving.check_room(ids, sampling.max_new_tokens, "sampling_params.max_new_tokens", default=128)
        logprobs = (body.top_logprobs_num or 0) if body.return_logprob else None
        logprob_ids = named[i] if body.return_logprob else None
        start = -1 if body.logprob_start_len is None else body.logprob_start_len
        of_prompt = logprobs if start >= 0 else None
        params = prepare.sampling(sampling, room, sampling.sampling_seed, logprobs, logprob_ids, of_prompt)
        params = replace(params, logprobs_mode=params.logprobs_mode or default_mode)
        form = await prepare.compiled(serving, prepare.form_of(sampling))
        options = {"block_size": body.block_size, "form": form}
        options |= {"priority": body.priority, "cache_salt": salts[i] or "", "media": placed}
        options["budget"] = budget = prepare.budget([body.max_thinking_tokens])
        options["thought"] = prepare.thought(serving, ids, budget, "max_thinking_tokens")
        if body.require_reasoning:
            options["thought"] = "open"
        prepared += await prepare.sequences(serving, ids, params, n, **options)
        several = several or n > 1
    names, close = names_of(body, len(prepared)), None
    current().ids = dict(zip(prepared, names, strict=True))
    if body.require_reasoning and serving.llm.tokenizer is not None:
        close = serving.llm.tokenizer.encode_plain(CLOSE)
    return [
        RequestedText(sequence, name, None if close is None else ThoughtTokens(close))
        for sequence, name in zip(prepared, numbered(names), strict=True)
    ], several


def _each(value, count: int, name: str) -> list:
    """A field that may be given once, or once for each prompt, as a list."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise ApiError(400, f"{len(value)} {name} for {count} prompts: give one, or one each", name)
    return value


def names_of(body: GenerateRequest, count: int) -> list[str]:
    """The request's id for each of ``count`` texts."""
    if isinstance(body.rid, list):
        return [rid for rid in body.rid for _ in range(count // len(body.rid))]
    return [current().choose_id("", rid=body.rid)] * count


def numbered(names: list[str]) -> list[str]:
    """The id of each text; SGLang numbers the texts of one request."""
    counts, seen = Counter(names), Counter()
    ids = []
    for name in names:
        ids.append(f"{name}_{seen[name]}" if counts[name] > 1 else name)
        seen[name] += 1
    return ids


def whole(sequence: RemoteSequence) -> Piece:
    """All of a text so far, as one piece."""
    text, reason = sequence.shown_text or "", sequence.request.finish_reason
    return Piece(text, sequence.token_ids, [], logprobs=sequence.logprobs, finish_reason=reason)


def answer(
    serving: Serving,
    body: GenerateRequest,
    requested: RequestedText,
    piece: Piece,
    prompt_entries: list[dict] | None,
    began: float,
) -> dict:
    """An answer, with ``meta_info`` as SGLang's and z-lab's benchmarks read it.

    Args:
        serving: The model and its engine.
        body: The request.
        requested: The text, whose totals the answer has.
        piece: The part of the text that the answer has.
        prompt_entries: Log-probabilities of the prompt's tokens but the first; None where the answer has none of them.
        began: When the request arrived, on `time.perf_counter`.
    """
    sequence, request, tokenizer = requested.sequence, requested.sequence.request, serving.llm.tokenizer
    ended = piece.finish_reason
    reason: dict[str, Any] = {"type": ended} if ended else {}
    if ended == "length":
        reason["length"] = request.params.max_tokens
    elif ended == "stop":
        reason["matched"] = sequence.matched
    elif ended == "abort":
        reason["message"] = "ended by /abort_request"
    counts = spec_tokens_details(sequence.rounds)
    meta = {
        "id": requested.name,
        "finish_reason": reason or None,
        "prompt_tokens": len(request.prompt),
        "completion_tokens": sequence.num_tokens,
        "reasoning_tokens": requested.thought.count if requested.thought else 0,
        "cached_tokens": request.cached,
        "e2e_latency": time.perf_counter() - began,
        **counts,
        # Older names of SGLang's.
        "spec_accept_token_num": counts["spec_num_correct_drafts"],
        "spec_draft_token_num": counts["spec_num_proposed_drafts"],
        "spec_accept_histogram": counts["spec_correct_drafts_histogram"],
        "drafters": drafters(sequence.rounds, serving.llm.draft_places),
        **weight_versions(serving, sequence),
    }
    if body.return_logprob:
        meta |= _logprobs("output", tokenizer, piece.logprobs or [], body)
        entries = []
        if request.prompt_logprobs is not None and prompt_entries is not None:
            first = {"token_id": request.prompt[0], "logprob": None, "top": {}}
            entries = [first, *prompt_entries][body.logprob_start_len :]
        meta |= _logprobs("input", tokenizer, entries, body)
    return {"text": None if tokenizer is None else piece.text, "output_ids": piece.token_ids, "meta_info": meta}


def weight_versions(serving: Serving, sequence: RemoteSequence) -> dict:
    """The version of the weights that drew the last tokens of a sequence, and those of all of its tokens."""
    spans = [span._asdict() for span in sequence.versions]
    return {"weight_version": spans[-1]["version"] if spans else serving.engine.state.version, "weight_versions": spans}


def _logprobs(side: str, tokenizer, entries: list[dict], body: GenerateRequest) -> dict:
    def triple(token: int, value: float | None) -> list:
        text = token_text(tokenizer, token)[0] if body.return_text_in_logprobs else None
        return [None if value is None else finite(value), token, text]

    def several(kind: str) -> Iterator[bytes]:
        return (dumped([triple(t, v) for t, v in e.get(kind, {}).items()] or None) for e in entries)

    fields: dict[str, Iterator[bytes]] = {
        f"{side}_token_logprobs": (dumped(triple(e["token_id"], e["logprob"])) for e in entries)
    }
    for kind, is_wanted, name in (
        ("top", body.top_logprobs_num, f"{side}_top_logprobs"),
        ("named", body.token_ids_logprob, f"{side}_token_ids_logprobs"),
    ):
        if is_wanted:
            fields[name] = several(kind)
    return fields


@router.post("/generate", responses={200: {"model": Generated | list[Generated]}}, response_model=None)
async def generate(http: Request, body: GenerateRequest):
    """SGLang's generation from text or token ids."""
    serving: Serving = http.app.state.serving
    began = time.perf_counter()
    texts, several = await prepare_generation(serving, body)
    body = body.without_large()
    if body.stream:
        return Later(http, EventStream(stream_events(serving, body, texts, several, began)).start())
    return Later(http, full_response(serving, body, texts, several, began))


async def full_response(
    serving: Serving, body: GenerateRequest, texts: list[RequestedText], several: bool, began: float
) -> JsonAnswer:
    """Waits for all sequences, then answers."""
    sequences = [text.sequence for text in texts]
    await serving.run(sequences)

    def answers() -> Iterator[dict]:
        for text in texts:
            if text.thought is not None:
                text.thought.take(text.sequence.token_ids)
            yield answer(serving, body, text, whole(text.sequence), text.sequence.request.prompt_entries, began)

    return JsonAnswer(answers() if several else next(answers()))


async def stream_events(
    serving: Serving, body: GenerateRequest, texts: list[RequestedText], several: bool, began: float
) -> AsyncGenerator[Frame, None]:
    """Yields events, as SGLang's: each has the text and the tokens so far, the last one of a text all of its answer.

    Log-probabilities come with the last event only, where they would be repeated otherwise. With
    ``--incremental-streaming-output`` each event has what is new, those of the prompt come with the first.
    """
    begun = set()
    async for i, piece in serving.merged([text.sequence for text in texts]):
        text = texts[i]
        if text.thought is not None:
            text.thought.take(piece.token_ids)
        entries = text.sequence.request.prompt_entries
        if serving.additions.incremental:
            entries = None if i in begun else entries
        elif piece.finish_reason:
            piece = whole(text.sequence)
        else:
            piece, entries = replace(whole(text.sequence), logprobs=None), None
        begun.add(i)
        value = answer(serving, body, text, piece, entries, began)
        yield frame_parts(value | ({"index": i} if several else {}))

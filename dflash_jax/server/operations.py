"""Endpoints beside generation: models, health, metrics, tokens."""

from datetime import UTC, datetime
from importlib.metadata import version

from fastapi import APIRouter, Request
from starlette.responses import Response

from dflash_jax.server import chat_schema, schema
from dflash_jax.server.answer_schema import (
    AnthropicModel,
    AnthropicModels,
    Error,
    MessagesError,
    Model,
    Models,
    Status,
    Text,
    Tokens,
    Version,
)
from dflash_jax.server.body import MediaRoute
from dflash_jax.server.conversation import converse
from dflash_jax.server.errors import ApiError, JsonResponse, wants_anthropic
from dflash_jax.server.large_answers import json_response
from dflash_jax.server.request_scope import while_connected
from dflash_jax.server.serving import Serving

router = APIRouter(route_class=MediaRoute)
NOT_READY = {503: {"model": Status}}


def model_card(serving: Serving, name: str, is_anthropics: bool) -> dict:
    """A model in OpenAI's list, or in Anthropic's."""
    if is_anthropics:
        created = datetime.fromtimestamp(serving.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        card = {"type": "model", "id": name, "display_name": name, "created_at": created}
        return card | {"max_input_tokens": serving.capacity, "max_tokens": serving.capacity}
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "dflash_jax",
        "root": serving.info.get("model_path"),
        "max_model_len": serving.capacity,
    }


@router.get("/v1/models", responses={200: {"model": Models | AnthropicModels}}, response_model=None)
async def models(http: Request):
    """The list of models: OpenAI's, or with the header anthropic-version Anthropic's, which is one page."""
    serving: Serving = http.app.state.serving
    is_anthropics = wants_anthropic(http.scope)
    data = [model_card(serving, name, is_anthropics) for name in serving.names]
    if is_anthropics:
        names = {"first_id": serving.names[0], "last_id": serving.names[-1]}
        return JsonResponse({"data": data, "has_more": False, **names})
    return JsonResponse({"object": "list", "data": data})


@router.get(
    "/v1/models/{name:path}",
    responses={200: {"model": Model | AnthropicModel}, 404: {"model": Error | MessagesError}},
    response_model=None,
)
async def model(http: Request, name: str):
    """One model."""
    serving: Serving = http.app.state.serving
    serving.check_model(name)
    return JsonResponse(model_card(serving, name or serving.name, wants_anthropic(http.scope)))


@router.get("/health", responses={200: {"model": Status}, **NOT_READY}, response_model=None)
@router.get("/ping", response_model=None, include_in_schema=False)
@router.post("/ping", response_model=None, include_in_schema=False)
async def health(http: Request):
    """Whether the process and its engine work. SageMaker calls it as /ping."""
    serving: Serving = http.app.state.serving
    if serving.failure is not None:
        return JsonResponse({"status": f"the engine failed: {serving.failure}"}, 503)
    return JsonResponse({"status": "ok"})


@router.get("/ready", responses={200: {"model": Status}, **NOT_READY}, response_model=None)
async def ready(http: Request):
    """Whether requests may be sent: not before the end of warm-up, and not while the server drains."""
    serving: Serving = http.app.state.serving
    status = serving.failure or ("draining" if serving.is_draining else None if serving.is_ready else "warming up")
    return JsonResponse({"status": status or "ok"}, 503 if status else 200)


@router.get("/version", responses={200: {"model": Version}}, response_model=None)
async def get_version():
    """The server's version."""
    return JsonResponse({"version": version("dflash-jax")})


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(http: Request):
    """Prometheus metrics under vLLM's names."""
    return Response(http.app.state.serving.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.post("/tokenize", responses={200: {"model": Tokens}}, response_model=None)
async def tokenize(http: Request, body: chat_schema.TokenizeRequest):
    """The tokens of a prompt or a conversation, vLLM's endpoint."""
    serving: Serving = http.app.state.serving
    serving.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give prompt or messages, and one of them only", "prompt")
    tokenizer = serving.llm.tokenizer
    if tokenizer is None:
        raise ApiError(400, "this checkpoint has no tokenizer", "prompt")
    if body.messages is not None:
        ids = (await while_connected(http, converse(serving, body.messages, body.tools, body))).prompt
    else:
        work = serving.texts.encode(body.prompt or "", "prompt", special=body.add_special_tokens)
        ids = await while_connected(http, work)

    def build() -> dict:
        names = [tokenizer.token(i) for i in ids] if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": serving.capacity, "tokens": ids, "token_strs": names}

    return await json_response([], build, len(ids))


@router.post("/detokenize", responses={200: {"model": Text}}, response_model=None)
async def detokenize(http: Request, body: schema.DetokenizeRequest):
    """The text of tokens, vLLM's endpoint."""
    serving: Serving = http.app.state.serving
    serving.check_model(body.model)
    if serving.llm.tokenizer is None:
        raise ApiError(400, "this checkpoint has no tokenizer", "tokens")
    return JsonResponse({"prompt": await while_connected(http, serving.texts.decode(body.tokens, "tokens"))})

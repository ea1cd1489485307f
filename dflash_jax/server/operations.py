"""Endpoints beside generation: models, health, metrics, tokens, the server's state and its load."""

import time
from datetime import UTC, datetime
from importlib.metadata import version

from fastapi import APIRouter, Request
from starlette.responses import Response

from dflash_jax.checkpoint.config_files import read_raw
from dflash_jax.errors import InputError
from dflash_jax.server import chat_schema, schema
from dflash_jax.server.answer_schema import (
    AnthropicModel,
    AnthropicModels,
    Error,
    Load,
    MessagesError,
    Model,
    ModelInfo,
    Models,
    Status,
    Text,
    Tokens,
    Version,
)
from dflash_jax.server.body import MediaRoute
from dflash_jax.server.conversation import converse
from dflash_jax.server.errors import ApiError, JsonResponse, dumped, wants_anthropic
from dflash_jax.server.page_files import page_file
from dflash_jax.server.serving import Serving
from dflash_jax.server.stream import JsonAnswer

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
        "root": serving.hello.info.get("model_path"),
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
    """Whether the process and its engine work, also where they rest. SageMaker calls it as /ping."""
    serving: Serving = http.app.state.serving
    if serving.failure is not None:
        return JsonResponse({"status": f"the engine failed: {serving.failure}"}, 503)
    return JsonResponse({"status": serving.engine.state.rest or "ok"})


@router.get("/ready", responses={200: {"model": Status}, **NOT_READY}, response_model=None)
async def ready(http: Request):
    """Whether requests may be sent: not before the end of warm-up, and not while the server sleeps or drains."""
    serving: Serving = http.app.state.serving
    state = serving.engine.state
    rest = state.rest if state.refuses or state.rest == "sleeping" else None
    status = serving.failure or ("draining" if serving.is_draining else rest if serving.is_ready else "warming up")
    return JsonResponse({"status": status or "ok"}, 503 if status else 200)


@router.get("/version", responses={200: {"model": Version}}, response_model=None)
async def get_version():
    """The server's version."""
    return JsonResponse({"version": version("dflash-jax")})


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(http: Request):
    """Prometheus metrics under vLLM's names."""
    text = await http.app.state.serving.engine.ask("metrics")
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


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
        ids = (await converse(serving, body.messages, body.tools, body)).prompt
    else:
        ids = await serving.texts.encode(body.prompt or "", "prompt", special=body.add_special_tokens)

    names = (dumped(tokenizer.token(i)) for i in ids) if body.return_token_strs else None
    return JsonAnswer({"count": len(ids), "max_model_len": serving.capacity, "tokens": ids, "token_strs": names})


@router.post("/detokenize", responses={200: {"model": Text}}, response_model=None)
async def detokenize(http: Request, body: schema.DetokenizeRequest):
    """The text of tokens, vLLM's endpoint."""
    serving: Serving = http.app.state.serving
    serving.check_model(body.model)
    if serving.llm.tokenizer is None:
        raise ApiError(400, "this checkpoint has no tokenizer", "tokens")
    return JsonResponse({"prompt": await serving.texts.decode(body.tokens, "tokens")})


# Fields of tokenizer_config.json that are shown. Others may have paths, or an access token of a model hub.
TOKENIZER_FIELDS = (
    "tokenizer_class",
    "model_max_length",
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "added_tokens_decoder",
    "additional_special_tokens",
    "clean_up_tokenization_spaces",
    "errors",
    "extra_special_tokens",
    "split_special_tokens",
)


# A page that shows /openapi.json and loads nothing from other servers.
router.add_api_route("/docs", page_file("/docs.html"), include_in_schema=False, response_model=None)


@router.get("/server_info", response_model=None)
@router.get("/get_server_info", response_model=None, include_in_schema=False)
async def server_info(http: Request):
    """The server's configuration and the engine's counters."""
    serving: Serving = http.app.state.serving
    figures = await serving.engine.ask("figures")
    names = ("running", "waiting", "usage", "requests", "rounds", "dispatches", "round_seconds")

    def state(of: dict) -> dict:
        accept_length = 1 + of["accepted"] / of["drafts"] if of["drafts"] else None
        return {**{name: of[name] for name in names}, "avg_spec_accept_length": accept_length}

    return JsonResponse(
        {
            "version": version("dflash-jax"),
            **serving.hello.info,
            "served_model_name": serving.name,
            "max_model_len": serving.capacity,
            "max_running_requests": figures["slots"],
            "warm_up": figures["warm_up"],
            "max_total_num_tokens": figures["positions"],
            "internal_states": [state(of) for of in figures.get("engines", [figures])],
        }
    )


@router.get("/model_info", responses={200: {"model": ModelInfo}}, response_model=None)
@router.get("/get_model_info", response_model=None, include_in_schema=False)
async def model_info(http: Request):
    """The model's properties, for routers."""
    serving: Serving = http.app.state.serving
    path = serving.hello.info.get("model_path")
    return JsonResponse(
        {
            "model_path": path,
            "tokenizer_path": path,
            "served_model_name": serving.name,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": serving.engine.state.version,
            "has_image_understanding": serving.media is not None,
            "has_audio_understanding": False,
            **architecture(serving),
            "vocab_size": serving.llm.config.vocab_size,
            "max_model_len": serving.capacity,
        }
    )


def architecture(serving: Serving) -> dict:
    """``model_type`` and ``architectures`` of config.json; None for a checkpoint of another format."""
    try:
        raw = read_raw(serving.llm.directory)
    except InputError:
        raw = {}
    return {"model_type": raw.get("model_type"), "architectures": raw.get("architectures")}


@router.get("/tokenizer_info", response_model=None)
async def tokenizer_info(http: Request):
    """The tokenizer's configuration with its chat template."""
    serving: Serving = http.app.state.serving
    tokenizer = serving.llm.tokenizer
    if tokenizer is None:
        raise ApiError(404, "this checkpoint has no tokenizer")
    shown = {name: tokenizer.config[name] for name in TOKENIZER_FIELDS if name in tokenizer.config}
    fixed = {"vocab_size": serving.llm.config.vocab_size, "max_model_len": serving.capacity}
    return JsonResponse({"tokenizer_class": None, **shown, **fixed, "chat_template": tokenizer.chat_template})


@router.get("/load", responses={200: {"model": Load}}, response_model=None)
async def load(http: Request):
    """Requests in flight, vLLM's measure of load."""
    return JsonResponse({"server_load": http.app.state.serving.in_flight})


async def load_metrics(serving: Serving) -> dict:
    """SGLang's measures of load, of all data shards together."""
    figures = await serving.engine.ask("figures")
    slots = figures["slots"]
    total, waiting = figures["positions"], figures["waiting_tokens"]
    used = round(figures["usage"] * total)
    return {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": figures["running"],
        "num_waiting_reqs": figures["waiting"],
        "num_waiting_uncached_tokens": waiting,
        "num_used_tokens": used,
        "num_total_tokens": used + waiting,
        "max_total_num_tokens": total,
        "max_running_requests": slots,
        "token_usage": figures["usage"],
        "utilization": figures["running"] / slots,
        "cache_hit_rate": figures["cached_tokens"] / max(figures["prompt_tokens"], 1),
    }


@router.get("/v1/loads", response_model=None)
async def loads(http: Request):
    """Loads in the shape that SGLang's routers read."""
    metrics = await load_metrics(http.app.state.serving)
    now = datetime.now(UTC).isoformat()
    return JsonResponse({"timestamp": now, "version": version("dflash-jax"), "dp_rank_count": 1, "loads": [metrics]})


@router.get("/get_load", response_model=None)
async def get_load(http: Request):
    """Loads in the shape that SGLang's earlier routers read."""
    metrics = await load_metrics(http.app.state.serving)
    names = {
        "num_reqs": metrics["num_running_reqs"] + metrics["num_waiting_reqs"],
        "num_waiting_reqs": metrics["num_waiting_reqs"],
        "num_tokens": metrics["num_total_tokens"],
        "num_pending_tokens": metrics["num_waiting_uncached_tokens"],
    }
    return JsonResponse([{"dp_rank": 0, **names}])

"""The server's state: SGLang's /server_info, /model_info and loads, vLLM's /load and /tokenizer_info."""

import time
from datetime import UTC, datetime
from importlib.metadata import version

from fastapi import APIRouter, Request

from dflash_jax.checkpoint.config_files import read_raw
from dflash_jax.errors import InputError
from dflash_jax.server.answer_schema import Load, ModelInfo
from dflash_jax.server.errors import ApiError, JsonResponse
from dflash_jax.server.page_files import page_file
from dflash_jax.server.serving import Serving

router = APIRouter()

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
    engine = serving.engine.engine
    s = engine.statistics
    drafts = max(s.drafts, 1)
    accepted = sum((n - 1) * c for n, c in dict(s.yielded).items())
    state = {
        "running": engine.running,
        "waiting": engine.waiting,
        "usage": engine.usage,
        "requests": dict(s.requests),
        "rounds": s.rounds,
        "dispatches": {f"{rows}x{spec}": c for (rows, spec), c in dict(s.dispatches).items()},
        "avg_spec_accept_length": 1 + accepted / drafts if s.drafts else None,
        "round_seconds": {f"{rows}x{spec}": v for (rows, spec), v in dict(engine.policy.seconds).items()},
    }
    return JsonResponse(
        {
            "version": version("dflash-jax"),
            **serving.info,
            "served_model_name": serving.name,
            "max_model_len": serving.capacity,
            "max_running_requests": engine.runner.slots,
            "warm_up": {name: getattr(serving.warm_up, name) for name in ("compiled", "failed", "total")},
            "max_total_num_tokens": engine.positions,
            "internal_states": [state],
        }
    )


@router.get("/model_info", responses={200: {"model": ModelInfo}}, response_model=None)
@router.get("/get_model_info", response_model=None, include_in_schema=False)
async def model_info(http: Request):
    """The model's properties, for routers. The weights never change."""
    serving: Serving = http.app.state.serving
    path = serving.info.get("model_path")
    return JsonResponse(
        {
            "model_path": path,
            "tokenizer_path": path,
            "served_model_name": serving.name,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
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


def load_metrics(serving: Serving) -> dict:
    """SGLang's measures of load, of all data shards together."""
    engine = serving.engine.engine
    total, s = engine.positions, engine.statistics
    used = round(engine.usage * total)
    waiting = engine.waiting_tokens
    return {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": engine.running,
        "num_waiting_reqs": engine.waiting,
        "num_waiting_uncached_tokens": waiting,
        "num_used_tokens": used,
        "num_total_tokens": used + waiting,
        "max_total_num_tokens": total,
        "max_running_requests": engine.runner.slots,
        "token_usage": engine.usage,
        "utilization": engine.running / engine.runner.slots,
        "cache_hit_rate": s.cached_tokens / max(s.prompt_tokens, 1),
    }


@router.get("/v1/loads", response_model=None)
async def loads(http: Request):
    """Loads in the shape that SGLang's routers read."""
    metrics = load_metrics(http.app.state.serving)
    now = datetime.now(UTC).isoformat()
    return JsonResponse({"timestamp": now, "version": version("dflash-jax"), "dp_rank_count": 1, "loads": [metrics]})


@router.get("/get_load", response_model=None)
async def get_load(http: Request):
    """Loads in the shape that SGLang's earlier routers read."""
    metrics = load_metrics(http.app.state.serving)
    names = {
        "num_reqs": metrics["num_running_reqs"] + metrics["num_waiting_reqs"],
        "num_waiting_reqs": metrics["num_waiting_reqs"],
        "num_tokens": metrics["num_total_tokens"],
        "num_pending_tokens": metrics["num_waiting_uncached_tokens"],
    }
    return JsonResponse([{"dp_rank": 0, **names}])

"""Endpoints that act on the engine: abort, flush, and the probe that generates a token."""

from fastapi import APIRouter, Request

from dflash_jax.server.answer_schema import Flushed, Status
from dflash_jax.server.errors import ApiError, JsonResponse
from dflash_jax.server.schema_base import Strict
from dflash_jax.server.serving import Serving

router = APIRouter()


class AbortRequest(Strict):
    """SGLang's ``/abort_request``."""

    rid: str | None = None
    abort_all: bool = False


@router.get("/health_generate", responses={200: {"model": Status}, 503: {"model": Status}}, response_model=None)
async def health_generate(http: Request):
    """Whether the engine generates a token now."""
    serving: Serving = http.app.state.serving
    if serving.failure is not None:
        return JsonResponse({"status": f"the engine failed: {serving.failure}"}, 503)
    if not serving.is_ready:
        return JsonResponse({"status": "warming up"}, 503)
    failure = await serving.engine.ask("generate")
    return JsonResponse({"status": failure or "ok"}, 503 if failure else 200)


@router.get("/flush_cache", include_in_schema=False, response_model=None)
@router.post("/flush_cache", responses={200: {"model": Flushed}, 400: {"model": Flushed}}, response_model=None)
async def flush_cache(http: Request):
    """Empties the prefix cache, as in SGLang only while no request is running: otherwise 400."""
    serving: Serving = http.app.state.serving
    if await serving.engine.ask("flush"):
        return JsonResponse({"success": True, "message": "Cache flushed."})
    return JsonResponse({"success": False, "message": "Requests are under way: nothing was flushed."}, 400)


@router.post("/reset_prefix_cache", responses={200: {"model": Flushed}}, response_model=None)
async def reset_prefix_cache(http: Request):
    """Empties the prefix cache. Running requests have their own copies."""
    serving: Serving = http.app.state.serving
    await serving.engine.ask("reset")
    return JsonResponse({"success": True, "message": "Cache reset."})


@router.post("/abort_request", response_model=None)
async def abort_request(http: Request, body: AbortRequest):
    """Ends the request with an id, or all requests with ``abort_all``; only those of the same API key.

    Their answers end with the finish_reason "abort". An unknown or finished request is no error.
    """
    if not body.rid and not body.abort_all:
        raise ApiError(400, "give rid, or abort_all: true", "rid")
    http.app.state.serving.engine.abort(http.state.owner, None if body.abort_all else body.rid)
    return JsonResponse({"success": True})

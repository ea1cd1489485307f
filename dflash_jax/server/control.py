"""Endpoints that act on the engine: abort, flush, and the probe that generates a token."""

import asyncio

from fastapi import APIRouter, Request

from dflash_jax.errors import EngineError, QueueFullError
from dflash_jax.sampling_params import SamplingParams
from dflash_jax.server import native_schema
from dflash_jax.server.answer_schema import Flushed, Status
from dflash_jax.server.errors import ApiError, JsonResponse
from dflash_jax.server.serving import Serving

router = APIRouter()

# The probe's priority, before all that clients can choose.
FIRST = -(2**31) - 1
# Seconds that the probe's token may take, and seconds between two checks of other requests' tokens.
TOKEN_S, LOOK_S = 10.0, 0.05
# Seconds in which the engine's thread must run a command.
COMMAND_S = 30.0


class Probe:
    """Tests whether the engine generates. Concurrent callers share one token."""

    def __init__(self, serving: Serving):
        self._serving = serving
        self._task: asyncio.Task | None = None

    async def failure(self) -> str | None:
        """Why the engine does not generate; None where it does."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._test())
        # Shielded: when one caller leaves, the others still wait.
        return await asyncio.shield(self._task)

    async def _test(self) -> str | None:
        statistics = self._serving.engine.engine.statistics
        before, token = statistics.new_tokens, asyncio.create_task(self._generate())
        try:
            async with asyncio.timeout(TOKEN_S):
                while not token.done():
                    await asyncio.wait({token}, timeout=LOOK_S)
                    # When every slot is busy, tokens of other requests are sufficient proof.
                    if self._serving.engine.engine.free_slots == 0 and statistics.new_tokens > before:
                        return None
                return token.result()
        except TimeoutError:
            return f"no token came within {TOKEN_S:g} s"
        finally:
            token.cancel()
            await asyncio.gather(token, return_exceptions=True)

    async def _generate(self) -> str | None:
        llm, engine = self._serving.llm, self._serving.engine
        sequence = llm.new_sequence([0], SamplingParams(max_tokens=1, temperature=0.0, seed=0), 1, priority=FIRST)
        try:
            events = engine.submit(sequence.request)
        except QueueFullError:
            # No place in the queue: only tokens of running requests can show that the engine generates.
            await asyncio.sleep(TOKEN_S)
            return f"no token came within {TOKEN_S:g} s"
        except EngineError as e:
            return str(e)
        try:
            async for event in events:
                if event.error is not None:
                    return str(event.error)
        except EngineError as e:
            return str(e)
        finally:
            await events.aclose()
        return None


@router.get("/health_generate", responses={200: {"model": Status}, 503: {"model": Status}}, response_model=None)
async def health_generate(http: Request):
    """Whether the engine generates a token now."""
    serving: Serving = http.app.state.serving
    if serving.failure is not None:
        return JsonResponse({"status": f"the engine failed: {serving.failure}"}, 503)
    if not serving.is_ready:
        return JsonResponse({"status": "warming up"}, 503)
    failure = await http.app.state.probe.failure()
    return JsonResponse({"status": failure or "ok"}, 503 if failure else 200)


async def on_engine(serving: Serving, function):
    """Calls ``function()`` on the engine's thread.

    Raises:
        ApiError: 503, the engine is not ready or does not answer.
    """
    if not serving.is_ready:
        raise ApiError(503, "the server is warming up")
    try:
        return await asyncio.wait_for(serving.engine.call(function), COMMAND_S)
    except (TimeoutError, EngineError):
        raise ApiError(503, "the engine does not answer") from None


@router.get("/flush_cache", include_in_schema=False, response_model=None)
@router.post("/flush_cache", responses={200: {"model": Flushed}, 400: {"model": Flushed}}, response_model=None)
async def flush_cache(http: Request):
    """Empties the prefix cache, as in SGLang only while no request is running: otherwise 400."""
    serving: Serving = http.app.state.serving
    if await on_engine(serving, serving.engine.engine.flush):
        return JsonResponse({"success": True, "message": "Cache flushed."})
    return JsonResponse({"success": False, "message": "Requests are under way: nothing was flushed."}, 400)


@router.post("/reset_prefix_cache", responses={200: {"model": Flushed}}, response_model=None)
async def reset_prefix_cache(http: Request):
    """Empties the prefix cache. Running requests have their own copies."""
    serving: Serving = http.app.state.serving
    await on_engine(serving, serving.engine.engine.prefix_cache.clear)
    return JsonResponse({"success": True, "message": "Cache reset."})


@router.post("/abort_request", response_model=None)
async def abort_request(http: Request, body: native_schema.AbortRequest):
    """Ends the request with an id, or all requests with ``abort_all``; only those of the same API key.

    Their answers end with the finish_reason "abort". An unknown or finished request is no error.
    """
    if not body.rid and not body.abort_all:
        raise ApiError(400, "give rid, or abort_all: true", "rid")
    http.app.state.serving.abort(None if body.abort_all else body.rid, http.state.owner)
    return JsonResponse({"success": True})

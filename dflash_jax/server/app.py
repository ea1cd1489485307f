"""The application: routes, keys, limits, the access log."""

import hmac
import logging
import time
from pathlib import Path

from fastapi import FastAPI
from starlette.staticfiles import StaticFiles

from dflash_jax.server import (
    chat,
    completions,
    control,
    info,
    messages,
    native,
    notes,
    operations,
    render,
    request_id,
    responses,
    stored_responses,
)
from dflash_jax.server.answer_schema import Error
from dflash_jax.server.cors import Cors
from dflash_jax.server.errors import ApiError, add_handlers, answer
from dflash_jax.server.schema_base import unknown_fields
from dflash_jax.server.serving import ClientGoneError, Serving

log = logging.getLogger("dflash_jax.access")

PAGE = Path(__file__).parent / "page"
# What needs no key: the page, probes and metrics, as in vLLM.
OPEN_PATHS = ("/health", "/health_generate", "/ready", "/ping", "/version", "/metrics", "/docs", "/openapi.json")
# What works without an engine, or is no request for text.
ALWAYS = (*OPEN_PATHS, "/abort_request", "/flush_cache", "/reset_prefix_cache")
CLIENT_GONE = 499


GUARDED = ("/v1/", "/generate", "/tokenize", "/detokenize", "/server_info", "/get_", "/model_info", "/load")
GUARDED += ("/invocations", "/flush_cache", "/reset_prefix_cache", "/abort_request")


def needs_key(path: str) -> bool:
    return path.startswith(GUARDED)


def needs_engine(scope) -> bool:
    return scope["method"] == "POST" and scope["path"] not in ALWAYS


class Gate:
    """Before any route: the key, whether the server takes requests, and the size of the body."""

    def __init__(self, app, serving: Serving, api_key: str | None):
        self.app, self.serving = app, serving
        self._expected = f"Bearer {api_key}".encode() if api_key else None

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status, told = time.perf_counter(), CLIENT_GONE, notes.begin()
        name = request_id.begin(scope)
        unknown_fields.set(self.serving.limits.unknown_fields)

        async def watched(message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                more = [*notes.headers(told), *request_id.headers(name)]
                message = message | {"headers": [*message.get("headers", ()), *more]}
            await send(message)

        try:
            await self._pass(scope, receive, watched)
        except ClientGoneError:
            pass
        except Exception:
            status = 500
            raise
        finally:
            milliseconds = 1e3 * (time.perf_counter() - began)
            client = (scope.get("client") or ("-",))[0]
            # As it was sent: decoded, it could hold line breaks.
            path = scope.get("raw_path", b"").decode("ascii", "backslashreplace")
            log.info("%s %s %s %d %.1f ms", client, scope["method"], path, status, milliseconds)

    async def _pass(self, scope, receive, send) -> None:
        try:
            self._check(scope)
            most, seen = self.serving.limits.body_bytes, 0

            async def measured():
                nonlocal seen
                message = await receive()
                seen += len(message.get("body", b""))
                if seen > most:
                    raise ApiError(413, f"the body has more than {most} bytes")
                return message

            self.serving.in_flight += needs_engine(scope)
            try:
                await self.app(scope, measured, send)
            finally:
                self.serving.in_flight -= needs_engine(scope)
        except ApiError as e:
            await answer(e, scope)(scope, receive, send)

    def _check(self, scope) -> None:
        headers, serving = dict(scope["headers"]), self.serving
        # Whose requests a client may abort: without a key, all clients are one.
        scope.setdefault("state", {})["owner"] = ""
        if self._expected is not None and needs_key(scope["path"]):
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                raise ApiError(401, "the API key is missing or wrong: send it as Authorization: Bearer KEY")
            scope["state"]["owner"] = given.decode("latin-1")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > serving.limits.body_bytes:
            raise ApiError(413, f"the body has {int(length)} bytes: at most {serving.limits.body_bytes} are possible")
        if needs_engine(scope):
            if serving.is_draining:
                raise ApiError(503, "the server is shutting down")
            if not serving.is_ready:
                raise ApiError(503, "the server is warming up")


def build(serving: Serving, api_key: str | None = None, cors: Cors | None = None) -> FastAPI:
    """The ASGI application of a `Serving`. ``api_key`` None: any key will do. ``cors`` None: pages of other origins
    cannot read answers."""
    app = FastAPI(
        title="dflash_jax",
        description="OpenAI's, Anthropic's and SGLang's interfaces, with lossless DFlash speculative decoding.",
        docs_url=None,
        redoc_url=None,
        responses={"4XX": {"model": Error}, "5XX": {"model": Error}},
    )
    app.state.serving, app.state.probe = serving, control.Probe(serving)
    for module in (
        *(chat, completions, responses, stored_responses, messages, native),
        *(operations, info, control, render),
    ):
        app.include_router(module.router)
    add_handlers(app)
    app.mount("/", StaticFiles(directory=PAGE, html=True), name="page")
    app.add_middleware(Gate, serving=serving, api_key=api_key)
    if cors is not None:
        # Outside of the gate: a preflight has no key, and a refusal is to be readable.
        cors.add_to(app)
    return app

"""The application: routes, keys, limits, the access log."""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse

from dflash_jax.server import (
    chat,
    chat_batch,
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
from dflash_jax.server.access import OPEN_PATHS, Access
from dflash_jax.server.answer_schema import Error
from dflash_jax.server.body import Body, check_type, has_body, replayed
from dflash_jax.server.cors import Cors
from dflash_jax.server.errors import ApiError, ClientGoneError, add_handlers, answer
from dflash_jax.server.schema_base import unknown_fields
from dflash_jax.server.serving import Serving, begin_rows

log = logging.getLogger("dflash_jax.access")

PAGE = Path(__file__).parent / "page"
# Each file has a route: a directory mounted at / would answer for all unknown paths and wrong methods.
PAGE_PATHS = ("/", *(f"/{file.name}" for file in PAGE.iterdir()))
# What works without an engine, or is no request for text.
ALWAYS = (*OPEN_PATHS, "/abort_request", "/flush_cache", "/reset_prefix_cache")
CLIENT_GONE = 499


def needs_engine(scope) -> bool:
    return scope["method"] == "POST" and scope["path"] not in ALWAYS


class Gate:
    """Before any route: the host, the key, whether the server takes requests, and the body."""

    def __init__(self, app, serving: Serving, access: Access):
        self.app, self.serving, self.access = app, serving, access

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status, told, rows = time.perf_counter(), CLIENT_GONE, notes.begin(), begin_rows()
        name = request_id.begin(scope, self.serving.additions.request_ids)
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
            for row in rows:
                row.request.close()
            milliseconds = 1e3 * (time.perf_counter() - began)
            client = (scope.get("client") or ("-",))[0]
            # As it was sent: decoded, it could hold line breaks.
            path = scope.get("raw_path", b"").decode("ascii", "backslashreplace")
            log.info("%s %s %s %d %.1f ms", client, scope["method"], path, status, milliseconds)

    async def _pass(self, scope, receive, send) -> None:
        body, counts = None, False
        try:
            headers = dict(scope["headers"])
            self._check(scope, headers)
            # A server without keys takes any: they tell nothing about who sends them.
            owner, host = scope["state"]["owner"] if self.access.keys else None, (scope.get("client") or (None,))[0]
            client = scope["state"]["client"] = (owner, host)
            body = scope["state"]["body"] = Body(self.serving, client)
            # Only now: a signal may begin to drain at any point of the check, which then refuses the request.
            counts = needs_engine(scope)
            self.serving.in_flight += counts
            if scope["method"] == "HEAD":
                # Of an answer to it, the HTTP server leaves the body out.
                scope = scope | {"method": "GET"}
            # What needs no key has no use for a body, and an unknown client's takes no memory.
            if has_body(headers) and not self.access.is_open(scope):
                receive = replayed(await body.read(receive), receive)
            await self.app(scope, receive, send)
        except ApiError as e:
            await answer(e, scope)(scope, receive, send)
        finally:
            self.serving.in_flight -= counts
            if body is not None:
                body.close()

    def _check(self, scope, headers: dict[bytes, bytes]) -> None:
        serving = self.serving
        # Whose requests a client may abort, and whose responses it may continue.
        scope.setdefault("state", {})["owner"] = self.access.check(scope)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > serving.limits.body_bytes:
            raise ApiError(413, f"the body has {int(length)} bytes: at most {serving.limits.body_bytes} are possible")
        if has_body(headers):
            check_type(headers)
        if needs_engine(scope):
            if serving.is_draining:
                raise ApiError(503, "the server is shutting down")
            if not serving.is_ready:
                raise ApiError(503, "the server is warming up")


def build(
    serving: Serving, api_keys: Sequence[str] = (), hosts: Collection[str] | None = None, cors: Cors | None = None
) -> FastAPI:
    """The ASGI application of a `Serving`.

    Args:
        serving: What answers.
        api_keys: Keys that clients may send; without any, none is needed.
        hosts: Names that the Host header may have; None for any.
        cors: Which pages of other origins may read answers; None for none.
    """
    app = FastAPI(
        title="dflash_jax",
        description="OpenAI's, Anthropic's and SGLang's interfaces, with lossless DFlash speculative decoding.",
        docs_url=None,
        redoc_url=None,
        responses={"4XX": {"model": Error}, "5XX": {"model": Error}},
    )
    app.state.serving, app.state.probe = serving, control.Probe(serving)
    for module in (
        *(chat, chat_batch, completions, responses, stored_responses, messages, native),
        *(operations, info, control, render),
    ):
        app.include_router(module.router)
    add_handlers(app)
    for path in PAGE_PATHS:
        app.add_api_route(path, page_file(path), include_in_schema=False, response_model=None)
    app.add_middleware(Gate, serving=serving, access=Access(api_keys, hosts, (*OPEN_PATHS, *PAGE_PATHS)))
    if cors is not None:
        # Outside of the gate: a preflight has no key, and a refusal is to be readable.
        cors.add_to(app)
    return app


def page_file(path: str) -> Callable:
    async def get() -> FileResponse:
        return FileResponse(PAGE / (path[1:] or "index.html"))

    return get

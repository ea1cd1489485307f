"""The ASGI application: routes, keys, limits, the access log."""

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.datastructures import Headers

from dflash_jax.server import (
    admin,
    chat,
    completions,
    control,
    messages,
    native,
    operations,
    render,
    responses,
    stored_responses,
    token_generation,
)
from dflash_jax.server.access import OPEN_PATHS, Access, media_type
from dflash_jax.server.answer_schema import Error
from dflash_jax.server.body import Body, already_read, check_type, has_body
from dflash_jax.server.cors import Cors
from dflash_jax.server.errors import ApiError, ClientGoneError, add_handlers, error_response, is_anthropics
from dflash_jax.server.page_files import PAGE_PATHS, page_file
from dflash_jax.server.request_context import ID_HEADER, RequestContext, fresh_id, while_connected
from dflash_jax.server.serving import BYTES_PATH, BYTES_TYPE, TENSOR_PATHS, Serving

log = logging.getLogger("dflash_jax.access")

# An administrator's paths, and the others that work without an engine or are no requests for text.
ADMIN_PATHS = frozenset(route.path for route in admin.router.routes if isinstance(route, APIRoute))
ALWAYS = frozenset((*OPEN_PATHS, *ADMIN_PATHS, "/abort_request", "/flush_cache", "/reset_prefix_cache"))


def needs_engine(scope) -> bool:
    """Whether a request is for text, so that it needs the engine."""
    return scope["method"] == "POST" and scope["path"] not in ALWAYS


def is_tensors(scope, headers: Mapping[bytes, bytes]) -> bool:
    """Whether the body of a request is the bytes of tensors."""
    return scope["path"] == BYTES_PATH and media_type(headers) == BYTES_TYPE


class Gate:
    """Checks every request before its route: the host, the key, whether the server takes requests, and the body."""

    def __init__(self, app, serving: Serving, access: Access):
        self.app, self.serving, self.access = app, serving, access

    async def __call__(self, scope, receive, send) -> None:
        """The ASGI application."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        serving = self.serving
        context = RequestContext(
            Headers(scope=scope), serving.name, serving.limits.unknown_fields, serving.on_begin, serving.on_end
        )
        context.enter()
        if serving.additions.request_ids and ID_HEADER not in context.headers:
            context.returned_id = fresh_id()
        if is_anthropics(scope):
            context.anthropic_id = f"req_{context.returned_id or fresh_id()}"
        # A copy: the server keeps its own as long as the connection.
        scope, start = scope | {"state": vars(context)}, time.perf_counter()

        async def send_with_headers(message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                message = message | {"headers": [*message.get("headers", ()), *context.answer_headers]}
            await send(message)
            context.is_answered = message["type"] == "http.response.body" and not message.get("more_body")

        try:
            await self._pass(context, scope, receive, send_with_headers)
        except ClientGoneError:
            pass
        except Exception:
            context.status = 500
            raise
        finally:
            context.end()
            milliseconds = 1e3 * (time.perf_counter() - start)
            client = (scope.get("client") or ("-",))[0]
            # The raw path: a decoded one could have line breaks.
            path = scope.get("raw_path", b"").decode("ascii", "backslashreplace")
            log.info("%s %s %s %d %.1f ms", client, scope["method"], path, context.status, milliseconds)

    async def _pass(self, context: RequestContext, scope, receive, send) -> None:
        serving = self.serving
        try:
            headers = dict(scope["headers"])
            # A client may abort requests and continue responses of the same owner.
            context.owner = self.access.check(scope)
            self._check(scope, headers)
            # Without configured keys, the key of a request does not identify its sender.
            host = (scope.get("client") or (None,))[0]
            context.client = context.owner.hex() if self.access.keys else host
            is_json = not is_tensors(scope, headers)
            most_bytes = serving.most_body_bytes(scope["path"], is_json)
            bodies, limits = serving.bodies, serving.limits
            if scope["path"] in TENSOR_PATHS:
                # Others keep their memory. One of the largest at a time.
                bodies, limits = serving.tensor_bodies, replace(limits, total_body_bytes=2 * limits.tensor_body_bytes)
            body = context.body = Body(bodies, limits, context.client, most_bytes, serving.capacity)
            context.endings.callback(body.close)
            # Counted after the check, which refuses the request where a signal began to drain meanwhile. What an
            # administrator has begun comes to its end, too.
            if needs_engine(scope) or scope["path"] in ADMIN_PATHS:
                serving.requests.add(context)
                context.endings.callback(serving.requests.discard, context)
            if scope["method"] == "HEAD":
                # The HTTP server omits the body of an answer to HEAD.
                scope = scope | {"method": "GET"}
            if has_body(headers) and self.access.is_open(scope):
                # Open paths use no body, so that unknown clients cannot fill memory.
                await self.app(scope, receive, send)
                return
            # No name for its content here: it is freed when the application has read it.
            receive_body = already_read(await body.read(receive, is_json) if has_body(headers) else b"")
            await while_connected(receive, self.app(scope, receive_body, send))
        except ApiError as e:
            await error_response(e, scope)(scope, receive, send)

    def _check(self, scope, headers: dict[bytes, bytes]) -> None:
        serving = self.serving
        length = headers.get(b"content-length", b"0")
        most = serving.most_body_bytes(scope["path"], is_json := not is_tensors(scope, headers))
        if length.isdigit() and int(length) > most:
            raise ApiError(413, f"the body has {int(length)} bytes: at most {most} are possible")
        if has_body(headers) and is_json:
            check_type(headers)
        if needs_engine(scope):
            if serving.is_draining:
                raise ApiError(503, "the server is shutting down")
            if not serving.engine.takes_requests:
                raise ApiError(503, "the server is warming up")


def build(
    serving: Serving,
    api_keys: Sequence[str] = (),
    hosts: Collection[str] | None = None,
    cors: Cors | None = None,
    admin_keys: Sequence[str] = (),
) -> FastAPI:
    """Builds the ASGI application of a `Serving`.

    Args:
        serving: The model and its engine.
        api_keys: Keys that clients may send; empty: none is needed.
        hosts: Names that the Host header may have; None for any.
        cors: Pages of other origins that may read answers; None for none.
        admin_keys: An administrator's keys; empty: there is no administrator.
    """
    app = FastAPI(
        title="dflash_jax",
        description="OpenAI's, Anthropic's and SGLang's interfaces, with lossless DFlash speculative decoding.",
        docs_url=None,
        redoc_url=None,
        responses={"4XX": {"model": Error}, "5XX": {"model": Error}},
    )
    app.state.serving = serving
    modules = [chat, completions, responses, stored_responses, messages, native, token_generation]
    for module in (*modules, operations, control, render, *([admin] if admin_keys else [])):
        app.include_router(module.router)
    add_handlers(app)
    for path in PAGE_PATHS:
        app.add_api_route(path, page_file(path), include_in_schema=False, response_model=None)
    origins = () if cors is None else cors.origins
    access = Access(api_keys, hosts, (*OPEN_PATHS, *PAGE_PATHS), origins, admin_keys, ADMIN_PATHS)
    app.add_middleware(Gate, serving=serving, access=access)
    if cors is not None:
        # Around the gate: a preflight has no key, and pages must be able to read refusals.
        cors.add_to(app)
    return app

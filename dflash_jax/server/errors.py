"""Errors as answers, in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

import json
import logging

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from dflash_jax.engine.engine import EngineError, QueueFullError
from dflash_jax.errors import InputError

log = logging.getLogger("dflash_jax.server")

RETRY_S = 1
KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(HTTPException):
    """What went wrong, for the client: an HTTP status, a message, and the field that it is about."""

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(status, message)
        self.message, self.param = message, param
        if status in (429, 503):
            self.headers = {"Retry-After": str(RETRY_S)}
        elif status == 401:
            self.headers = {"WWW-Authenticate": "Bearer"}

    @property
    def body(self) -> dict:
        status = self.status_code
        kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": status}}


class JsonResponse(Response):
    """ASCII only: what clients send may hold halves of characters, and comes back in messages."""

    media_type = "application/json"

    def render(self, content) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode("ascii")


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of any error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InputError):
        return ApiError(400, str(error))
    if isinstance(error, QueueFullError):
        return ApiError(429, f"{error}; try again later")
    if isinstance(error, EngineError):
        return ApiError(500, f"the engine failed: {error}")
    log.error("unexpected error", exc_info=error)
    return ApiError(500, f"internal error: {type(error).__name__}")


def field(loc: tuple) -> str | None:
    """("body", "messages", 0, "content") → messages[0].content"""
    name = ""
    for part in loc[1:]:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else str(part)
    return name or None


def of_validation(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body."""
    # Of a union, the branch that came furthest says most.
    first = max(error.errors(), key=lambda e: (e["type"] == "extra_forbidden", len(e["loc"])))
    param = field(first["loc"])
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{param} is not supported", param)
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', 'malformed')}")
    reason = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{param or 'body'}: {reason[0].lower()}{reason[1:]}", param)


def answer(error: ApiError) -> JsonResponse:
    return JsonResponse(error.body, error.status_code, error.headers)


def add_handlers(app) -> None:
    async def on_validation(_: Request, error: RequestValidationError):
        return answer(of_validation(error))

    async def on_http(_: Request, error: HTTPException):
        return answer(ApiError(error.status_code, str(error.detail)))

    async def on_any(_: Request, error: Exception):
        return answer(as_api_error(error))

    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    for kind in (ApiError, InputError, QueueFullError, EngineError, Exception):
        app.add_exception_handler(kind, on_any)

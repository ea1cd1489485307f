"""Errors as answers.

OpenAI's shape is ``{"error": {"message", "type", "param", "code"}}``; paths below /v1/messages have Anthropic's. Agents
shorten a conversation that is too long, which they know by OpenAI's code, or by the words of each interface.
"""

import json
import logging
from collections.abc import Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any, cast

from pydantic_core import PydanticSerializationError, to_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from dflash_jax.errors import EngineError, InputError, QueueFullError, UnavailableError

if TYPE_CHECKING:
    from fastapi.exceptions import RequestValidationError
    from pydantic import ValidationError

log = logging.getLogger("dflash_jax.server")

RETRY_S = 1
# Codex reads the time to wait from the message.
AGAIN = f": try again in {RETRY_S}s"
KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
ANTHROPIC_KINDS = KINDS | {403: "permission_error", 413: "request_too_large", 503: "overloaded_error"}


class ClientGoneError(Exception):
    """The client has disconnected, so that its answer has no reader."""


class ApiError(HTTPException):
    """An error for the client.

    Attributes:
        message: What is wrong, and what would be right.
        param: The field that the error is about.
        code: OpenAI's name of it where clients read one, such as Codex; else the status.
        headers: Further headers of the answer.
    """

    headers: Mapping[str, str] | None

    def __init__(self, status: int, message: str, param: str | None = None):
        if status in (429, 503) and not message.endswith(AGAIN):
            message += AGAIN
        super().__init__(status, message)
        self.message, self.param = message, param
        self.code: int | str = "rate_limit_exceeded" if status == 429 else status
        if status in (429, 503):
            self.headers = {"Retry-After": str(RETRY_S)}
        elif status == 401:
            self.headers = {"WWW-Authenticate": "Bearer"}

    @property
    def anthropic_message(self) -> str:
        """The message in Anthropic's shape."""
        return self.message

    @property
    def body(self) -> dict:
        """The body in OpenAI's shape."""
        status = self.status_code
        kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic_body(self, request_id: str) -> dict:
        """The body in Anthropic's shape."""
        status = self.status_code
        kind = ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.anthropic_message}, "request_id": request_id}


class TooLongError(ApiError):
    """A prompt or a conversation does not fit into a slot.

    Attributes:
        tokens: Tokens of it, or fewer where it was not counted to its end; None for another measure.
        most: Most tokens that it may have.
    """

    def __init__(self, message: str, param: str | None = None, tokens: int | None = None, most: int = 0):
        super().__init__(400, message, param)
        self.code = "context_length_exceeded"
        self.tokens, self.most = tokens, most

    @property
    def anthropic_message(self) -> str:
        """Anthropic's message of a prompt that is too long."""
        if self.tokens is None:
            return self.message
        return f"prompt is too long: {self.tokens} tokens > {self.most} maximum"


def too_long(tokens: int, capacity: int, param: str | None, is_at_least: bool = False) -> TooLongError:
    """The error of a prompt that leaves no room for a new token, or is not counted further."""
    count = f"{'at least ' * is_at_least}{tokens}"
    message = f"{count} tokens do not fit: this model's maximum context length is {capacity} tokens, one of them new"
    return TooLongError(message, param, tokens, capacity - 1)


def dumped(value: object) -> bytes:
    """``value`` as JSON in ASCII, since text from clients may have unpaired surrogates. NaN and infinities are null."""
    try:
        # A fifth of the time of Python's own module.
        return to_json(value, ensure_ascii=True, inf_nan_mode="null")
    except PydanticSerializationError:
        # An unpaired surrogate.
        return json.dumps(_without_infinities(value), separators=(",", ":")).encode("ascii")


def _without_infinities(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_infinities(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_without_infinities, value))
    return None if isinstance(value, float) and not isfinite(value) else value


class JsonResponse(Response):
    """JSON in ASCII: text from clients may have unpaired surrogates, and messages repeat it."""

    media_type = "application/json"

    def render(self, content) -> bytes:
        """``content`` as bytes."""
        return dumped(content)


def as_api_error(error: Exception) -> ApiError:
    """The error that a client gets for any exception. An unexpected one is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InputError):
        return ApiError(400, str(error))
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error))
    if isinstance(error, UnavailableError):
        return ApiError(503, f"no requests are taken: {error}")
    if isinstance(error, EngineError):
        return ApiError(500, f"the engine failed: {error}")
    log.error("unexpected error", exc_info=error)
    return ApiError(500, f"internal error: {type(error).__name__}")


# Characters of a field's name that messages repeat.
MOST_CHARACTERS = 64
# The required kind of a value, by pydantic's type of error.
VALUE_KINDS = {
    "string_type": "a string",
    "list_type": "a list",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "null",
}


def field_name(path: tuple) -> str | None:
    """A field's name in messages: ("messages", 0, "content") → messages[0].content."""
    name = ""
    for part in path:
        part = part if isinstance(part, int) else part[:MOST_CHARACTERS]
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name or None


def _path(error: dict, body: Any) -> tuple:
    """The path of an error in the body, without pydantic's names of a union's branches."""
    path, parts = [], error["loc"][1:]
    if error["loc"][0] == "query":
        return tuple(parts)
    for i, part in enumerate(parts):
        is_key = isinstance(body, dict) and isinstance(part, str) and part in body
        is_index = isinstance(body, list) and isinstance(part, int) and part < len(body)
        if is_key or is_index:
            body = cast("Any", body)[part]
        elif error["type"] != "missing" or i < len(parts) - 1:
            continue
        path.append(part)
    if error["type"] in ("wrong_field", "unknown_field"):
        path.append(error["ctx"]["field"])
    elif error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        path.append("type")
    return tuple(path)


def _kind(error: dict) -> str | None:
    """The required kind of a value, for errors about its kind."""
    if error["type"] == "literal_error":
        return error["ctx"]["expected"]
    if error["type"] == "union_tag_invalid":
        return error["ctx"]["expected_tags"].replace(", ", " or ")
    return VALUE_KINDS.get(error["type"])


def from_validation_error(error: "RequestValidationError") -> ApiError:
    """The most telling error of an invalid body."""
    errors = error.errors()
    if isinstance(error.body, bytes) and error.body:
        return ApiError(400, "the body must be sent with Content-Type: application/json")
    if errors[0]["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {errors[0].get('ctx', {}).get('error', 'malformed')}")
    located = [(_path(e, error.body), e) for e in errors]
    # Of a union's branches, the one with the longest path matched best.
    path, first = max(located, key=lambda each: (each[1]["type"] == "unknown_field", len(each[0])))
    param, kinds = field_name(path), [_kind(e) for where, e in located if where == path]
    if first["type"] in ("wrong_field", "unknown_field"):
        reason = first["msg"]
    elif first["type"] in ("missing", "union_tag_not_found"):
        reason = "is missing"
    elif all(kinds):
        reason = f"must be {' or '.join(dict.fromkeys(map(str, kinds)))}"
    else:
        message = first["msg"].removeprefix("Value error, ")
        return ApiError(400, f"{param or 'body'}: {message[0].lower()}{message[1:]}", param)
    return ApiError(400, f"{param or 'the body'} {reason}", param)


def from_conversion_error(error: "ValidationError", where: str = "") -> ApiError:
    """The error of a value at ``where`` that was validated apart, or converted from another interface's request."""
    first = error.errors()[0]
    name = ".".join(filter(None, (where, field_name(first["loc"]))))
    return ApiError(400, f"{name}: {first['msg']}", where or None)


def is_anthropics(scope: Mapping) -> bool:
    """Whether a request's answer has Anthropic's shape."""
    return scope["path"] == "/v1/messages" or scope["path"].startswith("/v1/messages/") or wants_anthropic(scope)


def wants_anthropic(scope: Mapping) -> bool:
    """Whether a request for models is one of Anthropic's clients, whose path is OpenAI's too."""
    is_for_models = scope["path"] == "/v1/models" or scope["path"].startswith("/v1/models/")
    return is_for_models and any(name == b"anthropic-version" for name, _ in scope["headers"])


def error_response(error: ApiError, scope: Mapping) -> JsonResponse:
    """The answer to a request of an ASGI scope."""
    body = error.anthropic_body(scope["state"]["anthropic_id"]) if is_anthropics(scope) else error.body
    return JsonResponse(body, error.status_code, error.headers)


def add_handlers(app) -> None:
    """Adds handlers for all exceptions to an application."""
    # An engine's process has no FastAPI, which takes half a second to import.
    from fastapi.exceptions import RequestValidationError

    async def handle(http: Request, error: Exception):
        if isinstance(error, RequestValidationError):
            error = from_validation_error(error)
        elif isinstance(error, HTTPException) and not isinstance(error, ApiError):
            # For example Allow, for a wrong method.
            headers = error.headers
            error = ApiError(error.status_code, str(error.detail))
            error.headers = headers
        return error_response(as_api_error(error), http.scope)

    for kind in (RequestValidationError, HTTPException, InputError, QueueFullError, EngineError, Exception):
        app.add_exception_handler(kind, handle)

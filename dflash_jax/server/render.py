"""vLLM's render endpoints, which show what generation would use; and SageMaker's one endpoint for all requests."""

import uuid
from dataclasses import asdict

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from dflash_jax.frontend.sequence import TextSequence
from dflash_jax.server import (
    chat,
    chat_schema,
    completions,
    native,
    responses,
    responses_input,
    schema,
    schema_base,
)
from dflash_jax.server.answer_schema import Rendered
from dflash_jax.server.body import MediaRoute
from dflash_jax.server.errors import ApiError
from dflash_jax.server.serving import Serving
from dflash_jax.server.stream import JsonAnswer

router = APIRouter(route_class=MediaRoute)

# The field that identifies an interface, its schema and its handler.
INVOCATIONS = {
    "messages": (chat_schema.ChatRequest, chat.chat_completions),
    "prompt": (schema.CompletionRequest, completions.completions),
    "input": (responses_input.ResponsesRequest, responses.responses),
    "text": (native.GenerateRequest, native.generate),
    "input_ids": (native.GenerateRequest, native.generate),
}


def rendered(serving: Serving, body: schema.OpenAiSampling, sequence: TextSequence, name: str) -> dict:
    """A request in vLLM's form."""
    request = sequence.request
    return {
        "request_id": f"{name}-{uuid.uuid4().hex}",
        "token_ids": request.prompt,
        "features": None,
        "sampling_params": asdict(request.params),
        "model": body.model or serving.name,
        "stream": bool(body.stream),
        "priority": request.priority,
    }


@router.post("/v1/chat/completions/render", responses={200: {"model": Rendered}}, response_model=None)
async def render_chat(http: Request, body: chat_schema.ChatRequest):
    """The prompt's token ids and the sampling parameters of a chat; invalid chats are refused."""
    serving: Serving = http.app.state.serving
    _, sequences = await chat.prepare_chat(serving, body)
    return JsonAnswer(rendered(serving, body, sequences[0], "chatcmpl"))


@router.post("/v1/completions/render", responses={200: {"model": list[Rendered]}}, response_model=None)
async def render_completions(http: Request, body: schema.CompletionRequest):
    """The prompt's token ids and the sampling parameters of each prompt of a completion."""
    serving: Serving = http.app.state.serving
    sequences = await completions.prepare_completions(serving, body)
    return JsonAnswer(rendered(serving, body, sequence, "cmpl") for sequence in sequences[:: body.n or 1])


@router.post("/invocations", response_model=None)
async def invocations(http: Request, body: schema_base.Json):
    """Any request for text, identified by its field: messages, prompt, input, text or input_ids."""
    kind = next((name for name in INVOCATIONS if name in body), None)
    if kind is None:
        raise ApiError(400, f"the body has none of the fields {', '.join(INVOCATIONS)}")
    model, handler = INVOCATIONS[kind]
    try:
        request = model.model_validate(body)
    except ValidationError as e:
        errors = [{**error, "loc": ("body", *error["loc"])} for error in e.errors()]
        raise RequestValidationError(errors, body=body) from None
    return await handler(http, request)

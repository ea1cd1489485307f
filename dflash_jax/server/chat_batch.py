"""/v1/chat/completions/batch, vLLM's: several conversations in one request, one choice for each."""

from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from dflash_jax.frontend.sequence import TextSequence
from dflash_jax.server import chat, chat_schema, request_id, resume
from dflash_jax.server.answer_schema import ChatCompletion
from dflash_jax.server.answers import usage
from dflash_jax.server.body import MediaRoute
from dflash_jax.server.conversation import Conversation
from dflash_jax.server.errors import ApiError
from dflash_jax.server.large_answers import json_response
from dflash_jax.server.request_scope import while_connected
from dflash_jax.server.serving import Serving
from dflash_jax.server.stream import Later

router = APIRouter(route_class=MediaRoute)


def check(serving: Serving, body: chat_schema.ChatBatchRequest) -> None:
    """Checks that no field is used that works for one conversation only.

    Raises:
        ApiError: One is, or there are too many conversations.
    """
    for field, is_wrong in {"stream": body.stream, "n": body.n not in (None, 1), "tools": body.tools}.items():
        if is_wrong:
            raise ApiError(400, f"{field} is not possible for several conversations", field)
    if len(body.messages) > serving.limits.prompts:
        message = f"{len(body.messages)} conversations: at most {serving.limits.prompts} are possible"
        raise ApiError(400, message, "messages")


async def prepare_batch(
    serving: Serving, body: chat_schema.ChatBatchRequest
) -> tuple[list[chat_schema.ChatRequest], list[Conversation], list[TextSequence]]:
    """A request, a conversation and a sequence for each list of messages.

    Raises:
        ApiError: A conversation is invalid; the message has its number.
    """
    check(serving, body)
    # The fields are validated already.
    fields: dict[str, Any] = dict(body)
    each_fields = [fields | {"messages": given} for given in body.messages]
    bodies = [chat_schema.ChatRequest.model_construct(None, **given) for given in each_fields]
    talks, sequences = [], []
    for i, each in enumerate(bodies):
        try:
            talk, (sequence,) = await chat.prepare_chat(serving, each)
        except ApiError as e:
            raise ApiError(e.status_code, f"conversation {i}: {e.message}", e.param) from None
        talks.append(talk)
        sequences.append(sequence)
    return bodies, talks, sequences


@router.post("/v1/chat/completions/batch", responses={200: {"model": ChatCompletion}}, response_model=None)
async def chat_completions_batch(http: Request, body: chat_schema.ChatBatchRequest):
    """Chat completions of several conversations, vLLM's endpoint."""
    serving: Serving = http.app.state.serving
    name = request_id.choose("chatcmpl-", body.request_id, body.rid)
    bodies, talks, sequences = await while_connected(http, prepare_batch(serving, body))
    head = {"id": name, "created": resume.current().created, "model": body.model or serving.name}
    serving.register(sequences, name, http.state.owner)
    bodies = [each.without_large() for each in bodies]
    return Later(http, while_connected(http, full_response(serving, bodies, talks, sequences, head)))


async def full_response(
    serving: Serving,
    bodies: list[chat_schema.ChatRequest],
    talks: list[Conversation],
    sequences: list[TextSequence],
    head: dict,
) -> Response:
    """Waits for all sequences, then answers."""
    parsers = [talk.parser(body.shown_reasoning) for talk, body in zip(talks, bodies, strict=True)]
    deltas = [[] for _ in sequences]
    async with aclosing(serving.merged(sequences)) as pieces:
        async for i, piece in pieces:
            deltas[i].append(parsers[i].push(piece))

    def build() -> dict:
        answers = [
            chat.chat_completion(serving, body, talk, [sequence], head, [parser], [choice_deltas])
            for body, talk, sequence, parser, choice_deltas in zip(
                bodies, talks, sequences, parsers, deltas, strict=True
            )
        ]
        choices = []
        for i, answer in enumerate(answers):
            (choice,) = answer["choices"]
            prompt_fields = {
                name: answer[name] for name in ("prompt_token_ids", "prompt_logprobs") if answer[name] is not None
            }
            choices.append({**choice, "index": i, **prompt_fields})
        counted = usage(sequences, 1, sum(parser.reasoning_tokens for parser in parsers))
        nothing = {"prompt_token_ids": None, "prompt_logprobs": None}
        return {**answers[0], "choices": choices, "usage": counted, **nothing}

    return await json_response(sequences, build)

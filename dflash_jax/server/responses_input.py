"""Requests to ``/v1/responses`` as chat requests."""

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from dflash_jax.media.parts import TYPES
from dflash_jax.server import chat_schema, responses_schema, schema
from dflash_jax.server.content import has_media, parts_or_text, text_of
from dflash_jax.server.errors import ApiError

# Fields with the same name and meaning in a chat request.
AS_IN_CHAT = (
    *schema.Sampling.model_fields,
    "model",
    "seed",
    "stop",
    "logit_bias",
    "structured_outputs",
    "priority",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "cache_salt",
    "min_tokens",
    "include_stop_str_in_output",
    "block_size",
)


def as_messages(instructions: str | None, items: Sequence[responses_schema.InputItem], earlier: int = 0) -> list[dict]:
    """Instructions and items as a chat's messages.

    Args:
        instructions: The system prompt.
        items: Items of the conversation.
        earlier: How many of the items precede the input.

    Raises:
        ApiError: An item is invalid.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    # Errors name items of the input: earlier items were valid in their own request.
    for i, item in enumerate(items, -earlier):
        where, more = f"input[{i}]", item.model_extra or {}
        kind = item.type or "message"
        if kind == "message":
            if item.role not in ("system", "developer", "user", "assistant"):
                raise ApiError(400, f"{where}.role is {item.role!r}: it must be system, user or assistant", where)
            source = item.content
            content = parts_or_text(source, where) if isinstance(source, list) else source or ""
            messages.append({"role": item.role, "content": content})
        elif kind == "function_call":
            function = {"name": _text(more, "name", where), "arguments": _text(more, "arguments", where)}
            call = {"id": _text(more, "call_id", where), "type": "function", "function": function}
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind == "function_call_output":
            output = _output(more.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": _text(more, "call_id", where), "content": output})
        elif kind == "reasoning":
            thought = text_of([_part(p) for p in item.content or []] if isinstance(item.content, list) else "", where)
            messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
        else:
            raise ApiError(400, f"{where}.type {kind!r} is not supported", f"{where}.type")
    return _joined_thoughts(messages)


def _part(part: chat_schema.Part) -> chat_schema.Part:
    return chat_schema.Part(type="text", text=part.text or "")


def takes_media(item: responses_schema.InputItem) -> bool:
    """Whether an item of the input has images or videos."""
    output = (item.model_extra or {}).get("output")
    kinds = [part.get("type") for part in output if isinstance(part, dict)] if isinstance(output, list) else []
    return any(isinstance(kind, str) and kind in TYPES for kind in kinds) or has_media(item.content)


def _output(output: Any, where: str) -> str | list[chat_schema.Part]:
    """What a tool returned: text, or parts."""
    if isinstance(output, str):
        return output
    try:
        items = enumerate(output if isinstance(output, list) else ())
        parts = [chat_schema.Part.model_validate(part).named(f"{where}[{i}]") for i, part in items]
    except ValidationError:
        parts = []
    if not parts:
        raise ApiError(400, f"{where} must be text or a list of parts", where)
    return parts_or_text(parts, where)


def _text(item: dict, name: str, where: str) -> str:
    if not isinstance(item.get(name), str):
        raise ApiError(400, f"{where}.{name} must be text", f"{where}.{name}")
    return item[name]


def _joined_thoughts(messages: list[dict]) -> list[dict]:
    """Joins each thought with the assistant's message after it."""
    joined: list[dict] = []
    for message in messages:
        previous = joined[-1] if joined else {}
        is_thought = previous.get("reasoning_content") is not None and not previous["content"]
        if is_thought and not previous.get("tool_calls") and message["role"] == "assistant":
            joined[-1] = {**message, "reasoning_content": previous["reasoning_content"]}
        else:
            joined.append(message)
    return joined


def _named(tool: responses_schema.ResponsesToolName) -> chat_schema.NamedTool:
    return chat_schema.NamedTool(type="function", function=chat_schema.FunctionName(name=tool.name))


def as_chat(
    body: responses_schema.ResponsesRequest, items: Sequence[responses_schema.InputItem], earlier: int = 0
) -> chat_schema.ChatRequest:
    """The equivalent chat request for these items; ``earlier`` as in `as_messages`."""
    form, choice = body.text.format if body.text else None, body.tool_choice
    response_format = None
    if form is not None and form.type == "json_schema":
        named = schema.JsonSchema(name=form.name or "answer", schema=form.schema_, strict=form.strict)
        response_format = schema.ResponseFormat(type="json_schema", json_schema=named)
    elif form is not None:
        response_format = schema.ResponseFormat(type=form.type)
    if isinstance(choice, responses_schema.ResponsesToolName):
        choice = _named(choice)
    elif isinstance(choice, responses_schema.ResponsesAllowedTools):
        allowed = chat_schema.AllowedTools(mode=choice.mode, tools=[_named(tool) for tool in choice.tools])
        choice = chat_schema.AllowedToolsChoice(type="allowed_tools", allowed_tools=allowed)
    wants_logprobs = bool(body.top_logprobs) or "message.output_text.logprobs" in (body.include or ())
    tools = [
        chat_schema.Tool(type="function", function=chat_schema.Function(**t.model_dump(exclude={"type"})))
        for t in body.tools or ()
    ]
    return chat_schema.ChatRequest(
        messages=[chat_schema.Message(**m) for m in as_messages(body.instructions, items, earlier)],
        max_completion_tokens=body.max_output_tokens,
        **{name: getattr(body, name) for name in AS_IN_CHAT},
        logprobs=wants_logprobs or None,
        top_logprobs=body.top_logprobs if wants_logprobs else None,
        response_format=response_format,
        tools=tools or None,
        tool_choice=choice,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
    )

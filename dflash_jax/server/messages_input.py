"""Requests to ``/v1/messages``, Anthropic's Messages API, as chat requests.

Unknown keys inside blocks and tools are ignored.
"""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, ValidationError

from dflash_jax.server import chat_schema
from dflash_jax.server.content import parts_or_text
from dflash_jax.server.errors import ApiError, from_conversion_error
from dflash_jax.server.schema_base import Body, Items, Json, Open, Strict, neutral_table


class Block(Open):
    """A content block. `as_chat` refuses unknown types by name."""

    type: str
    # text, thinking
    text: str | None = None
    thinking: str | None = None
    # tool_use
    id: str | None = None
    name: str | None = None
    input: Json | None = None
    # tool_result
    tool_use_id: str | None = None
    content: str | Items[chat_schema.Part] | None = None


class TurnMessage(Strict):
    """A turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Items[Block]


class MessagesTool(Open):
    """A tool that the client runs. Tools that Anthropic defines or runs have another ``type``."""

    type: str | None = None
    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: str | None = None
    input_schema: Json | None = None
    strict: bool | None = None


class MessagesToolChoice(Strict):
    """Which tool the model must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Strict):
    """Whether and how much to think; ``display`` "omitted" leaves the text of thoughts out of the answer."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Strict):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class OutputConfig(Strict):
    """Form and effort of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ContextEdit(Open):
    """Removal of old thoughts, which the chat template decides; other edits are not supported."""

    type: Literal["clear_thinking_20251015"]


class ContextManagement(Strict):
    """Edits of the context."""

    edits: Items[ContextEdit] | None = None


class CountTokensRequest(Body):
    """``/v1/messages/count_tokens``: the fields that make the prompt."""

    neutral = neutral_table("messages")

    messages: Items[TurnMessage] = Field(min_length=1)
    model: str | None = None
    system: str | Items[Block] | None = None
    tools: Items[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    # The same as in chat requests.
    chat_template_kwargs: Json | None = None


class MessagesRequest(CountTokensRequest):
    """``/v1/messages``."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Items[str] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    # The same as in chat requests.
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    block_size: int | Literal["auto"] | None = None
    require_answer: bool | None = None


BLOCKS = {
    "system": ("text",),
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}

BILLING = "x-anthropic-billing-header:"
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def as_messages(body: CountTokensRequest) -> list[dict]:
    """The system prompt and all turns as a chat's messages.

    Raises:
        ApiError: A block is invalid.
    """
    system = body.system if isinstance(body.system, str) else _joined(_lasting(body.system or ()), "system", "system")
    messages = [{"role": "system", "content": system}] if system else []
    for i, turn in enumerate(body.messages):
        where = f"messages[{i}].content"
        if isinstance(turn.content, str):
            messages.append({"role": turn.role, "content": turn.content})
        elif not turn.content:
            raise ApiError(400, f"{where} is empty", where)
        elif turn.role == "assistant":
            messages.append(_assistant(turn.content, where))
        else:
            messages += _user(turn, where)
    if messages[-1].get("tool_calls"):
        raise ApiError(400, "messages ends with tool_use: send its tool_result", "messages")
    return messages


def _check_type(block: Block, role: str, where: str) -> None:
    if block.type not in BLOCKS[role]:
        right = ", ".join(BLOCKS[role])
        raise ApiError(400, f"{where}.type is {block.type!r}: {role} content may have {right}", f"{where}.type")


def _required(block: Block, name: str, where: str):
    if (value := getattr(block, name)) is None:
        raise ApiError(400, f"{where}.{name} is missing", f"{where}.{name}")
    return value


def _joined(blocks: Sequence[Block], role: str, where: str) -> str:
    texts = []
    for i, block in enumerate(blocks):
        _check_type(block, role, f"{where}[{i}]")
        texts.append(_required(block, "text", f"{where}[{i}]"))
    return "".join(texts)


def _lasting(blocks: Sequence[Block]) -> list[Block]:
    """A system prompt without Claude Code's header, which changes with each request: no beginning would be known."""
    return [block for block in blocks if not (block.text or "").startswith(BILLING)]


def _user(turn: TurnMessage, where: str) -> list[dict]:
    """A user's turn as messages. Each tool result is one message, and so is what is between results."""
    messages: list[dict] = []
    parts: list[chat_schema.Part] = []

    def flush_parts() -> None:
        if parts:
            messages.append({"role": turn.role, "content": parts_or_text(parts, where)})
            parts.clear()

    blocks = [block for block in turn.content if not isinstance(block, str)]
    for i, block in enumerate(blocks):
        at = f"{where}[{i}]"
        _check_type(block, turn.role, at)
        if block.type == "tool_result":
            name, content = _required(block, "tool_use_id", at), _result(block.content, at)
            flush_parts()
            messages.append({"role": "tool", "tool_call_id": name, "content": content})
        elif block.type == "image":
            parts.append(_image(block, at))
        else:
            parts.append(chat_schema.Part(type="text", text=_required(block, "text", at)))
    flush_parts()
    return messages


def _result(content: str | list[chat_schema.Part] | None, where: str) -> str | list[chat_schema.Part]:
    """A tool's result. Other keys of its parts, such as cache_control, have no effect."""
    if not isinstance(content, list):
        return content or ""
    parts = []
    for i, part in enumerate(content):
        at = f"{where}.content[{i}]"
        parts.append(_image(part, at) if part.type == "image" else chat_schema.Part(type=part.type, text=part.text))
    return parts_or_text(parts, where)


def _image(block: Block | chat_schema.Part, where: str) -> chat_schema.Part:
    """An image as a part of a chat's message."""
    source, name = (block.model_extra or {}).get("source"), f"{where}.source"
    kind = source.get("type") if isinstance(source, dict) else None
    value = source.get("data" if kind == "base64" else "url") if isinstance(source, dict) else None
    if kind not in ("base64", "url") or not isinstance(value, str):
        right = '{"type": "base64", "media_type": "image/png", "data": "…"} or {"type": "url", "url": "…"}'
        raise ApiError(400, f"{name} must be {right}", name)
    # The content tells the format, whatever media_type says.
    url = f"data:;base64,{value}" if kind == "base64" else value
    return chat_schema.Part.model_validate({"type": "image", "image": url}).named(where)


def _assistant(blocks: Sequence[Block], where: str) -> dict:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        at = f"{where}[{i}]"
        _check_type(block, "assistant", at)
        if block.type == "text":
            texts.append(_required(block, "text", at))
        elif block.type == "thinking":
            thoughts.append(_required(block, "thinking", at))
        elif block.type == "tool_use":
            function = {"name": _required(block, "name", at), "arguments": _required(block, "input", at)}
            calls.append({"id": _required(block, "id", at), "type": "function", "function": function})
        # A redacted thought is encrypted, and is left out.
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool(tool: MessagesTool, where: str) -> dict:
    if tool.type not in (None, "custom"):
        raise ApiError(400, f"{where}.type is {tool.type!r}: it must be custom, a tool of the client", f"{where}.type")
    if tool.input_schema is None:
        raise ApiError(400, f"{where}.input_schema is missing", f"{where}.input_schema")
    function = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    return {"type": "function", "function": function | {"parameters": tool.input_schema}}


def _tool_choice(choice: MessagesToolChoice | None) -> str | dict | None:
    if choice is None or choice.type != "tool":
        return None if choice is None else CHOICES[choice.type]
    if choice.name is None:
        raise ApiError(400, "tool_choice.name is missing", "tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}


def as_chat(body: CountTokensRequest) -> chat_schema.ChatRequest:
    """The equivalent chat request.

    Raises:
        ApiError: The request is invalid.
    """
    thinking, output, messages = body.thinking, body.output_config, as_messages(body)
    fields: dict[str, Any] = {
        "model": body.model,
        # An assistant's turn at the end is continued.
        "continue_final_message": messages[-1]["role"] == "assistant",
        "tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())] or None,
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    if thinking is not None:
        fields |= {"enable_thinking": thinking.type != "disabled", "thinking_token_budget": thinking.budget_tokens}
        if (thinking.type == "enabled") != (thinking.budget_tokens is not None):
            name = "thinking.budget_tokens"
            raise ApiError(400, f"{name} belongs to thinking.type enabled, and must be given with it", name)
    if isinstance(body, MessagesRequest):
        same = ("max_tokens", "stream", "temperature", "top_p", "top_k", "seed", "block_size", "require_answer")
        fields |= {name: getattr(body, name) for name in same} | {"stop": body.stop_sequences or None}
    if output is not None:
        fields["reasoning_effort"] = output.effort
        if output.format is not None:
            form = {"name": "answer", "schema": output.format.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": form}
    try:
        messages = [chat_schema.Message(**message) for message in messages]
        return chat_schema.ChatRequest.model_validate(fields | {"messages": messages})
    except ValidationError as e:
        raise from_conversion_error(e) from None

"""Requests to ``/v1/messages``, Anthropic's Messages API, as chat requests.

Unknown keys inside blocks, messages and tools are ignored. What Anthropic's own servers do (tools that they run, edits
of the context) is left out with a note.
"""

import base64
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field, ValidationError

from dflash_jax.server import chat_schema
from dflash_jax.server.content import parts_or_text
from dflash_jax.server.errors import ApiError, from_conversion_error
from dflash_jax.server.request_context import current
from dflash_jax.server.schema_base import Body, Effort, Items, Json, Lenient, Open, Strict, neutral_table


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
    # tool_result, search_result; results of tools that Anthropic runs may be objects
    tool_use_id: str | None = None
    content: str | Items[chat_schema.Part] | Json | None = None


class TurnMessage(Lenient):
    """A turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Items[Block]
    # Of a system message: the effort from here on.
    output_config: Json | None = None


class MessagesTool(Open):
    """A tool that the client runs. Tools that Anthropic defines or runs have another ``type``."""

    type: str | None = None
    name: str | None = Field(None, min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: str | None = None
    input_schema: Json | None = None
    strict: bool | None = None
    # Such a tool is described where the conversation refers to it, and not at the beginning.
    defer_loading: bool | None = None


class MessagesToolChoice(Strict):
    """Which tool the model must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class OutputFormat(Strict):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class OutputConfig(Strict):
    """Form and effort of the answer. A budget of the whole task is for the model to know, and no model here does."""

    effort: Effort | None = None
    format: OutputFormat | None = None
    task_budget: Json | None = None


class ContextEdit(Open):
    """A change of the context that Anthropic's servers make, such as the removal of old results of tools."""

    type: str


class ContextManagement(Strict):
    """Edits of the context."""

    edits: Items[ContextEdit] | None = None


class CountTokensRequest(Body):
    """``/v1/messages/count_tokens``: as ``/v1/messages``, of which some fields make no prompt."""

    neutral = neutral_table("messages")

    messages: Items[TurnMessage] = Field(min_length=1)
    model: str | None = None
    system: str | Items[Block] | None = None
    tools: Items[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: chat_schema.Thinking | None = None
    output_config: OutputConfig | None = None
    # An older name of output_config.format.
    output_format: OutputFormat | None = None
    context_management: ContextManagement | None = None
    mcp_servers: Items[Json] | None = None
    container: str | Json | None = None
    # The same as in chat requests.
    chat_template_kwargs: Json | None = None
    max_tokens: int | None = Field(None, ge=1)
    stop_sequences: Items[str] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    block_size: int | Literal["auto"] | None = None
    require_answer: bool | None = None


class MessagesRequest(CountTokensRequest):
    """``/v1/messages``."""

    max_tokens: int = Field(ge=1)


# The content of a message: texts, and images.
Parts = list[str | chat_schema.Part]
# Types of blocks by the role of their turn, and of those in a tool's result.
BLOCKS = {
    "system": ("text", "tool_addition", "tool_removal"),
    "user": (
        *("text", "image", "document", "search_result", "tool_result", "tool_reference"),
        *("tool_addition", "tool_removal"),
    ),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "tool_result": ("text", "image", "document", "search_result", "tool_reference"),
}
BILLING = "x-anthropic-billing-header:"
# Fields with the same name and meaning in a chat request.
AS_IN_CHAT = (
    *("model", "max_tokens", "stream", "temperature", "top_p", "top_k", "seed", "block_size", "thinking"),
    *("require_answer", "chat_template_kwargs"),
)
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# The types of tools that Anthropic defines or runs end with dates.
DATE = re.compile(r"_\d{8}", re.ASCII)


def _is_hosted(tool: MessagesTool) -> bool:
    """Whether Anthropic defines or runs a tool."""
    return tool.type is not None and (tool.type == "mcp_toolset" or DATE.fullmatch(tool.type[-9:]) is not None)


def _is_of_server(kind: str) -> bool:
    """Whether a block is a call of a tool that Anthropic runs, or its result."""
    return kind in ("server_tool_use", "mcp_tool_use") or kind.endswith("_tool_result")


def _function(tool: MessagesTool, where: str) -> dict:
    """A tool of the client's as a function of a chat's tool."""
    if tool.type not in (None, "custom"):
        message = f"{where}.type is {tool.type[:64]!r}: it must be custom, a tool of the client"
        raise ApiError(400, message, f"{where}.type")
    for name in ("name", "input_schema"):
        if getattr(tool, name) is None:
            raise ApiError(400, f"{where}.{name} is missing", f"{where}.{name}")
    return {
        "name": tool.name,
        "description": tool.description,
        "strict": tool.strict,
        "parameters": tool.input_schema,
    }


@dataclass
class Tools:
    """The tools of a request.

    Attributes:
        functions: By name, as functions of a chat's tools.
        added: The same of those that messages define.
        deferred: Names of functions that the beginning of the prompt does not describe.
        left_out: Types by name of tools that Anthropic defines or runs.
    """

    functions: dict[str, dict] = field(default_factory=dict)
    added: dict[str, dict] = field(default_factory=dict)
    deferred: set[str] = field(default_factory=set)
    left_out: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, tools: Sequence[MessagesTool]) -> "Tools":
        """Raises ApiError for a tool that is neither the client's nor Anthropic's, or incomplete."""
        read = cls()
        for i, tool in enumerate(tools):
            if tool.type is not None and _is_hosted(tool):
                read.left_out[tool.name or tool.type] = tool.type
            else:
                read.functions[tool.name or ""] = _function(tool, f"tools[{i}]")
                read.deferred |= {tool.name or ""} if tool.defer_loading else set()
        return read

    def choice(self, choice: MessagesToolChoice | None) -> str | dict | None:
        """A choice as a chat has it. Raises ApiError for a tool without a name, or that is left out."""
        if choice is None or choice.type != "tool":
            return None if choice is None else CHOICES[choice.type]
        if choice.name is None:
            raise ApiError(400, "tool_choice.name is missing", "tool_choice.name")
        if kind := self.left_out.get(choice.name):
            message = f"tool_choice.name is {choice.name[:64]!r}: this server has no {kind[:64]}, and leaves it out"
            raise ApiError(400, message, "tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}

    def as_chat(self) -> list[dict] | None:
        """As tools of a chat. The beginning of the prompt stays as it was when messages add some."""
        tools = [
            *((function, name in self.deferred) for name, function in self.functions.items()),
            *((function, True) for function in self.added.values()),
        ]
        named = [{"type": "function", "function": function, "defer_loading": later} for function, later in tools]
        return named or None


class Turns:
    """Turns as a chat's messages.

    Attributes:
        tools: The tools; messages may add some.
        left_out: Types of blocks that are left out.
    """

    def __init__(self, tools: Tools):
        """Nothing is read yet."""
        self.tools, self.left_out = tools, set[str]()
        # Names of tools that the conversation has described: once each, since a body may refer to one very often.
        self._described: set[str] = set()

    def read(self, turn: TurnMessage, where: str) -> list[dict]:
        """The messages of a turn.

        Raises:
            ApiError: A block is invalid.
        """
        if isinstance(turn.content, str):
            return [{"role": turn.role, "content": turn.content}]
        blocks = []
        for i, block in enumerate(turn.content):
            if turn.role != "system" and _is_of_server(block.type):
                self.left_out.add(block.type)
            else:
                _check_type(block, turn.role, f"{where}[{i}]")
                blocks.append((block, f"{where}[{i}]"))
        return [_assistant(blocks)] if turn.role == "assistant" else self._of_others(turn.role, blocks, where)

    def _of_others(self, role: str, blocks: Sequence[tuple[Block, str]], where: str) -> list[dict]:
        """Messages of a user's or the system's turn: each tool result is one, and so is what is between results."""
        messages: list[dict] = []
        parts: Parts = []

        def flush_parts() -> None:
            if parts:
                messages.append({"role": role, "content": _content(parts, where)})
                parts.clear()

        for block, at in blocks:
            if block.type == "tool_result":
                name, content = _required(block, "tool_use_id", at), self._result(block, f"{at}.content")
                flush_parts()
                messages.append({"role": "tool", "tool_call_id": name, "content": content})
            else:
                parts += self._parts(block, at)
        flush_parts()
        # An empty turn of the system, which only has settings, says nothing.
        return messages or ([] if role == "system" else [{"role": role, "content": ""}])

    def _result(self, block: Block, where: str) -> str | list[chat_schema.Part]:
        """A tool's result. Other keys of its parts, such as cache_control, have no effect."""
        if not isinstance(block.content, list):
            if isinstance(block.content, dict):
                raise ApiError(400, f"{where} must be a string or a list of blocks", where)
            return block.content or ""
        parts: Parts = []
        for i, part in enumerate(block.content):
            _check_type(part, "tool_result", f"{where}[{i}]")
            parts += self._parts(part, f"{where}[{i}]")
        return _content(parts, where)

    def _parts(self, block: Block | chat_schema.Part, at: str) -> Parts:
        """A block, which is no result, as parts of a chat's message."""
        if block.type == "image":
            return [_image(block, at)]
        if block.type == "document":
            return _document(block, at)
        if block.type == "search_result":
            source = getattr(block, "source", None)
            return _titled(block, {"Source": source}, _inner(getattr(block, "content", None), f"{at}.content"))
        if block.type == "tool_reference":
            return [self._description(getattr(block, "tool_name", None), f"{at}.tool_name")]
        if block.type in ("tool_addition", "tool_removal"):
            return [self._change(block, f"{at}.tool")]
        return [_required(block, "text", at)]

    def _description(self, name: Any, where: str) -> str:
        """What the model reads where the conversation refers to a tool, in the form that Claude Code tells it of."""
        if not isinstance(name, str):
            raise ApiError(400, f"{where} must be a string", where)
        function = self.tools.added.get(name) or self.tools.functions.get(name)
        if function is None or name in self._described:
            return f"<function>{name}</function>\n"
        self._described.add(name)
        shown = {key: function[key] for key in ("description", "name", "parameters")}
        try:
            written = json.dumps(shown, ensure_ascii=False)
        except RecursionError:
            raise ApiError(400, f"{where} names a tool that is nested too deeply", where) from None
        return f"<functions>\n<function>{written}</function>\n</functions>\n"

    def _change(self, block: Block | chat_schema.Part, where: str) -> str:
        """What the model reads where a tool is added or removed."""
        tool = getattr(block, "tool", None)
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(tool, dict) or kind not in ("tool_reference", "tool_definition"):
            raise ApiError(400, f"{where} must be a tool_reference or a tool_definition", where)
        name = tool.get("name")
        if kind == "tool_definition":
            at = f"{where}.definition"
            try:
                definition = MessagesTool.model_validate(tool.get("definition"))
            except ValidationError as e:
                raise from_conversion_error(e, at) from None
            if definition.type is not None and _is_hosted(definition):
                self.left_out.add(definition.type)
                return ""
            function = _function(definition, at)
            name = function["name"]
            if block.type == "tool_addition":
                self.tools.added[name] = function
                self._described.discard(name)
        if not isinstance(name, str):
            raise ApiError(400, f"{where}.name must be a string", f"{where}.name")
        if block.type == "tool_removal":
            return f"This function is not available any more: {name}\n"
        return f"This function is available now:\n{self._description(name, where)}"


def as_messages(body: CountTokensRequest, tools: Tools | None = None) -> list[dict]:
    """The system prompt and all turns as a chat's messages. The header X-Dflash-Note names what is left out.

    Raises:
        ApiError: A block is invalid.
    """
    system = body.system if isinstance(body.system, str) else _system(body.system or ())
    messages = [{"role": "system", "content": system}] if system else []
    turns = Turns(Tools() if tools is None else tools)
    for i, turn in enumerate(body.messages):
        messages += turns.read(turn, f"messages[{i}].content")
    # An empty turn of the assistant at the end is where the answer begins.
    if messages and messages[-1] == {"role": "assistant", "content": ""}:
        messages.pop()
    if not messages:
        raise ApiError(400, "messages is empty", "messages")
    if turns.left_out:
        current().note(f"messages: blocks left out: {_named(turns.left_out)}")
    if any(turn.output_config for turn in body.messages):
        current().note("messages: output_config inside a message is not applied")
    return messages


def _named(names: Sequence[str] | set[str]) -> str:
    return ", ".join(name[:64] for name in sorted(names))


def _check_type(block: Block | chat_schema.Part, role: str, where: str) -> None:
    if block.type not in BLOCKS[role]:
        right = ", ".join(BLOCKS[role])
        raise ApiError(400, f"{where}.type is {block.type[:64]!r}: {role} content may have {right}", f"{where}.type")


def _required(block: Block | chat_schema.Part, name: str, where: str):
    if (value := getattr(block, name)) is None:
        raise ApiError(400, f"{where}.{name} is missing", f"{where}.{name}")
    return value


def _content(parts: Parts, where: str) -> str | list[chat_schema.Part]:
    """The content of a chat's message: a text, unless there are images."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return "".join(texts)
    return parts_or_text(
        [chat_schema.Part(type="text", text=part) if isinstance(part, str) else part for part in parts], where
    )


def _system(blocks: Sequence[Block]) -> str:
    """A system prompt without Claude Code's header, which changes with each request: no beginning would be known."""
    texts = []
    for i, block in enumerate(blocks):
        where = f"system[{i}]"
        if block.type != "text":
            raise ApiError(400, f"{where}.type is {block.type[:64]!r}: it must be text", f"{where}.type")
        texts.append(_required(block, "text", where))
    return "".join(text for text in texts if not text.startswith(BILLING))


def _inner(content: Any, where: str) -> Parts:
    """The texts and images inside of a document or of a search's result."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise ApiError(400, f"{where} must be a string or a list of blocks", where)
    parts: Parts = []
    for i, value in enumerate(content):
        at = f"{where}[{i}]"
        try:
            part = chat_schema.Part.model_validate(value)
        except ValidationError as e:
            raise from_conversion_error(e, at) from None
        if part.type not in ("text", "image"):
            raise ApiError(400, f"{at}.type is {part.type[:64]!r}: it must be text or image", f"{at}.type")
        parts.append(_image(part, at) if part.type == "image" else _required(part, "text", at))
    return parts


def _titled(block: Block | chat_schema.Part, heads: Json, parts: Parts) -> Parts:
    """A document or a search's result, between tags of its type and below its title."""
    heads = {"Title": getattr(block, "title", None)} | heads
    lines = "".join(f"{name}: {value}\n" for name, value in heads.items() if isinstance(value, str) and value)
    return [f"<{block.type}>\n{lines}", *parts, f"\n</{block.type}>\n"]


def _document(block: Block | chat_schema.Part, where: str) -> Parts:
    """A document of text, or of blocks."""
    source, name = getattr(block, "source", None), f"{where}.source"
    source = source if isinstance(source, dict) else {}
    kind, value, media_type = source.get("type"), source.get("data"), source.get("media_type", "text/plain")
    parts: Parts
    if kind == "content":
        parts = _inner(source.get("content"), f"{name}.content")
    elif kind == "text" and isinstance(value, str):
        parts = [value]
    elif kind == "base64" and isinstance(value, str) and isinstance(media_type, str) and media_type[:5] == "text/":
        try:
            parts = [base64.b64decode(value, validate=True).decode()]
        except ValueError:
            raise ApiError(400, f"{name}.data must be base64 of text in UTF-8", f"{name}.data") from None
    else:
        given = repr(kind[:64]) if isinstance(kind, str) else "of no type"
        given += f" of {media_type[:64]}" if kind == "base64" and isinstance(media_type, str) else ""
        message = f"{name} is {given}: it must be text, content, or base64 of text; send other documents as text"
        raise ApiError(400, message, name)
    return _titled(block, {"Context": getattr(block, "context", None)}, parts)


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


def _assistant(blocks: Sequence[tuple[Block, str]]) -> dict:
    texts, thoughts, calls = [], [], []
    for block, at in blocks:
        if block.type == "text":
            texts.append(_required(block, "text", at))
        elif block.type == "thinking":
            thoughts.append(_required(block, "thinking", at) or _unsealed(getattr(block, "signature", None)))
        elif block.type == "tool_use":
            function = {"name": _required(block, "name", at), "arguments": _required(block, "input", at)}
            calls.append({"id": _required(block, "id", at), "type": "function", "function": function})
        # A redacted thought is encrypted, and is left out.
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


# What a signature begins with that has the thought itself.
SEALED = "dflash:"


def sealed(thought: str) -> str:
    """A signature of a thought whose text the answer leaves out, so that the client brings the thought back in it."""
    return SEALED + base64.b64encode(thought.encode("utf-8", "replace")).decode()


def _unsealed(signature: Any) -> str:
    """The thought of a signature of `sealed`; none of another one."""
    if not isinstance(signature, str) or not signature.startswith(SEALED):
        return ""
    try:
        return base64.b64decode(signature[len(SEALED) :], validate=True).decode()
    except ValueError:
        return ""


def _note_what_is_not_done(body: CountTokensRequest, tools: Tools) -> None:
    """Notes what this server leaves out, beside blocks."""
    note = current().note
    if tools.left_out:
        note(f"tools: {_named(set(tools.left_out.values()))} left out, since this server has none of them")
    for name in ("mcp_servers", "container"):
        if getattr(body, name):
            note(f"{name}: left out, since this server has none")
    if body.output_config is not None and body.output_config.task_budget:
        note("output_config.task_budget: not told to the model")
    edits = (body.context_management and body.context_management.edits) or ()
    if others := {edit.type for edit in edits if not _keeps_thoughts(edit)}:
        note(f"context_management: the context stays as it is, without {_named(others)}")


def _keeps_thoughts(edit: ContextEdit) -> bool:
    """Whether an edit of old thoughts leaves all of them."""
    return edit.type.startswith("clear_thinking_") and getattr(edit, "keep", None) == "all"


def as_chat(body: CountTokensRequest) -> chat_schema.ChatRequest:
    """The equivalent chat request.

    Raises:
        ApiError: The request is invalid.
    """
    output, tools = body.output_config or OutputConfig(), Tools.of(body.tools or ())
    messages, edits = as_messages(body, tools), (body.context_management and body.context_management.edits) or ()
    _note_what_is_not_done(body, tools)
    fields: dict[str, Any] = {name: getattr(body, name) for name in AS_IN_CHAT} | {
        # An assistant's turn at the end is continued.
        "continue_final_message": messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1],
        "tools": tools.as_chat(),
        "tool_choice": tools.choice(body.tool_choice),
        "parallel_tool_calls": not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        "preserve_thinking": True if any(map(_keeps_thoughts, edits)) else None,
        "stop": body.stop_sequences or None,
        "reasoning_effort": output.effort,
    }
    if (form := output.format or body.output_format) is not None:
        named = {"name": "answer", "schema": form.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": named}
    try:
        messages = [chat_schema.Message(**message) for message in messages]
        return chat_schema.ChatRequest.model_validate(fields | {"messages": messages})
    except ValidationError as e:
        raise from_conversion_error(e) from None

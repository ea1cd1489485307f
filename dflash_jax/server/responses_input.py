"""Requests to ``/v1/responses``: OpenAI's interface with some of vLLM's additions, as chat requests.

With ``truncation: "auto"`` a conversation that is too long continues without its oldest items.
"""

import json
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from dflash_jax.media.parts import TYPES
from dflash_jax.server import chat_schema, schema
from dflash_jax.server.chat import tools_in_use
from dflash_jax.server.chat_schema import FunctionName, Part
from dflash_jax.server.content import has_media, parts_or_text, text_of
from dflash_jax.server.conversation import converse
from dflash_jax.server.errors import ApiError, TooLongError, from_conversion_error
from dflash_jax.server.limits import DEFAULT_LIMITS
from dflash_jax.server.schema_base import Effort, Items, Json, Lenient, Open, Strict, neutral_table
from dflash_jax.server.serving import Serving
from dflash_jax.server.tools import INPUT


class ResponsesTool(Lenient):
    """A function, flat in this interface; a custom tool, whose argument is a text; or functions of a namespace."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None
    format: Json | None = None
    tools: Items[Json] | None = None


class ResponsesToolName(FunctionName):
    """A tool by its name."""

    type: Literal["function", "custom"]


class ResponsesAllowedTools(Strict):
    """Tools that may be called, and whether one must be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Items[ResponsesToolName] = Field(min_length=1)


ResponsesToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[ResponsesToolName | ResponsesAllowedTools, Field(discriminator="type")]
)


class TextFormat(Strict):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Json | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Strict):
    """Options of the text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Strict):
    """How much to think."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ContextEdit(Strict):
    """A summary in place of the conversation where its prompt has more tokens than a number."""

    type: Literal["compaction"]
    compact_threshold: int | None = Field(None, ge=1)


class InputItem(Open):
    """A message, a call, its output, or a thought; `as_messages` refuses unknown types by name."""

    type: str | None = None
    role: str | None = None
    content: str | Items[Part] | None = None

    @property
    def id(self) -> Any:
        """Its id, if it has one."""
        return (self.model_extra or {}).get("id")

    @property
    def is_reference(self) -> bool:
        """Whether it stands for the item of its id, in OpenAI's form with or without a type."""
        return self.type == "item_reference" or (
            self.type is self.role is self.content is None and isinstance(self.id, str)
        )


class ResponsesRequest(schema.SharedFields):
    """``/v1/responses``."""

    neutral = neutral_table("responses")

    input: str | Items[InputItem] = Field(default_factory=list)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Items[ResponsesTool] | None = None
    tool_choice: ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    previous_response_id: str | None = Field(None, max_length=128)
    include: Items[str] | None = None
    context_management: Items[ContextEdit] | None = None
    chat_template_kwargs: Json | None = None
    require_answer: bool | None = None


# Fields with the same name and meaning in a chat request.
AS_IN_CHAT = (*schema.SharedFields.model_fields, "parallel_tool_calls", "chat_template_kwargs", "require_answer")


# What joins the names of a namespace and of its function.
JOINT = "__"
# Tools of OpenAI's servers and of Codex itself, which Codex names in every request.
HOSTED = ("web_search", "local_shell", "tool_search", "image_generation", "code_interpreter", "file_search", "mcp")
# What stands for the conversation before it, as the summary that this server has sealed.
COMPACTIONS = ("compaction", "compaction_summary", "context_compaction")
# Items of such tools that say nothing without them, what other servers have sealed, and references that are resolved.
LEFT_OUT = (
    *("web_search_call", "image_generation_call", "code_interpreter_call", "file_search_call", "mcp_list_tools"),
    *(*COMPACTIONS, "item_reference"),
)
# A result that adds tools, an item that only does so, and the last item of an input that asks for a summary.
FOUND_TOOLS, ADDED_TOOLS, TRIGGER = "tool_search_output", "additional_tools", "compaction_trigger"
# Calls and results that are read as those of functions, and the key of a call's arguments.
CALLS = {"custom_tool_call": INPUT, "local_shell_call": "action", "tool_search_call": "arguments"}
RESULTS = {"custom_tool_call_output": "output", "local_shell_call_output": "output", FOUND_TOOLS: "tools"}

# What asks the model for a summary, and what a later turn begins with.
TASK = """The conversation up to here is about to be replaced by a summary, with which alone you will go on. \
Write that summary now. State:
- what the user wants, with every constraint and preference
- what was decided and done: names of files, functions and commands, values, exact identifiers
- what was learned, with errors and their causes
- what remains to be done, the next step first
Give facts only. Call no tool, and answer with nothing but the summary."""
SUMMARY = "The conversation before this message is replaced by this summary of it:\n\n"
# New tokens of a summary, at most this number and this part of a slot, where the request has no limit.
SUMMARY_TOKENS, SUMMARY_PART = 4096, 16


@dataclass
class Tools:
    """The tools of a request.

    Attributes:
        functions: As tools of a chat.
        customs: Names of custom tools.
        namespaces: Namespace and name of functions by their flat names.
        left_out: Types of tools that this server has not.
    """

    functions: list[dict] = field(default_factory=list)
    customs: set[str] = field(default_factory=set)
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    _names: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, tools: Sequence[ResponsesTool]) -> "Tools":
        """Raises ApiError for a tool of an unknown type, or without a name."""
        found = cls()
        for i, tool in enumerate(tools):
            found._take(tool, f"tools[{i}]")
        return found

    def add(self, tool: Any, where: str) -> None:
        """Adds a tool that an item of the conversation brings, unless one of its name is there.

        Raises:
            ApiError: It is none, or there are too many.
        """
        try:
            read = ResponsesTool.model_validate(tool)
        except ValidationError as e:
            raise from_conversion_error(e, where) from None
        self._take(read, where, is_new=False)

    def _take(self, tool: ResponsesTool, where: str, is_new: bool = True) -> None:
        if tool.type.startswith(HOSTED):
            self.left_out.append(tool.type)
            return
        if tool.type not in ("function", "custom", "namespace"):
            right = "function, custom or namespace"
            raise ApiError(400, f"{where}.type is {tool.type[:64]!r}: it must be {right}", f"{where}.type")
        if tool.name is None:
            raise ApiError(400, f"{where}.name is missing", f"{where}.name")
        if tool.type == "namespace":
            self._add_namespace(tool.name, tool.tools or (), where, is_new)
        elif is_new or tool.name not in self._names:
            if tool.type == "custom":
                self.customs.add(tool.name)
                self._add(_custom(tool, where), "custom")
            else:
                self._add(tool.model_dump(include={"name", "description", "parameters", "strict"}))

    def _add(self, fields: dict, kind: str = "function") -> None:
        if len(self.functions) == DEFAULT_LIMITS.tools:
            message = (
                f"more than {DEFAULT_LIMITS.tools} tools, functions of namespaces among them: no more are possible"
            )
            raise ApiError(400, message, "tools")
        self._names.add(fields["name"])
        self.functions.append({"type": kind, kind: fields})

    def _add_namespace(self, namespace: str, tools: Sequence[Json], where: str, is_new: bool) -> None:
        for i, tool in enumerate(tools):
            name = tool.get("name")
            if tool.get("type") != "function" or not isinstance(name, str):
                at = f"{where}.tools[{i}]"
                raise ApiError(400, f"{at} must be a function with a name", at)
            flat = f"{namespace}{JOINT}{name}"
            if is_new or flat not in self._names:
                self.namespaces[flat] = namespace, name
                self._add({key: tool.get(key) for key in ("description", "parameters", "strict")} | {"name": flat})


def _custom(tool: ResponsesTool, where: str) -> dict:
    """A custom tool of a chat.

    Raises:
        ApiError: Its name or format is invalid.
    """
    fields = tool.model_dump(include={"name", "description", "format"}, exclude_none=True)
    try:
        chat_schema.CustomTool.model_validate(fields)
    except ValidationError as e:
        first = e.errors()[0]
        at = ".".join(map(str, (where, *first["loc"])))
        raise ApiError(400, f"{at} of the tool {(tool.name or '')[:64]!r}: {first['msg']}", at) from None
    return fields


def as_chat_item(item: InputItem, unseal: Callable[[str, Any], str | None] = lambda *_: None) -> InputItem:
    """An item as a message, a thought, or a call of a function or its output.

    Args:
        item: The item: also a custom tool's, of Codex's shell or search, or a summary.
        unseal: The text of a kind ("reasoning" or "compaction") that this server has sealed for this client, or None.
    """
    kind, more = item.type, item.model_extra or {}
    if kind in (*CALLS, *RESULTS) and more.get("call_id") is None and not kind.startswith("custom"):
        # A search that another server has run, with one result after it.
        more = more | {"call_id": kind.partition("_call")[0].removesuffix("_output")}
    if kind in CALLS:
        value = more.get(CALLS[kind])
        arguments = json.dumps({INPUT: value} if kind == "custom_tool_call" else value)
        name = more.get("name") if kind == "custom_tool_call" else kind.removesuffix("_call")
        return InputItem(**more | {"type": CALL, "name": name, "arguments": arguments})
    if kind in RESULTS:
        value = more.get(RESULTS[kind])
        is_text = isinstance(value, str | list) and kind != FOUND_TOOLS
        return InputItem(**more | {"type": OUTPUT, "output": value if is_text else json.dumps(value)})
    if kind == CALL and isinstance(more.get("namespace"), str) and isinstance(more.get("name"), str):
        return InputItem(**more | {"type": CALL, "name": f"{more['namespace']}{JOINT}{more['name']}"})
    if kind == "reasoning":
        thought = unseal("reasoning", more.get("encrypted_content"))
        parts = _thoughts(item) if thought is None else [chat_schema.Part(type="reasoning_text", text=thought)]
        return InputItem(type=kind, content=[*parts], **{key: more[key] for key in ("id",) if key in more})
    if kind in COMPACTIONS and (text := unseal("compaction", more.get("encrypted_content"))) is not None:
        named = {key: more[key] for key in ("id",) if key in more}
        return InputItem(type="message", role="user", content=SUMMARY + text, **named)
    return item


def added_tools(item: InputItem) -> list:
    """The tools that an item of a conversation adds to those of the request."""
    tools = (item.model_extra or {}).get("tools")
    return tools if item.type in (FOUND_TOOLS, ADDED_TOOLS) and isinstance(tools, list) else []


def as_messages(instructions: str | None, items: Sequence[InputItem], earlier: int = 0) -> list[dict]:
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
            thought = text_of([_part(p) for p in _thoughts(item)], where)
            messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
        elif kind == TRIGGER:
            messages.append({"role": "user", "content": TASK})
        elif kind not in (*LEFT_OUT, ADDED_TOOLS):
            raise ApiError(400, f"{where}.type {kind!r} is not supported", f"{where}.type")
    return _joined_thoughts(messages)


def _thoughts(item: InputItem) -> Sequence[chat_schema.Part]:
    """The parts of a thought: its text, or else its summary."""
    if isinstance(item.content, list) and item.content:
        return item.content
    summary = (item.model_extra or {}).get("summary")
    texts = [part.get("text") for part in summary if isinstance(part, dict)] if isinstance(summary, list) else []
    return [chat_schema.Part(type="text", text=text) for text in texts if isinstance(text, str)]


def _part(part: chat_schema.Part) -> chat_schema.Part:
    return chat_schema.Part(type="text", text=part.text or "")


def takes_media(item: InputItem) -> bool:
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
    """Joins thoughts with the assistant's message after them."""
    joined: list[dict] = []
    thoughts: list[str] = []
    for message in [*messages, {}]:
        is_assistant = message.get("role") == "assistant"
        if is_assistant and (thought := message.get("reasoning_content")) is not None:
            thoughts.append(thought)
            if not (message["content"] or message.get("tool_calls")):
                continue
        if thoughts:
            own = message if is_assistant else {"role": "assistant", "content": ""}
            joined.append({**own, "reasoning_content": "\n".join(filter(None, thoughts))})
            thoughts.clear()
            if is_assistant:
                continue
        joined.append(message)
    return joined[:-1]


def most_tokens(body: ResponsesRequest, capacity: int) -> int | None:
    """The tokens of a prompt beyond which a summary comes first, three quarters of a slot where none are named."""
    given = [edit.compact_threshold or capacity * 3 // 4 for edit in body.context_management or ()]
    return min(given, default=None)


def with_trigger(body: ResponsesRequest) -> ResponsesRequest:
    """The request for a summary of a request's conversation."""
    if asks_for_summary(body):
        return body
    items = [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    return body.model_copy(update={"input": [*items, InputItem(type=TRIGGER)]})


def asks_for_summary(body: ResponsesRequest) -> bool:
    """Whether a request's input ends with a `TRIGGER`."""
    return bool(body.input) and not isinstance(body.input, str) and body.input[-1].type == TRIGGER


def as_summary_request(body: ResponsesRequest, capacity: int, banned: Sequence[int]) -> ResponsesRequest:
    """A request whose input ends with a `TRIGGER`, with the fields of its summary alone.

    It has no thought, call, form or stop. Tools stay, since the beginning of the prompt shows them: it is in the prefix
    cache.

    Args:
        body: The request.
        capacity: Positions of a slot.
        banned: Tokens that begin a call.
    """
    most = max(1, min(SUMMARY_TOKENS, capacity // SUMMARY_PART))
    unset = ("text", "parallel_tool_calls", "top_logprobs", "include", "regex", "ebnf", "structured_outputs")
    unset += ("stop", "stop_token_ids", "stop_regex", "min_tokens", "bad_words", "allowed_token_ids")
    fields: dict[str, Any] = dict.fromkeys(unset) | {
        "temperature": 0.0 if body.temperature is None else body.temperature,
        "max_output_tokens": body.max_output_tokens or most,
        "reasoning": Reasoning(effort="none"),
        "tool_choice": "none" if body.tool_choice == "none" else None,
        "logit_bias": {**(body.logit_bias or {}), **{str(token): -100.0 for token in banned}},
    }
    return body.model_copy(update=fields)


def places_after(items: Sequence[InputItem], summaries: Collection[int]) -> list[int]:
    """The places of the items that count: of ``summaries`` the last one, what follows, and what is kept before.

    Of the messages, those of the system and the user, as they are in OpenAI's compacted conversations; and the tools
    that items add.
    """
    last, passed = max(summaries, default=0), set(summaries)
    return [i for i, item in enumerate(items) if i >= last or (is_kept(item) and i not in passed)]


def is_kept(item: InputItem) -> bool:
    """Whether an item stays in a conversation that a summary replaces."""
    return _kind(item) in ("user", *OF_SYSTEM, ADDED_TOOLS)


def _named(tool: ResponsesToolName) -> dict:
    return {"type": "function", "function": {"name": tool.name}}


def as_chat(
    body: ResponsesRequest, tools: Tools, items: Sequence[InputItem], earlier: int = 0
) -> chat_schema.ChatRequest:
    """The equivalent chat request for these items; ``earlier`` as in `as_messages`."""
    form, choice, response_format = body.text.format if body.text else None, body.tool_choice, None
    if form is not None:
        named = {"name": form.name or "answer", "schema": form.schema_, "strict": form.strict}
        response_format = {"type": form.type, "json_schema": named if form.type == "json_schema" else None}
    if isinstance(choice, ResponsesToolName):
        choice = _named(choice)
    elif isinstance(choice, ResponsesAllowedTools):
        allowed = {"mode": choice.mode, "tools": [_named(tool) for tool in choice.tools]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
    messages = as_messages(body.instructions, items, earlier)
    if not messages:
        raise ApiError(400, "input has nothing that the model reads: no message, call or output", "input")
    wants_logprobs = bool(body.top_logprobs) or "message.output_text.logprobs" in (body.include or ())
    return chat_schema.ChatRequest.model_validate(
        {
            **{name: getattr(body, name) for name in AS_IN_CHAT},
            "messages": [chat_schema.Message(**m) for m in messages],
            "max_completion_tokens": body.max_output_tokens,
            "logprobs": wants_logprobs or None,
            "top_logprobs": body.top_logprobs if wants_logprobs else None,
            "response_format": response_format,
            "tools": tools.functions or None,
            "tool_choice": choice,
            "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        }
    )


CALL, OUTPUT = "function_call", "function_call_output"
OF_MODEL = ("assistant", "reasoning", CALL)
OF_SYSTEM = ("system", "developer")


def droppable(items: Sequence[InputItem]) -> list[list[int]]:
    """The items that may be dropped, as groups of indices, the oldest group first.

    A group is dropped as a whole, so that chat templates accept the remaining items. A group is a turn, which begins
    with a message of the user; in the latest turn it is a step: items of the model up to the outputs of its calls. The
    output of a call is in the group of the call. No group has system messages, the newest input (all items after the
    model's last one), the calls that the newest input answers, or the user's last message before it.
    """
    without = (*OF_SYSTEM, *LEFT_OUT, ADDED_TOOLS)
    kinds = {i: _kind(item) for i, item in enumerate(items) if _kind(item) not in without}
    last = max((i for i, kind in kinds.items() if kind in OF_MODEL), default=-1)
    newest = {i for i in kinds if i > last} or set([*kinds][-1:])
    # Ids may repeat: an output belongs to the last call before it.
    calls = {_call_id(items[i]): i for i, kind in kinds.items() if kind == CALL}
    answered = {_call_id(items[i]) for i in newest if kinds[i] == OUTPUT} & set(calls)
    begin = min([*newest, *(calls[name] for name in answered)], default=0)
    user_turns = [i for i, kind in kinds.items() if kind == "user"]
    question = max((i for i in user_turns if i <= begin), default=max(user_turns, default=-1))

    groups: list[list[int]] = []
    group_of_call: dict[str | None, list[int]] = {}
    is_open = False
    for i, kind in kinds.items():
        name = _call_id(items[i])
        if i == question:
            is_open = False
        elif kind == OUTPUT and name in group_of_call:
            group_of_call[name].append(i)
            # In the latest turn, the model's next step begins a group.
            is_open = is_open and i < question
        else:
            if not is_open or kind in ("user", OUTPUT):
                groups.append([])
            groups[-1].append(i)
            is_open = True
            if kind == CALL:
                group_of_call[name] = groups[-1]
    return [group for group in groups if newest.isdisjoint(group)]


def _kind(item: InputItem) -> str | None:
    """The type of an item; of a message, its role."""
    return item.role if item.type in (None, "message") else item.type


def _call_id(item: InputItem) -> str | None:
    return (item.model_extra or {}).get("call_id")


def characters(item: InputItem) -> int:
    """Characters of an item's texts."""
    parts = item.content if isinstance(item.content, list) else ()
    texts = [item.content, *(part.text for part in parts), *(item.model_extra or {}).values()]
    return sum(len(text) for text in texts if isinstance(text, str))


async def kept_items(
    serving: Serving,
    items: Sequence[InputItem],
    chat_of: Callable[[Sequence[int]], Awaitable[chat_schema.ChatRequest]],
) -> list[int]:
    """The items with which a conversation continues: as few of the oldest `droppable` groups as possible are dropped.

    Args:
        serving: The model and its engine.
        items: The whole conversation, valid.
        chat_of: Makes the request for the items at some places.

    Returns:
        Places of items. Where all groups are dropped, the rest may still be too long.
    """
    groups, sizes = droppable(items), list(map(characters, items))

    def kept(count: int) -> list[int]:
        dropped = {i for group in groups[:count] for i in group}
        return [i for i in range(len(items)) if i not in dropped]

    async def fits(count: int) -> bool:
        chat = await chat_of(kept(count))
        try:
            talk = await converse(serving, chat.messages, tools_in_use(chat), chat)
            serving.check_room(talk.prompt, chat.max_completion_tokens, "messages")
        except TooLongError:
            return False
        return True

    # Groups are dropped without rendering while the conversation exceeds the limits of any request.
    low, size, count = 0, sum(sizes), len(items)
    while low < len(groups) and (size > serving.texts.most_cut or count > serving.limits.objects):
        size, count = size - sum(sizes[i] for i in groups[low]), count - len(groups[low])
        low += 1
    high = len(groups)
    if low == high or await fits(low):
        return kept(low)
    low += 1
    while low < high:
        middle = (low + high) // 2
        if await fits(middle):
            high = middle
        else:
            low = middle + 1
    return kept(low)

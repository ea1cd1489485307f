"""A conversation on its way to the model and back: messages → prompt, text → reasoning, content and calls."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_jax.errors import InputError
from dflash_jax.frontend.sequence import Piece, TextSequence
from dflash_jax.frontend.tokenizer import RESERVED
from dflash_jax.server import chat_schema
from dflash_jax.server.errors import ApiError, TooLongError
from dflash_jax.server.reasoning import CLOSE, OPEN, ReasoningSplitter, is_open
from dflash_jax.server.serving import Serving
from dflash_jax.server.tools import CallDelta, ToolParser, is_xml


@dataclass
class Delta:
    """What a piece of text turns out to be."""

    reasoning: str
    content: str
    calls: list[CallDelta]


class Parser:
    """Text of a choice → reasoning, content and calls, as it arrives. ``has_one_call``: further ones are left out.

    Attributes:
        reasoning_tokens: Tokens of the reasoning so far, whatever is shown of it.
    """

    def __init__(
        self,
        is_thinking: bool,
        tools: ToolParser | None,
        shown: chat_schema.ShownReasoning = "stream",
        has_one_call: bool = False,
    ):
        self._splitter, self._tools, self._shown = ReasoningSplitter(is_thinking), tools, shown
        self._has_one_call = has_one_call
        # Reasoning that is not shown yet, and text of which it is not known yet whether it is reasoning.
        self._reasoning = self._undecided = ""
        self.reasoning_tokens = 0

    def push(self, piece: Piece) -> Delta:
        reasoning, content = self._split(piece)
        if self._shown == "content":
            text = self._undecided + piece.text
            self._undecided = "" if self._splitter.is_reasoning or self._splitter.is_content else text
            # The content is the end of the text. What is before it is shown as it is, its tags included.
            verbatim = "" if self._undecided else text[: len(text) - len(content)]
            delta = self._parsed("", content)
            delta.content = verbatim + delta.content
            return delta
        return self._parsed(self._due(reasoning, is_ended=self._splitter.is_content), content)

    def _due(self, reasoning: str, is_ended: bool) -> str:
        """What is shown now of the reasoning, of which ``reasoning`` is new."""
        if self._shown == "stream":
            return reasoning
        if self._shown != "whole":
            return ""
        self._reasoning += reasoning
        if not is_ended:
            return ""
        due, self._reasoning = self._reasoning, ""
        return due

    def _split(self, piece: Piece) -> tuple[str, str]:
        """(reasoning, content) of a piece, and counts tokens of reasoning."""
        reasoning, at = "", 0
        # A thought ends at a token, and may do so inside of a piece.
        for end in piece.ends:
            if self._splitter.is_content:
                break
            was_reasoning = self._splitter.is_reasoning
            thought, content = self._splitter.push(piece.text[at:end])
            self.reasoning_tokens += was_reasoning or self._splitter.is_reasoning
            reasoning, at = reasoning + thought, end
            if content:
                return reasoning, content + self._splitter.push(piece.text[at:])[1]
        thought, content = self._splitter.push(piece.text[at:])
        return reasoning + thought, content

    def finish(self, row: TextSequence) -> Delta:
        reasoning, content = self._splitter.finish()
        delta = self._parsed(self._due(reasoning, is_ended=True), content)
        if self._tools is not None:
            last = self._tools.finish(is_cut=row.request.finish_reason == "length" or isinstance(row.matched, str))
            delta.content += last.content
            delta.calls += self._wanted(last.calls)
        return delta

    def _parsed(self, reasoning: str, content: str) -> Delta:
        if self._tools is None:
            return Delta(reasoning, content, [])
        found = self._tools.push(content)
        return Delta(reasoning, found.content, self._wanted(found.calls))

    def _wanted(self, calls: list[CallDelta]) -> list[CallDelta]:
        return [call for call in calls if call.index == 0] if self._has_one_call else calls

    def reason(self, row: TextSequence) -> str:
        called = self._tools is not None and self._tools.count
        return "tool_calls" if called and row.request.finish_reason == "stop" else row.request.finish_reason


class FirstCall:
    """Ends a text behind its first call, or behind a later one where min_tokens lets it go on; ``ends`` of a
    `TextSequence`."""

    def __init__(self, is_thinking: bool, tools: ToolParser):
        self._splitter, self._tools = ReasoningSplitter(is_thinking), tools

    def __call__(self, text: str) -> bool:
        self._tools.push(self._splitter.push(text)[1])
        return self._tools.is_behind_call


@dataclass
class Conversation:
    """A conversation as token ids, and how to read what follows."""

    prompt: list[int]
    thought: str
    tools: dict[str, dict]
    xml: bool
    # What the answer begins with.
    echoed: str = ""
    # Whether the answer must be calls.
    is_forced: bool = False
    # Whether it has one call at most, behind which it ends.
    has_one_call: bool = False

    def parser(self, shown: chat_schema.ShownReasoning = "stream") -> Parser:
        return Parser(self.thought == "open", self._tool_parser(), shown, self.has_one_call)

    def ends(self) -> FirstCall | None:
        """Where a choice ends, beside its stops; one for each choice."""
        tools = self._tool_parser() if self.has_one_call else None
        return None if tools is None else FirstCall(self.thought == "open", tools)

    def _tool_parser(self) -> ToolParser | None:
        return ToolParser(self.xml, self.tools, self.is_forced) if self.tools else None


def text_of(content: str | list[chat_schema.Part] | None, where: str) -> str:
    """Text parts joined; a refusal is text too. Raises ApiError for others."""
    if isinstance(content, str) or content is None:
        return content or ""
    texts = []
    for i, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "input_text", "output_text", "refusal") or text is None:
            name = f"{where}.content[{i}].type"
            raise ApiError(400, f"{name} is {part.type!r}: only text is possible, images and video are not", name)
        texts.append(text)
    return "".join(texts)


def as_template(messages: Sequence[chat_schema.Message]) -> list[dict]:
    """Messages as chat templates read them."""
    found = []
    for i, m in enumerate(messages):
        message = {
            "role": "system" if m.role == "developer" else m.role,
            "content": text_of(m.refusal if m.content is None else m.content, f"messages[{i}]"),
        }
        if (thought := m.reasoning_content or m.reasoning) is not None:
            message["reasoning_content"] = thought
        if m.tool_call_id is not None:
            message["tool_call_id"] = m.tool_call_id
        if m.name is not None:
            message["name"] = m.name
        if m.tool_calls:
            message["tool_calls"] = [_call(c, f"messages[{i}].tool_calls[{j}]") for j, c in enumerate(m.tool_calls)]
        found.append(message)
    return found


def _check_arguments(messages: Sequence[chat_schema.Message], most: int) -> None:
    """Raises ApiError where calls' arguments, JSON inside of the body's JSON, may have more than ``most`` values."""
    given = (call.function.arguments for m in messages for call in m.tool_calls or ())
    if sum(text.count(mark) for text in given if isinstance(text, str) for mark in ",[{") > most:
        raise TooLongError(f"messages: the arguments of calls have more than {most} values", "messages")


def _call(call: chat_schema.Call, where: str) -> dict:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            # It came broken from a model: the template shows it as it was.
            arguments = call.function.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def check_parameters(schema: dict, where: str) -> None:
    """A tool's parameters are an object's, under names that both formats of calls can write."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if schema.get("type", "object") != "object":
        raise ApiError(400, f"{where}.type is {schema['type']!r}: it must be object", f"{where}.type")
    if not isinstance(properties, dict) or any(">" in name or "\n" in name for name in properties):
        raise ApiError(400, f"{where}.properties must be an object, its names without > and newlines", where)
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ApiError(400, f"{where}.required must be a list of names", f"{where}.required")


def template_options(serving: Serving, body: chat_schema.Templated, messages: Sequence[chat_schema.Message]) -> dict:
    """What `Templates.render` takes beside messages and tools."""
    options = body.template_options
    if reserved := RESERVED & set(options):
        name = f"chat_template_kwargs.{min(reserved)}"
        raise ApiError(400, f"{name} is not an option of the template", name)
    if body.chat_template is not None:
        if not serving.limits.trust_request_chat_template:
            message = "chat_template is not taken from requests: the server runs without --trust-request-chat-template"
            raise ApiError(400, message, "chat_template")
        options["template"] = body.chat_template
    if body.continue_final_message:
        if body.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt are both true: give one of them"
            raise ApiError(400, message, "continue_final_message")
        if messages[-1].role != "assistant":
            message = f"continue_final_message: the last message is of the role {messages[-1].role}, not assistant"
            raise ApiError(400, message, "continue_final_message")
        options["continue_final_message"] = True
    options["ask"] = body.add_generation_prompt is not False and not body.continue_final_message
    return options


async def converse(
    serving: Serving,
    messages: Sequence[chat_schema.Message],
    tools: Sequence[chat_schema.Tool] | None,
    body: chat_schema.Templated,
) -> Conversation:
    """Renders a conversation as ``body`` wants it, and tokenises it."""
    tokenizer = serving.llm.tokenizer
    if tokenizer is None:
        raise ApiError(400, "this checkpoint has no tokenizer, so it has no chat template: use token ids", "messages")
    if len(tools or ()) > serving.limits.tools:
        raise ApiError(400, f"{len(tools)} tools: at most {serving.limits.tools} are possible", "tools")
    for i, tool in enumerate(tools or ()):
        check_parameters(tool.function.parameters or {}, f"tools[{i}].function.parameters")
    given = [t.model_dump(exclude_none=True) for t in tools or ()] or None
    _check_arguments(messages, serving.limits.values)
    options, conversation = template_options(serving, body, messages), as_template(messages)
    try:
        text = await serving.templates.render(conversation, given, **options)
        is_truncated = isinstance(body, chat_schema.ChatRequest) and body.truncate_prompt_tokens is not None
        ids = await serving.texts.encode(text, "messages", is_truncated=is_truncated)
        # Before it is truncated, it may be too long to be checked here.
        prompt = await serving.texts.prompt(ids, "messages", is_truncated=True)
    except InputError as e:
        raise ApiError(400, str(e), "messages") from None
    template = body.chat_template or tokenizer.chat_template or ""
    if body.continue_final_message:
        content = conversation[-1]["content"]
        thought = "open" if content.rfind(OPEN) > content.rfind(CLOSE) else "none"
    else:
        closed = text.rstrip().endswith(CLOSE)
        thought = "open" if is_open(text) else "possible" if OPEN in template and not closed else "none"
    schemas = {t.function.name: t.function.parameters or {} for t in tools or ()}
    return Conversation(prompt, thought, schemas, is_xml(template))

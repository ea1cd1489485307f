"""Conversations as prompts, and generated text as reasoning, content and calls."""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dflash_jax.errors import InputError
from dflash_jax.frontend.messages import template_messages
from dflash_jax.frontend.reasoning import ReasoningSplitter, is_cut_in_thought, is_open
from dflash_jax.frontend.sequence import Piece, TextSequence
from dflash_jax.frontend.tokenizer import RESERVED
from dflash_jax.media.parts import MediaPart
from dflash_jax.protocol import CallEnd
from dflash_jax.sampling_params import CLOSE, OPEN
from dflash_jax.server import chat_schema
from dflash_jax.server.answer_splitter import AnswerSplitter, call_at_end
from dflash_jax.server.content import has_media, text_of, with_media
from dflash_jax.server.errors import ApiError, TooLongError
from dflash_jax.server.media import PlacedMedia
from dflash_jax.server.serving import Serving
from dflash_jax.server.tool_values import parameters_of
from dflash_jax.server.tools import CallDelta, ToolParser, syntax_of


@dataclass
class Delta:
    """The parts of a piece of text.

    Attributes:
        reasoning: Text of the reasoning.
        content: Text of the answer.
        calls: Pieces of tool calls.
    """

    reasoning: str
    content: str
    calls: list[CallDelta]

    def parts(self) -> Iterator[tuple[str, str, CallDelta | None]]:
        """Yields (kind, text, call) of each part in order; the kind is "call", "reasoning" or "content".

        Arguments of a call that has begun precede reasoning and content; new calls follow.
        """
        first_new = next((i for i, call in enumerate(self.calls) if call.name is not None), len(self.calls))
        yield from (("call", call.arguments, call) for call in self.calls[:first_new])
        yield from ((k, text, None) for k, text in (("reasoning", self.reasoning), ("content", self.content)) if text)
        yield from (("call", call.arguments, call) for call in self.calls[first_new:])


class GrowingItems(ABC):
    """The items of an answer as they grow (thoughts, texts and calls), and the events that report them.

    Attributes:
        items: The items so far.
    """

    def __init__(self):
        self.items: list[dict] = []
        # The kind of the item that grows, as of `Delta.parts`, and the parts of its text or arguments.
        self._kind: str | None = None
        self._texts: list[str] = []

    def take(self, delta: Delta) -> list[dict]:
        """Adds a piece, and returns its events."""
        events = []
        for kind, text, call in delta.parts():
            if kind != self._kind or (call is not None and call.name is not None):
                events += self.close()
                self._kind, self._texts = kind, []
                events += self._begun(kind, call)
            if text:
                self._texts.append(text)
                events += self._grown(kind, text)
        return events

    def close(self, status: str = "completed") -> list[dict]:
        """Ends the item that grows, and returns its events."""
        kind, self._kind = self._kind, None
        return [] if kind is None else self._ended(kind, "".join(self._texts), status)

    @abstractmethod
    def _begun(self, kind: str, call: CallDelta | None) -> list[dict]:
        """Adds an item. Events get copies of it, since it still grows."""

    @abstractmethod
    def _grown(self, kind: str, text: str) -> list[dict]:
        """The events of the next text of the last item."""

    @abstractmethod
    def _ended(self, kind: str, text: str, status: str) -> list[dict]:
        """Completes the last item with its whole text."""


class Parser:
    """Splits the text of a choice into reasoning, content and calls while it arrives.

    Attributes:
        reasoning_tokens: Tokens of the reasoning so far, shown or not.
    """

    def __init__(
        self,
        is_thinking: bool,
        tools: ToolParser | None,
        shown: chat_schema.ShownReasoning = "stream",
        has_one_call: bool = False,
        openings: Sequence[int] | None = None,
    ):
        """Prepares a parser.

        Args:
            is_thinking: Whether the prompt opened a thought.
            tools: Parser of calls; None without tools.
            shown: How reasoning is shown.
            has_one_call: Whether calls after the first one are left out.
            openings: The tokens one of which begins the text if that has a thought, whatever the text of another one
                is; None where the text alone decides.
        """
        self._openings = None if is_thinking else openings
        self._splitter = ReasoningSplitter(is_thinking) if tools is None else AnswerSplitter(is_thinking, tools.schemas)
        self._tools, self._shown = tools, shown
        # All reasoning, where a call may end it.
        self._thoughts: list[str] = []
        self._has_one_call = has_one_call
        # Reasoning that is not shown yet, and text that may still turn out to be reasoning.
        self._reasoning = self._undecided = ""
        self.reasoning_tokens = 0

    def push(self, piece: Piece) -> Delta:
        """Parses the next piece."""
        if self._openings is not None and piece.token_ids:
            if piece.token_ids[0] not in self._openings:
                self._splitter.begin_content()
            self._openings = None
        reasoning, content = self._split(piece)
        if self._shown == "content":
            text = self._undecided + piece.text
            self._undecided = "" if self._splitter.is_reasoning or self._splitter.is_content else text
            # The content is the end of the text. The text before it is shown verbatim, with its tags.
            verbatim = "" if self._undecided else text[: len(text) - len(content)]
            delta = self._parsed("", content)
            delta.content = verbatim + delta.content
            return delta
        return self._parsed(self._due(reasoning, is_ended=self._splitter.is_content), content)

    def _due(self, reasoning: str, is_ended: bool) -> str:
        """The reasoning to show now; ``reasoning`` is its new part."""
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
        """(reasoning, content) of a piece; counts tokens of reasoning."""
        reasoning, at = "", 0
        # A thought ends at a token, which may be inside a piece.
        for end in piece.ends:
            if self._splitter.is_content:
                break
            was_reasoning = self._splitter.is_reasoning
            thought, content = self._splitter.push(piece.text[at:end])
            self._keep(thought)
            self.reasoning_tokens += was_reasoning or self._splitter.is_reasoning
            reasoning, at = reasoning + thought, end
            if content:
                return reasoning, content + self._splitter.push(piece.text[at:])[1]
        thought, content = self._splitter.push(piece.text[at:])
        self._keep(thought)
        return reasoning + thought, content

    def _keep(self, thought: str) -> None:
        if self._tools is not None and thought:
            self._thoughts.append(thought)

    def finish(self, sequence: TextSequence) -> Delta:
        """Parses the end of the text."""
        is_open, (reasoning, content) = self._splitter.is_reasoning, self._splitter.finish()
        delta = self._parsed(self._due(reasoning, is_ended=True), content)
        if self._tools is not None:
            is_cut = sequence.request.finish_reason == "length" or isinstance(sequence.matched, str)
            last = self._tools.finish(is_cut)
            if is_open and not is_cut:
                last = call_at_end("".join(self._thoughts) + reasoning, self._tools.schemas)
                self._tools.count += len({call.index for call in last.calls})
            delta.content += last.content
            delta.calls += self._allowed_calls(last.calls)
        return delta

    def _parsed(self, reasoning: str, content: str) -> Delta:
        if self._tools is None:
            return Delta(reasoning, content, [])
        parsed = self._tools.push(content)
        return Delta(reasoning, parsed.content, self._allowed_calls(parsed.calls))

    def _allowed_calls(self, calls: list[CallDelta]) -> list[CallDelta]:
        return [call for call in calls if call.index == 0] if self._has_one_call else calls

    def reason(self, sequence: TextSequence) -> str | None:
        """OpenAI's finish_reason of a sequence; None while it has not ended."""
        called = self._tools is not None and self._tools.count
        return "tool_calls" if called and sequence.request.finish_reason == "stop" else sequence.request.finish_reason


@dataclass
class Conversation:
    """A conversation as token ids, and how to parse its answer.

    Attributes:
        prompt: Token ids.
        thought: Where reasoning stands when the answer begins: "open", "possible" or "none".
        tools: Schemas of the tools' parameters by name.
        syntax: How the model writes calls, as `Serving.call_syntax`.
        echoed: Text that the answer begins with.
        is_forced: Whether the answer must consist of calls.
        has_one_call: Whether the answer ends after its first call.
        only_at_start: As of `ToolParser`.
        openings: As of `Parser`.
        customs: Names of custom tools.
        media: Images and videos of the prompt; None for text.
    """

    prompt: list[int]
    thought: str
    tools: dict[str, dict]
    syntax: str
    echoed: str = ""
    is_forced: bool = False
    has_one_call: bool = False
    only_at_start: bool = False
    openings: tuple[int, ...] | None = None
    customs: frozenset[str] = frozenset()
    media: PlacedMedia | None = None

    def parser(self, shown: chat_schema.ShownReasoning = "stream") -> Parser:
        """A parser for one choice."""
        options = {"is_forced": self.is_forced, "only_at_start": self.only_at_start}
        tools = ToolParser(self.tools, is_bare=self.syntax == "bare", **options) if self.tools else None
        return Parser(self.thought == "open", tools, shown, self.has_one_call, self.openings)

    def ends(self) -> CallEnd | None:
        """The end condition of a choice beside its stop strings; None without one."""
        if not self.has_one_call or not self.tools:
            return None
        is_bare, tools = self.syntax == "bare", json.dumps(self.tools)
        return CallEnd(self.thought == "open", is_bare, tools, self.is_forced, self.only_at_start)


def as_template(messages: Sequence[chat_schema.Message], takes_media: bool) -> tuple[list[dict], list[MediaPart]]:
    """Messages in the form that chat templates read, and their images and videos.

    Args:
        messages: The messages. Messages of the assistant are text.
        takes_media: Whether messages of other roles may have images and videos.

    Raises:
        ApiError: A part of a message is wrong.
    """
    converted, media = [], []
    for i, m in enumerate(messages):
        parts, where = m.refusal if m.content is None else m.content, f"messages[{i}]"
        content: str | list[dict]
        if takes_media and m.role != "assistant" and isinstance(parts, list) and has_media(parts):
            content, added = with_media(parts, where)
            media += added
        else:
            content = text_of(parts, where)
        converted.append(
            {
                "role": "system" if m.role == "developer" else m.role,
                "content": content,
                "reasoning_content": m.reasoning_content or m.reasoning,
                "tool_call_id": m.tool_call_id,
                "name": m.name,
                "tool_calls": [call.model_dump(exclude={"index"}) for call in m.tool_calls or ()] or None,
            }
        )
    return template_messages(converted), media


def check_parameters(schema: dict, where: str) -> None:
    """Checks that a tool's parameters are an object whose names both formats of calls can write.

    Raises:
        ApiError: They are not.
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if schema.get("type", "object") != "object":
        raise ApiError(400, f"{where}.type is {schema['type']!r}: it must be object", f"{where}.type")
    if not isinstance(properties, dict) or any(">" in name or "\n" in name for name in parameters_of(schema)[0]):
        raise ApiError(400, f"{where}.properties must be an object, its names without > and newlines", where)
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ApiError(400, f"{where}.required must be a list of names", f"{where}.required")


def template_options(serving: Serving, body: chat_schema.Templated, messages: Sequence[chat_schema.Message]) -> dict:
    """Arguments of `Templates.render` beside messages and tools.

    Raises:
        ApiError: An option is invalid or not allowed here.
    """
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
    """Renders and tokenises a conversation, and reads its images and videos.

    Args:
        serving: The model and its engine.
        messages: The messages.
        tools: The tools that the template shows.
        body: The request, for the template's options.

    Raises:
        ApiError: The template refuses the conversation, or it is too long, or an image or a video cannot be read.
    """
    tokenizer, templates = serving.llm.tokenizer, serving.templates
    if tokenizer is None or templates is None:
        raise ApiError(400, "this checkpoint has no tokenizer, so it has no chat template: use token ids", "messages")
    # Clients defer tools where they have many.
    shown = sum(not tool.defer_loading for tool in tools or ())
    if shown > serving.limits.tools:
        raise ApiError(400, f"{shown} tools: at most {serving.limits.tools} are possible", "tools")
    tool_schemas = []
    async for i, tool in serving.in_steps(enumerate(tools or ())):
        check_parameters(tool.function.parameters or {}, f"tools[{i}].function.parameters")
        if not tool.defer_loading:
            tool_schemas.append(tool.model_dump(exclude_none=True))
    # The arguments of calls are JSON inside the body's JSON.
    arguments, most = [call.function.arguments for m in messages for call in m.tool_calls or ()], serving.limits.values
    if sum(text.count(mark) for text in arguments if isinstance(text, str) for mark in ",[{") > most:
        raise TooLongError(f"messages: the arguments of calls have more than {most} values", "messages")
    options = template_options(serving, body, messages)
    conversation, parts = as_template(messages, serving.media is not None)
    is_truncated = isinstance(body, chat_schema.ChatRequest) and body.truncate_prompt_tokens is not None
    if parts and is_truncated:
        name = "truncate_prompt_tokens"
        raise ApiError(400, f"{name} is not possible with images and videos", name)
    try:
        # A step of its own.
        await asyncio.sleep(0)
        text = await templates.render(conversation, tool_schemas or None, **options)
        ids = await serving.texts.encode(text, "messages", is_truncated=is_truncated)
        # Not checked for length: the prompt may be truncated later.
        prompt = await serving.texts.prompt(ids, "messages", is_truncated=True)
    except InputError as e:
        raise ApiError(400, str(e), "messages") from None
    media = None
    if parts and serving.media is not None:
        prompt, media = await serving.media.placed(prompt, parts, "messages")
    template = body.chat_template or tokenizer.chat_template or ""
    if body.continue_final_message:
        content = conversation[-1]["content"]
        thought = "open" if is_cut_in_thought(content) else "none"
    else:
        closed = text.rstrip().endswith(CLOSE)
        is_begun = is_open(text) or (serving.begins_in_thought and not closed)
        thought = "open" if is_begun else "possible" if OPEN in template and not closed else "none"
    schemas = {t.function.name: t.function.parameters or {} for t in tools or ()}
    return Conversation(prompt, thought, schemas, serving.call_syntax or syntax_of(template), media=media)

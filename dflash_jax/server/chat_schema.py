"""Fields of chat requests: OpenAI's interface with the additions of vLLM and SGLang.

Requests to other interfaces are converted to them.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, ValidationError, model_validator

from dflash_jax.server.schema import OpenAiSampling, ResponseFormat, ThinkingBudget
from dflash_jax.server.schema_base import (
    Body,
    Effort,
    Items,
    Json,
    Lenient,
    Open,
    Strict,
    check_neutral,
    neutral_table,
    wrong,
)
from dflash_jax.server.tools import INPUT

# Fields of a message without effect.
NEUTRAL = neutral_table("message")
# How reasoning is shown: as it arrives, in one piece at its end, as part of the content, or not at all.
ShownReasoning = Literal["stream", "whole", "content", "none"]


class Function(Lenient):
    """A function that the model may call."""

    # Claude Code names tools of its servers by up to 128 characters.
    name: str = Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class InputGrammar(Lenient):
    """What the input of a custom tool follows."""

    syntax: Literal["lark", "regex"]
    definition: str = Field(min_length=1)


class InputFormat(Lenient):
    """The form of a custom tool's input: a grammar, of its own in chats, flat in responses, or any text."""

    type: Literal["text", "grammar"]
    grammar: InputGrammar | None = None

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("type") == "grammar" and given.get("grammar") is None:
            given = given | {"grammar": {name: given[name] for name in ("syntax", "definition") if name in given}}
        return given


class CustomTool(Function):
    """A custom tool: its one argument is a text."""

    format: InputFormat | None = None

    @property
    def grammar(self) -> Json | None:
        """What its input follows; None for any text."""
        if self.format is None or self.format.type != "grammar" or self.format.grammar is None:
            return None
        return self.format.grammar.model_dump()

    def as_function(self) -> Json:
        """The function as which models know it."""
        described, grammar = self.description or "", self.grammar
        if grammar is not None:
            described += f"\n\nThe {INPUT} has this form ({grammar['syntax']}):\n{grammar['definition']}"
        parameters = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
        return {"name": self.name, "description": described, "parameters": parameters}


class Tool(Lenient):
    """A function, or a custom tool with the function as which models know it."""

    type: Literal["function"]
    function: Function
    custom: CustomTool | None = Field(None, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _converted(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("type") == "custom":
            custom = checked_custom(given.get("custom"))
            return {"type": "function", "function": custom.as_function(), "custom": custom}
        return given | {"custom": None} if isinstance(given, dict) else given


def checked_custom(given: Any) -> CustomTool:
    """A custom tool of a request.

    Raises:
        PydanticCustomError: It is invalid.
    """
    try:
        return CustomTool.model_validate(given)
    except ValidationError as e:
        first = e.errors()[0]
        raise wrong(".".join(map(str, ("custom", *first["loc"]))), first["msg"]) from None


class FunctionName(Strict):
    """The name of a function."""

    name: str


class NamedTool(Strict):
    """A tool by its name."""

    type: Literal["function", "custom"]
    function: FunctionName

    @model_validator(mode="before")
    @classmethod
    def _converted(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("type") == "custom" and "custom" in given:
            return {"type": "custom", "function": given["custom"]}
        return given


class AllowedTools(Strict):
    """Tools that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: Items[NamedTool] = Field(min_length=1)


class AllowedToolsChoice(Strict):
    """A choice of tools that the model may call among those that it sees."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = (
    Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedToolsChoice, Field(discriminator="type")]
)


class CalledFunction(Lenient):
    """A called function."""

    name: str
    arguments: str | Json


class Call(Lenient):
    """A tool call. One of a custom tool is read as one of a function."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _converted(cls, given: Any) -> Any:
        custom = given.get("custom") if isinstance(given, dict) and given.get("type") == "custom" else None
        if isinstance(given, dict) and isinstance(custom, dict):
            function = {"name": custom.get("name"), "arguments": {INPUT: custom.get("input") or ""}}
            return given | {"type": "function", "function": function}
        return given


class Part(Open):
    """A part of a message: text, a refusal, an image or a video. Others are refused by name."""

    type: str
    text: str | None = None
    refusal: str | None = None
    # Its name in errors, where a request to another interface was converted.
    _where: str | None = PrivateAttr(None)

    @property
    def where(self) -> str | None:
        """Its name in errors; None where that follows from its place."""
        return self._where

    def named(self, where: str) -> Self:
        """This part, which has the name ``where`` in errors."""
        self._where = where
        return self


class Message(Lenient):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Items[Call] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _checked(cls, given: Any) -> Any:
        if isinstance(given, dict):
            for name, allowed in NEUTRAL.items():
                check_neutral(name, allowed, given.get(name))
            if given.get("content") is None and given.get("role") in ("system", "developer", "user", "tool"):
                raise wrong("content", "must be a string or a list of parts")
        return given


class ReasoningOptions(Strict):
    """How much to think, in OpenRouter's and SGLang's form."""

    effort: Effort | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    max_tokens: None = None


class Templated(Body):
    """Fields that affect the rendering of a conversation, beside its messages and tools."""

    chat_template: str | None = Field(None, max_length=65536)
    chat_template_kwargs: Json | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    reasoning_effort: Effort | None = None
    reasoning: ReasoningOptions | None = None
    enable_thinking: bool | None = None

    @property
    def template_options(self) -> Json:
        """Variables of the template. ``chat_template_kwargs`` has precedence, then ``enable_thinking``."""
        reasoning = self.reasoning or ReasoningOptions()
        effort = self.reasoning_effort or reasoning.effort
        options: Json = {}
        if effort is not None:
            options |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        for is_thinking in (reasoning.enabled, self.enable_thinking):
            if is_thinking is not None:
                options["enable_thinking"] = is_thinking
        return options | (self.chat_template_kwargs or {})


class ChatRequest(OpenAiSampling, Templated):
    """``/v1/chat/completions``."""

    neutral = neutral_table("chat")

    messages: Items[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    # Whether the answer begins with the assistant's message at the end of the conversation.
    echo: bool = False
    response_format: ResponseFormat | None = None
    tools: Items[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    return_prompt_token_ids: bool = False
    # The second name is Qwen's.
    thinking_token_budget: ThinkingBudget = None
    thinking_budget: ThinkingBudget = None
    # Whether no text ends inside its thought, or without an answer; None: as the server does.
    require_answer: bool | None = None
    # SGLang's and vLLM's fields for showing reasoning.
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    include_reasoning: bool = True

    @property
    def must_call(self) -> bool:
        """Whether the answer must be calls."""
        choice = self.tool_choice
        if isinstance(choice, AllowedToolsChoice):
            return choice.allowed_tools.mode == "required"
        return choice not in (None, "none", "auto")

    @property
    def shown_reasoning(self) -> ShownReasoning:
        """How reasoning is shown."""
        if not self.include_reasoning or (self.reasoning is not None and self.reasoning.exclude):
            return "none"
        if not self.separate_reasoning:
            return "content"
        return "stream" if self.stream_reasoning else "whole"


class ChatBatchRequest(ChatRequest):
    """``/v1/chat/completions/batch``, vLLM's endpoint: several conversations."""

    messages: Items[Annotated[Items[Message], Field(min_length=1)]] = Field(min_length=1)


class TokenizeRequest(Templated):
    """``/tokenize``, vLLM's endpoint: a prompt or a conversation."""

    neutral = neutral_table("tokenize")

    model: str | None = None
    prompt: str | None = None
    messages: Items[Message] | None = None
    tools: Items[Tool] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

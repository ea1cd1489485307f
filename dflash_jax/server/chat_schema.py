"""Fields of chat requests: OpenAI's interface with the additions of vLLM and SGLang.

Requests to other interfaces are converted to them.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, ValidationError, field_validator, model_validator

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
    """A function, or a custom tool with the function as which models know it.

    One with ``defer_loading`` may be called, and the template does not show it: the conversation does.
    """

    type: Literal["function"]
    function: Function
    custom: CustomTool | None = Field(default=None, exclude=True)
    defer_loading: bool | None = Field(default=None, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _converted(cls, given: Any) -> Any:
        """Takes a custom tool, and a function without its envelope, as /v1/responses and /v1/messages have it."""
        if not isinstance(given, dict):
            return given
        if given.get("type") == "custom":
            custom = checked_custom(given.get("custom"))
            return {"type": "function", "function": custom.as_function(), "custom": custom}
        is_flat = "function" not in given and isinstance(given.get("name"), str)
        if not is_flat or given.get("type", "function") != "function":
            return given | {"custom": None}
        parameters = given.get("parameters", given.get("input_schema"))
        return {"type": "function", "function": {**given, "parameters": parameters}}


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


class FunctionName(Lenient):
    """The name of a function. Some clients send the whole function."""

    name: str


class NamedTool(Lenient):
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
# Other servers' words for choices of tools.
CHOICES = {"any": "required"}


def openais_choice(choice: Any) -> Any:
    """A choice of tools in OpenAI's form, of another server's: a word as a type, a name beside the type."""
    if not isinstance(choice, dict):
        return CHOICES.get(choice, choice) if isinstance(choice, str) else choice
    kind, name = choice.get("type"), choice.get("name")
    if kind in ("auto", "none", "required", "any"):
        return CHOICES.get(kind, kind)
    if kind in ("tool", "function", None) and isinstance(name, str) and "function" not in choice:
        return {"type": "function", "function": {"name": name}}
    return choice


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
    # Mistral's and Qwen's names for a message of the assistant that is continued.
    prefix: bool | None = None
    partial: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _checked(cls, given: Any) -> Any:
        if isinstance(given, dict):
            # OpenAI's older form of calls and their results, which had no ids.
            call, name = given.get("function_call"), given.get("name")
            if isinstance(call, dict) and not given.get("tool_calls"):
                if not isinstance(call.get("name"), str):
                    raise wrong("function_call", "must have a name that is a string")
                given = given | {"tool_calls": [{"id": call["name"], "function": call}]}
            if given.get("role") == "function":
                given = given | {"role": "tool", "tool_call_id": name}
            for name, allowed in NEUTRAL.items():
                check_neutral(name, allowed, given.get(name))
            if given.get("content") is None and given.get("role") in ("system", "developer", "user", "tool"):
                raise wrong("content", "must be a string or a list of parts")
        return given

    @property
    def is_begun(self) -> bool:
        """Whether it is a message of the assistant that says by itself that it is continued."""
        return self.role == "assistant" and bool(self.prefix or self.partial)


class ReasoningOptions(Strict):
    """How much to think, in OpenRouter's and SGLang's form."""

    neutral = neutral_table("reasoning")

    effort: Effort | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    max_tokens: ThinkingBudget = None


class Thinking(Strict):
    """Whether and how much to think, in Anthropic's form, which other clients have, too.

    ``display`` "omitted" leaves the text of thoughts out of the answers of /v1/messages. ``clear_thinking`` false (of
    GLM) and ``keep`` "all" (of Kimi) keep earlier thoughts in the conversation.
    """

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: int | None = None
    display: str | None = None
    clear_thinking: bool | None = None
    keep: str | None = None

    @property
    def budget(self) -> int | None:
        """Most tokens of the thought; None for any number. With other types than enabled it is the model's choice."""
        return self.budget_tokens if self.type == "enabled" else None

    @property
    def preserves(self) -> bool:
        """Whether earlier thoughts are asked for."""
        return self.clear_thinking is False or self.keep == "all"


class Templated(Body):
    """Fields that affect the rendering of a conversation, beside its messages and tools."""

    chat_template: str | None = Field(None, max_length=65536)
    chat_template_kwargs: Json | None = None
    # Baseten's and Dynamo's name.
    chat_template_args: Json | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    reasoning_effort: Effort | None = None
    reasoning: ReasoningOptions | None = None
    enable_thinking: bool | None = None
    # Whether earlier thoughts stay in the conversation.
    preserve_thinking: bool | None = None
    thinking: Thinking | None = None

    @property
    def template_options(self) -> Json:
        """Variables of the template. ``chat_template_kwargs`` has precedence, then ``enable_thinking``."""
        reasoning = self.reasoning or ReasoningOptions()
        effort = self.reasoning_effort or reasoning.effort
        options: Json = {}
        if effort is not None:
            options |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        thinking = self.thinking
        switches = (reasoning.enabled, None if thinking is None else thinking.type != "disabled", self.enable_thinking)
        if is_thinking := [switch for switch in switches if switch is not None]:
            options["enable_thinking"] = is_thinking[-1]
        if self.preserve_thinking is not None or (thinking is not None and thinking.preserves):
            options["preserve_thinking"] = self.preserve_thinking is not False
        return options | (self.chat_template_args or {}) | (self.chat_template_kwargs or {})


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
    # OpenAI's older form of both, whose answer has one call in a field of its own.
    functions: Items[Function] | None = None
    function_call: Literal["none", "auto"] | FunctionName | None = None
    parallel_tool_calls: bool | None = None
    return_prompt_token_ids: bool = False
    # vLLM's, Qwen's and llama.cpp's names.
    thinking_token_budget: ThinkingBudget = None
    thinking_budget: ThinkingBudget = None
    thinking_budget_tokens: ThinkingBudget = None
    # Whether no text ends inside its thought, or without an answer; None: as the server does.
    require_answer: bool | None = None
    # SGLang's and vLLM's fields for showing reasoning.
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    include_reasoning: bool = True
    _has_functions: bool = PrivateAttr(False)

    @field_validator("max_tokens", "max_completion_tokens", mode="before")
    @classmethod
    def _without_limit(cls, most: Any) -> Any:
        """-1 is no limit in llama.cpp and LM Studio."""
        return None if most == -1 and not isinstance(most, bool) else most

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _of_any_server(cls, choice: Any) -> Any:
        return openais_choice(choice)

    @model_validator(mode="after")
    def _with_todays_fields(self) -> Self:
        last = self.messages[-1]
        if isinstance(last, Message) and last.is_begun:
            self.continue_final_message = True
        if self.functions and not self.tools:
            self._has_functions, self.parallel_tool_calls = True, False
            self.tools = [Tool(type="function", function=function) for function in self.functions]
            if self.tool_choice is None:
                call = self.function_call
                is_named = isinstance(call, FunctionName)
                self.tool_choice = NamedTool(type="function", function=call) if is_named else call
        return self

    @property
    def has_functions(self) -> bool:
        """Whether the answer has OpenAI's older form of calls."""
        return self._has_functions

    @property
    def budgets(self) -> list[int | None]:
        """Most tokens of the thought, by all fields that say it."""
        options = (self.reasoning and self.reasoning.max_tokens, self.thinking and self.thinking.budget)
        return [self.thinking_token_budget, self.thinking_budget, self.thinking_budget_tokens, *options]

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

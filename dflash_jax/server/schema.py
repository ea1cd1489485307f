"""What requests may say: the fields of OpenAI's interface, vLLM's and SGLang's additions, and ours.

A field that is neither here nor in `neutral_fields` is refused, or, with ``--unknown-fields warn``, left out.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dflash_jax.server import neutral_fields
from dflash_jax.server.schema_base import Body, Effort, Items, Json, Lenient, RequestId, Salt, Strict, TokenId, wrong

# Reasoning as it comes, in one piece at its end, as part of the content, or not at all.
ShownReasoning = Literal["stream", "whole", "content", "none"]
# Tokens whose log-probabilities are wanted.
NamedTokens = Annotated[Items[TokenId], Field(max_length=20)]
# Tokens of the thought, -1 for any number.
ThinkingBudget = Annotated[int | None, Field(ge=-1)]


class StreamOptions(Strict):
    """``include_timings``: beside each usage, `answers.timings`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_timings: bool = False
    # Padding of OpenAI's streams: there is none here.
    include_obfuscation: bool = False


class Sampling(Body):
    """What all of them share. None: as the checkpoint says."""

    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    stop_token_ids: Items[TokenId] | None = Field(None, max_length=16)
    ignore_eos: bool = False
    regex: str | None = None
    ebnf: str | None = None
    stop_regex: str | Items[str] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    # SGLang's name of include_stop_str_in_output.
    no_stop_trim: bool | None = None
    bad_words: Items[str] | None = None
    allowed_token_ids: Items[TokenId] | None = Field(None, min_length=1)


class OpenAiSampling(Sampling):
    """``block_size``: tokens a round may yield, "auto" or a number; it does not change the text. return_drafts: with
    each piece of text, which part of it a draft brought."""

    model: str | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    n: int | None = Field(None, ge=1)
    stop: str | Items[str] | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    grammar: str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_json: Json | str | None = None
    guided_choice: Items[str] | None = None
    structured_outputs: Json | None = None
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=2**63 - 1)
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    request_id: RequestId | None = None
    rid: RequestId | None = None
    cache_salt: Salt | None = None
    block_size: int | Literal["auto"] | None = None
    return_drafts: bool = False
    return_token_ids: bool = False
    min_tokens: int | None = Field(None, ge=0)
    include_stop_str_in_output: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    logprob_token_ids: NamedTokens | None = None


class JsonSchema(Strict):
    name: str
    description: str | None = None
    schema_: Json | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class StructureTag(Strict):
    """A stretch of text in a form of its own, in structural_tag's older notation."""

    begin: str
    schema_: Json | bool = Field(alias="schema")
    end: str


class ResponseFormat(Strict):
    """structural_tag: the older notation has structures and triggers, the newer one format."""

    type: Literal["text", "json_object", "json_schema", "structural_tag", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    structures: Items[StructureTag] | None = None
    triggers: Items[str] | None = None
    format: Json | None = None


class Function(Lenient):
    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Lenient):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: Items[NamedTool] = Field(min_length=1)


class AllowedToolsChoice(Strict):
    """Of the tools that the model sees, those that it may call."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = (
    Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedToolsChoice, Field(discriminator="type")]
)


class CalledFunction(Lenient):
    name: str
    arguments: str | Json


class Call(Lenient):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Part(Lenient):
    """A part of a message. Others than text and refusals are known, to be refused by name."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Message(Lenient):
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
            for name, allowed in neutral_fields.MESSAGE.items():
                if not neutral_fields.accepts(allowed, given.get(name)):
                    raise wrong(name, neutral_fields.reason(name, allowed))
            if given.get("content") is None and given.get("role") in ("system", "developer", "user", "tool"):
                raise wrong("content", "must be a string or a list of parts")
        return given


class ReasoningOptions(Strict):
    """How much to think, as OpenRouter and SGLang write it."""

    effort: Effort | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    max_tokens: None = None


class Templated(Body):
    """What a conversation's rendering depends on, beside its messages and tools."""

    chat_template: str | None = Field(None, max_length=65536)
    chat_template_kwargs: Json | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    reasoning_effort: Effort | None = None
    reasoning: ReasoningOptions | None = None
    enable_thinking: bool | None = None

    @property
    def template_options(self) -> Json:
        """The template's variables. What ``chat_template_kwargs`` says goes first, then ``enable_thinking``."""
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
    neutral = neutral_fields.CHAT

    messages: Items[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    # The answer begins with the assistant's message that the conversation ends with.
    echo: bool = False
    response_format: ResponseFormat | None = None
    tools: Items[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    return_prompt_token_ids: bool = False
    # The second name is Qwen's.
    thinking_token_budget: ThinkingBudget = None
    thinking_budget: ThinkingBudget = None
    # SGLang's and vLLM's fields of what is shown of the reasoning.
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    include_reasoning: bool = True

    @property
    def shown_reasoning(self) -> ShownReasoning:
        if not self.include_reasoning or (self.reasoning is not None and self.reasoning.exclude):
            return "none"
        if not self.separate_reasoning:
            return "content"
        return "stream" if self.stream_reasoning else "whole"


class ChatBatchRequest(ChatRequest):
    """vLLM's ``/v1/chat/completions/batch``: several conversations."""

    messages: Items[Annotated[Items[Message], Field(min_length=1)]] = Field(min_length=1)


class CompletionRequest(OpenAiSampling):
    neutral = neutral_fields.COMPLETION

    prompt: str | Items[str] | Items[TokenId] | Items[Items[TokenId]]
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    response_format: ResponseFormat | None = None
    thinking_token_budget: ThinkingBudget = None


class ResponsesTool(Lenient):
    """A function in the responses interface, where it is flat."""

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class ResponsesToolName(Strict):
    type: Literal["function"]
    name: str


class ResponsesAllowedTools(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Items[ResponsesToolName] = Field(min_length=1)


ResponsesToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[ResponsesToolName | ResponsesAllowedTools, Field(discriminator="type")]
)


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Json | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Strict):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Strict):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class InputItem(BaseModel):
    """A message, a call, its output, or a thought: read in responses.py, which names what it does not know."""

    model_config = ConfigDict(extra="allow")

    type: str | None = None
    role: str | None = None
    content: str | Items[Part] | None = None


class ResponsesRequest(Sampling):
    neutral = neutral_fields.RESPONSES

    input: str | Items[InputItem]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    stream: bool | None = None
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
    # As in chat.
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: str | Items[str] | None = None
    logit_bias: dict[str, float] | None = None
    structured_outputs: Json | None = None
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    chat_template_kwargs: Json | None = None
    request_id: RequestId | None = None
    cache_salt: Salt | None = None
    min_tokens: int | None = Field(None, ge=0)
    include_stop_str_in_output: bool | None = None
    block_size: int | Literal["auto"] | None = None


class NativeSampling(Sampling):
    """SGLang's ``sampling_params``."""

    neutral = neutral_fields.SAMPLING

    # 0: only the prompt is read.
    max_new_tokens: int | None = Field(None, ge=0)
    stop: str | Items[str] | None = None
    n: int | None = Field(None, ge=1)
    min_new_tokens: int | None = Field(None, ge=0)
    json_schema: str | Json | None = None
    structural_tag: str | Json | None = None
    sampling_seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    logit_bias: dict[str, float] | None = None


class GenerateRequest(Body):
    """SGLang's ``/generate``."""

    neutral = neutral_fields.GENERATE

    text: str | Items[str] | None = None
    input_ids: Items[TokenId] | Items[Items[TokenId]] | None = None
    sampling_params: NativeSampling | Items[NativeSampling] | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = Field(None, ge=-1)
    top_logprobs_num: int | None = Field(None, ge=0, le=20)
    token_ids_logprob: NamedTokens | Items[NamedTokens] | None = None
    return_text_in_logprobs: bool | None = None
    # The text begins with reasoning, after which a grammar begins.
    require_reasoning: bool = False
    max_thinking_tokens: ThinkingBudget = None
    rid: RequestId | Items[RequestId] | None = None
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    cache_salt: Salt | Items[Salt] | None = None
    block_size: int | Literal["auto"] | None = None


class TokenizeRequest(Templated):
    """vLLM's ``/tokenize``: of a prompt, or of a conversation."""

    neutral = neutral_fields.TOKENIZE

    model: str | None = None
    prompt: str | None = None
    messages: Items[Message] | None = None
    tools: Items[Tool] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class AbortRequest(Strict):
    """SGLang's ``/abort_request``."""

    rid: str | None = None
    abort_all: bool = False


class DetokenizeRequest(Body):
    neutral = neutral_fields.DETOKENIZE

    model: str | None = None
    tokens: Items[TokenId]

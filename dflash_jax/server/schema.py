"""What requests may say: the fields of OpenAI's interface, vLLM's and SGLang's additions, and ours.

A field that is not here is refused, never ignored.
"""

from itertools import islice
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

T = TypeVar("T")
# The first wrong item is enough: others need not be looked for.
Items = Annotated[list[T], Field(fail_fast=True)]
TokenId = Annotated[int, Field(ge=0)]
Json = dict[str, Any]
# More than any object here has.
MOST_FIELDS = 128


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _shortened(cls, given: Any) -> Any:
        """Every unknown field is an error of its own: of a million, a few are enough."""
        if isinstance(given, dict) and len(given) > MOST_FIELDS:
            return dict(islice(given.items(), MOST_FIELDS))
        return given


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Sampling(Strict):
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
    user: str | None = None
    block_size: int | Literal["auto"] | None = None
    return_drafts: bool = False
    return_token_ids: bool = False


class JsonSchema(Strict):
    name: str
    description: str | None = None
    schema_: Json | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = None


class Function(Strict):
    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class CalledFunction(Strict):
    name: str
    arguments: str | Json


class Call(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Part(BaseModel):
    """A part of a message. Others than text are known, to be refused by name."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Items[Call] | None = None
    tool_call_id: str | None = None
    # What OpenAI's own answers carry, and come back with.
    refusal: str | None = None
    annotations: Items[Any] | None = None
    audio: None = None
    function_call: None = None


class ChatRequest(OpenAiSampling):
    messages: Items[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Json | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(OpenAiSampling):
    prompt: str | Items[str] | Items[TokenId] | Items[Items[TokenId]]
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    best_of: Literal[1] | None = None
    suffix: None = None
    response_format: ResponseFormat | None = None


class ResponsesTool(Strict):
    """A function in the responses interface, where it is flat."""

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class ResponsesToolName(Strict):
    type: Literal["function"]
    name: str


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Json | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Strict):
    format: TextFormat | None = None
    verbosity: None = None


class Reasoning(Strict):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto"] | None = None


class InputItem(BaseModel):
    """A message, a call, its output, or a thought: read in responses.py, which names what it does not know."""

    model_config = ConfigDict(extra="allow")

    type: str | None = None
    role: str | None = None
    content: str | Items[Part] | None = None


class ResponsesRequest(Strict):
    input: str | Items[InputItem]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    stream: bool | None = None
    tools: Items[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolName | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    store: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    background: Literal[False] | None = None
    previous_response_id: None = None
    include: Items[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    # As in chat.
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    chat_template_kwargs: Json | None = None


class NativeSampling(Sampling):
    """SGLang's ``sampling_params``."""

    max_new_tokens: int | None = Field(None, ge=1)
    stop: str | Items[str] | None = None
    n: int | None = Field(None, ge=1)
    json_schema: str | Json | None = None
    ebnf: str | None = None
    sampling_seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: Literal[False] | None = None


class GenerateRequest(Strict):
    """SGLang's ``/generate``."""

    text: str | Items[str] | None = None
    input_ids: Items[TokenId] | Items[Items[TokenId]] | None = None
    sampling_params: NativeSampling | Items[NativeSampling] | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = Field(None, ge=-1)
    top_logprobs_num: int | None = Field(None, ge=0, le=20)
    return_text_in_logprobs: bool | None = None
    rid: str | None = None
    block_size: int | Literal["auto"] | None = None


class TokenizeRequest(Strict):
    """vLLM's ``/tokenize``: of a prompt, or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[Message] | None = None
    tools: Items[Tool] | None = None
    chat_template_kwargs: Json | None = None
    add_special_tokens: bool = True
    add_generation_prompt: Literal[True] = True
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Items[TokenId]

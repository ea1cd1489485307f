"""What answers look like: for the OpenAPI document."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    model_config = ConfigDict(extra="allow")


class ErrorBody(Answer):
    message: str
    type: str
    param: str | None
    code: int


class Error(Answer):
    error: ErrorBody


class PromptDetails(Answer):
    cached_tokens: int


class CompletionDetails(Answer):
    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    draft_rounds: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    reasoning_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Function(Answer):
    name: str
    arguments: str


class Call(Answer):
    id: str
    type: Literal["function"]
    function: Function


class ChatMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Call] = []
    refusal: None = None


class ChatChoice(Answer):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]
    stop_reason: int | str | None
    matched_stop: int | str | None
    token_ids: list[int] | None


class ChatCompletion(Answer):
    """Or, with ``stream``, server-sent events of chat.completion.chunk."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None
    prompt_token_ids: list[int] | None


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "abort"]
    stop_reason: int | str | None
    matched_stop: int | str | None
    token_ids: list[int] | None
    prompt_logprobs: list[dict[str, Any] | None] | None
    prompt_token_ids: list[int] | None


class Completion(Answer):
    """Or, with ``stream``, server-sent events of the same shape."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Response(Answer):
    """Or, with ``stream``, server-sent events named as OpenAI names them."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any]


class DeletedResponse(Answer):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(Answer):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class MessagesUsage(Answer):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessagesAnswer(Answer):
    """Or, with ``stream``, server-sent events named as Anthropic names them."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessagesUsage


class InputTokens(Answer):
    input_tokens: int


class MessagesErrorBody(Answer):
    type: str
    message: str


class MessagesError(Answer):
    type: Literal["error"]
    error: MessagesErrorBody
    request_id: str


class Generated(Answer):
    """SGLang's answer to /generate."""

    text: str | None
    output_ids: list[int]
    meta_info: dict[str, Any]


class Model(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(Answer):
    object: Literal["list"]
    data: list[Model]


class Tokens(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(Answer):
    prompt: str


class Version(Answer):
    version: str


class Status(Answer):
    status: str


class Load(Answer):
    """Requests for text that have no whole answer yet."""

    server_load: int


class ModelInfo(Answer):
    model_path: str | None
    served_model_name: str
    is_generation: bool
    max_model_len: int


class Rendered(Answer):
    """vLLM's request for tokens: what would be generated from."""

    request_id: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str


class Flushed(Answer):
    success: bool
    message: str

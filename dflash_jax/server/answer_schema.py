"""Schemas of answers, for the OpenAPI document."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """Base of all answers; further fields are possible."""

    model_config = ConfigDict(extra="allow")


class ErrorBody(Answer):
    """An error in OpenAI's shape."""

    message: str
    type: str
    param: str | None
    code: int


class Error(Answer):
    """An answer that is an error."""

    error: ErrorBody


class PromptDetails(Answer):
    """Details of prompt tokens."""

    cached_tokens: int


class CompletionDetails(Answer):
    """Details of new tokens."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    draft_rounds: int


class Usage(Answer):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    reasoning_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Function(Answer):
    """A called function; ``arguments`` is JSON."""

    name: str
    arguments: str


class Call(Answer):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: Function


class ChatMessage(Answer):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Call] = []
    refusal: None = None


class ChatChoice(Answer):
    """A choice of a chat."""

    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]
    stop_reason: int | str | None
    matched_stop: int | str | None
    token_ids: list[int] | None


class ChatCompletion(Answer):
    """A chat's answer; with ``stream``, server-sent events of chat.completion.chunk."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None
    prompt_token_ids: list[int] | None


class CompletionChoice(Answer):
    """A choice of a completion."""

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
    """A completion's answer; with ``stream``, server-sent events of the same shape."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Response(Answer):
    """A response; with ``stream``, server-sent events under OpenAI's names."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any]


class DeletedResponse(Answer):
    """The confirmation that a response was deleted."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(Answer):
    """A page of the items before a response."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class MessagesUsage(Answer):
    """Token counts in Anthropic's shape."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessagesAnswer(Answer):
    """A message; with ``stream``, server-sent events under Anthropic's names."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessagesUsage


class InputTokens(Answer):
    """The count of a prompt's tokens."""

    input_tokens: int


class MessagesErrorBody(Answer):
    """An error in Anthropic's shape."""

    type: str
    message: str


class MessagesError(Answer):
    """An answer of /v1/messages that is an error."""

    type: Literal["error"]
    error: MessagesErrorBody
    request_id: str


class Generated(Answer):
    """SGLang's answer to /generate."""

    text: str | None
    output_ids: list[int]
    meta_info: dict[str, Any]


class Model(Answer):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(Answer):
    """The list of models."""

    object: Literal["list"]
    data: list[Model]


class AnthropicModel(Answer):
    """A model in Anthropic's shape."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int


class AnthropicModels(Answer):
    """Anthropic's list of models."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str
    last_id: str


class Tokens(Answer):
    """The tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(Answer):
    """The text of tokens."""

    prompt: str


class Version(Answer):
    """The server's version."""

    version: str


class Status(Answer):
    """The state of the server."""

    status: str


class Load(Answer):
    """Requests for text that have no complete answer yet."""

    server_load: int


class ModelInfo(Answer):
    """SGLang's description of the model."""

    model_path: str | None
    served_model_name: str
    is_generation: bool
    max_model_len: int


class Rendered(Answer):
    """vLLM's rendered request: the token ids and sampling parameters that generation would use."""

    request_id: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str


class Flushed(Answer):
    """The result of a flush."""

    success: bool
    message: str

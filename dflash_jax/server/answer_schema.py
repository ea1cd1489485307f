"""Schemas of answers, for the OpenAPI document. Nothing is validated with them."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, create_model


class Answer(BaseModel):
    """Base of all answers; further fields are possible."""

    model_config = ConfigDict(extra="allow")


def _answer(name: str, doc: str, /, **fields: Any) -> Any:
    """The schema of an answer, from the types of its fields; of those that may be missing, (type, default)."""
    return create_model(name, __base__=Answer, __doc__=doc, **fields)


ErrorBody = _answer("ErrorBody", "An error in OpenAI's shape.", message=str, type=str, param=str | None, code=int | str)
Error = _answer("Error", "An answer that is an error.", error=ErrorBody)
PromptDetails = _answer("PromptDetails", "Details of prompt tokens.", cached_tokens=int)
CompletionDetails = _answer(
    "CompletionDetails",
    "Details of new tokens.",
    reasoning_tokens=int,
    accepted_prediction_tokens=int,
    rejected_prediction_tokens=int,
    draft_rounds=int,
)
DrafterUsage = _answer(
    "DrafterUsage",
    "Rounds of a drafter, and its drafts and accepted drafts by their position.",
    rounds=int,
    drafted_per_pos=dict[str, int],
    accepted_per_pos=dict[str, int],
)
Usage = _answer(
    "Usage",
    "Token counts of a request.",
    prompt_tokens=int,
    completion_tokens=int,
    total_tokens=int,
    reasoning_tokens=int,
    prompt_tokens_details=PromptDetails,
    completion_tokens_details=CompletionDetails,
    drafters=dict[str, DrafterUsage],
)
Function = _answer("Function", "A called function; ``arguments`` is JSON.", name=str, arguments=str)
Custom = _answer("Custom", "A called custom tool.", name=str, input=str)
Call = _answer(
    "Call",
    "A tool call, of a function or of a custom tool.",
    id=str,
    type=Literal["function", "custom"],
    function=(Function, None),
    custom=(Custom, None),
)
ChatMessage = _answer(
    "ChatMessage",
    "The assistant's message.",
    role=Literal["assistant"],
    content=str | None,
    reasoning_content=(str | None, None),
    reasoning=(str | None, None),
    tool_calls=(list[Call], []),
    function_call=(Function | None, None),
    refusal=(type(None), None),
)
# Fields of every choice; of what has the log-probabilities of a prompt; of every completion.
_CHOICE = {
    "index": int,
    "logprobs": dict[str, Any] | None,
    "stop_reason": int | str | None,
    "matched_stop": int | str | None,
    "token_ids": list[int] | None,
}
_PROMPT = {"prompt_logprobs": list[dict[str, Any] | None] | None, "prompt_token_ids": list[int] | None}
_COMPLETION = {"id": str, "created": int, "model": str, "usage": Usage}
ChatChoice = _answer(
    "ChatChoice",
    "A choice of a chat.",
    message=ChatMessage,
    finish_reason=Literal["stop", "length", "tool_calls", "function_call", "abort"],
    **_CHOICE,
)
ChatCompletion = _answer(
    "ChatCompletion",
    "A chat's answer; with ``stream``, server-sent events of chat.completion.chunk.",
    object=Literal["chat.completion"],
    choices=list[ChatChoice],
    **_COMPLETION,
    **_PROMPT,
)
CompletionChoice = _answer(
    "CompletionChoice",
    "A choice of a completion.",
    text=str,
    finish_reason=Literal["stop", "length", "abort"],
    **_CHOICE,
    **_PROMPT,
)
Completion = _answer(
    "Completion",
    "A completion's answer; with ``stream``, server-sent events of the same shape.",
    object=Literal["text_completion"],
    choices=list[CompletionChoice],
    **_COMPLETION,
)
Response = _answer(
    "Response",
    "A response; with ``stream``, server-sent events under OpenAI's names.",
    id=str,
    object=Literal["response"],
    created_at=int,
    status=Literal["completed", "incomplete"],
    model=str,
    output=list[dict[str, Any]],
    usage=dict[str, Any],
)
CompactedResponse = _answer(
    "CompactedResponse",
    "A conversation as its messages and a summary.",
    id=str,
    object=Literal["response.compaction"],
    created_at=int,
    output=list[dict[str, Any]],
    usage=dict[str, Any],
)
ResponseInputTokens = _answer(
    "ResponseInputTokens",
    "The count of a prompt's tokens, in OpenAI's shape.",
    object=Literal["response.input_tokens"],
    input_tokens=int,
)
DeletedResponse = _answer(
    "DeletedResponse",
    "The confirmation that a response was deleted.",
    id=str,
    object=Literal["response"],
    deleted=Literal[True],
)
InputItems = _answer(
    "InputItems",
    "A page of the items before a response.",
    object=Literal["list"],
    data=list[dict[str, Any]],
    first_id=str | None,
    last_id=str | None,
    has_more=bool,
)
MessagesUsage = _answer(
    "MessagesUsage",
    "Token counts in Anthropic's shape.",
    input_tokens=int,
    cache_creation_input_tokens=int,
    cache_read_input_tokens=int,
    output_tokens=int,
)
MessagesAnswer = _answer(
    "MessagesAnswer",
    "A message; with ``stream``, server-sent events under Anthropic's names.",
    id=str,
    type=Literal["message"],
    role=Literal["assistant"],
    model=str,
    content=list[dict[str, Any]],
    stop_reason=Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"],
    stop_sequence=str | None,
    usage=MessagesUsage,
)
InputTokens = _answer("InputTokens", "The count of a prompt's tokens.", input_tokens=int)
MessagesErrorBody = _answer("MessagesErrorBody", "An error in Anthropic's shape.", type=str, message=str)
MessagesError = _answer(
    "MessagesError",
    "An answer of /v1/messages that is an error.",
    type=Literal["error"],
    error=MessagesErrorBody,
    request_id=str,
)
Generated = _answer(
    "Generated", "SGLang's answer to /generate.", text=str | None, output_ids=list[int], meta_info=dict[str, Any]
)
Model = _answer("Model", "A model.", id=str, object=Literal["model"], created=int, owned_by=str, max_model_len=int)
Models = _answer("Models", "The list of models.", object=Literal["list"], data=list[Model])
AnthropicModel = _answer(
    "AnthropicModel",
    "A model in Anthropic's shape.",
    type=Literal["model"],
    id=str,
    display_name=str,
    created_at=str,
    max_input_tokens=int,
    max_tokens=int,
)
AnthropicModels = _answer(
    "AnthropicModels",
    "Anthropic's list of models.",
    data=list[AnthropicModel],
    has_more=bool,
    first_id=str,
    last_id=str,
)
Tokens = _answer(
    "Tokens", "The tokens of a text.", count=int, max_model_len=int, tokens=list[int], token_strs=list[str] | None
)
Text = _answer("Text", "The text of tokens.", prompt=str)
Version = _answer("Version", "The server's version.", version=str)
Status = _answer("Status", "The state of the server.", status=str)
Load = _answer("Load", "Requests for text that have no complete answer yet.", server_load=int)
ModelInfo = _answer(
    "ModelInfo",
    "SGLang's description of the model.",
    model_path=str | None,
    served_model_name=str,
    is_generation=bool,
    max_model_len=int,
)
Rendered = _answer(
    "Rendered",
    "vLLM's rendered request: the token ids and sampling parameters that generation would use.",
    request_id=str,
    token_ids=list[int],
    sampling_params=dict[str, Any],
    model=str,
)
Flushed = _answer("Flushed", "Whether it is done.", success=bool, message=str)
Message = _answer("Message", "What is done.", message=str)
Paused = _answer("Paused", "The result of a pause.", status=Literal["paused", "resumed"])
IsPaused = _answer("IsPaused", "Whether nothing is generated.", is_paused=bool)
Aborted = _answer("Aborted", "How many sequences are ended.", status=Literal["aborted"], aborted=int)
Slept = _answer("Slept", "The result of a sleep.", status=Literal["sleeping", "paused"], level=int)
Woken = _answer("Woken", "What is there again.", status=Literal["awake", "sleeping"], tags=list[str] | None)
IsSleeping = _answer("IsSleeping", "Whether weights or caches are not on the devices.", is_sleeping=bool)
WeightInfo = _answer("WeightInfo", "The version of the weights.", weight_version=str)
TokenChoice = _answer(
    "TokenChoice",
    "A continuation as token ids.",
    index=int,
    token_ids=list[int],
    logprobs=dict[str, Any] | None,
    finish_reason=Literal["stop", "length", "abort"] | None,
    stop_reason=int | str | None,
    weight_versions=list[dict[str, Any]],
)
GeneratedTokens = _answer(
    "GeneratedTokens",
    "vLLM's answer to /inference/v1/generate.",
    request_id=str,
    model=str,
    created=int,
    choices=list[TokenChoice],
    usage=Usage,
    prompt_logprobs=list[dict[str, Any] | None] | None,
)

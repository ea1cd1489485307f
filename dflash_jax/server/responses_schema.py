"""Fields of requests to ``/v1/responses``: OpenAI's interface, with some of vLLM's additions."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from dflash_jax.server import neutral_fields
from dflash_jax.server.chat_schema import Part
from dflash_jax.server.schema import Sampling
from dflash_jax.server.schema_base import Effort, Items, Json, Lenient, RequestId, Salt, Strict


class ResponsesTool(Lenient):
    """A function, flat in this interface."""

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class ResponsesToolName(Strict):
    """A tool by its name."""

    type: Literal["function"]
    name: str


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


class InputItem(BaseModel):
    """A message, a call, its output, or a thought; `responses_input` refuses unknown types by name."""

    model_config = ConfigDict(extra="allow")

    type: str | None = None
    role: str | None = None
    content: str | Items[Part] | None = None


class ResponsesRequest(Sampling):
    """``/v1/responses``."""

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
    # The same as in chat requests.
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

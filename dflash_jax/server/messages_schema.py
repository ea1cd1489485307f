"""Fields of requests to ``/v1/messages``: Anthropic's Messages API.

Unknown keys inside blocks and tools are ignored.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from dflash_jax.server import neutral_fields
from dflash_jax.server.chat_schema import Part
from dflash_jax.server.schema_base import Body, Items, Json, Strict


class Block(BaseModel):
    """A content block. `messages_input` refuses unknown types by name."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str
    # text, thinking
    text: str | None = None
    thinking: str | None = None
    # tool_use
    id: str | None = None
    name: str | None = None
    input: Json | None = None
    # tool_result
    tool_use_id: str | None = None
    content: str | Items[Part] | None = None


class TurnMessage(Strict):
    """A turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Items[Block]


class MessagesTool(BaseModel):
    """A tool that the client runs. Tools that Anthropic defines or runs have another ``type``."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str | None = None
    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: str | None = None
    input_schema: Json | None = None
    strict: bool | None = None


class MessagesToolChoice(Strict):
    """Which tool the model must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Strict):
    """Whether and how much to think; ``display`` "omitted" leaves the text of thoughts out of the answer."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Strict):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class OutputConfig(Strict):
    """Form and effort of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ContextEdit(BaseModel):
    """Removal of old thoughts, which the chat template decides; other edits are not supported."""

    model_config = ConfigDict(extra="allow")

    type: Literal["clear_thinking_20251015"]


class ContextManagement(Strict):
    """Edits of the context."""

    edits: Items[ContextEdit] | None = None


class CountTokensRequest(Body):
    """``/v1/messages/count_tokens``: the fields that make the prompt."""

    neutral = neutral_fields.MESSAGES

    messages: Items[TurnMessage] = Field(min_length=1)
    model: str | None = None
    system: str | Items[Block] | None = None
    tools: Items[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    # The same as in chat requests.
    chat_template_kwargs: Json | None = None


class MessagesRequest(CountTokensRequest):
    """``/v1/messages``."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Items[str] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    # The same as in chat requests.
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    block_size: int | Literal["auto"] | None = None

"""Fields that requests to several endpoints share, and the requests for completions.

The fields are OpenAI's, the additions of vLLM and SGLang, and ours. A field that is neither in a schema nor in
neutral_fields.toml is refused or, with ``--unknown-fields warn``, ignored.
"""

from typing import Annotated, Literal

from pydantic import Field

from dflash_jax.sampling_params import LogprobsMode
from dflash_jax.server.schema_base import Body, Items, Json, RequestId, Salt, Strict, TokenId, neutral_table
from dflash_jax.server.token_lists import TokenList

# Tokens whose log-probabilities are returned.
NamedTokens = Annotated[Items[TokenId], Field(max_length=20)]

# Most tokens of the thought, -1 for any number.
ThinkingBudget = Annotated[int | None, Field(ge=-1)]


class StreamOptions(Strict):
    """Options of streams; ``include_timings`` adds `answers.timings` to each usage."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_timings: bool = False
    # OpenAI pads its streams; this server does not.
    include_obfuscation: bool = False


class Sampling(Body):
    """Fields of sampling that all endpoints share. None means the checkpoint's default."""

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
    # SGLang's name for include_stop_str_in_output.
    no_stop_trim: bool | None = None
    bad_words: Items[str] | None = None
    allowed_token_ids: Items[TokenId] | None = Field(None, min_length=1)
    # None means the server's.
    logprobs_mode: LogprobsMode | None = None


class SharedFields(Sampling):
    """Fields that chats, completions and responses share.

    ``block_size`` limits the tokens of a round ("auto" or a number) and does not change the text.
    """

    model: str | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: str | Items[str] | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    structured_outputs: Json | None = None
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    request_id: RequestId | None = None
    cache_salt: Salt | None = None
    block_size: int | Literal["auto"] | None = None
    min_tokens: int | None = Field(None, ge=0)
    include_stop_str_in_output: bool | None = None


class OpenAiSampling(SharedFields):
    """Fields of chats and completions.

    ``return_drafts`` marks which parts of each piece of text were drafted. ``return_proposals``, for streams, adds what
    each round drafted and how much of it was accepted; each round is then a dispatch of its own, and the text is the
    same. ``return_spec_tokens_details`` adds SGLang's counts of drafts.
    """

    n: int | None = Field(None, ge=1)
    stream_options: StreamOptions | None = None
    grammar: str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_json: Json | str | None = None
    guided_choice: Items[str] | None = None
    guided_whitespace_pattern: str | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=2**63 - 1)
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    rid: RequestId | None = None
    return_drafts: bool = False
    return_proposals: bool = False
    return_spec_tokens_details: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool | None = None
    logprob_token_ids: NamedTokens | None = None


class JsonSchema(Strict):
    """A named JSON schema."""

    name: str | None = None
    description: str | None = None
    schema_: Json | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class StructureTag(Strict):
    """A stretch of text with its own form, in structural_tag's older notation."""

    begin: str
    schema_: Json | bool = Field(alias="schema")
    end: str


class ResponseFormat(Strict):
    """The form of an answer.

    For structural_tag, the older notation has structures and triggers, the newer one format. A schema beside the type
    is llama.cpp's and Together's notation.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    schema_: Json | bool | None = Field(default=None, alias="schema")
    structures: Items[StructureTag] | None = None
    triggers: Items[str] | None = None
    format: Json | None = None


class CompletionRequest(OpenAiSampling):
    """``/v1/completions``."""

    neutral = neutral_table("completion")

    prompt: str | Items[str] | TokenList | Items[TokenList]
    # What follows the text: it fills the gap between both.
    suffix: str | None = None
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    response_format: ResponseFormat | None = None
    thinking_token_budget: ThinkingBudget = None


class DetokenizeRequest(Body):
    """``/detokenize``, vLLM's endpoint."""

    neutral = neutral_table("detokenize")

    model: str | None = None
    tokens: TokenList

"""Fields of requests to SGLang's own endpoints."""

from typing import Any, Literal

from pydantic import Field

from dflash_jax.server import neutral_fields
from dflash_jax.server.schema import NamedTokens, Sampling, ThinkingBudget
from dflash_jax.server.schema_base import Body, Items, Json, RequestId, Salt, Strict
from dflash_jax.server.token_lists import TokenList


class NativeSampling(Sampling):
    """SGLang's ``sampling_params``."""

    neutral = neutral_fields.SAMPLING

    # With 0, only the prompt is processed.
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
    input_ids: TokenList | Items[TokenList] | None = None
    # URLs or base64, one or a list; of several prompts, a list of these for each.
    image_data: str | Json | Items[Any] | None = None
    video_data: str | Json | Items[Any] | None = None
    sampling_params: NativeSampling | Items[NativeSampling] | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = Field(None, ge=-1)
    top_logprobs_num: int | None = Field(None, ge=0, le=20)
    token_ids_logprob: NamedTokens | Items[NamedTokens] | None = None
    return_text_in_logprobs: bool | None = None
    # Whether the text begins with reasoning, after which a grammar begins.
    require_reasoning: bool = False
    max_thinking_tokens: ThinkingBudget = None
    rid: RequestId | Items[RequestId] | None = None
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    cache_salt: Salt | Items[Salt] | None = None
    block_size: int | Literal["auto"] | None = None


class AbortRequest(Strict):
    """SGLang's ``/abort_request``."""

    rid: str | None = None
    abort_all: bool = False

"""Options of a server that requests meet: their limits, and additions to all answers."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from dflash_jax.server.schema import StreamOptions


@dataclass(frozen=True)
class Limits:
    """Limits of one HTTP request.

    Attributes:
        body_bytes: Bytes of its body.
        media_body_bytes: The same where it may have images and videos.
        tensor_body_bytes: The same where it is the bytes of tensors.
        total_body_bytes: Bytes of the bodies of all requests in flight.
        values: Values in lists and objects of its body, or twice the capacity where that is more.
        objects: Objects in its body.
        choices: Choices of a prompt.
        prompts: Prompts of a request.
        stops: Stop strings.
        stop_characters: Characters of a stop string.
        tools: Tools of a conversation.
        logprobs: Log-probabilities of a token.
        unknown_fields: How unknown fields are treated: "refuse" or "warn".
        trust_request_chat_template: Whether requests may bring a chat template.
    """

    body_bytes: int = 10 * 2**20
    media_body_bytes: int = 64 * 2**20
    tensor_body_bytes: int = 2**29
    total_body_bytes: int = 2**30
    values: int = 2**18
    objects: int = 2**13
    choices: int = 16
    prompts: int = 128
    stops: int = 16
    stop_characters: int = 256
    tools: int = 128
    logprobs: int = 20
    unknown_fields: str = "refuse"
    trust_request_chat_template: bool = False


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Additions:
    """Additions to all answers: vLLM's and SGLang's flags.

    Attributes:
        stream_usage: Where a stream has its usage, beside what the request asks for: in a chunk at its end, or in each.
        metrics: Whether answers of one sequence have its times, as `answers.request_metrics`.
        drafts: Whether they have counts of its drafts, "detailed" those of each round, too.
        tokens_as_ids: Whether log-probabilities name tokens "token_id:N" where the request does not choose.
        incremental: Whether each event of /generate has what is new in place of all text and tokens so far.
        request_ids: Whether every answer has the header X-Request-Id, with a fresh id where the request has none.
    """

    stream_usage: Literal["as asked", "at the end", "always"] = "as asked"
    metrics: bool = False
    drafts: Literal["none", "summary", "detailed"] = "none"
    tokens_as_ids: bool = False
    incremental: bool = False
    request_ids: bool = False

    @classmethod
    def of_arguments(cls, args) -> "Additions":
        """The additions that the flags describe."""
        at_the_end = "at the end" if args.stream_response_default_include_usage else "as asked"
        return cls(
            "always" if args.enable_force_include_usage else at_the_end,
            bool(args.enable_per_request_metrics),
            args.per_request_spec_decode_metrics,
            bool(args.return_tokens_as_token_ids),
            bool(args.incremental_streaming_output),
            bool(args.enable_request_id_headers),
        )

    def stream_options(self, given: "StreamOptions") -> "StreamOptions":
        """A request's stream options with ``stream_usage`` applied."""
        if self.stream_usage == "as asked":
            return given
        is_continuous = self.stream_usage == "always" or given.continuous_usage_stats
        return given.model_copy(update={"include_usage": True, "continuous_usage_stats": is_continuous})

    def as_ids(self, given: bool | None) -> bool:
        """Whether log-probabilities name tokens by id: the request's choice, else ``tokens_as_ids``."""
        return self.tokens_as_ids if given is None else given

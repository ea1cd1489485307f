"""Options of the command line that add to all answers: vLLM's and SGLang's flags."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from dflash_jax.server.schema import StreamOptions


@dataclass(frozen=True)
class Additions:
    """Additions to all answers.

    Attributes:
        stream_usage: Where a stream has its usage, beside what the request asks for: in a chunk at its end, or in each.
        metrics: Whether answers of one sequence have its times, as `answers.request_metrics`.
        tokens_as_ids: Whether log-probabilities name tokens "token_id:N" where the request does not choose.
        incremental: Whether each event of /generate has what is new in place of all text and tokens so far.
        request_ids: Whether every answer has the header X-Request-Id, with a fresh id where the request has none.
    """

    stream_usage: Literal["as asked", "at the end", "always"] = "as asked"
    metrics: bool = False
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

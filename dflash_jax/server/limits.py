"""Limits of an HTTP request."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of one HTTP request.

    Attributes:
        body_bytes: Bytes of its body.
        media_body_bytes: The same where it may have images and videos.
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

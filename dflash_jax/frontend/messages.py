"""Messages as OpenAI's API writes them, in the form that chat templates read."""

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_jax.json_text import loaded


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict]:
    """Messages for a chat template: no value is null, and the arguments of calls are objects.

    Templates write None for a null, and JSON in quotes for arguments that are text.
    """
    converted = []
    for message in messages:
        kept = {key: value for key, value in message.items() if value is not None}
        # A message of calls alone.
        kept.setdefault("content", "")
        if calls := kept.get("tool_calls"):
            kept["tool_calls"] = [_template_call(call) for call in calls]
        converted.append(kept)
    return converted


def _template_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    return {**call, "function": {**function, "arguments": call_arguments(function.get("arguments"))}}


def call_arguments(arguments: Any) -> Any:
    """The arguments of a call as an object, of JSON text; other text, which a model wrote, stays as it is."""
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        return loaded(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments

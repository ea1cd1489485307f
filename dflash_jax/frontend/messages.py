"""Messages as OpenAI's API writes them, in the forms that chat templates read."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dflash_jax.json_text import loaded

# The argument that has what is no object of arguments.
RAW = "_raw"
# How much a model thinks, in OpenAI's words.
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
SYSTEM = ("system", "developer")
# A system message as a turn of the user, in the words of Claude Code.
REMINDER = "<system-reminder>\n%s\n</system-reminder>"


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict]:
    """Messages for a chat template: no value is null, arguments are objects, results follow their calls' order.

    Templates write None for a null, and JSON in quotes for arguments that are text. They show no ids of calls, so that
    a model knows a result by its place.
    """
    converted = []
    for message in messages:
        kept = {key: value for key, value in message.items() if value is not None}
        # A message of calls alone.
        kept.setdefault("content", "")
        if calls := kept.get("tool_calls"):
            kept["tool_calls"] = [_template_call(call) for call in calls]
        converted.append(kept)
    return _with_results_in_order(converted)


def _template_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    return {**call, "function": {**function, "arguments": call_arguments(function.get("arguments"))}}


def call_arguments(arguments: Any) -> Any:
    """The arguments of a call as an object, of JSON text, too. What is none is kept in one, as a model wrote it."""
    value = arguments
    # Some clients encode them twice.
    for _ in range(2):
        if isinstance(value, str):
            try:
                value = loaded(value, strict=False) if value.strip() else {}
            except (ValueError, RecursionError):
                break
    if isinstance(value, Mapping):
        return value
    return {} if value in (None, []) else {RAW: arguments}


def _with_results_in_order(messages: list[dict]) -> list[dict]:
    places: dict[str, int] = {}
    ordered: list[dict] = []
    results: list[dict] = []
    for message in [*messages, {}]:
        if message.get("role") == "tool":
            results.append(message)
            continue
        names = [str(result.get("tool_call_id")) for result in results]
        if all(name in places for name in names):
            results = [results[i] for i in sorted(range(len(names)), key=lambda i: places[names[i]])]
        ordered += [*results, message]
        results = []
        calls = message.get("tool_calls")
        calls = [call for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
        places = {str(call.get("id")): place for place, call in enumerate(calls)}
    return ordered[:-1]


def template_forms(
    messages: Sequence[dict], options: Mapping[str, Any]
) -> Iterator[tuple[list[dict], Mapping[str, Any]]]:
    """What a chat template is asked to render, one after the other, until it takes one.

    First the conversation as it is. Then with one system message, at the beginning: those that come first are joined,
    and a later one is a turn of the user in its place, so that what stands before it stays as it was. After a tool's
    result it is a part of the result: Qwen's templates leave out the thoughts before the last turn of the user. Then
    with an empty turn of the user, where there is none. Then all of these with the nearest efforts.

    Args:
        messages: Of `template_messages`.
        options: The template's variables.

    Yields:
        Messages and options.
    """
    forms = [list(messages)]
    for change in (_with_one_system, _with_user):
        if (changed := change(forms[-1])) != forms[-1]:
            forms.append(changed)
    effort = options.get("reasoning_effort")
    place = EFFORTS.index(effort) if effort in EFFORTS else None
    others = [] if place is None else sorted(range(len(EFFORTS)), key=lambda i: (abs(i - place), -i))[1:]
    for changed in (options, *({**options, "reasoning_effort": EFFORTS[i]} for i in others)):
        yield from ((form, changed) for form in forms)


def _with_one_system(messages: list[dict]) -> list[dict]:
    count = next((i for i, message in enumerate(messages) if message.get("role") not in SYSTEM), len(messages))
    first, later = messages[:count], messages[count:]
    if len(first) > 1 and all(isinstance(message["content"], str) for message in first):
        first = [first[0] | {"content": "\n\n".join(message["content"] for message in first)}]
    changed = list(first)
    for message in later:
        if message.get("role") not in SYSTEM:
            changed.append(message)
            continue
        content, last = message["content"], changed[-1] if changed else {}
        reminder = REMINDER % content if isinstance(content, str) else content
        if last.get("role") == "tool" and isinstance(last["content"], str) and isinstance(content, str):
            changed[-1] = last | {"content": f"{last['content']}\n\n{reminder}"}
        else:
            changed.append(message | {"role": "user", "content": reminder})
    return changed


def _with_user(messages: list[dict]) -> list[dict]:
    if any(message.get("role") == "user" for message in messages):
        return messages
    count = next((i for i, message in enumerate(messages) if message.get("role") not in SYSTEM), len(messages))
    return [*messages[:count], {"role": "user", "content": ""}, *messages[count:]]

"""``truncation: "auto"`` of /v1/responses: a conversation that is too long continues without its oldest items."""

from collections.abc import Awaitable, Callable, Sequence

from dflash_jax.server import chat_schema, responses_schema
from dflash_jax.server.chat import tools_in_use
from dflash_jax.server.conversation import converse
from dflash_jax.server.errors import TooLongError
from dflash_jax.server.serving import Serving

CALL, OUTPUT = "function_call", "function_call_output"
OF_MODEL = ("assistant", "reasoning", CALL)
OF_SYSTEM = ("system", "developer")


def droppable(items: Sequence[responses_schema.InputItem]) -> list[list[int]]:
    """The items that may be dropped, as groups of indices, the oldest group first.

    A group is dropped as a whole, so that chat templates accept the remaining items. A group is a turn, which begins
    with a message of the user; in the latest turn it is a step: items of the model up to the outputs of its calls. The
    output of a call is in the group of the call. No group has system messages, the newest input (all items behind the
    model's last one), the calls that the newest input answers, or the user's last message before it.
    """
    kinds = {i: _kind(item) for i, item in enumerate(items) if _kind(item) not in OF_SYSTEM}
    last = max((i for i, kind in kinds.items() if kind in OF_MODEL), default=-1)
    newest = {i for i in kinds if i > last} or set([*kinds][-1:])
    # Ids may repeat: an output belongs to the last call before it.
    calls = {_call_id(items[i]): i for i, kind in kinds.items() if kind == CALL}
    answered = {_call_id(items[i]) for i in newest if kinds[i] == OUTPUT} & set(calls)
    begin = min([*newest, *(calls[name] for name in answered)], default=0)
    user_turns = [i for i, kind in kinds.items() if kind == "user"]
    question = max((i for i in user_turns if i <= begin), default=max(user_turns, default=-1))

    groups: list[list[int]] = []
    group_of_call: dict[str | None, list[int]] = {}
    is_open = False
    for i, kind in kinds.items():
        name = _call_id(items[i])
        if i == question:
            is_open = False
        elif kind == OUTPUT and name in group_of_call:
            group_of_call[name].append(i)
            # In the latest turn, the model's next step begins a group.
            is_open = is_open and i < question
        else:
            if not is_open or kind in ("user", OUTPUT):
                groups.append([])
            groups[-1].append(i)
            is_open = True
            if kind == CALL:
                group_of_call[name] = groups[-1]
    return [group for group in groups if newest.isdisjoint(group)]


def _kind(item: responses_schema.InputItem) -> str | None:
    """The type of an item; of a message, its role."""
    return item.role if item.type in (None, "message") else item.type


def _call_id(item: responses_schema.InputItem) -> str | None:
    return (item.model_extra or {}).get("call_id")


def characters(item: responses_schema.InputItem) -> int:
    """Characters of an item's texts."""
    parts = item.content if isinstance(item.content, list) else ()
    texts = [item.content, *(part.text for part in parts), *(item.model_extra or {}).values()]
    return sum(len(text) for text in texts if isinstance(text, str))


async def kept_items(
    serving: Serving,
    items: Sequence[responses_schema.InputItem],
    sizes: Sequence[int],
    as_chat: Callable[[Sequence[int]], Awaitable[chat_schema.ChatRequest]],
) -> list[int]:
    """The items with which a conversation continues: as few of the oldest `droppable` groups as possible are dropped.

    Args:
        serving: The model and its engine.
        items: The whole conversation, valid; texts may be left out.
        sizes: Characters of each item's texts, or fewer.
        as_chat: Makes the request for the items at some places.

    Returns:
        Places of items. Where all groups are dropped, the rest may still be too long.
    """
    groups = droppable(items)

    def kept(count: int) -> list[int]:
        dropped = {i for group in groups[:count] for i in group}
        return [i for i in range(len(items)) if i not in dropped]

    async def fits(count: int) -> bool:
        chat = await as_chat(kept(count))
        try:
            talk = await converse(serving, chat.messages, tools_in_use(chat), chat)
            serving.check_room(talk.prompt, chat.max_completion_tokens, "messages")
        except TooLongError:
            return False
        return True

    # Groups are dropped without rendering while the conversation exceeds the limits of any request.
    low, size, count = 0, sum(sizes), len(items)
    while low < len(groups) and (size > serving.texts.most_cut or count > serving.limits.objects):
        size, count = size - sum(sizes[i] for i in groups[low]), count - len(groups[low])
        low += 1
    high = len(groups)
    if low == high or await fits(low):
        return kept(low)
    low += 1
    while low < high:
        middle = (low + high) // 2
        if await fits(middle):
            high = middle
        else:
            low = middle + 1
    return kept(low)

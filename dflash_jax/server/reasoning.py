"""Where reasoning ends and the answer begins, in text that is still arriving."""

from collections.abc import Sequence

OPEN, CLOSE = "<think>", "</think>"


def count_tokens(ids: Sequence[int], close: Sequence[int]) -> int:
    """Tokens of the reasoning that a text begins with, its end ``close`` included; all of them where it has no end."""
    ends = (i + len(close) for i in range(len(ids)) if tuple(ids[i : i + len(close)]) == tuple(close))
    return next(ends, len(ids))


def open_thought(ids: Sequence[int], open_ids: Sequence[int], close_ids: Sequence[int]) -> int | None:
    """Tokens behind the last tag of a text where that opens a thought; None where it does not."""
    tags, lasts = (tuple(open_ids), tuple(close_ids)), {open_ids[-1], close_ids[-1]}
    for end in range(len(ids), 0, -1):
        if ids[end - 1] in lasts:
            for tag in tags:
                if tuple(ids[max(0, end - len(tag)) : end]) == tag:
                    return len(ids) - end if tag == tags[0] else None
    return None


def held_back(text: str, *markers: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of a marker."""
    return max((n for m in markers for n in range(1, min(len(m), len(text) + 1)) if text.endswith(m[:n])), default=0)


def is_open(prompt: str) -> bool:
    """Whether a prompt opens a thought at its end, so that the answer begins there. What users say does not count."""
    return prompt.rstrip().endswith(OPEN)


class ReasoningSplitter:
    """Text → (reasoning, content), without the tags and the blank lines around them.

    ``started``: the prompt has opened the thought already. Else it begins with <think>, if there is one at all.
    """

    def __init__(self, started: bool):
        self._state = "reasoning" if started else "undecided"
        self._held, self._fresh = "", True

    @property
    def is_reasoning(self) -> bool:
        return self._state == "reasoning"

    @property
    def is_content(self) -> bool:
        """Whether no thought can come any more."""
        return self._state == "content"

    def push(self, text: str) -> tuple[str, str]:
        self._held += text
        if self._state == "undecided":
            found = self._held.lstrip()
            if not found or (OPEN.startswith(found) and found != OPEN):
                return "", ""
            if found.startswith(OPEN):
                self._state, self._held = "reasoning", found.removeprefix(OPEN)
            else:
                self._state, self._fresh = "content", False
        if self._state == "reasoning":
            thought, closed, rest = self._held.partition(CLOSE)
            if closed:
                self._state, self._held = "content", ""
                thought = self._opened(thought).rstrip()
                self._fresh = True
                return thought, self._opened(rest)
            # Blank lines before the end are not part of it.
            keep = len(thought) - held_back(thought, CLOSE)
            keep = len(thought[:keep].rstrip())
            self._held = thought[keep:]
            return self._opened(thought[:keep]), ""
        rest, self._held = self._held, ""
        return "", self._opened(rest)

    def finish(self) -> tuple[str, str]:
        """No more text comes."""
        rest, self._held = self._held, ""
        if self._state == "reasoning":
            return self._opened(rest).rstrip(), ""
        return "", rest

    def _opened(self, text: str) -> str:
        if self._fresh:
            text = text.lstrip()
            self._fresh = not text
        return text

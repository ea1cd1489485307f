"""Splits reasoning from the answer, in text that is still arriving."""

from collections import deque
from collections.abc import Sequence

from dflash_jax.sampling_params import CLOSE, OPEN


class ThoughtTokens:
    """Counts the tokens of the reasoning at the beginning of a text, with its closing tag.

    Without a closing tag, all tokens count.

    Args:
        close: Token ids of the closing tag.

    Attributes:
        count: The tokens so far.
    """

    def __init__(self, close: Sequence[int]):
        self.count, self._is_open = 0, True
        self._close, self._last = list(close), deque[int](maxlen=len(close))

    def take(self, ids: Sequence[int]) -> None:
        """Counts the next tokens of the text."""
        for token in ids:
            if not self._is_open:
                return
            self.count += 1
            self._last.append(token)
            self._is_open = list(self._last) != self._close


def open_thought(ids: Sequence[int], open_ids: Sequence[int], close_ids: Sequence[int]) -> int | None:
    """Tokens after the last tag of a text if that opens a thought; None otherwise."""
    tags, lasts = (tuple(open_ids), tuple(close_ids)), {open_ids[-1], close_ids[-1]}
    for end in range(len(ids), 0, -1):
        if ids[end - 1] in lasts:
            for tag in tags:
                if tuple(ids[max(0, end - len(tag)) : end]) == tag:
                    return len(ids) - end if tag == tags[0] else None
    return None


def partial_marker(text: str, *markers: str) -> int:
    """The number of characters at the end of ``text`` that may be the beginning of a marker."""
    return max((n for m in markers for n in range(1, min(len(m), len(text) + 1)) if text.endswith(m[:n])), default=0)


def is_open(prompt: str) -> bool:
    """Whether a prompt ends with an open thought, which the answer continues. Earlier tags do not count."""
    return prompt.rstrip().endswith(OPEN)


def is_cut_in_thought(content: str) -> bool:
    """Whether a message that is to be continued ends inside a thought."""
    return content.rfind(OPEN) > content.rfind(CLOSE)


class ReasoningSplitter:
    """Splits text into (reasoning, content), without the tags and the blank lines around them."""

    def __init__(self, started: bool):
        """A splitter.

        Args:
            started: Whether the prompt has opened the thought. Otherwise a thought begins with <think>, if at all.
        """
        self._state = "reasoning" if started else "undecided"
        self._buffer, self._is_at_start = "", True
        # Blanks at the end of the text that are not split yet, in pieces.
        self._blanks: list[str] = []

    @property
    def is_reasoning(self) -> bool:
        """Whether the text is inside a thought."""
        return self._state == "reasoning"

    @property
    def is_content(self) -> bool:
        """Whether the thought has ended or none can begin."""
        return self._state == "content"

    def begin_content(self) -> None:
        """Takes the text for content from here on, whatever it begins with."""
        self._state, self._is_at_start = "content", False

    def push(self, text: str) -> tuple[str, str]:
        """Splits the next text; the end of it may be held back."""
        if text.isspace() and self._state != "content":
            # Blanks decide nothing.
            self._blanks.append(text)
            return "", ""
        self._buffer += "".join(self._blanks) + text
        self._blanks = []
        if self._state == "undecided":
            text_so_far = self._buffer.lstrip()
            if text_so_far not in (OPEN, CLOSE) and any(tag.startswith(text_so_far) for tag in (OPEN, CLOSE)):
                return "", ""
            if text_so_far.startswith(OPEN):
                self._state, self._buffer = "reasoning", text_so_far.removeprefix(OPEN)
            elif text_so_far.startswith(CLOSE):
                # Models close the thought that the prompt has closed, too.
                self._state, self._buffer = "content", text_so_far.removeprefix(CLOSE)
            else:
                self.begin_content()
        if self._state == "reasoning":
            end, after = self._end_of_thought(self._buffer)
            thought, rest = self._buffer[:end], self._buffer[after:]
            if after is not None:
                self._state, self._buffer = "content", ""
                thought = self._without_leading_space(thought).rstrip()
                self._is_at_start = True
                return thought, self._without_leading_space(rest)
            # Blank lines before the closing tag are not part of the thought.
            keep = len(thought.rstrip())
            self._buffer = self._buffer[keep:]
            return self._without_leading_space(thought[:keep]), ""
        rest, self._buffer = self._buffer, ""
        return "", self._without_leading_space(rest)

    def _end_of_thought(self, text: str) -> tuple[int, int | None]:
        """(end of the thought, index of what follows it), or (length of what is certainly in it, None)."""
        end = text.find(CLOSE)
        return (len(text) - partial_marker(text, CLOSE), None) if end < 0 else (end, end + len(CLOSE))

    def finish(self) -> tuple[str, str]:
        """Splits the text that was held back, at the end of the text."""
        thought, content = self.push("")
        rest, self._buffer = self._buffer, ""
        if self._state == "reasoning":
            return thought + self._without_leading_space(rest).rstrip(), content
        return thought, content + rest

    def _without_leading_space(self, text: str) -> str:
        if self._is_at_start:
            text = text.lstrip()
            self._is_at_start = not text
        return text


def split_reasoning(text: str, started: bool) -> tuple[str | None, str]:
    """(reasoning, content) of a whole text, as `ReasoningSplitter` splits it; None for no reasoning."""
    splitter = ReasoningSplitter(started)
    (thought, content), (last_thought, last) = splitter.push(text), splitter.finish()
    return thought + last_thought or None, content + last

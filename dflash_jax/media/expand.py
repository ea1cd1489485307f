"""Prompts with images and videos: a pad for each token of a medium, and the positions of all tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dflash_jax.media.errors import MediaError
from dflash_jax.media.medium import Medium


class PadTokens(Protocol):
    """Ids of a model's tokens for media: `models.config.MediaTokens`."""

    @property
    def image(self) -> int:
        """``<|image_pad|>``."""
        ...

    @property
    def video(self) -> int:
        """``<|video_pad|>``."""
        ...

    @property
    def vision_start(self) -> int:
        """``<|vision_start|>``."""
        ...

    @property
    def vision_end(self) -> int:
        """``<|vision_end|>``."""
        ...


@dataclass(frozen=True, eq=False)
class Span:
    """Pads of a prompt that stand for one frame.

    Attributes:
        start: Index of the first pad.
        tokens: Number of pads.
        medium: The image or video.
        offset: The row of the medium's tower outputs that belongs to the first pad.
    """

    start: int
    tokens: int
    medium: Medium
    offset: int = 0


@dataclass(frozen=True, eq=False)
class ExpandedPrompt:
    """A prompt as the model reads it.

    Attributes:
        ids: int32 [tokens].
        spans: The frames of all images and videos, in order.
        is_given: Which tokens are the given prompt's text, bool [tokens]: neither pads nor times.
        positions: int32 [3, tokens]: time, height and width.
        rope_delta: What is added to the index of a token after the prompt for its positions.
    """

    ids: np.ndarray
    spans: tuple[Span, ...]
    is_given: np.ndarray
    positions: np.ndarray
    rope_delta: int


def expand(
    ids: Sequence[int] | np.ndarray,
    media: Sequence[Medium],
    tokens: PadTokens,
    text_ids: Callable[[str], Sequence[int]],
) -> ExpandedPrompt:
    """Expands a prompt as chat templates write it, with one pad for each image or video.

    An image's pad is repeated. A video's pad becomes, for each frame, the text of its time and the frame's pads between
    ``<|vision_start|>`` and ``<|vision_end|>``; the pair that the template writes stays around them, as in transformers
    from 5.10 on.

    Args:
        ids: Token ids, [tokens].
        media: Images and videos, each kind in the order of its pads.
        tokens: Ids of the model's tokens for media.
        text_ids: Tokenizes the text of a time, such as ``<0.3 seconds>``, apart from its neighbours.

    Raises:
        MediaError: The prompt has another number of pads than ``media`` has images or videos, or ends in a pad.
    """
    ids = np.asarray(ids, np.int32)
    pads = {tokens.image: "image", tokens.video: "video"}
    queues = {}
    for pad, kind in pads.items():
        queues[pad] = iter(given := [medium for medium in media if medium.kind == kind])
        if (count := int(np.sum(ids == pad))) != len(given):
            raise MediaError(f"the prompt has {count} {kind} pads: {len(given)} {kind}s are given")
    if len(ids) and int(ids[-1]) in pads:
        raise MediaError(
            f"the prompt ends in {pads[int(ids[-1])]} pad {ids[-1]}: at least one token of text must follow"
        )
    builder = _Builder()
    begin = 0
    for index in np.flatnonzero(np.isin(ids, list(pads))).tolist():
        builder.add_text(ids[begin:index], is_given=True)
        begin, pad = index + 1, int(ids[index])
        medium = next(queues[pad])
        if medium.kind == "image":
            builder.add_frame(medium, 0, pad)
            continue
        for frame, seconds in enumerate(medium.timestamps):
            builder.add_text([*text_ids(f"<{seconds:.1f} seconds>"), tokens.vision_start])
            builder.add_frame(medium, frame, pad)
            builder.add_text([tokens.vision_end])
    builder.add_text(ids[begin:], is_given=True)
    return builder.prompt()


class _Builder:
    """A prompt that grows by text and frames."""

    def __init__(self):
        self._ids: list[np.ndarray] = []
        self._is_given: list[np.ndarray] = []
        self._positions: list[np.ndarray] = [np.zeros((3, 0), np.int32)]
        self._spans: list[Span] = []
        # Tokens so far, and the position of the next one.
        self._tokens = self._next = 0

    def add_text(self, ids: Sequence[int] | np.ndarray, is_given: bool = False) -> None:
        """Adds tokens with equal positions in all three rows."""
        positions = self._next + np.broadcast_to(np.arange(len(ids), dtype=np.int32), (3, len(ids)))
        self._add(np.asarray(ids, np.int32), positions, len(ids), is_given)

    def add_frame(self, medium: Medium, frame: int, pad: int) -> None:
        """Adds a frame: one time, and a grid of heights and widths."""
        height, width = medium.merged
        grid = np.indices((1, height, width), np.int32).reshape(3, -1)
        self._spans.append(Span(self._tokens, medium.frame_tokens, medium, frame * medium.frame_tokens))
        self._add(np.full(medium.frame_tokens, pad, np.int32), self._next + grid, max(height, width))

    def _add(self, ids: np.ndarray, positions: np.ndarray, step: int, is_given: bool = False) -> None:
        self._ids.append(ids)
        self._is_given.append(np.full(len(ids), is_given))
        self._positions.append(positions)
        self._tokens += len(ids)
        self._next += step

    def prompt(self) -> ExpandedPrompt:
        """The prompt."""
        # The next position is one more than the largest of all rows.
        positions = np.concatenate(self._positions, axis=1).astype(np.int32)
        ids, is_given = np.concatenate(self._ids), np.concatenate(self._is_given)
        return ExpandedPrompt(ids, tuple(self._spans), is_given, positions, self._next - self._tokens)

"""Images and videos of a prompt: where they are, and, as the engine takes them, rows in place of embeddings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dflash_jax.media.medium import Medium


class PlacedFrame(NamedTuple):
    """Tokens of a prompt that stand for an image, or for one frame of a video.

    Attributes:
        start: The first token's position in the prompt.
        length: Number of tokens.
        medium: Index of the image or video.
        offset: The row of the medium's tower outputs that belongs to the first token.
    """

    start: int
    length: int
    medium: int
    offset: int


@dataclass(frozen=True, eq=False)
class UnencodedMedia:
    """The images and videos of one prompt before the vision tower, as plain data: pixels, numbers and bytes.

    Attributes:
        media: The images and videos.
        frames: Where they are, ascending; at least one.
        positions: As in `PromptMedia`.
        rope_delta: As in `PromptMedia`.
    """

    media: tuple[Medium, ...]
    frames: tuple[PlacedFrame, ...]
    positions: np.ndarray
    rope_delta: int


@dataclass(frozen=True, eq=False)
class MediaSpan:
    """Tokens of a prompt that stand for an image, or for one frame of a video.

    Attributes:
        start: The first token's position in the prompt.
        length: Number of tokens.
        key: Bytes that identify the pixels: spans with equal keys have equal rows.
        rows: Returns what takes the place of the tokens' embeddings, [length, H]. The engine calls it when the prompt's
            turn comes, once for each chunk.
        is_encoded: Returns whether ``rows`` needs no call of the vision tower.
    """

    start: int
    length: int
    key: bytes
    rows: Callable[[], np.ndarray]
    is_encoded: Callable[[], bool] = lambda: True

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + self.length


@dataclass(frozen=True, eq=False)
class PromptMedia:
    """The images and videos of one prompt.

    Attributes:
        spans: Where they are, ascending; at least one.
        positions: Rotary positions of the prompt's tokens (time, height, width), int32 [3, N] of the first N tokens,
            where N reaches at least the end of the last span.
        rope_delta: Rotary position minus position in the prompt of the tokens after the last span.
    """

    spans: tuple[MediaSpan, ...]
    positions: np.ndarray
    rope_delta: int

    @property
    def end(self) -> int:
        """The position after the last span: from there on, prefill is that of text."""
        return self.spans[-1].end

    def chunk(self, start: int, size: int, hidden: int, dtype: np.dtype) -> tuple[Any, Any, Any]:
        """The fields of a `MediaChunk` of one sequence, which prefill takes.

        Args:
            start: Position of the chunk's first token.
            size: Tokens of the program.
            hidden: H.
            dtype: The target's dtype.
        """
        embeddings, is_media, positions = empty_chunk(size, hidden, dtype)
        for span in self.spans:
            first, last = max(span.start, start), min(span.end, start + size)
            if first < last:
                embeddings[0, first - start : last - start] = span.rows()[first - span.start : last - span.start]
                is_media[0, first - start : last - start] = True
        # The tokens after the last span follow it in all three rows.
        positions += start + self.rope_delta
        known = self.positions[:, start : start + size]
        positions[0, :, : known.shape[1]] = known
        return embeddings, is_media, positions


def empty_chunk(size: int, hidden: int, dtype: np.dtype) -> tuple[Any, Any, Any]:
    """The fields of a `MediaChunk` of one sequence of text, whose positions begin at 0."""
    positions = np.tile(np.arange(size, dtype=np.int32), (1, 3, 1))
    return np.zeros((1, size, hidden), dtype), np.zeros((1, size), bool), positions

"""Images and videos of training data: their tokens and rows in documents; `media_rows` has those of a step.

Neither pixels nor rows are kept with the documents: a row of a step reads its own again, and what `VisionEncoder` has
cached it neither decodes nor computes. The drafter's loss is on text: the tokens of media are never learned.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from dflash_jax.argument_checks import shown
from dflash_jax.engine.vision_encoder import VisionEncoder
from dflash_jax.errors import InputError
from dflash_jax.frontend.media import MediaReader
from dflash_jax.media.parts import MediaPart
from dflash_jax.training.conversations import at_line

NO_TOWER = "images and videos are not possible: the model has no vision tower, or several processes train it"


@dataclass(frozen=True, eq=False)
class DocumentMedia:
    """Images and videos of a document.

    Attributes:
        reader: Reads them.
        encoder: Computes their rows.
        parts: What they are read from, in the order of their tokens.
        keys: What identifies the pixels of each.
        is_media: Which tokens stand for them, bool [N].
        positions: Rotary positions of all tokens within the document (time, height, width), int32 [3, N].
    """

    reader: MediaReader
    encoder: VisionEncoder
    parts: tuple[MediaPart, ...]
    keys: tuple[bytes, ...]
    is_media: np.ndarray
    positions: np.ndarray

    def rows(self, count: int) -> np.ndarray:
        """What takes the place of the embeddings of the first ``count`` tokens of media, [count, H].

        Raises:
            InputError: A file has changed since the data was read, or is gone.
        """
        encoder = self.encoder
        found, left = [np.zeros((0, encoder.config.out_hidden_size), encoder.tower.dtype)], count
        for part, key in zip(self.parts, self.keys, strict=True):
            # A document that is cut off may have lost its last ones.
            if left <= 0:
                break
            rows = encoder.outputs.find([key]).get(key)
            if rows is None:
                medium = self.reader.read(part)
                if medium.key != key:
                    raise InputError(f"{part.where}: {shown(part.source)} has changed since the data was read")
                (rows,) = encoder.encode([medium])
            found.append(rows)
            left -= len(rows)
        return np.concatenate(found)[:count]


# (token ids with one pad for each image or video, which of them are learned, the images and videos, "file:line" for
# errors) → token ids with a pad for each row, which of them are learned, and what the target needs of the media.
Placed: TypeAlias = tuple[Sequence[int] | np.ndarray, Sequence[bool] | np.ndarray, DocumentMedia | None]
Placer: TypeAlias = Callable[[Sequence[int], Sequence[bool], Sequence[MediaPart], str], Placed]


def placer(reader: MediaReader | None, encoder: VisionEncoder | None) -> Placer | None:
    """Places images and videos for a model; None for one without a vision tower."""
    return None if reader is None or encoder is None else partial(_placed, reader, encoder)


def _placed(
    reader: MediaReader,
    encoder: VisionEncoder,
    ids: Sequence[int],
    mask: Sequence[bool],
    parts: Sequence[MediaPart],
    where: str,
) -> Placed:
    media = [reader.read(part) for part in parts]
    try:
        prompt = reader.expand(ids, media)
    except InputError as e:
        raise at_line(e, where) from None
    pads = (reader.tokens.image, reader.tokens.video)
    learned = np.zeros(len(prompt.ids), bool)
    learned[prompt.is_given] = np.asarray(mask, bool)[~np.isin(ids, pads)]
    is_media = np.isin(prompt.ids, pads)
    # Pads of images and of videos are counted apart: the order of the document need not be that of the parts.
    order = [frame.medium for frame in prompt.frames if not frame.offset]
    taken, keys = tuple(parts[i] for i in order), tuple(media[i].key for i in order)
    return prompt.ids, learned, DocumentMedia(reader, encoder, taken, keys, is_media, prompt.positions)


def without_media(ids: Sequence[int], mask: Sequence[bool], parts: Sequence[MediaPart], where: str) -> Placed:
    """A `Placer` for those who count the learned tokens, which are text: one pad stays for each image or video."""
    return ids, mask, None

"""Rows of training with what the target needs of their images and videos."""

import numpy as np

from dflash_jax.decoding.prefill import MediaChunk
from dflash_jax.training.data import PackedRows


class MediaRows:
    """`PackedRows` with a `MediaChunk` in each: the embeddings and rotary positions of its documents' media.

    Attributes:
        rows: The packed rows, of which some have media.
    """

    def __init__(self, rows: PackedRows):
        self.rows = rows
        encoder = next(rows.documents.media).encoder
        self._shape, self._dtype = (rows.length, encoder.config.out_hidden_size), encoder.tower.dtype

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index) -> dict:
        row = self.rows[index]
        embeddings, is_media = np.zeros(self._shape, self._dtype), np.zeros(self._shape[0], bool)
        positions = np.tile(np.arange(self._shape[0], dtype=np.int32) - row["starts"], (3, 1))
        for document, start, end in self.rows.places(index):
            if (media := document.media) is None:
                continue
            places = start + np.flatnonzero(media.is_media[: end - start])
            embeddings[places], is_media[places] = media.rows(len(places)), True
            positions[:, start:end] = media.positions[:, : end - start]
        return row | {"media": MediaChunk(embeddings, is_media, positions)}  # pyright: ignore[reportArgumentType]


def with_media(rows: PackedRows) -> PackedRows | MediaRows:
    """The rows for a step that runs the target: as they are, where no document has images or videos."""
    return MediaRows(rows) if rows.has_media else rows

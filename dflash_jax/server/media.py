"""Images and videos of requests: fetched, decoded in processes of their own, placed in the prompt, and encoded.

The vision tower (`tower.TowerTurns`) runs last, when all else of a request is known to be right. Clients share each
step by turns, and the memory that requests take meanwhile.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_jax.engine.media import UnencodedMedia
from dflash_jax.errors import InputError
from dflash_jax.frontend.concurrency import gather_or_cancel
from dflash_jax.frontend.media import MediaReader
from dflash_jax.media.data_url import DataUrl
from dflash_jax.media.decoding import MediaDecoder
from dflash_jax.media.errors import MediaError
from dflash_jax.media.medium import CHANNELS, Medium
from dflash_jax.media.parts import MediaPart, media_part
from dflash_jax.server.capacity import FairCapacity, Share
from dflash_jax.server.errors import ApiError
from dflash_jax.server.request_context import current

# Bytes of the images and videos that are being read, and of those that are decoded, each.
MOST_BYTES = 2**31
# Paths of requests that may have images and videos.
MEDIA_PATHS = frozenset(
    {
        *("/v1/chat/completions", "/v1/chat/completions/batch", "/v1/chat/completions/render"),
        *("/v1/responses", "/v1/responses/compact", "/v1/responses/input_tokens"),
        *("/v1/messages", "/v1/messages/count_tokens", "/generate", "/tokenize", "/invocations"),
    }
)


def url_part(given: Mapping[str, Any], where: str) -> MediaPart:
    """Reads a part of a message's content whose source is a URL.

    Args:
        given: As of `media_part`.
        where: Names it in errors.

    Raises:
        ApiError: It is wrong.
    """
    try:
        part = media_part(given, where)
    except MediaError as e:
        raise ApiError(e.status, str(e), where) from None
    if not isinstance(part.source, str):
        raise ApiError(400, f"{where}: the source of a part of type {given['type']} must be a URL", where)
    return part


@dataclass(frozen=True, eq=False)
class PlacedMedia:
    """The images and videos of a prompt.

    Attributes:
        prompt: The images and videos as the engine gets them.
        seconds: Seconds by step: "fetch" (the wait for memory included) and "decode".
        memory: Memory of the pixels.
    """

    prompt: UnencodedMedia
    seconds: dict[str, float]
    memory: Share


class RequestMedia:
    """Reads the images and videos of all requests of a front.

    Attributes:
        reader: The preprocessing and the limits.
        decoder: The processes that decode.
        memory: Bytes of decoded images and videos.
    """

    def __init__(self, reader: MediaReader, most_bytes: int = MOST_BYTES):
        self.reader, self.decoder = reader, MediaDecoder(reader.limits)
        self.memory = FairCapacity(most_bytes, "the memory for images and videos")
        # Memory for the contents and pixels of images and videos that are being fetched and decoded.
        self._reading = FairCapacity(most_bytes, "memory to read images and videos", reader.limits.waiting)
        # Images and videos that are fetched and decoded at a time; others of admitted requests wait here.
        self._fetches = FairCapacity(reader.limits.fetches, "the network")
        self._decodes = FairCapacity(reader.limits.decodes, "the decoder of images and videos")

    def start(self) -> None:
        """Starts the processes that decode."""
        self.decoder.start()

    def stop(self) -> None:
        """Ends all fetches and processes, for good."""
        self.decoder.stop()
        self.reader.fetcher.stop()

    async def placed(self, ids: Sequence[int], parts: Sequence[MediaPart], field: str) -> tuple[list[int], PlacedMedia]:
        """Reads images and videos and puts them into a prompt.

        Args:
            ids: Token ids with one pad for each.
            parts: The images and videos, at least one; each source is a URL.
            field: The request's field, for errors.

        Returns:
            The token ids with all pads, and the media.

        Raises:
            ApiError: One cannot be read, or there are too many, or the prompt has another number of pads.
        """
        try:
            self.reader.limits.check_counts(part.kind for part in parts)
            began = time.perf_counter()
            with await self._reading.take(sum(map(self._bytes, parts))):
                contents = await gather_or_cancel(map(self._fetched, parts))
                fetched = time.perf_counter()
                media = await gather_or_cancel(map(self._decoded, parts, contents))
                seconds = {"fetch": fetched - began, "decode": time.perf_counter() - fetched}
                expanded, placed = await asyncio.to_thread(self.reader.place, ids, media)
                memory = self.memory.take_now(sum(medium.pixels.nbytes for medium in media))
                current().endings.callback(memory.release)
        except MediaError as e:
            raise ApiError(e.status, str(e), field) from None
        except InputError as e:
            raise ApiError(400, str(e), field) from None
        return expanded, PlacedMedia(placed, seconds, memory)

    def _bytes(self, part: MediaPart) -> int:
        """Bytes that a part may take: encoded and decoded."""
        encoded = len(part.source) if _is_data(part) else self.reader.limits.item_bytes
        return encoded + CHANNELS * self.reader.settings(part).max_pixels

    async def _fetched(self, part: MediaPart) -> bytes | DataUrl:
        with _named(part):
            if _is_data(part):
                return DataUrl(part.source, self.reader.limits.item_bytes)
            with await self._fetches.take(1):
                return await self.reader.fetcher.fetch(part.source, part.kind)

    async def _decoded(self, part: MediaPart, content: bytes | DataUrl) -> Medium:
        with await self._decodes.take(1), _named(part):
            return await self.decoder.decode(content, self.reader.settings(part), part.fps, part.num_frames)


def _is_data(part: MediaPart) -> bool:
    return part.source[:5].lower() == "data:"


@contextlib.contextmanager
def _named(part: MediaPart) -> Iterator[None]:
    """Names a part in its errors."""
    try:
        yield
    except MediaError as e:
        raise ApiError(e.status, f"{part.where}: {e}", part.where) from None
    except InputError as e:
        # No decoder starts.
        raise ApiError(503, f"{part.where}: {e}", part.where) from None

"""Images and videos of requests: fetched, decoded in processes of their own, placed in the prompt, and encoded.

The vision tower runs last, when all else of a request is known to be right, on one thread: the engine's loop never
waits for it. What requests hold meanwhile counts against one allowance of memory, for which further requests wait.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from dflash_jax.engine.ahead_of_time import yield_processors
from dflash_jax.engine.media import PromptMedia
from dflash_jax.errors import InputError
from dflash_jax.frontend.media import MediaReader
from dflash_jax.media.decoding import MediaDecoder
from dflash_jax.media.errors import MediaError
from dflash_jax.media.medium import CHANNELS, Medium
from dflash_jax.media.parts import MediaPart, media_part
from dflash_jax.server.errors import ApiError, ClientGoneError
from dflash_jax.server.request_scope import at_end

# Bytes of encoded and decoded images and videos of all requests that the tower has not encoded yet.
MOST_BYTES = 2**31
# Paths of requests that may have images and videos.
MEDIA_PATHS = frozenset(
    {
        *("/v1/chat/completions", "/v1/chat/completions/batch", "/v1/chat/completions/render"),
        *("/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/generate", "/tokenize", "/invocations"),
    }
)

T = TypeVar("T")


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


class Allowance:
    """Bytes that requests share. A request that does not fit waits for those before it.

    Attributes:
        most: All bytes.
        used: Those in use.
    """

    def __init__(self, most: int, waiting: int):
        """Prepares ``most`` bytes, for which at most ``waiting`` requests wait."""
        self.most, self.used, self._most_waiting = most, 0, waiting
        self._waiting: deque[tuple[int, asyncio.Future]] = deque()

    async def take(self, count: int) -> None:
        """Waits for ``count`` bytes; for all where that is more.

        Raises:
            ApiError: 503, too many wait.
        """
        if len(self._waiting) >= self._most_waiting:
            raise ApiError(503, f"{len(self._waiting)} requests with images or videos wait: try again later")
        entry = min(count, self.most), asyncio.get_running_loop().create_future()
        self._waiting.append(entry)
        self._grant()
        try:
            await entry[1]
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
                self._grant()
            else:
                self.give(entry[0])
            raise

    def give(self, count: int) -> None:
        """Returns bytes."""
        self.used -= count
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self.used + self._waiting[0][0] <= self.most:
            count, granted = self._waiting.popleft()
            self.used += count
            if not granted.done():
                granted.set_result(None)


class Reservation:
    """The bytes that a request has of an `Allowance`."""

    def __init__(self, allowance: Allowance):
        self._allowance, self._count = allowance, 0

    async def take(self, count: int) -> None:
        """Waits for ``count`` bytes, as in `Allowance.take`. They are returned at the request's end at the latest."""
        await self._allowance.take(count)
        self._count = min(count, self._allowance.most)
        at_end(self.release)

    def keep(self, count: int) -> None:
        """Returns all bytes but ``count``, where there are more."""
        returned, self._count = max(self._count - count, 0), min(self._count, count)
        self._allowance.give(returned)

    def release(self) -> None:
        """Returns all bytes."""
        self.keep(0)


@dataclass(frozen=True, eq=False)
class PlacedMedia:
    """The images and videos of a prompt.

    Attributes:
        prompt: As the engine takes them. The tower computes their rows when they are first asked for.
        seconds: Seconds by step: "fetch" (what waits for memory included), "decode", and "tower" once they are encoded.
        reservation: Memory of the pixels.
    """

    prompt: PromptMedia
    seconds: dict[str, float]
    reservation: Reservation


class RequestMedia:
    """Reads and encodes the images and videos of all requests of a server.

    Attributes:
        reader: The vision tower, the preprocessing and the limits.
        decoder: The processes that decode.
        allowance: Memory of what is not encoded yet.
    """

    def __init__(self, reader: MediaReader, most_bytes: int = MOST_BYTES):
        self.reader, self.decoder = reader, MediaDecoder(reader.limits)
        self.allowance = Allowance(most_bytes, reader.limits.waiting)
        # Requests have been admitted: those of many images wait here, where the decoder would refuse them.
        self._decodes = asyncio.Semaphore(reader.limits.decodes)
        self._tower = ThreadPoolExecutor(1, "vision-tower")

    def start(self) -> None:
        """Starts the processes that decode."""
        self.decoder.start()

    def compile(self, positions: int) -> None:
        """Compiles the tower's programs for prompts of ``positions`` tokens; requests have precedence."""
        yield_processors()
        for size in self.reader.encoder.sizes_for(positions):
            self.reader.encoder.compile(size)

    def stop(self) -> None:
        """Ends all fetches and processes, for good."""
        self.decoder.stop()
        self.reader.fetcher.stop()
        self._tower.shutdown(wait=False, cancel_futures=True)

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
            reservation = Reservation(self.allowance)
            media, seconds = await self._read(parts, reservation)
            expanded, prompt = await asyncio.to_thread(self.reader.place, ids, media)
        except MediaError as e:
            raise ApiError(e.status, str(e), field) from None
        except InputError as e:
            raise ApiError(400, str(e), field) from None
        return expanded, PlacedMedia(prompt, seconds, reservation)

    async def _read(
        self, parts: Sequence[MediaPart], reservation: Reservation
    ) -> tuple[list[Medium], dict[str, float]]:
        """The decoded images and videos, and the seconds of both steps."""
        began = time.perf_counter()
        await reservation.take(sum(map(self._bytes, parts)))
        contents = await _all(self._fetched(part) for part in parts)
        fetched = time.perf_counter()
        media = await _all(self._decoded(*each) for each in zip(parts, contents, strict=True))
        reservation.keep(sum(medium.pixels.nbytes for medium in media))
        return media, {"fetch": fetched - began, "decode": time.perf_counter() - fetched}

    def _bytes(self, part: MediaPart) -> int:
        """Bytes that a part may take: encoded, decoded, and as rows."""
        is_data = part.source[:5].lower() == "data:"
        encoded = len(part.source) if is_data else self.reader.limits.item_bytes
        settings, tower = self.reader.settings(part), self.reader.encoder.tower
        rows = settings.max_pixels // settings.factor**2 * tower.config.out_hidden_size * tower.dtype.itemsize
        return encoded + CHANNELS * settings.max_pixels + rows

    async def _fetched(self, part: MediaPart) -> bytes:
        with _named(part):
            return await self.reader.fetcher.fetch(part.source, part.kind)

    async def _decoded(self, part: MediaPart, content: bytes) -> Medium:
        async with self._decodes:
            with _named(part):
                return await self.decoder.decode(content, self.reader.settings(part), part.fps, part.num_frames)

    async def encode(self, media: PlacedMedia) -> None:
        """Runs the tower. It begins no further image or frame where the caller is cancelled."""
        gone, began = threading.Event(), time.perf_counter()

        def run() -> None:
            for span in media.prompt.spans:
                if gone.is_set():
                    raise ClientGoneError
                span.rows()

        try:
            await asyncio.get_running_loop().run_in_executor(self._tower, run)
        finally:
            gone.set()
        # Rows stay until the request ends.
        media.reservation.keep(sum(span.rows().nbytes for span in media.prompt.spans))
        media.seconds["tower"] = time.perf_counter() - began


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


async def _all(work: Iterable[Coroutine[None, None, T]]) -> list[T]:
    """Awaits everything at once. The first error ends the rest."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

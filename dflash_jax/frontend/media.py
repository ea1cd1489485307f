"""Images and videos of prompts: read, and placed among the tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dflash_jax.argument_checks import shown
from dflash_jax.engine.media import PlacedFrame, UnencodedMedia
from dflash_jax.errors import InputError
from dflash_jax.media.errors import MediaError
from dflash_jax.media.fetch import Fetcher
from dflash_jax.media.limits import MediaLimits
from dflash_jax.media.medium import Medium, check_grid
from dflash_jax.media.parts import LOW_PIXELS, MediaPart
from dflash_jax.media.processor import ImageSettings, read_image
from dflash_jax.media.video import VideoSettings, read_video
from dflash_jax.models.config import MediaTokens

SOURCES = {
    "image": "a path, bytes, a PIL image, a data: URL or a uint8 array [height, width, 3]",
    "video": "a path, bytes, a data: URL, or frames: PIL images or a uint8 array [frames, height, width, 3]",
}


@dataclass(frozen=True, eq=False)
class ExpandedPrompt:
    """A prompt as the model reads it.

    Attributes:
        ids: int32 [tokens].
        frames: Where the frames of all images and videos are, in order.
        is_given: Which tokens are the given prompt's text, bool [tokens]: neither pads nor times.
        positions: int32 [3, tokens]: time, height and width.
        rope_delta: What is added to the index of a token after the prompt for its positions.
    """

    ids: np.ndarray
    frames: tuple[PlacedFrame, ...]
    is_given: np.ndarray
    positions: np.ndarray
    rope_delta: int


def expand(
    ids: Sequence[int] | np.ndarray,
    media: Sequence[Medium],
    tokens: MediaTokens,
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
        queues[pad] = iter(indices := [i for i, medium in enumerate(media) if medium.kind == kind])
        if (count := int(np.sum(ids == pad))) != len(indices):
            raise MediaError(f"the prompt has {count} {kind} pads: {len(indices)} {kind}s are given")
    if len(ids) and int(ids[-1]) in pads:
        raise MediaError(
            f"the prompt ends in {pads[int(ids[-1])]} pad {ids[-1]}: at least one token of text must follow"
        )
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    frames: list[PlacedFrame] = []
    length = position = 0

    def add(added: Sequence[int] | np.ndarray, grid: tuple[int, int] | None = None, is_given: bool = False) -> None:
        """Adds text, with equal positions in all three rows, or a frame: one time, and a grid of height and width."""
        nonlocal length, position
        offsets = np.tile(np.arange(len(added)), (3, 1)) if grid is None else np.indices((1, *grid)).reshape(3, -1)
        parts.append((np.asarray(added, np.int32), position + offsets, np.full(len(added), is_given)))
        length += len(added)
        # The next position is one more than the largest of all rows.
        position += len(added) if grid is None else max(grid)

    def add_frame(index: int, frame: int, pad: int) -> None:
        size = media[index].frame_tokens
        frames.append(PlacedFrame(length, size, index, frame * size))
        add(np.full(size, pad), media[index].merged)

    begin = 0
    for end in np.flatnonzero(np.isin(ids, list(pads))).tolist():
        add(ids[begin:end], is_given=True)
        begin, pad = end + 1, int(ids[end])
        index = next(queues[pad])
        if media[index].kind == "image":
            add_frame(index, 0, pad)
            continue
        for frame, seconds in enumerate(media[index].timestamps):
            add([*text_ids(f"<{seconds:.1f} seconds>"), tokens.vision_start])
            add_frame(index, frame, pad)
            add([tokens.vision_end])
    add(ids[begin:], is_given=True)
    all_ids, positions, is_given = (np.concatenate(each, axis=-1) for each in zip(*parts, strict=True))
    return ExpandedPrompt(all_ids, tuple(frames), is_given, positions.astype(np.int32), position - length)


@dataclass(frozen=True)
class MediaReader:
    """Makes images and videos part of prompts.

    Attributes:
        merge_size: Side of the vision tower's merge block in patches.
        tokens: Ids of the model's tokens for media.
        images: Preprocessing of images.
        videos: Preprocessing of videos.
        limits: How many there may be, and how large.
        text_ids: Tokenizes the times between the frames of a video; None without a tokenizer.
        fetcher: Fetches URLs.
    """

    merge_size: int
    tokens: MediaTokens
    images: ImageSettings
    videos: VideoSettings
    limits: MediaLimits
    text_ids: Callable[[str], Sequence[int]] | None
    fetcher: Fetcher

    def settings(self, part: MediaPart) -> ImageSettings:
        """The preprocessing of an image or a video."""
        if part.kind == "video":
            return self.videos
        most = max(min(self.images.max_pixels, LOW_PIXELS), self.images.min_pixels)
        return replace(self.images, max_pixels=most) if part.is_low else self.images

    def read(self, part: MediaPart) -> Medium:
        """Decodes an image or a video of the library's caller, in this process.

        Raises:
            MediaError: It cannot be read.
        """
        source = part.source
        if isinstance(source, Medium):
            return source
        try:
            if isinstance(source, str) and source[:8].partition(":")[0].lower() in ("data", "http", "https", "file"):
                source = self.fetcher.fetch_now(source, part.kind)
            elif isinstance(source, str | Path):
                source = Path(source).expanduser().read_bytes()
            if part.kind == "video":
                settings = self.settings(part)
                assert isinstance(settings, VideoSettings)
                return read_video(_frames(source), settings, self.limits, part.fps, part.num_frames)
            return read_image(_picture(source), self.settings(part), self.limits)
        except OSError as e:
            raise MediaError(f"{part.where}: {shown(part.source)} cannot be read: {e.strerror or e}") from None
        except MediaError as e:
            raise MediaError(f"{part.where}: {e}", e.status) from None
        except InputError as e:
            raise InputError(f"{part.where}: {e}") from None

    def expand(self, ids: Sequence[int], media: Sequence[Medium]) -> ExpandedPrompt:
        """A prompt that has one pad for each image or video, with a pad for each row.

        Args:
            ids: Token ids.
            media: Each kind in the order of its pads; at least one.

        Raises:
            MediaError: The numbers of pads and media differ, or no text follows the last one.
            InputError: One is larger than the tower takes.
        """

        def text_ids(text: str) -> Sequence[int]:
            if self.text_ids is None:
                raise InputError("videos need a tokenizer, and this checkpoint has none")
            return self.text_ids(text)

        for medium in media:
            check_grid(medium.grid, self.merge_size)
        return expand(ids, media, self.tokens, text_ids)

    def place(self, ids: Sequence[int], media: Sequence[Medium]) -> tuple[list[int], UnencodedMedia]:
        """Puts images and videos into a prompt: arguments and errors as of `expand`.

        Returns:
            The token ids with a pad for each row, and the media, which `VisionEncoder.prompt_media` takes.
        """
        prompt = self.expand(ids, media)
        last = prompt.frames[-1]
        positions = np.ascontiguousarray(prompt.positions[:, : last.start + last.length])
        return prompt.ids.tolist(), UnencodedMedia(tuple(media), prompt.frames, positions, prompt.rope_delta)


def media_parts(given: Any, name: str) -> list[MediaPart]:
    """The images and videos of vLLM's ``multi_modal_data``: ``{"image": one or a list, "video": one or a list}``.

    Raises:
        InputError: It has another form.
    """
    if not isinstance(given, Mapping) or set(given) - {"image", "video"}:
        raise InputError(f'{name}["multi_modal_data"] is {shown(given)}: it must be {{"image": …, "video": …}}')
    parts = []
    for kind in ("image", "video"):
        value = given.get(kind)
        if value is None:
            continue
        # A list of frames is one video.
        is_one = kind == "video" and isinstance(value, list) and bool(value) and isinstance(value[0], Image.Image)
        for i, source in enumerate([value] if is_one or not isinstance(value, list) else value):
            if isinstance(source, MediaPart):
                parts.append(source)
                continue
            if kind == "video" and isinstance(source, tuple) and len(source) == 2:
                # vLLM's (frames, metadata).
                source = source[0]
            parts.append(MediaPart(kind, source, f'{name}["multi_modal_data"]["{kind}"][{i}]'))
    return parts


def by_kind(parts: Sequence[MediaPart]) -> dict[str, list[MediaPart]]:
    """The images and videos of a conversation in the form of ``multi_modal_data``."""
    return {kind: own for kind in ("image", "video") if (own := [part for part in parts if part.kind == kind])}


def _picture(source: Any) -> bytes | Image.Image:
    if isinstance(source, bytearray | memoryview):
        return bytes(source)
    if isinstance(source, np.ndarray) and source.dtype == np.uint8 and source.ndim == 3 and source.shape[2] == 3:
        return Image.fromarray(source)
    if not isinstance(source, bytes | Image.Image):
        raise MediaError(f"the image is {shown(source)}: it must be {SOURCES['image']}")
    return source


def _frames(source: Any) -> bytes | list[Image.Image] | np.ndarray:
    if isinstance(source, bytearray | memoryview):
        return bytes(source)
    is_list = isinstance(source, list) and bool(source) and all(isinstance(frame, Image.Image) for frame in source)
    if not isinstance(source, bytes | np.ndarray) and not is_list:
        raise MediaError(f"the video is {shown(source)}: it must be {SOURCES['video']}")
    return source

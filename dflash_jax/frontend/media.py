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
from dflash_jax.media.expand import ExpandedPrompt, expand
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
        prompt, index = self.expand(ids, media), {id(medium): i for i, medium in enumerate(media)}
        frames = tuple(PlacedFrame(s.start, s.tokens, index[id(s.medium)], s.offset) for s in prompt.spans)
        positions = np.ascontiguousarray(prompt.positions[:, : frames[-1].start + frames[-1].length])
        return prompt.ids.tolist(), UnencodedMedia(tuple(media), frames, positions, prompt.rope_delta)


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

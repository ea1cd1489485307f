"""Limits of images and videos: how many, how large, how long."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from dflash_jax.argument_checks import check_fields
from dflash_jax.errors import InputError
from dflash_jax.media.errors import MediaError


@dataclass(frozen=True)
class MediaLimits:
    """Limits of the images and videos of requests.

    Attributes:
        images: Images of a prompt.
        videos: Videos of a prompt.
        item_bytes: Bytes of an encoded image or video.
        pixels: Pixels of a decoded image or frame, before it is resized.
        scans: Scans of a JPEG. Each passes over all pixels, and may have no bytes; usual encoders write 10.
        source_frames: Frames of a video, of which some are sampled.
        image_fetch_s: Seconds of wall time in which an image is fetched, redirects included.
        video_fetch_s: The same of a video.
        redirects: Redirects that a fetch follows.
        image_decode_s: Seconds of processor time in which an image is decoded.
        video_decode_s: The same of a video.
        memory_bytes: Memory of the process that decodes.
        fetches: Fetches at a time.
        decodes: Images and videos decoded at a time.
        waiting: Images and videos that may wait for either.
    """

    images: int = 8
    videos: int = 1
    item_bytes: int = 2**26
    pixels: int = 2**26
    scans: int = 64
    source_frames: int = 2**16
    image_fetch_s: float = 5.0
    video_fetch_s: float = 30.0
    redirects: int = 3
    image_decode_s: int = 10
    video_decode_s: int = 30
    memory_bytes: int = 3 * 2**29
    fetches: int = 8
    decodes: int = 3
    waiting: int = 64

    def __post_init__(self):
        check_fields(self)
        for name, value in vars(self).items():
            if value < 0 or (value == 0 and name not in ("images", "videos", "redirects", "waiting")):
                raise InputError(f"{name} is {value}: it must be positive")

    def decode_s(self, kind: str) -> int:
        """Seconds of processor time in which an "image" or a "video" is decoded."""
        return self.image_decode_s if kind == "image" else self.video_decode_s

    def check_counts(self, kinds: Iterable[str]) -> None:
        """Checks the number of images and videos of a prompt.

        Args:
            kinds: "image" or "video" for each.

        Raises:
            MediaError: There are more than allowed.
        """
        counts = Counter(kinds)
        for kind, most in (("image", self.images), ("video", self.videos)):
            if counts[kind] > most:
                raise MediaError(
                    f"the prompt has {counts[kind]} {kind}s: this server allows {most} (--limit-mm-per-prompt)"
                )


DEFAULT_LIMITS = MediaLimits()

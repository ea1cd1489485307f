"""Videos as Qwen's vision towers read them: sampled frames, their timestamps, one size for all."""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from dflash_jax.errors import InputError
from dflash_jax.media.errors import MediaError
from dflash_jax.media.limits import DEFAULT_LIMITS, MediaLimits
from dflash_jax.media.medium import Medium
from dflash_jax.media.processor import STEPS, ImageSettings, check_area, read_settings, rgb, smart_resize

log = logging.getLogger("dflash_jax.media")

# ffmpeg reads playlists, devices and hundreds of rare formats, too: only these are opened.
CONTAINERS = {b"ftyp": "mp4", b"moov": "mov", b"wide": "mov", b"mdat": "mov"}
MATROSKA = b"\x1a\x45\xdf\xa3"
CODECS = ("h264", "hevc", "av1", "libdav1d", "vp8", "vp9", "libvpx", "libvpx-vp9", "mpeg4", "mjpeg")
FORMATS = "MP4, MOV, WebM and MKV"
DEFAULT_FPS = 24.0
MOST_FPS = 1000.0
# Frames that a decoder's threads work on; their pictures count against the memory.
THREADS = 4


@dataclass(frozen=True)
class VideoSettings(ImageSettings):
    """Preprocessing of videos; the defaults are those of Qwen3.5. Areas are of all frames together.

    Attributes:
        fps: Frames sampled of a second.
        min_frames: Least frames sampled, where the video has as many.
        max_frames: Most frames sampled.
    """

    min_pixels: int = 4_096
    max_pixels: int = 25_165_824
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768


def video_settings(directory: Path) -> VideoSettings:
    """Settings of a checkpoint: ``video_preprocessor_config.json``, or ``processor_config.json``, or the defaults.

    Raises:
        InputError: A file is malformed, or asks for another preprocessing.
    """
    steps = STEPS | {"do_sample_frames": True, "cap_pixels_per_frame": False, "num_frames": None}
    return read_settings(VideoSettings, directory, "video_preprocessor_config.json", "video_processor", steps)


def sample_indices(
    total: int,
    source_fps: float,
    settings: VideoSettings,
    fps: float | None = None,
    num_frames: int | None = None,
) -> np.ndarray:
    """Which frames are sampled.

    Args:
        total: Frames of the video.
        source_fps: Its frames a second.
        settings: The settings.
        fps: Frames sampled of a second, in place of the settings'.
        num_frames: Frames sampled, in place of a rate.

    Returns:
        int64 [frames], ascending.

    Raises:
        MediaError: The video is too short.
        InputError: Both a rate and a number are given, or one is out of range.
    """
    least = settings.temporal_patch_size
    if fps is not None and num_frames is not None:
        raise InputError("fps and num_frames are both given: they exclude one another")
    if fps is not None and not 0 < fps <= MOST_FPS:
        raise InputError(f"fps is {fps}: it must be above 0 and at most {MOST_FPS:g}")
    if num_frames is not None and not least <= num_frames <= settings.max_frames:
        raise InputError(f"num_frames is {num_frames}: it must be from {least} to {settings.max_frames}")
    if total < least:
        raise MediaError(f"it has {total} frames: a video has at least {least}")
    if num_frames is None:
        num_frames = int(total / source_fps * (settings.fps if fps is None else fps))
        num_frames = min(max(num_frames, settings.min_frames), settings.max_frames)
    return np.linspace(0, total - 1, min(num_frames, total)).round().astype(int)


def frame_timestamps(
    indices: Sequence[int] | np.ndarray, source_fps: float, settings: VideoSettings
) -> tuple[float, ...]:
    """Seconds of each temporal patch: the mean of its first and its last frame's times."""
    size = settings.temporal_patch_size
    times = [int(index) / source_fps for index in indices]
    times += times[-1:] * (-len(times) % size)
    return tuple((times[i] + times[i + size - 1]) / 2 for i in range(0, len(times), size))


def video_size(frames: int, height: int, width: int, settings: VideoSettings) -> tuple[int, int]:
    """The height and width to which ``frames`` frames are resized.

    Raises:
        MediaError: One side is more than 200 times as long as the other.
    """
    factor, pairs = settings.factor, settings.temporal_patch_size
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    return smart_resize(height, width, settings, frames, round(frames / pairs) * pairs)


def read_video(
    source: bytes | Sequence[Image.Image] | np.ndarray,
    settings: VideoSettings = VideoSettings(),
    limits: MediaLimits = DEFAULT_LIMITS,
    fps: float | None = None,
    num_frames: int | None = None,
    source_fps: float | None = None,
) -> Medium:
    """Samples and resizes a video.

    Args:
        source: An encoded video (MP4, MOV, WebM or MKV), or all of its frames: images, or uint8
            [frames, height, width, 3].
        settings: The checkpoint's preprocessing.
        limits: The limits.
        fps: Frames sampled of a second, in place of the settings'.
        num_frames: Frames sampled, in place of a rate.
        source_fps: Frames a second of ``source``; None: what the file says, or else 24, with a warning.

    Raises:
        MediaError: It is no video of these formats, is damaged, or exceeds a limit.
        InputError: An argument is wrong, or PyAV is not installed.
    """
    video = _EncodedVideo(source, limits) if isinstance(source, bytes) else _DecodedVideo(source)
    source_fps = source_fps or video.fps
    if source_fps is None:
        log.warning("a video does not say its frames a second: %g are assumed", DEFAULT_FPS)
        source_fps = DEFAULT_FPS
    total = video.total
    while True:
        indices = sample_indices(total, source_fps, settings, fps, num_frames)
        pixels, size = [], None
        for image in video.frames(indices):
            check_area(*image.size, limits)
            size = size or video_size(len(indices), image.height, image.width, settings)
            pixels.append(_resized(image, *size))
        if len(pixels) == len(indices):
            return Medium("video", np.stack(pixels), settings, frame_timestamps(indices, source_fps, settings))
        # The file has fewer frames than packets: those that were decoded are sampled.
        total = min(video.total, total - 1)


def _resized(image: Image.Image, height: int, width: int) -> np.ndarray:
    """uint8 [height, width, 3]; rows first, as torchvision resizes: in one step, Pillow may take columns first."""
    row = image.resize((width, image.height), Image.Resampling.BICUBIC)
    return np.asarray(row.resize((width, height), Image.Resampling.BICUBIC))


class _DecodedVideo:
    """Frames that the caller has decoded, of an unknown rate."""

    fps = None

    def __init__(self, source: Sequence[Image.Image] | np.ndarray):
        if isinstance(source, np.ndarray) and (source.ndim != 4 or source.dtype != np.uint8 or source.shape[3] != 3):
            raise InputError(
                f"the video is {source.dtype} {list(source.shape)}: it must be uint8 [frames, height, width, 3]"
            )
        self._frames, self.total = source, len(source)

    def frames(self, indices: np.ndarray) -> Iterator[Image.Image]:
        """The frames of these indices, in RGB."""
        for index in indices:
            frame = self._frames[index]
            yield rgb(frame) if isinstance(frame, Image.Image) else Image.fromarray(np.asarray(frame))


class _EncodedVideo:
    """A file in memory.

    Attributes:
        total: Number of frames: packets at first, then what was decoded.
        fps: Frames a second; None where the file does not say it.
    """

    def __init__(self, data: bytes, limits: MediaLimits):
        try:
            import av
        except ImportError:
            raise InputError("videos need PyAV: pip install 'dflash-jax[video]'") from None
        self._av, self._data = av, data
        self._container = "matroska" if data[:4] == MATROSKA else CONTAINERS.get(data[4:8])
        if self._container is None:
            raise MediaError(f"it is no video: {FORMATS} are possible")
        with self._opened() as (container, stream):
            if (codec := stream.codec_context.name) not in CODECS:
                raise MediaError(f"its codec is {codec}: {', '.join(CODECS)} are possible")
            check_area(stream.codec_context.width, stream.codec_context.height, limits)
            rate = stream.average_rate
            self.fps = float(rate) if rate and math.isfinite(rate) and rate > 0 else None
            self.total = 0
            for packet in container.demux(stream):
                self.total += packet.size > 0 and not packet.is_discard
                if self.total > limits.source_frames:
                    raise MediaError(f"it has more than {limits.source_frames} frames", 413)

    @contextmanager
    def _opened(self):
        """The container and its video stream. Errors of ffmpeg are MediaErrors."""
        try:
            with self._av.open(BytesIO(self._data), format=self._container) as container:
                stream = container.streams.best("video")
                # ffmpeg knows a stream without its codec in a file that is cut within its index.
                if stream is None or stream.codec_context is None:
                    raise MediaError("it has no video stream that can be decoded")
                yield container, stream
        except MemoryError:
            raise
        except (self._av.error.FFmpegError, ValueError) as e:
            if isinstance(e, InputError):
                raise
            raise MediaError(f"it cannot be decoded as a video: {FORMATS} are possible") from None

    def frames(self, indices: np.ndarray) -> Iterator[Image.Image]:
        """Decodes the frames of these ascending indices, in RGB; fewer where the file has fewer.

        Then ``total`` is the number of those that it has.
        """
        wanted = iter(indices)
        index = next(wanted)
        count = 0
        with self._opened() as (container, stream):
            stream.thread_type, stream.codec_context.thread_count = "AUTO", THREADS
            for count, frame in enumerate(container.decode(stream), 1):
                if count - 1 < index:
                    continue
                picture = Image.fromarray(frame.to_ndarray(format="rgb24"))
                # Upright cameras write a rotation beside the frames.
                turns = round(frame.rotation / 90) * 90
                yield picture.rotate(turns, expand=True) if turns else picture
                if (index := next(wanted, None)) is None:
                    return
        self.total = count

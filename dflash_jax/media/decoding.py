"""Images and videos, decoded in separate processes within limits; see `decode_worker`."""

import asyncio
import json
import os
import socket
import tempfile
from dataclasses import asdict
from typing import BinaryIO

import numpy as np

from dflash_jax.media.data_url import DataUrl
from dflash_jax.media.errors import MediaError
from dflash_jax.media.limits import DEFAULT_LIMITS, MediaLimits
from dflash_jax.media.medium import Medium
from dflash_jax.media.processor import ImageSettings
from dflash_jax.media.video import VideoSettings
from dflash_jax.workers.process import Nursery

CANNOT_START = "images and videos need Pillow, which does not start here"


class MediaDecoder:
    """Decodes images and videos, each in a process of its own, which is forked from one that starts on first use.

    Attributes:
        limits: The limits.
    """

    def __init__(self, limits: MediaLimits = DEFAULT_LIMITS):
        self.limits = limits
        self._nursery = Nursery("dflash_jax.media.decode_worker", {}, CANNOT_START)

    def start(self) -> None:
        """Starts the first process, which takes half a second."""
        self._nursery.start()

    def stop(self) -> None:
        """Ends it, for good."""
        self._nursery.stop()

    async def decode(
        self,
        data: bytes | DataUrl,
        settings: ImageSettings,
        fps: float | None = None,
        num_frames: int | None = None,
    ) -> Medium:
        """Decodes and resizes an image or a video.

        Args:
            data: The encoded image or video; the base64 of a URL is decoded in the process, too.
            settings: The checkpoint's preprocessing: `VideoSettings` for a video.
            fps: Frames sampled of a second of a video, in place of the settings'.
            num_frames: Frames sampled of a video, in place of a rate.

        Raises:
            MediaError: It cannot be decoded, exceeds a limit, or the decoder is being restarted.
        """
        kind = "video" if isinstance(settings, VideoSettings) else "image"
        request = {"kind": kind, "settings": asdict(settings), "limits": asdict(self.limits)}
        request |= {"fps": fps, "num_frames": num_frames, "url": data.name if isinstance(data, DataUrl) else None}
        with _memory_file() as source, _memory_file() as target:
            # Tens of megabytes take a while, in which the event loop serves others.
            await asyncio.to_thread(_write, source, data)
            answer = await self._answer(request, source, target)
            if "error" in answer:
                raise MediaError(answer["error"], answer["status"])
            # Not mapped: the server would crash where the file is cut.
            pixels = np.frombuffer(await asyncio.to_thread(_read, target), np.uint8).reshape(answer["shape"])
        return Medium(kind, pixels, settings, tuple(answer["timestamps"]), bytes.fromhex(answer["key"]))

    async def _answer(self, request: dict, source: BinaryIO, target: BinaryIO) -> dict:
        """The answer of a process, which has ended then, and has where the caller is cancelled."""
        limits, process = self.limits, None
        try:
            process = await self._nursery.forked()
            socket.send_fds(process.socket, [b"\0"], [source.fileno(), target.fileno()])
            return json.loads(await process.ask(json.dumps(request).encode()))
        except (EOFError, OSError):
            if process is None:
                raise MediaError("the decoder of images and videos is being restarted", 503) from None
            most = f"{limits.decode_s(request['kind'])} s of processor time or {limits.memory_bytes >> 20} MiB"
            raise MediaError(f"it needs more than {most} to decode, or is damaged", 413) from None
        finally:
            if process is not None:
                process.end()


def _memory_file() -> BinaryIO:
    """A file without a name; in memory, where the system has such."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("medium"), "w+b")
    return tempfile.TemporaryFile()


def _write(file: BinaryIO, data: bytes | DataUrl) -> None:
    if isinstance(data, DataUrl):
        data.write(file)
    else:
        file.write(data)
    file.flush()


def _read(file: BinaryIO) -> bytes:
    # The process that wrote has moved the position, which all descriptors of a file share.
    file.seek(0)
    return file.read()

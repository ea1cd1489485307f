"""The processes that decode images and videos: ``python -m dflash_jax.media.decode_worker FD``.

Decoders are native code that reads bytes from anywhere: a few of them may take gigabytes, never return, or be made to
crash. The nursery imports the decoders and forks a process for each image or video; `decoding.py` has the other ends of
their sockets.

The descriptors of two files come first, one with the encoded bytes or their base64, one for the pixels; then frames of
JSON go in and out.
"""

import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dflash_jax.errors import InputError
from dflash_jax.media.data_url import decoded, pieces_of
from dflash_jax.media.errors import MediaError
from dflash_jax.media.limits import MediaLimits
from dflash_jax.media.processor import ImageSettings, read_image
from dflash_jax.media.video import VideoSettings, read_video
from dflash_jax.workers.loop import NICENESS, Frames, limit_memory, limit_seconds, run_nursery


def _prepare(_: dict) -> Callable[[Frames], None]:
    os.nice(NICENESS)
    # Forks share the libraries. Without PyAV, videos are refused.
    with suppress(ImportError):
        import av  # noqa: F401
    return _decode


def _decode(frames: Frames) -> None:
    """Decodes one image or video."""
    _, (source, target), _, _ = socket.recv_fds(frames.socket, 1, 2)
    request = frames.read()
    limits = MediaLimits(**request["limits"])
    limit_memory(limits.memory_bytes)
    limit_seconds(limits.decode_s(request["kind"]))
    try:
        with open(source, "rb") as file:
            pieces = pieces_of(file)
            data = (
                b"".join(pieces)
                if request["url"] is None
                else decoded(pieces, f"the URL is {request['url']}", limits.item_bytes)
            )
        settings: dict[str, Any] = {
            key: tuple(v) if isinstance(v, list) else v for key, v in request["settings"].items()
        }
        if request["kind"] == "image":
            medium = read_image(data, ImageSettings(**settings), limits)
        else:
            medium = read_video(data, VideoSettings(**settings), limits, request["fps"], request["num_frames"])
        with open(target, "wb") as file:
            file.write(medium.pixels.data)
        answer = {"shape": medium.pixels.shape, "timestamps": medium.timestamps, "key": medium.key.hex()}
    except MediaError as e:
        answer = {"error": str(e), "status": e.status}
    except InputError as e:
        answer = {"error": str(e), "status": 400}
    except MemoryError:
        answer = {"error": f"it needs more than {limits.memory_bytes >> 20} MiB to decode", "status": 413}
    except Exception:  # decoders raise many types for what is damaged
        answer = {"error": "it is damaged: it cannot be decoded", "status": 400}
    frames.send(json.dumps(answer).encode())


if __name__ == "__main__":
    run_nursery(_prepare)

"""Decoding in processes of their own: what an image or a video does there ends as an error, and others go on."""

import asyncio
import base64
import io
import os
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from dflash_jax.media import data_url
from dflash_jax.media.data_url import DataUrl
from dflash_jax.media.decoding import MediaDecoder
from dflash_jax.media.errors import MediaError
from dflash_jax.media.limits import MediaLimits
from dflash_jax.media.medium import Medium
from dflash_jax.media.processor import ImageSettings, read_image
from dflash_jax.media.video import VideoSettings, read_video
from tests.media.encoded import clip, encoded, picture
from tests.media.test_fetch import DATA_URLS
from tests.server.conftest import wait_until

IMAGES, VIDEOS = ImageSettings(), VideoSettings()
PNG = encoded(picture(33, 50))
# Processor time of a machine that is as slow as may be.
PATIENT = MediaLimits(image_decode_s=300, video_decode_s=300)


@pytest.fixture(scope="module")
def decoder():
    decoder = MediaDecoder(PATIENT)
    yield decoder
    decoder.stop()


def decoded(decoder: MediaDecoder, *contents: bytes | DataUrl, settings=IMAGES, **options) -> list:
    """What each content gives, all at once: a `Medium` or an error."""

    async def main():
        work = (decoder.decode(content, settings, **options) for content in contents)
        return await asyncio.gather(*work, return_exceptions=True)

    return asyncio.run(main())


def same(medium: Medium, right: Medium) -> bool:
    return medium.key == right.key and np.array_equal(medium.pixels, right.pixels)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, rows: int, *more: bytes) -> bytes:
    """A black PNG with ``rows`` rows of data, whatever its header says, and ``more`` chunks."""
    packed = zlib.compressobj(9)
    line = bytes(1 + 3 * width)
    data = b"".join(packed.compress(line) for _ in range(rows)) + packed.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = (chunk(b"IHDR", header), *more, chunk(b"IDAT", data), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def long_gif() -> bytes:
    data = io.BytesIO()
    frame = Image.new("P", (64, 64))
    frame.save(data, "GIF", save_all=True, append_images=[Image.new("P", (64, 64), i % 2) for i in range(999)])
    return data.getvalue()


def test_a_process_gives_what_the_library_gives(decoder):
    (image,) = decoded(decoder, PNG)
    assert same(image, read_image(PNG))
    content = clip(frames=6, rate=2)
    (video,) = decoded(decoder, content, settings=VIDEOS, num_frames=4)
    assert same(video, read_video(content, num_frames=4))
    assert video.timestamps == read_video(content, num_frames=4).timestamps


def test_the_base64_of_a_url_is_decoded_in_the_process(decoder, monkeypatch):
    monkeypatch.setattr(data_url, "PIECE_CHARACTERS", 64)
    monkeypatch.setattr(data_url, "decoded", None)
    url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    (found,) = decoded(decoder, DataUrl(url, len(PNG)))
    assert same(found, read_image(PNG))


@pytest.mark.parametrize(("url", "status"), [case for case in DATA_URLS if ";base64," in case[0][:256]])
def test_malformed_base64_is_refused_as_where_it_is_fetched(url, status):
    decoder = MediaDecoder(replace(PATIENT, item_bytes=2**20))
    try:
        given = DataUrl(url, 2**20)
    except MediaError as e:
        error = e
    else:
        (error,) = decoded(decoder, given)
    finally:
        decoder.stop()
    assert isinstance(error, MediaError)
    assert error.status == status
    assert "base64 is malformed" in str(error) or status == 413
    assert len(str(error)) < 200


ATTACKS = {
    "a header of 100,000 × 100,000": (png(100_000, 100_000, 1), IMAGES, 413),
    "a header of 8,192 × 8,193": (png(8192, 8193, 1), IMAGES, 413),
    "1 × 20,000": (encoded(picture(1, 20_000)), IMAGES, 400),
    "text of 2 GiB": (png(64, 64, 64, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**26)))), IMAGES, 400),
    "no end": (PNG[:400], IMAGES, 400),
    "half of an mp4": (clip()[:1500], VIDEOS, 400),
    "an image as a video": (PNG, VIDEOS, 400),
    "a video as an image": (clip(frames=4), IMAGES, 400),
    "a playlist": (b"#EXTM3U\nfile:///etc/passwd\n", VIDEOS, 400),
    "zeros": (bytes(2**20), IMAGES, 400),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused_and_another_image_is_decoded_beside_it(decoder, name):
    content, settings, status = ATTACKS[name]

    async def main():
        attack = decoder.decode(content, settings)
        return await asyncio.gather(attack, decoder.decode(PNG, IMAGES), return_exceptions=True)

    error, other = asyncio.run(main())
    assert isinstance(error, MediaError)
    assert error.status == status
    assert same(other, read_image(PNG))


def test_a_gif_of_many_frames_is_its_first_one(decoder):
    content = long_gif()
    (found,) = decoded(decoder, content)
    assert same(found, read_image(content))


def test_memory_is_limited():
    decoder = MediaDecoder(replace(PATIENT, memory_bytes=2**27))
    try:
        # 8,192 × 8,192 pixels are 201 MB.
        (error,) = decoded(decoder, png(8192, 8192, 8192))
        assert isinstance(error, MediaError)
        assert "it needs more than 128 MiB" in str(error)
        assert error.status == 413
    finally:
        decoder.stop()


@pytest.fixture(scope="module")
def long_video() -> bytes:
    """A video that takes any processor more than a second."""
    return clip(frames=400, rate=30, height=720, width=1280)


@pytest.mark.parametrize("kind", ["image", "video"])
def test_processor_time_is_limited_for_each_kind(long_video, kind):
    decoder = MediaDecoder(replace(PATIENT, **{f"{kind}_decode_s": 1}))
    try:
        if kind == "video":
            (error,) = decoded(decoder, long_video, settings=VIDEOS, num_frames=400)
        else:
            # Chunks of 24 MB are read one by one, whatever the number of pixels.
            (error,) = decoded(decoder, png(1, 1, 1, chunk(b"prVt", b"") * 2_000_000))
        assert isinstance(error, MediaError)
        assert "it needs more than 1 s of processor time" in str(error)
        assert error.status == 413
    finally:
        decoder.stop()


def test_a_process_that_is_killed_is_an_error_of_its_image_and_is_replaced(decoder, monkeypatch):
    """A crash of native code looks like this."""
    forked, killed = decoder._nursery.forked, []

    async def broken():
        process = await forked()
        while process.pid is None:
            process.poll()
            await asyncio.sleep(0.01)
        killed.append(process.kill())
        return process

    monkeypatch.setattr(decoder._nursery, "forked", broken)
    (error,) = decoded(decoder, PNG)
    assert isinstance(error, MediaError)
    assert (error.status, "is damaged" in str(error)) == (413, True)
    assert killed == [True]
    monkeypatch.setattr(decoder._nursery, "forked", forked)
    (found,) = decoded(decoder, PNG)
    assert same(found, read_image(PNG))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_cancelled_decode_ends_its_process(decoder, long_video, monkeypatch):
    forked, started = decoder._nursery.forked, []

    async def seen():
        started.append(await forked())
        return started[-1]

    monkeypatch.setattr(decoder._nursery, "forked", seen)

    async def main():
        task = asyncio.create_task(decoder.decode(long_video, VIDEOS, num_frames=400))
        while not started or started[0].pid is None:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert wait_until(lambda: not is_running(started[0].pid))

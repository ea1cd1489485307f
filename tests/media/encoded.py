"""Images and videos as files have them."""

import io

import av
import numpy as np
from PIL import Image


def picture(height: int, width: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """An image of noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(noise, "RGBA" if mode in ("RGBA", "LA", "P") else "RGBX").convert(mode)


def encoded(image: Image.Image, form: str = "PNG", **options) -> bytes:
    data = io.BytesIO()
    image.save(data, form, **options)
    return data.getvalue()


def clip(
    frames: int = 35,
    rate: int = 10,
    form: str = "mp4",
    codec: str = "libx264",
    height: int = 96,
    width: int = 128,
    rotation: int = 0,
) -> bytes:
    """A video; frame i has the grey value 7 i, and its upper left quarter is white."""
    data = io.BytesIO()
    with av.open(data, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate, options={"preset": "ultrafast"} if codec == "libx264" else {})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        if rotation:
            stream.set_display_rotation(rotation)
        for i in range(frames):
            pixels = np.full((height, width, 3), 7 * i % 256, np.uint8)
            pixels[: height // 2, : width // 2] = 255
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return data.getvalue()

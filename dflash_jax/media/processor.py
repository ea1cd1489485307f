"""Images as Qwen's vision towers read them, equal to the last bit to transformers' processor with Pillow."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image, ImageOps
from PIL.JpegImagePlugin import JpegImageFile

from dflash_jax.argument_checks import shown
from dflash_jax.errors import InputError
from dflash_jax.media.errors import MediaError
from dflash_jax.media.limits import DEFAULT_LIMITS, MediaLimits
from dflash_jax.media.medium import Medium, PatchSettings

# Pillow tries no other decoder, whatever the content.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
MOST_ASPECT_RATIO = 200
# A marker of a JPEG; within a scan, other bytes are 0xFF only before a zero or as a restart marker.
JPEG_MARKER = re.compile(rb"\xff+([\x01-\xcf\xd8-\xfe])")
START_OF_IMAGE, END_OF_IMAGE, START_OF_SCAN = 0xD8, 0xD9, 0xDA
# What this module does, whether or not a checkpoint's file says so.
STEPS = {
    "do_convert_rgb": True,
    "do_resize": True,
    "resample": int(Image.Resampling.BICUBIC),
    "do_rescale": True,
    "do_normalize": True,
}


@dataclass(frozen=True)
class ImageSettings(PatchSettings):
    """Preprocessing of images; the defaults are those of Qwen3.5.

    Attributes:
        min_pixels: Smaller images are scaled up to this area.
        max_pixels: Larger images are scaled down to this area.
    """

    min_pixels: int = 65_536
    max_pixels: int = 16_777_216


S = TypeVar("S", bound=ImageSettings)


def image_settings(directory: Path) -> ImageSettings:
    """Settings of a checkpoint: ``preprocessor_config.json``, or ``processor_config.json``, or the defaults.

    Raises:
        InputError: A file is malformed, or asks for another preprocessing.
    """
    return read_settings(ImageSettings, directory, "preprocessor_config.json", "image_processor", STEPS)


def read_settings(kind: type[S], directory: Path, name: str, section: str, steps: Mapping[str, Any]) -> S:
    """Settings from the fields of a processor's file; those that it lacks have their defaults.

    Args:
        kind: The dataclass of the settings.
        directory: The checkpoint.
        name: The file of this processor alone.
        section: Its key in ``processor_config.json``, which newer versions of transformers write.
        steps: Fields that must have these values where the file has them.

    Raises:
        InputError: A file has no JSON object, or a field has a wrong value.
    """
    values, where = {}, str(directory / name)
    for path, key in ((directory / name, None), (directory / "processor_config.json", section)):
        if path.is_file():
            try:
                found = json.loads(path.read_text())
            except ValueError as e:
                raise InputError(f"{path}: it is no JSON: {e}") from None
            found = found.get(key) if key and isinstance(found, dict) else found
            if found is None:
                continue
            if not isinstance(found, dict):
                raise InputError(f"{path}: it has {shown(found)} in place of a processor's fields")
            values, where = found, str(path)
            break
    for key, value in steps.items():
        if values.get(key) not in (None, value):
            raise InputError(f"{where}: {key} is {shown(values[key])}: only {value} is supported")
    size = values.get("size") or {}
    if not isinstance(size, dict):
        raise InputError(f"{where}: size is {shown(size)}: it must have shortest_edge and longest_edge")
    # The names of `size` say edges; the numbers are areas.
    areas = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
    names = {"mean": "image_mean", "std": "image_std"}
    given: dict[str, Any] = {each.name: values.get(names.get(each.name, each.name)) for each in fields(kind)}
    given |= {name: area for name, area in areas.items() if area is not None}
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if v is not None}
    try:
        settings = kind(**given)
    except InputError as e:
        raise InputError(f"{where}: {e}") from None
    if settings.max_pixels < settings.min_pixels:
        raise InputError(f"{where}: longest_edge is {settings.max_pixels}: below shortest_edge, {settings.min_pixels}")
    return settings


def smart_resize(
    height: int,
    width: int,
    settings: ImageSettings,
    frames: int = 1,
    rounded_frames: int = 1,
) -> tuple[int, int]:
    """The height and width to which images are resized.

    Both become multiples of ``settings.factor``, their ratio is nearly kept, and their area is within the settings.

    Args:
        height: Height in pixels.
        width: Width in pixels.
        settings: The settings.
        frames: Frames of a video.
        rounded_frames: The frames that count against the area's limits.

    Raises:
        MediaError: One side is more than 200 times as long as the other.
    """
    if max(height, width) > MOST_ASPECT_RATIO * min(height, width):
        raise MediaError(
            f"it has {width} × {height} pixels: the longer side may be at most {MOST_ASPECT_RATIO} times the shorter"
        )
    factor, area = settings.factor, frames * height * width
    # Python's round, half to even, as transformers has it.
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    new_area = rounded_frames * new_height * new_width
    if new_area > settings.max_pixels:
        beta = math.sqrt(area / settings.max_pixels)
        new_height = max(factor, math.floor(height / beta / factor) * factor)
        new_width = max(factor, math.floor(width / beta / factor) * factor)
    elif new_area < settings.min_pixels:
        beta = math.sqrt(settings.min_pixels / area)
        new_height = math.ceil(height * beta / factor) * factor
        new_width = math.ceil(width * beta / factor) * factor
    return new_height, new_width


def rgb(image: Image.Image) -> Image.Image:
    """``image`` in RGB; what is transparent becomes white."""
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return image.convert("RGB")


def check_area(width: int, height: int, limits: MediaLimits) -> None:
    """Raises MediaError for more pixels than ``limits`` allow."""
    if width * height > limits.pixels:
        raise MediaError(f"it has {width} × {height} pixels: at most {limits.pixels} are allowed", 413)


def check_scans(jpeg: bytes, limits: MediaLimits) -> None:
    """Raises MediaError for more scans than ``limits`` allow."""
    scans = at = 0
    while (marker := JPEG_MARKER.search(jpeg, at)) and (kind := marker[1][0]) != END_OF_IMAGE:
        at = marker.end()
        if kind not in (0x01, START_OF_IMAGE):
            at += int.from_bytes(jpeg[at : at + 2], "big")
        scans += kind == START_OF_SCAN
        if scans > limits.scans:
            raise MediaError(f"it has more than {limits.scans} scans", 413)


def read_image(
    source: bytes | Image.Image,
    settings: ImageSettings = ImageSettings(),
    limits: MediaLimits = DEFAULT_LIMITS,
) -> Medium:
    """Decodes and resizes an image.

    Args:
        source: An encoded image (JPEG, PNG, WebP, GIF, of which the first frame is used, or BMP), or an open one.
        settings: The checkpoint's preprocessing.
        limits: The limits.

    Raises:
        MediaError: It is no image of these formats, is damaged, or exceeds a limit.
    """
    try:
        image = Image.open(BytesIO(source), formats=FORMATS) if isinstance(source, bytes) else source
        check_area(*image.size, limits)
        if isinstance(source, bytes) and isinstance(image, JpegImageFile):
            check_scans(source, limits)
        image = rgb(ImageOps.exif_transpose(image))
    except (MediaError, MemoryError):
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise MediaError(f"it has more than {limits.pixels} pixels", 413) from None
    # The decoder of a damaged file may raise anything.
    except Exception:
        raise MediaError(f"it cannot be decoded as an image: {', '.join(FORMATS)} are possible") from None
    height, width = smart_resize(image.height, image.width, settings)
    pixels = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
    return Medium("image", pixels[None], settings)

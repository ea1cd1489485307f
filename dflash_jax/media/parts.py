"""Images and videos among the contents of messages: what templates read in their place, and where their bytes are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_jax.argument_checks import has_type, shown
from dflash_jax.media.errors import MediaError
from dflash_jax.media.medium import Kind

# Types of parts, and the kind and the key of each: OpenAI's, vLLM's, and those of templates themselves.
TYPES: dict[str, tuple[Kind, str]] = {
    "image": ("image", "image"),
    "image_url": ("image", "image_url"),
    "input_image": ("image", "image_url"),
    "image_pil": ("image", "image_pil"),
    "video": ("video", "video"),
    "video_url": ("video", "video_url"),
    "input_video": ("video", "video_url"),
}
DETAILS = ("auto", "low", "high")
# What other tools take beside a source, and what would give other pixels or frames than the checkpoint's settings.
OTHER_SETTINGS = (
    *("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width", "size"),
    *("min_frames", "max_frames", "nframes", "video_start", "video_end"),
)
# Pixels of an image of low detail: OpenAI's 512 by 512.
LOW_PIXELS = 512 * 512


@dataclass(frozen=True, eq=False)
class MediaPart:
    """An image or a video of a prompt, before it is read.

    Attributes:
        kind: "image" or "video".
        source: A URL, or in the library a path, bytes, a PIL image or frames.
        where: Names it in errors.
        is_low: Whether an image is read at low detail.
        fps: Frames of a video that are sampled a second; None for the checkpoint's.
        num_frames: Frames that are sampled in all; None for the checkpoint's.
    """

    kind: Kind
    source: Any
    where: str
    is_low: bool = False
    fps: float | None = None
    num_frames: int | None = None


def is_medium(part: Mapping[str, Any]) -> bool:
    """Whether a part of a message's content is an image or a video."""
    return part.get("type") in TYPES


def media_part(part: Mapping[str, Any], where: str) -> MediaPart:
    """Reads a part of a message's content.

    Args:
        part: Such as ``{"type": "image_url", "image_url": {"url": U, "detail": "low"}}``. The value under the type's
            key may be the source itself.
        where: Names it in errors.

    Raises:
        MediaError: A field is missing or wrong.
    """
    kind, key = TYPES[part["type"]]
    source = part.get(key)
    options = dict(part)
    if isinstance(source, Mapping):
        options |= source
        source = source.get("url")
    if source is None:
        raise MediaError(f"{where}: a part of type {part['type']} needs {key}")
    detail, fps, num_frames = options.get("detail") or "auto", options.get("fps"), options.get("num_frames")
    if detail not in DETAILS:
        raise MediaError(f"{where}: detail is {shown(detail)}: it must be {', '.join(DETAILS)}")
    for name in OTHER_SETTINGS:
        if options.get(name) is not None:
            possible = "fps or num_frames" if kind == "video" else "detail"
            raise MediaError(f"{where}: {name} is not possible: use {possible}")
    if fps is not None and not has_type(fps, float):
        raise MediaError(f"{where}: fps is {shown(fps)}: it must be a number")
    if num_frames is not None and not has_type(num_frames, int):
        raise MediaError(f"{where}: num_frames is {shown(num_frames)}: it must be a whole number")
    return MediaPart(kind, source, where, detail == "low", fps, num_frames)


def split_media(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict], list[MediaPart]]:
    """Takes images and videos out of a conversation.

    Args:
        messages: Messages; a content that is a list has parts with a type.

    Returns:
        The messages as templates read them, and what was taken out, in order.

    Raises:
        MediaError: A part is wrong.
    """
    rendered, parts = [], []
    for i, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list) or not any(isinstance(p, Mapping) and is_medium(p) for p in content):
            rendered.append(dict(message))
            continue
        shown_parts = []
        for j, part in enumerate(content):
            if isinstance(part, Mapping) and is_medium(part):
                parts.append(media_part(part, f"messages[{i}].content[{j}]"))
                part = {"type": parts[-1].kind}
            shown_parts.append(part)
        rendered.append({**message, "content": shown_parts})
    return rendered, parts

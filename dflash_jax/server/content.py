"""Contents of messages: text, and the images and videos among it."""

from collections.abc import Sequence

from dflash_jax.media.parts import TYPES, MediaPart
from dflash_jax.server import chat_schema
from dflash_jax.server.errors import ApiError
from dflash_jax.server.media import url_part

ONLY_TEXT = "only text is possible, images and video are not"


def text_of(content: str | Sequence[chat_schema.Part] | None, where: str) -> str:
    """Joins text parts; a refusal is text too.

    Raises:
        ApiError: A part is no text.
    """
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(text_of_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))


def text_of_part(part: chat_schema.Part, where: str, possible: str = ONLY_TEXT) -> str:
    """The text of a part.

    Raises:
        ApiError: It is no text.
    """
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in ("text", "input_text", "output_text", "refusal") or text is None:
        name = f"{part.where or where}.type"
        raise ApiError(400, f"{name} is {part.type!r}: {possible}", name)
    return text


def has_media(content: str | Sequence[chat_schema.Part] | None) -> bool:
    """Whether a content has images or videos."""
    return content is not None and not isinstance(content, str) and any(part.type in TYPES for part in content)


def parts_or_text(content: Sequence[chat_schema.Part], where: str) -> str | list[chat_schema.Part]:
    """The parts of a content that has images or videos, with their names in errors; else its text.

    Raises:
        ApiError: The content has no images and videos, and a part is no text.
    """
    if not has_media(content):
        return text_of(content, where)
    return [part if part.where else part.named(f"{where}.content[{i}]") for i, part in enumerate(content)]


def with_media(content: Sequence[chat_schema.Part], where: str) -> tuple[list[dict], list[MediaPart]]:
    """A content as chat templates read it, and its images and videos."""
    shown, media = [], []
    for i, part in enumerate(content):
        at = part.where or f"{where}.content[{i}]"
        if part.type not in TYPES:
            possible = "text, images and videos are possible"
            shown.append({"type": "text", "text": text_of_part(part, at, possible)})
            continue
        media.append(url_part({"type": part.type, **(part.model_extra or {})}, at))
        shown.append({"type": media[-1].kind})
    return shown, media

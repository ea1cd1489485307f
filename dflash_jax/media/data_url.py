"""Contents of ``data:`` URLs, decoded where they are read: for the server, in the process of the decoder.

Decoding 40 MB of base64 takes Python's interpreter lock for 0.1 s.
"""

import binascii
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from dflash_jax.argument_checks import shown
from dflash_jax.media.errors import MediaError

# The header of a data: URL ends within.
MOST_HEADER_CHARACTERS = 256
# Characters of base64 that are written or decoded at a time, between which other threads run.
PIECE_CHARACTERS = 2**20


class DataUrl:
    """A ``data:`` URL whose content is base64, which is not checked until it is decoded.

    Attributes:
        name: The URL as messages show it.
        most_bytes: Most bytes of the content.
    """

    def __init__(self, url: str, most_bytes: int):
        """Checks the header and the length of ``url``.

        Raises:
            MediaError: It is not in base64, or too large.
        """
        self.name, self.most_bytes, self._url = shown(url), most_bytes, url
        comma = url.find(",", 0, MOST_HEADER_CHARACTERS)
        if comma < 0 or not url[:comma].lower().endswith(";base64"):
            raise MediaError(f"the URL is {self.name}: a data: URL must be like data:image/png;base64,…")
        if 3 * (len(url) - comma - 1) // 4 > most_bytes + 2:
            raise MediaError(f"a data: URL has more than {most_bytes} bytes", 413)
        self._start = comma + 1

    def _pieces(self) -> Iterator[bytes]:
        for start in range(self._start, len(self._url), PIECE_CHARACTERS):
            # No character beyond ASCII is base64, and neither is its replacement.
            yield self._url[start : start + PIECE_CHARACTERS].encode("ascii", "replace")

    def write(self, file: BinaryIO) -> None:
        """Writes the base64."""
        for piece in self._pieces():
            file.write(piece)

    def content(self) -> bytes:
        """The content.

        Raises:
            MediaError: As of `decoded`.
        """
        return decoded(self._pieces(), f"the URL is {self.name}", self.most_bytes)


def pieces_of(file: BinaryIO) -> Iterator[bytes]:
    """What `DataUrl.write` wrote, from its beginning on."""
    file.seek(0)
    while piece := file.read(PIECE_CHARACTERS):
        yield piece


def decoded(pieces: Iterable[bytes], name: str, most_bytes: int) -> bytes:
    """Decodes base64.

    Args:
        pieces: The base64; each piece but the last one has a multiple of four characters.
        name: What it is, for errors.
        most_bytes: Most bytes of the content.

    Raises:
        MediaError: It is malformed, or has more bytes.
    """
    content, has_ended = bytearray(), False
    for piece in pieces:
        try:
            # Padding elsewhere than at the end is refused, too.
            if has_ended:
                raise ValueError
            content += binascii.a2b_base64(piece, strict_mode=True)
        except ValueError:
            raise MediaError(f"{name}: its base64 is malformed") from None
        has_ended = b"=" in piece
    if len(content) > most_bytes:
        raise MediaError(f"{name}: it has more than {most_bytes} bytes", 413)
    return bytes(content)

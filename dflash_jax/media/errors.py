"""The error of an image or a video that a request names."""

from dflash_jax.errors import InputError


class MediaError(InputError):
    """An image or a video cannot be used.

    Messages name neither addresses of the network nor paths outside the allowed directory.

    Attributes:
        status: The HTTP status that says the same: 400 malformed, 413 too large, 422 cannot be fetched, 503 the server
            is busy.
    """

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status

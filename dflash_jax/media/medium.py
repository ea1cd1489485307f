"""A decoded, resized image or video, and its patches."""

from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Literal

import numpy as np

from dflash_jax.argument_checks import check_fields
from dflash_jax.errors import InputError

Kind = Literal["image", "video"]
CHANNELS = 3
# Patches of an image or frame at most: the largest images of published checkpoints have 16,777,216 pixels, which are as
# many patches of 16 by 16.
MOST_PATCHES = 2**16


@dataclass(frozen=True)
class PatchSettings:
    """How pixels become patches.

    Attributes:
        patch_size: Side of a patch in pixels.
        temporal_patch_size: Frames of a patch.
        merge_size: Side, in patches, of the block that becomes one token.
        mean: Mean of each channel, subtracted after scaling.
        std: Standard deviation of each channel.
        rescale_factor: Factor of the pixels' values.
    """

    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2
    mean: tuple[float, ...] = (0.5,) * CHANNELS
    std: tuple[float, ...] = (0.5,) * CHANNELS
    rescale_factor: float = 1 / 255

    def __post_init__(self):
        check_fields(self)
        for name, value in vars(self).items():
            values = value if isinstance(value, tuple) else (value,)
            if name != "mean" and not all(each > 0 for each in values):
                raise InputError(f"{name} is {value}: it must be positive")
        for name in ("mean", "std"):
            if len(getattr(self, name)) != CHANNELS:
                raise InputError(f"{name} is {getattr(self, name)}: it must have {CHANNELS} numbers")

    @property
    def factor(self) -> int:
        """Divisor of the height and width of resized images, in pixels."""
        return self.patch_size * self.merge_size

    @property
    def patch_dim(self) -> int:
        """Numbers of a patch."""
        return CHANNELS * self.temporal_patch_size * self.patch_size**2

    def normalized(self, kind: Kind) -> np.ndarray:
        """The normalised value of each value of a pixel, rounded as transformers does.

        transformers scales an image in float64 and then subtracts; of a video, mean and deviation are scaled instead.

        Returns:
            float32 [256, channels].
        """
        values = np.arange(256)[:, None]
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        if kind == "video":
            scale = np.float32(1 / self.rescale_factor)
            return (values.astype(np.float32) - mean * scale) / (std * scale)
        return ((values * self.rescale_factor).astype(np.float32) - mean) / std


@dataclass(frozen=True, eq=False)
class Medium:
    """An image or a video as a model reads it.

    Attributes:
        kind: "image" or "video".
        pixels: uint8 [frames, height, width, 3], RGB; one frame for an image.
        settings: How the pixels become patches.
        timestamps: Seconds of each temporal patch of a video; () for an image.
        key: 16 bytes of a hash of all that the tower and the prompt read of it. Computed unless given.
    """

    kind: Kind
    pixels: np.ndarray
    settings: PatchSettings
    timestamps: tuple[float, ...] = ()
    key: bytes = field(default=b"", repr=False)

    def __post_init__(self):
        frames, height, width, channels = self.pixels.shape
        factor = self.settings.factor
        if self.pixels.dtype != np.uint8 or channels != CHANNELS or height % factor or width % factor:
            raise InputError(
                f"pixels is {self.pixels.dtype} {list(self.pixels.shape)}: it must be uint8 [frames, height, width, 3] "
                f"with height and width multiples of {factor}"
            )
        is_image = self.kind == "image"
        if frames != 1 if is_image else not frames:
            raise InputError(f"pixels has {frames} frames: {'an image has one' if is_image else 'a video has some'}")
        if len(self.timestamps) != (0 if is_image else self.frames):
            raise InputError(f"timestamps is {self.timestamps}: it must have one for each of {self.frames} frames")
        if not self.key:
            object.__setattr__(self, "key", self._hash())

    def _hash(self) -> bytes:
        digest = blake2b(repr((self.kind, self.grid, self.timestamps, self.settings)).encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self.pixels).data)
        return digest.digest()

    @cached_property
    def grid(self) -> tuple[int, int, int]:
        """Temporal patches, then height and width in patches."""
        frames, height, width, _ = self.pixels.shape
        size = self.settings.patch_size
        return -(-frames // self.settings.temporal_patch_size), height // size, width // size

    @property
    def frames(self) -> int:
        """Temporal patches, each of which is a frame of its own in the prompt."""
        return self.grid[0]

    @property
    def merged(self) -> tuple[int, int]:
        """Height and width of a frame in tokens."""
        return self.grid[1] // self.settings.merge_size, self.grid[2] // self.settings.merge_size

    @property
    def frame_tokens(self) -> int:
        """Tokens of a frame."""
        return self.merged[0] * self.merged[1]

    @property
    def tokens(self) -> int:
        """Tokens of all frames: rows that the tower computes."""
        return self.frames * self.frame_tokens

    def patches(self) -> np.ndarray:
        """Normalised patches in the order that the tower merges them, block by block.

        An image is repeated over the frames of a patch, and so is the last frame of a video where one is missing.

        Returns:
            float32 [patches, patch_dim]; a patch is [channels, temporal_patch_size, patch_size, patch_size].
        """
        settings, (t, _, _), (height, width) = self.settings, self.grid, self.merged
        size, merge, depth = settings.patch_size, settings.merge_size, settings.temporal_patch_size
        values = settings.normalized(self.kind)
        patches = np.empty((t, height, width, merge, merge, CHANNELS, depth, size, size), np.float32)
        blocks = self.pixels.reshape(-1, height, merge, size, width, merge, size, CHANNELS)
        # One row of blocks at a time: NumPy widens indices to eight bytes, and other threads run in between.
        for frame in range(t * depth):
            for row, block in enumerate(blocks[min(frame, len(blocks) - 1)]):
                for channel in range(CHANNELS):
                    line = values[:, channel][block[..., channel]].transpose(2, 0, 3, 1, 4)
                    patches[frame // depth, row, :, :, :, channel, frame % depth] = line
        return patches.reshape(-1, settings.patch_dim)


def check_grid(grid: tuple[int, int, int], merge_size: int, most_patches: int = MOST_PATCHES) -> None:
    """Checks that a vision tower can encode a medium.

    Args:
        grid: Its frames, rows and columns, as in `Medium`.
        merge_size: Side of the tower's merge block in patches.
        most_patches: Patches of a frame at most.

    Raises:
        InputError: A side is no multiple of a merge block's, or a frame has more patches.
    """
    _, height, width = grid
    if min(grid) < 1 or height % merge_size or width % merge_size:
        raise InputError(
            f"a grid of {grid} patches: it must have a frame or more, and multiples of {merge_size} rows and columns"
        )
    if height * width > most_patches:
        raise InputError(
            f"an image or frame of {height} x {width} patches: at most {most_patches} patches are possible"
        )

from dataclasses import replace

import numpy as np
import pytest

from dflash_jax.errors import InputError
from dflash_jax.media.medium import Medium, PatchSettings

SETTINGS = PatchSettings(patch_size=2)


def pixels(frames=1, height=8, width=12):
    return np.random.default_rng(0).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def test_sizes():
    image, video = Medium("image", pixels(), SETTINGS), Medium("video", pixels(5), SETTINGS, (0.0, 1.0, 2.0))
    assert (image.grid, image.frames, image.merged, image.frame_tokens, image.tokens) == ((1, 4, 6), 1, (2, 3), 6, 6)
    assert (video.grid, video.frames, video.merged, video.frame_tokens, video.tokens) == ((3, 4, 6), 3, (2, 3), 6, 18)
    assert image.patches().shape == (24, SETTINGS.patch_dim)
    assert video.patches().shape == (72, SETTINGS.patch_dim)


def test_patches_come_block_by_block():
    settings = PatchSettings(patch_size=1, mean=(0.0,) * 3, std=(1.0,) * 3, rescale_factor=1.0)
    image = np.arange(24, dtype=np.uint8).reshape(1, 4, 6)[..., None].repeat(3, -1)
    blocks = Medium("image", image, settings).patches()[:, 0].astype(int).reshape(-1, 4).tolist()
    assert blocks[:4] == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11], [12, 13, 18, 19]]


def test_the_last_frame_of_an_odd_video_is_repeated():
    frames = pixels(3)
    odd = Medium("video", frames, SETTINGS, (0.0, 1.0)).patches()
    even = Medium("video", np.concatenate([frames, frames[2:]]), SETTINGS, (0.0, 1.0)).patches()
    np.testing.assert_array_equal(odd, even)


def test_the_key_is_of_all_that_the_model_reads():
    image = pixels()
    other = image.copy()
    other[0, 7, 11, 2] ^= 1
    video = pixels(2)
    keys = [
        Medium("image", image, SETTINGS).key,
        Medium("image", other, SETTINGS).key,
        Medium("image", image.reshape(1, 12, 8, 3), SETTINGS).key,
        Medium("video", image, SETTINGS, (0.0,)).key,
        Medium("video", image, SETTINGS, (1.0,)).key,
        Medium("video", video, SETTINGS, (1.0,)).key,
        Medium("image", image, replace(SETTINGS, mean=(0.1, 0.5, 0.5))).key,
    ]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {16}
    assert Medium("image", image.copy(), SETTINGS).key == keys[0]
    assert Medium("image", image, SETTINGS, key=b"given").key == b"given"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("image", pixels(height=6), SETTINGS), "multiples of 4"),
        (("image", pixels().astype(np.float32), SETTINGS), "float32"),
        (("image", pixels(2), SETTINGS), "an image has one"),
        (("video", pixels(0), SETTINGS), "a video has some"),
        (("video", pixels(3), SETTINGS, (0.0,)), "each of 2 frames"),
        (("image", pixels(), SETTINGS, (0.0,)), "each of 1 frames"),
    ],
)
def test_wrong_shapes_are_refused(fields, message):
    with pytest.raises(InputError, match=message):
        Medium(*fields)

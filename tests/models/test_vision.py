"""The vision tower: what a patch sees, and what padding changes. Its numbers are in tests/parity/test_vision.py."""

import numpy as np
import pytest

from dflash_jax.models.layers import with_backend
from dflash_jax.models.packing import pack_weights
from dflash_jax.models.vision import frame_arrays, patch_places
from dflash_jax.ops.backend import Backend
from dflash_jax.ops.kernels.cpu import calls as cpu
from tests.helpers import VISION, random_tower, whole_pass

FRAMES = [(4, 6), (2, 10), (6, 2)]
LENGTHS = [h * w for h, w in FRAMES]


@pytest.fixture(scope="module")
def tower():
    return random_tower(seed=1)


@pytest.fixture(scope="module")
def patches():
    return np.random.default_rng(2).standard_normal((sum(LENGTHS), VISION.patch_dim)).astype(np.float32)


def rows(tower, patches, frames, size=None) -> np.ndarray:
    """Rows without those of padding, whose patches are noise."""
    n = len(patches)
    padding = np.random.default_rng(n).standard_normal(((size or n) - n, VISION.patch_dim)).astype(np.float32)
    out = whole_pass(tower, np.concatenate([patches, 100 * padding]), **frame_arrays(frames, size or n, 2))
    return np.asarray(out[: n // 4])


def test_patches_are_in_the_order_of_merge_blocks():
    found = list(zip(*map(list, patch_places(4, 6, 2)), strict=True))
    assert found[:8] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert found[12:16] == [(2, 0), (2, 1), (3, 0), (3, 1)]
    assert sorted(found) == [(r, c) for r in range(4) for c in range(6)]


def test_each_frame_is_an_interval_and_padding_is_empty():
    arrays = frame_arrays([(2, 2), (2, 4)], 16, 2)
    assert arrays["low"].tolist() == [0] * 4 + [4] * 8 + [0] * 4
    assert arrays["high"].tolist() == [4] * 4 + [12] * 8 + [0] * 4
    assert arrays["widths"].tolist() == [2] * 4 + [4] * 8 + [1] * 4
    assert {a.dtype for a in arrays.values()} == {np.dtype(np.int32)}


# Larger than a tile of scores, so that padding has tiles of its own.
@pytest.mark.parametrize("size", [60, 64, 600, 1024])
def test_padding_does_not_reach_the_rows(size, tower, patches):
    np.testing.assert_allclose(rows(tower, patches, FRAMES, size), rows(tower, patches, FRAMES), atol=1e-5)


@pytest.mark.skipif(bool(cpu.why_not()), reason="no C++ compiler")
def test_rows_of_padding_that_are_not_computed_reach_no_other(tower, patches):
    """With the C++ kernels, whatever the padding has. Without frames, as programs are warmed up, too."""
    packed = pack_weights(with_backend(random_tower(seed=1), Backend.detect()))
    padding = np.full((600 - len(patches), VISION.patch_dim), np.nan, np.float32)
    out = whole_pass(packed, np.concatenate([patches, padding]), **frame_arrays(FRAMES, 600, 2))
    np.testing.assert_allclose(np.asarray(out)[: len(patches) // 4], rows(tower, patches, FRAMES), atol=1e-5)
    assert whole_pass(packed, np.concatenate([patches, padding]), **frame_arrays([], 600, 2)).shape == out.shape


def test_frames_together_equal_each_alone(tower, patches):
    together, start = rows(tower, patches, FRAMES), 0
    for frame, n in zip(FRAMES, LENGTHS, strict=True):
        own = rows(tower, patches[start : start + n], [frame])
        np.testing.assert_allclose(together[start // 4 : (start + n) // 4], own, atol=1e-5, err_msg=str(frame))
        start += n


def test_change_in_a_frame_leaves_the_others_bits(tower, patches):
    changed = patches.copy()
    changed[LENGTHS[0]] += 1
    before, after = rows(tower, patches, FRAMES), rows(tower, changed, FRAMES)
    first, last = LENGTHS[0] // 4, (LENGTHS[0] + LENGTHS[1]) // 4
    np.testing.assert_array_equal(before[:first], after[:first])
    np.testing.assert_array_equal(before[last:], after[last:])
    assert (before[first:last] != after[first:last]).any(axis=1).all(), "a patch does not reach its whole frame"

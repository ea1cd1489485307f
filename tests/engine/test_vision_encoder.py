"""The vision tower's calls: what shares one, what is padded, and what is kept."""

import threading
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.engine import vision_encoder
from dflash_jax.engine.vision_encoder import SIZES, OutputCache, VisionEncoder, blocks_of_call, workspace
from dflash_jax.errors import InputError
from dflash_jax.models.vision import frame_arrays
from dflash_jax.options.systems import read_system
from dflash_jax.planner import read_shapes
from tests.helpers import HIDDEN, VISION, random_tower, whole_pass

ROW = 4 * HIDDEN


@dataclass(eq=False)
class Medium:
    grid: tuple[int, int, int]
    seed: int = 0
    reads: list = field(default_factory=list)

    @property
    def key(self) -> bytes:
        return repr((self.grid, self.seed)).encode()

    @property
    def tokens(self) -> int:
        return int(np.prod(self.grid)) // 4

    def patches(self) -> np.ndarray:
        self.reads.append(1)
        rng = np.random.default_rng(self.seed)
        return rng.standard_normal((int(np.prod(self.grid)), VISION.patch_dim)).astype(np.float32)


@pytest.fixture(scope="module")
def tower():
    return random_tower(seed=3)


@pytest.fixture(scope="module")
def programs():
    """Programs by size, which encoders of one tower share."""
    return {}


@pytest.fixture
def make(tower, programs):
    def make(cache_bytes: int = 0, sizes=(64, 128)) -> VisionEncoder:
        encoder = VisionEncoder(tower, cache_bytes=cache_bytes, sizes=sizes)
        encoder._programs = programs
        return encoder

    return make


def alone(tower, medium: Medium) -> np.ndarray:
    """Its rows without padding or other media."""
    frames, height, width = medium.grid
    arrays = frame_arrays([(height, width)] * frames, frames * height * width, 2)
    return np.asarray(whole_pass(tower, medium.patches(), **arrays))


def test_sizes_are_powers_of_two_up_to_the_largest_published_image():
    assert SIZES == (256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
    assert SIZES[-1] == 16_777_216 // 16**2


def test_workspace_covers_what_a_program_takes():
    """Of sizes in the proportions of the published ones, and more than one tile of scores."""
    config = replace(VISION, hidden_size=288, intermediate_size=1076, patch_size=8, depth=3)
    encoder = VisionEncoder(random_tower(config), sizes=(4096,))
    memory = encoder.compile(4096).memory_analysis()
    used = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    used -= memory.alias_size_in_bytes + sum(x.nbytes for x in jax.tree.leaves(encoder.tower))
    assert 0.5 < used / workspace(config, 4096) < 1


def test_media_of_a_request_share_a_call_and_equal_each_alone(tower, make):
    media = [Medium((1, 4, 6), 1), Medium((2, 2, 8), 2), Medium((1, 6, 6), 3)]
    encoder = make()
    rows = encoder.encode(media)
    assert encoder.calls == 1
    assert set(encoder._programs) == {128}
    for medium, got in zip(media, rows, strict=True):
        assert (got.shape, got.dtype) == ((medium.tokens, HIDDEN), np.float32)
        np.testing.assert_allclose(got, alone(tower, medium), atol=1e-5)


def test_rows_do_not_depend_on_the_compiled_size(make):
    medium = Medium((1, 6, 6), 4)
    (small,), (large,) = (make(sizes=sizes).encode([medium]) for sizes in ((64,), (128,)))
    np.testing.assert_allclose(small, large, atol=1e-5)


def test_long_video_runs_groups_of_frames_in_turns(tower, make):
    video, image = Medium((7, 6, 8), 5), Medium((1, 2, 4), 6)
    encoder = make()
    rows = encoder.encode([image, video])
    # 8 and 48 patches a frame: an image and two frames, two frames, two frames, one frame.
    assert encoder.calls == 4
    np.testing.assert_allclose(rows[0], alone(tower, image), atol=1e-5)
    np.testing.assert_allclose(rows[1], alone(tower, video), atol=1e-5)


def test_a_pass_in_several_calls_has_the_same_bits(make, monkeypatch):
    medium, encoder = Medium((1, 6, 6), 4), make()
    (whole,) = encoder.encode([medium])
    monkeypatch.setattr(vision_encoder, "CALL_FLOPS", 1)
    (parts,) = encoder.encode([medium])
    assert encoder.calls == 1 + VISION.depth
    np.testing.assert_array_equal(parts, whole)


def test_calls_of_large_passes_have_few_blocks():
    config = read_shapes(str(read_system("qwen3.6-35b-a3b").shapes["target"]), None).target.vision
    assert [blocks_of_call(config, n) for n in (4096, 16_384, 65_536)] == [27, 5, 1]


@pytest.mark.parametrize(
    ("grid", "named"),
    [
        ((1, 10, 14), "10 x 14 patches: at most 128"),
        ((1, 3, 4), "multiples of 2"),
        ((1, 4, 5), "multiples of 2"),
        ((0, 4, 4), "a frame or more"),
        ((1, 0, 4), "a frame or more"),
    ],
)
def test_grid_that_cannot_be_encoded_is_refused_before_anything_runs(grid, named, make):
    encoder, good = make(), Medium((1, 2, 2), 7)
    with pytest.raises(InputError, match=named):
        encoder.encode([good, Medium(grid)])
    assert (encoder.calls, good.reads) == (0, [])


def test_no_media_are_no_rows(make):
    assert make().encode([]) == []


def test_kept_rows_are_returned_without_a_call_or_patches(make):
    encoder, first = make(cache_bytes=2**20), Medium((1, 4, 4), 8)
    (rows,) = encoder.encode([first])
    again, other = Medium((1, 4, 4), 8), Medium((1, 4, 4), 9)
    found, new = encoder.encode([again, other])
    assert found is rows
    assert (encoder.calls, again.reads, len(other.reads)) == (2, [], 1)
    assert not np.array_equal(found, new)
    assert encoder.outputs.size == rows.nbytes + new.nbytes
    with pytest.raises(ValueError, match="read-only"):
        rows[0] = 0


def test_one_key_twice_in_a_request_is_computed_once(make):
    encoder, media = make(), [Medium((1, 4, 4), 10), Medium((1, 4, 4), 10)]
    first, second = encoder.encode(media)
    assert first is second
    assert (encoder.calls, sum(len(m.reads) for m in media)) == (1, 1)


def test_kept_bytes_are_bounded_and_the_least_recently_used_go_first():
    cache = OutputCache(10 * ROW)
    rows = {key: np.zeros((4, HIDDEN), np.float32) for key in (b"a", b"b", b"c")}
    cache.add(b"a", rows[b"a"])
    cache.add(b"b", rows[b"b"])
    assert cache.find([b"a", b"z"])[b"a"] is rows[b"a"]
    cache.add(b"c", rows[b"c"])
    assert (len(cache), cache.size) == (2, 8 * ROW)
    assert set(cache.find(rows)) == {b"a", b"c"}
    cache.add(b"c", rows[b"c"])
    cache.add(b"large", np.zeros((11, HIDDEN), np.float32))
    assert (len(cache), cache.size, cache.find([b"large"])) == (2, 8 * ROW, {})
    cache.add(b"whole", np.zeros((10, HIDDEN), np.float32))
    assert (len(cache), cache.size) == (1, 10 * ROW)


def test_kept_rows_own_their_bytes(make):
    """A view would keep the padded output of the call, which the budget does not count."""
    encoder = make(cache_bytes=2**20)
    assert all(rows.base is None for rows in encoder.encode([Medium((1, 2, 2), 11), Medium((1, 4, 4), 12)]))


def test_threads_compute_a_medium_once_and_compile_a_size_once(tower):
    encoder, media = VisionEncoder(tower, cache_bytes=2**20, sizes=(64,)), [Medium((1, 4, 8), 13) for _ in range(4)]
    barrier, results = threading.Barrier(4), [None] * 4

    def encode(i):
        barrier.wait()
        (results[i],) = encoder.encode([media[i]])

    threads = [threading.Thread(target=encode, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (encoder.calls, sum(len(m.reads) for m in media)) == (1, 1)
    assert all(rows is results[0] for rows in results)
    assert encoder.compile(64) is encoder.compile(64)


def test_rows_have_the_towers_dtype(tower):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tower)
    medium = Medium((1, 4, 4), 14)
    (rows,) = VisionEncoder(half, sizes=(64,)).encode([medium])
    assert rows.dtype == jnp.bfloat16
    exact = alone(tower, medium)
    assert np.abs(rows.astype(np.float32) - exact).max() < 0.1 * np.abs(exact).max()


@pytest.mark.parametrize(("positions", "sizes"), [(1, (64,)), (16, (64,)), (17, (64, 128)), (1000, (64, 128))])
def test_sizes_are_those_that_a_prompt_may_need(make, positions, sizes):
    """A token stands for four patches."""
    assert make().sizes_for(positions) == sizes

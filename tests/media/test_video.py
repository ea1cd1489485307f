import json
import logging
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from dflash_jax.errors import InputError
from dflash_jax.media.errors import MediaError
from dflash_jax.media.limits import MediaLimits
from dflash_jax.media.medium import Medium
from dflash_jax.media.video import (
    VideoSettings,
    frame_timestamps,
    read_video,
    sample_indices,
    video_settings,
    video_size,
)
from tests.media.encoded import clip, encoded, picture

SMALL = VideoSettings(patch_size=4, min_pixels=256, max_pixels=8192, mean=(0.48, 0.45, 0.4), std=(0.27, 0.26, 0.28))
# torch and Pillow round the weights of an interpolation differently: a value of a pixel differs by 1 at most after the
# first of its two steps, and by 2 after the second.
TWO_LEVELS = 2.001 / 255


def noise(frames: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(frames).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def torch_patches(frames: np.ndarray, size: tuple[int, int], settings: VideoSettings) -> np.ndarray:
    """Qwen3VLVideoProcessor's patches by torch alone, of frames that are resized to ``size``.

    The processor itself cannot be imported without torchvision, whose resize is this interpolation.
    """
    video = torch.from_numpy(frames).permute(0, 3, 1, 2)
    if size != frames.shape[1:3]:
        video = torch.nn.functional.interpolate(video, size, mode="bicubic", antialias=True)
    mean, std = (torch.tensor(each) * (1.0 / settings.rescale_factor) for each in (settings.mean, settings.std))
    video = video.float().sub(mean[:, None, None]).div(std[:, None, None])[None]
    depth, merge, patch = settings.temporal_patch_size, settings.merge_size, settings.patch_size
    if pad := -video.shape[1] % depth:
        video = torch.cat([video, video[:, -1:].expand(-1, pad, -1, -1, -1)], dim=1)
    h, w = (side // patch for side in size)
    video = video.view(1, -1, depth, 3, h // merge, merge, patch, w // merge, merge, patch)
    return video.permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9).reshape(-1, 3 * depth * patch**2).numpy()


def assert_almost_equal(medium: Medium, expected: np.ndarray) -> None:
    difference = np.abs(medium.patches() - expected) * min(medium.settings.std)
    assert difference.max() <= TWO_LEVELS
    # A rare rounding, no other filter.
    assert np.mean(difference > 1e-5) < 0.02


@pytest.mark.parametrize("frames", [2, 3, 4, 7])
@pytest.mark.parametrize("settings", [VideoSettings(), SMALL], ids=["qwen", "small"])
def test_patches_of_frames_that_keep_their_size_are_those_of_torch(frames, settings):
    settings = VideoSettings(**vars(settings) | {"max_pixels": 2**24})
    video = noise(frames, 64, 96)
    medium = read_video(video, settings, num_frames=frames)
    assert medium.grid == (-(-frames // 2), 64 // settings.patch_size, 96 // settings.patch_size)
    np.testing.assert_array_equal(medium.patches(), torch_patches(video, (64, 96), settings))


# Both sides smaller, both larger, one of each: Pillow's own order of the two steps would differ by tens of levels.
@pytest.mark.parametrize(
    ("shape", "size"),
    [((200, 300), (192, 288)), ((100, 150), (96, 160)), ((150, 100), (160, 96)), ((20, 50), (32, 64))],
)
def test_patches_of_resized_frames_are_those_of_torch(shape, size):
    video = noise(5, *shape)
    medium = read_video(video, num_frames=5)
    assert medium.grid == (3, size[0] // 16, size[1] // 16)
    assert_almost_equal(medium, torch_patches(video, size, VideoSettings()))


@pytest.fixture(scope="module")
def processor():
    """transformers' processor of videos, where torchvision is."""
    pytest.importorskip("torchvision")
    from transformers import Qwen3VLVideoProcessor

    return Qwen3VLVideoProcessor(
        size={"shortest_edge": SMALL.min_pixels, "longest_edge": SMALL.max_pixels},
        patch_size=SMALL.patch_size,
        image_mean=list(SMALL.mean),
        image_std=list(SMALL.std),
        cap_pixels_per_frame=False,
    )


@pytest.mark.parametrize("shape", [(5, 64, 96), (35, 100, 150), (4, 5, 70), (8, 7, 9), (3, 16, 16)])
def test_videos_are_those_of_transformers(processor, shape):
    video = noise(*shape)
    metadata = VideoMetadata(total_num_frames=len(video), fps=10.0)
    outputs = processor(videos=[video], video_metadata=[metadata], do_sample_frames=True, return_tensors="np")
    medium = read_video(video, SMALL, source_fps=10.0)
    assert list(medium.grid) == outputs["video_grid_thw"][0].tolist()
    assert_almost_equal(medium, outputs["pixel_values_videos"])


@pytest.mark.parametrize("wanted", [{}, {"fps": 1.0}, {"fps": 7.5}, {"num_frames": 5}])
@pytest.mark.parametrize(("total", "rate"), [(35, 10.0), (3, 30.0), (100, 29.97), (5000, 24.0), (2, 0.1)])
def test_sampled_frames_are_those_of_transformers(processor, total, rate, wanted):
    if wanted.get("num_frames", 0) > total:
        # transformers repeats frames.
        assert sample_indices(total, rate, SMALL, **wanted).tolist() == list(range(total))
        return
    metadata = VideoMetadata(total_num_frames=total, fps=rate)
    expected = processor.sample_frames(metadata, **wanted).tolist()
    assert sample_indices(total, rate, SMALL, **wanted).tolist() == expected


@pytest.mark.parametrize(
    ("frames", "rate", "indices", "texts"),
    [
        (35, 10, [0, 6, 11, 17, 23, 28, 34], ["0.3", "1.4", "2.5", "3.4"]),
        (3, 30, [0, 1, 2], ["0.0", "0.1"]),
        (100, 25, [0, 14, 28, 42, 57, 71, 85, 99], ["0.3", "1.4", "2.6", "3.7"]),
    ],
)
def test_timestamps_are_those_of_transformers(frames, rate, indices, texts):
    assert sample_indices(frames, rate, VideoSettings()).tolist() == indices
    times = frame_timestamps(indices, rate, VideoSettings())
    assert list(times) == Qwen3VLProcessor._calculate_timestamps(None, list(indices), rate, 2)
    assert [f"{each:.1f}" for each in times] == texts


def test_many_frames_share_the_area():
    settings = VideoSettings()
    assert video_size(768, 1080, 1920, settings) == (128, 224)
    assert video_size(4, 1080, 1920, settings) == (1088, 1920)
    assert len(sample_indices(100_000, 24.0, settings)) == settings.max_frames


@pytest.mark.parametrize(
    ("form", "codec"),
    [("mp4", "libx264"), ("mp4", "mpeg4"), ("mov", "libx264"), ("webm", "libvpx-vp9"), ("matroska", "libx264")],
)
def test_files_are_sampled(form, codec):
    medium = read_video(clip(35, 10, form, codec))
    assert medium.grid == (4, 6, 8)
    assert [f"{each:.1f}" for each in medium.timestamps] == ["0.3", "1.4", "2.5", "3.4"]
    # Grey values say which frames they are: 7 i modulo 256.
    grey = medium.pixels[:, 80, 100].mean(-1)
    np.testing.assert_allclose(grey, [7 * i % 256 for i in (0, 6, 11, 17, 23, 28, 34)], atol=5)


def test_a_rate_or_a_number_is_asked_for():
    data = clip(35, 10)
    assert read_video(data, fps=4).grid[0] == 7
    assert read_video(data, num_frames=6).grid[0] == 3
    assert read_video(data, num_frames=100).grid[0] == 18


def test_rotation_is_applied():
    still, turned = read_video(clip()), read_video(clip(rotation=90))
    assert turned.grid == (4, 8, 6)
    np.testing.assert_allclose(turned.pixels.astype(int), np.rot90(still.pixels, axes=(1, 2)), atol=3)


def test_images_are_frames():
    frames = noise(6, 40, 64)
    medium = read_video([Image.fromarray(frame) for frame in frames], source_fps=2)
    assert medium.key == read_video(frames, source_fps=2).key
    assert medium.timestamps == (0.25, 1.25, 2.25)


def test_an_unknown_rate_is_24_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "dflash_jax.media"):
        medium = read_video(noise(48, 32, 32))
    assert medium.timestamps == pytest.approx((8 / 24, 1.625), abs=0.02)
    assert "24" in caplog.text


def test_a_file_with_fewer_frames_than_packets_is_sampled_from_those(monkeypatch):
    from dflash_jax.media import video

    data, read = clip(35, 10), video._EncodedVideo.__init__

    def wrong(self, *arguments):
        read(self, *arguments)
        self.total += 20

    expected = read_video(data)
    monkeypatch.setattr(video._EncodedVideo, "__init__", wrong)
    assert read_video(data).key == expected.key


@pytest.mark.parametrize(
    ("data", "arguments", "message", "status"),
    [
        (b"", {}, "no video", 400),
        (b"#EXTM3U\nhttp://127.0.0.1/", {}, "no video", 400),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", {}, "no video", 400),
        (encoded(picture(40, 60), "GIF", save_all=True, append_images=[picture(40, 60)] * 3), {}, "no video", 400),
        (clip()[:900], {}, "cannot be decoded", 400),
        (clip().replace(b"avc1", b"zzzz"), {}, "no video stream that can be decoded", 400),
        (b"\0\0\0\x18ftypmp42" + bytes(200), {}, "cannot be decoded", 400),
        (b"\x1a\x45\xdf\xa3" + bytes(200), {}, "cannot be decoded|no video stream", 400),
        (clip(form="matroska", codec="ffv1"), {}, "codec is ffv1", 400),
        (clip(1), {}, "1 frames: a video has at least 2", 400),
        (clip(height=32, width=6432, frames=2), {}, "200 times", 400),
        (clip(), {"limits": MediaLimits(source_frames=34)}, "more than 34 frames", 413),
        (clip(), {"limits": MediaLimits(pixels=12_287)}, "128 × 96 pixels", 413),
    ],
    ids=["empty", "m3u8", "concat", "gif", "cut", "no codec", "ftyp", "ebml", "codec", "one", "wide", "long", "large"],
)
def test_other_content_is_refused(data, arguments, message, status):
    with pytest.raises(MediaError, match=message) as error:
        read_video(data, **arguments)
    assert error.value.status == status


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fps": 2, "num_frames": 4}, "exclude one another"),
        ({"fps": 0}, "fps is 0"),
        ({"fps": float("nan")}, "fps is nan"),
        ({"fps": 1e9}, "fps is 1000000000"),
        ({"num_frames": 1}, "num_frames is 1: it must be from 2 to 768"),
        ({"num_frames": 769}, "num_frames is 769"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        read_video(noise(8, 32, 32), **arguments)


def test_wrong_arrays_are_refused():
    with pytest.raises(InputError, match="float64"):
        read_video(np.zeros((4, 32, 32, 3)))
    with pytest.raises(InputError, match=r"\[4, 3, 32, 32\]"):
        read_video(np.zeros((4, 3, 32, 32), np.uint8))


def test_without_pyav_the_extra_is_named(monkeypatch):
    data = clip()
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(InputError, match=r"dflash-jax\[video\]"):
        read_video(data)


def test_settings_come_from_the_checkpoint(tmp_path):
    assert video_settings(tmp_path) == VideoSettings()
    path = tmp_path / "video_preprocessor_config.json"
    path.write_text(json.dumps({"size": {"longest_edge": 2**20, "shortest_edge": 4096}, "fps": 1, "max_frames": 9}))
    assert video_settings(tmp_path) == VideoSettings(max_pixels=2**20, fps=1, max_frames=9)
    path.write_text(json.dumps({"cap_pixels_per_frame": True}))
    with pytest.raises(InputError, match="cap_pixels_per_frame is True"):
        video_settings(tmp_path)

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Qwen3_5Config, Qwen3_5Model
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from dflash_jax.frontend.media import expand
from dflash_jax.media.errors import MediaError
from dflash_jax.media.medium import Medium, PatchSettings
from dflash_jax.media.video import VideoSettings, frame_timestamps
from dflash_jax.models.config import MediaTokens

SETTINGS = PatchSettings(patch_size=4)


TOKENS = MediaTokens(90, 91, 92, 93)
IMAGE, VIDEO, START, END = TOKENS.image, TOKENS.video, TOKENS.vision_start, TOKENS.vision_end


def text_ids(text: str) -> list[int]:
    """Its characters."""
    assert text.endswith(" seconds>")
    return [ord(each) % 80 for each in text]


def image(height: int, width: int) -> Medium:
    return Medium("image", np.zeros((1, 8 * height, 8 * width, 3), np.uint8), SETTINGS)


def video(frames: int, height: int, width: int, start: float = 0.3) -> Medium:
    pixels = np.zeros((2 * frames, 8 * height, 8 * width, 3), np.uint8)
    return Medium("video", pixels, SETTINGS, tuple(start + 1.5 * i for i in range(frames)))


@pytest.fixture(scope="module")
def model():
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 16,
        "out_hidden_size": 32,
        "patch_size": 4,
    }
    text = {
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "layer_types": ["full_attention"],
    }
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
    return Qwen3_5Model(Qwen3_5Config(vision_config=vision | {"num_position_embeddings": 16}, text_config=text, **ids))


def expected_positions(model, ids: np.ndarray, media: list[Medium]) -> tuple[np.ndarray, int]:
    """Positions and delta of transformers."""
    kinds = np.where(ids == IMAGE, 1, np.where(ids == VIDEO, 2, 0))
    grids = {
        f"{kind}_grid_thw": torch.tensor([medium.grid for medium in media if medium.kind == kind])
        for kind in {medium.kind for medium in media}
    }
    positions, delta = model.get_rope_index(torch.tensor(ids)[None].long(), torch.tensor(kinds)[None], **grids)
    return positions[:, 0].numpy(), int(delta[0, 0])


PROMPTS = {
    "text": ([1, 2, 3], []),
    "image": ([1, 2, START, IMAGE, END, 3], [image(3, 5)]),
    "tall image": ([START, IMAGE, END, 3], [image(7, 2)]),
    "an image at once": ([IMAGE, 3], [image(2, 2)]),
    "two images": ([1, START, IMAGE, END, 4, 5, START, IMAGE, END, 6, 7], [image(3, 4), image(1, 1)]),
    "video": ([1, START, VIDEO, END, 2], [video(4, 2, 3)]),
    "one frame": ([1, START, VIDEO, END, 2], [video(1, 3, 1)]),
    "two videos": ([START, VIDEO, END, START, VIDEO, END, 2], [video(2, 1, 4), video(3, 2, 2, 99.9)]),
    "mixed": (
        [1, START, IMAGE, END, 2, START, VIDEO, END, START, IMAGE, END, 3, START, VIDEO, END, START, IMAGE, END, 4],
        [image(2, 2), video(2, 2, 1), image(4, 1), video(3, 1, 2), image(1, 6)],
    ),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_positions_are_those_of_transformers(model, name):
    ids, media = PROMPTS[name]
    prompt = expand(ids, media, TOKENS, text_ids)
    positions, delta = expected_positions(model, prompt.ids, media)
    np.testing.assert_array_equal(prompt.positions, positions)
    assert prompt.rope_delta == delta
    assert prompt.positions.dtype == prompt.ids.dtype == np.int32


@pytest.mark.parametrize("name", PROMPTS)
def test_frames_are_the_pads(name):
    ids, media = PROMPTS[name]
    prompt = expand(ids, media, TOKENS, text_ids)
    pads = np.zeros(len(prompt.ids), bool)
    for frame in prompt.frames:
        part = slice(frame.start, frame.start + frame.length)
        assert set(prompt.ids[part]) == {IMAGE if media[frame.medium].kind == "image" else VIDEO}
        assert not pads[part].any()
        pads[part] = True
    np.testing.assert_array_equal(pads, np.isin(prompt.ids, [IMAGE, VIDEO]))
    assert prompt.ids[prompt.is_given].tolist() == [i for i in ids if i not in (IMAGE, VIDEO)]
    # All rows of each medium, once and in order.
    rows = [(frame.medium, frame.offset + row) for frame in prompt.frames for row in range(frame.length)]
    assert rows == [(i, row) for i, medium in enumerate(media) for row in range(medium.tokens)]


def test_a_frame_follows_its_time_between_start_and_end():
    ids, media = [1, START, VIDEO, END, 2], [video(2, 1, 2, 0.25)]
    prompt = expand(ids, media, TOKENS, text_ids)
    times = [text_ids("<0.2 seconds>"), text_ids("<1.8 seconds>")]
    assert prompt.ids.tolist() == [
        1,
        START,
        *times[0],
        START,
        VIDEO,
        VIDEO,
        END,
        *times[1],
        START,
        VIDEO,
        VIDEO,
        END,
        END,
        2,
    ]


def test_the_text_of_a_video_is_that_of_transformers():
    indices, rate = [0, 6, 11, 17], 10.0
    names = {"vision_start_token": "S", "video_token": "V", "vision_end_token": "E"}
    processor = SimpleNamespace(video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2), **names)
    processor._calculate_timestamps = partial(Qwen3VLProcessor._calculate_timestamps, None)
    metadata = VideoMetadata(total_num_frames=35, fps=rate, frames_indices=indices)
    inputs = {"video_grid_thw": np.array([[2, 2, 4]]), "video_metadata": [metadata]}
    text = Qwen3VLProcessor.replace_video_token(processor, inputs, 0)
    film = Medium(
        "video", np.zeros((4, 8, 16, 3), np.uint8), SETTINGS, frame_timestamps(indices, rate, VideoSettings())
    )
    marks = {"S": START, "V": VIDEO, "E": END}
    expected = [marks.get(each, ord(each) % 80) for each in text]
    assert expand([VIDEO, 1], [film], TOKENS, text_ids).ids.tolist() == [*expected, 1]


def test_media_are_taken_by_kind():
    first, second, film = image(1, 2), image(2, 1), video(1, 1, 1)
    prompt = expand([IMAGE, 1, VIDEO, 1, IMAGE, 1], [film, first, second], TOKENS, text_ids)
    assert [frame.medium for frame in prompt.frames] == [1, 0, 2]


@pytest.mark.parametrize(
    ("ids", "media", "message"),
    [
        ([1, IMAGE, 2], [], "1 image pads: 0 images"),
        ([1, 2], [image(1, 1)], "0 image pads: 1 images"),
        ([1, IMAGE, IMAGE, 2], [image(1, 1)], "2 image pads: 1 images"),
        ([1, IMAGE, 2], [video(1, 1, 1)], "1 image pads: 0 images"),
        ([1, VIDEO, 2], [video(1, 1, 1)] * 2, "1 video pads: 2 videos"),
        ([1, IMAGE], [image(1, 1)], "ends in image pad 90"),
        ([1, VIDEO], [video(1, 1, 1)], "ends in video pad 91"),
    ],
)
def test_wrong_pads_are_refused(ids, media, message):
    with pytest.raises(MediaError, match=message):
        expand(ids, media, TOKENS, text_ids)

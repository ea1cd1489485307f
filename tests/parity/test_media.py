"""Text behind images and videos is that of transformers: logits, and greedy tokens, from pixels on."""

import asyncio
import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from dflash_jax import LLM, InputError, SamplingParams
from dflash_jax.frontend.media import media_parts
from tests.vision_checkpoint import FAMILIES, write_vision_checkpoint
from tools.equality import equal_or_tie

NEW = 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, logprobs=5, ignore_eos=True)
IMAGE, VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"


def picture(width: int, height: int, seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def frames(count: int, seed: int) -> np.ndarray:
    return np.stack([np.asarray(picture(40, 24, seed + i)) for i in range(count)])


# Text, and the images and videos in it: odd grids, several, at the beginning, next to one another, at the end of text.
PROMPTS = {
    "one image": (f"def f({IMAGE}): pass", {"image": [picture(50, 33, 0)]}),
    "several images": (
        f"{IMAGE}{IMAGE} and\n{IMAGE} x",
        {"image": [picture(w, h, w) for w, h in ((9, 70), (64, 64), (20, 8))]},
    ),
    "a video": (f"see {VIDEO} now", {"video": [frames(5, 3)]}),
    "both": (f"a {VIDEO} b {IMAGE} c", {"image": [picture(30, 30, 5)], "video": [frames(3, 9)]}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """(the model of transformers, an LLM of its directory)."""
    path = tmp_path_factory.mktemp(request.param)
    # In float64: the tolerance is for the errors of one side.
    model = write_vision_checkpoint(path, request.param).double()
    return model, LLM(path, draft=None, max_len=256, slots=2)


def by_transformers(model, llm: LLM, ids: list[int], media: dict) -> torch.Tensor:
    """Logits of greedy decoding, [NEW, V]."""
    tokens = torch.tensor([ids])
    kinds = (tokens == llm.media.tokens.image).int() + 2 * (tokens == llm.media.tokens.video).int()
    inputs = {}
    for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if read := [llm.media.read(part) for part in media_parts(media, "prompt") if part.kind == kind]:
            inputs[name] = torch.as_tensor(np.concatenate([medium.patches() for medium in read])).double()
            inputs[f"{kind}_grid_thw"] = torch.as_tensor([medium.grid for medium in read])
    # transformers keeps the offset of the last prompt.
    model.model.rope_deltas = None
    with torch.no_grad():
        made = model.generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), mm_token_type_ids=kinds, do_sample=False,
            max_new_tokens=NEW, min_new_tokens=NEW, output_logits=True, return_dict_in_generate=True, **inputs,
        )  # fmt: skip
    return torch.cat(made.logits)


@pytest.mark.parametrize("name", PROMPTS)
def test_text_behind_images_and_videos_is_that_of_transformers(pair, name):
    model, llm = pair
    text, media = PROMPTS[name]
    (found,) = llm.generate({"prompt": text, "multi_modal_data": media}, GREEDY)
    assert len(found.prompt_ids) > len(llm.encode(text))
    logits = by_transformers(model, llm, found.prompt_ids, media)
    best = logits.topk(2).values
    expected = logits.argmax(-1).tolist()
    equal_or_tie(expected, found.token_ids, lambda i: float(best[i, 0] - best[i, 1]))
    logprobs = logits.log_softmax(-1)
    for i, entry in enumerate(found.logprobs):
        if found.token_ids[:i] == expected[:i]:
            for token, value in entry["top"].items():
                # A tie of experts that is nearly one multiplies rounding errors; a position wrong by one gives 0.2.
                assert value == pytest.approx(float(logprobs[i, int(token)]), abs=1e-3 if i else 1e-4)


def test_the_forms_of_a_prompt_are_one(pair, tmp_path):
    """Paths, bytes, PIL images, arrays and data: URLs; generate and chat; text and token ids."""
    _, llm = pair
    text, media = PROMPTS["one image"]
    (image,) = media["image"]
    path = tmp_path / "image.png"
    image.save(path)
    (expected,) = llm.generate({"prompt": text, "multi_modal_data": media}, GREEDY)

    url = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    for source in (path, str(path), path.read_bytes(), np.asarray(image), url, [image]):
        (found,) = llm.generate({"prompt": text, "multi_modal_data": {"image": source}}, GREEDY)
        assert (found.prompt_ids, found.token_ids) == (expected.prompt_ids, expected.token_ids)
    ids = llm.encode(text)
    (found,) = llm.generate({"prompt_token_ids": ids, "multi_modal_data": media}, GREEDY)
    assert found.token_ids == expected.token_ids
    talk = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "what?"}]}]
    other = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, talk[0]["content"][1]]}]
    answers = [llm.chat(each, GREEDY)[0] for each in (talk, other)]
    assert answers[0].token_ids == answers[1].token_ids
    pads = llm.media.tokens.image
    assert answers[0].prompt_ids.count(pads) == expected.prompt_ids.count(pads) > 1


def test_a_url_is_read_within_a_running_event_loop(pair):
    """As in a notebook."""
    _, llm = pair
    text, media = PROMPTS["one image"]
    buffer = io.BytesIO()
    media["image"][0].save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()

    async def main():
        return llm.generate({"prompt": text, "multi_modal_data": {"image": url}}, GREEDY)

    assert (
        asyncio.run(main())[0].token_ids
        == llm.generate({"prompt": text, "multi_modal_data": media}, GREEDY)[0].token_ids
    )


def test_a_low_detail_has_fewer_tokens(pair):
    _, llm = pair
    image = picture(64, 64, 1)
    part = {"type": "image", "image": image, "detail": "low"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash_jax.frontend.media.LOW_PIXELS", 1024)
        low, high = (
            llm.chat([{"role": "user", "content": [part | {"detail": detail}, {"type": "text", "text": "x"}]}], GREEDY)[
                0
            ]
            for detail in ("low", "high")
        )
    pad = llm.media.tokens.image
    assert (low.prompt_ids.count(pad), high.prompt_ids.count(pad)) == (16, 64)


@pytest.mark.parametrize(
    ("text", "media", "message"),
    [
        ("no place", {"image": [picture(8, 8, 0)]}, "has 0 image pads: 1 images"),
        (f"{IMAGE}x{IMAGE}x", {"image": picture(8, 8, 0)}, "has 2 image pads: 1 images"),
        ("<|image_pad|>", {"image": picture(8, 8, 0)}, "text must follow"),
        (f"{IMAGE}x", {"image": "/no/such/file.png"}, "No such file"),
        (f"{IMAGE}x", {"image": b"no image"}, "multi_modal_data"),
        (f"{IMAGE}x", {"audio": b""}, "it must be"),
        (f"{IMAGE}x", {"image": 7}, "a path, bytes, a PIL image"),
        (f"{IMAGE}x", {"image": [picture(8, 8, 0)] * 9}, "9 images"),
        (IMAGE * 6 + "x", {"image": [picture(64, 64, 0)] * 6}, "prompt tokens and"),
    ],
)
def test_a_prompt_that_cannot_be_is_refused_before_the_tower_runs(pair, text, media, message):
    _, llm = pair
    calls = llm.encoder.calls
    with pytest.raises(InputError, match=message):
        llm.generate({"prompt": text, "multi_modal_data": media}, GREEDY)
    assert llm.encoder.calls == calls


def test_token_ids_need_neither_tokenizer_nor_settings_of_videos(pair, tmp_path):
    _, llm = pair
    text, media = PROMPTS["one image"]
    for file in llm.directory.iterdir():
        if "token" not in file.name and "video" not in file.name and "template" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    bare = LLM(tmp_path, draft=None, max_len=256, slots=2)
    assert bare.tokenizer is None
    prompt = {"prompt_token_ids": llm.encode(text), "multi_modal_data": media}
    assert bare.generate(prompt, GREEDY)[0].token_ids == llm.generate(prompt, GREEDY)[0].token_ids


def test_without_the_tower_images_are_refused_and_text_is_the_same(pair):
    _, llm = pair
    text_only = LLM(llm.directory, draft=None, max_len=256, slots=2, language_model_only=True)
    assert text_only.media is None
    assert text_only.loaded_bytes < llm.loaded_bytes
    prompt, media = PROMPTS["one image"]
    with pytest.raises(InputError, match="language_model_only"):
        text_only.generate({"prompt": prompt, "multi_modal_data": media}, GREEDY)
    (a,), (b,) = (each.generate("def f(x):", GREEDY) for each in (llm, text_only))
    assert a.token_ids == b.token_ids
    assert a.logprobs == b.logprobs
    # Text runs no program of images.
    assert {key[0] for key in text_only.programs.compiled} >= {"prefill", "decode"}

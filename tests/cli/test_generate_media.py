"""Images and videos on the command line."""

import json

import pytest

from dflash_jax import LLM, SamplingParams
from dflash_jax.cli.generate import main
from tests.media.encoded import clip, encoded, picture
from tests.vision_checkpoint import write_vision_checkpoint

IMAGE, VIDEO = picture(33, 50), clip(frames=6, rate=2, height=32, width=32)
NEW = 6


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A checkpoint with a vision tower, an image and a video."""
    path = tmp_path_factory.mktemp("media")
    write_vision_checkpoint(path / "model")
    (path / "image.png").write_bytes(encoded(IMAGE))
    (path / "video.mp4").write_bytes(VIDEO)
    (path / "text.png").write_text("no image")
    return path


def run(capsys, files, *argv) -> tuple[int, str, str]:
    target = ["--target", str(files / "model"), "--draft", "none", "--max-len", "256", "--max-new-tokens", str(NEW)]
    code = main([*target, "--temperature", "0", "--ignore-eos", *argv])
    return code, *capsys.readouterr()


def test_an_image_and_a_video_are_before_the_text_of_one_message(capsys, files):
    media = ["--image", str(files / "image.png"), "--video", str(files / "video.mp4")]
    code, out, err = run(capsys, files, *media, "--prompt", "what?", "--system", "Be brief.", "--json")
    assert code == 0, err
    found = json.loads(out)
    content = [{"type": "image", "image": IMAGE}, {"type": "video", "video": VIDEO}, {"type": "text", "text": "what?"}]
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    llm = LLM(files / "model", draft=None, max_len=256, slots=1)
    right = llm.chat(talk, SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True))[0]
    assert found["prompt_ids"] == right.prompt_ids
    assert found["token_ids"] == right.token_ids
    assert right.prompt_ids.count(llm.media.tokens.image) == 24


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--image", "image.png"], "no prompt"),
        (["--image", "image.png", "--prompt", "a", "--prompt", "b"], "belong to one prompt of text"),
        (["--image", "image.png", "--prompt-ids", "1"], "belong to one prompt of text"),
        (["--image", "none.png", "--prompt", "a"], "--image: '/"),
        (["--image", "text.png", "--prompt", "a"], "--image: "),
        (["--video", "image.png", "--prompt", "a"], "--video: "),
        (["--image", "http://example.invalid/a.png", "--prompt", "a"], "--allowed-media-domains"),
        (["--image", "image.png", "--prompt", "a", "--compare"], "--compare"),
        (["--image", "image.png", "--prompt", "a", "--language-model-only"], "--language-model-only"),
        (["--image", "image.png", "--prompt", "a", "--limit-mm-per-prompt", '{"image": 0}'], "1 images"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(capsys, files, options, message):
    names = ["image.png", "none.png", "text.png", "video.mp4"]
    code, out, err = run(capsys, files, *(str(files / o) if o in names else o for o in options))
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1

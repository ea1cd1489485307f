"""Training behind images and videos: the features are those of decoding, text alone is learned, text is unchanged."""

import base64
import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import LLM, InputError, SamplingParams
from dflash_jax.checkpoint.load import load_target
from dflash_jax.cli.train import main
from dflash_jax.decoding.prefill import MediaChunk
from dflash_jax.frontend import llm as llm_module
from dflash_jax.models.cache import init_cache
from dflash_jax.models.packing import unpack_weights
from dflash_jax.ops.backend import XLA
from dflash_jax.options.train import TrainConfig
from dflash_jax.training import regenerate as regeneration
from dflash_jax.training import run
from dflash_jax.training.conversations import DIRECTORY, directory_of, split_conversation
from dflash_jax.training.data import PackedRows, read_documents
from dflash_jax.training.evaluation import read_held_out
from dflash_jax.training.losses import Loss
from dflash_jax.training.media import placer
from dflash_jax.training.media_rows import MediaRows, with_media
from dflash_jax.training.optimiser import optimiser
from dflash_jax.training.regenerate import regenerate
from dflash_jax.training.step import Recipe, Trainer, sample_anchors
from dflash_jax.training.tokenising import Skipped, read_lines
from tests.float64 import in_both_of
from tests.media.encoded import clip, encoded, picture
from tests.training.talks import TALKS
from tests.training.test_train import assert_same_bits, parameters
from tests.vision_checkpoint import VOCAB, write_vision_checkpoint

LENGTH, TAPS = 160, (0, 2)
URL = "data:image/png;base64," + base64.b64encode(encoded(picture(20, 9, seed=5))).decode()
ANSWER = {"role": "assistant", "content": "def f(x):\n    return x"}


def asked(*content) -> dict:
    return {"role": "user", "content": list(content)}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


IMAGE, VIDEO = {"type": "image", "image": "images/a.png"}, {"type": "video", "video": "b.mp4", "num_frames": 3}
CONVERSATIONS = [
    # An image in the middle of a row, and media of both kinds in an order of their own.
    [asked(text("what is "), IMAGE, text(" this?")), ANSWER],
    [asked(VIDEO, text(" and "), {"type": "image", "image": URL}), ANSWER, asked(text("and")), ANSWER],
    # In an answer, too, it is not learned.
    [asked(text("show")), {"role": "assistant", "content": [text("here "), IMAGE, text(" it is")]}],
    *TALKS[:3],
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("vision")
    write_vision_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(checkpoint, draft=None, max_len=256, slots=2)


def write(directory: Path, talks: list) -> Path:
    (directory / "images").mkdir(parents=True)
    (directory / "images/a.png").write_bytes(encoded(picture(33, 50)))
    (directory / "b.mp4").write_bytes(clip(7, height=32, width=40))
    path = directory / "talks.jsonl"
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("data") / "set", CONVERSATIONS)


@pytest.fixture(scope="module")
def rows(llm, data) -> PackedRows:
    return PackedRows(read_documents([data], llm.tokenizer, VOCAB, None, placer(llm.media, llm.encoder)), LENGTH)


@pytest.fixture(scope="module")
def config(checkpoint, data):
    return TrainConfig(
        target=str(checkpoint),
        data=(str(data),),
        layers=1,
        block_size=4,
        taps=TAPS,
        sequence_length=LENGTH,
        rows=2,
        anchors=8,
        steps=2,
        log_every=1,
    )


def trainer_of(llm: LLM, config: TrainConfig) -> Trainer:
    draft = run.open_pair(config).draft
    return Trainer(unpack_weights(llm.target), draft, Recipe(Loss(), 1, 2), optimiser(1e-3, 1))


def test_features_of_training_are_those_of_decoding(llm, data, rows, config):
    """Of every document, packed beside others, as of prefill in two chunks that divide an image."""
    trainer, plain, seen = trainer_of(llm, config), load_target(llm.directory, backend=XLA), 0
    features = jax.jit(trainer.features)

    @jax.jit
    def decoded(target, tokens, chunk):
        n = tokens.shape[1]
        inputs, positions = chunk.inputs(target, tokens)
        cache, parts = init_cache(target.config, 1, LENGTH, jnp.float32), []
        for start, end in ((0, n // 2), (n // 2, n)):
            length, count = jnp.array([start]), jnp.array([end - start])
            x, at = inputs[:, start:end], positions[:, :, start:end]
            _, part, cache = target.extend(x, cache, length, count, TAPS, at)
            parts.append(part)
        return jnp.concatenate(parts, axis=1)[0]

    talks = {}
    for where, record in read_lines([data]):
        rendered, parts = split_conversation(record["messages"], where, directory_of(record, where))
        ids = llm.tokenizer.mark_answers(rendered, where)[0]
        ids, media = llm.with_media(ids, parts) if parts else (ids, None)
        talks[tuple(ids)] = media and llm.encoder.prompt_media(media)
    for index, row in enumerate(map(with_media(rows).__getitem__, range(len(rows)))):
        batch = jax.tree.map(lambda x: jnp.asarray(x)[None], row)
        _, found = features(trainer.leaves, batch["tokens"], batch["starts"], batch["media"])
        for document, start, end in rows.places(index):
            assert len(document.tokens) == end - start
            media = talks[tuple(document.tokens.tolist())]
            if media is None:
                continue
            chunk = MediaChunk(*media.chunk(0, end - start, llm.config.hidden_size, np.float32))
            right = in_both_of(decoded, plain, document.tokens[None], chunk).value
            # A row or a position that is wrong moves features by more than 0.1, rounding by up to 1e-4 at one place.
            np.testing.assert_allclose(found[0, start:end], right, rtol=0, atol=1e-3)
            seen += start > 0
    assert seen, "no document with media is behind another one"


def test_text_of_a_row_with_media_is_that_of_text_alone(llm, rows, config):
    trainer = trainer_of(llm, config)
    index = next(i for i in range(len(rows)) if rows.media_keys(i))
    row, text_row = with_media(rows)[index], rows[index]
    assert not set(text_row) & {"media"}
    compiled = jax.jit(trainer.features)
    features = [
        np.asarray(compiled(trainer.leaves, row["tokens"][None], row["starts"][None], media)[1][0])
        for media in (None, jax.tree.map(lambda x: jnp.asarray(x)[None], row["media"]))
    ]
    for document, start, end in rows.places(index):
        apart = np.abs(features[0][start:end] - features[1][start:end]).max()
        assert (apart > 0.1) if document.media is not None else (apart < 1e-4)


def test_text_alone_is_learned(llm, rows):
    pads, newline = (llm.media.tokens.image, llm.media.tokens.video), llm.tokenizer.encode_plain("\n")
    assert newline
    for index in range(len(rows)):
        row = with_media(rows)[index]
        is_media = row["media"].is_media
        np.testing.assert_array_equal(is_media, np.isin(row["tokens"], pads))
        assert not row["loss_mask"][is_media].any()
        anchors, valid = sample_anchors(jax.random.key(0), row["loss_mask"][None], row["starts"][None], 24)
        assert not is_media[np.asarray(anchors)[np.asarray(valid)]].any()
    first, second, third = (d for d in rows.documents if d.media is not None)
    decode = llm.tokenizer.decode
    assert decode(first.tokens[first.mask]).strip().endswith(ANSWER["content"])
    assert decode(second.tokens[second.mask]).count(ANSWER["content"]) == 2
    assert "seconds" in decode(second.tokens[~second.mask])
    assert re.search("here .*it is", decode(third.tokens[third.mask]), re.DOTALL)
    assert len(third.media.parts) == 1


def test_rows_of_text_are_as_they_were(llm, tmp_path, data):
    """The same arrays, and no more of them, with a tower and without."""
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))
    ours, plain = (
        PackedRows(read_documents([path], llm.tokenizer, VOCAB, None, place), LENGTH)
        for place in (placer(llm.media, llm.encoder), None)
    )
    assert with_media(ours) is ours
    assert ours.digest() == plain.digest()
    assert set(ours[0]) == {"tokens", "loss_mask", "starts"}


def test_training_on_text_has_the_same_bits_with_and_without_a_tower(config, tmp_path, monkeypatch):
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))
    mine = replace(config, data=(str(path),), output=str(tmp_path / "with"))
    assert run.fit(mine, print) == (2, 2)
    monkeypatch.setattr(llm_module, "load_encoder", lambda *_: None)
    assert run.fit(replace(mine, output=str(tmp_path / "without")), print) == (2, 2)
    assert_same_bits(parameters(tmp_path / "with"), parameters(tmp_path / "without"))


def test_a_document_that_is_cut_off_has_the_rows_of_what_is_left(llm, data, rows):
    """Neither images behind the cut nor rows of the one that it divides."""
    documents = [d for d in rows.documents if d.media is not None and len(d.media.parts) == 2]
    (document,) = documents
    (whole,) = (row for row in map(MediaRows(rows).__getitem__, range(len(rows))) if _has(row, document))
    start = int(np.flatnonzero(whole["tokens"] == document.tokens[0])[0])
    ends = np.flatnonzero(document.media.is_media)
    for length in (int(ends[5]), int(ends[0]), int(ends[-1])):
        cut = MediaRows(PackedRows([document], length))[0]
        n = start + length
        np.testing.assert_array_equal(cut["media"].embeddings, whole["media"].embeddings[start:n])
        np.testing.assert_array_equal(cut["media"].positions, whole["media"].positions[:, start:n])


def _has(row: dict, document) -> bool:
    n = len(document.tokens)
    return any(np.array_equal(row["tokens"][i : i + n], document.tokens) for i in range(LENGTH - n + 1))


def test_a_file_that_changes_while_it_is_trained_on_is_named(llm, tmp_path):
    path = write(tmp_path / "set", CONVERSATIONS[:1])
    (document,) = read_documents([path], llm.tokenizer, VOCAB, None, placer(llm.media, llm.encoder))
    before = document.media.rows(3)
    (tmp_path / "set/images/a.png").write_bytes(encoded(picture(33, 50, seed=9)))
    # The encoder has its rows no more.
    llm.encoder.outputs.__init__(0)
    with pytest.raises(InputError, match=r"talks.jsonl:1: messages\[0\].content\[1\]: .*has changed"):
        document.media.rows(3)
    (tmp_path / "set/images/a.png").write_bytes(encoded(picture(33, 50)))
    np.testing.assert_array_equal(document.media.rows(3), before)
    (tmp_path / "set/images/a.png").unlink()
    with pytest.raises(InputError, match=r"talks.jsonl:1: .*cannot be read: No such file"):
        document.media.rows(3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image", "image": "talks.jsonl"}], r"messages\[0\].content\[0\]: "),
        ([{"type": "image", "image": "data:image/png;base64,!"}], r"messages\[0\].content\[0\]: .*base64"),
        ([{"type": "image", "image": "no.png"}], "is no file"),
        ([IMAGE, text("<|image_pad|>")], "the prompt has 2 image pads: 1 images"),
        ([text("<|video_pad|>"), IMAGE], "the prompt has 1 video pads: 0 videos"),
        ([VIDEO | {"fps": 1}], "fps and num_frames are both given"),
    ],
)
def test_a_line_whose_media_cannot_be_used_is_named_or_counted(llm, tmp_path, content, message):
    path = write(tmp_path / "set", [CONVERSATIONS[0], [asked(*content), ANSWER]])
    with pytest.raises(InputError, match=rf"^{re.escape(str(path))}:2: (?!{re.escape(str(path))}).*{message}"):
        read_documents([path], llm.tokenizer, VOCAB, None, placer(llm.media, llm.encoder))
    skipped = Skipped()
    assert len(read_documents([path], llm.tokenizer, VOCAB, skipped, placer(llm.media, llm.encoder))) == 1
    assert (skipped.count, message.partition(" ")[0].split("\\")[0] in skipped.first) == (1, True)


def test_a_target_without_a_tower_refuses_media_by_line(llm, data, tmp_path):
    with pytest.raises(InputError, match=r"talks.jsonl:1: .*no vision tower"):
        read_documents([data], llm.tokenizer, VOCAB)
    config = TrainConfig(data=(str(data),), temperature=0.0)
    with pytest.raises(InputError, match=r"talks.jsonl:1: .*no vision tower"):
        regenerate(config, LLM(None, slots=2), tmp_path / "r.jsonl", print)


def test_a_run_learns_behind_media_online_and_from_a_cache(config, tmp_path):
    """The cache holds what the tower gave: fit runs neither it nor the target. Other pixels are another run."""
    path = write(tmp_path / "set", CONVERSATIONS)
    mine = replace(config, data=(str(path),), output=str(tmp_path / "online"))
    assert run.fit(mine, print) == (2, 2)
    cached = replace(mine, features=str(tmp_path / "cache"), output=str(tmp_path / "cached"))
    argv = ["cache", "--target", config.target, "--data", str(path), "--features", cached.features, "--layers", "1"]
    argv += ["--block-size", "4", "--taps", *map(str, TAPS), "--sequence-length", str(LENGTH), "--rows", "2"]
    assert main([*argv, "--anchors", "8"]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash_jax.engine.vision_encoder.VisionEncoder.encode", None)
        assert run.fit(cached, print) == (2, 2)
    first = [(tmp_path / name / "metrics.csv").read_text().splitlines()[1].split(",") for name in ("online", "cached")]
    assert abs(float(first[0][1]) - float(first[1][1])) < 0.02
    (tmp_path / "set/images/a.png").write_bytes(encoded(picture(33, 50, seed=9)))
    with pytest.raises(InputError, match="other rows: tokens"):
        run.fit(replace(cached, output=str(tmp_path / "again")), print)
    with pytest.raises(InputError, match="the data's tokens are others"):
        run.fit(replace(mine, steps=2), print)


def test_the_tokens_to_draft_from_need_no_tower(config, tmp_path, monkeypatch):
    monkeypatch.setattr("dflash_jax.frontend.media.MediaReader.read", None)
    argv = ["tokens", "--target", config.target, "--data", *config.data, "--output", str(tmp_path)]
    assert main([*argv, "--draft-vocabulary", "9"]) == 0
    assert len(json.loads((tmp_path / "draft_tokens.json").read_text())) == 9


def test_answers_behind_media_are_those_of_chat_and_are_trained_on(llm, tmp_path, monkeypatch):
    """The conversation is written as it was, into another directory, and a second call knows the pixels."""
    talks = [CONVERSATIONS[0], CONVERSATIONS[1], TALKS[0]]
    data = write(tmp_path / "set", talks)
    path = tmp_path / "run/deep/r.jsonl"
    config = TrainConfig(data=(str(data),), max_new_tokens=6, temperature=0.0)
    assert regenerate(config, llm, path, print) == 3
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["source"] for line in lines] == [0, 1, 1, 2]
    assert [line["messages"][0] for line in lines] == [talks[i][0] for i in (0, 1, 1, 2)]
    assert [line.get(DIRECTORY) for line in lines] == ["../../set"] * 3 + [None]
    located = [asked(text("what is "), {"type": "image", "image": str(data.parent / "images/a.png")}, text(" this?"))]
    (alone,) = llm.chat(located, SamplingParams(temperature=0.0, max_tokens=6, seed=0))
    assert lines[0]["response_ids"] == alone.token_ids
    documents = read_documents([path], llm.tokenizer, VOCAB, None, placer(llm.media, llm.encoder))
    assert [int(d.mask.sum()) for d in documents] == [len(line["response_ids"]) for line in lines]
    assert documents[0].tokens.tolist() == [*alone.prompt_ids, *alone.token_ids]
    assert [len(d.media.parts) if d.media else 0 for d in documents] == [1, 2, 2, 0]
    said: list[str] = []
    assert regenerate(config, llm, path, said.append) == 3
    assert said == ["3 of 3 were answered before"]
    (data.parent / "images/a.png").write_bytes(encoded(picture(33, 50, seed=9)))
    with pytest.raises(InputError, match="other settings: media was"):
        regenerate(config, llm, path, print)
    # A path that is broken later is a line's fault, like one that was broken before.
    monkeypatch.setattr(regeneration, "digest_of_files", lambda parts: "")
    (data.parent / "images/a.png").write_bytes(b"no image")
    other = tmp_path / "other.jsonl"
    with pytest.raises(InputError, match=r"talks.jsonl:1: messages\[0\].content\[1\]: "):
        regenerate(config, llm, other, print)
    assert regenerate(replace(config, skip_bad_lines=True), llm, other, print) == 2


def test_held_out_conversations_with_media_are_prompts(llm, data, tmp_path):
    config = TrainConfig(held_out=str(data), evaluate_tokens=4)
    prompts = read_held_out(config, llm)
    assert [isinstance(prompt, dict) for prompt in prompts] == [True, True, False, False, False, False]
    answers = llm.generate(prompts, SamplingParams(max_tokens=4, temperature=0.0))
    assert answers[0].prompt_ids.count(llm.media.tokens.image) > 1
    with pytest.raises(InputError, match=r"talks.jsonl:1: "):
        read_held_out(replace(config, evaluate_tokens=250), llm)
    bad = write(tmp_path / "set", [[asked({"type": "image", "image": "no.png"})]])
    with pytest.raises(InputError, match=r"talks.jsonl:1: .*is no file"):
        read_held_out(replace(config, held_out=str(bad)), llm)


def test_the_chunk_of_a_row_is_one_for_the_step(rows):
    row = MediaRows(rows)[0]
    assert isinstance(row["media"], MediaChunk)
    assert row["media"].embeddings.shape == (LENGTH, 36)
    assert row["media"].positions.shape == (3, LENGTH)

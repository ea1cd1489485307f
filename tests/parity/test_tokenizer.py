"""Token ids and texts are those of transformers' AutoTokenizer on the same files."""

import json
import shutil

import pytest
import tokenizers
from transformers import AutoTokenizer

from dflash_jax.frontend.llm_config import TINY
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.training.tokenizer import save_tokenizer, train_tokenizer

# Decomposed characters, Hangul jamo, marks beside added tokens and alone, ligatures, compatibility characters.
TEXTS = [
    "e\u0301cole école",
    "\u1112\u1161\u11ab\uae00 각",
    "a\u0328\u0301 \u0344 \u0301",
    "<|im_start|>\u0301x<|im_end|>e\u0301",
    "<think>\u0301</think>\u0301e\u0301!",
    "ﬁ \u212b Å \ufffd\ufffd漢字",
    "e\u0301!é!e\u0301",
    " हिन्दी  \u202fx\r\n\n",
]


def bundled(directory):
    """The bundled target's, which transformers reads as its family's whatever the file says."""
    shutil.copytree(TINY / "target", directory, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)


def trained(directory):
    """One of ours with tokens that are added to it, found in the normalised text."""
    tokenizer = train_tokenizer(["héllo wörld 한국어 각 école"] * 3, 400)
    tokenizer.add_tokens([tokenizers.AddedToken("é!", special=False, normalized=True)])
    save_tokenizer(tokenizer, directory, 64)


def cut_and_padded(directory):
    """One that its training cut and padded."""
    trained(directory)
    given = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(given))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=40)
    tokenizer.save(str(directory / "tokenizer.json"))


def older(directory):
    """A vocabulary and merges without a tokenizer.json."""
    trained(directory)
    path = directory / "tokenizer.json"
    model = json.loads(path.read_text(encoding="utf-8"))["model"]
    path.unlink()
    (directory / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    merges = "\n".join(map(" ".join, model["merges"]))
    (directory / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.mark.parametrize("make", [bundled, trained, cut_and_padded, older])
def test_ids_and_texts_are_those_of_transformers(make, tmp_path):
    make(tmp_path)
    ours, reference = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.encode("e\u0301") == ours.encode("\u00e9")
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == reference.encode(text), text
        assert ours.encode_plain(text) == reference.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert ours.decode(ids, skip) == reference.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )

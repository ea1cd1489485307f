"""The tokenizer inside a GGUF file, as the files that tokenizers and transformers read."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from dflash_jax.errors import InputError
from dflash_jax.models.families.reading import LIMITS, flag, integer, shown

KEY = "tokenizer.ggml."
CONTROL, USER_DEFINED = 3, 4
# Most characters of tokens of these types together: some seconds of the library.
MOST_ADDED = 2**20
SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def _split(digits: str, marks: str = "") -> str:
    """A regular expression of words; ``marks`` are of words, too."""
    words = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}{marks}]+"
    return rf"{words}|{digits}| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Scheme:
    """How a byte-level BPE treats text before its merges.

    Attributes:
        split: A regular expression; None: GPT-2's.
        lone_digits: Whether each digit is split off first.
        nfc: Whether text is normalised to NFC.
        whole_words: Whether a word of the vocabulary is one token whatever the merges.
        bos: Whether texts begin with the bos token unless the file says otherwise.
    """

    split: str | None = None
    lone_digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    bos: bool = False


LLAMA3 = Scheme(_split(r"\p{N}{1,3}"), whole_words=True, bos=True)
# Scheme by the value of tokenizer.ggml.pre.
SCHEMES = {
    "gpt-2": Scheme(),
    "smollm": Scheme(lone_digits=True),
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": Scheme(_split(r"\p{N}"), nfc=True),
    "qwen35": Scheme(_split(r"\p{N}", r"\p{M}"), nfc=True),
}


def _fail(source: str, message: str) -> NoReturn:
    raise InputError(f"{source}: its tokenizer {message}")


def _fits(pair: tuple[str, ...], ids: Mapping[str, int]) -> bool:
    return len(pair) == 2 and pair[0] in ids and pair[1] in ids and pair[0] + pair[1] in ids


def build_tokenizer(metadata: dict, source: str) -> Tokenizer:
    """Builds the tokenizer of a GGUF file.

    Args:
        metadata: The file's metadata.
        source: The file's name, for errors.

    Raises:
        InputError: Its kind is unknown, or a value is invalid.
    """
    kind, pre = metadata.get(f"{KEY}model"), metadata.get(f"{KEY}pre")
    if kind != "gpt2":
        _fail(source, f"is of kind {shown(kind)}: known is 'gpt2' (byte-level BPE)")
    if not isinstance(pre, str) or pre not in SCHEMES:
        _fail(source, f"splits text by {shown(pre)}: known are {', '.join(SCHEMES)}")
    scheme = SCHEMES[pre]
    tokens, merges = (metadata.get(f"{KEY}{name}") for name in ("tokens", "merges"))
    if not isinstance(tokens, list) or not isinstance(merges, list):
        _fail(source, f"lacks {KEY}{'merges' if isinstance(tokens, list) else 'tokens'}")
    for name, texts in (("tokens", tokens), ("merges", merges)):
        if not all(isinstance(each, str) for each in texts):
            _fail(source, f"has {KEY}{name} that are not strings")
    outside = [i for i in ids_of(metadata, source) if i >= len(tokens)]
    if outside:
        _fail(source, f"names the token id {outside[0]}: ids are 0 to {len(tokens) - 1}")
    ids = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    # The library panics at some merges that do not fit.
    wrong = (merge for merge, pair in zip(merges, pairs, strict=True) if not _fits(pair, ids))
    if (merge := next(wrong, None)) is not None:
        _fail(source, f"has the merge {shown(merge)}: it must be two tokens that are one token together")
    try:
        model = models.BPE(
            ids,
            pairs,
            ignore_merges=scheme.whole_words,
        )
    except Exception as e:  # the library raises plain Exception
        _fail(source, f"has merges that do not fit its tokens: {(str(e).splitlines() or [type(e).__name__])[0][:200]}")
    tokenizer = Tokenizer(model)
    if scheme.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = (
        [pre_tokenizers.Digits(individual_digits=True)] if scheme.lone_digits else []
    )
    if scheme.split:
        steps.append(pre_tokenizers.Split(Regex(scheme.split), "isolated"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=scheme.split is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata.get(f"{KEY}token_type", [])
    if not isinstance(types, list):
        _fail(source, f"has {KEY}token_type {shown(types)}: it must be a list")
    added = [(t, kind) for t, kind in zip(tokens, types, strict=False) if kind in (CONTROL, USER_DEFINED)]
    if (size := sum(len(t) for t, _ in added)) > MOST_ADDED:
        _fail(source, f"has {size} characters of special tokens: at most {MOST_ADDED} are read")
    for token_type, add in ((CONTROL, tokenizer.add_special_tokens), (USER_DEFINED, tokenizer.add_tokens)):
        add([AddedToken(t, normalized=False) for t, kind in added if kind == token_type])
    if (
        flag(f"{source}: {KEY}add_bos_token", metadata.get(f"{KEY}add_bos_token", scheme.bos))
        and (bos := metadata.get(f"{KEY}bos_token_id")) is not None
    ):
        first = tokens[bos]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[first, "$A"], pair=[first, "$A", f"{first}:1", "$B:1"], special_tokens=[(first, bos)]
        )
    return tokenizer


def ids_of(metadata: dict, source: str, names=("bos", "eos", "eot", "eom", "unknown", "padding")) -> list[int]:
    """The distinct ids of the special tokens ``names`` that the file defines.

    Raises:
        InputError: A value is no token id.
    """
    values = {f"{KEY}{name}_token_id": metadata.get(f"{KEY}{name}_token_id") for name in names}
    maximum = LIMITS["vocab_size"]
    ids = (integer(f"{source}: {key}", value, 0, maximum) for key, value in values.items() if value is not None)
    return list(dict.fromkeys(ids))


def save_tokenizer(metadata: dict, directory: Path, max_positions: int, source: str) -> None:
    """Writes tokenizer.json, tokenizer_config.json and, if the file has a template, chat_template.jinja.

    Raises:
        InputError: The tokenizer is invalid or unknown.
    """
    tokenizer = build_tokenizer(metadata, source)
    ids = {name: metadata.get(f"{KEY}{key}") for name, key in SPECIAL.items()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: tokenizer.id_to_token(i) for name, i in ids.items() if i is not None},
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
    }
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if template := metadata.get("tokenizer.chat_template"):
        if not isinstance(template, str):
            _fail(source, f"has tokenizer.chat_template {shown(template)}: it must be a string")
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")

"""Between text and token ids: tokenizer, chat template, detokenising while tokens arrive, stop strings."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from dflash_jax.errors import InputError

# What opens a message: Qwen's and Llama's.
MARKERS = ("<|im_start|>", "<|start_header_id|>")


class Tokenizer:
    """The checkpoint's own tokenizer and chat template.

    ``tokenizer.json`` is read by the tokenizers library; transformers, which takes seconds to import, is asked only
    for chat templates and for checkpoints in older formats.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        if (directory / "tokenizer.json").exists():
            try:
                fast = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
            except Exception as e:  # the library raises plain Exception
                raise InputError(f"{directory / 'tokenizer.json'} is no tokenizer: {_reason(e)}") from None
            self._encode = lambda text, special: fast.encode(text, add_special_tokens=special).ids
            self._decode = lambda ids: fast.decode(ids, skip_special_tokens=True)
        else:
            slow = self._full
            self._encode = lambda text, special: slow.encode(text, add_special_tokens=special)
            self._decode = lambda ids: slow.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    @cached_property
    def _full(self):
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self._directory)
        except Exception as e:  # transformers raises many types for what is one fault: no usable tokenizer there
            raise InputError(f"{self._directory} has no tokenizer that transformers can read: {_reason(e)}") from None

    def encode(self, text: str) -> list[int]:
        return self._encode(text, True)

    @cached_property
    def markers(self) -> frozenset[int]:
        """Ids of the tokens that open a message in a chat template, where there are some."""
        each = (self._encode(marker, False) for marker in MARKERS)
        return frozenset(ids[0] for ids in each if len(ids) == 1)

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._decode(list(ids))

    def render_chat(self, messages: list[dict], thinking: bool | None = None) -> str:
        """A conversation as the template writes it, up to where the answer begins. ``thinking`` None: its default."""
        if not self._full.chat_template:
            raise InputError("this checkpoint has no chat template: give plain prompts")
        options = {} if thinking is None else {"enable_thinking": thinking}
        return self._full.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)

    def chat(self, messages: list[dict], thinking: bool | None = None) -> list[int]:
        """Token ids of `render_chat`."""
        return self._encode(self.render_chat(messages, thinking), False)


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class Detokenizer:
    """Text of tokens as they arrive: whole characters only, and nothing of a stop string.

    ``text`` is what may be shown so far; once ``stopped``, it ends before the first stop string and no longer grows.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()):
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._ids: list[int] = []
        # Tokens before _from are settled; they are decoded again only as the context of those behind.
        self._from, self._read = 0, 0
        self._raw = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> None:
        self._ids.append(token)
        before = self._tokenizer.decode(self._ids[self._from : self._read])
        now = self._tokenizer.decode(self._ids[self._from :])
        # A half character decodes to the replacement character: wait for its other half.
        if len(now) > len(before) and not now.endswith("�"):
            self._from, self._read = self._read, len(self._ids)
            self._settle(now[len(before) :])

    def finish(self) -> None:
        """No more tokens come: what was held back is text after all."""
        if not self.stopped:
            before = self._tokenizer.decode(self._ids[self._from : self._read])
            self._settle(self._tokenizer.decode(self._ids[self._from :])[len(before) :])
            if not self.stopped:
                self.text = self._raw

    def _settle(self, piece: str) -> None:
        self._raw += piece
        found = [i for i in (self._raw.find(s) for s in self._stops) if i >= 0]
        if found:
            self.text, self.stopped = self._raw[: min(found)], True
            return
        held = max((n for s in self._stops for n in range(1, len(s)) if self._raw.endswith(s[:n])), default=0)
        self.text = self._raw[: len(self._raw) - held]

"""Between text and token ids: tokenizer, chat template, detokenising while tokens arrive, stop strings."""

from collections.abc import Sequence
from pathlib import Path

from dflash_jax.errors import InputError


class Tokenizer:
    """The checkpoint's own tokenizer and chat template, through transformers."""

    def __init__(self, directory: Path):
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(directory)
        except Exception as e:  # transformers raises many types for what is one fault: no usable tokenizer there
            reason = (str(e).strip() or type(e).__name__).splitlines()[0]
            raise InputError(f"{directory} has no tokenizer that transformers can read: {reason}") from None

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=True)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def chat(self, messages: list[dict], thinking: bool | None = None) -> list[int]:
        """Token ids of a conversation up to where the assistant's answer begins. ``thinking`` None: the template's
        default."""
        if not self._tokenizer.chat_template:
            raise InputError("this checkpoint has no chat template: give plain prompts")
        options = {} if thinking is None else {"enable_thinking": thinking}
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        return self._tokenizer.encode(text, add_special_tokens=False)


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

"""Between text and token ids: tokenizer and chat template."""

import json
import os
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path

import jinja2
import tokenizers

from dflash_jax.checkpoint.config_files import read_json
from dflash_jax.errors import InputError

# What a chat template, or a library that fills one in, raises.
REFUSALS = (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError, SyntaxError)
# What a template's options cannot say: it has fields of its own, or is decided here.
RESERVED = {
    "add_generation_prompt",
    "ask",
    "chat_template",
    "continue_final_message",
    "conversation",
    "conversations",
    "messages",
    "return_assistant_tokens_mask",
    "return_dict",
    "self",
    "template",
    "tokenize",
    "tools",
}
# Words whose tokens are kept.
WORDS = 2048
# What opens a message: Qwen's and Llama's.
MARKERS = ("<|im_start|>", "<|start_header_id|>")


class Tokenizer:
    """The checkpoint's own tokenizer and chat template.

    ``tokenizer.json`` is read by the tokenizers library; transformers, which takes seconds to import, is asked only
    for chat templates and for checkpoints in older formats.

    Args:
        directory: Of the checkpoint, or of a tokenizer alone.
        chat_template: Text of a template in place of the checkpoint's.
        template_options: Defaults of the template's own options, such as ``{"enable_thinking": False}``.
    """

    def __init__(self, directory: Path, chat_template: str | None = None, template_options: dict | None = None):
        self._directory, self._given_template = directory, chat_template
        # Log-probabilities ask for the same tokens again and again.
        self._token_bytes: dict[int, bytes] = {}
        self._encode_word = lru_cache(WORDS)(lambda word: tuple(self._encode(word, False)))
        self.template_options = dict(template_options or {})
        if reserved := RESERVED & set(self.template_options):
            raise InputError(f"{min(reserved)!r} is not an option of a chat template")
        self.file = directory / "tokenizer.json" if (directory / "tokenizer.json").exists() else None
        if self.file is not None:
            try:
                fast = tokenizers.Tokenizer.from_file(str(self.file))
            except Exception as e:  # the library raises plain Exception
                raise InputError(f"{self.file} is no tokenizer: {reason(e)}") from None
            # Encoding a batch lets other threads run meanwhile, encoding a text does not.
            self._encode = lambda text, special: fast.encode_batch_fast([text], add_special_tokens=special)[0].ids
            self._decode = lambda ids, skip: fast.decode(ids, skip_special_tokens=skip)
            self._decode_long = lambda ids: fast.decode_batch([ids], skip_special_tokens=True)[0]
            self._vocabulary = fast.get_vocab
            self._token = fast.id_to_token
        else:
            slow = self._full
            self._encode = lambda text, special: slow.encode(text, add_special_tokens=special)
            self._decode = lambda ids, skip: slow.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            self._decode_long = lambda ids: self._decode(ids, True)
            self._token = slow.convert_ids_to_tokens

    @cached_property
    def _full(self):
        # Tokenizers and templates need no PyTorch, which transformers advises to install.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        from transformers import AutoTokenizer

        try:
            full = AutoTokenizer.from_pretrained(self._directory)
        except Exception as e:  # transformers raises many types for what is one fault: no usable tokenizer there
            raise InputError(f"{self._directory} has no tokenizer that transformers can read: {reason(e)}") from None
        if self._given_template is not None:
            full.chat_template = self._given_template
        return full

    def encode(self, text: str) -> list[int]:
        return self._encode(text, True)

    def encode_plain(self, text: str) -> list[int]:
        """Without the special tokens that a checkpoint may put around a prompt."""
        return self._encode(text, False)

    def encode_word(self, word: str) -> tuple[int, ...]:
        """As `encode_plain`; kept, since all choices of a request ask for the same words."""
        return self._encode_word(word)

    def token(self, token_id: int) -> str:
        """The token as the vocabulary spells it; empty past its end."""
        return self._token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for, special ones by their names; half a character, too, in byte-level vocabularies."""
        found = self._token_bytes.get(token_id)
        if found is None:
            found = self._token_bytes[token_id] = self._read_token_bytes(token_id)
        return found

    def _read_token_bytes(self, token_id: int) -> bytes:
        name = self.token(token_id)
        if self._is_byte_level and all(c in _BYTES for c in name):
            return bytes(_BYTES[c] for c in name)
        return (name if "<" in name else self.decode([token_id])).encode()

    @cached_property
    def _is_byte_level(self) -> bool:
        return self.file is not None and "ByteLevel" in self.file.read_text(encoding="utf-8")

    @cached_property
    def config(self) -> dict:
        """What tokenizer_config.json says; empty where there is none."""
        path = self._directory / "tokenizer_config.json"
        return read_json(path) if path.exists() else {}

    @cached_property
    def chat_template(self) -> str | None:
        found = self._full.chat_template
        return found.get("default") if isinstance(found, dict) else found

    def template_for(self, tools: list[dict] | None) -> str:
        """The chat template for a conversation with ``tools``. Raises InputError where there is none."""
        if not self.chat_template:
            raise InputError("this checkpoint has no chat template: give plain prompts")
        return self._full.get_chat_template(None, tools)

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """As chat templates read them: ``bos_token`` and others."""
        return {name: str(token) for name, token in self._full.special_tokens_map.items()}

    @cached_property
    def longest_token(self) -> int | None:
        """Characters that one token stands for at most; None where that is not known.

        It is known of byte-level vocabularies whose text is not shortened before. NFC composes four characters to one
        at most.
        """
        if not self._is_byte_level:
            return None
        given = json.loads(self.file.read_text(encoding="utf-8"))
        normalizer = given.get("normalizer") or {"type": None}
        if normalizer["type"] not in (None, "NFC") or any(t["lstrip"] or t["rstrip"] for t in given["added_tokens"]):
            return None
        return max(map(len, self._vocabulary())) * (4 if normalizer["type"] == "NFC" else 1)

    @cached_property
    def markers(self) -> frozenset[int]:
        """Ids of the tokens that open a message in a chat template, where there are some."""
        each = (self._encode(marker, False) for marker in MARKERS)
        return frozenset(ids[0] for ids in each if len(ids) == 1)

    def decode_long(self, ids: Sequence[int]) -> str:
        """As `decode`; other threads run meanwhile."""
        return self._decode_long(list(ids))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids, by default without special tokens."""
        return self._decode(list(ids), skip_special_tokens)

    def render_chat(
        self,
        messages: list[dict],
        thinking: bool | None = None,
        tools: list[dict] | None = None,
        ask: bool = True,
        **options,
    ) -> str:
        """A conversation as the template writes it; if ``ask``, up to where the answer begins. ``thinking`` None: its
        default; ``options``: the template's own. The template runs in a sandbox. Raises InputError for what it refuses.
        """
        if not self.chat_template and not options.get("chat_template"):
            raise InputError("this checkpoint has no chat template: give plain prompts")
        options = self.template_options | options
        if thinking is not None:
            options["enable_thinking"] = thinking
        try:
            return self._full.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=ask, **options
            )
        except REFUSALS as e:
            raise InputError(f"the chat template does not take this conversation: {reason(e)}") from None

    def mark_answers(self, messages: list[dict], where: str) -> tuple[list[int], list[bool]]:
        """Token ids of a whole conversation, and which are the assistant's.

        From the template's generation markers; of a template that has none, an answer is what it adds to the
        conversation before it. Raises InputError, naming ``where``, for a template that rewrites earlier turns: then
        each answer must be a conversation of its own.
        """
        if "generation %}" in (self.chat_template or "") or "generation -%}" in (self.chat_template or ""):
            try:
                found = self._full.apply_chat_template(
                    messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
                )
            except REFUSALS as e:
                raise InputError(f"{where}: the chat template does not take this conversation: {reason(e)}") from None
            return list(found["input_ids"]), [bool(m) for m in found["assistant_masks"]]
        tokens: list[int] = []
        mask: list[bool] = []
        shown = ""
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            try:
                base, asked = (self.render_chat(messages[:i], ask=ask) for ask in (False, True))
                after = self.render_chat(messages[: i + 1], ask=False)
            except InputError as e:
                raise InputError(f"{where}: {e}") from None
            if not (asked.startswith(base) and after.startswith(base) and base.startswith(shown)):
                raise InputError(
                    f"{where}: the chat template has no generation marker and rewrites earlier turns, so it cannot be "
                    f"told what messages[{i}] adds: give each answer as a conversation that ends with it, or use "
                    f"regenerate, which writes token ids"
                )
            # The lines that the template itself writes before an answer.
            same = next((k for k, (a, b) in enumerate(zip(asked, after, strict=False)) if a != b), len(asked))
            head = after[: max(after.rfind("\n", 0, same) + 1, len(base))]
            for text, is_answer in ((head[len(shown) :], False), (after[len(head) :], True)):
                ids = self._encode(text, False)
                tokens, mask = tokens + ids, mask + [is_answer] * len(ids)
            shown = after
        return tokens, mask

    def chat(self, messages: list[dict], thinking: bool | None = None) -> list[int]:
        """Token ids of `render_chat`."""
        return self._encode(self.render_chat(messages, thinking), False)


def _byte_level() -> dict[str, int]:
    """The characters that byte-level vocabularies write for the 256 bytes: printable ones for themselves, the others
    from U+0100 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_level()


def reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

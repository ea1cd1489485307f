"""Conversion between text and token ids: tokenizer and chat template."""

import json
import os
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import jinja2
import tokenizers

from dflash_jax.argument_checks import is_text
from dflash_jax.checkpoint.config_files import read_json
from dflash_jax.errors import InputError
from dflash_jax.frontend.messages import template_forms, template_messages

# Errors of a chat template and of the library that renders it.
REFUSALS = (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError, SyntaxError)
# Names that are not options of a template: they have parameters of their own, or are set here.
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
# Words whose tokens are cached.
WORDS = 2048
# Tokens that open a message, of Qwen and of Llama.
MARKERS = ("<|im_start|>", "<|start_header_id|>")


class _TokenBytes(dict[int, bytes]):
    """The bytes of tokens, each read when it is first asked for."""

    def __init__(self, read: Callable[[int], bytes]):
        super().__init__()
        self._read = read

    def __missing__(self, token: int) -> bytes:
        value = self[token] = self._read(token)
        return value


def auto_tokenizer() -> Any:
    """The class of transformers that reads any tokenizer. Its import takes seconds."""
    # transformers advises to install PyTorch, which tokenizers and templates do not need.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    return AutoTokenizer


class Tokenizer:
    """The tokenizer and chat template of a checkpoint.

    The tokenizers library reads ``tokenizer.json``. transformers, which takes seconds to import, is used only for chat
    templates and for checkpoints in older formats.

    Args:
        directory: Directory of the checkpoint, or of a tokenizer alone.
        chat_template: Text of a template in place of the checkpoint's.
        template_options: Defaults of the template's options, such as ``{"enable_thinking": False}``.

    Attributes:
        file: The tokenizer.json; None in older formats.
        is_byte_level: Whether a text is the UTF-8 of its tokens' bytes, one after the other.
        has_byte_fallback: Whether runs of tokens such as ``<0x0A>`` are the UTF-8 of a text, or a replacement character
            for each where they are none.
        template_options: As given.
        all_bytes: `token_bytes` by token id.
        shown_bytes: The same, empty for special tokens.

    Raises:
        InputError: The files are not a tokenizer, or an option has a reserved name.
    """

    def __init__(self, directory: Path, chat_template: str | None = None, template_options: dict | None = None):
        self._directory, self._given_template = directory, chat_template
        self.all_bytes = _TokenBytes(self._read_token_bytes)
        self.shown_bytes = _TokenBytes(lambda token: b"" if self.is_special(token) else self.all_bytes[token])
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
        else:
            fast = getattr(self._full, "backend_tokenizer", None)
        if fast is not None:
            # As transformers, which cuts and pads no text unless asked to.
            fast.no_truncation()
            fast.no_padding()
            # Encoding a batch lets other threads run meanwhile, encoding a text does not.
            self._encode = lambda text, special: fast.encode_batch_fast([text], add_special_tokens=special)[0].ids
            self._decode = lambda ids, skip: fast.decode(ids, skip_special_tokens=skip)
            self._decode_long = lambda ids: fast.decode_batch([ids], skip_special_tokens=True)[0]
            self._vocabulary = fast.get_vocab
            self._token = fast.id_to_token
            self._special_ids = frozenset(i for i, t in fast.get_added_tokens_decoder().items() if t.special)
        else:
            slow = self._full
            self._encode = lambda text, special: slow.encode(text, add_special_tokens=special)
            self._decode = lambda ids, skip: slow.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            self._decode_long = lambda ids: self._decode(ids, True)
            self._token = slow.convert_ids_to_tokens
            self._special_ids = frozenset(slow.all_special_ids)
        decoder = json.loads(fast.decoder.__getstate__()) if fast is not None and fast.decoder is not None else {}
        steps = {step["type"] for step in decoder.get("decoders", [decoder] if decoder else [])}
        self.is_byte_level, self.has_byte_fallback = steps == {"ByteLevel"}, "ByteFallback" in steps
        self._fallback_bytes = dict[int | None, int]()
        if fast is not None and self.has_byte_fallback:
            for name, byte in ((f"<0x{byte:02{case}}>", byte) for case in "xX" for byte in range(256)):
                self._fallback_bytes[fast.token_to_id(name)] = byte

    @cached_property
    def _full(self):
        try:
            full = auto_tokenizer().from_pretrained(self._directory)
        except Exception as e:  # transformers raises many types where a directory has no usable tokenizer
            raise InputError(f"{self._directory} has no tokenizer that transformers can read: {reason(e)}") from None
        if self._given_template is not None:
            full.chat_template = self._given_template
        return full

    @property
    def arguments(self) -> dict[str, Any]:
        """What makes the same tokenizer in another process, as JSON can hold it."""
        options = {"chat_template": self._given_template, "template_options": self.template_options}
        return {"directory": str(self._directory.absolute()), **options}

    @property
    def transformers_tokenizer(self):
        """The checkpoint's tokenizer as transformers reads it, with this chat template."""
        return self._full

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the checkpoint adds."""
        return self._encode(text, True)

    def encode_plain(self, text: str) -> list[int]:
        """Token ids without special tokens added."""
        return self._encode(text, False)

    def encode_word(self, word: str) -> tuple[int, ...]:
        """As `encode_plain`, cached: all choices of a request encode the same words."""
        return self._encode_word(word)

    def token(self, token_id: int) -> str:
        """The token as spelled in the vocabulary; empty for ids past its end."""
        return self._token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, which may be part of a character; of a special token, its name."""
        return self.all_bytes[token_id]

    def _read_token_bytes(self, token_id: int) -> bytes:
        name = self.token(token_id)
        if self.is_byte_level and all(c in _BYTES for c in name):
            return bytes(_BYTES[c] for c in name)
        if self.is_byte_level or self.is_special(token_id):
            return name.encode()
        if (byte := self.fallback_byte(token_id)) is not None:
            return bytes([byte])
        # Decoders may drop the space before a text's first token.
        once, twice = (self.decode([token_id] * n, False) for n in (1, 2))
        return twice[len(once) :].encode()

    def is_special(self, token_id: int) -> bool:
        """Whether a token is left out of texts by default."""
        return token_id in self._special_ids

    def fallback_byte(self, token_id: int) -> int | None:
        """The byte of a token such as ``<0x0A>`` of a vocabulary that falls back to bytes; None for other tokens."""
        return self._fallback_bytes.get(token_id)

    @cached_property
    def config(self) -> dict:
        """The tokenizer_config.json; empty where there is none."""
        path = self._directory / "tokenizer_config.json"
        return read_json(path) if path.exists() else {}

    @cached_property
    def chat_template(self) -> str | None:
        """The default chat template; None where there is none."""
        templates = self._full.chat_template
        return templates.get("default") if isinstance(templates, dict) else templates

    def template_for(self, tools: list[dict] | None) -> str:
        """The chat template for a conversation with ``tools``. Raises InputError where there is none."""
        if not self.chat_template:
            raise InputError("this checkpoint has no chat template: give plain prompts")
        return self._full.get_chat_template(None, tools)

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens by the names that chat templates use, such as ``bos_token``."""
        return {name: str(token) for name, token in self._full.special_tokens_map.items()}

    @cached_property
    def longest_token(self) -> int | None:
        """Characters of the longest token; None where it is unknown.

        It is known for byte-level vocabularies with all bytes whose file neither shortens the text nor drops parts of
        it. NFC composes at most four characters into one.
        """
        if self.file is None or not self.is_byte_level:
            return None
        text = self.file.read_text(encoding="utf-8")
        given, vocabulary = json.loads(text), self._vocabulary()
        normalizer = given.get("normalizer") or {"type": None}
        if normalizer["type"] not in (None, "NFC") or any(t["lstrip"] or t["rstrip"] for t in given["added_tokens"]):
            return None
        split = str(given.get("pre_tokenizer"))
        drops = '"Removed"' in text or "Whitespace" in split or "ByteLevel" not in split
        if drops or given["model"].get("type") != "BPE" or not vocabulary.keys() >= _BYTES.keys():
            return None
        return max(map(len, vocabulary)) * (4 if normalizer["type"] == "NFC" else 1)

    @cached_property
    def markers(self) -> frozenset[int]:
        """Ids of the tokens that open a message in a chat template; may be empty."""
        each = (self._encode(marker, False) for marker in MARKERS)
        return frozenset(ids[0] for ids in each if len(ids) == 1)

    def decode_long(self, ids: Sequence[int]) -> str:
        """As `decode`, for long texts: other threads can run meanwhile."""
        return self._decode_long(list(ids))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; special tokens are left out by default."""
        return self._decode(list(ids), skip_special_tokens)

    def render_chat(
        self,
        messages: list[dict],
        thinking: bool | None = None,
        tools: list[dict] | None = None,
        ask: bool = True,
        **options,
    ) -> str:
        """Renders a conversation with the chat template, which runs in a sandbox.

        Args:
            messages: ``{"role", "content"}`` of each message, in OpenAI's form.
            thinking: The template's enable_thinking; None takes its default.
            tools: Tools that the model may call, as JSON schemas.
            ask: Whether the text goes on to where the answer begins.
            **options: The template's own options.

        Raises:
            InputError: There is no template, or it refuses the conversation.
        """
        if not self.chat_template and not options.get("chat_template"):
            raise InputError("this checkpoint has no chat template: give plain prompts")
        options = self.template_options | options
        if thinking is not None:
            options["enable_thinking"] = thinking
        refusals = []
        for form, variables in template_forms(template_messages(messages), options):
            try:
                return self._full.apply_chat_template(
                    form, tools=tools, tokenize=False, add_generation_prompt=ask, **variables
                )
            except REFUSALS as e:
                refusals.append(reason(e))
        raise InputError(f"the chat template does not take this conversation: {refusals[0]}")

    def mark_answers(
        self, messages: list[dict], where: str, tools: list[dict] | None = None
    ) -> tuple[list[int], list[bool]]:
        """Encodes a conversation for training.

        Answers are known from the template's generation markers. For a template without them, an answer is the text
        that it adds to the conversation before it.

        Args:
            messages: ``{"role", "content"}`` of each message, in OpenAI's form.
            where: Names the conversation in errors.
            tools: Tools that the model may call, as JSON schemas.

        Returns:
            Token ids, and whether each is the assistant's.

        Raises:
            InputError: The template refuses the conversation, or rewrites earlier turns; then each answer must be a
                conversation of its own.
        """
        if "generation %}" in (self.chat_template or "") or "generation -%}" in (self.chat_template or ""):
            try:
                encoded = self._full.apply_chat_template(
                    template_messages(messages),
                    tools=tools,
                    tokenize=True,
                    return_dict=True,
                    return_assistant_tokens_mask=True,
                )
            except REFUSALS as e:
                raise InputError(f"{where}: the chat template does not take this conversation: {reason(e)}") from None
            return list(encoded["input_ids"]), [bool(m) for m in encoded["assistant_masks"]]
        tokens: list[int] = []
        mask: list[bool] = []
        shown = ""
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            try:
                base, asked = (self.render_chat(messages[:i], tools=tools, ask=ask) for ask in (False, True))
                after = self.render_chat(messages[: i + 1], tools=tools, ask=False)
            except InputError as e:
                raise InputError(f"{where}: {e}") from None
            if not is_text(after):
                raise InputError(f"{where}: the text of messages is not text that UTF-8 can hold")
            if not (asked.startswith(base) and after.startswith(base) and base.startswith(shown)):
                raise InputError(
                    f"{where}: the chat template has no generation marker and rewrites earlier turns, so it cannot be "
                    f"told what messages[{i}] adds: give each answer as a conversation that ends with it, or use "
                    f"regenerate, which writes token ids"
                )
            # The template writes the lines before an answer itself.
            pairs = enumerate(zip(asked[len(base) :], after[len(base) :], strict=False), len(base))
            same = next((k for k, (a, b) in pairs if a != b), len(asked))
            head = after[: max(after.rfind("\n", 0, same) + 1, len(base))]
            for text, is_answer in ((head[len(shown) :], False), (after[len(head) :], True)):
                ids = self._encode(text, False)
                tokens, mask = tokens + ids, mask + [is_answer] * len(ids)
            shown = after
        return tokens, mask


def _byte_level() -> dict[str, int]:
    """The 256 bytes by the characters of byte-level vocabularies.

    Printable bytes are themselves; the others are characters from U+0100 on, in order.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_level()


def reason(error: Exception) -> str:
    """The first line of an error's message, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]

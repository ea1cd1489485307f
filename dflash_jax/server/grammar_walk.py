"""Masks of one sequence from its grammar, and from the thought that may precede it.

Masks are packed bits of the vocabulary, bit i of byte b for token 8 b + i. The module runs in the sequence's own
process (`grammar_worker`), and imports neither JAX nor numpy.
"""

import json
import re
from collections.abc import Sequence
from ctypes import addressof, create_string_buffer
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from dflash_jax.errors import InputError
from dflash_jax.server.grammar_source import Notation, input_source, sources

# A row of the parser has an entry for each alternative: thousands of choices are allowed, and take microseconds each.
# The limits of the process stop steps that take too long.
_LIMITS = {"max_items_in_row": 50_000, "step_max_items": 1_000_000, "verbose_errors": False}

# Normalisers of tokenizers that write other characters than the text's.
_REWRITING = {"NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents", "BertNormalizer", "Precompiled"}

# Names of added tokens in llguidance's tokenizer: no text has this character.
_HIDDEN = "\U0010ffff"
# What may contain the name of a token in Lark without being one, and the name of a token.
_LARK = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|#[^\n]*|/(?:[^/\\]|\\.)+/|<[^<>\s]+>', re.S)

# Most blank tokens between a thought and the answer; models write one or two.
MOST_BLANKS = 4


@dataclass(frozen=True)
class GrammarTokens:
    """A checkpoint's tokens as grammars need them.

    Attributes:
        file: The tokenizer.json.
        vocab: Size of the model's vocabulary.
        stop_ids: Tokens that end a text.
        open_ids: Tokens of the tag that opens a thought.
        close_ids: Tokens of the tag that closes it.
        blank_ids: Tokens that may stand between a thought and the answer.
    """

    file: str
    vocab: int
    stop_ids: tuple[int, ...]
    open_ids: tuple[int, ...]
    close_ids: tuple[int, ...]
    blank_ids: tuple[int, ...]

    @property
    def mask_bytes(self) -> int:
        """Bytes of a mask: whole words of 32 bits."""
        return 4 * -(-self.vocab // 32)

    @cached_property
    def _vocabulary(self) -> "_Vocabulary":
        return _Vocabulary(self)

    @property
    def _tokenizer(self) -> LLTokenizer:
        return self._vocabulary.tokenizer

    def load(self) -> None:
        """Reads the tokenizer's file, which takes a second for a large vocabulary."""
        _ = self._vocabulary

    def bits(self, ids: Sequence[int]) -> int:
        """A mask of some tokens, as an integer whose little-endian bytes are the mask."""
        return sum(1 << i for i in set(ids))

    def ids(self, text: bytes) -> list[int]:
        """Tokens that spell a text."""
        return self._tokenizer.tokenize_bytes(text)

    @cached_property
    def spellings(self) -> list[bytes]:
        """The text of each token; of one that is not spelt, what no text has."""
        tokenizer = self._tokenizer
        return [b"\xff" if tokenizer.is_special_token(i) else tokenizer.decode_bytes([i]) for i in range(self.vocab)]

    @cached_property
    def anything(self) -> bytes:
        """The mask of all tokens."""
        return ((1 << self.vocab) - 1).to_bytes(self.mask_bytes, "little")

    @cached_property
    def stops(self) -> bytes:
        """The mask of the tokens that end a text."""
        return self.bits(self.stop_ids).to_bytes(self.mask_bytes, "little")

    def matcher(self, kind: str, value, field: str, blanks: str | None = None) -> tuple[LLMatcher, list[str]]:
        """Compiles a `Form`, whose value is parsed.

        Returns:
            The matcher, and what it does not enforce.

        Raises:
            InputError: The form is invalid; the message names ``field``.
        """
        error, notation = "", Notation(self._vocabulary.literal, self._vocabulary.lark, blanks)
        try:
            for source, notes in sources(kind, value, notation):
                matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=LLParserLimits(**_LIMITS))
                if not matcher.is_error():
                    return matcher, notes + [_line(note) for note in matcher.get_grammar_warnings()]
                error = error or _line(matcher.get_error())
        except Exception as e:  # the library may raise any error for text from outside
            error = error or _line(e)
        raise InputError(f"{field}: {self._faulty_tool(kind, value, notation)}{error}")

    def _faulty_tool(self, kind: str, value, notation: Notation) -> str:
        """Names the custom tool whose grammar is invalid, if that is so."""
        for tool in value["tools"] if kind in ("calls", "inputs") else ():
            try:
                source = input_source(notation, tool["grammar"]) if "grammar" in tool else None
                if source and not LLMatcher(self._tokenizer, source, log_level=0).is_error():
                    continue
            except Exception:  # as above
                source = "invalid"
            if source:
                return f"the grammar of the tool {tool['name']!r}: "
        return ""

    def mask(self, matcher: LLMatcher) -> bytes:
        """The mask of the tokens that ``matcher`` allows next.

        Raises:
            InputError: The matcher has reached its limits.
        """
        mask = matcher.compute_bitmask()[: self.mask_bytes]
        if matcher.is_error():
            raise InputError(f"the text's form cannot be kept any longer: {_line(matcher.get_error())}")
        # A finished grammar allows no token: the text ends here.
        return mask if mask.count(0) < len(mask) else self.stops


class _Vocabulary:
    """A tokenizer as llguidance reads it.

    Attributes:
        tokenizer: llguidance's.
    """

    def __init__(self, tokens: GrammarTokens):
        given = json.loads(Path(tokens.file).read_text(encoding="utf-8"))
        hidden = {token["content"] for token in given.get("added_tokens") or () if token["special"]}
        given["normalizer"], self._added = _spelling(given.get("normalizer")), _hide_added(given)
        self.tokenizer = LLTokenizer(json.dumps(given), n_vocab=tokens.vocab, eos_token=list(tokens.stop_ids) or None)
        shown = [name for name, i in self._added.items() if name not in hidden and i not in tokens.stop_ids]
        # The longest first. Without any, it matches nothing.
        self._shown = re.compile("|".join(map(re.escape, sorted(shown, key=len, reverse=True))) or "(?!)")

    def literal(self, text: str) -> list[str]:
        """A text in Lark whose added tokens are tokens: strings, and tokens as "<[id]>".

        Other tokens spell the names of those that texts do not show, and of those that end a text.
        """
        parts, at = [], 0
        for match in [*self._shown.finditer(text), None]:
            if plain := text[at : match.start() if match else None]:
                parts.append(json.dumps(plain))
            if match:
                parts.append(f"<[{self._added[match[0]]}]>")
                at = match.end()
        return parts

    def lark(self, grammar: str) -> str:
        """A grammar in Lark in which added tokens have numbers for their names."""
        return _LARK.sub(lambda m: f"<[{self._added[m[0]]}]>" if m[0] in self._added else m[0], grammar)


def _spelling(normalizer: dict | None) -> dict | None:
    """The steps that spell a text for the vocabulary, without those that write other characters.

    llguidance tokenises what a grammar demands to find the next token, which must not spell another text.
    """
    if normalizer is None or normalizer["type"] in _REWRITING:
        return None
    if normalizer["type"] != "Sequence":
        return normalizer
    return normalizer | {"normalizers": [step for step in normalizer["normalizers"] if _spelling(step)]}


def _hide_added(tokenizer: dict) -> dict[str, int]:
    """Renames added tokens in the content of a tokenizer.json, so that none stands for its text.

    llguidance's masks tokenise what a grammar demands; its matcher takes an added token for itself only, not for its
    text, which other tokens spell.

    Returns:
        The renamed tokens by their names: all that are special to llguidance.
    """
    added = {}
    for token in tokenizer.get("added_tokens") or ():
        name = token["content"]
        if token["special"] or (name.startswith("<") and name.endswith(">")):
            added[name] = token["id"]
            token["content"] = _hidden(token["id"])
        # Others stand for their text, without the blanks around it.
        token |= {"lstrip": False, "rstrip": False}
    model = tokenizer["model"]
    names = {name: _hidden(token) for name, token in added.items()}
    if isinstance(vocab := model.get("vocab"), dict):
        model["vocab"] = {names.get(name, name): token for name, token in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[names.get(name, name), score] for name, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return added


def _hidden(token: int) -> str:
    return f"<{_HIDDEN}{token}>"


def _line(error: object) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def refusal(matcher: LLMatcher, token: int) -> InputError:
    """The error of a matcher that does not take a token."""
    if matcher.is_error():
        return InputError(f"the text's form cannot be kept any longer: {_line(matcher.get_error())}")
    return InputError(f"the text's form cannot be kept: its grammar refuses token {token}")


class GrammarWalk:
    """The state of a sequence in its grammar.

    ``thought`` is "open" where the text begins inside a thought: the grammar begins when the thought ends, even in the
    middle of a drafted block. "possible": the text may begin with a thought, unless the grammar itself begins with the
    tag of one. "none": the grammar begins at once.

    Attributes:
        tokens: The checkpoint's tokens.
        matcher: The grammar's state.
    """

    def __init__(self, tokens: GrammarTokens, matcher: LLMatcher, thought: str = "none"):
        self.tokens, self.matcher = tokens, matcher
        if thought == "possible" and len(tokens.open_ids) != 1:
            thought = "none"
        self._phase = {"open": "thought", "possible": "undecided", "none": "grammar"}[thought]
        # The last tokens of the thought, as many as the closing tag has, and the blank tokens after it.
        self._tail: tuple[int, ...] = ()
        # A matcher that has reached a limit is unusable: a copy of this one consumes the same tokens again.
        self._beginning, self._consumed = matcher.deep_copy(), []

    def take(self, tokens: Sequence[int]) -> None:
        """Advances past drawn tokens.

        Raises:
            InputError: The grammar refuses a token.
        """
        if self._phase == "grammar" and not self.matcher.is_stopped():
            count = self.matcher.try_consume_tokens(list(tokens))
            self._consumed += tokens[:count]
            tokens = tokens[count:]
        for token in tokens:
            self._phase, self._tail, consumed = self._step(self._phase, self._tail, token)
            self._consumed += [token] * consumed

    def _step(self, phase: str, tail: tuple[int, ...], token: int) -> tuple[str, tuple[int, ...], int]:
        """The phase after a token, the new tail, and how many tokens (0 or 1) the grammar consumed."""
        if phase == "undecided" and (token,) == self.tokens.open_ids and not self.matcher.validate_tokens([token]):
            return "thought", tail, 0
        if phase == "thought":
            tail = (*tail, token)[-len(self.tokens.close_ids) :]
            return ("between" if tail == self.tokens.close_ids else "thought"), tail, 0
        if phase == "between" and token in self._blank_ids(tail) and not self.matcher.validate_tokens([token]):
            return "between", (*tail, token), 0
        if phase == "over":
            return "over", tail, 0
        if not self.matcher.is_stopped() and self.matcher.try_consume_tokens([token]):
            return "grammar", tail, 1
        if self.matcher.is_error() or token not in self.tokens.stop_ids:
            raise refusal(self.matcher, token)
        return "over", tail, 0

    def _blank_ids(self, tail: tuple[int, ...]) -> tuple[int, ...]:
        """Blank tokens that may come next between a thought and the answer."""
        return self.tokens.blank_ids if len(tail) < len(self.tokens.close_ids) + MOST_BLANKS else ()

    def _mask(self, phase: str, tail: tuple[int, ...]) -> bytes:
        if phase in ("thought", "over"):
            return self.tokens.anything
        allowed = self.tokens.mask(self.matcher)
        besides = {"between": self._blank_ids(tail), "undecided": self.tokens.open_ids[:1]}.get(phase)
        if besides is None:
            return allowed
        return (int.from_bytes(allowed, "little") | self.tokens.bits(besides)).to_bytes(len(allowed), "little")

    def masks(self, drafts: Sequence[int]) -> list[bytes]:
        """Masks after the taken tokens, and after each of the ``drafts``.

        The list ends at the first draft that is forbidden, or with an empty mask where a limit is reached. Neither is
        an error yet, since a draft may never be drawn.
        """
        if self._phase == "grammar" and drafts and (native := self._native_masks(drafts)):
            return native
        masks, phase, tail, consumed = [self._mask(self._phase, self._tail)], self._phase, self._tail, 0
        for draft in drafts:
            if not masks[-1][draft // 8] >> draft % 8 & 1:
                break
            try:
                phase, tail, more = self._step(phase, tail, draft)
                consumed += more
                masks.append(self._mask(phase, tail))
            except InputError:
                self._restore()
                return [*masks, bytes(self.tokens.mask_bytes)]
        self.matcher.rollback(consumed)
        return masks

    def _native_masks(self, drafts: Sequence[int]) -> list[bytes]:
        """`masks` by one call of the library, in half the time; none where the text may end, or a limit is reached."""
        size = self.tokens.mask_bytes
        buffer = create_string_buffer(size * (len(drafts) + 1))
        # The library's stubs have it at another class.
        compute = self.matcher.unsafe_compute_mask_ptr_with_draft_token  # pyright: ignore[reportAttributeAccessIssue]
        compute(addressof(buffer), size, list(drafts))
        if self.matcher.is_error():
            self._restore()
            return []
        every, masks, stops = buffer.raw, [], self.tokens.bits(self.tokens.stop_ids)
        for i, draft in enumerate([*drafts, None]):
            mask = every[i * size : i * size + size]
            if mask.count(0) >= size - len(self.tokens.stop_ids) and int.from_bytes(mask, "little") | stops == stops:
                return []
            masks.append(mask)
            if draft is not None and not mask[draft // 8] >> draft % 8 & 1:
                break
        return masks

    def _restore(self) -> None:
        """A matcher in the place of one that has reached a limit."""
        self.matcher = self._beginning.deep_copy()
        self.matcher.try_consume_tokens(self._consumed)

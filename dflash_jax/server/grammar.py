"""Structured output: what a request demands of its text, as masks for the engine (llguidance does the work)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from dflash_jax.errors import InputError
from dflash_jax.server.reasoning import CLOSE, OPEN
from dflash_jax.server.tools import as_xml, is_text
from dflash_jax.text import Tokenizer

# Most characters of a schema, regular expression or grammar. What one may cost, llguidance limits by itself.
MOST_CHARACTERS = 65536


@dataclass(frozen=True)
class Constraint:
    """kind: "json" (any object), "schema", "regex", "grammar" (EBNF: GBNF's or Lark's), "choice" or "calls"; ``value``
    as each needs it. ``field``: the request's, for errors."""

    kind: str
    value: object
    field: str

    def source(self, tokens: "GrammarTokens") -> str:
        """llguidance's own notation."""
        if self.kind == "json":
            return LLMatcher.grammar_from_json_schema({"type": "object"})
        if self.kind == "schema":
            return LLMatcher.grammar_from_json_schema(self.value)
        if self.kind == "regex":
            return LLMatcher.grammar_from_regex(self.value)
        if self.kind == "choice":
            return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(c) for c in self.value))
        if self.kind == "calls":
            return LLMatcher.grammar_from_lark(self.value)
        text = gbnf_to_lark(self.value) if "::=" in self.value else self.value
        return LLMatcher.grammar_from_lark(text)


class GrammarTokens:
    """A checkpoint's tokens, as grammars see them."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, stop_ids: Sequence[int]):
        self.vocab, self.words = vocab, -(-vocab // 32)
        self.stop_ids = tuple(stop_ids)
        self.open_ids, self.close_ids = tokenizer.encode_plain(OPEN), tokenizer.encode_plain(CLOSE)
        self._ll = LLTokenizer(str(tokenizer.file), n_vocab=vocab, eos_token=list(stop_ids) or None)
        self.anything, self._stops = self._bits(range(vocab)), self._bits(self.stop_ids)
        # What may stand between a thought and the answer.
        self.blank_ids = [i for n in (1, 2) for i in tokenizer.encode_plain("\n" * n)]
        self.blanks, self.open = self._bits(self.blank_ids), self._bits(self.open_ids[:1])

    def _bits(self, ids) -> np.ndarray:
        bits = np.zeros(self.words, np.uint32)
        for i in ids:
            bits[i // 32] |= np.uint32(1 << i % 32)
        return bits

    def special(self, token: str) -> str:
        """A tag in Lark: by its token where it is one."""
        return token if len(self._ll.tokenize_str(token, parse_special=True)) == 1 else json.dumps(token)

    def matcher(self, constraint: Constraint) -> LLMatcher:
        """Raises InputError for what cannot be understood, or is too large."""
        text = constraint.value if isinstance(constraint.value, str) else json.dumps(constraint.value)
        if len(text) > MOST_CHARACTERS:
            raise InputError(f"{constraint.field} has {len(text)} characters: at most {MOST_CHARACTERS} are possible")
        try:
            matcher = LLMatcher(self._ll, constraint.source(self), log_level=0)
        except Exception as e:  # whatever a text from outside makes the library raise
            raise InputError(f"{constraint.field}: {_line(e)}") from None
        if matcher.is_error():
            raise InputError(f"{constraint.field}: {_line(matcher.get_error())}")
        return matcher

    def mask(self, matcher: LLMatcher) -> np.ndarray:
        found = np.frombuffer(matcher.compute_bitmask(), np.uint32)[: self.words]
        # A grammar at its wits' end: the text ends here.
        return found if found.any() else self._stops


def _line(error) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


class GrammarMask:
    """Masks for one request; the engine's `MaskProvider`.

    ``thought``: "open" where the text begins inside one; then the grammar begins when that ends, also in the middle of
    a drafted block. "possible": where it may begin with one. "none": the grammar begins at once.
    """

    def __init__(self, tokens: GrammarTokens, matcher: LLMatcher, thought: str = "none"):
        self.tokens, self.matcher = tokens, matcher
        if thought == "possible" and len(tokens.open_ids) != 1:
            thought = "none"
        self._phase = {"open": "thought", "possible": "undecided", "none": "grammar"}[thought]
        # The end of what was thought, as long as the closing tag's own tokens.
        self._tail: tuple[int, ...] = ()

    def take(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._phase, self._tail, _ = self._walk(self._phase, self._tail, token)

    def _walk(self, phase: str, tail: tuple[int, ...], token: int) -> tuple[str, tuple[int, ...], int]:
        """The phase behind a token, and how many tokens (0 or 1) the grammar consumed."""
        close = tuple(self.tokens.close_ids)
        if phase == "undecided" and [token] == self.tokens.open_ids:
            return "thought", tail, 0
        if phase == "thought":
            tail = (*tail, token)[-len(close) :]
            return ("between" if tail == close else "thought"), tail, 0
        if phase == "between" and token in self.tokens.blank_ids and not self.matcher.validate_tokens([token]):
            return "between", tail, 0
        if self.matcher.is_stopped() or not self.matcher.try_consume_tokens([token]):
            return "over", tail, 0
        return "grammar", tail, 1

    def _mask(self, phase: str) -> np.ndarray:
        if phase in ("thought", "over"):
            return self.tokens.anything
        besides = {"between": self.tokens.blanks, "undecided": self.tokens.open}
        allowed = self.tokens.mask(self.matcher)
        return allowed | besides[phase] if phase in besides else allowed

    def masks(self, drafts: Sequence[int]) -> np.ndarray:
        """uint32 [len(drafts) + 1, words]. Behind a draft that is forbidden, anything: it is not accepted."""
        found, phase, tail = [self._mask(self._phase)], self._phase, self._tail
        consumed = 0
        for draft in drafts:
            if not int(found[-1][draft // 32]) >> draft % 32 & 1:
                break
            phase, tail, more = self._walk(phase, tail, draft)
            consumed += more
            found.append(self._mask(phase))
        self.matcher.rollback(consumed)
        found += [self.tokens.anything] * (len(drafts) + 1 - len(found))
        return np.stack(found)


def call_grammar(tokens: GrammarTokens, xml: bool, tools: list[dict], most: int) -> str:
    """Lark for one call or, up to ``most``, several, of ``tools`` (OpenAI's function objects); whitespace as Qwen
    writes it."""
    start, end = tokens.special("<tool_call>"), tokens.special("</tool_call>")
    rules, names = [], []
    for i, tool in enumerate(tools):
        schema = tool.get("parameters") or {"type": "object"}
        names.append(f"call_{i}")
        if xml:
            rules += _xml_call(f"call_{i}", tool["name"], schema)
        else:
            head = json.dumps(f'{{"name": {json.dumps(tool["name"])}, "arguments": ')
            rules.append(f'call_{i}: {head} arguments_{i} "}}"\narguments_{i}: %json {json.dumps(schema)}')
    calls = f'one ("\\n" one){{0,{most - 1}}}' if most > 1 else "one"
    one = f'one: {start} "\\n" ({" | ".join(names)}) "\\n" {end}'
    return "\n".join([f"start: {calls}", one, *rules])


def _xml_call(rule: str, name: str, schema: dict) -> list[str]:
    """Parameters in the schema's order, those that are not required optional."""
    required, parts, rules, end = schema.get("required", []), [], [], "\n</parameter>\n"
    for j, (key, wanted) in enumerate((schema.get("properties") or {}).items()):
        wanted, value = wanted if isinstance(wanted, dict) else {}, f"{rule}_{j}"
        begin, closing = json.dumps(f"<parameter={key}>\n"), json.dumps(end)
        if isinstance(wanted.get("enum"), list):
            rules.append(f"{value}: " + " | ".join(json.dumps(as_xml(c)) for c in wanted["enum"]))
        elif is_text(wanted):
            # Free text goes on to the end of the parameter.
            rules.append(f"{value}[suffix={closing}]: /(?s:.*)/")
            closing = ""
        else:
            shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
            rules.append(f"{value}: %json {json.dumps(shared | wanted)}")
        part = f"{begin} {value} {closing}"
        parts.append(part if key in required else f"({part})?")
    opening, ending = json.dumps(f"<function={name}>\n"), json.dumps("</function>")
    return [f"{rule}: {opening} {' '.join(parts)} {ending}", *rules]

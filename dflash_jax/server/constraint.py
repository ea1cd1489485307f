"""The form that a request demands of its text, and the tokenizer as grammars need it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash_jax.errors import InputError
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.protocol import Form
from dflash_jax.sampling_params import CLOSE, OPEN
from dflash_jax.server.grammar_walk import GrammarTokens

# Longest schema, regular expression or grammar, in characters.
MOST_CHARACTERS = 65536


@dataclass(frozen=True)
class Constraint:
    """The form that a text must have.

    Attributes:
        kind: "json" (any object), "schema", "regex", "grammar" (EBNF: GBNF's or Lark's), "choice", "structural_tag" or
            "calls".
        value: The form, of JSON's types; its type depends on the kind.
        field: The request's field, for errors.
    """

    kind: str
    value: Any
    field: str

    def form(self) -> Form:
        """The constraint in the form of the protocol with engines.

        Raises:
            InputError: It is too long, or nested too deeply.
        """
        try:
            # Keys are not sorted: the grammar follows the order of a schema's properties.
            text = json.dumps(self.value)
        except RecursionError:
            raise InputError(f"{self.field} is nested too deeply") from None
        length = len(self.value if isinstance(self.value, str) else text)
        if length > MOST_CHARACTERS:
            raise InputError(f"{self.field} has {length} characters: at most {MOST_CHARACTERS} are possible")
        return Form(self.kind, text, self.field)


def grammar_tokens(tokenizer: Tokenizer, vocab: int, stop_ids: Sequence[int]) -> GrammarTokens:
    """A checkpoint's tokens as grammars need them. The tokenizer must have a file."""
    blanks = [i for n in (1, 2) for i in tokenizer.encode_plain("\n" * n)]
    open_ids, close_ids = (tuple(tokenizer.encode_plain(tag)) for tag in (OPEN, CLOSE))
    return GrammarTokens(str(tokenizer.file), vocab, tuple(stop_ids), open_ids, close_ids, tuple(blanks))


def tag_in_lark(tokenizer: Tokenizer, tag: str) -> str:
    """A tag in Lark's notation: its token where it is one, else a string."""
    return tag if len(tokenizer.encode_plain(tag)) == 1 else json.dumps(tag)

"""Sampling parameters as rules on tokens."""

from collections.abc import Sequence

from dflash_jax.engine.token_rules import Rules, ThinkingBudget
from dflash_jax.errors import InputError
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.sampling_params import SamplingParams


def token_rules(
    params: SamplingParams, stops: Sequence[int], tokenizer: Tokenizer | None, budget: ThinkingBudget | None
) -> Rules:
    """The `Rules` of a request. Raises InputError for bad words that cannot be encoded."""
    bad_words = _bad_words(params.bad_words, tokenizer)
    allowed = None if params.allowed_token_ids is None else tuple(params.allowed_token_ids)
    return Rules(params.min_tokens, tuple(stops), bad_words, allowed, budget)


def _bad_words(words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Token ids of each word, and, as in vLLM, of the word after a space.

    The latter only where they are as many, with another first one.
    """
    if not words:
        return ()
    if tokenizer is None:
        raise InputError("bad_words need a tokenizer, and this checkpoint has none: use logit_bias")
    result = []
    for word in words:
        plain, spaced = (tokenizer.encode_word(space + word.lstrip()) for space in ("", " "))
        if not plain:
            raise InputError(f"bad_words has {word!r}: it must have a character beside spaces")
        result.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            result.append(spaced)
    return tuple(result)

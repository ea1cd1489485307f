"""Sampling parameters of a request."""

from dataclasses import dataclass, field, fields
from functools import wraps
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from dflash_jax.argument_checks import caller_names, check_fields, has_type, is_text, plain, shown, unknown, wrong
from dflash_jax.errors import InputError
from dflash_jax.stop_strings import StopFinder

# The marks of a thought.
OPEN, CLOSE = "<think>", "</think>"
# Stop token ids of a request.
MAX_STOPS = 16
# Tokens whose logits a request may bias, as in OpenAI's API.
MAX_BIAS = 300
# Tokens whose log-probabilities are reported beside that of the drawn token.
MAX_LOGPROBS = 20
# Stop expressions and bad words of a request, and their characters.
MAX_STOP_REGEX, MAX_REGEX_CHARACTERS = 4, 1024
MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS = 256, 256
# Continuations of a prompt.
MAX_CHOICES = 1024
# Numbers that scale logits or are added to them, and their reciprocals: float32 holds their products with logits and
# with counts of tokens.
MAX_FACTOR = 1e30
# Names of vLLM, SGLang and transformers.
OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "sampling_seed": "seed",
}
# Parameters of vLLM and transformers that mean nothing else here: the values that are accepted beside None, and why no
# other is.
OTHER_PARAMETERS: dict[str, tuple[tuple, str]] = {
    "best_of": ((1,), "continuations are not ranked: give n, and compare cumulative_logprob"),
    "detokenize": ((True,), "the text is always decoded"),
    "do_sample": ((False,), "give temperature, 0 for greedy"),
    "extra_args": (({},), "there are none"),
    "flat_logprobs": ((False,), "log-probabilities are one entry a token"),
    "logits_processors": (([], ()), "give logit_bias, allowed_token_ids or LLM.new_sequence(mask=...)"),
    "num_beams": ((1,), "there is no beam search: give n"),
    "output_kind": ((), "generate() returns whole continuations: use stream() or pieces()"),
    "spaces_between_special_tokens": ((True,), "the tokenizer decides"),
    "structured_outputs": ((), "the server has it; here give LLM.new_sequence(mask=...)"),
    "truncate_prompt_tokens": ((), "shorten the token ids: LLM.encode(prompt)[-n:]"),
}
# What is reported as log-probabilities: the names of vLLM, and "scaled_logprobs" for SGLang's rule.
LogprobsMode: TypeAlias = Literal[
    "raw_logprobs", "processed_logprobs", "scaled_logprobs", "raw_logits", "processed_logits"
]
LOGPROBS_MODES: tuple[str, ...] = get_args(LogprobsMode)
T = TypeVar("T")


def _with_other_names(cls: type[T]) -> type[T]:
    """Lets a dataclass be made with other servers' names; an unknown keyword gets a suggestion."""
    init = cls.__init__

    @wraps(init)
    def from_keywords(self, *args, **keywords):
        values, names = dict[str, Any](), dict[str, str]()
        if len(args) > len(cls.__annotations__):
            limit = len(cls.__annotations__)
            raise InputError(
                f"{cls.__name__}() has {len(args)} arguments without a keyword: at most {limit} are possible"
            )
        # Ours first, so that an error names the other.
        for name in sorted(keywords, key=lambda name: name not in cls.__annotations__):
            dest = name if name in cls.__annotations__ else OTHER_NAMES.get(name)
            if dest in values:
                raise InputError(f"{dest} and {name} are one parameter: give one of them")
            if dest in cls.__annotations__:
                values[dest], names[dest] = keywords[name], name
            elif name not in OTHER_PARAMETERS:
                raise unknown(cls.__name__, name, cls.__annotations__)
            elif (value := plain(keywords[name])) is not None:
                accepted, reason = OTHER_PARAMETERS[name]
                if not any(type(value) is type(each) and value == each for each in accepted):
                    raise InputError(f"{name} is {shown(value)}: that is not supported; {reason}")
        if plain(keywords.get("do_sample")) is False:
            temperature = plain(args[0] if args else values.get("temperature"))
            if temperature is not None and not (has_type(temperature, float) and temperature == 0):
                raise InputError(f"do_sample is False and temperature is {shown(temperature)}: give one of them")
            args, values = ((0.0, *args[1:]), values) if args else (args, values | {"temperature": 0.0})
        with caller_names(names):
            init(self, *args, **values)

    cls.__init__ = from_keywords
    return cls


@_with_other_names
@dataclass(frozen=True)
class SamplingParams:
    """How one prompt is continued.

    None means the value of the checkpoint's generation_config.json, or else off.

    Attributes:
        temperature: 0 is greedy.
        top_k: Draws from the k likeliest tokens; 0 is off, and so is -1, which becomes 0.
        top_p: In (0, 1]: draws from the likeliest tokens that together have this probability.
        min_p: In [0, 1]: draws from tokens of at least this probability relative to the likeliest.
        repetition_penalty: Above 0; divides positive logits, and multiplies negative ones, of the tokens of prompt and
            output.
        frequency_penalty: Subtracted from a token's logit for each time that it is in the output.
        presence_penalty: Subtracted from the logits of the tokens of the output.
        logit_bias: Token id → value added to its logit.
        seed: The same seed gives the same text, with or without a drafter, alone or in a batch; None takes a random
            one.
        max_tokens: New tokens, at most; None is as many as fit after the prompt, and 0 only reads the prompt.
        stop: Strings that end the text, and are not part of it.
        stop_regex: Regular expressions (RE2's) whose matches end the text. Matches of at most 256 characters are
            found; their last 64 characters are not part of the text.
        stop_token_ids: Token ids that end the text, beside the checkpoint's own.
        ignore_eos: Whether the checkpoint's own stop ids do not end the text.
        include_stop_str_in_output: Whether what ends the text is part of it.
        skip_special_tokens: Whether special tokens are left out of the text.
        min_tokens: New tokens before which the text does not end.
        bad_words: Texts that the output must not contain, with or without a space before them.
        allowed_token_ids: The only tokens that the output may contain.
        logprobs: Reports the log-probability of each token, and those of this many likeliest tokens.
        logprob_token_ids: Reports the log-probabilities of these tokens too.
        logprobs_mode: What ``logprobs`` reports: "raw_logprobs" of the model's distribution, "processed_logprobs" of
            the one that is drawn from (after bias, penalties, mask, temperature and cuts), "scaled_logprobs" of it
            before the cuts (top_k, top_p, min_p), or "raw_logits" and "processed_logits", which are not normalised.
            "raw" and "processed" are short for the first two. None is the mode of the `LLM`, "raw_logprobs" by default.
        prompt_logprobs: Reports the log-probability of each token of the prompt after the first, and those of this many
            likeliest tokens. They are raw in every mode, and logits in the modes of logits.
        n: Continuations of the prompt; their seeds are seed, seed + 1 and so on.

    None for a collection is an empty one. ``max_new_tokens`` (for max_tokens), ``min_new_tokens``,
    ``num_return_sequences`` (n) and ``sampling_seed`` are accepted, too.

    Raises:
        InputError: A value is out of range; the message names it.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = 256
    stop: tuple[str, ...] | list[str] | str = ()
    stop_regex: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    bad_words: tuple[str, ...] | list[str] = ()
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] | list[int] = ()
    logprobs_mode: str | None = None
    n: int = 1
    prompt_logprobs: int | None = None

    def __post_init__(self):
        self._normalise()
        check_fields(self)

        def check(name, good, right):
            value = getattr(self, name)
            if value is not None and not good(value):
                raise wrong(name, value, right)

        # These conditions are false for NaN.
        check("temperature", lambda v: 0 <= v <= MAX_FACTOR, f"0 (greedy) to {MAX_FACTOR:g}")
        check("top_k", lambda v: v >= 0, "0 (off) or more")
        check("top_p", lambda v: 0 < v <= 1, "above 0 and at most 1")
        check("min_p", lambda v: 0 <= v <= 1, "between 0 and 1")
        check("repetition_penalty", lambda v: 1 / MAX_FACTOR <= v <= MAX_FACTOR, f"above 0 and at most {MAX_FACTOR:g}")
        for name in ("frequency_penalty", "presence_penalty"):
            check(name, lambda v: abs(v) <= MAX_FACTOR, f"a number between -{MAX_FACTOR:g} and {MAX_FACTOR:g}")
        check("max_tokens", lambda v: v >= 0, "0 or more")
        if self.max_tokens is None:
            check("min_tokens", lambda v: v >= 0, "0 or more")
        else:
            most = f"between 0 and max_tokens, which is {shown(self.max_tokens)}"
            check("min_tokens", lambda v: 0 <= v <= self.max_tokens, most)
        for name in ("logprobs", "prompt_logprobs"):
            check(name, lambda v: v >= 0, "0 or more")
        check("seed", lambda v: 0 <= v < 2**32, "between 0 and 4294967295")
        check("n", lambda v: 1 <= v <= MAX_CHOICES, f"1 to {MAX_CHOICES}")
        check("logprobs_mode", lambda v: v in LOGPROBS_MODES, f"one of {', '.join(LOGPROBS_MODES)}")
        for name in ("stop", "stop_regex", "bad_words"):
            check(name, all, "strings, none of them empty")
            check(name, lambda v: all(map(is_text, v)), "text that UTF-8 can hold")
        if len(self.stop_regex) > MAX_STOP_REGEX:
            raise InputError(
                f"stop_regex has {len(self.stop_regex)} expressions: at most {MAX_STOP_REGEX} are possible"
            )
        if any(len(each) > MAX_REGEX_CHARACTERS for each in self.stop_regex):
            longest = max(len(each) for each in self.stop_regex)
            raise InputError(f"stop_regex has {longest} characters: at most {MAX_REGEX_CHARACTERS} are possible")
        if self.stop_regex:
            StopFinder((), self.stop_regex)
        if len(self.bad_words) > MAX_BAD_WORDS or any(len(w) > MAX_BAD_WORD_CHARACTERS for w in self.bad_words):
            raise InputError(
                f"bad_words has too many or too long words: at most {MAX_BAD_WORDS} words of "
                f"{MAX_BAD_WORD_CHARACTERS} characters are possible"
            )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InputError("allowed_token_ids is empty: it must have one token id at least")
        if len(self.logprob_token_ids) > MAX_LOGPROBS:
            message = f"logprob_token_ids has {len(self.logprob_token_ids)} ids: at most {MAX_LOGPROBS} are possible"
            raise InputError(message)
        biases = {plain(token): plain(value) for token, value in self.logit_bias.items()}
        for token, value in biases.items():
            if not has_type(token, int) or not has_type(value, float) or not abs(value) <= MAX_FACTOR:
                raise InputError(
                    f"logit_bias {shown(token)}: {shown(value)}: it must be a number between -{MAX_FACTOR:g} and "
                    f"{MAX_FACTOR:g} for a token id"
                )
        object.__setattr__(self, "logit_bias", biases)

    def _normalise(self) -> None:
        """None as an empty collection, a string as one of several, -1 for top_k as 0, and short modes in full."""
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None and (each.default == () or each.default_factory is dict):
                object.__setattr__(self, each.name, () if each.default == () else {})
            elif isinstance(value, str) and each.name in ("stop", "stop_regex"):
                object.__setattr__(self, each.name, (value,))
        if has_type(self.top_k, int) and self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.logprobs_mode in ("raw", "processed"):
            object.__setattr__(self, "logprobs_mode", f"{self.logprobs_mode}_logprobs")

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are reported."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    def check_vocabulary(self, vocab: int) -> None:
        """Raises InputError for token ids outside of a vocabulary of ``vocab`` tokens, and for too many biases."""
        allowed = self.allowed_token_ids or ()
        # The allowed ids may be as many as the vocabulary: the smallest and the largest suffice.
        given = (
            *self.logit_bias,
            *self.stop_token_ids,
            *self.logprob_token_ids,
            min(allowed, default=0),
            max(allowed, default=0),
        )
        outside = [i for i in given if not 0 <= i < vocab]
        if outside:
            raise InputError(f"token id {shown(outside[0])} is out of vocabulary: ids are 0 to {vocab - 1}")
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None and count > vocab:
                raise wrong(name, count, f"at most the vocabulary's {vocab}")
        if len(self.logit_bias) > MAX_BIAS:
            raise InputError(f"logit_bias has {len(self.logit_bias)} tokens: at most {MAX_BIAS} are possible")

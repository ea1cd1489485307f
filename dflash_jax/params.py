"""What a request may ask for, what comes back, and the checkpoint's own defaults."""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from dflash_jax.config import MAX_BIAS, MAX_LOGPROBS, MAX_STOPS
from dflash_jax.errors import InputError
from dflash_jax.stops import StopFinder

# Of one request.
MAX_STOP_REGEX, MAX_REGEX_CHARACTERS = 4, 1024
MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS = 256, 256


@dataclass(frozen=True)
class SamplingParams:
    """How one prompt is continued. None means: as the checkpoint's generation_config.json says, else off.

    temperature: 0 is greedy. top_k: 0 is off. top_p in (0, 1], min_p in [0, 1]. repetition_penalty > 0 looks at prompt
    and output; frequency_penalty and presence_penalty at the output. logit_bias: token id → added to its logit. seed:
    the same seed gives the same text, with or without a drafter, alone or in a batch; None takes a fresh one.
    max_tokens: new tokens at most; min_tokens: so many come before the text may end. stop: strings that end the text
    (and are not part of it). stop_regex: regular expressions (RE2's) that end it: matches of at most 256 characters are
    seen, and of these the last 64 are no part of the text. stop_token_ids: beside the checkpoint's own. ignore_eos: go
    on past those. include_stop_str_in_output: what ends the text is part of it. skip_special_tokens: special tokens are
    not part of it. bad_words: texts that never come, with or without a space before. allowed_token_ids: only these
    tokens come. logprobs: for each token, its log-probability and the n likeliest tokens'; logprob_token_ids: those of
    these tokens too; logprobs_mode: of the "raw" distribution or of the "processed" one, after
    bias, penalties, temperature and cuts.
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
    max_tokens: int = 256
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
    logprobs_mode: str = "raw"

    def __post_init__(self):
        def check(name, good, right):
            value = getattr(self, name)
            if value is not None and not good(value):
                raise InputError(f"{name} is {value}: it must be {right}")

        for name in ("top_k", "max_tokens", "min_tokens", "logprobs", "seed"):
            check(name, lambda v: isinstance(v, int) and not isinstance(v, bool), "a whole number")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
            check(name, lambda v: isinstance(v, (int, float)), "a number")
        # Written so that NaN fails.
        check("temperature", lambda v: 0 <= v < float("inf"), "0 (greedy) or more")
        check("top_k", lambda v: v >= 0, "0 (off) or more")
        check("top_p", lambda v: 0 < v <= 1, "above 0 and at most 1")
        check("min_p", lambda v: 0 <= v <= 1, "between 0 and 1")
        check("repetition_penalty", lambda v: 0 < v < float("inf"), "above 0")
        check("frequency_penalty", lambda v: abs(v) < float("inf"), "a finite number")
        check("presence_penalty", lambda v: abs(v) < float("inf"), "a finite number")
        check("max_tokens", lambda v: v >= 1, "1 or more")
        check(
            "min_tokens", lambda v: 0 <= v <= self.max_tokens, f"between 0 and max_tokens, which is {self.max_tokens}"
        )
        check("logprobs", lambda v: v >= 0, "0 or more")
        check("seed", lambda v: 0 <= v < 2**32, "between 0 and 4294967295")
        check("logprobs_mode", lambda v: v in ("raw", "processed"), "'raw' or 'processed'")
        for name in ("stop", "stop_regex", "bad_words"):
            given = getattr(self, name)
            if isinstance(given, str) and name != "bad_words":
                given = (given,)
                object.__setattr__(self, name, given)
            if isinstance(given, str) or any(not isinstance(s, str) or not s for s in given):
                raise InputError(f"{name} is {given!r}: it must be strings, none of them empty")
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
        if any(not isinstance(i, int) for i in self.stop_token_ids):
            raise InputError(f"stop_token_ids is {self.stop_token_ids!r}: it must be token ids")
        if any(isinstance(i, bool) or not isinstance(i, int) for i in self.logprob_token_ids):
            raise InputError(f"logprob_token_ids is {self.logprob_token_ids!r}: it must be token ids")
        if len(self.logprob_token_ids) > MAX_LOGPROBS:
            message = f"logprob_token_ids has {len(self.logprob_token_ids)} ids: at most {MAX_LOGPROBS} are possible"
            raise InputError(message)
        for token, value in self.logit_bias.items():
            if not isinstance(token, int) or not isinstance(value, (int, float)) or not abs(value) <= 1e30:
                raise InputError(f"logit_bias {token!r}: {value!r}: it must be a finite number for a token id")

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are recorded."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    def check_vocabulary(self, vocab: int) -> None:
        allowed = self.allowed_token_ids or ()
        # Of what may be as many as the vocabulary has, the ends say enough.
        given = (
            *self.logit_bias,
            *self.stop_token_ids,
            *self.logprob_token_ids,
            min(allowed, default=0),
            max(allowed, default=0),
        )
        outside = [i for i in given if not 0 <= i < vocab]
        if outside:
            raise InputError(f"token id {outside[0]} is out of vocabulary: ids are 0 to {vocab - 1}")
        if self.logprobs is not None and self.logprobs > vocab:
            raise InputError(f"logprobs is {self.logprobs}: it must be at most the vocabulary's {vocab}")
        if len(self.logit_bias) > MAX_BIAS:
            raise InputError(f"logit_bias has {len(self.logit_bias)} tokens: at most {MAX_BIAS} are possible")


def _stop_ids(raw: dict) -> tuple[int, ...] | None:
    """``eos_token_id`` of a config, which is an id or several; None where it has none."""
    from dflash_jax.models.families.reading import LIMITS, shown, whole

    value = raw.get("eos_token_id")
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if len(ids) > MAX_STOPS:
        raise InputError(f"eos_token_id is {shown(value)}: at most {MAX_STOPS} are possible")
    return tuple(whole("eos_token_id", i, 0, LIMITS["vocab_size"]) for i in ids)


def _sampling(raw) -> dict:
    """The sampling options of a generation_config.json, a `Raw`."""
    values = {"repetition_penalty": raw.number("repetition_penalty", None, 1e-6, 1e6)}
    if raw.flag("do_sample"):
        values |= {
            "temperature": raw.number("temperature", 1.0, 0.0, 1e6),
            "top_k": raw.whole("top_k", None, least=0),
            "top_p": raw.number("top_p", None, 0.0, 1.0),
            "min_p": raw.number("min_p", None, 0.0, 1.0),
        }
    values = {name: value for name, value in values.items() if value is not None}
    SamplingParams(**values)
    return values


@dataclass(frozen=True)
class Defaults:
    """Sampling defaults and stop ids of a checkpoint."""

    values: dict = field(default_factory=dict)
    stop_ids: tuple[int, ...] = ()

    @classmethod
    def read(cls, directory: Path, generation_config: str | Path = "auto") -> "Defaults":
        """From generation_config.json, and the stop ids from config.json where that has none.

        Args:
            directory: Of the checkpoint.
            generation_config: "auto" for the checkpoint's own, "vllm" for none, else the path of another file or of
                its directory.
        """
        from dflash_jax.checkpoint.config_json import parsed, read_json, read_raw
        from dflash_jax.models.families.reading import Raw

        path = directory / "generation_config.json"
        if generation_config not in ("auto", "vllm"):
            path = Path(generation_config).expanduser()
            path = path / "generation_config.json" if path.is_dir() else path
        is_read = generation_config != "vllm" and (generation_config != "auto" or path.exists())
        raw = Raw(read_json(path) if is_read else {}, "generation_config")
        values, stop_ids = parsed(_sampling, raw, path), parsed(_stop_ids, raw, path)
        if stop_ids is None:
            config = read_raw(directory)
            texts = (config, config.get("text_config", {}))
            stop_ids = next((ids for t in texts if (ids := parsed(_stop_ids, t, directory)) is not None), ())
        return cls(values, stop_ids)

    def overridden(self, values: dict) -> "Defaults":
        """With other sampling defaults: temperature, top_k, top_p, min_p, repetition_penalty. Raises InputError for
        other names and wrong values."""
        known = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        for name, value in values.items():
            if name not in known:
                raise InputError(f"sampling default {name[:60]!r}: it must be one of {', '.join(known)}")
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InputError(f"sampling default {name} is {str(value)[:60]}: it must be a number")
        values = values | ({"top_k": 0} if values.get("top_k") == -1 else {})
        SamplingParams(**values)
        return replace(self, values=self.values | values)

    def fill(self, params: SamplingParams) -> SamplingParams:
        """``params`` without a None among the sampling options."""
        neutral = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        missing = {f.name for f in fields(params) if getattr(params, f.name) is None}
        filled = replace(params, **{k: v for k, v in (neutral | self.values).items() if k in missing})
        # Logits divided by less would overflow: the limit of sampling is greedy.
        return replace(filled, temperature=0.0) if filled.temperature < 1e-5 else filled

    def stops(self, params: SamplingParams, must_end: bool = False) -> list[int]:
        """The token ids that end a row; ``must_end``: the checkpoint's own whatever ``params`` say."""
        own = () if params.ignore_eos and not must_end else self.stop_ids
        ids = list(dict.fromkeys((*params.stop_token_ids, *own)))
        if len(ids) > MAX_STOPS:
            message = f"stop_token_ids and the checkpoint's own are {len(ids)}: at most {MAX_STOPS} are possible"
            raise InputError(message)
        return ids


@dataclass(frozen=True)
class Timings:
    """When a prompt was submitted, got a slot, was in the caches, had its first token and its last: seconds on a clock
    that stands still while programs are compiled. compile_s: what it waited for compilation."""

    submitted: float
    admitted: float
    prefilled: float
    first_token: float
    finished: float
    compile_s: float

    @property
    def prefill_s(self) -> float:
        return self.prefilled - self.admitted

    @property
    def decode_s(self) -> float:
        return self.finished - self.prefilled


@dataclass(frozen=True)
class Completion:
    """One prompt's result.

    token_ids: the new tokens, with the stop token where one ended the row. text: None without a tokenizer.
    finish_reason: "stop" or "length". acceptance_lengths: tokens that each round yielded. logprobs, where asked for:
    per token ``{"token_id", "logprob", "top": {token id: logprob}}``, and ``"named"``, as ``"top"``, for
    logprob_token_ids. cached_tokens: of the prompt, those that were known from earlier prompts.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: str
    acceptance_lengths: list[int]
    logprobs: list[dict] | None
    timings: Timings
    cached_tokens: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        return sum(self.acceptance_lengths) / max(1, len(self.acceptance_lengths))

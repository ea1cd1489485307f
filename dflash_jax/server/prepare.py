"""From the fields of a request to what the engine takes: prompts, sampling parameters, constraints, rows."""

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from dflash_jax.engine.token_rules import ThinkingBudget
from dflash_jax.errors import InputError
from dflash_jax.frontend.sequence import TextSequence
from dflash_jax.sampling_params import SamplingParams
from dflash_jax.server import schema
from dflash_jax.server.errors import ApiError
from dflash_jax.server.grammar import MOST_CHARACTERS, Constraint, Grammar
from dflash_jax.server.notes import note
from dflash_jax.server.reasoning import CLOSE, OPEN, open_thought
from dflash_jax.server.serving import prepared

if TYPE_CHECKING:
    from dflash_jax.server.serving import Serving

SEEDS = 2**32
FIELDS = frozenset(each.name for each in fields(SamplingParams))


def sampling(
    body: schema.Sampling,
    max_tokens: int,
    seed: int | None,
    logprobs: int | None = None,
    logprob_ids: Sequence[int] | None = None,
) -> SamplingParams:
    """A body's sampling fields. A seed of any size is taken modulo 2³²; none is a fresh one. ``logprob_ids``: whose
    log-probabilities are wanted beside the likeliest tokens'."""
    min_tokens = getattr(body, "min_tokens", None) or getattr(body, "min_new_tokens", None) or 0
    include_stop = body.no_stop_trim or getattr(body, "include_stop_str_in_output", None)
    skip_special = body.skip_special_tokens is not False
    try:
        return SamplingParams(
            temperature=body.temperature,
            top_k=0 if body.top_k == -1 else body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            frequency_penalty=body.frequency_penalty or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            logit_bias=biases(getattr(body, "logit_bias", None)),
            seed=int.from_bytes(os.urandom(4), "little") if seed is None else seed % SEEDS,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop=getattr(body, "stop", None) or (),
            stop_regex=body.stop_regex or (),
            include_stop_str_in_output=bool(include_stop),
            skip_special_tokens=skip_special,
            bad_words=tuple(body.bad_words or ()),
            # Each once: every choice reads them again.
            allowed_token_ids=None if body.allowed_token_ids is None else tuple(dict.fromkeys(body.allowed_token_ids)),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=body.ignore_eos,
            logprobs=logprobs,
            logprob_token_ids=tuple(logprob_ids or ()),
        )
    except InputError as e:
        raise ApiError(400, str(e), named(str(e))) from None


def named(message: str) -> str | None:
    """The field that a message about sampling parameters begins with."""
    first = message.partition(" ")[0]
    return first if first in FIELDS else None


def biases(given: dict[str, float] | None) -> dict[int, float]:
    wrong = [token for token in given or {} if not (token.isascii() and token.isdecimal() and len(token) < 20)]
    if wrong:
        names = ", ".join(repr(token[:40]) for token in wrong[:8])
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ApiError(400, f"logit_bias: its keys must be token ids, and these are not: {names}{more}", "logit_bias")
    return {int(token): value for token, value in (given or {}).items()}


def truncated(serving: "Serving", body: schema.OpenAiSampling, prompt: list[int], new_tokens: int | None) -> list[int]:
    """What ``truncate_prompt_tokens`` leaves of a prompt: its last tokens, or its first with truncation_side right.
    -1: as many as leave room for ``new_tokens``, of which None is one."""
    most = body.truncate_prompt_tokens
    if most is None:
        return prompt
    if most == 0:
        message = "truncate_prompt_tokens is 0: it must be 1 or more, or -1 for what there is room for"
        raise ApiError(400, message, "truncate_prompt_tokens")
    if most == -1:
        most = max(serving.capacity - (new_tokens or 1), 1)
    return prompt[:most] if body.truncation_side == "right" else prompt[-most:]


def check_logprobs(serving: "Serving", body) -> None:
    """Raises ApiError where a field asks for more log-probabilities of a token than --max-logprobs."""
    most = serving.limits.logprobs
    for name in ("logprobs", "top_logprobs", "prompt_logprobs", "top_logprobs_num"):
        value = getattr(body, name, None)
        if not isinstance(value, bool) and (value or 0) > most:
            raise ApiError(400, f"{name} is {value}: at most {most} are possible", name)
    for name in ("logprob_token_ids", "token_ids_logprob"):
        given = getattr(body, name, None) or []
        count = max(len(ids) for ids in given) if given and isinstance(given[0], list) else len(given)
        if count > most:
            raise ApiError(400, f"{name} has {count} ids: at most {most} are possible", name)


def check_counts(serving: "Serving", body, prompts: int = 1) -> int:
    """How many choices each prompt gets."""
    limits, n = serving.limits, getattr(body, "n", None) or 1
    check_logprobs(serving, body)
    stops = getattr(body, "stop", None) or []
    if n > limits.choices:
        raise ApiError(400, f"n is {n}: at most {limits.choices} choices are possible", "n")
    if prompts > limits.prompts:
        raise ApiError(400, f"{prompts} prompts: at most {limits.prompts} are possible", "prompt")
    longest = max((len(s) for s in ([stops] if isinstance(stops, str) else stops)), default=0)
    if longest > limits.stop_characters:
        message = f"a stop string has {longest} characters: at most {limits.stop_characters} are possible"
        raise ApiError(400, message, "stop")
    if not isinstance(stops, str) and len(stops) > limits.stops:
        raise ApiError(400, f"{len(stops)} stop strings: at most {limits.stops} are possible", "stop")
    return n


def constraint(body) -> Constraint | None:
    """The one constraint that the fields of a body ask for."""
    found = []
    form = getattr(body, "response_format", None)
    if form is not None and form.type == "json_object":
        found.append(Constraint("json", {}, "response_format"))
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema_ is None:
            raise ApiError(400, "response_format.json_schema.schema is missing", "response_format.json_schema.schema")
        found.append(Constraint("schema", form.json_schema.schema_, "response_format.json_schema.schema"))
    elif form is not None and form.type == "structural_tag":
        value = form.model_dump(by_alias=True, exclude_none=True)
        found.append(Constraint("structural_tag", value, "response_format"))
    elif form is not None and form.type in ("regex", "grammar"):
        raise ApiError(400, f"response_format.type {form.type}: use the field {form.type}", "response_format.type")
    kinds = {
        "regex": "regex",
        "grammar": "grammar",
        "ebnf": "grammar",
        "json_schema": "schema",
        "structural_tag": "structural_tag",
        "guided_regex": "regex",
        "guided_grammar": "grammar",
        "guided_json": "schema",
        "guided_choice": "choice",
    }
    given = {name: getattr(body, name, None) for name in kinds}
    nested = {"regex": "regex", "grammar": "grammar", "json": "schema", "choice": "choice", "json_object": "json"}
    nested["structural_tag"] = "structural_tag"
    for name, value in (getattr(body, "structured_outputs", None) or {}).items():
        if name not in nested:
            raise ApiError(400, f"structured_outputs.{name} is not supported", f"structured_outputs.{name}")
        if value not in (None, False):
            found.append(Constraint(nested[name], value, f"structured_outputs.{name}"))
    found += [Constraint(kinds[name], value, name) for name, value in given.items() if value is not None]
    if len(found) > 1:
        names = " and ".join(c.field for c in found)
        raise ApiError(400, f"{names} each ask for a form of the text: give one of them", found[1].field)
    return _checked(found[0]) if found else None


def _checked(wanted: Constraint) -> Constraint:
    right = {"schema": (dict, bool), "choice": list, "regex": str, "grammar": str, "structural_tag": dict}
    value = wanted.value
    if wanted.kind in ("schema", "structural_tag") and isinstance(value, str):
        if len(value) > MOST_CHARACTERS:
            message = f"{wanted.field} has {len(value)} characters: at most {MOST_CHARACTERS} are possible"
            raise ApiError(400, message, wanted.field)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ApiError(400, f"{wanted.field} is not JSON", wanted.field) from None
    if not isinstance(value, right.get(wanted.kind, object)):
        raise ApiError(400, f"{wanted.field} has a wrong type", wanted.field)
    if wanted.kind == "choice" and not (value and all(isinstance(c, str) and c for c in value)):
        raise ApiError(400, f"{wanted.field} must be a list of strings, none of them empty", wanted.field)
    return replace(wanted, value=value)


def budget(given: Sequence[int | None]) -> int | None:
    """Tokens that a thought may have, by several fields of which -1 and None say nothing."""
    return min((each for each in given if each is not None and each >= 0), default=None)


def thought(serving: "Serving", prompt: Sequence[int], budget: int | None, field: str) -> str:
    """Where reasoning stands behind a prompt without messages, as `rows` takes it: "none" without a ``budget``, which
    says that the text has a thought. Raises ApiError, which names ``field``."""
    if budget is None:
        return "none"
    if serving.llm.tokenizer is None:
        raise ApiError(400, f"{field} needs a tokenizer, and this checkpoint has none", field)
    encode = serving.llm.tokenizer.encode_plain
    return "possible" if open_thought(prompt, encode(OPEN), encode(CLOSE)) is None else "open"


async def grammar(serving: "Serving", wanted: Constraint | None) -> Grammar | None:
    """The compiled grammar. The answer's headers name what of it cannot be enforced."""
    if wanted is None:
        return None
    if serving.grammar is None:
        raise ApiError(400, f"{wanted.field} needs a tokenizer.json, and this checkpoint has none", wanted.field)
    try:
        compiled = await serving.grammar.grammar(wanted)
    except InputError as e:
        raise ApiError(400, str(e), wanted.field) from None
    for text in compiled.notes:
        note(f"{wanted.field}: {text}")
    return compiled


async def rows(
    serving: "Serving",
    prompt: Sequence[int],
    params: SamplingParams,
    n: int,
    *,
    block_size: int | str | None = None,
    priority: int = 0,
    grammar: Grammar | None = None,
    thought: str = "none",
    budget: int | None = None,
    prompt_logprobs: int | None = None,
    cache_salt: str | None = None,
    ends: Callable[[], Callable[[str], bool] | None] = lambda: None,
) -> list[TextSequence]:
    """One row for each choice; of a seed s the choices have s, s + 1, …

    Others have their turn behind each row: there may be thousands, of thousands of tokens each.

    Args:
        thought: Where reasoning stands when the text begins: "open", "possible" or "none".
        budget: Tokens that the thought may have, those of the prompt behind the tag that opens it among them.
        cache_salt: Only prompts with the same one share known prefixes.
        ends: Makes the ``ends`` of each `TextSequence`.
    """
    options = {"priority": priority, "prompt_logprobs": prompt_logprobs, "cache_salt": cache_salt or ""}
    vocabulary = serving.llm.config.vocab_size
    if outside := [i for i in params.stop_token_ids if i >= vocabulary]:
        # Clients send those of another model along. vLLM and SGLang take them, too.
        note(f"stop_token_ids: {outside[0]} is out of vocabulary, and never ends a text")
        params = replace(params, stop_token_ids=tuple(i for i in params.stop_token_ids if i < vocabulary))
    if budget is not None and thought != "none":
        encode = serving.llm.tokenizer.encode_plain
        blank, tags = tuple(i for n in (1, 2) for i in encode("\n" * n)), (tuple(encode(OPEN)), tuple(encode(CLOSE)))
        # As in vLLM and SGLang, what the prompt has of the thought counts.
        used = (open_thought(prompt, *tags) or 0) if thought == "open" else 0
        options["budget"] = ThinkingBudget(max(0, budget - used), *tags, thought == "open", blank)
    found = []
    for i in range(n):
        mask = None if grammar is None else grammar.mask(thought)
        own = replace(params, seed=(params.seed + i) % SEEDS)
        try:
            found.append(prepared(serving.llm.new_sequence(prompt, own, block_size, mask=mask, ends=ends(), **options)))
        except InputError as e:
            if mask is not None:
                mask.close()
            raise ApiError(400, str(e), named(str(e))) from None
        await asyncio.sleep(0)
    return found

"""From the fields of a request to the engine's input: sampling parameters, forms, sequences."""

import asyncio
import json
import secrets
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import astuple

from dflash_jax import protocol
from dflash_jax.engine.config import BlockSize
from dflash_jax.engine.token_rules import ThinkingBudget
from dflash_jax.errors import InputError
from dflash_jax.frontend.reasoning import open_thought
from dflash_jax.protocol import Form
from dflash_jax.sampling_params import CLOSE, MAX_BIAS, OPEN, SamplingParams
from dflash_jax.server import schema
from dflash_jax.server.answer_splitter import FirstCall
from dflash_jax.server.engine_client import RemoteSequence
from dflash_jax.server.errors import ApiError
from dflash_jax.server.media import PlacedMedia
from dflash_jax.server.request_context import current
from dflash_jax.server.serving import Serving
from dflash_jax.server.tools import END

SEEDS = 2**32
FIELDS = frozenset(each.name for each in fields(SamplingParams))


def sampling(
    body: schema.Sampling,
    max_tokens: int,
    seed: int | None,
    logprobs: int | None = None,
    logprob_ids: Sequence[int] | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The sampling parameters of a request.

    Args:
        body: The request.
        max_tokens: Most new tokens.
        seed: Any integer, taken modulo 2³²; None: a random one.
        logprobs: Likeliest tokens whose log-probabilities are returned; None: none.
        logprob_ids: Tokens whose log-probabilities are returned beside them.
        prompt_logprobs: Likeliest tokens of which log-probabilities of the prompt are returned; None: none.

    Raises:
        ApiError: A value is invalid.
    """
    # No stop string may be empty: a text without any is none.
    names = FIELDS - {"n"}
    values: dict[str, Any] = {name: value for name, value in body if name in names and value not in (None, "")}
    values |= {
        "logit_bias": biases(getattr(body, "logit_bias", None)),
        "seed": secrets.randbits(32) if seed is None else seed % SEEDS,
        "max_tokens": max_tokens,
        "min_tokens": getattr(body, "min_tokens", None) or getattr(body, "min_new_tokens", None) or 0,
        "include_stop_str_in_output": bool(body.no_stop_trim or getattr(body, "include_stop_str_in_output", None)),
        "logprobs": logprobs,
        "logprob_token_ids": logprob_ids,
        "prompt_logprobs": prompt_logprobs,
    }
    if body.allowed_token_ids is not None:
        # Without duplicates, since every choice reads them.
        values["allowed_token_ids"] = tuple(dict.fromkeys(body.allowed_token_ids))
    try:
        return SamplingParams(**values)
    except InputError as e:
        raise ApiError(400, str(e), field_of(str(e))) from None


def field_of(message: str) -> str | None:
    """The field that a message about sampling parameters begins with."""
    first = message.partition(" ")[0]
    return first if first in FIELDS else None


def biases(by_token: dict[str, float] | None) -> dict[int, float]:
    """``logit_bias`` with token ids as integers.

    Raises:
        ApiError: A key is no token id, or there are too many.
    """
    by_token = by_token or {}
    if len(by_token) > MAX_BIAS:
        raise ApiError(400, f"logit_bias has {len(by_token)} tokens: at most {MAX_BIAS} are possible", "logit_bias")
    wrong = [token for token in by_token if not (token.isascii() and token.isdecimal() and len(token) < 20)]
    if wrong:
        names = ", ".join(repr(token[:40]) for token in wrong[:8])
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ApiError(400, f"logit_bias: its keys must be token ids, and these are not: {names}{more}", "logit_bias")
    return {int(token): value for token, value in by_token.items()}


def truncate(serving: Serving, body: schema.OpenAiSampling, prompt: list[int], new_tokens: int | None) -> list[int]:
    """Applies ``truncate_prompt_tokens`` to a prompt: its last tokens remain, or its first with truncation_side right.

    -1 leaves room for ``new_tokens`` (None: one).

    Raises:
        ApiError: The value is 0.
    """
    most = body.truncate_prompt_tokens
    if most is None:
        return prompt
    if most == 0:
        message = "truncate_prompt_tokens is 0: it must be 1 or more, or -1 for what there is room for"
        raise ApiError(400, message, "truncate_prompt_tokens")
    if most == -1:
        most = max(serving.capacity - (new_tokens or 1), 1)
    return prompt[:most] if body.truncation_side == "right" else prompt[-most:]


def check_logprobs(serving: Serving, body) -> None:
    """Checks the number of log-probabilities of a token.

    Raises:
        ApiError: A field asks for more than --max-logprobs.
    """
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


def check_counts(serving: Serving, body, prompts: int = 1) -> int:
    """Checks the numbers of choices, prompts and stop strings.

    Returns:
        Choices of each prompt.

    Raises:
        ApiError: There are too many, or a stop string is too long.
    """
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


# The kind of form that a field asks for, and a key of structured_outputs.
FORM_FIELDS = {
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
NESTED_FIELDS = {"regex": "regex", "grammar": "grammar", "json": "schema", "choice": "choice", "json_object": "json"}
NESTED_FIELDS["structural_tag"] = "structural_tag"
# What is no form. Objects are closed in any case, and there is one implementation.
NESTED_OPTIONS = frozenset(
    (
        "disable_any_whitespace",
        "whitespace_pattern",
        "disable_additional_properties",
        "disable_fallback",
        "backend",
        "_backend",
        "_backend_was_auto",
    )
)
# Characters of the pattern of blanks.
MOST_PATTERN = 1024
# The types of a form's value; of other kinds it may have any.
FORM_TYPES = {"schema": (dict, bool), "choice": list, "regex": str, "grammar": str, "structural_tag": dict}


def form_of(body) -> Form | None:
    """The form that a request's fields ask for; None without one.

    Raises:
        ApiError: Several fields ask for one, or one is invalid.
    """
    asked: list[tuple[str, Any, str]] = []
    answer = getattr(body, "response_format", None) or schema.ResponseFormat(type="text")
    kind = answer.type
    if answer.schema_ is not None and answer.json_schema is None and kind in ("json_object", "json_schema"):
        asked.append(("schema", answer.schema_, "response_format.schema"))
    elif kind == "json_object":
        asked.append(("json", {}, "response_format"))
    elif kind == "json_schema":
        field = "response_format.json_schema.schema"
        if answer.json_schema is None or answer.json_schema.schema_ is None:
            raise ApiError(400, f"{field} is missing", field)
        asked.append(("schema", answer.json_schema.schema_, field))
    elif kind == "structural_tag":
        asked.append((kind, answer.model_dump(by_alias=True, exclude_none=True), "response_format"))
    elif kind != "text":
        raise ApiError(400, f"response_format.type {kind}: use the field {kind}", "response_format.type")
    nested = getattr(body, "structured_outputs", None) or {}
    for name, value in nested.items():
        field = f"structured_outputs.{name}"
        if name in NESTED_OPTIONS:
            continue
        if name not in NESTED_FIELDS:
            raise ApiError(400, f"{field} is not supported", field)
        if value not in (None, False):
            asked.append((NESTED_FIELDS[name], value, field))
    fields = [(kind, getattr(body, name, None), name) for name, kind in FORM_FIELDS.items()]
    asked += [field for field in fields if field[1] is not None]
    if len(asked) > 1:
        names = " and ".join(field for _, _, field in asked)
        raise ApiError(400, f"{names} each ask for a form of the text: give one of them", asked[1][2])
    return msgspec.structs.replace(checked_form(*asked[0]), blanks=_blanks(body, nested)) if asked else None


def _blanks(body, nested: dict[str, Any]) -> str | None:
    """The blanks that a request's fields ask for, as of a `Form`.

    Raises:
        ApiError: One has a wrong type.
    """
    patterns = {
        "guided_whitespace_pattern": getattr(body, "guided_whitespace_pattern", None),
        "structured_outputs.whitespace_pattern": nested.get("whitespace_pattern"),
    }
    for field, pattern in patterns.items():
        if not isinstance(pattern, str | None) or len(pattern or "") > MOST_PATTERN:
            raise ApiError(400, f"{field} must be text of at most {MOST_PATTERN} characters", field)
    if not isinstance(is_compact := nested.get("disable_any_whitespace"), bool | None):
        field = "structured_outputs.disable_any_whitespace"
        raise ApiError(400, f"{field} must be true or false", field)
    return "" if is_compact else next((each for each in patterns.values() if each is not None), None)


def checked_form(kind: str, value: Any, field: str) -> Form:
    """The form of a field, whose value has the right type.

    Raises:
        ApiError: It has another one, or is too long.
    """
    try:
        form = Form.of(kind, value, field)
        if kind in ("schema", "structural_tag") and isinstance(value, str):
            value = json.loads(value)
            form = Form.of(kind, value, field)
    except InputError as e:
        raise ApiError(400, str(e), field) from None
    except (ValueError, RecursionError):
        raise ApiError(400, f"{field} is not JSON", field) from None
    if not isinstance(value, FORM_TYPES.get(kind, object)):
        raise ApiError(400, f"{field} has a wrong type", field)
    if kind == "choice" and not (value and all(isinstance(c, str) and c for c in value)):
        raise ApiError(400, f"{field} must be a list of strings, none of them empty", field)
    return form


def budget(given: Sequence[int | None]) -> int | None:
    """The smallest token budget of a thought among several fields; -1 and None set none."""
    return min((each for each in given if each is not None and each >= 0), default=None)


def thought(serving: Serving, prompt: Sequence[int], budget: int | None, field: str) -> str:
    """Where reasoning stands after a prompt without messages, as `sequences` takes it.

    It is "none" without a ``budget``, since only a budget tells that the text has a thought.

    Raises:
        ApiError: There is no tokenizer; the error names ``field``.
    """
    if budget is None:
        return "none"
    if serving.llm.tokenizer is None:
        raise ApiError(400, f"{field} needs a tokenizer, and this checkpoint has none", field)
    encode = serving.llm.tokenizer.encode_plain
    return "possible" if open_thought(prompt, encode(OPEN), encode(CLOSE)) is None else "open"


def openings(serving: Serving, thought: str) -> tuple[int, ...]:
    """The tokens with which a text that has a form may begin a thought; ``thought`` as of `sequences`."""
    tokenizer = serving.llm.tokenizer
    tag = tuple(tokenizer.encode_plain(OPEN)) if tokenizer is not None and thought == "possible" else ()
    return tag if len(tag) == 1 else ()


def check_stream(serving: Serving, body: schema.OpenAiSampling) -> None:
    """Checks ``return_proposals``. Other options of a stream have no effect without one.

    Raises:
        ApiError: The request is no stream, or there are no rounds that show their drafts.
    """
    if not body.return_proposals:
        return
    hello, reason = serving.hello, None
    if not body.stream:
        reason = "needs stream: true"
    elif hello.largest_block == 1:
        reason = "needs a drafter, and this server decodes without one"
    elif not hello.has_masks:
        reason = "needs the programs of structured output, and this server has none"
    if reason is not None:
        raise ApiError(400, f"return_proposals {reason}", "return_proposals")


async def compiled(serving: Serving, form: Form | None) -> Form | None:
    """Has the engine compile a form. Notes of the answer name what the grammar does not enforce.

    Raises:
        ApiError: It is invalid, or there is no tokenizer.
    """
    if form is None:
        return None
    if serving.llm.tokenizer is None or serving.llm.tokenizer.file is None:
        raise ApiError(400, f"{form.field} needs a tokenizer.json, and this checkpoint has none", form.field)
    if form.blanks is None:
        form = msgspec.structs.replace(form, blanks=serving.json_blanks)
    try:
        notes = await serving.engine.compile(form)
    except InputError as e:
        raise ApiError(400, str(e), form.field) from None
    for text in notes:
        current().note(f"{form.field}: {text}")
    return form


async def sequences(
    serving: Serving,
    ids: Sequence[int],
    params: SamplingParams,
    n: int,
    *,
    block_size: BlockSize | None = None,
    budget: int | None = None,
    requires_answer: bool = False,
    media: PlacedMedia | None = None,
    **fields,
) -> list[RemoteSequence]:
    """Makes the sequences of a prompt, one for each choice. Their seeds are s, s + 1 and so on.

    Other requests have a turn after each, since there may be thousands, of thousands of tokens each.

    Args:
        serving: The model and its engine.
        ids: Token ids of the prompt.
        params: Sampling parameters of the first choice.
        n: Choices.
        block_size: Most tokens of a round, or "auto"; None: the server's.
        budget: Most tokens of the thought, those in the prompt after the opening tag included.
        requires_answer: Whether no text ends inside its thought, or without an answer.
        media: Images and videos of the prompt.
        **fields: Further fields of `protocol.Prompt`.

    Raises:
        ApiError: A value is invalid.
    """
    vocabulary = serving.llm.config.vocab_size
    if outside := [i for i in params.stop_token_ids if i >= vocabulary]:
        # Clients send token ids of another model. vLLM and SGLang accept them, too.
        current().note(f"stop_token_ids: {outside[0]} is out of vocabulary, and never ends a text")
        params = replace(params, stop_token_ids=tuple(i for i in params.stop_token_ids if i < vocabulary))
    prompt = protocol.Prompt(
        np.array(ids, np.int32),
        protocol.params_fields(params),
        serving.llm.block_size if block_size is None else block_size,
        **fields,
    )
    has_budget = budget is not None and prompt.thought != "none"
    if (has_budget or requires_answer) and serving.llm.tokenizer is not None:
        encode, is_open = serving.llm.tokenizer.encode_plain, prompt.thought == "open"
        blank, tags = tuple(i for n in (1, 2) for i in encode("\n" * n)), (tuple(encode(OPEN)), tuple(encode(CLOSE)))
        # As in vLLM and SGLang, the part of the thought in the prompt counts.
        used = (open_thought(ids, *tags) or 0) if is_open else 0
        left = max(0, budget - used) if budget is not None and has_budget else None
        # The grammar of a form says itself where its text may end.
        is_formed = prompt.form is not None and prompt.form.begins
        needs, call_end = requires_answer and not is_formed, tuple(encode(END))
        answers = call_end if len(call_end) == 1 else ()
        prompt.budget = ThinkingBudget(left, *tags, is_open, blank, requires_answer, needs, answers)
    if prompt.form is not None and not prompt.form.begins and budget is None:
        # Calls in a thought keep their grammars, too, where no budget may end it.
        prompt.thought = "none"
    if media is not None:
        prompt.media, prompt.preparation = media.prompt, media.seconds
    prepared, first_seed = [], params.seed or 0
    for i in range(n):
        choice_params = replace(params, seed=(first_seed + i) % SEEDS)
        try:
            sequence = serving.llm.sequence(
                ids,
                choice_params,
                block_size,
                must_end=prompt.form is not None and prompt.form.begins,
                kind=RemoteSequence,
                ends=None if prompt.ends is None else FirstCall(*astuple(prompt.ends)),
                preparation=prompt.preparation,
            )
        except InputError as e:
            raise ApiError(400, str(e), field_of(str(e))) from None
        sequence.prompt = prompt
        prepared.append(sequence)
        await asyncio.sleep(0)
    if media is not None:
        # The engine has the pixels once it has the request.
        context = current()
        endings = context.endings if serving.engine.submits_again else context.until_submitted
        endings.callback(media.memory.release)
        endings.callback(setattr, prompt, "media", None)
    return prepared

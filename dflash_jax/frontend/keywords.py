"""Keywords of `LLM` under the names of vLLM and SGLang."""

import argparse
import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from dflash_jax.aliases import (
    ALIASES,
    SPECULATIVE_KEYS,
    Alias,
    check_speculative_config,
    check_speculative_flags,
    drafted,
    json_object,
)
from dflash_jax.argument_checks import check_type, hints_of, nearest, plain, shown, unknown, wrong
from dflash_jax.errors import InputError
from dflash_jax.frontend.llm_config import LLMConfig
from dflash_jax.frontend.other_flags import NOTHING, REFUSED, SECRETS, is_neutral, read_word
from dflash_jax.sampling_params import SamplingParams

log = logging.getLogger("dflash_jax")

DEFAULTS = {field.name: field.default for field in fields(LLMConfig)}
# Options of the commands that have another name in the library.
RENAMED = {"override_generation_config": "sampling_defaults", "default_chat_template_kwargs": "chat_template_kwargs"}
# Each name, and whether the flag is its negation.
KEYWORDS = {k: (alias, f"--no-{k.replace('_', '-')}" in alias.names) for alias in ALIASES for k in alias.keywords}
KEYWORDS |= {dest: (Alias(dest, ()), False) for dest in RENAMED}
OTHERS = {
    name[2:].replace("-", "_"): (group.reason, group in REFUSED, word)
    for group in (*NOTHING, *REFUSED)
    for word in group.words.split()
    for name in read_word(word)[0]
    if name.startswith("--")
}
AXES = ("tensor_parallel", "data_parallel")
# Far more than any machine has.
MAX_DEVICES = 2**20
# Fields that a keyword may set.
FLAGS = ("speculative_algorithm", "speculative_num_steps")
TARGETS = {*DEFAULTS, *AXES, *FLAGS, "speculative_config"}
ACCEPTED = [
    *DEFAULTS,
    *(name for name, (alias, _) in KEYWORDS.items() if RENAMED.get(alias.dest, alias.dest) in TARGETS),
]
SERVER_ONLY = {alias.dest for alias in ALIASES} | {"max_num_batched_tokens", "max_logprobs", "served_model_name"}


def with_other_names(given: Mapping[str, Any], others: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The fields of `LLMConfig` that keywords give, and the names under which errors show them.

    Args:
        given: Every field of `LLMConfig` by its name.
        others: Keywords that are not fields.

    Returns:
        Every field; and by field, the caller's name where that is another.

    Raises:
        InputError: A keyword is unknown, is refused, or is given beside another of the same meaning.
    """
    given = {name: plain(value) for name, value in given.items()}
    result, givers, names, axes, flags = dict(given), {}, {}, {}, {}
    for name, value in others.items():
        for field, (setting, shown_as) in _read(name, plain(value)).items():
            if field in FLAGS:
                flags[field] = setting
                continue
            target = "mesh" if field in AXES else field
            is_given = type(given[target]) is not type(DEFAULTS[target]) or given[target] != DEFAULTS[target]
            if before := givers.get(field, target if is_given else None):
                raise InputError(f"{before} and {name} are one argument: give one of them")
            givers[field], names[target] = name, shown_as
            (axes if field in AXES else result)[field] = setting
    if axes:
        result["mesh"] = ",".join(f"{axis.removesuffix('_parallel')}={n}" for axis, n in sorted(axes.items()))
    if flags:
        method, steps = map(flags.get, FLAGS)
        result |= check_speculative_flags(method, steps, result["draft"], result["max_block_size"])
    return result, names


def _read(name: str, value: Any) -> dict[str, tuple[Any, str]]:
    """The settings of one keyword, each with the name that errors have for it."""
    if name not in KEYWORDS:
        _check_other(name, value)
        return {}
    alias, is_negated = KEYWORDS[name]
    field = RENAMED.get(alias.dest, alias.dest)
    if field not in TARGETS:
        raise InputError(f"LLM has no argument {name!r}: dflash serve has --{alias.dest.replace('_', '-')}")
    if value is None:
        return {}
    if alias.const is not None:
        check_type(name, value, bool)
        return {field: (alias.const, name)} if value is not is_negated else {}
    if alias.type is json_object:
        check_type(name, value, dict)
        keys = SPECULATIVE_KEYS
        return {
            field: (setting, f"{name}: {keys[field]}")
            for field, setting in check_speculative_config(value, name).items()
        }
    if alias.type is None or alias.type in (int, drafted):
        check_type(name, value, hints_of(LLMConfig)[field] if alias.type is None else int)
        if field in AXES and not 1 <= value <= MAX_DEVICES:
            raise wrong(name, value, f"1 to {MAX_DEVICES}")
        return {field: (value + 1, f"{name} + 1") if alias.type is drafted else (value, name)}
    check_type(name, value, str)
    try:
        setting = alias.type(value)
    except argparse.ArgumentTypeError as e:
        raise InputError(f"{name}: {e}") from None
    return {field: (setting, name)} if setting is not None and field in (*DEFAULTS, *FLAGS) else {}


def _check_other(name: str, value: Any) -> None:
    """Raises InputError for a keyword that is unknown or asks for what there is not."""
    if name in SERVER_ONLY:
        raise InputError(f"LLM has no argument {name!r}: dflash serve has --{name.replace('_', '-')}")
    if name not in OTHERS:
        near = nearest(name, [*ACCEPTED, *SamplingParams.__annotations__])
        if near and near[0] not in ACCEPTED:
            raise InputError(f"LLM has no argument {name!r}: SamplingParams has {near[0]}")
        raise unknown("LLM", name, ACCEPTED)
    reason, is_refused, word = OTHERS[name]
    _, is_on, _, neutral = read_word(word)
    if not is_refused:
        log.info("%s needs nothing here: %s", name, reason)
    elif value is not None and not (
        value is is_on if neutral is None else is_neutral(_word(value), neutral) or value in ((), [], {}, False)
    ):
        flag = f"--{name.replace('_', '-')}"
        raise InputError(f"{name}{'' if flag in SECRETS else f' is {shown(value)}'}: that is refused, {reason}")


def _word(value: Any) -> str:
    """A value as the word of a flag."""
    return value if isinstance(value, str) else shown(value)

"""Keywords of `LLM` under the names of vLLM and SGLang."""

import argparse
import inspect
import logging
from collections.abc import Mapping
from dataclasses import fields
from inspect import Parameter, Signature
from typing import Any

from dflash_jax.argument_checks import check_type, hints_of, nearest, plain, shown, unknown, wrong
from dflash_jax.errors import InputError
from dflash_jax.frontend.llm_config import LLMConfig
from dflash_jax.options.option import Alias, aliases_of, options_of
from dflash_jax.options.others import FLAGS, SECRETS, is_neutral
from dflash_jax.options.readers import (
    SPECULATIVE_KEYS,
    check_speculative_config,
    check_speculative_flags,
    drafted,
    json_object,
)
from dflash_jax.options.serve import ServeOptions
from dflash_jax.sampling_params import SamplingParams

log = logging.getLogger("dflash_jax")

DEFAULTS = {field.name: field.default for field in fields(LLMConfig)}
OPTIONS = options_of(ServeOptions)
# Other names, and whether the flag is the keyword's negation; our own flags where a field has another name.
KEYWORDS = {name: (alias, negated) for alias in aliases_of(ServeOptions) for name, negated in alias.keywords.items()}
KEYWORDS |= {
    keyword: (Alias(str(option.flag), dest=name), False)
    for name, option in OPTIONS.items()
    for keyword in Alias(option.flag or "").keywords
    if keyword != name
}
OTHERS = {name[2:].replace("-", "_"): flag for flag in FLAGS for name in flag.names if name.startswith("--")}
AXES = ("tensor_parallel", "data_parallel")
# Far more than any machine has.
MAX_DEVICES = 2**20
# Fields that a keyword may set.
SPECULATIVE = ("speculative_algorithm", "speculative_num_steps")
TARGETS = {*DEFAULTS, *AXES, *SPECULATIVE, "speculative_config"}
ACCEPTED = [*DEFAULTS, *(name for name, (alias, _) in KEYWORDS.items() if alias.dest in TARGETS)]


def signature() -> Signature:
    """The signature of `LLM`."""
    first, second, *others = inspect.signature(LLMConfig).parameters.values()
    others = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in others]
    return Signature([first, second, *others, Parameter("other_names", Parameter.VAR_KEYWORD)])


def with_other_names(keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The fields of `LLMConfig` that keywords give, and the names under which errors show them.

    Args:
        keywords: Fields of `LLMConfig`, under their own names and under others.

    Returns:
        Every field; and by field, the caller's name where that is another.

    Raises:
        InputError: A keyword is unknown, is refused, or is given beside another of the same meaning.
    """
    given = {name: plain(keywords.get(name, default)) for name, default in DEFAULTS.items()}
    others = {name: plain(value) for name, value in keywords.items() if name not in DEFAULTS}
    result, givers, names, axes, flags = dict(given), {}, {}, {}, {}
    for name, value in others.items():
        for field, (setting, shown_as) in _read(name, value).items():
            if field in SPECULATIVE:
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
        method, steps = map(flags.get, SPECULATIVE)
        result |= check_speculative_flags(method, steps, result["draft"], result["max_block_size"])
    return result, names


def _read(name: str, value: Any) -> dict[str, tuple[Any, str]]:
    """The settings of one keyword, each with the name that errors have for it."""
    if name not in KEYWORDS:
        _check_other(name, value)
        return {}
    alias, is_negated = KEYWORDS[name]
    field = str(alias.dest)
    if field not in TARGETS:
        raise InputError(f"LLM has no argument {name!r}: dflash serve has --{field.replace('_', '-')}")
    if value is None:
        return {}
    if alias.const is not None:
        check_type(name, value, bool)
        return {field: (alias.const, name)} if value is not is_negated else {}
    if alias.read is json_object:
        check_type(name, value, dict)
        keys = SPECULATIVE_KEYS
        return {
            field: (setting, f"{name}: {keys[field]}")
            for field, setting in check_speculative_config(value, name).items()
        }
    if alias.read is None or alias.read in (int, drafted):
        check_type(name, value, hints_of(LLMConfig)[field] if alias.read is None else int)
        if field in AXES and not 1 <= value <= MAX_DEVICES:
            raise wrong(name, value, f"1 to {MAX_DEVICES}")
        return {field: (value + 1, f"{name} + 1") if alias.read is drafted else (value, name)}
    check_type(name, value, str)
    try:
        setting = alias.read(value)
    except argparse.ArgumentTypeError as e:
        raise InputError(f"{name}: {e}") from None
    return {field: (setting, name)} if setting is not None and field in (*DEFAULTS, *SPECULATIVE) else {}


def _check_other(name: str, value: Any) -> None:
    """Raises InputError for a keyword that is unknown or asks for what there is not."""
    if name in OPTIONS:
        raise InputError(f"LLM has no argument {name!r}: dflash serve has {OPTIONS[name].flag}")
    if name not in OTHERS:
        near = nearest(name, [*ACCEPTED, *SamplingParams.__annotations__])
        if near and near[0] not in ACCEPTED:
            raise InputError(f"LLM has no argument {name!r}: SamplingParams has {near[0]}")
        raise unknown("LLM", name, ACCEPTED)
    flag = OTHERS[name]
    if not flag.is_refused:
        log.info("%s needs nothing here: %s", name, flag.reason)
        return
    if value is None or (value is flag.is_on and flag.neutral is None):
        return
    if flag.neutral is None or not (is_neutral(_word(value), flag.neutral) or value in ((), [], {}, False)):
        said = f" is {shown(value)}" if SECRETS.isdisjoint(flag.names) else ""
        raise InputError(f"{name}{said}: that is refused, {flag.reason}")


def _word(value: Any) -> str:
    """A value as the word of a flag."""
    return value if isinstance(value, str) else shown(value)

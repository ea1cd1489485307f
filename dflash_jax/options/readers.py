"""What reads the values of options, those of other servers' forms among them."""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from dflash_jax.argument_checks import check_type, plain, shown, suggestion, wrong
from dflash_jax.engine.config import BlockSize
from dflash_jax.errors import InputError
from dflash_jax.sampling_params import CLOSE, OPEN

T = TypeVar("T")
# What a JSON flag may hold.
JSON_CHARACTERS, JSON_DEPTH = 65_536, 32


def json_object(text: str) -> dict:
    """The JSON object that a flag holds: of at most 65,536 characters, nested at most 32 deep."""
    if len(text) > JSON_CHARACTERS:
        raise argparse.ArgumentTypeError(f"{len(text)} characters of JSON: at most {JSON_CHARACTERS} are possible")
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not JSON: {str(e)[:120]}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text[:60]!r} must be a JSON object, such as {{}}")
    if _depth(value) > JSON_DEPTH:
        raise argparse.ArgumentTypeError(f"the JSON is nested more than {JSON_DEPTH} deep")
    return value


def _no_constant(name: str):
    raise ValueError(f"{name} is not a JSON number")


def _depth(value) -> int:
    deepest, left = 0, [(value, 1)]
    while left:
        item, depth = left.pop()
        deepest = max(deepest, depth)
        if isinstance(item, dict | list):
            left += [(each, depth + 1) for each in (item.values() if isinstance(item, dict) else item)]
    return deepest


def token_ids(text: str) -> list[int]:
    """Token ids of the command line."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be token ids with commas between, such as 1,2,3") from None


def block_size(text: str) -> BlockSize:
    """A block size of the command line."""
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of tokens, or auto") from None


def bias(text: str) -> tuple[int, float]:
    """One logit bias of the command line: (token id, value)."""
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be ID=VALUE, such as 42=-1.5") from None


def one_of(values: dict[str, T], fault: str) -> Callable[[str], T]:
    """What reads a word of a table, in any case; ``fault`` says after another word what is possible."""

    def read(text: str) -> T:
        if text.lower() not in values:
            raise argparse.ArgumentTypeError(f"{shown(text)}{fault}")
        return values[text.lower()]

    return read


# The methods of vLLM and SGLang: of loading, and formats of checkpoints, by which loading is checked.
quantization = one_of(
    {
        "none": None,
        "fp8": "fp8",
        "w8a8_fp8": "fp8",
        "int8": "int8",
        "w8a8_int8": "int8",
        "bitsandbytes_int8": "int8",
        **dict.fromkeys(("awq", "awq_marlin"), "awq"),
        **dict.fromkeys(("gptq", "gptq_marlin"), "gptq"),
        **dict.fromkeys(("auto-round", "auto_round", "inc"), "auto-round"),
        "compressed-tensors": "compressed-tensors",
        **dict.fromkeys(("modelopt", "modelopt_fp8", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"), "modelopt"),
    },
    ": it must be fp8 or int8, or the checkpoint's format: awq, gptq, auto-round, compressed-tensors or modelopt",
)
# Methods of drafting by the names of vLLM and SGLang, whose EAGLE without a drafter is the target's MTP head.
METHODS = {"dflash": "dflash", "mtp": "mtp", "qwen3_5_mtp": "mtp", "qwen3_next_mtp": "mtp"}
algorithm = one_of(METHODS | {"nextn": "mtp", "eagle": "mtp"}, ": it must be DFLASH, NEXTN, EAGLE or mtp")
# Platforms by the names of vLLM and SGLang.
platform = one_of(
    {"auto": None, "cuda": "cuda", "gpu": "cuda", "cpu": "cpu", "tpu": "tpu"}, ": it must be auto, cuda, gpu, cpu, tpu"
)
# SGLang's source of sampling defaults, as our ``generation_config``.
sampling_defaults = one_of({"model": "auto", "openai": "vllm"}, ": it must be model or openai")


def drafted(text: str) -> int:
    """The block size of ``text`` speculative tokens: one more."""
    return int(text) + 1


def thinking_marks(text: str) -> dict:
    """The marks of a thought in vLLM's form, of which only Qwen's are possible."""
    right = {"reasoning_parser": None, "reasoning_start_str": OPEN, "reasoning_end_str": CLOSE}
    for name, value in (config := json_object(text)).items():
        if name not in right:
            raise argparse.ArgumentTypeError(f"{name[:40]!r} is not known: {suggestion(name, right)}")
        if right[name] is not None and value not in ("", right[name]):
            raise argparse.ArgumentTypeError(f"{name} is {str(value)[:40]!r}: only {right[name]!r} is possible")
    return config


def expression(text: str) -> str:
    """A regular expression of the command line."""
    try:
        re.compile(text)
    except re.error as e:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no regular expression: {e}") from None
    return text


def structured_outputs(text: str) -> str | None:
    """The blanks of JSON, by vLLM's configuration of structured outputs: "" for none, None for the default."""
    neutral = {"backend": None, "disable_fallback": None, "disable_additional_properties": None, "reasoning_parser": ""}
    for name, value in (config := json_object(text)).items():
        if name == "disable_any_whitespace":
            if not isinstance(value, bool):
                raise argparse.ArgumentTypeError(f"{name} is {shown(value)}: it must be true or false")
        elif name not in neutral:
            known = (*neutral, "disable_any_whitespace")
            raise argparse.ArgumentTypeError(f"{name[:40]!r} is not known: {suggestion(name, known)}")
        elif name == "reasoning_parser" and value:
            raise argparse.ArgumentTypeError(f"{name} is {shown(value)}: use --reasoning-parser")
    return "" if config.get("disable_any_whitespace") else None


def chunk(text: str) -> int | None:
    """SGLang's -1 turns chunks off; prompts are always read in chunks here, which the text does not depend on."""
    return None if text == "-1" else int(text)


# Our options that vLLM's configuration of speculative decoding gives, each with its key there.
SPECULATIVE_KEYS = {
    "draft": "model",
    "draft_revision": "revision",
    "max_block_size": "num_speculative_tokens + 1",
}


def check_speculative_config(given: dict, name: str) -> dict[str, Any]:
    """The options that vLLM's configuration of speculative decoding gives: n speculative tokens are a block of n + 1.

    Args:
        given: The configuration.
        name: Names it in errors.

    Raises:
        InputError: Its method or a key is not known, or a value is wrong.
    """
    given = {key: plain(value) for key, value in given.items()}
    method = given.get("method", "dflash")
    if not isinstance(method, str) or method not in METHODS:
        raise InputError(f"{name}: its method is {shown(method)}: it must be {' or '.join(METHODS)}")
    if METHODS[method] == "mtp":
        given.setdefault("model", "mtp")
    kinds = {
        "method": str,
        "model": str | Path,
        "num_speculative_tokens": int,
        "draft_tensor_parallel_size": int,
        "attention_backend": str,
        "revision": str,
    }
    for key, value in given.items():
        if key not in kinds:
            raise InputError(
                f"{name}: {shown(key)} is not known: {suggestion(key if isinstance(key, str) else '', kinds)}"
            )
        check_type(f"{name}: {key}", value, kinds[key])
    if METHODS[method] == "mtp" and given["model"] == "none":
        raise InputError(f"{name}: {method} drafts with an MTP head: leave the model 'none' out")
    result = {option: given[key] for option, key in SPECULATIVE_KEYS.items() if key in given}
    if (count := given.get("num_speculative_tokens")) is not None:
        if count < 0:
            raise wrong(f"{name}: num_speculative_tokens", count, "0 or more")
        result["max_block_size"] = count + 1
    return result


def check_speculative_flags(
    method: str | None, steps: int | None, draft: str | Path | None, largest: int | None, prefix: str = ""
) -> dict[str, Any]:
    """The options that SGLang's flags of speculative decoding give.

    Args:
        method: What `algorithm` made of ``speculative_algorithm``.
        steps: ``speculative_num_steps``.
        draft: Our ``draft`` as it is without them.
        largest: Our ``max_block_size`` as it is without them.
        prefix: Of the flags' names in errors.

    Raises:
        InputError: They contradict each other.
    """

    def flag(name: str) -> str:
        return prefix + (name.replace("_", "-") if prefix else name)

    result: dict[str, Any] = {}
    if method == "mtp" and draft == "none":
        raise InputError(f"{flag('speculative_algorithm')} drafts with an MTP head: leave the drafter 'none' out")
    # With a drafter, that is a head in a directory of its own.
    if method == "mtp" and draft in (None, "auto"):
        result["draft"] = draft = "mtp"
    if steps is None:
        return result
    if draft != "mtp" and method != "mtp":
        if steps != 1:
            message = f"{flag('speculative_num_steps')} is {shown(steps)}: DFlash drafts a block in one step"
            raise InputError(message)
        return result
    if steps < 1 or largest not in (None, steps + 1):
        right = "1 or more" if steps < 1 else f"one less than {flag('speculative_num_draft_tokens')}, {shown(largest)}"
        raise wrong(flag("speculative_num_steps"), steps, right)
    return result | {"max_block_size": steps + 1}

"""The flags of vLLM and SGLang that mean one of ours, and the reading of those that need nothing or are refused."""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash_jax.cli.other_flags import NOTHING, REFUSED
from dflash_jax.errors import InputError
from dflash_jax.server.reasoning import CLOSE, OPEN

# Values that mean "as by default" for any flag.
NEUTRAL = {"", "none", "null"}
# What a JSON flag may hold.
JSON_CHARACTERS, JSON_DEPTH = 65_536, 32


@dataclass(frozen=True)
class Alias:
    """Other servers' names for one of our options.

    Attributes:
        dest: Our option.
        names: The other names.
        type: Reads a value; None reads it as our option does.
        const: The value of a flag that takes none.
    """

    dest: str
    names: tuple[str, ...]
    type: Callable[[str], Any] | None = None
    const: Any = None


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


def quantization(text: str) -> str | None:
    """The methods of vLLM and SGLang. Those that read checkpoints of another layout are refused."""
    methods = {
        "none": None,
        "fp8": "fp8",
        "w8a8_fp8": "fp8",
        "int8": "int8",
        "w8a8_int8": "int8",
        "bitsandbytes_int8": "int8",
    }
    if text.lower() not in methods:
        raise argparse.ArgumentTypeError(f"{text!r} is not supported: fp8 and int8 are")
    return methods[text.lower()]


def dflash(text: str) -> str:
    """The one method of drafting, by its name."""
    if text.upper() != "DFLASH":
        raise argparse.ArgumentTypeError(f"{text!r}: it must be DFLASH")
    return text


def drafted(text: str) -> int:
    """The block size of ``text`` speculative tokens: one more."""
    return int(text) + 1


def platform(text: str) -> str | None:
    """A platform by the names of vLLM and SGLang; None for "auto"."""
    platforms = {"auto": None, "cuda": "cuda", "gpu": "cuda", "cpu": "cpu", "tpu": "tpu"}
    if text not in platforms:
        raise argparse.ArgumentTypeError(f"{text!r}: it must be {', '.join(platforms)}")
    return platforms[text]


def chunk(text: str) -> int | None:
    """SGLang's -1 turns chunks off; prompts are always read in chunks here, which the text does not depend on."""
    return None if text == "-1" else int(text)


def sampling_defaults(text: str) -> str:
    """SGLang's source of sampling defaults, as our ``generation_config``."""
    if text not in ("model", "openai"):
        raise argparse.ArgumentTypeError(f"{text!r}: it must be model or openai")
    return "auto" if text == "model" else "vllm"


def thinking_tags(text: str) -> dict:
    """The marks of a thought in vLLM's form; only Qwen's are possible."""
    config = json_object(text)
    right = {"reasoning_parser": None, "reasoning_start_str": OPEN, "reasoning_end_str": CLOSE}
    for name, value in config.items():
        if name not in right:
            raise argparse.ArgumentTypeError(f"{name[:40]!r} is not known: {', '.join(right)} are")
        if right[name] is not None and value not in ("", right[name]):
            raise argparse.ArgumentTypeError(f"{name} is {str(value)[:40]!r}: only {right[name]!r} is possible")
    return config


ALIASES = (
    Alias("target", ("--model", "--model-path")),
    Alias("draft", ("--speculative-draft-model-path", "--speculative-draft-model", "--spec-model")),
    Alias("draft_revision", ("--speculative-draft-model-revision",)),
    Alias("speculative_config", ("--speculative-config", "-sc"), json_object),
    Alias("speculative_algorithm", ("--speculative-algorithm", "--spec-method"), dflash),
    Alias("max_block_size", ("--speculative-num-draft-tokens", "--speculative-dflash-block-size"), int),
    Alias("max_block_size", ("--spec-tokens",), drafted),
    Alias("draft_window_size", ("--speculative-dflash-draft-window-size", "--speculative-draft-window-size")),
    Alias("draft_sink_size", ("--speculative-draft-sink-size",)),
    Alias("draft_tokens", ("--speculative-token-map",)),
    Alias("tokenizer", ("--tokenizer-path",)),
    Alias("max_len", ("--max-model-len", "--context-length")),
    Alias("slots", ("--max-num-seqs", "--max-running-requests")),
    Alias("mem_fraction", ("--gpu-memory-utilization", "--device-memory-utilization", "--mem-fraction-static")),
    Alias("max_num_batched_tokens", ("--chunked-prefill-size",), chunk),
    Alias("max_queue", ("--max-queued-requests", "--max-num-queued-reqs")),
    Alias("tensor", ("--tensor-parallel-size", "-tp", "--tp-size", "--tp"), int),
    Alias("data", ("--data-parallel-size", "-dp", "--dp-size", "--dp"), int),
    Alias("platform", ("--device",), platform),
    Alias("quantize", ("--quantization", "-q"), quantization),
    Alias("reproducible", ("--enable-deterministic-inference",), const=True),
    Alias("prefix_bytes", ("--no-enable-prefix-caching", "--disable-radix-cache"), const=0),
    Alias("generation_config", ("--sampling-defaults",), sampling_defaults),
    Alias("override_generation_config", ("--preferred-sampling-params",)),
    Alias("reasoning_config", ("--reasoning-config",), thinking_tags),
    Alias("root_path", ("--fastapi-root-path",)),
    Alias("drain_s", ("--shutdown-timeout",)),
    Alias("log_level", ("--uvicorn-log-level",)),
    Alias("enable_log_requests", ("--log-requests",), const=True),
    Alias("enable_log_requests", ("--no-enable-log-requests",), const=False),
    Alias("otlp_traces_endpoint", ("--enable-trace",), const="http://localhost:4317"),
)


class _Other(argparse.Action):
    """A flag of `NOTHING` or `REFUSED`, judged under the name that the user typed."""

    def __init__(self, option_strings, dest, reason="", neutral: tuple[str | bool, ...] | None = None, **options):
        super().__init__(
            option_strings, argparse.SUPPRESS, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **options
        )
        # None: any value needs nothing.
        self.reason, self.neutral = reason, neutral

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        if self.neutral is None:
            notices = getattr(namespace, "notices", ())
            namespace.notices = (*notices, f"{option_string} needs nothing here: {self.reason}")
            return
        typed = option_string or self.option_strings[0]
        given = (
            [typed.startswith("--no-")] if self.nargs == 0 else values if isinstance(values, list) else [str(values)]
        )
        wrong = [v for v in given if not _is_neutral(v, self.neutral)]
        if wrong:
            typed = typed if self.nargs == 0 else f"{typed} {str(wrong[0])[:60]}"
            right = [v for v in self.neutral if isinstance(v, str)]
            hint = f" (possible: {', '.join(right)})" if right else ""
            raise InputError(f"{typed} is refused: {self.reason}{hint}")


def _is_neutral(value: str | bool, neutral: tuple[str | bool, ...]) -> bool:
    if isinstance(value, bool):
        return value in neutral
    return value.lower() in NEUTRAL or any(isinstance(v, str) and _equal(value, v) for v in neutral)


def _equal(a: str, b: str) -> bool:
    try:
        return float(a) == float(b)
    except ValueError:
        return a.lower() == b.lower()


def add_others(parser: argparse.ArgumentParser) -> None:
    """Adds other servers' flags, hidden from ``--help``.

    Each name is an action of its own, so that errors name what was typed.
    """
    description = "Most are understood; docs/flags.md says what each does."
    group = parser.add_argument_group("flags of vLLM and SGLang", description)
    ours = {action.dest: action for action in parser._actions}
    for alias in ALIASES:
        options: dict[str, Any] = {"dest": alias.dest, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if alias.const is not None:
            options |= {"action": "store_const", "const": alias.const}
        elif alias.type is not None:
            options |= {"type": alias.type}
        else:
            action = ours[alias.dest]
            options |= {"type": action.type, "choices": action.choices}
        for name in alias.names:
            group.add_argument(name, **options)
    for groups, is_refused in ((NOTHING, False), (REFUSED, True)):
        for each in groups:
            for word in each.words.split():
                _add(group, word, each.reason, is_refused)


def _add(group, word: str, reason: str, is_refused: bool) -> None:
    match = re.fullmatch(r"([^!+=]+)(!?)(\+?)(=.*)?", word)
    assert match is not None, word
    names, is_on, several, values = match.groups()
    options = {"action": _Other, "reason": reason}
    if values is None:
        names = [n for name in names.split("/") for n in (name, *([f"--no-{name[2:]}"] if name[:2] == "--" else []))]
        names = [n for n in names if n not in group._option_string_actions]
        # A switch is neutral as by default: off, or on.
        neutral = (not is_on,)
        options |= {"nargs": 0}
    else:
        names, neutral = names.split("/"), tuple(filter(None, values[1:].split("|")))
        options |= {"nargs": "*"} if several else {}
    group.add_argument(*names, neutral=neutral if is_refused else None, **options)

"""What a checkpoint's configuration says of weights in few bits: which modules are in FP8 or in NVFP4.

It is ``quantization_config`` of ``config.json``, else ModelOpt's ``hf_quant_config.json``. What a module is follows
from its tensors (`quantized`); these claims check it, and stand for it where a plan has no tensors.
"""

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_jax.checkpoint.config_files import parsed, read_json
from dflash_jax.errors import InputError
from dflash_jax.models.families.reading import LIMIT, section, shown, words

FP8, NVFP4 = "FP8", "NVFP4"
# Inputs that share a scale of NVFP4.
GROUP = 16
# Of a file of ModelOpt beside config.json.
MODELOPT_FILE = "hf_quant_config.json"
# quant_algo of ModelOpt → what the weights are.
ALGORITHMS = {"FP8": FP8, "FP8_PER_CHANNEL_PER_TOKEN": FP8, "NVFP4": NVFP4, "W4A16_NVFP4": NVFP4}
# Prefixes of a text model's modules, of which a config may name another one than the files have.
PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
# Characters and memory of a pattern at most, and processor time for all patterns and modules of a checkpoint.
LONGEST_PATTERN, MOST_MEMORY, MOST_SECONDS = 2000, 2**20, 20.0


@dataclass(frozen=True)
class Claim:
    """What a configuration says of a module's weight.

    Attributes:
        kind: `FP8` or `NVFP4`.
        block: Rows and columns of the block of a scale; None: one scale a tensor or a row.
    """

    kind: str
    block: tuple[int, int] | None = None


# What `Names` says of a module that it does not name.
UNNAMED = Claim("")


class Budget:
    """Processor time of this thread that compiling and matching the patterns of a checkpoint may take."""

    def __init__(self) -> None:
        self._spent = self._started = 0.0

    def start(self) -> None:
        """Begins to count."""
        self._started = time.thread_time() - self._spent

    def check(self) -> None:
        """Raises InputError where the time is over."""
        self._spent = time.thread_time() - self._started
        if self._spent > MOST_SECONDS:
            raise InputError(
                f"the patterns of the quantization config take more than {MOST_SECONDS:g} s for all modules: it must "
                f"have fewer"
            )


class Names:
    """What is claimed of modules, by names, which stand for all modules below them, too, and by patterns.

    Args:
        budget: Time for the patterns.
    """

    def __init__(self, budget: Budget):
        self._budget = budget
        self._claims: dict[str, Claim | None] = {}
        self._patterns: list[tuple[Any, Claim | None]] = []

    def add(self, key: str, names: Iterable[str], claim: Claim | None, is_wildcard: bool = False) -> None:
        """Adds names, ``re:`` expressions and, with ``is_wildcard``, shell wildcards.

        Raises:
            InputError: A pattern is too long or is no regular expression of RE2, or the time is over.
        """
        self._budget.start()
        for name in names:
            if name.startswith("re:"):
                self._patterns.append((_compiled(key, name, name[3:]), claim))
                self._budget.check()
            elif is_wildcard and ("*" in name or "?" in name):
                expression = "".join({"*": ".*", "?": "."}.get(c) or re.escape(c) for c in name)
                self._patterns.append((_compiled(key, name, expression + r"\z"), claim))
                self._budget.check()
            else:
                self._claims.setdefault(name, claim)

    def find(self, module: str) -> Claim | None:
        """What is claimed of a module: by name, else by the first pattern that matches, else `UNNAMED`.

        Raises:
            InputError: The time is over.
        """
        relative = module[len(next(p for p in PREFIXES if module.startswith(p))) :]
        spellings = dict.fromkeys((module, *(prefix + relative for prefix in PREFIXES)))
        for name in spellings:
            while name:
                if name in self._claims:
                    return self._claims[name]
                name = name.rpartition(".")[0]
        self._budget.start()
        for pattern, claim in self._patterns:
            self._budget.check()
            if any(pattern.match(name) for name in spellings):
                return claim
        return UNNAMED


def _compiled(key: str, name: str, expression: str) -> Any:
    """A compiled pattern: RE2 matches in time linear in the name, whatever the expression is."""
    import re2

    if len(name) > LONGEST_PATTERN:
        raise InputError(f"{key} has a pattern of {len(name)} characters: at most {LONGEST_PATTERN} are read")
    options = re2.Options()
    options.log_errors, options.never_capture, options.max_mem = False, True, MOST_MEMORY
    try:
        return re2.compile(expression, options)
    except (re2.error, UnicodeEncodeError) as e:
        reason = e.args[0].decode(errors="replace") if isinstance(e.args[0], bytes) else "it is no text"
        raise InputError(f"{key} has {shown(name)}: it must be a regular expression of RE2 ({reason})") from None


class Quantization:
    """The weights in few bits of a checkpoint, as its configuration has them.

    Attributes:
        key: Where the configuration names modules, for messages.
        is_official: Whether it is of the official FP8 checkpoints, whose scales of blocks have names of their own.
        ignored: Modules that are not quantized.
        groups: Modules that are, and how.
        default: What a module is that neither names; None: not quantized.
        caches: What is said of keys and values, which stay in the model's dtype here; None: nothing.
    """

    def __init__(self, key: str, default: Claim | None = None, is_official: bool = False):
        self.key, self.default, self.is_official = key, default, is_official
        self.caches: str | None = None
        budget = Budget()
        self.ignored, self.groups = Names(budget), Names(budget)

    def claim(self, module: str) -> Claim | None:
        """What is claimed of a module, such as ``model.layers.0.mlp.down_proj``; None: it is not quantized."""
        if self.ignored.find(module) is None:
            return None
        claim = self.groups.find(module)
        return self.default if claim is UNNAMED else claim


def read(raw: dict, directory: Path) -> Quantization | None:
    """The quantization of a checkpoint; None where nothing is quantized.

    Args:
        raw: Its ``config.json``.
        directory: Its directory, or the config file itself.

    Raises:
        InputError: The checkpoint is quantized in another way than is read here, or a value is invalid.
    """
    quantization = raw.get("quantization_config") or raw.get("text_config", {}).get("quantization_config")
    beside = read_json(directory / MODELOPT_FILE) if (directory / MODELOPT_FILE).is_file() else {}
    beside = beside.get("quantization")
    beside = {"quant_method": "modelopt", **beside} if isinstance(beside, dict) else {}
    quantization = quantization or beside
    if not quantization:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if not isinstance(quantization, dict) or not isinstance(method, str) or method not in READERS:
        raise InputError(f"{directory} is quantized by {shown(method)}: FP8 and NVFP4 are read here")
    path = directory / MODELOPT_FILE if quantization is beside else directory
    found = parsed(lambda _: READERS[method](quantization), raw, path)
    caches = [d[k] for d in (quantization, beside) for k in ("kv_cache_scheme", "kv_cache_quant_algo") if d.get(k)]
    found.caches = shown(caches[0]) if caches else None
    return found


def _sizes(key: str, value: Any) -> tuple[int, int]:
    """Rows and columns of a block."""
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and 0 < n <= LIMIT for n in value):
        raise InputError(f"{key} is {shown(value)}: it must be two sizes, like [128, 128]")
    return value[0], value[1]


def _read_fp8(raw: dict) -> Quantization:
    """The official FP8 checkpoints': blocks, or one scale a tensor or row."""
    block = raw.get("weight_block_size")
    block = None if block is None else _sizes("quantization_config.weight_block_size", block)
    return Quantization("quant_method", Claim(FP8, block), is_official=block is not None)


def _read_modelopt(raw: dict) -> Quantization:
    """ModelOpt's: of one kind, or of mixed precision, where only ``quantized_layers`` tells what a module is."""
    excluded = "ignore" if raw.get("ignore") is not None else "exclude_modules"
    if raw.get("quant_algo") == "MIXED_PRECISION":
        found = Quantization("quantized_layers")
        for name, value in section("quantized_layers", raw.get("quantized_layers")).items():
            entry = section(f"quantized_layers[{shown(name)}]", value)
            found.groups.add("quantized_layers", [name], _of_algorithm(entry), is_wildcard=True)
    else:
        found = Quantization(excluded, default=_of_algorithm(raw))
    found.ignored.add(excluded, words(excluded, raw.get(excluded) or []), None, is_wildcard=True)
    return found


def _of_algorithm(raw: dict) -> Claim:
    algorithm, group = raw.get("quant_algo"), raw.get("group_size")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise InputError(f"quant_algo is {shown(algorithm)}: {', '.join(ALGORITHMS)} are read here")
    if ALGORITHMS[algorithm] == NVFP4 and group not in (None, GROUP):
        raise InputError(f"group_size is {shown(group)}: NVFP4 has groups of {GROUP}")
    return Claim(ALGORITHMS[algorithm])


def _read_compressed(raw: dict) -> Quantization:
    """compressed-tensors', whose ``ignore`` goes before the targets of its groups."""
    found = Quantization("config_groups")
    for key in ("transform_config", "sparsity_config"):
        value = raw.get(key)
        if value and not (isinstance(value, dict) and value.get("format") == "dense"):
            raise InputError(f"{key} is {shown(value)}: it changes the numbers, and is not known here")
    for name, value in section("config_groups", raw.get("config_groups")).items():
        key = f"config_groups[{shown(name)}]"
        group = section(key, value)
        claim = _of_weights(section(f"{key}.weights", group.get("weights") or {}), f"{key}.weights")
        if claim is None:
            continue
        # A class of modules, such as Linear, stands for all that no name or pattern is for.
        targets = words(f"{key}.targets", group.get("targets"))
        if any(map(_is_class, targets)):
            found.default = found.default or claim
        found.groups.add(f"{key}.targets", (t for t in targets if not _is_class(t)), claim)
    found.ignored.add("ignore", words("ignore", raw.get("ignore") or []), None)
    return found


def _is_class(target: str) -> bool:
    return target.isidentifier() and target[0].isupper()


def _of_weights(weights: dict, key: str) -> Claim | None:
    """What a group's weights are; None where only its activations are quantized."""
    if not weights:
        return None
    kind, bits, strategy, group = (weights.get(k) for k in ("type", "num_bits", "strategy", "group_size"))
    if kind == "float" and bits == 8 and strategy in ("tensor", "channel"):
        return Claim(FP8)
    if kind == "float" and bits == 8 and strategy == "block":
        return Claim(FP8, _sizes(f"{key}.block_structure", weights.get("block_structure")))
    if kind == "float" and bits == 4 and strategy == "tensor_group" and group == GROUP:
        return Claim(NVFP4)
    what = f"{shown(bits)} bits, type {shown(kind)}, strategy {shown(strategy)} and group_size {shown(group)}"
    raise InputError(f"{key} has {what}: FP8 and NVFP4 are read here")


READERS: dict[str, Callable[[dict], Quantization]] = {
    "fp8": _read_fp8,
    "modelopt": _read_modelopt,
    "modelopt_fp4": _read_modelopt,
    "modelopt_mixed": _read_modelopt,
    "compressed-tensors": _read_compressed,
}

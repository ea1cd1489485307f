"""What a checkpoint's configuration says of weights in few bits: which modules are, and in which form.

It is ``quantization_config`` of ``config.json``, else ModelOpt's ``hf_quant_config.json``. What a module is follows
from its tensors (`quantized`); these claims check it, and stand for it where a plan has no tensors.
"""

import re
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from dflash_jax.checkpoint.config_files import parsed, read_json
from dflash_jax.checkpoint.quantize import AUTO_ROUND, FORMATS
from dflash_jax.errors import InputError
from dflash_jax.models.families.reading import LIMIT, flag, section, shown, words

FP8, NVFP4, MXFP4, INT4, INT8 = "FP8", "NVFP4", "MXFP4", "INT4", "INT8"
READ_HERE = "FP8, NVFP4, MXFP4, INT4 and INT8 are read here"
INTEGERS = {4: INT4, 8: INT8}
# Inputs that share a scale of NVFP4, and of the forms of OCP Microscaling.
GROUP, MX_GROUP = 16, 32
# How a claim's integers are packed: in words of several inputs as compressed-tensors has them, GPTQ's, of which the
# first version stores a zero point less 1, or AWQ's.
COMPRESSED, GPTQ, GPTQ_V2, AWQ = "compressed-tensors", "gptq", "gptq_v2", "awq"
# Of a file of ModelOpt beside config.json.
MODELOPT_FILE = "hf_quant_config.json"
# Keys that say what keys and values are.
OF_CACHES = ("kv_cache_scheme", "kv_cache_quant_algo")
# Prefixes of a text model's modules, of which a config may name another one than the files have.
PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
# Characters and memory of a pattern at most, expressions that are one pattern, and processor time for all patterns and
# modules of a checkpoint.
LONGEST_PATTERN, MOST_MEMORY, MOST_JOINED, MOST_SECONDS = 2000, 2**20, 64, 20.0


@dataclass(frozen=True)
class Claim:
    """What a configuration says of a module's weight.

    Attributes:
        kind: `FP8`, `NVFP4`, `MXFP4`, `INT4` or `INT8`.
        block: Rows and columns of the block of a scale; None: one scale a tensor or a row.
        packing: Of integers, one of `COMPRESSED`, `GPTQ`, `GPTQ_V2` and `AWQ`.
        is_symmetric: Of integers, whether 0 stands for 0.
        has_order: Of integers, whether a tensor tells the group of each input.
    """

    kind: str
    block: tuple[int, int] | None = None
    packing: str = COMPRESSED
    is_symmetric: bool = True
    has_order: bool = False


# quant_algo of ModelOpt → what the weights are.
ALGORITHMS = {
    "FP8": Claim(FP8),
    "FP8_PER_CHANNEL_PER_TOKEN": Claim(FP8),
    "MXFP8": Claim(FP8, (1, MX_GROUP)),
    "NVFP4": Claim(NVFP4),
    "W4A16_NVFP4": Claim(NVFP4),
}
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
        # Expressions in order. Those of one claim become one pattern, since each takes time for each module.
        self._expressions: list[tuple[str, Claim | None]] = []
        self._patterns: list[tuple[Any, Claim | None]] | None = None

    def add(self, key: str, names: Iterable[str], claim: Claim | None, is_wildcard: bool = False) -> None:
        """Adds names, ``re:`` expressions and, with ``is_wildcard``, shell wildcards.

        Raises:
            InputError: A pattern is too long or is no regular expression of RE2, or the time is over.
        """
        self._budget.start()
        for name in names:
            if name.startswith("re:"):
                expression = name[3:]
            elif is_wildcard and ("*" in name or "?" in name):
                expression = "".join({"*": ".*", "?": "."}.get(c) or re.escape(c) for c in name) + r"\z"
            else:
                self._claims.setdefault(name, claim)
                continue
            _check(key, name, expression)
            self._budget.check()
            self._expressions.append((expression, claim))

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
        if self._patterns is None:
            same_claims = groupby(self._expressions, key=lambda pair: pair[1])
            groups = [([expression for expression, _ in pairs], claim) for claim, pairs in same_claims]
            self._patterns = [(p, claim) for expressions, claim in groups for p in self._joined(expressions)]
        for pattern, claim in self._patterns:
            is_match = any(pattern.match(name) for name in spellings)
            self._budget.check()
            if is_match:
                return claim
        return UNNAMED

    def _joined(self, expressions: list[str]) -> list[Any]:
        """One pattern of expressions, or several where they are many or take much memory."""
        import re2

        self._budget.check()
        if len(expressions) == 1:
            return [_compiled(expressions[0])]
        # What \Q quotes may have no end.
        if len(expressions) <= MOST_JOINED and not any(r"\Q" in expression for expression in expressions):
            try:
                return [_compiled("|".join(f"(?:{expression})" for expression in expressions))]
            except re2.error:
                pass
        middle = len(expressions) // 2
        return self._joined(expressions[:middle]) + self._joined(expressions[middle:])


def _compiled(expression: str) -> Any:
    """A compiled pattern: RE2 matches in time linear in the name, whatever the expression is."""
    import re2

    options = re2.Options()
    options.log_errors, options.never_capture, options.max_mem = False, True, MOST_MEMORY
    return re2.compile(expression, options)


def _check(key: str, name: str, expression: str) -> None:
    import re2

    if len(name) > LONGEST_PATTERN:
        raise InputError(f"{key} has a pattern of {len(name)} characters: at most {LONGEST_PATTERN} are read")
    try:
        _compiled(expression)
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
        has_head: Whether that is said of the head, too. It may be all the same: then its tensors tell.
        caches: What is said of keys and values; None: nothing.
        has_fp8_scales: Whether scales of keys and values, where there are any, are of FP8.
    """

    def __init__(self, key: str, default: Claim | None = None, is_official: bool = False):
        self.key, self.default, self.is_official = key, default, is_official
        self.caches: str | None = None
        self.has_head = False
        self.has_fp8_scales = True
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
    quantization, method, beside = _section(raw, directory)
    if not quantization:
        return None
    if not isinstance(quantization, dict) or not isinstance(method, str) or method not in READERS:
        raise InputError(f"{directory} is quantized by {shown(method)}: fp8, {', '.join(FORMATS)} are read here")
    path = directory / MODELOPT_FILE if quantization is beside else directory
    # ModelOpt may say only in its own file what keys and values are.
    both = quantization if _caches(quantization) else quantization | {k: beside[k] for k in OF_CACHES if k in beside}
    found = parsed(lambda _: READERS[method](both), raw, path)
    if caches := _caches(both):
        found.caches, found.has_fp8_scales = shown(caches), _is_fp8(caches)
    return found


def _caches(raw: dict) -> Any:
    """What a quantization config says of keys and values; None: nothing."""
    return next((raw[key] for key in OF_CACHES if raw.get(key)), None)


def _is_fp8(caches: Any) -> bool:
    """Whether it is FP8. ModelOpt's scales of NVFP4 are six times smaller."""
    if isinstance(caches, dict):
        return caches.get("num_bits") == 8 and caches.get("type") == "float"
    return isinstance(caches, str) and caches.upper().startswith("FP8")


def _section(raw: dict, directory: Path) -> tuple[Any, Any, dict]:
    """The quantization config of a checkpoint, its method, and ModelOpt's file; arguments as of `read`."""
    quantization = raw.get("quantization_config") or raw.get("text_config", {}).get("quantization_config")
    beside = read_json(directory / MODELOPT_FILE) if (directory / MODELOPT_FILE).is_file() else {}
    beside = beside.get("quantization")
    beside = {"quant_method": "modelopt", **beside} if isinstance(beside, dict) else {}
    quantization = quantization or beside
    return quantization, quantization.get("quant_method") if isinstance(quantization, dict) else quantization, beside


def without_format(quantize: str | None, raw: dict, directory: Path) -> str | None:
    """What loading does to weights: ``quantize``, or nothing where it names the format of the checkpoint.

    Raises:
        InputError: It names another format.
    """
    if quantize not in FORMATS:
        return quantize
    method = _section(raw, directory)[1]
    if not isinstance(method, str) or method not in FORMATS[quantize]:
        what = f"quantized by {shown(method)}" if method else "not quantized"
        raise InputError(f"quantize is {quantize!r}: {directory} is {what}, and weights are read as they are")
    return None


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
    """ModelOpt's: of one kind, of keys and values alone, or of mixed precision.

    Only ``quantized_layers`` tells what a module of mixed precision is.
    """
    excluded = "ignore" if raw.get("ignore") is not None else "exclude_modules"
    if raw.get("quant_algo") == "MIXED_PRECISION":
        found = Quantization("quantized_layers")
        for name, value in section("quantized_layers", raw.get("quantized_layers")).items():
            entry = section(f"quantized_layers[{shown(name)}]", value)
            found.groups.add("quantized_layers", [name], _of_algorithm(entry), is_wildcard=True)
    elif raw.get("quant_algo") is None and _caches(raw):
        found = Quantization("quant_algo")
    else:
        found = Quantization(f"quant_algo and {excluded}", default=_of_algorithm(raw))
        found.has_head = True
    found.ignored.add(excluded, words(excluded, raw.get(excluded) or []), None, is_wildcard=True)
    return found


def _of_algorithm(raw: dict) -> Claim:
    algorithm, group = raw.get("quant_algo"), raw.get("group_size")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise InputError(f"quant_algo is {shown(algorithm)}: {', '.join(ALGORITHMS)} are read here")
    claim = ALGORITHMS[algorithm]
    size = GROUP if claim.kind == NVFP4 else claim.block and claim.block[1]
    if size and group not in (None, size):
        raise InputError(f"group_size is {shown(group)}: {algorithm} has groups of {size}")
    return claim


def _read_compressed(raw: dict) -> Quantization:
    """compressed-tensors', whose ``ignore`` goes before the targets of its groups."""
    found = Quantization("config_groups")
    found.has_head = True
    for key in ("transform_config", "sparsity_config"):
        value = raw.get(key)
        if value and not (isinstance(value, dict) and value.get("format") == "dense"):
            raise InputError(f"{key} is {shown(value)}: it changes the numbers, and is not known here")
    groups = raw.get("config_groups")
    # Of keys and values alone it may be missing.
    for name, value in section("config_groups", {} if groups is None and _caches(raw) else groups).items():
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
    kind, bits, group = weights.get("type", "int"), weights.get("num_bits", 8), weights.get("group_size")
    strategy = weights.get("strategy") or ("tensor" if group is None else "channel" if group == -1 else "group")
    block = None
    if strategy in ("group", "tensor_group"):
        block = 1, _group(f"{key}.group_size", group)
    elif strategy == "block":
        block = _sizes(f"{key}.block_structure", weights.get("block_structure"))
    if strategy in ("tensor", "channel", "group", "block"):
        if kind == "int" and type(bits) is int and bits in INTEGERS:
            is_symmetric = flag(f"{key}.symmetric", weights.get("symmetric", True))
            return Claim(INTEGERS[bits], block, COMPRESSED, is_symmetric, _has_order(weights, key))
        if kind == "float" and bits == 8:
            return Claim(FP8, block)
    # Of microscaling, scales are powers of two.
    for form, its_strategy, size in ((NVFP4, "tensor_group", GROUP), (MXFP4, "group", MX_GROUP)):
        if (kind, bits, strategy, group) == ("float", 4, its_strategy, size):
            return Claim(form)
    what = f"{shown(bits)} bits, type {shown(kind)}, strategy {shown(strategy)} and group_size {shown(group)}"
    raise InputError(f"{key} has {what}: {READ_HERE}")


def _has_order(weights: dict, key: str) -> bool:
    """Whether a tensor tells the groups of inputs. An order of weights is one of calibration, and changes nothing."""
    order = weights.get("actorder")
    if order not in (None, False, True, "weight", "static", "group", "dynamic"):
        raise InputError(f"{key}.actorder is {shown(order)}: it must be weight, group or null")
    return order in (True, "group", "dynamic")


def _group(key: str, value: Any, otherwise: str = "") -> int:
    """The inputs that share a scale."""
    if type(value) is not int or not 0 < value <= LIMIT:
        raise InputError(f"{key} is {shown(value)}: it must be a number of inputs{otherwise}")
    return value


def _first(raw: Mapping[str, Any], keys: str, default: Any = None) -> Any:
    """The first value of ``keys`` that is not null."""
    return next((raw[key] for key in keys.split() if raw.get(key) is not None), default)


def _of_integers(raw: Mapping[str, Any], packing: str, is_symmetric: bool) -> Claim:
    """What GPTQ's, AWQ's and AutoRound's keys say of a module."""
    bits, group = _first(raw, "bits w_bit"), _first(raw, "group_size q_group_size")
    known = (4,) if packing == AWQ else tuple(INTEGERS)
    if type(bits) is not int or bits not in known:
        raise InputError(f"bits is {shown(bits)}: it must be {' or '.join(map(str, known))}")
    block = None if type(group) is int and group == -1 else (1, _group("group_size", group, ", or -1 for a whole row"))
    has_order = flag("desc_act", _first(raw, "desc_act", False))
    return Claim(INTEGERS[bits], block, packing, is_symmetric, has_order)


def _of_gptq(raw: Mapping[str, Any]) -> Claim:
    version = _first(raw, "checkpoint_format format", GPTQ)
    if version not in (GPTQ, GPTQ_V2):
        raise InputError(f"checkpoint_format is {shown(version)}: {GPTQ} and {GPTQ_V2} are read here")
    return _of_integers(raw, version, flag("sym", _first(raw, "sym", True)))


def _of_awq(raw: Mapping[str, Any]) -> Claim:
    version = _first(raw, "version checkpoint_format format", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise InputError(f"version is {shown(version)}: AWQ's gemm is read here")
    has_zero = flag("zero_point", _first(raw, "zero_point", not flag("sym", _first(raw, "sym", False))))
    return _of_integers(raw, AWQ, not has_zero)


def _of_auto_round(raw: Mapping[str, Any]) -> Claim | None:
    """What AutoRound's keys say of a module; None: it is not quantized."""
    bits, kind = raw.get("bits"), _first(raw, "data_type", "int")
    if type(bits) is int and bits >= 16:
        return None
    for (prefix, size), claim in AUTO_ROUND_FLOATS.items():
        if isinstance(kind, str) and kind.startswith(prefix) and bits == size:
            return claim
    if kind not in ("int", "int_sym", "int_asym") or raw.get("super_bits") is not None:
        what = f"data_type is {shown(kind)} with {shown(bits)} bits"
        raise InputError(f"{what}: AutoRound's int, fp8, mx_fp and nv_fp are read here")
    # Its older files name a backend, whose packing it is.
    packing = _first(raw, "packing_format backend", "auto_round:auto_gptq")
    if not isinstance(packing, str):
        raise InputError(f"packing_format is {shown(packing)}: it must be a string, such as auto_round:auto_gptq")
    if "llm_compressor" in packing:
        form = COMPRESSED
    elif "awq" in packing:
        form = AWQ
    else:
        form = GPTQ if "gptq" in packing.replace("gptqmodel", "") else GPTQ_V2
    return _of_integers(raw, form, flag("sym", _first(raw, "sym", True)))


# data_type of AutoRound, as it begins, and bits → what the weights are.
AUTO_ROUND_FLOATS = {
    ("nv_fp", 4): Claim(NVFP4),
    ("mx_fp", 4): Claim(MXFP4),
    ("mx_fp", 8): Claim(FP8, (1, MX_GROUP)),
    ("fp", 8): Claim(FP8),
}
# Keys that tell which modules GPTQ, AWQ and AutoRound quantize.
OF_MODULES = (
    "dynamic",
    "extra_config",
    "modules_to_not_convert",
    "modules_in_block_to_quantize",
    "block_name_to_quantize",
    "to_quant_block_names",
)
# Keys of GPTQModel that make other weights of those in the files.
OTHER_WEIGHTS = ("rotation", "adapter", "lora", "is_marlin_format")


def _read_packed(raw: dict, claim_of: Callable[[Mapping[str, Any]], Claim | None]) -> Quantization:
    """GPTQ's, AWQ's and AutoRound's: one form for all modules but those that a key names."""
    for key in OTHER_WEIGHTS:
        if raw.get(key):
            raise InputError(f"{key} is {shown(raw[key])}: it changes the numbers, and is not known here")
    claim, found = claim_of(raw), Quantization(" and ".join(key for key in OF_MODULES if raw.get(key)) or "bits")
    for name, value in section("dynamic", raw.get("dynamic") or {}).items():
        entry = section(f"dynamic[{shown(name)}]", value)
        is_excluded = name.startswith("-:")
        pattern = f"re:{name[2:] if name.startswith(('-:', '+:')) else name}"
        found.groups.add("dynamic", [pattern], None if is_excluded else claim_of(ChainMap(entry, raw)))
    for name, value in section("extra_config", raw.get("extra_config") or {}).items():
        entry = section(f"extra_config[{shown(name)}]", value)
        name = f"re:.*(?:{name})" if _is_expression(name) else name
        found.groups.add("extra_config", [name], claim_of(ChainMap(entry, raw)))
    found.has_head = flag("lm_head", _first(raw, "lm_head quant_lm_head", False))
    if found.has_head:
        found.groups.add("lm_head", ["lm_head"], claim)
    found.ignored.add("modules_to_not_convert", _parts_of_names(_names(raw, "modules_to_not_convert")), None)
    chosen = _names(raw, "modules_in_block_to_quantize")
    chosen = chosen or _names(raw, "block_name_to_quantize to_quant_block_names")
    found.groups.add("modules_in_block_to_quantize", _parts_of_names(chosen), claim)
    found.default = None if chosen else claim
    return found


def _is_expression(name: str) -> bool:
    return not set(name).isdisjoint("*+?^$()[]{}|\\")


def _parts_of_names(names: list[str]) -> Iterator[str]:
    """Patterns of the modules of which a name, or an expression, is a part; of many names few patterns."""
    waiting: list[str] = []
    for name in (*names, None):
        if name is not None and _is_expression(name):
            yield f"re:.*(?:{name})"
            continue
        if waiting and (name is None or sum(map(len, waiting)) + len(waiting) + 2 * len(name) > LONGEST_PATTERN - 60):
            yield rf"re:(?:.*\.)?(?:{'|'.join(waiting)})(?:\.|\z)"
            waiting = []
        if name is not None:
            waiting.append(re.escape(name.strip(".")))


def _names(raw: Mapping[str, Any], keys: str) -> list[str]:
    """The names of a list, of lists in it, or with commas between; ``keys`` as of `_first`."""
    value = _first(raw, keys, [])
    left, names = [value.split(",") if isinstance(value, str) else value], []
    while left:
        item = left.pop()
        if isinstance(item, str):
            names.append(item)
        elif isinstance(item, list):
            left += item
        else:
            raise InputError(f"{keys.split()[0]} is {shown(value)}: it must be a list of strings")
    return names


READERS: dict[str, Callable[[dict], Quantization]] = {
    "fp8": _read_fp8,
    "modelopt": _read_modelopt,
    "modelopt_fp4": _read_modelopt,
    "modelopt_mixed": _read_modelopt,
    "compressed-tensors": _read_compressed,
    "gptq": partial(_read_packed, claim_of=_of_gptq),
    "awq": partial(_read_packed, claim_of=_of_awq),
    **dict.fromkeys(AUTO_ROUND, partial(_read_packed, claim_of=_of_auto_round)),
}

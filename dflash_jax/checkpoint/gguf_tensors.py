"""The tensors of a GGUF file as Hugging Face's: names, and what llama.cpp's converter does to rows and numbers, undone.

Rows are reordered as they are stored, and unpacked a few at a time.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dflash_jax.checkpoint.gguf_config import FREQUENCIES, TOKENS, Architecture, architecture_of
from dflash_jax.checkpoint.gguf_file import I32, I64, SIZES, GgufFile, GgufTensor, dequantize
from dflash_jax.errors import InputError

# Numbers that are unpacked at once.
CHUNK = 2**22
# A target's embedding and head.
TABLES = ("token_embd.weight", "output.weight")
# Beside a tensor: a factor of its numbers, and one of activations, which are not quantised here.
FACTORS = ("scale", "input_scale")


@dataclass(frozen=True)
class Order:
    """Rows (or columns) of tensors, one after another, in another order.

    Attributes:
        total: How many there are.
        count: How many are taken.
        index: Makes the taken ones' indices.
    """

    total: int
    count: int
    index: Callable[[], np.ndarray]


@dataclass(frozen=True)
class Rule:
    """A tensor of Hugging Face and the file's tensors that it is made of.

    Attributes:
        name: Its name; {i} is the layer, {e} the expert, which are stacked in one tensor of the file.
        sources: The file's tensors, whose rows follow one another.
        rows: Config → order of their rows; None: as they are.
        columns: The same of columns.
        value: Changes the numbers; None: as they are.
        shape: Stored shape → shape; None: the same.
    """

    name: str
    sources: tuple[str, ...]
    rows: Callable[[dict], Order] | None = None
    columns: Callable[[dict], Order] | None = None
    value: Callable[[np.ndarray], np.ndarray] | None = None
    shape: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None


class Source(NamedTuple):
    """A matrix of the file.

    Attributes:
        data: Its bytes, uint8 [rows, bytes of a row].
        kind: Its ggml type.
        factor: Of its numbers.
    """

    data: np.ndarray
    kind: int
    factor: np.float32


@dataclass(frozen=True)
class Output:
    """A tensor of Hugging Face as it is made.

    Attributes:
        shape: Its shape.
        sources: The matrices of which it is made.
        width: Numbers of a row.
        rows: The order of their rows; None: as they are.
        columns: The same of columns.
        value: Changes the numbers; None: as they are.
    """

    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    width: int
    rows: Order | None = None
    columns: Order | None = None
    value: Callable[[np.ndarray], np.ndarray] | None = None

    @property
    def is_integer(self) -> bool:
        """Whether it has whole numbers."""
        return self.sources[0].kind in (I32, I64)

    def stored(self, step: int) -> Iterator[list[tuple[np.ndarray | slice, Source]]]:
        """Yields ``step`` rows at a time: (which of these rows, these rows of a source) of each source that has any."""
        index = None if self.rows is None else self.rows.index()
        starts = np.cumsum([0, *(len(source.data) for source in self.sources)])
        for first in range(0, starts[-1] if index is None else len(index), step):
            if index is None and len(self.sources) == 1:
                (source,) = self.sources
                yield [(slice(None), source._replace(data=source.data[first : first + step]))]
                continue
            wanted = np.arange(first, min(first + step, starts[-1])) if index is None else index[first : first + step]
            of = np.searchsorted(starts, wanted, side="right") - 1
            parts = ((of == i, source, starts[i]) for i, source in enumerate(self.sources))
            yield [(m, source._replace(data=source.data[wanted[m] - start])) for m, source, start in parts if m.any()]

    def chunks(self) -> Iterator[np.ndarray]:
        """Yields its numbers, some rows at a time."""
        columns = None if self.columns is None else self.columns.index()
        for parts in self.stored(max(1, CHUNK // self.width)):
            yield self._made(parts, columns)

    @np.errstate(all="ignore")
    def _made(self, parts: list[tuple[np.ndarray | slice, Source]], columns: np.ndarray | None) -> np.ndarray:
        """The numbers of rows of `stored`. What is not finite is found where they are written."""
        unpacked = [(mask, _unpacked(source)) for mask, source in parts]
        array = unpacked[0][1]
        if len(unpacked) > 1:
            array = np.empty((sum(len(part) for _, part in unpacked), self.width), array.dtype)
            for mask, part in unpacked:
                array[mask] = part
        array = array if columns is None else array[:, columns]
        return array if self.value is None else self.value(array)


def _unpacked(source: Source) -> np.ndarray:
    array = dequantize(source.data, source.kind)
    return array if source.factor == 1 else array * source.factor


def minus_one(array: np.ndarray) -> np.ndarray:
    """The weight of a norm that is stored with 1 added."""
    return array - np.float32(1)


def log_negative(array: np.ndarray) -> np.ndarray:
    """``A_log`` of -exp(A_log), whose rounding to float32 leaves an error of at most 6e-8 and half a last place.

    Raises:
        InputError: A number is not below 0.
    """
    if not (array < 0).all():
        raise InputError("ssm_a has numbers that are not below 0")
    return np.log(-array.astype(np.float64)).astype(np.float32)


def offsets(array: np.ndarray) -> np.ndarray:
    """``d2t`` of the token ids of a reduced head, which are few enough for one chunk.

    Raises:
        InputError: They are no whole numbers.
    """
    if array.dtype.kind != "i":
        raise InputError("the tensor d2t has numbers that are not whole")
    return array - np.arange(len(array))[:, None]


def _alone(first: int, count: int, total: int) -> Order:
    """Some rows that follow one another."""
    return Order(total, count, lambda: np.arange(first, first + count))


def _query_key_value(arch: Architecture, part: str, is_fused: bool) -> Callable[[dict], Order] | None:
    """Rows of q, k or v, alone or among all of them."""
    is_paired = arch.is_paired and part != "v"
    if not is_fused and not is_paired:
        return None

    def order(config: dict) -> Order:
        heads, kv_heads, size = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        counts = {"q": heads * size * (2 if arch.is_hybrid else 1), "k": kv_heads * size, "v": kv_heads * size}
        first = sum(list(counts.values())[: "qkv".index(part)]) if is_fused else 0
        total = sum(counts.values()) if is_fused else counts[part]
        if not is_paired:
            return _alone(first, counts[part], total)
        # llama.cpp rotates rows 2j and 2j + 1 of a head together, Hugging Face j and j + D / 2.
        return Order(
            total,
            counts[part],
            lambda: first + np.arange(counts[part]).reshape(-1, size // 2, 2).swapaxes(1, 2).reshape(-1),
        )

    return order


def _grouped(after_keys: bool, size: str | None) -> Callable[[dict], Order]:
    """Value heads grouped by their key head, which llama.cpp stores tiled: those of the first places of all, then on.

    Args:
        after_keys: Whether rows of queries and keys are before them.
        size: The field of the config that says how many rows a head has; None: one.
    """

    def order(config: dict) -> Order:
        keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        rows = config[size] if size else 1
        first = 2 * keys * config["linear_key_head_dim"] if after_keys else 0
        # The config's reader refuses heads that do not divide.
        count = values // keys * keys * rows

        def index() -> np.ndarray:
            tiled = np.arange(first, first + count).reshape(-1, keys, rows)
            return np.concatenate([np.arange(first), tiled.swapaxes(0, 1).reshape(-1)])

        return Order(first + count, first + count, index)

    return order


def _by_key_head(config: dict) -> Order:
    """Rows of q, k, v and z of each key head, which llama.cpp stores as all of q, of k, of v and of z."""
    keys, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    counts = [size, size, values, values]
    total = keys * sum(counts)

    def index() -> np.ndarray:
        parts = np.split(np.arange(total), np.cumsum([keys * n for n in counts])[:-1])
        return np.concatenate([part.reshape(keys, -1) for part in parts], 1).reshape(-1)

    return Order(total, total, index)


LAYER, EXPERT = "model.layers.{i}.", "mlp.experts.{e}."


def _renamed(names: dict[str, str], prefix: str, **changes) -> list[Rule]:
    """Rules of single tensors with ".weight", by the file's names of a layer's parts."""
    return [Rule(f"{prefix}{there}.weight", (f"{here}.weight",), **changes) for here, there in names.items()]


def _in_block(rules: list[Rule]) -> list[Rule]:
    """Rules with the file's names of a layer."""
    return [replace(rule, sources=tuple(f"blk.{{i}}.{name}" for name in rule.sources)) for rule in rules]


def _norms(arch: Architecture, names: dict[str, str], prefix: str) -> list[Rule]:
    return _renamed(names, prefix, value=minus_one if arch.is_hybrid else None)


def _attention(arch: Architecture, prefix: str) -> list[Rule]:
    rules = _renamed({"attn_output": "o_proj"}, f"{prefix}self_attn.")
    for part in "qkv":
        name = f"{prefix}self_attn.{part}_proj.weight"
        rules.append(Rule(name, (f"attn_{part}.weight",), _query_key_value(arch, part, False)))
        rules.append(Rule(name, ("attn_qkv.weight",), _query_key_value(arch, part, True)))
    return rules + _norms(arch, {f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"}, prefix)


def _delta(arch: Architecture, prefix: str) -> list[Rule]:
    """Gated DeltaNet: tiled value heads, or qwen3next's, whose projections are split."""
    at, size = f"{prefix}linear_attn.", "linear_value_head_dim"
    heads = _grouped(False, None) if arch.is_tiled else None
    channels = _grouped(True, size) if arch.is_tiled else None
    rules = [
        Rule(f"{at}A_log", ("ssm_a",), heads, value=log_negative),
        Rule(f"{at}dt_bias", ("ssm_dt.bias",), heads),
        Rule(f"{at}conv1d.weight", ("ssm_conv1d.weight",), channels, shape=lambda s: (s[0], 1, s[-1])),
        Rule(f"{at}norm.weight", ("ssm_norm.weight",)),
    ]
    if not arch.is_tiled:
        both = ("attn_qkv.weight", "attn_gate.weight")
        return [
            *rules,
            Rule(f"{at}in_proj_qkvz.weight", both, _by_key_head),
            *_renamed({"ssm_in": "in_proj_qkvz", "ssm_ba": "in_proj_ba", "ssm_out": "out_proj"}, at),
        ]
    return [
        *rules,
        Rule(f"{at}in_proj_qkv.weight", ("attn_qkv.weight",), channels),
        Rule(f"{at}in_proj_z.weight", ("attn_gate.weight",), _grouped(False, size)),
        Rule(f"{at}in_proj_a.weight", ("ssm_alpha.weight",), heads),
        Rule(f"{at}in_proj_b.weight", ("ssm_beta.weight",), heads),
        Rule(f"{at}out_proj.weight", ("ssm_out.weight",), columns=_grouped(False, size)),
    ]


def _feed_forward(arch: Architecture, prefix: str) -> list[Rule]:
    parts = ("gate", "up", "down")
    if not arch.has_experts:
        return _renamed({f"ffn_{x}": f"mlp.{x}_proj" for x in parts}, prefix)
    at = f"{prefix}{EXPERT}"
    rules = _renamed({"ffn_gate_inp": "mlp.gate"}, prefix) + _renamed({f"ffn_{x}_exps": f"{x}_proj" for x in parts}, at)
    for first, part in enumerate(("gate", "up")):
        rules.append(Rule(f"{at}{part}_proj.weight", ("ffn_gate_up_exps.weight",), _half(first)))
    if arch.is_hybrid:
        rules += _renamed({f"ffn_{x}_shexp": f"mlp.shared_expert.{x}_proj" for x in parts}, prefix)
        rules += _renamed({"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}, prefix, shape=lambda s: (1, s[-1]))
    return rules


def _half(which: int) -> Callable[[dict], Order]:
    """The first or second half of the rows of an expert's gate and up."""

    def order(config: dict) -> Order:
        size = config["moe_intermediate_size"]
        return _alone(which * size, size, 2 * size)

    return order


def _decoder(arch: Architecture, prefix: str, kind: str) -> list[Rule]:
    """The rules of a layer: of Gated DeltaNet, or of attention."""
    after = dict.fromkeys(("ffn_norm", "post_attention_norm"), "post_attention_layernorm")
    rules = _norms(arch, {"attn_norm": "input_layernorm"} | after, prefix)
    rules += _delta(arch, prefix) if kind == "linear_attention" else _attention(arch, prefix)
    return _in_block(rules + _feed_forward(arch, prefix))


def _target(arch: Architecture, config: dict) -> Iterator[tuple[int, Rule]]:
    """(layer, rule) of every tensor that a target may have."""
    tables = {"token_embd": "model.embed_tokens", "output": "lm_head"}
    for rule in _renamed(tables, "") + _norms(arch, {"output_norm": "model.norm"}, ""):
        yield 0, rule
    depth = config["num_hidden_layers"]
    kinds = config.get("layer_types", ["full_attention"] * depth)
    by_kind = {kind: _decoder(arch, LAYER, kind) for kind in set(kinds)}
    for i, kind in enumerate(kinds):
        for rule in by_kind[kind]:
            yield i, rule
    if config.get("mtp_num_hidden_layers"):
        head = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head_norm": "norm"}
        rules = _norms(arch, {f"nextn.{here}": there for here, there in head.items()}, "mtp.")
        rules += _renamed({"nextn.eh_proj": "fc"}, "mtp.")
        for rule in _decoder(arch, "mtp.layers.0.", "full_attention") + _in_block(rules):
            yield depth, rule


def _drafter(arch: Architecture, config: dict) -> Iterator[tuple[int, Rule]]:
    """The same of a drafter, with the names of llama.cpp and of its forks."""
    names = {
        **dict.fromkeys(("fc", "dflash_fc", "dflash.fc"), "fc"),
        **dict.fromkeys(("enc.output_norm", "dflash_hidden_norm", "dflash.hidden_norm", "hidden_norm"), "hidden_norm"),
        "output_norm": "norm",
        "token_embd": "embed_tokens",
        "output": "lm_head",
        **dict.fromkeys(("selector_hidden", "selector.hidden_proj"), "candidate_selector.hidden_projection"),
        **{f"markov_{w}": f"markov_head.markov_{w}" for w in ("w1", "w2")},
    }
    rules = _renamed(names, "")
    for name, short in (("predecessor", "pred"), ("successor", "succ")):
        for source in (f"selector_{name}.weight", f"selector.{short}_codebook", f"selector.{short}_codebook.weight"):
            rules.append(Rule(f"candidate_selector.{name}_codebook", (source,)))
    head = "confidence_head.proj."
    rules.append(Rule(f"{head}weight", ("conf_proj.weight",), shape=lambda s: (1, s[-1])))
    rules.append(Rule(f"{head}bias", ("conf_proj.bias",)))
    rules.append(Rule("d2t", (TOKENS,), value=offsets))
    for rule in rules:
        yield 0, rule
    layer = _decoder(arch, "layers.{i}.", "full_attention")
    for here, there in (("attn_conv", "attention_conv"), ("ffn_conv", "mlp_conv")):
        for dot in "_.":
            at = f"layers.{{i}}.{there}."
            base = Rule(f"{at}base_kernel", (f"{here}{dot}base",))
            projection = Rule(f"{at}kernel_projection.weight", (f"{here}{dot}proj.weight",))
            layer += _in_block([base, projection])
    for i in range(config["num_hidden_layers"]):
        for rule in layer:
            yield i, rule


def is_head_alone(file: GgufFile, config: dict) -> bool:
    """Whether a file has the MTP head of a target without its layers."""
    return bool(config.get("mtp_num_hidden_layers")) and not any(name.startswith("blk.0.") for name in file.tensors)


def hf_tensors(file: GgufFile, config: dict) -> dict[str, Output]:
    """The tensors under Hugging Face's names.

    Args:
        file: The file.
        config: What `read_config` read.

    Raises:
        InputError: A tensor is unknown, or its rows do not fit the config.
    """
    arch = architecture_of(file)
    # Of a head alone, the target's tables, of which it needs no copies.
    skipped = {FREQUENCIES, *(TABLES if is_head_alone(file, config) else ())}
    names = [name for name in file.tensors if name not in skipped]
    known, used = frozenset(names), set()
    tensors: dict[str, Output] = {}
    origins: dict[str, str] = {}
    for i, rule in (_drafter if arch.is_drafter else _target)(arch, config):
        sources = tuple(name.replace("{i}", str(i)) for name in rule.sources)
        if not known.issuperset(sources):
            continue
        used |= {*sources, *(name.removesuffix("weight") + s for name in sources for s in FACTORS)}
        for name, output in _outputs(
            file, config, replace(rule, name=rule.name.replace("{i}", str(i)), sources=sources)
        ):
            if name in tensors:
                raise InputError(f"{file.path}: tensors {origins[name]!r} and {sources[0]!r} are the same {name!r}")
            tensors[name], origins[name] = output, sources[0]
    if unknown := [name for name in names if name not in used]:
        more = f", nor are {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise InputError(f"{file.path}: tensor {unknown[0]!r} is not known for {arch.model_type}{more}")
    return tensors


def _outputs(file: GgufFile, config: dict, rule: Rule) -> Iterator[tuple[str, Output]]:
    """(name, tensor) of what a rule makes: one, or one of each expert."""
    stored = [file.tensors[name] for name in rule.sources]
    what = " and ".join(f"{name!r} {list(t.shape)}" for name, t in zip(rule.sources, stored, strict=True))
    is_stacked, count = "{e}" in rule.name, config.get("num_experts", 1)
    if is_stacked and stored[0].shape[0] != count:
        raise InputError(f"{file.path}: {what} has {stored[0].shape[0]} experts, expert_count says {count}")
    if is_stacked and len(stored[0].shape) != 3:
        raise InputError(f"{file.path}: {what} must be a matrix for each expert")
    factors = [_factors(file, name, count if is_stacked else 1) for name in rule.sources]
    for e in range(count) if is_stacked else (None,):
        parts = stored if e is None else [GgufTensor(t.shape[1:], t.kind, t.data[e]) for t in stored]
        try:
            output = _output(parts, [factor[e or 0] for factor in factors], config, rule)
        except InputError as error:
            raise InputError(f"{file.path}: tensor {what} {error.args[0]}") from None
        yield rule.name.replace("{e}", str(e)), output


def _factors(file: GgufFile, name: str, count: int) -> np.ndarray:
    """The factor of a tensor, which types of four bits may have beside it, or of each of ``count`` experts."""
    beside = name.removesuffix("weight") + FACTORS[0]
    if not name.endswith("weight") or beside not in file.tensors:
        return np.ones(count, np.float32)
    factors = file.read(beside).astype(np.float32).reshape(-1)
    if len(factors) not in (1, count):
        raise InputError(f"{file.path}: {beside!r} has {len(factors)} numbers, it must have {count}")
    return np.broadcast_to(factors, count)


def _output(parts: list[GgufTensor], factors: list[np.float32], config: dict, rule: Rule) -> Output:
    """The tensor that a rule makes of tensors with factors.

    Raises:
        InputError: Their sizes are not those of the config.
    """
    sources = tuple(Source(_rows(part), part.kind, each) for part, each in zip(parts, factors, strict=True))
    shape, count = parts[0].shape, sum(len(source.data) for source in sources)
    width = shape[-1] if len(shape) > 1 else math.prod(shape) // max(1, count)
    if len(parts) > 1 and any(len(part.shape) != 2 or part.shape[-1] != width for part in parts):
        raise InputError("have different columns")
    rows = rule.rows and rule.rows(config)
    columns = rule.columns and rule.columns(config)
    if rows:
        if len(shape) > 2 or rows.total != count:
            raise InputError(f"has {count} rows, it must have {rows.total}")
        shape = (rows.count, *shape[1:])
    if columns and (len(shape) != 2 or columns.total != width):
        raise InputError(f"has {width} columns, it must have {columns.total}")
    wanted = rule.shape(shape) if rule.shape else shape
    if math.prod(wanted) != math.prod(shape):
        raise InputError(f"has too many axes: it must have {list(wanted)} or fewer")
    return Output(wanted, sources, width, rows, columns, rule.value)


def _rows(tensor: GgufTensor) -> np.ndarray:
    """The bytes of a tensor's rows; numbers of a vector are rows where they are stored one by one."""
    if len(tensor.shape) == 1 and SIZES.get(tensor.kind, (0,))[0] == 1:
        return tensor.data.reshape(tensor.shape[0], -1)
    return tensor.data.reshape(-1, tensor.data.shape[-1])

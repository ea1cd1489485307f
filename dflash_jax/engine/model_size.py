"""Bytes of a model's weights on one device, and those that a pass reads."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from dflash_jax.models.decoder import Decoder
    from dflash_jax.models.drafting import Drafting
    from dflash_jax.parallel.sharding import Layout


@dataclass(frozen=True)
class Weights:
    """One model on one device, in bytes unless said otherwise.

    Attributes:
        parameters: Number of parameters, over all devices.
        total: All weights.
        expert: One routed expert, over all layers.
        experts: Number of routed experts of a layer; 0 without a mixture.
        per_token: Number of experts that a token is routed to.
        local_experts: Number of a layer's experts on this device.
        lookup: The tables of which only single rows are read: the embedding, where it is not the head too, and the rows
            of a drafter's selector.
        head: The head.
        context: Of a drafter: the weights that an extension of its context reads, without norms.
        replicated: By parameter: bytes that several devices of a model's mesh hold alike.
        dense: (bytes, parameters) of all weights but the routed experts, the tables and the head: a pair for each size
            of a parameter.
        expert_parameters: Parameters of one routed expert, over all layers.
        head_parameters: Parameters of the head.
    """

    parameters: int
    total: float
    expert: float
    experts: int
    per_token: int
    local_experts: float
    lookup: float
    head: float
    context: float
    replicated: dict[str, float]
    dense: tuple[tuple[float, float], ...]
    expert_parameters: float
    head_parameters: float

    def read(self, tokens: float, touched: float | None = None) -> float:
        """Bytes that a pass over ``tokens`` tokens reads, with ``touched`` experts a layer (None: as if by chance)."""
        if touched is None:
            touched = float(self.experts * (1 - (1 - self.per_token / self.experts) ** tokens)) if self.experts else 0.0
        share = self.local_experts / self.experts if self.experts else 0.0
        return self.total - self.lookup - self.local_experts * self.expert + touched * share * self.expert

    def work(self, tokens: float, touched: float | None = None) -> list[tuple[float, float]]:
        """(bytes, operations) of the products of a pass, whose bytes are those of `read`.

        Products of the same number of tokens with parameters of the same size are one pair: of these either the bytes
        or the operations take longer in all.
        """
        products = [*self.dense, (self.head, self.head_parameters)]
        pairs = [(size, 2 * parameters * tokens) for size, parameters in products]
        if self.experts:
            routed = self.read(tokens, touched) - sum(size for size, _ in pairs)
            share = self.local_experts / self.experts
            pairs.append((routed, 2 * self.expert_parameters * tokens * self.per_token * share))
        return pairs


def weigh(module: "Decoder | Drafting", layout: "Layout") -> Weights:
    """Sums up the weights of a model, with arrays or shapes, on a mesh."""
    import jax

    from dflash_jax.models.config import ModelConfig, MoeSpec
    from dflash_jax.models.drafters import config_of
    from dflash_jax.models.kv_scales import is_scale
    from dflash_jax.ops.weights import is_weight
    from dflash_jax.parallel.sharding import parameter_paths, parameter_specs, parts_of

    config = getattr(module, "config", None)
    if not isinstance(config, ModelConfig):
        config = config_of(cast("Drafting", module))
    ffns = [getattr(layer, "ffn", None) for layer in config.layers]
    moe = next((ffn for ffn in ffns if isinstance(ffn, MoeSpec)), None)
    experts = moe.num_experts if moe else 0
    routed = {
        f"layers.{i}.ffn.{n}" for i, ffn in enumerate(ffns) if isinstance(ffn, MoeSpec) for n in ("gate_up", "down")
    }
    names = "count", "total", "expert", "expert_parameters", "lookup", "head", "head_parameters", "context"
    sums = dict.fromkeys(names, 0.0)
    replicated: dict[str, float] = {}
    dense: dict[float, tuple[float, float]] = {}
    weights = parameter_paths(module, is_weight), jax.tree.leaves(module, is_leaf=is_weight)
    for path, weight, spec in zip(*weights, parameter_specs(module, is_weight), strict=True):
        sums["count"] += 0 if is_scale(path) else math.prod(weight.shape)
        name = path.rsplit(".", 1)[-1]
        size = sum(math.prod(array.shape) * array.dtype.itemsize for array in jax.tree.leaves(weight))
        parts = parts_of(layout.sizes, spec)
        sums["total"] += size / parts
        count = math.prod(weight.shape)
        if path in routed:
            divided = parts / layout.parts(layout.experts(experts))
            sums["expert"] += size / experts / divided
            sums["expert_parameters"] += count / experts / divided
        if name in ("fc", "k", "v"):
            sums["context"] += size / parts
        tied = path == "embed" and getattr(config, "tied_embeddings", False)
        if path == "head" or tied:
            sums["head"], sums["head_parameters"] = size / parts, count / parts
        elif path in ("embed", "selector.predecessor", "selector.successor"):
            sums["lookup"] += size / parts
        elif path not in routed and count:
            before = dense.get(size / count, (0.0, 0.0))
            dense[size / count] = before[0] + size / parts, before[1] + count / parts
        if parts < layout.tensor * layout.expert:
            short = ".".join("*" if p.isdecimal() else p for p in path.split("."))
            replicated[short] = replicated.get(short, 0.0) + size / parts
    local_experts = experts / layout.parts(layout.experts(experts)) if experts else 0.0
    per_token = moe.experts_per_token if moe else 0
    return Weights(
        int(sums["count"]),
        sums["total"],
        sums["expert"],
        experts,
        per_token,
        local_experts,
        sums["lookup"],
        sums["head"],
        sums["context"],
        replicated,
        tuple(dense.values()),
        sums["expert_parameters"],
        sums["head_parameters"],
    )

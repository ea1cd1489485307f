"""Runs of an engine whose drafter has the right drafts in a table, and comparison of their tokens.

The models are random and have the heads of real ones. For tests, and for a check on a card.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.decoding.sampling_state import SamplingState
from dflash_jax.decoding.state import Settings
from dflash_jax.engine.config import EngineConfig, speculations_of
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.executables import Executables
from dflash_jax.engine.model_runner import ModelRunner
from dflash_jax.engine.request import Request
from dflash_jax.models.config import AttentionSpec, GatedDeltaSpec, LayerSpec, MoeSpec, RopeSpec
from dflash_jax.models.decoder import abstract_decoder
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.drafters import abstract_drafter
from dflash_jax.models.drafting import DrafterWrapper, Proposal
from dflash_jax.options.systems import read_system
from dflash_jax.parallel.sharding import parameter_paths
from dflash_jax.planner import Shapes, read_shapes
from dflash_jax.sampling_params import SamplingParams
from tools.compile_report import shorten
from tools.equality import Reference, equal_or_tie

# Tokens of a random model's vocabulary: few, so that the table of a `Remembering` stays small.
VOCAB = 64
CONFIG = "qwen3.6-35b-a3b"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Remembering(DrafterWrapper):
    """A drafter that drafts known continuations, half of them with one wrong token.

    Attributes:
        table: Tokens int32 [V, L, W - 1] that follow a token at a position.
    """

    table: jax.Array

    @classmethod
    def of(cls, drafter: Drafter, requests: list[Request], wide: int, capacity: int, seed: int = 0) -> "Remembering":
        """A drafter that drafts the tokens of ``requests``, with errors at random places."""
        rng, vocab = np.random.default_rng(seed), drafter.config.vocab_size
        table = rng.integers(0, vocab, (vocab, capacity + wide, wide - 1))
        for r in requests:
            text = [*r.prompt, *r.tokens]
            for at in range(len(r.prompt) - 1, len(text) - 1):
                following = text[at + 1 : at + wide]
                table[text[at], at, : len(following)] = following
        wrong = rng.random(table.shape[:2]) < 0.5
        place = rng.integers(0, wide - 1, table.shape[:2])
        hit = wrong[..., None] & (np.arange(wide - 1) == place[..., None])
        return cls(drafter, jnp.asarray(np.where(hit, (table + 1) % vocab, table), jnp.int32))

    def propose(self, cache, last, start, block_sizes, size, heads, window):
        """The remembered drafts; at every eighth position, those of the inner drafter."""
        drafted = super().propose(cache, last, start, block_sizes, size, heads, window).tokens
        remembered = self.table[last, jnp.minimum(start, self.table.shape[1] - 1)][:, : size - 1]
        # Every eighth position is left to the drafter itself.
        return Proposal(jnp.where((start % 8 == 0)[:, None], drafted, remembered))


def real_heads(vocab: int = VOCAB) -> Shapes:
    """Four layers of Qwen3.6-35B-A3B, three recurrent ones and one of attention, and two layers of its drafter.

    A layer has 32 of the 256 experts: several processes on one card hold the pair in float32.
    """
    system = read_system(CONFIG)
    shapes = shorten(read_shapes(*(str(system.shapes[k]) for k in ("target", "draft"))), 4)
    assert shapes.draft is not None, CONFIG
    draft = replace(
        shapes.draft, layers=shapes.draft.layers[-2:], vocab_size=vocab, mask_token_id=vocab - 2,
        target_layer_ids=(0, 1, 3),
    )  # fmt: skip
    layers = tuple(replace(layer, ffn=replace(layer.ffn, num_experts=32)) for layer in shapes.target.layers)
    return replace(shapes, target=replace(shapes.target, vocab_size=vocab, layers=layers), draft=draft)


def small(vocab: int = VOCAB, hidden: int = 64) -> Shapes:
    """A hybrid of experts, and a drafter of one layer.

    Heads have the sizes that the kernels take (256 in attention, 128 in the drafter and the delta rule). The target has
    a recurrent layer and one of attention.
    """
    shapes = real_heads(vocab)
    attention = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=256, rope=RopeSpec(10000.0, 64), gated=True)
    delta = GatedDeltaSpec(num_key_heads=1, num_value_heads=2, key_dim=128, value_dim=128)
    experts = MoeSpec(num_experts=6, experts_per_token=2, intermediate_size=32, shared_intermediate_size=32)
    layers = tuple(LayerSpec(mixer, experts) for mixer in (delta, attention))
    target = replace(shapes.target, hidden_size=hidden, layers=layers)
    assert shapes.draft is not None
    attention = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=128, rope=RopeSpec(10000.0, 128))
    draft = replace(
        shapes.draft, hidden_size=hidden, num_target_layers=2, target_layer_ids=(0, 1),
        layers=(replace(shapes.draft.layers[-1], attention=attention, intermediate_size=31),),
    )  # fmt: skip
    return replace(shapes, target=target, draft=draft)


def drawn(module, seed: int, offset: float):
    """An abstract module with random float32 weights, made on the device.

    Their spread is large enough that leaving out a part shows.

    Args:
        module: The module.
        seed: Seed of the weights.
        offset: What the norms add to their weights.
    """

    def draw(key, path: str, shape: tuple[int, ...]):
        noise, name = jax.random.normal(key, shape), path.rsplit(".", 1)[-1]
        if name == "a_log":
            return jnp.log(jax.random.uniform(key, shape, minval=0.05, maxval=4.0))
        if name == "dt_bias":
            return noise - 1
        if name == "conv":
            return 0.6 * noise
        if "norm" in path:
            # The norm inside Gated DeltaNet has no offset.
            return (1.0 if path.endswith("mixer.norm") else 1.0 - offset) + 0.3 * noise
        if "embed" in path:
            return noise
        # o and out are [H, heads, …], fc [H, taps, H]: their inputs are all but the first axis.
        inputs = np.prod(shape[1:]) if name in ("o", "out", "fc") else shape[-1]
        spread = 0.4 if re.search(r"\.(o|out|down)$", path) else 1.6 if name == "router" else 1.0
        return spread * noise * float(inputs) ** -0.5

    leaves, structure = jax.tree.flatten(module)
    make = jax.jit(draw, static_argnums=(1, 2))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [make(*each) for each in zip(keys, parameter_paths(module), (x.shape for x in leaves), strict=True)]
    return jax.tree.unflatten(structure, drawn)


def random_pair(shapes: Shapes, seed: int = 0) -> tuple:
    """(target, drafter) in float32."""
    assert shapes.draft is not None, "a pair has a drafter"
    target, drafter = abstract_decoder(shapes.target), abstract_drafter(shapes.draft)
    return drawn(target, seed, shapes.target.norm_offset), drawn(drafter, seed + 1, 0.0)


def requests(lengths: Sequence[int], temperature: float, new: int, vocab: int) -> list[Request]:
    """Requests for ``new`` tokens each, with random prompts of ``lengths`` tokens."""
    rng = np.random.default_rng(0)
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "logit_bias": {}}
    neutral |= {"frequency_penalty": 0.0, "presence_penalty": 0.0, "temperature": temperature, "max_tokens": new}
    params = [SamplingParams(seed=i, **neutral) for i in range(len(lengths))]
    return [Request(rng.integers(2, vocab - 2, n).tolist(), p, []) for n, p in zip(lengths, params, strict=True)]


def run(
    target, drafter, wanted: list[Request], block_size: int, *, together: bool, reproducible: int = 0, capacity: int,
    prefill_sizes: tuple[int, ...], prefill_batch_tokens: int = 0,
) -> list[Request]:  # fmt: skip
    """Decodes requests and returns them with their tokens.

    Args:
        target: The target.
        drafter: The drafter, or None.
        wanted: The requests.
        block_size: The largest block size.
        together: Whether all run at once; otherwise one after another.
        reproducible: The size of all blocks; 0 leaves it to each dispatch.
        capacity: Positions of a slot.
        prefill_sizes: As in `EngineConfig`.
        prefill_batch_tokens: As in `EngineConfig`.
    """
    settings = Settings(reproducible or 1, bool(reproducible))
    config = EngineConfig(
        speculations=speculations_of((block_size,)),
        prefill_sizes=prefill_sizes,
        prefill_batch_tokens=prefill_batch_tokens,
        max_decode_batch=1 if reproducible else None,
        adaptive=False,
    )
    engine = Engine(ModelRunner(Executables(target, drafter), len(wanted), capacity, settings), config)
    for request in wanted:
        engine.submit(request)
        while not together and engine.has_work:
            engine.step()
    while engine.has_work:
        engine.step()
    return wanted


@dataclass(frozen=True)
class _Run:
    """A `Finished` run of one request."""

    sampling: SamplingState
    tokens: jax.Array
    prompt_length: jax.Array
    length: jax.Array


def margin(target, request: Request, at: int) -> float:
    """How decided the target was about the new token ``at`` of a request whose only option is its temperature."""
    sampling = SamplingState.greedy(1, target.config.vocab_size)
    params, start = request.params, len(request.prompt)
    sampling = replace(
        sampling,
        temperature=jnp.full_like(sampling.temperature, params.temperature or 0.0),
        seed=jnp.full_like(sampling.seed, params.seed or 0),
    )
    tokens = np.array([request.prompt + request.tokens])
    state = _Run(sampling, jnp.asarray(tokens), jnp.asarray([start]), jnp.asarray([tokens.shape[1]]))
    with jax.default_matmul_precision("highest"):
        return Reference(target, state).margin(0, start + at)


def compared(found: list[Request], expected: list[Request], margin: Callable | None) -> dict:
    """{"status": "exact", "tokens", "ties"}, or {"status": "failed", "why"}.

    Args:
        found: The requests of a run.
        expected: The same requests of the reference run.
        margin: (request, place) → how decided the target was, as `equality.equal_or_tie` takes it; None: no tie is
            allowed. Not more than one of eight requests may part at a tie: in a long prompt some expert is always
            chosen by a small margin, which would excuse anything.
    """
    ties = 0
    for number, (one, right) in enumerate(zip(found, expected, strict=False)):
        if one.finish_reason != "length" or right.finish_reason != "length":
            return {"status": "failed", "why": f"request {number} ended by {one.finish_reason}"}
        margin_at = (lambda at: float("inf")) if margin is None else partial(margin, right)
        try:
            ties += equal_or_tie(right.tokens, one.tokens, margin_at) is not None
        except AssertionError as e:
            return {"status": "failed", "why": f"prompt of {len(one.prompt)}: {e}"}
    if ties > max(1, len(found) // 8):
        return {"status": "failed", "why": f"{ties} of {len(found)} requests part, at ties: chance makes fewer"}
    return {"status": "exact", "tokens": sum(len(r.tokens) for r in found), "ties": ties}

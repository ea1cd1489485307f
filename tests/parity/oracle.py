"""transformers as the oracle: random models, their logits and hidden states, and ours over the same rows."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import torch

from dflash_jax.models.cache import init_cache
from tests.float64 import Exact, in_both
from tests.helpers import draw, extend, logits

logging.getLogger("transformers").setLevel(logging.ERROR)
torch.set_num_threads(1)

LENGTHS = (300, 171, 90)
# Tokens of each row in each call: more than one chunk of the delta rule (64) and of the attention context (256).
PIECES = [(100, 64, 1), (37, 100, 0), (100, 7, 89), (63, 0, 0)]
SLOTS = 100


def randomise(model: torch.nn.Module, seed: int, offset: float = 1.0) -> torch.nn.Module:
    """Random weights in place; logits come out with a spread of about one. ``offset``: what the model adds to norm
    weights."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            value = draw(rng, name, tuple(p.shape), p.shape[-1], offset=offset)
            p.copy_(torch.from_numpy(value))
    model.set_attn_implementation("eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.eval()


def oracle(model, tokens, **options) -> tuple[Exact, list[Exact]]:
    """Logits [T, V], and the outputs [T, H] of the embedding and of each layer, of one sequence on its own."""
    scores, states = in_both(model, np.asarray(tokens)[None], **options)
    return scores[0], [x[0] for x in states]


def pad(pieces, slots: int):
    """Right-padded with a token that is a real one: what it computes must not reach the others."""
    return jnp.asarray(np.stack([np.pad(p, (0, slots - len(p)), constant_values=5) for p in pieces]), jnp.int32)


def run(target, rows, pieces, slots, taps=()):
    """The rows through ``extend``, each in its own pieces: a list of (logits, features) with the padding cut off."""
    cache = init_cache(target.config, len(rows), max(map(len, rows)), jnp.float32)
    length = np.zeros(len(rows), np.int32)
    out = [[] for _ in rows]
    for sizes in pieces:
        tokens = pad([row[at : at + n] for row, at, n in zip(rows, length, sizes, strict=True)], slots)
        hidden, features, cache = extend(
            target, tokens, cache, jnp.asarray(length), jnp.asarray(sizes, jnp.int32), taps=taps
        )
        scores = logits(target, hidden)
        for i, n in enumerate(sizes):
            out[i].append((np.asarray(scores[i, :n]), np.asarray(features[i, :n]) if taps else None))
        length += np.asarray(sizes, np.int32)
    assert tuple(length) == tuple(map(len, rows))
    return [tuple(np.concatenate(x) if x[0] is not None else None for x in zip(*pieces, strict=True)) for pieces in out]


def assert_same_parameters(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))

"""Optimisers: AdamW, and Muon for matrices."""

import jax
import optax
from optax.contrib import MuonDimensionNumbers, muon

from dflash_jax.parallel.sharding import parameter_paths

# Weights whose first axis (after the expert axis) is the output. All other matrices have their input last.
_OUTPUT_FIRST = ("o", "out", "down", "fc")
_NOT_A_MATRIX = (
    *("embed", "head", "router", "conv", "beta_alpha", "shared_gate", "a_log", "dt_bias", "norm", "weight"),
    # A drafter's tables of single rows, coefficients of channels, and what gives one number or is one for each rank.
    *("predecessor", "successor", "base", "confidence", "confidence_bias", "gate_bias"),
)

# Parts of a drafter beyond DFlash's.
_PARTS = ("attention_conv", "mlp_conv", "selector", "confidence", "confidence_bias")


def in_part(module):
    """Whether each parameter is a convolution's, a selector's, a Markov head's or a confidence head's."""
    is_part = [any(name in _PARTS for name in path.split(".")) for path in parameter_paths(module)]
    return jax.tree.unflatten(jax.tree.structure(module), is_part)


def matrix_axes(module):
    """The axes of each parameter that form the matrix that Muon orthogonalises; None where AdamW applies."""

    def axes(path: str, leaf):
        name = path.rsplit(".", 1)[-1]
        if name in _NOT_A_MATRIX:
            return None
        dims = tuple(range(leaf.ndim))
        if name in _OUTPUT_FIRST:
            skip = 1 if name == "down" and leaf.ndim == 3 else 0
            return MuonDimensionNumbers(dims[skip + 1 :], (dims[skip],))
        if name == "gate_up":
            return MuonDimensionNumbers((dims[-1],), (dims[-2],))
        return MuonDimensionNumbers((dims[-1],), dims[:-1])

    leaves, structure = jax.tree.flatten(module)
    return jax.tree.unflatten(structure, [axes(p, x) for p, x in zip(parameter_paths(module), leaves, strict=True)])


def optimiser(
    peak: float, steps: int, kind: str = "adamw", warm_up: float = 0.04, clip: float = 1.0, body_rate: float = 1.0
):
    """AdamW or Muon, with linear warm-up and a cosine schedule.

    Gradients are clipped by global norm, without weight decay. Muon's updates are scaled to AdamW's size, so one
    ``peak`` serves both; AdamW updates parameters that are no matrices.

    Args:
        peak: Highest learning rate.
        steps: Steps of the run.
        kind: "adamw" or "muon".
        warm_up: Share of the steps in which the learning rate rises.
        clip: Largest global norm of the gradients.
        body_rate: Share of the learning rate for parameters of no part (`in_part`).
    """
    rising, steps = max(1, int(steps * warm_up)), max(steps, 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, rising, steps, peak * 0.02)
    if kind == "adamw":
        update = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.0)
    else:
        update = muon(
            schedule, adam_b1=0.9, adam_b2=0.95, consistent_rms=0.2, muon_weight_dimension_numbers=matrix_axes
        )
    chain = optax.chain(optax.clip_by_global_norm(clip), update)
    if body_rate == 1:
        return chain

    def slowed(updates, _):
        return jax.tree.map(lambda u, is_part: u if is_part else u * body_rate, updates, in_part(updates))

    return optax.chain(chain, optax.stateless(slowed))

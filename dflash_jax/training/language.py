"""Training of a language model itself; the bundled target is made with it."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax


def make_step(loss: Callable, transformation: optax.GradientTransformation):
    """A jitted training step; it donates the model and the optimiser state.

    Args:
        loss: ``loss(model, *batch)`` → scalar.
        transformation: The optimiser.

    Returns:
        ``step(model, opt_state, *batch)`` → (model, opt_state, loss).
    """

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(model, opt_state, *batch):
        value, grads = jax.value_and_grad(loss)(model, *batch)
        updates, opt_state = transformation.update(grads, opt_state, model)
        return optax.apply_updates(model, updates), opt_state, value

    return step


def token_losses(model, batch):
    """Cross-entropy in nats [B, T] of tokens 1 … T of ``batch`` int [B, T + 1], each given those before it."""
    hidden, _ = model(batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), batch[:, 1:])


def next_token_loss(model, batch):
    """Mean of `token_losses`."""
    return token_losses(model, batch).mean().astype(jnp.float32)

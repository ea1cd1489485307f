"""What a drafter is trained to do: sums over a block's slots, the vocabulary in chunks.

Letters beyond `models.parts`: A anchors of a row, K = W - 1 slots of a block that predict.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dflash_jax.ops.backend import Backend
from dflash_jax.ops.linear import project

# A logit that no softmax sees, and whose products are still numbers.
NEVER = -1e30


@dataclass(frozen=True)
class Loss:
    """kind: "cross-entropy" against the next tokens; "kl", forward, against the target's distributions; "hybrid",
    λ·KL + (1 - λ)·TV with λ = exp(-eta · acceptance rate) (arXiv 2602.23881). weights: "decay", exp(-(k - 1) / gamma)
    for slot k (arXiv 2602.06036); "d-pace", Σ_{m ≥ k} Π_{i ≤ m} q̃_i with q̃ = (1 - alpha)·q + alpha and q the drafter's
    probability of the label: what a slot is worth to the expected acceptance length. ``match``: adds so many times the
    squared distance to the target's hidden states, relative to their square (as in arXiv 2401.15077). ``chunk``:
    anchors of a row whose logits are held at a time."""

    kind: str = "cross-entropy"
    weights: str = "decay"
    gamma: float = 7.0
    alpha: float = 0.5
    eta: float = 3.0
    match: float = 0.0
    chunk: int = 32

    @property
    def needs_teacher(self) -> bool:
        """Whether the target's own hidden states are needed."""
        return self.kind != "cross-entropy" or self.match > 0


def default_gamma(block_size: int) -> float:
    """The paper's decay of the slots' weights, and what lies between."""
    return {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, block_size / 2.3)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """Of a batch; sums of several add up. ``loss`` and ``weight``; by slot [K]: labels seen, and of those predicted
    right; ``accepted`` and ``anchors``: how far blocks are right from their beginning, and how many there are."""

    loss: jax.Array
    weight: jax.Array
    seen: jax.Array
    right: jax.Array
    accepted: jax.Array
    anchors: jax.Array


def slot_weights(loss: Loss, log_q, learned):
    """float32 [..., K] for log-probabilities of the labels, 0 where not ``learned``."""
    k = learned.shape[-1]
    if loss.weights == "decay":
        return jnp.where(learned, jnp.exp(-jnp.arange(k) / loss.gamma), 0.0)
    q = jax.lax.stop_gradient((1 - loss.alpha) * jnp.exp(log_q) + loss.alpha)
    reached = jnp.cumprod(jnp.where(learned, q, 0.0), axis=-1)
    return jnp.where(learned, jnp.flip(jnp.cumsum(jnp.flip(reached, -1), -1), -1), 0.0)


def _losses(loss: Loss, logits, labels, teacher):
    """(losses, log-probabilities of the labels) [..., K] of float32 logits [..., K, V]."""
    total = jax.nn.logsumexp(logits, axis=-1)
    log_q = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0] - total
    if loss.kind == "cross-entropy":
        return -log_q, log_q
    teacher = jax.lax.stop_gradient(teacher)
    log_p = teacher - jax.nn.logsumexp(teacher, axis=-1, keepdims=True)
    p = jnp.exp(log_p)
    divergence = jnp.sum(p * (log_p - logits), axis=-1) + total
    if loss.kind == "kl":
        return divergence, log_q
    overlap = jnp.sum(jnp.minimum(p, jnp.exp(logits - total[..., None])), axis=-1)
    share = jax.lax.stop_gradient(jnp.exp(-loss.eta * overlap))
    return share * divergence + (1 - share) * (1 - overlap), log_q


@dataclass(frozen=True)
class Head:
    """The target's output matrix [V, H]. With ``kept`` int [N], token ids in ascending order, and their ``rows``
    [N, H], logits are of these and, in a last column, of the label where it is none of them: a softmax over the
    frequent tokens costs a fraction of one over all."""

    backend: Backend
    matrix: jax.Array
    kept: jax.Array | None = None
    rows: jax.Array | None = None

    @classmethod
    def over(cls, backend: Backend, matrix, kept=None) -> "Head":
        return cls(backend, matrix) if kept is None else cls(backend, matrix, jnp.asarray(kept), matrix[kept])

    def __call__(self, hidden, labels):
        """hidden [..., H], labels int [...] → float32 logits [..., V or N + 1], and the labels' columns [...]."""
        rows = self.matrix if self.kept is None else self.rows
        logits = project(self.backend, hidden, rows, dtype=jnp.float32)
        if self.kept is None:
            return logits, labels
        column = jnp.minimum(jnp.searchsorted(self.kept, labels), len(self.kept) - 1)
        is_kept = self.kept[column] == labels
        own = jnp.einsum("...h,...h->...", hidden, self.matrix[labels], preferred_element_type=jnp.float32)
        last = jnp.where(is_kept, NEVER, own)[..., None]
        return jnp.concatenate([logits, last], axis=-1), jnp.where(is_kept, column, len(self.kept))


def distance(states, teacher):
    """float32 [...]: squared distance of [..., H] to the target's, relative to the latter's square."""
    states, teacher = states.astype(jnp.float32), teacher.astype(jnp.float32)
    # Chunks are padded with zeros.
    return jnp.sum((states - teacher) ** 2, -1) / jnp.maximum(jnp.sum(teacher**2, -1), 1e-6)


def block_loss(loss: Loss, head: Head, states, labels, learned, teacher=None) -> Sums:
    """states [B, A, K, H] of the predicting slots; labels int [B, A, K], ``learned`` bool [B, A, K]: which of them
    count; teacher [B, A, K, H]: the target's hidden states that predict the labels.

    The chunks' logits are computed again for the gradient, and never lie side by side.
    """
    b, a, k, _ = states.shape
    size = min(loss.chunk, a)
    pad = -a % size

    def chunks(x):
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(b, -1, size, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def one(states, labels, learned, teacher):
        logits, columns = head(states, labels)
        taught = head(teacher, labels)[0] if loss.kind != "cross-entropy" else None
        losses, log_q = _losses(loss, logits, columns, taught)
        if loss.match:
            losses += loss.match * distance(states, teacher)
        weights = slot_weights(loss, log_q, learned)
        right = learned & (jnp.argmax(logits, axis=-1) == columns)
        led = jnp.cumprod(right.astype(jnp.float32), axis=-1)
        return Sums(
            jnp.sum(losses * weights),
            jnp.sum(weights),
            jnp.sum(learned, (0, 1), jnp.float32),
            jnp.sum(right, (0, 1), jnp.float32),
            jnp.sum(led),
            jnp.sum(learned[..., 0], dtype=jnp.float32),
        )

    def add(total, x):
        return jax.tree.map(jnp.add, total, one(*x)), None

    nothing = Sums(*(jnp.zeros(s) for s in ((), (), (k,), (k,), (), ())))
    xs = jax.tree.map(chunks, (states, labels, learned, teacher))
    return jax.lax.scan(add, nothing, xs)[0]

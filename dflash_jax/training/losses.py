"""Losses of drafter training: sums over the slots of blocks, with the vocabulary's logits in chunks.

Letters beyond `models.layers`: A anchors of a row, K = W - 1 slots of a block that predict.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dflash_jax.ops.backend import Backend
from dflash_jax.ops.linear import project

# The logit of a masked column. It is finite, so that its products with zeros are no NaN.
NEVER = -1e30


@dataclass(frozen=True)
class Loss:
    """The training loss.

    Attributes:
        kind: "cross-entropy" against the next tokens; "kl", forward, against the target's distributions; "hybrid", λ·KL
            + (1 - λ)·TV with λ = exp(-eta · acceptance rate) (arXiv 2602.23881).
        weights: "decay": exp(-(k - 1) / gamma) for slot k (arXiv 2602.06036). "d-pace": Σ_{m ≥ k} Π_{i ≤ m} q̃_i with
            q̃ = (1 - alpha)·q + alpha and q the drafter's probability of the label, a slot's share in the expected
            acceptance length.
        gamma: Decay of "decay", in slots.
        alpha: Smoothing of "d-pace".
        eta: Rate of "hybrid".
        match: Weight of the squared distance to the target's hidden states, relative to their square (as in arXiv
            2401.15077).
        chunk: Anchors of a row whose logits are in memory at a time.
    """

    kind: str = "cross-entropy"
    weights: str = "decay"
    gamma: float = 7.0
    alpha: float = 0.5
    eta: float = 3.0
    match: float = 0.0
    chunk: int = 32

    @property
    def needs_teacher(self) -> bool:
        """Whether the loss reads the target's hidden states."""
        return self.kind != "cross-entropy" or self.match > 0


# FastMTP's decay of an MTP head's steps (arXiv 2509.18362): 0.6 a step.
MTP_GAMMA = -1 / math.log(0.6)


def default_gamma(block_size: int) -> float:
    """The paper's decay of the slots' weights for a block size, in slots; interpolated for sizes not in the paper."""
    return {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, block_size / 2.3)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """Sums over a batch; sums of several batches add up.

    Attributes:
        loss: Weighted loss.
        weight: Sum of the weights.
        seen: Labels by slot, [K].
        right: Labels predicted correctly by slot, [K].
        accepted: Correct slots before the first wrong one, over all blocks.
        anchors: Blocks.
    """

    loss: jax.Array
    weight: jax.Array
    seen: jax.Array
    right: jax.Array
    accepted: jax.Array
    anchors: jax.Array


def slot_weights(loss: Loss, log_q, learned):
    """Weights of the slots.

    Args:
        loss: The loss.
        log_q: The drafter's log-probabilities of the labels, float32 [..., K].
        learned: Slots that count, bool [..., K].

    Returns:
        float32 [..., K], 0 where not ``learned``.
    """
    k = learned.shape[-1]
    if loss.weights == "decay":
        return jnp.where(learned, jnp.exp(-jnp.arange(k) / loss.gamma), 0.0)
    q = jax.lax.stop_gradient((1 - loss.alpha) * jnp.exp(log_q) + loss.alpha)
    reached = jnp.cumprod(jnp.where(learned, q, 0.0), axis=-1)
    return jnp.where(learned, jnp.flip(jnp.cumsum(jnp.flip(reached, -1), -1), -1), 0.0)


def _losses(loss: Loss, logits, labels, teacher):
    """(losses, log-probabilities of the labels) [..., K] from float32 logits [..., K, V]."""
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
    """The target's output matrix, over all tokens or over the frequent ones.

    Over N frequent tokens, logits have N + 1 columns: the last is the label's where the label is none of them. This
    softmax costs a fraction of one over all tokens.

    Attributes:
        backend: Where its products run.
        matrix: Output matrix [V, H].
        ids: Ids of the frequent tokens, int [N], ascending; None: all.
        rows: ``matrix[ids]`` [N, H].
    """

    backend: Backend
    matrix: jax.Array
    ids: jax.Array | None = None
    rows: jax.Array | None = None

    @classmethod
    def over(cls, backend: Backend, matrix, ids=None) -> "Head":
        """A head over ``ids`` int [N], ascending; None: over all tokens."""
        return cls(backend, matrix) if ids is None else cls(backend, matrix, jnp.asarray(ids), matrix[ids])

    def __call__(self, hidden, labels):
        """Logits of hidden states.

        Args:
            hidden: [..., H].
            labels: Token ids, int [...].

        Returns:
            float32 logits [..., V or N + 1], and the labels' columns [...].
        """
        rows = self.matrix if self.rows is None else self.rows
        logits = project(self.backend, hidden, rows, dtype=jnp.float32)
        if self.ids is None:
            return logits, labels
        column = jnp.minimum(jnp.searchsorted(self.ids, labels), len(self.ids) - 1)
        is_frequent = self.ids[column] == labels
        label_logit = jnp.einsum("...h,...h->...", hidden, self.matrix[labels], preferred_element_type=jnp.float32)
        last = jnp.where(is_frequent, NEVER, label_logit)[..., None]
        return jnp.concatenate([logits, last], axis=-1), jnp.where(is_frequent, column, len(self.ids))


def distance(states, teacher):
    """Squared distance of ``states`` [..., H] to ``teacher``, relative to the square of ``teacher``; float32 [...]."""
    states, teacher = states.astype(jnp.float32), teacher.astype(jnp.float32)
    # The minimum: chunks are padded with zeros.
    return jnp.sum((states - teacher) ** 2, -1) / jnp.maximum(jnp.sum(teacher**2, -1), 1e-6)


def block_loss(loss: Loss, head: Head, states, labels, learned, teacher=None, teacher_head: Head | None = None) -> Sums:
    """Loss and counts of blocks.

    The logits of a chunk are computed again for the gradient, so only one chunk's logits are in memory.

    Args:
        loss: The loss.
        head: The head that the drafter drafts with.
        states: Hidden states of the predicting slots [B, A, K, H].
        labels: Token ids int [B, A, K].
        learned: Labels that count, bool [B, A, K].
        teacher: The target's hidden states that predict the labels [B, A, K, H], for losses that need them.
        teacher_head: The target's head; None: ``head`` is.
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
        taught = (teacher_head or head)(teacher, labels)[0] if loss.kind != "cross-entropy" else None
        losses, log_q = _losses(loss, logits, columns, taught)
        if loss.match:
            losses += loss.match * distance(states, teacher)
        weights = slot_weights(loss, log_q, learned)
        right = learned & (jnp.argmax(logits, axis=-1) == columns)
        led_right = jnp.cumprod(right.astype(jnp.float32), axis=-1)
        return Sums(
            jnp.sum(losses * weights),
            jnp.sum(weights),
            jnp.sum(learned, (0, 1), jnp.float32),
            jnp.sum(right, (0, 1), jnp.float32),
            jnp.sum(led_right),
            jnp.sum(learned[..., 0], dtype=jnp.float32),
        )

    def add(total, x):
        return jax.tree.map(jnp.add, total, one(*x)), None

    nothing = Sums(*(jnp.zeros(s) for s in ((), (), (k,), (k,), (), ())))
    xs = jax.tree.map(chunks, (states, labels, learned, teacher))
    return jax.lax.scan(add, nothing, xs)[0]

"""Losses of drafter training: sums over the slots of blocks, with the vocabulary's logits in chunks.

A drafter with a selector has a second loss, of the choice among candidates after the true token before each. A Markov
head of DSpark has none: it changes the logits that the first loss is of.

Letters beyond `models.layers`: A anchors of a row, K = W - 1 slots of a block that predict.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dflash_jax.models.drafter import Drafter
from dflash_jax.models.selector import Candidates
from dflash_jax.ops.backend import Backend
from dflash_jax.ops.linear import project
from dflash_jax.ops.weights import QuantizedWeight, dense

# The logit of a masked column. It is finite, so that its products with zeros are no NaN.
NEVER = -1e30


@dataclass(frozen=True)
class Loss:
    """The training loss.

    Attributes:
        kind: "cross-entropy" against the next tokens; "kl", forward, against the target's distributions; "hybrid", λ·KL
            + (1 - λ)·TV with λ = exp(-eta · acceptance rate) (arXiv 2602.23881); "dspark", 0.1 · cross-entropy + 0.9 ·
            Σ|p - q| (arXiv 2607.05147).
        weights: "decay": exp(-(k - 1) / gamma) for slot k (arXiv 2602.06036). "d-pace": Σ_{m ≥ k} Π_{i ≤ m} q̃_i with
            q̃ = (1 - alpha)·q + alpha and q the drafter's probability of the label, a slot's share in the expected
            acceptance length.
        gamma: Decay of "decay", in slots.
        alpha: Smoothing of "d-pace".
        eta: Rate of "hybrid".
        match: Weight of the squared distance to the target's hidden states, relative to their square (as in arXiv
            2401.15077).
        chunk: Anchors of a row whose logits are in memory at a time.
        selector: Weight of a selector's loss.
        confidence: Weight of the loss of a head for the drafts' probabilities.
    """

    kind: str = "cross-entropy"
    weights: str = "decay"
    gamma: float = 7.0
    alpha: float = 0.5
    eta: float = 3.0
    match: float = 0.0
    chunk: int = 32
    selector: float = 1.0
    confidence: float = 1.0

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
        recalled: Labels among the candidates by slot, [K]; None without a selector.
        path_accepted: As ``accepted``, of the chain that the selector chooses, each slot after its own choice before
            it; None without a selector.
    """

    loss: jax.Array
    weight: jax.Array
    seen: jax.Array
    right: jax.Array
    accepted: jax.Array
    anchors: jax.Array
    recalled: jax.Array | None = None
    path_accepted: jax.Array | None = None

    @classmethod
    def nothing(cls, slots: int, has_selector: bool) -> "Sums":
        """Sums over no batch, of blocks with that many predicting slots."""
        zero, by_slot = jnp.zeros(()), jnp.zeros(slots)
        more = (by_slot, zero) if has_selector else (None, None)
        return cls(zero, zero, by_slot, by_slot, zero, zero, *more)


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
    if loss.kind == "dspark":
        return -0.1 * log_q + 0.9 * 2 * (1 - overlap), log_q
    share = jax.lax.stop_gradient(jnp.exp(-loss.eta * overlap))
    return share * divergence + (1 - share) * (1 - overlap), log_q


def _overlap(logits, teacher):
    """Σ min(p, q) of two distributions [..., V] given by logits: how often one draw can be accepted by the other."""
    return jnp.sum(jnp.minimum(jax.nn.softmax(logits, -1), jax.nn.softmax(teacher, -1)), axis=-1)


@dataclass(frozen=True)
class Head:
    """The target's output matrix, over all tokens or over the frequent ones.

    Over N frequent tokens, logits have N + 1 columns: the last is the label's where the label is none of them. This
    softmax costs a fraction of one over all tokens.

    Attributes:
        backend: Where its products run.
        matrix: Output matrix [V, H], an array or in few bits.
        ids: Ids of the frequent tokens, int [N], ascending; None: all.
        rows: ``matrix[ids]`` [N, H].
        scaled: Maps the logits of a drafter to those that it drafts with; None: they are these.
    """

    backend: Backend
    matrix: jax.Array | QuantizedWeight
    ids: jax.Array | None = None
    rows: jax.Array | QuantizedWeight | None = None
    scaled: Callable[[jax.Array], jax.Array] | None = None

    @classmethod
    def over(cls, backend: Backend, matrix, ids=None) -> "Head":
        """A head over ``ids`` int [N], ascending; None: over all tokens."""
        return cls(backend, matrix) if ids is None else cls(backend, matrix, jnp.asarray(ids), matrix[ids])

    def tokens(self, columns, labels):
        """Token ids of columns int [..., n] of the logits; ``labels`` int [...] as of `__call__`."""
        if self.ids is None:
            return columns
        return jnp.where(columns == len(self.ids), labels[..., None], self.ids[jnp.minimum(columns, len(self.ids) - 1)])

    def __call__(self, hidden, labels):
        """Logits of hidden states.

        Args:
            hidden: [..., H].
            labels: Token ids, int [...].

        Returns:
            float32 logits [..., V or N + 1], and the labels' columns [...].
        """
        rows = self.matrix if self.rows is None else self.rows
        scaled = self.scaled or (lambda logits: logits)
        logits = scaled(project(self.backend, hidden, rows, dtype=jnp.float32))
        if self.ids is None:
            return logits, labels
        column = jnp.minimum(jnp.searchsorted(self.ids, labels), len(self.ids) - 1)
        is_frequent = self.ids[column] == labels
        of_labels = dense(self.matrix[labels], hidden.dtype)
        label_logit = jnp.einsum("...h,...h->...", hidden, of_labels, preferred_element_type=jnp.float32)
        last = jnp.where(is_frequent, NEVER, scaled(label_logit))[..., None]
        return jnp.concatenate([logits, last], axis=-1), jnp.where(is_frequent, column, len(self.ids))


def distance(states, teacher):
    """Squared distance of ``states`` [..., H] to ``teacher``, relative to the square of ``teacher``; float32 [...]."""
    states, teacher = states.astype(jnp.float32), teacher.astype(jnp.float32)
    # The minimum: chunks are padded with zeros.
    return jnp.sum((states - teacher) ** 2, -1) / jnp.maximum(jnp.sum(teacher**2, -1), 1e-6)


@dataclass(frozen=True)
class Choice:
    """What chooses among candidates in blocks, and what it reads beside states.

    Attributes:
        drafter: The drafter, whose selector and confidence are trained.
        before: The true token before each slot, int [B, A, K].
    """

    drafter: Drafter
    before: jax.Array

    @property
    def is_markov(self) -> bool:
        """Whether the selector is a Markov head, which changes the logits of the loss."""
        return self.drafter.selector.spec.kind != "dflash2"


def _with_markov(choice: Choice, head: Head, states, logits, before, labels):
    """Logits [..., V or N + 1] with the Markov head's bias after the true tokens ``before`` [...]."""
    selector = choice.drafter.selector
    rows = selector.successor[...].astype(jnp.float32)
    gated = selector.gated(states, before[..., None])[..., 0, :]
    if head.ids is None:
        return logits + gated @ rows.T
    of_label = jnp.sum(gated * rows[labels], axis=-1, keepdims=True)
    return logits + jnp.concatenate([gated @ rows[head.ids].T, of_label], axis=-1)


def _choices(choice: Choice, head: Head, states, logits, taught, columns, before, labels, learned):
    """The choice among the candidates of the logits without a Markov head.

    A slot whose label is no candidate has no loss: a selector that learns to raise labels from outside, which are no
    candidates in decoding, chooses worse.

    Args:
        choice: The selector.
        head: What the logits are of.
        states: [B, a, K, H].
        logits: [B, a, K, V or N + 1].
        taught: The target's logits [B, a, K, V or N + 1], whose shares among the candidates are learned; None: the
            labels are.
        columns: The labels' columns, int [B, a, K].
        before: The true tokens before, int [B, a, K].
        labels: int [B, a, K].
        learned: bool [B, a, K].

    Returns:
        The losses [B, a, K]; labels among the candidates, [K]; and correct slots of the walked chains before the first
        wrong one.
    """
    selector = choice.drafter.selector
    count = min(selector.spec.top_k, logits.shape[-1])
    _, places = jax.lax.top_k(jax.lax.stop_gradient(logits), count)
    is_label = places == columns[..., None]
    is_in = is_label.any(-1)
    after = selector.successor[...][head.tokens(places, labels)].astype(jnp.float32)
    gated = selector.gated(states, before[..., None])[..., 0, :]
    top = jnp.take_along_axis(logits, places, axis=-1)
    log_q = jax.nn.log_softmax(top + jnp.einsum("...r,...kr->...k", gated, after), axis=-1)
    right = is_label if taught is None else jax.nn.softmax(jnp.take_along_axis(taught, places, axis=-1), axis=-1)
    losses = -jnp.sum(jnp.where(is_in[..., None], jax.lax.stop_gradient(right) * log_q, 0.0), axis=-1)

    def flat(x):
        return x.reshape(-1, *x.shape[2:])

    rows = flat(head.tokens(places, labels))
    candidates = Candidates(rows, flat(top), jnp.ones(len(rows)))
    tokens, _ = jax.lax.stop_gradient(selector.choose(flat(states), flat(before)[:, 0], candidates, rows))
    led_right = jnp.cumprod((tokens == flat(labels)) & flat(learned), axis=-1, dtype=jnp.float32)
    return losses, jnp.sum(is_in & learned, (0, 1), jnp.float32), jnp.sum(led_right)


def _confidence_losses(drafter: Drafter, states, before, probability):
    """Cross-entropy of the drafts' probabilities with what ``probability`` [...] says of them, [...]."""
    said = jnp.clip(drafter.probabilities(states, before), 1e-6, 1 - 1e-6)
    probability = jax.lax.stop_gradient(probability)
    return -(probability * jnp.log(said) + (1 - probability) * jnp.log1p(-said))


def block_loss(
    loss: Loss,
    head: Head,
    states,
    labels,
    learned,
    teacher=None,
    teacher_head: Head | None = None,
    choice: Choice | None = None,
) -> Sums:
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
        choice: What chooses among candidates; None: each slot takes its own best token.
    """
    b, a, k, _ = states.shape
    size = min(loss.chunk, a)
    pad = -a % size

    def chunks(x):
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(b, -1, size, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def one(states, labels, learned, teacher, before):
        logits, columns = head(states, labels)
        plain, is_markov = logits, choice is not None and choice.is_markov
        if choice is not None and is_markov:
            logits = _with_markov(choice, head, states, logits, before, labels)
        taught = (teacher_head or head)(teacher, labels)[0] if loss.kind != "cross-entropy" else None
        losses, log_q = _losses(loss, logits, columns, taught)
        if loss.match:
            losses += loss.match * distance(states, teacher)
        more = (None, None)
        if choice is not None:
            chosen, *more = _choices(choice, head, states, plain, taught, columns, before, labels, learned)
            losses += 0.0 if is_markov else loss.selector * chosen
            if choice.drafter.config.confidence is not None:
                right = jnp.exp(log_q) if taught is None else _overlap(logits, taught)
                losses += loss.confidence * _confidence_losses(choice.drafter, states, before, right)
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
            *more,
        )

    def add(total, x):
        return jax.tree.map(jnp.add, total, one(*x)), None

    before = None if choice is None else choice.before
    xs = jax.tree.map(chunks, (states, labels, learned, teacher, before))
    return jax.lax.scan(add, Sums.nothing(k, choice is not None), xs)[0]

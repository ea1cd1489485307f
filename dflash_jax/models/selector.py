"""Choosing a chain of drafts from candidates, each judged with the draft before it: the heads of DFlash2 and DSpark.

A drafter's own logits judge every place alone. A *selector* takes the k best tokens of each place as its candidates, and
adds a score for each pair of a candidate and its predecessor. All pairs of a block are scored at once. The choice at a
place is then a map from the k possible predecessors to the k candidates, and the maps are composed: no loop of small
steps.

Dimension letters: B sequences, L drafts, K candidates, P predecessors (K), R rank, H hidden size, V vocabulary.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dflash_jax.models.config import SelectorSpec
from dflash_jax.models.layers import constant, normal
from dflash_jax.ops.backend import Backend
from dflash_jax.ops.linear import project


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Candidates:
    """The best tokens of each place, the best first.

    Attributes:
        tokens: Token ids, int [B, L, K].
        scores: What a draw compares: logits for greedy sequences, else processed logits with the noise of the draw,
            float32 [B, L, K].
        scale: What a score of a pair, which is on the logits' scale, is multiplied with, float32 [B]: 1 for greedy
            sequences, else 1 / temperature.
    """

    tokens: Int[Array, "B L K"]
    scores: Float[Array, "B L K"]
    scale: Float[Array, " B"]

    def predecessors(self, last: Int[Array, " B"]) -> Int[Array, "B L K"]:
        """The tokens that may precede each place: the candidates of the place before, and ``last`` int [B] at first."""
        first = jnp.broadcast_to(last[:, None, None], self.tokens[:, :1].shape)
        return jnp.concatenate([first, self.tokens[:, :-1]], axis=1)

    def walk(self, pairs: Float[Array, "B L P K"]) -> tuple[Int[Array, "B L"], Float[Array, "B L"]]:
        """The chain that takes, at each place, the best candidate after the one chosen before.

        Args:
            pairs: Scores of predecessor and candidate, [B, L, P, K].

        Returns:
            Tokens int [B, L], and the share that each has in a softmax over the candidates of its place, float32
            [B, L].
        """
        total = self.scores[:, :, None] + self.scale[:, None, None, None] * pairs.astype(jnp.float32)
        best = jnp.argmax(total, axis=-1)
        # All predecessors of the first place are the same: any index begins.
        chosen = jax.lax.associative_scan(lambda a, b: jnp.take_along_axis(b, a, axis=-1), best, axis=1)[..., :1]
        before = jnp.concatenate([jnp.zeros_like(chosen[:, :1]), chosen[:, :-1]], axis=1)
        rows = jnp.take_along_axis(total, before[..., None], axis=2)[:, :, 0]
        share = jnp.take_along_axis(jax.nn.softmax(rows, axis=-1), chosen, axis=-1)
        return jnp.take_along_axis(self.tokens, chosen, axis=-1)[..., 0], share[..., 0]


class Selector(nnx.Module):
    """DFlash2's selector: the score of a pair is Σ_r predecessor_r · gate_r · successor_r, with a gate of the place.

    Attributes:
        spec: Its configuration.
        backend: Where operations run.
        hidden: Projection of hidden states to gates, [R, H].
        predecessor: A row for each token as a predecessor, [V, R].
        successor: A row for each token as a candidate, [V, R].
    """

    def __init__(
        self,
        spec: SelectorSpec,
        hidden: int,
        vocab: int,
        rngs: nnx.Rngs | None,
        dtype: DTypeLike,
        backend: Backend,
    ):
        self.spec, self.backend = spec, backend
        self.hidden = normal(rngs, (spec.rank, hidden), dtype)
        self.predecessor = normal(rngs, (vocab, spec.rank), dtype)
        # Without successors it changes nothing: a drafter that gets a selector drafts as before.
        self.successor = constant(rngs, (vocab, spec.rank), dtype, 0.0)

    def matrices(self) -> dict[str, int]:
        """Parameter → number of its contracted last axes, for `packing.pack_weights`."""
        return {"hidden": 1}

    def pairs(
        self, hidden: Float[Array, "B L H"], predecessors: Int[Array, "B L P"], candidates: Int[Array, "B L K"]
    ) -> Float[Array, "B L P K"]:
        """Scores of predecessors and candidates.

        Args:
            hidden: Hidden states of the places after the final norm, [B, L, H].
            predecessors: Token ids, int [B, L, P].
            candidates: Token ids, int [B, L, K].

        Returns:
            float32 [B, L, P, K].
        """
        gates = project(self.backend, hidden, self.hidden[...], dtype=jnp.float32)
        before = self.predecessor[...][predecessors].astype(jnp.float32) * gates[:, :, None]
        after = self.successor[...][candidates].astype(jnp.float32)
        return jnp.einsum("blpr,blkr->blpk", before, after)

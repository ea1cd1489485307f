"""Choosing a chain of drafts from candidates, each judged with the draft before it: the heads of DFlash2 and DSpark.

A drafter's own logits judge every place alone. A *selector* takes the k best tokens of each place as its candidates,
and adds a score for each pair of a candidate and its predecessor. All pairs of a block are scored at once. The choice
at a place is then a map from the k possible predecessors to the k candidates, and the maps are composed: no loop of
small steps.

Dimension letters: B sequences, L drafts, K candidates, P predecessors (K), R rank, H hidden size, V vocabulary.
"""

from dataclasses import dataclass, replace

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
    """The score of a pair: Σ_r predecessor_r · gate_r · successor_r, with a gate as `SelectorSpec.kind` says.

    Sources: DFlash2 as NeMo Automodel and z-lab write it; DSpark's Markov heads, arXiv 2607.05147.

    Attributes:
        spec: Its configuration.
        backend: Where operations run.
        predecessor: A row for each token as a predecessor, [V, R].
        successor: A row for each token that is drafted, [N, R].
        gate: Projection to gates: "dflash2": of the state, [R, H]; "gated": of state and predecessor's row,
            [R, H + R]; "rnn": of a recurrent state, the predecessor's row and the state, [3 R, 2 R + H]; absent in
            "vanilla".
        gate_bias: [R] or [3 R]; of "gated" and "rnn".
    """

    def __init__(
        self,
        spec: SelectorSpec,
        hidden: int,
        vocab: int,
        drafted: int,
        rngs: nnx.Rngs | None,
        dtype: DTypeLike,
        backend: Backend,
    ):
        self.spec, self.backend = spec, backend
        rank = spec.rank
        self.predecessor = normal(rngs, (vocab, rank), dtype)
        # Without successors it changes nothing: a drafter that gets a selector drafts as before.
        self.successor = constant(rngs, (drafted, rank), dtype, 0.0)
        if shape := spec.gate_shape(hidden):
            self.gate = normal(rngs, shape, dtype)
            if spec.kind != "dflash2":
                self.gate_bias = constant(rngs, shape[:1], dtype, 0.0)

    def matrices(self) -> dict[str, int]:
        """Parameter → number of its contracted last axes, for `packing.pack_weights`."""
        return {"gate": 1} if self.spec.kind == "dflash2" else {}

    def choose(
        self, hidden: Float[Array, "B L H"], last: Int[Array, " B"], candidates: Candidates, rows: Int[Array, "B L K"]
    ) -> tuple[Int[Array, "B L"], Float[Array, "B L"]]:
        """Chooses the drafts of a block.

        Args:
            hidden: Hidden states of their places after the final norm, [B, L, H].
            last: The last known token, int [B].
            candidates: The candidates.
            rows: The candidates' rows of `successor`, int [B, L, K].

        Returns:
            As `Candidates.walk`.
        """
        if self.spec.kind == "rnn":
            after = self.successor[...][rows].astype(jnp.float32)
            return self._run(hidden.astype(jnp.float32), last, candidates, after)
        before = self.gated(hidden, candidates.predecessors(last))
        after = self.successor[...][rows].astype(jnp.float32)
        return candidates.walk(jnp.einsum("blpr,blkr->blpk", before, after))

    def gated(self, hidden: Float[Array, "*B H"], predecessors: Int[Array, "*B P"]) -> Float[Array, "*B P R"]:
        """Rows of predecessors times their gates: a pair's score is the product with its successor's row.

        Args:
            hidden: Hidden states of the places after the final norm, [..., H].
            predecessors: Token ids, int [..., P].

        Returns:
            float32 [..., P, R]; not of the kind "rnn".
        """
        before = self.predecessor[...][predecessors].astype(jnp.float32)
        if self.spec.kind == "vanilla":
            return before
        if self.spec.kind == "dflash2":
            return before * project(self.backend, hidden, self.gate[...], dtype=jnp.float32)[..., None, :]
        of_state, of_row = jnp.split(self.gate[...].astype(jnp.float32), [hidden.shape[-1]], axis=1)
        gates = (hidden.astype(jnp.float32) @ of_state.T)[..., None, :] + before @ of_row.T
        return before * jax.nn.sigmoid(gates + self.gate_bias[...].astype(jnp.float32))

    def _run(
        self, hidden: Float[Array, "B L H"], last: Int[Array, " B"], candidates: Candidates, after: Array
    ) -> tuple[Int[Array, "B L"], Float[Array, "B L"]]:
        """`choose` with a recurrent state, one place after another: its maps depend on all tokens before them."""
        joint, bias = self.gate[...].astype(jnp.float32), self.gate_bias[...].astype(jnp.float32)
        state, token = jnp.zeros((len(last), self.spec.rank)), last
        tokens, shares = [], []
        for place in range(hidden.shape[1]):
            row = self.predecessor[...][token].astype(jnp.float32)
            mixed = jnp.concatenate([state, row, hidden[:, place]], axis=-1) @ joint.T + bias
            keep, new, out = jnp.split(mixed, 3, axis=-1)
            keep = jax.nn.sigmoid(keep)
            state = keep * state + (1 - keep) * jnp.tanh(new)
            pairs = jnp.einsum("br,bkr->bk", jnp.tanh(out), after[:, place])
            at = slice(place, place + 1)
            here = replace(candidates, tokens=candidates.tokens[:, at], scores=candidates.scores[:, at])
            token, share = here.walk(pairs[:, None, None])
            token = token[:, 0]
            tokens.append(token)
            shares.append(share)
        return jnp.stack(tokens, axis=1), jnp.concatenate(shares, axis=1)

"""A training step of the drafter: the target's features, the blocks' loss, gradients over all devices, an update.

The target runs as in decoding, each device on its own shard. Drafter and loss are written for whole arrays, which XLA
divides over the mesh: sums are sums over all devices, so that a step does not depend on how many there are.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dflash_jax.models.config import DraftConfig
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.drafter import Drafter
from dflash_jax.parallel.sharding import DATA, Layout, parameter_paths, parameter_specs
from dflash_jax.training.blocks import at, block_states, sample_anchors
from dflash_jax.training.losses import Head, Loss, Sums, block_loss

ROWS = PartitionSpec(DATA)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Rows of packed documents: tokens int [B, T]; loss_mask bool [B, T], which of them may be learned from; starts
    int [B, T], where the document of each begins. From a cache of the target's features: features [B, T, taps, H], and
    hidden [B, T, H] after its final norm where a loss needs them; None: the target computes them."""

    tokens: jax.Array
    loss_mask: jax.Array
    starts: jax.Array
    features: jax.Array | None = None
    hidden: jax.Array | None = None


@dataclass(frozen=True)
class Recipe:
    """What a step does with a batch. ``slots``: the blocks' width; ``anchors`` of a row; ``dtype`` of the drafter's
    arithmetic, its parameters being float32."""

    loss: Loss
    anchors: int
    slots: int
    dtype: str = "float32"


def batch_sums(drafter: Drafter, embed: Callable, head: Head, batch: Batch, key, recipe: Recipe) -> Sums:
    """Loss and counts of a batch that has its features. ``embed``, ``head``: the target's."""
    tokens, w = batch.tokens, recipe.slots
    where, valid = sample_anchors(key, batch.loss_mask, batch.starts, recipe.anchors)
    block = jnp.full((*where.shape, w), drafter.config.mask_token_id, tokens.dtype).at[..., 0].set(at(tokens, where))
    states = block_states(drafter, batch.features, embed(block), where, batch.starts)
    places = where[..., None] + jnp.arange(1, w)
    inside = places < tokens.shape[1]
    places = jnp.minimum(places, tokens.shape[1] - 1)
    same = at(batch.starts, places) == at(batch.starts, where)[..., None]
    learned = inside & same & at(batch.loss_mask, places) & valid[..., None]
    # What cannot be reached is not learned: a block ends where its document's response does.
    learned = jnp.cumprod(learned, axis=-1, dtype=jnp.int32) > 0
    teacher = at(batch.hidden, places - 1) if recipe.loss.needs_teacher else None
    return block_loss(recipe.loss, head, states[:, :, 1:], at(tokens, places), learned, teacher)


def spread(shape: tuple[int, ...], spec: PartitionSpec, layout: Layout) -> PartitionSpec:
    """``spec``, and over the data axis the first dimension that is whole and divisible: for parameters and what an
    optimiser keeps of them."""
    cuts = [*spec, *[None] * (len(shape) - len(spec))]
    if layout.data > 1 and math.prod(shape) >= 2**16:
        for i, (size, cut) in enumerate(zip(shape, cuts, strict=True)):
            if cut is None and size % layout.data == 0:
                cuts[i] = DATA
                break
    return PartitionSpec(*cuts)


class Trainer:
    """Steps on one pair over a mesh. ``target`` may be abstract: then steps can be lowered for devices that are not
    there. ``vocabulary`` int [N], ascending: the tokens that the loss is over (None: all)."""

    def __init__(
        self,
        target: Decoder,
        config: DraftConfig,
        recipe: Recipe,
        update: optax.GradientTransformation,
        mesh: Mesh | None = None,
        vocabulary: np.ndarray | None = None,
    ):
        self.target, self.config, self.recipe, self.update = target, config, recipe, update
        self.vocabulary = vocabulary
        self.layout, self.mesh = target.layout, mesh or target.layout.mesh()
        self.backend = target.backend
        self._structure, self._specs = jax.tree.structure(target), parameter_specs(target)
        self.leaves = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding(s))
            if isinstance(x, jax.ShapeDtypeStruct)
            else jax.device_put(x, self.sharding(s))
            for x, s in zip(jax.tree.leaves(target), self._specs, strict=True)
        ]
        self.step = jax.jit(self._step, donate_argnums=0)

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def shardings(self) -> tuple:
        """Of (drafter, optimiser state), in their shapes."""
        cut = Drafter(self.config, rngs=None, layout=self.layout, backend=self.backend)
        leaves, structure = jax.tree.flatten(Drafter(self.config, rngs=None, backend=self.backend))
        specs = [spread(x.shape, s, self.layout) for x, s in zip(leaves, parameter_specs(cut), strict=True)]
        drafter, cuts = jax.tree.unflatten(structure, leaves), [self.sharding(s) for s in specs]
        # What an optimiser keeps of a parameter has its name at the end of a longer one.
        named = dict(zip(parameter_paths(drafter), cuts, strict=True))
        state, whole = jax.eval_shape(self.update.init, drafter), self.sharding(PartitionSpec())
        kept = [
            next((cut for name, cut in named.items() if path.endswith("." + name) and leaf.ndim), whole)
            for path, leaf in zip(parameter_paths(state), jax.tree.leaves(state), strict=True)
        ]
        return jax.tree.unflatten(structure, cuts), jax.tree.unflatten(jax.tree.structure(state), kept)

    def start(self, drafter: Drafter) -> tuple:
        """(drafter, optimiser state) at its beginning, on the mesh."""
        drafter = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), drafter)
        return jax.jit(lambda d: (d, self.update.init(d)), out_shardings=self.shardings())(drafter)

    def on_host(self, drafter: Drafter) -> Drafter:
        """All of it, on every host."""
        return jax.device_get(jax.jit(lambda d: d, out_shardings=self.sharding(PartitionSpec()))(drafter))

    def features(self, leaves, tokens, starts):
        """(hidden [B, T, H] after the final norm, features [B, T, taps, H]) of the frozen target."""

        def run(leaves, tokens, starts):
            return jax.tree.unflatten(self._structure, leaves)(tokens, self.config.target_layer_ids, starts)

        specs = (self._specs, ROWS, ROWS)
        return jax.shard_map(run, mesh=self.mesh, in_specs=specs, out_specs=(ROWS, ROWS), check_vma=False)(
            leaves, tokens, starts
        )

    def _borrowed(self, leaves) -> tuple[Callable, Head]:
        """The target's embedding and head, over whole arrays."""
        target = jax.tree.unflatten(self._structure, leaves)
        table = target.embed[...]
        head = table if target.config.tied_embeddings else target.head[...]
        return lambda tokens: table[tokens], Head.over(target.backend, head, self.vocabulary)

    def sums(self, drafter: Drafter, leaves, batch: Batch, key) -> Sums:
        """Of one batch, differentiable in the drafter."""
        if batch.features is None:
            hidden, features = jax.lax.stop_gradient(self.features(leaves, batch.tokens, batch.starts))
            batch = replace(batch, features=features, hidden=hidden)
        low = jax.tree.map(lambda x: x.astype(self.recipe.dtype), drafter)
        return batch_sums(low, *self._borrowed(leaves), batch, key, self.recipe)

    def gradients(self, drafter: Drafter, leaves, batches: Batch, key) -> tuple:
        """(gradients of the mean loss, Sums) over ``batches``, whose arrays have a leading axis of micro-batches."""

        def one(drafter, batch, key):
            sums = self.sums(drafter, leaves, batch, key)
            return sums.loss, sums

        def add(total, x):
            batch, i = x
            (_, sums), grads = jax.value_and_grad(one, has_aux=True)(drafter, batch, jax.random.fold_in(key, i))
            return jax.tree.map(jnp.add, total, (grads, sums)), None

        count = batches.tokens.shape[0]
        k = self.recipe.slots - 1
        nothing = Sums(*(jnp.zeros(s) for s in ((), (), (k,), (k,), (), ())))
        total = jax.tree.map(jnp.zeros_like, drafter), nothing
        if count == 1:
            (grads, sums), _ = add(total, (jax.tree.map(lambda x: x[0], batches), 0))
        else:
            (grads, sums), _ = jax.lax.scan(add, total, (batches, jnp.arange(count)))
        return jax.tree.map(lambda g: g / jnp.maximum(sums.weight, 1e-6), grads), sums

    def _step(self, state: tuple, leaves, batches: Batch, key) -> tuple:
        """((drafter, optimiser state), Sums, norm of the gradients)."""
        drafter, kept = state
        grads, sums = self.gradients(drafter, leaves, batches, key)
        updates, kept = self.update.update(grads, kept, drafter)
        state = optax.apply_updates(drafter, updates), kept
        return jax.lax.with_sharding_constraint(state, self.shardings()), sums, optax.global_norm(grads)

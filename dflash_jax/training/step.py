"""A training step of the drafter: the target's features, the blocks' loss, gradients over all devices, an update.

The target runs as in decoding, each device on its own shard. Drafter and loss are written for whole arrays, which XLA
divides over the mesh. Sums are sums over all devices, so a step's result does not depend on their number.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dflash_jax.decoding.prefill import MediaChunk
from dflash_jax.models.config import DraftConfig
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.drafters import abstract_drafter
from dflash_jax.models.layers import with_backend
from dflash_jax.models.mtp import Mtp
from dflash_jax.models.mtp_config import MtpConfig
from dflash_jax.ops.backend import XLA
from dflash_jax.parallel.sharding import DATA, ONE_DEVICE, Layout, parameter_paths, parameter_specs
from dflash_jax.training.blocks import at, block_states, sample_anchors
from dflash_jax.training.losses import Choice, Head, Loss, Sums, block_loss
from dflash_jax.training.optimiser import in_part
from dflash_jax.training.recurrence import can_begin, step_states

ROWS = PartitionSpec(DATA)
D = TypeVar("D", Drafter, Mtp)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Rows of packed documents.

    Attributes:
        tokens: Token ids, int [B, T].
        loss_mask: Tokens that may be learned from, bool [B, T].
        starts: First token of each token's document, int [B, T].
        features: The target's features [B, T, taps, H] from a cache; None: the step computes them.
        hidden: The target's hidden states after the final norm [B, T, H] from a cache, where the loss needs them.
        media: Images and videos of the rows, for the target; None: none, or the features have them.
    """

    tokens: jax.Array
    loss_mask: jax.Array
    starts: jax.Array
    features: jax.Array | None = None
    hidden: jax.Array | None = None
    media: MediaChunk | None = None


@dataclass(frozen=True)
class Recipe:
    """What a step computes.

    Attributes:
        loss: The loss.
        anchors: Blocks of a row.
        slots: Slots of a block.
        dtype: Dtype of the drafter's arithmetic; parameters are float32.
        learns_body: Whether parameters of no part (`in_part`) have gradients.
    """

    loss: Loss
    anchors: int
    slots: int
    dtype: str = "float32"
    learns_body: bool = True


def batch_sums(
    drafter: Drafter | Mtp,
    embed: Callable,
    head: Head,
    batch: Batch,
    key,
    recipe: Recipe,
    teacher_head: Head | None = None,
) -> Sums:
    """Loss and counts of a batch that has its features.

    Args:
        drafter: The drafter, in the dtype of the arithmetic.
        embed: The embedding that the drafter reads, token ids → [..., H].
        head: The head that it drafts with.
        batch: The batch.
        key: A JAX random key for the anchors.
        recipe: The recipe.
        teacher_head: The target's head; None: ``head`` is.
    """
    tokens, slots = batch.tokens, recipe.slots
    anchors, valid = sample_anchors(key, batch.loss_mask, batch.starts, recipe.anchors)
    if isinstance(drafter, Mtp):
        valid = valid & can_begin(anchors, batch.starts)
        states = step_states(drafter, batch.features, embed, tokens, anchors, batch.starts, slots - 1)
    else:
        block = (
            jnp.full((*anchors.shape, slots), drafter.config.mask_token_id, tokens.dtype)
            .at[..., 0]
            .set(at(tokens, anchors))
        )
        states = block_states(drafter, batch.features, embed(block), anchors, batch.starts)[:, :, 1:]
    places = anchors[..., None] + jnp.arange(1, slots)
    inside = places < tokens.shape[1]
    places = jnp.minimum(places, tokens.shape[1] - 1)
    same = at(batch.starts, places) == at(batch.starts, anchors)[..., None]
    learned = inside & same & at(batch.loss_mask, places) & valid[..., None]
    # A block ends at the first slot that is not learned: decoding never reaches slots after it.
    learned = jnp.cumprod(learned, axis=-1, dtype=jnp.int32) > 0
    teacher = at(batch.hidden, places - 1) if recipe.loss.needs_teacher else None
    choice = None
    if isinstance(drafter, Drafter) and drafter.config.selector is not None:
        choice = Choice(drafter, at(tokens, places - 1))
    return block_loss(recipe.loss, head, states, at(tokens, places), learned, teacher, teacher_head, choice)


def spread(shape: tuple[int, ...], spec: PartitionSpec, layout: Layout) -> PartitionSpec:
    """``spec`` with its first unsharded, divisible dimension over the data axis, for large arrays.

    It applies to parameters and to the arrays that an optimiser keeps for them.
    """
    axes = [*spec, *[None] * (len(shape) - len(spec))]
    if layout.data > 1 and math.prod(shape) >= 2**16:
        for i, (size, axis) in enumerate(zip(shape, axes, strict=True)):
            if axis is None and size % layout.data == 0:
                axes[i] = DATA
                break
    return PartitionSpec(*axes)


class Trainer:
    """Training steps for one pair over a mesh.

    Attributes:
        target: The target. An abstract one lets steps be lowered for absent devices.
        config: The drafter's configuration.
        taps: Layers of the target whose outputs the drafter reads.
        recipe: What a step computes.
        update: The optimiser.
        vocabulary: Tokens of the loss, int [N], ascending; None: all.
        layout: The target's layout.
        mesh: The devices.
        leaves: The target's arrays on the mesh; arguments of `step`.
        step: ``step(state, leaves, batches, key)`` → (state, Sums, norm of the gradients); donates ``state``.
    """

    def __init__(
        self,
        target: Decoder,
        config: DraftConfig | MtpConfig,
        recipe: Recipe,
        update: optax.GradientTransformation,
        mesh: Mesh | None = None,
        vocabulary: np.ndarray | None = None,
    ):
        self.target, self.config, self.recipe, self.update = target, config, recipe, update
        self.vocabulary = vocabulary
        self.layout, self.mesh = target.layout, mesh or target.layout.mesh()
        # A mixture of experts has a gradient in its reference form.
        self.backend = XLA if isinstance(config, MtpConfig) else target.backend
        self.taps = abstract_drafter(config).taps
        self._structure, self._specs = jax.tree.structure(target), parameter_specs(target)
        self.leaves = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding(s))
            if isinstance(x, jax.ShapeDtypeStruct)
            else jax.device_put(x, self.sharding(s))
            for x, s in zip(jax.tree.leaves(target), self._specs, strict=True)
        ]
        self.step = jax.jit(self._step, donate_argnums=0)

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """The sharding of ``spec`` on the mesh."""
        return NamedSharding(self.mesh, spec)

    def shardings(self) -> tuple:
        """Shardings of (drafter, optimiser state), in their structure."""
        sharded = self._abstract(self.layout)
        leaves, structure = jax.tree.flatten(self._abstract())
        specs = [spread(x.shape, s, self.layout) for x, s in zip(leaves, parameter_specs(sharded), strict=True)]
        drafter, shardings = jax.tree.unflatten(structure, leaves), [self.sharding(s) for s in specs]
        # The path of an optimiser's array ends with the path of its parameter.
        named = dict(zip(parameter_paths(drafter), shardings, strict=True))
        state, replicated = jax.eval_shape(self.update.init, drafter), self.sharding(PartitionSpec())
        state_shardings = [
            next((sharded for name, sharded in named.items() if path.endswith("." + name) and leaf.ndim), replicated)
            for path, leaf in zip(parameter_paths(state), jax.tree.leaves(state), strict=True)
        ]
        return jax.tree.unflatten(structure, shardings), jax.tree.unflatten(jax.tree.structure(state), state_shardings)

    def abstract_state(self) -> tuple:
        """Shapes and dtypes of (drafter, optimiser state)."""
        return jax.eval_shape(lambda d: (d, self.update.init(d)), self._abstract())

    def _abstract(self, layout: Layout = ONE_DEVICE) -> Drafter | Mtp:
        return abstract_drafter(self.config, layout=layout, backend=self.backend)

    def start(self, drafter: Drafter | Mtp) -> tuple:
        """(drafter, optimiser state) at step 0, on the mesh."""
        drafter = with_backend(drafter, self.backend)
        drafter = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), drafter)
        return jax.jit(lambda d: (d, self.update.init(d)), out_shardings=self.shardings())(drafter)

    def on_host(self, drafter: D) -> D:
        """The whole drafter as NumPy arrays, on every host."""
        return jax.device_get(jax.jit(lambda d: d, out_shardings=self.sharding(PartitionSpec()))(drafter))

    def features(self, leaves, tokens, starts, media: MediaChunk | None = None):
        """Runs the frozen target.

        Args:
            leaves: The target's arrays.
            tokens: int [B, T].
            starts: First token of each token's document, int [B, T].
            media: Images and videos among the tokens; its rotary positions are those within each document.

        Returns:
            Hidden states after the final norm [B, T, H], and features [B, T, taps, H].
        """

        def run(leaves, tokens, starts, media):
            target = jax.tree.unflatten(self._structure, leaves)
            inputs, positions = (tokens, None) if media is None else media.inputs(target, tokens)
            return target(inputs, self.taps, starts, positions)

        specs = (self._specs, ROWS, ROWS, ROWS)
        return jax.shard_map(run, mesh=self.mesh, in_specs=specs, out_specs=(ROWS, ROWS), check_vma=False)(
            leaves, tokens, starts, media
        )

    def _target_heads(self, leaves) -> tuple[Callable, Head]:
        """The target's embedding and head, over whole arrays."""
        target = jax.tree.unflatten(self._structure, leaves)
        table = target.embed[...]
        return lambda tokens: table[tokens], Head.over(target.backend, target.head_weight, self.vocabulary)

    def sums(self, drafter: Drafter | Mtp, leaves, batch: Batch, key) -> Sums:
        """Sums of one batch, differentiable in the drafter."""
        if batch.features is None:
            hidden, features = jax.lax.stop_gradient(self.features(leaves, batch.tokens, batch.starts, batch.media))
            batch = replace(batch, features=features, hidden=hidden)
        low = jax.tree.map(lambda x: x.astype(self.recipe.dtype), drafter)
        if not self.recipe.learns_body:
            low = jax.tree.map(lambda x, is_part: x if is_part else jax.lax.stop_gradient(x), low, in_part(low))
        embed, teacher_head = self._target_heads(leaves)
        head, config = teacher_head, self.config
        # Tables of the drafter's own are trained as its other weights.
        if isinstance(config, DraftConfig) and config.own_embedding:
            embed = low.embed[...].__getitem__
        if isinstance(config, DraftConfig) and config.own_head:
            head = Head.over(self.backend, low.head[...], self.vocabulary)
        if isinstance(low, Drafter):
            head = replace(head, scaled=low.scaled)
        return batch_sums(low, embed, head, batch, key, self.recipe, teacher_head)

    def gradients(self, drafter: Drafter | Mtp, leaves, batches: Batch, key) -> tuple:
        """Gradients over micro-batches.

        Args:
            drafter: The drafter, float32.
            leaves: The target's arrays.
            batches: Arrays with a leading axis of micro-batches.
            key: A JAX random key.

        Returns:
            Gradients of the mean loss, and the Sums.
        """

        def one(drafter, batch, key):
            sums = self.sums(drafter, leaves, batch, key)
            return sums.loss, sums

        def add(total, x):
            batch, i = x
            (_, sums), grads = jax.value_and_grad(one, has_aux=True)(drafter, batch, jax.random.fold_in(key, i))
            return jax.tree.map(jnp.add, total, (grads, sums)), None

        count = batches.tokens.shape[0]
        k = self.recipe.slots - 1
        has_selector = isinstance(self.config, DraftConfig) and self.config.selector is not None
        total = jax.tree.map(jnp.zeros_like, drafter), Sums.nothing(k, has_selector)
        if count == 1:
            (grads, sums), _ = add(total, (jax.tree.map(lambda x: x[0], batches), 0))
        else:
            (grads, sums), _ = jax.lax.scan(add, total, (batches, jnp.arange(count)))
        return jax.tree.map(lambda g: g / jnp.maximum(sums.weight, 1e-6), grads), sums

    def _step(self, state: tuple, leaves, batches: Batch, key) -> tuple:
        """((drafter, optimiser state), Sums, norm of the gradients)."""
        drafter, optimiser_state = state
        grads, sums = self.gradients(drafter, leaves, batches, key)
        updates, optimiser_state = self.update.update(grads, optimiser_state, drafter)
        state = optax.apply_updates(drafter, updates), optimiser_state
        return jax.lax.with_sharding_constraint(state, self.shardings()), sums, optax.global_norm(grads)

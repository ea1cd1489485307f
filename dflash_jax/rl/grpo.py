"""GRPO (arXiv 2402.03300) on one device: a policy's steps on rollouts, and those of the drafter that moves along.

The sampler's log-probabilities are the old policy's. Gradients come from the trainer's own, which it computes again
from prompts and answers. The features of that pass train the drafter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from dflash_jax.argument_checks import wrong
from dflash_jax.errors import InputError
from dflash_jax.frontend.outputs import Completion
from dflash_jax.models.config import DraftConfig
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.drafting import Drafting
from dflash_jax.models.layers import with_backend
from dflash_jax.models.mtp import Mtp
from dflash_jax.models.packing import unpack_weights
from dflash_jax.ops.backend import XLA
from dflash_jax.ops.weights import QuantizedWeight, is_weight
from dflash_jax.training.losses import MTP_GAMMA, Loss, default_gamma
from dflash_jax.training.step import Batch, Recipe, Trainer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rollouts:
    """Answers as rows, each after its prompt.

    Attributes:
        tokens: Token ids, int32 [B, T].
        mask: The tokens of answers, which are learned from, bool [B, T].
        logprobs: Their log-probabilities as they were drawn, float32 [B, T]; 0 elsewhere.
    """

    tokens: jax.Array
    mask: jax.Array
    logprobs: jax.Array

    @classmethod
    def of(cls, completions: Sequence[Completion], length: int) -> "Rollouts":
        """Every answer of completions, prompt by prompt.

        Args:
            completions: Of a `generate` with ``logprobs=0`` and ``logprobs_mode="processed"``.
            length: T, which prompts with their answers do not exceed.

        Raises:
            InputError: One does exceed it, or has no log-probabilities.
        """
        answers = [(completion, output) for completion in completions for output in completion.outputs]
        tokens, logprobs = np.zeros((len(answers), length), np.int32), np.zeros((len(answers), length), np.float32)
        mask = np.zeros((len(answers), length), bool)
        for row, (completion, output) in enumerate(answers):
            start = len(completion.prompt_ids)
            end = start + len(output.token_ids)
            if output.logprobs is None:
                raise InputError("a completion has no log-probabilities: generate with logprobs=0")
            if end > length:
                raise InputError(f"a prompt and its answer have {end} tokens: at most {length} are possible")
            tokens[row, :end] = [*completion.prompt_ids, *output.token_ids]
            pairs = zip(output.token_ids, output.logprobs, strict=True)
            logprobs[row, start:end] = [entry[token].logprob for token, entry in pairs]
            mask[row, start:end] = True
        return cls(jnp.asarray(tokens), jnp.asarray(mask), jnp.asarray(logprobs))


def group_advantages(rewards: Sequence[Sequence[float]] | np.ndarray) -> np.ndarray:
    """Rewards [prompts, n] of the answers of each prompt, normalised within it: float32 [prompts · n]."""
    rewards = np.asarray(rewards, np.float32)
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    # Where all answers have one reward, there is nothing to learn.
    return (centred / (rewards.std(axis=1, keepdims=True) + 1e-6)).ravel()


def token_logprobs(policy: Decoder, tokens, temperature: float = 1.0, taps: Sequence[int] = ()):
    """A teacher-forced pass.

    Args:
        policy: The model.
        tokens: Token ids, int [B, T], each row one text.
        temperature: What logits are divided by.
        taps: Layers whose outputs are returned.

    Returns:
        Log-probabilities of all tokens but the first, float32 [B, T - 1]; hidden states [B, T, H] after the final norm;
        and features [B, T, taps, H], None without taps.
    """
    hidden, features = policy(tokens, taps)
    logits = policy.logits(hidden[:, :-1]) / temperature
    drawn = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return drawn - jax.nn.logsumexp(logits, axis=-1), hidden, features


class PolicyStep(NamedTuple):
    """What a step of the policy gives.

    Attributes:
        loss: The loss.
        drift: Mean distance of the trainer's log-probabilities from the sampler's, over the answers' tokens.
        clipped: Share of the tokens whose ratio was cut.
        hidden: Hidden states after the final norm, before the update, [B, T, H].
        features: The drafter's features, likewise, [B, T, taps, H]; None without taps.
    """

    loss: jax.Array
    drift: jax.Array
    clipped: jax.Array
    hidden: jax.Array
    features: jax.Array | None


def clipped_loss(logprobs, rollouts: Rollouts, advantages, clip: float):
    """PPO's clipped loss (arXiv 1707.06347), a mean over the answers' tokens.

    Args:
        logprobs: The trainer's log-probabilities, float32 [B, T - 1].
        rollouts: The answers, with the sampler's log-probabilities.
        advantages: float32 [B].
        clip: How far a ratio may be from 1.

    Returns:
        The loss, the drift and the clipped share, as in `PolicyStep`.
    """
    mask, difference = rollouts.mask[:, 1:], logprobs - rollouts.logprobs[:, 1:]
    difference = jnp.where(mask, difference, 0.0)
    ratio, gain = jnp.exp(difference), advantages[:, None]
    cut = jnp.clip(ratio, 1 - clip, 1 + clip)
    count = jnp.maximum(mask.sum(), 1)
    loss = -jnp.sum(jnp.where(mask, jnp.minimum(ratio * gain, cut * gain), 0.0)) / count
    return loss, jnp.abs(difference).sum() / count, jnp.sum(mask & (cut != ratio)) / count


class PolicyTrainer:
    """Steps of a policy in float32, on one device.

    Attributes:
        policy: The policy, as `LLM.update_weights` takes it.
        taps: The layers of the drafter's features.
    """

    def __init__(
        self,
        target: Decoder,
        update: optax.GradientTransformation,
        taps: Sequence[int] = (),
        temperature: float = 1.0,
        clip: float = 0.2,
    ):
        """Takes the weights of ``target``, such as `LLM.target`, which keeps them.

        Args:
            target: The model at step 0.
            update: The optimiser.
            taps: The layers of the drafter's features.
            temperature: As the answers are sampled with.
            clip: How far a token's ratio may be from 1.

        Raises:
            InputError: Its weights are in few bits, or on several devices.
        """
        plain = with_backend(unpack_weights(target), XLA)
        if any(isinstance(x, QuantizedWeight) for x in jax.tree.leaves(plain, is_leaf=is_weight)):
            raise InputError("the policy has weights in few bits, which have no gradient: load it without quantize")
        if target.layout.devices > 1:
            raise InputError(f"the policy is on {target.layout.devices} devices: this trainer has one")
        self.taps = tuple(taps)

        def start(policy):
            policy = jax.tree.map(lambda x: x.astype(jnp.float32), policy)
            return policy, update.init(policy)

        self.policy, self._state = jax.jit(start)(plain)

        def step(policy, state, rollouts: Rollouts, advantages):
            def loss(policy):
                logprobs, hidden, features = token_logprobs(policy, rollouts.tokens, temperature, self.taps)
                loss, *others = clipped_loss(logprobs, rollouts, advantages, clip)
                return loss, (*others, hidden, features)

            (value, others), grads = jax.value_and_grad(loss, has_aux=True)(policy)
            updates, state = update.update(grads, state, policy)
            return optax.apply_updates(policy, updates), state, PolicyStep(value, *others)

        # Not the policy's arrays, which its reader may still have.
        self._step = jax.jit(step, donate_argnums=1)

    def step(self, rollouts: Rollouts, advantages) -> PolicyStep:
        """One update on rollouts, with the advantage of each answer, float32 [B]."""
        self.policy, self._state, result = self._step(self.policy, self._state, rollouts, jnp.asarray(advantages))
        return result


class DrafterTrainer:
    """Steps of the drafter on what the policy has answered, between its updates, without a disk."""

    def __init__(
        self,
        target: Decoder,
        drafter: Drafting | None,
        update: optax.GradientTransformation,
        block_size: int | None = None,
        kind: str = "cross-entropy",
        anchors: int = 16,
        seed: int = 0,
    ):
        """Takes the weights of ``drafter``, such as `LLM.drafter`, which keeps them.

        Args:
            target: Its target, in arrays: `PolicyTrainer.policy`.
            drafter: The drafter at step 0.
            update: The optimiser.
            block_size: Tokens of a round that are trained for; None: the drafter's own.
            kind: The loss, as in `training.losses.Loss`.
            anchors: Blocks of each answer.
            seed: Of the places where blocks begin.

        Raises:
            InputError: It is no DFlash drafter and no MTP head.
        """
        if not isinstance(drafter, Drafter | Mtp):
            raise wrong("drafter", drafter, "a DFlash drafter or an MTP head")
        config = drafter.config
        slots = block_size or config.block_size
        gamma = default_gamma(slots) if isinstance(config, DraftConfig) else MTP_GAMMA
        self._trainer = Trainer(target, config, Recipe(Loss(kind, gamma=gamma), anchors, slots), update)
        plain = with_backend(unpack_weights(drafter), XLA)
        plain.vocabulary = nnx.data(None)
        self._state, self._key, self._count = self._trainer.start(plain), jax.random.key(seed), 0

    @property
    def drafter(self) -> Drafter | Mtp:
        """A copy of the drafter, as `LLM.update_weights` takes it."""
        return jax.tree.map(jnp.copy, self._state[0])

    def step(self, policy: Decoder, rollouts: Rollouts, result: PolicyStep) -> float:
        """One update on the features of the policy's step.

        Args:
            policy: The policy, for its embedding and head.
            rollouts: The answers.
            result: The policy's step on them.

        Returns:
            The mean loss.
        """
        starts = jnp.zeros(rollouts.tokens.shape, jnp.int32)
        batch = Batch(rollouts.tokens, rollouts.mask, starts, result.features, result.hidden)
        batches, key = jax.tree.map(lambda x: x[None], batch), jax.random.fold_in(self._key, self._count)
        self._state, sums, _ = self._trainer.step(self._state, jax.tree.leaves(policy), batches, key)
        self._count += 1
        return float(sums.loss / jnp.maximum(sums.weight, 1e-6))

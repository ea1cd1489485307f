import math
from runpy import run_path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dflash_jax import LLM, InputError, SamplingParams
from dflash_jax.rl import DrafterTrainer, PolicyTrainer, Rollouts, group_advantages
from dflash_jax.rl.grpo import clipped_loss, token_logprobs
from tests import tiny
from tests.docs.pages import ROOT
from tests.helpers import tokens_of


@pytest.fixture(scope="module")
def example():
    return run_path(str(ROOT / "examples" / "grpo.py"))


def test_rewards_of_a_prompt_are_normalised_within_it_and_equal_ones_teach_nothing():
    advantages = group_advantages([[1.0, 0.0, 0.0, 1.0], [0.4, 0.4, 0.4, 0.4]])
    np.testing.assert_allclose(advantages[:4], [1, -1, -1, 1], rtol=1e-5)
    assert not advantages[4:].any()


def test_the_loss_is_ppos_clipped_one_over_the_answers_tokens():
    rng = np.random.default_rng(0)
    old, new = rng.normal(size=(3, 6)) * 0.3 - 2, rng.normal(size=(3, 6)) * 0.3 - 2
    mask, gains = rng.random((3, 6)) < 0.6, rng.normal(size=3)
    rollouts = Rollouts(jnp.zeros((3, 6), int), jnp.asarray(mask), jnp.asarray(old, jnp.float32))
    loss, drift, clipped = clipped_loss(jnp.asarray(new[:, 1:], jnp.float32), rollouts, jnp.asarray(gains), 0.2)
    places = [(b, t) for b in range(3) for t in range(1, 6) if mask[b, t]]
    ratios = {place: math.exp(new[place] - old[place]) for place in places}
    terms = [min(r * gains[b], min(max(r, 0.8), 1.2) * gains[b]) for (b, _), r in ratios.items()]
    assert math.isclose(float(loss), -sum(terms) / len(places), rel_tol=1e-5)
    assert math.isclose(float(drift), sum(abs(new[p] - old[p]) for p in places) / len(places), rel_tol=1e-5)
    assert math.isclose(float(clipped), sum(not 0.8 <= r <= 1.2 for r in ratios.values()) / len(places), rel_tol=1e-6)
    assert 0 < float(clipped) < 1


def test_a_step_raises_what_was_rewarded_and_lowers_what_was_not():
    """On a hybrid with experts: every kind of layer has a gradient."""
    target = tiny.target()
    tokens = tokens_of(np.random.default_rng(1), 2, 9, vocab=tiny.VOCAB)
    mask = jnp.broadcast_to(jnp.arange(9) >= 4, (2, 9))
    before = token_logprobs(target, tokens)[0]
    trainer = PolicyTrainer(target, optax.sgd(0.05))
    result = trainer.step(Rollouts(tokens, mask, jnp.pad(before, ((0, 0), (1, 0)))), np.array([1.0, -1.0]))
    after = token_logprobs(trainer.policy, tokens)[0]
    change = jnp.where(mask[:, 1:], after - before, 0).sum(axis=1)
    assert change[0] > 0 > change[1]
    assert float(result.drift) < 1e-5
    moved = jax.tree.map(lambda new, old: bool((new != old).any()), trainer.policy, target)
    assert all(jax.tree.leaves(moved))
    # The target's arrays are not the policy's.
    np.testing.assert_array_equal(token_logprobs(target, tokens)[0], before)


@pytest.mark.parametrize("kind", ["drafter", "head"])
def test_the_drafter_learns_what_the_policy_answers(kind):
    target = tiny.target()
    drafter = getattr(tiny, kind)(target)
    trainer = PolicyTrainer(target, optax.sgd(0.0), drafter.taps)
    mover = DrafterTrainer(trainer.policy, drafter, optax.adam(3e-3), block_size=4, anchors=8)
    rollouts = Rollouts(
        tokens_of(np.random.default_rng(2), 2, 12, vocab=tiny.VOCAB), jnp.ones((2, 12), bool), jnp.zeros((2, 12))
    )
    losses = [mover.step(trainer.policy, rollouts, trainer.step(rollouts, np.zeros(2))) for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]
    handed = mover.drafter
    mover.step(trainer.policy, rollouts, trainer.step(rollouts, np.zeros(2)))
    # The step donates its state, and who has a drafter keeps it.
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(handed))


def test_what_cannot_be_trained_is_named():
    with pytest.raises(InputError, match="drafter"):
        DrafterTrainer(tiny.target(), None, optax.sgd(0.1))
    llm = LLM(draft=None, quantize="int8")
    with pytest.raises(InputError, match="few bits"):
        PolicyTrainer(llm.target, optax.sgd(0.1))


def test_rollouts_have_each_answer_after_its_prompt_as_it_was_drawn():
    llm = LLM(draft=None, dtype="float32", max_len=64)
    params = SamplingParams(temperature=0.7, n=2, max_tokens=5, seed=3, logprobs=0, logprobs_mode="processed")
    completions = llm.generate([[5, 9, 11], [7]], params)
    rollouts = Rollouts.of(completions, 10)
    answers = [(c.prompt_ids, o.token_ids) for c in completions for o in c.outputs]
    for row, (prompt, answer) in enumerate(answers):
        assert rollouts.tokens[row, : len(prompt) + len(answer)].tolist() == [*prompt, *answer]
        assert np.flatnonzero(rollouts.mask[row]).tolist() == list(range(len(prompt), len(prompt) + len(answer)))
    policy = PolicyTrainer(llm.target, optax.sgd(0.1), temperature=0.7)
    assert float(policy.step(rollouts, np.zeros(4)).drift) < 1e-4
    with pytest.raises(InputError, match="at most 6"):
        Rollouts.of(completions, 6)
    with pytest.raises(InputError, match="logprobs=0"):
        Rollouts.of(llm.generate([[5]], SamplingParams(max_tokens=2)), 10)


def test_a_drafter_changes_no_sample_and_no_reward_of_a_training(example):
    """Three steps with the drafter moving along, and without one: the weights of the last have all of it in them."""

    def trained(drafter: str) -> list:
        names = ["--drafter", drafter, "--steps", "3", "--reproducible"]
        steps = example["train"](example["parser"]().parse_args(names))
        return [
            (row["reward"], [(o.text, o.token_ids, o.logprobs) for c in completions for o in c.outputs], row)
            for row, completions in steps
        ]

    moving, off = trained("moving"), trained("off")
    for (reward, answers, row), (other_reward, other_answers, other_row) in zip(moving, off, strict=True):
        assert (reward, answers) == (other_reward, other_answers)
        assert row["acceptance_length"] > 1 == other_row["acceptance_length"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(a, b):\n    return a + b", 1.0),
        ("def f(a, b):\n    return b", 0.5),
        ("def f(a, b):\n    return c.a", 0.0),
        ("def f(a, b):\n    return (a", 0.0),
        ("a + b", 0.0),
        ("def f(a, b):\n    pass\na + b", 0.0),
    ],
)
def test_the_reward_of_the_example(example, text, expected):
    assert math.isclose(example["reward"](text), expected)

"""The engine for tunix with tunix itself, which no extra installs: pip install google-tunix==0.1.7."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

from dflash_jax import LLM, InputError
from dflash_jax.checkpoint.load import save_module
from dflash_jax.models.families import qwen3
from tests.helpers import random_decoder

pytest.importorskip("tunix")

from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.rl import rl_cluster
from tunix.rl.common import compute_per_token_logps
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

from dflash_jax.rl import TunixRollout

PAD, EOS, ANSWER = 0, 1, 12
RAW = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 36,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    # tunix 0.1.7 takes no other, whatever its config says.
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
CONFIG = RolloutConfig(max_tokens_to_generate=ANSWER, max_prompt_length=8, temperature=0.8, seed=7)


class Words:
    """A tokenizer: a text is numbers."""

    def encode(self, text, **_):
        return [int(word) for word in text.split()]

    def decode(self, ids, **_):
        return " ".join(map(str, ids))

    def bos_id(self):
        return None

    def dedup_bos_ids(self, ids):
        return ids

    def pad_id(self):
        return PAD

    def eos_id(self):
        return EOS


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path, config = tmp_path_factory.mktemp("qwen3"), qwen3.read_config(RAW)
    save_module(random_decoder(config), qwen3.weight_names(config), RAW, path, jnp.float32)
    return LLM(path, dtype="float32", max_len=64)


@pytest.fixture
def model():
    """tunix's Qwen3 of the same shapes, with other weights."""
    shape = ModelConfig(
        num_layers=RAW["num_hidden_layers"],
        vocab_size=RAW["vocab_size"],
        embed_dim=RAW["hidden_size"],
        hidden_dim=RAW["intermediate_size"],
        num_heads=RAW["num_attention_heads"],
        head_dim=RAW["head_dim"],
        num_kv_heads=RAW["num_key_value_heads"],
        rope_theta=RAW["rope_theta"],
        norm_eps=RAW["rms_norm_eps"],
    )
    return Qwen3(shape, rngs=nnx.Rngs(3))


def trainers_logprobs(model, prompts, answers, temperature):
    graph, state = nnx.split(model)
    return compute_per_token_logps(graph, state, prompts, answers, PAD, EOS, temperature=temperature)


def padded(answers):
    return np.array([np.pad(each, (0, ANSWER - len(each)), constant_values=PAD) for each in answers])


def test_the_samplers_and_scored_logprobs_are_the_trainers(llm, model):
    engine = TunixRollout(model, Words(), rollout_config=CONFIG, llm=llm)
    output = engine.generate(["5 9 11", "7 7", "5 9 11"], CONFIG)
    assert output.left_padded_prompt_tokens.tolist()[0] == [PAD] * 5 + [5, 9, 11]
    assert not np.array_equal(output.tokens[0], output.tokens[2]), "each prompt has a seed of its own"
    prompts, answers = output.left_padded_prompt_tokens, padded(output.tokens)
    expected = trainers_logprobs(model, jnp.asarray(prompts), jnp.asarray(answers), 0.8)
    scored = engine.get_per_token_logps(jnp.asarray(prompts), jnp.asarray(answers))
    for row, (tokens, logprobs) in enumerate(zip(output.tokens, output.logprobs, strict=True)):
        assert tokens.shape == logprobs.shape
        np.testing.assert_allclose(logprobs, expected[row, : len(tokens)], atol=1e-4)
        np.testing.assert_allclose(scored[row, : len(tokens)], expected[row, : len(tokens)], atol=1e-4)
    assert output.text == [" ".join(map(str, tokens)) for tokens in output.tokens]


def test_the_token_that_ends_an_answer_stays_with_its_logprob(llm, model):
    engine = TunixRollout(model, Words(), rollout_config=CONFIG, llm=llm)
    config = dataclasses.replace(CONFIG, eos_tokens=list(range(2, 34)[:16]), max_tokens_to_generate=40)
    output = engine.generate(["5 9 11"] * 8, config)
    ended = [each for each in output.tokens if len(each) < 40]
    assert ended
    assert all(each[-1] in config.eos_tokens for each in ended)
    assert [len(each) for each in output.tokens] == [len(each) for each in output.logprobs]


def test_a_prompt_longer_than_the_width_widens_it_to_a_power_of_two(llm, model):
    engine = TunixRollout(model, Words(), rollout_config=CONFIG, llm=llm)
    output = engine.generate(["5 " * 11, "7"], CONFIG)
    assert output.left_padded_prompt_tokens.shape == (2, 16)


def test_the_same_seed_gives_the_same_rollouts_and_greedy_takes_no_seed(llm, model):
    first, second = (TunixRollout(model, Words(), rollout_config=CONFIG, llm=llm) for _ in range(2))
    for prompts in (["5 9"] * 3, ["7"] * 2):
        for one, other in zip(*(e.generate(prompts, CONFIG).tokens for e in (first, second)), strict=True):
            np.testing.assert_array_equal(one, other)
    greedy = dataclasses.replace(CONFIG, temperature=0.0)
    one, other = first.generate(["5 9"] * 2, greedy).tokens
    np.testing.assert_array_equal(one, other)


def test_lora_alone_and_parameters_without_a_name_are_refused_by_name(llm, model):
    engine = TunixRollout(model, Words(), rollout_config=CONFIG, llm=llm)
    lora = nnx.State({"layers": {0: {"attn": {"q_proj": {"w_lora_a": nnx.LoRAParam(jnp.zeros((4, 2)))}}}}})
    with pytest.raises(InputError, match=r"layers\.0\.attn\.q_proj\.w_lora_a is of LoRA"):
        engine.update_params(lora, (nnx.LoRAParam,))
    other = nnx.State({"layers": {0: {"attn": {"sinks": nnx.Param(jnp.zeros(4))}}}})
    with pytest.raises(InputError, match=r"layers\.0\.attn\.sinks has no name"):
        engine.update_params(other)


def test_tunix_grpo_trains_on_our_rollouts_and_gives_its_weights_back(llm, model):
    """Its own cluster and learner: what it samples rises with the reward, and both have the same weights at the end."""
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    cluster = rl_cluster.RLCluster(
        actor=model,
        reference=model,
        tokenizer=Words(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(
                (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT), mesh
            ),
            rollout_engine=functools.partial(TunixRollout, llm=llm),
            offload_to_cpu=False,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(3e-2), eval_every_n_steps=100, max_steps=6, gradient_accumulation_steps=None
            ),
            rollout_config=CONFIG,
        ),
    )
    assert isinstance(cluster.rollout, TunixRollout)
    means = []

    def reward(prompts, completions, **_):
        """Even numbers are good."""
        words = [text.split() for text in completions]
        rewards = [sum(int(word) % 2 == 0 for word in each) / len(each) for each in words]
        means.append(np.mean(rewards))
        return rewards

    learner = GRPOLearner(cluster, GRPOConfig(num_generations=8, num_iterations=2, beta=0.0), reward)
    learner.train([{"prompts": np.array(["5 9 11", "7 7"])} for _ in range(6)])
    assert means[-1] > means[0] + 0.2
    prompts, answers = jnp.array([[0, 5, 9]]), jnp.array([[2, 4, 6]])
    trained = cluster.actor_trainer.model
    np.testing.assert_allclose(
        cluster.rollout.get_per_token_logps(prompts, answers),
        trainers_logprobs(trained, prompts, answers, 0.8),
        atol=1e-4,
    )

"""`LLM` as the rollout engine of tunix, google/tunix, which this package does not depend on.

``ClusterConfig(rollout_engine=functools.partial(TunixRollout, llm=llm), ...)`` is all that a cluster needs.
"""

import re
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.generate.mappings import MappingConfig  # pyright: ignore[reportMissingImports]
from tunix.rl.rollout.base_rollout import (  # pyright: ignore[reportMissingImports]
    BaseRollout,
    RolloutConfig,
    RolloutOutput,
)

from dflash_jax.errors import InputError
from dflash_jax.frontend.llm import LLM
from dflash_jax.sampling_params import SamplingParams

# Of tunix's mappings only the names are read, which those of both its backends have; the layout of arrays is HF's.
BACKEND = "vllm_jax"


def hf_tensors(params: Any, names: dict[str, Any]) -> Iterator[tuple[str, jax.Array]]:
    """Tensors of a model of tunix as a checkpoint has them.

    Args:
        params: Its parameters, an `nnx.State`.
        names: Its ``to_hf_mappings``: a path with * for each index → a name, or a tuple that begins with one.

    Yields:
        Hugging Face name and array, on the devices of the parameter.

    Raises:
        InputError: A parameter is of LoRA, or has no name.
    """
    for path, variable in nnx.to_flat_state(params):
        shown = ".".join(map(str, path))
        if isinstance(variable, nnx.LoRAParam) or "_lora_" in shown:
            raise InputError(f"{shown} is of LoRA: rollouts take whole weights, so merge it into them")
        key = re.sub(r"(?<![^.])\d+(?![^.])", "*", shown)
        if key not in names:
            raise InputError(f"{shown} has no name in to_hf_mappings: give one in rollout_mapping_config")
        name = names[key] if isinstance(names[key], str) else names[key][0]
        for part in path:
            name = name.replace("*", str(part), 1) if str(part).isdigit() else name
        yield name, _as_hf(name, variable.get_value() if isinstance(variable, nnx.Variable) else variable)


def _as_hf(name: str, array: jax.Array) -> jax.Array:
    """A parameter in the layout of Hugging Face: outputs before inputs, heads joined."""
    if array.ndim == 1 or "embed_tokens" in name:
        return array
    if name.endswith(".bias"):
        return array.reshape(-1)
    # The inputs come first in tunix, those of the attention's output in two axes.
    outputs_last = array.reshape(-1, array.shape[-1]) if "o_proj" in name else array.reshape(array.shape[0], -1)
    return outputs_last.T


def _random(seed: Any) -> Random:
    """Draws the seeds of prompts. ``seed``: an int, an array or a key of JAX; None: another one each time."""
    if seed is None:
        return Random()
    is_key = isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)
    return Random(np.asarray(jax.random.key_data(seed) if is_key else seed).tobytes())


class TunixRollout(BaseRollout):
    """A rollout engine of tunix.

    Samples and their log-probabilities are the same with a drafter and without one. Sampling takes nothing from the
    checkpoint's generation_config.json, since the trainer knows the temperature alone.

    Attributes:
        llm: What continues prompts.
        mesh: Its devices, which the cluster takes for the role of rollouts.
    """

    def __init__(
        self,
        rollout_actor: Any,
        tokenizer: Any,
        mesh: Any = None,
        rollout_config: RolloutConfig | None = None,
        *,
        llm: LLM,
    ):
        """Gives the weights of tunix's model to ``llm``.

        Args:
            rollout_actor: The model of tunix.
            tokenizer: tunix's, whose ids are the LLM's.
            mesh: Not used: the LLM has its own.
            rollout_config: Temperature and length of answers; its ``rollout_mapping_config`` names the tensors where
                the model does not.
            llm: An `LLM` of the same architecture.

        Raises:
            InputError: The parameters do not fit the LLM, or are of LoRA.
        """
        config = rollout_config or RolloutConfig()
        self.llm, self.mesh, self._tokenizer, self._config = llm, llm.programs.mesh, tokenizer, config
        mappings = MappingConfig.build(mapping_obj=config.rollout_mapping_config, model=rollout_actor, backend=BACKEND)
        self._names, self._seeds = dict(mappings.to_hf_mappings or {}), _random(config.seed)
        self.update_params(nnx.state(rollout_actor, nnx.Param))

    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any) -> RolloutOutput:
        """Continues every prompt once.

        Args:
            prompts: Texts.
            rollout_config: Of this call.
            **kwargs: Further fields of `SamplingParams`.

        Returns:
            Tokens, with the one that ended the text, and log-probabilities as they were drawn, unpadded.
        """
        ids = [self._encoded(prompt) for prompt in prompts]
        options: dict[str, Any] = {
            "temperature": rollout_config.temperature,
            "top_p": 1.0 if rollout_config.top_p is None else rollout_config.top_p,
            "top_k": rollout_config.top_k or 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": rollout_config.max_tokens_to_generate,
            "stop_token_ids": rollout_config.eos_tokens or [self.eos_id()],
            "ignore_eos": True,
            "logprobs": 0,
            "logprobs_mode": "processed",
            **kwargs,
        }
        params = [SamplingParams(**{"seed": self._seeds.getrandbits(32), **options}) for _ in prompts]
        completions = self.llm.generate([{"prompt_token_ids": each} for each in ids], params)
        width = rollout_config.max_prompt_length
        if (longest := max(map(len, ids))) > width:
            width = 1 << (longest - 1).bit_length()
        padded = np.full((len(ids), width), self.pad_id(), np.int32)
        for row, each in zip(padded, ids, strict=True):
            row[width - len(each) :] = each
        return RolloutOutput(
            text=[self._tokenizer.decode(each.token_ids) for each in completions],
            logits=None,
            tokens=[np.array(each.token_ids, np.int32) for each in completions],
            left_padded_prompt_tokens=padded,
            logprobs=[np.array([t["logprob"] for t in each.logprobs or ()], np.float32) for each in completions],
        )

    def _encoded(self, prompt: str) -> list[int]:
        """The ids of a prompt, which begin with one BOS where the tokenizer has one."""
        ids, bos = list(self._tokenizer.encode(prompt)), self._tokenizer.bos_id()
        return self._tokenizer.dedup_bos_ids([bos, *ids]) if bos else ids

    def get_per_token_logps(self, prompt_tokens: Any, completion_tokens: Any, completion_mask: Any = None) -> jax.Array:
        """Log-probabilities of answers by the temperature of `RolloutConfig`, as tunix's trainer computes them.

        Args:
            prompt_tokens: int [B, P], padded on the left.
            completion_tokens: int [B, L], padded on the right.
            completion_mask: bool [B, L], the tokens of answers; None: those that are not padding.

        Returns:
            float32 [B, L], 0 where padding is.
        """
        pad = self.pad_id()
        prompts = [_without_padding(row, pad) for row in np.asarray(prompt_tokens)]
        answers = [_without_padding(row[::-1], pad)[::-1] for row in np.asarray(completion_tokens)]
        if completion_mask is not None:
            # The id of padding may be that of the end of an answer, too.
            counts = np.asarray(completion_mask).astype(bool).sum(axis=1)
            answers = [row[:n].tolist() for row, n in zip(np.asarray(completion_tokens), counts, strict=True)]
        params = SamplingParams(temperature=self._config.temperature, logprobs_mode="processed")
        result = np.zeros(np.shape(completion_tokens), np.float32)
        for row, scores in zip(result, self.llm.score(prompts, answers, params), strict=True):
            row[: len(scores)] = scores
        return jnp.asarray(result)

    def update_params(self, params: Any, filter_types: Sequence[Any] | None = None) -> None:
        """Replaces the LLM's weights.

        Args:
            params: All parameters, an `nnx.State`.
            filter_types: Not used: LoRA is known by the parameters.

        Raises:
            InputError: They do not fit, or are of LoRA.
        """
        # tunix guards its call against transfers on a CPU, where constants of programs are some.
        with jax.transfer_guard("allow"):
            self.llm.update_weights(hf_tensors(params, self._names))

    def pad_id(self) -> int:
        """The tokenizer's."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """The tokenizer's."""
        return self._tokenizer.eos_id()

    def model(self) -> None:
        """None, as of tunix's engine with vLLM: the LLM holds the weights, in a form of its own."""
        return


def _without_padding(row: np.ndarray, pad: int) -> list[int]:
    """``row`` without the padding that it begins with."""
    tokens = np.flatnonzero(row != pad)
    return row[tokens[0] :].tolist() if len(tokens) else []

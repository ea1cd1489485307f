"""Acceptance length and speed of a drafter in real decoding, on prompts that it was not trained on."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.engine.config import BlockSize
from dflash_jax.engine.executables import Executables
from dflash_jax.errors import InputError
from dflash_jax.frontend.llm import LLM
from dflash_jax.frontend.media import by_kind
from dflash_jax.frontend.outputs import Completion
from dflash_jax.frontend.prompts import Prompt
from dflash_jax.models.drafting import DrafterWrapper
from dflash_jax.models.selector import Candidates
from dflash_jax.options.train import TrainConfig
from dflash_jax.sampling_params import SamplingParams
from dflash_jax.training.conversations import at_line, conversation_of, directory_of, split_conversation
from dflash_jax.training.tokenising import read_lines

# Temperatures at which a drafter is measured.
TEMPERATURES = (0.0, 0.7)


def is_degenerate(token_ids: Sequence[int], order: int = 4, least: float = 0.5) -> bool:
    """Whether a text repeats itself: fewer than ``least`` of its n-grams of ``order`` tokens are distinct.

    Such text is easy to draft, so its acceptance length is not representative.
    """
    grams = [tuple(token_ids[i : i + order]) for i in range(len(token_ids) - order + 1)]
    return bool(grams) and len(set(grams)) < least * len(grams)


@dataclass(frozen=True)
class Acceptance:
    """Acceptance length over all rounds of some completions.

    Attributes:
        mean: Mean tokens of a round.
        rounds: Rounds.
        kept: Completions that count.
        degenerate: Completions that repeat themselves.
        rates: The share of rounds that accepted draft 1, draft 2, …
    """

    mean: float
    rounds: int
    kept: int
    degenerate: int
    rates: tuple[float, ...]

    def scalars(self) -> dict[str, float]:
        """The attributes that are one number each."""
        return {name: value for name, value in vars(self).items() if name != "rates"}


def acceptance(completions: Sequence[Completion], keep_all: bool = False) -> Acceptance:
    """Averages the acceptance lengths of completions.

    Args:
        completions: Finished completions.
        keep_all: Whether text that repeats itself counts, as it does in the published tables.
    """
    good = [c for c in completions if not is_degenerate(c.token_ids)]
    counted = completions if keep_all else good
    lengths = np.array([n for c in counted for n in c.acceptance_lengths])
    rates = tuple(float((lengths > i).mean()) for i in range(1, max(lengths, default=1)))
    mean = float(lengths.mean()) if len(lengths) else 0.0
    return Acceptance(mean, len(lengths), len(counted), len(completions) - len(good), rates)


def prompt_of(record: dict, where: str, llm: LLM) -> Prompt:
    """The prompt of a line of held-out data: token ids, with images and videos in a dict.

    It is ``prompt_ids``, ``prompt`` or ``text``, or a conversation up to its first answer.

    Raises:
        InputError: The line has none of them, or an image or a video cannot be used; the message begins with ``where``.
    """
    if isinstance(record.get("prompt_ids"), list):
        return llm.encode(record["prompt_ids"])
    if isinstance(text := record.get("prompt", record.get("text")), str):
        return llm.encode(text)
    if (conversation := conversation_of(record, where)) is None:
        raise InputError(f"{where}: a line must have messages, conversations, prompt, text or prompt_ids")
    messages = conversation.messages
    first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    rendered, parts = split_conversation(messages[:first], where, directory_of(record, where))
    ids = llm.encode_chat(rendered, tools=conversation.tools)
    return {"prompt_token_ids": ids, "multi_modal_data": by_kind(parts)} if parts else ids


def held_out_prompts(streams: Sequence[Sequence[int]], length: int, most: int, seed: int = 0) -> list[list[int]]:
    """Up to ``most`` cuts of ``length`` token ids from ``streams`` (a document each), at random places."""
    rng = np.random.default_rng(seed)
    cuts = [(s, i) for s, ids in enumerate(streams) for i in range(0, len(ids) - 2 * length, 4 * length)]
    chosen = [cuts[i] for i in rng.permutation(len(cuts))[:most]]
    return [list(streams[s][i : i + length]) for s, i in chosen]


def measure(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, block_size: BlockSize | None = None
) -> Acceptance:
    """Decodes every prompt and averages over the completions that do not repeat themselves."""
    return acceptance(llm.generate(prompts, params, block_size))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GreedyDrafts(DrafterWrapper):
    """Proposes the likeliest tokens at any temperature: the baseline for drafting with shared noise."""

    def propose(self, cache, last, start, block_sizes, size, heads, window):
        """Proposes as the inner drafter does, with argmax in place of its choice."""

        def largest(logits, positions, ids=None):
            columns = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            return columns if ids is None else ids[columns]

        def best(logits, positions, count, ids=None):
            scores, columns = jax.lax.top_k(logits, count)
            return Candidates(columns if ids is None else ids[columns], scores, jnp.ones(len(logits)))

        heads = replace(heads, draw=largest, scored_draw=None, candidates=best)
        return super().propose(cache, last, start, block_sizes, size, heads, window)


def with_greedy_drafts(llm: LLM) -> LLM:
    """The same pair with `GreedyDrafts` around its drafter."""
    drafter = None if llm.drafter is None else GreedyDrafts(llm.drafter)
    return llm.with_programs(Executables(llm.target, drafter))


def read_held_out(config: TrainConfig, llm: LLM) -> list[Prompt]:
    """Prompts of ``config.held_out``, those of text cut at their beginning where the new tokens need room.

    Raises:
        InputError: A line is invalid, or a prompt with images or videos leaves no room; both name the line.
    """
    if config.held_out is None:
        return []
    lines = list(read_lines([config.held_out]))[: config.evaluate_prompts]
    room, prompts = llm.max_len - config.evaluate_tokens, []
    for where, record in lines:
        prompt = prompt_of(record, where, llm)
        if isinstance(prompt, list):
            prompts.append(prompt[-room:])
            continue
        try:
            llm.check(prompt, SamplingParams(max_tokens=config.evaluate_tokens))
        except InputError as e:
            raise at_line(e, where) from None
        prompts.append(prompt)
    return prompts


def held_out_digest(config: TrainConfig) -> str:
    """Identifies what `read_held_out` gives: acceptance lengths on the same prompts can be compared."""
    settings = (config.evaluate_prompts, config.evaluate_tokens, Path(config.held_out or "").read_bytes())
    return blake2b(repr(settings).encode(), digest_size=16).hexdigest()


def _sampling(config: TrainConfig, temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=config.evaluate_tokens, seed=config.seed)


def acceptance_by_temperature(config: TrainConfig, llm: LLM, prompts: Sequence[Prompt]) -> dict[float, Acceptance]:
    """Decodes every prompt at each of `TEMPERATURES` with the largest block, all prompts at once.

    Returns:
        Nothing in a process that follows.
    """
    results = {}
    with llm.leading() as leads:
        for temperature in TEMPERATURES if leads else ():
            params = _sampling(config, temperature)
            completions = llm.generate(prompts, params, llm.largest_block, progress=False)
            results[temperature] = acceptance(completions, keep_all=True)
    return results


def evaluate(config: TrainConfig, tell: Callable[[str], None]) -> dict[str, dict] | None:
    """Measures the drafter of ``config`` on held-out prompts, one at a time, as a single user waits for them.

    The drafter is the exported one of ``config.output``, else ``config.draft``.

    Returns:
        By temperature: plain_tokens_per_s, tokens_per_s, acceptance_length, rounds, prompts, repeating_themselves. None
        in a process that follows.

    Raises:
        InputError: There are no held-out prompts.
    """
    exported = config.directory / "draft"
    # A `Path` is never taken for a repo id.
    draft = config.draft if config.draft is not None and not exported.exists() else exported
    revision = config.draft_revision if draft == config.draft else None
    options: dict[str, Any] = {
        "dtype": config.dtype,
        "mesh": config.mesh or "",
        "prefix_bytes": 0,
        "draft_revision": revision,
    }
    llm = LLM(config.target, draft, **options, **config.target_options)
    prompts = read_held_out(config, llm)
    if not prompts:
        raise InputError("evaluate needs --held-out: a file of JSON lines with prompts")
    with llm.leading() as leads:
        return _measured(config, llm, prompts, tell) if leads else None


def _measured(config: TrainConfig, llm: LLM, prompts: Sequence[Prompt], tell: Callable[[str], None]) -> dict[str, dict]:
    results = {}
    for temperature in TEMPERATURES:
        params, result = _sampling(config, temperature), {}
        for block in (1, llm.largest_block):
            # The first answer compiles.
            llm.generate(prompts[:1], params, block, progress=False)
            start = time.perf_counter()
            completions = [llm.generate([p], params, block, progress=False)[0] for p in prompts]
            rate = sum(len(c.token_ids) for c in completions) / (time.perf_counter() - start)
            result["plain_tokens_per_s" if block == 1 else "tokens_per_s"] = round(rate, 1)
        measured = acceptance(completions, keep_all=True)
        results[str(temperature)] = result | {
            "acceptance_length": round(measured.mean, 3),
            "rounds": measured.rounds,
            "prompts": measured.kept,
            "repeating_themselves": measured.degenerate,
        }
        tell(f"temperature {temperature:g}: {results[str(temperature)]}")
    return results

"""Whether trees of drafts would pay: the rank of the target's draw among the drafter's candidates, place by place.

    python scripts/bench/draft_ranks.py [--target DIR --draft DIR --data FILE] [--markdown FILE]

The target continues prompts. At many places of its texts the drafter fills a block, given the true text before it, and
the token that the target drew at each place of the block is looked up in the order of the drafter's candidates there. A
chain takes the first candidate; a tree that has the first n at a place would go on where the draw's rank is n or less.
At temperature 0 candidates are ordered by logits; above it by processed logits, and by these with the noise of the
target's draw, which drafts share here.
"""

import argparse
import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import LLM, SamplingParams
from dflash_jax.decoding.sampling import add_noise, process_logits
from dflash_jax.decoding.sampling_state import SamplingState
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.drafting import TargetHeads
from dflash_jax.models.packing import unpack_weights
from dflash_jax.training.blocks import at, block_states
from dflash_jax.training.corpus import standard_library
from dflash_jax.training.evaluation import held_out_prompts

RANKS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Texts:
    """Texts of the target.

    Attributes:
        tokens: Prompt and continuation, int [B, T].
        begin: The first position of the continuation, int [B].
        seeds: Seeds of the draws, uint32 [B].
        temperature: Of the draws.
    """

    tokens: np.ndarray
    begin: np.ndarray
    seeds: np.ndarray
    temperature: float


def texts_of(llm: LLM, prompts: list[list[int]], length: int, temperature: float) -> Texts:
    """Continuations of prompts, each as long as is left to ``length`` tokens."""
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=length - len(p), ignore_eos=True)
        for i, p in enumerate(prompts)
    ]
    completions = llm.generate(prompts, params)
    tokens = np.array([[*c.prompt_ids, *c.token_ids] for c in completions], np.int32)
    return Texts(tokens, np.array([len(p) for p in prompts]), np.arange(len(prompts), dtype=np.uint32), temperature)


def ranks(llm: LLM, texts: Texts, anchors: np.ndarray, size: int, has_noise: bool) -> np.ndarray:
    """Ranks, from 1, of the target's draws among a drafter's candidates.

    Args:
        llm: The pair.
        texts: The target's texts.
        anchors: Last known tokens, int [B, A], ``size`` - 1 or more before the end.
        size: Tokens of a block.
        has_noise: Whether the noise of the draws orders the candidates, too.

    Returns:
        int [B, A, size - 1].
    """
    assert isinstance(llm.drafter, Drafter), "other drafters have no blocks"
    target, drafter, config = unpack_weights(llm.target), unpack_weights(llm.drafter), llm.drafter.config
    assert not config.is_shifted, "places that are shifted by one are not ranked"
    assert config.draft_vocab_size is None, "reduced vocabularies are not ranked"
    rows = len(texts.tokens)
    options = {"temperature": jnp.full(rows, texts.temperature), "seed": jnp.asarray(texts.seeds)}
    sampling = replace(SamplingState.greedy(rows, llm.config.vocab_size), **options)
    return np.asarray(_ranks(target, drafter, sampling, texts.tokens, anchors, size=size, has_noise=has_noise))


@partial(jax.jit, static_argnames=("size", "has_noise"))
def _ranks(target, drafter, sampling, tokens, anchors, *, size: int, has_noise: bool):
    rows = len(tokens)
    heads = drafter.heads(TargetHeads(target.embed_tokens, target.logits, argmax, argmax))
    block = jnp.full((*anchors.shape, size), drafter.config.mask_token_id).at[..., 0].set(at(tokens, anchors))
    embedded = heads.embed(block.reshape(rows, -1)).reshape(*block.shape, -1)
    _, features = target(tokens, drafter.taps)
    states = block_states(drafter, features, embedded, anchors)[:, :, 1:]
    places = (anchors[..., None] + jnp.arange(1, size)).reshape(rows, -1)
    logits = process_logits(drafter.scaled(heads.logits(states.reshape(rows, places.shape[1], -1))), sampling)
    if has_noise:
        logits = add_noise(logits, sampling, places)
    drawn = jnp.take_along_axis(logits, at(tokens, places)[..., None], axis=-1)
    return (1 + (logits > drawn).sum(-1)).reshape(*anchors.shape, size - 1)


def argmax(logits, *_):
    """What a drafter without sampling takes."""
    return logits.argmax(-1)


def shares(found: np.ndarray) -> list[list[float]]:
    """Shares of ranks, int [..., places], of at most each of `RANKS` at each place; last, the mean accepted drafts.

    Those of rank 1 are a chain's, and those of rank n a tree's that has the first n candidates after each draft.
    """
    flat = found.reshape(-1, found.shape[-1])
    upto = np.stack([flat <= rank for rank in RANKS], axis=-1)
    return [*upto.mean(0).tolist(), np.cumprod(upto, axis=1).sum(1).mean(0).tolist()]


def table(found: dict[str, list[list[float]]]) -> str:
    """The shares as a table in Markdown."""
    head = ["place", *(f"{name}, rank ≤ {rank}" for name in found for rank in RANKS)]
    lines = [head, ["---"] * len(head)]
    count = len(next(iter(found.values())))
    for place in range(count):
        name = "accepted" if place == count - 1 else str(place + 1)
        lines.append([name, *(f"{share:.2f}" for each in found.values() for share in each[place])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default: the bundled pair")
    parser.add_argument("--draft")
    parser.add_argument("--data", metavar="FILE", help='JSON lines {"turns": ["…"]}, as benchmark_data.py writes them')
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--length", type=int, default=256, help="tokens of prompt and continuation (default: 256)")
    parser.add_argument("--anchors", type=int, default=24, help="places of a text (default: 24)")
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    args = parser.parse_args()
    llm = LLM(args.target, args.draft) if args.draft else LLM(args.target)
    if args.data:
        lines = Path(args.data).read_text(encoding="utf-8").splitlines()[: args.prompts]
        chats = [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in lines]
        prompts = [llm.encode_chat(chat)[: args.length // 2] for chat in chats]
    else:
        streams = [llm.encode(document.text) for document in standard_library()[1]]
        prompts = held_out_prompts(streams, args.length // 4, args.prompts)
    found, rng = {}, np.random.default_rng(0)
    for temperature in (0.0, 1.0):
        texts = texts_of(llm, prompts, args.length, temperature)
        last = args.length - args.block_size
        anchors = np.stack([np.sort(rng.choice(np.arange(b, last), args.anchors, replace=False)) for b in texts.begin])
        for has_noise in (False, True)[: 1 + (temperature > 0)]:
            name = f"T = {temperature:g}" + (", shared noise" if has_noise else "")
            found[name] = shares(ranks(llm, texts, anchors, args.block_size, has_noise))
            print(name, json.dumps(found[name]), flush=True)
    if args.markdown:
        args.markdown.write_text(table(found), encoding="utf-8")


if __name__ == "__main__":
    main()

"""What verifying fewer drafts brings: accepted drafts per verified draft, and predicted tokens per second.

    python scripts/bench/widths.py [--target DIR --draft DIR --data FILE] [--contexts 64 1024] [--markdown FILE]

The target continues prompts, in rounds of fixed block sizes and in rounds that verify the drafts whose chance to be
accepted is a price at least (`decoding.widths`). The rates of acceptance are learned in a run before. Texts are
compared with plain decoding's, up to ties. Speeds are those of the cost model of Qwen3.6-35B-A3B on one H200, whose
rounds it gives within a tenth to a fifth of what was measured there, with these acceptance lengths: a prediction, for
1, 8 and 32 requests at once.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import LLM
from dflash_jax.cli.ops import backend_for
from dflash_jax.decoding.batch_init import init_state
from dflash_jax.decoding.prefill import prefill_chunk
from dflash_jax.decoding.sampling_state import SamplingState
from dflash_jax.decoding.speculative import decode_by_widths
from dflash_jax.decoding.state import DecodeState, Settings
from dflash_jax.engine.acceptance import Calibration
from dflash_jax.engine.config import Speculation
from dflash_jax.engine.round_costs import RoundCosts, platform_named
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.packing import unpack_weights
from dflash_jax.parallel.sharding import Layout
from dflash_jax.planner import abstract_pair, read_shapes
from dflash_jax.training.corpus import standard_library
from dflash_jax.training.evaluation import held_out_prompts
from tools.bundled_pair import with_positions

FLAGSHIP = "configs/hf/Qwen3.6-35B-A3B.json", "configs/hf/Qwen3.6-35B-A3B-DFlash.json"
PRICES, REQUESTS, CHUNK, ROUNDS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5), (1, 8, 32), 64, 16


@dataclass(frozen=True)
class Run:
    """Means over the rounds of all sequences.

    Attributes:
        block_size: The compiled block size.
        tokens: New tokens of a round.
        verified: Tokens that it might have yielded.
        texts: The new tokens of each sequence.
    """

    block_size: int
    tokens: float
    verified: float
    texts: list[list[int]]

    @property
    def accepted_share(self) -> float:
        """Accepted drafts over verified ones."""
        return (self.tokens - 1) / max(self.verified - 1, 1e-9)


class Bench:
    """One pair on one batch of prompts.

    Args:
        llm: The pair.
        prompts: Token ids of each prompt.
        new_tokens: New tokens of each sequence.
        temperature: Of the draws.
    """

    def __init__(self, llm: LLM, prompts: list[list[int]], new_tokens: int, temperature: float):
        assert isinstance(llm.drafter, Drafter), "one DFlash drafter"
        self._pair = unpack_weights(llm.target), unpack_weights(llm.drafter)
        self._prompts, self._new_tokens, rows = prompts, new_tokens, len(prompts)
        greedy = SamplingState.greedy(rows, llm.config.vocab_size, llm.target.vocab, llm.target.backend)
        seeds = jnp.arange(rows, dtype=jnp.uint32)
        self._sampling = replace(greedy, temperature=jnp.full(rows, temperature), seed=seeds)
        self._prefill = jax.jit(partial(prefill_chunk, size=CHUNK))
        self._decode = jax.jit(decode_by_widths, static_argnames="settings")
        self._filled: DecodeState | None = None
        self.calibrations: dict[int, Calibration] = {}

    def run(self, block_size: int, price: float | None) -> Run:
        """Decodes all prompts; ``price``: None verifies all drafts."""
        target, drafter = self._pair
        settings = Settings(block_size=block_size, has_widths=block_size > 1)
        if self._filled is None:
            options = {"settings": Settings(), "sampling": self._sampling}
            state = init_state(target, drafter, self._prompts, self._new_tokens, **options)
            while bool((state.num_cached < state.prompt_length - 1).any()):
                state = self._prefill(target, drafter, state)
            self._filled = state
        rows = len(self._prompts)
        state = replace(self._filled, block_sizes=jnp.full(rows, block_size))
        calibration = self.calibrations.setdefault(block_size, Calibration(block_size - 1))
        prices = jnp.full(rows, price or 0.0)
        while not bool(state.done.all()):
            rates = calibration.rates(block_size - 1) if block_size > 1 else None
            used = drafter if block_size > 1 else None
            state, outcomes = self._decode(
                target, used, state, ROUNDS, None, settings=settings, rates=rates, prices=prices
            )
            if outcomes is not None:
                calibration.observe(np.asarray(outcomes), ROUNDS * rows)
        state = jax.device_get(state)
        rounds = int(state.rounds.sum())
        texts = [state.tokens[i, state.prompt_length[i] : state.length[i]].tolist() for i in range(rows)]
        return Run(block_size, state.yielded.sum() / rounds, state.verified.sum() / rounds, texts)


def flagship() -> RoundCosts:
    """The cost model of Qwen3.6-35B-A3B with its drafter on an H200, in bfloat16."""
    backend = backend_for("h200", "auto")
    target, drafter = abstract_pair(read_shapes(*FLAGSHIP), Layout(), jnp.bfloat16, None, backend)
    assert drafter is not None
    return RoundCosts(target, [drafter], platform_named("gpu"))


def speeds(costs: RoundCosts, run: Run) -> list[float]:
    """Predicted speed over plain decoding, for each of `REQUESTS`."""
    result = []
    for count in REQUESTS:
        places, verified = count * run.block_size, count * run.verified
        cost = costs(count, Speculation(run.block_size)) - costs.saved(places, verified)
        result.append(run.tokens * costs(count, Speculation(1, None)) / cost)
    return result


def own_price(costs: RoundCosts, run: Run, count: int) -> float:
    """The price of `DraftLengthPolicy.widths` for ``count`` requests after such rounds."""
    cost = costs(count, Speculation(run.block_size)) - costs.saved(count * run.block_size, count * run.verified)
    places, now = count * run.block_size, count * min(run.tokens, run.block_size - 1)
    return (costs.saved(places, now) - costs.saved(places, now + count)) * run.tokens / cost


def rows_of(bench: Bench, sizes: list[int], costs: RoundCosts, name: str) -> list[list[str]]:
    """The rows of one setting in the table."""
    plain, rows = bench.run(1, None), []

    def add(how: str, run: Run) -> Run:
        equal = sum(a == b for a, b in zip(run.texts, plain.texts, strict=True))
        values = [f"{run.tokens:.2f}", f"{run.verified:.2f}", f"{run.accepted_share:.2f}"]
        rows.append([name, how, *values, *(f"{x:.2f}" for x in speeds(costs, run)), f"{equal} of {len(run.texts)}"])
        print(" ".join(rows[-1]), flush=True)
        return run

    for size in sizes:
        whole = add(f"blocks of {size}", bench.run(size, None))
    for price in PRICES:
        add(f"{size}, price {price:g}", bench.run(size, price))
    for count in REQUESTS:
        run = whole
        # As the engine's own price follows from the rounds before.
        for _ in range(2):
            price = own_price(costs, run, count)
            run = bench.run(size, price)
        add(f"{size}, the engine's price for {count} at once, {price:.2f}", run)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default: the bundled pair, its positions raised")
    parser.add_argument("--draft")
    parser.add_argument("--data", metavar="FILE", help='JSON lines {"turns": ["…"]}, as benchmark_data.py writes them')
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--contexts", type=int, nargs="+", default=[64], help="tokens of a prompt (default: 64)")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        pair = args.target, args.draft
        if args.target is None:
            pair = tuple(map(str, with_positions(Path(directory), max(args.contexts) + args.new_tokens)))
        llm = LLM(*pair)
    costs, rows = flagship(), []
    for context in args.contexts:
        if args.data:
            lines = Path(args.data).read_text(encoding="utf-8").splitlines()[: args.prompts]
            chats = [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in lines]
            prompts = [llm.encode_chat(chat)[-context:] for chat in chats]
        else:
            streams = [llm.encode(document.text) for document in standard_library()[1]]
            if max(map(len, streams)) <= 2 * context:
                streams = [[token for stream in streams for token in stream]]
            prompts = held_out_prompts(streams, context, args.prompts)
        for temperature in (0.0, 0.7):
            bench = Bench(llm, prompts, args.new_tokens, temperature)
            rows += rows_of(bench, args.block_sizes, costs, f"{context:,} tokens, T = {temperature:g}")
    if args.markdown:
        head = ["context", "verified", "tokens a round", "verified a round", "accepted / verified drafts"]
        head += [f"{n} at once, × plain (predicted)" for n in REQUESTS] + ["texts equal to plain"]
        lines = [head, ["---"] * len(head), *rows]
        args.markdown.write_text("".join(f"| {' | '.join(line)} |\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()

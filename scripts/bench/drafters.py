"""The bundled target's MTP head and DFlash drafter at once, and each alone: tokens/s by turns, and where the time goes.

    python scripts/bench/drafters.py [--at-once 1] [--turns 10] [--contenders "both auto" "mtp 2" …] [--json FILE]

A contender has the drafters "both", "mtp" or "dflash", and "auto", a block size, or with both drafters one kind of
round: "both 2:1" are blocks of 2 that the head drafts, "both 4" those of 4 that the DFlash drafter drafts, and "both
2:1 alone" blocks of 2 by the head without the context of the DFlash drafter. "plain" has no drafter. Each has an engine
of its own, so that "auto" learns from its own rounds only; those of "auto" are warmed up. Each turn runs every
contender once, in alternating order: the machine's speed changes over minutes by more than contenders differ, and a
ratio within a turn is free of that. Prompts are held out of all training; float32, without a prefix cache.
"""

import argparse
import json
import statistics
import time
from collections import Counter, defaultdict
from pathlib import Path

from dflash_jax import LLM, SamplingParams
from dflash_jax.engine.config import BlockSize, Speculation
from dflash_jax.engine.warm_up import warm_up
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.training.corpus import standard_library
from dflash_jax.training.evaluation import held_out_prompts

DRAFTERS = {"both": [TINY / "draft", "mtp"], "dflash": TINY / "draft", "mtp": "mtp", "plain": None}
CONTENDERS = ["both auto", "mtp auto", "dflash auto", "mtp 2", "dflash 4", "both 2:1", "plain"]
# Tokens of a prompt.
PROMPT = 64


class Contender:
    """Drafters and a choice of rounds.

    Args:
        name: As on the command line.
        at_once: Requests at a time.

    Attributes:
        name: As given.
        turns: Of each turn: seconds, rounds by kind, and the seconds of a round that the engine measured, by kind.
    """

    def __init__(self, name: str, at_once: int):
        self.name, self._at_once = name, at_once
        drafters, _, rounds = name.partition(" ")
        rounds, _, alone = rounds.partition(" ")
        size, _, drafter = rounds.partition(":")
        self._llm = LLM(TINY / "target", draft=DRAFTERS[drafters], prefix_bytes=0, dtype="float32", slots=at_once)
        self._block_size: BlockSize = "auto" if rounds == "auto" else int(size or 1)
        # With both drafters a block size leaves the choice of the drafter to the engine.
        is_one = drafters == "both" and rounds != "auto"
        self._only = Speculation(int(size), int(drafter or 0), alone == "alone") if is_one else None
        self._rounds: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self.turns: list[dict] = []

    def prepare(self, prompts: list[list[int]], params: SamplingParams) -> None:
        """Compiles and measures the programs of the engine."""
        self._answers(prompts, params)
        engine = self._llm.engine
        assert engine is not None
        if self._block_size == "auto":
            warm_up(engine)
        if (only := self._only) is not None:

            def choose(*_) -> Speculation:
                return only

            engine.policy.choose = choose  # pyright: ignore[reportAttributeAccessIssue]
        observe = engine.policy.observe_seconds

        def observe_seconds(
            batch_size: int,
            speculation: Speculation,
            seconds: float,
            rounds: int = 1,
            is_whole: bool = True,
            tokens: int = 0,
        ) -> None:
            self._rounds[str(speculation)] += rounds
            self._seconds[str(speculation)] += seconds * rounds
            observe(batch_size, speculation, seconds, rounds, is_whole, tokens)

        engine.policy.observe_seconds = observe_seconds
        self._answers(prompts, params)

    def encode(self, text: str) -> list[int]:
        """Token ids."""
        return self._llm.encode(text)

    def _answers(self, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
        texts = []
        for first in range(0, len(prompts), self._at_once):
            part = prompts[first : first + self._at_once]
            texts += [c.token_ids for c in self._llm.generate(part, params, block_size=self._block_size)]
        return texts

    def turn(self, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
        """Answers the prompts: their tokens."""
        self._rounds.clear()
        self._seconds.clear()
        compiled, began = self._llm.compile_s, time.perf_counter()
        texts = self._answers(prompts, params)
        seconds = time.perf_counter() - began - (self._llm.compile_s - compiled)
        ms = {kind: 1e3 * self._seconds[kind] / rounds for kind, rounds in self._rounds.items()}
        self.turns.append({"seconds": seconds, "rounds": dict(self._rounds), "ms_per_round": ms})
        return texts


def summary(contender: Contender, reference: Contender, tokens: int) -> dict:
    """Medians of the turns, and the tokens/s of ``reference`` over those of ``contender``, turn by turn."""
    turns = contender.turns
    ratios = [mine["seconds"] / its["seconds"] for mine, its in zip(turns, reference.turns, strict=True)]
    kinds = sorted({kind for turn in turns for kind in turn["rounds"]})
    return {
        "contender": contender.name,
        "tokens_per_s": round(statistics.median(tokens / turn["seconds"] for turn in turns)),
        f"{reference.name} over this": round(statistics.median(ratios), 3),
        "of each turn": [round(ratio, 3) for ratio in ratios],
        "rounds of a turn": {k: round(statistics.mean(t["rounds"].get(k, 0) for t in turns)) for k in kinds},
        "ms of a round": {
            k: round(statistics.median(t["ms_per_round"][k] for t in turns if k in t["rounds"]), 3) for k in kinds
        },
    }


def make_parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--at-once", type=int, default=1, metavar="N", help="requests at a time (default: %(default)s)")
    p.add_argument("--turns", type=int, default=10, metavar="N", help="default: %(default)s")
    p.add_argument("--prompts", type=int, default=16, metavar="N", help="default: %(default)s")
    p.add_argument("--new-tokens", type=int, default=256, metavar="N", help="of each prompt (default: %(default)s)")
    p.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s")
    p.add_argument("--seconds", type=float, default=300.0, metavar="S", help="no turn begins later (%(default)s)")
    p.add_argument("--contenders", nargs="+", default=CONTENDERS, metavar="NAME", help=f"default: {CONTENDERS}")
    p.add_argument("--json", type=Path, metavar="FILE")
    return p


def main() -> None:
    args = make_parser().parse_args()
    params = SamplingParams(max_tokens=args.new_tokens, temperature=args.temperature, ignore_eos=True, seed=1)
    contenders = [Contender(name, args.at_once) for name in args.contenders]
    prompts = []
    for document in standard_library()[1]:
        if len(document.text) > 2000 and len(prompts) < args.prompts:
            prompts += held_out_prompts([contenders[0].encode(document.text[:2000])], PROMPT, 1)
    for contender in contenders:
        contender.prepare(prompts, params)
    texts, began = [], time.perf_counter()
    for turn in range(args.turns):
        # Preparation does not count: it compiles, which takes minutes with an empty cache.
        if time.perf_counter() - began > args.seconds:
            break
        for contender in contenders[:: 1 if turn % 2 == 0 else -1]:
            texts.append(contender.turn(prompts, params))
    if any(text != texts[0] for text in texts):
        raise SystemExit("error: the contenders' texts differ")
    tokens = sum(map(len, texts[0]))
    rows = [{"at_once": args.at_once, "turns": len(contenders[0].turns), "tokens": tokens}]
    rows += [summary(contender, contenders[0], tokens) for contender in contenders]
    for row in rows:
        print(json.dumps(row), flush=True)
    if args.json:
        args.json.write_text("[\n" + ",\n".join(f" {json.dumps(row)}" for row in rows) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()

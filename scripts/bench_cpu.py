"""Plain decoding and DFlash against transformers on the same weights: one process each, float32, greedy, as JSON.

python scripts/bench_cpu.py [--target DIR --draft DIR] [--new-tokens N] [--prompts N]
"""

import argparse
import json
import subprocess
import sys
import time
from itertools import islice, pairwise
from pathlib import Path

PROMPTS = [
    "def main(",
    "import os\nimport sys\n\n",
    "class Parser:\n    def __init__(self",
    '    """Return the ',
    "for name in ",
]


def transformers_seconds(target: str, prompts: list[str], new_tokens: int) -> dict:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    seconds, tokens = 0.0, []
    for i, prompt in enumerate([prompts[0], *prompts]):
        ids = tokenizer(prompt, return_tensors="pt")
        options = {"do_sample": False, "min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
        began = time.perf_counter()
        out = model.generate(**ids, **options)
        if i:  # the first run warms up
            seconds += time.perf_counter() - began
            tokens.append(out[0, ids["input_ids"].shape[1] :].tolist())
    return {"tokens_per_s": len(prompts) * new_tokens / seconds, "tokens": tokens}


def dflash_seconds(target: str | None, draft: str | None, prompts: list[str], new_tokens: int, block: int) -> dict:
    from dflash_jax import LLM, SamplingParams

    llm = LLM(target, draft) if target else LLM()
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    llm.generate(prompts[:1], params, block_size=block)
    began = time.perf_counter()
    outs = [llm.generate([p], params, block_size=block)[0] for p in prompts]
    seconds = time.perf_counter() - began
    rounds = sum(len(o.acceptance_lengths) for o in outs)
    return {
        "tokens_per_s": len(prompts) * new_tokens / seconds,
        "ms_per_round": 1e3 * sum(o.timings.decode_s for o in outs) / rounds,
        "acceptance_length": sum(sum(o.acceptance_lengths) for o in outs) / rounds,
        "tokens": [o.token_ids for o in outs],
    }


def context_milliseconds(target: str | None, draft: str | None) -> dict:
    """Median ms of a round by live context and buffer: it should follow the first and not the second."""
    from dflash_jax import LLM, SamplingParams

    llm = LLM(target, draft) if target else LLM()
    ids = llm.encode(PROMPTS[2]) * 1000
    found = {}
    for context, buffer in ((64, 512), (64, llm.max_len), (llm.max_len // 2, llm.max_len)):
        params = SamplingParams(temperature=0.0, max_tokens=buffer - context, ignore_eos=True)
        ends, rounds = [], []
        for piece in islice(llm.pieces(ids[:context], params, llm.largest_block), 25):
            ends.append(time.perf_counter())
            rounds.append(len(piece.acceptance_lengths))
        # The first dispatches compile.
        each = sorted((b - a) / n for (a, b), n in zip(pairwise(ends[2:]), rounds[3:], strict=True))
        found[f"context {context}, buffer {buffer}"] = 1e3 * each[len(each) // 2]
    return found


def child(name: str, args) -> dict:
    """Runs one contender in a process of its own."""
    command = [sys.executable, __file__, "--only", name, *sys.argv[1:]]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default: the bundled pair")
    parser.add_argument("--draft")
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    prompts = PROMPTS[: args.prompts]
    tiny = str(Path(__file__).parents[1] / "dflash_jax" / "assets" / "tiny" / "target")
    if args.only == "transformers":
        print(json.dumps(transformers_seconds(args.target or tiny, prompts, args.new_tokens)))
    elif args.only == "context":
        print(json.dumps(context_milliseconds(args.target, args.draft)))
    elif args.only:
        print(json.dumps(dflash_seconds(args.target, args.draft, prompts, args.new_tokens, int(args.only))))
    else:
        found = {name: child(name, args) for name in ("transformers", "1", "4", "8", "16")}
        plain = found["1"].pop("tokens")
        for name, result in found.items():
            result["equal_to_plain"] = result.pop("tokens", plain) == plain
            result["speed_of_plain"] = result["tokens_per_s"] / found["1"]["tokens_per_s"]
            print(json.dumps({"contender": name if name == "transformers" else f"dflash_jax block {name}", **result}))
        print(json.dumps({"ms_per_round": child("context", args)}))


if __name__ == "__main__":
    main()

"""Plain decoding and DFlash against transformers on the same weights: one process each, float32, as JSON lines.

    python scripts/bench/cpu.py [--target DIR --draft DIR] [--data FILE ... --temperatures 0 0.7] [--blocks 1 4]
                                [--threads 1] [--llama-bench PROGRAM --gguf FILE ...] [--quantize FORM ...]

Without --data: a few beginnings of Python, --new-tokens tokens each; with it, answers to the first turns of the first
--prompts conversations of each file (as scripts/data/benchmark_data.py writes them), at most --new-tokens long. --gguf:
files of the same weights, in the bits that they have, for llama.cpp's own benchmark (prompts of the average length).
--quantize: forms of the target's weights, each a contender for plain decoding and for each block; transformers, which
has none of them, is then left out. --threads: cores that a contender may use.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path

from dflash_jax.checkpoint.quantize import QUANTIZE

PROMPTS = [
    "def main(",
    "import os\nimport sys\n\n",
    "class Parser:\n    def __init__(self",
    '    """Return the ',
    "for name in ",
]


def read_prompts(path: str | None, count: int, target: str) -> list[list[int]]:
    """Token ids, the same for all contenders."""
    from dflash_jax.benchmarking.data import read_task
    from dflash_jax.frontend.tokenizer import Tokenizer

    tokenizer = Tokenizer(Path(target))
    if path is None:
        return [tokenizer.encode(text) for text in PROMPTS[:count]]
    questions = [turns[0] for turns in read_task(Path(path), None, 0)[:count]]
    return [tokenizer.encode_plain(tokenizer.render_chat([{"role": "user", "content": q}])) for q in questions]


def transformers_answers(target: str) -> Callable:
    """(prompts, new_tokens, temperature, ignore_eos) → (tokens, further figures)."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()

    def answer(prompts, new_tokens, temperature, ignore_eos):
        torch.manual_seed(0)
        options = {"do_sample": temperature > 0, "max_new_tokens": new_tokens}
        options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        options |= {"min_new_tokens": new_tokens} if ignore_eos else {}
        found = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)  # pyright: ignore[reportAttributeAccessIssue]
            found.append(out[0, len(prompt) :].tolist())
        return found, {}

    return answer


def llama_bench(path: str, sets: dict[str, list[list[int]]], args) -> dict[str, dict]:
    """As `measure`, by llama-bench: prompts of the average length of each set, answers of ``new_tokens``, greedy."""
    found = {}
    for name, prompts in sets.items():
        length = round(sum(map(len, prompts)) / len(prompts))
        command = [args.llama_bench, "-m", path, "-t", str(args.threads or os.cpu_count()), "-o", "json"]
        command += ["-p", "0", "-n", str(args.new_tokens), "-d", f"0,{length}", "-pg", f"{length},{args.new_tokens}"]
        runs = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        kinds = {(run["n_prompt"], run["n_depth"]): run for run in runs}
        found[f"{name}, T=0"] = {
            "tokens_per_s": 1e9 * args.new_tokens / kinds[length, 0]["avg_ns"],
            "ms_per_round": 1e-6 * kinds[0, length]["avg_ns"] / args.new_tokens,
            "llama.cpp": f"{runs[0]['build_commit']}, {runs[0]['model_type']}",
            "tokens": None,
        }
    return found


def dflash_answers(target: str | None, draft: str | None, block: int, draft_tokens: str, quantize: str) -> Callable:
    """As `transformers_answers`; prompts one after the other."""
    from dflash_jax import LLM, SamplingParams

    options = {"prefix_bytes": 0, "draft_tokens": draft_tokens, "quantize": None if quantize == "none" else quantize}
    llm = LLM(target, draft, **options) if target else LLM(**options)

    def answer(prompts, new_tokens, temperature, ignore_eos):
        params = SamplingParams(temperature=temperature, max_tokens=new_tokens, ignore_eos=ignore_eos, seed=0)
        outs = [llm.generate([p], params, block_size=block)[0] for p in prompts]
        rounds = sum(len(o.acceptance_lengths) for o in outs)
        figures = {
            "ms_per_round": 1e3 * sum(o.timings.decode_s for o in outs) / rounds,
            "acceptance_length": sum(sum(o.acceptance_lengths) for o in outs) / rounds,
        }
        return [o.token_ids for o in outs], figures

    return answer


def measure(answer: Callable, sets: dict[str, list[list[int]]], args, is_compiled: bool) -> dict[str, dict]:
    """Figures by set of prompts and temperature. Before the clock starts the first prompt is answered once, or all of
    them where sizes ``is_compiled``.
    """
    found = {}
    for name, prompts in sets.items():
        for temperature in args.temperatures:
            options = args.new_tokens, temperature, not args.data
            answer(prompts if is_compiled else prompts[:1], *options)
            began = time.perf_counter()
            tokens, figures = answer(prompts, *options)
            seconds = time.perf_counter() - began
            rate = sum(map(len, tokens)) / seconds
            found[f"{name}, T={temperature:g}"] = {"tokens_per_s": rate, **figures, "tokens": tokens}
    return found


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
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="of each file (default: %(default)s)")
    parser.add_argument("--data", nargs="+", metavar="FILE", help='JSON lines {"turns": ["…"]}')
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0], metavar="T", help="default: 0")
    parser.add_argument("--blocks", nargs="*", type=int, default=[4, 8, 16], metavar="N", help="default: 4 8 16")
    parser.add_argument("--draft-tokens", default="auto", metavar="FILE|none", help="as generate's")
    parser.add_argument("--quantize", nargs="+", choices=QUANTIZE, default=["none"], metavar="FORM")
    parser.add_argument("--threads", type=int, metavar="N", help="default: as many as there are cores")
    parser.add_argument("--llama-bench", metavar="PROGRAM", default="llama-bench")
    parser.add_argument("--gguf", nargs="+", default=[], metavar="FILE", help="the same weights for llama.cpp")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.threads:
        # Each contender is a process that inherits this.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    target = args.target or str(Path(__file__).parents[2] / "dflash_jax" / "assets" / "tiny" / "target")
    if args.only == "context":
        print(json.dumps(context_milliseconds(args.target, args.draft)))
        return
    if args.only:
        sets = {
            Path(path).stem if path else "code": read_prompts(path, args.prompts, target)
            for path in args.data or [None]
        }
        block, _, form = args.only.partition(" ")
        is_ours = block.isdigit()
        if args.only in args.gguf:
            found = llama_bench(args.only, sets, args)
        elif is_ours:
            answer = dflash_answers(args.target, args.draft, int(block), args.draft_tokens, form)
            found = measure(answer, sets, args, True)
        else:
            found = measure(transformers_answers(target), sets, args, False)
        print(json.dumps(found))
        return
    plain: dict[str, dict] = {}
    ours = [f"{block} {form}" for form in args.quantize for block in (1, *args.blocks)]
    for name in (*ours, *args.gguf, *(["transformers"] if args.quantize == ["none"] else [])):
        contender = f"dflash_jax block {name.removesuffix(' none')}" if name in ours else Path(name).name
        try:
            results = child(name, args)
        except subprocess.CalledProcessError as e:
            print(json.dumps({"contender": contender, "failed": f"exit code {e.returncode}"}), flush=True)
            continue
        plain = plain or {label: dict(result) for label, result in results.items()}
        for label, result in results.items():
            # Whoever samples otherwise has other tokens.
            result["equal_to_plain"] = result.pop("tokens") == plain[label]["tokens"]
            result["speed_of_plain"] = result["tokens_per_s"] / plain[label]["tokens_per_s"]
            print(json.dumps({"contender": contender, "prompts": label, **result}), flush=True)
    if not args.data:
        print(json.dumps({"ms_per_round": child("context", args)}))


if __name__ == "__main__":
    main()

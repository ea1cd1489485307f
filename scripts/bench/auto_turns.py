"""Block size "auto" against plain decoding, turn by turn in fresh processes, as a table in Markdown.

    python scripts/bench/auto_turns.py [--target DIR --draft DIR] [--sequences 1 4 16] [--processes 5]

A process answers the same prompts in turns: plainly twice, of which the first compiles and is not counted, then with
"auto", each time followed by a plain turn. The ratio of a turn is that of its tokens per second of decoding to the mean
of the plain turns before and after it. Medians are over the processes; the first process begins without costs on
record where `--forget` is given, which removes those of earlier runs.
"""

import argparse
import json
import statistics
import subprocess
import sys

PROMPTS = ["def main(", "import os\nimport sys\n\n", "class Parser:\n    def __init__(self", '    """Return the ']


def measure(args) -> None:
    """Runs the turns in this process, and prints their ratios and block sizes as JSON."""
    from dflash_jax import LLM, SamplingParams

    given = {"target": args.target, "draft": args.draft} if args.target else {}
    # Engines of their own: one of both kinds would be made anew at each turn.
    plain, auto = LLM(args.target, None, slots=max(args.sequences)), LLM(**given, slots=max(args.sequences))
    params = SamplingParams(temperature=0, max_tokens=args.new_tokens, ignore_eos=True)
    (count,) = args.sequences
    prompts = [PROMPTS[i % len(PROMPTS)] + " " * (i // len(PROMPTS)) for i in range(count)]

    def rate(llm: LLM) -> float:
        found = llm.generate(prompts, params, progress=False)
        return sum(len(c.token_ids) for c in found) / max(c.timings.decode_s for c in found)

    rate(plain)
    before, ratios = rate(plain), []
    for _ in range(args.turns):
        now, after = rate(auto), rate(plain)
        ratios.append(2 * now / (before + after))
        before = after
    print(json.dumps([round(ratio, 3) for ratio in ratios]))


def forget() -> None:
    """Removes the costs on record."""
    from dflash_jax.engine.compile_cache import cache_directory, enable_disk_cache

    enable_disk_cache()
    for path in (cache_directory() or sys.exit("there is no directory of compiled programs")).glob(
        "round-costs-*.json"
    ):
        path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default: the bundled pair")
    parser.add_argument("--draft")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--new-tokens", type=int, default=384)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--forget", action="store_true", help="remove the costs on record first")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        measure(args)
        return
    if args.forget:
        forget()
    print("| sequences | " + " | ".join(f"turn {i + 1}" for i in range(args.turns)) + " | least of a process |")
    print("|---|" + "---|" * (args.turns + 1))
    for count in args.sequences:
        command = [sys.executable, __file__, "--here", "--sequences", str(count), "--new-tokens", str(args.new_tokens)]
        command += ["--turns", str(args.turns)]
        command += ["--target", args.target, "--draft", args.draft] if args.target else []
        runs = []
        for _ in range(args.processes):
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
        medians = [f"{statistics.median(turn):.2f}" for turn in zip(*runs, strict=True)]
        print(f"| {count} | {' | '.join(medians)} | {min(map(min, runs)):.2f} |", flush=True)


if __name__ == "__main__":
    main()

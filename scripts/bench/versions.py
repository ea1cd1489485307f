"""Two versions of this package beside each other: decoded tokens/s on this CPU, as JSON lines.

    python scripts/bench/versions.py BEFORE AFTER [--model bundled|smollm2] [--pairs 3] [--turns 20] [--json FILE]

BEFORE and AFTER are checkouts. A pair is a process of each, both alive, which answer the same prompts by turns: the
machine's speed changes over minutes by more than the versions differ, and a ratio of neighbours is free of that. The
median of all ratios counts. Both run in this process's Python; greedy, float32, without a prefix cache; a load's first
two answers of each process, which compile, do not count.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

PROMPTS = ["def main(", "import os\nimport sys\n\n", "class Parser:\n    def __init__(self", '    """Return the ']
# Requests at a time, block size, new tokens of each.
LOADS = {
    "bundled": [(1, 1, 400), (1, 8, 400), (4, 1, 300), (4, 8, 300)],
    "smollm2": [(1, 1, 96), (1, 4, 96), (4, 1, 64), (4, 4, 64)],
}
# Runs in a checkout, whose package may be older than this file: it uses the public API only.
CONTENDER = """
import json, os, sys
from pathlib import Path
import dflash_jax
from dflash_jax import LLM, SamplingParams

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
assets = Path(dflash_jax.__file__).parent / "assets"
pairs = {"bundled": (assets / "tiny/target", assets / "tiny/draft"), "smollm2": (sys.argv[2], assets / "smollm2")}
target, draft = pairs[sys.argv[1]]
llm = LLM(target, draft=draft, prefix_bytes=0, dtype="float32", slots=4)
for line in sys.stdin:
    prompts, block_size, new_tokens = json.loads(line)
    params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
    done = llm.generate(prompts, params, block_size=block_size)
    seconds = max(c.timings.decode_s for c in done)
    print(json.dumps(sum(len(c.token_ids) for c in done) / seconds), file=answers, flush=True)
"""


class Contender:
    """A process of one version.

    Args:
        checkout: Directory that has the package.
        model: Key of `LOADS`.
        target: The checkpoint, for models that are not part of the package.
    """

    def __init__(self, checkout: Path, model: str, target: str):
        self.checkout, environment = checkout, os.environ | {"PYTHONPATH": str(checkout)}
        command = [sys.executable, "-c", CONTENDER, model, target]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=checkout, env=environment, stdin=pipe, stdout=pipe, text=True)

    def rate(self, load: tuple[int, int, int]) -> float:
        """Decoded tokens/s of one load."""
        count, block_size, new_tokens = load
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps([PROMPTS[:count], block_size, new_tokens]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"error: the process of {self.checkout} ended; its message is above")
        return json.loads(line)

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def measure_pair(contenders: list[Contender], load: tuple[int, int, int], turns: int) -> list[tuple[float, float]]:
    """Tokens/s of both contenders, by turns, which of them begins changing."""
    for contender in contenders * 2:
        contender.rate(load)
    rates = []
    for turn in range(turns):
        order = contenders if turn % 2 == 0 else contenders[::-1]
        pair = [contender.rate(load) for contender in order]
        rates.append(tuple(pair if turn % 2 == 0 else pair[::-1]))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, metavar="BEFORE", help="checkout")
    parser.add_argument("after", type=Path, metavar="AFTER", help="checkout")
    parser.add_argument("--model", choices=list(LOADS), default="bundled")
    parser.add_argument("--target", default="", help="checkpoint of smollm2 (default: the one in the cache)")
    parser.add_argument("--pairs", type=int, default=3, metavar="N", help="processes of each version (default: 3)")
    parser.add_argument("--turns", type=int, default=20, metavar="N", help="answers to each load (default: 20)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.model == "smollm2" and not args.target:
        from dflash_jax.checkpoint.smollm2 import cached_smollm2

        args.target = str(cached_smollm2(lambda line: print(line, file=sys.stderr)))
    rates: dict[tuple[int, int, int], list[list[tuple[float, float]]]] = {load: [] for load in LOADS[args.model]}
    checkouts = [args.before.resolve(), args.after.resolve()]
    for pair in range(args.pairs):
        # The process that starts first may get better memory.
        order = checkouts if pair % 2 == 0 else checkouts[::-1]
        started = [Contender(checkout, args.model, args.target) for checkout in order]
        for load in LOADS[args.model]:
            rates[load].append(measure_pair(started if pair % 2 == 0 else started[::-1], load, args.turns))
        for contender in started:
            contender.close()
    rows = []
    for (count, block_size, new_tokens), pairs in rates.items():
        ratios = [[after / before for before, after in pair] for pair in pairs]
        each = [rate for pair in pairs for rate in pair]
        row = {"model": args.model, "requests": count, "block_size": block_size, "new_tokens": new_tokens}
        row |= {"before": round(statistics.median(b for b, _ in each), 1)}
        row |= {"after": round(statistics.median(a for _, a in each), 1)}
        row |= {"ratio": round(statistics.median([r for pair in ratios for r in pair]), 3)}
        row |= {"ratio_of_pairs": [round(statistics.median(pair), 3) for pair in ratios]}
        rows.append(row)
        print(json.dumps(row), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

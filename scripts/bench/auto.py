"""Block size "auto" against plain decoding, each prompt in a fresh process, as JSON lines and a summary.

    python scripts/bench/auto.py [--target DIR --draft DIR --data FILE]

Every prompt is answered by `dflash generate --json` with "auto" and with block size 1, one process after the other; new
tokens are 48 to 256. A first process of each kind, which compiles, is not counted. Rates are those of decoding, without
prompts and compilation. With `--repeats N`, N processes of each kind take turns, and their median and their fastest
rates are compared: answers of a few milliseconds vary by half from process to process. `--control` adds plain decoding
a second time: its ratios to the first show what such differences are worth.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

# Ratios of a contender: of its medians, and of its fastest processes.
Ratios = tuple[list[float], list[float]]
PROMPTS = ["def main(", "import os\nimport sys\n\n", "class Parser:\n    def __init__(self", '    """Return the ']
SHORTEST, LONGEST = 48, 256


def answer(prompt: str, new_tokens: int, block_size: str, options: list[str]) -> dict:
    """One answer in a process of its own: its JSON with the seconds of the process."""
    command = [sys.executable, "-m", "dflash_jax.generate", "--json", "--prompt", prompt, "--block-size", block_size]
    command += ["--max-new-tokens", str(new_tokens), "--temperature", "0", *options]
    began = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout) | {"process_s": time.perf_counter() - began}


def rate(answered: dict) -> float:
    """New tokens per second of decoding."""
    return len(answered["token_ids"]) / answered["timings"]["decode_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default: the bundled pair")
    parser.add_argument("--draft")
    parser.add_argument("--data", metavar="FILE", help='JSON lines {"turns": ["…"]}, as benchmark_data.py writes them')
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="processes of each kind (default: 1)")
    parser.add_argument("--control", action="store_true", help="compare plain decoding with itself too")
    args = parser.parse_args()
    options = ["--ignore-eos"]
    if args.target:
        options += ["--target", args.target, "--draft", args.draft]
    prompts = [PROMPTS[i % len(PROMPTS)] + " " * (i // len(PROMPTS)) for i in range(args.prompts)]
    if args.data:
        lines = Path(args.data).read_text(encoding="utf-8").splitlines()[: args.prompts]
        prompts = [json.loads(line)["turns"][0] for line in lines]
        options += ["--chat"]
    # Contender → its block size. All are compared with "plain".
    contenders = {"auto": "auto", "plain": "1"} | ({"control": "1"} if args.control else {})
    compared: dict[str, Ratios] = {name: ([], []) for name in contenders if name != "plain"}
    for block_size in ("auto", "1"):
        answer(prompts[0], SHORTEST, block_size, options)
    for i, prompt in enumerate(prompts):
        new_tokens = SHORTEST + (LONGEST - SHORTEST) * i // max(len(prompts) - 1, 1)
        answers = {name: [] for name in contenders}
        for repeat in range(args.repeats):
            # Each begins as often as the others.
            for name in sorted(contenders, key=lambda name: (list(contenders).index(name) + repeat) % len(contenders)):
                answers[name].append(answer(prompt, new_tokens, contenders[name], options))
        rates = {name: list(map(rate, each)) for name, each in answers.items()}
        auto, plain = answers["auto"][0], answers["plain"][0]
        lengths = auto["acceptance_lengths"]
        row = {
            "new_tokens": new_tokens,
            "equal": all(a["token_ids"] == plain["token_ids"] for each in answers.values() for a in each),
            "tokens_per_s": {name: round(statistics.median(each), 1) for name, each in rates.items()},
            "acceptance_length": round(sum(lengths) / len(lengths), 2),
            "compile_s": [round(a["timings"]["compile_s"], 2) for a in (auto, plain)],
            "process_s": [round(a["process_s"], 2) for a in (auto, plain)],
        }
        for name, (medians, fastest) in compared.items():
            medians.append(statistics.median(rates[name]) / statistics.median(rates["plain"]))
            fastest.append(max(rates[name]) / max(rates["plain"]))
            row[name] = {"ratio": round(medians[-1], 3), "ratio_of_fastest": round(fastest[-1], 3)}
        print(json.dumps(row), flush=True)
    for name, (medians, fastest) in compared.items():
        summary = {"least": min(medians), "median": statistics.median(medians)}
        summary |= {"least_of_fastest": min(fastest), "median_of_fastest": statistics.median(fastest)}
        print(json.dumps({"contender": name, **{key: round(value, 3) for key, value in summary.items()}}))


if __name__ == "__main__":
    main()

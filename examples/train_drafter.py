"""Trains a drafter on ten lines of data and decodes with it: the whole way, on a CPU.

Ten lines teach it little; the text is exact all the same. Needs the extra "train". Run:
python examples/train_drafter.py
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from dflash_jax import LLM, SamplingParams

NAMES = ("area", "clamp", "mean", "head", "tail", "swap", "scale", "shift", "join", "count")
FRESH = ("--layers", "2", "--block-size", "8", "--taps", "1", "3", "--intermediate-size", "256")
RECIPE = ("--sequence-length", "64", "--rows", "2", "--anchors", "8", "--steps", "4", "--evaluate-tokens", "16")


def train(command: str, *options: str) -> None:
    subprocess.run([sys.executable, "-m", "dflash_jax.train", command, *options], check=True)


def main(directory: Path) -> None:
    lines = [{"text": f"def {name}(values):\n    return {name}_of(values)\n"} for name in NAMES]
    data, run = directory / "ten.jsonl", directory / "run"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    train("fit", "--data", str(data), "--output", str(run), *FRESH, *RECIPE)
    params = SamplingParams(max_tokens=32)
    (drafted,) = LLM(draft=run / "draft", block_size=8).generate(["def area("], params)
    (plain,) = LLM(draft=None).generate(["def area("], params)
    assert drafted.token_ids == plain.token_ids
    print(f"{drafted.text}\n--- {drafted.mean_acceptance_length:.2f} tokens a round")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))

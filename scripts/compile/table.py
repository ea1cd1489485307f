"""Writes benchmarks/compile.json and compile.md: `report.py` over the systems that matter.

    python scripts/compile/table.py [--only four-layers|full]

Rows already in the file are kept unless --again is given, so an interrupted run goes on. The rows of four layers are
what tests/tools/test_compile_report.py compares with.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
REPORT = Path(__file__).with_name("report.py")
FIGURES = ROOT / "benchmarks" / "compile.json"
FOUR_LAYERS = [
    "qwen3.6-35b-a3b --device b200 --layers 4",
    "qwen3.6-35b-a3b --device b200 --layers 4 --kernels xla",
    "qwen3.6-35b-a3b --device b200 --devices 8 --layers 4",
    "qwen3.6-35b-a3b --device h100 --layers 4",
    "qwen3.6-35b-a3b --device v6e:2x4 --layers 4",
]
FULL = [
    "qwen3.6-35b-a3b --device b200",
    "qwen3.6-35b-a3b --device b200 --slots 32",
    "qwen3.6-35b-a3b --device b200 --max-len 262144",
    "qwen3.6-35b-a3b-fp8 --device b200",
    "qwen3.5-27b --device b200",
    "qwen3.5-397b-a17b --device b200 --devices 8 --slots 32",
    "qwen3.5-397b-a17b --device b200 --devices 8 --slots 32 --decode-context-parallel-size 4",
    "qwen3.6-35b-a3b --device h200 --slots 32",
    "qwen3.6-35b-a3b-fp8 --device h100",
    "qwen3.6-35b-a3b-fp8 --device h100 --slots 8",
    "qwen3.5-27b --device h100",
    "qwen3.6-35b-a3b --device v6e:2x4 --slots 32",
    "qwen3.6-35b-a3b --device v5e:2x4 --slots 8",
    "qwen3.5-27b --device b200 --slots 32",
    *(
        f"qwen3.6-35b-a3b --device {card} --draft mtp --block-size 4{shortlist} --programs round"
        for card in ("b200", "h200")
        for shortlist in ("", " --draft-tokens 32768")
    ),
]
INTRODUCTION = """# What XLA makes of it

Compiled at full size for accelerators that were not there: nothing here has run on one, and no figure is a measured
time. `python scripts/compile/table.py`, which runs `scripts/compile/report.py --config configs/SYSTEM.toml …` with the
options of the first column. GB per device: arguments (weights, caches) with temporaries. Prefill: the largest chunk,
4,096 tokens of one prompt where Triton's kernels are, else 1,024. A decode program's kernels are those of one round
(plain: one token), Triton's and the head's among them, over its layers (round: and the drafter's); apart, in all, those
in the branches of conditionals (drawing, penalties), of which a greedy round takes two kernels a draw. Graphs: CUDA
graphs of the whole program; 1 means that nothing breaks the loop. Copied: caches, recurrent state and weights written
anew. Weights: GB of them that a round's operations read (prefill: all), each array once for each operation that takes
it, of those held; the embedding, of which rows are gathered, is not counted on one device, the head of a round is for
drafts and once more to verify, and of experts' arrays only the chosen are read. Estimate: the TPU compiler's own, of a
loop's body once and without the loops over the context. GPUs: with Triton kernels, but for `--kernels xla`.
"""
COLUMNS = (
    "system|slots × length|program|GB|temporaries|kernels a layer|in branches|graphs|collectives a layer|copied MB|"
    "weights|compiled s"
)
HEAD = f"\n| {' | '.join([*COLUMNS.split('|'), 'estimate ms'])} |\n{'|---' * 13}|\n"


def measure(command: str) -> dict:
    """One report, from a process of its own: the compilers keep what they have."""
    config, *options = command.split()
    argv = [sys.executable, str(REPORT), "--config", config]
    done = subprocess.run([*argv, *options, "--json"], capture_output=True, text=True)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1][:300]}
    return json.loads(done.stdout)


def table(rows: dict[str, dict]) -> str:
    """Markdown: a line a program."""
    lines = []
    for command, found in rows.items():
        if "failed" in found:
            lines.append(f"| `{command}` | | | {found['failed']} | | | | | | | | | |")
            continue
        for name, f in found["programs"].items():
            if "failed" in f:
                lines.append(f"| `{command}` | | {name} | {f['failed']} | | | | | | | | | |")
                continue
            cells = [
                f"`{command}`",
                f"{found['slots']} × {found['max_len']:,}",
                name,
                f"{f['all'] / 1e9:.1f}{'' if f['fits'] else ' **does not fit**'}",
                f"{f['temporaries'] / 1e9:.3f}",
                f"{f['kernels_per_layer']:.1f}" if "kernels_per_layer" in f else "",
                str(f.get("kernels_in_branches", "")),
                str(f.get("graphs", "")),
                f"{f['collectives_per_layer']:.1f}",
                f"{sum(f['copied'].values()) / 1e6:.0f}",
                f"{f['weights']['read'] / 1e9:.2f} of {f['weights']['held'] / 1e9:.2f}" if "weights" in f else "",
                f"{f['compile_s']:.0f}",
                f"{1e3 * f['optimal_seconds']:.2f}" if "optimal_seconds" in f else "",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return HEAD + "\n".join(lines) + "\n"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", choices=["four-layers", "full"])
    p.add_argument("--again", action="store_true", help="measure what is in the file anew")
    args = p.parse_args()
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    for name, commands in (("four-layers", FOUR_LAYERS), ("full", FULL)):
        held = figures.get(name, {})
        for command in commands:
            if args.only in (None, name) and (args.again or "programs" not in held.get(command, {})):
                print(command, flush=True)
                held[command] = measure(command)
            figures[name] = {c: held[c] for c in commands if c in held}
            FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    text = INTRODUCTION + table(figures["full"])
    text += "\nThe first four layers (three recurrent, one of attention), which a test holds these figures to:\n"
    text += table(figures["four-layers"])
    FIGURES.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()

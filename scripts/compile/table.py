"""Writes benchmarks/compile.json and compile.md: `report.py` and `drafts.py` over the systems that matter.

    python scripts/compile/table.py [--only four-layers|full|drafts]

Rows already in the file are kept unless --again is given, so an interrupted run goes on. The rows of four layers and
of drafts are what tests/tools/test_compile_report.py compares with.
"""

import argparse
import json
from pathlib import Path

from tools.compile_report import reported

FIGURES = Path(__file__).parents[2] / "benchmarks" / "compile.json"
FOUR_LAYERS = [
    "qwen3.6-35b-a3b --device b200 --layers 4",
    "qwen3.6-35b-a3b --device b200 --layers 4 --kernels all",
    "qwen3.6-35b-a3b --device b200 --layers 4 --kernels xla",
    "qwen3.6-35b-a3b --device b200 --devices 8 --layers 4",
    "qwen3.6-35b-a3b --device h100 --layers 4",
    "qwen3.6-35b-a3b --device b200 --layers 4 --quantize nvfp4",
    "qwen3.6-35b-a3b --device v6e:2x4 --layers 4",
]
FULL = [
    "qwen3.6-35b-a3b --device b200",
    "qwen3.6-35b-a3b --device b200 --slots 32",
    "qwen3.6-35b-a3b --device b200 --kernels all",
    "qwen3.6-35b-a3b --device b200 --slots 32 --kernels all",
    "qwen3.6-35b-a3b --device b200 --max-len 262144",
    "qwen3.6-35b-a3b-fp8 --device b200",
    "qwen3.6-35b-a3b-fp8 --device b200 --kernels all",
    "qwen3.6-35b-a3b --device b200 --quantize nvfp4",
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
DRAFTS = [
    f"{system} --device b200{block}{slots}{kernels}"
    for system, block in (("qwen3.8-27b", ""), ("qwen3.6-35b-a3b", " --block-size 8"))
    for slots in ("", " --slots 32")
    for kernels in (" --kernels all", "")
]
# Of each section its script, and its rows.
SECTIONS = {"four-layers": ("report.py", FOUR_LAYERS), "full": ("report.py", FULL), "drafts": ("drafts.py", DRAFTS)}
INTRODUCTION = """# What XLA makes of it

Compiled at full size for accelerators that were not there: nothing here has run on one, and no figure is a measured
time. `python scripts/compile/table.py`, which runs `scripts/compile/report.py --config configs/SYSTEM.toml …` with the
options of the first column. GB per device: arguments (weights, caches) with temporaries. Prefill: the largest chunk,
4,096 tokens of one prompt where Triton's kernels are, else 1,024. A decode program's kernels are those of one round
(plain: one token), Triton's and the head's among them, over its layers (round: and the drafter's), each launch within a
call counted; "in": the calls of XLA that they are, where several launches are one (`--kernels all`, which no card has
run). Apart, in all, those in the branches of conditionals (drawing, penalties), of which a greedy round takes two
kernels a draw. Graphs: CUDA graphs of the whole program; 1 means that nothing breaks the loop. Copied: caches,
recurrent state and weights written anew. Weights: GB of them that a round's operations read (prefill: all), each array
once for each operation that takes it, of those held; the embedding, of which rows are gathered, is not counted on one
device, the head of a round is for drafts and once more to verify, and of experts' arrays only the chosen are read.
GPUs: with Triton kernels, but for `--kernels xla`. What a TPU's program moves and takes is in
[tpu.md](tpu.md), with loops as often as they run.

Whole models were compiled before 27 November 2026. Their kernels a layer have some of the branches' kernels among them,
22 in all of a plain step and 40 of a round: those after the first loop within a branch.
"""
COLUMNS = (
    "system|slots × length|program|GB|temporaries|kernels a layer|in branches|graphs|collectives a layer|copied MB|"
    "weights|compiled s"
)
HEAD = f"\n| {' | '.join(COLUMNS.split('|'))} |\n{'|---' * 12}|\n"


OF_DRAFTS = """
The drafts of a round, of the same drafter as DFlash and as DFlash2 (`scripts/compile/drafts.py --config …`): kernels
that run in the proposal, greedy and drawn, and of each of its layers; what DFlash2 adds, and the time of that,
**predicted**: its bytes at the card's bandwidth, and 1.0 to 2.5 µs a kernel. The 35B's drafter, of which a DFlash is
in `configs/`, gets the convolutions and the selector of the published DFlash2. In branches: what penalties and filters
may take, with two loops over 32 steps. The choice by the selector has no loop. `--kernels all` takes the kernel of
block convolutions, which no card has run.

| system | slots | layers | DFlash | DFlash2 | more a layer | more in all | more MB | predicted ms |
|---|---|---|---|---|---|---|---|---|
"""


def kernels(figures: dict) -> str:
    """The kernels a layer of a program, and the calls that they are where several are one; "" on a TPU."""
    count, calls = (f"{figures[k]:.1f}" if k in figures else "" for k in ("kernels_per_layer", "calls_per_layer"))
    return count if calls in ("", count) else f"{count} in {calls}"


def table(rows: dict[str, dict]) -> str:
    """Markdown: a line a program."""
    lines = []
    for command, found in rows.items():
        if "failed" in found:
            lines.append(f"| `{command}` | | | {found['failed']} | | | | | | | | |")
            continue
        for name, f in found["programs"].items():
            if "failed" in f:
                lines.append(f"| `{command}` | | {name} | {f['failed']} | | | | | | | | |")
                continue
            cells = [
                f"`{command}`",
                f"{found['slots']} × {found['max_len']:,}",
                name,
                f"{f['all'] / 1e9:.1f}{'' if f['fits'] else ' **does not fit**'}",
                f"{f['temporaries'] / 1e9:.3f}",
                kernels(f),
                str(f.get("kernels_in_branches", "")),
                str(f.get("graphs", "")),
                f"{f['collectives_per_layer']:.1f}",
                f"{sum(f['copied'].values()) / 1e6:.0f}",
                f"{f['weights']['read'] / 1e9:.2f} of {f['weights']['held'] / 1e9:.2f}" if "weights" in f else "",
                f"{f['compile_s']:.0f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return HEAD + "\n".join(lines) + "\n"


def drafts_table(rows: dict[str, dict]) -> str:
    """Markdown: a line a drafter."""
    lines = []
    for command, found in rows.items():
        if "failed" in found:
            lines.append(f"| `{command}` | | | {found['failed']} | | | | | |")
            continue
        of, added = found["programs"], found["added"]
        kernels = (
            ", ".join(str(of[f"{form}, {how}"]["kernels"]) for how in added)
            + f", {of[f'{form}, greedy']['of_a_layer']}"
            for form in ("dflash", "dflash2")
        )
        least, most = (1e3 * pick(f["predicted_s"][i] for f in added.values()) for i, pick in ((0, min), (1, max)))
        cells = [
            f"`{command}`",
            str(found["slots"]),
            str(found["layers"]),
            *kernels,
            *(", ".join(str(f[name]) for f in added.values()) for name in ("of_a_layer", "kernels")),
            f"{added['greedy']['bytes'] / 1e6:.0f}",
            f"{least:.3f} to {most:.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return OF_DRAFTS + "\n".join(lines) + "\n"


def page(figures: dict[str, dict]) -> str:
    """The page of all figures."""
    text = INTRODUCTION + table(figures["full"])
    text += "\nThe first four layers (three recurrent, one of attention), which a test holds these figures to:\n"
    return text + table(figures["four-layers"]) + drafts_table(figures["drafts"])


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", choices=list(SECTIONS))
    p.add_argument("--again", action="store_true", help="measure what is in the file anew")
    args = p.parse_args()
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    for name, (script, commands) in SECTIONS.items():
        held = figures.get(name, {})
        for command in commands:
            if args.only in (None, name) and (args.again or "programs" not in held.get(command, {})):
                print(command, flush=True)
                held[command] = reported(script, command)
            figures[name] = {c: held[c] for c in commands if c in held}
            FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    FIGURES.with_suffix(".md").write_text(page(figures))


if __name__ == "__main__":
    main()

"""The curves of a training run as a picture: loss, accuracy of each slot, acceptance length.

    python scripts/bench/plot_training.py RUN [RUN ...] --out curves.png

Several runs are shown one after another, as parts of one training. Needs the extra plot: pip install
"dflash-jax[plot]".
"""

import argparse
import csv
import sys
from pathlib import Path

from dflash_jax.errors import InputError
from dflash_jax.options.parser import Parser
from dflash_jax.process import exit_code

# Lines of the log that a point is the mean of.
WINDOW = 10


def read(path: Path) -> list[dict[str, float]]:
    """Rows of a log; none where it is not there."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def joined(runs: list[Path], name: str, ends: list[float]) -> list[dict[str, float]]:
    """The logs ``name`` of all runs; a run's steps go on from ``ends``, the last steps of those before it."""
    return [
        row | {"step": row["step"] + offset}
        for run, offset in zip(runs, [0.0, *ends], strict=False)
        for row in read(run / name)
    ]


def means(rows: list[dict[str, float]], column: str) -> tuple[list[float], list[float]]:
    """(steps, means of ``column``) over windows."""
    rows = [row for row in rows if column in row]
    parts = [rows[i : i + WINDOW] for i in range(0, len(rows), WINDOW)]
    return [p[-1]["step"] for p in parts], [sum(r[column] for r in p) / len(p) for p in parts]


def run(argv: list[str] | None) -> int:
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="an --output of train fit")
    p.add_argument("--out", type=Path, default=Path("curves.png"), metavar="FILE", help="default: %(default)s")
    args = p.parse_args(argv)
    ends, total = [], 0.0
    for run in args.runs:
        if not (rows := read(run / "metrics.csv")):
            raise InputError(f"{run} has no metrics.csv with a line in it: it must be an --output of train fit")
        ends.append(total := total + rows[-1]["step"])
    try:
        import matplotlib  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise InputError('plotting needs matplotlib: pip install "dflash-jax[plot]"') from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]

    metrics, decoded = (joined(args.runs, f"{name}.csv", ends) for name in ("metrics", "acceptance"))
    figure, (loss, slots, acceptance) = plt.subplots(1, 3, figsize=(12, 3.2))
    loss.plot(*means(metrics, "loss"))
    for column in sorted({k for row in metrics for k in row if k.startswith("slot_")}, key=lambda k: int(k[5:])):
        slots.plot(*means(metrics, column), label=column.replace("_", " "))
    for temperature in sorted({row["temperature"] for row in decoded}):
        points = [(row["step"], row["mean"]) for row in decoded if row["temperature"] == temperature]
        acceptance.plot(*zip(*points, strict=True), marker="o", label=f"T = {temperature:g}")
    for panel, title in (
        (loss, "loss"),
        (slots, "accuracy, training data"),
        (acceptance, "acceptance length, held out"),
    ):
        panel.set(title=title, xlabel="step")
        for end in ends[:-1]:
            panel.axvline(end, color="grey", linewidth=0.8, linestyle=":")
        if panel.get_legend_handles_labels()[0]:
            panel.legend()
    # What no drafter falls below.
    acceptance.set_ylim(bottom=1)
    figure.tight_layout()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=120)
    return 0


def main(argv: list[str] | None = None) -> int:
    return exit_code(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())

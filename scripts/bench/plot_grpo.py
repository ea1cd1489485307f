"""The curves of runs of examples/grpo.py beside one another: reward, acceptance length, tokens a second.

    python scripts/bench/plot_grpo.py moving.csv frozen.csv off.csv --out docs/grpo.png

Each file is the --csv of a run, and its name is the run's. Needs the extra plot: pip install "dflash-jax[plot]".
"""

import argparse
import csv
import sys
from pathlib import Path

from dflash_jax.errors import InputError
from dflash_jax.options.parser import Parser
from dflash_jax.process import exit_code

# Steps that a point is the mean of.
WINDOW = 5
PANELS = {"reward": "reward", "acceptance_length": "tokens a round", "tokens_per_s": "sampled tokens a second"}


def read(path: Path) -> list[dict[str, float]]:
    """The steps of a run."""
    try:
        with path.open(newline="") as file:
            rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
    except (OSError, ValueError) as e:
        raise InputError(f"{path} cannot be read: {e}") from None
    if not rows or not set(PANELS) <= set(rows[0]):
        raise InputError(f"{path} has no steps: it must be the --csv of examples/grpo.py")
    return rows


def means(rows: list[dict[str, float]], column: str) -> tuple[list[float], list[float]]:
    """(steps, means of ``column``) over windows."""
    parts = [rows[i : i + WINDOW] for i in range(0, len(rows), WINDOW)]
    return [part[-1]["step"] for part in parts], [sum(row[column] for row in part) / len(part) for part in parts]


def run(argv: list[str] | None) -> int:
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("runs", nargs="+", type=Path, metavar="FILE", help="a --csv of examples/grpo.py")
    p.add_argument("--out", type=Path, default=Path("grpo.png"), metavar="FILE", help="default: %(default)s")
    args = p.parse_args(argv)
    runs = {path.stem: read(path) for path in args.runs}
    try:
        import matplotlib  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise InputError('plotting needs matplotlib: pip install "dflash-jax[plot]"') from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]

    figure, panels = plt.subplots(1, len(PANELS), figsize=(12, 3.2))
    for panel, (column, title) in zip(panels, PANELS.items(), strict=True):
        for i, (name, rows) in enumerate(runs.items()):
            # Equal curves lie on one another: the later ones are thinner.
            panel.plot(*means(rows, column), label=name, linewidth=2.5 - 0.8 * min(i, 2))
        panel.set(title=title, xlabel="step")
        panel.set_ylim(bottom=1 if column == "acceptance_length" else 0)
    panels[0].legend()
    figure.tight_layout()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=120)
    return 0


def main(argv: list[str] | None = None) -> int:
    return exit_code(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())

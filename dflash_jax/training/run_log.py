"""Records of a training run: metrics of steps, and CSV files that a continued run extends."""

import csv
from pathlib import Path

import numpy as np

from dflash_jax.parallel import distributed
from dflash_jax.training.losses import Sums


class CsvLog:
    """A CSV file with one line a step. Only the first process writes.

    A run that continues from a checkpoint keeps the lines up to that step.
    """

    def __init__(self, directory: Path, name: str, last_step: int):
        """Opens ``directory / name`` and drops its lines behind ``last_step``."""
        self.path, lines = directory / name, []
        if self.path.exists() and distributed.is_first():
            with self.path.open(newline="", encoding="utf-8") as file:
                lines = [line for line in csv.DictReader(file) if int(line["step"]) <= last_step]
            self.path.unlink()
        for line in lines:
            self.add(line)

    def add(self, line: dict) -> None:
        """Appends a line of column names and values; the first line of a file also writes the header."""
        if not distributed.is_first():
            return
        is_new = not self.path.exists()
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(line))
            if is_new:
                writer.writeheader()
            writer.writerow(line)


def step_metrics(sums: Sums) -> dict[str, float]:
    """Means of a step.

    Returns:
        ``loss``; ``right``, the correct tokens of a block, its first token included; ``anchors``, blocks of the
        step; ``slot_1``, ``slot_2``, …, accuracy by slot.
    """
    seen = np.maximum(np.asarray(sums.seen), 1)
    metrics = {
        "loss": float(sums.loss) / max(float(sums.weight), 1e-9),
        "right": 1 + float(sums.accepted) / max(float(sums.anchors), 1),
        "anchors": float(sums.anchors),
    }
    return metrics | {f"slot_{k}": round(float(v), 5) for k, v in enumerate(np.asarray(sums.right) / seen, 1)}

"""Records of a training run: metrics of steps, CSV files that a continued run extends, TensorBoard and W&B."""

import csv
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dflash_jax.checkpoint.files import writing
from dflash_jax.errors import InputError
from dflash_jax.options.train import TrainConfig
from dflash_jax.parallel import distributed
from dflash_jax.training.losses import Sums


class CsvLog:
    """A CSV file with one line a step. Only the first process writes.

    A run that continues from a checkpoint keeps the lines up to that step.
    """

    def __init__(self, directory: Path, name: str, last_step: int):
        """Opens ``directory / name`` and drops its lines after ``last_step``, and one that is not whole.

        Raises:
            InputError: It is no such log, or cannot be written.
        """
        self.path = directory / name
        if not distributed.is_first() or not self.path.exists():
            return
        try:
            text = self.path.read_bytes().decode("utf-8")
            header, *lines = text[: text.rfind("\n") + 1].splitlines(True) or [""]
            kept = [line for line in lines if int(next(csv.DictReader([header, line]))["step"]) <= last_step]
        except (ValueError, LookupError, TypeError, StopIteration, csv.Error):
            raise InputError(f"{self.path} is no log of a run, a CSV file with a column step: remove it") from None
        except OSError as e:
            raise InputError(f"{self.path} cannot be read: {e.strerror}") from None
        half = self.path.with_name(f"{name}.half")
        with writing(self.path):
            half.write_bytes("".join([header, *kept]).encode())
            half.replace(self.path)
            if not kept:
                # The columns may be others from now on.
                self.path.unlink()

    def add(self, line: dict) -> None:
        """Appends a line of column names and values; the first line of a file also writes the header.

        Raises:
            InputError: It cannot be written.
        """
        if not distributed.is_first():
            return
        is_new = not self.path.exists()
        with writing(self.path), self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(line))
            if is_new:
                writer.writeheader()
            writer.writerow(line)


def step_metrics(sums: Sums) -> dict[str, float]:
    """Means of a step.

    Returns:
        ``loss``; ``right``, the correct tokens of a block, its first token included; ``anchors``, blocks of the
        step; ``slot_1``, ``slot_2``, …, accuracy by slot. With a selector, ``right`` is of its chain, and ``unary`` of
        the logits alone; ``recall_1``, …, are the shares of labels among the candidates.
    """
    seen = np.maximum(np.asarray(sums.seen), 1)
    metrics = {
        "loss": float(sums.loss) / max(float(sums.weight), 1e-9),
        "right": 1 + float(sums.accepted) / max(float(sums.anchors), 1),
        "anchors": float(sums.anchors),
    }
    if sums.recalled is not None and sums.path_accepted is not None:
        metrics["unary"] = metrics["right"]
        metrics["right"] = 1 + float(sums.path_accepted) / max(float(sums.anchors), 1)
        metrics |= {f"recall_{k}": round(float(v), 5) for k, v in enumerate(np.asarray(sums.recalled) / seen, 1)}
    return metrics | {f"slot_{k}": round(float(v), 5) for k, v in enumerate(np.asarray(sums.right) / seen, 1)}


class Tracker(Protocol):
    """A log outside the run's directory."""

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Adds the metrics of a step."""

    def close(self) -> None:
        """Writes the records that are still in memory."""


class TensorBoardLog:
    """Event files for TensorBoard. A continued run hides events after its first step."""

    def __init__(self, directory: str, last_step: int):
        """Opens a new event file in ``directory``."""
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]

        # tensorboardX names a file by the second, and a run that goes on in that second would replace the file.
        suffix = f".{time.time_ns()}"
        self._writer = SummaryWriter(directory, purge_step=last_step + 1 if last_step else None, filename_suffix=suffix)

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Adds a scalar for each metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


class WandbLog:
    """A Weights & Biases run, whose id is kept in the run's directory, so that a continued run extends it.

    The environment has wandb's own settings: WANDB_MODE=offline needs no network, `wandb sync` uploads later.
    """

    def __init__(self, project: str, directory: Path, settings: dict[str, Any]):
        """Starts or resumes the W&B run."""
        import wandb  # pyright: ignore[reportMissingImports]

        path = directory / "wandb_id"
        if not path.exists():
            path.write_text(uuid.uuid4().hex[:8])
        options = {"id": path.read_text().strip(), "resume": "allow", "dir": str(directory), "config": settings}
        self._run = wandb.init(project=project, **options)
        # wandb's own count of steps only grows; a continued run repeats those after its checkpoint.
        self._run.define_metric("*", step_metric="step")

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Logs the metrics with their step."""
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        """Ends the W&B run."""
        self._run.finish()


def check_tracker_packages(config: TrainConfig) -> None:
    """Raises InputError where a log of ``config`` needs a package that is not installed."""
    for option, package, name in (
        ("tensorboard", "tensorboardX", "TensorBoard"),
        ("wandb", "wandb", "Weights & Biases"),
    ):
        if getattr(config, option) is not None and find_spec(package) is None:
            raise InputError(f'a log for {name} needs the extra {option}: pip install "dflash-jax[{option}]"')


class Trackers:
    """The logs of ``config.tensorboard`` and ``config.wandb``, written by the first process.

    A log that fails is closed with a line for the user, and training goes on.
    """

    def __init__(self, config: TrainConfig, last_step: int, settings: dict[str, Any], tell: Callable[[str], None]):
        """Opens the logs.

        Args:
            config: Names the logs.
            last_step: The step after which the run continues; 0 for a new run.
            settings: Recorded with the W&B run.
            tell: Receives a line for each failure.
        """
        self._tell, self._logs = tell, {}
        openers: dict[str, Callable[[], Tracker]] = {}
        if config.tensorboard is not None:
            openers["TensorBoard"] = lambda: TensorBoardLog(config.tensorboard or "", last_step)
        if config.wandb is not None:
            openers["Weights & Biases"] = lambda: WandbLog(config.wandb or "", config.directory, settings)
        for name, opener in openers.items() if distributed.is_first() else ():
            try:
                self._logs[name] = opener()
            except Exception as e:  # the packages raise many unrelated types
                self._report(name, e)

    def _report(self, name: str, error: Exception) -> None:
        reason = " ".join(str(error).split()) or type(error).__name__
        self._tell(f"the log for {name} failed, training goes on without it: {reason}")

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Adds the metrics of a step to every log."""
        for name, log in list(self._logs.items()):
            try:
                log.add(step, metrics)
            except Exception as e:
                self._report(name, e)
                # What fails to write may fail to close too.
                with suppress(Exception):
                    self._logs.pop(name).close()

    def close(self) -> None:
        """Closes every log."""
        for name, log in list(self._logs.items()):
            try:
                log.close()
            except Exception as e:
                self._report(name, e)
        self._logs.clear()

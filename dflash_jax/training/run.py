"""The training loop: steps until the end or a signal, with checkpoints, logs and measured acceptance lengths."""

import math
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict

import jax
from jax.sharding import PartitionSpec
from tqdm import tqdm

from dflash_jax import progress
from dflash_jax.errors import InputError
from dflash_jax.options.train import TrainConfig
from dflash_jax.parallel import distributed
from dflash_jax.parallel.sharding import DATA, place
from dflash_jax.training import drafters
from dflash_jax.training.checkpoints import Checkpoints
from dflash_jax.training.data import batches, frequent_tokens
from dflash_jax.training.evaluation import acceptance_by_temperature, held_out_digest, read_held_out
from dflash_jax.training.features import FeatureRows
from dflash_jax.training.locks import locked_by_first
from dflash_jax.training.losses import MTP_GAMMA, Loss, default_gamma
from dflash_jax.training.media_rows import with_media
from dflash_jax.training.optimiser import optimiser
from dflash_jax.training.pair import Pair, open_pair
from dflash_jax.training.run_log import CsvLog, Trackers, check_tracker_packages, step_metrics
from dflash_jax.training.step import Batch, Recipe, Trainer
from dflash_jax.training.stop_signal import stop_signal


def recipe_of(config: TrainConfig, pair: Pair) -> Recipe:
    """The recipe of a step; values that ``config`` leaves open follow from the drafter's block size."""
    block, gamma = pair.draft.block_size, config.gamma
    if config.mtp:
        block = drafters.mtp_block_size(config)
    if gamma is None:
        gamma = MTP_GAMMA if config.mtp else default_gamma(block)
    loss = Loss(config.loss, config.loss_weights, gamma, match=config.match, chunk=config.loss_chunk)
    return Recipe(loss, config.anchors, block, pair.llm.dtype, config.body_rate > 0)


def step_count(config: TrainConfig, rows: int) -> int:
    """Steps of a run over ``rows`` rows: ``config.steps``, or as many as the epochs need."""
    return config.steps or max(1, config.epochs * rows // config.rows)


class TrainingRun:
    """One run from its configuration to the exported drafter.

    The constructor reads the data and the newest checkpoint; `run` trains. A second run with the same configuration
    continues at that checkpoint.

    Attributes:
        config: The configuration.
        pair: The target and the drafter's configuration.
        trainer: The compiled step.
        steps: The number of the last step.
        step: Steps that were dispatched, those of earlier runs included.
        state: (drafter, optimiser state) on the mesh.
    """

    def __init__(self, config: TrainConfig, tell: Callable[[str], None]):
        check_tracker_packages(config)
        self.config, self._tell = config, tell
        self.pair = open_pair(config)
        rows, recipe = self.pair.rows(config, tell), recipe_of(config, self.pair)
        if config.mtp and rows.has_media:
            raise InputError("mtp: the data has images or videos, and a head is trained on text")
        vocabulary = None if config.loss_vocabulary is None else frequent_tokens(rows, config.loss_vocabulary)
        digest = rows.digest()
        is_cached = config.features is not None
        self._rows = FeatureRows(config, rows, self.pair, recipe.loss.needs_teacher) if is_cached else with_media(rows)
        self.steps = step_count(config, len(rows))
        self._check_division()
        update = optimiser(
            config.learning_rate, self.steps, config.optimizer, config.warm_up, config.clip, config.body_rate
        )
        self.trainer = Trainer(self.pair.target, self.pair.draft, recipe, update, vocabulary=vocabulary)
        self._checkpoints = Checkpoints(config, self.pair.raw, tell, digest)
        self.step = self._checkpoints.latest
        self.state = self._initial_state()
        self._prompts = read_held_out(config, self.pair.llm)
        self._metrics = CsvLog(config.directory, "metrics.csv", self.step)
        # A finished run that is started again measures its last step again.
        measured = min(self.step, self.steps - 1) if self._prompts else self.step
        self._acceptance = CsvLog(config.directory, "acceptance.csv", measured)
        self._is_compiled = False
        self._trackers = Trackers(config, self.step, asdict(config), tell)
        # Dispatched steps whose sums were not read yet: (step, sums, norm of the gradients).
        self._pending: list[tuple] = []
        self._bar, self._key = tqdm(disable=True), jax.random.key(config.seed)
        self._reset_clock()

    def _check_division(self) -> None:
        part, layout = self.config.rows // self.config.accumulate, self.pair.target.layout
        if part % layout.data:
            raise InputError(f"{part} rows of a part of a step: they cannot be divided over data={layout.data}")

    def _initial_state(self) -> tuple:
        """The state of the newest checkpoint, or of a drafter at its beginning."""
        if self.step:
            self._tell(f"resuming after step {self.step} of {self.steps}")
            return self._checkpoints.restore(self.trainer.abstract_state(), self.trainer.shardings())
        state = self.trainer.start(
            drafters.starting_drafter(self.config, self.pair.raw, self.pair.target, self.pair.llm.directory)
        )
        count, layout = sum(x.size for x in jax.tree.leaves(state[0])), self.trainer.layout
        size = f"{count / 1e6:.1f} million parameters"
        self._tell(f"a drafter of {size}, {self.steps} steps of {self.config.rows} rows on {layout}")
        return state

    def run(self) -> tuple[int, int]:
        """Trains until the last step or a signal.

        Returns:
            The step reached and the last step; they differ where a signal stopped the run.

        Raises:
            InputError: A loss or a gradient is not finite.
        """
        try:
            return self._run()
        finally:
            self._trackers.close()

    def _run(self) -> tuple[int, int]:
        reason = None
        has_bar = sys.stderr.isatty() and distributed.is_first()
        bar = tqdm(total=self.steps, initial=self.step, unit="step", disable=not has_bar)
        with ExitStack() as caught, bar as self._bar:
            signals = [caught.enter_context(stop_signal(signal.SIGTERM))]

            def arrived() -> str | None:
                return next(filter(None, (name() for name in signals)), None)

            for batch in self._batches():
                # Asked before the step, which several processes would have to wait for.
                is_stopped = distributed.anywhere(lambda: arrived() is not None)
                self._dispatch(batch)
                # Not earlier: while the first step compiles, when nothing is to be saved, Ctrl-C ends the process.
                if len(signals) == 1:
                    signals.append(caught.enter_context(stop_signal(signal.SIGINT)))
                reason = (arrived() or "a signal of another process") if is_stopped() else None
                is_last = self.step >= self.steps
                if self.step % self.config.save_every == 0 or is_last or reason:
                    self._save()
                if reason or is_last:
                    break
                if self.config.evaluate_every and self.step % self.config.evaluate_every == 0:
                    self._settle()
                    self._evaluate()
                    self._reset_clock()
        self._checkpoints.wait()
        if self.step < self.steps:
            self._tell(f"{reason}: stopped after step {self.step}; the same command goes on from there")
        else:
            self._finish()
        return self.step, self.steps

    def _batches(self):
        if self.step >= self.steps:
            return ()
        config = self.config
        return batches(self._rows, config.rows, config.accumulate, config.seed, self.step)

    def _dispatch(self, batch: dict) -> None:
        """Starts a step, then reads the sums of the previous one while the devices work."""
        self.step += 1
        sharding = self.trainer.sharding(PartitionSpec(None, DATA))
        arrays = Batch(**jax.tree.map(lambda array: place(array, sharding), batch))
        key = jax.random.fold_in(self._key, self.step)
        is_first = not self._is_compiled
        with progress.step("compiling the training step") if is_first and distributed.is_first() else nullcontext():
            self.state, sums, norm = self.trainer.step(self.state, self.trainer.leaves, arrays, key)
        self._is_compiled = True
        self._settle()
        self._pending.append((self.step, sums, norm))
        self._bar.update()

    def _settle(self) -> None:
        """Waits for the dispatched steps, checks and logs them. Steps are settled before they are saved."""
        while self._pending:
            step, sums, norm = self._pending.pop(0)
            metrics = step_metrics(jax.device_get(sums)) | {"gradient_norm": float(norm)}
            self._check_finite(step, metrics)
            self._log(step, metrics)

    def _check_finite(self, step: int, metrics: dict[str, float]) -> None:
        loss, norm = metrics["loss"], metrics["gradient_norm"]
        if math.isfinite(loss) and math.isfinite(norm):
            return
        self._checkpoints.wait()
        latest = self._checkpoints.newest_good(self._tell)
        good = f"the last good checkpoint is that of step {latest} in {self.config.output}"
        raise InputError(
            f"step {step}: the loss is {loss}, the gradients' norm {norm}: stopped; "
            f"{good if latest else 'there is no good checkpoint'}"
        )

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        """Shows a step's metrics, and writes them every ``log_every`` steps."""
        tokens = (step - self._clock_step) * self.config.rows * self.config.sequence_length
        rate = tokens / (time.perf_counter() - self._clock_start)
        slots = [f"{value:.0%}" for name, value in metrics.items() if name.startswith("slot_")]
        shown = {"loss": f"{metrics['loss']:.3f}", "right": f"{metrics['right']:.2f}", "slots": " ".join(slots)}
        self._bar.set_postfix(shown | {"tok/s": f"{rate:.0f}"}, refresh=False)
        if step % self.config.log_every:
            return
        metrics |= {"tokens_per_s": round(rate)}
        self._metrics.add({"step": step, **metrics})
        self._trackers.add(step, metrics)
        if self._bar.disable:
            words = ", ".join(f"{name} {value}" for name, value in shown.items())
            self._tell(f"step {step} of {self.steps}: {words}, {rate:.0f} tokens/s")
        self._reset_clock(step)

    def _reset_clock(self, step: int | None = None) -> None:
        """Starts the measurement of tokens/s after ``step`` (None: the step that was dispatched last)."""
        self._clock_start, self._clock_step = time.perf_counter(), self.step if step is None else step

    def _save(self) -> None:
        self._settle()
        self._checkpoints.save(self.step, self.state)

    def _evaluate(self) -> None:
        """Measures and logs the acceptance length on the held-out prompts, and saves the drafter that is the best."""
        if not self._prompts:
            return
        llm = self.pair.llm.with_drafter(self.trainer.on_host(self.state[0]))
        by_temperature = acceptance_by_temperature(self.config, llm, self._prompts)
        for temperature, measured in by_temperature.items():
            at = f"at temperature {temperature:g} ({measured.rounds} rounds)"
            self._tell(f"step {self.step}: acceptance length {measured.mean:.3f} {at}")
            self._acceptance.add({"step": self.step, "temperature": temperature} | measured.scalars())
            named = {f"{name}/temperature_{temperature:g}": value for name, value in measured.scalars().items()}
            self._trackers.add(self.step, {f"acceptance_{name}": value for name, value in named.items()})
        note = None
        if by_temperature and (measured := by_temperature[min(by_temperature)]).rounds:
            note = {"length": measured.mean, "rates": measured.rates, "of": held_out_digest(self.config)}
        self._checkpoints.wait()
        if distributed.agreed(note is not None and self._checkpoints.is_best(note)):
            self._checkpoints.save(self.step, self.state)
            self._checkpoints.note(self.step, note or {})

    def _finish(self) -> None:
        """Measures the trained drafter, and exports it or, where another one was better, the best."""
        self._evaluate()
        export_checkpoint(self.config, self._checkpoints, self.pair, self.trainer, self._tell, (self.step, self.state))
        self._checkpoints.close()


def fit(config: TrainConfig, tell: Callable[[str], None]) -> tuple[int, int]:
    """Trains a drafter; see `TrainingRun`.

    Args:
        config: The run. The same configuration continues a run that was stopped.
        tell: Receives lines for the user.

    Returns:
        The step reached and the last step.

    Raises:
        InputError: The configuration or the data is invalid, the loss is not finite, or another process trains there.
    """
    with locked_by_first(config.directory / "fit.lock", config.output):
        return TrainingRun(config, tell).run()


def export(config: TrainConfig, tell: Callable[[str], None]) -> None:
    """Writes the drafter of a checkpoint, as `export_checkpoint` chooses it, as a Hugging Face directory.

    Raises:
        InputError: There is no checkpoint, or it is of another configuration.
    """
    pair = open_pair(config)
    checkpoints = Checkpoints(config, pair.raw, tell)
    update = optimiser(config.learning_rate, 1, config.optimizer, body_rate=config.body_rate)
    trainer = Trainer(pair.target, pair.draft, recipe_of(config, pair), update)
    export_checkpoint(config, checkpoints, pair, trainer, tell)


def export_checkpoint(
    config: TrainConfig,
    checkpoints: Checkpoints,
    pair: Pair,
    trainer: Trainer,
    tell: Callable[[str], None],
    last: tuple[int, tuple] | None = None,
) -> None:
    """Writes the best measured drafter, or without a measurement the newest, into ``OUTPUT/draft``.

    Args:
        config: The run.
        checkpoints: Its checkpoints.
        pair: The target and the drafter's configuration.
        trainer: Knows the state's shapes.
        tell: Receives a line that says which it is.
        last: The newest step and its state, where they are in memory.
    """
    newest, state = last or (checkpoints.latest, None)
    step, measured = checkpoints.good_best(tell) or (newest, None)
    if state is None or step != newest:
        state = checkpoints.restore(trainer.abstract_state(), trainer.shardings(), step)
    # Those of the drafter that training began with.
    raw = {k: v for k, v in pair.raw.items() if k not in ("acceptance_length", "acceptance_rates")}
    which = "the newest"
    if measured is not None:
        which = f"the best measured, with acceptance length {measured['length']:.3f}"
        rates = [round(rate, 4) for rate in measured["rates"]]
        raw |= {"acceptance_length": round(measured["length"], 2), "acceptance_rates": rates}
    drafter, directory = trainer.on_host(state[0]), config.directory / "draft"
    if distributed.is_first():
        drafters.export(drafter, raw, directory)
    tell(f"the drafter of step {step} ({which}) is in {directory}")

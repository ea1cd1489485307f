"""`fit`: steps until the end or a signal, checkpoints, a log, and the acceptance length on the way."""

import csv
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jax
import numpy as np
from jax.sharding import PartitionSpec
from tqdm import tqdm

from dflash_jax.checkpoint.hub import resolve
from dflash_jax.checkpoint.load import check_target
from dflash_jax.errors import InputError
from dflash_jax.frontend.llm import DRAFT_TOKENS, LLM, TINY
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.families import dflash
from dflash_jax.models.packing import unpack_weights
from dflash_jax.parallel import distributed
from dflash_jax.parallel.sharding import DATA, Layout, place
from dflash_jax.sampling_params import SamplingParams
from dflash_jax.training import drafters
from dflash_jax.training.checkpoints import Checkpoints
from dflash_jax.training.config import TrainConfig
from dflash_jax.training.data import (
    PackedRows,
    Skipped,
    batches,
    check_learnable,
    frequent_tokens,
    read_documents,
    read_lines,
)
from dflash_jax.training.evaluation import Acceptance, acceptance, prompt_of
from dflash_jax.training.features import FeatureRows
from dflash_jax.training.losses import Loss, Sums, default_gamma
from dflash_jax.training.optimiser import optimiser
from dflash_jax.training.step import Batch, Recipe, Trainer


@dataclass
class Pair:
    """The target, ready to decode, and what its drafter is."""

    llm: LLM
    raw: dict

    def rows(self, config: TrainConfig, tell: Callable) -> PackedRows:
        return read_rows(config, self.llm.tokenizer, self.llm.config.vocab_size, tell)

    @cached_property
    def target(self) -> Decoder:
        """As it was loaded, however the LLM has arranged it."""
        return unpack_weights(self.llm.target)

    @property
    def draft(self):
        return dflash.read_config(self.raw)


def open_pair(config: TrainConfig) -> Pair:
    llm = LLM(config.target, None, dtype=config.dtype, mesh=Layout.parse(config.mesh or ""), prefix_bytes=0)
    if config.sequence_length > llm.config.max_positions:
        most = llm.config.max_positions
        raise InputError(f"sequence_length {config.sequence_length}: the target has {most} positions")
    return Pair(llm, drafters.raw_config(config, llm))


def read_rows(config: TrainConfig, tokenizer, vocab: int, tell: Callable) -> PackedRows:
    skipped = Skipped() if config.skip_bad_lines else None
    rows = PackedRows(read_documents(config.data, tokenizer, vocab, skipped), config.sequence_length)
    tokens = sum(len(d.tokens) for d in rows.documents)
    check_learnable(rows.documents, rows.length, config.data)
    tell(f"{len(rows.documents)} documents, {tokens} tokens, in {len(rows)} rows, {rows.used:.0%} used")
    if (cut := rows.cut_off)[0]:
        tell(f"{cut[0]} of them are longer than a row of {rows.length}: {cut[1]} tokens are left out")
    if skipped is not None and skipped.count:
        tell(f"{skipped.count} lines left out, the first: {skipped.first}")
    return rows


def recipe_of(config: TrainConfig, pair: Pair) -> Recipe:
    block = pair.draft.block_size
    gamma = default_gamma(block) if config.gamma is None else config.gamma
    loss = Loss(config.loss, config.loss_weights, gamma, match=config.match, chunk=config.loss_chunk)
    return Recipe(loss, config.anchors, block, pair.llm.dtype)


def step_count(config: TrainConfig, rows: int) -> int:
    return config.steps or max(1, config.epochs * rows // config.rows)


@contextmanager
def stopping() -> Iterator[Callable[[], str | None]]:
    """Gives a function that says which signal asked to stop, if one has. A second one interrupts at once."""
    seen: list[int] = []

    def on(number, frame):
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    before = {s: signal.signal(s, on) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: signal.Signals(seen[0]).name if seen else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Log:
    """A CSV of a run, continued behind the step that it goes on from. Only the first process writes."""

    def __init__(self, directory: Path, name: str, first: int):
        self.path, held = directory / name, []
        if self.path.exists() and distributed.is_first():
            with self.path.open(newline="", encoding="utf-8") as file:
                held = [row for row in csv.DictReader(file) if int(row["step"]) <= first]
            self.path.unlink()
        for row in held:
            self.add(row)

    def add(self, row: dict) -> None:
        if not distributed.is_first():
            return
        is_new = not self.path.exists()
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(row))
            if is_new:
                writer.writeheader()
            writer.writerow(row)


def figures(sums: Sums) -> dict[str, float]:
    """Mean loss, tokens a block is right for (with the one that is always), and accuracy by slot."""
    seen = np.maximum(np.asarray(sums.seen), 1)
    found = {
        "loss": float(sums.loss) / max(float(sums.weight), 1e-9),
        "right": 1 + float(sums.accepted) / max(float(sums.anchors), 1),
        "anchors": float(sums.anchors),
    }
    return found | {f"slot_{k}": round(float(v), 5) for k, v in enumerate(np.asarray(sums.right) / seen, 1)}


def held_out_prompts(config: TrainConfig, llm: LLM) -> list[list[int]]:
    if config.held_out is None:
        return []
    lines = list(read_lines([config.held_out]))[: config.evaluate_prompts]
    prompts = [prompt_of(record, where, llm) for where, record in lines]
    room = llm.max_len - config.evaluate_tokens
    return [p[-room:] for p in prompts]


def fit(config: TrainConfig, tell: Callable[[str], None]) -> tuple[int, int]:
    """Trains to the end, or until a signal asks to stop; the same call goes on from there. Returns the step reached,
    and the last one."""
    pair = open_pair(config)
    rows, recipe = pair.rows(config, tell), recipe_of(config, pair)
    vocabulary = None if config.loss_vocabulary is None else frequent_tokens(rows, config.loss_vocabulary)
    digest = rows.digest()
    if config.features is not None:
        rows = FeatureRows(config, rows, pair, recipe.loss.needs_teacher)
    steps, layout = step_count(config, len(rows)), pair.target.layout
    if (config.rows // config.accumulate) % layout.data:
        part = config.rows // config.accumulate
        raise InputError(f"{part} rows of a part of a step: they cannot be divided over data={layout.data}")
    update = optimiser(config.learning_rate, steps, config.optimizer, config.warm_up, config.clip)
    trainer = Trainer(pair.target, pair.draft, recipe, update, vocabulary=vocabulary)
    held = Checkpoints(config, pair.raw, digest)
    first = held.latest
    if first:
        shapes = jax.eval_shape(lambda d: (d, update.init(d)), drafters.Drafter(pair.draft, rngs=None))
        state = held.restore(shapes, trainer.shardings())
        tell(f"going on behind step {first} of {steps}")
    else:
        state = trainer.start(drafters.starting_drafter(config, pair.raw, pair.target))
        count = sum(x.size for x in jax.tree.leaves(state[0]))
        tell(f"a drafter of {count / 1e6:.1f} million parameters, {steps} steps of {config.rows} rows on {layout}")
    directory = config.directory
    directory.mkdir(parents=True, exist_ok=True)
    prompts = held_out_prompts(config, pair.llm)
    # What is measured at the end is measured again by a call that finds nothing to do.
    kept = min(first, steps - 1) if prompts else first
    metrics, lengths = Log(directory, "metrics.csv", first), Log(directory, "acceptance.csv", kept)
    key, whole = jax.random.key(config.seed), trainer.sharding(PartitionSpec(None, DATA))
    waiting: list[tuple] = []
    began, since = time.perf_counter(), first

    def settle(bar) -> None:
        """Looks at the steps that were left running: what is not finite ends the run, before it can be saved."""
        nonlocal began, since
        while waiting:
            step, sums, norm = waiting.pop(0)
            found = figures(jax.device_get(sums)) | {"gradient_norm": float(norm)}
            if not (math.isfinite(found["loss"]) and math.isfinite(found["gradient_norm"])):
                held.wait()
                good = f"the last good checkpoint is that of step {held.latest} in {config.output}"
                raise InputError(
                    f"step {step}: the loss is {found['loss']}, the gradients' norm {found['gradient_norm']}: stopped; "
                    f"{good if held.latest else 'there is no checkpoint yet'}"
                )
            rate = (step - since) * config.rows * config.sequence_length / (time.perf_counter() - began)
            slots = [f"{v:.0%}" for name, v in found.items() if name.startswith("slot_")]
            shown = {"loss": f"{found['loss']:.3f}", "right": f"{found['right']:.2f}", "slots": " ".join(slots)}
            bar.set_postfix(shown | {"tok/s": f"{rate:.0f}"}, refresh=False)
            if step % config.log_every == 0:
                metrics.add({"step": step, **found, "tokens_per_s": round(rate)})
                if not is_bar:
                    words = ", ".join(f"{name} {value}" for name, value in shown.items())
                    tell(f"step {step} of {steps}: {words}, {rate:.0f} tokens/s")
                began, since = time.perf_counter(), step

    def measure_now(step: int) -> None:
        for temperature, found in measure(config, pair, trainer.on_host(state[0]), prompts).items():
            at = f"at temperature {temperature:g} ({found.rounds} rounds)"
            tell(f"step {step}: acceptance length {found.mean:.3f} {at}")
            lengths.add({"step": step, "temperature": temperature} | vars(found))

    step, is_bar = first, sys.stderr.isatty() and distributed.is_first()
    with stopping() as asked, tqdm(total=steps, initial=first, unit="step", disable=not is_bar) as bar:
        for batch in batches(rows, config.rows, config.accumulate, config.seed, first) if first < steps else ():
            step += 1
            on_devices = Batch(**{k: place(v, whole) for k, v in batch.items()})
            state, sums, norm = trainer.step(state, trainer.leaves, on_devices, jax.random.fold_in(key, step))
            # It runs while the one before is looked at.
            settle(bar)
            waiting.append((step, sums, norm))
            bar.update()
            is_last = step >= steps
            reason = asked()
            if jax.process_count() > 1:
                # All of them stop behind the same step.
                reason = "a signal" if step % config.log_every == 0 and distributed.agreed(reason is not None) else None
            if step % config.save_every == 0 or is_last or reason:
                settle(bar)
                held.save(step, state)
            if reason or is_last:
                break
            if config.evaluate_every and step % config.evaluate_every == 0:
                settle(bar)
                measure_now(step)
                began, since = time.perf_counter(), step
    held.wait()
    if step < steps:
        tell(f"{reason}: stopped behind step {step}; the same command goes on from there")
        return step, steps
    if prompts:
        measure_now(step)
    drafter = trainer.on_host(state[0])
    if distributed.is_first():
        drafters.export(drafter, pair.raw, directory / "draft")
        tell(f"the drafter is in {directory / 'draft'}")
    held.close()
    return step, steps


def measure(config: TrainConfig, pair: Pair, drafter, prompts: list[list[int]]) -> dict[float, Acceptance]:
    """Acceptance lengths of real decoding, by temperature."""
    if not prompts:
        return {}
    llm = pair.llm.with_drafter(drafter)
    found = {}
    for temperature in (0.0, 0.7):
        params = SamplingParams(temperature=temperature, max_tokens=config.evaluate_tokens, seed=config.seed)
        found[temperature] = acceptance(llm.generate(prompts, params, llm.largest_block, progress=False), keep_all=True)
    return found


def export(config: TrainConfig, tell: Callable[[str], None]) -> None:
    """The newest checkpoint as a Hugging Face directory."""
    pair = open_pair(config)
    held = Checkpoints(config, pair.raw)
    update = optimiser(config.learning_rate, 1, config.optimizer)
    trainer = Trainer(pair.target, pair.draft, recipe_of(config, pair), update)
    shapes = jax.eval_shape(lambda d: (d, update.init(d)), drafters.Drafter(pair.draft, rngs=None))
    drafter = trainer.on_host(held.restore(shapes, trainer.shardings())[0])
    if distributed.is_first():
        drafters.export(drafter, pair.raw, config.directory / "draft")
    tell(f"step {held.latest} is in {config.directory / 'draft'}")


def write_draft_tokens(config: TrainConfig, tell: Callable[[str], None]) -> None:
    """The tokens that answers use most, for `LLM`'s ``draft_tokens``: beside the drafter of OUTPUT, or where there is
    none, in OUTPUT itself."""
    target = TINY / "target" if config.target is None else resolve(config.target)
    rows = read_rows(config, Tokenizer(target), check_target(target).vocab_size, tell)
    kept = frequent_tokens(rows, config.draft_vocabulary)
    learned = np.concatenate([d.tokens[d.mask] for d in rows.documents])
    trained = config.directory / "draft"
    path = (trained if (trained / "config.json").exists() else config.directory) / DRAFT_TOKENS
    if distributed.is_first():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(kept.tolist()) + "\n", encoding="utf-8")
    tell(f"{len(kept)} tokens, {np.isin(learned, kept).mean():.1%} of the answers, are in {path}")


def evaluate(config: TrainConfig, tell: Callable[[str], None]) -> dict:
    """Acceptance length and speed beside plain decoding, by temperature, of a drafter on held-out prompts."""
    trained = config.directory / "draft"
    draft = config.draft if config.draft is not None and not trained.exists() else str(trained)
    llm = LLM(config.target, draft, dtype=config.dtype, mesh=config.mesh or "", prefix_bytes=0)
    prompts = held_out_prompts(config, llm)
    if not prompts:
        raise InputError("evaluate needs --held-out: a file of JSON lines with prompts")
    found = {}
    for temperature in (0.0, 0.7):
        params = SamplingParams(temperature=temperature, max_tokens=config.evaluate_tokens, seed=config.seed)
        row: dict = {}
        for width in (1, llm.largest_block):
            llm.generate(prompts[:1], params, width, progress=False)
            # One after the other, as a single user waits for them.
            began = time.perf_counter()
            done = [llm.generate([p], params, width, progress=False)[0] for p in prompts]
            rate = sum(len(c.token_ids) for c in done) / (time.perf_counter() - began)
            row["plain_tokens_per_s" if width == 1 else "tokens_per_s"] = round(rate, 1)
        length = acceptance(done, keep_all=True)
        found[str(temperature)] = row | {
            "acceptance_length": round(length.mean, 3),
            "rounds": length.rounds,
            "prompts": length.kept,
            "repeating_themselves": length.degenerate,
        }
        tell(f"temperature {temperature:g}: {found[str(temperature)]}")
    return found

"""Before the first request: compiles every program, and measures the cost of a round."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import replace

import jax
import numpy as np

from dflash_jax.engine.ahead_of_time import AheadOfTime
from dflash_jax.engine.draft_length import NO_DRAFTER
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.executables import Executables
from dflash_jax.engine.model_runner import Dispatch, ModelRunner
from dflash_jax.engine.prefill import scored_size
from dflash_jax.engine.request import Request
from dflash_jax.engine.scheduler import UNKNOWN_ROUNDS
from dflash_jax.sampling_params import SamplingParams

log = logging.getLogger("dflash_jax")

# Parameters of the requests that fill the slots.
_FILLER = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=0)
# Compiling a large model takes gigabytes of the host's memory.
_MAX_THREADS = 8


def warm_up(engine: Engine) -> dict[str, float]:
    """Compiles all programs that requests may need, side by side, runs each once, and measures the cost of rounds.

    The engine must be idle. Programs for masks are compiled only where `EngineConfig.masks` says so.

    Returns:
        Seconds of compilation by the program's name.
    """
    runner, seconds_by_name = engine.runner, {}
    filler = Request([1] * min(4, runner.capacity - 1), _FILLER)
    filler.params = replace(_FILLER, max_tokens=runner.capacity - len(filler.prompt))
    # Several hosts must compile in the same order.
    threads = 1 if jax.process_count() > 1 else min(_MAX_THREADS, os.cpu_count() or 1)
    executables = runner.programs
    assert isinstance(executables, Executables), "an engine that is ahead of time itself"
    with AheadOfTime(executables, threads) as ahead:
        names: dict = {}
        for name, _ in _calls(engine, runner.on(ahead), filler):
            names |= {future: name for future in ahead.pending.values() if future not in names}
        for future in as_completed(names):
            name, seconds = names[future], future.result()[1]
            seconds_by_name[name] = seconds_by_name.get(name, 0.0) + seconds
            log.info("%s: compiled in %.1f s", name, seconds)
    for _, result in _calls(engine, runner, filler):
        runner.wait(result)
    for batch_size, block_size in _decode_programs(engine):
        _time_rounds(engine, filler, batch_size, block_size)
    return seconds_by_name


def _decode_programs(engine: Engine) -> list[tuple[int, int]]:
    """(batch size, block size) of every decode program."""
    block_sizes = engine.config.block_sizes
    block_sizes = (NO_DRAFTER, *block_sizes) if block_sizes[-1] > 1 else block_sizes
    return [(batch, block) for batch in engine.runner.batch_sizes() for block in block_sizes]


def _start(engine: Engine, runner: ModelRunner, filler: Request, slots: Sequence[int]):
    """Puts a prompt into each of the slots: a result for `ModelRunner.wait`."""
    for slot in slots:
        runner.admit(slot, filler)
        ticket = runner.prefill([slot], [len(filler.prompt) - 1], engine.config.prefill_sizes[0])
    return ticket


def _dispatch(slots: tuple[int, ...], block_size: int, rounds: int) -> Dispatch:
    return Dispatch(slots, (block_size,) * len(slots), rounds, block_size)


def _calls(engine: Engine, runner: ModelRunner, filler: Request) -> Iterator[tuple[str, object]]:
    """Makes the calls that together need every program: (name, a result for `ModelRunner.wait`) of each."""
    config = engine.config
    yield "admit", runner.admit(0, filler)
    for size in config.prefill_sizes:
        for batch in engine.prefill_batches(size):
            name = f"prefill {batch} x {size}"
            runner.admit(0, filler)
            yield name, runner.prefill([0], [1], size, batch)
            if config.block_sizes[-1] > 1:
                runner.admit(0, filler)
                yield f"{name} without drafter", runner.prefill([0], [1], size, batch, drafting=False)
        if engine.prefix_cache.budget:
            segment = runner.save(0, 0, size)
            yield f"save {size}", segment
            yield f"load {size}", runner.load(0, 0, segment)
    if engine.prefix_cache.budget:
        snapshot = runner.snapshot(0)
        yield "snapshot", snapshot
        yield "restore", runner.restore(0, 1, snapshot)
    runner.admit(0, filler)
    scored = scored_size(config.prefill_sizes)
    yield f"score {scored}", runner.score(0, 1, scored)
    for batch, block in _decode_programs(engine):
        slots = runner.first_slots(batch)
        _start(engine, runner, filler, slots)
        yield f"decode {batch} x {block}", runner.decode(_dispatch(slots, block, UNKNOWN_ROUNDS[block > 1]))
    for batch in runner.masked_batch_sizes() if config.masks else ():
        slots = runner.first_slots(batch)
        for block in sorted({1, config.block_sizes[-1]}):
            _start(engine, runner, filler, slots)
            masks = _AllAllowed(runner.mask_words)
            yield f"masked {batch} x {block}", runner.decode_masked(_dispatch(slots, block, 1), masks)


class _AllAllowed:
    """`RoundMasks` that allow every token."""

    def __init__(self, words: int):
        self._words = words

    def ask(self, blocks: np.ndarray) -> np.ndarray:
        self._shape = blocks.shape
        return blocks

    def answer(self, is_verified: Callable[[], bool]) -> tuple[np.ndarray, np.ndarray]:
        return np.full((*self._shape, self._words), 0xFFFFFFFF, np.uint32), np.zeros(self._shape[0], bool)


def _time_rounds(engine: Engine, filler: Request, batch_size: int, block_size: int, times: int = 3) -> None:
    """Measures rounds of one program for the engine's `DraftLengthPolicy`."""
    runner, slots = engine.runner, engine.runner.first_slots(batch_size)
    dispatch = _dispatch(slots, block_size, UNKNOWN_ROUNDS[block_size > 1])
    for _ in range(times):
        runner.wait(_start(engine, runner, filler, slots))
        began = runner.clock
        yielded = runner.read(runner.decode(dispatch), False).yielded
        rounds = max(len(a) for a in yielded)
        engine.policy.observe_seconds(batch_size, block_size, (runner.clock - began) / max(rounds, 1), rounds)

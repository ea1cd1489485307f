"""Before the first request: every program compiled, and the cost of a round known."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import replace

import jax
import numpy as np

from dflash_jax.engine.draft_length import ALONE
from dflash_jax.engine.engine import UNKNOWN_ROUNDS, Engine, log
from dflash_jax.engine.model_runner import Dispatch
from dflash_jax.engine.prefill import scored_size
from dflash_jax.engine.request import Request
from dflash_jax.sampling_params import SamplingParams

# What rows are warmed up with.
_FILLER = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=0)
# A compilation of a large model takes gigabytes of the host's memory.
_MOST_THREADS = 8


def warm_up(engine: Engine) -> dict[str, float]:
    """Compiles all that requests may need, side by side, runs it once, and lets "auto" know what rounds cost: seconds
    of each program's compilation.

    Only while nothing else runs. Executables for masks only where `Options.masks` says so.
    """
    device, found = engine.device, {}
    filler = Request([1] * min(4, device.capacity - 1), _FILLER)
    filler.params = replace(_FILLER, max_tokens=device.capacity - len(filler.prompt))
    # Several hosts compile in one order.
    threads = 1 if jax.process_count() > 1 else min(_MOST_THREADS, os.cpu_count() or 1)
    with device.programs.ahead(threads) as pending:
        names: dict = {}
        for name, _ in _calls(engine, filler):
            names |= {future: name for future in pending.values() if future not in names}
        for future in as_completed(names):
            name, seconds = names[future], future.result()[1]
            found[name] = found.get(name, 0.0) + seconds
            log.info("%s: compiled in %.1f s", name, seconds)
    for _, result in _calls(engine, filler):
        device.wait(result)
    for rows, width in _decodings(engine):
        _time_rounds(engine, filler, rows, width)
    return found


def _decodings(engine: Engine) -> list[tuple[int, int]]:
    """(rows, width) of every decode program."""
    widths = engine.options.widths
    widths = (ALONE, *widths) if widths[-1] > 1 else widths
    return [(rows, width) for rows in engine.device.row_sizes() for width in widths]


def _start(engine: Engine, filler: Request, slots: Sequence[int]):
    """A prompt in each of the slots; what to wait for."""
    device, size = engine.device, engine.options.prefill_sizes[0]
    for slot in slots:
        device.admit(slot, filler)
        ticket = device.prefill([slot], [len(filler.prompt) - 1], size)
    return ticket


def _calls(engine: Engine, filler: Request) -> Iterator[tuple[str, object]]:
    """Makes calls that need every program once: what each of them is called, and what to wait for."""
    device, options = engine.device, engine.options
    yield "admit", device.admit(0, filler)
    for size in options.prefill_sizes:
        for rows in engine.prefill_rows(size):
            name = f"prefill {rows} x {size}"
            device.admit(0, filler)
            yield name, device.prefill([0], [1], size, rows)
            if options.widths[-1] > 1:
                device.admit(0, filler)
                yield f"{name} alone", device.prefill([0], [1], size, rows, drafting=False)
        if engine.store.budget:
            segment = device.save(0, 0, size)
            yield f"save {size}", segment
            yield f"load {size}", device.load(0, 0, segment)
    if engine.store.budget:
        snapshot = device.snapshot(0)
        yield "snapshot", snapshot
        yield "restore", device.restore(0, 1, snapshot)
    device.admit(0, filler)
    scored = scored_size(options.prefill_sizes)
    yield f"score {scored}", device.score(0, 1, scored)
    for rows, width in _decodings(engine):
        slots = device.first_slots(rows)
        _start(engine, filler, slots)
        dispatch = Dispatch(slots, (width,) * len(slots), UNKNOWN_ROUNDS[width > 1], width)
        yield f"decode {rows} x {width}", device.decode(dispatch)
    for rows in device.masked_sizes() if options.masks else ():
        slots = device.first_slots(rows)
        for width in sorted({1, options.widths[-1]}):
            _start(engine, filler, slots)
            dispatch = Dispatch(slots, (width,) * len(slots), 1, width)
            yield f"masked {rows} x {width}", device.decode_masked(dispatch, _AllAllowed(device.mask_words))


class _AllAllowed:
    """Masks that allow everything."""

    def __init__(self, words: int):
        self._words = words

    def ask(self, block: np.ndarray) -> np.ndarray:
        self._shape = block.shape
        return block

    def answer(self, is_verified: Callable[[], bool]) -> tuple[np.ndarray, np.ndarray]:
        return np.full((*self._shape, self._words), 0xFFFFFFFF, np.uint32), np.zeros(self._shape[0], bool)


def _time_rounds(engine: Engine, filler: Request, rows: int, width: int, times: int = 3) -> None:
    device, slots = engine.device, engine.device.first_slots(rows)
    dispatch = Dispatch(slots, (width,) * len(slots), UNKNOWN_ROUNDS[width > 1], width)
    for _ in range(times):
        device.wait(_start(engine, filler, slots))
        began = device.clock
        accepted = device.read(device.decode(dispatch), False).accepted
        rounds = max(len(a) for a in accepted)
        engine.policy.observe_seconds(rows, width, (device.clock - began) / max(rounds, 1), rounds)

"""Before the first request: every program compiled, and the cost of a round known."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from dflash_jax.engine.device import Dispatch
from dflash_jax.engine.engine import UNKNOWN_ROUNDS, Engine, log
from dflash_jax.engine.prefill import scored_size
from dflash_jax.engine.request import Request
from dflash_jax.engine.width import ALONE
from dflash_jax.params import SamplingParams

# What rows are warmed up with.
_FILLER = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=0)


def warm_up(engine: Engine) -> dict[str, float]:
    """Compiles all that requests may need, and lets "auto" know what rounds cost: seconds of each program.

    Only while nothing else runs. Programs for masks only where `Options.masks` says so.
    """
    device, options, found = engine.device, engine.options, {}
    is_drafting = options.widths[-1] > 1

    def timed(name: str, work: Callable):
        before = device.compile_s
        result = work()
        found[name] = device.compile_s - before
        log.info("%s: compiled in %.1f s", name, found[name])
        return result

    filler = Request([1] * min(4, device.capacity - 1), _FILLER)
    filler.params = replace(_FILLER, max_tokens=device.capacity - len(filler.prompt))
    timed("admit", lambda: device.admit(0, filler))
    for size in options.prefill_sizes:
        device.admit(0, filler)
        device.wait(timed(f"prefill {size}", lambda size=size: device.prefill(0, 1, size)))
        if is_drafting:
            device.admit(0, filler)
            device.wait(timed(f"prefill {size} alone", lambda size=size: device.prefill(0, 1, size, drafting=False)))
        if engine.store.budget:
            segment = timed(f"save {size}", lambda size=size: device.save(0, 0, size))
            timed(f"load {size}", lambda segment=segment: device.load(0, 0, segment))
    if engine.store.budget:
        snapshot = timed("snapshot", lambda: device.snapshot(0))
        timed("restore", lambda: device.restore(0, 1, snapshot))
    device.admit(0, filler)
    scored = scored_size(options.prefill_sizes)
    device.read_scores(timed(f"score {scored}", lambda: device.score(0, 1, scored)))
    for rows in device.row_sizes():
        slots = device.first_slots(rows)
        for width in (ALONE, *options.widths) if is_drafting else options.widths:
            dispatch = Dispatch(slots, (width,) * len(slots), UNKNOWN_ROUNDS[width > 1], width)
            for i in range(3):
                for slot in slots:
                    device.admit(slot, filler)
                    device.prefill(slot, len(filler.prompt) - 1, options.prefill_sizes[0])
                device.wait(device.prefill(slots[0], 0, options.prefill_sizes[0]))
                began = device.clock
                name = f"decode {rows} x {width}"
                handle = timed(name, lambda d=dispatch: device.decode(d)) if i == 0 else device.decode(dispatch)
                rounds = max(len(a) for a in device.read(handle, False).accepted)
                engine.policy.observe_seconds(rows, width, (device.clock - began) / max(rounds, 1), rounds)
    if options.masks:
        words = device.mask_words
        for rows in device.masked_sizes():
            slots = device.first_slots(rows)
            for width in sorted({1, options.widths[-1]}):
                for slot in slots:
                    device.admit(slot, filler)
                    device.prefill(slot, len(filler.prompt) - 1, options.prefill_sizes[0])
                dispatch = Dispatch(slots, (width,) * len(slots), 1, width)
                allowed = np.full((len(slots), width, words), 0xFFFFFFFF, np.uint32)
                timed(
                    f"masked {rows} x {width}",
                    lambda d=dispatch, m=allowed: device.read(device.decode_masked(d, lambda _: m), False),
                )
    return found

"""How many conversations run at a time in the bytes of a few dense slots: the bundled pair, its arrays and its engine.

    python scripts/bench/conversations.py [--dense 4] [--requests 240] [--scale 8] [--json FILE]

Two loads, in parts of the lengths that servers have (with --scale 8, eighths): chats of at most 32,768 positions, with
1,500 to 4,500 tokens; and a mix of at most 262,144 positions, in which 70, 20, 9 and 1 of a hundred conversations have
4,096, 32,768, 131,072 and 262,144, each 60 % full. The bytes are those of the decoding state of --dense slots with all
their positions. The engine gets as many slots and pages as take no more, and all requests at once. The mean number of
those that run counts, of the time in which some wait, without its first quarter. Random prompts in extended positions:
the text is worth nothing, the memory is the same.
"""

import argparse
import json
import random
import tempfile
import time
from datetime import date
from pathlib import Path

from dflash_jax import LLM, SamplingParams
from dflash_jax.engine.memory import pages_of_slots, plan_memory
from dflash_jax.engine.request import Request
from dflash_jax.ops.cache import page_size
from tools.bundled_pair import with_positions

ANSWER = 180
LOADS = {"chat": 32768, "mix": 262144}


def lengths(load: str, rng: random.Random, count: int) -> list[int]:
    """Tokens of each conversation, unscaled."""
    if load == "chat":
        return [rng.randrange(1500, 4500) for _ in range(count)]
    return [rng.choices([4096, 32768, 131072, 262144], [70, 20, 9, 1])[0] * 6 // 10 for _ in range(count)]


def measure(llm: LLM, load: str, dense: int, count: int, scale: int) -> dict:
    """What runs at a time in the bytes of ``dense`` slots."""
    capacity, rng = LOADS[load] // scale, random.Random(0)
    sizes = [length // scale for length in lengths(load, rng, count)]
    if min(sizes) <= ANSWER:
        raise SystemExit(f"error: --scale {scale} leaves {min(sizes)} tokens, and the answers alone have {ANSWER}")
    # The engine of one slot says what its parts take.
    probe = llm.new_engine(llm.programs, 1, capacity)
    settings, config = probe.runner.settings, probe.config

    def plan(slots: int, tokens: int | None):
        return plan_memory(llm.programs, slots, capacity, settings, config, 1.0, 0, tokens)

    def taken(slots: int, tokens: int | None) -> int:
        return plan(slots, tokens).slots + plan(slots, tokens).pages

    page, room = page_size(capacity), taken(dense, None)
    # As many slots as conversations of the mean length have pages.
    mean = sum(-(-size // page) * page for size in sizes) // len(sizes)
    slots = dense
    while taken(slots + 1, max((slots + 1) * mean, capacity)) <= room:
        slots += 1
    tokens = max(slots * mean, capacity)
    engine = llm.new_engine(llm.programs, slots, capacity, max_total_tokens=tokens)
    for size in sizes:
        prompt = [rng.randrange(10, 500) for _ in range(size - ANSWER)]
        params = SamplingParams(
            max_tokens=ANSWER, temperature=0.0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=1
        )
        engine.submit(Request(prompt, params, ()))
    running, began = [], time.perf_counter()
    while engine.has_work:
        engine.step()
        if engine.waiting:
            running.append(engine.running - engine.swapped)
    assert engine.statistics.requests["length"] == count, engine.statistics.requests
    busy = running[len(running) // 4 :]
    return {
        "load": load,
        "scale": scale,
        "requests": count,
        "date": f"{date.today()}",
        "dense_slots": dense,
        "dense_pages": pages_of_slots(llm.programs, dense, capacity, settings)[0],
        "room_bytes": room,
        "slots": slots,
        "pages": plan(slots, tokens).counts[0],
        "taken_bytes": taken(slots, tokens),
        "at_a_time": round(sum(busy) / max(len(busy), 1), 1),
        "most": max(busy, default=0),
        "moved": engine.statistics.preemptions,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dense", type=int, default=4, metavar="N", help="dense slots (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=240, metavar="N", help="of each load (default: %(default)s)")
    parser.add_argument("--scale", type=int, default=8, metavar="N", help="divides all lengths (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the figures, too")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        positions = max(LOADS.values()) // args.scale
        llm = LLM(*with_positions(Path(directory), positions), max_len=positions, prefix_bytes=0, slots=1)
        for load in LOADS:
            rows.append(measure(llm, load, args.dense, args.requests, args.scale))
            print(json.dumps(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

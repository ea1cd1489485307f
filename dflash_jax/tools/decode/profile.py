"""The kernels that a round of `bench` spends its time in, from a trace."""

import gzip
import json
import re
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import jax

from dflash_jax.tools.decode.pair import Point


def profile(bench, point: Point, kept: Path) -> list[tuple[str, float, int]]:
    """(name, ms a round, times a round) of the ten kernels that take longest in the loop.

    Kernels whose names differ by a number only are counted together.

    Args:
        bench: A `bench.Bench`.
        point: The point.
        kept: The file of the trace, for Perfetto.
    """
    # One round at a time: of a loop in one graph a trace shows the first turn only.
    call, state = bench.calls(point, state := bench.state(point), 1)["round"], bench.rewound(state, point, "round")
    _, state = call(state)
    state = jax.block_until_ready(bench.rewound(state, point, "round"))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call(state)[0])
        (path,) = Path(folder).rglob("*.trace.json.gz")
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, kept)
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    spent: dict[str, float] = {}
    times: Counter[str] = Counter()
    for name, microseconds in kernel_events(events):
        name = re.sub(r"[._]\d+", "", name)
        spent[name] = spent.get(name, 0.0) + microseconds / 1e3
        times[name] += 1
    return [(name, round(ms, 4), times[name]) for name, ms in sorted(spent.items(), key=lambda each: -each[1])[:10]]


def kernel_events(events: list[dict]) -> list[tuple[str, float]]:
    """(name, microseconds) of the events on a trace's devices.

    On a GPU they are all events of its streams. On a CPU, the events of XLA's own work have the operation's name beside
    them, and those that only contain other operations are left out.
    """
    named = [e for e in events if e.get("ph") == "M" and "name" in e.get("args", {})]
    devices = {e["pid"] for e in named if e["name"] == "process_name" and e["args"]["name"].startswith("/device:")}
    streams = {
        (e["pid"], e["tid"])
        for e in named
        if e["name"] == "thread_name" and e["pid"] in devices and e["args"]["name"].startswith("Stream")
    }
    ran = [e for e in events if e.get("ph") == "X"]
    if streams:
        return [(e["name"], e["dur"]) for e in ran if (e["pid"], e["tid"]) in streams]
    operations = [e for e in ran if "hlo_op" in e.get("args", {})]
    return [(e["name"], e["dur"]) for e in operations if not e["name"].startswith(("while", "cond", "call"))]

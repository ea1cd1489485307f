"""The engine under load: tokens/s, time to first token and inter-token latency by concurrency, for plain decoding,
fixed widths and auto.

    python scripts/bench/engine.py [--target DIR --draft DIR] [--new-tokens N] [--runs N] [--out benchmarks/engine]

Every line is measured once in each of the runs, one after the other, and medians are told: a table on stdout, with
--out as Markdown, JSON and a plot beside it, which needs the extra plot (pip install
"dflash-jax[plot]").
"""

import argparse
import json
import statistics
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from dflash_jax import LLM, SamplingParams
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.request import Request
from dflash_jax.engine.warm_up import warm_up

INTRODUCTION = """# The engine under load

`python scripts/bench/engine.py --runs {args.runs} --new-tokens {args.new_tokens} --waves {args.waves}`: medians of the
runs, in each of which every line is measured once at every concurrency; short prompts, T = 0.7, the bundled pair unless
named. Host waits: the share of the time in which the host had nothing to do but wait for the device.

"""
CONCURRENCY = (1, 4, 8, 16, 32)
TEXTS = [
    "def main(",
    "import os\nimport sys\n\n",
    "class Parser:\n    def __init__(self",
    '    """Return the ',
    "for name in ",
    "def read_config(path):\n    ",
    "    raise ValueError(",
    "    def __repr__(self):\n",
]


def measure(engine: Engine, requests: list[Request], concurrency: int) -> dict:
    """Runs the requests, ``concurrency`` of them at a time."""
    clock, before = engine.runner, engine.statistics
    host, wait, dispatches = before.host_s, before.wait_s, sum(before.dispatches.values())
    began, left, live, pieces = clock.clock, list(requests), 0, {r: [] for r in requests}
    while left or engine.has_work:
        while left and live < concurrency:
            engine.submit(left.pop())
            live += 1
        for event in engine.step():
            pieces[event.request].append((clock.clock, len(event.tokens)))
            live -= event.finish_reason is not None
    seconds = clock.clock - began
    gaps = [(b - a) / n for times in pieces.values() for (a, _), (b, n) in pairwise(times) for _ in range(n)]
    after = engine.statistics
    dispatched = sum(after.dispatches.values()) - dispatches
    return {
        "tokens_per_s": sum(len(r.tokens) for r in requests) / seconds,
        "first_token_ms": 1e3 * statistics.median(r.times.first_token - r.times.submitted for r in requests),
        "inter_token_ms": 1e3 * statistics.median(gaps) if gaps else 0.0,
        "host_ms_per_dispatch": 1e3 * (after.host_s - host) / dispatched,
        # Where the host is never behind, it waits: what it did not wait for, the device may have waited for it.
        "waited_for_device": (after.wait_s - wait) / seconds,
    }


def requests_of(llm: LLM, count: int, new_tokens: int, block, seed: int) -> list[Request]:
    params = SamplingParams(temperature=0.7, max_tokens=new_tokens, ignore_eos=True)
    found = []
    for i in range(seed, seed + count):
        own = llm.defaults.fill(replace(params, seed=i))
        found.append(Request(llm.encode(TEXTS[i % len(TEXTS)]), own, block_size=block))
    return found


def run(args) -> list[dict]:
    llm = LLM(args.target, args.draft) if args.target else LLM()
    lines = {"plain": 1, **{str(w): w for w in (8, 16) if w <= llm.largest_block}, "auto": "auto"}
    engines = {}
    for name, block in lines.items():
        programs = llm.plain_programs if name == "plain" else llm.programs
        engines[name] = llm.new_engine(programs, max(args.concurrency), 512)
        warm_up(engines[name])
        for count in args.concurrency:
            measure(engines[name], requests_of(llm, 2 * count, args.new_tokens, block, 0), count)
    samples = {}
    for run in range(args.runs):
        for count in args.concurrency:
            for name, block in lines.items():
                requests = requests_of(llm, args.waves * count, args.new_tokens, block, 1000 * run)
                found = measure(engines[name], requests, count)
                samples.setdefault((count, name), []).append(found)
    rows = []
    for (count, name), found in samples.items():
        medians = {key: statistics.median(f[key] for f in found) for key in found[0]}
        rows.append({"concurrency": count, "line": name, **medians})
    for name in lines:
        print(name, {str(k): n for k, n in sorted(engines[name].statistics.dispatches.items())})
    return rows


def table(rows: list[dict]) -> str:
    names = ("tokens_per_s", "first_token_ms", "inter_token_ms", "host_ms_per_dispatch", "waited_for_device")
    head = ["concurrency", "line", "tokens/s", "first token ms", "inter-token ms", "host ms a dispatch", "host waits"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        figures = [f"{row[n]:.0f}" if n == "tokens_per_s" else f"{row[n]:.2f}" for n in names]
        lines.append(f"| {row['concurrency']} | {row['line']} | {' | '.join(figures)} |")
    return "\n".join(lines) + "\n"


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name in dict.fromkeys(row["line"] for row in rows):
        mine = [row for row in rows if row["line"] == name]
        axes.plot([r["concurrency"] for r in mine], [r["tokens_per_s"] for r in mine], marker="o", label=name)
    axes.set(xlabel="requests at a time", ylabel="tokens/s", xscale="log", xticks=CONCURRENCY, xticklabels=CONCURRENCY)
    axes.set_ylim(0)
    axes.legend(title="width")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", help="default: the bundled pair")
    p.add_argument("--draft")
    p.add_argument("--new-tokens", type=int, default=128, metavar="N", help="of each request (default: %(default)s)")
    p.add_argument("--runs", type=int, default=5, metavar="N", help="default: %(default)s")
    p.add_argument("--waves", type=int, default=3, metavar="N", help="requests of a row one after the other")
    p.add_argument("--concurrency", type=int, nargs="+", default=CONCURRENCY, metavar="N")
    p.add_argument("--out", type=Path, metavar="PATH", help="writes PATH.md, PATH.json and PATH.png")
    args = p.parse_args()
    if args.out and find_spec("matplotlib") is None:
        p.error('--out plots with matplotlib: pip install "dflash-jax[plot]"')
    rows = run(args)
    print(table(rows))
    if args.out:
        args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(INTRODUCTION.format(args=args) + table(rows))
        plot(rows, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()

"""Decoding at real shapes, part by part, beside the bandwidth floor of the card it runs on.

    python scripts/bench/decode.py [--config qwen3.6-35b-a3b] [--grid full] [--profile]

On a machine that has JAX only, from a checkout: PYTHONPATH=. python scripts/bench/decode.py. It needs no other package.

Weights are random and made on the device; the experts that they touch are counted, the card's bandwidth is measured, or
given (--bandwidth), so that the floors of several records have one denominator.
Without a config: the bundled pair, which a CPU manages. A model that does not fit in bfloat16 is held in FP8, or cut to
as many layers as fit, and the table says so. Points that --out already has are not measured again. Results: a table on
stdout (--json: the record), OUT.json and OUT.md.
"""

import argparse
import gzip
import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax

from dflash_jax.benchmarking.store import beside, read_record, write_record
from dflash_jax.checkpoint.config_files import find_config
from dflash_jax.checkpoint.quantize import QUANTIZE
from dflash_jax.engine.compile_cache import enable_disk_cache
from dflash_jax.errors import InputError
from dflash_jax.models.config import MoeSpec
from dflash_jax.ops.backend import Backend
from dflash_jax.options.generate import GenerateOptions
from dflash_jax.options.parser import Parser
from dflash_jax.parallel.devices import DEVICES, device_name, set_platform, versions
from dflash_jax.process import exit_code
from tools.decode.bench import Bench, measured_bandwidth
from tools.decode.pair import Point, experts_used, grid, groups, in_fp8, layout_of, open_pair, parameters, shapes_of

PUBLISHED = Path(__file__).parents[2] / "dflash_jax/assets/published.json"
# Parameters.
MOST_ON_CPU = 2e9
# What a trace may show.
PARTS = ("round", "prefill")
INTRODUCTION = """# Decoding, part by part

`python scripts/bench/decode.py`: {}. Milliseconds, medians of five. A round and its parts each run in a loop on the
device; the head is part of verify. GB: what a round cannot but move, with the experts that were counted; the floor is
its time at the measured bandwidth (the faster of reading, and of reading and writing; measured once for all points).
Of the data sheet: the same at the bandwidth that the maker states. With arithmetic: each product takes the longer of
its bytes and of two operations for a weight and token at the rate that the maker states for 16 bits. Peak: what the
largest of a point's programs holds. Kernels are counted in compile.md. Prefill: the last chunk of one prompt, the
largest that the context has room for, after the tokens before it.
"""
COLUMNS = {
    "round": "round_ms", "draft": "draft_ms", "verify": "verify_ms", "of it head": "head_ms", "draw": "draw_ms",
    "commit": "commit_ms", "GB": "gb_a_round", "floor ms": "floor_ms", "of floor": "of_floor",
    "of data sheet": "of_data_sheet", "floor with arithmetic ms": "floor_with_arithmetic_ms",
    "of it": "of_floor_with_arithmetic", "experts": "experts_touched", "temporaries GB": "temporaries_gb",
    "peak GB": "peak_gb", "prefill ms": "prefill_ms", "prefill tok/s": "prefill_tokens_per_s", "model": "model",
}  # fmt: skip


def acceptance_lengths(name: str, block_size: int, drafter: str) -> dict[str, float]:
    """Published, by task; ``drafter``: "dflash" or "mtp"."""
    published = json.loads(PUBLISHED.read_text()).get(name.removesuffix("-fp8"), {})
    length_by_task = {}
    for task, lengths in published.get("acceptance_length", {}).items():
        value = lengths.get(str(block_size), {})
        by_drafter = value if isinstance(value, dict) else {"dflash": value}
        if drafter in by_drafter:
            length_by_task[task] = by_drafter[drafter]
    return length_by_task


def table(record: dict) -> str:
    """Markdown: a line a point, then tokens/s at published acceptance lengths."""
    about = record["about"]
    lines = [INTRODUCTION.format(", ".join(f"{k} {v}" for k, v in about.items() if v))]
    shown = {c: k for c, k in COLUMNS.items() if any(k in row for row in record["points"].values())}
    lines += ["| point | " + " | ".join(shown) + " |", "|---" * (len(shown) + 1) + "|"]
    for point, row in record["points"].items():
        cells = [row["failed"]] if "failed" in row else [str(row.get(k, "")) for k in shown.values()]
        lines.append(f"| {point} | " + " | ".join(cells) + " |")
    computed, drafter = [], "mtp" if about.get("draft", "").startswith("mtp") else "dflash"
    for point, row in record["points"].items():
        batch, block_size, _ = (int(part.split()[1]) for part in point.split(", ")[:3])
        # Of fewer layers than there are a token's time says nothing.
        if "failed" in row or "layers" in row.get("model", "") + about["model"]:
            continue
        if block_size == 1:
            computed.append(f"| {point} | plain | 1 | {1e3 * batch / row['round_ms']:.0f} |")
        for task, length in acceptance_lengths(about["config"], block_size, drafter).items():
            computed.append(f"| {point} | {task} | {length} | {1e3 * batch * length / row['round_ms']:.0f} |")
    lines += ["", "Tokens/s, computed, not measured: a measured round, of the weights above, at a published acceptance"]
    lines += ["length; without prefill.", ""]
    return "\n".join([*lines, "| point | task | acceptance length | tokens/s |", "|---|---|---|---|", *computed]) + "\n"


def profile(bench: Bench, point: Point, part: str, kept: Path) -> list[tuple[str, float, int]]:
    """(name, ms, times) of the ten kernels that take longest in a round or in a prefill.

    Kernels whose names differ by a number only are counted together.

    Args:
        bench: Of the point's pair.
        point: The point.
        part: One of `PARTS`.
        kept: The file of the trace, for Perfetto.
    """
    # One round at a time: of a loop in one graph a trace shows the first turn only.
    call, state = bench.calls(point, state := bench.state(point), 1)[part], bench.rewound(state, point, part)
    _, state = call(state)
    state = jax.block_until_ready(bench.rewound(state, point, part))
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


def count_of_experts(args, point: Point) -> int:
    """What --experts says for a point. Raises InputError where the target has none, or fewer."""
    specs = [layer.ffn for layer in shapes_of(args).target.layers if isinstance(layer.ffn, MoeSpec)]
    if not specs:
        raise InputError("--experts: the target has none")
    tokens, spec = point.batch * point.block_size, specs[0]
    if args.experts == "even":
        return experts_used(tokens, spec)
    low, high = spec.experts_per_token, min(spec.num_experts, tokens * spec.experts_per_token)
    if not args.experts.isdecimal() or not low <= int(args.experts) <= high:
        raise InputError(f"--experts {args.experts!r}: for {tokens} tokens it must be 'even' or {low} to {high}")
    return int(args.experts)


def kernels_of(backend: Backend) -> str:
    """The kernels of a record."""
    return ("triton, all" if backend.kernels == "all" else "triton") if backend.has_triton else "xla"


def run(args) -> int:
    """Measures the points: the exit code."""
    set_platform(args.platform)
    is_cpu = jax.default_backend() == "cpu"
    if args.bandwidth is not None and not 0 < args.bandwidth < float("inf"):
        raise InputError(f"--bandwidth {args.bandwidth}: it must be GB/s, more than 0")
    if args.config is not None and is_cpu and (count := parameters(args)) > MOST_ON_CPU:
        raise InputError(f"{count / 1e9:.0f} billion parameters on a CPU: give --layers, or leave --config out")
    if args.draft and args.config is None:
        raise InputError(f"--draft {args.draft}: it needs --config")
    if args.draft_tokens is not None:
        vocab = shapes_of(args).target.vocab_size
        if args.config is None or not 1 <= args.draft_tokens <= vocab:
            raise InputError(f"--draft-tokens {args.draft_tokens}: it needs --config, and must be 1 to {vocab}")
    enable_disk_cache()
    points = [Point.parse(text) for text in args.points or ()] or grid(args.grid, args.config is None or is_cpu)
    if args.experts is not None:
        points = [replace(p, experts=count_of_experts(args, p)) for p in points]
    kind, name = jax.devices()[0].device_kind, find_config(args.config).stem if args.config else "bundled"
    if args.grid == "full" and args.config is not None and not args.points and args.quantize is None:
        points += in_fp8(args, points)
    about = {
        "config": name,
        "device": f"{len(jax.devices())} x {kind}",
        "mesh": str(layout_of(args)),
        "dtype": (args.dtype or ("float32" if is_cpu and args.config is None else "bfloat16"))
        + (f", weights in {args.quantize}" if args.quantize else ""),
        "kernels": kernels_of(Backend.detect(args.kernels)),
        "draft": ", ".join(filter(None, (args.draft, args.draft_tokens and f"{args.draft_tokens:,} tokens"))),
        "model": ("random" if args.config else "trained")
        + " weights"
        + (f", first {args.layers} layers" if args.layers else ""),
    }
    out = args.out or Path(
        f"benchmarks/decode-{device_name(kind) or jax.default_backend()}-{name}"
        + "".join(f"-{each}" for each in (args.draft, args.draft_tokens) if each)
    )
    if args.bandwidth is not None:
        about["bandwidth_gb_per_s"] = args.bandwidth
    figures, page = beside(out, ".json"), beside(out, ".md")
    recorded = read_record(figures)
    was = recorded.get("about", about)
    if any(was.get(k, "") != v for k, v in about.items()):
        raise InputError(f"{figures} is of {was}, this is {about}: give another --out")
    record, bench, bandwidth = {"about": about, "points": recorded.get("points", {})}, None, 0.0
    device = DEVICES.get(device_name(kind) or "")

    def measured(point: Point) -> bool:
        return "round_ms" in record["points"].get(str(point), {})

    left = [p for p in points if not measured(p)] or points[-1:] * bool(args.profile)
    if left:
        # A record has one: that of its first points.
        if (gb_per_s := about.get("bandwidth_gb_per_s", was.get("bandwidth_gb_per_s"))) is None:
            gb_per_s = round(measured_bandwidth() / 1e9, 1)
        bandwidth = 1e9 * gb_per_s
        about |= {"bandwidth_gb_per_s": gb_per_s, "versions": versions()}
    else:
        about |= was
    for group in groups(args, left):
        # Frees the memory of the previous group first.
        bench = None
        for point in group:
            if measured(point):
                continue
            print(f"{point} …", file=sys.stderr, flush=True)
            try:
                if bench is None:
                    bench = Bench(open_pair(args, group), bandwidth, device)
                row = bench.measure(point) | ({"model": bench.pair.note} if bench.pair.note else {})
            except jax.errors.JaxRuntimeError as e:
                row = {"failed": " ".join(str(e).split())[:120]}
            if bench is not None:
                bench.programs.compiled.clear()
            record["points"][str(point)] = row
            write_record(figures, record)
            page.write_text(table(record))
    print(json.dumps(record) if args.json else table(record))
    if args.profile:
        # Of what fits this very point.
        bench = None
        bench = Bench(open_pair(args, points[-1:]), bandwidth, device)
        trace = out.with_name(out.name + "-trace.json.gz")
        print(f"ten kernels of {points[-1]}; the whole trace is in {trace}", file=sys.stderr)
        for name, ms, times in profile(bench, points[-1], args.profile, trace):
            print(f"{ms:10.4f} ms a {args.profile}, {times:4d} times: {name}", file=sys.stderr)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--config", metavar="NAME|FILE", help="a name of configs/, or a TOML (default: the bundled pair)")
    p.add_argument("--grid", choices=["default", "full"], default="default", help="default: %(default)s")
    p.add_argument("--points", nargs="+", metavar="BATCH,WIDTH,CONTEXT", help="these instead of a grid")
    text = "send the tokens of a round to N experts of each layer, or to as many as evenly used routers do (even)"
    p.add_argument("--experts", metavar="N|even", help=f"{text}; default: as random weights route")
    p.add_argument("--draft", choices=["mtp"], help="the target's own MTP head in place of the config's drafter")
    p.add_argument("--draft-tokens", type=int, metavar="N", help="number of tokens that are drafted (default: all)")
    p.add_argument("--layers", type=int, metavar="N", help="only the first N layers of the target")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: by platform")
    p.add_argument("--quantize", choices=QUANTIZE[1:])
    p.add_argument("--mesh", metavar="tensor=8", help="default: the config's for these devices")
    p.add_options(GenerateOptions, ("platform", "kernels"), group="options")
    text = "name the ten dearest kernels of the last point's round, or of its prefill; keep the trace"
    p.add_argument("--profile", nargs="?", const=PARTS[0], choices=PARTS, help=text)
    text = "the device's, as an earlier run measured it (default: it is measured)"
    p.add_argument("--bandwidth", type=float, metavar="GB/S", help=text)
    p.add_argument("--out", type=Path, metavar="PATH", help="without suffix (default: benchmarks/decode-DEVICE-CONFIG)")
    p.add_argument("--json", action="store_true", help="one JSON object on stdout and nothing else")
    return p


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return exit_code(lambda: run(make_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())

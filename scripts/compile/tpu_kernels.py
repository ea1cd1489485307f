"""What a TPU's compiler makes of every Pallas kernel at a published model's shapes; no TPU is needed.

    python scripts/compile/tpu_kernels.py --out benchmarks/kernels-tpu.json
    python scripts/compile/tpu_kernels.py --device v6e:1x1 --batch 8

Compiles attention, the delta rule and its replay of one layer for each device, on one chip: the kernel's bytes of VMEM,
the bundles of instructions of its program and of a page's loop in it (of all branches, so at most that many run; the
compiler's schedule), and the temporaries of the call. Beside them, by arithmetic: programs of a call, the bytes that
their blocks and copies move, and those that must be moved. It needs what report.py needs.
"""

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_jax.options.parser import Parser
from dflash_jax.options.systems import read_system
from dflash_jax.parallel.devices import versions
from dflash_jax.planner import read_shapes
from dflash_jax.process import exit_code
from tools import compile_report as report

DEVICES = ("v5e:1x1", "v5p:2x2x1", "v6e:1x1", "tpu7x:1x1x1")
SCHEDULE, UTILIZATION = "*-{}.*final_bundles.txt", "*-{}.*final_hlo-static-per-bundle-utilization.txt"


@dataclass(frozen=True)
class Case:
    """A call of a kernel: how many programs it has, the bytes that it moves, and those that it must move."""

    kernel: str
    of: str
    programs: int
    moved: int
    least: int
    call: Callable[..., Any]
    args: tuple[Any, ...]
    donated: tuple[int, ...] = ()


def _shape(*sizes: int, dtype: Any = "bfloat16") -> Any:
    import jax
    import jax.numpy as jnp

    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def attention_cases(spec, batch: int, context: int) -> Iterator[Case]:
    """Blocks of one token and of 16, with caches in bfloat16 and FP8."""
    import jax
    import jax.numpy as jnp

    from dflash_jax.ops.attention import attention
    from dflash_jax.ops.backend import Backend
    from dflash_jax.ops.cache import FP8, Bounds, KVCache
    from dflash_jax.ops.kernels.tpu.attention import TOKENS

    n, heads, d = spec.num_heads, spec.num_kv_heads, spec.head_dim
    rows = _shape(batch, dtype="int32")

    def call(q, k, v, cache, length, bounds):
        return attention(Backend.for_tpu("all"), q, k, v, None, cache, length, bounds)

    for tokens, dtype in ((1, jnp.bfloat16), (16, jnp.bfloat16), (16, FP8)):
        cache = jax.eval_shape(lambda dtype=dtype: KVCache.create(batch + 1, heads, d, context, dtype))
        size, page, new = jnp.dtype(dtype).itemsize, cache.page_size, _shape(batch, tokens, heads, d, dtype=dtype)

        def moved(tokens: int, positions: int, size=size) -> int:
            """Queries, results, new and cached keys and values."""
            return batch * 2 * d * (2 * n * tokens + size * heads * (tokens + positions))

        bounds = Bounds(_shape(batch, tokens, dtype="int32"), rows, rows)
        yield Case(
            "attend", f"{batch} rows of {tokens} tokens, context {context}, {jnp.dtype(dtype).name}", batch,
            moved(TOKENS, -(-context // page) * page), moved(tokens, context), call,
            (_shape(batch, tokens, n, d), new, new, KVCache(cache.k, cache.v, cache.table, rows), rows, bounds),
        )  # fmt: skip


def delta_cases(spec, batch: int, prompt: int) -> Iterator[Case]:
    """Rounds of one token and of 16, with their replays, and a chunk of a prompt."""
    from dflash_jax.ops import gated_delta
    from dflash_jax.ops.backend import Backend
    from dflash_jax.ops.cache import DeltaRecord, DeltaState
    from dflash_jax.ops.kernels.tpu.delta import CHUNK, TOKENS, heads_of_program

    g, r, dk, dv = spec.num_key_heads, spec.values_per_key, spec.key_dim, spec.value_dim
    channels, taps, tpu, rows = 2 * dk + r * dv, spec.conv_kernel, Backend.for_tpu("all"), _shape(batch, dtype="int32")
    recurrent = _shape(batch + 1, g, r, dk, dv, dtype="float32")
    state = DeltaState(recurrent, _shape(batch + 1, taps - 1, g, channels), rows)
    weights = gated_delta.Weights(_shape(g, channels, taps), _shape(g, r), _shape(g, r), _shape(dv))
    state_bytes = 4 * g * r * dk * dv

    def mix(x, gates, state, weights):
        return gated_delta.gated_delta(tpu, x, gates, state, weights, 1e-6)

    def advance(x, gates, state, weights, n):
        return gated_delta.advance(tpu, x, gates, state, weights, 1e-6, n)

    def replay(state, record, n):
        return gated_delta.replay(tpu, state, record, n)

    for tokens in (1, 16, prompt):
        is_round, of = tokens <= TOKENS, f"{batch} rows of {tokens} tokens"
        size = TOKENS if is_round else CHUNK
        chunks, record_bytes = -(-tokens // size), 4 * tokens * g * (dk + r * dv)
        read = 2 * tokens * g * (channels + 2 * r * dv) + 2 * (taps - 1) * g * channels + state_bytes
        both = batch * (read + (record_bytes if is_round else state_bytes))
        programs = batch * g // heads_of_program(tokens, state)
        # Decays and step sizes are in float32, and so is the kernel of the convolution.
        moved = both + batch * 4 * 3 * chunks * size * g * r + 4 * taps * g * channels
        least = both + batch * 2 * 2 * tokens * g * r + 2 * taps * g * channels
        args = (_shape(batch, tokens, g, channels + r * dv), _shape(batch, tokens, 2, g, r), state, weights)
        if not is_round:
            yield Case("mix", of, programs * chunks, moved, least, advance, (*args, rows), (2,))
            continue
        yield Case("mix", of, programs, moved, least, mix, args)
        moved = batch * (record_bytes + 4 * tokens * g * r + 2 * state_bytes)
        record = DeltaRecord(
            _shape(batch, tokens, g, dk, dtype="float32"), _shape(batch, tokens, g, r, dv, dtype="float32"),
            _shape(batch, tokens, g, r, dtype="float32"), _shape(batch, tokens, g, channels),
        )  # fmt: skip
        yield Case("replay", of, programs, moved, moved, replay, (state, record, rows), (0,))


def bundles(kernel: str, folder: Path, programs: int) -> tuple[int | None, int]:
    """Bundles of a kernel's program, and of loops in it, as the compiler has written them to ``folder``."""
    schedules = sorted(p for p in folder.glob(SCHEDULE.format(kernel)) if "schedule-analysis" not in p.name)
    tables = sorted(folder.glob(UTILIZATION.format(kernel)))
    if not schedules or not tables:
        return None, 0
    total = sum(bool(re.match(r"[\d ]+$", line)) for line in tables[-1].read_text().splitlines()[3:])
    # One ">" a loop; the outermost is over programs where there are several.
    depths = re.findall(r"^ *(?:0x)?[0-9a-f]+ [^{>]*: *(>[> ]*)\{", schedules[-1].read_text(), re.MULTILINE)
    return total, sum(depth.count(">") > (programs > 1) for depth in depths)


def measure(device, case: Case, folder: Path) -> dict:
    """The compiler's figures of a case."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    for path in folder.glob("*.txt"):
        path.unlink()
    everywhere = NamedSharding(Mesh(np.array([device]), ("data",)), PartitionSpec())
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), case.args)
    try:
        compiled: Any = jax.jit(case.call, donate_argnums=case.donated).lower(*args).compile()
    except Exception as e:  # the compiler's own words, whatever the type
        return {"failed": " ".join(str(e).split())[:300]}
    calls = [line for line in compiled.as_text().splitlines() if "tpu_custom_call" in line]
    vmem = [int(n) for line in calls for n in re.findall(r'"memory_space":"1","offset":"\d+","size":"(\d+)"', line)]
    total, loop = bundles(case.kernel, folder, case.programs)
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    return {"vmem": max(vmem, default=0), "bundles": total, "loop": loop, "temporaries": temporaries}


def table(rows: list[dict]) -> str:
    """Figures for people."""
    lines = [
        "| device | kernel | of | VMEM, KB | bundles | of them in loops | programs | MB moved | least MB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = row.get("failed") or " | ".join(
            str(x) for x in (row["vmem"] // 1000, row["bundles"], row["loop"], row["programs"])
        )
        bytes_ = " | ".join(f"{row[name] / 1e6:.2f}" for name in ("moved", "least"))
        lines.append(f"| {row['device']} | {row['kernel']} | {row['of']} | {figures} | {bytes_} |")
    return "\n".join(lines)


def run(args, folder: Path) -> int:
    """Writes the figures: the exit code."""
    import jax

    from dflash_jax.models.config import AttentionSpec, GatedDeltaSpec

    jax.config.update("jax_enable_compilation_cache", False)
    config = read_shapes(*(str(read_system(args.config).shapes[k]) for k in ("target", "draft"))).target
    specs = {type(layer.mixer): layer.mixer for layer in config.layers}
    cases = [case for b in args.batch for case in attention_cases(specs[AttentionSpec], b, args.context)]
    if GatedDeltaSpec in specs:
        cases += [case for b in args.batch for case in delta_cases(specs[GatedDeltaSpec], b, args.prompt)]
    rows = []
    for name in args.device:
        device = report.topology(name, 1)[0]
        for case in cases:
            head = {"device": name, "kernel": case.kernel, "of": case.of}
            figures = {"programs": case.programs, "moved": case.moved, "least": case.least}
            rows.append(head | measure(device, case, folder) | figures)
            print(rows[-1], file=sys.stderr, flush=True)
    if args.out:
        about = json.dumps({"versions": versions(), "config": args.config})
        body = ",\n".join(map(json.dumps, rows))
        args.out.write_text(f'{{"about": {about}, "kernels": [\n{body}\n]}}\n')
    print(table(rows))
    return int(any("failed" in row for row in rows))


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--config", default="qwen3.6-35b-a3b", metavar="NAME|FILE", help="default: %(default)s")
    p.add_argument("--device", nargs="+", default=list(DEVICES), metavar="NAME", help="default: %(default)s")
    p.add_argument("--batch", nargs="+", type=int, default=[1, 8], metavar="N", help="rows (default: %(default)s)")
    p.add_argument("--context", type=int, default=4096, metavar="N", help="default: %(default)s")
    p.add_argument("--prompt", type=int, default=1024, metavar="N", help="tokens of a chunk (default: %(default)s)")
    p.add_argument("--out", type=Path, metavar="FILE", help="JSON")
    return p


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    report.prepare()
    with tempfile.TemporaryDirectory(prefix="llo_") as folder:
        # Read when libtpu loads.
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}"
        return exit_code(lambda: run(make_parser().parse_args(argv), Path(folder)))


if __name__ == "__main__":
    sys.exit(main())

"""Milliseconds a round beside SGLang's, at equal work: benchmarks/equal_work.md.

    python scripts/bench/equal_work.py --out benchmarks/equal_work.md

Reads what bench/decode.py measured on an H200 and the throughput that the model card gives for SGLang on a B200.
"""

import argparse
import json
from pathlib import Path
from statistics import mean

from dflash_jax.models.config import ModelConfig, MoeSpec
from dflash_jax.options.parser import Parser
from dflash_jax.options.systems import read_system
from dflash_jax.parallel.devices import DEVICES
from dflash_jax.planner import read_shapes
from dflash_jax.process import exit_code
from tools.decode.pair import experts_used

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "dflash_jax/assets/published.json"
MEASURED = ROOT / "benchmarks/decode-h200-qwen3.6-35b-a3b-triton.json"
NAME, CONTEXT = "qwen3.6-35b-a3b", 2048
BATCHES, BLOCK_SIZES = (1, 8, 16, 32), (1, 8, 16)

INTRODUCTION = """# Equal work: a round beside SGLang's

`python scripts/bench/equal_work.py`. Qwen3.6-35B-A3B, bfloat16. A round of block size 1 is a plain decoding step; of
block size 8 or 16, one round of DFlash.

**SGLang, B200** is computed from the model card: acceptance length × concurrency / (tokens/s), the mean of the card's
tasks, and the least and greatest of them in brackets. The card's tokens/s count the whole request, prefill too.

**Ours, measured** is [the run of bench/decode.py]({measured}) on one H200 ({bandwidth:.0f} GB/s measured) with random
weights, a context of {context:,} tokens, no prefill. A point that was not run is left empty.

**Ours, scaled** is a prediction for a B200 ({card:.0f} GB/s by its data sheet, of which the H200's measured part,
{part:.0%}, is assumed): nothing of it was measured. Two corrections are made. The experts that a layer reads are set to
what evenly used routers touch, 256 · (1 − (31/32)^tokens), which random weights' routers reach for few and for many
tokens only; and the bytes are divided by the B200's bandwidth. The first figure keeps the measured fraction of the
floor, the second keeps the measured milliseconds above the floor. Both are estimates, and a measured round may lie
outside.
"""


def target() -> ModelConfig:
    shapes = read_system(NAME).shapes
    return read_shapes(*(str(shapes[k]) for k in ("target", "draft"))).target


def gigabytes_of_an_expert(config: ModelConfig) -> float:
    """In all layers, in bfloat16: three matrices of hidden by intermediate size."""
    specs = [layer.ffn for layer in config.layers if isinstance(layer.ffn, MoeSpec)]
    return sum(3 * config.hidden_size * spec.intermediate_size for spec in specs) * 2 / 1e9


def published_rounds(published: dict, batch: int, block_size: int) -> list[float]:
    """Milliseconds of SGLang's rounds, by task."""
    found = []
    for row in published["throughput"]:
        if row["concurrency"] != batch or (block_size > 1 and row["block_size"] != block_size):
            continue
        length = 1.0
        if block_size > 1:
            lengths = published["acceptance_length"][row["task"]][str(block_size)]
            length = lengths["dflash"] if isinstance(lengths, dict) else lengths
        rate = row["autoregressive" if block_size == 1 else "dflash"]
        found.append(1e3 * length * batch / rate)
    return found


def scaled(
    point: dict, experts: int, expert: float, measured_bandwidth: float, bandwidth: float
) -> tuple[float, float]:
    """A measured round for another card and count of experts: (at the measured fraction of the floor, with the measured
    milliseconds above it). ``expert`` in GB, bandwidths in GB/s.
    """
    gigabytes = point["gb_a_round"] + (experts - point["experts_touched"]) * expert
    before, after = (1e3 * point["gb_a_round"] / measured_bandwidth, 1e3 * gigabytes / bandwidth)
    return after * point["round_ms"] / before, after + point["round_ms"] - before


def page(published: dict, record: dict) -> str:
    measured = float(record["about"]["bandwidth_gb_per_s"])
    part = measured / (DEVICES["h200"].bandwidth / 1e9)
    card, config = DEVICES["b200"].bandwidth / 1e9, target()
    spec, expert = config.layers[0].ffn, gigabytes_of_an_expert(config)
    assert isinstance(spec, MoeSpec)
    head = ["batch", "block size", "SGLang, B200, ms", "ours, measured, H200, ms", "experts", "GB"]
    head += ["ours, scaled to a B200, ms", "experts", "SGLang / ours"]
    lines = [
        INTRODUCTION.format(
            measured=MEASURED.with_suffix(".md").name, bandwidth=measured, context=CONTEXT, card=card, part=part
        ),
        "| " + " | ".join(head) + " |",
        "|---" * len(head) + "|",
    ]
    for batch in BATCHES:
        for block_size in BLOCK_SIZES:
            published_ms = published_rounds(published, batch, block_size)
            cells = [
                str(batch),
                str(block_size),
                f"{mean(published_ms):.1f} ({min(published_ms):.1f} to {max(published_ms):.1f})",
            ]
            where = f"batch {batch}, width {block_size}, context {CONTEXT}"
            # A point may name the experts that its tokens were sent to.
            point = next((p for name, p in record["points"].items() if f"{name},".startswith(f"{where},")), {})
            if "round_ms" in point:
                experts = experts_used(batch * block_size, spec)
                low, high = scaled(point, experts, expert, measured, card * part)
                cells += [f"{point['round_ms']:.1f}", f"{point['experts_touched']:.0f}", f"{point['gb_a_round']:.1f}"]
                cells += [f"{low:.1f} to {high:.1f}", str(experts)]
                cells.append(f"{mean(published_ms) / high:.1f} to {mean(published_ms) / low:.1f}")
            lines.append("| " + " | ".join(cells + [""] * (len(head) - len(cells))) + " |")
    return "\n".join(lines) + "\n"


def make_parser() -> argparse.ArgumentParser:
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", required=True, type=Path, metavar="FILE", help="the page, in Markdown")
    return p


def run(args) -> int:
    published = json.loads(PUBLISHED.read_text())[NAME]
    args.out.write_text(page(published, json.loads(MEASURED.read_text())))
    return 0


def main(argv: list[str] | None = None) -> int:
    return exit_code(lambda: run(make_parser().parse_args(argv)))


if __name__ == "__main__":
    raise SystemExit(main())

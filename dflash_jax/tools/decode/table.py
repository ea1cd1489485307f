"""The Markdown of `bench`: a line a point, and tokens/s at published acceptance lengths."""

import json
from pathlib import Path

PUBLISHED = Path(__file__).parents[2] / "assets/published.json"
INTRODUCTION = """# Decoding, part by part

`python scripts/bench/decode.py`: {}. Milliseconds, medians of five. A round and its parts each run in a loop on the
device; the head is part of verify. GB: what a round cannot but move, with the experts that were counted; the floor is
its time at the measured bandwidth (the faster of reading, and of reading and writing). Peak: what the largest of a
point's programs holds. Prefill: one chunk of one prompt, the largest that the context has room for.
"""


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


COLUMNS = {
    "round": "round_ms", "draft": "draft_ms", "verify": "verify_ms", "of it head": "head_ms", "draw": "draw_ms",
    "commit": "commit_ms", "GB": "gb_a_round", "floor ms": "floor_ms", "of floor": "of_floor",
    "experts": "experts_touched", "kernels a layer": "kernels_a_layer", "temporaries GB": "temporaries_gb",
    "peak GB": "peak_gb", "prefill ms": "prefill_ms", "prefill tok/s": "prefill_tokens_per_s", "model": "model",
}  # fmt: skip


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

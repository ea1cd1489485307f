"""Writes benchmarks/tpu.json and the tables of tpu.md: predicted times and tokens a second of systems on TPUs.

    python scripts/compile/tpu.py [--only TEXT] [--again] [--page]

Compiles the first four and the first eight layers of a system by `report.py` and takes each further layer to be like
the fifth to the eighth. Rows already in the file are kept unless --again is given, so an interrupted run goes on. It
needs libtpu; --page writes the tables of what is in the file.
"""

import argparse
import json
import re
import textwrap
from pathlib import Path
from typing import Any

from dflash_jax.parallel.devices import DEVICES
from tools.compile_report import reported
from tools.xla_costs import REVISION

FIGURES = Path(__file__).parents[2] / "benchmarks" / "tpu.json"
PAGE = FIGURES.with_suffix(".md")
CONTEXT = 4096
SHORT, LONG = 4, 8
# (system, slice), by importance. Programs are compiled for all of a group before the next kind is.
GROUPS = [
    [
        ("qwen3.6-35b-a3b", "v6e:2x4"),
        ("qwen3.6-35b-a3b", "tpu7x:2x2x1"),
        ("qwen3.8-27b", "tpu7x:2x2x1"),
        ("qwen3.8-27b", "v6e:2x4"),
    ],
    [("qwen3.5-397b-a17b-fp8", "tpu7x:2x2x1"), ("qwen3.5-397b-a17b", "tpu7x:2x2x2")],
    [(system, device) for device in ("v5p:2x2x1", "v5e:2x4") for system in ("qwen3.6-35b-a3b", "qwen3.8-27b")],
    [("qwen3.5-397b-a17b-fp8", "v6e:4x8"), ("qwen3.5-397b-a17b", "v5p:2x2x4")],
]
KINDS = {
    "--slots 1 --programs plain round": "one slot",
    "--slots 1 --programs prefill --chunk 1024": "prefill of 1,024",
    "--slots 1 --programs prefill --chunk 4096": "prefill of 4,096",
    "--slots 32 --programs plain round": "32 slots",
    "--slots 1 --programs round --block-size 8": "a round of 8",
    "--slots 8 --programs plain round": "8 slots",
}
# Mean acceptance lengths that the drafters' authors publish, by system and block size, and where.
ACCEPTANCE = {
    ("qwen3.6-35b-a3b", 16): 6.02,
    ("qwen3.6-35b-a3b", 8): 4.80,
    ("qwen3.8-27b", 8): 4.80,
    ("qwen3.5-397b-a17b", 16): 6.02,
}
MEGAKERNELS, THEIR_ACCEPTANCE = 1515, 6.0
THEIR_ROW = "qwen3.8-27b", "tpu7x:2x2x1", 1
OLDER = "†"


def commands() -> list[str]:
    """What is compiled, in its order; a DFlash2 drafter's block is eight already."""
    return [
        f"{system} --device {device} --context {CONTEXT} {kind} --layers {layers}"
        for group in GROUPS
        for kind in KINDS
        for system, device in group
        if not ("--block-size" in kind and system != "qwen3.6-35b-a3b")
        for layers in (SHORT, LONG)
    ]


def whole(short: Any, long: Any, layers: int) -> Any:
    """A figure, or a tree of figures, of ``layers`` layers, from those of four and of eight."""
    if isinstance(short, dict):
        return {k: whole(v, long[k], layers) for k, v in short.items() if k in long and not isinstance(v, str)}
    if isinstance(short, int | float) and not isinstance(short, bool):
        return short + (long - short) / (LONG - SHORT) * (layers - SHORT)
    return short


def programs(rows: dict[str, dict]) -> list[dict]:
    """The programs of whole systems, by the order of their rows."""
    found = []
    for command in commands():
        short, long = (rows.get(command.replace(f"--layers {SHORT}", f"--layers {n}"), {}) for n in (SHORT, LONG))
        if not command.endswith(f"--layers {SHORT}") or "programs" not in short or "programs" not in long:
            continue
        for name, figures in short["programs"].items():
            if "failed" in figures or "failed" in long["programs"][name]:
                continue
            kept, further = (
                {k: f[name][k] for k in ("counted", "floor")} for f in (short["programs"], long["programs"])
            )
            found.append(
                {
                    "system": short["config"],
                    "slice": short["device"],
                    "slots": short["slots"],
                    "layers": short["depth"],
                    "name": name,
                    "tokens": figures["tokens"],
                    "is_older": any(row.get("revision", 0) < REVISION for row in (short, long)),
                    **whole(kept, further, short["depth"]),
                }
            )
    return found


def label(program: dict) -> str:
    """A program's name with its tokens."""
    return {"plain": "plain", "round": f"round of {program['tokens']}"}.get(
        program["name"], f"prefill of {program['tokens']:,}"
    )


def system_of(*found: dict | None) -> str:
    """The system of programs, with a mark if an older revision of the arithmetic has counted one."""
    counted = [p for p in found if p is not None]
    return counted[0]["system"] + f" {OLDER}" * any(p["is_older"] for p in counted)


def with_note(text: str) -> str:
    """A table, with what its mark means where it has one."""
    note = f"{OLDER} Counted by an older revision of `tools/xla_costs.py`; `tpu.py --again` counts anew."
    return f"{text}\n{note}\n" if OLDER in text else text


def times_table(found: list[dict]) -> str:
    """Markdown: a line a program."""
    titles = "system|slice|slots|program|floor ms|predicted ms|compiler's ms|once a dispatch ms|HBM GB, of the floor's"
    titles += "|GFLOP, of the floor's|operations|collectives a layer|their ms|hidden ms"
    lines = [f"| {' | '.join(titles.split('|'))} |", "|---" * len(titles.split("|")) + "|"]
    for p in found:
        c, floor = p["counted"], p["floor"]
        once = c.get("once", {"predicted_s": 0.0})
        cells = [
            system_of(p),
            p["slice"],
            str(p["slots"]),
            label(p),
            f"{1e3 * floor['seconds']:.2f}",
            f"**{1e3 * c['predicted_s']:.2f}**",
            f"{1e3 * c['compiler_s']:.2f}",
            f"{1e3 * once['predicted_s']:.2f}",
            f"{(c['read'] + c['written']) / 1e9:.2f} of {floor['bytes'] / 1e9:.2f}",
            f"{c['operations'] / 1e9:,.0f} of {floor['operations'] / 1e9:,.0f}",
            f"{c['runs']:,.0f}",
            f"{c['collectives'] / p['layers']:.1f}",
            f"{1e3 * c['collective_s']:.2f}",
            f"{1e3 * c['hidden_s']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def speeds_table(found: list[dict]) -> str:
    """Markdown: tokens a second of plain decoding and of DFlash, a line a system, slice and number of slots."""
    titles = "system|slice|slots|block|acceptance|plain: floor|predicted|compiler's|DFlash: floor|predicted|compiler's"
    lines = [f"| {' | '.join(titles.split('|'))} |", "|---" * len(titles.split("|")) + "|"]

    def speeds(p: dict | None, tokens: float) -> list[str]:
        if p is None:
            return ["", "", ""]
        seconds = p["floor"]["seconds"], p["counted"]["predicted_s"], p["counted"]["compiler_s"]
        return [f"{p['slots'] * tokens / s:,.0f}" for s in seconds]

    plain = {(p["system"], p["slice"], p["slots"]): p for p in found if p["name"] == "plain"}
    for p in found:
        if p["name"] != "round":
            continue
        acceptance = ACCEPTANCE.get((p["system"].removesuffix("-fp8"), p["tokens"]))
        if acceptance is None:
            continue
        without = plain.get((p["system"], p["slice"], p["slots"]))
        cells = [system_of(p, without), p["slice"], str(p["slots"]), str(p["tokens"]), f"{acceptance:.2f}"]
        cells += speeds(without, 1.0) + speeds(p, acceptance)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def missing(rows: dict[str, dict]) -> str:
    """Markdown: what has no figures, a line for each system and slice, with the reason where there is one."""
    lines: dict[str, list[str]] = {f"{system} on {device}": [] for group in GROUPS for system, device in group}
    for command in commands():
        said = failure(rows.get(command, {"failed": ""}))
        name, _, device, _, _, kind = command.split(" ", 5)
        kind = kind.rpartition(" --layers")[0]
        text = KINDS[kind] + (f" ({said})" if said else "")
        if said is not None and text not in lines[f"{name} on {device}"]:
            lines[f"{name} on {device}"].append(text)
    return "\n".join(f"- {place}: {', '.join(kinds)}" for place, kinds in lines.items() if kinds) + "\n"


def failure(row: dict) -> str | None:
    """Why a row has no figures; None where it has."""
    if "failed" in row:
        return row["failed"]
    said = [f["failed"] for f in row.get("programs", {}).values() if "failed" in f]
    return said[0] if said else None


def chips_table() -> str:
    """Markdown: what the arithmetic takes of each TPU."""
    lines = [
        "| device | memory GiB | HBM TB/s | bfloat16 TFLOP/s | FP8 | int8 | link GB/s | clock GHz |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, d in DEVICES.items():
        if d.platform == "tpu":
            cells = d.memory / 2**30, d.bandwidth / 1e12, *(n / 1e12 for n in (d.operations, d.fp8, d.int8))
            figures = [f"{n:,.4g}" if n else "as bfloat16" for n in (*cells, d.link / 1e9, d.clock / 1e9)]
            lines.append(f"| {name}{', half a chip' if name == 'tpu7x' else ''} | {' | '.join(figures)} |")
    return "\n".join(lines) + "\n"


def megakernels(found: list[dict]) -> str:
    """What would have to be true to be faster than the megakernels."""
    p = next(
        (p for p in found if (p["system"], p["slice"], p["slots"]) == THEIR_ROW and p["name"] == "round"),
        None,
    )
    if p is None:
        return "Not compiled yet.\n"
    c, floor = p["counted"], p["floor"]["seconds"]
    round_s = THEIR_ACCEPTANCE / MEGAKERNELS
    left = round_s - floor - c["collective_s"]
    published = ACCEPTANCE[p["system"], p["tokens"]]
    rows = [
        ("their round: acceptance 6 at 1,515 tokens/s", round_s),
        ("our floor: weights, caches and states once, at all of the bandwidth", floor),
        (f"{c['collectives']:,.0f} collectives of our round, at 1 µs a hop", c["collective_s"]),
        ("left for everything else", left),
        ("our round, predicted: every operation by bytes and products", c["predicted_s"]),
        ("our round by the compiler's estimate", c["compiler_s"]),
        ("what XLA copies once a dispatch", c["once"]["predicted_s"]),
    ]
    table = "".join(f"| {name} | {1e3 * seconds:.2f} |\n" for name, seconds in rows)
    runs, each = c["runs"], (c["compiler_s"] - c["collective_s"]) / c["runs"]
    allowed, once = left / runs, c["once"]["predicted_s"]
    said = [
        f"**Bytes.** A device reads {p['floor']['bytes'] / 1e9:.2f} GB a round: {1e3 * floor:.2f} ms at all of the "
        f"bandwidth, {1e3 * floor / 0.8:.2f} ms at 80 % of it. bfloat16 leaves room.",
        f"**Collectives.** {c['collectives'] / p['layers']:.1f} a layer take {1e3 * c['collective_s']:.2f} ms, nearly "
        "all of it latency: a sum goes along three axes and back, six hops. An exchange in one phase, three hops, "
        "saves half of it.",
        f"**Operations.** XLA's program runs {runs:,.0f} a round, so that {1e6 * allowed:.2f} µs are left for each. "
        f"The compiler estimates {1e6 * each:.2f} µs on average: a round needs {each / allowed:.0f} times fewer, as "
        "kernels that do more, such as one a sublayer.",
        f"**Copies.** What XLA copies once a dispatch, mostly weights of queries, takes {1e3 * once:.2f} ms: "
        f"{once / c['predicted_s']:.1f} rounds. Other weights are read as they are placed.",
        f"**Acceptance.** With the program as it is, a round must yield {MEGAKERNELS * c['predicted_s']:.1f} tokens by "
        f"the arithmetic and {MEGAKERNELS * c['compiler_s']:.1f} by the compiler's estimate. It has {p['tokens']} at "
        "most.",
    ]
    bullets = "\n".join(textwrap.fill(x, 120, initial_indent="- ", subsequent_indent="  ") for x in said)
    return f"""| {system_of(p)} on {p["slice"]}, a round of {p["tokens"]}, one request | ms |
|---|---|
{table}
To reach 1,515 tokens/s a round may take {1e3 * round_s:.2f} ms at acceptance 6, and {1e3 * published / MEGAKERNELS:.2f}
ms at the {published:.2f} that the drafter's authors publish. What would have to be true:

{bullets}
"""


def page(text: str, rows: dict[str, dict]) -> str:
    """The page with its tables written anew, each between a comment with its name and `<!-- end -->`."""
    found = programs(rows)
    tables = {
        "chips": chips_table(),
        "times": times_table(found),
        "speeds": speeds_table(found),
        "megakernels": megakernels(found),
        "missing": missing(rows),
    }
    for name, table in tables.items():
        noted = with_note(table)
        text = re.sub(
            rf"(<!-- {name} -->\n).*?(?=<!-- end -->)", lambda m, t=noted: m[1] + "\n" + t + "\n", text, flags=re.S
        )
    return text


def main() -> None:
    """Compiles what is missing and writes the figures and the page."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", default="", metavar="TEXT", help="rows that have it in their command")
    p.add_argument("--again", action="store_true", help="compile what is in the file anew")
    p.add_argument("--page", action="store_true", help="compile nothing")
    args = p.parse_args()
    rows = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    for command in () if args.page else commands():
        if args.only in command and (args.again or "programs" not in rows.get(command, {})):
            print(command, flush=True)
            rows[command] = reported("report.py", command)
            FIGURES.write_text(json.dumps({c: rows[c] for c in commands() if c in rows}, indent=1) + "\n")
    PAGE.write_text(page(PAGE.read_text(), rows))


if __name__ == "__main__":
    main()

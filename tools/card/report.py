"""The page of `scripts/card/check.py`: what was measured and compared, on which card, with which versions."""

from collections import Counter

TITLES = {
    "machine": "The machine",
    "build": "Kernels built and launched at the shapes of three systems",
    "kernels": "Kernels and other implementations against their definitions",
    "tokens": "Tokens",
    "large": "Kernels on large arrays, and under compute-sanitizer",
    "ruler": "The ruler",
}
NOTES = {
    "build": "Qwen3.6-35B-A3B in bfloat16 and FP8, Qwen3.6-27B, and Qwen3.5-397B-A17B over eight devices: what each "
    "launches, every form once. Without a card each is built for compute capability 9.0 and not launched.",
    "kernels": "Each kernel runs twice and with its rows in another order, which must give equal bits, and beside its "
    "definition in JAX in float64. Its distance from that is allowed to be three times that of the definition in the "
    "kernel's own dtype, and a few roundings. Rows past the end take part; what must not be read is NaN. Launches in "
    "one call (`--kernels all`) must also give the bits of single ones.",
    "tokens": "Random models with heads of the sizes of Qwen3.6-35B-A3B's, and a drafter that knows half of the text. "
    "Tokens are compared with those of plain decoding: in float32 without kernels, where a tie (a margin below 1e-4) "
    "counts as equal in one of eight requests; in bfloat16 with `--reproducible` and the same kernels, where no tie is "
    "allowed. Kernels all: those that no card has run, too, launched in joined calls.",
    "kernels on tpu": "What each operation takes on a TPU, then Pallas' kernels, which no TPU has run, then the other "
    "implementations in the operations' lists. Each runs twice, and with its rows in another order and beside other "
    "rows, which must give equal bits; of experts in the reproducible mode alone, of the others it is only asked. Its "
    "distance from the definition in float64 on the host's processor may be three times that of the definition in the "
    "same dtype there, and a few roundings.",
    "tokens on tpu": "Random models with heads of the sizes of Qwen3.6-35B-A3B's, and a drafter that knows half of the "
    "text. In float32 tokens are those of plain decoding without Pallas' kernels on one device, whatever the draft "
    "length, alone and together, on one device and on all of the host; a tie (a margin below 1e-4) counts as equal in "
    "one of eight requests. In bfloat16 they are those of plain decoding with `--reproducible`, the same kernels and "
    "the same devices.",
    "ruler on cpu": "`scripts/bench/decode.py` on the shapes of the bundled pair: it shows that the ruler runs.",
    "ruler": "`scripts/bench/decode.py`, with random weights; tokens are sent to as many experts of a layer as evenly "
    "used routers choose.",
}
# Of the ruler's rows.
FIGURES = {
    "round ms": "round_ms", "draft": "draft_ms", "verify": "verify_ms", "commit": "commit_ms",
    "prefill ms": "prefill_ms", "GB": "gb_a_round", "floor ms": "floor_ms", "of floor": "of_floor",
    "of data sheet": "of_data_sheet", "floor with arithmetic ms": "floor_with_arithmetic_ms",
    "of it": "of_floor_with_arithmetic", "experts": "experts_touched", "model": "model",
}  # fmt: skip
STATUSES = ("exact", "measured", "failed", "timed out", "skipped", "not run")
# Cases of a page's last table at most; report.json has all.
SHOWN = 30


def summary(stage: dict) -> str:
    """The outcome of a stage, such as "finished: 12 exact, 1 failed"."""
    counts = Counter(case["status"] for case in stage["cases"].values())
    text = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
    if stage["state"] == "not finished":
        return f"not finished, {len(stage['cases'])} of {stage['total'] or 'unknown'} cases: {text or 'none'}"
    return f"{stage['state']}{': ' * bool(text)}{text}"


def cell(value) -> str:
    """A value as a cell of a table."""
    if isinstance(value, list):
        return "; ".join(map(cell, value))
    return str(value).replace("|", "\\|").replace("\n", " ")


def figures(case: dict) -> str:
    """The figures of a case on one line."""
    return ", ".join(f"{k} {cell(v)}" for k, v in case.items() if k not in ("status", "seconds", "why"))


def table(cases: dict[str, dict]) -> list[str]:
    """A table with a line for each case."""
    lines = ["| case | result | |", "|---|---|---|"]
    return lines + [
        f"| {cell(name)} | {case['status']} | {cell(case.get('why') or figures(case))} |"
        for name, case in cases.items()
    ]


def farthest(cases: dict[str, dict]) -> list[str]:
    """The cases of each operation and dtype: their number, and the largest distance as a share of the allowed one."""
    groups: dict[str, list[dict]] = {}
    for name, case in cases.items():
        if case["status"] == "exact":
            groups.setdefault(name.split(",")[0].split(":")[0].split(" of ")[0], []).append(case)
    lines = ["| exact | cases | farthest, as a share of what is allowed |", "|---|---|---|"]
    for group, some in groups.items():
        shares = [case["of_allowed"] for case in some if "of_allowed" in case]
        lines.append(f"| {group} | {len(some)} | {max(shares) if shares else ''} |")
    return lines if groups else []


def by_turns(default, every) -> str:
    """A figure of a point with the default kernels and with all, and its ratio where they differ."""
    if default is None or every is None or default == every:
        return cell(default if every is None else every) if (default, every) != (None, None) else ""
    ratio = f" ({every / default:.2f})" if isinstance(default, float) and default else ""
    return f"{cell(default)} → {cell(every)}{ratio}"


def ruler(cases: dict[str, dict]) -> list[str]:
    """A table with a line for each point, and the kernels of each trace."""
    points: dict[str, dict[str, dict]] = {}
    for name, case in cases.items():
        if "row" in case:
            point, _, kernels = name.rpartition(", kernels ")
            points.setdefault(point, {})[kernels] = case["row"]
    shown = {c: k for c, k in FIGURES.items() if any(k in row for turns in points.values() for row in turns.values())}
    bandwidths = {str(case["about"]["bandwidth_gb_per_s"]) for case in cases.values() if "row" in case}
    lines = [f"Floors: at {' and '.join(sorted(bandwidths))} GB/s. `--kernels auto` → `--kernels all` (ratio):", ""]
    lines += [f"| point | {' | '.join(shown)} |", "|---" * (len(shown) + 1) + "|"]
    for point, turns in points.items():
        default, every = (turns.get(kernels, {}) for kernels in ("auto", "all"))
        lines.append(f"| {point} | {' | '.join(by_turns(default.get(k), every.get(k)) for k in shown.values())} |")
    lines = lines if points else []
    for name, case in cases.items():
        if "dearest" in case:
            lines += ["", f"{name} ({case['trace']}): the dearest kernels.", ""]
            lines += [f"- {cell(line)}" for line in case["dearest"]]
    return lines


def page(record: dict) -> str:
    """The page in Markdown, with measured things only."""
    stages, about = record["stages"], record["about"]
    described = stages.get("machine", {}).get("cases", {}).get("device and versions", {})
    kind = about.get("kind", "cuda")
    where = {
        "cuda": "on a card",
        "tpu": "on TPUs",
        "cpu": f"without a {'TPU' if kind == 'tpu' else 'card'}, interpreted",
    }
    lines = [f"# A check {where[about['platform']]}", ""]
    commands = ", ".join(f"{c['at']} ({c['minutes']} minutes)" for c in about["commands"])
    as_kind = " --as tpu" if (about["platform"], kind) == ("cpu", "tpu") else ""
    lines += [f"`python scripts/card/check.py --platform {about['platform']}{as_kind}`: {commands}."]
    if about["card"]:
        lines += ["", f"Card: {about['card']}."]
    if described.get("status") == "measured":
        lines += ["", f"Device: {described['device']}. Versions: {described['versions']}."]
    for command in about["commands"]:
        if refused := command.get("wheels not installed"):
            lines += ["", "Wheels that were not installed:", ""]
            lines += [f"- {name}: {cell(why)}" for name, why in refused.items()]
    lines += ["", "| stage | |", "|---|---|", *(f"| {TITLES[n]} | {cell(summary(s))} |" for n, s in stages.items())]
    for name, stage in stages.items():
        note = next(filter(None, (NOTES.get(f"{name} on {on}") for on in (about["platform"], kind))), NOTES.get(name))
        lines += ["", f"## {TITLES[name]}", "", *([note, ""] if note else [])]
        cases = stage["cases"]
        if name in ("machine", "tokens"):
            lines += table(cases)
            continue
        lines += ruler(cases) if name == "ruler" else farthest(cases)
        others = {n: c for n, c in cases.items() if c["status"] not in ("exact", "measured")}
        if others:
            lines += ["", *table(dict(list(others.items())[:SHOWN]))]
        if len(others) > SHOWN:
            lines += ["", f"{len(others) - SHOWN} more are in report.json."]
    return "\n".join(lines) + "\n"

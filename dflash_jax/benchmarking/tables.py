"""Results as Markdown and a plot, with the published figures beside ours."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

PLAIN = "autoregressive"
# Concurrencies at the ticks of the plot.
AT_ONCE = (1, 2, 4, 8, 16, 32)


def key(task: str, concurrency: int, method: str) -> str:
    """The key of a cell in a record."""
    return f"{task} | {concurrency} | {method}"


def published_rates(published: dict) -> dict[str, dict[tuple[str, int], float]]:
    """Published tokens/s.

    Returns:
        Column → (task, concurrency) → tokens/s. Columns are plain decoding, each block size, and MTP with as many
        drafts.
    """
    rates: dict[str, dict] = {}
    for row in published.get("throughput", ()):
        block = row["block_size"]
        columns = {PLAIN: "autoregressive", str(block): "dflash", f"mtp {block}": "mtp"}
        for column, name in columns.items():
            if row.get(name) is not None:
                rates.setdefault(column, {})[row["task"], row["concurrency"]] = row[name]
    return rates


def published_acceptance(published: dict) -> dict[str, dict[str, float]]:
    """Published acceptance lengths, column → task → value."""
    lengths: dict[str, dict] = {}
    for task, by_block in published.get("acceptance_length", {}).items():
        for block, value in by_block.items():
            both = value if isinstance(value, dict) else {"dflash": value}
            for name, v in both.items():
                lengths.setdefault(block if name == "dflash" else f"{name} {block}", {})[task] = v
    return lengths


def _shown(value, form: str = "{}") -> str:
    return "" if value is None else form.format(value)


def _line(cells: Sequence) -> str:
    """A line of a Markdown table."""
    return "| " + " | ".join(str(c).replace("|", "\\|") for c in cells) + " |"


def markdown(record: dict, published: dict, methods: Sequence[str]) -> str:
    """Tables of tokens/s by task and concurrency, and of acceptance lengths by task."""
    about, cells = record["about"], record["cells"]
    places = list(dict.fromkeys(tuple(k.split(" | ")[:2]) for k in cells))
    head = ["task", "at once"]
    for m in methods:
        head += [f"{m} tok/s", *([] if m == PLAIN else ["×"]), "first ms", "token ms"]
    rates, lengths = published_rates(published), published_acceptance(published)
    head += [f"published {column}" for column in rates]
    lines = [
        f"# {about['model']}",
        "",
        f"`{about['command']}`",
        "",
        ", ".join(
            f"{k} {v}" for k, v in about.items() if k not in ("model", "command", "data") and v not in (None, "")
        ),
        "",
        "Tokens/s from the first question to the last answer, prefill included; first ms: median time to a token;",
        "token ms: median time between tokens of an answer; ×: against autoregressive.",
        *([f"Published: {published['setup']['source']}, {published['setup']['hardware']}."] if published else []),
        *(
            f"Published elsewhere: {p['tokens_per_s']} tokens/s with {p['method']}, {p['concurrency']} at once, "
            f"{p['hardware']} ({p['source']})."
            for p in published.get("elsewhere", ())
        ),
        "",
        _line(head),
        "|---" * len(head) + "|",
    ]
    for task, at_once in places:
        row, base = [task, at_once], cells.get(f"{task} | {at_once} | {PLAIN}", {}).get("tokens_per_s")
        for m in methods:
            cell = cells.get(f"{task} | {at_once} | {m}", {})
            rate = cell.get("tokens_per_s")
            row.append(cell.get("failed") or _shown(rate))
            if m != PLAIN:
                row.append(_shown(rate / base if rate and base else None, "{:.2f}"))
            row += [_shown(cell.get("first_token_ms")), _shown(cell.get("inter_token_ms"))]
        row += [_shown(column.get((task, int(at_once)))) for column in rates.values()]
        lines.append(_line(row))
    drafting = [m for m in methods if m != PLAIN]
    head = ["task", *drafting, *(f"published {column}" for column in lengths)]
    lines += ["", "Acceptance length, mean over the concurrencies (95 % interval of the first):", ""]
    lines += [_line(head), "|---" * len(head) + "|"]
    for task in dict.fromkeys(task for task, _ in places):
        row = [task]
        for m in drafting:
            measured = [cells.get(f"{task} | {n} | {m}", {}) for t, n in places if t == task]
            means = [c["acceptance_length"] for c in measured if "acceptance_length" in c]
            text = f"{sum(means) / len(means):.2f}" if means else ""
            if means and "acceptance_low" in measured[0]:
                text += f" ({measured[0]['acceptance_low']:.2f} to {measured[0]['acceptance_high']:.2f})"
            row.append(text)
        lines.append(_line(row + [_shown(column.get(task)) for column in lengths.values()]))
    lines += by_place(cells)
    failed = [f"- {k}: {c['errors']} failed: {c['first_error']}" for k, c in cells.items() if c.get("errors")]
    return "\n".join([*lines, *(["", *failed] if failed else [])]) + "\n"


def by_place(cells: dict) -> list[str]:
    """A table of the drafts that were accepted, of all concurrencies together; no lines without drafts."""
    sums: dict[tuple[str, str, str], dict[str, Counter[int]]] = {}
    for (task, _, method), cell in ((k.split(" | "), c) for k, c in cells.items()):
        for drafter, sides in cell.get("drafters", {}).items():
            total = sums.setdefault((task, method, drafter), {side: Counter() for side in sides})
            for side, counts in sides.items():
                total[side].update(dict(enumerate(counts)))
    places = range(max((max(total["drafted"]) for total in sums.values()), default=-1) + 1)
    if not places:
        return []
    head = ["task", "method", "drafter", *map(str, places)]
    lines = ["", "Share of drafts that were accepted, by position in the draft:", "", _line(head)]
    lines.append("|---" * len(head) + "|")
    for names, total in sums.items():
        drafted, accepted = total["drafted"], total["accepted"]
        rates = (accepted[i] / drafted[i] if drafted[i] else None for i in places)
        lines.append(_line([*names, *(_shown(rate, "{:.2f}") for rate in rates)]))
    return lines


def plot(record: dict, methods: Sequence[str], path: Path) -> bool:
    """Plots tokens/s over concurrency, one panel a task.

    Returns:
        False where matplotlib is missing or there is nothing to plot.
    """
    try:
        import matplotlib  # pyright: ignore[reportMissingImports]
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]

    cells = {k: c for k, c in record["cells"].items() if "tokens_per_s" in c}
    tasks = list(dict.fromkeys(k.split(" | ")[0] for k in cells))
    if not tasks:
        return False
    figure, panels = plt.subplots(1, len(tasks), figsize=(4 * len(tasks), 3.2), squeeze=False)
    for task, panel in zip(tasks, panels[0], strict=True):
        for m in methods:
            points = sorted(
                (int(k.split(" | ")[1]), c["tokens_per_s"])
                for k, c in cells.items()
                if k.split(" | ")[0] == task and k.split(" | ")[2] == m
            )
            if points:
                panel.plot(*zip(*points, strict=True), marker="o", label=m)
        panel.set(title=task, xlabel="requests at once", ylabel="tokens/s", xscale="log", ylim=(0, None))
        panel.set_xticks(AT_ONCE, [str(n) for n in AT_ONCE])
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True

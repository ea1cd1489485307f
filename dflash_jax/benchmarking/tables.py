"""Results as people read them: Markdown and a plot, the published figures beside ours."""

from collections.abc import Sequence
from pathlib import Path

PLAIN = "autoregressive"
# Ticks of the plot.
AT_ONCE = (1, 2, 4, 8, 16, 32)


def key(task: str, concurrency: int, method: str) -> str:
    return f"{task} | {concurrency} | {method}"


def published_rate(published: dict, task: str, concurrency: int, method: str) -> float | None:
    """Tokens/s of the model card; of MTP, too."""
    for row in published.get("throughput", ()):
        if (row["task"], row["concurrency"]) == (task, concurrency):
            if method in (PLAIN, "mtp"):
                return row.get("autoregressive" if method == PLAIN else "mtp")
            if str(row["block_size"]) == method:
                return row["dflash"]
    return None


def published_acceptance(published: dict, task: str, method: str) -> float | None:
    value = published.get("acceptance_length", {}).get(task, {}).get(method)
    return value.get("dflash") if isinstance(value, dict) else value


def _shown(value, form: str = "{}") -> str:
    return "" if value is None else form.format(value)


def markdown(record: dict, published: dict, methods: Sequence[str]) -> str:
    """Tokens/s by task and concurrency, then acceptance lengths by task."""
    about, cells = record["about"], record["cells"]
    places = list(dict.fromkeys(tuple(k.split(" | ")[:2]) for k in cells))
    head = ["task", "at once"]
    for m in methods:
        head += [f"{m} tok/s", *([] if m == PLAIN else ["×"]), "first ms", "token ms"]
    if published:
        head += [f"published {m}" for m in (PLAIN, *(m for m in methods if m != PLAIN), "mtp")] + ["our mtp"]
    lines = [
        f"# {about['model']}",
        "",
        f"`{about['command']}`",
        "",
        ", ".join(f"{k} {v}" for k, v in about.items() if k not in ("model", "command") and v not in (None, "")),
        "",
        "Tokens/s from the first question to the last answer, prefill included; first ms: median time to a token;",
        "token ms: median time between tokens of an answer; ×: against autoregressive.",
        *([f"Published: {published['setup']['source']}, {published['setup']['hardware']}."] if published else []),
        "",
        "| " + " | ".join(head) + " |",
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
        if published:
            for m in (PLAIN, *(m for m in methods if m != PLAIN), "mtp"):
                row.append(_shown(published_rate(published, task, int(at_once), m)))
            row.append("not yet")
        lines.append("| " + " | ".join(row) + " |")
    drafting = [m for m in methods if m != PLAIN]
    head = ["task"]
    for m in drafting:
        head += [f"{m}", *([f"published {m}"] if published else [])]
    lines += ["", "Acceptance length, mean over the concurrencies (95 % interval of the first):", ""]
    lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for task in dict.fromkeys(task for task, _ in places):
        row = [task]
        for m in drafting:
            found = [cells.get(f"{task} | {n} | {m}", {}) for t, n in places if t == task]
            means = [c["acceptance_length"] for c in found if "acceptance_length" in c]
            text = f"{sum(means) / len(means):.2f}" if means else ""
            if means and "acceptance_low" in found[0]:
                text += f" ({found[0]['acceptance_low']:.2f} to {found[0]['acceptance_high']:.2f})"
            row += [text, *([_shown(published_acceptance(published, task, m))] if published else [])]
        lines.append("| " + " | ".join(row) + " |")
    failed = [f"- {k}: {c['errors']} failed: {c['first_error']}" for k, c in cells.items() if c.get("errors")]
    return "\n".join([*lines, *(["", *failed] if failed else [])]) + "\n"


def plot(record: dict, methods: Sequence[str], path: Path) -> bool:
    """Tokens/s over concurrency, a panel a task; False where matplotlib is not there."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

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

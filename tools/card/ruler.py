"""The ruler, `scripts/bench/decode.py`, point by point, in order of worth; for `scripts/card/check.py`.

Each point is measured in a process of its own, so that a failure costs one point. This process holds no device.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

RULER = Path(__file__).resolve().parents[2] / "scripts/bench/decode.py"
CONFIG = "qwen3.6-35b-a3b"
# (bits of weights or None for the checkpoint's, batch, tokens of a round, context).
POINTS = (
    (None, 1, 16, 2048), (None, 1, 1, 2048), ("fp8", 1, 16, 2048), ("fp8", 1, 1, 2048), (None, 1, 8, 2048),
    (None, 32, 16, 2048), (None, 32, 1, 2048), (None, 8, 16, 2048), (None, 1, 16, 16384), (None, 32, 8, 16384),
    ("fp8", 32, 16, 2048), ("fp8", 32, 1, 2048), (None, 16, 16, 2048), (None, 8, 1, 2048), ("fp8", 8, 16, 2048),
)  # fmt: skip
# Experts to which a router that uses 256 experts evenly sends 16 tokens.
EXPERTS, TOKENS = 102, 16
SHOWN = ("round_ms", "draft_ms", "verify_ms", "commit_ms", "floor_ms", "of_floor", "experts_touched", "prefill_ms")


def point(quantize: str | None, batch: int, block_size: int, context: int) -> list[str]:
    """The ruler's options for a point."""
    experts = str(EXPERTS) if batch * block_size == TOKENS else "even"
    options = ["--config", CONFIG, "--points", f"{batch},{block_size},{context}", "--experts", experts]
    return options + (["--quantize", quantize] if quantize else [])


def measured(options: list[str], point: str, out: Path) -> dict:
    """Runs the ruler, and returns the figures of ``point`` in ``out``'s record and the names of its trace."""
    command = [sys.executable, str(RULER), *options, "--out", str(out)]
    # Of JAX's usual three quarters of a card, the weights in bfloat16 are too many for one of 80 GB.
    environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95", "XLA_CLIENT_MEM_FRACTION": ""}
    done = subprocess.run(command, env=environment, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    sys.stderr.write(done.stderr)
    if done.returncode:
        errors = re.findall(r"^(?:error:|[\w.]*(?:Error|Exception):?).*", done.stderr, re.MULTILINE)
        return {"status": "failed", "why": (errors or [f"exit code {done.returncode}"])[-1][:300]}
    record = json.loads(out.with_name(out.name + ".json").read_text())
    name, row = next((name, row) for name, row in record["points"].items() if name.startswith(point))
    if "failed" in row:
        return {"status": "skipped", "why": row["failed"]}
    if "FP8" in row.get("model", "") and "--quantize" not in options:
        return {"status": "skipped", "why": f"does not fit: {row['model']}"}
    dearest = [line.strip() for line in done.stderr.splitlines() if " ms a round, " in line]
    about = {"point": name, "gb_per_s": record["about"].get("bandwidth_gb_per_s"), "model": row.get("model", "")}
    figures = {k: row[k] for k in SHOWN if k in row}
    return {"status": "measured"} | about | figures | ({"dearest": dearest} if dearest else {})


def cases(on_card: bool, out: str) -> Iterator[tuple[str, Callable[[], dict]]]:
    """(name, case) of the measurements."""
    if not on_card:
        # The bundled pair, which shows that the ruler runs.
        yield (
            "the bundled pair",
            lambda: measured(
                ["--points", "1,8,256", "--profile"], "batch 1, width 8, context 256", Path(out) / "decode-bundled"
            ),
        )
        return
    for number, (quantize, batch, block_size, context) in enumerate(POINTS):
        where = f"batch {batch}, width {block_size}, context {context}"
        arguments = (
            point(quantize, batch, block_size, context),
            where,
            Path(out) / f"decode{'-fp8' if quantize else ''}",
        )
        yield f"{quantize or 'bfloat16'}, {where}", partial(measured, *arguments)
        if number == 1:
            first = "batch {1}, width {2}, context {3}".format(*POINTS[0])
            traced = [*point(*POINTS[0]), "--profile"], first, Path(out) / "decode"
            yield f"trace of all layers, {first}", partial(measured, *traced)

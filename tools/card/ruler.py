"""The ruler, `scripts/bench/decode.py`, point by point, in order of worth; for `scripts/card/check.py`.

Each point is measured with the default kernels and with all of them, one after the other, each time in a process of
its own, so that a failure costs one measurement. This process holds no device. Traces come last.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RULER = ROOT / "scripts/bench/decode.py"
# What ``--kernels`` takes in turn.
TURNS = ("auto", "all")


@dataclass(frozen=True)
class Place:
    """Work that is measured.

    Attributes:
        kind: Its weights or its drafter, in words.
        options: The ruler's options for these.
        batch: Sequences.
        block_size: Tokens of each that a round verifies.
        context: Tokens before them.
    """

    kind: str
    options: tuple[str, ...]
    batch: int
    block_size: int
    context: int

    @property
    def where(self) -> str:
        """How the ruler's names of the point begin."""
        return f"batch {self.batch}, width {self.block_size}, context {self.context}"

    def arguments(self, kernels: str) -> list[str]:
        """The ruler's options."""
        point = f"{self.batch},{self.block_size},{self.context}"
        return ["--points", point, "--experts", "even", "--kernels", kernels, *self.options]


def bfloat16(*point: int) -> Place:
    """A point with the checkpoint's weights and its drafter."""
    return Place("bfloat16", (), *point)


def fp8(*point: int) -> Place:
    """A point with weights in FP8."""
    return Place("FP8", ("--quantize", "fp8"), *point)


def mtp(*point: int) -> Place:
    """A point whose drafter is the target's own head."""
    return Place("MTP head", ("--draft", "mtp"), *point)


# After 8,192 tokens and more a prefill is a chunk of 4,096.
ON_CARD = (
    bfloat16(1, 16, 2048), bfloat16(1, 1, 2048), fp8(1, 16, 2048), fp8(1, 1, 2048), mtp(1, 4, 2048),
    bfloat16(32, 16, 2048), bfloat16(32, 1, 2048), bfloat16(1, 16, 8192), fp8(1, 1, 8192), bfloat16(1, 16, 32768),
)  # fmt: skip
# On TPUs, on all devices of the host: where bfloat16 does not fit, as many layers as fit; rounds of 8 and 16, plain.
ON_TPU = (
    bfloat16(1, 16, 2048), bfloat16(1, 1, 2048), bfloat16(1, 8, 1024), fp8(1, 16, 2048), fp8(1, 1, 2048),
    bfloat16(32, 16, 2048), bfloat16(32, 1, 2048), bfloat16(1, 16, 4096), bfloat16(8, 8, 1024), mtp(1, 4, 2048),
)  # fmt: skip
# (part, number of the point) of traces.
TRACES = (("round", 0), ("round", 5), ("prefill", 7))
# Shapes of the bundled pair, which show that the ruler runs.
ON_CPU = (bfloat16(1, 4, 64), Place("MTP head, FP8", (*fp8(2, 3, 64).options, *mtp(2, 3, 64).options), 2, 3, 64))
TRACES_ON_CPU = (("round", ON_CPU[0]), ("prefill", ON_CPU[0]))
CONFIG = ("--config", "qwen3.6-35b-a3b")
TINY = ROOT / "dflash_jax/assets/tiny"
TINY_SYSTEM = f'[shapes]\ntarget = "{TINY}/target/config.json"\ndraft = "{TINY}/draft/config.json"\n'


def measured(place: Place, kernels: str, on_device: bool, out: Path, trace: tuple[str, str] | None = None) -> dict:
    """Runs the ruler: a point with its row, or a trace of it with the names of its kernels.

    Args:
        place: The point.
        kernels: One of `TURNS`.
        on_device: Whether it is measured at full size.
        out: The folder of the check's report, whose bandwidth and rows are taken.
        trace: The part that is traced, and the file that the trace goes to; None: the point is measured.
    """
    cases = recorded(out)
    with tempfile.TemporaryDirectory() as folder:
        record, tiny = Path(folder) / "decode.json", Path(folder) / "tiny.toml"
        tiny.write_text(TINY_SYSTEM)
        command = [sys.executable, str(RULER), *place.arguments(kernels), "--out", str(record.with_suffix(""))]
        command += CONFIG if on_device else ["--config", str(tiny), "--dtype", "float32"]
        # On TPUs all of the host; a card is one device.
        if (devices := cases("machine", "device and versions").get("devices", 1)) > 1:
            command += ["--mesh", f"tensor={devices}"]
        if bandwidth := cases("machine", "bandwidth").get("gb_per_s"):
            command += ["--bandwidth", str(bandwidth)]
        if trace is not None:
            command += ["--profile", trace[0]]
            if "row" in (known := cases("ruler", named(place, kernels))):
                record.write_text(json.dumps({"about": known["about"], "points": {known["point"]: known["row"]}}))
        # Of JAX's usual three quarters of a card, the weights in bfloat16 are too many for one of 80 GB.
        environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95", "XLA_CLIENT_MEM_FRACTION": ""}
        done = subprocess.run(command, env=environment, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
        sys.stderr.write(done.stderr)
        if done.returncode:
            errors = re.findall(r"^(?:error:|[\w.]*(?:Error|Exception):?).*", done.stderr, re.MULTILINE)
            return {"status": "failed", "why": (errors or [f"exit code {done.returncode}"])[-1][:300]}
        found = json.loads(record.read_text())
        name, row = next((name, row) for name, row in found["points"].items() if name.startswith(place.where))
        if "failed" in row:
            return {"status": "skipped", "why": row["failed"]}
        if "FP8" in row.get("model", "") and "--quantize" not in place.options:
            return {"status": "skipped", "why": f"does not fit: {row['model']}"}
        if trace is None:
            return {"status": "measured", "point": name, "about": found["about"], "row": row}
        shutil.move(record.with_name("decode-trace.json.gz"), out / trace[1])
    dearest = [line.strip() for line in done.stderr.splitlines() if f" ms a {trace[0]}, " in line]
    return {"status": "measured", "point": name, "trace": trace[1], "dearest": dearest}


def recorded(out: Path) -> Callable[[str, str], dict]:
    """(stage, case) → the case in the check's report; {} where there is none."""
    path = out / "report.json"
    stages = json.loads(path.read_text())["stages"] if path.exists() else {}
    return lambda stage, case: stages.get(stage, {}).get("cases", {}).get(case, {})


def named(place: Place, kernels: str) -> str:
    """The name of a measurement."""
    return f"{place.kind}, {place.where}, kernels {kernels}"


def cases(kind: str, on_device: bool, out: str) -> Iterator[tuple[str, Callable[[], dict]]]:
    """(name, case) of the measurements."""
    places = (ON_TPU if kind == "tpu" else ON_CARD) if on_device else ON_CPU
    for place in places:
        for kernels in TURNS:
            yield named(place, kernels), partial(measured, place, kernels, on_device, Path(out))
    traces = ((part, places[number]) for part, number in TRACES) if on_device else TRACES_ON_CPU
    for number, (part, place) in enumerate(traces, 1):
        file = f"trace-{number}-{part}.json.gz"
        run = partial(measured, place, TURNS[0], on_device, Path(out), (part, file))
        yield f"trace of a {part}, {place.kind}, {place.where}", run

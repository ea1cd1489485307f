"""Every kernel compiled for every card: what the file says holds, and fits."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia.compiler")

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "benchmarks/kernels.json").read_text())
# In a process without Triton's interpreter.
AGAIN = """
import json, sys
from tools import compile_kernels
compile_kernels.prepare()
for capability, launch in json.load(sys.stdin):
    print(json.dumps(compile_kernels.compiled(launch, capability)))
"""
TRACED = """
import json, sys
from tools import compile_kernels as script
script.prepare()
from dflash_jax.ops.card import Card
name, capability = sys.argv[1], int(sys.argv[2])
traced = script.launches(name, script.SYSTEMS[name], Card.of_capability(capability))
print(json.dumps({"digest": script.digest(traced)}))
"""
ASSEMBLED = """
import sys
import json
from tools import compile_kernels
compile_kernels.prepare()
from pathlib import Path
from triton.backends.nvidia import compiler
from dflash_jax.ops.kernels.triton import call, ptx
ptx.assemblers = lambda: [Path(compiler.__file__).parent / "bin/ptxas"]
call.PTX_VERSION = int(sys.argv[1]) or ptx.ptx_version(80)
compiler.get_ptxas = lambda arch: compiler.knobs.nvidia.ptxas
compiler.ptx_get_version = lambda release: 90
print(json.dumps(compile_kernels.compiled(json.loads(sys.argv[2]), 90)))
"""

DEPENDENT = """
import json, sys
from tools import compile_kernels
compile_kernels.prepare()
for launch in json.load(sys.stdin):
    made = compile_kernels.compile_launch(launch, int(sys.argv[1]))
    print(json.dumps({"kernel": launch["kernel"], "ptx": made.asm["ptx"]}))
"""
# What reads or writes the card's memory.
MEMORY = re.compile(r"\b(ld\.global|st\.global|atom|red\.global|cp\.async(?!\.bulk\.prefetch)|st\.async|ldu|tma)\b")
GLUON = """
import json
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from dflash_jax.ops.kernels.triton.call import compile_kernel

@gluon.jit
def double(x, y, LEN: gl.constexpr):
    i = gl.arange(0, LEN, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(y + i, 2 * gl.load(x + i))

made = compile_kernel(double, ["float32", "float32"], {"LEN": 128}, 4, 3, 90)
is_elf = made.asm["cubin"][:4] == b"\\x7fELF"
print(json.dumps({"name": made.metadata.name, "threads": 32 * made.metadata.num_warps, "is elf": is_elf}))
"""


def python(code: str, *args: str, stdin: str = "") -> list[dict]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    found = subprocess.run(
        [sys.executable, "-c", code, *args], input=stdin, capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return [json.loads(line) for line in found.stdout.splitlines() if line.startswith('{"')]


def launches():
    return [(int(c), row) for c, rows in RECORD["cards"].items() for row in rows]


def test_every_kernel_fits_every_card():
    from dflash_jax.ops.card import OLDEST_FP4, SHARED_MEMORY

    assert set(RECORD["cards"]) == {"80", "89", "90", "100", "120"}
    for capability, row in launches():
        assert "failed" not in row, (capability, row)
        assert row["shared"] <= SHARED_MEMORY[capability], (capability, row)
        assert row["tensor_memory"] <= 512, (capability, row)
    kernels = {int(card): {row["kernel"] for row in rows} for card, rows in RECORD["cards"].items()}
    assert len(kernels[80]) == 23
    of_fp4 = {"fp4._gate_up", "fp4._down"}
    assert all(names == kernels[80] | (of_fp4 if card >= OLDEST_FP4 else set()) for card, names in kernels.items())


@pytest.mark.parametrize("capability", [pytest.param(89, marks=pytest.mark.long), 100])
def test_what_takes_most_is_as_recorded(capability):
    """Of each kernel the recorded launch that takes most, compiled again. If this fails, the kernel has changed:
    scripts/compile/kernels.py --out benchmarks/kernels.json writes the file anew."""
    if RECORD["about"]["versions"].partition("triton")[2][:6] != triton_version():
        pytest.skip("another version of Triton")
    figures = ("stack", "shared", "registers", "tensor_memory")
    most = {}
    for card, row in launches():
        if card == capability and [row[n] for n in figures] > [most.get(row["kernel"], {}).get(n, -1) for n in figures]:
            most[row["kernel"]] = row
    found = python(AGAIN, stdin=json.dumps([(capability, row) for row in most.values()]))
    for row, again in zip(most.values(), found, strict=True):
        assert again == {n: row[n] for n in again}, row["kernel"]


@pytest.mark.parametrize(
    ("system", "capability"), [pytest.param("qwen3.6-27b", 89, marks=pytest.mark.long), ("qwen3.6-35b-a3b-fp8", 100)]
)
def test_the_launches_are_those_recorded(system, capability):
    """What the models launch today, traced. If this fails, write the file anew as above."""
    (found,) = python(TRACED, system, str(capability))
    assert found["digest"] == RECORD["about"]["launches"][str(capability)][system]


def triton_version() -> str:
    import triton

    return f" {triton.__version__}"


def test_an_old_assembler_reads_the_ptx_that_is_asked_for():
    """Triton's own assembler for older cards, of CUDA 12, in XLA's place: it reads the version that `ptx_version`
    chooses for it, and not the one of Triton's newest."""
    row = next(row for _, row in launches() if row["kernel"].endswith("._write"))
    (read,) = python(ASSEMBLED, "0", json.dumps(row))
    (refused,) = python(ASSEMBLED, "90", json.dumps(row))
    assert "failed" not in read
    assert "version 9.0; current version is" in refused["failed"]


def test_kernels_of_gluon_are_compiled_too(tmp_path):
    # Triton reads a kernel's source from its file.
    (tmp_path / "gluon_kernel.py").write_text(GLUON)
    (made,) = python(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import gluon_kernel")
    assert made == {"name": "double", "threads": 128, "is elf": True}


@pytest.mark.parametrize("capability", ["90", "100"])
def test_dependent_kernels_touch_no_memory_before_they_wait(capability):
    """But for prefetches of weights. Every program waits: no branch and no exit comes before."""
    rows = {row["kernel"]: row for row in RECORD["cards"][capability] if "DEPENDENT" in row["meta"]}
    assert len(rows) >= 14
    launched = [row | {"meta": row["meta"] | {"DEPENDENT": True}} for row in rows.values()]
    for made in python(DEPENDENT, capability, stdin=json.dumps(launched)):
        body = made["ptx"].partition("griddepcontrol.wait")
        assert body[1], made["kernel"]
        assert not MEMORY.search(body[0]), made["kernel"]
        assert not re.search(r"\bret;|\bbra\b", body[0]), made["kernel"]
        assert body[2].count("griddepcontrol.wait") == 0, made["kernel"]

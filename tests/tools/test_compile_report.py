"""What XLA makes of a step may get better, not worse."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.helpers import load_script
from tools.xla_text import KERNELS, copied_bytes, thunk_kinds, weights_read, written_bytes

ROOT = Path(__file__).parents[2]
compile_table, compile_train = load_script("compile/table.py"), load_script("compile/train.py")
compile_tpu = load_script("compile/tpu.py")

RECORDED = json.loads((ROOT / "benchmarks/compile.json").read_text())
TRAINING = json.loads((ROOT / "benchmarks/training.json").read_text())
SPENT = (
    "kernels_per_layer",
    "kernels_in_branches",
    "collectives_per_layer",
    "temporaries",
    "written",
)
COUNTED = ("predicted_s", "compiler_s", "read", "written", "operations", "runs", "sent")
# The models whole take minutes a row and much memory: DFLASH_COMPILE_FULL=1.
FULL = bool(os.environ.get("DFLASH_COMPILE_FULL"))
FIGURES = RECORDED["four-layers"] | (RECORDED["full"] if FULL else {})
DRAFTS = {command: row for command, row in RECORDED["drafts"].items() if FULL or row["slots"] == 1}
# Python 3.12 with jax 0.11 and the compilers, if it is not this one.
PYTHON = os.environ.get("DFLASH_COMPILE_PYTHON", sys.executable)


def test_the_page_is_that_of_the_figures():
    assert (ROOT / "benchmarks/compile.md").read_text() == compile_table.page(RECORDED)


def test_the_tables_of_tpus_are_those_of_the_figures():
    rows, text = json.loads(compile_tpu.FIGURES.read_text()), compile_tpu.PAGE.read_text()
    assert compile_tpu.page(text, rows) == text
    assert all(f"<!-- {name} -->" in text for name in ("chips", "times", "speeds", "megakernels", "missing"))


def test_figures_of_whole_models_are_linear_in_their_layers():
    """From four and eight layers: 10 + 3 a layer are 130 of 40. What one of the two lacks is left out."""
    short, long = ({"counted": {"read": 10 + 3 * n, "loops": {f"×{n}": 1}}, "name": "x"} for n in (4, 8))
    assert compile_tpu.whole(short, long, 40) == {"counted": {"read": 130, "loops": {}}}
    system, device = compile_tpu.GROUPS[0][0]
    rows = {
        command: {
            "config": system,
            "device": device,
            "slots": 1,
            "depth": 40,
            "programs": {"plain": {"counted": {"read": n}, "floor": {"bytes": 2 * n}, "tokens": 1}},
        }
        for command, n in zip(compile_tpu.commands()[:2], (4, 8), strict=True)
    }
    (found,) = compile_tpu.programs(rows)
    assert (found["counted"], found["floor"], found["layers"]) == ({"read": 40}, {"bytes": 80}, 40)
    assert not compile_tpu.programs(dict(list(rows.items())[:1]))
    rest = compile_tpu.missing(rows)
    assert rest.startswith(f"- {system} on {device}: prefill of 1,024, prefill of 4,096, 32 slots")
    rows[compile_tpu.commands()[2]] = {"failed": "no memory"}
    assert "one slot (no memory)" in compile_tpu.missing(rows)


def test_rows_of_an_older_revision_of_the_arithmetic_are_marked():
    """Those of before there were revisions have none. The rows of a program are those of two numbers of layers."""
    figures = dict.fromkeys(("predicted_s", "compiler_s", "collective_s", "hidden_s", "seconds"), 1e-3)
    figures |= dict.fromkeys(("read", "written", "operations", "runs", "collectives", "bytes"), 1000)
    program = {"counted": figures | {"once": figures}, "floor": figures}
    system, device, _ = compile_tpu.THEIR_ROW
    kind = f"{system} --device {device} --context 4096 --slots 1 --programs plain round --layers"

    def page(*revisions: dict) -> list[str]:
        row = {"config": system, "device": device, "slots": 1, "depth": 64}
        row |= {"programs": {"plain": program | {"tokens": 1}, "round": program | {"tokens": 8}}}
        rows = {f"{kind} {n}": row | revision for n, revision in zip((4, 8), revisions, strict=True)}
        names = "times", "speeds", "megakernels"
        text = compile_tpu.page("".join(f"<!-- {name} -->\n<!-- end -->\n" for name in names), rows)
        return [line for line in text.splitlines() if "†" in line]

    now, before = {"revision": compile_tpu.REVISION}, {"revision": compile_tpu.REVISION - 1}
    assert page(now, now) == []
    for revisions in ((now, {}), ({}, now), (before, before)):
        marked = page(*revisions)
        # Two programs, their speeds and what would have to be true, each with what the mark means.
        assert [line.startswith(f"| {system} †") for line in marked] == [True, True, False, True, False, True, False]


@pytest.mark.parametrize("options", [None, {"xla_tpu_scoped_vmem_limit_kib": 98304}])
@pytest.mark.parametrize(("platform", "is_dumped"), [("tpu", False), ("cuda", True)])
def test_kernels_are_looked_for_on_gpus_only(platform, is_dumped, options):
    """A TPU's compiler has options too, but writes no list of kernels."""
    import jax

    from tools import compile_report

    taken = {}

    class Lowered:
        def compile(self, compiler_options):
            taken.update(compiler_options)
            return jax.jit(lambda x: x + 1).lower(1.0).compile()

    compile_report.measure(Lowered(), 1, {}, platform, options)
    assert (taken.pop("xla_dump_to", None) is not None) == is_dumped
    assert taken == (options or {})


def test_calls_are_shown_where_they_are_fewer_than_kernels():
    """Figures from before calls were counted have none, and those of a TPU have neither."""
    shown = compile_table.kernels
    assert shown({"kernels_per_layer": 13.04, "calls_per_layer": 6.26}) == "13.0 in 6.3"
    assert shown({"kernels_per_layer": 13.04, "calls_per_layer": 13.04}) == "13.0"
    assert shown({"kernels_per_layer": 13.04}) == "13.0"
    assert shown({}) == ""


@cache
def reason_to_skip(device: str, kernels: bool) -> str:
    plugin = "libtpu" if ":" in device else "jax_cuda13_plugin, jax_triton" if kernels else "jax_cuda13_plugin"
    code = f"import sys, jax, {plugin}; sys.exit(jax.__version_info__ < (0, 11))"
    if plugin == "libtpu" and "TPU_LIBRARY_PATH" in os.environ:
        code = code.replace(", libtpu", "")
    if subprocess.run([PYTHON, "-c", code], capture_output=True).returncode:
        return f"{PYTHON} lacks {plugin} or jax 0.11: name one that has them in DFLASH_COMPILE_PYTHON"
    return ""


def reported(script: str, command: str) -> dict:
    """What a script says of a command, or a skip where its compiler is not here."""
    _, *options = command.split()
    if reason := reason_to_skip(options[1], script != "train.py" and "xla" not in options):
        pytest.skip(reason)
    # Without the suite's own flags for XLA.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0", "XLA_FLAGS": ""}
    argv = [PYTHON, f"scripts/compile/{script}", *command.split()]
    if script != "train.py":
        argv[2:3] = ["--config", argv[2], "--json"]
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def assert_no_worse(found: dict, recorded: dict, name: str) -> None:
    """What is spent within a tenth; graphs and copies not at all."""
    for figure in SPENT:
        if figure in recorded:
            assert found[figure] <= 1.1 * recorded[figure], (name, figure)
    for figure in COUNTED if "counted" in recorded else ():
        assert found["counted"][figure] <= 1.1 * recorded["counted"][figure], (name, figure)
    assert found.get("graphs", 0) <= recorded.get("graphs", 0), name
    assert sum(found["copied"].values()) <= sum(recorded["copied"].values()), name


@pytest.mark.parametrize("command", FIGURES)
def test_no_worse_than_recorded(command):
    found = reported("report.py", command)["programs"]
    for name, recorded in FIGURES[command]["programs"].items():
        assert_no_worse(found[name], recorded, name)


@pytest.mark.parametrize("command", DRAFTS)
def test_drafts_no_worse_than_recorded(command):
    found = reported("drafts.py", command)["programs"]
    for name, recorded in DRAFTS[command]["programs"].items():
        for figure, value in recorded.items():
            assert found[name][figure] <= 1.1 * value, (name, figure)


def test_dflash2_adds_at_most_three_kernels_a_layer_and_no_loop():
    rows = [row for command, row in RECORDED["drafts"].items() if command.endswith("--kernels all")]
    assert sorted(row["slots"] for row in rows) == [1, 1, 32, 32]
    for row in rows:
        for how, added in row["added"].items():
            assert added["of_a_layer"] <= 3
            assert row["programs"][f"dflash2, {how}"]["loops"] == row["programs"][f"dflash, {how}"]["loops"]


@pytest.mark.parametrize("command", compile_train.FOUR_LAYERS)
def test_training_no_worse_than_recorded(command):
    assert_no_worse(reported("train.py", command)["step"], TRAINING[command]["step"], command)


def test_kernels_in_branches_are_counted_apart():
    text = """000: kCommandBuffer [source | sink]
    001: kCopy         [source        | next=002 (1) ] kCopy
    009: kWhile        [prev=001 (1)  | next=010 (1) ]
      condition:
        002: kCustomKernel [source | sink] loop_and_fusion grid: [1, 1, 1]
      body:
        003: kCustomCall   [source | next=007 (1) ] kCustomCall
        007: kConditional  [prev=003 (1)  | next=008 (1) ]
          false_branch:
            004: kCustomKernel [source | sink] draw grid: [1, 1, 1]
            006: kConditional  [prev=004 (1)  | sink]
              true_branch:
                005: kCustomCall [source | sink] kCustomCall
                0050: kWhile     [prev=005 (1) | sink]
condition:
                    0052: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1]
                  body:
                    0053: kCustomKernel [source | sink] loop_add_fusion grid: [1, 1, 1]
          true_branch:
            0051: kGemm [source | sink] kGemm
        008: kGemm [prev=007 (1)  | sink] kGemm
    010: kCustomKernel [prev=009 (1)  | sink] loop_or_fusion grid: [1, 1, 1]
"""
    always, branches = thunk_kinds(text)
    assert sum(always[kind] for kind in KERNELS) == 4
    assert sum(branches[kind] for kind in KERNELS) == 5
    assert always["Copy"] == always["CommandBuffer"] == 1


def test_a_copy_counts_where_it_is_written():
    hlo = """
%fused_reduce (p: bf16[4,2,8]) -> f32[4] {
  %transpose.1 = f32[2,4,8]{2,1,0} transpose(%p), dimensions={1,0,2}
  ROOT %reduce = f32[4]{0} reduce(%transpose.1)
}
%fused_transpose (p: bf16[4,2,8]) -> bf16[8,4,2] {
  ROOT %transpose.2 = bf16[8,4,2]{2,1,0} transpose(%p), dimensions={2,0,1}
}
%body (p: (bf16[4,2,8])) -> (bf16[4,2,8]) {
  %copy.1 = bf16[1,4,2,8]{3,2,1,0} copy(%p)
  %copy.2 = bf16[4,3,8]{2,1,0} copy(%q)
  %f = f32[4] fusion(%copy.1), kind=kInput, calls=%fused_reduce
  %t = bf16[8,4,2] fusion(%copy.1), kind=kLoop, calls=%fused_transpose
}
"""
    assert copied_bytes(hlo, {(2, 4, 8)}) == 2 * 128
    # Both copies and what the two fusions return; none of what is inside of them.
    assert written_bytes(hlo, set()) == 2 * 64 + 2 * 96 + 4 * 4 + 2 * 64
    assert written_bytes(hlo, {(2, 4, 8)}) == 2 * 96 + 4 * 4


def test_a_weight_counts_for_each_operation_that_reads_it():
    hlo = """
%branch (q: (bf16[4,2,8])) -> f32[4] {
  %w = bf16[4,2,8]{2,1,0} get-tuple-element(%q), index=0
  ROOT %f = f32[4] fusion(%w), kind=kInput, calls=%fused
}
%body (p: (bf16[4,2,8], bf16[64,2], f32[4])) -> (bf16[4,2,8], bf16[64,2], f32[4]) {
  %one = bf16[4,2,8]{2,1,0} get-tuple-element(%p), index=0
  %table = bf16[64,2]{1,0} get-tuple-element(%p), index=1
  %x = f32[4]{0} get-tuple-element(%p), index=2
  %same = bf16[8,8]{1,0} bitcast(%one)
  %rows = bf16[4,2]{1,0} fusion(%table, %x), kind=kLoop, calls=%gather
  %loop_gather_fusion = bf16[4,2]{1,0} fusion(%table, %x), kind=kLoop, calls=%gather
  %kernel.1 = f32[4] custom-call(%x, %same, %same, %one), custom_call_target="triton"
  %kernel.2 = f32[4] custom-call(%kernel.1, %one)
  %c = f32[4] conditional(%x, %one), branch_computations={%branch, %branch}
  ROOT %t = (bf16[4,2,8]) tuple(%one)
}
ENTRY %main (p: (bf16[4,2,8], bf16[64,2], f32[4])) -> f32[4] {
  %w = bf16[4,2,8]{2,1,0} parameter(0)
  %before = f32[4] fusion(%w), kind=kInput, calls=%fused
  %loop = (bf16[4,2,8], bf16[64,2], f32[4]) while(%t), condition=%more, body=%body
}
"""
    assert weights_read(hlo, {(2, 4, 8), (2, 64)}) == 2 * 128 + 256
    assert weights_read(hlo.replace(" while(", " call("), {(2, 4, 8)}) == 128

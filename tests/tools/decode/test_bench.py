"""The ruler on what a CPU can hold; seconds are not judged."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.errors import InputError
from dflash_jax.models import moe as moe_layer
from dflash_jax.ops.backend import XLA, Backend
from dflash_jax.ops.card import HOPPER
from dflash_jax.ops.kernels.cpu import calls as cpu
from dflash_jax.parallel.devices import DEVICES
from dflash_jax.parallel.sharding import ONE_DEVICE, Layout
from dflash_jax.planner import Slot, abstract_pair, read_shapes, weigh
from tests.helpers import load_script
from tools.decode import pair as decode_pair
from tools.decode.bench import Bench
from tools.decode.pair import Point

ROOT = Path(__file__).parents[3]
script = load_script("bench/decode.py")
TINY = ROOT / "dflash_jax/assets/tiny"


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    """The bundled pair as a system of shapes only: its weights are then random."""
    path = tmp_path_factory.mktemp("system") / "tiny.toml"
    shapes = {k: TINY / v / "config.json" for k, v in {"target": "target", "draft": "draft"}.items()}
    path.write_text("[shapes]\n" + "".join(f'{k} = "{v}"\n' for k, v in shapes.items()))
    return path


@pytest.fixture(scope="module")
def measured(system, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "decode"
    options = ["--config", str(system), "--dtype", "float32", "--out", str(out)]
    assert script.main([*options, "--points", "1,1,64", "2,4,64"]) == 0
    return out, options


@pytest.fixture
def counting(monkeypatch):
    """The experts of a point are counted, and nothing is timed."""

    def count(self, point):
        state = self.state(point)
        return {"experts_touched": self.experts_touched(self.calls(point, state)["choices"], state), "round_ms": 1.0}

    monkeypatch.setattr(Bench, "_measure", count)
    monkeypatch.setattr(script, "measured_bandwidth", lambda: 1e9)


@pytest.mark.usefixtures("counting")
def test_experts_that_a_kernel_in_cpp_chooses_are_counted(tmp_path):
    """Of the bundled pair, whose tokens go to two experts each."""
    if cpu.why_not():
        pytest.skip("no C++ compiler")
    assert script.main(["--points", "1,2,64", "--out", str(tmp_path / "decode")]) == 0
    (row,) = json.loads((tmp_path / "decode.json").read_text())["points"].values()
    assert 2 <= row["experts_touched"] <= 4


def test_every_part_is_timed(measured):
    out, _ = measured
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["about"]["model"] == "random weights"
    plain, wide = record["points"].values()
    assert list(record["points"]) == ["batch 1, width 1, context 64", "batch 2, width 4, context 64"]
    for row in (plain, wide):
        assert min(row[f"{part}_ms"] for part in ("round", "verify", "head", "draw", "commit", "prefill")) > 0
        assert row["peak_gb"] > 0
        assert row["of_floor"] == round(row["floor_ms"] / row["round_ms"], 3)
    assert "draft_ms" in wide
    assert "draft_ms" not in plain
    assert plain["experts_touched"] <= wide["experts_touched"]
    assert wide["gb_a_round"] > plain["gb_a_round"]
    assert "| batch 2, width 4, context 64 |" in out.with_suffix(".md").read_text()


@pytest.mark.parametrize(("block_size", "kv"), [(1, 3), (8, 3 + 5)])
def test_a_round_reads_the_drafters_keys_only_where_it_drafts(block_size, kv):
    weights = SimpleNamespace(work=lambda *args: [])
    pair = SimpleNamespace(drafter=SimpleNamespace(config=SimpleNamespace(passes=lambda block_size: (1, block_size))))
    bench = SimpleNamespace(
        layout=ONE_DEVICE, slot=Slot(0, 0, 0, 3, 5), weights=weights, drafts=weights, head=(0.0, 0.0), pair=pair
    )
    assert moved(bench, Point(2, block_size, 100), None) == 2 * 100 * kv


def moved(bench, point, touched) -> float:
    return sum(size for size, _ in Bench.work(bench, point, touched))


@pytest.fixture(scope="module")
def full_size():
    """Qwen3.6-35B-A3B, its drafter and its head as the drafter, as shapes, beside an H200."""

    def bench(quantize=None, draft="Qwen3.6-35B-A3B-DFlash"):
        shapes = read_shapes(*(str(ROOT / f"configs/hf/{name}.json") for name in ("Qwen3.6-35B-A3B", draft)))
        target, drafter = abstract_pair(shapes, ONE_DEVICE, jnp.bfloat16, quantize, Backend.for_card(HOPPER))
        return Bench(decode_pair.Pair("", target, drafter, ""), 4.48e12, DEVICES["h200"])

    return {"bfloat16": bench(), "fp8": bench("fp8"), "mtp": bench(draft="Qwen3.6-35B-A3B")}


def test_the_floor_with_arithmetic(full_size):
    """As benchmarks/NOTES.md has it for a round of 16 at batch 32; at batch 1 bytes take longer everywhere."""
    found = full_size["bfloat16"].floors(Point(32, 16, 2048), 256.0, 32.59)
    # Millions of parameters: attention, Gated DeltaNet, shared experts, drafter's layers, head; then the 480 drafts'.
    excess = sum(1e6 * n * (2 * 512 / 989e12 - 2 / 4.48e12) for n in (272.6, 1006.6, 125.8, 352.3, 508.6))
    excess += 508.6e6 * (2 * 480 / 989e12 - 2 / 4.48e12)
    # Routers, gates and the drafter's projection of taps are small.
    assert 0.02 < found["floor_with_arithmetic_ms"] - found["floor_ms"] - 1e3 * excess < 0.04
    assert round(found["floor_ms"] + 1e3 * excess, 1) == 18.8
    assert found["of_floor_with_arithmetic"] == round(found["floor_with_arithmetic_ms"] / 32.59, 3)
    assert found["of_data_sheet"] == pytest.approx(found["of_floor"] * 4.48 / 4.8, abs=1e-3)
    for name, point, touched in (
        ("bfloat16", Point(1, 1, 2048), 8.0), ("bfloat16", Point(1, 16, 2048), 102.0), ("mtp", Point(1, 4, 2048), 31.0),
        ("fp8", Point(1, 1, 2048), 8.0), ("fp8", Point(1, 16, 2048), 102.0),
    ):  # fmt: skip
        found = full_size[name].floors(point, touched, 1.0)
        assert found["floor_with_arithmetic_ms"] == found["floor_ms"]


def test_bytes_are_those_of_the_record(full_size):
    """Of all rows of the records with the drafter. (The head's counts its keys and values once, not in each pass.)"""
    for suffix, name in (("triton", "bfloat16"), ("fp8", "fp8")):
        record = json.loads((ROOT / f"benchmarks/decode-h200-qwen3.6-35b-a3b-{suffix}.json").read_text())
        for where, row in record["points"].items():
            point = Point(*(int(part.split()[1]) for part in where.split(", ")[:3]))
            found = full_size[name].floors(point, row["experts_touched"], row["round_ms"])
            assert found["gb_a_round"] == pytest.approx(row["gb_a_round"], abs=2e-4)


def test_a_device_that_is_not_known_has_a_measured_floor_only(full_size):
    bench = full_size["bfloat16"]
    found = Bench.floors(SimpleNamespace(work=bench.work, bandwidth=4e12, device=None), Point(1, 1, 2048), 8.0, 3.0)
    assert set(found) == {"gb_a_round", "floor_ms", "of_floor"}


def test_the_head_as_the_drafter(system, tmp_path):
    """Each of its passes reads its own weights and the head's rows, or the shortlist's."""
    options = ["--config", str(system), "--dtype", "float32", "--draft", "mtp", "--out", str(tmp_path / "head")]
    short = [*options, "--draft-tokens", "64"]
    assert script.main([*short, "--points", "1,3,64"]) == 0
    record = json.loads((tmp_path / "head.json").read_text())
    assert record["about"]["draft"] == "mtp, 64 tokens"
    assert all(row["draft_ms"] > 0 for row in record["points"].values())
    read = []
    for given in (options, short):
        pair = decode_pair.open_pair(script.make_parser().parse_args(given), [Point(1, 3, 64)])
        read.append(moved(Bench(pair, 1e9), Point(1, 3, 64), 0.0))
    config = pair.target.config
    # Two passes, each with the whole head, or with 64 of its rows and their ids.
    assert read[0] - read[1] == 2 * (4 * (config.vocab_size - 64) * config.hidden_size - 4 * 64)


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (["--draft", "mtp"], "--draft mtp: it needs --config"),
        (["--draft-tokens", "5"], "it needs --config"),
        (["--config", "SYSTEM", "--draft-tokens", "0"], "must be 1 to 512"),
        (["--config", "SYSTEM", "--draft-tokens", "513"], "must be 1 to 512"),
    ],
)
def test_a_shortlist_that_cannot_be(system, capsys, options, wrong):
    assert script.main([str(system) if each == "SYSTEM" else each for each in options]) == 2
    assert wrong in capsys.readouterr().err


def test_what_is_there_is_not_measured_again(measured, capsys):
    out, options = measured
    before = out.with_suffix(".json").read_text()
    assert script.main([*options, "--points", "1,1,64", "--json"]) == 0
    said = capsys.readouterr()
    assert "…" not in said.err
    assert json.loads(said.out)["points"] == json.loads(before)["points"]


def test_results_of_another_model_are_not_mixed(measured, capsys):
    _, options = measured
    assert script.main([*options, "--points", "1,1,64", "--layers", "2"]) == 2
    assert "give another --out" in capsys.readouterr().err


def test_a_point_that_memory_cannot_hold_leaves_the_others(measured, bench, tmp_path, monkeypatch, capsys):
    _, options = measured

    def measure(self, point):
        if point.batch == 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return {"round_ms": 1.0}

    monkeypatch.setattr(Bench, "measure", measure)
    monkeypatch.setattr(script, "open_pair", lambda *args: bench.pair)
    monkeypatch.setattr(script, "measured_bandwidth", lambda: 1e9)
    assert script.main([*options[:-1], str(tmp_path / "x"), "--points", "2,4,64", "1,1,64"]) == 0
    rows = json.loads((tmp_path / "x.json").read_text())["points"]
    assert [sorted(row) for row in rows.values()] == [["failed"], ["round_ms"]]
    assert "RESOURCE_EXHAUSTED" in capsys.readouterr().out


def test_weights_that_memory_cannot_hold_are_rows_too(measured, tmp_path, monkeypatch, capsys):
    def full(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(script, "open_pair", full)
    monkeypatch.setattr(script, "measured_bandwidth", lambda: 1e9)
    assert script.main([*measured[1][:-1], str(tmp_path / "x"), "--points", "2,4,64", "1,1,64"]) == 0
    rows = json.loads((tmp_path / "x.json").read_text())["points"]
    assert [list(row) for row in rows.values()] == [["failed"], ["failed"]]


@pytest.fixture(scope="module")
def bench(system):
    args = script.make_parser().parse_args(["--config", str(system), "--dtype", "float32"])
    return Bench(decode_pair.open_pair(args, [Point(2, 4, 64)]), 1e9)


def test_choices_are_counted_as_routed(bench):
    """The experts that the ruler counts are those that the layers use, and benchmark prompts differ in them: equal rows
    would all be sent to the same experts."""
    point = Point(2, 4, 64)
    chosen = np.asarray(bench.calls(point, state := bench.state(point))["choices"](state)[0])
    layers = bench.pair.target.config.layers
    assert chosen.shape == (len(layers), 8, layers[0].ffn.experts_per_token)
    assert all(len(set(token)) == chosen.shape[-1] for layer in chosen for token in layer)
    assert (chosen[:, 0] != chosen[:, 4]).any()


@pytest.mark.parametrize(
    ("memory", "kind", "layers", "note"),
    [(180e9, None, 40, ""), (84e9, "fp8", 40, "held in FP8"), (30e9, "fp8", 12, "12 of 40 layers, in FP8")],
)
def test_what_does_not_fit_is_cut(memory, kind, layers, note):
    names = ("Qwen3.6-35B-A3B.json", "Qwen3.6-35B-A3B-DFlash.json")
    shapes = read_shapes(*(str(ROOT / "configs/hf" / name) for name in names))
    points = decode_pair.grid("default", is_small=False)
    found = decode_pair.fitting(shapes, Layout.parse(""), points, memory, None)
    assert (found[1], len(found[0].target.layers)) == (kind, layers)
    assert found[2].startswith(note)


def test_each_point_has_what_fits_it(system, monkeypatch):
    """A large point does not cut a small one, and FP8 is a point of its own."""
    args = script.make_parser().parse_args(["--config", str(ROOT / "configs/qwen3.6-35b-a3b.toml")])
    monkeypatch.setattr(decode_pair.jax, "devices", lambda: [FakeCard()])
    small, large = Point(1, 16, 2048), Point(32, 16, 131072)
    points = [small, large, Point(1, 1, 2048)]
    points += decode_pair.in_fp8(args, points)
    found = decode_pair.groups(args, points)
    assert found[0] == [points[0], points[2]]
    fits = {str(g[0]): decode_pair._fitting(args, g) for g in found}
    assert [(kind, len(shapes.target.layers) == 40) for shapes, kind, _ in fits.values()] == [
        (None, True),
        ("fp8", False),
        ("fp8", True),
        ("fp8", False),
    ]
    # What was asked for needs no excuse.
    assert fits[f"{small}, fp8"][2] == ""
    assert str(points[3]) == "batch 1, width 16, context 2048, fp8"


class FakeCard:
    device_kind, platform = "NVIDIA H200", "gpu"

    def memory_stats(self):
        return {"bytes_limit": 130e9}


@pytest.mark.parametrize("text", ["1,4", "0,4,64", "a,b,c", "1,4,16", "1,4,64,2"])
def test_a_point_that_is_none_is_told(text, capsys):
    assert script.main(["--points", text]) == 2
    assert f"point '{text}'" in capsys.readouterr().err


def test_a_model_of_full_size_is_refused_on_a_cpu(capsys):
    assert script.main(["--config", str(ROOT / "configs/qwen3.6-35b-a3b.toml")]) == 2
    assert "billion parameters on a CPU" in capsys.readouterr().err


def test_fewer_layers_make_no_tokens(measured):
    record = json.loads(measured[0].with_suffix(".json").read_text())
    record["about"]["config"] = "qwen3.6-35b-a3b"
    row = record["points"]["batch 2, width 4, context 64"]
    cut = row | {"model": "2 of 4 layers"}
    record["points"] = {"batch 1, width 16, context 64": row, "batch 1, width 8, context 64": cut}
    text = script.table(record)
    assert "| batch 1, width 16, context 64 | Math500 |" in text
    assert "| batch 1, width 8, context 64 | Math500 |" not in text


def test_it_runs_with_what_a_jax_image_holds():
    """Uninstalled, with the checkout in PYTHONPATH, without the packages that only the library and the server need."""
    missing = ["tqdm", "safetensors", "jinja2", "tokenizers", "transformers", "huggingface_hub", "platformdirs"]
    code = f"""
import runpy, sys
sys.modules |= dict.fromkeys({missing})
sys.meta_path = [f for f in sys.meta_path if "editable" not in repr(f)]
sys.argv = ["decode.py", "--config", "qwen3.6-35b-a3b"]
runpy.run_path({str(ROOT / "scripts/bench/decode.py")!r}, run_name="__main__")
"""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", env=environment)
    assert "billion parameters on a CPU" in done.stderr, done.stderr


def test_not_even_one_period():
    shapes = read_shapes(str(TINY / "target/config.json"), str(TINY / "draft/config.json"))
    with pytest.raises(InputError, match="not even 4 layers fit"):
        decode_pair.fitting(shapes, Layout.parse(""), [Point(1, 4, 64)], 1e3, None)


def event(pid, tid, name, dur, **args):
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "dur": dur, "args": args}


def name_of(kind, pid, tid, name):
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}


def test_kernels_of_a_trace():
    """A GPU's are what its streams show, named or not; a CPU's are XLA's own, without what only holds others."""
    host = [event(9, 1, "while.3", 90.0, hlo_op="while.3"), event(9, 1, "dot.1", 5.0, hlo_op="dot.1")]
    host += [event(9, 1, "PjitFunction", 70.0), name_of("process_name", 9, 0, "/host:CPU")]
    assert script.kernel_events(host) == [("dot.1", 5.0)]
    card = [name_of("process_name", 1, 0, "/device:GPU:0"), name_of("thread_name", 1, 4, "Stream #14(Compute)")]
    card += [name_of("thread_name", 1, 5, "XLA Ops"), event(1, 5, "fusion.1", 8.0, hlo_op="fusion.1")]
    card += [event(1, 4, "fusion_1", 3.0), event(1, 4, "memcpy32_post", 1.0)]
    assert script.kernel_events(card + host) == [("fusion_1", 3.0), ("memcpy32_post", 1.0)]


def test_of_experts_in_few_bits_only_those_that_are_touched_are_read():
    shapes = read_shapes(str(ROOT / "configs/hf/Qwen3.6-35B-A3B-FP8.json"), None)
    held = weigh(abstract_pair(shapes, ONE_DEVICE, jnp.bfloat16, None, XLA)[0], ONE_DEVICE)
    # A byte for each of 3 x 512 inputs of an expert's 2,048 outputs in each of 40 layers, two for each 128 of them.
    assert held.expert == 40 * 3 * 512 * 2048 * (1 + 2 / 128)
    untouched = (256 - 70) * held.expert
    assert held.read(16, 70.0) == pytest.approx(held.total - held.lookup - untouched)
    assert held.read(16, 70.0) < 0.4 * held.total


@pytest.fixture
def unmeasured(monkeypatch, bench):
    """Points take no time, and the bandwidth is measured as the next of 7, 8, … GB/s."""
    bandwidths = (1e9 * n for n in range(7, 99))
    monkeypatch.setattr(script, "measured_bandwidth", lambda: next(bandwidths))
    monkeypatch.setattr(script, "open_pair", lambda *args: bench.pair)
    monkeypatch.setattr(Bench, "measure", lambda self, point: {"round_ms": 1.0, "floor_ms": 1e9 / self.bandwidth})


@pytest.mark.usefixtures("unmeasured")
def test_a_record_has_one_bandwidth(measured, tmp_path, capsys):
    """The one that is given, or the first that is measured, for all of its points."""

    def run(name, *options):
        code = script.main([*measured[1][:-1], str(tmp_path / name), *options])
        if code:
            return capsys.readouterr().err
        record = json.loads((tmp_path / f"{name}.json").read_text())
        return record["about"]["bandwidth_gb_per_s"], [row["floor_ms"] for row in record["points"].values()]

    assert run("a", "--points", "1,1,64") == (7.0, [1 / 7])
    assert run("a", "--points", "1,1,64", "2,4,64") == (7.0, [1 / 7, 1 / 7])
    assert "give another --out" in run("a", "--points", "1,4,64", "--bandwidth", "5")
    assert run("b", "--points", "1,1,64", "--bandwidth", "5.25") == (5.25, [1 / 5.25])
    assert run("b", "--points", "2,4,64") == (5.25, [1 / 5.25, 1 / 5.25])
    for wrong in ("0", "-1", "inf", "nan"):
        assert "it must be GB/s, more than 0" in run("c", f"--bandwidth={wrong}")


def test_a_trace_is_of_its_part_alone(bench, tmp_path, monkeypatch):
    calls, ran = bench.calls, []

    def watched(*args):
        def watch(name, call):
            return lambda state: ran.append(name) or call(state)

        return {name: watch(name, call) for name, call in calls(*args).items()}

    monkeypatch.setattr(bench, "calls", watched)
    for part in script.PARTS:
        dearest = script.profile(bench, Point(2, 4, 64), part, tmp_path / f"{part}.json.gz")
        assert dearest[0][1] > 0
        assert (tmp_path / f"{part}.json.gz").exists()
    assert [*dict.fromkeys(ran)] == list(script.PARTS)
    assert len(ran) == 2 * len(script.PARTS)


@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize("experts", ["even", "7"])
def test_forced_experts_are_counted_as_asked(measured, bench, tmp_path, monkeypatch, experts):
    """The record counts as many as were asked for, and routing is as before afterwards."""
    monkeypatch.setattr(script, "open_pair", lambda *args: bench.pair)
    before, out = moe_layer.mixture, tmp_path / "forced"
    options = [*measured[1][:-1], str(out), "--points", "2,4,64"]
    assert script.main([*options, "--experts", experts]) == 0
    ((name, row),) = json.loads(out.with_suffix(".json").read_text())["points"].items()
    assert name.endswith(f"{row['experts_touched']:.0f} experts")
    assert experts == "even" or row["experts_touched"] == 7
    assert moe_layer.mixture is before


def test_more_experts_than_choices_are_refused():
    args = script.make_parser().parse_args(["--points", "1,1,64", "--experts", "100"])
    with pytest.raises(InputError, match="for 1 tokens it must be 'even' or"):
        script.count_of_experts(args, Point(1, 1, 64))

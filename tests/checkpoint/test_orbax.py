"""Hugging Face → Orbax → Hugging Face: exact, resumable, and never half whole."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_jax.checkpoint import orbax
from dflash_jax.checkpoint.export import to_hf
from dflash_jax.checkpoint.files import TensorFiles
from dflash_jax.checkpoint.load import load_drafter, load_target, open_any
from dflash_jax.errors import InputError
from dflash_jax.frontend.llm import LLM
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.parallel.sharding import ONE_DEVICE
from dflash_jax.sampling_params import SamplingParams
from tests.helpers import said_by_two

ROOT = Path(__file__).parents[2]
BLOCK = 16


def convert(source: Path, target: Path, progress=lambda todo: todo, dtype=None, quantize=None, layout=ONE_DEVICE):
    opened, module = open_any(source, layout)
    options = {"dtype": dtype, "quantize": quantize}
    orbax.convert(opened, module, source, target, layout, options, progress)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The bundled target with some matrices in FP8, mixed dtypes, and tensors of a vision tower and an MTP head."""
    path = tmp_path_factory.mktemp("source") / "target"
    shutil.copytree(TINY / "target", path)
    files, rng = TensorFiles(path), np.random.default_rng(0)
    tensors = {name: files.read(name) for name in files}
    for name in list(tensors):
        if (name.startswith("model.layers.3.") and "_proj.weight" in name) or name.endswith("in_proj_qkv.weight"):
            tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
        if name.endswith("in_proj_z.weight"):
            tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
        if tensors[name].dtype == ml_dtypes.float8_e4m3fn:
            grid = [-(-n // BLOCK) for n in tensors[name].shape]
            tensors[f"{name}_scale_inv"] = rng.uniform(0.5, 2, grid).astype(ml_dtypes.bfloat16)
        if name.endswith("A_log"):
            tensors[name] = tensors[name].astype(np.float32)
    tensors["model.visual.pos_embed.weight"] = rng.standard_normal((5, 3)).astype(np.float16)
    tensors["mtp.fc.weight"] = rng.standard_normal((4, 8)).astype(np.float32)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((path / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (path / "config.json").write_text(json.dumps(raw))
    return path


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    path = tmp_path_factory.mktemp("converted") / "orbax"
    convert(source, path)
    return path


def assert_same_module(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))


@pytest.mark.parametrize("quantize", [None, "none", "int8"])
def test_reads_as_the_source_does(source, converted, quantize):
    assert_same_module(load_target(converted, quantize=quantize), load_target(source, quantize=quantize))


def test_the_way_back_is_bit_exact(source, converted, tmp_path):
    count = to_hf(converted, tmp_path / "hf", 300_000, lambda tensors, _: tensors)
    before, after = TensorFiles(source), TensorFiles(tmp_path / "hf")
    assert count == len(before) == len(after)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 3
    for name in before:
        assert before.dtype(name) == after.dtype(name), name
        np.testing.assert_array_equal(before.read(name).view(np.uint8), after.read(name).view(np.uint8), err_msg=name)
    for name in ("config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "hf" / name).read_bytes() == (source / name).read_bytes()


def test_tensors_that_devices_read_by_turns_are_read_once(converted, monkeypatch):
    seen, files = [], orbax.ExtraTensors(converted)
    first = files._tensors
    # Three names of one tensor: a parameter of as many tensors.
    files._tensors = dict.fromkeys("abc", first["mtp.fc.weight"])
    files._paths = dict.fromkeys("abc", files._paths["mtp.fc.weight"])
    read = orbax.read_arrays
    monkeypatch.setattr(orbax, "read_arrays", lambda path, *args: seen.append(path) or read(path, *args))
    for part in range(4):
        for name in "abc":
            files.section(name, (4, 8), slice(part, part + 1), slice(0, 8))
    assert len(seen) == 3
    files.release()
    files.read("a")
    assert len(seen) == 4


READS_ONE_MORE = """if 1:
    import sys
    from pathlib import Path
    from dflash_jax.checkpoint import orbax
    from dflash_jax.parallel import distributed
    distributed.start()
    path, count = Path(sys.argv[1]), 1 + distributed.is_first()
    for _ in range(count):
        orbax.ExtraTensors(path).read("mtp.fc.weight")
    print("read", count, flush=True)
"""


def test_processes_may_read_different_numbers_of_tensors(converted):
    first, other = said_by_two(READS_ONE_MORE, str(converted))
    assert "read 2" in first
    assert "read 1" in other


def test_drafter_through_orbax_is_the_same(tmp_path):
    convert(TINY / "draft", tmp_path / "orbax")
    target = load_target(TINY / "target").config
    assert_same_module(load_drafter(tmp_path / "orbax", target=target), load_drafter(TINY / "draft", target=target))


def test_llm_generates_the_same_tokens_from_orbax(converted, source):
    params = SamplingParams(max_tokens=12)
    (expected,), (found,) = (LLM(path, TINY / "draft").generate(["def f("], params) for path in (source, converted))
    assert found.token_ids == expected.token_ids


class KilledError(Exception):
    pass


def test_resumes_where_it_was(source, converted, tmp_path):
    seen = []

    def stop_after(limit):
        def progress(todo):
            for i, item in enumerate(todo):
                if i == limit:
                    raise KilledError
                seen.append(item)
                yield item

        return progress

    target = tmp_path / "orbax"
    with pytest.raises(KilledError):
        convert(source, target, stop_after(40))
    with pytest.raises(InputError, match="is half a conversion"):
        load_target(target)
    # As if killed between the last save and its record.
    last = target / "records" / "{} {}.json".format(*seen[-1])
    last.unlink()
    times = {p: p.stat().st_mtime_ns for p in (target / "records").iterdir()}
    convert(source, target)
    assert all(p.stat().st_mtime_ns == before for p, before in times.items())
    assert_same_module(load_target(target), load_target(converted))


def test_killed_at_any_moment(source, converted, tmp_path):
    target = tmp_path / "orbax"
    command = [sys.executable, str(ROOT / "convert" / "hf_to_orbax.py"), str(source), str(target)]
    for records in (3, 40):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and len(list(target.glob("records/*"))) < records:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        # Where it came to its end before the signal did, it is whole.
        if (target / orbax.MANIFEST).exists():
            assert_same_module(load_target(target), load_target(converted))
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert_same_module(load_target(target), load_target(converted))


@pytest.mark.parametrize("name", ["hf_to_orbax", "orbax_to_hf"])
def test_full_disk_is_reported_and_leaves_no_loadable_checkpoint(name, source, converted, tmp_path):
    """One line, and what is there does not look whole. A limit on file sizes stands for a full disk."""
    # -B: Python would write what it compiles of modules, cut off, too.
    command = [sys.executable, "-B", str(ROOT / f"convert/{name}.py")]
    command.append(str(source if name == "hf_to_orbax" else converted))
    limited = ["bash", "-c", 'ulimit -f 20; exec "$@"', "_", *command, str(tmp_path / "to")]
    done = subprocess.run(limited, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "File too large" in done.stderr.splitlines()[-1]
    with pytest.raises(InputError, match=r"half a conversion|no config.json"):
        load_target(tmp_path / "to")


def test_a_checkpoint_that_changed_meanwhile(source, tmp_path):
    copy, target = shutil.copytree(source, tmp_path / "source"), tmp_path / "orbax"
    with pytest.raises(KilledError):
        convert(copy, target, stop_at_once)
    os.utime(copy / "model.safetensors", (0, 0))
    with pytest.raises(InputError, match="begun with another source"):
        convert(copy, target)


def stop_at_once(todo):
    raise KilledError
    yield


@pytest.mark.parametrize(("options", "named"), [({"dtype": "float32"}, "dtype"), ({"quantize": "int8"}, "quantize")])
def test_other_options_on_resuming(options, named, source, tmp_path):
    with pytest.raises(KilledError):
        convert(source, tmp_path / "orbax", stop_at_once)
    with pytest.raises(InputError, match=f"begun with another {named}"):
        convert(source, tmp_path / "orbax", **options)


def test_a_directory_with_something_else_in_it(source, tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(InputError, match="is not empty"):
        convert(source, tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "precious"


def test_a_damaged_parameter_is_named(converted, tmp_path):
    broken = shutil.copytree(converted, tmp_path / "broken")
    shutil.rmtree(broken / "parameters" / "layers.0.mixer.qkvz")
    with pytest.raises(InputError, match=r"layers.0.mixer.qkvz"):
        load_target(broken)


def test_what_does_not_read_back_is_an_error(source, tmp_path, monkeypatch):
    real = orbax.read_arrays

    def flipped(*args):
        found = real(*args)
        return {k: np.flip(v, -1) if v.ndim > 1 else v for k, v in found.items()}

    monkeypatch.setattr(orbax, "read_arrays", flipped)
    with pytest.raises(InputError, match="does not read back"):
        convert(source, tmp_path / "orbax")


def test_quantized_orbax_equals_quantized_on_loading(source, tmp_path):
    convert(source, tmp_path / "orbax", quantize="int8")
    assert_same_module(load_target(tmp_path / "orbax"), load_target(source, quantize="int8"))
    with pytest.raises(InputError, match="no way back"):
        to_hf(tmp_path / "orbax", tmp_path / "hf", 10**9, lambda tensors, _: tensors)
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("name", "argv", "named"),
    [
        ("hf_to_orbax", ["/no/such", "/tmp/x"], "/no/such"),
        ("hf_to_orbax", ["src"], "DST"),
        ("hf_to_orbax", [str(TINY / "target"), "/proc/x"], "/proc/x"),
        ("orbax_to_hf", [str(TINY / "target"), "/tmp/x"], "is not a checkpoint of dflash convert hf-to-orbax"),
    ],
)
def test_command_line_errors_are_one_line(name, argv, named):
    done = subprocess.run([sys.executable, str(ROOT / "convert" / f"{name}.py"), *argv], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert named in done.stderr

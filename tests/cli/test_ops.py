"""`dflash ops`: the choices of operations for a system and a device."""

import json

import pytest

from dflash_jax.cli import ops
from dflash_jax.cli.ops import main
from dflash_jax.planner import read_shapes
from tools.compile_report import shorten


@pytest.fixture
def short(monkeypatch):
    """A period of the model's layers: the others are the same again."""
    monkeypatch.setattr(ops, "read_shapes", lambda *paths: shorten(read_shapes(*paths), 4))


def choices(capsys, *options: str, config: str = "qwen3.6-35b-a3b") -> dict[str, list[dict]]:
    assert main(["--config", config, "--prompt", "256", "--json", *options]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {line["program"]: line["choices"] for line in lines}


def taken(found: list[dict]) -> dict[str, set[str]]:
    return {op: {c["taken"] for c in found if c["op"] == op} for op in {c["op"] for c in found}}


def test_a_card_takes_its_kernels(capsys):
    pytest.importorskip("triton")
    found = choices(capsys, "--device", "b200")
    assert list(found) == ["prefill", "plain step", "round", "vision tower"]
    assert taken(found["vision tower"]) == {"frame_attention": {"triton"}, "linear": {"reference"}}
    assert taken(found["plain step"])["gated_delta"] == {"triton, one chunk"}
    assert taken(found["round"])["attention"] == {"triton"}
    assert taken(found["prefill"])["linear"] == {"reference"}
    delta = next(c for c in found["round"] if c["op"] == "gated_delta")
    assert dict(delta["passed_over"])["triton, parts of heads"] == "no card has run it: kernels 'all' takes it"
    reasons = dict(next(c for c in found["prefill"] if c["op"] == "linear")["passed_over"])
    assert reasons["triton"] == "256 rows: the kernel takes 16 at most"


@pytest.mark.usefixtures("short")
def test_a_kernel_that_no_card_has_run_is_taken_where_all_are_wanted(capsys):
    pytest.importorskip("triton")
    for wanted, implementation in (("auto", "reference"), ("all", "triton")):
        found = choices(capsys, "--device", "b200", "--kernels", wanted, config="qwen3.8-27b")["round"]
        (convolution,) = (c for c in found if c["op"] == "block_convolution")
        assert convolution["taken"] == implementation
        if wanted == "auto":
            assert convolution["passed_over"] == [["triton", "no card has run it: kernels 'all' takes it"]]


@pytest.mark.usefixtures("short")
def test_without_kernels_each_operation_says_why(capsys):
    found = choices(capsys, "--device", "b200", "--kernels", "xla")
    assert taken(found["plain step"])["mixture"] == {"gathered"}
    assert dict(found["round"][0]["passed_over"])["triton"] == "kernels are 'xla'"


@pytest.mark.usefixtures("short")
def test_weights_in_few_bits_have_kernels_on_a_card_without_float8(capsys):
    pytest.importorskip("triton")
    for form in ("fp8", "nvfp4", "int4"):
        found = choices(capsys, "--device", "a100", "--quantize", form)
        assert taken(found["plain step"])["mixture"] == {"triton"}, form


@pytest.mark.usefixtures("short")
def test_a_tpu_has_no_kernels(capsys):
    found = choices(capsys, "--device", "v6e")
    assert taken(found["plain step"])["mixture"] == taken(found["prefill"])["mixture"] == {"ragged"}
    found = choices(capsys, "--device", "v6e", "--quantize", "fp8")
    assert taken(found["plain step"])["mixture"] == {"blocks"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--config", "qwen3.6-35b-a3b", "--batch", "0"], "--batch 0: it must be 1 to 65536"),
        (["--config", "no-such"], "no-such"),
        ([], "--config"),
    ],
)
def test_wrong_options_are_refused(capsys, options, said):
    assert main(options) == 2
    assert said in capsys.readouterr().err

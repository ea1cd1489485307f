"""Runs `cases.py` in a process of its own: the number of CPU devices is fixed when JAX starts."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from dflash_jax import LLM, InputError, SamplingParams
from dflash_jax.frontend.compare import divergence
from dflash_jax.models.layers import output
from dflash_jax.ops.backend import XLA
from dflash_jax.parallel.sharding import AxisSharding, Layout
from tests.helpers import flags_of_devices, run_on_eight_devices

HERE = Path(__file__).parent


@pytest.mark.parametrize("chosen", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_eight_devices_give_the_tokens_of_one(chosen):
    run_on_eight_devices(HERE / "cases.py", chosen)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_two_processes_speak_as_one(tmp_path):
    """Two CPU devices each, collectives over TCP; rows and heads are cut across the processes. Drafts are of a list."""
    (tmp_path / "ids.json").write_text(json.dumps(list(range(0, 512, 2))))
    options = ["--prompt", "def f(", "--prompt", "import os", "--max-new-tokens", "12", "--json", "--logprobs", "1"]
    options += ["--temperature", "0.7", "--seed", "5", "--draft-tokens", str(tmp_path / "ids.json")]
    command = [sys.executable, "-m", "dflash_jax.generate", *options, "--mesh", "data=2,tensor=2", "--distributed"]
    environment = {
        **os.environ,
        "XLA_FLAGS": flags_of_devices(2),
        "JAX_PLATFORMS": "cpu",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_NUM_PROCESSES": "2",
    }
    processes = [
        subprocess.Popen(
            command,
            env={**environment, "JAX_PROCESS_ID": str(i)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    (out, err), (silent, _) = (p.communicate() for p in processes)
    assert [p.returncode for p in processes] == [0, 0], err[-3000:]
    assert silent == ""
    found = [json.loads(line) for line in out.splitlines()]
    llm, params = LLM(), SamplingParams(temperature=0.7, seed=5, max_tokens=12)
    for line, expected in zip(found, llm.generate(["def f(", "import os"], params), strict=True):
        parting = divergence(llm, expected.prompt_ids, expected.token_ids, line["token_ids"], params)
        assert parting is None or parting.is_tie
        assert [entry["token_id"] for entry in line["logprobs"]] == line["token_ids"]


def test_distributed_without_a_cluster():
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_COORD", "SLURM", "OMPI"))}
    command = [sys.executable, "-m", "dflash_jax.generate", "--prompt", "x", "--distributed"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --distributed: no cluster")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("tensor", "size ''"),
        ("tensor=0", "size '0'"),
        ("tensor=-2", "size '-2'"),
        ("rows=2", "mesh axis 'rows' is not known"),
        ("data=2,data=2", "gives data twice"),
    ],
)
def test_a_mesh_that_makes_no_sense(text, fault):
    with pytest.raises(InputError, match=fault):
        Layout.parse(text)


def test_dimensions_are_cut_as_far_as_they_divide():
    eight = Layout.parse("tensor=8")
    assert str(eight) == "data=1,expert=1,tensor=8"
    assert eight.wide(248_320) == AxisSharding(("tensor0", "tensor1", "tensor2"))
    assert eight.wide(12) == AxisSharding(("tensor0", "tensor1"))
    assert eight.wide(9) == AxisSharding()
    # Two KV heads: halves of four copies each; the query heads go on.
    assert (eight.wide(2), eight.heads(16, 2)) == (AxisSharding(("tensor0",)), eight.wide(8))
    # Six KV heads: a device has three of them, and the twelve query heads that read those.
    assert eight.wide(6) == eight.heads(24, 6) == AxisSharding(("tensor0",))
    assert Layout.parse("expert=4,tensor=2").wide(8) == AxisSharding(("tensor0", "expert0", "expert1"))


def test_pages_are_cut_over_what_would_have_copies():
    eight = Layout.parse("tensor=8")
    assert eight.positions(32, 2) == AxisSharding()
    for parts, axes in ((2, ("tensor1",)), (4, ("tensor1", "tensor2"))):
        layout = replace(eight, decode_context_parallel=parts)
        layout.check_positions(32, 2)
        assert layout.positions(32, 2) == AxisSharding(axes)
    # A drafter whose eight KV heads have no copies; one whose query heads are divided in four.
    assert replace(eight, decode_context_parallel=4).positions(32, 8) == AxisSharding()
    assert replace(eight, decode_context_parallel=4).positions(12, 2) == AxisSharding(("tensor1",))


@pytest.mark.parametrize(
    ("mesh", "parts", "heads", "kv_heads", "message"),
    [
        (
            "tensor=8",
            3,
            32,
            2,
            "size is 3: it must be 1, 2 or 4, since on mesh .*tensor=8 4 devices share one of the 2 KV",
        ),
        ("tensor=8", 8, 32, 2, "size is 8: it must be 1, 2 or 4"),
        ("tensor=8", 0, 32, 2, "size is 0: it must be"),
        (
            "tensor=8",
            2,
            32,
            8,
            "size is 2: it must be 1, since on mesh .*tensor=8 no two devices share one of the 8 KV",
        ),
        ("", 2, 32, 2, "size is 2: it must be 1, since"),
        # Pages have a power of two of positions; a device with several KV heads has all of their query heads.
        ("tensor=6", 3, 36, 2, "size is 3: it must be 1, since"),
        ("tensor=4", 2, 24, 6, "size is 2: it must be 1, since"),
    ],
)
def test_pages_that_cannot_be_cut_so(mesh, parts, heads, kv_heads, message):
    with pytest.raises(InputError, match=message):
        replace(Layout.parse(mesh), decode_context_parallel=parts).check_positions(heads, kv_heads)


@pytest.mark.parametrize("with_residual", [False, True])
def test_a_cut_map_is_summed_and_its_residual_added_once(with_residual):
    """Two devices, each with half of the inputs."""
    rng = np.random.default_rng(0)
    y, weight, rest = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 8), (5, 8), (3, 5)))
    residual = rest if with_residual else None
    halves = [np.stack(np.split(a, 2, axis=1)) for a in (y, weight)]
    found = jax.vmap(lambda y, w: output(XLA, y, w, 1, AxisSharding(("tensor0",)), residual), axis_name="tensor0")(
        *halves
    )
    expected = y @ weight.T + (rest if with_residual else 0)
    np.testing.assert_allclose(found, np.stack([expected, expected]), rtol=1e-5, atol=1e-5)

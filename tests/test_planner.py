"""Will it fit: figures of the published systems, against sums done by hand."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.checkpoint import orbax
from dflash_jax.checkpoint.load import load_target, open_any
from dflash_jax.checkpoint.quantize import QUANTIZE
from dflash_jax.cli.plan import main
from dflash_jax.engine.model_size import weigh
from dflash_jax.errors import InputError
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.ops.backend import XLA
from dflash_jax.ops.weights import is_weight
from dflash_jax.options.systems import System, read_system
from dflash_jax.parallel.devices import DEVICES
from dflash_jax.parallel.sharding import ONE_DEVICE, Layout
from dflash_jax.planner import abstract_pair, make_plan, read_shapes

CONFIGS = Path(__file__).parents[1] / "configs"
TOMLS = sorted(CONFIGS.glob("*.toml"))


def plan(config: str, device: str = "b200", mesh: str = "", **options) -> dict:
    shapes = read_system(CONFIGS / f"{config}.toml").shapes
    defaults = {"slots": 1, "max_len": 8192, "context": 2048, "acceptance_length": 7.35, "block": 16}
    return make_plan(
        read_shapes(str(shapes["target"]), str(shapes["draft"])),
        Layout.parse(mesh),
        DEVICES[device],
        dtype=jnp.bfloat16,
        **(defaults | options),
    )


@pytest.mark.parametrize(
    ("config", "device", "slots", "plain", "drafted"),
    [
        ("qwen3.6-35b-a3b", "h100", 1, 553, 777),
        ("qwen3.6-35b-a3b", "h200", 1, 792, 1113),
        ("qwen3.6-35b-a3b", "b200", 1, 1319, 1854),
        ("qwen3.6-35b-a3b", "b200", 8, 3249, 6644),
        ("qwen3.6-35b-a3b", "b200", 32, None, 24_498),
        ("qwen3.6-35b-a3b-fp8", "b200", 1, None, 3370),
        ("qwen3.5-27b", "b200", 1, 155, None),
    ],
)
def test_tokens_per_second_are_bandwidth_over_bytes(config, device, slots, plain, drafted):
    """Sums done by hand over the same shapes."""
    found = plan(config, device, slots=slots)
    if plain:
        assert found["floor_tokens_per_s_autoregressive"] == pytest.approx(plain, rel=0.01)
    if drafted:
        assert found["floor_tokens_per_s"] == pytest.approx(drafted, rel=0.02)


def test_weight_and_cache_bytes_equal_a_calculation_by_hand():
    found = plan("qwen3.6-35b-a3b")
    assert found["parameters"] == {"target": 34_660_610_688, "vision": 446_571_248, "drafter": 385_906_176}
    assert found["bytes_per_device"]["target"] == 2 * 34_660_610_688
    assert found["bytes_per_device"]["vision"] == 2 * 446_571_248
    # 20,480 bytes of keys and values for the target, those of the drafter's one full layer, the token and what its
    # round yielded and verified, and a page's place in each of 16 tables.
    assert found["bytes_per_device"]["cache_per_token"] == pytest.approx(20_480 + 4_096 + 12 + 16 * 4 / 256)
    # 60 MiB of recurrent state, 1.4 MiB of convolution, tables of the vocabulary, rings of the drafter.
    fixed = found["bytes_per_device"]["cache_per_slot"] - 8192 * found["bytes_per_device"]["cache_per_token"]
    assert 60 * 2**20 < fixed < 160 * 2**20
    # In FP8 a byte a number, and two scales for each of the target's ten layers of attention and two KV heads.
    half = plan("qwen3.6-35b-a3b", has_fp8_caches=True)
    assert half["bytes_per_device"]["cache_per_token"] == pytest.approx(10_240 + 2_048 + 12 + 16 * 4 / 256)
    assert half["bytes_per_device"]["target"] == 2 * 34_660_610_688 + 10 * 2 * 2 * 4
    assert half["parameters"] == found["parameters"]
    assert half["floor_tokens_per_s"] > found["floor_tokens_per_s"]
    eight = plan("qwen3.6-35b-a3b-fp8")["bytes_per_device"]["target"]
    assert eight == pytest.approx(36.6e9, rel=0.02)


@pytest.mark.parametrize("quantize", [None, *QUANTIZE])
def test_weights_take_the_bytes_that_are_planned(quantize):
    planned, _ = abstract_pair(read_shapes(str(TINY / "target"), None), ONE_DEVICE, jnp.bfloat16, quantize, XLA)
    loaded = load_target(TINY / "target", jnp.bfloat16, quantize=quantize, backend=XLA)
    allocated = sum(x.nbytes for x in jax.tree.leaves(loaded))
    assert weigh(planned, ONE_DEVICE).total == weigh(loaded, ONE_DEVICE).total == allocated
    assert weigh(planned, ONE_DEVICE).parameters == weigh(loaded, ONE_DEVICE).parameters


@pytest.mark.parametrize("quantize", ["int8", "int4", "nvfp4"])
def test_what_was_quantized_for_orbax_takes_the_bytes_that_are_planned(quantize, tmp_path):
    """Also the MTP head, whose paths are the target's and whose tensors stay as they were."""
    opened, module = open_any(TINY / "target")
    options = {"dtype": None, "quantize": quantize}
    orbax.convert(opened, module, TINY / "target", tmp_path / "o", ONE_DEVICE, options, lambda x: x)
    shapes = read_shapes(str(tmp_path / "o"), str(tmp_path / "o"))
    planned, head = abstract_pair(shapes, ONE_DEVICE, jnp.bfloat16, None, XLA)
    loaded = load_target(tmp_path / "o", jnp.bfloat16, backend=XLA)
    assert weigh(planned, ONE_DEVICE).total == sum(x.nbytes for x in jax.tree.leaves(loaded))
    assert head is not None
    assert not any(is_weight(x) for x in jax.tree.leaves(head, is_leaf=is_weight))


def test_a_window_of_the_drafter_bounds_its_keys_and_values():
    """Eight full layers of Qwen3-Coder-Next's drafter: 16,384 bytes a token. A window of 4,096 has 17 pages."""

    def slot(**options) -> dict:
        return plan("qwen3-coder-next", max_len=2**18, context=2**17, **options)

    full, windowed = slot(), slot(draft_window_size=4096)
    sizes, bounded = full["bytes_per_device"], windowed["bytes_per_device"]
    assert sizes["cache_per_token"] - bounded["cache_per_token"] == pytest.approx(16_384)
    assert sizes["cache_per_slot"] - bounded["cache_per_slot"] == pytest.approx(16_384 * (2**18 - 17 * 256), rel=1e-6)
    assert windowed["max_slots"] > full["max_slots"]
    assert windowed["floor_tokens_per_s"] > full["floor_tokens_per_s"]
    assert windowed["floor_tokens_per_s_autoregressive"] == full["floor_tokens_per_s_autoregressive"]


def test_an_mtp_head_costs_a_layer_and_the_targets_head_for_each_draft():
    target = str(read_system(CONFIGS / "qwen3.6-35b-a3b.toml").shapes["target"])
    shapes, options = read_shapes(target, target), {"slots": 1, "max_len": 8192, "context": 0, "dtype": jnp.bfloat16}

    def with_block(block: int) -> dict:
        return make_plan(shapes, Layout(), DEVICES["h200"], acceptance_length=1.0, block=block, **options)

    found = with_block(4)
    # With a copy of the target's final norm.
    assert found["parameters"]["drafter"] == 844_640_768 + 2048
    assert found["bytes_per_device"]["drafter"] == 2 * (844_640_768 + 2048)
    # Keys and values of one more layer of attention.
    assert found["bytes_per_device"]["cache_per_token"] == pytest.approx(20_480 + 2_048 + 12 + 11 * 4 / 256)
    plain = found["floor_tokens_per_s_autoregressive"]
    assert plain == pytest.approx(with_block(1)["floor_tokens_per_s"], rel=0.01)
    # A draft reads the head, 1.02 GB, and of the layer all but 248 of its 256 experts, 0.12 GB.
    seconds = {block: 1 / with_block(block)["floor_tokens_per_s"] for block in (2, 4)}
    verified = {2: 8 * (2 - 2 / 64), 4: 256 * (1 - (1 - 8 / 256) ** 4)}
    expert, steps = 40 * 3 * 512 * 2048 * 2, (248_320 * 2048 * 2 + 0.12e9) * 2
    gained = (seconds[4] - seconds[2]) * DEVICES["h200"].bandwidth
    assert gained == pytest.approx(steps + (verified[4] - verified[2]) * expert, rel=0.03)


def test_a_mesh_divides_what_it_can_and_says_what_not():
    one, eight = plan("qwen3.5-397b-a17b"), plan("qwen3.5-397b-a17b", mesh="tensor=8", slots=32)
    assert not one["fits"]
    assert eight["fits"]
    whole = one["bytes_per_device"]["target"]
    # One of the two heads of 256, in each of 15 layers, in two bytes.
    assert eight["replicated"]["layers.*.mixer.k"] == eight["replicated"]["layers.*.mixer.v"] == 15 * 256 * 4096 * 2
    vision = eight["bytes_per_device"]["vision"]
    assert whole / 8 < eight["bytes_per_device"]["target"] < whole / 8 + sum(eight["replicated"].values()) - vision
    assert any("router" in name for name in eight["replicated"])
    assert eight["replicated"]["vision"] == eight["bytes_per_device"]["vision"] == 2 * 456_010_480


@pytest.mark.parametrize(("config", "mesh", "slots"), [("qwen3.6-35b-a3b", "", 3), ("qwen3-8b", "data=2,tensor=4", 8)])
def test_the_largest_that_fits_fits_and_no_more(config, mesh, slots):
    found = plan(config, "h100", mesh, slots=slots, max_len=16_384)
    data = Layout.parse(mesh).data
    most = found["max_slots"]
    assert plan(config, "h100", mesh, slots=most, max_len=16_384)["fits"]
    assert not plan(config, "h100", mesh, slots=most + data, max_len=16_384)["fits"]
    length = found["max_len"]
    assert plan(config, "h100", mesh, slots=slots, max_len=length)["fits"]
    if length < read_shapes(str(CONFIGS / "hf" / "Qwen3-8B.json"), None).target.max_positions:
        assert not plan(config, "h100", mesh, slots=slots, max_len=length + 1024)["fits"]


def test_long_contexts_and_full_batches_fit_where_they_are_meant_to():
    assert plan("qwen3.6-35b-a3b", slots=32)["fits"]
    assert plan("qwen3.6-35b-a3b", max_len=262_144)["fits"]
    assert plan("qwen3.5-397b-a17b-fp8", "h100", "tensor=8", slots=8)["fits"]


def test_plan_command_prints_json_with_all_figures(capsys):
    toml = str(CONFIGS / "qwen3.6-35b-a3b.toml")
    assert main(["--target", toml, "--json", "--slots", "4", "--device", "b200", "--devices", "8"]) == 0
    found = json.loads(capsys.readouterr().out)
    for key in ("parameters", "bytes_per_device", "fits", "max_slots", "max_len", "floor_tokens_per_s"):
        assert key in found
    assert set(found["parameters"]) == {"target", "vision", "drafter"}
    assert {"target", "drafter", "cache_per_slot"} <= set(found["bytes_per_device"])
    assert found["devices"] == 8
    assert main(["--config", toml, "--device", "h100", "--slots", "64"]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "no target"),
        (["--target", "/no/such"], "/no/such"),
        (["--config", "/no/such.toml"], "/no/such.toml"),
        (["--config", str(CONFIGS / "qwen3-8b.toml"), "--mesh", "rows=2"], "rows"),
        (["--config", str(CONFIGS / "qwen3-8b.toml"), "--slots", "0"], "--slots 0: it must be"),
        (["--config", str(CONFIGS / "qwen3-8b.toml"), "--max-len", "9999999"], "9999999"),
        (["--config", str(CONFIGS / "qwen3.6-35b-a3b.toml"), "--mesh", "expert=3"], "expert=3"),
    ],
)
def test_plan_command_names_bad_input(argv, named, capsys):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert named in err


# The systems.


@pytest.mark.parametrize("path", TOMLS, ids=lambda p: p.stem)
def test_every_system_is_whole(path):
    system = read_system(path)
    assert {"target", "draft"} <= set(system.options)
    shapes = read_shapes(str(system.shapes["target"]), str(system.shapes["draft"]))
    assert bool(shapes.forms.parameters) == path.stem.endswith("fp8")
    if system.meshes:
        assert {"dtype", "max_len"} <= set(system.options)
        assert system.options["block_size"] == "auto"
    for machine, mesh in system.meshes.items():
        device, _, count = machine.rpartition("x")
        assert device in DEVICES
        assert Layout.parse(mesh).devices == int(count)
        found = plan(path.stem, device, mesh, max_len=8192)
        assert found["fits"] or machine == "h100x1", (machine, found["bytes_per_device"])


def test_there_is_one_for_each_published_system():
    assert len([path for path in TOMLS if read_system(path).meshes]) == 13


def test_the_mesh_follows_the_machine():
    meshes = {"b200x1": "tensor=1", "b200x8": "tensor=8", "h100x4": "tensor=4", "tpu7xx8": "tensor=8"}
    system = System({}, meshes, {})
    assert system.mesh("NVIDIA B200", 8) == "tensor=8"
    assert system.mesh("NVIDIA B200", 4) == "tensor=1"
    assert system.mesh("NVIDIA H100 80GB HBM3", 8) == "tensor=4"
    assert system.mesh("TPU7x", 8) == "tensor=8"
    assert system.mesh("cpu", 1) == ""


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("target = ", "is not TOML"),
        ("tarqet = 'x'", "'tarqet' is not known"),
        ("block_size = 1.5", "block_size is 1.5"),
        ("[sampling]\nheat = 1", "'heat' is not known"),
        ("[mesh]\nb200 = 'tensor=8'", "mesh b200"),
        ("mesh = 4", "must be tables"),
        ("[drafters]\n'a/b' = 3", "drafters: a/b is 3"),
    ],
)
def test_a_toml_that_makes_no_sense(text, named, tmp_path):
    path = tmp_path / "system.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=named):
        read_system(path)


def test_tokens_per_second_of_an_unlisted_device_follows_its_bandwidth(capsys):
    """Memory and bandwidth of a device without a name here: tokens a second follow its bandwidth."""
    options = ["--config", "configs/qwen3.6-27b.toml", "--json"]

    def figures(*more):
        assert main([*options, *more]) == 1
        plan = json.loads(capsys.readouterr().out)
        return plan["bytes_per_device"]["memory"], plan["floor_tokens_per_s"]

    memory, one = figures("--device-memory", "48", "--bandwidth", "900")
    assert memory == 48_000_000_000
    assert figures("--device-memory", "48", "--bandwidth", "1800")[1] == pytest.approx(2 * one)
    assert main([*options, "--bandwidth", "900"]) == 2
    assert "--bandwidth goes with --device-memory" in capsys.readouterr().err
    assert main([*options, "--bandwidth", "nan", "--device-memory", "48"]) == 2
    assert "--bandwidth nan: it must be 0.001 to" in capsys.readouterr().err
    assert main([*options, "--device", "h100", "--bandwidth", "900", "--device-memory", "48"]) == 2
    assert "--device names" in capsys.readouterr().err

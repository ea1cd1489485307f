"""`dflash plan`: exit codes, changes that fit, names of models, devices, and bad values."""

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from dflash_jax.cli.plan import main
from dflash_jax.parallel.devices import DEVICES, device_name

CONFIGS = Path(__file__).parents[2] / "configs"
QWEN3_8B = ["Qwen/Qwen3-8B", "--slots", "16", "--max-len", "16384"]


def planned(capsys, *argv: str) -> tuple[int, dict]:
    """Exit code and JSON of a plan."""
    code = main([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def refused(capsys, *argv: str) -> str:
    """The one line on stderr of a plan that is refused."""
    assert main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


def test_plain_decoding_reads_no_cache_of_the_drafter(capsys):
    """16.38 GB of weights less the embedding table, and 147,456 bytes per position of the target, at 3,350 GB/s."""
    _, drafted = planned(capsys, *QWEN3_8B, "--device", "h100")
    _, plain = planned(capsys, *QWEN3_8B, "--device", "h100", "--draft", "none")
    read = 2 * (8_190_735_360 - 151_936 * 4096) + 16 * 2048 * 147_456
    assert drafted["floor_tokens_per_s_autoregressive"] == pytest.approx(16 * 3.35e12 / read, rel=1e-4)
    assert round(drafted["floor_tokens_per_s_autoregressive"]) == 2684
    assert plain["floor_tokens_per_s_autoregressive"] == drafted["floor_tokens_per_s_autoregressive"]
    assert drafted["floor_tokens_per_s"] > 4.9 * plain["floor_tokens_per_s"]


@pytest.mark.parametrize(
    "argv",
    [
        ["qwen3.6-35b-a3b", "--device", "h100", "--slots", "64"],
        ["qwen3-8b", "--device", "rtx4090", "--slots", "2", "--max-len", "40960"],
        ["qwen3-8b", "--device", "l40s", "--dtype", "float32", "--max-len", "40960"],
        ["qwen3.5-397b-a17b-fp8", "--device", "h100", "--devices", "2"],
        ["qwen3.5-27b", "--memory", "24", "--mesh", "data=2"],
        ["qwen3-8b", "--device", "rtx5090", "--slots", "100000000"],
    ],
    ids=" ".join,
)
def test_every_change_that_is_named_fits(argv, capsys):
    code, plan = planned(capsys, *argv)
    assert (code, plan["fits"]) == (1, False)
    assert plan["would_fit"]
    for change in plan["would_fit"]:
        base = argv[:1] + argv[3:] if change["options"][0] == "--device" else argv
        code, changed = planned(capsys, *base, *change["options"])
        assert (code, changed["fits"], changed["would_fit"]) == (0, True, []), change


def test_changes_go_as_far_as_they_must_and_no_further(capsys):
    argv = ["qwen3-8b", "--device", "rtx4090", "--slots", "2", "--max-len", "40960"]
    assert main(argv) == 1
    out = capsys.readouterr().out
    assert "would fit: two RTX4090 (--mesh tensor=2); or --max-len 10240; or one L40S (--device l40s)\n" in out
    assert planned(capsys, *argv, "--max-len", "11264")[0] == 1
    assert main(["qwen3.6-35b-a3b", "--device", "h100", "--slots", "64"]) == 1
    assert "two H100 (--mesh tensor=2); or FP8 (--quantize fp8); or --slots 12;" in capsys.readouterr().out
    assert planned(capsys, "qwen3.6-35b-a3b", "--device", "h100", "--slots", "13")[0] == 1


def test_without_its_vision_tower_a_target_leaves_room_for_more(capsys):
    argv = ["qwen3.6-35b-a3b", "--device", "h100", "--slots", "22"]
    code, plan = planned(capsys, *argv)
    assert (code, plan["bytes_per_device"]["vision"]) == (1, 2 * 446_571_248)
    assert {"text": "--language-model-only", "options": ["--language-model-only"]} in plan["would_fit"]
    code, text = planned(capsys, *argv, "--language-model-only")
    assert (code, text["bytes_per_device"]["vision"]) == (0, 0)
    assert text["parameters"] == plan["parameters"]
    # Its weights, and 40 bytes for each of 1,152 features and 4 for each of 1,536 numbers of 65,536 patches.
    more = 2 * 446_571_248 + 65_536 * (40 * 1152 + 4 * 1536)
    assert plan["bytes_per_device"]["all"] - text["bytes_per_device"]["all"] == more
    main([*argv, "--language-model-only"])
    out = capsys.readouterr().out
    assert "vision (left out) 446,571,248" in out
    assert "vision 0" not in out
    main(argv)
    out = capsys.readouterr().out
    assert "vision 446,571,248" in out
    assert "vision 0.89 GB, " in out


def test_combined_changes_where_none_alone_fits(capsys, monkeypatch):
    """Without further devices, and without four bits, FP8 fits only with less besides."""
    monkeypatch.setattr("dflash_jax.cli.plan_changes.LIMIT", 1)
    argv = ["qwen3.5-27b", "--device", "l40s", "--slots", "16"]
    for quantize in ([], ["--quantize", "fp8"]):
        assert main([*argv, *quantize]) == 1
        assert "would fit: NVFP4 (--quantize nvfp4)" in capsys.readouterr().out
    monkeypatch.setattr("dflash_jax.cli.plan_changes.in_four_bits", lambda request: None)
    assert main(argv) == 1
    assert "would fit: FP8 and --slots 5 (--quantize fp8 --slots 5)" in capsys.readouterr().out
    code, plan = planned(capsys, "qwen3.5-397b-a17b", "--memory", "0.5")
    assert (code, plan["would_fit"]) == (1, [])
    main(["qwen3.5-397b-a17b", "--memory", "0.5"])
    assert "\nno change that was planned fits\n" in capsys.readouterr().out


def test_for_people_it_says_at_most(capsys):
    assert main([*QWEN3_8B, "--device", "h100"]) == 0
    out = capsys.readouterr().out
    assert "at most 2684 tok/s plain, 13410 tok/s at acceptance length 6" in out
    assert "floor" not in out
    assert "would fit" not in out


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H200", "h200"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("nvidia b200", "b200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("GeForce RTX 4090", "rtx4090"),
        ("RTX PRO 6000", "rtxpro6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"),
        ("TPU v6 lite", "v6e"),
        ("TPU v6e", "v6e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v5 lite", "v5e"),
        ("TPU7x", "tpu7x"),
        ("TPU v4", None),
        ("v5e-8", None),
        ("v5x", None),
        # Of another memory.
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", None),
        ("Tesla V100-SXM2-32GB", None),
        ("cpu", None),
    ],
)
def test_a_device_has_its_makers_names_too(text, name):
    assert device_name(text) == name


def test_plan_takes_the_name_of_nvidia_smi(capsys):
    assert planned(capsys, *QWEN3_8B, "--device", "NVIDIA H200") == planned(capsys, *QWEN3_8B, "--device", "h200")


@pytest.mark.parametrize("option", ["--hf-overrides", "--json-model-override-args"])
def test_overrides_of_the_config_are_planned(option, tmp_path, capsys):
    """YaRN for a longer context, as the model's card has it."""
    long = ["Qwen/Qwen3-8B", "--device", "h100", "--draft", "none", "--max-len", "131072"]
    assert "the model has 40960 positions" in refused(capsys, *long)
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    code, plan = planned(capsys, *long, option, json.dumps({"rope_scaling": scaling}))
    assert (code, plan["length"]) == (0, 131072)
    (tmp_path / "long.toml").write_text("""target = "Qwen/Qwen3-8B"
[hf_overrides.rope_scaling]
rope_type = "yarn"
factor = 4.0
original_max_position_embeddings = 32768
""")
    assert planned(capsys, str(tmp_path / "long.toml"), *long[1:]) == (code, plan)
    unknown = json.dumps({"rope_scaling": scaling | {"mscale": 0.7}})
    assert "has mscale" in refused(capsys, *long, option, unknown)


# Models.


def test_every_published_repository_is_a_model(capsys):
    """A repository's plan is that of its system, drafter included; capitals do not matter."""
    from dflash_jax.options.systems import read_system

    for path in sorted(CONFIGS.glob("*.toml")):
        options = read_system(path).options
        _, by_name = planned(capsys, path.stem, "--device", "b200")
        assert planned(capsys, options["target"].upper(), "--device", "b200")[1] == by_name
        _, both = planned(capsys, "--target", options["target"], "--draft", options["draft"], "--device", "b200")
        assert both["parameters"]["target"] == by_name["parameters"]["target"]
    assert planned(capsys, "--config", "Qwen/Qwen3-8B", "--device", "b200")[1]["parameters"]["drafter"] > 0
    assert planned(capsys, "--target", "Qwen/Qwen3-8B", "--draft", "none")[1]["parameters"]["drafter"] == 0


def test_other_published_drafters_are_named_and_planned(capsys):
    from dflash_jax.options.systems import repositories

    assert main(["qwen3.6-35b-a3b", "--device", "b200"]) == 0
    names = ["z-lab/Qwen3.6-35B-A3B-DFlash", "incoai/Qwen3.6-35B-A3B-DFlash2"]
    assert f"published drafters, for --draft: {', '.join(names)}" in capsys.readouterr().out
    words = ("Qwen/Qwen3.6-35B-A3B", "--draft", names[1].upper(), "--device", "b200")
    assert planned(capsys, *words)[1]["parameters"]["drafter"] == 526_251_520
    for name, path in repositories("draft").items():
        if path is None:
            assert f"hf download {name} config.json" in refused(capsys, "qwen3.6-27b", "--draft", name)


def test_a_config_file_may_name_a_repository(tmp_path, capsys):
    path = tmp_path / "system.toml"
    path.write_text("target = 'Qwen/Qwen3-8B'\ndraft = 'none'\ndtype = 'float32'\nquantize = 'int8'")
    _, plan = planned(capsys, str(path), "--device", "b200")
    _, same = planned(
        capsys, "qwen3-8b", "--draft", "none", "--device", "b200", "--dtype", "float32", "--quantize", "int8"
    )
    assert plan == same
    path.write_text("target = 'Qwen/Qwen3-8B'\ndtype = 'float8'")
    assert "dtype is 'float8'" in refused(capsys, str(path), "--device", "b200")
    path.write_text("dtype = 'float32'")
    assert "no target" in refused(capsys, str(path), "--device", "b200")


def test_a_directory_comes_before_a_repository(tmp_path, capsys, monkeypatch):
    """A directory named like a repository is read, and no drafter is assumed."""
    (tmp_path / "Qwen" / "Qwen3-8B").mkdir(parents=True)
    config = (CONFIGS / "hf" / "Qwen3.6-27B.json").read_text()
    (tmp_path / "Qwen" / "Qwen3-8B" / "config.json").write_text(config)
    monkeypatch.chdir(tmp_path)
    _, plan = planned(capsys, "Qwen/Qwen3-8B", "--device", "b200")
    assert plan["parameters"]["target"] > 20e9
    assert plan["parameters"]["drafter"] == 0


def test_the_config_of_a_downloaded_repository_is_read(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text((CONFIGS / "hf" / "Qwen3-8B.json").read_text())
    _, plan = planned(capsys, "some/model", "--device", "b200")
    assert plan["parameters"] == {"target": 8_190_735_360, "vision": 0, "drafter": 0}


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["Qwen/Qwen3-80B"], "did you mean Qwen/Qwen3-8B"),
        (["no/such"], "known are Qwen/Qwen3-8B"),
        (["--config", "Qwen/Qwen3-80B"], "Qwen/Qwen3-80B"),
        (["/no/such/place"], "'/no/such/place' does not exist"),
        (["a\nb/c"], "'a\\nb/c' does not exist"),
        (["qwen3-8"], "did you mean qwen3-8b"),
        ([""], "no target"),
        (["some/..model--x"], "'some/..model--x'"),
        (["a/" + "b" * 5000], "bbbb"),
        (["a\0/b"], "a"),
        (["Qwen/Qwen3-8B", "--draft", "z-lab/none"], "draft 'z-lab/none'"),
        (["Qwen/Qwen3-8B", "--draft", "z-lab/Qwen3.6-27B-DFlash"], "they differ"),
        (["qwen3-8b", "--config", "qwen3-8b"], "both name the model"),
        (["qwen3-8b", "--target", "Qwen/Qwen3-8B"], "both name the model"),
    ],
)
def test_unknown_models_are_named(argv, named, capsys):
    assert named in refused(capsys, *argv, "--device", "h100")


# Devices.


def test_without_a_bandwidth_there_are_no_tokens_per_second(capsys):
    code, plan = planned(capsys, "Qwen/Qwen3-8B", "--memory", "24")
    assert (code, plan["bytes_per_device"]["memory"]) == (0, 24_000_000_000)
    assert plan["floor_tokens_per_s"] is plan["floor_tokens_per_s_autoregressive"] is None
    assert main(["Qwen/Qwen3-8B", "--memory", "24"]) == 0
    assert "not known without the device's memory bandwidth" in capsys.readouterr().out
    named = ["--device-memory", "24", "--bandwidth", "1008"]
    assert planned(capsys, "qwen3-8b", *named) == planned(
        capsys, "qwen3-8b", "--memory", "24", "--memory-bandwidth", "1008"
    )


def test_devices_without_a_mesh_in_the_config_divide_heads(capsys):
    """--devices N plans for N devices, listed or not."""
    for device in (["--device", "h100"], ["--memory", "80", "--bandwidth", "3000"]):
        for model in (["qwen3-8b"], ["--target", str(CONFIGS / "hf" / "Qwen3-8B.json")]):
            _, plan = planned(capsys, *model, *device, "--devices", "4")
            assert (plan["devices"], plan["mesh"]) == (4, "data=1,expert=1,tensor=4")


@pytest.mark.parametrize(
    ("kind", "platform", "count", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "gpu", 1, ("h100", DEVICES["h100"].memory, 1)),
        ("NVIDIA H100 80GB HBM3", "gpu", 8, ("h100", DEVICES["h100"].memory, 8)),
        ("TPU v6 lite", "tpu", 8, ("v6e", DEVICES["v6e"].memory, 8)),
        ("NVIDIA GeForce RTX 3090", "gpu", 1, ("NVIDIA GeForce RTX 3090", 24_000_000_000, 1)),
        ("cpu", "cpu", 4, ("cpu of this machine", 96_000_000_000, 1)),
    ],
)
def test_the_default_device_is_this_machines(kind, platform, count, expected, capsys, monkeypatch):
    """Listed devices have the listed memory, others what JAX may allocate; the mesh is the one that `serve` takes."""
    devices = [SimpleNamespace(device_kind=kind, platform=platform)] * count
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    monkeypatch.setattr("dflash_jax.engine.memory.device_memory", lambda: 24_000_000_000)
    code, plan = planned(capsys, "qwen3-8b")
    assert (plan["bytes_per_device"]["memory"], plan["devices"]) == expected[1:]
    assert main(["qwen3-8b"]) == code
    assert f"{expected[2]} x {expected[0]}" in capsys.readouterr().out


def test_a_table_of_all_devices(capsys):
    code, plans = planned(capsys, *QWEN3_8B, "--all-devices")
    assert (code, list(plans["plans"])) == (0, list(DEVICES))
    for name, plan in plans["plans"].items():
        single = planned(capsys, *QWEN3_8B, "--device", name)[1]
        single.pop("would_fit")
        assert plan == single
    assert main([*QWEN3_8B, "--all-devices"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = {line.split()[0]: line for line in lines[3:]}
    assert list(cells) == list(DEVICES)
    assert cells["h100"].split()[1:] == ["1", "84.9", "GB", "65.0", "GB", "yes", "21", "22,211", "2,684", "13,410", "-"]
    assert cells["l40s"].endswith("no            8    8,998      -        -  two L40S or --max-len 8192")
    assert max(map(len, lines)) <= 120
    assert main(["qwen3.5-397b-a17b", "--all-devices", "--slots", "4"]) == 1


@pytest.mark.parametrize("more", [["--device", "h100"], ["--memory", "24"], ["--bandwidth", "900"]], ids=" ".join)
def test_a_table_takes_no_device(more, capsys):
    assert "--all-devices takes each device" in refused(capsys, "qwen3-8b", "--all-devices", *more)


# Values.


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0", "1e-320", "1e400", "1e9", "many"])
@pytest.mark.parametrize("option", ["--memory", "--bandwidth", "--acceptance-length"])
def test_figures_that_are_no_sizes(option, value, capsys):
    more = ["--memory", "24"] if option == "--bandwidth" else ["--device", "h100"][: 2 * (option != "--memory")]
    err = refused(capsys, "qwen3-8b", *more, option, value)
    assert option.lstrip("-").replace("-", "_") in err.replace("-", "_")


@pytest.mark.parametrize("value", ["0", "-1", "1000000001", "9" * 400, "1.5"])
@pytest.mark.parametrize(
    "option", ["slots", "max-len", "devices", "context", "block-size", "decode-context-parallel-size"]
)
def test_counts_out_of_range(option, value, capsys):
    err = refused(capsys, "qwen3-8b", "--device", "h100", f"--{option}", value)
    assert option.replace("-", "_") in err.replace("-", "_")


def test_pages_in_parts_are_planned(capsys):
    options = ("qwen3.5-397b-a17b-fp8", "--device", "b200", "--devices", "8")
    (_, copied), (_, divided) = planned(capsys, *options), planned(capsys, *options, "-dcp", "4")
    # Keys and values of 15 layers, one KV head of 256 in two bytes; the drafter's, which has no copies; the token and
    # what its round yielded and verified, and a page's place in each of 21 tables.
    others = 6 * 2 * 128 * 2 + 12 + 21 * 4 / 256
    found = [plan["bytes_per_device"]["cache_per_token"] for plan in (copied, divided)]
    assert found == pytest.approx([15 * 2 * 256 * 2 + others, 15 * 2 * 256 * 2 / 4 + others])
    assert divided["floor_tokens_per_s"] > copied["floor_tokens_per_s"]
    assert divided["decode_context_parallel_size"] == 4
    assert "it must be 1, 2 or 4, since on mesh" in refused(capsys, *options, "--decode-context-parallel-size", "8")


def test_meshes_out_of_range_end_at_once(capsys):
    """The prime factors of so many devices would take hours."""
    err = refused(capsys, "qwen3-8b", "--device", "h100", "--mesh", "tensor=999999999989")
    assert "65,536 or fewer" in err


def test_the_largest_values_are_planned(capsys):
    code, plan = planned(capsys, "qwen3-8b", "--memory", "0.001", "--bandwidth", "0.001", "--slots", "1000000000")
    assert code == 1
    assert all(0 <= rate < 1 for rate in (plan["floor_tokens_per_s"], plan["floor_tokens_per_s_autoregressive"]))
    assert planned(capsys, "qwen3-8b", "--device", "h100", "--context", "1000000000")[0] == 0
    # Fewer tokens in a round than the default acceptance length.
    _, plan = planned(capsys, "qwen3-8b", "--device", "h100", "--block-size", "4")
    assert plan["floor_tokens_per_s"] > 0
    # Shorter slots than the default context.
    _, short = planned(capsys, "qwen3-8b", "--device", "h100", "--max-len", "512")
    _, given = planned(capsys, "qwen3-8b", "--device", "h100", "--max-len", "512", "--context", "512")
    assert short == given

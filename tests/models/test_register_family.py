"""Families from outside the package: registered, or named by an installed package."""

import tomllib
from types import SimpleNamespace

import pytest

from dflash_jax import InputError, register_family
from dflash_jax.checkpoint.load import load_target
from dflash_jax.models import families
from tests.families import EXAMPLES, OUTSIDE, example_family, save_example

RAW = {"model_type": "mine"}
MINE = SimpleNamespace(read_config=lambda raw: raw, weight_names=lambda config, names=(): [], is_skipped=bool)


@pytest.fixture(autouse=True)
def no_family_is_registered(monkeypatch):
    monkeypatch.setattr(families, "registered", {})


def install(directory, monkeypatch, points: str, package: str = "mine") -> None:
    """What pip writes of a package with these entry points."""
    information = directory / f"{package}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[{families.ENTRY_POINTS}]\n{points}\n")
    monkeypatch.syspath_prepend(directory)


def test_a_registered_family_reads_targets_of_its_type():
    register_family("mine", MINE)
    assert families.target_family(RAW) is MINE
    assert families.read_target(RAW) == RAW


def test_an_unknown_type_names_the_known_and_says_how_to_add_one(tmp_path, monkeypatch):
    register_family("mine", MINE)
    install(tmp_path, monkeypatch, "installed = no_such_module")
    with pytest.raises(InputError, match=r"'other': .* installed, llama, mine, .* dflash_jax.register_family \(docs/"):
        families.target_family({"model_type": "other"})


@pytest.mark.parametrize("name", ["llama", "qwen3_5_moe_text"])
def test_a_type_of_the_package_is_not_registered(name):
    with pytest.raises(InputError, match=f"'{name}' is a family of dflash_jax"):
        register_family(name, MINE)


def test_a_type_is_registered_once():
    register_family("mine", MINE)
    with pytest.raises(InputError, match="'mine' is registered already"):
        register_family("mine", example_family("qwen2"))
    assert families.target_family(RAW) is MINE


@pytest.mark.parametrize("name", families.FUNCTIONS)
def test_a_family_without_a_function_is_refused(name):
    family = SimpleNamespace(**{**vars(MINE), name: None})
    with pytest.raises(InputError, match=f"'mine' has no {name}: it must be a module or an object with read_config"):
        register_family("mine", family)
    with pytest.raises(InputError, match="model_type is 3: it must be a string"):
        register_family(3, MINE)
    assert not families.registered


def test_a_table_without_a_parameter_is_refused(tmp_path):
    save_example("qwen2", tmp_path)
    qwen2 = example_family("qwen2")

    def weight_names(config, names=()):
        return [entry for entry in qwen2.weight_names(config, names) if not entry.path.endswith("k_bias")]

    functions = {"read_config": qwen2.read_config, "is_skipped": lambda name: name.endswith("k_proj.bias")}
    register_family("qwen2", SimpleNamespace(weight_names=weight_names, **functions))
    with pytest.raises(InputError, match=r"lacks 3 parameters of the model, first layers.0.mixer.k_bias"):
        load_target(tmp_path)


def test_an_installed_family_is_imported_when_its_type_is_asked_for(tmp_path, monkeypatch):
    (tmp_path / "installed_family.py").write_text("weight_names = is_skipped = print\ndef read_config(raw): return 7\n")
    install(tmp_path, monkeypatch, "mine = installed_family\nbroken = no_such_module\nempty = json")
    assert families.read_target(RAW) == 7
    with pytest.raises(InputError, match=r"'broken', no_such_module, cannot be imported: ModuleNotFoundError"):
        families.target_family({"model_type": "broken"})
    with pytest.raises(InputError, match=r"'empty' has no read_config and no weight_names and no is_skipped"):
        families.target_family({"model_type": "empty"})
    register_family("mine", MINE)
    assert families.target_family(RAW) is MINE


def test_two_installed_families_of_one_type_are_refused(tmp_path, monkeypatch):
    for package in ("first", "second"):
        install(tmp_path, monkeypatch, f"mine = of_{package}", package)
    with pytest.raises(InputError, match="'mine' has several installed families, of_first, of_second"):
        families.target_family(RAW)


def test_an_installed_family_does_not_replace_one_of_the_package(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "llama = no_such_module")
    assert families.target_family({"model_type": "llama"}) is families.llama


def test_the_package_of_the_examples_names_each():
    project = tomllib.loads((EXAMPLES / "pyproject.toml").read_text())
    points = project["project"]["entry-points"][families.ENTRY_POINTS]
    assert points == {name: f"example_families.{name}" for name in OUTSIDE}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(OUTSIDE)

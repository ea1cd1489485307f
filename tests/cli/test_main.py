"""The console command `dflash`, and configs by name."""

import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

import dflash_jax
from dflash_jax.checkpoint.config_files import CONFIGS, find_config
from dflash_jax.cli import main as cli
from dflash_jax.errors import InputError
from dflash_jax.options.parser import program
from dflash_jax.options.systems import read_system
from dflash_jax.options.train import read_toml

ROOT = Path(__file__).parents[2]


def run(*words: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, **options)


def test_version_of_a_checkout_that_is_not_installed(tmp_path):
    # -S leaves site-packages out, -P the working directory.
    done = run("-S", "-P", "-m", "dflash_jax", "--version", env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"dflash-jax {dflash_jax.__version__}\n"), done.stderr


def test_pyproject_takes_version_and_command_from_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "dflash_jax.__version__"}
    module, _, name = project["project"]["scripts"]["dflash"].partition(":")
    assert (module, getattr(cli, name)) == (cli.__name__, cli.command)


def test_help_lists_every_command_without_jax():
    # Without site-packages there is no JAX to import.
    done = run("-S", "-m", "dflash_jax", "--help", env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert all(f"  {name} " in done.stdout for name in cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_each_command_has_its_help_under_the_name_it_was_run_by(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/dflash"])
    with pytest.raises(SystemExit) as exit:
        cli.main([name, "--help"])
    assert exit.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: dflash {name} ")


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("/usr/bin/dflash", "dflash plan"),
        ("C:\\Scripts\\dflash.exe".replace("\\", "/"), "dflash plan"),
        ("/src/dflash_jax/__main__.py", "python -m dflash_jax plan"),
        ("/src/dflash_jax/plan.py", "python -m dflash_jax.plan"),
        ("/usr/bin/pytest", "python -m dflash_jax.plan"),
    ],
)
def test_a_command_is_named_as_it_was_run(file, words, monkeypatch):
    monkeypatch.setattr(sys, "argv", [file])
    assert program("plan") == words


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["srve"], "did you mean serve?"),
        (["Generate"], "did you mean generate?"),
        (["xyzzy"], "commands are demo, generate, serve"),
        ([""], "commands are"),
        (["--bogus"], "--bogus is not known"),
    ],
)
def test_what_is_no_command_is_one_line_and_code_2(argv, said, capsys):
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["demo", "--bundle"], "did you mean --bundled?"),
        (["generate", "--promt", "x"], "did you mean --prompt?"),
        (["generate", "--dtype", "float16"], "did you mean bfloat16"),
        (["serve", "--max-model-length", "8"], "did you mean --max-model-len?"),
        (["serve", "--log-levl=info"], "did you mean --log-level?"),
        (["cluster", "--replica"], "did you mean --replicas?"),
        (["batch", "-i", "x", "-o", "y", "--concurency", "2"], "did you mean --concurrency?"),
        (["batch", "-i", "x", "-o", "y", "--slot", "2"], "did you mean --slots?"),
        (["train", "fti"], "did you mean fit?"),
        (["train", "fit", "--outputs", "x"], "did you mean --output?"),
        (["plan", "qwen3-8b", "--slot", "2"], "did you mean --slots?"),
        (["plan", "qwen3-8b", "--device", "h20"], "did you mean h200?"),
        (["plan", "qwen3-8b", "--device", "NVIDIA H300"], "did you mean h"),
        (["ops", "--configs", "x"], "did you mean --config?"),
        (["benchmark", "--concurency", "2"], "did you mean --concurrency?"),
        (["convert", "gguf-hf", "a", "b"], "did you mean gguf-to-hf?"),
        (["completion", "zhs"], "did you mean zsh?"),
        (["help", "srve"], "did you mean serve?"),
        (["plan", "qwen3-8b", "--xyzzy"], "--help lists the options"),
    ],
)
def test_a_wrong_word_gets_the_near_one(argv, said, capsys):
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def test_help_is_of_all_commands_or_of_one(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/dflash"])
    assert cli.main(["help"]) == 0
    assert "commands:" in capsys.readouterr().out
    for words, usage in ((["plan"], "usage: dflash plan "), (["train", "fit"], "usage: dflash train fit ")):
        with pytest.raises(SystemExit) as exit:
            cli.main(["help", *words])
        assert exit.value.code == 0
        assert capsys.readouterr().out.startswith(usage)


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (read_system, "targt = 'a/b'", "'targt' is not known: did you mean target?"),
        (read_system, "[sampling]\ntemprature = 1", "'temprature' is not known: did you mean temperature?"),
        (read_system, "xyzzy = 1", "'xyzzy' is not known: known are target, draft"),
        (read_toml, "layer = 1", "'layer' is not known: did you mean layers?"),
    ],
)
def test_a_wrong_key_of_a_config_gets_the_near_one(read, text, said, tmp_path):
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(InputError, match=said.replace("?", r"\?")):
        read(tmp_path / "a.toml")


def test_no_command_shows_the_help(capsys):
    assert cli.main([]) == 2
    assert "commands:" in capsys.readouterr().err


def test_a_command_gets_the_remaining_words(capsys):
    assert cli.main(["plan", "--config", "qwen3.6-35b-a3b", "--devices", "0"]) == 2
    assert capsys.readouterr().err == "error: --devices 0: it must be 1 to 65536\n"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda p: p.stem)
def test_systems_are_found_by_name(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_system(path.stem).options == read_system(path).options
    system = read_system(path.stem)
    assert all(shape.exists() for shape in [*system.shapes.values(), *filter(None, system.others.values())])


@pytest.mark.parametrize("path", sorted((ROOT / "configs/train").glob("*.toml")), ids=lambda p: p.stem)
def test_training_runs_are_found_by_name(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = read_toml(path.stem)[0]
    assert values.keys() == read_toml(path)[0].keys()
    assert "draft_config" not in values or Path(values["draft_config"]).exists()


def test_a_file_comes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("qwen3-8b").write_text("")
    Path("qwen3.6-27b").mkdir()
    assert find_config("qwen3-8b") == Path("qwen3-8b")
    assert find_config("./qwen3.6-35b-a3b.toml") == Path("qwen3.6-35b-a3b.toml")
    assert find_config("qwen3.6-27b") == CONFIGS / "qwen3.6-27b.toml"


@pytest.mark.parametrize(
    ("name", "folder", "said"),
    [
        ("qwen3.6-35b-a3", "", "did you mean qwen3.6-35b-a3b"),
        ("smollm2", "train", "did you mean smollm2-135m"),
        ("smollm2-135m", "", "did you mean smollm2"),
        ("xyzzy", "", "known are qwen3-8b, "),
        ("..", "", "known are "),
        ("", "", "known are "),
    ],
)
def test_an_unknown_name_gets_the_near_ones(name, folder, said):
    with pytest.raises(InputError, match="is neither a file nor a known name") as failure:
        find_config(name, folder)
    assert said in str(failure.value)


def test_the_wheel_has_every_config():
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    package = ROOT / "dflash_jax"
    shipped = {path for pattern in tables["package-data"]["dflash_jax"] for path in package.glob(pattern)}
    wanted = {CONFIGS / p.relative_to(ROOT / "configs") for p in (ROOT / "configs").rglob("*.*") if p.is_file()}
    assert {CONFIGS / "qwen3.6-35b-a3b.toml", CONFIGS / "hf" / "Qwen3-Coder-Next.json"} <= wanted
    data = {path for path in package.rglob("*.toml") if CONFIGS not in path.parents}
    assert {package / "options" / "other_flags.toml", package / "server" / "neutral_fields.toml"} <= data
    assert {package / "py.typed", *wanted, *data} <= shipped


def test_distributions_have_the_package_whole_and_nothing_beside_it(tmp_path):
    """A part of the tests, which setuptools would take, cannot run without the rest of the repository.

    The package that a wheel installs is that of top_level.txt, which the source distribution has too.
    """
    for name in (
        "pyproject.toml",
        "MANIFEST.in",
        "README.md",
        "LICENSE",
        "constraints.txt",
        "configs",
        "dflash_jax",
        "scripts",
        "tests",
        "tools",
    ):
        (tmp_path / name).symlink_to(ROOT / name)
    done = run("-c", "from setuptools import build_meta; build_meta.build_sdist('out')", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (archive,) = (tmp_path / "out").iterdir()
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
        (installed,) = (file.extractfile(name) for name in file.getnames() if name.endswith("/top_level.txt"))
        assert installed.read() == b"dflash_jax\n"
    assert "constraints.txt" in names
    assert not [name for name in names if name.startswith(("scripts", "tests", "tools"))]
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["dflash_jax"]
    data = {path for pattern in package for path in (ROOT / "dflash_jax").glob(pattern)}
    wanted = {path for path in (*data, *(ROOT / "dflash_jax").rglob("*.py")) if path.is_file()}
    assert {path.relative_to(ROOT).as_posix() for path in wanted} <= names

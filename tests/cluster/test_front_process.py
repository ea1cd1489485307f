"""A front's arguments, and the files of a model that its machine has not."""

from types import SimpleNamespace

import pytest

from dflash_jax.checkpoint import hub
from dflash_jax.cluster.front_process import ClusterFront, arguments_of, words_of
from dflash_jax.cluster.options import parse


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--api-key", "k", "--replicas", "1:3", "--mesh", "tensor=2", "--allowed-hosts", "a,b", "--slots", "8"],
        ["--served-model-name", "m", "--replica-resources", '{"TPU": 4}', "--default-chat-template-kwargs", "{}"],
        ["--config", "qwen3.6-35b-a3b-fp8", "--replica-slice", "v6e:4x4", "--response-store-path", "x.sqlite"],
    ],
)
def test_arguments_are_the_same_in_a_front(words):
    args, _ = parse(words)
    given, system = arguments_of(words_of(args))
    assert system is None
    as_lists = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(args).items()}
    assert vars(given) == as_lists


@pytest.mark.parametrize("tokenizer", ["own", "of the model", "none"])
@pytest.mark.parametrize("is_here", [True, False])
def test_files_that_are_not_here_come_from_the_hub_without_weights(tmp_path, monkeypatch, tokenizer, is_here):
    here = tmp_path / "here" if is_here else tmp_path / "missing"
    (tmp_path / "here").mkdir()
    directory, loaded = str(here), []

    def resolve(name, revision=None, download_dir=None, patterns=()):
        assert not any("safetensors" in pattern for pattern in patterns)
        loaded.append((name, revision, download_dir))
        (path := tmp_path / name.replace("/", "-")).mkdir()
        return path

    monkeypatch.setattr(hub, "resolve", resolve)
    front = ClusterFront()
    front.args = SimpleNamespace(revision="r", download_dir="d", tokenizer="o/t")
    where = {"own": f"{directory}-t", "of the model": directory, "none": None}[tokenizer]
    if is_here and tokenizer == "own":
        (tmp_path / "here-t").mkdir()
    model = {"directory": directory, "tokenizer_directory": where, "max_len": 9}
    facts = front.facts_of(SimpleNamespace(model=model, info={"model_path": "o/m"}))
    if is_here:
        assert (facts, loaded) == (model, [])
        return
    expected = {"own": tmp_path / "o-t", "of the model": tmp_path / "o-m", "none": None}[tokenizer]
    assert facts["directory"] == str(tmp_path / "o-m")
    assert facts["tokenizer_directory"] == (expected and str(expected))
    assert loaded[0] == ("o/m", "r", "d")
    assert loaded[1:] == ([("o/t", None, "d")] if tokenizer == "own" else [])

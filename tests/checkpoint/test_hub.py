"""Repositories that cannot be downloaded: the error says what to do."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants, errors

from dflash_jax import LLM
from dflash_jax.checkpoint.config_files import CONFIGS, published_drafters, read_toml_file
from dflash_jax.checkpoint.hub import resolve
from dflash_jax.errors import InputError
from dflash_jax.frontend.llm_config import TINY


def failing(error: Exception):
    def snapshot_download(name, **options):
        raise error

    return snapshot_download


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        (errors.GatedRepoError, "It is gated: accept its terms on huggingface.co, and set HF_TOKEN"),
        (errors.RepositoryNotFoundError, "A private repo needs HF_TOKEN"),
        (errors.RevisionNotFoundError, "Give another revision"),
        (errors.LocalEntryNotFoundError, "The hub was not reached, or did not answer. Give a local directory, or copy"),
        (ConnectionError, "HF_HOME and --download-dir move that place"),
    ],
)
def test_a_download_that_fails_names_the_repo_and_what_to_do(kind, advice, monkeypatch):
    error = kind.__new__(kind)
    Exception.__init__(error, "reason")
    monkeypatch.setattr("huggingface_hub.snapshot_download", failing(error))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(InputError, match=r"^a/b is neither a directory nor a repo that can be downloaded") as failure:
        resolve("a/b")
    assert advice in str(failure.value)


def test_offline_the_error_names_the_place_that_was_searched(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=rf"HF_HUB_OFFLINE is set, and {tmp_path} does not have it. Give a local"):
        resolve("a/b", download_dir=tmp_path)


def test_a_path_is_never_taken_for_a_repo(monkeypatch, tmp_path):
    """What the program joins itself, such as OUTPUT/draft, has the form of a repo id."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("it downloads"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"^run/draft does not exist$"):
        resolve(Path("run") / "draft")


def test_a_gguf_file_is_to_be_converted(monkeypatch, tmp_path):
    """By its name, by that of its directory, and by that of a repo that has others."""
    path = tmp_path / "model.gguf"
    path.touch()
    (tmp_path / "config.json").touch()
    command = f"dflash convert gguf-to-hf {path} NEW, and give NEW"
    for name in (path, str(path), tmp_path):
        with pytest.raises(InputError) as error:
            resolve(name)
        assert command in str(error.value)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: tmp_path)
    with pytest.raises(
        InputError, match=r"hf download a/b-GGUF FILE --local-dir DIR, then make .* gguf-to-hf DIR/FILE"
    ):
        resolve("a/b-GGUF")
    (tmp_path / "model.safetensors").touch()
    assert resolve(tmp_path) == resolve("a/b-GGUF") == tmp_path


def test_a_target_finds_its_published_drafter(monkeypatch, caplog, tmp_path):
    """The bundled pair in place of the published one."""
    asked, draft = [], shutil.copytree(TINY / "draft", tmp_path / "draft") / "config.json"

    def snapshot_download(name, **options):
        asked.append(name)
        if "DFlash" in name and is_gone:
            raise ConnectionError("reason")
        return str(draft.parent if "DFlash" in name else TINY / "target")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    is_gone = False
    llm = LLM("qwen/qwen3.8-27b")
    assert llm.drafter is not None
    assert asked == ["qwen/qwen3.8-27b", "z-lab/Qwen3.8-27B-DFlash2"]
    assert LLM("Qwen/Qwen3.8-27B", None).drafter is None
    is_gone = True
    assert LLM("Qwen/Qwen3.8-27B").drafter is None
    assert "has the drafter z-lab/Qwen3.8-27B-DFlash2, which cannot be used, so decoding is plain" in caplog.text
    is_gone, raw = False, json.loads((TINY / "draft" / "config.json").read_text())
    draft.write_text(json.dumps(raw | {"dflash_config": raw["dflash_config"] | {"unknown": 1}}))
    assert LLM("Qwen/Qwen3.8-27B").drafter is None
    assert "dflash_config has 'unknown'" in caplog.text
    assert caplog.text.count("published, too: incoai/Qwen3.8-27B-DFlash2") == 2
    assert published_drafters("Qwen/Unknown") == []


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_config_names_a_pair(path):
    system = read_toml_file(path)
    assert published_drafters(system["target"]) == [system["draft"], *system.get("drafters", {})]

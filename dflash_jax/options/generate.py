"""The options of `dflash generate`, and the parser of any command that has some of them."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from dflash_jax.options import readers
from dflash_jax.options.option import option
from dflash_jax.options.parser import Parser, program
from dflash_jax.options.shared import CommandOptions, LLMOptions, SamplingOptions, sampling

DESCRIPTION = "Text from a target and a DFlash drafter. Text goes to stdout, everything else to stderr."
_given = partial(option, group="prompts (any number, in any mixture)")
_media = partial(option, group="images and videos")
_output = partial(option, group="output")


@dataclass(frozen=True)
class GenerateOptions(SamplingOptions, LLMOptions, CommandOptions):
    """The options of `dflash generate`."""

    prompt: list[str] = _given(list, "a prompt; - reads it from stdin", action="append")
    prompt_file: list[str] = _given(list, "a file that is one prompt", "FILE", action="append")
    prompt_ids: list[list[int]] = _given(list, "token ids", "1,2,3", action="append", read=readers.token_ids)
    chat: bool = _given(False, "prompts are user messages for the chat template")
    system: str | None = _given(None, "system message (with --chat)")
    thinking: bool | None = _given(None, "reason first (with --chat)")
    image: list[str] = _media(
        list, "an image in one message with --prompt, before its text; repeatable", "FILE|URL", action="append"
    )
    video: list[str] = _media(list, "a video, likewise; repeatable", "FILE|URL", action="append")
    max_new_tokens: int = sampling(256, "new tokens of a prompt, at most", "N", aliases="--max-tokens")
    logit_bias: list[tuple[int, float]] = sampling(list, "repeatable", "ID=V", action="append", read=readers.bias)
    seed: int | None = sampling(
        None, "the same seed gives the same text, with or without a drafter", aliases="--sampling-seed"
    )
    stop: list[str] = sampling(list, "end before this text; repeatable", "TEXT", action="append")
    ignore_eos: bool = sampling(False, "go on past the checkpoint's stop tokens")
    logprobs: int | None = sampling(None, "with --json: log-probabilities of the N likeliest tokens", "N")
    compare: bool = _output(False, "decode with and without the drafter, several times; compare tokens and speed")
    show_drafts: bool = _output(False, "accepted drafts in green, with NO_COLOR in [brackets]")
    json: bool = _output(False, "one JSON object a prompt, one a line, and nothing else on stdout")


def command_parser(
    command: str, description: str | None, cls: type, shared: Collection[str] = (), **settings
) -> Parser:
    """The parser of a command.

    Args:
        command: Its name.
        description: What ``--help`` says of it.
        cls: The dataclass of its options. Their names in other servers are those of `GenerateOptions`.
        shared: Further options, of `GenerateOptions`.
        **settings: Further settings of argparse's parser.
    """
    parser = Parser(prog=program(command), description=description, **settings)
    parser.add_options(cls)
    parser.add_options(GenerateOptions, shared, group="options")
    parser.add_aliases(GenerateOptions)
    return parser


make_parser = partial(command_parser, "generate", DESCRIPTION, GenerateOptions)

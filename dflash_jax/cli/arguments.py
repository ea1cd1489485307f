"""The arguments of `dflash generate`, and the prompts that they name."""

import argparse
import sys

from dflash_jax.cli.aliases import AddDraft, add_aliases
from dflash_jax.cli.options import Parser, add_hub, add_media, add_mesh, add_platform, program
from dflash_jax.engine.config import BlockSize
from dflash_jax.errors import InputError

DESCRIPTION = "Text from a target and a DFlash drafter. Text goes to stdout, everything else to stderr."


def token_ids(text: str) -> list[int]:
    """Token ids of the command line."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be token ids with commas between, such as 1,2,3") from None


def block_size(text: str) -> BlockSize:
    """A block size of the command line."""
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of tokens, or auto") from None


def bias(text: str) -> tuple[int, float]:
    """One logit bias of the command line: (token id, value)."""
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be ID=VALUE, such as 42=-1.5") from None


def make_parser() -> argparse.ArgumentParser:
    """The parser of `generate`."""
    p = Parser(prog=program("generate"), description=DESCRIPTION, allow_abbrev=False)
    models = p.add_argument_group("models")
    models.add_argument(
        "--config",
        metavar="NAME|FILE",
        help="a name of configs/, or a TOML; options override it",
    )
    models.add_argument("model", nargs="?", metavar="MODEL", help="the target; smollm2 is SmolLM2-135M-Instruct")
    models.add_argument("--target", metavar="PATH|REPO", help="target checkpoint (default: the bundled tiny model)")
    models.add_argument(
        "--draft",
        action=AddDraft,
        metavar="PATH|REPO|mtp|none",
        default="auto",
        help="drafter checkpoint; mtp: the target's own MTP head; none decodes plainly; repeatable",
    )
    add_hub(models)
    models.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: float32 on CPU, bfloat16 elsewhere")
    models.add_argument(
        "--quantize",
        choices=["none", "int8", "fp8"],
        help="quantize the target; none: an FP8 checkpoint becomes --dtype",
    )
    models.add_argument("--max-len", type=int, metavar="N", help="most tokens of a row, prompt and answer")
    models.add_argument("--slots", type=int, default=32, metavar="N", help="prompts at a time (default: %(default)s)")
    models.add_argument(
        "--mem-fraction", type=float, default=0.9, metavar="F", help="of a device's memory (default: %(default)s)"
    )
    add_mesh(models)
    models.add_argument(
        "--distributed", action="store_true", help="one of several processes, as the cluster's environment says"
    )
    add_platform(models)

    prompts = p.add_argument_group("prompts (any number, in any mixture)")
    prompts.add_argument("--prompt", action="append", default=[], help="a prompt; - reads it from stdin")
    prompts.add_argument("--prompt-file", action="append", default=[], metavar="FILE", help="a file that is one prompt")
    prompts.add_argument("--prompt-ids", action="append", default=[], type=token_ids, metavar="1,2,3", help="token ids")
    prompts.add_argument("--chat", action="store_true", help="prompts are user messages for the chat template")
    prompts.add_argument("--system", help="system message (with --chat)")
    prompts.add_argument("--thinking", action=argparse.BooleanOptionalAction, help="reason first (with --chat)")

    media = p.add_argument_group("images and videos (in one message with --prompt, before its text)")
    media.add_argument("--image", action="append", default=[], metavar="FILE|URL", help="an image; repeatable")
    media.add_argument("--video", action="append", default=[], metavar="FILE|URL", help="a video; repeatable")
    add_media(media)

    sampling = p.add_argument_group("sampling (defaults: the checkpoint's generation_config.json)")
    sampling.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="default: %(default)s")
    sampling.add_argument("--temperature", type=float, help="0 is greedy")
    sampling.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens; 0 is off")
    sampling.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest tokens of mass P; 1 is off")
    sampling.add_argument(
        "--min-p", type=float, metavar="P", help="keep tokens of at least P times the best one's probability"
    )
    sampling.add_argument("--repetition-penalty", type=float, metavar="R", help="1 is off")
    sampling.add_argument("--frequency-penalty", type=float, default=0.0, metavar="F", help="default: %(default)s")
    sampling.add_argument("--presence-penalty", type=float, default=0.0, metavar="F", help="default: %(default)s")
    sampling.add_argument("--logit-bias", action="append", default=[], type=bias, metavar="ID=V", help="repeatable")
    sampling.add_argument("--seed", type=int, help="the same seed gives the same text, with or without a drafter")
    sampling.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable"
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="go on past the checkpoint's stop tokens")
    sampling.add_argument(
        "--logprobs", type=int, metavar="N", help="with --json: log-probabilities of the N likeliest tokens"
    )

    drafting = p.add_argument_group("drafting")
    drafting.add_argument(
        "--block-size",
        type=block_size,
        default="auto",
        metavar="B",
        help="tokens a round may yield; auto (the default) takes what is fastest, down to plain decoding",
    )
    drafting.add_argument("--max-block-size", type=int, metavar="B", help="the largest that auto takes")
    drafting.add_argument("--draft-window-size", type=int, metavar="W", help="context positions that the drafter sees")
    drafting.add_argument("--draft-sink-size", type=int, default=0, metavar="S", help="first positions it sees besides")
    drafting.add_argument(
        "--draft-tokens",
        metavar="FILE|none",
        default="auto",
        help="JSON list of the only ids that any drafter drafts (default: each drafter's draft_tokens.json, if any)",
    )
    drafting.add_argument(
        "--reproducible", action="store_true", help="the same bits at any block size, in bfloat16 too"
    )

    output = p.add_argument_group("output")
    output.add_argument(
        "--compare",
        action="store_true",
        help="decode with and without the drafter, several times; compare tokens and speed",
    )
    output.add_argument(
        "--show-drafts", action="store_true", help="accepted drafts in green, with NO_COLOR in [brackets]"
    )
    output.add_argument(
        "--json", action="store_true", help="one JSON object a prompt, one a line, and nothing else on stdout"
    )
    add_aliases(p)
    return p


def read_stdin() -> str:
    """The prompt on stdin."""
    if sys.stdin is None:
        raise InputError("--prompt - reads stdin, and stdin is closed")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise InputError("stdin is not UTF-8 text") from None


def read_prompts(args) -> list[str | list[int]]:
    """The prompts that the arguments or stdin give: texts, or token ids.

    Raises:
        InputError: A prompt cannot be read, or there is none.
    """
    prompts: list = []
    for prompt in args.prompt:
        prompts.append(read_stdin() if prompt == "-" else prompt)
        # What is not UTF-8 comes as lone surrogates.
        if any("\ud800" <= c <= "\udfff" for c in prompts[-1]):
            raise InputError("a prompt is not UTF-8 text")
    for name in args.prompt_file:
        try:
            with open(name, encoding="utf-8") as file:
                prompts.append(file.read())
        except OSError as e:
            raise InputError(f"prompt file {name} cannot be read: {e.strerror}") from None
        except UnicodeDecodeError:
            raise InputError(f"prompt file {name} is not UTF-8 text") from None
    prompts += args.prompt_ids
    if not prompts:
        raise InputError("no prompt: give --prompt, --prompt-file or --prompt-ids")
    if any(p == "" for p in prompts):
        raise InputError("a prompt is empty: it must have at least one token")
    if args.chat and args.prompt_ids:
        raise InputError("--prompt-ids are not chat messages: leave out --chat, or give --prompt")
    if (args.image or args.video) and (len(prompts) > 1 or args.prompt_ids):
        raise InputError("--image and --video belong to one prompt of text: give one --prompt or --prompt-file")
    if not (args.chat or args.image or args.video) and (args.system is not None or args.thinking is not None):
        raise InputError("--system, --thinking and --no-thinking need --chat")
    return prompts

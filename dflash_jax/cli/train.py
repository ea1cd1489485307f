"""A DFlash drafter for a target of yours."""

import argparse
import json
import os
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dflash_jax.errors import InputError
from dflash_jax.options.generate import GenerateOptions
from dflash_jax.options.parser import Parser, program
from dflash_jax.options.train import FIELDS, TrainConfig, checked, read_toml
from dflash_jax.parallel.devices import mesh_for, set_platform
from dflash_jax.process import exit_code
from dflash_jax.progress import starting
from dflash_jax.sampling_params import SamplingParams

# A run that was stopped and may go on: EX_TEMPFAIL of sysexits.h.
TRY_AGAIN = 75
# Images, and videos, of a conversation of regenerate.
MOST_MEDIA = 2**16
COMMANDS = {
    "regenerate": "the target's own answers to the data's prompts, into OUTPUT/regenerated.jsonl",
    "cache": "the target's features of the data, into --features",
    "fit": "train; the same command goes on after a stop",
    "evaluate": "acceptance length and speed, on --held-out, of OUTPUT/draft or, where there is none, of --draft",
    "export": "the best measured or the newest checkpoint of OUTPUT as a Hugging Face directory, OUTPUT/draft",
    "tokens": "the data's most frequent tokens, to draft from: OUTPUT/draft/draft_tokens.json, or in OUTPUT",
}


def tell(line: str) -> None:
    """Writes a line to stderr, in the first process only."""
    from dflash_jax.parallel import distributed

    if distributed.is_first():
        print(line, file=sys.stderr, flush=True)


# Options of each command, which its help lists. All are accepted by every command, so that one line of options or one
# TOML serves them all.
FRESH = "draft_config layers block_size taps intermediate_size sliding_window mask_token_id start_layers"
COMMON = "target revision download_dir output dtype mesh"
DATA = f"{COMMON} data skip_bad_lines sequence_length"
GENERATION = "temperature max_new_tokens thinking slots urls"
ONLY = {
    "regenerate": f"{COMMON} data skip_bad_lines draft draft_revision seed {GENERATION}",
    "cache": f"{DATA} draft draft_revision features rows loss mtp {FRESH}",
    "evaluate": f"{COMMON} draft draft_revision held_out evaluate_prompts evaluate_tokens seed",
    "tokens": f"{DATA} draft_vocabulary",
}
# Of fit, and of export, which reads the checkpoints of a run with the same options.
NOT_OF_FIT = f"draft_vocabulary {GENERATION}"


def options_of(command: str) -> list[str]:
    """Names of the settings that a command reads."""
    names = ONLY[command].split() if command in ONLY else [n for n in FIELDS if n not in NOT_OF_FIT.split()]
    return [name for name in FIELDS if name in names]


class _Help(argparse.Action):
    """``--help``: of the command before it, or of all."""

    def __init__(self, option_strings, dest, **options):
        text = "list the options of the command before it, and exit"
        super().__init__(option_strings, argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, help=text)

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        make_parser(getattr(namespace, "command", None)).print_help()
        parser.exit()


def make_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser of the command line.

    Args:
        command: Whose help it prints; None: of all, without their options.
    """
    prog = program("train")
    commands = "\n".join(f"  {each:12}{text}" for each, text in COMMANDS.items())
    p = Parser(
        prog=prog,
        usage=f"{prog} {command or 'COMMAND'} [OPTION ...]",
        description=__doc__ if command is None else f"{COMMANDS[command][0].upper()}{COMMANDS[command][1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"commands:\n{commands}\n\n{prog} COMMAND --help lists a command's options." if command is None else "",
        add_help=False,
    )
    p.register("action", "command_help", _Help)
    p.add_argument("command", choices=COMMANDS, help=argparse.SUPPRESS)
    p.add_argument("-h", "--help", action="command_help")
    text = "a name of configs/train/, or a TOML with these options as keys"
    p.add_argument("--config", metavar="NAME|FILE", help=text)
    p.add_options(GenerateOptions, ("platform", "distributed"), group="options")
    shown = options_of(command) if command is not None else ()
    p.add_options(TrainConfig, is_unset=True, listed=shown)
    p.add_aliases(GenerateOptions)
    return p


def read_config(args: argparse.Namespace) -> tuple[TrainConfig, dict[str, str]]:
    """The settings and the meshes that ``--config`` and the options give; the options win."""
    values, meshes = read_toml(args.config) if args.config else ({}, {})
    given = {name: getattr(args, name) for name in FIELDS if getattr(args, name) is not None}
    settings: dict[str, Any] = values | {k: checked(k, v, "options") for k, v in given.items()}
    return TrainConfig(**settings), meshes


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""

    def command() -> int:
        args = make_parser().parse_args(argv)
        config, meshes = read_config(args)
        if args.distributed:
            from dflash_jax.parallel import distributed

            distributed.start()
        with starting():
            set_platform(args.platform)
        return run(args.command, config, meshes)

    return exit_code(command)


def _regenerate_by_url(config: TrainConfig) -> int:
    """Runs `regenerate` on running servers: the exit code."""
    from dflash_jax.training.regenerate import regenerate
    from dflash_jax.training.remote import RemoteTarget

    def tell(line: str) -> None:
        # JAX, which the other `tell` asks, takes the devices of this machine.
        print(line, file=sys.stderr, flush=True)

    path, key = config.directory / "regenerated.jsonl", os.environ.get("DFLASH_API_KEY") or "EMPTY"
    with RemoteTarget(config.urls, config.slots, key) as target:
        tell(f"{len(config.urls)} servers answer with {target.model}")
        if config.target not in (None, target.model):
            tell(f"warning: --target is {config.target}, and --urls serve {target.model}, whose answers these are")
        count = regenerate(replace(config, target=config.target or target.model), target, path, tell)
    tell(f"{count} lines have answers in {path}")
    return 0


def check_files(command: str, config: TrainConfig) -> None:
    """Raises InputError for a file that cannot be read, and OSError for an output that cannot be written."""
    files = {"data": config.data, "held_out": (config.held_out,), "draft_config": (config.draft_config,)}
    for option in files.keys() & options_of(command):
        for name in filter(None, files[option]):
            try:
                open(name, "rb").close()
            except OSError as e:
                raise InputError(f"{option} {name} cannot be read: {e.strerror}") from None
    if command in ("fit", "regenerate"):
        config.directory.mkdir(parents=True, exist_ok=True)


def run(command: str, config: TrainConfig, meshes: dict[str, str]) -> int:
    """Runs one command of `train`: the exit code."""
    import jax

    if find_spec("grain") is None:
        raise InputError('training needs more packages: pip install "dflash-jax[train]"')
    if command in ("regenerate", "cache", "fit", "tokens") and not config.data:
        raise InputError(f"{command} needs --data: files of JSON lines")
    check_files(command, config)
    if command == "regenerate" and config.urls:
        return _regenerate_by_url(config)
    if config.mesh is None:
        config = replace(config, mesh=mesh_for(meshes, jax.devices()[0].device_kind, jax.device_count()))
    if command == "regenerate":
        with starting():
            from dflash_jax.frontend.llm import LLM
            from dflash_jax.training.regenerate import regenerate

        # What is wrong is found before the target is loaded.
        SamplingParams(temperature=config.temperature, max_tokens=config.max_new_tokens)
        # Prompts that have little in common: to keep their beginnings costs more than it spares.
        options: dict[str, Any] = {"dtype": config.dtype, "mesh": config.mesh, "slots": config.slots, "prefix_bytes": 0}
        options |= {"draft_revision": config.draft_revision, **config.target_options}
        # As many images and videos as a conversation has room for.
        options["limit_mm_per_prompt"] = dict.fromkeys(("image", "video"), MOST_MEDIA)
        llm = LLM(config.target, config.draft, **options)
        path = config.directory / "regenerated.jsonl"
        with llm.leading() as leads:
            if leads:
                count = regenerate(config, llm, path, tell)
                tell(f"{count} lines have answers in {path}")
        return 0
    with starting():
        from dflash_jax.training import features
        from dflash_jax.training import run as training
        from dflash_jax.training.draft_vocabulary import write_draft_tokens
        from dflash_jax.training.evaluation import evaluate
        from dflash_jax.training.locks import locked_by_first
        from dflash_jax.training.pair import open_pair

    if command == "fit":
        reached, last = training.fit(config, tell)
        return 0 if reached == last else TRY_AGAIN
    if command == "cache":
        if config.features is None:
            raise InputError("cache needs --features: a directory to write to")
        pair = open_pair(config)
        with locked_by_first(Path(config.features) / "cache.lock", config.features):
            features.write(config, pair.rows(config, tell), pair, tell)
    elif command == "export":
        training.export(config, tell)
    elif command == "tokens":
        write_draft_tokens(config, tell)
    else:
        results = evaluate(config, tell)
        if results is not None:
            print(json.dumps(results, indent=1))
    return 0

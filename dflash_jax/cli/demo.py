"""A question, answered with a drafter and without it: which tokens were drafted, and what that saved."""

import argparse
from dataclasses import dataclass
from functools import partial

from dflash_jax.cli.draft_marks import draft_marks
from dflash_jax.cli.generate import tell, write
from dflash_jax.errors import InputError
from dflash_jax.options.generate import command_parser
from dflash_jax.options.option import option
from dflash_jax.parallel.devices import set_platform
from dflash_jax.process import exit_code
from dflash_jax.progress import starting
from dflash_jax.sampling_params import SamplingParams

# Answered correctly and briefly by greedy decoding, and well drafted: 2.3 tokens a round of 4.
QUESTION = "Write a Python function that checks whether a string is a palindrome."
# Of the bundled pair, which continues Python.
BEGINNING = "def read_config(path):"
MAX_TOKENS = 160


DESCRIPTION = f"""{__doc__} The model is SmolLM2-135M-Instruct, downloaded once (93 MB) into the user's cache
directory, with the drafter of this package; without a connection, the bundled pair of tiny models."""


@dataclass(frozen=True)
class DemoOptions:
    """The options that only `dflash demo` has."""

    prompt: str | None = option(None, f"the question (default: {QUESTION})", "TEXT")
    bundled: bool = option(False, "the bundled pair, which continues Python: no download")


make_parser = partial(command_parser, "demo", DESCRIPTION, DemoOptions, ("platform", "kernels"))


def open_pair(is_bundled: bool, kernels: str):
    """The `LLM` of the demo, and whether it is the bundled pair."""
    from dflash_jax.checkpoint.smollm2 import NAME, smollm2_or_bundled
    from dflash_jax.frontend.llm import LLM

    target = None
    if not is_bundled:
        try:
            target = smollm2_or_bundled(tell)
        except InputError as e:
            tell(f"{' '.join(str(e).split())}: the bundled pair of tiny models instead of {NAME}")
    return LLM(target, prefix_bytes=0, kernels=kernels), target is None


def duration(seconds: float) -> str:
    """Seconds as text, in milliseconds where that is shorter."""
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.0f} ms"


def last_line(measured, legend: str) -> str:
    """What the marks mean, and what drafting saved."""
    from dflash_jax.frontend.compare import first_difference

    drafted, plain = measured.drafted, measured.plain
    at = first_difference(plain.token_ids, drafted.token_ids)
    same = f"the same {len(plain.token_ids)} tokens" if at is None else f"the tokens part at token {at}"
    words = f"{legend} = guessed by the drafter and confirmed by the model. " if legend else ""
    seconds = f"Plain {duration(plain.timings.decode_s)}, drafted {duration(drafted.timings.decode_s)}"
    return f"{words}{seconds}: {measured.speedup:.1f} times as fast, {same}"


def run(args: argparse.Namespace) -> int:
    """Runs the demo: the exit code."""
    if args.prompt == "":
        raise InputError("the prompt is empty: it must have at least one token")
    with starting():
        set_platform(args.platform)
        from dflash_jax.frontend.compare import measure_drafting, why_plain

    llm, is_bundled = open_pair(args.bundled, args.kernels)
    if is_bundled:
        # Greedy text of the tiny pair repeats itself.
        text = prompt = args.prompt or BEGINNING
        params = SamplingParams(temperature=0.7, seed=5, max_tokens=MAX_TOKENS)
    else:
        text = args.prompt or QUESTION
        prompt = llm.encode_chat([{"role": "user", "content": text}])
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    llm.check([prompt], params)
    marks, titles = draft_marks(), {True: "with the drafter", False: "the same, plainly"}
    write(f"> {text}\n")

    def watch(is_drafted: bool, number: int, piece) -> None:
        """Shows the first measured run of each side."""
        if number != 1:
            return
        if title := titles.pop(is_drafted, None):
            write(f"\n{title}:\n{text if is_bundled else ''}")
        write((marks.marked(piece.segments) if is_drafted else piece.text) + ("\n" if piece.finish_reason else ""))

    (measured,) = measure_drafting(llm, [prompt], params, watch=watch)
    write(f"\n{last_line(measured, marks.legend)}\n")
    if reason := why_plain(llm, [measured]):
        write(f"Commands decode plainly with this pair here: {reason}\n")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return exit_code(lambda: run(make_parser().parse_args(argv)))

"""Text from a target and a DFlash drafter. Text goes to stdout, everything else to stderr."""

import errno
import json
import os
import sys
from collections import Counter

from dflash_jax import progress
from dflash_jax.cli.draft_marks import draft_marks
from dflash_jax.errors import InputError
from dflash_jax.options.generate import make_parser
from dflash_jax.options.shared import take_model
from dflash_jax.options.systems import SAMPLING, llm_keywords, with_config
from dflash_jax.parallel.devices import set_platform
from dflash_jax.process import exit_code
from dflash_jax.progress import starting
from dflash_jax.sampling_params import SamplingParams

# No call of a device takes less: a prompt of one token, which is not prefilled, shows no rate.
SHORTEST_S = 1e-4


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


def covered(spans) -> float:
    """Seconds that are in at least one of (start, end)."""
    total, upto = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, upto))
        upto = max(upto, end)
    return total


def with_rate(tokens: int, seconds: float, note: str = "", of: int | None = None) -> str:
    """A count of tokens and their rate; no rate where ``seconds`` is too short to measure or no token took it.

    Args:
        tokens: The tokens that are counted.
        seconds: The time that ``of`` of them took.
        note: Follows the count.
        of: The tokens that took the time; None: all.
    """
    timed = tokens if of is None else of
    count = f"{tokens} token{'' if tokens == 1 else 's'}{note}"
    return f"{count}, {timed / seconds:.0f} tok/s" if timed and seconds >= SHORTEST_S else count


def statistics(llm, device: str, completions: list) -> str:
    """The line at the end: rates exclude compilation."""
    prompt = sum(len(c.prompt_ids) for c in completions)
    known = sum(c.cached_tokens for c in completions)
    new = sum(len(c.token_ids) for c in completions)
    prefill = covered((c.timings.admitted, c.timings.prefilled) for c in completions)
    decode = covered((c.timings.prefilled, c.timings.finished) for c in completions)
    lengths = [n for c in completions for n in c.acceptance_lengths]
    line = f"{device} {llm.dtype} | prompt "
    line += with_rate(prompt, prefill, f" ({known} known)" if known else "", prompt - known)
    line += f" | decode {with_rate(new, decode)}"
    if any(n > 1 for n in lengths):
        histogram = " ".join(f"{n}:{c}" for n, c in sorted(Counter(lengths).items()))
        line += f" | acceptance length {sum(lengths) / len(lengths):.2f} in {len(lengths)} rounds ({histogram})"
    size = llm.loaded_bytes / 1e9
    return f"{line} | compiled in {llm.compile_s:.1f} s | loaded {size:.2g} GB at {size / llm.load_s:.2g} GB/s"


def write(text: str) -> None:
    """Writes to stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def tell(line: str) -> None:
    """Writes a line to stderr."""
    print(line, file=sys.stderr, flush=True)


def write_piece(llm, piece, show_drafts: bool) -> None:
    """Writes a piece of text to stdout, and the end of the line after the last one."""
    progress.hide()
    if llm.tokenizer is None:
        write("".join(f"{token} " for token in piece.token_ids))
    elif not show_drafts:
        write(piece.text)
    else:
        write(draft_marks().marked(piece.segments))
    if piece.finish_reason:
        write("\n")
        # What follows may compile: another prompt, or the side of a comparison without the drafter.
        progress.show()


def stream_text(llm, prompt, params, show_drafts: bool):
    """Streams one prompt's text to stdout and returns its Completion."""
    from dflash_jax.frontend.sequence import Piece

    for event in llm.pieces(prompt, params):
        if not isinstance(event, Piece):
            return event
        write_piece(llm, event, show_drafts)
    raise AssertionError("there is a completion at the end")


def compare(llm, prompts: list, params, args) -> tuple[list, list[dict], bool]:
    """Continues prompts with the drafter and without it, and measures both.

    Returns:
        Completions with the drafter, what --json adds for each, and whether all tokens are equal or part at a tie.
    """
    from dflash_jax.frontend.compare import REPEATS, divergence, measure_drafting, tokens_per_s, why_plain

    def watch(is_drafted, number, piece):
        if is_drafted and number == 0:
            write_piece(llm, piece, args.show_drafts)

    comparisons = measure_drafting(llm, prompts, params, is_batched=args.json, watch=None if args.json else watch)
    extras, good = [], True
    for measured in comparisons:
        drafted, plain = measured.drafted, measured.plain
        parting = divergence(llm, drafted.prompt_ids, plain.token_ids, drafted.token_ids, params)
        verdict = "equal tokens" if parting is None else (
            f"tokens part at new token {parting.at}: {parting.expected} without the drafter, {parting.actual} with it, "
            f"margin {parting.margin:.2g}{' (a tie)' if parting.is_tie else ''}"
        )  # fmt: skip
        good = good and (parting is None or llm.dtype != "float32" or parting.is_tie)
        # A parting changes the length: what is compared are tokens a second.
        rates = tokens_per_s(drafted), tokens_per_s(plain)
        tell(
            f"compare: block size {measured.block_size}: {rates[0]:.0f} against {rates[1]:.0f} tokens/s, "
            f"{measured.speedup:.2f} times as fast (median of {REPEATS} runs); {verdict}"
        )
        comparison = {"block_size": measured.block_size, "repeats": REPEATS}
        comparison |= {"tokens_per_s": rates[0], "baseline_tokens_per_s": rates[1]}
        baseline = {"token_ids": plain.token_ids, "decode_s": plain.timings.decode_s}
        equal = {"equal": parting is None, "speedup": measured.speedup}
        extras.append({"baseline": baseline, **equal, "comparison": comparison})
    if reason := why_plain(llm, comparisons):
        tell(f'compare: block size "auto" decodes plainly here: {reason}')
        for extra in extras:
            extra["comparison"]["why_plain"] = reason
    return [measured.drafted for measured in comparisons], extras, good


def as_json(completion, extra: dict) -> str:
    """A completion as a JSON object, with the keys of ``extra``."""
    c = completion
    value = {
        "prompt_ids": c.prompt_ids,
        "token_ids": c.token_ids,
        "text": c.text,
        "finish_reason": c.finish_reason,
        "acceptance_lengths": c.acceptance_lengths,
    }
    if c.logprobs is not None:
        value["logprobs"] = [{**entry, "top": {str(k): v for k, v in entry["top"].items()}} for entry in c.logprobs]
    value["timings"] = {k: getattr(c.timings, k) for k in ("prefill_s", "decode_s", "compile_s")}
    return json.dumps({**value, **extra})


def system_messages(args) -> list[dict]:
    """The system message, if there is one."""
    return [{"role": "system", "content": args.system}] if args.system is not None else []


def media_prompt(llm, text: str | list[int], args) -> dict:
    """A prompt of one user message, with its images and videos before the text."""
    from dflash_jax.frontend.media import by_kind
    from dflash_jax.media.parts import MediaPart

    llm.media_reader()
    parts = [MediaPart("image", source, "--image") for source in args.image]
    parts += [MediaPart("video", source, "--video") for source in args.video]
    content = [*({"type": part.kind} for part in parts), {"type": "text", "text": text}]
    ids = llm.encode_chat([*system_messages(args), {"role": "user", "content": content}], args.thinking)
    return {"prompt_token_ids": ids, "multi_modal_data": by_kind(parts)}


def run(args, system) -> int:
    """Continues the prompts: the exit code."""
    prompts = read_prompts(args)
    has_media = bool(args.image or args.video)
    if args.compare and has_media:
        raise InputError("--compare cannot judge a tie after an image or a video: leave out one of them")
    if args.json and args.show_drafts:
        raise InputError("--show-drafts colours text, --json has none: give one of them")
    if args.logprobs is not None and not args.json:
        raise InputError("--logprobs is shown with --json only: add --json")
    if args.distributed:
        from dflash_jax.parallel import distributed

        distributed.start()
    with starting():
        device = set_platform(args.platform)
        from dflash_jax.frontend.llm import LLM
    if args.distributed:
        distributed.one_voice()

    params = SamplingParams(
        **{name: getattr(args, name) for name in SAMPLING},
        logit_bias=dict(args.logit_bias),
        seed=args.seed if args.seed is not None else int.from_bytes(os.urandom(4), "little"),
        max_tokens=args.max_new_tokens,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
        logprobs=args.logprobs,
    )
    keywords = llm_keywords(args, system)
    if len(prompts) == 1 and args.prefix_bytes is None:
        # It has no other prompt to share a prefix with.
        keywords["prefix_bytes"] = 0
    llm = LLM.unloaded(**keywords)
    prompts = prepared(llm, prompts, params, args)
    llm.load()
    with llm.leading() as leads:
        return answer(llm, prompts, params, args, device) if leads else 0


def prepared(llm, prompts: list, params, args) -> list:
    """The prompts as `LLM.generate` takes them, but for images and videos. Raises InputError where it would."""
    if args.compare and llm.largest_block == 1:
        raise InputError("--compare compares with and without a drafter: give --draft")
    if args.show_drafts and llm.tokenizer is None:
        raise InputError("--show-drafts colours text, and this checkpoint has no tokenizer: leave it out")
    if args.image or args.video:
        if llm.config.vision is None or args.language_model_only:
            llm.media_reader()
        for option, sources in (("--image", args.image), ("--video", args.video)):
            if missing := [each for each in sources if ":" not in each and not os.path.exists(each)]:
                raise InputError(f"{option}: {missing[0]!r}: {os.strerror(errno.ENOENT)}")
        return prompts
    if args.chat:
        given = system_messages(args)
        prompts = [llm.encode_chat([*given, {"role": "user", "content": p}], args.thinking) for p in prompts]
    llm.check(prompts, params)
    return prompts


def answer(llm, prompts: list, params, args, device: str) -> int:
    """Continues the prompts on a model: the exit code."""
    if args.image or args.video:
        prompts = [media_prompt(llm, prompts[0], args)]
        llm.check(prompts, params)
    extras, good = [{}] * len(prompts), True
    if args.compare:
        completions, extras, good = compare(llm, prompts, params, args)
    elif args.json:
        completions = llm.generate(prompts, params)
    else:
        completions = [stream_text(llm, prompt, params, args.show_drafts) for prompt in prompts]
    if args.json:
        for completion, extra in zip(completions, extras, strict=True):
            write(as_json(completion, extra) + "\n")
    tell(statistics(llm, device, completions))
    return 0 if good else 1


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""

    def command() -> int:
        args, system = with_config(make_parser(), argv)
        take_model(args)
        return run(args, system)

    return exit_code(command)

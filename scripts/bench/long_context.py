"""Prefill, decoding and memory by length of the context: plain, and drafted with and without a window of the context.

    python scripts/bench/long_context.py [--target DIR --draft DIR] [--contexts 1024 8192 32768] [--windows 1024 256]
                                         [--json FILE]
    python scripts/bench/long_context.py --predict [NAME ...] [--devices h200 b200]

Without --target: the bundled pair, whose positions are raised; `scripts/bundled/make_tiny_pair.py long-target
long-drafter` trains it further on long rows. Prompts are cuts of the standard library's held-out files. Those of all
lengths end at the same places, so that acceptance lengths are of the same beginnings. Each case runs once to compile
and to warm up; then, in each of --runs runs, every case has the prompt of the run at every length. Seconds are medians
over the runs, on the engine's clock, which stands still during compilation.

With --predict nothing runs: it writes what rounds of published systems are predicted to take, one sequence at a time.
Bytes are those of `dflash plan`. What a layer takes beyond its bytes, the bandwidth as a share of the maker's, and the
share of it at which rounds read their context are those of the H200's record of Qwen3.6-35B-A3B, for other models and
cards, too.
"""

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import LLM, SamplingParams
from dflash_jax.benchmarking.store import read_record
from dflash_jax.decoding.state import is_kv_cache
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.executables import Executables
from dflash_jax.engine.request import Request
from dflash_jax.errors import InputError
from dflash_jax.models.drafting import DraftWindow, together
from dflash_jax.models.packing import unpack_weights
from dflash_jax.options.parser import Parser
from dflash_jax.options.systems import read_system
from dflash_jax.parallel.devices import DEVICES, device_of_text
from dflash_jax.parallel.sharding import Layout
from dflash_jax.planner import Shapes, make_plan, read_shapes
from dflash_jax.process import exit_code
from dflash_jax.training.corpus import standard_library
from tools.bundled_pair import with_positions
from tools.equality import TIE
from tools.token_runs import margin


@dataclass(frozen=True)
class Case:
    """How requests are run.

    Attributes:
        block_size: Tokens that a round may yield; 1 is plain decoding, which leaves the drafter out.
        window: Last positions of the context that the drafter sees; None: as its layers do.
        chunk: Tokens of a chunk of prefill at most; None: as the platform's default is.
    """

    block_size: int = 1
    window: int | None = None
    chunk: int | None = None

    def __str__(self) -> str:
        """As a row of the table names it."""
        drafting = "plain" if self.block_size == 1 else f"blocks of {self.block_size}"
        window = "" if self.window is None else f", window of {self.window:,}"
        return drafting + window + ("" if self.chunk is None else f", chunks of {self.chunk}")


@dataclass(frozen=True)
class Setup:
    """The engine of a case.

    Attributes:
        case: The case.
        engine: Its engine, of one slot.
        target_page: Bytes of a page of the target, in caches that keep all positions and in those with a window.
        draft_page: The same of the drafter.
    """

    case: Case
    engine: Engine
    target_page: tuple[int, int]
    draft_page: tuple[int, int]

    def kv_bytes(self, pages: tuple[int, int]) -> dict[str, int]:
        """Bytes of target and drafter in so many pages of both kinds."""
        sizes = {"target_kv_bytes": self.target_page, "draft_kv_bytes": self.draft_page}
        return {name: sum(n * size for n, size in zip(pages, page, strict=True)) for name, page in sizes.items()}


@dataclass(frozen=True)
class Sample:
    """A request that was run.

    Attributes:
        prefill_s: Seconds from its slot to the end of prefill.
        decode_s: Seconds from there to its last token.
        host_s: Seconds of the host in both, without those of waiting for the device.
        tokens: New tokens.
        rounds: Rounds of decoding.
        pages: The most pages that it had, of both kinds.
    """

    prefill_s: float
    decode_s: float
    host_s: float
    tokens: list[int]
    rounds: int
    pages: tuple[int, int]

    @property
    def tokens_per_s(self) -> float:
        """Of decoding."""
        return len(self.tokens) / self.decode_s


# What is predicted: systems, devices, contexts and block sizes.
SYSTEMS, CARDS = ("qwen3.6-35b-a3b", "qwen3.6-27b"), ("h200", "b200")
LONG, BLOCKS = (8192, 32768, 65536, 131072), (4, 8, 16)
# A record, its system, card and contexts; and the share of the bandwidth at which attention is to read a context.
RECORD = Path(__file__).parents[2] / "benchmarks/decode-h200-qwen3.6-35b-a3b-triton.json"
RECORDED, RECORDED_CONTEXTS, AIM = ("qwen3.6-35b-a3b", "h200"), (2048, 8192), 0.7
# By length of the prompt and case, one for each set of prompts.
Samples = dict[tuple[int, Case], list[Sample]]


def cases_of(block_size: int, windows: Sequence[int], chunks: Sequence[int]) -> list[Case]:
    """Plain decoding first, then drafted without and with windows, then plain decoding with smaller chunks."""
    drafted = [Case(block_size, window) for window in (None, *sorted(windows, reverse=True))]
    return [Case(), *drafted, *(Case(chunk=chunk) for chunk in chunks)]


def cuts(stream: Sequence[int], lengths: Sequence[int], count: int) -> list[dict[int, list[int]]]:
    """``count`` sets of prompts by length; those of a set end at the same place of the stream.

    Raises:
        InputError: The stream is shorter than the longest prompt.
    """
    longest = max(lengths)
    if len(stream) < longest:
        raise InputError(f"contexts: the held-out files have {len(stream):,} tokens, and {longest:,} are asked for")
    ends = np.linspace(longest, len(stream), count).astype(int).tolist()
    return [{length: list(stream[end - length : end]) for length in lengths} for end in ends]


def page_bytes(caches) -> tuple[int, int]:
    """Bytes of a page, in caches that keep all positions and in those with a window."""
    sizes = {False: 0, True: 0}
    for cache in filter(is_kv_cache, jax.tree.leaves(caches, is_leaf=is_kv_cache)):
        # Keys and values have the same shape.
        sizes[cache.window is not None] += 2 * prod(cache.k.shape[1:]) * cache.k.dtype.itemsize
    return sizes[False], sizes[True]


def set_up(llm: LLM, case: Case, capacity: int) -> Setup:
    """An engine for a case."""
    programs = llm.plain_programs
    if case.block_size > 1:
        # Programs depend on the window.
        programs = Executables(llm.target, together(llm.drafters))
        llm = llm.with_programs(programs)
        llm.draft_window = DraftWindow(case.window)
    engine = llm.new_engine(programs, 1, capacity, max_num_batched_tokens=case.chunk)
    return Setup(case, engine, page_bytes(engine.runner.state.target), page_bytes(engine.runner.state.draft))


def run(setup: Setup, prompt: list[int], params: SamplingParams) -> Sample:
    """Runs one request alone."""
    engine, request = setup.engine, Request(prompt, params, block_size=setup.case.block_size)
    before, rounds, most = engine.statistics.host_s, 0, (0, 0)
    engine.submit(request)
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                raise event.error
            rounds += len(event.yielded)
        if request.is_resident:
            full, windowed = engine.pages.counts(request.slot)
            most = max(most[0], full), max(most[1], windowed)
    times = request.times
    seconds = times.prefilled - times.admitted, times.finished - times.prefilled
    return Sample(*seconds, engine.statistics.host_s - before, request.tokens, rounds, most)


def measure(setups: list[Setup], prompts: list[dict[int, list[int]]], params: SamplingParams) -> Samples:
    """Runs each case once to warm up, then all cases with each prompt in turn."""
    for setup in setups:
        run(setup, prompts[0][min(prompts[0])], params)
    samples: Samples = {}
    for number, by_length in enumerate(prompts):
        for length, prompt in by_length.items():
            for setup in setups:
                sample = run(setup, prompt, replace(params, seed=number))
                samples.setdefault((length, setup.case), []).append(sample)
    return samples


def parting(expected: list[int], tokens: list[int]) -> int | None:
    """The first place where tokens differ; None where they are equal."""
    pairs = enumerate(zip(expected, tokens, strict=True))
    return next((i for i, (a, b) in pairs if a != b), None)


def rows_of(
    samples: Samples, setups: list[Setup], margin_at: Callable[[int, int, list[int], int], float]
) -> list[dict]:
    """A row for each length and case.

    Args:
        samples: From `measure`.
        setups: Its cases.
        margin_at: (length, number of the prompt, plain tokens, place) → how decided the target was there.
    """
    rows, by_case = [], {setup.case: setup for setup in setups}
    for (length, case), found in samples.items():
        plain, partings = samples[length, Case()], []
        for number, (right, sample) in enumerate(zip(plain, found, strict=True)):
            if (at := parting(right.tokens, sample.tokens)) is not None:
                partings.append({"prompt": number, "at": at, "margin": margin_at(length, number, right.tokens, at)})
        prefill_s, rate = (median(getattr(s, name) for s in found) for name in ("prefill_s", "tokens_per_s"))
        count = sum(len(s.tokens) for s in found)
        rows.append(
            {
                "context": length,
                "case": str(case),
                "block_size": case.block_size,
                "window": case.window,
                "chunk": case.chunk,
                "prefill_s": prefill_s,
                "prefill_tokens_per_s": length / prefill_s,
                "decode_tokens_per_s": rate,
                "times_plain": rate / median(s.tokens_per_s for s in plain),
                "acceptance_length": count / sum(s.rounds for s in found),
                "host_s": median(s.host_s for s in found),
                "new_tokens": count,
                **by_case[case].kv_bytes((max(s.pages[0] for s in found), max(s.pages[1] for s in found))),
                "equal": len(found) - len(partings),
                "prompts": len(found),
                "partings": partings,
            }
        )
    return rows


def pools_of(setups: list[Setup]) -> list[dict]:
    """Bytes that each case's engine, of one slot, has for all its pages."""
    pages = [(setup, setup.engine.runner.pages) for setup in setups]
    return [{"case": str(setup.case), "pages": list(n), **setup.kv_bytes(n)} for setup, n in pages]


def figures(llm: LLM, args) -> tuple[list[dict], list[dict]]:
    """What `rows_of` and `pools_of` give for a pair and the arguments of the command line."""
    if llm.drafter is None:
        raise InputError("draft: there is no drafter to measure: give --draft with --target")
    llm.limits.check_block_size(args.block_size)
    capacity = max(args.contexts) + args.new_tokens
    if capacity > llm.max_len:
        raise InputError(f"contexts {args.contexts}: with {args.new_tokens} new tokens, {llm.max_len} is the most")
    stream = [token for document in standard_library()[1] if document.text for token in llm.encode(document.text)]
    prompts = cuts(stream, sorted(set(args.contexts)), args.runs)
    sampling = SamplingParams(temperature=args.temperature, max_tokens=args.new_tokens, ignore_eos=True, seed=0)
    params = llm.defaults.fill(sampling)
    setups = [set_up(llm, case, capacity) for case in cases_of(args.block_size, args.windows, args.chunks)]

    def margin_at(length: int, number: int, tokens: list[int], at: int) -> float:
        request = Request(prompts[number][length], replace(params, seed=number))
        request.tokens = tokens
        return margin(unpack_weights(llm.target), request, at)

    return rows_of(measure(setups, prompts, params), setups, margin_at), pools_of(setups)


def equality(row: dict) -> str:
    """How many texts are plain decoding's; those that part do so at ties, or it says so."""
    text = f"{row['equal']} of {row['prompts']}"
    margins = [parting["margin"] for parting in row["partings"]]
    if not margins:
        return text
    return text + (", others part at ties" if max(margins) < TIE else f", NOT a tie: {max(margins):.2g}")


def tables(rows: list[dict], pools: list[dict]) -> str:
    """Both tables in Markdown."""
    heads = ["context", "", "prefill, s", "tokens/s", "decoding, tokens/s", "of plain", "acceptance length"]
    heads += ["keys and values of the target, MB", "of the drafter, MB", "tokens are plain decoding's"]
    lines = [f"| {' | '.join(heads)} |", "| ---: | --- |" + " ---: |" * (len(heads) - 3) + " --- |"]
    for row in rows:
        is_plain = row["block_size"] == 1
        cells = [
            f"{row['context']:,}",
            row["case"],
            f"{row['prefill_s']:.2f}",
            f"{row['prefill_tokens_per_s']:,.0f}",
            f"{row['decode_tokens_per_s']:,.0f}",
            "" if is_plain else f"{row['times_plain']:.2f} ×",
            "" if is_plain else f"{row['acceptance_length']:.2f}",
            f"{row['target_kv_bytes'] / 1e6:.2f}",
            "" if is_plain else f"{row['draft_kv_bytes'] / 1e6:.2f}",
            "" if row["case"] == "plain" else equality(row),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| pages of an engine of one slot | target, MB | drafter, MB |", "| --- | ---: | ---: |"]
    for pool in pools:
        sizes = [f"{pool[name] / 1e6:.2f}" for name in ("target_kv_bytes", "draft_kv_bytes")]
        lines.append(f"| {pool['case']} | {' | '.join(sizes)} |")
    return "\n".join(lines) + "\n"


def bytes_of_round(shapes: Shapes, block: int, context: int, window: int | None = None) -> tuple[float, float]:
    """Bytes that a round of one sequence reads and writes: without a context, and of the context."""

    def all_bytes(context: int) -> float:
        # The time at a byte a second.
        device = replace(DEVICES["h200"], bandwidth=1.0)
        options = {"dtype": jnp.bfloat16, "slots": 1, "max_len": shapes.target.max_positions, "block": block}
        options |= {"context": context, "acceptance_length": 1.0, "draft_window_size": window}
        plan = make_plan(shapes, Layout(), device, **options)
        return 1 / plan["floor_tokens_per_s" if block > 1 else "floor_tokens_per_s_autoregressive"]

    empty = all_bytes(0)
    return empty, all_bytes(context) - empty


def system_shapes(name: str) -> Shapes:
    """The published configs of a system."""
    paths = read_system(name).shapes
    if "draft" not in paths:
        raise InputError(f"--predict {name}: it has no drafter's config")
    return read_shapes(str(paths["target"]), str(paths["draft"]))


@dataclass(frozen=True)
class RoundModel:
    """What rounds take, from the H200's record.

    Attributes:
        bandwidth: The measured bandwidth, as a share of the maker's.
        context: The share of the measured bandwidth at which a round reads its context.
        layer_s: Seconds of a layer beyond its bytes, in a plain step and in a round.
    """

    bandwidth: float
    context: float
    layer_s: tuple[float, float]

    @classmethod
    def of_record(cls) -> "RoundModel":
        """The model that gives the record's rounds: a plain step, and rounds of 16 after two contexts."""
        record, (name, card) = read_record(RECORD), RECORDED
        rounds = {key.rpartition(",")[0]: row["round_ms"] / 1e3 for key, row in record["points"].items()}
        bandwidth, shapes = 1e9 * record["about"]["bandwidth_gb_per_s"], system_shapes(name)
        near, far = (f"batch 1, width 16, context {context}" for context in RECORDED_CONTEXTS)
        read = [bytes_of_round(shapes, 16, context)[1] for context in RECORDED_CONTEXTS]
        share = (read[1] - read[0]) / (rounds[far] - rounds[near]) / bandwidth
        model = cls(bandwidth / DEVICES[card].bandwidth, share, (0.0, 0.0))
        plain = rounds[f"batch 1, width 1, context {RECORDED_CONTEXTS[0]}"]
        beyond = [
            (seconds - model.seconds(shapes, card, block, RECORDED_CONTEXTS[0])) / layers_of(shapes, block)
            for block, seconds in ((1, plain), (16, rounds[near]))
        ]
        return replace(model, layer_s=(beyond[0], beyond[1]))

    def seconds(self, shapes: Shapes, card: str, block: int, context: int, window: int | None = None) -> float:
        """Seconds of a round, or for a block of 1 of a plain step."""
        empty, read = bytes_of_round(shapes, block, context, window)
        bandwidth = self.bandwidth * DEVICES[card].bandwidth
        own = self.layer_s[block > 1] * layers_of(shapes, block)
        return empty / bandwidth + read / (self.context * bandwidth) + own


def layers_of(shapes: Shapes, block: int) -> int:
    """Layers that a round runs."""
    drafted = len(shapes.draft.layers) * shapes.draft.passes(block)[0] if shapes.draft and block > 1 else 0
    return len(shapes.target.layers) + drafted


def own_window(shapes: Shapes) -> int:
    """The largest window of the drafter's layers; where all see everything, 4,096."""
    windows = [getattr(layer, "window", None) for layer in shapes.draft.layers] if shapes.draft else []
    return max((window for window in windows if window), default=4096)


def predicted(systems: Sequence[str], cards: Sequence[str]) -> str:
    """The table of what rounds are predicted to take, in Markdown."""
    measured = RoundModel.of_record()
    heads = ["system, card", "context", "context read at", "plain, ms", *(f"round of {b}, ms" for b in BLOCKS)]
    heads += [f"pays from, {b}" for b in BLOCKS]
    heads += ["with a window", *(f"round of {b}, ms" for b in BLOCKS), "saves of 16"]
    lines = [f"| {' | '.join(heads)} |", "| --- |" + " ---: |" * (len(heads) - 1)]
    for name in systems:
        shapes = system_shapes(name)
        window = own_window(shapes)
        for card in cards:
            for context in LONG:
                for model in (measured, replace(measured, context=AIM)):
                    plain = model.seconds(shapes, card, 1, context)
                    whole, windowed = (
                        [model.seconds(shapes, card, block, context, seen) for block in BLOCKS]
                        for seen in (None, window)
                    )
                    cells = [f"{name}, {card}", f"{context:,}", f"{model.context:.0%}", f"{1e3 * plain:.2f}"]
                    cells += [*(f"{1e3 * s:.2f}" for s in whole), *(f"{s / plain:.2f}" for s in whole), f"{window:,}"]
                    cells += [*(f"{1e3 * s:.2f}" for s in windowed), f"{1 - windowed[-1] / whole[-1]:.1%}"]
                    lines.append(f"| {' | '.join(cells)} |")
    layer_us = " and ".join(f"{1e6 * s:.0f}" for s in measured.layer_s)
    about = f"Predicted, not measured: {measured.bandwidth:.0%} of the maker's bandwidth, a layer takes {layer_us} µs "
    return f"{about}beyond its bytes in a plain step and in a round.\n\n" + "\n".join(lines) + "\n"


def make_parser() -> argparse.ArgumentParser:
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", metavar="DIR", help="default: the bundled pair")
    p.add_argument("--draft", metavar="DIR")
    lengths = [1024, 8192, 32768]
    p.add_argument(
        "--contexts", nargs="+", type=int, default=lengths, metavar="N", help="tokens (default: %(default)s)"
    )
    text = "of the drafter's context, beside none (default: %(default)s)"
    p.add_argument("--windows", nargs="*", type=int, default=[1024, 256], metavar="N", help=text)
    text = "tokens of a chunk of prefill, beside the largest (default: %(default)s)"
    p.add_argument("--chunks", nargs="*", type=int, default=[256], metavar="N", help=text)
    p.add_argument("--block-size", type=int, default=8, metavar="N", help="of the drafted cases (default: %(default)s)")
    p.add_argument("--new-tokens", type=int, default=256, metavar="N", help="of each request (default: %(default)s)")
    p.add_argument("--temperature", type=float, default=0.7, metavar="T", help="default: %(default)s")
    p.add_argument("--runs", type=int, default=3, metavar="N", help="prompts of each length (default: %(default)s)")
    p.add_argument("--json", type=Path, metavar="FILE", help="writes the figures there, too")
    text = f"predicts rounds of these systems of configs/ in place of a measurement ({', '.join(SYSTEMS)})"
    p.add_argument("--predict", nargs="*", metavar="NAME", help=text)
    text = "whose rounds are predicted (default: %(default)s)"
    p.add_argument("--devices", nargs="+", type=device_of_text, default=list(CARDS), metavar="NAME", help=text)
    return p


def run_all(args) -> int:
    if args.predict is not None:
        jax.config.update("jax_platforms", "cpu")
        print(predicted(args.predict or SYSTEMS, args.devices))
        return 0
    least = {"contexts": 2, "windows": 1, "chunks": 1, "block_size": 2, "new_tokens": 2, "runs": 1}
    for name, limit in least.items():
        value = getattr(args, name)
        if any(n < limit for n in (value if isinstance(value, list) else [value])):
            raise InputError(f"{name} {value}: it must be {limit} or more")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        pair = args.target, args.draft
        if args.target is None:
            pair = tuple(map(str, with_positions(Path(directory), max(args.contexts) + args.new_tokens)))
        rows, pools = figures(LLM(*pair, prefix_bytes=0), args)
    about = {
        "pair": "bundled" if args.target is None else "given",
        "device": jax.devices()[0].device_kind,
        "cpus": len(os.sched_getaffinity(0)),
        # Figures that were measured beside other work say so.
        "load_before": round(load, 1),
        "python": platform.python_version(),
        "jax": jax.__version__,
        **{name: getattr(args, name) for name in ("temperature", "runs", "new_tokens")},
    }
    print(tables(rows, pools))
    print(f"load of the machine before the run: {load:.1f} of {about['cpus']} processors")
    if args.json:
        args.json.write_text(json.dumps({"about": about, "rows": rows, "pools": pools}, indent=1) + "\n")
    return 0


def main(argv: list[str] | None = None) -> int:
    return exit_code(lambda: run_all(make_parser().parse_args(argv)))


if __name__ == "__main__":
    raise SystemExit(main())

"""The published tables, measured on your machine.

Against our engine in this process, or with --url against any server that speaks OpenAI's chat completions (its own
method then goes by --label). Data: JSON lines {"turns": ["…"]}, a file a task, called as the published tables call it
(humaneval.jsonl, gsm8k.jsonl, …; scripts/data/benchmark_data.py writes them). What OUT.json already has is not measured
again. Results: OUT.json, OUT.md (rates, acceptance lengths, acceptance by drafter and position) and, with the extra
plot (pip install "dflash-jax[plot]"), OUT.png.
"""

import argparse
import gc
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from dflash_jax import progress
from dflash_jax.argument_checks import suggestion
from dflash_jax.benchmarking.clients import Asking, Client, EngineClient, HttpClient
from dflash_jax.benchmarking.data import read_tasks
from dflash_jax.benchmarking.store import beside, read_record, write_record
from dflash_jax.benchmarking.tables import PLAIN, key, markdown, plot
from dflash_jax.checkpoint.config_files import find_config
from dflash_jax.engine.config import BATCH_SIZES, BlockSize
from dflash_jax.errors import InputError
from dflash_jax.models.mtp_config import MtpConfig
from dflash_jax.options.generate import GenerateOptions
from dflash_jax.options.option import option
from dflash_jax.options.parser import Parser, program
from dflash_jax.options.readers import block_size
from dflash_jax.options.systems import with_config
from dflash_jax.parallel.devices import set_platform, versions
from dflash_jax.process import exit_code, run_async
from dflash_jax.progress import starting
from dflash_jax.sampling_params import SamplingParams

# Keywords of `LLM` that are flags here, and that a config may give.
MODELS = (
    *(
        "target",
        "draft",
        "revision",
        "draft_revision",
        "download_dir",
        "hf_overrides",
        "dtype",
        "quantize",
        "kv_cache_dtype",
        "activations",
        "mesh",
    ),
    *("decode_context_parallel_size", "max_len", "max_block_size", "mem_fraction", "draft_tokens"),
)


class Method(NamedTuple):
    """A way to decode.

    Attributes:
        name: Names it in tables.
        draft: "mtp" for the target's MTP head; None for the drafter that the options name.
        block_size: Of every request; None for the one above 1 that "auto" favours for one sequence.
    """

    name: str
    draft: str | None
    block_size: BlockSize | None


def method(text: str) -> Method:
    """A method of the command line: ``autoregressive``, ``dflash``, ``mtp``, or a block size, of the head after mtp."""
    if text in (PLAIN, "dflash", "mtp"):
        return Method(text, "mtp" if text == "mtp" else None, 1 if text == PLAIN else None)
    draft, block = "mtp" if text.startswith("mtp ") else None, block_size(text.removeprefix("mtp "))
    largest = MtpConfig.block_size
    if draft and block != "auto" and not 1 <= block <= largest:
        # Now, and not after the methods before it.
        raise argparse.ArgumentTypeError(
            f"{text!r}: an MTP head drafts at most {largest - 1} tokens: give 'mtp 1' to 'mtp {largest}', or 'mtp auto'"
        )
    return Method(f"mtp {block}" if draft else str(block), draft, block)


_count = partial(option, least=1)
_server = partial(option, group="a server")


@dataclass(frozen=True)
class BenchmarkOptions:
    """The options that only `dflash benchmark` has, or has in another form."""

    data: list[Path] = option(list, "tasks, a file each", "FILE", is_required=True)
    out: Path = option(Path("benchmark"), "where results go", "PATH")
    prompts: int | None = _count(None, "conversations of a task (default: all)", "N")
    concurrency: list[int] = _count(lambda: [1, 8, 16, 32], "requests at a time (default: 1 8 16 32)", "N")
    methods: list[Method] | None = option(
        None,
        f"{PLAIN}, dflash, mtp, N, 'mtp N' (blocks of N tokens) or auto (default: {PLAIN} 8 16 auto)",
        "M",
        read=method,
    )
    max_new_tokens: int = _count(4096, "of an answer, at most", "N")
    temperature: float = option(0.0, "0 is greedy")
    thinking: bool = option(True, "reason first (default: on)")
    ignore_eos: bool = option(False, "always --max-new-tokens tokens")
    seed: int = option(0, "of the draw of --prompts")
    published: str | None = option(None, "whose published figures to show (default: the config's)", "NAME")
    url: str | None = _server(None, "such as http://127.0.0.1:30000")
    model: str | None = _server(None, "default: the server's first")
    api_key: str = _server("EMPTY", "of the server")
    label: str | None = _server(None, "what the server's own method is called in the table; leaves out --methods")
    timeout_s: float = _server(3600.0, "seconds of an answer", "S", above=0)


def make_parser() -> Parser:
    """The parser of the command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    p, here = Parser(prog=program("benchmark"), description=__doc__, formatter_class=formatter), "in this process"
    p.add_options(BenchmarkOptions)
    p.add_options(GenerateOptions, MODELS, group=here, is_unset=True)
    p.add_options(GenerateOptions, ("config", "platform", "kernels"), group=here)
    p.add_aliases(GenerateOptions)
    return p


class Results:
    """OUT.json and what is made of it, written after every cell."""

    def __init__(self, out: Path, about: dict, published: dict):
        self.out, self.published, self.path = out, published, beside(out, ".json")
        recorded = read_record(self.path)
        # The command may name more tasks, methods and concurrencies than before, and other packages may be installed.
        free, was = ("command", "versions", "data"), recorded.get("about", about)
        now = {k: v for k, v in about.items() if k not in free}
        differing = [f"{k} was {was.get(k)!r}" for k, v in now.items() if was.get(k) != v]
        data = was.get("data", {})
        differing += [f"data of {task} was other" for task, v in about["data"].items() if data.get(task, v) != v]
        if differing:
            raise InputError(f"{self.path} is of another run ({', '.join(differing)}): give another --out")
        versions = dict.fromkeys([*was.get("versions", "").split("; "), about["versions"]])
        about = about | {"data": data | about["data"], "versions": "; ".join(filter(None, versions))}
        self.record = {"about": about, "cells": recorded.get("cells", {})}

    def has(self, name: str) -> bool:
        """Whether a cell was measured, and nothing failed in it."""
        cell = self.record["cells"].get(name, {})
        return "tokens_per_s" in cell and not cell.get("errors")

    def add(self, name: str, cell: dict, methods: list[str]) -> None:
        """Adds a cell, and writes the files."""
        if "failed" in cell and "tokens_per_s" in self.record["cells"].get(name, {}):
            # Part of it was measured before: nothing is lost.
            return
        self.record["cells"][name] = cell
        write_record(self.path, self.record)
        self.write(methods)

    def write(self, methods: list[str]) -> str:
        """Writes the table and the picture of ``methods`` and of those measured before: the table."""
        seen = [k.split(" | ")[2] for k in self.record["cells"]]
        shown = list(dict.fromkeys([*methods, *seen]))
        text = markdown(self.record, self.published, shown)
        beside(self.out, ".md").write_text(text, encoding="utf-8")
        plot(self.record, shown, beside(self.out, ".png"))
        return text


def open_llm(args, draft: str | None):
    """An unloaded target and drafter: (LLM, name of the device). ``draft``: in place of the one that options name."""
    with starting():
        device = set_platform(args.platform)
        from dflash_jax.frontend.llm import LLM

    given = {name: getattr(args, name) for name in MODELS if getattr(args, name) is not None}
    given |= {} if draft is None else {"draft": draft}
    if "target" in given and "draft" not in given:
        raise InputError("no drafter: give --draft")
    # Each concurrency asks the same questions: nothing may be left of their prompts.
    return LLM.unloaded(**given, kernels=args.kernels, prefix_bytes=0), device


class Systems:
    """The target with one drafter or the other, one at a time in memory."""

    def __init__(self, args, methods: Sequence[Method]):
        """Opens the one that the first method with a drafter takes; `LLM.load` loads it."""
        self._args = args
        self.llm: Any
        self._draft = next((m.draft for m in methods if m.name != PLAIN), None)
        self.llm, self.device = open_llm(args, self._draft)

    def of(self, method: Method):
        """The LLM of a method: that of before where it decodes plainly."""
        if self.llm is None or (method.name != PLAIN and method.draft != self._draft):
            # Not in memory while the other one is loaded.
            self.llm = None
            gc.collect()
            self._draft = method.draft
            self.llm, self.device = open_llm(self._args, self._draft)
        return self.llm


async def cells(results: Results, tasks: dict, methods: list[Method], args, asking: Asking, open_client) -> None:
    """Measures every cell that has no result yet.

    Args:
        results: Gets the cells.
        tasks: Conversations by task.
        methods: The methods.
        args: The command's options.
        asking: How each question is asked.
        open_client: Makes the client of a method.
    """
    from jax.errors import JaxRuntimeError

    from dflash_jax.benchmarking.cells import measure

    names = [m.name for m in methods]
    for each in methods:
        name = each.name
        left = [(t, n) for t in tasks for n in args.concurrency if not results.has(key(t, n, name))]
        if not left:
            continue
        try:
            async with open_client(each) as client:
                while left:
                    task, at_once = left[0]
                    await client.forget()
                    with progress.bar(
                        description=key(task, at_once, name), total=len(tasks[task]), unit="talk", leave=True
                    ) as bar:
                        cell = await measure(client, tasks[task], at_once, asking, bar.update)
                    results.add(key(task, at_once, name), {"block_size": client.block_size, **cell}, names)
                    left.pop(0)
        except (InputError, JaxRuntimeError) as e:
            if not results.record["cells"]:
                raise InputError(" ".join(str(e).split())[:300]) from None
            # A server that is gone, memory that is not enough: the other methods go on.
            for task, at_once in left:
                results.add(key(task, at_once, name), {"failed": " ".join(str(e).split())[:120]}, names)
        finally:
            # Its engine goes before the next one comes.
            client = None


def drafted_tokens(llm) -> int | None:
    """Tokens of the drafter's shortlist; None where it drafts all."""
    from dflash_jax.models.drafters import vocabulary_of

    listed = vocabulary_of(llm.drafter)
    return None if listed is None else len(listed.ids[...])


def capacity(llm, tasks: dict, asking: Asking) -> int:
    """Positions that a conversation may come to."""
    longest = max(
        sum(len(llm.encode(turn)) for turn in turns) + len(turns) * (asking.max_new_tokens + 64)
        for talks in tasks.values()
        for turns in talks
    )
    return min(llm.max_len, -(-longest // 256) * 256)


def run(argv: list[str]) -> int:
    """Measures the tables: the exit code, 1 where an answer failed."""
    args, _ = with_config(make_parser(), argv, MODELS)
    if args.url and (args.target or args.draft or args.config):
        raise InputError("--url measures a server: leave out --config, --target and --draft")
    if args.label and not args.url:
        raise InputError("--label names a server's own method: give --url")
    SamplingParams(temperature=args.temperature, max_tokens=args.max_new_tokens)
    published = _published(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    tasks = read_tasks(args.data, args.prompts, args.seed)
    asking = Asking(args.max_new_tokens, args.temperature, args.thinking, args.ignore_eos, args.timeout_s)
    methods = args.methods or [method(text) for text in (PLAIN, "8", "16", "auto")]
    if args.label:
        methods = [Method(args.label, None, None)]
    if isinstance(args.draft, list):
        raise InputError(f"--draft {args.draft}: give one drafter; --methods mtp measures the head beside it")
    if args.draft == "mtp" and any(m.name == "dflash" for m in methods):
        raise InputError("--methods dflash: --draft mtp names the MTP head; leave it out")
    if args.url and any(m.draft for m in methods):
        raise InputError("--methods mtp: a server has one drafter; start it with --draft mtp and give --label mtp")
    about = {"command": f"{program('benchmark')} {shlex.join(_without_key(argv))}"}
    about |= {k: v for k, v in asdict(asking).items() if k != "timeout_s"} | {
        "prompts": args.prompts,
        "seed": args.seed,
        "data": {task: blake2b(json.dumps(talks).encode(), digest_size=8).hexdigest() for task, talks in tasks.items()},
        "versions": versions(),
    }
    if args.url:
        about |= {"model": args.model or args.url, "device": "a server"}

        def open_server(method: Method) -> Client:
            return HttpClient(args.url, args.model, args.api_key, method.block_size)

        open_client = open_server
    else:
        systems = Systems(args, methods)
        llm, device = systems.llm, systems.device
        model = find_config(args.config).stem if args.config else str(args.target or "bundled pair")
        if args.methods is None:
            methods = [m for m in methods if m.block_size in (None, "auto") or m.block_size <= llm.largest_block]
        for each in methods:
            if each.block_size is not None and each.draft is None:
                llm.limits.check_block_size(each.block_size)
        if max(args.concurrency) > BATCH_SIZES[-1]:
            raise InputError(f"concurrency {max(args.concurrency)}: an engine has {BATCH_SIZES[-1]} slots at most")
        room = capacity(llm, tasks, asking)
        llm.load()
        about |= {"model": model, "device": device, "dtype": llm.dtype, "mesh": str(llm.target.layout)}
        about |= {"max_len": llm.max_len, "quantize": args.quantize, "kernels": args.kernels}
        about |= {"kv_cache_dtype": args.kv_cache_dtype, "activations": args.activations}
        about |= {"draft_tokens": drafted_tokens(llm)}
        # Systems has the only reference, so that one can make room for another.
        del llm

        def open_engine(method: Method) -> Client:
            llm = systems.of(method)
            llm.load()
            size = llm.drafting_block_size if method.block_size is None else method.block_size
            llm.limits.check_block_size(size)
            return EngineClient(llm, size, max(args.concurrency), room)

        open_client = open_engine

    results = Results(args.out, about, published)
    run_async(cells(results, tasks, methods, args, asking, open_client))
    print(results.write([m.name for m in methods]), end="")
    if find_spec("matplotlib") is None:
        picture = beside(args.out, ".png")
        print(f'{picture} is not drawn without matplotlib: pip install "dflash-jax[plot]"', file=sys.stderr)
    return 1 if any("failed" in c or c.get("errors") for c in results.record["cells"].values()) else 0


def _without_key(argv: list[str]) -> list[str]:
    """The command as anyone may read it."""
    hidden = [a.partition("=")[0] + "=KEY" if a.startswith("--api-key=") else a for a in argv]
    return ["KEY" if before == "--api-key" else a for before, a in zip(["", *hidden], hidden, strict=False)]


def _published(args) -> dict:
    """Figures of the model's card, where there are any."""
    path = Path(__file__).parents[1] / "assets/published.json"
    name = args.published or (find_config(args.config).stem.removesuffix("-fp8") if args.config else None)
    if name is None:
        return {}
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if args.published and name not in known:
        raise InputError(f"published {name!r}: {suggestion(name, known)}")
    return known.get(name, {})


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    return exit_code(lambda: run(argv))

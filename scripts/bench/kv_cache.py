"""What keys and values in FP8 cost in quality: nats per token and acceptance, beside those in the model's dtype.

    python scripts/bench/kv_cache.py [--model bundled|smollm2 | --target DIR --draft DIR] [--contexts 1024 8192 32768]
                                     [--texts 3] [--new-tokens 128] [--compare] [--json FILE]

Text is of the standard library's held-out files, cut at the same places for all lengths. Nats are those of the text's
own tokens, read in chunks through the caches; of a length they are of its positions after the next shorter length.
Acceptance lengths are of as many new tokens after a prompt of each length, greedy and at T = 0.7, in blocks of
--block-size always; --compare holds each drafted text to plain decoding's in the same caches. The bundled pair's
positions are raised.
"""

import argparse
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean, stdev

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import LLM, SamplingParams
from dflash_jax.checkpoint.smollm2 import cached_smollm2
from dflash_jax.errors import InputError
from dflash_jax.models.cache import init_cache
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.kv_scales import with_fp8_caches
from dflash_jax.options.parser import Parser
from dflash_jax.process import exit_code
from dflash_jax.training.corpus import standard_library
from tools.bundled_pair import with_positions

CHUNK = 256


@partial(jax.jit, donate_argnums=1)
def read_chunk(targets: Sequence[Decoder], caches, tokens, following, start):
    """Nats of the following tokens [targets, T], the divergence of the second target from the first and whether their
    likeliest tokens agree, [T] each, and the caches."""
    length, count, logs, after = start[None], jnp.full((1,), tokens.shape[1], jnp.int32), [], []
    for target, cache in zip(targets, caches, strict=True):
        hidden, _, cache = target.extend(tokens, cache, length, count)
        logs.append(jax.nn.log_softmax(target.logits(hidden)[0]))
        after.append(cache)
    nats = jnp.stack([-jnp.take_along_axis(x, following[:, None], 1)[:, 0] for x in logs])
    divergence = (jnp.exp(logs[0]) * (logs[0] - logs[1])).sum(-1)
    return nats, divergence, logs[0].argmax(-1) == logs[1].argmax(-1), after


def losses(targets: Sequence[Decoder], text: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `read_chunk` gives for each position of a text whose length is a multiple of a chunk and one."""
    capacity = len(text) - 1
    caches = [init_cache(t.config, 1, capacity, t.dtype, kv_dtype=t.kv_dtype) for t in targets]
    parts = []
    for start in range(0, capacity, CHUNK):
        tokens, following = (jnp.asarray(text[start + i : start + i + CHUNK], jnp.int32) for i in (0, 1))
        *found, caches = read_chunk(targets, caches, tokens[None], following, jnp.int32(start))
        parts.append([np.asarray(x) for x in found])
    nats, divergence, agreement = (np.concatenate(x, axis=-1) for x in zip(*parts, strict=True))
    return nats, divergence, agreement


def quality(target: Decoder, texts: list[list[int]], contexts: list[int]) -> list[dict]:
    """A row for each length: nats per token in both dtypes, and their difference with its standard error by texts."""
    pair = target, with_fp8_caches(target)
    found, rows = [losses(pair, text) for text in texts], []
    for first, last in zip([0, *contexts], contexts, strict=False):
        means = [[part[..., first:last].mean(-1) for part in parts] for parts in found]
        nats = np.array([m[0] for m in means])
        more = (nats[:, 1] - nats[:, 0]).tolist()
        rows.append(
            {
                "positions": [first, last],
                "tokens": (last - first) * len(texts),
                "nats": nats[:, 0].mean().item(),
                "nats_fp8": nats[:, 1].mean().item(),
                "more": mean(more),
                "more_error": stdev(more) / math.sqrt(len(more)) if len(more) > 1 else None,
                "divergence": mean(float(m[1]) for m in means),
                "agreement": mean(float(m[2]) for m in means),
            }
        )
    return rows


def acceptance(llm: LLM, texts: list[list[int]], contexts: list[int], args) -> list[dict]:
    """A row for each length and temperature."""
    rows = []
    for length in contexts:
        yielded: dict[float, list[int]] = {0.0: [], 0.7: []}
        same = dict.fromkeys(yielded, 0)
        # Of each text the tokens before its end; the second temperature finds them in the prefix cache.
        for prompt, temperature in ((text[-length - 1 : -1], t) for text in texts for t in yielded):
            params = SamplingParams(temperature=temperature, max_tokens=args.new_tokens, ignore_eos=True, seed=0)
            (drafted,) = llm.generate([prompt], params, block_size=args.block_size)
            yielded[temperature] += drafted.acceptance_lengths
            if args.compare:
                same[temperature] += llm.generate([prompt], params, block_size=1)[0].token_ids == drafted.token_ids
        for temperature, lengths in yielded.items():
            row = {"context": length, "temperature": temperature, "cache": jnp.dtype(llm.target.kv_dtype).name}
            row |= {"acceptance_length": mean(lengths), "rounds": len(lengths), "texts": len(texts)}
            rows.append(row | ({"same_as_plain": same[temperature]} if args.compare else {}))
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def tables(nats: list[dict], accepted: list[dict]) -> str:
    """Both tables in Markdown."""
    lines = ["| positions | nats | with FP8 | more | divergence | same likeliest token |", "|---|---|---|---|---|---|"]
    for row in nats:
        first, last = row["positions"]
        error = "" if row["more_error"] is None else f" ± {row['more_error']:.4f}"
        lines.append(
            f"| {first:,} to {last - 1:,} | {row['nats']:.4f} | {row['nats_fp8']:.4f} | {row['more']:+.4f}{error} | "
            f"{row['divergence']:.5f} | {row['agreement']:.2%} |"
        )
    compared = " drafted texts that are plain decoding's |" if "same_as_plain" in accepted[0] else ""
    lines += [
        "",
        f"| context | T | acceptance length | with FP8 |{compared}",
        "|---|---|---|---|" + "---|" * bool(compared),
    ]
    for row in (r for r in accepted if r["cache"] != "float8_e4m3fn"):
        key = row["context"], row["temperature"]
        other = next(r for r in accepted if (r["context"], r["temperature"]) == key and r is not row)
        cells = [f"{key[0]:,}", f"{key[1]:g}", f"{row['acceptance_length']:.2f}", f"{other['acceptance_length']:.2f}"]
        if compared:
            cells.append("; ".join(f"{r['same_as_plain']} of {r['texts']}" for r in (row, other)))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", choices=("bundled", "smollm2"), default="bundled")
    p.add_argument("--target", metavar="DIR")
    p.add_argument("--draft", metavar="DIR")
    lengths = [1024, 8192, 32768]
    p.add_argument("--contexts", nargs="+", type=int, default=lengths, metavar="N", help="default: %(default)s")
    p.add_argument("--texts", type=int, default=3, metavar="N", help="default: %(default)s")
    p.add_argument("--new-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    p.add_argument("--block-size", type=int, default=8, metavar="N", help="default: %(default)s")
    p.add_argument("--compare", action="store_true", help="each drafted text with plain decoding's")
    p.add_argument("--json", type=Path, metavar="FILE", help="writes the figures there, too")
    return p


def measure(args, pair: tuple[str | None, ...], positions: int) -> dict:
    began = time.time()
    options = {"prefix_bytes": 2**30, "slots": 1, "max_len": positions}
    llm = LLM(*pair, **options)
    stream = [token for document in standard_library()[1] if document.text for token in llm.encode(document.text)]
    longest = max(args.contexts) + 1
    ends = np.linspace(longest, len(stream), args.texts).astype(int).tolist()
    texts, contexts = [stream[end - longest : end] for end in ends], sorted(set(args.contexts))
    nats = quality(llm.target, texts, contexts)
    print(*nats, sep="\n", file=sys.stderr, flush=True)
    accepted = acceptance(llm, texts, contexts, args)
    accepted += acceptance(LLM(*pair, **options, kv_cache_dtype="fp8"), texts, contexts, args)
    device = jax.devices()[0].device_kind
    about = {"device": device, "cpus": os.cpu_count(), "python": platform.python_version(), "jax": jax.__version__}
    about |= {"model": args.target or args.model, "block_size": args.block_size, "new_tokens": args.new_tokens}
    return {"about": about | {"seconds": round(time.time() - began)}, "nats": nats, "acceptance": accepted}


def run(args) -> int:
    if any(n < CHUNK or n % CHUNK for n in args.contexts):
        raise InputError(f"contexts {args.contexts}: they must be multiples of {CHUNK}")
    positions = max(args.contexts) + args.new_tokens
    with tempfile.TemporaryDirectory() as directory:
        pair: tuple[str | None, ...] = (args.target, args.draft)
        if args.target is None and args.model == "bundled":
            pair = tuple(map(str, with_positions(Path(directory), positions)))
        elif args.target is None:
            pair = str(cached_smollm2(print)), "smollm2"
        found = measure(args, pair, positions)
    print(tables(found["nats"], found["acceptance"]))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def main(argv: list[str] | None = None) -> int:
    return exit_code(lambda: run(make_parser().parse_args(argv)))


if __name__ == "__main__":
    raise SystemExit(main())

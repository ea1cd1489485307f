"""What weights in few bits cost in quality: nats per token, and acceptance of a drafter that was trained on whole ones.

    python scripts/bench/quantize.py [--model bundled|smollm2] [--forms none int8 …] [--data FILE] [--prompts 16]
                                     [--rows 24] [--new-tokens 128] [--block-size 8] [--json FILE]

Nats are those of held-out text of the standard library, in rows of 1,024 tokens; with them the divergence from the
whole weights' distribution, and how often the likeliest token is the same. Acceptance lengths are of --new-tokens after
each prompt, greedy and at T = 0.7, in blocks of --block-size always; prompts are JSON lines {"turns": ["…"]}, as
scripts/data/benchmark_data.py writes them, or else the beginnings of the held-out text. Each drafted text is plain
decoding's, or the row says of how many it is not. The form nvfp4-fp4 is nvfp4 with activations in FP4.
"""

import argparse
import json
import os
import platform
from pathlib import Path
from statistics import mean

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import LLM, SamplingParams
from dflash_jax.checkpoint.quantize import QUANTIZE
from dflash_jax.checkpoint.smollm2 import cached_smollm2
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.packing import unpack_weights
from dflash_jax.ops.weights import QuantizedWeight, is_weight
from dflash_jax.options.parser import Parser
from dflash_jax.process import exit_code
from dflash_jax.training.corpus import standard_library

ROW = 1024
W4A4 = "nvfp4-fp4"


@jax.jit
def log_probabilities(target: Decoder, tokens: jax.Array) -> jax.Array:
    """[T, V] of a row of tokens [T]."""
    return jax.nn.log_softmax(target.logits(target(tokens[None])[0])[0])


def judge(target: Decoder, whole: Decoder, rows: np.ndarray) -> dict[str, float]:
    """Nats per token of rows [N, T + 1], divergence from ``whole``, and the share of likeliest tokens that agree."""
    nats, divergence, agreement = [], [], []
    for row in rows:
        logs, right = (log_probabilities(t, row[:-1]) for t in (target, whole))
        nats.append(-jnp.take_along_axis(logs, row[1:, None], 1).mean())
        divergence.append((jnp.exp(right) * (right - logs)).sum(-1).mean())
        agreement.append((logs.argmax(-1) == right.argmax(-1)).mean())
    found = {"nats": nats, "divergence": divergence, "agreement": agreement}
    return {name: mean(map(float, values)) for name, values in found.items()}


def accept(llm: LLM, prompts: list, args) -> dict[str, float]:
    """Acceptance lengths, greedy and at T = 0.7, and how many texts of each are not plain decoding's."""
    found: dict[str, float] = {}
    for name, temperature in (("greedy", 0.0), ("sampled", 0.7)):
        params = SamplingParams(temperature=temperature, max_tokens=args.new_tokens, seed=0)
        plain, drafted = (llm.generate(prompts, params, block_size=n) for n in (1, args.block_size))
        found[name] = mean(n for each in drafted for n in each.acceptance_lengths)
        found[f"{name}_other"] = sum(a.token_ids != b.token_ids for a, b in zip(plain, drafted, strict=True))
    return found


def table(found: list[dict]) -> str:
    """The rows in Markdown."""
    heads = ("weights", "bits", "nats per token", "more", "divergence", "same likeliest token")
    heads += ("accepted, greedy", "accepted, T = 0.7", "texts that differ")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in found:
        cells = [row["form"], f"{row['bits']:.2f}", f"{row['nats']:.4f}", f"{row['nats'] - found[0]['nats']:+.4f}"]
        cells += [
            f"{row['divergence']:.4f}",
            f"{row['agreement']:.1%}",
            f"{row['greedy']:.2f}",
            f"{row['sampled']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} | {row['greedy_other'] + row['sampled_other']} |")
    return "\n".join(lines)


def bits(target: Decoder, whole: Decoder) -> float:
    """Bits of a weight of the matrices that are quantized; those of the whole target's dtype where none is."""
    leaves = jax.tree.leaves(unpack_weights(target), is_leaf=is_weight)
    leaves = [x for x in leaves if isinstance(x, QuantizedWeight)]
    size = sum(8 * array.nbytes for x in leaves for array in jax.tree.leaves(x))
    return size / sum(np.prod(x.shape) for x in leaves) if leaves else 8.0 * jnp.dtype(whole.dtype).itemsize


def make_parser() -> argparse.ArgumentParser:
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", choices=("bundled", "smollm2"), default="bundled")
    p.add_argument("--forms", nargs="+", choices=(*QUANTIZE, W4A4), default=[*QUANTIZE, W4A4], metavar="FORM")
    p.add_argument("--data", type=Path, metavar="FILE")
    for name, default in (("prompts", 16), ("rows", 24), ("new-tokens", 128), ("block-size", 8)):
        p.add_argument(f"--{name}", type=int, default=default, metavar="N", help="default: %(default)s")
    p.add_argument("--json", type=Path, metavar="FILE", help="writes the figures there, too")
    return p


def run(args) -> int:
    pair = (str(cached_smollm2(print)), "smollm2") if args.model == "smollm2" else ()
    whole, found = LLM(*pair, max_len=2048, slots=args.prompts), []
    stream = [token for document in standard_library()[1] if document.text for token in whole.encode(document.text)]
    count = len(stream) // (ROW + 1)
    places = np.linspace(0, count - 1, min(args.rows, count)).astype(int) * (ROW + 1)
    rows = np.array([stream[i : i + ROW + 1] for i in places], np.int32)
    prompts: list = [row[:128].tolist() for row in rows[: args.prompts]]
    if args.data:
        lines = args.data.read_text(encoding="utf-8").splitlines()
        lines = lines[:: max(1, len(lines) // args.prompts)][: args.prompts]
        prompts = [whole.encode_chat([{"role": "user", "content": json.loads(x)["turns"][0]}]) for x in lines]
    for form in args.forms:
        options = {"quantize": "nvfp4", "activations": "fp4"} if form == W4A4 else {"quantize": form}
        llm = whole if form == "none" else LLM(*pair, **options, max_len=2048, slots=args.prompts)
        row = {"form": form, "bits": bits(llm.target, whole.target)}
        found.append(row | judge(llm.target, whole.target, rows) | accept(llm, prompts, args))
        print(table(found).splitlines()[-1], flush=True)
    print(table(found))
    if args.json:
        device = jax.devices()[0].device_kind
        about = {"device": device, "cpus": os.cpu_count(), "python": platform.python_version(), "jax": jax.__version__}
        about |= {name: str(value) for name, value in vars(args).items()}
        args.json.write_text(json.dumps({"about": about, "rows": found}, indent=1) + "\n", encoding="utf-8")
    return 0


def main(argv: list[str] | None = None) -> int:
    return exit_code(lambda: run(make_parser().parse_args(argv)))


if __name__ == "__main__":
    raise SystemExit(main())

"""How far the log-probabilities of drawn tokens are from those of a teacher-forced pass with the same weights.

    python scripts/bench/trainer_against_sampler.py [--target DIR] [--prompts 32] [--new-tokens 96] [--temperature 1.0]

A trainer computes log_softmax(logits / temperature) of prompt and answer in one pass, in the weights' precision and
without caches; the sampler reports what it drew from. The table has the differences of bfloat16, float32, FP8 weights
and reproducible runs, with the drafter and without, and those of `LLM.score` on the same tokens. Prompts are the
beginnings of held-out text of the standard library.
"""

import argparse
import os
import platform

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import LLM, SamplingParams
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.layers import with_backend
from dflash_jax.ops.backend import Backend
from dflash_jax.options.parser import Parser
from dflash_jax.process import exit_code
from dflash_jax.training.corpus import standard_library

PROMPT = 32
VARIANTS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, FP8 weights": {"dtype": "bfloat16", "quantize": "fp8"},
    "bfloat16, reproducible": {"dtype": "bfloat16", "reproducible": True},
}


@jax.jit
def teacher_forced(target: Decoder, tokens: jax.Array, temperature: float) -> jax.Array:
    """Log-probabilities [N, T - 1] of the tokens [N, T] after the first of each row."""
    logits = target.logits(target(tokens[:, :-1])[0])
    logs = jax.nn.log_softmax(logits.astype(jnp.float32) / temperature)
    return jnp.take_along_axis(logs, tokens[:, 1:, None], -1)[..., 0]


def compare(llm: LLM, prompts: list[list[int]], args) -> list[dict]:
    """The differences of a variant: a row with the drafter, and one without."""
    rows = []
    for drafts in (True, False):
        params = SamplingParams(
            temperature=args.temperature,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            max_tokens=args.new_tokens,
            ignore_eos=True,
            seed=0,
            logprobs=0,
            logprobs_mode="scaled_logprobs",
        )
        found = llm.generate(prompts, params, block_size=llm.largest_block if drafts else 1, progress=False)
        texts = [each.token_ids for each in found]
        sampled = np.array([[entry["logprob"] for entry in each.logprobs or ()] for each in found])
        target = with_backend(llm.target, Backend.xla())
        whole = jnp.asarray([[*each.prompt_ids, *each.token_ids] for each in found])
        trained = np.asarray(teacher_forced(target, whole, args.temperature))[:, PROMPT - 1 :]
        scored = np.array(llm.score(prompts, texts, params))
        rounds = [n for each in found for n in each.acceptance_lengths]
        rows.append({"acceptance": np.mean(rounds), "sampler": sampled - trained, "score": scored - trained})
    return rows


def make_parser() -> Parser:
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", metavar="DIR", help="a checkpoint (default: the bundled pair)")
    p.add_argument("--prompts", type=int, default=32, metavar="N")
    p.add_argument("--new-tokens", type=int, default=96, metavar="N")
    p.add_argument("--temperature", type=float, default=1.0, metavar="T")
    return p


def run(args) -> int:
    _, held_out = standard_library()
    device = jax.devices()[0].device_kind
    print(f"{args.prompts} prompts × {args.new_tokens} tokens, T = {args.temperature}; {device}, "
          f"{os.cpu_count()} processors, {platform.machine()}, jax {jax.__version__}\n")  # fmt: skip
    print("| weights | tokens a round | sampler − trainer: max | mean | score − trainer: max | mean |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, options in VARIANTS.items():
        llm = LLM(args.target, max_len=PROMPT + args.new_tokens + 16, **options)
        texts = [document.text for document in held_out if len(document.text) > 40 * PROMPT][: args.prompts]
        for row in compare(llm, [llm.encode(text)[:PROMPT] for text in texts], args):
            cells = [f"{f(np.abs(row[kind])):.1e}" for kind in ("sampler", "score") for f in (np.max, np.mean)]
            kind = "drafted" if row["acceptance"] > 1 else "plain"
            print(f"| {name}, {kind} | {row['acceptance']:.2f} | {' | '.join(cells)} |", flush=True)
    return 0


def main(argv: list[str] | None = None) -> int:
    return exit_code(lambda: run(make_parser().parse_args(argv)))


if __name__ == "__main__":
    raise SystemExit(main())

"""What XLA made of the decode loop, as JSON: loops, callbacks, compilations over a varied session, donated and copied
bytes.

    python scripts/compile/inspect_program.py [--target DIR --draft DIR] [--max-new-tokens N]
"""

import argparse
import json
import re

import jax

from dflash_jax import LLM, SamplingParams
from dflash_jax.decoding.state import Settings
from dflash_jax.ops.cache import DeltaState, KVCache
from dflash_jax.sampling_params import MAX_LOGPROBS
from tools.xla_text import ENTRY, computations, copied_bytes, shape_key


def session(llm: LLM, tokens: int) -> None:
    """A varied session: other prompts, lengths, seeds, sampling options and block sizes."""
    ids = list(range(10, 40))
    for params in (
        SamplingParams(temperature=0.0, max_tokens=tokens),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.05, seed=7, max_tokens=tokens),
        SamplingParams(
            temperature=0.5, repetition_penalty=1.2, presence_penalty=0.5, logit_bias={5: 2.0}, max_tokens=9
        ),
    ):
        for prompt in (ids[:1], ids[:7], ids):
            llm.generate([prompt], params, block_size=llm.largest_block)
    for block in range(9, llm.largest_block + 1):
        llm.generate([ids], SamplingParams(max_tokens=tokens), block_size=block)


def inspect(llm: LLM, tokens: int = 24) -> dict:
    """The figures for one LLM, after a session on it."""
    session(llm, tokens)
    programs, count = llm.programs, llm.programs.count
    settings = Settings(llm.largest_block, top_logprobs=MAX_LOGPROBS)
    state = programs.empty(1, 256, settings)
    compiled = programs.lower_decode(programs.abstract_state(1, 256, settings), 1, settings).compile()
    hlo, memory = compiled.as_text(), compiled.memory_analysis()
    # One row of three, so that no other array has the shape of a cache.
    three = programs.abstract_state(3, 256, settings)
    prefill = programs.lower_prefill(three, 1, 16).compile().as_text()
    assert hlo is not None
    assert prefill is not None
    assert memory is not None
    layers = (*state.target, *state.draft)
    kv = [x for layer in layers if isinstance(layer, KVCache) for x in (layer.k, layer.v)]
    recurrent = [layer.recurrent for layer in layers if isinstance(layer, DeltaState)]
    return {
        "outer_while_loops": sum(x.opcode == "while" for x in computations(hlo)[ENTRY].instructions.values()),
        "callbacks": len(re.findall(r'custom_call_target="[^"]*callback[^"]*"', hlo)),
        "compiled_programs": count,
        "programs": sorted({str(k[0]) for k in programs.compiled}),
        "kv_bytes": sum(x.nbytes for x in kv),
        "recurrent_bytes": sum(x.nbytes for x in recurrent),
        "state_bytes": sum(x.nbytes for x in jax.tree.leaves(state)),
        "donated_bytes": memory.alias_size_in_bytes,
        "copied_kv_bytes": copied_bytes(hlo, {shape_key(x.shape) for x in kv}),
        "copied_kv_bytes_of_prefill": copied_bytes(prefill, {shape_key((3, *x.shape[1:])) for x in kv}),
        "copied_recurrent_bytes": copied_bytes(hlo, {shape_key(x.shape) for x in recurrent}),
        "temporary_bytes": memory.temp_size_in_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default: the bundled pair")
    parser.add_argument("--draft")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    args = parser.parse_args()
    llm = LLM(args.target, args.draft) if args.target else LLM()
    print(json.dumps(inspect(llm, args.max_new_tokens), indent=2))


if __name__ == "__main__":
    main()

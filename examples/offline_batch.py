"""Answers many prompts at once, 32 at a time, each as if it were alone.

Run: python examples/offline_batch.py
"""

from dflash_jax import LLM, SamplingParams

PROMPTS = [f"def {name}(" for name in ("parse", "read_config", "clamp", "merge", "fib", "main")]


def main() -> None:
    # The bundled pair. A real one: LLM("Qwen/Qwen3.5-27B", draft="z-lab/Qwen3.5-27B-DFlash"). Without block_size the
    # engine takes what is fastest, which is plain decoding for a model as small as this one.
    llm = LLM(block_size=8)
    completions = llm.generate(PROMPTS, SamplingParams(temperature=0.7, seed=1, max_tokens=48))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        print(f"{prompt}{completion.text}")
        print(f"--- {completion.finish_reason}, {completion.mean_acceptance_length:.2f} tokens a round")


if __name__ == "__main__":
    main()

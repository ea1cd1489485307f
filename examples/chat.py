"""A conversation of two turns through the checkpoint's chat template.

Run: python examples/chat.py
"""

from dflash_jax import LLM, SamplingParams

QUESTIONS = ["Write the function `clamp`: Limit a value to a range.", "Write the function `mean`: The mean of a list."]


def main() -> None:
    llm = LLM()
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=96)
    messages: list[dict] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        (completion,) = llm.chat(messages, params, thinking=False)
        messages.append({"role": "assistant", "content": completion.text})
        print(f"> {question}\n{completion.text}\n({len(completion.prompt_ids)} prompt tokens)\n")


if __name__ == "__main__":
    main()

"""Two streams at once on one engine, for a service with asyncio of its own.

The engine knows token ids only; the tokenizer turns them into text here.
Run: python examples/async_streaming.py
"""

import asyncio

from dflash_jax import LLM, SamplingParams
from dflash_jax.engine.request import Request
from dflash_jax.engine.service import AsyncEngine
from dflash_jax.engine.warm_up import warm_up

PROMPTS = ["def f(", "class Parser:"]


async def stream(running: AsyncEngine, llm: LLM, prompt: str) -> str:
    params = llm.defaults.fill(SamplingParams(temperature=0.7, seed=1, max_tokens=32))
    request = Request(llm.encode(prompt), params, stops=llm.defaults.stops(params))
    tokens: list[int] = []
    async for event in running.submit(request):
        tokens += event.tokens
        print(f"{prompt!r}: {len(event.tokens)} tokens, {event.finish_reason or 'more to come'}")
    assert llm.tokenizer is not None
    return llm.tokenizer.decode(tokens)


async def main() -> None:
    llm = LLM(slots=2, max_block_size=8)
    engine = llm.new_engine(llm.programs, slots=2, capacity=256)
    warm_up(engine)  # compiles everything, so that no request waits for a compilation
    async with AsyncEngine(engine) as running:
        texts = await asyncio.gather(*(stream(running, llm, prompt) for prompt in PROMPTS))
    for prompt, text in zip(PROMPTS, texts, strict=True):
        print(f"{prompt}{text}\n")


if __name__ == "__main__":
    asyncio.run(main())

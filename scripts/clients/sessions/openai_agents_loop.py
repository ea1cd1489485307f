"""A tool loop of openai-agents: python openai_agents_loop.py responses|chat URL MODEL KEY TASK"""

import asyncio
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from file_tools import TOOLS
from openai import AsyncOpenAI


async def main() -> None:
    kind, url, name, key, task = sys.argv[1:]
    set_tracing_disabled(True)
    model = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}[kind]
    agent = Agent(
        "coder",
        instructions="You repair files.",
        model=model(name, AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)),
        model_settings=ModelSettings(include_usage=True),
        tools=[function_tool(tool) for tool in TOOLS],
    )
    result = Runner.run_streamed(agent, task, max_turns=20)
    async for _ in result.stream_events():
        pass
    print(result.final_output)


asyncio.run(main())

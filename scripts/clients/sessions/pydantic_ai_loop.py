"""A tool loop of pydantic-ai: python pydantic_ai_loop.py responses|chat URL MODEL KEY TASK"""

import asyncio
import sys

from file_tools import TOOLS
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


async def main() -> None:
    kind, url, name, key, task = sys.argv[1:]
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key=key)
    model = {"responses": OpenAIResponsesModel, "chat": OpenAIChatModel}[kind](name, provider=provider)
    agent = Agent(model, instructions="You repair files.", tools=TOOLS)
    print((await agent.run(task)).output)


asyncio.run(main())

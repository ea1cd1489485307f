"""Starts the server with the bundled pair, asks it with the openai client, and stops it.

Needs the extra "server" and the package openai. Run: python examples/server_and_client.py
"""

import subprocess
import sys
import time

import httpx
from openai import OpenAI
from openai.types.chat import ChatCompletionUserMessageParam

PORT = 30123
QUESTION: ChatCompletionUserMessageParam = {
    "role": "user",
    "content": "Write the function `clamp`: Limit a value to a range.",
}


def wait_until_ready(server: subprocess.Popen, url: str) -> None:
    """Waits for the end of compilation, which /ready reports."""
    while server.poll() is None:
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass  # It does not listen yet.
        time.sleep(0.5)
    raise SystemExit(f"the server ended with code {server.returncode}")


def main(port: int = PORT) -> None:
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "dflash_jax.serve", "--bundled", "--port", str(port)]
    command += ["--slots", "1", "--max-len", "256"]
    server = subprocess.Popen(command)
    try:
        wait_until_ready(server, url)
        with OpenAI(base_url=f"{url}/v1", api_key="EMPTY") as client:
            stream = client.chat.completions.create(
                model="default",
                messages=[QUESTION],
                max_tokens=64,
                temperature=0.7,
                seed=1,
                stream=True,
                stream_options={"include_usage": True},
            )
            for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    print(chunk.choices[0].delta.content, end="", flush=True)
                if chunk.usage:
                    print(f"\n{chunk.usage.completion_tokens} tokens")
    finally:
        server.terminate()  # It finishes the requests under way first.
        server.wait()


if __name__ == "__main__":
    main()

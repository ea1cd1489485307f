"""Sends a request of every kind through a router in front of two servers, and compares the answers with a server's own.

    python scripts/cluster/routers.py -- smg launch --host 127.0.0.1 --port {port} --prometheus-port {other_port} \\
        --worker-urls {urls}

Words after -- start the router; {port}, {other_port} and {urls} stand for its port, another free port and the
addresses of the servers. Starts two of `dflash serve` with the bundled pair, and prints a table of what came through.
With --kill one of the servers gets SIGKILL while it answers, and the table says how the answers under way end.
"""

import argparse
import contextlib
import json
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.server_process import ServerProcess, free_port, is_ready, machine

# --help works without it.
with contextlib.suppress(ModuleNotFoundError):
    import httpx

WORDS = ["--bundled", "--slots", "4", "--max-len", "1024", "--prefix-bytes", "0", "--platform", "cpu"]
MESSAGES = [{"role": "user", "content": "Write the function `clamp`."}]
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
PARAMETERS = {"type": "object", "properties": {"path": {"enum": ["a", "b"]}}, "required": ["path"]}
TOOL = {"type": "function", "function": {"name": "read_file", "parameters": PARAMETERS}}
# Texts that come in pieces: how many there are depends on time.
PIECES = ("text", "content", "reasoning_content", "delta", "arguments", "partial_json", "thinking")
# Times, which are equal by chance.
TIMES = ("created", "created_at", "completed_at")
REQUESTS_DONE = re.compile(r"^vllm:request_success_total\{.*\} (\S+)$", re.M)


@dataclass(frozen=True)
class Case:
    """A request.

    Attributes:
        name: What the table calls it.
        path: The endpoint.
        body: Its body; None for GET.
        streams: Whether it may stream.
    """

    name: str
    path: str
    body: dict | None = None
    streams: bool = False


COMPLETION = {"prompt": "def f(", "max_tokens": 12, "temperature": 0}
CHAT = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0, **OFF}
CASES = [
    Case("/v1/completions", "/v1/completions", COMPLETION, True),
    Case(
        "… with `regex`, `top_k`, `seed`",
        "/v1/completions",
        COMPLETION | {"regex": "[a-z]+", "top_k": 5, "seed": 1},
        True,
    ),
    Case("… of token ids", "/v1/completions", COMPLETION | {"prompt": [5, 6, 7], "return_token_ids": True}, True),
    Case("/v1/chat/completions", "/v1/chat/completions", CHAT, True),
    Case(
        "… with a tool",
        "/v1/chat/completions",
        CHAT | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60},
        True,
    ),
    Case(
        "… with a JSON schema",
        "/v1/chat/completions",
        CHAT
        | {
            "max_tokens": 60,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}},
        },
        True,
    ),
    Case("… with `logprobs`, `n`", "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2, "n": 2}),
    Case("… with `block_size`", "/v1/chat/completions", CHAT | {"block_size": 4}),
    Case("/v1/responses", "/v1/responses", {"input": "def f(", "max_output_tokens": 12, "temperature": 0}, True),
    Case("/v1/messages", "/v1/messages", {"messages": MESSAGES, "max_tokens": 12, "temperature": 0}, True),
    Case("/v1/messages/count_tokens", "/v1/messages/count_tokens", {"messages": MESSAGES}),
    Case(
        "/generate", "/generate", {"text": "def f(", "sampling_params": {"max_new_tokens": 12, "temperature": 0}}, True
    ),
    Case("/v1/chat/completions/batch", "/v1/chat/completions/batch", CHAT | {"messages": [MESSAGES, MESSAGES]}),
    Case("/tokenize", "/tokenize", {"prompt": "def f("}),
    Case("/detokenize", "/detokenize", {"tokens": [5, 6, 7]}),
    Case("/v1/models", "/v1/models"),
    Case("/model_info", "/model_info"),
    Case("/get_model_info", "/get_model_info"),
    Case("/server_info", "/server_info"),
    Case("/get_server_info", "/get_server_info"),
    Case("/health", "/health"),
    Case("/health_generate", "/health_generate"),
    Case("/flush_cache", "/flush_cache", {}),
    Case("/abort_request", "/abort_request", {"rid": "none"}),
]


def leaves(value: Any, path: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """(path, value) of everything in a JSON value that is neither object nor list."""
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(each, (*path, key))
    else:
        yield path, value


def answered(http: "httpx.Client", case: Case, stream: bool) -> dict[tuple, Any]:
    """What a client sees: the leaves of an answer, or the whole texts of a stream.

    Raises:
        RuntimeError: The answer is an error, or a stream without its end.
    """
    if case.body is None:
        response = http.get(case.path)
    else:
        body = {"model": "default"} | case.body if case.path.startswith("/v1/") else case.body
        response = http.post(case.path, json=body | ({"stream": True} if stream else {}))
    if response.status_code != 200:
        raise RuntimeError(f"{response.status_code} {' '.join(message(response.text).split())}".strip()[:160])
    if not stream:
        with contextlib.suppress(ValueError):
            return dict(leaves(response.json()))
        return {}
    events = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    if not events or (events[-1] != "[DONE]" and case.path not in ("/v1/responses", "/v1/messages")):
        raise RuntimeError("a stream without its end")
    texts: dict[tuple, str] = {}
    for event in events:
        for path, value in leaves(json.loads(event)) if event != "[DONE]" else ():
            if path[-1] in PIECES and isinstance(value, str):
                # SGLang's streams repeat the text so far.
                texts[path] = value if case.path == "/generate" else texts.get(path, "") + value
    return dict(texts)


def message(text: str) -> str:
    """The message of an error."""
    with contextlib.suppress(ValueError, AttributeError):
        value = json.loads(text)
        error = value.get("error", value)
        return error["message"] if isinstance(error, dict) and "message" in error else str(error)
    return text


def result(routed: "httpx.Client", servers: list["httpx.Client"], case: Case, stream: bool) -> str:
    """A cell of the table: "yes", or what is wrong. What differs from server to server is not compared."""
    first, second = (answered(server, case, stream) for server in servers)
    try:
        found = answered(routed, case, stream)
    except (RuntimeError, ValueError, httpx.HTTPError) as e:
        return str(e) or type(e).__name__
    same = [path for path, value in first.items() if second.get(path) == value and path[-1] not in TIMES]
    wrong = [path for path in same if found.get(path) != first[path]]
    return f"other: {'.'.join(map(str, wrong[0]))}" if wrong else "yes"


def done(server: "httpx.Client") -> int:
    """Requests that a server has answered."""
    return round(sum(map(float, REQUESTS_DONE.findall(server.get("/metrics").text))))


def forwards(http: "httpx.Client") -> bool:
    """Whether the router has a server to send a chat to."""
    with contextlib.suppress(httpx.HTTPError):
        return http.post("/v1/chat/completions", json={"model": "default", **CHAT}).status_code < 500
    return False


def ended(http: "httpx.Client", body: dict, has_begun: threading.Semaphore) -> tuple[str, str]:
    """(how an answer ends, its text): "whole", "cut", "error event" or a status.

    Args:
        http: The client.
        body: A chat.
        has_begun: Released once, when the answer begins, or ends before that.
    """
    text, last, is_first = "", "", True
    try:
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                return f"status {response.status_code}", ""
            if not body["stream"]:
                return "whole", json.loads(response.read())["choices"][0]["message"]["content"]
            for line in response.iter_lines():
                if is_first:
                    is_first = False
                    has_begun.release()
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return "error event", text
                    text += event["choices"][0]["delta"].get("content") or ""
                last = line or last
            return "whole" if last == "data: [DONE]" else "cut", text
    except httpx.HTTPError:
        return "cut", text
    finally:
        if is_first:
            has_begun.release()


def under_way(routed: "httpx.Client", direct: "httpx.Client", server: ServerProcess, count: int) -> list[str]:
    """Rows of the table: ``count`` streams and as many other answers while a server is killed, then as many after it.

    Args:
        routed: A client of the router.
        direct: One of the server that is left.
        server: The other one.
        count: Of each kind.
    """
    chat = {"model": "default", **CHAT, "max_tokens": 300, "ignore_eos": True, "temperature": 0.8}
    bodies = [chat | {"seed": i, "stream": kind} for i in range(count) for kind in (True, False)]
    # Of the streams, and of all other answers.
    has_begun, ignored = threading.Semaphore(0), threading.Semaphore(0)
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = [pool.submit(ended, routed, body, has_begun if body["stream"] else ignored) for body in bodies]
        for _ in range(count):
            has_begun.acquire()
        server.process.kill()
        outcomes = [each.result() for each in answers]
    ends = {True: Counter[str](), False: Counter[str]()}
    for body, (end, text) in zip(bodies, outcomes, strict=True):
        is_changed = end == "whole" and text != ended(direct, body, ignored)[1]
        ends[body["stream"]]["whole, another text" if is_changed else end] += 1
    short = [body | {"max_tokens": 4, "stream": False} for body in bodies[:count]]
    after = Counter(ended(routed, body, ignored)[0] for body in short)
    named = {"streams under way": ends[True], "other answers under way": ends[False], "requests after it": after}
    return [f"| {name} | {', '.join(f'{n} {end}' for end, n in each.most_common())} |" for name, each in named.items()]


def main() -> int:
    # Servers end with the script.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--requests", type=int, default=20, help="chats, to see how they are shared out (default: 20)")
    p.add_argument("--kill", type=int, metavar="N", help="kill a server under N streams and N other answers instead")
    p.add_argument("--out", type=Path, help="write the report here too")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, command = p.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    if not command:
        p.error("after -- there must be the router's command")
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(ServerProcess.of("serve", WORDS)) for _ in range(2)]
        for server in servers:
            server.wait_until(lambda url=server.url: is_ready(url))
        values = {"port": str(free_port()), "other_port": str(free_port())}
        words = []
        for word in command:
            words += [s.url for s in servers] if word == "{urls}" else [word.format(**values)]
        router = stack.enter_context(ServerProcess(words, int(values["port"])))
        to = lambda url: stack.enter_context(httpx.Client(base_url=url, timeout=120))  # noqa: E731
        direct, routed = [to(server.url) for server in servers], to(router.url)
        router.wait_until(lambda: forwards(routed))
        if args.kill:
            rows = under_way(routed, direct[1], servers[0], args.kill)
            write(f"`{' '.join(command)}` on {machine()}.", "| | how they end |\n| --- | --- |", rows, args.out)
            return 0
        rows = []
        for case in CASES:
            cells = [result(routed, direct, case, stream) for stream in ((False, True) if case.streams else (False,))]
            rows.append(f"| {case.name} | {' | '.join([*cells, ''][:2])} |")
            print(rows[-1], file=sys.stderr)
        before = [done(each) for each in direct]
        for i in range(args.requests):
            routed.post("/v1/chat/completions", json={"model": "default", "seed": i, **CHAT})
        shared = [done(each) - b for each, b in zip(direct, before, strict=True)]
    head = (
        f"`{' '.join(command)}` on {machine()}; the servers got {shared[0]} and {shared[1]} of {args.requests} chats."
    )
    write(head, "| request | plain | streaming |\n| --- | --- | --- |", rows, args.out)
    return 0


def write(head: str, columns: str, rows: list[str], out: Path | None) -> None:
    """Prints a report, and writes it to a file."""
    report = "\n".join([head, "", columns, *rows, ""])
    print(report)
    if out:
        out.write_text(report)


if __name__ == "__main__":
    sys.exit(main())

"""Runs agents against a server whose model follows a script: each repairs a file, as agents do, over several turns.

    python scripts/clients/check.py [--only NAME ...] [--markdown benchmarks/clients.md] [--record DIR]

Installs the clients with pip and npm, each in a folder of its own in .cache/clients, and starts for each a server with
a mock device (`tools.mock_engine`), all of which but the model is the server's own. The model reads a file, edits it,
runs it, which fails, edits it again, runs it, and says a last sentence. A session is good if the file is right
afterwards, the client ends with code 0 and shows that sentence, no request is answered with an error, and each turn
finds the last one's prompt in the prefix cache.

Exits 1 where a session is not good, or a client cannot be installed. With --record, the requests and answers of each
client are written to DIR/NAME/NUMBER.json.
"""

import argparse
import http.client
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tools.mock_runner import MockDevice
from tools.recorded import as_text, recorded
from tools.server_process import ServerProcess, free_port, is_ready, machine

HERE = Path(__file__).parent
CACHE, TEMPLATE = HERE.parent.parent / ".cache/clients", HERE / "template.jinja"
# Seconds after which a client hangs.
CLIENT_S = 120.0
# Of the tokens of a turn's prompt, the part that the next turn finds in the prefix cache at least.
LEAST_CACHED = 0.9
POSITIONS = 262144
MODEL, KEY = "qwen", "none"
# What is wrong in the file, what is wrong still after the first edit, and what is right.
FILE, COMMAND = "mean.py", "python3 mean.py"
WRONG, STILL_WRONG, RIGHT = (f"\treturn sum(values) / len(values){end}  # a tab" for end in (" + 1", " - 1", ""))
CODE = """# "é" → 中 </parameter> & <b>\\\\n</b>
def mean(values):
{}


assert mean([1, 2, 3]) == 2, mean([1, 2, 3])
print("right")
"""
# The model says how many of its thoughts its last prompt has.
LAST = "The file is right now. Thoughts: "
TASK = f"{FILE} fails. Read it, repair it, and run it with `{COMMAND}`. Session: {{}}."

# The page of results, before its table.
HEAD = """# Clients

Sessions of agents with a scripted model (`scripts/clients/check.py`): each reads a file, edits it, runs it, edits it
again, and runs it again. "Cached" is what each turn but the first finds of the last one's prompt in the prefix cache.
"Thoughts" are those of the model's earlier turns that its last prompt has.

"""
COLUMNS = """| client | packages | endpoint | turns | requests | cached | thoughts | result |
|---|---|---|---|---|---|---|---|"""


def call(tool: str, **arguments: Any) -> str:
    """A call in the XML form of Qwen3.5."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    parameters = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    return f"<tool_call>\n<function={tool}>\n{parameters}</function>\n</tool_call>"


def turns(read: str, edit: Callable[[str, str], str], run: str) -> list[str]:
    """What the model says; ``edit`` replaces a text by another."""
    return [
        f"The file first.\n</think>\n\nI read the file, and run it.\n\n{read}\n{run}",
        f"It adds one.\n</think>\n\n{edit(WRONG, STILL_WRONG)}",
        f"Does it work?\n</think>\n\nI run it.\n\n{run}",
        f"It takes one away.\n</think>\n\n{edit(STILL_WRONG, RIGHT)}",
        f"Once more.\n</think>\n\n{run}",
        f"It is.\n</think>\n\n{LAST}{{thoughts}}.",
    ]


@dataclass(frozen=True)
class Installation:
    """Packages in a folder of their own.

    Attributes:
        name: The folder.
        packages: With versions.
        is_npm: Whether they are npm's; pip's otherwise.
    """

    name: str
    packages: tuple[str, ...]
    is_npm: bool = True

    @property
    def folder(self) -> Path:
        """Where they are."""
        return CACHE / self.name

    def program(self, name: str) -> str:
        """A program of the installation."""
        return str(self.folder / ("node_modules/.bin" if self.is_npm else "bin") / name)

    def install(self) -> None:
        """Installs what is not there yet.

        Raises:
            CalledProcessError: It failed; its output has the reason.
        """
        mark = self.folder / "installed"
        if mark.exists() and mark.read_text() == " ".join(self.packages):
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        if self.is_npm:
            commands = [["npm", "install", "--no-audit", "--no-fund", "--prefix", ".", *self.packages]]
        else:
            commands = [[sys.executable, "-m", "venv", "."], ["bin/pip", "install", "--quiet", *self.packages]]
        for command in commands:
            subprocess.run(command, cwd=self.folder, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        mark.write_text(" ".join(self.packages))


@dataclass(frozen=True)
class Session:
    """Where a client works.

    Attributes:
        installed: The client's installation.
        home: The client's own files; a fresh folder.
        folder: The folder with the file.
        url: The server's address.
        task: What it is asked to do.
    """

    installed: Installation
    home: Path
    folder: Path
    url: str
    task: str

    @property
    def path(self) -> str:
        """The file."""
        return str(self.folder / FILE)

    def write(self, name: str, text: str) -> Path:
        """Writes a file of the client's configuration, with the values of $URL, $MODEL and $KEY."""
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("$URL", self.url).replace("$MODEL", MODEL).replace("$KEY", KEY))
        return path


@dataclass(frozen=True)
class Proxy:
    """A process between a client and the server.

    Attributes:
        installed: Its installation.
        command: Writes the configuration and gives the command, by a session whose address is the server's, and a port.
    """

    installed: Installation
    command: Callable[[Session, int], list[str]]


@dataclass(frozen=True)
class Client:
    """A client and its session.

    Attributes:
        name: Its name, which is the name of its script.
        installed: Its installation.
        endpoint: The endpoint that it uses.
        script: Gives the model's turns.
        command: Writes the configuration and gives the command.
        environment: Further variables, with the values of $URL, $MODEL and $KEY.
        proxy: What stands between it and the server; None for nothing.
    """

    name: str
    installed: Installation
    endpoint: str
    script: Callable[[Session], list[str]]
    command: Callable[[Session], list[str]]
    environment: Mapping[str, str] = field(default_factory=dict)
    proxy: Proxy | None = None


# ---- Codex

CODEX_CLI = Installation("codex", ("@openai/codex@0.171.0",))
CODEX = """
model = "$MODEL"
model_provider = "dflash"
check_for_update_on_startup = false
analytics.enabled = false
[model_providers.dflash]
name = "dflash"
base_url = "$URL/v1"
wire_api = "responses"
"""
# What Codex knows of its own models only.
CATALOG = {
    "slug": MODEL,
    "display_name": MODEL,
    "description": "",
    "supported_reasoning_levels": [],
    "shell_type": "unified_exec",
    "visibility": "list",
    "supported_in_api": True,
    "priority": 1,
    "base_instructions": "You repair files.",
    "apply_patch_tool_type": "freeform",
    "truncation_policy": {"mode": "tokens", "limit": 10000},
    "context_window": 131072,
    "experimental_supported_tools": [],
    "supports_reasoning_summaries": True,
    "support_verbosity": False,
    "supports_parallel_tool_calls": True,
}

# Tokens of a conversation, as the bundled tokenizer counts, that is summarised before its next turn.
COMPACTED = 13500
# The form of the last answer.
ANSWER = {
    "type": "object",
    "properties": {"answer": {"type": "string"}},
    "required": ["answer"],
    "additionalProperties": False,
}


def patch(old: str, new: str) -> str:
    return f"*** Begin Patch\n*** Update File: {FILE}\n@@ def mean(values):\n-{old}\n+{new}\n*** End Patch"


def run_command(command: str) -> str:
    return call("exec_command", cmd=command)


def codex_command(session: Session, *options: str) -> list[str]:
    session.write(".codex/config.toml", CODEX)
    safe = "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"
    return [session.installed.program("codex"), "exec", *safe, *options, session.task]


def codex_with_catalog(session: Session, *options: str) -> list[str]:
    path = session.write("models.json", json.dumps({"models": [CATALOG]}))
    return codex_command(session, "-c", f"model_catalog_json={json.dumps(str(path))}", *options)


def codex_compacting(session: Session) -> list[str]:
    """The conversation is summarised when it has more tokens than at its beginning."""
    return codex_with_catalog(session, "-c", f"model_auto_compact_token_limit={COMPACTED}")


def codex_with_schema(session: Session) -> list[str]:
    path = session.write("answer.json", json.dumps(ANSWER))
    return codex_with_catalog(session, "--output-schema", str(path))


def codex_script(session: Session) -> list[str]:
    edits = lambda old, new: call("apply_patch", input=patch(old, new))  # noqa: E731
    return turns(run_command(f"cat {FILE}"), edits, run_command(COMMAND))


def codex_schema_script(session: Session) -> list[str]:
    """Calls alone, and an object at the end: the form leaves no room for other words."""
    silent = [re.sub(r"(</think>\n\n)[^<]+(?=<tool_call>)", r"\1", text) for text in codex_script(session)]
    answer = json.dumps({"answer": f"{LAST}{{thoughts}}."})
    return [*silent[:-1], f"It is.\n</think>\n\n{answer}"]


def codex_shell_script(session: Session) -> list[str]:
    edits = lambda old, new: run_command(f"apply_patch <<'EOF'\n{patch(old, new)}\nEOF")  # noqa: E731
    return turns(run_command(f"cat {FILE}"), edits, run_command(COMMAND))


# ---- qwen-code

QWEN_CODE = Installation("qwen-code", ("@qwen-code/qwen-code@0.24.4",))
QWEN_SETTINGS = {
    "general": {"enableAutoUpdate": False},
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
}


def qwen_code_command(session: Session) -> list[str]:
    session.write(".qwen/settings.json", json.dumps(QWEN_SETTINGS))
    return [session.installed.program("qwen"), "--auth-type", "openai", "--yolo", "-p", session.task]


def qwen_code_script(session: Session) -> list[str]:
    def edit(old: str, new: str) -> str:
        return call("edit", file_path=session.path, old_string=old, new_string=new)

    run = call("run_shell_command", command=COMMAND, is_background=False, description="Runs it.")
    return turns(call("read_file", file_path=session.path), edit, run)


# ---- opencode

OPENCODE = Installation("opencode", ("opencode-ai@1.18.33",))
OPENCODE_ENVIRONMENT = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
OPENCODE_CONFIG = """{
  "$schema": "https://opencode.ai/config.json",
  "autoupdate": false,
  "share": "disabled",
  "model": "dflash/$MODEL",
  "provider": {
    "dflash": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {"baseURL": "$URL/v1", "apiKey": "$KEY"},
      "models": {"$MODEL": {"limit": {"context": 131072, "output": 8192}}}
    }
  }
}
"""


def opencode_command(session: Session) -> list[str]:
    session.write(".config/opencode/opencode.json", OPENCODE_CONFIG)
    return [session.installed.program("opencode"), "run", session.task]


def opencode_script(session: Session) -> list[str]:
    def edit(old: str, new: str) -> str:
        return call("edit", filePath=session.path, oldString=old, newString=new)

    run = call("bash", command=COMMAND, description="Runs it.")
    return turns(call("read", filePath=session.path), edit, run)


# ---- LiteLLM, before opencode and Claude Code

LITELLM_ENVIRONMENT = {
    # Prices are not fetched.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_MASTER_KEY": "$KEY",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
}
LITELLM_CONFIG = """
model_list:
  - model_name: $MODEL
    litellm_params:
      model: hosted_vllm/$MODEL
      api_base: $URL/v1
      api_key: $KEY
"""


def litellm_command(session: Session, port: int) -> list[str]:
    path = session.write("litellm.yaml", LITELLM_CONFIG)
    words = ["--config", str(path), "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
    return [session.installed.program("litellm"), *words]


LITELLM = Proxy(Installation("litellm", ("litellm[proxy]==1.108.7",), is_npm=False), litellm_command)


# ---- aider

AIDER = Installation("aider", ("aider-chat==0.86.2",), is_npm=False)

AIDER_ENVIRONMENT = LITELLM_ENVIRONMENT | {"OPENAI_API_BASE": "$URL/v1", "OPENAI_API_KEY": "$KEY"}


def aider_command(session: Session) -> list[str]:
    quiet = "--no-git", "--no-check-update", "--analytics-disable", "--no-show-model-warnings", "--no-pretty"
    test = "--yes-always", "--edit-format", "diff", "--auto-test", "--test-cmd", COMMAND
    return [
        session.installed.program("aider"),
        "--model",
        f"openai/{MODEL}",
        *quiet,
        *test,
        "--message",
        session.task,
        FILE,
    ]


def aider_script(session: Session) -> list[str]:
    def edit(old: str, new: str) -> str:
        return f"{FILE}\n```python\n<<<<<<< SEARCH\n{old}\n=======\n{new}\n>>>>>>> REPLACE\n```"

    return [
        f"It adds one.\n</think>\n\nIt adds one.\n\n{edit(WRONG, STILL_WRONG)}",
        f"It takes one away.\n</think>\n\n{edit(STILL_WRONG, RIGHT)}\n\n{LAST}{{thoughts}}.",
    ]


# ---- Claude Code

CLAUDE_CODE = Installation("claude-code", ("@anthropic-ai/claude-code@2.1.332",))
CLAUDE_ENVIRONMENT = {
    "ANTHROPIC_BASE_URL": "$URL",
    "ANTHROPIC_API_KEY": "$KEY",
    "ANTHROPIC_MODEL": "$MODEL",
    "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "131072",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    # Otherwise it does not skip permissions for the administrator.
    "IS_SANDBOX": "1",
}


def claude_command(session: Session) -> list[str]:
    return [session.installed.program("claude"), "-p", session.task, "--dangerously-skip-permissions"]


def claude_script(session: Session) -> list[str]:
    def edit(old: str, new: str) -> str:
        return call("Edit", file_path=session.path, old_string=old, new_string=new)

    run = call("Bash", command=COMMAND, description="Runs it")
    return turns(call("Read", file_path=session.path), edit, run)


# ---- Libraries, whose tool loops are programs in sessions/

AI_SDK = Installation(
    "ai-sdk", ("ai@7.0.173", "@ai-sdk/openai@4.0.118", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7")
)
OPENAI_AGENTS = Installation("openai-agents", ("openai-agents==0.24.0",), is_npm=False)
PYDANTIC_AI = Installation("pydantic-ai", ("pydantic-ai-slim[openai]==2.68.0",), is_npm=False)


def loop(program: str, kind: str) -> Callable[[Session], list[str]]:
    """The command of a program in sessions/."""

    def command(session: Session) -> list[str]:
        # Node.js looks for modules in the folders above the program.
        copy = shutil.copytree(HERE / "sessions", session.installed.folder / "sessions", dirs_exist_ok=True)
        interpreter = "node" if session.installed.is_npm else session.installed.program("python")
        return [interpreter, str(copy / program), kind, session.url, MODEL, KEY, session.task]

    return command


def loop_script(session: Session) -> list[str]:
    def edit(old: str, new: str) -> str:
        return call("edit_file", path=session.path, old=old, new=new)

    return turns(call("read_file", path=session.path), edit, call("run_command", command=COMMAND))


ENDPOINTS = {"responses": "/v1/responses", "chat": "/v1/chat/completions"}
LOOPS = (
    ("ai-sdk", AI_SDK, "ai_sdk_loop.mjs"),
    ("openai-agents", OPENAI_AGENTS, "openai_agents_loop.py"),
    ("pydantic-ai", PYDANTIC_AI, "pydantic_ai_loop.py"),
)

CLIENTS = (
    Client("codex", CODEX_CLI, "/v1/responses", codex_script, codex_with_catalog),
    Client("codex-shell", CODEX_CLI, "/v1/responses", codex_shell_script, codex_command),
    Client("codex-compact", CODEX_CLI, "/v1/responses", codex_script, codex_compacting),
    Client("codex-schema", CODEX_CLI, "/v1/responses", codex_schema_script, codex_with_schema),
    Client(
        "qwen-code",
        QWEN_CODE,
        "/v1/chat/completions",
        qwen_code_script,
        qwen_code_command,
        {"OPENAI_BASE_URL": "$URL/v1", "OPENAI_API_KEY": "$KEY", "OPENAI_MODEL": "$MODEL"},
    ),
    Client("opencode", OPENCODE, ENDPOINTS["chat"], opencode_script, opencode_command, OPENCODE_ENVIRONMENT),
    Client("claude-code", CLAUDE_CODE, "/v1/messages", claude_script, claude_command, CLAUDE_ENVIRONMENT),
    *(
        Client(f"{name}-{kind}", installed, endpoint, loop_script, loop(program, kind))
        for name, installed, program in LOOPS
        for kind, endpoint in ENDPOINTS.items()
    ),
    Client(
        "litellm-opencode",
        OPENCODE,
        ENDPOINTS["chat"],
        opencode_script,
        opencode_command,
        OPENCODE_ENVIRONMENT | LITELLM_ENVIRONMENT,
        LITELLM,
    ),
    Client(
        "litellm-claude-code",
        CLAUDE_CODE,
        ENDPOINTS["chat"],
        claude_script,
        claude_command,
        CLAUDE_ENVIRONMENT | LITELLM_ENVIRONMENT,
        LITELLM,
    ),
    Client("aider", AIDER, ENDPOINTS["chat"], aider_script, aider_command, AIDER_ENVIRONMENT),
)


# ---- What runs them


@dataclass
class Exchange:
    """A request and its answer."""

    method: str
    path: str
    headers: dict[str, str]
    body: str
    status: int = 0
    answer: str = ""

    @property
    def tokens(self) -> tuple[int, int] | None:
        """(tokens of the prompt, of which from the prefix cache), if the answer says it."""
        cached = re.findall(r'"(?:cached_tokens|cache_read_input_tokens)": ?(\d+)', self.answer)
        prompt = re.findall(r'"(?:prompt|input)_tokens": ?(\d+)', self.answer)
        if not cached or not prompt:
            return None
        is_apart = "cache_read_input_tokens" in self.answer
        return int(prompt[-1]) + is_apart * int(cached[-1]), int(cached[-1])


class Recorder(ThreadingHTTPServer):
    """A proxy before a server, which keeps what goes through.

    Attributes:
        url: Its address.
        exchanges: Requests and answers, in the order of the requests.
    """

    daemon_threads = True

    def __init__(self, server: str):
        super().__init__(("127.0.0.1", 0), Forward)
        self.server, self.url = server.removeprefix("http://"), f"http://127.0.0.1:{self.server_port}"
        self.exchanges: list[Exchange] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves its connection is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Forward(BaseHTTPRequestHandler):
    """Passes a request on, and its answer piece by piece."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    def _forward(self) -> None:
        assert isinstance(self.server, Recorder)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        shown = {key: value for key, value in self.headers.items() if key.lower() not in ("authorization", "x-api-key")}
        exchange = Exchange(self.command, self.path, shown, body.decode("utf-8", "replace"))
        self.server.exchanges.append(exchange)
        connection = http.client.HTTPConnection(self.server.server, timeout=CLIENT_S)
        own = {"Host": self.server.server, "Accept-Encoding": "identity"}
        headers = own | {k: v for k, v in self.headers.items() if k.lower() not in ("host", "accept-encoding")}
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        exchange.status = answer.status
        self.send_response(answer.status)
        dropped = "transfer-encoding", "content-length", "connection", "server", "date"
        for key, value in answer.getheaders():
            if key.lower() not in dropped:
                self.send_header(key, value)
        has_body = self.command != "HEAD"
        self.send_header(*(("Transfer-Encoding", "chunked") if has_body else ("Content-Length", "0")))
        self.end_headers()
        pieces = []
        while has_body and (piece := answer.read1(65536)):
            pieces.append(piece)
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        if has_body:
            self.wfile.write(b"0\r\n\r\n")
        exchange.answer = b"".join(pieces).decode("utf-8", "replace")
        connection.close()

    do_GET = do_HEAD = do_POST = do_DELETE = _forward  # noqa: N815


@dataclass(frozen=True)
class Result:
    """What came of a session.

    Attributes:
        client: The client.
        exchanges: Its requests.
        turns: How many of the requests are turns of the script.
        tokens: (tokens of the prompt, of which from the prefix cache) of each turn whose answer says it.
        thoughts: How many of the model's earlier thoughts its last prompt has.
        problems: What was wrong; empty for a good session.
    """

    client: Client
    exchanges: Sequence[Exchange] = ()
    turns: int = 0
    tokens: Sequence[tuple[int, int]] = ()
    thoughts: str = ""
    problems: Sequence[str] = ()

    @property
    def row(self) -> str:
        """Its row of the table."""
        installed = [self.client.installed, *([self.client.proxy.installed] if self.client.proxy else [])]
        packages = ", ".join(package for each in installed for package in each.packages)
        cached = " ".join(f"{cached / before:.0%}" for (before, _), (_, cached) in itertools.pairwise(self.tokens))
        cells = (
            self.client.name,
            packages,
            f"`{self.client.endpoint}`",
            self.turns,
            len(self.exchanges),
            cached,
            self.thoughts,
        )
        return "| " + " | ".join(map(str, (*cells, "; ".join(self.problems) or "good"))) + " |"


def environment_of(client: Client, session: Session) -> dict[str, str]:
    """A client's environment: nothing of this one, and no way to other machines by proxies."""
    nowhere = "http://127.0.0.1:9"
    own = {
        name: value.replace("$URL", session.url).replace("$MODEL", MODEL).replace("$KEY", KEY)
        for name, value in client.environment.items()
    }
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(session.home),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "DO_NOT_TRACK": "1",
        "HTTP_PROXY": nowhere,
        "HTTPS_PROXY": nowhere,
        "NO_PROXY": "127.0.0.1,localhost",
    } | own


def run(client: Client, record: Path | None, fixtures: Path | None) -> Result:
    """Runs a client's session.

    Args:
        client: The client.
        record: Gets requests and answers in a folder; None for nothing.
        fixtures: Gets a good session, cut down to its shape; None for nothing.
    """
    try:
        for installed in (client.installed, *((client.proxy.installed,) if client.proxy else ())):
            installed.install()
    except (OSError, subprocess.CalledProcessError) as e:
        output = (getattr(e, "output", None) or b"").decode(errors="replace").strip().splitlines()
        return Result(client, problems=[f"cannot be installed: {output[-1] if output else e}"])
    home = CACHE / "homes" / client.name
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        (Path(folder) / FILE).write_text(CODE.format(WRONG))
        session = Session(client.installed, home, Path(folder), "", TASK.format(client.name))
        script = client.script(session)
        try:
            recorder = started(client, session, script, stack)
            session = replace(session, url=proxied(client, replace(session, url=recorder.url), stack))
        except RuntimeError as e:
            return Result(client, problems=[str(e)])
        code, said = asked(client, session)
        if record is not None:
            directory = record / client.name
            directory.mkdir(parents=True, exist_ok=True)
            for number, exchange in enumerate(recorder.exchanges, 1):
                (directory / f"{number}.json").write_text(json.dumps(asdict(exchange), indent=1, ensure_ascii=False))
        is_right = Path(session.path).read_text() == CODE.format(RIGHT)
        problems = [f"ended with code {code}"] * (code != 0) + ["the file is not right"] * (not is_right)
        result, turns = judged(client, script, recorder.exchanges, said, problems)
    if fixtures is not None and not result.problems:
        fixtures.mkdir(parents=True, exist_ok=True)
        found = recorded([asdict(turn) for turn in turns], script, session.task, str(session.folder))
        (fixtures / f"{client.name}.json").write_text(as_text(found))
    return result


def started(client: Client, session: Session, script: Sequence[str], stack: ExitStack) -> Recorder:
    """Starts a server of a script.

    Raises:
        RuntimeError: It does not start.
    """
    port = free_port()
    device = MockDevice(4, POSITIONS, 0.001, 8, scripts={f"Session: {client.name}.": script})
    words = ["--bundled", "--port", str(port), "--served-model-name", MODEL, "--chat-template", str(TEMPLATE)]
    words += ["--log-level", "error", "--hf-overrides", json.dumps({"max_position_embeddings": POSITIONS})]
    command = [sys.executable, "-m", "tools.mock_engine", *words]
    server = stack.enter_context(ServerProcess(command, port, device.environment))
    server.wait_until(lambda: is_ready(server.url))
    recorder = stack.enter_context(Recorder(server.url))
    stack.callback(recorder.shutdown)
    return recorder


def proxied(client: Client, session: Session, stack: ExitStack) -> str:
    """Starts what stands before the server, if anything, and returns the address for the client.

    Raises:
        RuntimeError: It does not start.
    """
    if client.proxy is None:
        return session.url
    port, log = free_port(), stack.enter_context((session.home / "proxy.log").open("w"))
    command = client.proxy.command(replace(session, installed=client.proxy.installed), port)
    proxy = stack.enter_context(ServerProcess(command, port, environment_of(client, session), log))
    proxy.wait_until(lambda: listens(port))
    return proxy.url


def judged(
    client: Client, script: Sequence[str], exchanges: Sequence[Exchange], said: str, problems: list[str]
) -> tuple[Result, list[Exchange]]:
    """The result of a session, and its turns."""
    problems += [f"{e.method} {e.path}: {e.status} {e.answer[:300]}" for e in exchanges if e.status >= 400]
    # Not those for a title or a summary.
    has_tools = "<tool_call>" in script[0]
    good = [e for e in exchanges if e.status == 200 and e.body and client.name in e.body]
    turns = [e for e in good if bool(json.loads(e.body).get("tools")) == has_tools]
    if len(turns) != len(script):
        problems.append(f"{len(turns)} turns of {len(script)}")
    # A stream of chat has them where the client asks.
    counts = [tokens for e in turns if (tokens := e.tokens) is not None]
    if any(cached < LEAST_CACHED * before for (before, _), (_, cached) in itertools.pairwise(counts)):
        problems.append(f"a turn finds less than {LEAST_CACHED:.0%} of the last one's prompt in the prefix cache")
    thoughts = re.search(f"{re.escape(LAST)}(\\d+)", said)
    if thoughts is None:
        problems.append("the last words are missing")
    shown = f"{thoughts[1]} of {len(script) - 1}" if thoughts else ""
    return Result(client, exchanges, len(turns), counts, shown, problems), turns


def asked(client: Client, session: Session) -> tuple[int | str, str]:
    """Runs the client: its exit code, or why there is none, and what it said."""
    log = session.home / "log"
    with log.open("w") as output:
        try:
            code = subprocess.run(
                client.command(session),
                cwd=session.folder,
                env=environment_of(client, session),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=CLIENT_S,
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"none after {CLIENT_S:.0f} s"
    return code, log.read_text(errors="replace")


def listens(port: int) -> bool:
    """Whether a port of this machine takes connections."""
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[client.name for client in CLIENTS], default=())
    parser.add_argument("--markdown", type=Path, help="the page whose table is replaced")
    parser.add_argument("--record", type=Path, help="gets requests and answers")
    parser.add_argument("--fixtures", type=Path, help="gets good sessions, cut down to their shapes")
    args = parser.parse_args()
    results = []
    for client in CLIENTS:
        if not args.only or client.name in args.only:
            results.append(run(client, args.record, args.fixtures))
            print(results[-1].row, flush=True)
    if args.markdown:
        rest = args.markdown.read_text().partition("\n## ") if args.markdown.exists() else ("", "", "")
        rows = "\n".join(result.row for result in results)
        args.markdown.write_text(f"{HEAD}{machine()}.\n\n{COLUMNS}\n{rows}\n{rest[1]}{rest[2]}")
    return int(any(result.problems for result in results))


if __name__ == "__main__":
    sys.exit(main())

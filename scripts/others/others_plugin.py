"""A pytest plugin for `others_tests.py`: vLLM's and SGLang's test modules against our server, as they are on disk.

Their packages are stubs. Calling a stub in a test skips that test: it is about a class of that package. Three things
are real: the tests' own package, servers (`RemoteOpenAIServer`, `popen_launch_server` start ours), and tokenizers,
which are our target's whatever name is asked for.
"""

import ast
import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import unittest
from pathlib import Path

import httpx
import openai
import pytest
import requests
import transformers

TARGET, DRAFT = os.environ["OTHERS_TARGET"], os.environ["OTHERS_DRAFT"]
VLLM, SGLANG = os.environ.get("OTHERS_VLLM"), os.environ.get("OTHERS_SGLANG")
RESULTS = os.environ["OTHERS_RESULTS"]
# Names that requests may use, of any test module.
NAMES = [*os.environ["OTHERS_NAMES"].split(), TARGET]
KEY = "token-abc123"
BLOCK_SIZE = "4"
BUDGET, NATIVE_BUDGET = {"thinking_token_budget": 64}, {"max_thinking_tokens": 64}
# Answers begin at once.
PLAIN = ("--default-chat-template-kwargs", '{"enable_thinking": false}')
TEST_S, START_S = 600, 1200
# Their machine's: left out of a command for ours.
MACHINE = {"--dtype": 1, "--max-num-seqs": 1, "--gpu-memory-utilization": 1, "--mem-fraction-static": 1, "--seed": 1}
MACHINE |= {
    "--enforce-eager": 0,
    "--trust-remote-code": 0,
    "--attention-backend": 1,
    "--tensor-parallel-size": 1,
    "--max-model-len": 1,
    # Of a model of embeddings, of whose server some tests ask no embeddings.
    "--runner": 1,
    # Of a checkpoint without weights and tokenizer: ours has them.
    "--load-format": 1,
    "--skip-tokenizer-init": 0,
}
# Tests to run, by their ids; empty: all.
ONLY = set(os.environ.get("OTHERS_ONLY", "").split("\n")) - {""}
# Tests that have run.
DONE = set(os.environ.get("OTHERS_DONE", "").split("\n")) - {""}
in_test = False
# The last error that a server answered in the test at hand: tests look into answers before they look at the status.
last_error = ""


class Stub:
    """Whatever a stubbed package is asked for. False, so that questions about the platform are answered no."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(f"{self._name}.{name}")

    def __call__(self, *args, **options):
        if not in_test or "platform" in self._name:
            # A decorator gives back what it decorates.
            is_decorated = len(args) == 1 and isinstance(args[0], types.FunctionType | type) and not options
            return args[0] if is_decorated else Stub(self._name)
        pytest.skip(f"own classes: {self._name}")

    def __mro_entries__(self, bases):
        return (object,)

    def __bool__(self) -> bool:
        return False

    def __iter__(self):
        return iter(())

    def __getitem__(self, key):
        return Stub(self._name)

    def __or__(self, other):
        return Stub(self._name)

    __ror__ = __or__


class StubModule(types.ModuleType):
    def __getattr__(self, name: str):
        # pytest looks for hooks in every module.
        if name.lower().startswith(("__", "pytest", "setup", "teardown")):
            raise AttributeError(name)
        return Stub(f"{self.__name__}.{name}")


STUBBED = ("vllm", "sglang", "model_hosting_container_standards", "lm_eval", "tabulate")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stubs of packages that are not installed. SGLang's kits are real."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in STUBBED or name.startswith(("sglang.test.kits.", "sglang.test.server_fixtures.")):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return StubModule(spec.name)

    def exec_module(self, module) -> None:
        pass


def add_module(name: str, path: list[str] | None = None, **contents) -> None:
    """Registers a stub under the name of another project's module; ``path``: the directory of its submodules."""
    module = StubModule(name)
    module.__path__ = path or []
    module.__dict__.update(contents)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, module)


FROM_PRETRAINED = transformers.AutoTokenizer.from_pretrained


def tokenizer_of_target(*args, **options):
    """The target's tokenizer. It renders conversations as a server does that starts with `PLAIN`."""
    tokenizer = FROM_PRETRAINED(TARGET)
    tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, enable_thinking=False)
    return tokenizer


STARTED: dict[tuple, "Server"] = {}


class Server:
    """A process of ours."""

    def __init__(self, options: tuple[str, ...]):
        command = [sys.executable, "-m", "dflash_jax.serve", "--port", "0", "--target", TARGET, "--draft", DRAFT]
        command += ["--served-model-name", *NAMES, "--slots", "4", "--max-len", "8192", *options]
        # A drafter that is there is used: "auto" decodes plainly where that is faster.
        command += [] if DRAFT == "none" else ["--block-size", BLOCK_SIZE]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        self.log = open(f"{RESULTS}.log", "a")  # noqa: SIM115
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        assert self.process.stderr is not None
        lines = []
        for line in self.process.stderr:
            lines.append(line)
            if found := re.search(r"listening on (\S+), warming", line):
                self.url = found[1]
                break
        else:
            raise RuntimeError("".join(lines[-3:]))
        # Read on, or the pipe fills.
        threading.Thread(target=self._copy, daemon=True).start()
        deadline = time.monotonic() + START_S
        while httpx.get(f"{self.url}/ready", timeout=None).status_code != 200:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the server did not become ready")
            time.sleep(0.2)

    def _copy(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.write(line)

    @classmethod
    def get(cls, options=()) -> "Server":
        """One that runs with these options, started if need be; at most three are kept."""
        key = tuple(options)
        if key not in STARTED:
            for old in list(STARTED)[1 : len(STARTED) - 1]:
                STARTED.pop(old).stop()
            STARTED[key] = cls(key)
        return STARTED[key]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def translated(args) -> list[str]:
    """The other server's command line without what is about its machine. Skips the test where our server refuses it."""
    from dflash_jax.errors import InputError
    from dflash_jax.options.serve import parse

    given, left = list(args), []
    while given:
        flag = given.pop(0)
        if flag in MACHINE:
            del given[: MACHINE[flag]]
        elif "lora" in flag:
            # Servers for LoRA serve other tests, too.
            while given and not given[0].startswith("--"):
                del given[0]
        elif flag == "--served-model-name":
            while given and not given[0].startswith("-"):
                NAMES.append(given.pop(0))
        else:
            left.append(flag)
    try:
        parse(left)
    except InputError as e:
        pytest.skip(f"flag: {e}")
    return left


class RemoteOpenAIServer:
    """vLLM's fixture, as its tests use it, around a server of ours."""

    DUMMY_API_KEY = KEY

    def __init__(self, model, vllm_serve_args=(), *, env_dict=None, **options):
        args = vllm_serve_args if isinstance(vllm_serve_args, list | tuple) else []
        if (env_dict or {}).get("VLLM_SERVER_DEV_MODE"):
            pytest.skip("own classes: vLLM's development mode")
        # Most tests were written for models that answer at once.
        options = translated(args)
        self.server = Server.get(options if "--reasoning-parser" in options else [*PLAIN, *options])
        self.proc, self.uds = self.server.process, None
        self.host, _, port = self.server.url.split("//")[1].rpartition(":")
        self.port = int(port)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    @property
    def url_root(self) -> str:
        return self.server.url

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *parts])

    def get_client(self, **options):
        return openai.OpenAI(base_url=self.url_for("v1"), api_key=KEY, max_retries=0, **options)

    def get_async_client(self, **options):
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key=KEY, max_retries=0, **options)

    def get_client_anthropic(self, **options):
        import anthropic

        return anthropic.Anthropic(base_url=self.url_for(), api_key=KEY, max_retries=0, **options)

    def get_async_client_anthropic(self, **options):
        import anthropic

        return anthropic.AsyncAnthropic(base_url=self.url_for(), api_key=KEY, max_retries=0, **options)


class ModelConfig:
    """vLLM's, of which tests ask the size of the vocabulary."""

    def __init__(self, **options):
        self._config = json.loads((Path(TARGET) / "config.json").read_text(encoding="utf-8"))

    def get_vocab_size(self) -> int:
        return self._config.get("text_config", self._config)["vocab_size"]


def passed_through(*args, **options):
    """A decorator, with or without arguments, that changes nothing."""
    return args[0] if len(args) == 1 and callable(args[0]) else lambda f: f


def is_chat(url) -> bool:
    return str(url).endswith(("/chat/completions", "/chat/completions/batch"))


def budgeted(request):
    """A chat request with a bound on its thought, unless it has one: small models think until max_tokens."""
    if request.method != "POST" or not is_chat(request.url):
        return request
    try:
        body = json.loads(request.content)
    except ValueError:
        return request
    if not isinstance(body, dict):
        return request
    headers = {name: value for name, value in request.headers.items() if name.lower() != "content-length"}
    content = json.dumps(BUDGET | body).encode()
    return type(request)(request.method, request.url, headers=headers, content=content, extensions=request.extensions)


def sending(send):
    """httpx's way to send, sync or not, of budgeted requests; httpx2 is what openai's and anthropic's clients use."""
    return lambda client, request, **options: send(client, budgeted(request), **options)


def watched(send):
    """`requests`' way to send, which bounds thoughts and keeps errors."""

    def sent(self, method, url, *args, **options):
        global last_error
        if isinstance(body := options.get("json"), dict) and (is_chat(url) or body.get("require_reasoning")):
            options["json"] = (BUDGET if is_chat(url) else NATIVE_BUDGET) | body
        answer = send(self, method, url, *args, **options)
        if answer.status_code >= 400:
            last_error = f"{answer.status_code}: {answer.text[:200]}"
        return answer

    return sent


def install() -> None:
    requests.Session.request = watched(requests.Session.request)
    for package in ("httpx", "httpx2"):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(package)
            for client in (module.Client, module.AsyncClient):
                client.send = sending(client.send)
    transformers.AutoTokenizer.from_pretrained = staticmethod(tokenizer_of_target)
    sys.meta_path.insert(0, Finder())
    if VLLM:
        utils = {"RemoteOpenAIServer": RemoteOpenAIServer, "RemoteVLLMServer": RemoteOpenAIServer}
        utils |= dict.fromkeys(("multi_gpu_test", "create_new_process_for_each_test"), passed_through)
        add_module("tests", [f"{VLLM}/tests"])
        add_module("tests.entrypoints", [f"{VLLM}/tests/entrypoints"])
        add_module("tests.utils", ROCM_EXTRA_ARGS=[], ROCM_ENV_OVERRIDES={}, path=None, **utils)
        add_module("vllm")
        add_module("vllm.config", ModelConfig=ModelConfig)
        add_module("vllm.transformers_utils")
        hub = types.SimpleNamespace(snapshot_download=lambda **_: TARGET)
        add_module("vllm.transformers_utils.repo_utils", hf_api=lambda: hub)
        add_module("vllm.model_executor")
        add_module("vllm.model_executor.model_loader")
        add_module("vllm.model_executor.model_loader.weight_utils", download_weights_from_hf=lambda *_, **__: TARGET)
        add_module("vllm.tokenizers", get_tokenizer=tokenizer_of_target)
        add_module("vllm.utils")
        add_module("vllm.utils.network_utils", get_open_port=open_port)
    if SGLANG:
        root = f"{SGLANG}/sglang"
        add_module("sglang", [root])
        add_module("sglang.test", [f"{root}/test"])
        add_module("sglang.test.kits", [f"{root}/test/kits"])
        add_module("sglang.test.server_fixtures", [f"{root}/test/server_fixtures"])
        add_module("sglang.test.test_utils", **sglang_utils(Path(root) / "test/test_utils.py"))
        for name in ("sglang.srt.utils.hf_transformers_utils", "sglang.benchmark.utils"):
            add_module(name, get_tokenizer=tokenizer_of_target)


def open_port() -> int:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as s:
        return s.getsockname()[1]


def sglang_utils(path: Path) -> dict:
    """The functions of SGLang's test utilities that only talk to a server, out of their file; the rest is a stub."""
    contents = {"requests": requests, "unittest": unittest, "Tuple": tuple}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    wanted: list = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "run_logprob_check"]
    exec(compile(ast.Module(wanted, []), str(path), "exec"), contents)
    return contents | {"CustomTestCase": unittest.TestCase, "is_in_ci": bool, "is_in_amd_ci": bool}


@contextlib.contextmanager
def time_limit(seconds: int):
    def stop(*_) -> None:
        raise TimeoutError(f"the test takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    global in_test, last_error
    in_test, last_error = True, ""
    try:
        return (yield)
    finally:
        in_test = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    with time_limit(TEST_S):
        return (yield)


def pytest_collection_modifyitems(config, items) -> None:
    wanted = [item for item in items if item.nodeid not in DONE and (not ONLY or item.nodeid in ONLY)]
    if len(wanted) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
        items[:] = wanted


def pytest_collectreport(report) -> None:
    if report.outcome == "failed":
        write(report.nodeid, "failed", f"import: {last_line(report.longreprtext)}")
    elif report.outcome == "skipped":
        write(report.nodeid, "skipped", report.longrepr[2])


def pytest_runtest_logreport(report) -> None:
    if report.outcome == "skipped":
        write(report.nodeid, "skipped", str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else "expected")
    elif report.outcome == "failed":
        reason = last_line(report.longreprtext)
        answered = f" (the server's last error: {last_error})" if last_error and last_error not in reason else ""
        write(report.nodeid, "failed", reason + answered)
    elif report.when == "call":
        write(report.nodeid, "passed", "")


def last_line(text: str) -> str:
    """What went wrong, of a traceback."""
    errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return (errors or text.strip().splitlines() or [""])[0][:300]


def write(test: str, outcome: str, reason: str) -> None:
    with open(RESULTS, "a", encoding="utf-8") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "reason": reason}) + "\n")


def pytest_sessionfinish() -> None:
    for server in STARTED.values():
        server.stop()


install()

"""One server with the bundled pair, on a thread of its own, for all tests of a process."""

import asyncio
import json
import socket
import threading
import time
from collections import Counter
from functools import cache
from math import isfinite

import httpx
import openai
import pytest
import uvicorn

from dflash_jax import LLM, SamplingParams
from dflash_jax.engine.service import AsyncEngine
from dflash_jax.engine.warm_up import warm_up
from dflash_jax.server.app import build
from dflash_jax.server.connections import ConnectionLimits, protocol
from dflash_jax.server.cors import Cors
from dflash_jax.server.engine_host import EngineHost, in_process
from dflash_jax.server.serving import Serving

NAME = "Qwen/Qwen3.6-35B-A3B"
MESSAGES = [{"role": "user", "content": "Write the function `clamp`: Limit a value to a range."}]
OFF = {"enable_thinking": False}
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Reads a file",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string", "maxLength": 12}, "lines": {"type": "integer"}},
            "required": ["path"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "n"],
    "additionalProperties": False,
}


def wait_until(holds, seconds: float = 120) -> bool:
    """Whether it holds at last. The seconds are for what never comes: they do not judge speed."""
    end = time.monotonic() + seconds
    while not (found := holds()) and time.monotonic() < end:
        time.sleep(0.01)
    return found


# Turns of the event loop within which an event of the engine is a piece of its stream.
TURNS = 20
# Servers of each host.
USES: Counter[EngineHost] = Counter()


class Running:
    """A server that was started; ``url`` ends with its port."""

    def __init__(
        self,
        serving: Serving,
        host: EngineHost,
        api_key: str | None = None,
        hosts: tuple[str, ...] | None = None,
        connections: ConnectionLimits | None = None,
        cors: Cors | None = None,
        admin_key: str | None = None,
    ):
        self.serving, self.host = serving, host
        USES[host] += 1
        listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        app = build(serving, [api_key] if api_key else (), hosts, cors, [admin_key] if admin_key else ())
        config = uvicorn.Config(
            app, http=protocol(connections or ConnectionLimits()), ws="none", lifespan="off", log_level="error"
        )
        self._server = uvicorn.Server(config)
        self._server.install_signal_handlers = lambda: None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve(sockets=[listening])))
        self._thread.start()
        self.http = httpx.Client(base_url=self.url, timeout=120)
        while not self._server.started:
            time.sleep(0.01)

    def post(self, path: str, **body):
        return self.http.post(path, json=body)

    def chat(self, **body):
        """A good answer to a chat request."""
        found = self.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], **body)
        assert found.status_code == 200, found.text
        return found.json()

    def stop(self) -> None:
        self.http.close()
        self._server.should_exit = True
        self._thread.join()
        self.serving.stop_workers()
        USES[self.host] -= 1
        if not USES[self.host]:
            self.host.stop_workers()

    def kill(self) -> None:
        """Ends it as SIGKILL does: nothing listens any more, and all connections break."""
        listening, loop = self._server.servers[0], self.loop

        def end():
            listening.close()
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()

        loop.call_soon_threadsafe(end)
        self.stop()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of its thread."""
        return self._server.servers[0].get_loop()

    def idle(self) -> bool:
        """Whether every slot comes back."""
        engine = self.host.engine.engine

        def is_idle() -> bool:
            return self.serving.in_flight == 0 and engine.free_slots == engine.runner.slots and not engine.waiting

        return wait_until(is_idle)


@cache
def bundled() -> LLM:
    """The bundled pair: all servers of a process have the same programs."""
    return LLM(slots=4)


@pytest.fixture(scope="session")
def llm():
    return bundled()


def started(llm, *, prepared: bool = True, **options) -> AsyncEngine:
    options = {"max_queue": 64, "prefill_sizes": (16, 64), "masks": True, "trusts_priority": False} | options
    engine = llm.new_engine(llm.programs, 4, 1024, **options)
    if prepared:
        warm_up(engine)
    return AsyncEngine(engine).start()


def hosted(llm, engine: AsyncEngine, name: str = "tiny", *, info: dict | None = None) -> EngineHost:
    """What fronts ask of an engine that was started."""
    host = EngineHost(llm, engine, name, info)
    host.is_ready = True
    return host


@pytest.fixture(scope="session")
def managed_server():
    """A server with a model of its own and an administrator, as whom its client asks."""
    llm = LLM(slots=4)
    engine = started(llm)
    host = hosted(llm, engine, info={"model_path": "bundled"})
    running = Running(Serving(llm, in_process(host), ["tiny"]), host, "key", admin_key="root")
    running.http.headers["Authorization"] = "Bearer root"
    yield running
    running.stop()
    engine.stop()


@pytest.fixture
def managed(managed_server):
    """That server, awake and with the weights and the version that it began with before and after each test."""
    running, llm = managed_server, managed_server.host.llm
    yield running
    engine = running.host.engine.engine
    found = running.post("/update_weights_from_disk", model_path=str(llm.directory), abort_all_requests=True)
    assert found.status_code == 200, found.text
    assert running.http.post("/wake_up").status_code == 200
    assert running.http.post("/resume").status_code == 200
    assert running.post("/update_weight_version", new_version="default").status_code == 200
    assert running.idle()
    assert not engine.is_paused


def programs_of(engine) -> int:
    """Compiled for an engine's state; the library has others."""
    state = engine.runner.state.tokens.shape
    return sum(state in key for key in engine.runner.programs.compiled)


@pytest.fixture(scope="session")
def server(llm):
    engine = started(llm)
    host = hosted(llm, engine, NAME, info={"model_path": "bundled"})
    running = Running(Serving(llm, in_process(host), [NAME, "tiny"]), host)
    running.programs = programs_of(engine.engine)
    yield running
    running.stop()
    engine.stop()


@pytest.fixture
def quiet(server):
    """The server, with nothing left in it afterwards."""
    yield server
    assert server.idle()


@pytest.fixture
def stepwise(quiet, monkeypatch):
    """The server, whose engine makes a step only after the event loop has taken what the last one yielded.

    Otherwise a busy machine merges the events of many steps into one piece of a stream.
    """
    engine, loop = quiet.host.engine.engine, quiet.loop

    async def take_turns():
        for _ in range(TURNS):
            await asyncio.sleep(0)

    def step(original=engine.step):
        asyncio.run_coroutine_threadsafe(take_turns(), loop).result()
        return original()

    monkeypatch.setattr(engine, "step", step)
    return quiet


@pytest.fixture
def client(quiet):
    with openai.OpenAI(base_url=f"{quiet.url}/v1", api_key="EMPTY", max_retries=0) as client:
        yield client


def posted(server: Running, path: str, body):
    """As `Running.post`, for what httpx does not write: half characters, numbers that are none."""
    return server.http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})


def alone(llm, messages=MESSAGES, thinking=None, **params):
    """What the library says."""
    return llm.generate([llm.encode_chat(messages, thinking)], SamplingParams(**params), block_size=1)[0]


def strict(text: str | bytes):
    """Parses JSON as the strictest parser does."""

    def refuse(word):
        raise ValueError(word)

    def number(word):
        return float(word) if isfinite(float(word)) else refuse(word)

    return json.loads(text, parse_constant=refuse, parse_float=number, parse_int=number)

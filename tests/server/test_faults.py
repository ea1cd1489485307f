"""The device fails while many wait; two servers share a cache of compiled programs, and one has none."""

import asyncio
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest

from dflash_jax.engine.service import AsyncEngine
from dflash_jax.options.serve import parse
from dflash_jax.sampling_params import SamplingParams
from dflash_jax.server import supervised, wire
from dflash_jax.server.engine_host import EngineHost, in_process
from dflash_jax.server.engine_process import EngineProcess
from dflash_jax.server.serving import Serving
from tests.cli.test_serve import serving
from tests.helpers import without_kernels_line
from tests.server.conftest import Running, hosted, started, wait_until

STREAMS = 120
BODY = {"prompt": "def f(", "max_tokens": 700, "ignore_eos": True, "stream": True}


def break_device(engine: AsyncEngine, requests: int) -> None:
    """The device fails at its second result. The first one waits until so many requests are with the engine.

    The engine's thread takes them in between the two: those that the first result does not serve wait for a slot.
    """
    device, reads = engine.engine.runner, []

    def read(*args, original=device.read):
        reads.append(args)
        if len(reads) > 1:
            raise RuntimeError("the device is on fire")
        assert wait_until(lambda: engine.open_requests == requests)
        return original(*args)

    device.read = read


async def stream(client: httpx.AsyncClient) -> tuple[int, list[dict], bool]:
    """(status, what was told, whether the stream came to its end)."""
    async with client.stream("POST", "/v1/completions", json=BODY) as response:
        lines = [line async for line in response.aiter_lines() if line]
        if response.status_code != 200:
            return response.status_code, [json.loads("".join(lines))], True
        return 200, [json.loads(line[6:]) for line in lines[:-1]], lines[-1] == "data: [DONE]"


def test_the_device_fails_in_the_middle_of_many_streams(llm):
    engine = started(llm, prepared=False, max_queue=STREAMS)
    host = hosted(llm, engine)
    serving = Serving(llm, in_process(host), ["tiny"])
    running = Running(serving, host)
    break_device(engine, STREAMS)

    async def main():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=running.url, timeout=300, limits=limits) as client:
            return await asyncio.gather(*(stream(client) for _ in range(STREAMS)))

    try:
        found = asyncio.run(main())
        for status, told, is_ended in found:
            # 500 for one that failed before its headers were sent, 503 for one that came after the failure.
            assert status in (200, 500, 503)
            assert "on fire" in told[-1]["error"]["message"]
            assert is_ended
        # Some had begun, the others still waited for a slot, with their headers sent.
        assert {len(told) > 1 for status, told, _ in found if status == 200} == {True, False}
        assert running.http.get("/health").status_code == running.http.get("/ready").status_code == 503
        for path, body in (("/v1/completions", BODY), ("/generate", {"text": "x"})):
            refused = running.post(path, **body)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    finally:
        running.stop()
        engine.stop()


def test_exit_on_failure_tells_the_supervisor_of_the_failure_and_no_other_does(llm):
    async def main(*words: str) -> list:
        process, sent = EngineProcess(), asyncio.Queue()
        process.args, process.send = parse(["--bundled", *words])[0], sent.put_nowait
        engine = AsyncEngine(llm.new_engine(llm.programs, 4, 1024, prefill_sizes=(16, 64), masks=True))
        host = EngineHost(llm, engine, "tiny")
        with wire.folder() as folder:
            process.start = supervised.Start([], str(folder))
            answering = asyncio.create_task(process._answer(host))
            said = [type(await sent.get()) for _ in range(2)]
            assert said == [supervised.Loaded, supervised.Ready]
            break_device(engine, 1)
            sequence = llm.new_sequence("def f(", SamplingParams(max_tokens=700, ignore_eos=True))
            events = [event async for event in engine.submit(sequence.request)]
            assert "on fire" in str(events[-1].error)
            # What the engine's thread says of the failure it says before it ends.
            process.receive(supervised.Stop())
            assert await answering == 0
            await asyncio.sleep(0)
        return [sent.get_nowait() for _ in range(sent.qsize())]

    assert asyncio.run(main("--exit-on-failure")) == [supervised.Broken()]
    assert asyncio.run(main()) == []


def test_a_warm_up_that_fails_ends_the_engines_process_with_code_1(llm, caplog):
    def fail(*_):
        raise RuntimeError("the compiler is on fire")

    async def main() -> tuple[int, list]:
        process, sent = EngineProcess(), []
        process.args, process.send = parse(["--bundled"])[0], sent.append
        host = EngineHost(llm, AsyncEngine(llm.new_engine(llm.programs, 4, 1024, prefill_sizes=(16, 64))), "tiny")
        host.warm_up.first = fail
        with wire.folder() as folder:
            process.start = supervised.Start([], str(folder))
            return await process._answer(host), sent

    assert asyncio.run(main()) == (1, [supervised.Loaded(), supervised.Failed("", 1)])
    assert "the compiler is on fire" in caplog.text


def test_two_servers_start_on_one_cache(tmp_path):
    options = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: stack.enter_context(serving(environment=options)), range(2)))
        body = {"prompt": "def f(", "max_tokens": 20, "temperature": 0}
        texts = [httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()["choices"] for _, url in both]
        assert texts[0] == texts[1]
    assert list(tmp_path.iterdir())


PROGRAM = """
import logging, sys
logging.basicConfig(format="%(message)s")
from dflash_jax import LLM, SamplingParams
import resource
if sys.argv[1] == "full":
    # As a disk without room: whatever is written to a file fails.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
for _ in range(2):
    llm = LLM(draft=None, slots=1)
print(llm.generate(["def f("], SamplingParams(max_tokens=4, temperature=0.0))[0].token_ids)
"""


@pytest.mark.parametrize(
    "kind", ["full", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("no directory", "no user cache"))]
)
def test_a_cache_that_cannot_be_written_is_one_line(llm, kind, tmp_path):
    (tmp_path / "file").touch()
    directory = tmp_path / ("cache" if kind == "full" else "file")
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(directory), "JAX_PLATFORMS": "cpu"}
    if kind == "no user cache":
        del environment["JAX_COMPILATION_CACHE_DIR"]
        environment["XDG_CACHE_HOME"], directory = str(directory), directory / "dflash_jax"
        # The kernels in C++ would be compiled anew.
        environment["CXX"] = "/bin/false"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind], env=environment, capture_output=True, text=True, check=True
    )
    (line,) = without_kernels_line(done.stderr).splitlines()
    assert line.startswith(f"compiled programs are not kept: {directory}: ")
    assert len(json.loads(done.stdout)) == 4

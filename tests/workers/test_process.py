"""Workers have processor time, not time of the clock: a busy machine refuses nothing."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from dflash_jax.errors import InputError
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.media.decoding import MediaDecoder
from dflash_jax.media.processor import ImageSettings
from dflash_jax.protocol import Form
from dflash_jax.server.errors import ApiError
from dflash_jax.server.grammar import GrammarProcesses, grammar_tokens
from dflash_jax.server.templates import Templates
from dflash_jax.workers.process import STUCK_S, WorkerProcess
from tests.media.encoded import encoded, picture
from tests.server.conftest import wait_until
from tests.server.test_grammar_processes import is_gone


def template():
    templates = Templates(Tokenizer(TINY / "target"))
    return templates, lambda: templates.render([{"role": "user", "content": "x"}])


def image():
    decoder = MediaDecoder()
    return decoder, lambda: decoder.decode(encoded(picture(33, 50)), ImageSettings())


def grammar():
    processes = GrammarProcesses(grammar_tokens(Tokenizer(TINY / "target"), 512, (2, 0)))
    return processes, lambda: processes.grammar(Form.of("regex", "[ab]{2,40}c", "f"))


@pytest.mark.parametrize("kind", [template, image, grammar])
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_worker_without_processor_time_is_waited_for_until_it_is_stuck(kind, goes_on, monkeypatch):
    owner, work = kind()
    forked, stopped, ahead = owner._nursery.forked, [], 0.0

    async def stopped_at_once() -> WorkerProcess:
        process = await forked()
        while process.pid is None:
            process.poll()
            await asyncio.sleep(0.01)
        os.kill(process.pid, signal.SIGSTOP)
        stopped.append(process)
        return process

    async def turn() -> None:
        # Timers that are due run within two turns of the loop.
        for _ in range(10):
            await asyncio.sleep(0)

    async def main() -> None:
        nonlocal ahead
        # Only this loop's clock: others of this process have timers, too.
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: time.monotonic() + ahead)
        task = asyncio.create_task(work())
        while not stopped:
            await asyncio.sleep(0.01)
        await turn()
        ahead = STUCK_S - 60
        await turn()
        assert not task.done()
        if goes_on:
            os.kill(stopped[0].pid, signal.SIGCONT)
            await task
            return
        ahead = STUCK_S + 60
        with pytest.raises((InputError, ApiError)):
            await task

    monkeypatch.setattr(owner._nursery, "forked", stopped_at_once)
    try:
        asyncio.run(main())
        assert goes_on or wait_until(lambda: is_gone(stopped[0].pid))
    finally:
        owner.stop()


def test_the_processor_time_of_all_threads_is_limited():
    code = """
import threading, time
from dflash_jax.workers.loop import limit_seconds
limit_seconds(1)
def burn():
    while time.process_time() < 20:
        pass
thread = threading.Thread(target=burn)
thread.start()
thread.join()
"""
    ended = subprocess.run([sys.executable, "-c", code], check=False)
    assert ended.returncode == -signal.SIGXCPU

"""How a process ends on an interrupt, and where its lines go without a stderr."""

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_jax import process

ROOT = Path(__file__).parents[1]


def run_lines(*lines: str) -> subprocess.CompletedProcess:
    """A process of these lines, in which SIGINT has Python's own handler as in a foreground process of a shell."""
    program = ["import os, signal, sys", "signal.signal(signal.SIGINT, signal.default_int_handler)", *lines]
    return subprocess.run([sys.executable, "-c", "\n".join(program)], capture_output=True, text=True, timeout=60)


def test_a_closed_stderr_does_not_send_its_lines_to_stdout():
    command = "import sys; from dflash_jax.process import exit_code; exit_code(lambda: print(1, file=sys.stderr) or 0)"
    done = subprocess.run(["bash", "-c", '"$0" -c "$1" 2>&-', sys.executable, command], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_an_unknown_command_with_a_closed_stderr_does_not_write_to_stdout():
    done = subprocess.run(
        ["bash", "-c", '"$0" -m dflash_jax nonsense 2>&-', sys.executable], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize("main", ["exit_code(interrupted)", "interrupted()"], ids=["in a command", "during imports"])
def test_an_interrupt_ends_the_process_although_a_thread_runs(main):
    done = run_lines(
        "import threading",
        "from dflash_jax.process import exit_code, exit_process",
        "def interrupted(): raise KeyboardInterrupt",
        "threading.Thread(target=threading.Event().wait).start()",
        f"exit_process(lambda: {main})",
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ninterrupted\n")


@pytest.mark.parametrize("before", ["", "import jax.numpy"], ids=["before JAX", "after JAX"])
def test_an_interrupt_inside_an_import_ends_the_process_without_an_exception(before, tmp_path):
    (tmp_path / "interrupted.py").write_text(
        "import os, signal, time\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('raised')\n"
    )
    done = run_lines(
        before,
        "from dflash_jax.process import exit_process",
        f"sys.path.insert(0, {str(tmp_path)!r})",
        "def main(): import interrupted; return 0",
        "exit_process(main)",
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ninterrupted\n")


def test_an_interrupt_inside_a_finalizer_is_not_lost():
    done = run_lines(
        "import time",
        "from dflash_jax.process import exit_process",
        "class Final:",
        "    def __del__(self):",
        "        os.kill(os.getpid(), signal.SIGINT)",
        "        time.sleep(0.1)",
        "def main():",
        "    Final()",
        "    time.sleep(60)",
        "    return 0",
        "exit_process(main)",
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ninterrupted\n")


def test_an_interrupt_ends_the_process_while_its_main_thread_runs_no_python():
    # Locking a mutex twice never returns, as a compilation that takes long. With this interval between switches the
    # signal is sent when the main thread waits there.
    done = run_lines(
        "import ctypes, threading",
        "from dflash_jax.process import exit_process",
        "mutex, lock, go = ctypes.create_string_buffer(256), ctypes.CDLL(None).pthread_mutex_lock, threading.Event()",
        "def interrupt():",
        "    go.wait()",
        "    os.kill(os.getpid(), signal.SIGINT)",
        "def main():",
        "    lock(mutex)",
        "    threading.Thread(target=interrupt, daemon=True).start()",
        "    sys.setswitchinterval(1e4)",
        "    go.set()",
        "    lock(mutex)",
        "exit_process(main)",
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ninterrupted\n")


def test_an_interrupt_of_a_coroutine_does_not_wait_for_its_threads():
    done = run_lines(
        "import asyncio, threading",
        "from dflash_jax.process import exit_process, run_async",
        "def compile():",
        "    os.kill(os.getpid(), signal.SIGINT)",
        "    threading.Event().wait()",
        "async def work():",
        "    await asyncio.to_thread(compile)",
        "exit_process(lambda: run_async(work()))",
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ninterrupted\n")


@pytest.mark.parametrize(
    ("handler", "ends"),
    [(process._on_interrupt, 1), (signal.default_int_handler, 0)],
    ids=["own handler", "another handler"],
)
def test_an_interrupt_is_left_to_another_handler(monkeypatch, handler, ends):
    ended, (received, sent) = [], os.pipe()
    monkeypatch.setattr(process, "INTERRUPT_S", 0.0)
    monkeypatch.setattr(process, "_end_interrupted", lambda: ended.append(1))
    monkeypatch.setattr(signal, "getsignal", lambda _: handler)
    os.write(sent, bytes([signal.SIGINT, signal.SIGTERM]))
    os.close(sent)
    process._watch_interrupts(received)
    os.close(received)
    assert len(ended) == ends


@pytest.mark.parametrize("before", ["", "import jax"], ids=["before JAX", "after JAX"])
def test_an_interrupt_outside_an_import_runs_finally(before):
    done = run_lines(
        before,
        "from dflash_jax.process import exit_process",
        "def main():",
        "    try:",
        "        os.kill(os.getpid(), signal.SIGINT)",
        "    finally:",
        "        print('cleanup')",
        "    return 0",
        "exit_process(main)",
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "cleanup\n", "\ninterrupted\n")


def test_an_interrupt_of_a_coroutine_cancels_it_at_its_await_and_the_handler_is_restored():
    done = run_lines(
        "import asyncio",
        "from dflash_jax import process",
        "async def work():",
        "    os.kill(os.getpid(), signal.SIGINT)",
        "    print('step finished')",
        "    try:",
        "        await asyncio.sleep(60)",
        "    except asyncio.CancelledError:",
        "        print('cancelled')",
        "        raise",
        "def main():",
        "    try:",
        "        process.run_async(work())",
        "    finally:",
        "        print(signal.getsignal(signal.SIGINT) is process._on_interrupt)",
        "process.exit_process(main)",
    )
    assert (done.returncode, done.stdout) == (130, "step finished\ncancelled\nTrue\n"), done.stderr


def test_an_interrupt_with_a_closed_stream_has_its_exit_code():
    done = run_lines(
        "from dflash_jax.process import exit_process",
        "def main(): sys.stdout.close(); return 130",
        "exit_process(main)",
    )
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize("script", ["gguf_to_hf", "hf_to_orbax", "orbax_to_hf"])
def test_converters_end_by_exit_process(script, monkeypatch):
    codes = []
    monkeypatch.setattr(process, "exit_process", lambda main: codes.append(main()))
    monkeypatch.setattr(sys, "argv", [script])
    runpy.run_path(str(ROOT / "convert" / f"{script}.py"), run_name="__main__")
    assert codes == [2]

"""How a process ends on an interrupt, and where its lines go without a stderr."""

import subprocess
import sys

import pytest


def test_a_closed_stderr_does_not_send_its_lines_to_stdout():
    command = (
        "import sys; from dflash_jax.cli.options import exit_code; exit_code(lambda: print(1, file=sys.stderr) or 0)"
    )
    done = subprocess.run(["bash", "-c", '"$0" -c "$1" 2>&-', sys.executable, command], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("main", ["exit_code(interrupted)", "interrupted()"], ids=["in a command", "during imports"])
def test_an_interrupt_ends_the_process_although_a_thread_runs(main):
    lines = [
        "import threading",
        "from dflash_jax.cli.options import exit_code, exit_process",
        "def interrupted(): raise KeyboardInterrupt",
        "threading.Thread(target=threading.Event().wait).start()",
        f"exit_process(lambda: {main})",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ninterrupted\n")


def test_an_interrupt_before_jax_is_imported_does_not_raise_inside_an_import():
    lines = [
        "import os, signal, time",
        "from dflash_jax.cli.options import exit_process",
        "def main():",
        "    try:",
        "        os.kill(os.getpid(), signal.SIGINT)",
        "        time.sleep(60)",
        "    except KeyboardInterrupt:",
        "        print('raised')",
        "signal.signal(signal.SIGINT, signal.default_int_handler)",
        "exit_process(main)",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ninterrupted\n")

"""Arguments and files that no honest user gives: each is one line that names the value."""

import subprocess
import sys

import pytest

from dflash_jax.checkpoint.config_files import MAX_TOML_BYTES
from dflash_jax.cli.system_config import read_system
from dflash_jax.errors import InputError
from dflash_jax.server.transport import listen
from dflash_jax.training.config import read_toml


@pytest.mark.parametrize("read", [read_system, read_toml])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a = " + b"[" * 20000 + b"]" * 20000, "nested too deeply"),
        (b"#" * (MAX_TOML_BYTES + 1), f"more than {MAX_TOML_BYTES} bytes"),
        (bytes(range(256)), "is not TOML"),
    ],
    ids=["nested", "large", "binary"],
)
def test_a_hostile_config_is_an_input_error(read, content, said, tmp_path):
    path = tmp_path / "hostile.toml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=said) as error:
        read(str(path))
    assert str(path) in str(error.value)


def test_a_config_without_an_end_is_an_input_error():
    with pytest.raises(InputError, match="/dev/zero has more than"):
        read_system("/dev/zero")


def test_an_empty_host_does_not_open_all_networks():
    with pytest.raises(InputError, match="--host is empty"):
        listen("", 0)


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

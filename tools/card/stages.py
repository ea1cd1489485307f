"""The stages of `scripts/card/check.py`, each in a process of its own.

    python -m tools.card.stages STAGE --platform cuda --out DIRECTORY

Reads {"done": [names], "share": [i, n]}, a line, from stdin, and ends when that is closed. Each n-th case from the i-th
on is its own. Writes to stdout, a JSON object a line, the names of all cases, and of each of its own that is not done
the beginning and the result. A case's status: exact, failed, measured, skipped (no room), or not run.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

Cases = Iterator[tuple[str, Callable[[], dict]]]
# Packages that the stages import; on a CPU Triton's interpreter takes torch's tensors.
NEEDED = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")
NEEDED_BY = {"cuda": ("triton", "jax-triton"), "tpu": ("libtpu",), "cuda on cpu": ("triton", "torch"), "tpu on cpu": ()}
# The platforms of devices, each with the stages of a check; the CPU stands for either.
STAGES_OF = {
    "cuda": ("machine", "build", "kernels", "tokens", "large", "ruler"),
    "tpu": ("machine", "kernels", "tokens", "ruler"),
}
CARD = "name,driver_version,memory.total,compute_cap,power.limit"
CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,temperature.gpu,power.draw"


# The reason of a case that failed or was skipped for lack of memory.
NO_ROOM = "the device has no room for it"


class NotRunError(Exception):
    """A case that this machine cannot run; the message says why."""


def smi(fields: str) -> dict:
    """{field: value} of the first card, from nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        raise NotRunError("nvidia-smi is not there")
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.partition("\n")[0]
    names, values = fields.split(","), [value.strip() for value in said.split(",")]
    if len(names) != len(values) or not said.strip():
        raise NotRunError(f"nvidia-smi says {said!r}")
    return {"status": "measured"} | dict(zip(names, values, strict=True))


def on_device(args) -> bool:
    """Whether there is a device of the kind that is checked; the CPU stands for it otherwise."""
    return args.platform != "cpu"


def machine(args) -> Cases:
    """The machine and its versions."""
    on_card = args.platform == "cuda"

    def packages() -> dict:
        versions = {}
        for name in (*NEEDED, *NEEDED_BY[args.kind if on_device(args) else f"{args.kind} on cpu"]):
            try:
                versions[name] = version(name)
            except PackageNotFoundError:
                versions[name] = "missing"
        if on_card and not any(map(importlib.util.find_spec, ("jax_cuda13_plugin", "jax_cuda12_plugin"))):
            versions["jax-cuda13-plugin"] = "missing"
        missing = [name for name, one in versions.items() if one == "missing"]
        return ({"status": "failed", "why": f"missing: {', '.join(missing)}"} if missing else measured()) | versions

    def kernels_wanted() -> dict:
        from dflash_jax.ops.backend import Backend

        if not on_card:
            raise NotRunError("there is no card: kernels run in Triton's interpreter")
        why = Backend.detect().no_triton
        return {"status": "failed", "why": why} if why else measured()

    def described() -> dict:
        import jax

        from dflash_jax.parallel.devices import versions

        device = jax.devices()[0]
        memory = (device.memory_stats() or {}).get("bytes_limit")
        count = {"devices": len(jax.local_devices())} if args.kind == "tpu" else {}
        return measured(device=device.device_kind, **count, versions=versions(), bytes_for_jax=memory)

    def assemblers() -> dict:
        import jax

        from dflash_jax.ops.card import HOPPER, Card
        from dflash_jax.ops.kernels.triton import ptx

        releases = {str(path): ptx.release_of(path) for path in ptx.assemblers()}
        device = jax.devices()[0]
        card = Card.of_device(device) if hasattr(device, "compute_capability") else HOPPER
        return measured(ptx_version=ptx.ptx_version(card.least_ptx), **releases)

    def bandwidth() -> dict:
        from tools.decode import bench as bench_decode

        return measured(gb_per_s=round(bench_decode.measured_bandwidth() / 1e9, 1))

    yield "packages", packages
    yield "device and versions", described
    if args.kind == "tpu":
        yield "bandwidth", bandwidth
        return
    yield "card and driver", lambda: smi(CARD)
    yield "clocks at rest", lambda: smi(CLOCKS)
    yield "assemblers, and the PTX version that Triton is asked for", assemblers
    yield "kernels", kernels_wanted
    yield "bandwidth", bandwidth
    yield "clocks after it", lambda: smi(CLOCKS)


def described_tpus() -> str:
    """The TPUs of this machine, by a process of its own, which gives them back.

    Raises:
        NotRunError: There are none.
    """
    said = subprocess.run(
        [sys.executable, "-c", "import jax; d = jax.local_devices(); print(len(d), 'x', d[0].device_kind)"],
        env=os.environ | {"JAX_PLATFORMS": "tpu"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    if said.returncode:
        raise NotRunError((said.stderr.strip().splitlines() or ["JAX finds no TPU"])[-1][:300])
    return said.stdout.strip().splitlines()[-1]


def measured(**figures) -> dict:
    """The result of a case that measures."""
    return {"status": "measured"} | figures


def build(args) -> Cases:
    """Compiles the kernels of the published models."""
    from tools.card import build as card_build

    return card_build.cases(args.platform == "cuda")


def kernels(args) -> Cases:
    """Compares each kernel with its definition."""
    from tools.kernels import cases as kernel_cases
    from tools.kernels.comparisons import REAL, SMALL, SMALL_OF_A_TPU

    is_real, of_kind = on_device(args), {"cuda": kernel_cases.remaining_first, "tpu": kernel_cases.of_a_tpu}[args.kind]
    sizes = REAL if is_real else {"cuda": SMALL, "tpu": SMALL_OF_A_TPU}[args.kind]
    for i, (name, make) in enumerate(of_kind(sizes)):
        yield name, lambda i=i, make=make: kernel_cases.check(make(kernel_cases.Source(i, is_real)), is_real)


def large(args) -> Cases:
    """Checks kernels on arrays of more than 2³¹ elements, and under NVIDIA's compute-sanitizer."""
    from tools.kernels import large as kernel_large

    on_card = args.platform == "cuda"
    for name, check in kernel_large.cases():
        yield name, check if on_card else _needs_a_card
    for tool in ("memcheck", "racecheck"):
        yield f"compute-sanitizer, {tool}", (lambda tool=tool: _sanitized(tool)) if on_card else _needs_a_card


def _needs_a_card() -> dict:
    raise NotRunError("it needs a card")


def _sanitized(tool: str) -> dict:
    """Runs the stage `sanitizer` under NVIDIA's compute-sanitizer, where each array is an allocation of its own."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.access(program, os.X_OK):
        raise NotRunError("compute-sanitizer is not installed")
    # JAX asks the driver for attributes that some drivers lack, and goes on: that is no error of a kernel.
    command = [program, "--tool", tool, "--error-exitcode", "9", "--report-api-errors", "no"]
    command += [sys.executable, "-m", __spec__.name, "sanitizer", "--platform", "cuda"]
    environment = os.environ | {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    asked = json.dumps({"done": [], "share": [0, 1]}) + "\n"
    done = subprocess.run(command, env=environment, input=asked, stdout=subprocess.PIPE, text=True)
    ends = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"end"')]
    wrong = [one["end"] for one in ends if one["status"] != "exact"]
    if done.returncode or wrong or not ends:
        return {"status": "failed", "why": f"exit code {done.returncode}; {', '.join(wrong) or f'{len(ends)} cases'}"}
    return {"status": "exact", "cases": len(ends)}


def sanitizer(args) -> Cases:
    """Runs kernels alone, at small sizes: one token and several, one row and several, few and many, joined and not."""
    from dflash_jax.ops.kernels.triton import call
    from tools.kernels import cases as kernel_cases
    from tools.kernels.comparisons import SMALL

    seen = set()
    for i, (name, make) in enumerate(kernel_cases.comparisons(SMALL)):
        match = re.match(r"(\w+) \w+, B (\d+), T (\d+)", name)
        assert match is not None, name
        function, rows, count = match.groups()
        is_joined = name.endswith(kernel_cases.JOINED)
        form = function, rows == "1", count == "1", int(count) > 16, is_joined
        if form not in seen and not (is_joined and call.why_not()):
            seen.add(form)
            yield name, lambda i=i, make=make: kernel_cases.launched(make(kernel_cases.Source(i)))


def tokens(args) -> Cases:
    """Compares an engine's tokens."""
    from tools.card import tokens as card_tokens

    return card_tokens.cases(args.kind, on_device(args))


def ruler(args) -> Cases:
    """Measures speed."""
    from tools.card import ruler as card_ruler

    return card_ruler.cases(args.kind, on_device(args), args.out)


# Those that an interpreter runs where there is no device.
INTERPRETED = ("kernels", "tokens")
STAGES = {f.__name__: f for f in (machine, build, kernels, tokens, large, ruler, sanitizer)}


def has_no_room(said: str) -> bool:
    """Whether an error is a lack of memory: XLA also gives RESOURCE_EXHAUSTED for too many registers of a kernel."""
    return (
        "ptxas" not in said
        and re.search(r"out of memory|\ballocat(e|ing)\b.*(\bbytes|\dB|iB)\b", said, re.I) is not None
    )


def result(check: Callable[[], dict], stage: str) -> tuple[dict, bool]:
    """The result of a case, and whether the process can go on.

    A device that failed computes nothing more. In the stage `build`, whose arrays are small beside a card, a lack of
    memory is a failure.
    """
    from dflash_jax.errors import InputError

    try:
        return check(), True
    except (NotRunError, InputError) as e:
        return {"status": "not run" if isinstance(e, NotRunError) else "skipped", "why": str(e)}, True
    except Exception as e:
        said = " ".join(str(e).split())
        if has_no_room(said):
            is_build = stage == "build"
            return {"status": "failed" if is_build else "skipped", "why": NO_ROOM}, not is_build
        traceback.print_exc()
        is_device = type(e).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
        return {"status": "failed", "why": f"{type(e).__name__}: {said[:300]}"}, not is_device


def run(args, say: Callable[[dict], None], done: set[str], share: tuple[int, int]) -> int:
    """Runs the cases of a stage that are not ``done``, and passes each result to ``say``; returns the exit code.

    ``share``, (i, n): each n-th case from i on.
    """
    cases = list(STAGES[args.stage](args))
    say({"cases": [name for name, _ in cases]})
    for name, check in cases[share[0] :: share[1]]:
        if name in done:
            continue
        say({"begin": name})
        began = time.monotonic()
        outcome, goes_on = result(check, args.stage)
        say({"end": name, "seconds": round(time.monotonic() - began, 1)} | outcome)
        if not goes_on:
            return 1
    return 0


def end_with_parent() -> None:
    """Ends this process group when stdin is closed: one whose parent was killed would keep the card."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def main() -> int:
    """Runs one stage in this process; its results are JSON lines on stdout."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("stage", choices=STAGES)
    p.add_argument("--platform", choices=["cpu", *STAGES_OF], required=True)
    p.add_argument("--kind", choices=STAGES_OF, default="cuda", help="what a CPU stands for")
    p.add_argument("--out", help="where the ruler's files go")
    args = p.parse_args()
    args.kind = args.platform if on_device(args) else args.kind
    if args.platform == "tpu":
        from dflash_jax.errors import InputError
        from dflash_jax.parallel.distributed import check_whole

        try:
            check_whole("tpu")
        except InputError as e:
            print(f"error: {e}", file=sys.stderr)
            return 2
    # Output of libraries is not part of the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    asked = json.loads(sys.stdin.readline())
    done, share = set(asked["done"]), tuple(asked["share"])
    if args.stage != "sanitizer":
        end_with_parent()
    with _prepared(args):
        return run(args, lambda line: print(json.dumps(line), file=answers, flush=True), done, share)


def _prepared(args):
    """A context in which kernels are interpreted, where there is no card and a stage runs some."""
    from contextlib import ExitStack

    stack = ExitStack()
    if args.stage in ("kernels", "tokens", "large", "sanitizer"):
        from dflash_jax.engine.compile_cache import enable_disk_cache

        enable_disk_cache()
        if args.kind == "tpu" and not on_device(args):
            from jax.experimental.pallas import tpu as pallas

            stack.enter_context(pallas.force_tpu_interpret_mode(pallas.InterpretParams()))
        elif args.platform == "cpu" and args.stage in INTERPRETED:
            from tools.triton_interpreter import interpreting, small_grids

            stack.enter_context(interpreting())
            stack.enter_context(small_grids())
    return stack


if __name__ == "__main__":
    sys.exit(main())

"""Checks and measures everything on a machine with an NVIDIA card or TPUs, in one command.

    python scripts/card/check.py --minutes 30 --out card-check
    python scripts/card/check.py --minutes 10 --resume card-check/report.json     # goes on where that one stopped
    python scripts/card/check.py --platform tpu --minutes 45                      # and so on, by --resume
    python scripts/card/check.py --platform cpu --minutes 10                      # as far as a CPU goes, interpreted
    python scripts/card/check.py --platform cpu --as tpu --minutes 10             # the same for a TPU

From a checkout that is not installed: PYTHONPATH=. python scripts/card/check.py --minutes 30

Stages, each in processes of its own: the machine, every kernel built and launched at the shapes of three systems, every
kernel against its definition, tokens with kernels and without, kernels on large arrays and under NVIDIA's sanitizer,
and for the rest of the time the ruler, with the default kernels and with all by turns. Most of the time of the second
to the fourth is compilation: --workers processes share their cases, and the card. A case that crashes ends its process
and counts as failed; one that takes too long is timed out, and failed if the next command's second try is too. The
others go on. The report is written after each case: report.json and report.md, beside log.txt and the ruler's traces,
at most 8 files in all.

On TPUs every implementation of an operation that a TPU takes is compared with its definition on the host's processor:
what is chosen first, then Pallas' kernels, which no TPU has run. Then come tokens, on one device and on all of the
host, and the ruler. One process has the TPUs at a time. On a host of a larger slice, where GKE's variables tell it, the
check needs TPU_WORKER_HOSTNAMES=localhost and TPU_WORKER_ID=0 (no slice has tried them): else the driver would wait.

Exit code: 0 where all that can run here is exact, 1 where something is not or nothing of a stage is, 3 where time ran
out before or a case timed out (--resume goes on), 2 for a wrong option or one host of a slice. A command ends within
its minutes; a CPU has 2.4 times as many.
"""

import argparse
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dflash_jax.parallel.distributed import check_whole
from tools.card import report as card_report
from tools.card import stages as card_stages
from tools.card.wheels import install

# With the package and tools/, for the processes that this one starts.
ROOT = Path(__file__).resolve().parents[2]
STAGE = "tools.card.stages"
# By stage: its share of the time, and the limit in seconds of a case and of the start. A case may also take no more
# than half of the share, so that other cases run after one that hangs. The ruler has the remaining time.
STAGES = {
    "machine": (0.15, 120), "build": (0.25, 240), "kernels": (0.5, 240), "tokens": (0.4, 300), "large": (0.25, 240),
    "ruler": (1.0, 420),
}  # fmt: skip
# Those that decide the exit code: others measure.
EXACT = ("build", "kernels", "tokens", "large")
# Those whose cases several processes share: neither speed nor the whole memory of the card matters there.
SHARED = ("build", "kernels", "tokens")
# Where the interpreter stands in for a card.
SLOWER_ON_CPU = 2.4
# Before the time is over: to end a process and write.
RESERVE_S = 15
# How long a process may take to end after it has closed its output.
ENDING_S = 10
LOG_BYTES = 2**20


def fresh(platform: str, card: str, kind: str = "cuda") -> dict:
    """A record of nothing yet."""
    return {"about": {"platform": platform, "kind": kind, "card": card, "commands": []}, "stages": {}}


@dataclass
class Report:
    """The record of all commands so far, in ``out``."""

    out: Path
    record: dict
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def end(self, stage: dict, case: str, outcome: dict) -> None:
        """Takes a case's result, and saves."""
        with self._lock:
            stage["cases"][case] = outcome
            self.save()

    def save(self) -> None:
        """Both files, each whole or as before."""
        with self._lock:
            self._save()

    def _save(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        texts = {"report.json": json.dumps(self.record, indent=1) + "\n", "report.md": card_report.page(self.record)}
        for name, text in texts.items():
            new = self.out / f"{name}.new"
            new.write_text(text, encoding="utf-8")
            new.replace(self.out / name)

    def stage(self, name: str) -> dict:
        """The record of a stage; a new one where there is none."""
        return self.record["stages"].setdefault(name, {"state": "not begun", "total": None, "cases": {}})


class Worker:
    """A stage's process, and the lines that it writes.

    Attributes:
        cases: The names of the stage's cases; None before it says them.
        open_case: The case that it runs.
        ended: Number of cases with a result.
    """

    def __init__(self, command: list[str], environment: dict, log, done: list[str], share: tuple[int, int]):
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            start_new_session=True,
        )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.cases: list[str] | None = None
        self.open_case: str | None = None
        self.ended = 0
        self.lines: queue.Queue = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        # A process that died at its start reads nothing. The others end when this end of the pipe is closed.
        with suppress(BrokenPipeError):
            self.stdin.write(json.dumps({"done": done, "share": share}) + "\n")
            self.stdin.flush()

    def _read(self) -> None:
        for line in self.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def line(self, seconds: float) -> dict | None:
        """The next line; None after the last. Raises queue.Empty where none came in time."""
        text = self.lines.get(timeout=max(seconds, 0))
        return None if text is None else json.loads(text)

    def end(self) -> int:
        """Its exit code, after it and its children were ended."""
        # One that has closed its output is about to end by itself, with a code that says why.
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(0 if self.reader.is_alive() else ENDING_S)
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        self.reader.join()
        self.stdout.close()
        with suppress(BrokenPipeError):
            self.stdin.close()
        return code


def run_stage(
    report: Report, name: str, command: list[str], environment: dict, until: float, limits: tuple[float, float],
    workers: int,
) -> None:  # fmt: skip
    """Runs the cases of a stage that have no result yet or that timed out in an earlier command.

    The cases are divided among ``workers`` processes. Whenever one has died, another one goes on.

    Args:
        report: Gets the results.
        name: Name of the stage.
        command: The command of a process.
        environment: Its environment.
        until: When the stage must end, by `time.monotonic`.
        limits: Seconds that the start of a process, and that a case may take.
        workers: Number of processes.
    """
    stage = report.stage(name)
    stage["state"] = "not finished"
    again = {name for name, case in stage["cases"].items() if case["status"] == "timed out"}
    run = partial(run_share, report, stage, again, command, environment, until, limits)
    with ThreadPoolExecutor(workers) as pool:
        try:
            states = [*pool.map(run, [(i, workers) for i in range(workers)])]
        except KeyboardInterrupt:
            # The threads would go on. Their processes end with this one.
            report.save()
            os._exit(128 + signal.SIGINT)
    crowded = [name for name, case in stage["cases"].items() if case.get("why") == card_stages.NO_ROOM]
    if crowded and workers > 1:
        # What other processes took, one by itself may have.
        for name in crowded:
            del stage["cases"][name]
        states.append(run((0, 1)))
    if set(states) == {"finished"} and any(case["status"] == "timed out" for case in stage["cases"].values()):
        states = ["not finished"]
    # A failure to start before all others.
    order = ("failed", "timed out", "not finished", "finished")
    stage["state"] = min(states, key=lambda state: [state.startswith(each) for each in order].index(True))
    report.save()


def run_share(
    report: Report, stage: dict, again: set[str], command: list[str], environment: dict, until: float,
    limits: tuple[float, float], share: tuple[int, int],
) -> str:  # fmt: skip
    """Runs one worker's part of `run_stage`, each n-th case from i on: the state of this part.

    Args:
        report: Gets the results.
        stage: Its record of the stage.
        again: The cases that timed out in an earlier command, which have a second try.
        command: The command of a process.
        environment: Its environment.
        until: When the stage must end, by `time.monotonic`.
        limits: Seconds that the start of a process, and that a case may take.
        share: (i, n).
    """

    def done() -> list[str]:
        cases = [*stage["cases"].items()]
        return [name for name, case in cases if name not in again or case["status"] != "timed out"]

    while True:
        with (report.out / "log.txt").open("a") as log:
            worker = Worker(command, environment, log, done(), share)
            why = follow(report, stage, worker, until, limits)
            code = worker.end()
        if why == "out of time":
            return "not finished"
        if worker.open_case is not None:
            if why is None:
                ended = {"status": "failed", "why": ended_by(code)}
            elif worker.open_case in again:
                ended = {"status": "failed", "why": f"hangs: {why}, as in an earlier command"}
            else:
                ended = {"status": "timed out", "why": why}
            report.end(stage, worker.open_case, ended)
            worker.ended += 1
        if worker.cases is not None and {*worker.cases[share[0] :: share[1]]} <= {*done()}:
            return "finished"
        if not worker.ended:
            kind = "failed" if why is None else "timed out"
            return f"{kind}: {why or ended_by(code)} before its first case; log.txt says more"


def follow(report: Report, stage: dict, worker: Worker, until: float, limits: tuple[float, float]) -> str | None:
    """Takes a process's lines into the report until there are no more: None, or why it must end."""
    while True:
        limit = limits[worker.open_case is not None]
        remaining_s = until - time.monotonic()
        try:
            line = worker.line(min(remaining_s, limit))
        except queue.Empty:
            return "out of time" if remaining_s <= limit else f"no answer in {limit:.0f} s"
        if line is None:
            return None
        if "cases" in line:
            worker.cases, stage["total"] = line["cases"], len(line["cases"])
        elif "begin" in line:
            worker.open_case = line["begin"]
        else:
            worker.open_case, worker.ended = None, worker.ended + 1
            report.end(stage, line.pop("end"), line)


def ended_by(code: int) -> str:
    """Why a case has no result: the exit code of its process in words."""
    return f"its process ended by {signal.Signals(-code).name}" if code < 0 else f"its process ended with code {code}"


def shorten_log(path: Path) -> None:
    """Keeps the last half MiB of a log above one MiB."""
    text = path.read_bytes()
    if len(text) > LOG_BYTES:
        path.write_bytes(text[-LOG_BYTES // 2 :])


def environment_of(stage: str, platform: str, installed: str | None, workers: int, kind: str = "cuda") -> dict:
    """The environment of a stage's processes, ``workers`` at a time."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (installed, str(ROOT), environment.get("PYTHONPATH"))))
    environment |= {"PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu" if platform == "cpu" else f"{platform},cpu"}
    if platform == "cuda" and workers > 1:
        # They share the card's memory, and give it back.
        environment |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    if platform == "cpu" and kind == "cuda" and stage in card_stages.INTERPRETED:
        environment["TRITON_INTERPRET"] = "1"
    if platform == "cpu" and stage in ("kernels", "tokens", "ruler"):
        # Compilation takes longer than what it compiles.
        environment.setdefault(
            "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
        )
    return environment


def exit_code(record: dict) -> int:
    """From exactness (module docstring)."""
    exact = [name for name in EXACT if name in card_stages.STAGES_OF[record["about"].get("kind", "cuda")]]
    stages = [record["stages"].get(name, {"state": "not begun", "cases": {}}) for name in exact]
    if any("failed" in stage["state"] for stage in stages):
        return 1
    if any(case["status"] == "failed" for stage in stages for case in stage["cases"].values()):
        return 1
    finished = [stage for stage in stages if stage["state"] == "finished"]
    shared = [record["stages"][name] for name in SHARED if record["stages"].get(name) in finished]
    if any(all(case["status"] != "exact" for case in stage["cases"].values()) for stage in shared):
        return 1
    return 0 if len(finished) == len(stages) else 3


def opened(args) -> Report:
    """The report to go on with, or a new one.

    Raises:
        ValueError: The report is of another kind or card, or a new one would replace another.
    """
    card = ""
    if args.platform != "cpu":
        try:
            if args.platform == "tpu":
                card = card_stages.described_tpus()
            else:
                card = "{name}, driver {driver_version}".format_map(card_stages.smi("name,driver_version"))
        except (card_stages.NotRunError, subprocess.SubprocessError) as e:
            card = f"unknown ({e})"
    if args.resume is None:
        report = Report(args.out or Path("card-check"), fresh(args.platform, card, args.kind))
        if (report.out / "report.json").exists():
            raise ValueError(f"{report.out} has a report: --resume goes on with it, --out takes another directory")
        return report
    record = json.loads(args.resume.read_text(encoding="utf-8"))
    about = record.get("about", {}) if isinstance(record, dict) else {}
    if (about.get("platform"), about.get("kind", "cuda"), about.get("card")) != (args.platform, args.kind, card):
        what = f"{args.platform}{f' --as {args.kind}' * (args.platform == 'cpu')}{f', {card}' if card else ''}"
        raise ValueError(f"{args.resume} is no report of --platform {what}")
    report = Report(args.out or args.resume.parent, record)
    report.out.mkdir(parents=True, exist_ok=True)
    # What the ruler has traced goes along.
    for path in args.resume.parent.iterdir():
        if path.name.startswith(("trace", "log.txt")) and not (report.out / path.name).exists():
            shutil.copy(path, report.out)
    return report


def run(args) -> int:
    """Runs all stages: the exit code."""
    began = time.monotonic()
    report = opened(args)
    slower = SLOWER_ON_CPU if args.platform == "cpu" else 1
    seconds = 60 * args.minutes * slower
    if args.workers is None:
        # As `engine.round_costs.processors`, which would import JAX here: this process holds no device.
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        args.workers = 1 if args.platform != "cuda" else max(1, min(8, processors // 2))
    installed, refused = install(args.wheels) if args.wheels else (None, {})
    started = {"at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "minutes": args.minutes}
    report.record["about"]["commands"].append(started | ({"wheels not installed": refused} if refused else {}))
    report.save()
    end = began + seconds - RESERVE_S
    for name, (share, limit) in STAGES.items():
        if name not in card_stages.STAGES_OF[args.kind]:
            continue
        if report.stage(name)["state"] == "finished":
            continue
        until = min(end, time.monotonic() + share * seconds)
        if until <= time.monotonic():
            break
        command = [sys.executable, "-m", STAGE, name, "--platform", args.platform, "--kind", args.kind]
        command += ["--out", str(report.out.resolve())]
        limits = limit * slower, min(limit * slower, share * seconds / 2)
        workers = args.workers if name in SHARED else 1
        environment = environment_of(name, args.platform, installed, workers, args.kind)
        run_stage(report, name, command, environment, until, limits, workers)
        shorten_log(report.out / "log.txt")
        print(f"{name}: {card_report.summary(report.stage(name))}", file=sys.stderr, flush=True)
    report.save()
    print(report.out / "report.md")
    return exit_code(report.record)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    p = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--minutes", type=int, choices=[10, 30, 45], default=30, help="of this command; default: %(default)s"
    )
    p.add_argument("--platform", choices=[*card_stages.STAGES_OF, "cpu"], default="cuda", help="default: %(default)s")
    text = "what a CPU stands for; default: %(default)s"
    p.add_argument("--as", choices=card_stages.STAGES_OF, default="cuda", dest="kind", help=text)
    p.add_argument("--resume", type=Path, metavar="REPORT", help="goes on with a report.json")
    p.add_argument("--wheels", type=Path, metavar="DIR", help="installs the wheels of a folder for this check alone")
    text = "processes that share the cases of a stage; default: on a card half of the processors, at most 8; else one"
    p.add_argument("--workers", type=int, choices=range(1, 65), metavar="N", help=text)
    p.add_argument("--out", type=Path, metavar="DIR", help="default: that of --resume, or card-check")
    return p


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    args = make_parser().parse_args(argv)
    args.kind = args.kind if args.platform == "cpu" else args.platform
    if args.platform == "tpu":
        # One process has them.
        args.workers = 1
    try:
        if args.platform == "tpu":
            check_whole("tpu")
        return run(args)
    except (OSError, ValueError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

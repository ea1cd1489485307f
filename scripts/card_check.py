"""Checks and measures everything on a machine with an NVIDIA card, in one command.

    python scripts/card_check.py --minutes 30 --out card-check
    python scripts/card_check.py --minutes 10 --resume card-check/report.json     # goes on where that one stopped
    python scripts/card_check.py --platform cpu --minutes 10                      # as far as a CPU goes, interpreted

Stages, each in processes of its own: the machine, every kernel built and launched at the shapes of three systems, every
kernel against its definition, tokens with kernels and without, and for the rest of the time the ruler. A case that
crashes or hangs ends its process and counts as failed; the others go on. The report is written after each case:
report.json and report.md, beside log.txt and the ruler's files, at most 8 files in all.

Exit code: 0 where all that can run here is exact, 1 where something is not, 3 where time ran out before (--resume goes
on), 2 for a wrong option. A command ends within its minutes; a CPU has 2.4 times as many.
"""

import argparse
import hashlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import card_report
import card_stages

HERE = Path(__file__).resolve().parent
# By stage: its share of the time, and how many seconds a case, or the start, may take. The ruler has what is left.
STAGES = {
    "machine": (0.15, 120), "build": (0.25, 240), "kernels": (0.5, 240), "tokens": (0.4, 300), "ruler": (1.0, 420),
}  # fmt: skip
# Those that decide the exit code: others measure.
EXACT = ("build", "kernels", "tokens")
# Where the interpreter stands in for a card.
SLOWER_ON_CPU = 2.4
# Before the time is over: to end a process and write.
RESERVE_S = 15
LOG_BYTES = 2**20


def fresh(platform: str, card: str) -> dict:
    """A record of nothing yet."""
    return {"about": {"platform": platform, "card": card, "commands": []}, "stages": {}}


@dataclass
class Report:
    """The record of all commands so far, in ``out``."""

    out: Path
    record: dict

    def save(self) -> None:
        """Both files, each whole or as before."""
        self.out.mkdir(parents=True, exist_ok=True)
        texts = {"report.json": json.dumps(self.record, indent=1) + "\n", "report.md": card_report.page(self.record)}
        for name, text in texts.items():
            new = self.out / f"{name}.new"
            new.write_text(text, encoding="utf-8")
            new.replace(self.out / name)

    def stage(self, name: str) -> dict:
        return self.record["stages"].setdefault(name, {"state": "not begun", "total": None, "cases": {}})


class Worker:
    """A stage's process, and the lines that it writes."""

    def __init__(self, command: list[str], environment: dict, log, done: list[str]):
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            start_new_session=True,
        )  # fmt: skip
        self.lines: queue.Queue = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        # A process that died at its start reads nothing. The others end when this end of the pipe is closed.
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"done": done}) + "\n")
            self.process.stdin.flush()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def line(self, seconds: float) -> dict | None:
        """The next one; None behind the last. Raises queue.Empty where none came in time."""
        text = self.lines.get(timeout=max(seconds, 0))
        return None if text is None else json.loads(text)

    def end(self) -> int:
        """Its exit code, after it and its children were ended."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        self.reader.join()
        self.process.stdout.close()
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        return code


def run_stage(report: Report, name: str, command: list[str], environment: dict, until: float, limit: float) -> None:
    """Runs the cases of a stage that have no result, in one process, and in another whenever one died.

    Args:
        until: When the stage must end, by `time.monotonic`.
        limit: Seconds that a case, or the start of a process, may take.
    """
    stage = report.stage(name)
    stage["state"] = "not finished"
    while stage["total"] is None or len(stage["cases"]) < stage["total"]:
        before = len(stage["cases"])
        with (report.out / "log.txt").open("a") as log:
            worker = Worker(command, environment, log, list(stage["cases"]))
            why = follow(report, stage, worker, until, limit)
            code = worker.end()
        shorten_log(report.out / "log.txt")
        open_case = stage.pop("running", None)
        if why == "out of time":
            break
        if open_case is not None:
            stage["cases"][open_case] = {"status": "failed", "why": why or ended_by(code)}
        if len(stage["cases"]) == before and (stage["total"] is None or before < stage["total"]):
            stage["state"] = f"failed: {why or ended_by(code)} before its first case; log.txt says more"
            break
        report.save()
    else:
        stage["state"] = "finished"
    report.save()


def follow(report: Report, stage: dict, worker: Worker, until: float, limit: float) -> str | None:
    """Takes a process's lines into the report until there are no more: None, or why it must end."""
    while True:
        rest = until - time.monotonic()
        try:
            line = worker.line(min(rest, limit))
        except queue.Empty:
            return "out of time" if rest <= limit else f"no answer in {limit:.0f} s"
        if line is None:
            return None
        if "cases" in line:
            stage["total"] = len(line["cases"])
        elif "begin" in line:
            stage["running"] = line["begin"]
        else:
            stage["cases"][line.pop("end")] = line
            stage.pop("running", None)
        report.save()


def ended_by(code: int) -> str:
    return f"its process ended by {signal.Signals(-code).name}" if code < 0 else f"its process ended with code {code}"


def shorten_log(path: Path) -> None:
    text = path.read_bytes()
    if len(text) > LOG_BYTES:
        path.write_bytes(text[-LOG_BYTES // 2 :])


def install(wheels: Path) -> tuple[str, list[str]]:
    """Wheels of a folder in a directory of their own, once for all commands: (the directory, those that do not suit
    this Python or machine). Raises ValueError where there are none."""
    names = sorted({path.name.split("-")[0] for path in wheels.glob("*.whl")})
    if not names:
        raise ValueError(f"{wheels} has no wheels")
    key = hashlib.sha256(repr((sys.version, sorted(p.name for p in wheels.glob("*.whl")))).encode()).hexdigest()[:16]
    target = Path(tempfile.gettempdir()) / f"card_check-{key}"
    known = target / "refused.json"
    if known.exists():
        return str(target), json.loads(known.read_text())
    refused = []
    for name in names:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--find-links"]
        command += [str(wheels), "--target", str(target), name]
        if subprocess.run(command, capture_output=True).returncode:
            refused.append(name)
    target.mkdir(exist_ok=True)
    known.write_text(json.dumps(refused))
    return str(target), refused


def environment_of(stage: str, platform: str, installed: str | None) -> dict:
    found = dict(os.environ)
    found["PYTHONPATH"] = os.pathsep.join(filter(None, (installed, str(HERE.parent), found.get("PYTHONPATH"))))
    found |= {"PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu" if platform == "cpu" else "cuda,cpu"}
    if platform == "cpu" and stage in ("kernels", "tokens"):
        found["TRITON_INTERPRET"] = "1"
        # Compilation takes longer than what it compiles.
        found.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1")
    return found


def exit_code(record: dict) -> int:
    """From exactness (module docstring)."""
    stages = [record["stages"].get(name, {"state": "not begun", "cases": {}}) for name in EXACT]
    if any("failed" in stage["state"] for stage in stages):
        return 1
    if any(case["status"] == "failed" for stage in stages for case in stage["cases"].values()):
        return 1
    return 0 if all(stage["state"] == "finished" for stage in stages) else 3


def opened(args) -> Report:
    """The report that is gone on with, or a new one. Raises ValueError for one of another kind or card, and where a new
    one would take another's place."""
    card = ""
    if args.platform == "cuda":
        try:
            card = "{name}, driver {driver_version}".format_map(card_stages.smi("name,driver_version"))
        except (card_stages.NotRunError, subprocess.SubprocessError) as e:
            card = f"unknown ({e})"
    if args.resume is None:
        report = Report(args.out or Path("card-check"), fresh(args.platform, card))
        if (report.out / "report.json").exists():
            raise ValueError(f"{report.out} has a report: --resume goes on with it, --out takes another directory")
        return report
    record = json.loads(args.resume.read_text(encoding="utf-8"))
    about = record.get("about", {}) if isinstance(record, dict) else {}
    if (about.get("platform"), about.get("card")) != (args.platform, card):
        raise ValueError(f"{args.resume} is no report of --platform {args.platform}{f', {card}' if card else ''}")
    report = Report(args.out or args.resume.parent, record)
    report.out.mkdir(parents=True, exist_ok=True)
    # What the ruler has measured goes along.
    for path in args.resume.parent.iterdir():
        if path.name.startswith(("decode", "log.txt")) and not (report.out / path.name).exists():
            shutil.copy(path, report.out)
    return report


def run(args) -> int:
    began = time.monotonic()
    report = opened(args)
    slower = SLOWER_ON_CPU if args.platform == "cpu" else 1
    seconds = 60 * args.minutes * slower
    installed, refused = install(args.wheels) if args.wheels else (None, [])
    started = {"at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "minutes": args.minutes}
    report.record["about"]["commands"].append(started | ({"wheels that do not suit": refused} if refused else {}))
    report.save()
    end = began + seconds - RESERVE_S
    for name, (share, limit) in STAGES.items():
        if report.stage(name)["state"] == "finished":
            continue
        until = min(end, time.monotonic() + share * seconds)
        if until <= time.monotonic():
            break
        command = [sys.executable, str(HERE / "card_stages.py"), name, "--platform", args.platform]
        command += ["--out", str(report.out.resolve())]
        run_stage(report, name, command, environment_of(name, args.platform, installed), until, limit * slower)
        print(f"{name}: {card_report.summary(report.stage(name))}", file=sys.stderr, flush=True)
    report.save()
    print(report.out / "report.md")
    return exit_code(report.record)


def make_parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--minutes", type=int, choices=[10, 30, 45], default=30, help="of this command; default: %(default)s"
    )
    p.add_argument("--platform", choices=["cuda", "cpu"], default="cuda", help="default: %(default)s")
    p.add_argument("--resume", type=Path, metavar="REPORT", help="goes on with a report.json")
    p.add_argument("--wheels", type=Path, metavar="DIR", help="installs the wheels of a folder for this check alone")
    p.add_argument("--out", type=Path, metavar="DIR", help="default: that of --resume, or card-check")
    return p


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    try:
        return run(args)
    except (OSError, ValueError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

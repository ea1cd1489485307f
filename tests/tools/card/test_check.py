"""The check of a card: its processes and report with stages that do nothing, and a few real comparisons."""

import json
import os
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from tests.helpers import load_script
from tools.card import report as card_report
from tools.card import ruler as card_ruler
from tools.card import stages as card_stages
from tools.card import wheels as card_wheels
from tools.kernels.arguments import Source

ROOT = Path(__file__).parents[3]
card_check = load_script("card/check.py")
script = load_script("bench/decode.py")
# A stage without a device: a line a case, as `stages` writes them. What cases do is in stages.json.
FAKE = """
import json, os, signal, sys, time
from pathlib import Path
stage, out = sys.argv[1], Path(sys.argv[sys.argv.index("--out") + 1])
asked = json.loads(sys.stdin.readline())
done, (first, step) = asked["done"], asked["share"]
cases = json.loads((Path(__file__).parent / "stages.json").read_text()).get(stage, {"one": "exact"})
if cases == "no start":
    sys.exit("there is no such module")
if cases == "a slow end":
    os.close(1)
    time.sleep(0.5)
    os._exit(3)
say = lambda **line: print(json.dumps(line), flush=True)
say(cases=list(cases))
for name, what in list(cases.items())[first::step]:
    if name in done:
        continue
    say(begin=name)
    with (out / "ran.txt").open("a") as file:
        print(stage, name, file=file)
    if what == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    while what == "hang" and not (out / "go").exists():
        time.sleep(0.01)
    while what == "waits for one":
        time.sleep(0.01)
        if "one" in json.loads((out / "report.json").read_text())["stages"].get(stage, {"cases": {}})["cases"]:
            what = "exact"
    if what in ("crowded", "no room"):
        is_alone = what == "crowded" and (out / "ran.txt").read_text().split("\\n").count(f"{stage} {name}") == 2
        say(end=name, status="exact" if is_alone else "failed", why="" if is_alone else "the device has no room for it")
        continue
    say(end=name, status=what.replace("hang", "exact"), why="|".join(["it", "says", "so"]))
"""


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Runs the check with such stages: (cases by stage, options) → (exit code, record, page)."""
    (tmp_path / "fake_stages.py").write_text(FAKE)
    monkeypatch.setattr(card_check, "STAGE", "fake_stages")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(card_stages, "smi", lambda fields: {"name": "A card", "driver_version": "1.2"})
    out = tmp_path / "out"

    def run(stages: dict, *options: str) -> tuple[int, dict, str]:
        (tmp_path / "stages.json").write_text(json.dumps(stages))
        code = card_check.main(["--minutes", "10", "--out", str(out), "--workers", "1", *options])
        return code, json.loads((out / "report.json").read_text()), (out / "report.md").read_text()

    run.out = out
    return run


def limits(monkeypatch, **stages: tuple[float, float]) -> None:
    monkeypatch.setattr(card_check, "STAGES", card_check.STAGES | stages)


def statuses(record: dict, stage: str) -> dict[str, str]:
    return {name: case["status"] for name, case in record["stages"][stage]["cases"].items()}


def test_check_of_exact_stages_exits_with_0(fake):
    code, record, page = fake({"build": {"one": "exact", "two": "not run", "three": "skipped"}})
    assert code == 0
    assert [stage["state"] for stage in record["stages"].values()] == ["finished"] * 6
    assert "finished: 1 exact, 1 skipped, 1 not run" in page
    assert "Card: A card, driver 1.2." in page
    assert "| two | not run | it\\|says\\|so |" in page


def test_a_measurement_that_fails_is_named_and_says_nothing_of_exactness(fake):
    code, _, page = fake({"ruler": {"one": "failed"}})
    assert code == 0
    assert "| one | failed |" in page


def test_nothing_exact_is_not_exact(fake):
    assert fake({"build": {"one": "skipped", "two": "not run"}})[0] == 1


def test_it_goes_on_after_a_failure_a_crash_and_a_hang(fake, monkeypatch):
    limits(monkeypatch, kernels=(0.4, 1))
    crash = {"one": "exact", "two": "crash", "three": "exact", "four": "failed", "five": "exact"}
    code, record, page = fake({"build": crash, "kernels": {"one": "hang", "two": "exact"}})
    assert code == 1
    assert [*statuses(record, "build").values()] == ["exact", "failed", "exact", "failed", "exact"]
    assert record["stages"]["build"]["cases"]["two"]["why"] == "its process ended by SIGSEGV"
    assert statuses(record, "kernels") == {"one": "timed out", "two": "exact"}
    assert "| one | timed out | no answer in 1 s |" in page
    assert statuses(record, "ruler") == {"one": "exact"}


def test_workers_share_the_cases_of_a_stage(fake):
    """Each case runs once; what a crash interrupts is its worker's own, and measurements have one process."""
    build = {f"{i}": "crash" if i == 3 else "exact" for i in range(8)}
    waits = {"kernels": {"two": "waits for one", "one": "exact"}, "ruler": {"one": "exact", "two": "exact"}}
    code, record, _ = fake({"build": build} | waits, "--workers", "3")
    assert code == 1
    assert record["stages"]["build"]["state"] == "finished"
    assert statuses(record, "build") == {i: "failed" if what == "crash" else "exact" for i, what in build.items()}
    assert statuses(record, "kernels") == {"one": "exact", "two": "exact"}
    ran = (fake.out / "ran.txt").read_text().split("\n")
    assert sorted(line for line in ran if line.startswith("build")) == [f"build {i}" for i in range(8)]
    assert [line for line in ran if line.startswith("ruler")] == ["ruler one", "ruler two"]


def test_a_case_without_room_beside_others_is_tried_alone(fake):
    """The second time it is the only one."""
    code, record, _ = fake({"build": {"one": "exact", "two": "crowded"}}, "--workers", "2")
    assert code == 0
    assert statuses(record, "build") == {"one": "exact", "two": "exact"}
    code, record, _ = fake({"build": {"one": "no room"}}, "--workers", "2", "--out", str(fake.out / "other"))
    assert code == 1


def test_a_worker_that_does_not_start_is_a_failure(fake):
    assert fake({"tokens": "no start"}, "--workers", "2")[1]["stages"]["tokens"]["state"].startswith("failed")


def test_a_stage_that_does_not_start_is_a_failure(fake):
    code, record, page = fake({"build": "no start"})
    assert code == 1
    assert record["stages"]["build"]["state"].startswith("failed: its process ended with code 1")
    assert "there is no such module" in (fake.out / "log.txt").read_text()
    assert statuses(record, "tokens") == {"one": "exact"}
    assert "ended with code 1" in page


def test_a_process_ends_by_itself_after_its_output(fake):
    assert "its process ended with code 3" in fake({"build": "a slow end"})[1]["stages"]["build"]["state"]


OF_CUDA, OF_TPU = ([(kind, stage) for stage in stages] for kind, stages in card_stages.STAGES_OF.items())


@pytest.mark.parametrize(("kind", "stage"), [*OF_CUDA, ("cuda", "sanitizer"), *OF_TPU])
def test_each_stage_begins_on_a_cpu(kind, stage, tmp_path, monkeypatch):
    """In the environment that the command gives it."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    environment = card_check.environment_of(stage, "cpu", None, 1, kind)
    command = [sys.executable, "-m", "tools.card.stages", stage, "--platform", "cpu", "--kind", kind]
    command += ["--out", str(tmp_path)]
    with subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdin.write(json.dumps({"done": [], "share": (0, 1)}) + "\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["cases"]
        process.kill()


def test_resume_goes_on_where_time_ran_out(fake, monkeypatch):
    """What has a result is not run again, and what was cut short is."""
    monkeypatch.setattr(card_check, "RESERVE_S", 588)
    stages = {"kernels": {"one": "exact", "two": "hang", "three": "exact"}}
    code, record, page = fake(stages)
    assert code == 3
    assert record["stages"]["kernels"]["state"] == "not finished"
    assert "not finished, 1 of 3 cases: 1 exact" in page
    (fake.out / "go").touch()
    monkeypatch.setattr(card_check, "RESERVE_S", 15)
    code, record, page = fake(stages, "--resume", str(fake.out / "report.json"))
    assert code == 0
    assert statuses(record, "kernels") == {"one": "exact", "two": "exact", "three": "exact"}
    ran = (fake.out / "ran.txt").read_text().split("\n")
    assert [line for line in ran if line.startswith("kernels")] == [
        f"kernels {n}" for n in ("one", "two", "two", "three")
    ]
    assert ran.count("build one") == 1
    assert len(record["about"]["commands"]) == 2
    assert page.count("(10 minutes)") == 2


@pytest.mark.parametrize("hangs", [True, False])
def test_a_case_that_takes_too_long_has_a_second_try(fake, monkeypatch, hangs):
    """Of a share below the limit, as in ten minutes: the case does not keep the others from running."""
    share, limit = card_check.STAGES["tokens"]
    assert share * 600 < limit
    limits(monkeypatch, tokens=(share / 20, limit / 20))
    stages = {"tokens": {"one": "hang", "two": "exact"}}
    code, record, page = fake(stages)
    assert code == 3
    assert statuses(record, "tokens") == {"one": "timed out", "two": "exact"}
    assert "not finished, 2 of 2 cases: 1 exact, 1 timed out" in page
    if not hangs:
        (fake.out / "go").touch()
    code, record, _ = fake(stages, "--resume", str(fake.out / "report.json"))
    assert code == int(hangs)
    assert statuses(record, "tokens") == {"one": "failed" if hangs else "exact", "two": "exact"}
    assert record["stages"]["tokens"]["state"] == "finished"
    assert not hangs or record["stages"]["tokens"]["cases"]["one"]["why"].startswith("hangs: no answer in 6 s")
    assert (fake.out / "ran.txt").read_text().count("tokens two") == 1


def test_what_a_killed_command_ran_is_run_again(fake):
    fake({})
    record = json.loads((fake.out / "report.json").read_text())
    record["stages"]["kernels"] = {"state": "not finished", "total": 1, "cases": {}}
    (fake.out / "report.json").write_text(json.dumps(record))
    code, record, _ = fake({"kernels": "no start"}, "--resume", str(fake.out / "report.json"))
    assert code == 1
    assert statuses(record, "kernels") == {}
    code, record, _ = fake({}, "--resume", str(fake.out / "report.json"))
    assert (code, statuses(record, "kernels")) == (0, {"one": "exact"})


def test_no_time_is_left_for_later_stages(fake, monkeypatch):
    monkeypatch.setattr(card_check, "RESERVE_S", 600)
    code, record, _ = fake({})
    assert code == 3
    assert statuses(record, "machine") == {}


def test_a_stage_ends_with_its_parent():
    """Where the check itself is killed, as at the end of a loan."""
    code = "import time; from tools.card import stages; stages.end_with_parent(); "
    code += "print(flush=True); time.sleep(600)"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, process_group=0, cwd=ROOT) as one:
        one.stdout.readline()
        assert one.poll() is None
        one.stdin.close()
        assert one.wait(timeout=60) == -signal.SIGKILL


def test_a_result_is_saved_while_the_next_case_runs(fake, monkeypatch):
    limits(monkeypatch, kernels=(0.4, 20))
    code, *_ = fake({"kernels": {"one": "exact", "two": "waits for one"}})
    assert code == 0


def test_a_report_of_another_platform_or_card_is_refused(fake, capsys, monkeypatch):
    fake({})
    report = str(fake.out / "report.json")
    assert card_check.main(["--platform", "cpu", "--resume", report]) == 2
    assert "is no report of --platform cpu" in capsys.readouterr().err
    monkeypatch.setattr(card_stages, "smi", lambda fields: {"name": "Another", "driver_version": "1.2"})
    assert card_check.main(["--resume", report]) == 2
    assert "is no report of --platform cuda, Another, driver 1.2" in capsys.readouterr().err
    (fake.out / "report.json").write_text("[]")
    assert card_check.main(["--resume", report]) == 2
    (fake.out / "report.json").write_text("{")
    assert card_check.main(["--resume", report]) == 2


def test_a_report_is_not_written_over(fake, capsys):
    fake({})
    before = (fake.out / "report.json").read_text()
    assert card_check.main(["--out", str(fake.out)]) == 2
    assert "has a report: --resume goes on with it" in capsys.readouterr().err
    assert (fake.out / "report.json").read_text() == before


def test_what_was_measured_goes_along_to_another_directory(fake, tmp_path):
    fake({})
    (fake.out / "trace-1-round.json.gz").write_text("")
    code = card_check.main(["--resume", str(fake.out / "report.json"), "--out", str(tmp_path / "another")])
    assert code == 0
    names = {path.name for path in (tmp_path / "another").iterdir()}
    assert names == {"report.json", "report.md", "log.txt", "trace-1-round.json.gz"}


@pytest.fixture
def decoding(monkeypatch):
    """In place of the ruler's processes, a function that writes what they write; it keeps their commands."""
    ruler = SimpleNamespace(commands=[], environments=[], rounds=iter(range(1, 99)), row={})

    def run(command, env, **options):
        ruler.commands.append(command)
        ruler.environments.append(env)
        asked = script.make_parser().parse_args(command[2:])
        point = script.Point.parse(*asked.points)
        path = asked.out.with_name(asked.out.name + ".json")
        if path.exists():
            record = json.loads(path.read_text())
        else:
            row = {"round_ms": float(next(ruler.rounds)), "of_floor": 0.5} | ruler.row
            about = {"bandwidth_gb_per_s": asked.bandwidth or 7.0}
            record = {"about": about, "points": {f"{point}, 9 experts": row}}
        path.write_text(json.dumps(record))
        if asked.profile:
            asked.out.with_name(asked.out.name + "-trace.json.gz").write_text("")
        return SimpleNamespace(returncode=0, stderr=f"  0.1 ms a {asked.profile}, 2 times: kernel\n")

    monkeypatch.setattr(card_ruler.subprocess, "run", run)
    return ruler


def ruled(decoding, out, on_card: bool, **machine) -> card_check.Report:
    """The report after all cases of the ruler."""
    report = card_check.Report(out, card_check.fresh("cuda" if on_card else "cpu", ""))
    for name, case in machine.items():
        report.end(report.stage("machine"), name, case)
    (out / "log.txt").touch()
    for name, check in card_ruler.cases("cuda", on_card, str(out)):
        report.end(report.stage("ruler"), name, check())
    return report


@pytest.mark.parametrize("on_card", [True, False])
def test_points_are_measured_by_turns_and_traces_last(decoding, tmp_path, on_card):
    """With one bandwidth, in at most eight files. A trace measures nothing again."""
    ruled(decoding, tmp_path, on_card, bandwidth={"status": "measured", "gb_per_s": 4321.5})
    asked = [script.make_parser().parse_args(command[2:]) for command in decoding.commands]
    measured = [each for each in asked if not each.profile]
    assert [each.kernels for each in measured] == ["auto", "all"] * (len(measured) // 2)
    assert all(
        a.points == b.points and a.quantize == b.quantize for a, b in zip(measured[::2], measured[1::2], strict=True)
    )
    assert asked[: len(measured)] == measured
    assert {each.bandwidth for each in asked} == {4321.5}
    assert not any(each.layers for each in asked)
    assert {each.experts for each in asked} == {"even"}
    assert {each.draft for each in asked} == {None, "mtp"}
    assert {each.quantize for each in asked} == {None, "fp8"}
    names = {path.name for path in tmp_path.iterdir()}
    assert len(names) <= 8
    assert len([name for name in names if name.startswith("trace")]) == len(asked) - len(measured)
    assert {each.profile for each in asked} == {None, "round", "prefill"}
    assert next(decoding.rounds) == len(measured) + 1
    page = (tmp_path / "report.md").read_text()
    assert "Floors: at 4321.5 GB/s." in page
    assert page.count("| bfloat16, batch 1, width 16, context 2048 | 1.0 → 2.0 (2.00) | 0.5 |") == on_card
    assert page.count("- 0.1 ms a prefill, 2 times: kernel") == 1


def test_the_ruler_has_all_tpus_of_the_host(decoding, tmp_path):
    report = card_check.Report(tmp_path, card_check.fresh("tpu", "4 x TPU v6 lite", "tpu"))
    described = {"status": "measured", "device": "TPU v6 lite", "devices": 4, "versions": "JAX"}
    report.end(report.stage("machine"), "device and versions", described)
    cases = dict(card_ruler.cases("tpu", True, str(tmp_path)))
    assert cases["bfloat16, batch 1, width 16, context 2048, kernels auto"]()["status"] == "measured"
    assert script.make_parser().parse_args(decoding.commands[0][2:]).mesh == "tensor=4"
    assert len([name for name in cases if name.startswith("trace")]) <= 5


def test_one_host_of_a_slice_is_refused_before_anything_waits(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "w-0.x,w-1.x")
    assert card_check.main(["--platform", "tpu", "--out", str(tmp_path / "out")]) == 2
    assert "for the devices of this host alone set TPU_WORKER_HOSTNAMES=localhost TPU_WORKER_ID=0" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()
    command = [sys.executable, "-m", "tools.card.stages", "machine", "--platform", "tpu"]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: this is host ? of the 2 of a TPU slice")


def test_a_check_of_tpus_has_its_stages(fake, monkeypatch):
    monkeypatch.setattr(card_stages, "described_tpus", lambda: "4 x TPU v6 lite")
    code, record, page = fake({}, "--platform", "tpu")
    assert code == 0
    assert list(record["stages"]) == ["machine", "kernels", "tokens", "ruler"]
    assert page.startswith("# A check on TPUs\n")
    assert "Card: 4 x TPU v6 lite." in page
    assert card_check.main(["--platform", "cpu", "--as", "tpu", "--resume", str(fake.out / "report.json")]) == 2


def test_the_ruler_measures_the_bandwidth_where_the_machine_stage_did_not(decoding, tmp_path):
    ruled(decoding, tmp_path, False, bandwidth={"status": "failed", "why": "it crashed"})
    assert not any("--bandwidth" in command for command in decoding.commands)
    assert "Floors: at 7.0 GB/s." in (tmp_path / "report.md").read_text()


def test_the_log_stays_small(tmp_path):
    (tmp_path / "log.txt").write_bytes(b"x" * (card_check.LOG_BYTES + 1))
    card_check.shorten_log(tmp_path / "log.txt")
    assert (tmp_path / "log.txt").stat().st_size <= card_check.LOG_BYTES


def test_wheels_are_installed_beside_what_is_there(monkeypatch, tmp_path):
    """Into a directory of their own, once; those for another Python are named."""
    monkeypatch.setattr(card_wheels.tempfile, "gettempdir", lambda: str(tmp_path))
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name, tag in (("carried", "py3-none-any"), ("unsuitable", "cp27-none-any")):
        with zipfile.ZipFile(wheels / f"{name}-1.0-{tag}.whl", "w") as wheel:
            info = f"{name}-1.0.dist-info"
            wheel.writestr(f"{name}.py", "")
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
            wheel.writestr(f"{info}/RECORD", "")
    target, refused = card_wheels.install(wheels)
    assert list(refused) == ["unsuitable"]
    assert "No matching distribution found" in refused["unsuitable"]
    assert (Path(target) / "carried.py").exists()
    monkeypatch.setattr(card_wheels.subprocess, "run", None)
    assert card_wheels.install(wheels) == (target, refused)
    with pytest.raises(ValueError, match="has no wheels"):
        card_wheels.install(tmp_path)
    assert card_check.environment_of("build", "cuda", target, 1)["PYTHONPATH"].split(os.pathsep)[0] == target


def test_a_wheel_that_fails_for_another_reason_is_tried_again(monkeypatch, tmp_path):
    monkeypatch.setattr(card_wheels.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "large-1.0-py3-none-any.whl").write_text("")
    pip = SimpleNamespace(returncode=1, stderr="ERROR: of a kind\nERROR: No space left on device\n")
    monkeypatch.setattr(card_wheels.subprocess, "run", lambda *args, **options: pip)
    assert card_wheels.install(tmp_path)[1] == {"large": "ERROR: No space left on device"}
    pip.returncode = 0
    assert card_wheels.install(tmp_path)[1] == {}
    monkeypatch.setattr(card_wheels.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs pip"):
        card_wheels.install(tmp_path)


def test_wheels_that_were_not_installed_are_on_the_page():
    record = card_check.fresh("cuda", "A card")
    record["about"]["commands"] = [{"at": "now", "minutes": 10, "wheels not installed": {"large": "No space left"}}]
    assert "- large: No space left\n" in card_report.page(record)


def test_nvidia_smi_that_says_nothing_is_no_card(monkeypatch):
    monkeypatch.setattr(card_stages.shutil, "which", lambda name: name)
    for said in ("", "\n", "A card\n"):
        monkeypatch.setattr(card_stages.subprocess, "run", lambda *args, said=said, **o: SimpleNamespace(stdout=said))
        with pytest.raises(card_stages.NotRunError, match="nvidia-smi says"):
            card_stages.smi("name,driver_version")


def test_a_sanitizer_that_ran_no_case_found_nothing_out(monkeypatch):
    monkeypatch.setattr(card_stages.os, "access", lambda *args: True)
    done = SimpleNamespace(stdout='{"cases": []}\n', returncode=0)
    monkeypatch.setattr(card_stages.subprocess, "run", lambda *args, **options: done)
    assert card_stages._sanitized("memcheck")["status"] == "failed"
    done.stdout += '{"end": "one", "status": "exact"}\n'
    assert card_stages._sanitized("memcheck") == {"status": "exact", "cases": 1}


def test_weights_in_fp8_are_no_point_in_bfloat16(decoding, tmp_path):
    """What the ruler takes where bfloat16 does not fit."""
    decoding.row = {"model": "held in FP8: bfloat16 does not fit"}
    places = card_ruler.bfloat16(1, 1, 2048), card_ruler.fp8(1, 1, 2048)
    asked = [card_ruler.measured(place, "auto", True, tmp_path) for place in places]
    assert [one["status"] for one in asked] == ["skipped", "measured"]
    assert "does not fit" in asked[0]["why"]
    assert decoding.environments[0]["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.95"


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(card_stages, "NEEDED", ("jax", "no-such-package"))
    checks = dict(card_stages.machine(SimpleNamespace(platform="cuda", kind="cuda")))
    found = checks["packages"]()
    assert found["status"] == "failed"
    assert "no-such-package" in found["why"]
    assert found["jax"] == jax.__version__


def test_what_a_case_raises():
    """No room is no failure; a device that failed ends the process."""

    def check(error, stage="kernels"):
        def run():
            raise error

        found, goes_on = card_stages.result(run, stage)
        return found["status"], goes_on

    assert check(card_stages.NotRunError("no card")) == ("not run", True)
    assert check(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")) == ("skipped", True)
    for said in ("Out of memory while trying to allocate 8 bytes.", "Failed to allocate request for 2.0GiB (2B)"):
        error = jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {said}")
        assert check(error) == ("skipped", True)
        assert check(error, "build") == ("failed", False)
    registers = "RESOURCE_EXHAUSTED: ptxas fatal: (C7600) Register allocation failed with register count of '255'"
    assert check(jax.errors.JaxRuntimeError(registers)) == ("failed", False)
    assert check(jax.errors.JaxRuntimeError(registers.replace("ptxas fatal: ", ""))) == ("failed", False)
    assert check(jax.errors.JaxRuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")) == ("failed", False)
    assert check(ValueError("shapes")) == ("failed", True)


@pytest.fixture(scope="module")
def interpreted():
    pytest.importorskip("torch")
    pytest.importorskip("triton.runtime.interpreter")
    from tools.triton_interpreter import interpreting, small_grids

    with interpreting(), small_grids():
        yield


def test_a_wrong_kernel_is_found(interpreted):
    """Wrong in one place, missing, another at each run, or by what its row stands beside."""
    from tools.kernels import cases as kernel_cases
    from tools.kernels.comparisons import F32, SMALL, products

    comparison, calls = products(kernel_cases.Source(0), SMALL, 7, 1, F32, "residual"), []
    assert kernel_cases.check(comparison, False)["status"] == "exact"

    def changed(change):
        def kernel(*args):
            (y,) = comparison.kernel(*args)
            return (change(y),)

        return kernel_cases.check(replace(comparison, kernel=kernel), False)

    assert "from float64" in changed(lambda y: y.at[..., 5].add(1e-3))["why"]
    assert "NaN" in changed(lambda y: y.at[..., 6].set(float("nan")))["why"]
    assert "shape" in changed(lambda y: y[:, :, :-1])["why"]
    assert "two runs" in changed(lambda y: y + len(calls.append(0) or calls) * 1e-7)["why"]
    assert "another order" in changed(lambda y: y.at[0].mul(1 + 1e-6))["why"]


def test_joined_launches_that_differ_are_found(interpreted):
    """From single ones, or that are none."""
    from dflash_jax.ops.kernels.triton import launch
    from tools.kernels import cases as kernel_cases
    from tools.kernels.comparisons import BF16, SMALL, products

    single = products(kernel_cases.Source(0), SMALL, 7, 1, BF16, "residual")
    comparison = replace(single, joined=True)
    assert kernel_cases.check(comparison, False)["status"] == "exact"

    def kernel(*args):
        (y,) = comparison.kernel(*args)
        # A launcher of single launches is a function.
        is_joined = isinstance(launch._launcher.get(), partial)
        return (y.at[0, 0, 0].multiply(1 + 2**-7) if is_joined else y,)

    assert "single launches" in kernel_cases.check(replace(comparison, kernel=kernel), False)["why"]
    without = replace(comparison, kernel=comparison.definition)
    assert "no call" in kernel_cases.check(without, False)["why"]


def test_a_recorded_launch_is_run_over_zeros(interpreted):
    """As `card_build` records it: kinds of arguments and results, their shapes, and what is written in place."""
    from dflash_jax.ops.kernels.triton import launch
    from tools.card import build as card_build

    calls, shapes = [], [[3, 2, 64, 16], [3, 2, 64, 16], [3, 1], [1, 5, 2, 16], [1, 5, 2, 16], [1], [1, 5]]
    described = {
        "kernel": "attention._write", "num_warps": 1, "num_stages": 3,
        "kinds": ["float32", "float32", "int32", "float32", "float32", "int32", "int32"],
        "meta": {"T": 5, "KH": 2, "D": 16, "ROWS": 3, "PAGES": 1, "LAST_PAGE": 2, "PAGE": 64}, "args": shapes,
        "out": [], "grid": [10], "in_place": [0, 1],
    }  # fmt: skip
    launcher = launch._launcher.get()
    with launch.launching(lambda one: calls.append(one) or launcher(one)):
        assert card_build.launched(described) == {"status": "exact"}
    assert [list(x.shape) for x in calls[0].args] == shapes
    assert calls[0].kernel.fn.__name__ == "_write"
    assert (calls[0].in_place, calls[0].grid, calls[0].num_warps) == ((0, 1), (10,), 1)


def test_tokens_may_part_at_a_few_ties():
    """Not at a decided token, not where no tie is allowed, and not in many requests."""
    from tools import token_runs

    def requests(*texts):
        return [SimpleNamespace(tokens=list(text), finish_reason="length", prompt=[1]) for text in texts]

    def status(found, margin):
        return token_runs.compared(requests(*found), right, margin)["status"]

    right, tie = requests("123", "123", "123"), lambda request, at: 1e-6
    assert status(["123", "123", "123"], None) == "exact"
    assert status(["124", "123", "123"], tie) == "exact"
    assert status(["124", "123", "123"], None) == "failed"
    assert status(["124", "123", "123"], lambda request, at: 0.1) == "failed"
    assert status(["124", "223", "123"], tie) == "failed"


def test_names_of_cases_are_unique():
    """And each case has a function that takes its options, which is called on a card only."""
    from tools.card import tokens as card_tokens
    from tools.kernels import cases as kernel_cases
    from tools.kernels.comparisons import REAL, SMALL, SMALL_OF_A_TPU

    for sizes in (REAL, SMALL):
        names = [name for name, _ in kernel_cases.comparisons(sizes)]
        assert len(set(names)) == len(names)
    for sizes in (REAL, SMALL_OF_A_TPU):
        names = [name for name, _ in kernel_cases.of_a_tpu(sizes)]
        assert len(set(names)) == len(names)
    for where in product(card_stages.STAGES_OF, (True, False)):
        for cases in (card_tokens.cases(*where), card_ruler.cases(*where, "")):
            names = [name for name, _ in cases]
            assert len(set(names)) == len(names)
            assert any("kernels all" in name for name in names)


@pytest.fixture
def implementations(monkeypatch):
    """Adds an implementation to an operation's list: (module, implementation)."""
    from tools.kernels import cases as kernel_cases

    def add(operation, implementation):
        monkeypatch.setattr(operation, "IMPLEMENTATIONS", (implementation, *operation.IMPLEMENTATIONS))
        kernel_cases._implementations.cache_clear()

    yield add
    kernel_cases._implementations.cache_clear()


def test_every_implementation_that_a_tpu_may_take_is_compared(implementations):
    """What operations choose first, then what no TPU has run: of the lists, so that a new one is found."""
    from dflash_jax.ops import attention
    from dflash_jax.ops.backend import Implementation
    from tools.kernels import cases as kernel_cases
    from tools.kernels.comparisons import SMALL_OF_A_TPU

    of_a_card = Implementation("of a card", lambda backend, *args: backend.no_triton, attention.reference)
    implementations(attention, of_a_card)
    only_16 = Implementation(
        "new", lambda backend, q, *args: None if q.shape[1] == 16 else "only 16 tokens", attention.reference, False
    )
    implementations(attention, only_16)
    cases = dict(kernel_cases.of_a_tpu(SMALL_OF_A_TPU))
    for name in ("attention", "delta", "replaying", "mixtures", "products", "rotation", "writing", "convolutions"):
        assert any(case.startswith(f"{name} bfloat16, B 1, T 1") and case.endswith(": kernels auto") for case in cases)
    assert any(case.startswith("mixtures") and case.endswith(": kernels auto, reproducible") for case in cases)
    assert not any("triton" in case or "cpp" in case or "of a card" in case for case in cases)
    places = {case: place for place, case in enumerate(cases)}
    one = "attention bfloat16, B 1, T 16, target, causal: "
    assert places[f"{one}kernels auto"] < places[f"{one}new"] < places[f"{one}reference"]
    found = kernel_cases.check(cases[f"{one}new"](kernel_cases.Source(0)), False)
    assert found["status"] == "exact"
    refused = partial(kernel_cases.check, cases["attention bfloat16, B 7, T 5, target, causal: new"](Source(0)), False)
    assert card_stages.result(refused, "kernels") == ({"status": "skipped", "why": "only 16 tokens"}, True)


def test_rows_that_depend_on_others_are_found(implementations):
    """Of experts, which need not be independent where tokens need not be reproducible, it is only asked."""
    from dflash_jax.ops import moe, rotation
    from dflash_jax.ops.backend import Implementation
    from tools.kernels import cases as kernel_cases
    from tools.kernels.comparisons import SMALL_OF_A_TPU

    def checked(operation, name, change, case):
        one = next(each for each in operation.IMPLEMENTATIONS if each.name == name)

        def call(backend, x, *args, **options):
            return jax.tree.map(
                lambda y: (y.astype(jnp.float32) * (1 + change(x))).astype(y.dtype),
                one.call(backend, x, *args, **options),
            )

        implementations(operation, Implementation("changed", one.supports, call, False))
        cases = dict(kernel_cases.of_a_tpu(SMALL_OF_A_TPU))
        return kernel_cases.check(cases[case](Source(0)), False)

    rotated = "rotation float32, B 7, T 5, target: changed"
    found = checked(rotation, "reference", lambda x: 4e-7 * (x[:1].sum() > 0), rotated)
    assert found["why"] == "rows in another order gave other bits"
    found = checked(rotation, "reference", lambda x: jnp.sort(x[:, 0, 0, 0, 0]).sum(), rotated)
    assert found["why"] == "beside other rows a row has other bits"
    asked = "mixtures float32, B 1, T 16: changed, does a token depend on others"
    yes = {f"the same bits {name}": "yes" for name in ("in another order", "beside other rows")}
    found = checked(moe, "gathered", lambda x: 4e-7 * (len(x) < 16), asked)
    assert found == {"status": "measured"} | yes | {f"the same bits of {n} of 16 rows": "no" for n in (8, 1)}
    found = checked(moe, "gathered", lambda x: 4e-7 * (len(x) < 16), asked.partition(", does")[0])
    assert found["status"] == "exact"


def test_what_a_card_has_compared_comes_last():
    """In the same order otherwise; a kernel that was replaced since is compared again."""
    from tools.kernels import cases as kernel_cases
    from tools.kernels.comparisons import REAL

    names, before = ([n for n, _ in f(REAL)] for f in (kernel_cases.remaining_first, kernel_cases.comparisons))
    recorded = json.loads(kernel_cases.RECORD.read_text())["stages"]["kernels"]["cases"]
    assert set(recorded) <= set(names)
    replaced = {f"products bfloat16, B {rows}, T 1, router" for rows in (7, 16)}
    exact = set(recorded) - replaced
    assert len(exact) == 66
    assert set(names[-66:]) == exact
    for some in (names[:-66], names[-66:]):
        assert some == [name for name in before if name in some]
    # No card has run joined launches.
    assert names[0].endswith(", in one call")


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_a_short_real_run(interpreted, tmp_path):
    """All but a few cases count as done: the others run interpreted, in processes, and are exact."""
    kept = {"writing bfloat16, B 1, T 16", "products bfloat16, B 1, T 1, router"}
    kept.add("products bfloat16, B 1, T 1, residual, in one call")
    short_run("cuda", kept, tmp_path)


def test_a_short_real_run_of_a_tpu(tmp_path):
    """As a CPU stands for it, in Pallas' interpreter."""
    page = short_run(
        "tpu", {"writing bfloat16, B 1, T 16: kernels auto", "mixtures bfloat16, B 1, T 1: gathered"}, tmp_path
    )
    assert page.startswith(
        "# A check without a TPU, interpreted\n\n`python scripts/card/check.py --platform cpu --as tpu`"
    )
    assert "under compute-sanitizer" not in page


def short_run(kind: str, kept: set[str], tmp_path) -> str:
    """Runs the comparisons ``kept`` in processes, of which all others count as done: the page."""
    names = [name for name, _ in card_stages.kernels(SimpleNamespace(platform="cpu", kind=kind))]
    assert kept <= set(names)
    done = {name: {"status": "exact"} for name in names if name not in kept}
    record = card_check.fresh("cpu", "", kind)
    for stage in card_stages.STAGES_OF[kind]:
        # Without a card there is nothing to run of large arrays.
        status = "not run" if stage == "large" else "exact"
        cases = done if stage == "kernels" else {"one": {"status": status}}
        state = "not finished" if stage == "kernels" else "finished"
        record["stages"][stage] = {"state": state, "total": len(names) if stage == "kernels" else 1, "cases": cases}
    card_check.Report(tmp_path, record).save()
    report = tmp_path / "report.json"
    assert card_check.main(["--platform", "cpu", "--as", kind, "--minutes", "10", "--resume", str(report)]) == 0
    found = statuses(json.loads(report.read_text()), "kernels")
    assert {found[name] for name in kept} == {"exact"}
    page = (tmp_path / "report.md").read_text()
    assert card_report.TITLES["kernels"] in page
    return page

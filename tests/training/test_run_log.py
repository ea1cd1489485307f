"""Logs of a training run for TensorBoard and Weights & Biases. wandb is a fake: the package is large."""

import struct
import sys
from dataclasses import replace
from types import ModuleType

import pytest

from dflash_jax import InputError
from dflash_jax.options.train import TrainConfig
from dflash_jax.training import run, run_log
from dflash_jax.training.run_log import Trackers, check_tracker_packages


def scalars(directory) -> list[tuple[str, int, float]]:
    """(name, step, value) of all event files, in order. A file is a list of TFRecords."""
    from tensorboardX.proto.event_pb2 import Event

    values = []
    for path in sorted(directory.glob("events*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            values += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            at += 16 + length
    return values


class FakeRun:
    """A W&B run that records what it gets."""

    def __init__(self, options: dict):
        self.options, self.lines, self.is_finished, self.error = options, [], False, None

    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("*", "step")

    def log(self, line):
        if self.error:
            raise self.error
        self.lines.append(line)

    def finish(self):
        self.is_finished = True
        if self.error:
            raise self.error


@pytest.fixture
def wandb(monkeypatch):
    """The fake package; ``runs`` has what `init` has given."""
    module = ModuleType("wandb")
    module.runs = []

    def init(**options):
        module.runs.append(FakeRun(options))
        return module.runs[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(run_log, "find_spec", lambda _: True)
    return module


@pytest.fixture
def config(tmp_path):
    return TrainConfig(output=str(tmp_path))


def test_a_continued_run_extends_the_same_wandb_run(config, wandb):
    config = replace(config, wandb="drafters")
    for step in (1, 2):
        trackers = Trackers(config, step - 1, {"rows": 8}, pytest.fail)
        trackers.add(step, {"loss": 0.5})
        trackers.close()
    first, second = wandb.runs
    assert first.lines + second.lines == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.5}]
    assert first.is_finished
    assert second.is_finished
    assert first.options == second.options
    assert {k: first.options[k] for k in ("project", "resume", "dir", "config")} == {
        "project": "drafters",
        "resume": "allow",
        "dir": config.output,
        "config": {"rows": 8},
    }


def test_a_log_that_fails_is_closed_with_one_line_and_the_others_go_on(config, wandb, tmp_path):
    told = []
    config = replace(config, wandb="drafters", tensorboard=str(tmp_path / "board"))
    trackers = Trackers(config, 0, {}, told.append)
    wandb.runs[0].error = ConnectionError("no\nnetwork")
    for step in (1, 2):
        trackers.add(step, {"loss": 0.5})
    trackers.close()
    assert told == ["the log for Weights & Biases failed, training goes on without it: no network"]
    assert scalars(tmp_path / "board") == [("loss", 1, 0.5), ("loss", 2, 0.5)]
    assert wandb.runs[0].is_finished


def test_a_run_that_goes_on_in_the_same_second_keeps_the_events_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1_800_000_000.0)
    for step in (1, 2):
        log = run_log.TensorBoardLog(str(tmp_path), step - 1)
        log.add(step, {"loss": 0.5})
        log.close()
    assert scalars(tmp_path) == [("loss", 1, 0.5), ("loss", 2, 0.5)]


def test_a_log_that_cannot_be_opened_is_one_line(config, wandb, monkeypatch):
    def init(**_):
        raise RuntimeError

    told = []
    monkeypatch.setattr(wandb, "init", init)
    Trackers(replace(config, wandb="drafters"), 0, {}, told.append).add(1, {})
    assert told == ["the log for Weights & Biases failed, training goes on without it: RuntimeError"]


@pytest.mark.parametrize(("option", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_missing_package_names_its_extra_before_anything_is_loaded(config, monkeypatch, option, package):
    monkeypatch.setattr(run_log, "find_spec", lambda name: None if name == package else True)
    monkeypatch.setattr(run, "open_pair", lambda _: pytest.fail("it loads"))
    with pytest.raises(InputError, match=rf'needs the extra {option}: pip install "dflash-jax\[{option}\]"'):
        run.fit(replace(config, **{option: "x"}), pytest.fail)
    check_tracker_packages(config)


@pytest.mark.parametrize(
    "content", [b"\xff\xfe1,2\r\n", b"step,loss\r\nx,1\r\n", b"loss\r\n1\r\n", b"step\r\n\0\r\n", b"step\n\n"]
)
def test_a_file_that_is_no_log_is_named_and_stays(tmp_path, content):
    path = tmp_path / "metrics.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"{path} is no log of a run.*: remove it"):
        run_log.CsvLog(tmp_path, "metrics.csv", 3)
    assert path.read_bytes() == content


def test_lines_up_to_the_step_stay_but_for_one_that_is_not_whole(tmp_path):
    path = tmp_path / "metrics.csv"
    for content, kept in (
        (b"step,loss\r\n1,2\r\n10,3\r\n", b"step,loss\r\n1,2\r\n"),
        (b"step,loss\r\n1,2\r\n3,", b"step,loss\r\n1,2\r\n"),
        (b"step,loss\r\n1", b"step,loss\r\n"),
        (b"", b"step,loss\r\n"),
    ):
        path.write_bytes(content)
        run_log.CsvLog(tmp_path, "metrics.csv", 5).add({"step": 6, "loss": 7})
        assert path.read_bytes() == kept + b"6,7\r\n"


def test_a_full_disk_is_named_by_the_log(tmp_path):
    log = run_log.CsvLog(tmp_path, "metrics.csv", 0)
    log.path.symlink_to("/dev/full")
    with pytest.raises(InputError, match=f"^{log.path} cannot be written: No space left on device$"):
        log.add({"step": 1})

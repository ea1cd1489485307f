"""Checkpoints of small states: what is broken is passed over, what is good and what is best stays."""

import errno
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from dflash_jax import InputError
from dflash_jax.options.train import TrainConfig
from dflash_jax.training import checkpoints
from dflash_jax.training.checkpoints import RECORD, SEAL, Checkpoints
from dflash_jax.training.locks import locked

RAW = {"block_size": 4}
ONE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


@pytest.fixture
def config(tmp_path):
    return TrainConfig(output=str(tmp_path / "run"), keep=2)


def state(step: int) -> dict:
    return {"a": np.full((64, 64), step, np.float32), "b": np.arange(step, step + 8)}


def opened(config, said=None, data: str | None = "x") -> Checkpoints:
    return Checkpoints(config, RAW, (said if said is not None else []).append, data)


def saved(config, *steps: int) -> Checkpoints:
    found = opened(config)
    for step in steps:
        found.save(step, jax.tree.map(jax.numpy.asarray, state(step)))
    found.wait()
    return found


def restored(found: Checkpoints, step: int | None = None) -> int:
    shapes = state(0)
    values = found.restore(shapes, jax.tree.map(lambda _: ONE, shapes), step)
    expected = state(int(values["b"][0]))
    np.testing.assert_array_equal(values["a"], expected["a"])
    return int(values["b"][0])


def steps_of(config) -> list[str]:
    return sorted(path.name for path in Path(config.output, "checkpoints").iterdir())


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def largest(directory: Path) -> Path:
    return max((p for p in (directory / "default").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


FAULTS = {
    "truncated": lambda path: os.truncate(largest(path), 10),
    "one bit": lambda path: flip(largest(path)),
    "gone": lambda path: largest(path).unlink(),
    "metadata empty": lambda path: os.truncate(path / "default" / "_METADATA", 0),
    "seal empty": lambda path: os.truncate(path / SEAL, 0),
    "seal flipped": lambda path: flip(path / SEAL),
    "seal altered": lambda path: (path / SEAL).write_text((path / SEAL).read_text().replace('"seed": 0', '"seed": 1')),
    "seal not UTF-8": lambda path: (path / SEAL).write_bytes(b"\xff\xfe"),
    "no seal": lambda path: (path / SEAL).unlink(),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_broken_checkpoint_is_passed_over_with_one_line_and_written_again(config, fault):
    saved(config, 2, 4).close()
    fault(Path(config.output, "checkpoints/4"))
    said: list[str] = []
    found = opened(config, said)
    assert (found.latest, restored(found)) == (2, 2)
    assert len(said) <= 1
    assert all(line.startswith("the checkpoint of step 4 is broken, and passed over: ") for line in said)
    found.save(4, jax.tree.map(jax.numpy.asarray, state(4)))
    found.close()
    said.clear()
    assert restored(opened(config, said)) == 4
    assert not said


def test_a_step_before_a_broken_one_replaces_it(config):
    saved(config, 4, 6).close()
    flip(largest(Path(config.output, "checkpoints/6")))
    saved(replace(config, keep=1), 5).close()
    assert steps_of(config) == ["5"]


def test_where_all_are_broken_nothing_begins_anew(config):
    saved(config, 2, 4).close()
    for step in (2, 4):
        flip(largest(Path(config.output, f"checkpoints/{step}")))
    with pytest.raises(InputError, match="has no good checkpoint: remove it to begin anew"):
        opened(config)
    assert steps_of(config) == ["2", "4"]


def test_checkpoints_of_earlier_versions_are_read_and_sealed_from_then_on(config):
    saved(config, 2, 4).close()
    for step in (2, 4):
        Path(config.output, f"checkpoints/{step}", SEAL).unlink()
    assert restored(opened(config)) == 4
    with pytest.raises(InputError, match="another configuration: seed was 0, is 1"):
        opened(replace(config, seed=1))
    os.truncate(largest(Path(config.output, "checkpoints/4")), 5)
    found = opened(config)
    with pytest.raises(InputError, match=r"checkpoints/4 cannot be read: .*: remove it") as failure:
        restored(found)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff", b'{"config": 3}'])
def test_the_record_is_with_each_checkpoint(config, content):
    """run.json may be gone, or broken: other options, another drafter and other data are noticed."""
    saved(config, 2).close()
    path = Path(config.output, RECORD)
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(InputError, match="another configuration: seed was 0, is 1"):
        opened(replace(config, seed=1))
    with pytest.raises(InputError, match=r"config\.json is another"):
        Checkpoints(config, {}, print, "x")
    with pytest.raises(InputError, match="the data's tokens are others"):
        opened(config, data="y")
    assert opened(config).latest == 2
    assert "config" in path.read_text()


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b'{"config": 3}'])
def test_a_broken_record_of_an_earlier_version_is_one_line(config, content):
    saved(config, 2).close()
    Path(config.output, "checkpoints/2", SEAL).unlink()
    Path(config.output, RECORD).write_bytes(content)
    with pytest.raises(InputError, match=r"run\.json") as failure:
        opened(config)
    assert "\n" not in str(failure.value)


def test_the_best_is_kept_beside_the_newest(config):
    found = opened(config)
    for step, length in ((2, 1.5), (4, 2.5), (6, 2.0), (8, 1.0), (10, 1.0)):
        measured = {"length": length, "rates": [0.5], "of": "prompts"}
        found.save(step, jax.tree.map(jax.numpy.asarray, state(step)))
        if found.is_best(measured):
            found.note(step, measured)
    found.wait()
    assert steps_of(config) == ["10", "4", "8"]
    step, measured = found.good_best(pytest.fail)
    assert (step, measured["length"], restored(found, step)) == (4, 2.5, 4)
    # Lengths on other prompts are not compared.
    other = {"length": 1.1, "rates": [], "of": "others"}
    assert found.is_best(other)
    found.note(10, other)
    assert steps_of(config) == ["10", "8"]
    found.close()
    flip(largest(Path(config.output, "checkpoints/10")))
    said: list[str] = []
    assert opened(config, said).good_best(said.append) is None
    assert len(said) == 2
    assert "best" in said[1]


def test_what_an_interrupted_write_left_is_removed(config):
    saved(config, 2).close()
    for name in ("checkpoints/4/default.orbax-checkpoint-tmp", "checkpoints/3/default.orbax-checkpoint-tmp"):
        (Path(config.output) / name).mkdir(parents=True)
    found = opened(config)
    assert found.latest == 2
    found.save(4, jax.tree.map(jax.numpy.asarray, state(4)))
    found.close()
    assert steps_of(config) == ["2", "4"]
    assert sorted(p.name for p in Path(config.output, "checkpoints/4").iterdir()) == ["default", SEAL]


def test_a_full_disk_is_named_by_the_checkpoint(config, monkeypatch):
    found = saved(config, 2)

    def full(*_, **__):
        raise ValueError("RESOURCE_EXHAUSTED: Failed to write\n9 bytes to file 7 [os_error_code='28']")

    monkeypatch.setattr(found._writer, "save", full)
    text = rf"^the checkpoint .*checkpoints/4 cannot be written: {os.strerror(errno.ENOSPC)}$"
    with pytest.raises(InputError, match=text):
        found.save(4, state(4))
    monkeypatch.undo()
    monkeypatch.setattr(found, "_digests", lambda *_, **__: full())
    found.save(4, jax.tree.map(jax.numpy.asarray, state(4)))
    with pytest.raises(InputError, match=text):
        found.wait()


def test_a_lock_is_refused_to_others_and_ends_with_its_process(tmp_path):
    path = tmp_path / "new" / "fit.lock"
    script = f"""if 1:
    from pathlib import Path
    from dflash_jax.training.locks import locked
    with locked(Path({str(path)!r}), "x"):
        print(flush=True)
        input()"""
    holder = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline()
        with pytest.raises(InputError, match=f"another process writes run: it holds {path}"), locked(path, "run"):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with locked(path, "run"):
        shutil.rmtree(path.parent)


def test_an_error_of_orbax_is_raised_and_not_logged_too(caplog):
    log = checkpoints.logging.getLogger("absl")
    for name, is_kept in (("/x/orbax/checkpoint/a.py", False), ("/x/other/a.py", True)):
        record = log.makeRecord("absl", checkpoints.logging.ERROR, name, 1, "m", (), None)
        assert bool(log.filter(record)) == is_kept

"""The trainer as it is used: runs that stop and go on, features from disk, what is wrong told."""

import csv
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import LLM, InputError, SamplingParams
from dflash_jax.checkpoint.files import TensorFiles
from dflash_jax.cli.train import main, make_parser, read_config
from dflash_jax.models.families import dflash
from dflash_jax.options.train import TrainConfig, read_toml
from dflash_jax.training import checkpoints, features, run
from dflash_jax.training import regenerate as regeneration
from dflash_jax.training.data import read_documents
from dflash_jax.training.evaluation import Acceptance
from dflash_jax.training.locks import locked
from dflash_jax.training.regenerate import regenerate
from tests.training.talks import TALKS
from tests.training.test_run_log import scalars

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def runs_share_their_step():
    """A run compiles its own, seconds each, though another has the same."""
    steps: dict[tuple, object] = {}

    class Sharing(run.Trainer):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            vocabulary = None if self.vocabulary is None else self.vocabulary.tobytes()
            # What a step depends on but for its arguments; an optimiser equals itself only.
            key = self._structure, self.config, self.recipe, self.update, self.mesh, vocabulary
            self.step = steps.setdefault(key, self.step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "Trainer", Sharing)
        patch.setattr(run, "optimiser", cache(run.optimiser))
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "talks.jsonl"
    path.write_text("".join(json.dumps({"messages": t}) + "\n" for t in TALKS))
    return path


@pytest.fixture(scope="module")
def config(data):
    return TrainConfig(
        data=(str(data),),
        layers=1,
        block_size=4,
        taps=(1, 3),
        sequence_length=96,
        rows=2,
        anchors=8,
        steps=6,
        save_every=2,
        log_every=1,
        learning_rate=1e-3,
    )


def parameters(directory) -> dict[str, np.ndarray]:
    """The newest checkpoint's arrays."""
    import orbax.checkpoint as ocp

    manager = ocp.CheckpointManager(Path(directory).absolute() / "checkpoints")
    found = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore())
    manager.close()
    return {k: np.asarray(v) for k, v in found.items()}


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """A run without a break."""
    output = tmp_path_factory.mktemp("whole")
    said: list[str] = []
    assert run.fit(replace(config, output=str(output)), said.append) == (6, 6)
    return output, said


def assert_same_bits(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])


def test_training_run_logs_learns_and_leaves_a_lossless_drafter(whole, config):
    """It logs, learns, and leaves a drafter that decodes losslessly."""
    output, said = whole
    lines = (output / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["step", *"123456"]
    assert any("12 documents" in line for line in said)
    llm = LLM(None, output / "draft")
    assert llm.largest_block == 4
    params = SamplingParams(max_tokens=24)
    (found,), (plain,) = (llm.generate(["def f("], params, width) for width in (4, 1))
    assert found.token_ids == plain.token_ids


def test_the_export_has_the_published_layout(whole, config):
    files, raw = TensorFiles(whole[0] / "draft"), json.loads((whole[0] / "draft" / "config.json").read_text())
    expected = {t.name: t.shape for e in dflash.weight_names(dflash.read_config(raw)) for t in e.tensors}
    assert {name: files[name] for name in files} == expected
    assert {files.dtype(name) for name in files} == {"BF16"}
    published = json.loads((ROOT / "configs/hf/Qwen3.6-35B-A3B-DFlash.json").read_text())
    # What a published config.json has and ours has not are transformers' defaults.
    assert set(published) - set(raw) <= {"attention_dropout"}
    assert set(published["dflash_config"]) == set(raw["dflash_config"])


def test_an_interrupt_of_the_first_step_which_compiles_does_not_wait_for_it(config, tmp_path, monkeypatch):
    def interrupted(array, sharding):
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(run, "place", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.fit(replace(config, output=str(tmp_path)), lambda _: None)


@pytest.mark.parametrize(("stop", "number"), [(1, signal.SIGTERM), (3, signal.SIGINT)])
def test_a_signal_stops_and_the_same_command_goes_on(whole, config, tmp_path, monkeypatch, stop, number):
    mine, place = replace(config, output=str(tmp_path), tensorboard=str(tmp_path / "board")), run.place
    calls = []

    def signalled(array, sharding):
        calls.append(1)
        if len(calls) == 3 * stop:
            os.kill(os.getpid(), number)
        return place(array, sharding)

    monkeypatch.setattr(run, "place", signalled)
    said: list[str] = []
    assert run.fit(mine, said.append) == (stop, 6)
    assert f"{number.name}: stopped after step {stop}" in said[-1]
    assert run.fit(mine, said.append) == (6, 6)
    assert f"resuming after step {stop} of 6" in said
    assert_same_bits(parameters(tmp_path), parameters(whole[0]))
    steps = [line.split(",")[0] for line in (tmp_path / "metrics.csv").read_text().splitlines()]
    assert steps == ["step", *"123456"]
    # TensorBoard has the same metrics.
    with (tmp_path / "metrics.csv").open(newline="") as file:
        lines = {int(line.pop("step")): line for line in csv.DictReader(file)}
    logged = [(at, name) for name, at, _ in scalars(tmp_path / "board")]
    assert sorted(logged) == sorted((at, name) for at, line in lines.items() for name in line)
    for name, at, value in scalars(tmp_path / "board"):
        assert value == pytest.approx(float(lines[at][name]), rel=1e-6)


def test_a_signal_of_another_process_stops_at_the_step(config, tmp_path, monkeypatch):
    asked = iter([False, True])
    monkeypatch.setattr(run.distributed, "anywhere", lambda _: partial(next, asked))
    said: list[str] = []
    assert run.fit(replace(config, output=str(tmp_path)), said.append) == (2, 6)
    assert said[-1] == "a signal of another process: stopped after step 2; the same command goes on from there"
    assert [path.name for path in tmp_path.glob("checkpoints/*")] == ["2"]


def test_killed_in_the_middle(whole, config, tmp_path):
    """As by a machine that goes down: the newest checkpoint is whole, and the run ends as if nothing had been."""
    options = ["--layers", "1", "--block-size", "4", "--taps", "1", "3", "--sequence-length", "96", "--rows", "2"]
    options += ["--anchors", "8", "--steps", "6", "--save-every", "2", "--log-every", "1", "--learning-rate", "1e-3"]
    command = [sys.executable, "-m", "dflash_jax.train", "fit", "--data", config.data[0], "--output", str(tmp_path)]
    process = subprocess.Popen([*command, *options], env={**os.environ, "JAX_PLATFORMS": "cpu"})
    while not list(tmp_path.glob("checkpoints/[246]")) and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert run.fit(replace(config, output=str(tmp_path)), print) == (6, 6)
    assert_same_bits(parameters(tmp_path), parameters(whole[0]))


def test_two_runs_in_one_directory_are_refused(config, tmp_path):
    with locked(tmp_path / "fit.lock", "x"), pytest.raises(InputError, match=f"another process writes {tmp_path}: "):
        run.fit(replace(config, output=str(tmp_path)), print)
    assert [path.name for path in tmp_path.iterdir()] == ["fit.lock"]


def test_another_configuration_is_refused(whole, config):
    other = replace(config, output=str(whole[0]), learning_rate=2e-3, rows=4)
    with pytest.raises(InputError, match=r"rows was 2, is 4; learning_rate was 0.001, is 0.002"):
        run.fit(other, print)


def test_features_from_disk_are_those_of_the_target(whole, config, tmp_path):
    """bfloat16 on disk: near, not equal. And a cache that was cut off goes on."""
    cached = replace(config, features=str(tmp_path / "cache"), output=str(tmp_path / "run"))
    argv = ["cache", "--data", *cached.data, "--features", cached.features, "--layers", "1", "--block-size", "4"]
    argv += ["--taps", "1", "3", "--sequence-length", "96", "--rows", "2", "--anchors", "8"]
    assert main(argv) == 0
    file = tmp_path / "cache" / "features.bin"
    size = file.stat().st_size
    held = file.read_bytes()
    with file.open("r+b") as f:
        f.truncate(size // 2 + 100)
    with pytest.raises(InputError, match="not complete"):
        run.fit(cached, print)
    assert main(argv) == 0
    assert file.read_bytes() == held
    run.fit(cached, print)
    a, b = ((p / "metrics.csv").read_text().splitlines()[1].split(",") for p in (tmp_path / "run", whole[0]))
    assert abs(float(a[1]) - float(b[1])) < 0.02
    description = tmp_path / "cache" / "features.json"
    described = description.read_text()
    description.write_text("")
    with pytest.raises(InputError, match=r"features\.json is not JSON"):
        run.fit(cached, print)
    assert main(argv) == 2
    description.write_text(described)
    with pytest.raises(InputError, match="hidden states"):
        run.fit(replace(cached, loss="kl", output=str(tmp_path / "kl")), print)
    with pytest.raises(InputError, match=r"other rows: .*sequence_length is 96"):
        run.fit(replace(cached, sequence_length=128, output=str(tmp_path / "long")), print)


def test_a_full_disk_is_told(config, tmp_path, monkeypatch, capsys):
    """Before the first row where it can be known, else behind the last that fitted."""
    argv = ["cache", "--data", *config.data, "--features", str(tmp_path), "--layers", "1", "--block-size", "4"]
    argv += ["--taps", "1", "--sequence-length", "96", "--rows", "2", "--anchors", "8"]
    usage = features.shutil.disk_usage
    monkeypatch.setattr(features.shutil, "disk_usage", lambda path: usage(path)._replace(free=1000))
    assert main(argv) == 2
    assert "0.00 GB are free" in capsys.readouterr().err
    monkeypatch.undo()

    class Full(type(Path())):
        def open(self, mode="r", *args, **options):
            file = super().open(mode, *args, **options)
            return Limited(file) if "b" in mode else file

    class Limited:
        def __init__(self, file):
            self.file, self.left = file, 2

        def write(self, data):
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.file.write(data)

        def __getattr__(self, name):
            return getattr(self.file, name)

    monkeypatch.setattr(features, "Path", Full)
    assert main(argv) == 2
    assert re.search(r"No space left on device after row 4; the same command goes on", capsys.readouterr().err)
    monkeypatch.undo()
    assert main(argv) == 0


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_loss_that_is_no_number_stops_the_run(config, tmp_path, monkeypatch, is_broken):
    """Also at a step that would be saved: nothing of it is. A checkpoint that is broken is not called good."""
    mine = replace(config, output=str(tmp_path))

    class Poisoned(run.Trainer):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            step, count = self.step, iter(range(1, 100))

            def spoiled(state, *rest):
                state, sums, norm = step(state, *rest)
                return state, (replace(sums, loss=sums.loss * np.nan) if next(count) == 4 else sums), norm

            self.step = spoiled

    monkeypatch.setattr(run, "Trainer", Poisoned)
    message = r"step 4: the loss is nan.* last good checkpoint is that of step 2"
    if is_broken:
        message = r"step 4: the loss is nan.* there is no good checkpoint"
        newest_good = run.Checkpoints.newest_good

        def broken(self, tell):
            for path in tmp_path.glob("checkpoints/2/default/_METADATA"):
                path.write_text("{}")
            return newest_good(self, tell)

        monkeypatch.setattr(run.Checkpoints, "newest_good", broken)
    with pytest.raises(InputError, match=message):
        run.fit(mine, print)
    assert [p.name for p in sorted(tmp_path.glob("checkpoints/*"))] == ["2"]


def test_regenerated_answers_are_the_targets_own(data, tmp_path, monkeypatch):
    """And a second call goes on behind the last that was counted, whatever of the next ones was written."""
    monkeypatch.setattr(regeneration, "GROUP", 5)
    monkeypatch.setattr(regeneration, "TURNS", 1)
    llm, path = LLM(None, slots=4), tmp_path / "r.jsonl"
    config = TrainConfig(data=(str(data),), max_new_tokens=12, temperature=0.8)
    assert regenerate(config, llm, path, print) == len(TALKS)
    text = path.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["source"] for line in lines] == list(range(len(TALKS)))
    for i in (0, 7):
        params = SamplingParams(temperature=0.8, max_tokens=12, seed=i)
        (alone,) = llm.chat(TALKS[i][:1], params)
        assert (alone.prompt_ids, alone.token_ids) == (lines[i]["prompt_ids"], lines[i]["response_ids"])
    record = tmp_path / "r.json"
    held = json.loads(record.read_text())
    assert (held["done"], held["bytes"]) == (len(TALKS), len(text.encode()))
    kept = sum(len(line.encode()) for line in text.splitlines(True)[:5])
    record.write_text(json.dumps(held | {"done": 5, "bytes": kept}))
    path.write_text("".join(text.splitlines(True)[:6]) + text.splitlines(True)[6][:20])
    said: list[str] = []
    assert regenerate(config, llm, path, said.append) == len(TALKS)
    assert said == [f"5 of {len(TALKS)} were answered before"]
    assert path.read_text() == text
    with pytest.raises(InputError, match=r"other settings: temperature was 0.8, is 0.5"):
        regenerate(replace(config, temperature=0.5), llm, path, print)
    other = tmp_path / "other.jsonl"
    other.write_text(data.read_text() + '{"text": "x"}\n')
    with pytest.raises(InputError, match="other settings: data was"):
        regenerate(replace(config, data=(str(other),)), llm, path, print)
    path.write_text("")
    with pytest.raises(InputError, match="has less than"):
        regenerate(config, llm, path, print)
    for broken in ("", "{}", '{"settings": 1, "done": 1, "unanswered": 0, "bytes": 9}'):
        record.write_text(broken)
        with pytest.raises(InputError, match=r"r\.json is no"):
            regenerate(config, llm, path, print)
    record.unlink()
    path.write_text(text)
    with pytest.raises(InputError, match=r"no r.json beside it"):
        regenerate(config, llm, path, print)
    with locked(tmp_path / "r.lock", "x"), pytest.raises(InputError, match=r"another process writes .*r\.jsonl"):
        regenerate(config, llm, path, print)
    documents = read_documents([path], None, llm.config.vocab_size)
    assert all(d.mask.sum() == len(line["response_ids"]) for d, line in zip(documents, lines, strict=True))


def test_what_cannot_be_answered_is_told(tmp_path):
    """A prompt that leaves no room, and a conversation that the template refuses: by line, or counted."""
    llm, path = LLM(None, slots=2, max_len=64), tmp_path / "r.jsonl"
    refuses = "{% if messages[0].content == 'no' %}{{ raise_exception('not this') }}{% endif %}"
    llm.tokenizer._full.chat_template = refuses + "{{ messages[0].content }}"
    lines = [{"text": "x = " * 100}, {"messages": [{"role": "user", "content": "no"}]}, {"text": "import"}]
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = TrainConfig(data=(str(data),), max_new_tokens=4, temperature=0.0)
    with pytest.raises(InputError, match=r"d.jsonl:2: the chat template does not take this conversation: not this"):
        regenerate(config, llm, path, print)
    said: list[str] = []
    for _ in range(2):
        said.clear()
        assert regenerate(replace(config, skip_bad_lines=True), llm, path, said.append) == 1
    assert [json.loads(line)["source"] for line in path.read_text().splitlines()] == [2]
    assert [re.split("[:,]", text)[0] for text in said] == ["3 of 3 were answered before", "2 prompts have no answer"]


def test_a_drafters_own_numbers_stay(data, tmp_path, whole):
    draft = str(whole[0] / "draft")
    config = TrainConfig(data=(str(data),), draft=draft, sequence_length=96, rows=2, anchors=8, output=str(tmp_path))
    with pytest.raises(InputError, match=r"layers 3: that of .*draft is 1, and stays"):
        run.fit(replace(config, layers=3, block_size=4, taps=(1, 3)), print)
    with pytest.raises(InputError, match=r"taps \(99,\): that of .*draft is \(1, 3\)"):
        run.fit(replace(config, taps=(99,)), print)


def test_a_run_without_checkpoints_may_begin_anew(config, tmp_path):
    """Another configuration is refused only where something would be lost; other data is another configuration."""
    mine = replace(config, output=str(tmp_path), steps=1)
    with pytest.raises(InputError, match="no checkpoint"):
        run.export(mine, print)
    assert not list(tmp_path.iterdir())
    (tmp_path / "run.json").write_text(json.dumps({"config": {}, "draft": {}}))
    assert run.fit(mine, print) == (1, 1)
    data = tmp_path / "data.jsonl"
    data.write_text(Path(config.data[0]).read_text())
    other = replace(mine, data=(str(data),), output=str(tmp_path / "other"))
    run.fit(other, print)
    data.write_text(json.dumps({"text": "def f(x):\n    return x\n"}) + "\n")
    with pytest.raises(InputError, match="the data's tokens are others"):
        run.fit(other, print)


def test_a_finished_run_is_measured_again_and_logged_once(config, tmp_path):
    mine = replace(config, output=str(tmp_path), steps=1, held_out=config.data[0], evaluate_prompts=1)
    mine, log = replace(mine, evaluate_tokens=4), tmp_path / "acceptance.csv"
    for _ in range(2):
        assert run.fit(mine, print) == (1, 1)
        lines = log.read_text().splitlines()
        assert [line.split(",")[0] for line in lines] == ["step", "1", "1"]
    exported = json.loads((tmp_path / "draft" / "config.json").read_text())
    rates = dflash.recorded_acceptance(exported, exported["block_size"])
    assert exported["acceptance_length"] == pytest.approx(1 + sum(rates), abs=0.006)
    # Without prompts what was measured stays.
    run.fit(replace(mine, held_out=None), print)
    assert log.read_text().splitlines() == lines


def test_the_best_measured_drafter_is_exported(config, tmp_path, monkeypatch):
    """Decoding decides, not the number of steps; also after a stop, and by export."""
    mine = replace(config, output=str(tmp_path), held_out=config.data[0], evaluate_prompts=1, evaluate_tokens=4)
    mine = replace(mine, evaluate_every=1, keep=1)
    lengths, drafts = iter([1.2, 1.9, 1.5, 1.4, 1.1, 1.3]), []

    def measured(config, llm, prompts):
        drafts.append(jax.tree.map(np.asarray, jax.tree.leaves(llm.drafter)))
        return {0.0: Acceptance(next(lengths), 10, 1, 0, (0.4, 0.2))}

    monkeypatch.setattr(run, "acceptance_by_temperature", measured)
    said: list[str] = []
    place, calls = run.place, []

    def signalled(array, sharding):
        calls.append(1)
        if len(calls) == 3 * 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return place(array, sharding)

    monkeypatch.setattr(run, "place", signalled)
    assert run.fit(mine, said.append) == (4, 6)
    assert run.fit(mine, said.append) == (6, 6)
    directory = tmp_path / "draft"
    assert said[-1] == f"the drafter of step 2 (the best measured, with acceptance length 1.900) is in {directory}"
    assert sorted(p.name for p in tmp_path.glob("checkpoints/*")) == ["2", "6"]
    exported = json.loads((directory / "config.json").read_text())
    assert (exported["acceptance_length"], exported["acceptance_rates"]) == (1.9, [0.4, 0.2])
    files = TensorFiles(directory)
    contents = {name: files.read(name) for name in files}
    flat = np.concatenate([np.ravel(x).astype(np.float32) for x in contents.values()])
    best = np.concatenate([np.ravel(x).astype(jnp.bfloat16).astype(np.float32) for x in drafts[1]])
    assert np.sort(flat).tolist() == np.sort(best).tolist()
    run.export(mine, said.append)
    assert said[-1] == said[-2]
    assert all(np.array_equal(TensorFiles(directory).read(name), x) for name, x in contents.items())


def test_features_of_another_target_are_refused(config, tmp_path):
    pair = run.open_pair(config)
    rows = pair.rows(config, print)
    before = features.record_of(rows, pair, False)
    assert features.record_of(rows, run.open_pair(config), False) == before
    last = pair.target.layers[-1].input_norm.weight
    last[...] = last[...] * 1.5
    assert features.record_of(rows, pair, False)["target"] != before["target"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["fit"], "fit needs --data"),
        (["fit", "--data", "no.jsonl"], "no.jsonl cannot be read"),
        (["fit", "--rows", "3", "--accumulate", "2"], "cannot be divided into 2"),
        (["fit", "--anchors", "5000"], "anchors 5000"),
        (["fit", "--loss", "x"], "--loss: invalid choice: 'x'"),
        (["fit", "--optimizer", "sgd"], "--optimizer: invalid choice: 'sgd'"),
        (["fit", "--taps", "9"], "taps target layers [9]"),
        (["fit", "--sequence-length", "9000"], "8192 positions"),
        (["fit", "--mask-token-id", "600"], "mask_token_id 600"),
        (["evaluate"], "run/draft does not exist"),
        (["export", "--output", "nothing"], "no checkpoint"),
        (["cache"], "cache needs --data"),
        (["teach"], "invalid choice"),
        (["fit", "--steps", "-5"], "steps -5: it must be 1 or more"),
        (["fit", "--loss-vocabulary", "0"], "--loss-vocabulary 0"),
        (["fit", "--warm-up", "2"], "--warm-up 2.0"),
        (["fit", "--config", "none.toml"], "none.toml cannot be read"),
    ],
)
def test_what_is_wrong_is_one_line(options, message, data, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if options != ["fit"] and options[0] == "fit" and "--data" not in options:
        options = [*options, "--data", str(data)]
    assert main(options) == 2
    err = capsys.readouterr().err
    assert err.splitlines()[-1].startswith("error: ")
    assert message in err, err


CONFIGS = sorted((ROOT / "configs/train").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_training_config_is_valid(path):
    values, meshes = read_toml(path)
    config = TrainConfig(**values)
    # A published drafter has its shape and its machines; any other one is of numbers.
    assert (config.draft_config is None) == (not meshes)
    if config.draft_config is not None:
        dflash.read_config(json.loads(Path(config.draft_config).read_text()))
    assert read_config(make_parser().parse_args(["fit", "--config", str(path), "--rows", "4"]))[0].rows == 4


def test_what_lies_elsewhere_has_its_logs_here():
    assert TrainConfig(output="gs://bucket/runs/mine/").directory == Path("mine")
    assert TrainConfig(output="runs/mine").directory == Path("runs/mine")


def test_what_a_bucket_needs_is_told(config, monkeypatch):
    def missing(path):
        raise ImportError("Please install gcsfs")

    monkeypatch.setattr(checkpoints.epath, "Path", missing)
    with pytest.raises(InputError, match=r"output gs://b/mine: Please install gcsfs \(pip install .dflash-jax\[gcs\]"):
        checkpoints.Checkpoints(replace(config, output="gs://b/mine"), {}, print)


def test_there_is_a_config_for_every_drafter():
    shapes = [read_toml(path)[0].get("draft_config") for path in CONFIGS]
    named = {Path(shape).name for shape in shapes if shape}
    assert named == {p.name for p in (ROOT / "configs/hf").glob("*DFlash*.json")}

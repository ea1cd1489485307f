"""Checkpoints of a training run: parameters and optimiser state by step, with digests and the run's configuration."""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from dflash_jax.checkpoint.config_files import read_json
from dflash_jax.checkpoint.files import write_json
from dflash_jax.errors import InputError
from dflash_jax.options.train import TrainConfig, differences
from dflash_jax.parallel import distributed

# Orbax logs what its threads raise with their stacks. It raises it as well.
logging.getLogger("absl").addFilter(lambda record: record.levelno < logging.ERROR or "orbax" not in record.pathname)

# In the run's directory, for the user, and for checkpoints without a seal.
RECORD = "run.json"
# In a checkpoint's directory: the digest of each file, the run's record, and the acceptance length where it was
# measured. It is written when the checkpoint is complete.
SEAL = "seal.json"
# The arrays of a checkpoint.
ARRAYS = "default"


class Checkpoints:
    """The checkpoints below ``config.output``, a directory or a ``gs://`` path.

    A checkpoint is ``checkpoints/STEP``. It is skipped if a file differs from the digest in its seal.

    Attributes:
        root: The directory of the run.
        latest: The step of the newest good checkpoint when the run was opened; 0 without one.
    """

    def __init__(self, config: TrainConfig, raw: dict, tell: Callable[[str], None], data: str | None = None):
        """Opens the checkpoints of a run, new or begun.

        Args:
            config: The run's configuration.
            raw: The drafter's ``config.json``.
            tell: Receives a line for each checkpoint that is passed over.
            data: Digest of the rows to train on; None opens an existing run for reading.

        Raises:
            InputError: The directory holds a run with another configuration (the message lists the differences), or has
                no good checkpoint to read.
        """
        try:
            self.root: Any = epath.Path(config.output) if "://" in config.output else Path(config.output).absolute()
            self._folder = self.root / "checkpoints"
            steps = self._steps()
        except ImportError as e:
            raise InputError(f'output {config.output}: {e} (pip install "dflash-jax[gcs]")') from None
        if data is None and not steps:
            raise InputError(f"{config.output} has no checkpoint")
        self._keep, self._record = config.keep, {"config": asdict(config), "draft": raw, "data": data}
        self.latest = self.newest_good(tell)
        if steps and not self.latest:
            raise InputError(f"{self._folder} has no good checkpoint: remove it to begin anew")
        if self.latest:
            self._check_record(config, raw, data)
        # Every process reads the record before the first one writes it, and none continues before it exists.
        distributed.agreed(0)
        if data is not None and distributed.is_first():
            self.root.mkdir(parents=True, exist_ok=True)
            self._write(self.root / RECORD, self._record)
        distributed.agreed(0)
        self._writer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
        # Seals the checkpoint that is being written.
        self._sealer = ThreadPoolExecutor(1, "seal")
        self._sealing: Future | None = None
        self._saved = self.latest

    def _steps(self) -> list[int]:
        """Steps of all checkpoints, ascending."""
        if not self._folder.exists():
            return []
        found = (int(path.name) for path in self._folder.iterdir() if path.name.isdigit())
        return sorted(step for step in found if (self._folder / str(step) / ARRAYS).exists())

    def _check_record(self, config: TrainConfig, raw: dict, data: str | None) -> None:
        """Raises InputError where the newest checkpoint is of another run."""
        seal = self._seal(self.latest)
        record = seal["record"] if seal else read_json(self.root / RECORD)
        if not isinstance(record.get("config"), dict):
            raise InputError(f"{self.root / RECORD} is no record of a run: it has no config")
        wrong = differences(record["config"], config)
        if record.get("draft") != raw:
            wrong.append("the drafter's config.json is another")
        if data is not None and record.get("data", data) != data:
            wrong.append("the data's tokens are others")
        if wrong:
            raise InputError(f"{config.output} has a run with another configuration: {'; '.join(wrong)}")

    def newest_good(self, tell: Callable[[str], None]) -> int:
        """The step of the newest checkpoint whose files match its seal; 0 without one.

        Only where none has a seal, since an earlier version wrote them, it is the newest one.

        Args:
            tell: Receives a line for each newer one.
        """
        return distributed.agreed(self._newest_good(tell) if distributed.is_first() else 0)

    def _newest_good(self, tell: Callable[[str], None]) -> int:
        unsealed = []
        for step in reversed(self._steps()):
            if not (self._folder / str(step) / SEAL).exists():
                unsealed.append(step)
            elif (fault := self._fault(step)) is None:
                return step
            else:
                tell(f"the checkpoint of step {step} is broken, and passed over: {fault}")
        return unsealed[0] if unsealed else 0

    def _seal(self, step: int) -> dict | None:
        """The seal of a checkpoint; None without one. Raises InputError for one that is broken."""
        path = self._folder / str(step) / SEAL
        if not path.exists():
            return None
        seal = read_json(path)
        if seal.pop("digest", None) != _digest(seal):
            raise InputError(f"{path} is not what was written")
        return seal

    def _fault(self, step: int) -> str | None:
        """Why a sealed checkpoint cannot be used; None where its files match its seal."""
        try:
            seal = self._seal(step)
            assert seal is not None
            digests = self._digests(step)
        except InputError as e:
            return str(e)
        except OSError as e:
            return f"{e.filename} cannot be read: {e.strerror}"
        wrong = [name for name, digest in seal["files"].items() if digests.get(name) != digest]
        return f"{self._folder / str(step) / wrong[0]} is not what was written" if wrong else None

    def _digests(self, step: int, sync: bool = False) -> dict[str, str]:
        """Hex digest of each file of a checkpoint, by its path; ``sync``: local files are forced to the disk first."""
        directory = self._folder / str(step)

        def digest(path) -> str:
            with path.open("rb") as file:
                if sync and isinstance(path, Path):
                    os.fsync(file.fileno())
                return hashlib.file_digest(file, _blake).hexdigest()

        paths = sorted(path for path in (directory / ARRAYS).rglob("*") if path.is_file())
        with ThreadPoolExecutor(4) as pool:
            return {p.relative_to(directory).as_posix(): d for p, d in zip(paths, pool.map(digest, paths), strict=True)}

    def _write(self, path, value: dict) -> None:
        if isinstance(path, Path):
            write_json(path, value)
        else:
            path.write_text(json.dumps(value, indent=2) + "\n")

    def _write_seal(self, step: int, files: dict[str, str], measured: dict | None) -> None:
        seal = {"record": self._record, "files": files, "measured": measured}
        # As JSON reads it: tuples are lists.
        seal = json.loads(json.dumps(seal))
        self._write(self._folder / str(step) / SEAL, seal | {"digest": _digest(seal)})
        self._prune(step)

    def restore(self, state, shardings, step: int | None = None):
        """Reads a checkpoint, by default the newest good one.

        Args:
            state: A pytree with the shapes and dtypes of the arrays.
            shardings: Where each array goes, a pytree like ``state``. It may differ from the mesh that wrote the
                checkpoint.
            step: Its step.

        Raises:
            InputError: It cannot be read.
        """
        import jax

        def shape(x, sharding):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        leaves, structure = jax.tree.flatten(jax.tree.map(shape, state, shardings))
        named = {str(i): leaf for i, leaf in enumerate(leaves)}
        path = self._folder / str(self.latest if step is None else step)
        try:
            arrays = self._writer.restore(path / ARRAYS, args=ocp.args.StandardRestore(named))
        except Exception as e:  # orbax and tensorstore raise many unrelated types
            raise InputError(f"the checkpoint {path} cannot be read: {_reason(e)}: remove it") from None
        return jax.tree.unflatten(structure, [arrays[str(i)] for i in range(len(leaves))])

    def save(self, step: int, state) -> None:
        """Starts to write ``state``; `wait` returns when it is on disk.

        Raises:
            InputError: The checkpoint before it could not be written.
        """
        import jax

        if step == self._saved:
            return
        self.wait()
        named = {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(state))}
        path = self._folder / str(step) / ARRAYS
        self._attempt(step, lambda: self._writer.save(path, args=ocp.args.StandardSave(named), force=True))
        self._saved, self._sealing = step, self._sealer.submit(self._finish, step)

    def _finish(self, step: int) -> None:
        """Seals a checkpoint when it is complete, and removes those that are no longer kept."""

        def finish() -> None:
            self._writer.wait_until_finished()
            if distributed.is_first():
                self._write_seal(step, self._digests(step, sync=True), None)

        self._attempt(step, finish)

    def _attempt(self, step: int, write: Callable[[], Any]) -> None:
        try:
            write()
        except InputError:
            raise
        except Exception as e:  # orbax and tensorstore raise many unrelated types
            raise InputError(f"the checkpoint {self._folder / str(step)} cannot be written: {_reason(e)}") from None

    def wait(self) -> None:
        """Blocks until all checkpoints are on disk.

        Raises:
            InputError: One could not be written.
        """
        if self._sealing is not None:
            sealing, self._sealing = self._sealing, None
            sealing.result()

    def note(self, step: int, measured: dict) -> None:
        """Records what was measured with the checkpoint of ``step``, the one that was saved last.

        Args:
            step: Its step.
            measured: With ``length``, and ``of``: what it was measured on. Only the same can be compared.
        """
        self.wait()
        if distributed.is_first() and (seal := self._seal(step)) is not None:
            self._write_seal(step, seal["files"], measured)

    def is_best(self, measured: dict) -> bool:
        """Whether no checkpoint has a larger acceptance length on the same prompts."""
        best = self._best()
        return best is None or best[1]["of"] != measured["of"] or best[1]["length"] <= measured["length"]

    def _best(self) -> tuple[int, dict] | None:
        """The step of the largest acceptance length among those on the newest prompts, and what was measured."""
        measured = []
        for step in reversed(self._steps()):
            with suppress(InputError):
                seal = self._seal(step)
                if seal is not None and seal["measured"] is not None:
                    measured.append((step, seal["measured"]))
        same = [(step, found) for step, found in measured if found["of"] == measured[0][1]["of"]]
        return max(same, key=lambda each: (each[1]["length"], each[0]), default=None)

    def good_best(self, tell: Callable[[str], None]) -> tuple[int, dict] | None:
        """The checkpoint with the largest acceptance length, and what was measured; None without a good one."""
        self.wait()
        best = self._best() if distributed.is_first() else None
        if best is not None and (fault := self._fault(best[0])) is not None:
            tell(f"the best checkpoint, that of step {best[0]}, is broken, and passed over: {fault}")
            best = None
        # The other processes read the seal when the first one has written it.
        step = distributed.agreed(0 if best is None else best[0])
        seal = self._seal(step) if step else None
        return None if seal is None else (step, seal["measured"])

    def _prune(self, last: int) -> None:
        """Removes all checkpoints but the newest ones up to ``last``, which is good, and the best.

        Those after it are broken: the run went on before them.
        """
        sealed = [s for s in self._steps() if s <= last and (self._folder / str(s) / SEAL).exists()]
        kept = {*sealed[-self._keep :], *(self._best() or ())[:1]}
        for path in self._folder.iterdir():
            if path.name not in map(str, kept):
                _remove(path)
        # What an interrupted attempt to write it has left.
        for path in (self._folder / str(last)).iterdir():
            if path.name not in (ARRAYS, SEAL):
                _remove(path)

    def close(self) -> None:
        """Ends the threads."""
        self.wait()
        self._sealer.shutdown()
        self._writer.close()


def _remove(path) -> None:
    if isinstance(path, Path):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    else:
        path.rmtree(missing_ok=True)


def _blake():
    return hashlib.blake2b(digest_size=16)


def _digest(value: dict) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def _reason(error: Exception) -> str:
    """What a library says of a file, in one line; of an error of the operating system what it is."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    number = re.search(r"os_error_code='(\d+)'", text)
    return os.strerror(int(number[1])) if number else text[:300] or type(error).__name__

"""Checkpoints of a training run: parameters and optimiser state by step, and a record of the configuration."""

import json
from dataclasses import asdict
from pathlib import Path

import orbax.checkpoint as ocp
from etils import epath

from dflash_jax.errors import InputError
from dflash_jax.parallel import distributed
from dflash_jax.training.config import TrainConfig, differences

RECORD = "run.json"


class Checkpoints:
    """The checkpoints below ``config.output``, a directory or a ``gs://`` path.

    Attributes:
        root: The directory of the run.
    """

    def __init__(self, config: TrainConfig, raw: dict, data: str | None = None):
        """Opens the checkpoints of a run, new or begun.

        Args:
            config: The run's configuration.
            raw: The drafter's ``config.json``.
            data: Digest of the rows to train on; None opens an existing run for reading.

        Raises:
            InputError: The directory holds a run with another configuration (the message lists the differences), or has
                no checkpoint to read.
        """
        try:
            self.root = epath.Path(config.output if "://" in config.output else Path(config.output).absolute())
            record, folder = self.root / RECORD, self.root / "checkpoints"
            has_checkpoint = record.exists() and folder.exists() and any(p.name.isdigit() for p in folder.iterdir())
        except ImportError as e:
            raise InputError(f'output {config.output}: {e} (pip install "dflash-jax[gcs]")') from None
        if data is None and not has_checkpoint:
            raise InputError(f"{config.output} has no checkpoint")
        if has_checkpoint:
            previous = json.loads(record.read_text())
            wrong = differences(previous["config"], config)
            if previous["draft"] != raw:
                wrong.append("the drafter's config.json is another")
            if data is not None and previous.get("data", data) != data:
                wrong.append("the data's tokens are others")
            if wrong:
                raise InputError(f"{config.output} has a run with another configuration: {'; '.join(wrong)}")
        # Every process reads the record before the first one writes it, and none continues before it exists.
        distributed.agreed(0)
        if not has_checkpoint and distributed.is_first():
            self.root.mkdir(parents=True, exist_ok=True)
            content = {"config": asdict(config), "draft": raw, "data": data}
            record.write_text(json.dumps(content, indent=1) + "\n")
        distributed.agreed(0)
        options = ocp.CheckpointManagerOptions(max_to_keep=config.keep, create=True)
        self._manager = ocp.CheckpointManager(folder, options=options)

    @property
    def latest(self) -> int:
        """The step of the newest checkpoint; 0 without one."""
        return self._manager.latest_step() or 0

    def restore(self, state, shardings):
        """Reads the newest checkpoint.

        Args:
            state: A pytree with the shapes and dtypes of the arrays.
            shardings: Where each array goes, a pytree like ``state``. It may differ from the mesh that wrote the
                checkpoint.
        """
        import jax

        def shape(x, sharding):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        leaves, structure = jax.tree.flatten(jax.tree.map(shape, state, shardings))
        named = {str(i): leaf for i, leaf in enumerate(leaves)}
        arrays = self._manager.restore(self.latest, args=ocp.args.StandardRestore(named))
        return jax.tree.unflatten(structure, [arrays[str(i)] for i in range(len(leaves))])

    def save(self, step: int, state) -> None:
        """Starts to write ``state``; `wait` returns when it is on disk."""
        import jax

        if step != self._manager.latest_step():
            named = {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(state))}
            self._manager.save(step, args=ocp.args.StandardSave(named))

    def wait(self) -> None:
        """Blocks until all checkpoints are on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Ends the manager's threads."""
        self._manager.close()

"""Checkpoints of a training run: parameters and optimiser state by step, and the run's own record."""

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
    """Of the run in ``config.output``, which may be a directory or a ``gs://`` path. Raises InputError where another
    run has checkpoints there, saying what differs."""

    def __init__(self, config: TrainConfig, raw: dict, data: str | None = None):
        """``data``: the digest of the rows to train on; None: to read only."""
        try:
            self.root = epath.Path(config.output if "://" in config.output else Path(config.output).absolute())
            record, folder = self.root / RECORD, self.root / "checkpoints"
            begun = record.exists() and folder.exists() and any(p.name.isdigit() for p in folder.iterdir())
        except ImportError as e:
            raise InputError(f'output {config.output}: {e} (pip install "dflash-jax[gcs]")') from None
        if data is None and not begun:
            raise InputError(f"{config.output} has no checkpoint")
        if begun:
            held = json.loads(record.read_text())
            wrong = differences(held["config"], config)
            if held["draft"] != raw:
                wrong.append("the drafter's config.json is another")
            if data is not None and held.get("data", data) != data:
                wrong.append("the data's tokens are others")
            if wrong:
                raise InputError(f"{config.output} has a run with another configuration: {'; '.join(wrong)}")
        # All have looked before one writes, and the others wait until it is there.
        distributed.agreed(0)
        if not begun and distributed.is_first():
            self.root.mkdir(parents=True, exist_ok=True)
            about = {"config": asdict(config), "draft": raw, "data": data}
            record.write_text(json.dumps(about, indent=1) + "\n")
        distributed.agreed(0)
        options = ocp.CheckpointManagerOptions(max_to_keep=config.keep, create=True)
        self._manager = ocp.CheckpointManager(folder, options=options)

    @property
    def latest(self) -> int:
        """The step of the newest one; 0 without any."""
        return self._manager.latest_step() or 0

    def restore(self, state, shardings):
        """The newest, in the shapes of ``state`` and on the devices of ``shardings``, whatever it was written from."""
        import jax

        def shape(x, sharding):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        leaves, structure = jax.tree.flatten(jax.tree.map(shape, state, shardings))
        named = {str(i): leaf for i, leaf in enumerate(leaves)}
        found = self._manager.restore(self.latest, args=ocp.args.StandardRestore(named))
        return jax.tree.unflatten(structure, [found[str(i)] for i in range(len(leaves))])

    def save(self, step: int, state) -> None:
        """Returns before all is written: see `wait`."""
        import jax

        if step != self._manager.latest_step():
            named = {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(state))}
            self._manager.save(step, args=ocp.args.StandardSave(named))

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()

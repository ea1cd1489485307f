"""A cache of the target's features on disk: computed once, read in every epoch."""

import shutil
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dflash_jax import progress
from dflash_jax.checkpoint.config_files import read_json
from dflash_jax.checkpoint.files import write_json
from dflash_jax.errors import InputError
from dflash_jax.models.drafters import abstract_drafter
from dflash_jax.options.train import TrainConfig
from dflash_jax.parallel import distributed
from dflash_jax.parallel.sharding import DATA, Layout, place
from dflash_jax.training.data import PackedRows
from dflash_jax.training.losses import Loss
from dflash_jax.training.media_rows import with_media
from dflash_jax.training.optimiser import optimiser
from dflash_jax.training.pair import Pair
from dflash_jax.training.step import Recipe, Trainer

FEATURES, HIDDEN, RECORD = "features.bin", "hidden.bin", "features.json"


def record_of(rows: PackedRows, pair: Pair, with_hidden: bool) -> dict:
    """The description of a cache: target, shapes and rows. A cache is used only where its description matches."""
    digest = blake2b(digest_size=16)
    for i in range(len(rows)):
        digest.update(rows[i]["tokens"].tobytes() + rows[i]["starts"].tobytes() + rows.media_keys(i))
    config, encoder = pair.llm.config, pair.llm.encoder
    tower = {"tower": fingerprint(encoder.tower, pair.target.layout)} if encoder and rows.has_media else {}
    return tower | {
        "target": fingerprint(pair.target, pair.target.layout),
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "target_layers": len(config.layers),
        "taps": list(abstract_drafter(pair.draft).taps),
        "rows": len(rows),
        "sequence_length": rows.length,
        "tokens": digest.hexdigest(),
        "hidden": with_hidden,
    }


def fingerprint(model, layout: Layout) -> str:
    """Hex digest of the first numbers of each of a model's arrays, in bfloat16, on any mesh."""

    def samples(leaves):
        return [jnp.ravel(x[(0,) * (x.ndim - 1)][:16]).astype(jnp.bfloat16) for x in leaves]

    leaves = jax.tree.leaves(model)
    replicated = jax.sharding.NamedSharding(layout.mesh(), jax.sharding.PartitionSpec())
    digest = blake2b(digest_size=16)
    for x in jax.device_get(jax.jit(samples, out_shardings=replicated)(leaves)):
        digest.update(x.tobytes())
    return digest.hexdigest()


def row_bytes(record: dict) -> tuple[int, int]:
    """Bytes of a row's features and of its hidden states, in bfloat16."""
    each = 2 * record["sequence_length"] * record["hidden_size"]
    return each * len(record["taps"]), each if record["hidden"] else 0


def _directory(config: TrainConfig) -> Path:
    """The directory of the cache."""
    if config.features is None:
        raise InputError("no feature cache: give --features")
    return Path(config.features)


def write(config: TrainConfig, rows: PackedRows, pair: Pair, tell: Callable[[str], None]) -> None:
    """Writes the features of every row into ``config.features``; continues where an earlier call stopped.

    Args:
        config: Names the directory and the batch size.
        rows: The rows.
        pair: The target and its drafter's taps.
        tell: Receives the sizes before anything is computed, and the end.

    Raises:
        InputError: The directory has another cache, or the disk is full.
    """
    record = record_of(rows, pair, Loss(config.loss).needs_teacher)
    directory = _directory(config)
    directory.mkdir(parents=True, exist_ok=True)
    sizes, description = row_bytes(record), directory / RECORD
    if description.exists() and read_json(description) != record:
        raise InputError(f"{directory} has a cache of other features: give another directory, or remove it")
    # Every process reads the description before the first one writes it.
    distributed.agreed(0)
    is_writer = distributed.is_first()
    if is_writer:
        write_json(description, record)
    paths = [directory / name for name, size in zip((FEATURES, HIDDEN), sizes, strict=True) if size]
    done = min(p.stat().st_size // s if p.exists() else 0 for p, s in zip(paths, sizes, strict=False))
    done = distributed.agreed(done)
    missing = (len(rows) - done) * sum(sizes)
    total_bytes = len(rows) * sum(sizes)
    tell(f"{len(rows)} rows of {sum(sizes) / 1e6:.1f} MB: {total_bytes / 1e9:.2f} GB, {missing / 1e9:.2f} to go")
    if missing > shutil.disk_usage(directory).free:
        free = shutil.disk_usage(directory).free
        raise InputError(f"{directory}: {missing / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free")
    trainer = Trainer(pair.target, pair.draft, Recipe(Loss(), 1, 2), optimiser(1e-3, 1))
    # Replicated results: the first host can read them all.
    run = jax.jit(trainer.features, out_shardings=trainer.sharding(jax.sharding.PartitionSpec()))
    data_sharding = trainer.sharding(jax.sharding.PartitionSpec(DATA))
    source = with_media(rows)
    count, start = trainer.layout.data * max(1, config.rows // trainer.layout.data), done
    files = [path.open("r+b" if path.exists() else "wb") for path in paths] if is_writer else []
    try:
        for file, size in zip(files, sizes, strict=False):
            file.truncate(done * size)
            file.seek(done * size)
        starts_of_batches = range(done, len(rows), count)
        for start in progress.bar(
            starts_of_batches, description="computing features", unit="batch", disable=not is_writer
        ):
            picked = [source[min(i, len(rows) - 1)] for i in range(start, start + count)]
            batch = jax.tree.map(lambda *each: place(np.stack(each), data_sharding), *picked)
            hidden, features = run(trainer.leaves, batch["tokens"], batch["starts"], batch.get("media"))
            arrays = [features, hidden][: len(paths)]
            if not is_writer:
                jax.block_until_ready(arrays)
                continue
            for file, array in zip(files, jax.device_get(arrays), strict=True):
                file.write(array[: len(rows) - start].astype(ml_dtypes.bfloat16).tobytes())
                file.flush()
    except OSError as e:
        raise InputError(f"{directory}: {e.strerror} after row {start}; the same command goes on from there") from None
    finally:
        for file in files:
            file.close()
    tell(f"{len(rows)} rows are in {directory}")


class FeatureRows:
    """`PackedRows` with features [T, taps, H] from a cache, and hidden states [T, H] where the loss needs them.

    Attributes:
        rows: The packed rows.
        needed: Whether the loss needs hidden states.
    """

    def __init__(self, config: TrainConfig, rows: PackedRows, pair: Pair, needed: bool):
        """Opens the cache of ``config.features``.

        Raises:
            InputError: The cache is missing, incomplete or of other rows.
        """
        directory = _directory(config)
        if not (directory / RECORD).exists():
            raise InputError(f"features {directory} have no {RECORD}: make them with `cache`")
        description = read_json(directory / RECORD)
        expected = record_of(rows, pair, description.get("hidden", False))
        wrong = [f"{k} is {description.get(k)!r}, not {v!r}" for k, v in expected.items() if description.get(k) != v]
        if needed and not description["hidden"]:
            wrong.append("it has no hidden states, which this loss needs: run `cache` with the same loss")
        if wrong:
            raise InputError(f"features {directory} are of other rows: {'; '.join(wrong)}")
        self.rows, self.needed, self._maps = rows, needed, {}
        h, shape = description["hidden_size"], (len(rows), rows.length)
        shapes = {"features": (*shape, len(description["taps"]), h)} | ({"hidden": (*shape, h)} if needed else {})
        for (name, shape_on_disk), file in zip(shapes.items(), (FEATURES, HIDDEN), strict=False):
            if (directory / file).stat().st_size < 2 * np.prod(shape_on_disk):
                raise InputError(f"features {directory} are not complete: run `cache` again")
            self._maps[name] = np.memmap(directory / file, ml_dtypes.bfloat16, "r", shape=shape_on_disk)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index) -> dict[str, np.ndarray]:
        return self.rows[index] | {name: np.asarray(m[index]) for name, m in self._maps.items()}

"""The target's features on disk: computed once, read in every epoch."""

import json
import shutil
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dflash_jax.errors import InputError
from dflash_jax.parallel import distributed
from dflash_jax.parallel.sharding import DATA, place
from dflash_jax.training.config import TrainConfig
from dflash_jax.training.data import PackedRows
from dflash_jax.training.losses import Loss
from dflash_jax.training.optimiser import optimiser
from dflash_jax.training.pair import Pair
from dflash_jax.training.step import Recipe, Trainer

FEATURES, HIDDEN, RECORD = "features.bin", "hidden.bin", "features.json"


def record_of(rows: PackedRows, pair: Pair, with_hidden: bool) -> dict:
    """What a cache is of."""
    digest = blake2b(digest_size=16)
    for i in range(len(rows)):
        digest.update(rows[i]["tokens"].tobytes() + rows[i]["starts"].tobytes())
    config = pair.llm.config
    return {
        "target": fingerprint(pair.target),
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "target_layers": len(config.layers),
        "taps": list(pair.draft.target_layer_ids),
        "rows": len(rows),
        "sequence_length": rows.length,
        "tokens": digest.hexdigest(),
        "hidden": with_hidden,
    }


def fingerprint(target) -> str:
    """Of some numbers of each of the target's arrays, in bfloat16, wherever they lie."""

    def some(leaves):
        return [jnp.ravel(x[(0,) * (x.ndim - 1)][:16]).astype(jnp.bfloat16) for x in leaves]

    leaves = jax.tree.leaves(target)
    everywhere = jax.sharding.NamedSharding(target.layout.mesh(), jax.sharding.PartitionSpec())
    digest = blake2b(digest_size=16)
    for x in jax.device_get(jax.jit(some, out_shardings=everywhere)(leaves)):
        digest.update(x.tobytes())
    return digest.hexdigest()


def row_bytes(record: dict) -> tuple[int, int]:
    """Bytes of a row's features and of its hidden states, in bfloat16."""
    each = 2 * record["sequence_length"] * record["hidden_size"]
    return each * len(record["taps"]), each if record["hidden"] else 0


def write(config: TrainConfig, rows: PackedRows, pair: Pair, tell: Callable[[str], None]) -> None:
    """Features of every row into ``config.features``, going on where an earlier call stopped. Tells the size first."""
    record = record_of(rows, pair, Loss(config.loss).needs_teacher)
    directory = Path(config.features)
    directory.mkdir(parents=True, exist_ok=True)
    sizes, about = row_bytes(record), directory / RECORD
    if about.exists() and json.loads(about.read_text()) != record:
        raise InputError(f"{directory} has a cache of other features: give another directory, or remove it")
    # All have looked before one writes.
    distributed.agreed(0)
    mine = distributed.is_first()
    if mine:
        about.write_text(json.dumps(record) + "\n")
    paths = [directory / name for name, size in zip((FEATURES, HIDDEN), sizes, strict=True) if size]
    done = min(p.stat().st_size // s if p.exists() else 0 for p, s in zip(paths, sizes, strict=False))
    done = distributed.agreed(done)
    left = (len(rows) - done) * sum(sizes)
    tell(
        f"{len(rows)} rows of {sum(sizes) / 1e6:.1f} MB: {len(rows) * sum(sizes) / 1e9:.2f} GB, {left / 1e9:.2f} to go"
    )
    if left > shutil.disk_usage(directory).free:
        free = shutil.disk_usage(directory).free
        raise InputError(f"{directory}: {left / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free")
    trainer = Trainer(pair.target, pair.draft, Recipe(Loss(), 1, 2), optimiser(1e-3, 1))
    # On every device in the end: any host may read them.
    run = jax.jit(trainer.features, out_shardings=trainer.sharding(jax.sharding.PartitionSpec()))
    cut = trainer.sharding(jax.sharding.PartitionSpec(DATA))
    count, start = trainer.layout.data * max(1, config.rows // trainer.layout.data), done
    files = [path.open("r+b" if path.exists() else "wb") for path in paths] if mine else []
    try:
        for file, size in zip(files, sizes, strict=False):
            file.truncate(done * size)
            file.seek(done * size)
        for start in range(done, len(rows), count):
            picked = [rows[min(i, len(rows) - 1)] for i in range(start, start + count)]
            tokens, starts = (place(np.stack([r[k] for r in picked]), cut) for k in ("tokens", "starts"))
            hidden, features = run(trainer.leaves, tokens, starts)
            found = [features, hidden][: len(paths)]
            if not mine:
                jax.block_until_ready(found)
                continue
            for file, array in zip(files, jax.device_get(found), strict=True):
                file.write(array[: len(rows) - start].astype(ml_dtypes.bfloat16).tobytes())
                file.flush()
    except OSError as e:
        raise InputError(f"{directory}: {e.strerror} behind row {start}; the same command goes on from there") from None
    finally:
        for file in files:
            file.close()
    tell(f"{len(rows)} rows are in {directory}")


class FeatureRows:
    """`PackedRows` with features [T, taps, H], and hidden states [T, H] where they are ``needed``, from a cache."""

    def __init__(self, config: TrainConfig, rows: PackedRows, pair: Pair, needed: bool):
        directory = Path(config.features)
        try:
            held = json.loads((directory / RECORD).read_text())
        except OSError as e:
            raise InputError(f"features {directory} cannot be read: {e.strerror}: make them with `cache`") from None
        wanted = record_of(rows, pair, held["hidden"])
        wrong = [f"{k} is {held.get(k)!r}, not {v!r}" for k, v in wanted.items() if held.get(k) != v]
        if needed and not held["hidden"]:
            wrong.append("it has no hidden states, which this loss needs: run `cache` with the same loss")
        if wrong:
            raise InputError(f"features {directory} are of other rows: {'; '.join(wrong)}")
        self.rows, self.needed, self._maps = rows, needed, {}
        h, shape = held["hidden_size"], (len(rows), rows.length)
        shapes = {"features": (*shape, len(held["taps"]), h)} | ({"hidden": (*shape, h)} if needed else {})
        for (name, whole), file in zip(shapes.items(), (FEATURES, HIDDEN), strict=False):
            if (directory / file).stat().st_size < 2 * np.prod(whole):
                raise InputError(f"features {directory} are not complete: run `cache` again")
            self._maps[name] = np.memmap(directory / file, ml_dtypes.bfloat16, "r", shape=whole)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index) -> dict[str, np.ndarray]:
        return self.rows[index] | {name: np.asarray(m[index]) for name, m in self._maps.items()}

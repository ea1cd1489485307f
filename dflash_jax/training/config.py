"""A training run as one flat record, from a TOML file of configs/train/ and the command line."""

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from dflash_jax.argument_checks import suggestion
from dflash_jax.checkpoint.config_files import find_config, read_toml_file
from dflash_jax.errors import InputError
from dflash_jax.parallel.devices import check_meshes

LOSSES, WEIGHTS, OPTIMIZERS = ("cross-entropy", "kl", "hybrid"), ("decay", "d-pace"), ("adamw", "muon")
# Fields that may differ between a run and its continuation.
FREE = {
    *("draft_vocabulary", "download_dir"),
    *("output", "mesh", "log_every", "save_every", "keep", "evaluate_every", "evaluate_prompts", "evaluate_tokens"),
    *(
        "tensorboard",
        "wandb",
        "held_out",
        "skip_bad_lines",
        "temperature",
        "max_new_tokens",
        "thinking",
        "slots",
        "urls",
    ),
}

# Fields that must be 1 or more.
COUNTS = (
    "block_size sequence_length rows accumulate anchors epochs steps layers intermediate_size sliding_window "
    "loss_vocabulary draft_vocabulary loss_chunk log_every save_every keep evaluate_every evaluate_prompts "
    "evaluate_tokens max_new_tokens slots"
)


def option(default, text: str, kind=None):
    """A field with its help text, and its type where the default value does not show it."""
    return field(default=default, metadata={"help": text, "kind": kind or type(default)})


@dataclass(frozen=True)
class TrainConfig:
    """All settings of a training run. Each field's help text is in its metadata, and ``--help`` shows it."""

    target: str | None = option(None, "target: directory or repo id (default: the bundled tiny one)", str)
    draft: str | None = option(None, "drafter to start from: directory or repo id (default: a fresh one)", str)
    revision: str | None = option(None, "branch, tag or commit of the target's repo", str)
    draft_revision: str | None = option(None, "likewise, of the drafter's", str)
    download_dir: str | None = option(None, "where repos are kept (default: Hugging Face's cache)", str)
    output: str = option("run", "directory of this run: checkpoints, logs, the exported drafter")
    data: tuple[str, ...] = option((), "JSON lines: messages, conversations, text, or what regenerate wrote", str)
    held_out: str | None = option(None, "JSON lines whose prompts the acceptance length is measured on", str)
    features: str | None = option(None, "directory of a feature cache that `cache` made (default: online)", str)
    skip_bad_lines: bool = option(False, "count broken lines of the data instead of stopping at the first")
    mtp: bool = option(False, "train the target's MTP head in place of a drafter (--block-size 4: three steps)")
    # A fresh drafter.
    draft_config: str | None = option(None, "config.json of a fresh drafter; without one the following numbers", str)
    layers: int = option(5, "layers of a fresh drafter")
    block_size: int = option(16, "tokens of a block")
    taps: tuple[int, ...] = option((), "target layers whose outputs the drafter reads (default: spread evenly)", int)
    intermediate_size: int | None = option(None, "width of its MLPs (default: three times the hidden size)", int)
    sliding_window: int | None = option(None, "window of all of its layers but the last (default: full attention)", int)
    mask_token_id: int | None = option(None, "token that stands for what is to be drafted (default: <|mask|>)", int)
    start_layers: tuple[int, ...] = option((), "target layers that its layers begin as (default: random)", int)
    # The recipe.
    sequence_length: int = option(3072, "tokens of a row, into which documents are packed")
    rows: int = option(8, "rows of a step, over all devices")
    accumulate: int = option(1, "parts that the rows of a step are computed in, one after the other")
    anchors: int = option(512, "blocks of a row, at places drawn anew each time")
    epochs: int = option(6, "passes over the data")
    steps: int | None = option(None, "steps (default: what the epochs need)", int)
    loss: str = option("cross-entropy", "cross-entropy, kl (against the target's distributions) or hybrid (KL and TV)")
    loss_weights: str = option("decay", "weights of a block's slots: decay or d-pace")
    match: float = option(0.0, "weight of the distance to the target's hidden states, beside the loss")
    gamma: float | None = option(None, "decay of the slots' weights (default: by block size)", float)
    loss_vocabulary: int | None = option(None, "tokens the loss is over, the data's most frequent (default: all)", int)
    draft_vocabulary: int = option(8192, "how many `tokens` writes")
    loss_chunk: int = option(32, "blocks of a row whose logits are in memory at a time")
    optimizer: str = option("adamw", "adamw or muon")
    learning_rate: float = option(6e-4, "peak of the cosine schedule")
    warm_up: float = option(0.04, "share of the steps in which the learning rate rises")
    clip: float = option(1.0, "largest norm of the gradients")
    seed: int = option(0, "of the fresh drafter, of the data's order and of the anchors")
    dtype: str | None = option(None, "arithmetic: float32 or bfloat16 (default: by platform)", str)
    mesh: str | None = option(None, "devices, such as data=4,tensor=2 (default: the config's for this machine)", str)
    # Logs, checkpoints and measurements.
    log_every: int = option(10, "steps between lines of the log")
    tensorboard: str | None = option(None, "directory of a TensorBoard log of fit (needs the extra tensorboard)", str)
    wandb: str | None = option(None, "Weights & Biases project of a log of fit (needs the extra wandb)", str)
    save_every: int = option(500, "steps between checkpoints")
    keep: int = option(2, "newest checkpoints that are kept, beside the best measured one")
    evaluate_every: int = option(0, "steps between measurements of the acceptance length (0: at the end only)")
    evaluate_prompts: int = option(32, "held-out prompts of a measurement")
    evaluate_tokens: int = option(128, "new tokens of each")
    # regenerate
    temperature: float | None = option(None, "of regenerate (default: the checkpoint's)", float)
    max_new_tokens: int = option(1024, "of each answer that regenerate writes")
    thinking: bool | None = option(None, "whether regenerate lets the target think (default: its template's)", bool)
    slots: int = option(32, "prompts that regenerate continues at a time, of each of --urls")
    urls: tuple[str, ...] = option((), "running servers of the target that answer in place of this machine", str)

    @property
    def target_options(self) -> dict[str, Any]:
        """Where an `LLM` finds the target's repo: its revision, and the directory of downloads."""
        return {"revision": self.revision, "download_dir": self.download_dir}

    @property
    def directory(self) -> Path:
        """Local directory of logs and the exported drafter.

        For an ``output`` on remote storage it is the last part of that path, below the current directory.
        """
        return Path(self.output.rstrip("/").rpartition("/")[2] if "://" in self.output else self.output)

    def __post_init__(self):
        least = dict.fromkeys(COUNTS.split(), 1) | {"block_size": 2, "sequence_length": 2, "evaluate_every": 0}
        for name, value in least.items():
            if getattr(self, name) is not None and getattr(self, name) < value:
                raise InputError(f"{name} {getattr(self, name)}: it must be {value} or more")
        if not 0 <= self.warm_up <= 1:
            raise InputError(f"warm_up {self.warm_up}: it must be 0 to 1, a share of the steps")
        if not self.clip > 0:
            raise InputError(f"clip {self.clip}: it must be above 0")
        if self.rows % self.accumulate:
            raise InputError(f"rows {self.rows}: they cannot be divided into {self.accumulate} parts (accumulate)")
        if self.anchors >= self.sequence_length:
            raise InputError(f"anchors {self.anchors}: a row has {self.sequence_length} tokens (sequence_length)")
        for name, known in (("loss", LOSSES), ("loss_weights", WEIGHTS), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in known:
                raise InputError(f"{name} {getattr(self, name)!r}: it must be one of {', '.join(known)}")
        if self.gamma is not None and not self.gamma > 0:
            raise InputError(f"gamma {self.gamma}: it must be above 0")
        if not self.learning_rate > 0:
            raise InputError(f"learning_rate {self.learning_rate}: it must be above 0")
        if self.dtype not in (None, "float32", "bfloat16"):
            raise InputError(f"dtype {self.dtype!r}: it must be float32 or bfloat16")


FIELDS = {f.name: f for f in fields(TrainConfig)}


def differences(previous: dict, config: TrainConfig) -> list[str]:
    """Differences between a run's record and ``config``, as text, apart from the fields in `FREE`."""
    now = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(config).items()}
    # A record from before a field had that field's default value.
    before = {k: previous.get(k, FIELDS[k].default) for k in now}
    return [f"{k} was {before[k]!r}, is {v!r}" for k, v in now.items() if k not in FREE and before[k] != v]


def read_toml(name: str | Path) -> tuple[dict, dict[str, str]]:
    """Reads a training configuration, by its path or by the name of one of configs/train/ (see `find_config`).

    Returns:
        Values of `TrainConfig` fields, and the mesh by machine. A relative ``draft_config`` is resolved against the
        file's directory.

    Raises:
        InputError: The file is unreadable, or a key or value is not valid.
    """
    path = find_config(name, "train")
    raw = read_toml_file(path)
    meshes = raw.pop("meshes", {})
    if not isinstance(meshes, dict):
        raise InputError(f"config {path}: meshes must be a table")
    check_meshes(meshes, f"config {path}")
    for key, value in raw.items():
        if key not in FIELDS:
            raise InputError(f"config {path}: {key!r} is not known: {suggestion(key, FIELDS)}")
        raw[key] = checked(key, value, f"config {path}")
    if "draft_config" in raw:
        raw["draft_config"] = str(path.parent / raw["draft_config"])
    return raw, meshes


def checked(key: str, value, where: str):
    """Returns ``value``, a tuple for a field of several values.

    Raises:
        InputError: The type is wrong; the message begins with ``where``.
    """
    kind, is_many = FIELDS[key].metadata["kind"], isinstance(FIELDS[key].default, tuple)
    items = value if is_many and isinstance(value, list | tuple) else [value]
    allowed = (int, float) if kind is float else kind
    if any(not isinstance(v, allowed) or (isinstance(v, bool) and kind is not bool) for v in items):
        raise InputError(f"{where}: {key} is {value!r}: it must be of type {kind.__name__}")
    return tuple(items) if is_many else value

"""A training run as one flat record, from a TOML file of configs/train/ and the command line."""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dflash_jax.argument_checks import check_type, suggestion
from dflash_jax.checkpoint.config_files import find_config, read_toml_file
from dflash_jax.errors import InputError
from dflash_jax.options.option import faults, option, options_of
from dflash_jax.parallel.devices import check_meshes

# A run that goes on may have another value.
_free = partial(option, is_free=True)


@dataclass(frozen=True)
class TrainConfig:
    """The options of `dflash train`: all settings of a training run."""

    target: str | None = option(None, "target: directory or repo id (default: the bundled tiny one)")
    draft: str | None = option(None, "drafter to start from: directory or repo id (default: a fresh one)")
    revision: str | None = option(None, "branch, tag or commit of the target's repo")
    draft_revision: str | None = option(None, "likewise, of the drafter's")
    download_dir: str | None = _free(None, "where repos are kept (default: Hugging Face's cache)")
    output: str = _free("run", "directory of this run: checkpoints, logs, the exported drafter")
    data: tuple[str, ...] = option((), "JSON lines: messages, conversations, text, or what regenerate wrote")
    held_out: str | None = _free(None, "JSON lines whose prompts the acceptance length is measured on")
    features: str | None = option(None, "directory of a feature cache that `cache` made (default: online)")
    skip_bad_lines: bool = _free(False, "count broken lines of the data instead of stopping at the first")
    mtp: bool = option(False, "train the target's MTP head in place of a drafter (--block-size 4: three steps)")
    # A fresh drafter.
    draft_config: str | None = option(None, "config.json of a fresh drafter; without one the following numbers")
    layers: int = option(5, "layers of a fresh drafter", least=1)
    block_size: int = option(16, "tokens of a block", least=2)
    taps: tuple[int, ...] = option((), "target layers whose outputs the drafter reads (default: spread evenly)")
    intermediate_size: int | None = option(None, "width of its MLPs (default: three times the hidden size)", least=1)
    sliding_window: int | None = option(
        None, "window of all of its layers but the last (default: full attention)", least=1
    )
    mask_token_id: int | None = option(None, "token that stands for what is to be drafted (default: <|mask|>)")
    start_layers: tuple[int, ...] = option((), "target layers that its layers begin as (default: random)")
    # Parts that any drafter may get; they change nothing at first.
    convolutions: bool = option(False, "give the drafter DFlash2's convolutions")
    convolution_taps: int = option(2, "places that each place reads by them, itself included", least=1, most=64)
    convolution_group: int = option(16, "channels that share a coefficient of a place", least=1)
    selector: bool = option(False, "give the drafter DFlash2's selector, which chooses drafts from candidates")
    markov: str | None = option(
        None, "give the drafter a Markov head of DSpark: vanilla or gated", choices=("vanilla", "gated")
    )
    confidence: bool = option(False, "give the drafter a head for the drafts' probabilities, beside a Markov head")
    rank: int = option(256, "size of a token's rows in a selector or a Markov head", least=1)
    candidates: int = option(16, "candidates of each place", least=2, most=256)
    # The recipe.
    sequence_length: int = option(3072, "tokens of a row, into which documents are packed", least=2)
    rows: int = option(8, "rows of a step, over all devices", least=1)
    accumulate: int = option(1, "parts that the rows of a step are computed in, one after the other", least=1)
    anchors: int = option(512, "blocks of a row, at places drawn anew each time", least=1)
    epochs: int = option(6, "passes over the data", least=1)
    steps: int | None = option(None, "steps (default: what the epochs need)", least=1)
    loss: str = option(
        "cross-entropy",
        "cross-entropy, kl (against the target's distributions), hybrid (KL and TV) or dspark (cross-entropy and TV)",
        choices=("cross-entropy", "kl", "hybrid", "dspark"),
    )
    loss_weights: str = option("decay", "weights of a block's slots: decay or d-pace", choices=("decay", "d-pace"))
    match: float = option(0.0, "weight of the distance to the target's hidden states, beside the loss")
    gamma: float | None = option(None, "decay of the slots' weights (default: by block size)", above=0)
    loss_vocabulary: int | None = option(
        None, "tokens the loss is over, the data's most frequent (default: all)", least=1
    )
    draft_vocabulary: int = _free(8192, "how many `tokens` writes", least=1)
    loss_chunk: int = option(32, "blocks of a row whose logits are in memory at a time", least=1)
    optimizer: str = option("adamw", "adamw or muon", choices=("adamw", "muon"))
    learning_rate: float = option(6e-4, "peak of the cosine schedule", above=0)
    body_rate: float = option(
        1.0,
        "share of the learning rate for all but convolutions, selector, Markov and confidence head (0: all else stays)",
        least=0,
        most=1,
    )
    warm_up: float = option(0.04, "share of the steps in which the learning rate rises", least=0, most=1)
    clip: float = option(1.0, "largest norm of the gradients", above=0)
    seed: int = option(0, "of the fresh drafter, of the data's order and of the anchors")
    dtype: str | None = option(
        None, "arithmetic: float32 or bfloat16 (default: by platform)", choices=("float32", "bfloat16")
    )
    mesh: str | None = _free(None, "devices, such as data=4,tensor=2 (default: the config's for this machine)")
    # Logs, checkpoints and measurements.
    log_every: int = _free(10, "steps between lines of the log", least=1)
    tensorboard: str | None = _free(None, "directory of a TensorBoard log of fit (needs the extra tensorboard)")
    wandb: str | None = _free(None, "Weights & Biases project of a log of fit (needs the extra wandb)")
    save_every: int = _free(500, "steps between checkpoints", least=1)
    keep: int = _free(2, "newest checkpoints that are kept, beside the best measured one", least=1)
    evaluate_every: int = _free(0, "steps between measurements of the acceptance length (0: at the end only)", least=0)
    evaluate_prompts: int = _free(32, "held-out prompts of a measurement", least=1)
    evaluate_tokens: int = _free(128, "new tokens of each", least=1)
    # regenerate
    temperature: float | None = _free(None, "of regenerate (default: the checkpoint's)")
    max_new_tokens: int = _free(1024, "of each answer that regenerate writes", least=1)
    thinking: bool | None = _free(None, "whether regenerate lets the target think (default: its template's)")
    slots: int = _free(32, "prompts that regenerate continues at a time, of each of --urls", least=1)
    urls: tuple[str, ...] = _free((), "running servers of the target that answer in place of this machine")

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
        for each, value in faults(TrainConfig, vars(self)):
            raise InputError(f"{each.name} {value!r}: it must be {each.right}")
        if self.rows % self.accumulate:
            raise InputError(f"rows {self.rows}: they cannot be divided into {self.accumulate} parts (accumulate)")
        if self.markov is not None and self.selector:
            raise InputError(f"selector and markov {self.markov!r}: a drafter has one of them")
        if self.mtp and self.body_rate < 1:
            raise InputError(f"body_rate {self.body_rate}: an MTP head learns as a whole")
        if self.confidence and self.markov is None:
            raise InputError("confidence: it comes with markov")
        if self.anchors >= self.sequence_length:
            raise InputError(f"anchors {self.anchors}: a row has {self.sequence_length} tokens (sequence_length)")


FIELDS = options_of(TrainConfig)


def differences(previous: dict, config: TrainConfig) -> list[str]:
    """Differences between a run's record and ``config``, as text, apart from options that are free."""
    now = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(config).items()}
    # A record from before a field had that field's default value.
    before = {k: previous.get(k, FIELDS[k].default) for k in now}
    return [f"{k} was {before[k]!r}, is {v!r}" for k, v in now.items() if not FIELDS[k].is_free and before[k] != v]


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


def checked(key: str, value: Any, where: str) -> Any:
    """Returns ``value``, a tuple for an option of several values.

    Raises:
        InputError: The type is wrong; the message begins with ``where``.
    """
    if FIELDS[key].has_several:
        value = tuple(value) if isinstance(value, list | tuple) else (value,)
    check_type(f"{where}: {key}", value, FIELDS[key].annotation)
    return value

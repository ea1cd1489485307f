"""Model families, one file each: a reader of ``config.json`` and a table of weight names.

A family of this package is a file and a line in `TARGETS`. Others are registered: by `register_family`, or by an
installed package as an entry point of the group `ENTRY_POINTS`, whose name is the model type.
"""

from collections.abc import Collection
from importlib.metadata import entry_points
from typing import Protocol

from dflash_jax.argument_checks import check_type
from dflash_jax.errors import InputError
from dflash_jax.models.config import DraftConfig, ModelConfig
from dflash_jax.models.families import dflash, llama, mtp, qwen3, qwen3_5, qwen3_next
from dflash_jax.models.families.draft_layouts import SPECULATORS
from dflash_jax.models.families.names import Entry
from dflash_jax.models.families.reading import shown
from dflash_jax.models.mtp_config import MtpConfig


class Family(Protocol):
    """A family of targets: a module with these functions, or an object with these methods."""

    def read_config(self, raw: dict) -> ModelConfig:
        """Reads a target's ``config.json``.

        Raises:
            InputError: A value is invalid, or a key is not known.
        """
        ...

    def weight_names(self, config: ModelConfig, names: Collection[str] = ()) -> list[Entry]:
        """The table of all parameters of the `Decoder` of ``config``, for a checkpoint with the tensors ``names``."""
        ...

    def is_skipped(self, name: str) -> bool:
        """Whether a run of text knowingly leaves a tensor of the checkpoint alone."""
        ...


FUNCTIONS = ("read_config", "weight_names", "is_skipped")
ENTRY_POINTS = "dflash_jax.models.families"
TARGETS: dict[str, Family] = {
    "qwen3_5_moe": qwen3_5,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe_text": qwen3_5,
    "qwen3_5_text": qwen3_5,
    "qwen3_next": qwen3_next,
    "qwen3_moe": qwen3,
    "qwen3": qwen3,
    "llama": llama,
}
# Model type → family of `register_family`.
registered: dict[str, Family] = {}


def register_family(model_type: str, family: Family) -> None:
    """Makes targets of another model type known in this process, to `LLM` and to all that reads checkpoints.

    Args:
        model_type: The ``model_type`` of their ``config.json``.
        family: What reads them; see `Family`.

    Raises:
        InputError: The model type has a family already, or ``family`` lacks a function.
    """
    check_type("model_type", model_type, str)
    if model_type in TARGETS:
        raise InputError(f"model_type {shown(model_type)} is a family of dflash_jax: only other types are registered")
    if model_type in registered:
        raise InputError(f"model_type {shown(model_type)} is registered already: register each once")
    _check_functions(model_type, family)
    registered[model_type] = family


def _check_functions(model_type: str, family: object) -> None:
    """Raises InputError where a family lacks a function."""
    if lacking := [name for name in FUNCTIONS if not callable(getattr(family, name, None))]:
        raise InputError(
            f"the family of model_type {shown(model_type)} has no {' and no '.join(lacking)}: it must be a module or "
            f"an object with {', '.join(FUNCTIONS)}"
        )


def _installed(model_type: str) -> Family | None:
    """The family that an installed package has for a model type; None where no package has one.

    Raises:
        InputError: Several packages have one, or it cannot be imported.
    """
    points = list(entry_points(group=ENTRY_POINTS, name=model_type))
    if not points:
        return None
    if len(points) > 1:
        raise InputError(
            f"model_type {shown(model_type)} has several installed families, "
            f"{', '.join(sorted(p.value for p in points))}: uninstall all but one"
        )
    try:
        family = points[0].load()
    except Exception as e:  # whatever the package raises
        why = " ".join(f"{type(e).__name__}: {e}".split())
        raise InputError(
            f"the installed family of model_type {shown(model_type)}, {points[0].value}, cannot be imported: {why}"
        ) from e
    _check_functions(model_type, family)
    return family


def target_family(raw: dict) -> Family:
    """The family module for a target's raw ``config.json``.

    Raises:
        InputError: The config is a drafter's, or its model type is unknown.
    """
    model_type: object = raw.get("model_type")
    if dflash.is_drafter(raw):
        raise InputError(
            "this is a DFlash drafter (its config has dflash_config): give it as the draft, not as the target"
        )
    if mtp.of_target(raw) is not raw:
        raise InputError("this is an MTP head alone: give it as the draft, not as the target")
    family = None
    if isinstance(model_type, str):
        family = TARGETS.get(model_type) or registered.get(model_type) or _installed(model_type)
    if family is None:
        known = ", ".join(sorted({*TARGETS, *registered, *entry_points(group=ENTRY_POINTS).names}))
        raise InputError(
            f"unknown model_type {shown(model_type)}: the targets known here are {known}; others are added by "
            f"dflash_jax.register_family (docs/adding_a_family.md)"
        )
    return family


def read_target(raw: dict) -> ModelConfig:
    """Reads a target's raw ``config.json`` as a ModelConfig.

    Raises:
        InputError: The model type is unknown, or a value is invalid.
    """
    return target_family(raw).read_config(raw)


def read_drafter(raw: dict) -> DraftConfig | MtpConfig:
    """Reads a drafter's raw ``config.json``: a DFlash drafter's, an MTP head's, or that of a target with one.

    Raises:
        InputError: Targets of this model type have no MTP head, or a value is invalid.
    """
    if dflash.is_drafter(raw):
        return dflash.read_config(raw)
    if (kind := raw.get("speculators_model_type")) not in (None, "mtp"):
        raise InputError(f"speculators_model_type is {shown(kind)}: known are {', '.join(SPECULATORS)}, mtp")
    raw = mtp.of_target(raw)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or TARGETS.get(model_type) not in mtp.FAMILIES:
        raise InputError(
            f"this is not a DFlash drafter: it has no dflash_config; and a model of model_type {shown(model_type)} has "
            f"no MTP head that is known here"
        )
    return mtp.read_config(raw, read_target(raw))

"""Model families, one file each: a reader of ``config.json`` and a table of weight names.

A new family is a file and a line in `TARGETS`.
"""

from dflash_jax.errors import InputError
from dflash_jax.models.config import DraftConfig
from dflash_jax.models.families import dflash, llama, mtp, qwen3, qwen3_5, qwen3_next
from dflash_jax.models.families.reading import shown
from dflash_jax.models.mtp_config import MtpConfig

TARGETS = {
    "qwen3_5_moe": qwen3_5,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe_text": qwen3_5,
    "qwen3_5_text": qwen3_5,
    "qwen3_next": qwen3_next,
    "qwen3_moe": qwen3,
    "qwen3": qwen3,
    "llama": llama,
}


def target_family(raw: dict):
    """The family module for a target's raw ``config.json``.

    Raises:
        InputError: The config is a drafter's, or its model type is unknown.
    """
    model_type = raw.get("model_type")
    if dflash.is_drafter(raw):
        raise InputError(
            "this is a DFlash drafter (its config has dflash_config): give it as the draft, not as the target"
        )
    if not isinstance(model_type, str) or model_type not in TARGETS:
        known = ", ".join(sorted(TARGETS))
        raise InputError(f"unknown model_type {shown(model_type)}: the targets known here are {known}")
    return TARGETS[model_type]


def read_target(raw: dict):
    """Reads a target's raw ``config.json`` as a ModelConfig.

    Raises:
        InputError: The model type is unknown, or a value is invalid.
    """
    return target_family(raw).read_config(raw)


def read_drafter(raw: dict) -> DraftConfig | MtpConfig:
    """Reads a drafter's raw ``config.json``: a DFlash drafter's, or that of a target, whose MTP head is the drafter.

    Raises:
        InputError: Targets of this model type have no MTP head, or a value is invalid.
    """
    if dflash.is_drafter(raw):
        return dflash.read_config(raw)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or TARGETS.get(model_type) not in mtp.FAMILIES:
        raise InputError(
            f"this is not a DFlash drafter: it has no dflash_config; and a model of model_type {shown(model_type)} has "
            f"no MTP head that is known here"
        )
    return mtp.read_config(raw, read_target(raw))

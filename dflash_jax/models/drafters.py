"""The drafters that are read from checkpoints, DFlash and the MTP head of a target, and what is known of any other."""

from dataclasses import dataclass
from typing import Any, overload

import jax.numpy as jnp
from jax.typing import DTypeLike

from dflash_jax.models.config import DraftConfig, ModelConfig, check_taps
from dflash_jax.models.drafter import Drafter, DraftVocabulary
from dflash_jax.models.drafting import Drafting
from dflash_jax.models.mtp import Mtp
from dflash_jax.models.mtp_config import MtpConfig
from dflash_jax.ops.backend import XLA, Backend
from dflash_jax.parallel.sharding import ONE_DEVICE, Layout


@overload
def abstract_drafter(
    config: DraftConfig, dtype: DTypeLike = ..., layout: Layout = ..., backend: Backend = ...
) -> Drafter: ...
@overload
def abstract_drafter(
    config: MtpConfig, dtype: DTypeLike = ..., layout: Layout = ..., backend: Backend = ...
) -> Mtp: ...
@overload
def abstract_drafter(
    config: DraftConfig | MtpConfig, dtype: DTypeLike = ..., layout: Layout = ..., backend: Backend = ...
) -> Drafter | Mtp: ...
def abstract_drafter(
    config: DraftConfig | MtpConfig,
    dtype: DTypeLike = jnp.float32,
    layout: Layout = ONE_DEVICE,
    backend: Backend = XLA,
) -> Drafter | Mtp:
    """A drafter with shapes in place of arrays; see `decoder.abstract_decoder`."""
    if isinstance(config, MtpConfig):
        return Mtp(config, rngs=None, dtype=dtype, layout=layout, backend=backend)
    return Drafter(config, rngs=None, dtype=dtype, layout=layout, backend=backend)


@dataclass(frozen=True)
class OwnConfig:
    """What is assumed of a drafter with neither a `DraftConfig` nor an `MtpConfig`: its weights are read once a round.

    Attributes:
        taps: The layers of the target that it reads.
        block_size: As in `DraftConfig`.
        layers: As in `DraftConfig`.
        acceptance_rates: As in `DraftConfig`.
    """

    taps: tuple[int, ...]
    block_size: int = 16
    layers: tuple[Any, ...] = ()
    acceptance_rates: tuple[float, ...] | None = None

    def passes(self, block_size: int) -> tuple[int, int]:
        """As `DraftConfig.passes`."""
        return 1, block_size

    def check_fits(self, target: ModelConfig) -> None:
        """As `DraftConfig.check_fits`."""
        check_taps(self.taps, target)


def vocabulary_of(drafter: Drafting | None) -> DraftVocabulary | None:
    """The shortlist of a drafter; None where it has none."""
    vocabulary = getattr(drafter, "vocabulary", None)
    return vocabulary if isinstance(vocabulary, DraftVocabulary) else None


def config_of(drafter: Drafting) -> DraftConfig | MtpConfig | OwnConfig:
    """The configuration of any drafter."""
    config = getattr(drafter, "config", None)
    return config if isinstance(config, DraftConfig | MtpConfig) else OwnConfig(tuple(drafter.taps))

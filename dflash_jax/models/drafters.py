"""The drafters that are read from checkpoints: DFlash, and the MTP head of a target."""

from typing import overload

import jax.numpy as jnp
from jax.typing import DTypeLike

from dflash_jax.models.config import DraftConfig
from dflash_jax.models.drafter import Drafter
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

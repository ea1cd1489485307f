"""The configuration of an engine for an `LLM`."""

import jax

from dflash_jax.decoding.state import Settings
from dflash_jax.engine.config import BlockSize, EngineConfig, Speculation, prefill_config
from dflash_jax.models.drafting import DraftWindow
from dflash_jax.ops.backend import Backend
from dflash_jax.sampling_params import MAX_LOGPROBS

# Block sizes that rounds are compiled for, below the drafter's own. On a CPU each further token of a block costs time,
# and so it does where each draft is a step of the drafter.
BLOCK_SIZES, CPU_BLOCK_SIZES, STEPPED_BLOCK_SIZES = (1, 8, 16), (1, 4, 8, 16), (1, 2, 4, 6, 8)


def compiled_block_sizes(largest: int, block_size: BlockSize, is_stepped: bool) -> tuple[int, ...]:
    """Block sizes that are compiled for a drafter, ascending: the usual ones, the ``largest``, and ``block_size``.

    Args:
        largest: The drafter's largest block size.
        block_size: The LLM's own; left out where it is larger.
        is_stepped: Whether each draft is a step of the drafter.
    """
    usual = CPU_BLOCK_SIZES if jax.default_backend() == "cpu" else BLOCK_SIZES
    usual = STEPPED_BLOCK_SIZES if is_stepped else usual
    fixed = () if block_size == "auto" or block_size > largest else (block_size,)
    return tuple(sorted({*(b for b in usual if b < largest), largest, *fixed}))


def engine_setup(
    speculations: tuple[Speculation, ...],
    backend: Backend,
    *,
    reproducible: bool,
    vocab: int,
    draft_window: DraftWindow,
    prefix_bytes: int,
    prefix_host_bytes: int,
    swap_bytes: int,
    markers: frozenset[int],
    max_num_batched_tokens: int | None = None,
    **options,
) -> tuple[EngineConfig, Settings]:
    """What suits the platform.

    Args:
        speculations: As in `EngineConfig`.
        backend: Where the engine runs.
        reproducible: Whether bits must not depend on drafter, block size and batch.
        vocab: Tokens of the vocabulary.
        draft_window: What the drafter sees of the context.
        prefix_bytes: As in `EngineConfig`.
        prefix_host_bytes: As in `EngineConfig`.
        swap_bytes: As in `EngineConfig`.
        markers: As in `EngineConfig`.
        max_num_batched_tokens: As in `EngineConfig`; None takes the platform's default.
        **options: Further fields of `EngineConfig`, which override the platform's.

    Returns:
        The engine's configuration, and what its programs share.
    """
    settings = Settings(
        max(BLOCK_SIZES[-1], speculations[-1].block_size) if reproducible else 1,
        reproducible,
        min(MAX_LOGPROBS, vocab),
        draft_window,
    )
    prefill = prefill_config(jax.default_backend(), backend.has_triton, reproducible, max_num_batched_tokens)
    config = EngineConfig(
        speculations=speculations,
        max_decode_batch=1 if reproducible else None,
        prefix_bytes=prefix_bytes,
        prefix_host_bytes=prefix_host_bytes,
        swap_bytes=swap_bytes,
        markers=markers,
        adaptive=not reproducible,
        **(prefill | options),
    )
    return config, settings

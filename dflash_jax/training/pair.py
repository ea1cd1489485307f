"""The target that training reads from, with the ``config.json`` of its drafter, and the data as packed rows."""

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from dflash_jax.checkpoint.hub import resolve
from dflash_jax.checkpoint.load import draft_tensor_names
from dflash_jax.errors import InputError
from dflash_jax.frontend.llm import LLM
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.models import families
from dflash_jax.models.config import DraftConfig
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.families import dflash
from dflash_jax.models.mtp_config import MtpConfig
from dflash_jax.models.packing import plain_weight
from dflash_jax.ops.weights import PackedWeight, is_weight
from dflash_jax.options.train import TrainConfig
from dflash_jax.parallel.sharding import Layout
from dflash_jax.training import drafters
from dflash_jax.training.data import PackedRows, check_learnable, read_documents
from dflash_jax.training.media import Placer, placer
from dflash_jax.training.tokenising import Skipped
from dflash_jax.user_cache import user_cache


@dataclass
class Pair:
    """A target and the configuration of the drafter that is trained for it.

    Attributes:
        llm: The target, ready to decode, without a drafter.
        raw: The drafter's ``config.json``; that of the target for an MTP head.
        tensors: Names of the tensors of the drafter that the run begins with; none of a fresh one.
    """

    llm: LLM
    raw: dict
    tensors: Collection[str] = ()

    def rows(self, config: TrainConfig, tell: Callable[[str], None]) -> PackedRows:
        """Reads the data of ``config`` with the target's tokenizer and vision tower; see `read_rows`."""
        return read_rows(
            config, self.llm.tokenizer, self.llm.config.vocab_size, tell, placer(self.llm.media, self.llm.encoder)
        )

    @cached_property
    def target(self) -> Decoder:
        """The target without the panels that decoding uses. Transposed experts stay: a copy of them may not fit."""
        return jax.tree.map(
            lambda x: plain_weight(x) if isinstance(x, PackedWeight) else x, self.llm.target, is_leaf=is_weight
        )

    @property
    def draft(self) -> DraftConfig | MtpConfig:
        """The drafter's configuration."""
        config = families.read_drafter(self.raw)
        return config if isinstance(config, MtpConfig) else dflash.with_tables(config, self.raw, self.tensors)


def open_pair(config: TrainConfig) -> Pair:
    """Loads the target and decides the drafter's configuration.

    Raises:
        InputError: A checkpoint or configuration does not fit.
    """
    options: dict[str, Any] = {"dtype": config.dtype, "mesh": Layout.parse(config.mesh or ""), "prefix_bytes": 0}
    # A follower has no tower, and each process computes the rows of its own steps.
    options["language_model_only"] = jax.process_count() > 1
    llm = LLM.unloaded(target=config.target, draft=None, **options, **config.target_options)
    if config.sequence_length > llm.config.max_positions:
        most = llm.config.max_positions
        raise InputError(f"sequence_length {config.sequence_length}: the target has {most} positions")
    raw = drafters.raw_config(config, llm)
    llm.load()
    if config.draft is None or config.mtp:
        return Pair(llm, raw)
    return Pair(llm, raw, draft_tensor_names(resolve(config.draft, config.draft_revision, config.download_dir)))


def read_rows(
    config: TrainConfig,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    tell: Callable[[str], None],
    place: Placer | None = None,
) -> PackedRows:
    """Reads and packs the data of ``config``, and reports counts.

    Args:
        config: Names the files and the length of a row.
        tokenizer: The target's, None for a target without one.
        vocab_size: Token ids must be below it.
        tell: Receives lines for the user.
        place: Places images and videos among the tokens; None for a target that takes none.

    Raises:
        InputError: A file is invalid, or no two neighbouring tokens can be learned from.
    """
    skipped = Skipped() if config.skip_bad_lines else None
    documents = read_documents(config.data, tokenizer, vocab_size, skipped, place, _cache_directory())
    rows = PackedRows(documents, config.sequence_length)
    tokens = rows.documents.lengths.sum()
    check_learnable(rows.documents, rows.length, config.data)
    tell(f"{len(rows.documents)} documents, {tokens} tokens, in {len(rows)} rows, {rows.used:.0%} used")
    if (cut := rows.cut_off)[0]:
        tell(f"{cut[0]} of them are longer than a row of {rows.length}: {cut[1]} tokens are left out")
    if skipped is not None and skipped.count:
        tell(f"{skipped.count} lines left out, the first: {skipped.first}")
    return rows


def _cache_directory() -> Path | None:
    """Where token ids are kept; None where the user's cache cannot be written."""
    directory = user_cache() / "tokens"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return directory if os.access(directory, os.W_OK) else None

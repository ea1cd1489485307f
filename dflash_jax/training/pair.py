"""What a run trains on: the target, its drafter's config, and rows of tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from dflash_jax.errors import InputError
from dflash_jax.frontend.llm import LLM
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.families import dflash
from dflash_jax.ops.weights import plain
from dflash_jax.parallel.sharding import Layout
from dflash_jax.training import drafters
from dflash_jax.training.config import TrainConfig
from dflash_jax.training.data import PackedRows, Skipped, check_learnable, read_documents


@dataclass
class Pair:
    """The target, ready to decode, and what its drafter is."""

    llm: LLM
    raw: dict

    def rows(self, config: TrainConfig, tell: Callable) -> PackedRows:
        return read_rows(config, self.llm.tokenizer, self.llm.config.vocab_size, tell)

    @cached_property
    def target(self) -> Decoder:
        """As it was loaded, however the LLM has arranged it."""
        return plain(self.llm.target)

    @property
    def draft(self):
        return dflash.read_config(self.raw)


def open_pair(config: TrainConfig) -> Pair:
    llm = LLM(config.target, None, dtype=config.dtype, mesh=Layout.parse(config.mesh or ""), prefix_bytes=0)
    if config.sequence_length > llm.config.max_positions:
        most = llm.config.max_positions
        raise InputError(f"sequence_length {config.sequence_length}: the target has {most} positions")
    return Pair(llm, drafters.raw_config(config, llm))


def read_rows(config: TrainConfig, tokenizer, vocab: int, tell: Callable) -> PackedRows:
    skipped = Skipped() if config.skip_bad_lines else None
    rows = PackedRows(read_documents(config.data, tokenizer, vocab, skipped), config.sequence_length)
    tokens = sum(len(d.tokens) for d in rows.documents)
    check_learnable(rows.documents, rows.length, config.data)
    tell(f"{len(rows.documents)} documents, {tokens} tokens, in {len(rows)} rows, {rows.used:.0%} used")
    if (cut := rows.cut_off)[0]:
        tell(f"{cut[0]} of them are longer than a row of {rows.length}: {cut[1]} tokens are left out")
    if skipped is not None and skipped.count:
        tell(f"{skipped.count} lines left out, the first: {skipped.first}")
    return rows

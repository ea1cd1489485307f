"""The file of tokens that a drafter may propose, for `LLM`'s ``draft_tokens``."""

import json
from collections.abc import Callable

import numpy as np

from dflash_jax.checkpoint.files import writing
from dflash_jax.checkpoint.hub import resolve
from dflash_jax.checkpoint.load import DRAFT_TOKENS, check_target
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.options.train import TrainConfig
from dflash_jax.parallel import distributed
from dflash_jax.training.data import frequent_tokens, learned_counts
from dflash_jax.training.media import without_media
from dflash_jax.training.pair import read_rows


def write_draft_tokens(config: TrainConfig, tell: Callable[[str], None]) -> None:
    """Writes the ids of the tokens that are most frequent in answers, as a JSON list in ascending order.

    The file goes beside the exported drafter of ``config.output``; without one, into ``config.output`` itself.
    """
    target = TINY / "target" if config.target is None else resolve(config.target, **config.target_options)
    # Only text is learned, so that neither the tower nor pixels are needed.
    rows = read_rows(config, Tokenizer(target), check_target(target).vocab_size, tell, without_media)
    ids = frequent_tokens(rows, config.draft_vocabulary)
    learned, counts = learned_counts(rows)
    drafter = config.directory / "draft"
    path = (drafter if (drafter / "config.json").exists() else config.directory) / DRAFT_TOKENS
    if distributed.is_first():
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(ids.tolist()) + "\n", encoding="utf-8")
    tell(f"{len(ids)} tokens, {counts[np.isin(learned, ids)].sum() / counts.sum():.1%} of the answers, are in {path}")

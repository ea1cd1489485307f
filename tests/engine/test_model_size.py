"""What a pass reads of the weights of a model."""

from dflash_jax.engine.model_size import weigh
from dflash_jax.models.drafters import abstract_drafter
from dflash_jax.models.families import dflash
from dflash_jax.parallel.sharding import ONE_DEVICE
from tests.parity.test_drafter import VOCAB, config


def test_a_pass_reads_single_rows_of_a_selector():
    section = config()["dflash_config"]
    keys = {"selector_rank": 7, "selector_top_k": 5}
    plain, chosen = (
        weigh(abstract_drafter(dflash.read_config(config(dflash_config=section | more))), ONE_DEVICE)
        for more in ({}, keys)
    )
    assert chosen.lookup - plain.lookup == 2 * VOCAB * 7 * 4
    assert chosen.read(8) - plain.read(8) == chosen.total - plain.total - 2 * VOCAB * 7 * 4

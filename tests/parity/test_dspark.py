"""DSpark drafters against their restatement in `dflash_reference`: shifted blocks, Markov heads and confidence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.models.drafting import DraftWindow, TargetHeads
from tests.parity import dflash_reference
from tests.parity.test_dflash2 import best
from tests.parity.test_drafter import (
    CAPACITY,
    FULL,
    HIDDEN,
    LENGTHS,
    SLIDING,
    SLOTS,
    TAPS,
    VOCAB,
    build_context,
    config,
    reference_rows,
    saved,
)

RANK, SIZE = 6, 7
SHAPES = {
    "vanilla": {},
    "gated": {"gate_proj": (RANK, HIDDEN + RANK)},
    "rnn": {"joint_proj": (3 * RANK, 2 * RANK + HIDDEN)},
}


def case(kind: str | None, with_token: bool = True, top_k: int = 5) -> tuple[dict, dict]:
    """A config and the tensors of its heads; ``kind`` None: without a Markov head."""
    rng = np.random.default_rng(3)
    own = {"block_size": SIZE, "sample_from_anchor": True, "is_causal": False, "enable_confidence_head": True}
    own |= {"confidence_head_with_markov": with_token, "markov_rank": RANK if kind else 0, "dspark_draft_topk": top_k}
    own |= {"markov_head_type": kind}
    shapes = {"confidence_head.proj.weight": (1, HIDDEN + RANK * with_token), "confidence_head.proj.bias": (1,)}
    if kind:
        shapes |= {f"markov_head.markov_w{i}.weight": (VOCAB, RANK) for i in (1, 2)}
        for name, shape in SHAPES[kind].items():
            shapes |= {f"markov_head.{name}.weight": shape, f"markov_head.{name}.bias": shape[:1]}
    raw = config(layer_types=[SLIDING, FULL], sliding_window=8, dflash_config=own)
    return raw, {name: rng.standard_normal(shape).astype(np.float32) / 2 for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("kind", "with_token", "size"),
    [
        ("vanilla", True, 8),
        ("vanilla", True, 11),
        ("gated", True, 8),
        ("rnn", True, 8),
        ("gated", False, 5),
        (None, False, 8),
        ("rnn", False, 3),
    ],
)
def test_chains_are_those_of_the_reference(kind, with_token, size, tmp_path):
    """Narrower blocks have the first drafts of the trained one, and wider ones no more than it."""
    raw, more = case(kind, with_token)
    drafter, tensors = saved(raw, tmp_path, more=more)
    rng, window = np.random.default_rng(5), DraftWindow()
    table, head = (rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32) for _ in range(2))
    features = rng.standard_normal((SLOTS, CAPACITY, TAPS, HIDDEN)).astype(np.float32)
    last = rng.integers(0, VOCAB, SLOTS)
    cache = build_context(drafter, features, LENGTHS, window, CAPACITY, 13, rng)
    positions = []
    heads = TargetHeads(
        lambda tokens: jnp.asarray(table)[tokens],
        lambda hidden: hidden @ head.T,
        lambda logits, at, ids=None: positions.append(at) or logits.argmax(-1),
        best,
    )
    run = jax.jit(lambda *args: vars(drafter.propose(*args, size, heads, window)))
    found = run(cache, jnp.asarray(last), jnp.asarray(LENGTHS), jnp.full(SLOTS, size))
    assert found["tokens"].shape == (SLOTS, size - 1)
    tokens = np.concatenate([last[:, None], np.full((SLOTS, SIZE - 1), 51)], axis=1)
    compared = differs = 0
    widths = np.full(SLOTS, SIZE)
    for row, hidden in enumerate(reference_rows(raw, tensors, features, LENGTHS, widths, table[tokens], window)):
        states = hidden.value[: size - 1]
        assert not found["tokens"][row, SIZE:].any()
        scores = states @ head.T
        want, leads = dflash_reference.chain(raw, tensors, states, last[row], scores)
        clear = int(np.argmax([*(np.asarray(leads) < 1e-3), True]))
        assert found["tokens"][row, :clear].tolist() == want[:clear]
        # The confidence of a draft depends on the one before it.
        sure = dflash_reference.confidence(raw, tensors, states, last[row], want)[: clear + 1]
        np.testing.assert_allclose(found["scores"][row, : len(sure)], sure, atol=1e-4)
        compared += clear
        differs += (scores.argmax(-1)[:clear] != want[:clear]).sum()
    assert compared > 10 * (min(size, SIZE + 1) - 1)
    assert (differs > 3) == (kind is not None)

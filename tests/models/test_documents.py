"""Several documents in a row are read as each of them alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import random_decoder, tiny_config

# Documents that end before, at and behind the borders of a recurrent chunk (64), and one of a single token.
LENGTHS = (5, 59, 1, 70, 3, 62)
TAPS = (0, 1)


@pytest.mark.parametrize("layers", ["dda", "aa"], ids=["hybrid", "attention"])
def test_documents_do_not_know_one_another(layers):
    model = random_decoder(tiny_config(layers))
    total = sum(LENGTHS)
    tokens = jax.random.randint(jax.random.key(0), (2, total), 0, model.config.vocab_size)
    starts = np.repeat(np.cumsum((0, *LENGTHS[:-1])), LENGTHS)
    run = jax.jit(lambda tokens, starts: model(tokens, TAPS, starts))
    hidden, features = run(tokens, jnp.asarray(starts)[None].repeat(2, 0))
    alone = jax.jit(lambda tokens: model(tokens, TAPS))
    for begin, length in zip(np.cumsum((0, *LENGTHS[:-1])), LENGTHS, strict=True):
        part = slice(begin, begin + length)
        expected, tapped = alone(tokens[:, part])
        np.testing.assert_allclose(hidden[:, part], expected, atol=2e-5)
        np.testing.assert_allclose(features[:, part], tapped, atol=2e-5)

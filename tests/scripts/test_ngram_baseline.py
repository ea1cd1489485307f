import numpy as np
import pytest

from tests.helpers import load_script

ngram = load_script("bundled/ngram_baseline.py")

VOCABULARY = 7


@pytest.fixture(scope="module", params=[40, 3000])
def stream(request) -> np.ndarray:
    """Skewed, so that counts of every size occur; the last id never does."""
    rng = np.random.default_rng(0)
    return rng.choice(VOCABULARY - 1, size=request.param, p=[0.4, 0.3, 0.15, 0.1, 0.04, 0.01])


def from_definition(ids: list[int], order: int, history: tuple[int, ...], word: int) -> float:
    """The textbook recursion, from lists and sets."""

    def counts(n: int) -> dict[tuple[int, ...], int]:
        grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
        if n < order:
            grams = [g[1:] for g in counts(n + 1)]
        return {g: grams.count(g) for g in set(grams)}

    def p(history: tuple[int, ...]) -> float:
        table = counts(len(history) + 1)
        discount = ngram.discounts(np.array(list(table.values())))
        row = {g[-1]: c for g, c in table.items() if g[:-1] == history}
        shorter = p(history[1:]) if history else 1 / VOCABULARY
        if not row:
            return shorter
        left = sum(discount[min(c, 3)] for c in row.values())
        kept = row.get(word, 0) - discount[min(row.get(word, 0), 3)]
        return (kept + left * shorter) / sum(row.values())

    return p(history)


@pytest.mark.parametrize("order", [1, 2, 4])
def test_probabilities_sum_to_one(stream, order):
    model = ngram.KneserNey.fit(stream, order, VOCABULARY)
    p = model.probability(np.arange(VOCABULARY**order)).reshape(-1, VOCABULARY)  # every context, seen or not
    assert p.min() > 0
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-12)


def test_agrees_with_the_definition(stream):
    stream = stream[:300]
    model = ngram.KneserNey.fit(stream, 3, VOCABULARY)
    grams = [(0, 1, 0), (1, 0, 3), (2, 2, 6), (6, 0, 1), (0, 6, 2), (4, 5, 0)]
    got = model.probability(np.array([ngram.keys(np.array(g), 3, VOCABULARY)[0] for g in grams]))
    want = [from_definition(stream.tolist(), 3, g[:-1], g[-1]) for g in grams]
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_discounts_equal_a_calculation_by_hand():
    counts = np.array([1] * 8 + [2] * 4 + [3] * 2 + [4] * 1 + [9] * 5)
    np.testing.assert_allclose(ngram.discounts(counts), [0, 0.5, 2 - 1.5 * 0.5, 3 - 2 * 0.5])


def test_bits_per_byte_of_a_uniform_model_is_its_entropy():
    model = ngram.KneserNey.fit(np.arange(8), 1, 8)
    assert ngram.bits_per_byte(model, np.arange(27) % 8, 0, len, length=8) == pytest.approx(3)
    assert ngram.bits_per_byte(model, np.arange(27) % 8, 0, lambda ids: 2 * len(ids), length=8) == pytest.approx(1.5)


def test_keys_refuse_to_overflow():
    with pytest.raises(ValueError, match="do not fit"):
        ngram.keys(np.arange(3), 6, 2048)

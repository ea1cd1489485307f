"""Where prompts are cut, and what is kept of them."""

from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.engine import prefix_cache
from dflash_jax.engine.prefix_cache import PrefixCache, chunks, cut_points, keys

MARKERS = frozenset([0])
TOKENS = st.lists(st.integers(0, 5), min_size=1, max_size=200)


@given(TOKENS, st.integers(0, 199))
def test_cuts_follow_from_the_tokens_before_them(tokens, at):
    """What comes later moves no cut, and so no chunk: a prefix is always computed in the same pieces."""
    last = min(at, len(tokens) - 1)
    whole, part = cut_points(tokens, len(tokens) - 1, MARKERS), cut_points(tokens, last, MARKERS)
    assert part == [c for c in whole if c < last] + ([last] if last else [])
    assert all(tokens[c] in MARKERS for c in whole[:-1])
    assert keys(tokens, whole)[: max(len(part) - 1, 0)] == keys(tokens, part)[:-1]


@given(
    st.integers(0, 5000),
    st.integers(0, 3000),
    st.sampled_from([(64,), (16, 64, 256, 1024)]),
    st.sampled_from([0.25, 0.5]),
)
def test_chunks_cover_what_is_between_cuts(start, length, sizes, padding):
    found = chunks(start, start + length, sizes, padding)
    assert [n for first, n, _ in found for n in range(first, first + n)] == list(range(start, start + length))
    assert all(n <= size for _, n, size in found)
    assert all(size - n < size * padding for _, n, size in found if size > sizes[0])
    # Any beginning at a chunk's border goes on with the same chunks.
    for i, (first, *_) in enumerate(found):
        assert chunks(first, start + length, sizes, padding) == found[i:]


def test_long_prompts_are_kept_on_a_grid():
    assert cut_points([1] * 10_000, 9999, MARKERS) == [prefix_cache.GRID, 2 * prefix_cache.GRID, 9999]
    assert cut_points([1, 0, *[1] * 20, 0, 1, 0, 1], 25, MARKERS) == [22, 25]


def add(kept: PrefixCache, name: str, parent=None, size: int = 10):
    return kept.add(name.encode(), 1, parent, [], None, size)


def test_the_least_recently_used_goes_first_and_children_before_parents():
    kept = PrefixCache(40)
    system = add(kept, "system")
    for name in "abc":
        assert add(kept, name, system) is not None
    assert kept.find(b"a")
    assert add(kept, "d", system)
    # b was used longest ago; the system prompt is older still, but others build on it.
    assert kept.find(b"b") is None
    assert all(kept.find(k) for k in (b"system", b"a", b"c", b"d"))
    assert kept.size == 40


def test_what_does_not_fit_is_not_kept():
    kept = PrefixCache(25)
    assert add(kept, "large", size=26) is None
    first = add(kept, "first", size=20)
    # Its parent cannot go before it.
    assert add(kept, "child", first, size=10) is None
    assert kept.size == 20
    assert add(kept, "other", size=25)
    assert kept.find(b"first") is None
    # What builds on a prefix that is gone is no prefix.
    assert add(kept, "late", first, size=1) is None


def test_other_tokens_are_another_key():
    assert keys([1, 2, 3, 4], [2, 4])[0] == keys([1, 2, 9], [2])[0]
    assert len({*keys([1, 2, 3], [1, 3]), *keys([2, 1, 3], [1, 3])}) == 4


def test_a_salt_parts_prefixes():
    tokens, cuts = list(range(50)), [10, 30, 50]
    plain, again, one, other = (keys(tokens, cuts, salt) for salt in ("", "", "a", "\ud800"))
    assert plain == again == keys(tokens, cuts)
    assert len({*plain, *one, *other}) == 9

"""Where prompts are cut, and what is kept of them."""

import sys
from collections import Counter, OrderedDict
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dflash_jax.engine.media import MediaSpan, PromptMedia
from dflash_jax.engine.prefix_cache import BLOCK, Prefix, PrefixCache, PrefixKey, PrefixKeys, chunks, cut_points
from dflash_jax.engine.prefix_tiers import Piece, PrefixTiers
from tests.engine.mock_runner import MockPages

MARKERS = frozenset([0])
TOKENS = st.lists(st.integers(0, 5), min_size=1, max_size=200)


@st.composite
def prompts(draw):
    """A prompt with images, and the spacing of its cuts."""
    tokens = draw(st.lists(st.integers(0, 5), min_size=1, max_size=200))
    borders = sorted(draw(st.sets(st.integers(0, len(tokens) - 1), max_size=8)))
    spans = tuple(MediaSpan(a, b - a, b"%d" % a, list) for a, b in zip(borders[::2], borders[1::2], strict=False))
    nearest = draw(st.integers(1, 40))
    media = PromptMedia(spans, np.zeros((3, 0)), 0) if spans else None
    return tokens, media, (nearest, draw(st.integers(nearest, 80)))


@given(prompts(), st.integers(0, 199))
def test_aligned_cuts_but_the_last_one_are_those_of_every_prompt_with_these_tokens(prompt, at):
    """What comes later moves no cut, and so no chunk: a prefix is always computed in the same pieces."""
    tokens, media, spacing = prompt
    last = min(at, len(tokens) - 1)
    whole, part = (cut_points(tokens, n, MARKERS, spacing, media, True) for n in (len(tokens) - 1, last))
    assert part == [*whole[: max(len(part) - 1, 0)], *([last] if last else [])]


@given(prompts(), st.booleans())
def test_cuts_keep_their_distance_and_divide_no_image(prompt, aligned):
    tokens, media, (nearest, farthest) = prompt
    found = cut_points(tokens, last := len(tokens) - 1, MARKERS, (nearest, farthest), media, aligned)
    spans = media.spans if media else ()
    inside = {place for span in spans for place in range(span.start + 1, span.end)}
    assert not inside & {cut for cut in found if cut < last}
    markers = [i for i, token in enumerate(tokens[:last]) if token in MARKERS and i >= 16 and i not in inside]
    assert not markers or markers[0] in found, "the first message does not end with a cut"
    longest_image = max((span.length for span in spans), default=0)
    for before, cut in pairwise([0, *found]):
        assert cut - before <= farthest + longest_image
        assert cut - before >= nearest or cut in (last, *markers[:1], *(span.start for span in spans))
    # Where the next turn of a conversation goes on.
    assert not markers or any(markers[-1] - nearest < cut <= markers[-1] for cut in found)


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


def test_long_messages_are_cut_at_the_largest_distance():
    assert cut_points([1] * 2500, 2499, MARKERS, (512, 1024)) == [1024, 2048, 2499]
    assert cut_points([1, 0, *[1] * 20, 0, 1, 0, 1], 25, MARKERS, (16, 256)) == [22, 25]


def test_many_messages_are_cut_as_far_apart_as_chunks_are_large():
    """A system prompt, and messages of 40 tokens."""
    message = [0, *[1] * 39]
    found = cut_points([0, *[1] * 299, *message * 99, 0, 1, 1], 4262, MARKERS, (512, 1024))
    assert found == [300, 1300, 2300, 3300, 4260, 4262]
    # The first marker in the reproducible mode.
    found = cut_points([0, *[1] * 299, *message * 99, 0, 1, 1], 4262, MARKERS, (512, 1024), aligned=True)
    assert found == [*range(300, 4262, 520), 4262]


def add(kept: PrefixCache, name: str, parent: Prefix | None = None, size: int = 10, length: int = 100):
    """A prefix of ``length`` tokens more than its parent's, whose keys and values have a tenth of its bytes."""
    key = key_of(name, length + (parent.length if parent else 0))
    return kept.add(key, parent, name, name, size // 10, size - size // 10)


def key_of(name: str, length: int = 100) -> PrefixKey:
    return PrefixKey(b"", length, name.encode())


def find(kept: PrefixCache, name: str) -> Prefix | None:
    return next((kept.find(key) for key in kept._prefixes if key.digest == name.encode()), None)


def use(kept: PrefixCache, prefix: Prefix | None) -> None:
    kept.pin(prefix)
    kept.unpin(prefix)


def restored(kept: PrefixCache, prefix: Prefix) -> list:
    """What the pieces of a prefix keep on the device."""
    found = []
    for piece, may_stay in kept.parts(prefix, 0):
        value, is_piece = kept.tiers.on_device(piece, 0, may_stay)
        found.append(value)
        if not is_piece:
            kept.tiers._copies.drop(value)
    return found


def conversation(kept: PrefixCache, name: str, lengths: list[int], parent: Prefix | None = None) -> Prefix | None:
    for i, length in enumerate(lengths):
        parent = add(kept, f"{name}{i}", parent, length=length)
    return parent


def known(kept: PrefixCache, *names: str) -> list[str]:
    return [name for name in names if find(kept, name)]


def test_the_least_recently_used_goes_first_and_children_before_parents():
    kept = PrefixCache(40, 0, MockPages())
    system = add(kept, "system")
    for name in "abc":
        assert add(kept, name, system) is not None
    use(kept, find(kept, "a"))
    assert add(kept, "d", system)
    # b was used longest ago; the system prompt is older still, but others build on it.
    assert known(kept, "system", *"abcd") == ["system", *"acd"]
    assert kept.size == 40


def test_what_does_not_fit_is_not_kept():
    kept = PrefixCache(25, 0, MockPages())
    assert add(kept, "large", size=26) is None
    first = add(kept, "first", size=20)
    # Its parent cannot go before it.
    assert add(kept, "child", first, size=10) is None
    assert kept.size == 20
    assert add(kept, "other", size=25)
    assert not known(kept, "first")
    # What builds on a prefix that is gone is no prefix.
    assert add(kept, "late", first, size=1) is None


def test_a_conversation_keeps_few_snapshots_and_all_keys_and_values():
    kept = PrefixCache(10**9, 0, MockPages())
    last = conversation(kept, "t", [1000] * 100)
    stored = [part for part in last.chain() if part.snapshot is not None]
    lengths = [part.length for part in stored]
    # The newest two, the first, and others in distances that grow towards the middle.
    assert lengths[:2] == [100_000, 99_000]
    assert lengths[-1] == 1000
    assert len(lengths) == len(kept) <= 14
    for newer, older in pairwise(lengths):
        assert newer - older <= 1000 + 3 * min(older, 100_000 - newer)
    # A cut between two of them is restored from the older one: the keys and values behind it are all there.
    assert restored(kept, last) == [f"t{i}" for i in range(100)] + ["t99"]
    assert kept.size == 100 * 1 + 9 * len(stored)


def test_points_where_prompts_diverge_are_kept():
    kept = PrefixCache(10**9, 0, MockPages())
    trunk = conversation(kept, "t", [1000] * 20)
    assert trunk.parent.snapshot is not None
    branch = add(kept, "branch", trunk.parent, length=500)
    conversation(kept, "t", [1000] * 60, trunk)
    assert trunk.parent.snapshot is not None
    # The sibling of the trunk is not its end: it has more tokens than a header.
    assert branch.snapshot is not None


def test_a_header_behind_a_prompt_goes_when_the_conversation_goes_on():
    kept = PrefixCache(10**9, 0, MockPages())
    user = add(kept, "user")
    header = add(kept, "header", user, length=5)
    kept.pin(header)
    add(kept, "busy", user)
    assert known(kept, "header")
    kept.unpin(header)
    add(kept, "next", user)
    assert known(kept, "header", "user", "busy", "next") == ["user", "busy", "next"]
    # Beside longer ends it stays: it is the newest.
    assert add(kept, "header", user, length=5)
    assert known(kept, "header")


def test_a_snapshot_that_went_comes_back_with_the_keys_and_values_that_stayed():
    kept = PrefixCache(10**9, 0, MockPages())
    last = conversation(kept, "t", [1000] * 100)
    gone = next(part for part in last.chain() if part.snapshot is None)
    size, name = kept.size, gone.key.digest.decode()
    assert kept.find(gone.key) is None
    assert add(kept, name, gone.parent, length=1000) is gone
    assert kept.find(gone.key) is gone
    assert kept.size == size + 9


def test_a_pinned_prefix_stays_and_what_finds_no_room_is_refused():
    kept = PrefixCache(30, 0, MockPages())
    chain = conversation(kept, "a", [100] * 3)
    kept.pin(chain)
    assert add(kept, "b") is None
    assert known(kept, "a0", "a1", "a2") == ["a0", "a1", "a2"]
    kept.unpin(chain)
    assert add(kept, "b")
    assert known(kept, "a0", "a1", "a2", "b") == ["a0", "a1", "b"]


def test_the_oldest_move_to_the_host_and_come_back():
    copies = MockPages()
    kept = PrefixCache(40, 1000, copies)
    for name in "abcdef":
        assert add(kept, name)
    # Those that came last are on the device alone.
    assert (kept.tiers.device.size, kept.tiers.host.size) == (40, 40)
    assert not kept.is_on_device(a := find(kept, "a"), 0)
    assert restored(kept, a) == ["a", "a"]
    assert known(kept, *"abcdef") == [*"abcdef"]
    assert kept.size <= 40


def test_where_the_host_is_full_its_oldest_are_lost():
    kept = PrefixCache(40, 20, MockPages())
    for name in "abcdefgh":
        add(kept, name)
        assert kept.tiers.host.size <= 20
    assert known(kept, *"abcdefgh") == [*"efgh"]
    assert kept.tiers.host.evictions > 0


@pytest.mark.parametrize("host", [0, 40, 100, 400])
def test_a_small_host_tier_takes_nothing_from_the_device(host):
    kept = PrefixCache(1000, host, MockPages())
    for i in range(60):
        add(kept, str(i), size=40)
    assert kept.tiers.device.size == 1000
    assert len(known(kept, *map(str, range(60)))) >= 25


def test_where_the_host_has_no_memory_left_its_budget_ends():
    copies = MockPages()
    kept = PrefixCache(40, 1000, copies)
    for name in "abcde":
        add(kept, name)
    copies.has_memory = False
    for name in "fghi":
        assert add(kept, name)
    assert kept.tiers.host.size <= kept.tiers.host.budget < 1000
    assert set("ghi") <= set(known(kept, *"abcdefghi"))


@pytest.mark.parametrize("make_room", [PrefixTiers.has_room, lambda tiers, _: tiers.give_up_pages(0, (0,))])
def test_room_is_made_from_the_oldest_without_a_look_at_the_others(make_room):
    seen, lost = [], []

    class Watched(OrderedDict):
        def __iter__(self):
            for piece in super().__iter__():
                seen.append(piece)
                yield piece

    pieces = [Piece(SimpleNamespace(pins=int(i in (0, 2))), 1) for i in range(1000)]
    tiers = PrefixTiers(len(pieces), 0, MockPages(), lost.append)
    for piece in pieces:
        tiers.add(piece)
    tiers.device.pieces = Watched(tiers.device.pieces)
    assert make_room(tiers, 1)
    assert make_room(tiers, 2)
    # The second time, one piece has left already where bytes are asked for.
    assert lost == [pieces[1], pieces[3]]
    assert len(seen) < 20


def test_what_comes_back_takes_no_room_of_its_own_prefix():
    kept = PrefixCache(40, 1000, MockPages())
    chain = conversation(kept, "a", [100] * 4)
    kept.pin(chain)
    pieces = [piece for piece, _ in kept.parts(chain, 0)]
    away, *others = pieces
    for piece in pieces:
        if piece not in kept.tiers.host:
            assert kept.tiers._save(piece, replaces=True)
    if away in kept.tiers.device:
        kept.tiers._leave_device(away)
    kept.tiers.device.budget = kept.tiers.device.size
    before = [piece.device for piece in others]
    value, is_piece = kept.tiers.on_device(away, 0)
    assert (value, is_piece) == ("a0", False)
    assert [piece.device for piece in others] == before


def test_each_device_of_a_host_takes_its_memory():
    copies = MockPages()
    copies.devices = 4
    kept = PrefixCache(40, 80, copies)
    for name in "abcdefgh":
        add(kept, name)
    assert kept.tiers.host.size == 80
    assert known(kept, *"abcdefgh") == [*"efgh"]


class Accounting(RuleBasedStateMachine):
    """Prompts of all shapes on small tiers."""

    @initialize(
        budget=st.integers(1, 200),
        host=st.sampled_from([0, 1, 60, 500]),
        devices=st.integers(1, 2),
    )
    def begin(self, budget, host, devices):
        self.copies = MockPages()
        self.copies.devices = devices
        self.kept = PrefixCache(budget, host, self.copies)
        self.names, self.pinned, self.count = [key_of("none")], [], 0

    @rule(at=st.integers(0, 50), length=st.sampled_from([3, 20, 400, 4096]), size=st.integers(1, 60), data=st.data())
    def adds(self, at, length, size, data):
        parent = self.kept.find(self.names[at % len(self.names)])
        again = parent is not None and data.draw(st.booleans())
        self.count += 1
        name = parent.key if again else key_of(f"{self.count}", length + (parent.length if parent else 0))
        if again:
            parent = parent.parent
        added = self.kept.add(name, parent, name, name, size // 2, size - size // 2, [name.digest[:1]])
        assert added is None or self.kept.find(name) is added
        self.names.append(name)

    @rule(at=st.integers(0, 50))
    def restores(self, at):
        if (prefix := self.kept.find(self.names[at % len(self.names)])) is not None:
            chain = [part.key for part in reversed(prefix.chain())]
            self.kept.pin(prefix)
            assert restored(self.kept, prefix) == [*chain, prefix.key]
            self.kept.unpin(prefix)

    @rule(at=st.integers(0, 50))
    def pins(self, at):
        if (prefix := self.kept.find(self.names[at % len(self.names)])) is not None:
            self.kept.pin(prefix)
            self.pinned.append(prefix)

    @precondition(lambda self: self.pinned)
    @rule(at=st.integers(0, 50))
    def unpins(self, at):
        self.kept.unpin(self.pinned.pop(at % len(self.pinned)))

    @rule()
    def clears(self):
        self.kept.clear()
        self.pinned.clear()

    @invariant()
    def no_tier_is_above_its_budget(self):
        for tier in (self.kept.tiers.device, self.kept.tiers.host):
            assert 0 <= tier.size <= tier.budget

    @invariant()
    def every_piece_is_counted_once(self):
        tiers, prefixes = self.kept.tiers, self.kept._prefixes.values()
        pieces = [p for prefix in prefixes for p in (prefix.segments, prefix.snapshot) if p is not None]
        assert set(tiers.device.pieces) == {piece for piece in pieces if piece.device is not None}
        assert set(tiers.host.pieces) == {piece for piece in pieces if piece.host is not None}
        assert {*tiers.device.pieces, *tiers.host.pieces} == set(pieces)
        assert tiers.device.size == sum(piece.size for piece in tiers.device.pieces)
        assert tiers.host.size == self.copies.devices * sum(piece.size for piece in tiers.host.pieces)

    @invariant()
    def what_is_on_the_device_has_its_users(self):
        on_device = Counter(piece.device for piece in self.kept.tiers.device.pieces)
        assert +self.copies.users == on_device

    @rule()
    def gives_up_pages(self):
        before = len(self.kept.tiers.device.pieces)
        assert self.kept.tiers.give_up_pages(0, (0,)) == (len(self.kept.tiers.device.pieces) < before)

    @invariant()
    def what_is_kept_can_be_restored_and_nothing_else_is_kept(self):
        for prefix in self.kept._prefixes.values():
            assert prefix.parent is None or prefix in self.kept._prefixes[prefix.parent.key].children
            assert prefix.snapshot is not None or prefix.children or prefix.pins

    @invariant()
    def nothing_pinned_is_lost(self):
        for prefix in self.pinned:
            assert all(self.kept._prefixes.get(part.key) is part for part in prefix.chain())

    @invariant()
    def prefixes_are_found_by_their_blocks(self):
        keys, digests = self.kept._prefixes, self.kept._block_digests
        assert digests == Counter(digest for prefix in keys.values() for digest in prefix.block_digests)
        lengths = {(digest, n) for digest, counts in self.kept._lengths.items() for n in counts}
        assert {(key.block_digest, key.length) for key in keys} == lengths

    @invariant()
    def pins_are_those_of_users_and_of_children(self):
        for prefix in self.kept._prefixes.values():
            users = sum(pinned is prefix for pinned in self.pinned)
            assert prefix.pins == users + sum(child.pins > 0 for child in prefix.children)


TestAccounting = Accounting.TestCase
TestAccounting.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_other_tokens_are_another_key():
    assert PrefixKeys([1, 2, 3, 4]).of(2) == PrefixKeys([1, 2, 9]).of(2)
    tokens = list(range(3 * BLOCK))
    found = [PrefixKeys(tokens).of(n) for n in range(3 * BLOCK + 1)]
    assert len(set(found)) == len(found)
    for at in (0, 5, BLOCK - 1, BLOCK, 2 * BLOCK + 3):
        changed = PrefixKeys([*tokens[:at], 10**6, *tokens[at + 1 :]])
        assert [changed.of(n) == found[n] for n in range(len(found))] == [n <= at for n in range(len(found))]


def test_other_pixels_are_another_key_from_their_first_token_on():
    tokens = [1] * 600
    plain, one, other, later = (
        PrefixKeys(tokens, media=spans and PromptMedia(tuple(MediaSpan(a, 20, key, list) for a, key in spans), None, 0))
        for spans in ((), [(300, b"one")], [(300, b"other")], [(300, b"one"), (400, b"more")])
    )
    assert plain.of(300) == one.of(300) == other.of(300)
    for length in (301, 320, 512, 600):
        assert len({keys.of(length) for keys in (plain, one, other)}) == 3
        assert (one.of(length) == later.of(length)) == (length <= 400)


def test_a_salt_and_a_part_without_the_drafters_are_other_keys():
    tokens, lengths = list(range(600)), [10, 300, 600]
    plain, again, one, other = (PrefixKeys(tokens, salt) for salt in ("", "", "a", "\ud800"))
    assert plain.of(300) == again.of(300)
    each = (*(PrefixKeys(tokens, salt, drafting=False) for salt in ("", "a")), plain, one, other)
    assert len({keys.of(n) for keys in each for n in lengths}) == 15


def stored(kept: PrefixCache, keys: PrefixKeys, *lengths: int) -> None:
    parent = None
    for length in lengths:
        digests = keys.block_digests(parent.length if parent else 0, length)
        parent = kept.add(keys.of(length), parent, length, length, 1, 1, digests)


def test_the_longest_prefix_is_found_at_any_length():
    kept, tokens = PrefixCache(10**6, 0, MockPages()), list(range(2000))
    keys = PrefixKeys(tokens)
    stored(kept, keys, 100, 700, BLOCK * 3, 1500)
    stored(kept, PrefixKeys(tokens[:900], drafting=False), 800)

    def found(tokens, at=0, lengths=None, drafting=True) -> int:
        prefix = kept.longest(PrefixKeys(tokens, drafting=drafting), at, lengths)
        return prefix.length if prefix else 0

    lengths = {99: 0, 100: 100, 699: 100, 701: 700, 768: 768, 1499: 768, 1500: 1500, 2000: 1500}
    assert {n: found(tokens[:n]) for n in lengths} == lengths
    assert found([*tokens[:1400], 1, 1, *tokens[1400:]]) == 768
    assert (found(tokens[:1400], at=768), found(tokens, at=768), found(tokens, lengths=[100, 700])) == (0, 1500, 700)
    # Where the drafter is not needed, prefixes without its part are found too.
    assert (found(tokens[:1400], drafting=False), found(tokens, drafting=False)) == (800, 1500)
    kept.find(keys.of(1500)).snapshot = None
    assert found(tokens) == 768


def test_a_conversation_costs_each_message_the_same(monkeypatch):
    """Counted are the prefixes that are touched."""
    kept, calls, count = PrefixCache(10**9, 0, MockPages()), Counter(), 2000
    monkeypatch.setattr(PrefixCache, "_touch", lambda *_: calls.update(["touch"]))
    parent = None
    for i in range(count):
        new = add(kept, f"t{i}", parent)
        kept.pin(new)
        if parent is not None:
            kept.unpin(parent)
        parent = new
        assert len(parent.stored) < 40
    kept.unpin(parent)
    # Each when it is added, and all once more when the last one has no user.
    assert calls["touch"] <= 4 * count


def test_a_conversation_of_more_messages_than_frames_is_lost_without_recursion():
    kept, count = PrefixCache(10**6, 0, MockPages()), sys.getrecursionlimit() + 200
    last = conversation(kept, "t", [20] * count)
    assert len(last.chain()) == count
    assert add(kept, "other", size=10**6)
    assert len(kept) == 1

"""A runner without a model that checks its engine: each token follows from the tokens before, so that mixed-up slots
show."""

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from dflash_jax.decoding.sampling import NOTHING_ALLOWED, Logprobs
from dflash_jax.engine.config import BATCH_SIZES, EngineConfig, speculations_of
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.request import Request
from dflash_jax.sampling_params import SamplingParams
from tools.mock_runner import FakeClock, MockCopies, MockRunner, Rounds

VOCAB, END = 50, 0


def next_token(tokens: list[int]) -> int:
    """Never END before a text of five tokens more than a hash says."""
    digest = blake2b(repr(tokens).encode(), digest_size=4).digest()
    token = int.from_bytes(digest, "big") % (VOCAB * 3)
    return END if token == 0 else 1 + token % (VOCAB - 1)


def expected(prompt: list[int], new: int, ends: bool = True) -> list[int]:
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(next_token(tokens))
        if tokens[-1] == END and ends:
            break
    return tokens[len(prompt) :]


@dataclass
class Slot:
    prompt: list[int] = field(default_factory=list)
    limit: int = 0
    known: int = 0  # positions in the caches
    tokens: list[int] = field(default_factory=list)
    done: bool = True
    chunks: tuple = ()  # (start, tokens, size) of those that computed its state, other slots' among them


class MockPages(MockCopies):
    """What pieces keep is a name, and has as many users as pieces keep it."""

    def __init__(self):
        self.users = Counter()

    def keep(self, kept):
        self.users[kept] += 1

    def drop(self, kept):
        assert self.users[kept] > 0
        self.users[kept] -= 1

    def has_idle_pages(self, kept, shard, kinds):
        return True

    def to_device(self, copy, shard):
        kept = super().to_device(copy)
        self.keep(kept)
        return kept


class CheckedRunner(MockRunner):
    """A `MockRunner` that has caches, and asserts what the engine does with them: a prefill chunk costs its size in
    microseconds, a round a millisecond, and yields any number of tokens."""

    page_size = 4

    def __init__(
        self,
        slots: int,
        capacity: int = 4096,
        seed: int = 0,
        shards: int = 1,
        pages: tuple[int, int] | None = None,
        window: tuple[int, int] = (0, 0),
    ):
        self.window, self.random, self.log = window, random.Random(seed), []
        # (prompts, tokens of each, batch size of a shard) of each prefill.
        self.calls = []
        self.fail, self.pause, self.ends = False, 0.0, True
        # New tokens behind which none is possible.
        self.no_token_behind = None
        # Names of programs that may run; None: all.
        self.allowed = None
        self.failed = set()
        times = {"clock": FakeClock(), "round_s": 1e-3, "prefill_s": 1e-6}
        super().__init__(slots, capacity, shards=shards, pages=pages, **times)

    def _clear(self):
        self.rows = [Slot() for _ in range(self.slots)]
        # Of both kinds: what the pages have, and which page a slot has.
        self.contents = [[[None] * self.page_size for _ in range(count * self.shards)] for count in self.pages]
        self.tables = None

    def set_tables(self, *tables):
        assert all(table.shape == (self.slots, -(-self.capacity // self.page_size)) for table in tables)
        self.tables = [table.tolist() for table in tables]

    def place(self, slot, position, kind=0):
        """The page of a position and the place in it; None where there is no page."""
        page = self.tables[kind][slot][position // self.page_size]
        if page == self.pages[kind]:
            return None
        return self.contents[kind][self.shard(slot) * self.pages[kind] + page], position % self.page_size

    def write(self, slot, tokens, chunk=None):
        """Appends tokens to the caches; ``chunk``: the one that computes them."""
        for token in tokens:
            for kind in (0, 1):
                if (place := self.place(slot, self.rows[slot].known, kind)) is not None:
                    place[0][place[1]] = token, chunk
            self.rows[slot].known += 1

    def written(self, slot, kind=0):
        """(token, its chunk) of each position of a slot, as the caches of a kind have them."""
        places = [self.place(slot, position, kind) for position in range(self.rows[slot].known)]
        return [(None, None) if place is None else place[0][place[1]] or (None, None) for place in places]

    def cached(self, slot, kind=0):
        """What the caches of a kind have of a slot."""
        return [token for token, _ in self.written(slot, kind)]

    def assert_window(self, slot):
        """Whether the caches with a window have what a round reads."""
        last, first = self.window
        row = self.rows[slot]
        for position, token in enumerate(self.cached(slot, 1) if last else ()):
            is_behind = first <= position < row.known - last
            assert is_behind or token == row.tokens[position]

    def has_failed(self, kind):
        return kind in self.failed

    def can_run(self, *name):
        return self.allowed is None or name in self.allowed

    def batch_sizes(self):
        return list(BATCH_SIZES)

    masked_batch_sizes = batch_sizes

    def admit(self, slot, request):
        self.log.append(("admit", slot, request))
        self.rows[slot] = Slot(request.context, request.need, 0, list(request.context), False)

    embedding = 1, "float32"

    def prefill(self, slots, tokens, size, batch=1, drafting=True, media=None):
        if self.fail:
            raise RuntimeError("out of memory")
        assert len(set(slots)) == len(slots)
        assert max(Counter(map(self.shard, slots)).values()) <= batch
        assert (
            self.can_run("prefill", batch, size, drafting) if media is None else self.can_run("media", size, drafting)
        )
        for slot, n in zip(slots, tokens, strict=True):
            row = self.rows[slot]
            assert 0 < n <= size
            assert row.known + n < len(row.prompt)
            assert self.cached(slot) == row.prompt[: row.known]
            self.log.append(("prefill", slot, size))
            chunk = row.known, n, size
            row.chunks += (chunk,)
            self.write(slot, row.prompt[row.known : row.known + n], chunk)
        self.calls.append((len(slots), size, batch))
        return super().prefill(slots, tokens, size, batch)

    def score(self, slot, tokens, size, media=None):
        """The log-probability of a token is the token."""
        row = self.rows[slot]
        chosen = row.prompt[row.known + 1 : row.known + 1 + tokens]
        none = np.zeros((tokens, 0), int)
        return self.prefill([slot], [tokens], size), Logprobs(np.array(chosen), none, none, none)

    def read_scores(self, ticket):
        self.wait(ticket)
        return ticket[1]

    def decode(self, dispatch):
        self.check(dispatch, "decode")
        return super().decode(dispatch)

    def check(self, dispatch, kind):
        assert len(set(dispatch.slots)) == len(dispatch.slots)
        assert self.largest_shard(dispatch.slots) <= dispatch.batch_size
        assert self.can_run(kind, dispatch.batch_size, dispatch.speculation)
        self.log.append(("decode", dispatch))

    def rounds(self, slot, block_size, rounds, forced=None):
        """With ``forced``, it is all tokens."""
        row, yielded = self.rows[slot], []
        before = len(row.tokens)
        for _ in range(rounds):
            if row.done:
                break
            # All but the last token must be in the caches.
            assert self.cached(slot) == row.tokens[:-1]
            self.assert_window(slot)
            n = 0
            for _ in range(self.random.randint(1, block_size)):
                row.tokens.append(next_token(row.tokens) if forced is None else forced)
                n += 1
                if len(row.tokens) - len(row.prompt) - 1 == self.no_token_behind:
                    row.tokens[-1], row.done = NOTHING_ALLOWED, True
                    break
                if (row.tokens[-1] == END and self.ends) or len(row.tokens) == row.limit:
                    row.done = True
                    break
            self.write(slot, row.tokens[row.known : -1])
            yielded.append(n)
        return Rounds(row.tokens[before:], yielded, row.done)

    def propose(self, dispatch):
        self.check(dispatch, "masked")
        return super().propose(dispatch)

    def read_blocks(self, ticket):
        dispatch = ticket[1]
        return np.zeros((len(dispatch.slots), dispatch.speculation.block_size), int)

    def drawn(self, dispatch, blocks, allowed, is_late):
        """The lowest allowed token, where not all are."""
        results = []
        for slot, size, masks, late in zip(dispatch.slots, dispatch.block_sizes, allowed, is_late, strict=True):
            is_free = (masks == 2**32 - 1).all()
            lowest = None if is_free else next(b for b in range(32) if int(masks[0, 0]) >> b & 1)
            results.append(Rounds([], [], True) if late else self.rounds(slot, size, 1, lowest))
        return results

    def read(self, ticket, logprobs):
        if self.fail:
            raise RuntimeError("out of memory")
        time.sleep(self.pause)
        return super().read(ticket, logprobs)

    def save(self, pages, is_windowed):
        return [tuple(self.contents[is_windowed][page]) for page in pages]

    def load(self, pages, segments, is_windowed):
        self.log.append(("load", len(pages)))
        for page, contents in zip(pages, segments, strict=True):
            self.contents[is_windowed][page] = list(contents)

    def snapshot(self, slot):
        return self.rows[slot].known, self.rows[slot].chunks

    def restore(self, slot, length, snapshot):
        row = self.rows[slot]
        row.known, row.chunks = snapshot
        assert row.known == length
        self.log.append(("restore", slot, length))
        assert self.cached(slot) == row.prompt[:length]


def request(prompt, new: int = 10, prompt_logprobs: int | None = None, **options) -> Request:
    params = SamplingParams(max_tokens=new, temperature=0.0, prompt_logprobs=prompt_logprobs)
    return Request(list(prompt), params, (END,), **options)


def engine(
    slots: int = 4,
    capacity: int = 4096,
    seed: int = 0,
    shards: int = 1,
    pages: tuple[int, int] | int | None = None,
    window: tuple[int, int] = (0, 0),
    **options,
) -> Engine:
    """An engine on a `CheckedRunner`; ``pages``: of both kinds, or of the first."""
    pages = (pages, 0) if isinstance(pages, int) else pages
    options = {
        "speculations": speculations_of((8, 16)),
        "prefill_sizes": (4, 16),
        "max_num_batched_tokens": 64,
    } | options
    return Engine(CheckedRunner(slots, capacity, seed, shards, pages, window), EngineConfig(**options))


def run(engine: Engine, most: int = 10_000) -> list:
    """All events until the engine has no work."""
    events = []
    for _ in range(most):
        if not engine.has_work:
            return events
        events += engine.step()
    raise AssertionError("the engine does not run out of work")

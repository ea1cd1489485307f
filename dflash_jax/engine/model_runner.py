"""The engine's hands: its decisions as calls of compiled programs on one decode state."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import jax
import numpy as np

from dflash_jax.decoding.batch_init import Admission
from dflash_jax.decoding.sampling import Logprobs
from dflash_jax.decoding.state import NO_BOUND, Settings
from dflash_jax.decoding.step_functions import Report
from dflash_jax.engine.draft_length import ALONE
from dflash_jax.engine.executables import Executables
from dflash_jax.engine.memory import on_device
from dflash_jax.engine.request import Request
from dflash_jax.parallel import distributed

ROW_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Dispatch:
    """What the host decides for a decoding dispatch: the slots that take part, the tokens a round of each may yield,
    the rounds, and the compiled width (0: plain decoding that leaves the drafter alone)."""

    slots: tuple[int, ...]
    widths: tuple[int, ...]
    rounds: int
    window: int


@dataclass(frozen=True)
class Outcome:
    """What a dispatch brought, one entry a slot: new tokens, what each round yielded, whether the row is done,
    log-probabilities of the tokens where asked for."""

    tokens: list[list[int]]
    accepted: list[list[int]]
    done: list[bool]
    logprobs: list[Logprobs] | None


class RoundMasks(Protocol):
    """The masks of a round, for the slots of a dispatch in their order."""

    def ask(self, block: np.ndarray) -> np.ndarray:
        """Learns the windows int [slots, W] that are about to be verified, and returns those that shall be."""

    def answer(self, is_verified: Callable[[], bool]) -> tuple[np.ndarray, np.ndarray]:
        """(packed masks uint32 [slots, W, words], bool [slots]: whose masks are late, so that they sit the round
        out). ``is_verified``: whether the device has verified the windows, and waits for the masks."""


class Device:
    """``slots`` rows of ``capacity`` positions. Slots are numbered through the mesh's data shards.

    ``settings``: what all programs share; their window is each dispatch's own.
    """

    def __init__(self, programs: Executables, slots: int, capacity: int, settings: Settings):
        self.programs, self.slots, self.capacity, self.settings = programs, slots, capacity, settings
        self._own = slots // programs.data
        # (rows, window) that were decoded with.
        self._used: set[tuple[int, int]] = set()
        self.reset()

    def reset(self) -> None:
        """An empty state; the old one is let go of first."""
        self.state = None
        self.state = self.programs.empty(self.slots, self.capacity, self.settings)

    @property
    def clock(self) -> float:
        """Seconds, without those of compilation."""
        return time.perf_counter() - self.programs.compile_s

    def row_sizes(self) -> list[int]:
        """Compiled rows of a data shard, up to all of its slots."""
        return [n for i, n in enumerate(ROW_SIZES) if i == 0 or ROW_SIZES[i - 1] < self._own]

    def masked_sizes(self) -> list[int]:
        """Compiled rows of a data shard where there are masks: fewer, for each takes three programs."""
        sizes = self.row_sizes()
        return [n for n in sizes if n in (1, 8) or n == sizes[-1]]

    def first_slots(self, rows: int) -> tuple[int, ...]:
        """So many slots of each data shard, if it has them."""
        return tuple(s * self._own + i for s in range(self.shards) for i in range(min(rows, self._own)))

    @property
    def compile_s(self) -> float:
        return self.programs.compile_s

    @property
    def last_compile_s(self) -> float:
        return self.programs.last_compile_s

    @property
    def first_width(self) -> str:
        """CPUs have no idle arithmetic for a drafter to use: plain decoding is the better guess there."""
        return "narrow" if jax.default_backend() == "cpu" else "wide"

    def is_compiled(self, rows: int, window: int) -> bool:
        return (rows, window) in self._used

    @property
    def mask_words(self) -> int:
        """uint32 words of a packed mask over the vocabulary."""
        return -(-self.programs.config.vocab_size // 32)

    @property
    def aligned(self) -> bool:
        """Whether windows begin at whole multiples of their size, as `speculative` explains."""
        return self.settings.aligned

    @property
    def shards(self) -> int:
        return self.programs.data

    def shard(self, slot: int) -> int:
        return slot // self._own

    def rows_for(self, slots: Sequence[int]) -> int:
        """Compiled rows, of each data shard, for these slots."""
        most = max(np.bincount([self.shard(s) for s in slots], minlength=1))
        return next(size for size in ROW_SIZES if size >= most)

    def _rows(self, slots: Sequence[int], size: int, values: Sequence[int] = (), fill: int = 0):
        """(rows, values in their order, the place of each slot in them)."""
        rows = np.full(size * self.shards, self._own, np.int32)
        packed, used, places = np.full(len(rows), fill, np.int32), [0] * self.shards, []
        for i, slot in enumerate(slots):
            shard = self.shard(slot)
            at = shard * size + used[shard]
            used[shard] += 1
            rows[at] = slot - shard * self._own
            if len(values):
                packed[at] = values[i]
            places.append(at)
        return rows, packed, places

    def admit(self, slot: int, request: Request) -> None:
        p = request.params
        admission = Admission.pack(
            request.prompt,
            self.capacity,
            request.stops,
            p.logit_bias,
            p.logprob_token_ids,
            limit=request.need,
            draft_window=NO_BOUND if request.draft_window_size is None else request.draft_window_size,
            draft_sinks=request.draft_sink_size,
            top_k=min(p.top_k, 2**31 - 1),
            seed=p.seed,
            wants_logprobs=p.wants_logprobs,
            processed_logprobs=p.logprobs_mode == "processed",
            temperature=p.temperature,
            top_p=p.top_p,
            min_p=p.min_p,
            repetition=p.repetition_penalty,
            frequency=p.frequency_penalty,
            presence=p.presence_penalty,
        )
        self.state = self.programs.admit(self.state, self._rows([slot], 1)[0], admission)

    def prefill(self, slots: Sequence[int], tokens: Sequence[int], size: int, rows: int = 1, drafting: bool = True):
        """Runs a chunk of each slot's prompt, at most ``rows`` of a data shard, of the drafter too if ``drafting``;
        returns what `wait` waits for."""
        rows, n, _ = self._rows(slots, rows, tokens)
        self.state, ticket = self.programs.prefill(self.state, rows, n, size, drafting)
        return ticket

    def score(self, slot: int, tokens: int, size: int):
        """Runs a chunk and takes the log-probabilities of the tokens behind; what `read_scores` reads."""
        rows, n, places = self._rows([slot], 1, [tokens])
        self.state, found = self.programs.score(self.state, rows, n, size, self.settings.top_logprobs)
        return found, places[0], tokens

    def read_scores(self, ticket) -> Logprobs:
        """`Logprobs` of a chunk's tokens."""
        found, at, n = ticket
        return jax.device_get(found).of_row(at, n)

    def wait(self, ticket) -> None:
        jax.block_until_ready(ticket)

    def decode(self, dispatch: Dispatch):
        """Starts a dispatch: what `read` reads."""
        size = self.rows_for(dispatch.slots)
        rows, widths, places = self._rows(dispatch.slots, size, dispatch.widths, 1)
        settings = self._settings(dispatch.window)
        self._used.add((size, dispatch.window))
        self.state, report = self.programs.decode(self.state, rows, widths, dispatch.rounds, settings)
        return report, places

    def _settings(self, window: int) -> Settings:
        s, drafting = self.settings, window != ALONE
        return replace(s, window=max(window, s.window) if s.aligned else max(window, 1), drafting=drafting)

    def decode_masked(self, dispatch: Dispatch, masks: "RoundMasks"):
        """Starts one round: what `read` reads. ``masks`` are computed while the device verifies the drafts."""
        least = self.rows_for(dispatch.slots)
        size = next(n for n in self.masked_sizes() if n >= least)
        rows, widths, places = self._rows(dispatch.slots, size, dispatch.widths, 1)
        settings = self._settings(dispatch.window)
        block = self.programs.read(self.programs.propose(self.state, rows, widths, settings)).copy()
        block[places] = masks.ask(block[places])
        verified = self.programs.verify(self.state, rows, widths, block, settings)
        allowed, is_late = masks.answer(lambda: jax.tree.leaves(verified)[0].is_ready())
        packed = np.full((len(rows), *allowed.shape[1:]), 0xFFFFFFFF, np.uint32)
        packed[places] = allowed
        # A slot whose mask is late stays as it is.
        rows[np.array(places)[is_late]] = self._own
        self.state, report = self.programs.finish(self.state, rows, widths, block, packed, verified, settings)
        return report, places

    def read(self, ticket, logprobs: bool) -> Outcome:
        """Waits for a dispatch, and reads what it brought. The one place where the host waits for the device."""
        report, places = ticket
        names = ("tokens", "count", "accepted", "rounds", "done") + (("logprobs",) if logprobs else ())
        found: Report = {name: getattr(report, name) for name in names}
        found = jax.device_get(found)
        counts = [int(found["count"][at]) for at in places]
        values = None
        if logprobs:
            record = found["logprobs"]
            values = [record.of_row(at, n) for at, n in zip(places, counts, strict=True)]
        return Outcome(
            [found["tokens"][at, :n].tolist() for at, n in zip(places, counts, strict=True)],
            [found["accepted"][at, : found["rounds"][at]].tolist() for at in places],
            [bool(found["done"][at]) for at in places],
            values,
        )

    def agree(self, value: int) -> int:
        """The first host's ``value``: what was decided by its clock."""
        return distributed.agreed(value)

    def save(self, slot: int, start: int, size: int):
        return self.programs.save(self.state, self._rows([slot], 1)[0], start, size)

    def load(self, slot: int, start: int, segment) -> None:
        self.state = self.programs.load(self.state, self._rows([slot], 1)[0], start, segment)

    def snapshot(self, slot: int):
        return self.programs.snapshot(self.state, self._rows([slot], 1)[0])

    def restore(self, slot: int, length: int, snapshot) -> None:
        self.state = self.programs.restore(self.state, self._rows([slot], 1)[0], length, snapshot)

    def bytes(self, tree) -> int:
        return on_device(tree)

"""The engine's decisions as calls of compiled programs on one decoding state."""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from dflash_jax.decoding.batch_init import Admission
from dflash_jax.decoding.prefill import MediaChunk
from dflash_jax.decoding.sampling import Logprobs
from dflash_jax.decoding.sampling_state import SCALED_PROMPT
from dflash_jax.decoding.state import NO_BOUND, DecodeState, Settings, is_kv_cache, num_pages
from dflash_jax.decoding.widths import BINS, LENGTHS
from dflash_jax.engine import steps
from dflash_jax.engine.config import BATCH_SIZES, COPIED_PAGES, RECOMPUTE, Speculation
from dflash_jax.engine.dispatch import Dispatch, Outcome, RoundMasks, round_settings
from dflash_jax.engine.memory import LIMIT_VARIABLE, PINNED, on_device
from dflash_jax.engine.request import Request
from dflash_jax.engine.steps import Programs, Report, Step
from dflash_jax.errors import EngineError
from dflash_jax.ops.cache import KVCache, page_size
from dflash_jax.sampling_params import LOGPROBS_MODES

log = logging.getLogger("dflash_jax")


class ModelRunner:
    """Runs an engine's decisions on a decoding state of ``slots`` slots with ``capacity`` positions each.

    Slots are numbered through the mesh's data shards.

    Args:
        programs: Run the steps.
        slots: Slots, a multiple of the data shards.
        capacity: Positions of each slot.
        settings: What all programs share, but for ``block_size``, which each dispatch sets.
        pages: Pages of a data shard, in caches that keep all positions and in those with a window; no slot has any
            before `set_tables`. None: each slot has all that it can need.
    """

    # A proposal for the next round with masks: its dispatch and ticket.
    _proposed: tuple[Dispatch, Any] | None = None

    def __init__(
        self,
        programs: Programs,
        slots: int,
        capacity: int,
        settings: Settings,
        pages: tuple[int, int] | None = None,
    ):
        self.programs, self.slots, self.capacity, self.settings = programs, slots, capacity, settings
        self._pages = pages
        self._slots_per_shard = slots // programs.data
        # (batch size, speculation) of decode programs that have run.
        self._used: set[tuple[int, Speculation]] = set()
        # Names of the programs that may run; None: all, each compiled at its first use.
        self._allowed: set[tuple] | None = None
        # First parts of the names of programs that cannot be compiled.
        self._failed: set[str] = set()
        self._state: DecodeState | None = None
        self._clear()

    def on(self, programs: Programs) -> "ModelRunner":
        """A runner of the same slots, capacity and settings with a state of its own."""
        return ModelRunner(programs, self.slots, self.capacity, self.settings, self._pages)

    def reset(self) -> None:
        """Empties the state."""
        self._clear()

    def release(self) -> None:
        """Frees the state, until `reset`."""
        self._state, self._proposed = None, None

    def _clear(self) -> None:
        # The old state is freed first.
        self.release()
        self._state = self.programs.empty(self.slots, self.capacity, self.settings, self._pages)

    @property
    def state(self) -> DecodeState:
        """The decoding state. Calls donate it: a reference to it is good until the next call."""
        if self._state is None:
            raise EngineError("the device has no decoding state: its memory could not be allocated")
        return self._state

    @state.setter
    def state(self, state: DecodeState) -> None:
        self._state = state

    def _change(self, step: Step, *args: Any, **static: Any) -> Any:
        """Runs a step that changes the state: its result."""
        if step is not steps.set_tables:
            self._proposed = None
        self.state, result = self.programs.run(step, self.state, *args, **static)
        return result

    @property
    def embedding(self) -> tuple[int, np.dtype]:
        """Size and dtype of a token's embedding."""
        return self.programs.config.hidden_size, self.programs.pair[0].dtype

    @property
    def clock(self) -> float:
        """Seconds, without those of compilation."""
        return time.perf_counter() - self.programs.compile_s

    def batch_sizes(self) -> list[int]:
        """Compiled batch sizes of a data shard, up to all of its slots."""
        return [n for i, n in enumerate(BATCH_SIZES) if i == 0 or BATCH_SIZES[i - 1] < self._slots_per_shard]

    def masked_batch_sizes(self) -> list[int]:
        """Compiled batch sizes of rounds with masks: few, since each takes three programs."""
        sizes = self.batch_sizes()
        return [n for n in sizes if n in (1, 8) or n == sizes[-1]]

    def allow(self, *names: tuple) -> None:
        """Allows programs; from the first call on, only those that were allowed may run.

        Args:
            *names: As `can_run` takes them.
        """
        self._allowed = (self._allowed or set()) | set(names)

    def mark_failed(self, *names: tuple) -> None:
        """Marks programs that cannot be compiled."""
        self._failed |= {name[0] for name in names}

    def has_failed(self, kind: str) -> bool:
        """Whether a program whose name begins with ``kind`` cannot be compiled."""
        return kind in self._failed

    def can_run(self, *name) -> bool:
        """Whether a program may run: it is compiled, or is to be compiled at its first use.

        Args:
            *name: "prefill", batch size, chunk size and whether the drafter takes part; "media", chunk size and
                whether the drafter takes part; "decode" or "masked", batch size and `Speculation`; "prefix"
                (copies of pages and of slots, for the prefix cache and for requests that leave their slots); "score" or
                "media score".
        """
        return self._allowed is None or name in self._allowed

    def decode_sizes(self, masked: bool, speculations: Sequence[Speculation]) -> dict[int, list[Speculation]]:
        """Those of ``speculations`` that may run, by batch size, ascending; without batch sizes that have none.

        Args:
            masked: Whether rounds have masks.
            speculations: What rounds are compiled for.
        """
        batch_sizes, kind = (self.masked_batch_sizes(), "masked") if masked else (self.batch_sizes(), "decode")
        sizes = {n: [s for s in speculations if s.may_run(n) and self.can_run(kind, n, s)] for n in batch_sizes}
        return {n: allowed for n, allowed in sizes.items() if allowed}

    def first_slots(self, count: int) -> tuple[int, ...]:
        """The first ``count`` slots of each data shard, or all where it has fewer."""
        size = self._slots_per_shard
        return tuple(shard * size + i for shard in range(self.shards) for i in range(min(count, size)))

    @property
    def compile_s(self) -> float:
        """Seconds of all compilations."""
        return self.programs.compile_s

    @property
    def last_compile_s(self) -> float:
        """Seconds of the last compilation."""
        return self.programs.last_compile_s

    def is_compiled(self, batch_size: int, speculation: Speculation) -> bool:
        """Whether a decode program is compiled."""
        if self._allowed is not None:
            return self.can_run("decode", batch_size, speculation)
        return (batch_size, speculation) in self._used

    @property
    def mask_words(self) -> int:
        """uint32 words of a packed mask over the vocabulary."""
        return -(-self.programs.config.vocab_size // 32)

    @property
    def aligned(self) -> bool:
        """Whether blocks begin at multiples of the block size (see `decoding.speculative`)."""
        return self.settings.aligned

    @property
    def shards(self) -> int:
        """Data shards."""
        return self.programs.data

    def shard(self, slot: int) -> int:
        """The data shard of a slot."""
        return slot // self._slots_per_shard

    def largest_shard(self, slots: Sequence[int]) -> int:
        """The largest number of these slots that one data shard has."""
        return int(max(np.bincount([self.shard(s) for s in slots], minlength=1)))

    def _placed(self, slots: Sequence[int], batch_size: int, values: Sequence[int] = (), fill: int = 0):
        """Distributes ``slots`` over the data shards' parts of a batch.

        Returns:
            int32 [shards * batch_size] slots numbered within their shard, padded with an index past its last;
            ``values`` in the same places, padded with ``fill``; and the place of each slot.
        """
        padding = self._slots_per_shard
        indices = np.full(batch_size * self.shards, padding, np.int32)
        packed, used, places = np.full(len(indices), fill, np.int32), [0] * self.shards, []
        for i, slot in enumerate(slots):
            shard = self.shard(slot)
            place = shard * batch_size + used[shard]
            used[shard] += 1
            indices[place] = slot - shard * self._slots_per_shard
            if len(values):
                packed[place] = values[i]
            places.append(place)
        return indices, packed, places

    def _only(self, slot: int) -> np.ndarray:
        """A batch of one slot."""
        return self._placed([slot], 1)[0]

    def admit(self, slot: int, request: Request) -> None:
        """Puts a request's prompt and sampling parameters into a slot."""
        p = request.params
        # The frontend has replaced None by a number.
        assert p.seed is not None
        assert p.temperature is not None
        assert p.top_p is not None
        assert p.min_p is not None
        assert p.repetition_penalty is not None
        assert p.frequency_penalty is not None
        assert p.presence_penalty is not None
        window, sinks, mode = *self._draft_window(request), p.logprobs_mode or LOGPROBS_MODES[0]
        admission = Admission.pack(
            request.context,
            self.capacity,
            request.stops,
            p.logit_bias,
            p.logprob_token_ids,
            num_resumed=request.resumed,
            limit=request.need,
            rope_delta=0 if request.media is None else request.media.rope_delta,
            draft_window=window,
            draft_sinks=sinks,
            top_k=min(p.top_k or 0, 2**31 - 1),
            wants_logprobs=p.wants_logprobs,
            logprobs_mode=SCALED_PROMPT if request.scales_prompt else LOGPROBS_MODES.index(mode),
            seed=p.seed,
            temperature=p.temperature,
            top_p=p.top_p,
            min_p=p.min_p,
            repetition=p.repetition_penalty,
            frequency=p.frequency_penalty,
            presence=p.presence_penalty,
        )
        self.admit_packed(slot, admission)

    def _draft_window(self, request: Request) -> tuple[int, int]:
        """The last and the first positions that the drafter sees: at most those that the drafter's caches keep."""
        window, size, sinks = self.settings.draft_window, request.draft_window_size, request.draft_sink_size
        assert not isinstance(window.size, jax.Array)
        assert not isinstance(window.sinks, jax.Array)
        if size is None:
            return NO_BOUND if window.size is None else window.size, window.sinks
        return (size, sinks) if window.size is None else (min(size, window.size), min(sinks, window.sinks))

    def admit_packed(self, slot: int, admission: Admission) -> None:
        """Puts a packed prompt into a slot."""
        self._change(steps.admit, self._only(slot), admission)

    def prefill(
        self,
        slots: Sequence[int],
        tokens: Sequence[int],
        size: int,
        batch: int = 1,
        drafting: bool = True,
        media: MediaChunk | None = None,
    ):
        """Runs a chunk of each slot's prompt.

        Args:
            slots: The slots, at most ``batch`` of a data shard.
            tokens: Prompt tokens of each slot's chunk.
            size: Tokens of each slot that the program takes.
            batch: Slots of a data shard that the program takes.
            drafting: Whether the drafter's context gets the chunk too.
            media: Images and videos of the chunk of one slot, as `PromptMedia.chunk` makes it.

        Returns:
            A ticket for `wait`.
        """
        indices, n, places = self._placed(slots, batch, tokens)
        media = None if media is None else self._placed_media(media, places[0])
        # Without a drafter both values are one program.
        drafting = drafting and self.programs.pair[1] is not None
        return self._change(steps.prefill, indices, n, media, size=size, drafting=drafting)

    def recompute(self, slot: int, blocks: int):
        """Feeds known tokens in aligned blocks, as decoding has fed them: a ticket for `wait`.

        The same program computes the same bits. A prefill would not.

        Args:
            slot: The slot. After its cached tokens, it knows the tokens of the blocks and one more.
            blocks: Their number.
        """
        indices, block_sizes, _ = self._placed([slot], 1, [1], 1)
        settings = self._settings(RECOMPUTE)
        return self._change(steps.decode, indices, block_sizes, np.int32(blocks), None, None, settings=settings)

    def score(self, slot: int, tokens: int, size: int, media: MediaChunk | None = None):
        """Runs a chunk of a prompt, with the log-probabilities of its tokens: a ticket for `read_scores`."""
        indices, n, places = self._placed([slot], 1, [tokens])
        media = None if media is None else self._placed_media(media, places[0])
        record = self._change(steps.score, indices, n, media, size=size, top=self.settings.top_logprobs)
        return record, places[0], tokens

    def _placed_media(self, media: MediaChunk, place: int) -> MediaChunk:
        """The media of one sequence at its place in a batch of one sequence of each data shard."""

        def placed(x: np.ndarray) -> np.ndarray:
            whole = np.zeros((self.shards, *x.shape[1:]), x.dtype)
            whole[place] = x[0]
            return whole

        return jax.tree.map(placed, media)

    def read_scores(self, ticket) -> Logprobs:
        """`Logprobs` of a chunk's tokens. Waits for the device."""
        record, place, n = ticket
        return jax.device_get(record).of_sequence(place, n)

    def wait(self, ticket) -> None:
        """Waits for the device."""
        jax.block_until_ready(ticket)

    def decode(self, dispatch: Dispatch):
        """Starts a dispatch: a ticket for `read`."""
        indices, block_sizes, places = self._batch(dispatch)
        settings = self._settings(dispatch.speculation)
        self._used.add((dispatch.batch_size, dispatch.speculation))
        rates = prices = None
        if settings.has_widths:
            # Without prices all drafts are worth their verification.
            every = np.ones((LENGTHS, settings.block_size - 1, BINS), np.float32)
            rates = every if dispatch.rates is None else dispatch.rates
            prices = np.zeros(len(indices), np.float32)
            prices[places] = dispatch.prices or 0.0
        rounds = np.int32(dispatch.rounds)
        report = self._change(steps.decode, indices, block_sizes, rounds, rates, prices, settings=settings)
        return report, places

    def _batch(self, dispatch: Dispatch):
        """`_placed` of a dispatch."""
        return self._placed(dispatch.slots, dispatch.batch_size, dispatch.block_sizes, 1)

    def _settings(self, speculation: Speculation) -> Settings:
        return round_settings(self.settings, speculation)

    def decode_masked(self, dispatch: Dispatch, masks: RoundMasks):
        """Starts one round with masks, which are computed while the device verifies: a ticket for `read`."""
        proposed = self._proposed
        ticket = proposed[1] if proposed is not None and proposed[0] == dispatch else self.propose(dispatch)
        blocks = masks.ask(self.read_blocks(ticket))
        verified = self.verify(dispatch, blocks)
        allowed, is_late = masks.answer(lambda: jax.tree.leaves(verified)[0].is_ready())
        return self.finish(dispatch, blocks, allowed, is_late, verified)

    def propose_next(self, dispatch: Dispatch) -> None:
        """Starts to propose for a round with masks, while the host reads the last one.

        `decode_masked` takes the proposal where it has the same dispatch, and the slots are as they are now.
        """
        self._proposed = dispatch, self.propose(dispatch)

    def propose(self, dispatch: Dispatch):
        """First part of a round with masks: a ticket for `read_blocks`."""
        indices, block_sizes, places = self._batch(dispatch)
        settings = self._settings(dispatch.speculation)
        return self.programs.run(steps.propose, self.state, indices, block_sizes, settings=settings), places

    def read_blocks(self, ticket) -> np.ndarray:
        """Waits for a proposal: int32 [slots, block], the last known token and the drafts after it."""
        block, places = ticket
        return self.programs.read(block)[places]

    def verify(self, dispatch: Dispatch, blocks: np.ndarray):
        """Second part of a round with masks: what `finish` takes; ``blocks`` as `RoundMasks.ask` returns them."""
        indices, block_sizes, places = self._batch(dispatch)
        placed, drafting = self._in_batch(blocks, indices, places), dispatch.speculation.drafter is not None
        return self.programs.run(steps.verify, self.state, indices, block_sizes, placed, drafting=drafting)

    def finish(self, dispatch: Dispatch, blocks: np.ndarray, allowed: np.ndarray, is_late: np.ndarray, verified):
        """Third part of a round with masks: draws tokens and commits them.

        Args:
            dispatch: The round.
            blocks: What was verified.
            allowed: Packed masks uint32 [slots, block, words].
            is_late: bool [slots], slots that skip the round.
            verified: What `verify` returned.

        Returns:
            A ticket for `read`.
        """
        indices, block_sizes, places = self._batch(dispatch)
        placed = self._in_batch(blocks, indices, places)
        packed = self._in_batch(allowed, indices, places, 0xFFFFFFFF)
        # As padding, a slot whose mask is late stays as it is.
        indices[np.array(places)[is_late]] = self._slots_per_shard
        static = {"aligned": self.aligned, "drafting": dispatch.speculation.drafter is not None}
        return self._change(steps.finish, indices, block_sizes, placed, packed, verified, **static), places

    def _in_batch(self, values: np.ndarray, indices: np.ndarray, places: Sequence[int], fill: int = 0) -> np.ndarray:
        """``values`` of each slot at its place in a batch that `_placed` has laid out, padded with ``fill``."""
        batch = np.full((len(indices), *values.shape[1:]), fill, values.dtype)
        batch[places] = values
        return batch

    def read(self, ticket, logprobs: bool) -> Outcome:
        """Waits for a dispatch and reads its results; ``logprobs``: log-probabilities too.

        The one place where decoding waits for the device.
        """
        report, places = ticket
        host: Report = jax.device_get(report if logprobs else replace(report, logprobs=None))
        counts = [int(host.count[place]) for place in places]
        records = None
        if host.logprobs is not None:
            records = [host.logprobs.of_sequence(place, n) for place, n in zip(places, counts, strict=True)]
        return Outcome(
            [host.tokens[place, :n].tolist() for place, n in zip(places, counts, strict=True)],
            [host.yielded[place, : host.rounds[place]].tolist() for place in places],
            [bool(host.done[place]) for place in places],
            records,
            [host.verified[place, : host.rounds[place]].tolist() for place in places],
            None if host.outcomes is None else np.asarray(host.outcomes).sum(0),
        )

    def next_token_scores(self) -> tuple[np.ndarray, np.ndarray]:
        """For the token after each slot's last: raw logits, and the values whose maximum is drawn, [slots, V] each."""
        return jax.device_get(self.programs.run(steps.next_token_scores, self.state))

    @property
    def page_size(self) -> int:
        """Positions of a page."""
        return page_size(self.capacity)

    @property
    def pages(self) -> tuple[int, int]:
        """Pages of a data shard, in caches that keep all positions and in those with a window."""
        full, windowed = num_pages(self.state)
        return full // self.shards, windowed // self.shards

    @property
    def page_bytes(self) -> tuple[int, int]:
        """Bytes of a page on one device, in caches that keep all positions and in those with a window."""
        sizes = [0, 0]
        for cache in self._caches():
            shape = cache.k.sharding.shard_shape(cache.k.shape)
            sizes[cache.window is not None] += 2 * int(np.prod(shape[1:])) * cache.k.dtype.itemsize
        return sizes[0], sizes[1]

    @property
    def window(self) -> tuple[int, int]:
        """The last and the first positions that caches with a window keep; zeros where there are none."""
        windows = [(cache.window, cache.sinks) for cache in self._caches() if cache.window is not None]
        return max((last for last, _ in windows), default=0), max((first for _, first in windows), default=0)

    def _caches(self) -> list[KVCache]:
        caches = jax.tree.leaves((self.state.target, self.state.draft), is_leaf=is_kv_cache)
        return [cache for cache in caches if is_kv_cache(cache)]

    def set_tables(self, table: np.ndarray, windowed: np.ndarray) -> None:
        """Gives the slots pages, int32 [slots, n] each: of caches that keep all positions, and of those with a window.

        Pages are numbered within their data shard.
        """
        self._change(steps.set_tables, table, windowed)

    def _groups(self, pages: Sequence[int], is_windowed: bool) -> Iterator[np.ndarray]:
        """Pages as the programs take them, some at a time."""
        count = self.pages[is_windowed]
        small, large = COPIED_PAGES
        start = 0
        while start < len(pages):
            size = large if len(pages) - start > small else small
            part = np.asarray(pages[start : start + size], np.int32)
            group = np.full((self.shards, size), count, np.int32)
            group[part // count, np.arange(len(part))] = part % count
            yield group.ravel()
            start += size

    def save(self, pages: Sequence[int], is_windowed: bool) -> list:
        """Copies of pages, which are numbered through the data shards: segments for `load`."""
        groups = self._groups(pages, is_windowed)
        return [self.programs.run(steps.save, self.state, group, is_windowed=is_windowed) for group in groups]

    def load(self, pages: Sequence[int], segments: list, is_windowed: bool) -> None:
        """Writes segments of `save` into as many pages."""
        for group, segment in zip(self._groups(pages, is_windowed), segments, strict=True):
            self._change(steps.load, group, segment, is_windowed=is_windowed)

    def snapshot(self, slot: int):
        """What a slot has beside pages, for `restore`."""
        return self.programs.run(steps.snapshot, self.state, self._only(slot))

    def restore(self, slot: int, length: int, snapshot) -> None:
        """Sets a slot to a `snapshot` that was taken after ``length`` tokens."""
        self._change(steps.restore, self._only(slot), np.int32(length), snapshot)

    @property
    def devices(self) -> int:
        """Devices of this host. Each has its part, or its copy, of every array."""
        return len(self.state.tokens.sharding.addressable_devices)

    @staticmethod
    def to_host(arrays: Any) -> Any:
        """Starts a copy to the host's pinned memory: arrays there, or None where the host has no memory for them.

        Nothing but `wait` waits for a copy: what uses an array waits on the device.
        """
        try:
            return jax.device_put(arrays, jax.tree.map(lambda x: x.sharding.with_memory_kind(PINNED), arrays))
        except jax.errors.JaxRuntimeError as e:
            if "RESOURCE_EXHAUSTED" not in str(e) or jax.process_count() > 1:
                # Several hosts must all do the same.
                raise
            log.warning("the host's pinned memory is exhausted (%s)", LIMIT_VARIABLE)
            return None

    @staticmethod
    def to_device(arrays: Any) -> Any:
        """Starts a copy of what `to_host` returned: arrays on the device, sharded as before."""
        kind = jax.local_devices()[0].default_memory().kind
        return jax.device_put(arrays, jax.tree.map(lambda x: x.sharding.with_memory_kind(kind), arrays))

    def bytes(self, tree) -> int:
        """Bytes of arrays on one device."""
        return on_device(tree)

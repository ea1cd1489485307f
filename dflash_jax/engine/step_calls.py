"""The step functions as methods: `Executables` runs them, `AheadOfTime` only compiles them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from dflash_jax.decoding import prefix_snapshot, speculative, step_functions
from dflash_jax.decoding.batch_init import Admission
from dflash_jax.decoding.prefill import MediaChunk
from dflash_jax.decoding.sampling import Logprobs
from dflash_jax.decoding.state import DecodeState, Settings, state_specs
from dflash_jax.decoding.step_functions import Report
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.drafting import Drafting
from dflash_jax.parallel.sharding import DATA

BATCH, REPLICATED = PartitionSpec(DATA), PartitionSpec()


def _with_media(slots, n, media: MediaChunk | None) -> tuple[tuple, tuple]:
    """(arguments of a prefill program, their PartitionSpecs)."""
    if media is None:
        return (slots, n), (BATCH, BATCH)
    return (slots, n, media), (BATCH, BATCH, jax.tree.map(lambda _: BATCH, media))


class StepCalls(ABC):
    """Methods that call the functions of `decoding.step_functions` on one pair of models.

    ``slots`` is int32 [data shards * b]: for each shard of the mesh's data axis, b of the shard's own slots, numbered
    from 0. Indices past a shard's last slot are padding. Methods that return a state donate the one that they are
    given: its buffers must not be used afterwards.

    Args:
        target: The model that verifies.
        drafter: The model that drafts, or None.

    Attributes:
        pair: (target, drafter).
        compile_s: Seconds of all compilations.
        last_compile_s: Seconds of the last one.
    """

    def __init__(self, target: Decoder, drafter: Drafting | None):
        self.pair = target, drafter
        self.compile_s = self.last_compile_s = 0.0

    @abstractmethod
    def call(
        self, key: tuple, function: Callable, state: DecodeState, args: tuple, specs: Callable, donate=True
    ) -> Any:
        """Calls ``function(target, drafter, state, *args)``.

        Args:
            key: Identifies the function and what is compiled into it. Shapes of the arguments are added to it.
            function: Returns (state, result) where the state is donated, else a result.
            state: The decoding state.
            args: Arrays, or trees of arrays.
            specs: ``specs()`` returns PartitionSpecs: (those of ``args``, those of the result).
            donate: Whether the state is donated.

        Returns:
            What ``function`` returns.
        """

    @abstractmethod
    def empty(self, slots: int, capacity: int, settings: Settings, pages: tuple[int, int] | None = None) -> DecodeState:
        """An `empty_state` of ``slots`` slots with ``capacity`` positions each, on the mesh."""

    @abstractmethod
    def read(self, x: jax.Array) -> np.ndarray:
        """``x`` on the host."""

    @property
    def config(self):
        """The target's `ModelConfig`."""
        return self.pair[0].config

    @property
    def data(self) -> int:
        """Shards of the mesh's data axis."""
        return self.pair[0].layout.data

    def state_specs(self, state: DecodeState):
        """PartitionSpecs of a state's arrays."""
        return state_specs(*self.pair, state)

    def verified_specs(self, drafting: bool = True):
        """PartitionSpecs of what `verify` returns."""
        target, drafter = self.pair
        return speculative.verified_specs(target, drafter if drafting else None)

    def admit(self, state: DecodeState, slots, admission: Admission) -> DecodeState:
        """Puts a new prompt into one slot."""

        def specs():
            return (BATCH, jax.tree.map(lambda _: REPLICATED, admission)), REPLICATED

        return self.call(("admit",), step_functions.admit, state, (slots, admission), specs)[0]

    def prefill(
        self, state: DecodeState, slots, n, size: int, drafting: bool = True, media: MediaChunk | None = None
    ) -> tuple[DecodeState, jax.Array]:
        """Runs a chunk of each slot's prompt.

        Args:
            state: The decoding state.
            slots: The slots that take part.
            n: int32 [slots], prompt tokens of each slot's chunk, at most ``size``.
            size: Tokens that the program takes of each slot.
            drafting: Whether the drafter's context gets the chunk too.
            media: Images and videos of the chunk.

        Returns:
            The state, and int32 [slots]: the tokens that are in the target's caches of each slot.
        """
        # Without a drafter both values of ``drafting`` are one program.
        drafting = drafting and self.pair[1] is not None
        function = partial(step_functions.prefill, size=size, drafting=drafting)
        args, specs = _with_media(slots, n, media)
        return self.call(("prefill", size, drafting), function, state, args, lambda: (specs, REPLICATED))

    def score(
        self, state: DecodeState, slots, n, size: int, top: int, media: MediaChunk | None = None
    ) -> tuple[DecodeState, Logprobs]:
        """`prefill` of the target alone, with the log-probabilities of the prompt's tokens.

        Returns:
            The state, and `Logprobs` [slots, size] of the token behind each one, with those of the ``top`` likeliest.
        """
        function = partial(step_functions.score, size=size, top=top)
        args, specs = _with_media(slots, n, media)
        return self.call(("score", size, top), function, state, args, lambda: (specs, REPLICATED))

    def decode(
        self, state: DecodeState, slots, block_sizes, rounds: int, settings: Settings
    ) -> tuple[DecodeState, Report]:
        """Runs up to ``rounds`` rounds of each slot; ``block_sizes`` int32 [slots] bounds the tokens of a round."""
        function, specs = partial(step_functions.decode, settings=settings), ((BATCH, BATCH, REPLICATED), REPLICATED)
        return self.call(("decode", settings), function, state, (slots, block_sizes, np.int32(rounds)), lambda: specs)

    def propose(self, state: DecodeState, slots, block_sizes, settings: Settings) -> jax.Array:
        """First part of a round with masks: int32 [slots, block], the last known token and the drafts behind it."""
        function, specs = partial(step_functions.propose, settings=settings), ((BATCH, BATCH), REPLICATED)
        return self.call(("propose", settings), function, state, (slots, block_sizes), lambda: specs, donate=False)

    def verify(self, state: DecodeState, slots, block_sizes, block, settings: Settings):
        """Second part of a round with masks: the target's pass over ``block``, as `finish` takes it."""
        drafting = settings.drafter is not None
        function = partial(step_functions.verify, drafting=drafting)

        def specs():
            return (BATCH, BATCH, BATCH), self.verified_specs(drafting)

        # One program for all drafters of a block size, as in `finish`.
        return self.call(("verify", drafting), function, state, (slots, block_sizes, block), specs, donate=False)

    def finish(self, state: DecodeState, slots, block_sizes, block, mask, verified, settings: Settings):
        """Third part of a round with masks: draws tokens and commits them.

        Args:
            state: The decoding state.
            slots: The slots that take part.
            block_sizes: int32 [slots].
            block: int32 [slots, block], as verified.
            mask: Packed bits of allowed tokens, uint32 [slots, block, ceil(V / 32)].
            verified: What `verify` returned.
            settings: What is compiled in.

        Returns:
            The state and a `Report`.
        """
        compiled_in = {"aligned": settings.aligned, "drafting": settings.drafter is not None}
        function = partial(step_functions.finish, **compiled_in)

        def specs():
            return (BATCH, BATCH, BATCH, BATCH, self.verified_specs(compiled_in["drafting"])), REPLICATED

        key = ("finish", *compiled_in.values())
        return self.call(key, function, state, (slots, block_sizes, block, mask, verified), specs)

    def set_tables(self, state: DecodeState, table, windowed) -> DecodeState:
        """Gives the slots pages, int32 [slots, n] each: of caches that keep all positions, and of those with a window.

        Pages are numbered within their data shard.
        """
        specs = (BATCH, BATCH), REPLICATED
        return self.call(("set_tables",), step_functions.set_tables, state, (table, windowed), lambda: specs)[0]

    def save(self, state: DecodeState, pages, is_windowed: bool):
        """The contents of pages, int32 [data shards * m], each of one shard and past the end of all others."""
        function = partial(step_functions.save, is_windowed=is_windowed)

        def specs():
            return (BATCH,), prefix_snapshot.segment_specs(self.state_specs(state), is_windowed)

        return self.call(("save", is_windowed), function, state, (pages,), specs, donate=False)

    def load(self, state: DecodeState, pages, segment, is_windowed: bool) -> DecodeState:
        """Writes a segment of `save` into pages, given as there."""
        function = partial(step_functions.load, is_windowed=is_windowed)

        def specs():
            return (BATCH, prefix_snapshot.segment_specs(self.state_specs(state), is_windowed)), REPLICATED

        return self.call(("load", is_windowed), function, state, (pages, segment), specs)[0]

    def snapshot(self, state: DecodeState, slots):
        """What one slot has beside pages, for `restore`."""

        def specs():
            return (BATCH,), prefix_snapshot.snapshot_specs(self.state_specs(state))

        return self.call(("snapshot",), step_functions.snapshot, state, (slots,), specs, donate=False)

    def restore(self, state: DecodeState, slots, length: int, snapshot) -> DecodeState:
        """Sets one slot to a `snapshot` that was taken behind ``length`` tokens."""

        def specs():
            return (BATCH, REPLICATED, prefix_snapshot.snapshot_specs(self.state_specs(state))), REPLICATED

        return self.call(("restore",), step_functions.restore, state, (slots, np.int32(length), snapshot), specs)[0]

    def next_token_scores(self, state: DecodeState) -> tuple:
        """For the token behind each slot's last: raw logits, and the values whose maximum is drawn, both [B, V]."""
        return self.call(
            ("next_token_scores",), step_functions.next_token_scores, state, (), lambda: ((), REPLICATED), donate=False
        )

"""The programs that requests may need, as the calls that need them, in the order in which they help."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflash_jax.decoding.prefill import MediaChunk
from dflash_jax.engine.config import COPIED_PAGES, NO_DRAFTER, Speculation
from dflash_jax.engine.dispatch import Dispatch
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.media import empty_chunk
from dflash_jax.engine.model_runner import ModelRunner
from dflash_jax.engine.prefill import scored_size
from dflash_jax.engine.request import Request
from dflash_jax.engine.scheduler import UNKNOWN_ROUNDS
from dflash_jax.sampling_params import SamplingParams

# Parameters of the requests that fill the slots.
FILLER = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=0)


@dataclass(frozen=True)
class Task:
    """Calls that need one program, or a few.

    Attributes:
        label: The program's name in the log.
        names: What may run once the programs are compiled, as `ModelRunner.allow` takes it.
        call: Makes the calls: a result for `ModelRunner.wait`.
    """

    label: str
    names: tuple[tuple, ...]
    call: Callable[[ModelRunner], object]


class AllAllowed:
    """`RoundMasks` that allow every token.

    Args:
        words: uint32 words of a mask.
    """

    def __init__(self, words: int):
        self._words = words

    def ask(self, blocks: np.ndarray) -> np.ndarray:
        """See `RoundMasks`."""
        self._shape = blocks.shape
        return blocks

    def answer(self, is_verified: Callable[[], bool]) -> tuple[np.ndarray, np.ndarray]:
        """See `RoundMasks`."""
        return np.full((*self._shape, self._words), 0xFFFFFFFF, np.uint32), np.zeros(self._shape[0], bool)


class Tasks:
    """The tasks of an engine.

    Args:
        engine: The engine.

    Attributes:
        first: Tasks whose programs answer any request without masks and without log-probabilities of the prompt.
        others: The other tasks, by how much they help.
        decode_programs: (batch size, speculation) of every decode program.
        has_drafter: Whether programs draft.
    """

    def __init__(self, engine: Engine):
        self._engine, self._runner, self._config = engine, engine.runner, engine.config
        self.has_drafter = self._runner.programs.pair[1] is not None
        self.decode_programs = [
            (n, each) for n in self._runner.batch_sizes() for each in self._config.speculations if each.may_run(n)
        ]
        self._filler = Request([1] * min(4, self._runner.capacity - 1), FILLER)
        self._filler.params = replace(FILLER, max_tokens=self._runner.capacity - len(self._filler.prompt))
        plain, smallest = self._config.speculations[0], self._config.prefill_sizes[0]
        self.first = [
            self._admit(),
            Task("tables", (), _set_tables),
            self._prefill(1, smallest, plain != NO_DRAFTER),
            self._decode(1, plain),
        ]
        by_label: dict[str, Task] = {}
        for task in (*self.first, *self._by_use()):
            by_label.setdefault(task.label, task)
        self.others = list(by_label.values())[len(self.first) :]

    def _by_use(self) -> Iterator[Task]:
        """All tasks; some twice."""
        config, sizes = self._config, self._config.prefill_sizes
        kinds = (True, False) if self.has_drafter else (True,)
        largest, *smaller = sorted(self._runner.batch_sizes(), reverse=True)
        favoured = self._engine.policy.favoured_draft(1)
        # The next turn of a conversation.
        if self._engine.prefix_cache.budget or not self._engine.config.recomputes_exactly:
            yield from self._copies()
        # One sequence, drafted.
        yield self._prefill(1, sizes[0], True)
        yield self._decode(1, favoured)
        # Requests that wait for their own programs.
        masked_sizes = self._runner.masked_batch_sizes() if config.masks else []
        for speculation in config.masked_speculations if masked_sizes else ():
            yield self._masked(masked_sizes[0], speculation)
        if config.media:
            for size in sizes:
                for drafting in kinds:
                    yield self._media(size, drafting)
        yield self._score()
        if config.media:
            yield self._score(has_media=True)
        for size in sizes:
            for drafting in kinds:
                yield self._prefill(1, size, drafting)
        # As many sequences as there are slots, in one batch.
        yield self._decode(largest, self.decode_programs[0][1])
        yield self._decode(largest, favoured)
        if masked_sizes:
            yield self._masked(masked_sizes[-1], Speculation(1))
        # Everything else makes rounds shorter.
        for batch, speculation in self.decode_programs:
            if batch == 1 and not speculation.is_alone:
                yield self._decode(batch, speculation)
        for size in sizes:
            for drafting in kinds:
                yield self._prefill(self._engine.prefill_batches(size)[-1], size, drafting)
        for n in (largest, *smaller):
            for batch, speculation in self.decode_programs:
                if batch == n:
                    yield self._decode(batch, speculation)
        for n in masked_sizes:
            for speculation in config.masked_speculations:
                yield self._masked(n, speculation)

    def start(self, runner: ModelRunner, slots: Sequence[int], drafting: bool = True):
        """Puts a prompt into each of the slots: a result for `ModelRunner.wait`."""
        size, tokens = self._config.prefill_sizes[0], len(self._filler.prompt) - 1
        for slot in slots:
            runner.admit(slot, self._filler)
            ticket = runner.prefill([slot], [tokens], size, 1, drafting)
        return ticket

    def dispatch(self, batch: int, speculation: Speculation, rounds: int) -> Dispatch:
        """A dispatch that fills a batch size."""
        slots = self._runner.first_slots(batch)
        return Dispatch(slots, (speculation.block_size,) * len(slots), rounds, speculation, batch)

    def _admit(self) -> Task:
        return Task("admit", (), lambda runner: runner.admit(0, self._filler))

    def _prefill(self, batch: int, size: int, drafting: bool) -> Task:
        def call(runner: ModelRunner):
            runner.admit(0, self._filler)
            return runner.prefill([0], [1], size, batch, drafting)

        # Without a drafter, both kinds are one program.
        kinds = (drafting,) if self.has_drafter else (True, False)
        label = f"prefill {batch} x {size}{'' if drafting else ' without drafter'}"
        return Task(label, tuple(("prefill", batch, size, kind) for kind in kinds), call)

    def _media(self, size: int, drafting: bool) -> Task:
        def call(runner: ModelRunner):
            runner.admit(0, self._filler)
            return runner.prefill([0], [1], size, 1, drafting, MediaChunk(*empty_chunk(size, *runner.embedding)))

        kinds = (drafting,) if self.has_drafter else (True, False)
        label = f"media {size}{'' if drafting else ' without drafter'}"
        return Task(label, tuple(("media", size, kind) for kind in kinds), call)

    def _decode(self, batch: int, speculation: Speculation) -> Task:
        def call(runner: ModelRunner):
            dispatch = self.dispatch(batch, speculation, UNKNOWN_ROUNDS[speculation.block_size > 1])
            self.start(runner, dispatch.slots, speculation != NO_DRAFTER)
            return runner.decode(dispatch)

        return Task(f"decode {batch} x {speculation}", (("decode", batch, speculation),), call)

    def _masked(self, batch: int, speculation: Speculation) -> Task:
        def call(runner: ModelRunner):
            dispatch = self.dispatch(batch, speculation, 1)
            self.start(runner, dispatch.slots)
            return runner.decode_masked(dispatch, AllAllowed(runner.mask_words))

        return Task(f"masked {batch} x {speculation}", (("masked", batch, speculation),), call)

    def _score(self, has_media: bool = False) -> Task:
        size = scored_size(self._config.prefill_sizes)

        def call(runner: ModelRunner):
            runner.admit(0, self._filler)
            return runner.score(0, 1, size, MediaChunk(*empty_chunk(size, *runner.embedding)) if has_media else None)

        kind = "media score" if has_media else "score"
        return Task(f"{kind} {size}", ((kind,),), call)

    def _copies(self) -> Iterator[Task]:
        """What the prefix cache needs, and requests that are copied out of their slots."""
        kinds = [kind for kind, count in enumerate(self._runner.pages) if count]
        for kind in kinds:
            for size in COPIED_PAGES:

                def call(runner: ModelRunner, size: int = size, is_windowed: bool = bool(kind)) -> None:
                    # As many of one page as there are: the contents stay as they are.
                    pages = [0] * size
                    runner.load(pages, runner.save(pages, is_windowed), is_windowed)

                label = f"copies of {size} pages{' with a window' if kind else ''}"
                yield Task(label, (), call)
        yield Task("restore", (("prefix",),), _restore)


def _restore(runner: ModelRunner) -> None:
    runner.restore(0, 1, runner.snapshot(0))


def _set_tables(runner: ModelRunner) -> None:
    width = -(-runner.capacity // runner.page_size)
    runner.set_tables(*(np.full((runner.slots, width), count, np.int32) for count in runner.pages))

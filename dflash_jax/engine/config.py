"""Configuration of an engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

# Tokens that a round may yield; "auto" leaves the choice to the engine.
BlockSize = int | Literal["auto"]


class Speculation(NamedTuple):
    """How a round speculates, which is compiled in.

    Attributes:
        block_size: Tokens that it may yield: the draft length + 1; 1 is plain decoding.
        drafter: Which drafter proposes, of several. None leaves all drafters out: their contexts then start anew where
            drafting resumes.
        is_alone: Whether the other drafters are left out in the same way.
    """

    block_size: int
    drafter: int | None = 0
    is_alone: bool = False

    def __str__(self) -> str:
        """The block size, 0 without drafters; a colon and the drafter, where that is not the first; whether alone."""
        if self.drafter is None:
            return "0"
        return f"{self.block_size}{f':{self.drafter}' if self.drafter else ''}{' alone' if self.is_alone else ''}"

    @property
    def with_all(self) -> "Speculation":
        """The same with the contexts of all drafters."""
        return Speculation(1) if self.block_size == 1 else self._replace(is_alone=False)

    def may_run(self, batch_size: int) -> bool:
        """Whether there are rounds of this kind for ``batch_size`` sequences of a data shard.

        Drafters draft alone for one sequence only: a context takes the largest share of its rounds, and for all batch
        sizes there would be twice as many programs.
        """
        return batch_size == 1 or not self.is_alone


# Plain decoding that does not update the drafters' contexts.
NO_DRAFTER = Speculation(1, None)
# What known tokens are computed again with.
RECOMPUTE = Speculation(1)


def speculations_of(*block_sizes: Sequence[int]) -> tuple[Speculation, ...]:
    """The speculations of drafters.

    Args:
        block_sizes: Of each drafter, its block sizes; 1 is implied.

    Returns:
        Plain decoding without drafters; of several drafters, what each does alone; then with all of them plain decoding
        and drafting, ascending by block size.
    """
    drafting = [Speculation(size, i) for i, sizes in enumerate(block_sizes) for size in sizes if size > 1]
    drafters = {each.drafter for each in drafting}
    alone = [each._replace(is_alone=True) for each in (*(Speculation(1, i) for i in drafters), *drafting)]
    if not drafting:
        return (Speculation(1),)
    return (NO_DRAFTER, *(sorted(alone) if len(drafters) > 1 else ()), Speculation(1), *sorted(drafting))


# Batch sizes of a data shard that programs are compiled for.
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PREFILL_SIZES = (16, 64, 256, 1024)
# On an accelerator a chunk of 1,024 tokens takes hardly longer than one of 16, since both read every expert. Chunks are
# larger where a kernel keeps attention's scores out of memory, and where so many TPUs divide the heads that their
# scores are small. In the reproducible mode a TPU computes every expert for every token.
LARGEST_PREFILL, TPUS_OF_LARGE_PREFILL = 4096, 4
# Share of a chunk that may be padding. A CPU takes as long for padding as for a token; an accelerator is bound by
# reading weights, and runs one half-empty chunk faster than two full ones.
PADDING = {"cpu": 0.25}
# The least and the largest distance of cuts of a prompt, at which prefixes are cached, on a CPU; the least one on an
# accelerator. There a chunk takes as long as reading the weights, whatever it holds: cuts are as far apart as a chunk
# is large, but for the reproducible mode, in which the next turn of a conversation goes on from the last of them.
CPU_CUT_SPACING, MIN_CUT_DISTANCE = (16, 256), 512
# Limits of a program for several short prompts: prompts, and tokens in all, padding included, by platform.
PREFILL_BATCH, PREFILL_BATCH_TOKENS = 8, {"gpu": 2048, "tpu": 2048}
# Temporaries of a prefill program, bytes for each feature of a token (compiled for B200 and H100: 87 of
# Qwen3.6-35B-A3B, 58 of Qwen3.5-27B; 236 of Qwen3.5-397B-A17B over eight devices, which fits into the unused share).
PREFILL_BYTES = 120

# Pages of a data shard that programs save and load at once, ascending, and how many of the largest such groups may be
# on their way between device and host before the next one waits for the first.
COPIED_PAGES, IN_FLIGHT = (1, 8), 4


def copied_pages(count: int) -> int:
    """Pages that a copy of ``count`` pages takes on the host, where its last group is padded."""
    small, large = COPIED_PAGES
    rest = count % large
    return count - rest + (large if rest > small else rest)


def has_large_chunks(platform: str, kernels: bool, devices: int) -> bool:
    """Whether the largest chunk of a prompt is `LARGEST_PREFILL`.

    Args:
        platform: "cpu", "gpu" or "tpu".
        kernels: Whether programs have Triton kernels.
        devices: Devices that divide the heads, 1 in the reproducible mode.
    """
    return kernels or (platform == "tpu" and devices >= TPUS_OF_LARGE_PREFILL)


def largest_prefill(is_large: bool) -> int:
    """Tokens of the largest chunk, by `has_large_chunks`."""
    return LARGEST_PREFILL if is_large else PREFILL_SIZES[-1]


def prefill_config(
    platform: str, is_large: bool, isolated: bool = False, max_num_batched_tokens: int | None = None
) -> dict:
    """Fields of `EngineConfig` that suit a platform.

    Args:
        platform: "cpu", "gpu" or "tpu".
        is_large: As `has_large_chunks` says.
        isolated: Whether the arithmetic of a prompt must not depend on other prompts.
        max_num_batched_tokens: As in `EngineConfig`; None takes the default.

    Returns:
        Keyword arguments of `EngineConfig`.
    """
    limit = max_num_batched_tokens or max(2048, largest_prefill(is_large))
    sizes = sorted({*PREFILL_SIZES, largest_prefill(is_large)})
    farthest = PREFILL_SIZES[-1] if isolated else largest_prefill(is_large)
    return {
        "prefill_sizes": tuple(s for s in sizes if s <= max(limit, sizes[0])),
        "prefill_padding": PADDING.get(platform, 0.5),
        "cut_spacing": CPU_CUT_SPACING if platform == "cpu" else (MIN_CUT_DISTANCE, farthest),
        "prefill_batch_tokens": 0 if isolated else min(PREFILL_BATCH_TOKENS.get(platform, 0), limit),
        "max_num_batched_tokens": limit,
    }


@dataclass(frozen=True)
class EngineConfig:
    """How an engine is set up.

    Attributes:
        speculations: What rounds are compiled for, as `speculations_of` orders them.
        drafters: The drafters' names; by default their numbers.
        prefill_sizes: Tokens of a prompt that a prefill program takes, ascending.
        prefill_padding: The largest share of a prefill program that may be padding.
        prefill_batch_tokens: Tokens of a program that takes several prompts of a data shard, at most.
        max_num_batched_tokens: Tokens of a step: those of prefill and of one decoding round.
        max_queue: Requests that may wait; None for any number. Each client has room for its share.
        trusts_priority: Whether priorities order the requests of all clients, not only those of one.
        recomputes_exactly: Whether tokens that are computed again have the same bits or differ in ties only. Then a
            request that gives up its slot for another client computes its tokens again. Otherwise it is copied out,
            unless it is still prefilled.
        max_decode_batch: Sequences decoded in one dispatch; 1 makes each sequence's arithmetic independent of the
            others, None is all.
        prefix_bytes: Bytes of the prefix cache on one device; 0 for none.
        prefix_host_bytes: Bytes of its second tier, in this host's pinned memory; 0 for none.
        swap_bytes: Bytes of one device's pages and snapshots that may wait on the host, of requests that are swapped
            out; None for as many as the host has memory for. Beyond them, requests whose pages are needed compute
            their tokens again, and none gives up its slot.
        markers: Token ids that open a message.
        cut_spacing: The least and the largest distance of a prompt's cuts, as `prefix_cache.cut_points` takes it.
        adaptive: Whether the block size "auto" is chosen by measured cost and acceptance; otherwise it is the largest.
        masks: Whether requests may have masks, so that warm-up compiles their programs.
        media: Whether requests may have images and videos; likewise.
    """

    speculations: tuple[Speculation, ...] = (Speculation(1),)
    drafters: tuple[str, ...] = ()
    prefill_sizes: tuple[int, ...] = PREFILL_SIZES
    prefill_padding: float = 0.5
    prefill_batch_tokens: int = 0
    max_num_batched_tokens: int = 2048
    max_queue: int | None = None
    trusts_priority: bool = True
    recomputes_exactly: bool = False
    max_decode_batch: int | None = None
    prefix_bytes: int = 0
    prefix_host_bytes: int = 0
    swap_bytes: int | None = None
    markers: frozenset[int] = frozenset()
    cut_spacing: tuple[int, int] = (512, 1024)
    adaptive: bool = True
    masks: bool = False
    media: bool = False

    @property
    def largest_block(self) -> int:
        """The largest block size; 1 without a drafter."""
        return self.speculations[-1].block_size

    def drafter_name(self, drafter: int) -> str:
        """The name of a drafter, which `Speculation` numbers."""
        return self.drafters[drafter] if self.drafters else str(drafter)

    @property
    def draft_places(self) -> dict[str, int]:
        """The largest draft length of each drafter, by name."""
        # Ascending by block size: the last one of a drafter counts.
        largest = {each.drafter: each.block_size - 1 for each in self.speculations if each.block_size > 1}
        return {self.drafter_name(i): places for i, places in largest.items() if i is not None}

    @property
    def masked_speculations(self) -> tuple[Speculation, ...]:
        """The speculations of rounds with masks: plain decoding, and each drafter's largest block."""
        largest = {each.drafter: each for each in self.speculations if each.block_size > 1 and not each.is_alone}
        return (Speculation(1), *sorted(largest.values()))

    def prefill_batch(self, size: int) -> int:
        """Prompts of a data shard that a program of ``size`` tokens takes at most."""
        return max(1, min(PREFILL_BATCH, self.prefill_batch_tokens // size))

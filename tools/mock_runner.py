"""A model runner without a model, whose device is a clock: it shows the costs and decisions of the engine's host."""

import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import numpy as np

from dflash_jax import LLM
from dflash_jax.decoding.sampling import NOTHING_ALLOWED
from dflash_jax.decoding.state import Settings
from dflash_jax.engine.config import EngineConfig, prefill_config, speculations_of
from dflash_jax.engine.dispatch import Dispatch, Outcome, RoundMasks
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.model_runner import ModelRunner
from dflash_jax.engine.request import Request
from dflash_jax.frontend.tokenizer import Tokenizer

# Tokens after which texts repeat: a prime, so that no block size divides it.
PERIOD = 4093
# The part of a round with masks that proposes.
PROPOSING = 0.2
# The environment's variable with a `MockDevice` as JSON.
VARIABLE = "DFLASH_MOCK_DEVICE"
# The block size of the drafter that the device has.
BLOCK = 8
# What begins a turn of a scripted model, ends one, and is its shortest thought.
USER, ASSISTANT, END, END_OF_THOUGHT = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>", "</think>\n\n"
THOUGHT = f"Well.\n{END_OF_THOUGHT}"
# What it says of earlier turns in a summary.
TURNS = re.compile(r"Turns: (\d+)\.")
# Seconds between two samples of the figures.
SAMPLE_S = 0.02


class Clock(Protocol):
    """The time of a mock device, in seconds."""

    def now(self) -> float:
        """The time."""
        ...

    def wait_until(self, moment: float) -> None:
        """Returns when it is ``moment``."""

    def has_come(self, moment: float) -> bool:
        """Whether it is ``moment`` yet."""
        ...


class WallClock:
    """The machine's own clock."""

    now = staticmethod(time.perf_counter)

    def wait_until(self, moment: float) -> None:
        """See `Clock`."""
        if (left := moment - self.now()) > 0:
            time.sleep(left)

    def has_come(self, moment: float) -> bool:
        """See `Clock`."""
        return self.now() >= moment


class FakeClock:
    """A clock that advances only while the host waits."""

    def __init__(self):
        self._now = 0.0

    def now(self) -> float:
        """See `Clock`."""
        return self._now

    def wait_until(self, moment: float) -> None:
        """See `Clock`."""
        self._now = max(self._now, moment)

    def has_come(self, moment: float) -> bool:
        """See `Clock`: a host that asks has waited."""
        self.wait_until(moment)
        return True


class Rounds(NamedTuple):
    """What the rounds of a dispatch bring to one slot, as in `Outcome`."""

    tokens: list[int]
    yielded: list[int]
    done: bool


@dataclass(eq=False)
class HostArrays:
    """A copy on the host of what it wraps."""

    arrays: object


class MockCopies:
    """Copies that wrap what they copy, and take no time. The host has memory if ``has_memory``."""

    devices, has_memory = 1, True

    def to_host(self, arrays: Any) -> HostArrays | None:
        """See `ModelRunner.to_host`."""
        assert arrays is not None
        return HostArrays(arrays) if self.has_memory else None

    def to_device(self, arrays: Any) -> Any:
        """See `ModelRunner.to_device`."""
        assert isinstance(arrays, HostArrays)
        return arrays.arrays


@dataclass
class Row:
    """A slot: the seed of its text, its numbers of tokens so far and at most, the tokens that end it, and its text.

    A text of its own takes the place of its seed's.
    """

    seed: int = 0
    known: int = 0
    most: int = 0
    stops: Sequence[int] = ()
    text: Sequence[int] = ()


class MockRunner(MockCopies, ModelRunner):
    """A `ModelRunner` whose device takes fixed times and computes nothing.

    Work is queued as on a device: it starts when what was started before it is done, or at once.

    Args:
        slots: Slots, a multiple of ``shards``.
        capacity: Positions of each slot.
        shards: Data shards.
        pages: Pages of a data shard, in caches that keep all positions and in those with a window; None: of the former
            as many as all slots need, and as many for prefixes.
        clock: The device's time.
        round_s: Seconds of a round.
        tokens: Tokens that a round yields where its block has as many.
        prefill_s: Seconds of a token of a prefill chunk, padding included.
        vocabulary: Token ids that texts have.
        vocab_size: Tokens that masks are over.
        answer: Gives the whole text of a request by its prompt; None: texts are those of seeds.

    Attributes:
        gaps: Seconds that the device had nothing to do, before each piece of work that was started.
    """

    page_bytes: tuple[int, int] = (40, 40)
    window: tuple[int, int] = (0, 0)
    pages: tuple[int, int] = (0, 0)
    snapshot_bytes = 10

    def __init__(
        self,
        slots: int,
        capacity: int = 4096,
        *,
        shards: int = 1,
        pages: tuple[int, int] | None = None,
        clock: Clock | None = None,
        round_s: float = 0.006,
        tokens: int = 4,
        prefill_s: float = 5e-6,
        vocabulary: Sequence[int] = range(1, 64),
        vocab_size: int = 64,
        answer: Callable[[Sequence[int]], Sequence[int]] | None = None,
    ):
        self.time, self.round_s, self.prefill_s, self.tokens = clock or WallClock(), round_s, prefill_s, tokens
        self.gaps: list[float] = []
        self._answer = answer
        self._busy_until = 0.0
        self._text = Random(0).choices(vocabulary, k=PERIOD) * 2
        programs: Any = SimpleNamespace(
            data=shards,
            pair=(None, "drafter"),
            compile_s=0.0,
            last_compile_s=0.0,
            config=SimpleNamespace(vocab_size=vocab_size),
        )
        self.capacity = capacity
        self.pages = pages or (2 * slots // shards * -(-capacity // self.page_size), 0)
        super().__init__(programs, slots, capacity, Settings())

    def _clear(self) -> None:
        self.rows = [Row() for _ in range(self.slots)]
        self._proposed = None

    @property
    def clock(self) -> float:
        """See `ModelRunner`."""
        return self.time.now()

    def text(self, seed: int, first: int, count: int) -> list[int]:
        """Tokens of the text of a seed, from number ``first`` on; at most `PERIOD`."""
        first = (31 * seed + first) % PERIOD
        return self._text[first : first + count]

    def following(self, row: Row, count: int) -> list[int]:
        """The next tokens of a slot; after its own text, that text's last token."""
        if not row.text:
            return self.text(row.seed, row.known, count)
        found = list(row.text[row.known : row.known + count])
        return found + [row.text[-1]] * (count - len(found))

    def work(self, seconds: float) -> float:
        """Queues work on the device, and returns the time at which it is done, which is its ticket."""
        now = self.clock
        self.gaps.append(max(0.0, now - self._busy_until))
        self._busy_until = max(self._busy_until, now) + seconds
        return self._busy_until

    def wait(self, ticket: Any) -> None:
        """See `ModelRunner.wait`."""
        # Copies take no time.
        if isinstance(ticket, float):
            self.time.wait_until(ticket)

    def is_compiled(self, batch_size, speculation) -> bool:
        """See `ModelRunner.is_compiled`."""
        return True

    def set_tables(self, table: np.ndarray, windowed: np.ndarray) -> None:
        """See `ModelRunner.set_tables`."""

    def admit(self, slot: int, request: Request) -> None:
        """See `ModelRunner.admit`."""
        self._proposed = None
        text, most = self._answer(request.prompt) if self._answer else (), request.need - len(request.prompt)
        most = min(most, len(text)) if text else most
        self.rows[slot] = Row(request.params.seed or 0, request.resumed, most, request.stops, text)

    def prefill(self, slots, tokens, size, batch=1, drafting=True, media=None) -> Any:
        """See `ModelRunner.prefill`."""
        self._proposed = None
        return self.work(self.prefill_s * size * batch)

    def decode(self, dispatch: Dispatch) -> Any:
        """See `ModelRunner.decode`."""
        self._proposed = None
        slots = zip(dispatch.slots, dispatch.block_sizes, strict=True)
        return self._started([self.rounds(slot, size, dispatch.rounds) for slot, size in slots])

    def _started(self, results: list[Rounds]) -> tuple[float, Outcome]:
        tokens, yielded, done = (list(values) for values in zip(*results, strict=True))
        return self.work(self.round_s * max(map(len, yielded))), Outcome(tokens, yielded, done, None)

    def rounds(self, slot: int, block_size: int, rounds: int) -> Rounds:
        """Runs rounds of a slot."""
        row, size = self.rows[slot], min(block_size, self.tokens)
        count = min(size * rounds, row.most - row.known)
        tokens = self.following(row, count)
        row.known += count
        full, rest = divmod(count, size)
        return Rounds(tokens, [size] * full + [rest] * (rest > 0), row.known == row.most)

    def decode_masked(self, dispatch: Dispatch, masks: RoundMasks) -> Any:
        """See `ModelRunner.decode_masked`."""
        proposed, self._proposed = self._proposed, None
        ticket = proposed[1] if proposed is not None and proposed[0] == dispatch else self.propose(dispatch)
        blocks = masks.ask(self.read_blocks(ticket))
        verified = self.work((1 - PROPOSING) * self.round_s)
        allowed, is_late = masks.answer(lambda: self.time.has_come(verified))
        tokens, yielded, done = (list(v) for v in zip(*self.drawn(dispatch, blocks, allowed, is_late), strict=True))
        return self.work(0.0), Outcome(tokens, yielded, done, None)

    def propose(self, dispatch: Dispatch) -> Any:
        """See `ModelRunner.propose`."""
        return self.work(PROPOSING * self.round_s), dispatch

    def read_blocks(self, ticket: Any) -> np.ndarray:
        """See `ModelRunner.read_blocks`: the drafts are the slots' texts."""
        done, dispatch = ticket
        self.wait(done)
        size, rows = dispatch.speculation.block_size, [self.rows[slot] for slot in dispatch.slots]
        # The last known token is not looked at.
        return np.array([[0, *self.following(row, size - 1)] for row in rows], np.int32)

    def drawn(self, dispatch: Dispatch, blocks: np.ndarray, allowed: np.ndarray, is_late: np.ndarray) -> list[Rounds]:
        """Draws the tokens of a round: the drafts that are allowed, and after them the text's own next token.

        Where that is not allowed, the lowest allowed token takes its place.

        Args:
            dispatch: The round.
            blocks: int32 [slots, block], what was verified.
            allowed: Packed masks uint32 [slots, block, words].
            is_late: bool [slots], slots that skip the round.
        """
        rows = [self.rows[slot] for slot in dispatch.slots]
        own = np.array([self.following(row, blocks.shape[1]) for row in rows], blocks.dtype)
        words = np.take_along_axis(allowed, own[..., None] >> 5, 2)[..., 0]
        is_allowed = words >> (own & 31).astype(np.uint32) & 1 == 1
        # After the last draft, the text's own token is a draft of itself.
        is_good = is_allowed & (np.concatenate([blocks[:, 1:], own[:, -1:]], 1) == own)
        results = []
        for i, (row, block_size, masks, late) in enumerate(
            zip(rows, dispatch.block_sizes, allowed, is_late, strict=True)
        ):
            most = min(block_size, self.tokens, row.most - row.known)
            if late or not most:
                results.append(Rounds([], [], not most))
                continue
            count = most if is_good[i, :most].all() else int(is_good[i].argmin())
            tokens = own[i, :count].tolist()
            if count < most and is_allowed[i, count]:
                tokens.append(int(own[i, count]))
            elif count < most:
                bits = np.unpackbits(masks[count].view(np.uint8), bitorder="little")
                tokens.append(int(bits.argmax()) if bits.any() else NOTHING_ALLOWED)
            row.known += len(tokens)
            done = row.known >= row.most or tokens[-1] in (NOTHING_ALLOWED, *row.stops)
            results.append(Rounds(tokens, [len(tokens)], done))
        return results

    def read(self, ticket: Any, logprobs: bool) -> Outcome:
        """See `ModelRunner.read`; there are no log-probabilities."""
        until, outcome = ticket
        self.wait(until)
        return outcome

    def save(self, pages: Sequence[int], is_windowed: bool) -> list:
        """See `ModelRunner.save`."""
        return list(pages)

    def load(self, pages: Sequence[int], segments: list, is_windowed: bool) -> None:
        """See `ModelRunner.load`."""

    def snapshot(self, slot: int) -> Any:
        """See `ModelRunner.snapshot`."""
        return slot

    def restore(self, slot: int, length: int, snapshot: Any) -> None:
        """See `ModelRunner.restore`."""

    def bytes(self, tree: Any) -> int:
        """See `ModelRunner.bytes`: of a snapshot."""
        return self.snapshot_bytes


@dataclass(frozen=True)
class MockDevice:
    """A device and its engine.

    Attributes:
        slots: Slots.
        positions: Positions of each.
        round_s: Seconds of a round.
        tokens: Tokens that a round yields of each sequence.
        figures: The file of `Figures`; "" for none.
        prefill_s: Seconds of a token of a prefill chunk.
        scripts: Its texts, as `Scripts` has them; none for texts of a seed.
    """

    slots: int
    positions: int
    round_s: float
    tokens: int
    figures: str = ""
    prefill_s: float = 5e-6
    scripts: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a server with this device."""
        return os.environ | {VARIABLE: json.dumps(asdict(self))}

    def engine(self, llm: LLM) -> Engine:
        """An engine of the model's vocabulary on this device."""
        assert llm.tokenizer is not None
        runner = MockRunner(
            self.slots,
            self.positions,
            round_s=self.round_s,
            tokens=self.tokens,
            prefill_s=self.prefill_s,
            vocabulary=printable(llm),
            vocab_size=llm.config.vocab_size,
            answer=Scripts(llm.tokenizer, self.scripts).answer if self.scripts else None,
        )
        options = {"max_queue": 1024, "prefix_bytes": runner.pages[0] * runner.page_bytes[0] // 2, "masks": True}
        return Engine(runner, EngineConfig(speculations_of((BLOCK,)), **prefill_config("gpu", True), **options))


class Scripts:
    """A model whose text is given for each turn of a session.

    A script has a name, which stands in the first message of the user, and the texts of its turns, each as the model
    writes it after ``<think>``, with the number of its thoughts in the prompt for ``{thoughts}``. The turn of a request
    is the number of the assistant's before it; in a script without calls, of its texts in the prompt. Where a script
    has calls, a request without tools, or for a summary, is answered by the name and that number, which counts from
    there on.

    Args:
        tokenizer: The model's tokenizer.
        scripts: Texts by the names of their scripts.
    """

    def __init__(self, tokenizer: Tokenizer, scripts: Mapping[str, Sequence[str]]):
        self._tokenizer, self._scripts = tokenizer, scripts

    def answer(self, prompt: Sequence[int]) -> list[int]:
        """The text of a request by its prompt."""
        before = self._tokenizer.decode(prompt, skip_special_tokens=False)
        text = self.text(before)
        if before.endswith(END_OF_THOUGHT):
            text = text.partition(END_OF_THOUGHT)[2]
        return self._tokenizer.encode(f"{text}{END}")

    def text(self, before: str) -> str:
        """The text that follows another; without a script, or after its last turn, it says so."""
        name = next((name for name in self._scripts if name in before), None)
        if name is None:
            return f"{THOUGHT}There is no script for this."
        turns, talk = self._scripts[name], before[before.index(name) :]
        if "<tool_call>" in turns[0]:
            turn, asked = talk.count(ASSISTANT) - 1 + int((TURNS.findall(talk) or ["0"])[-1]), talk.rpartition(USER)[2]
            if "<tools>" not in before or ("summary" in asked and not TURNS.search(asked)):
                return f"{THOUGHT}{name} Turns: {turn}."
        else:
            turn = sum(text.partition(END_OF_THOUGHT)[2] in talk for text in turns)
        if turn >= len(turns):
            return f"{THOUGHT}The script has no turn {turn + 1}."
        thoughts = re.findall(r"<think>\n[^<]+\n</think>", talk)
        return turns[turn].replace("{thoughts}", str(len(thoughts)))


def printable(llm: LLM) -> list[int]:
    """Tokens of printable ASCII, without tags such as ``<think>``."""
    assert llm.tokenizer is not None
    texts = {token: llm.tokenizer.token_bytes(token) for token in range(llm.config.vocab_size)}
    return [token for token, text in texts.items() if re.fullmatch(rb"[ -;=-~]+", text)]


class Figures(threading.Thread):
    """Samples what an engine's thread and its device do.

    Attributes:
        samples: (``time.perf_counter()``, processor seconds of the engine's thread, host seconds, dispatches, gaps) of
            each moment, totals but for the first.
    """

    def __init__(self, engine: Engine):
        super().__init__(name="figures", daemon=True)
        assert isinstance(engine.runner, MockRunner)
        self._engine, self._gaps, self._has_ended = engine, engine.runner.gaps, threading.Event()
        self.samples: list[tuple[float, float, float, int, int]] = []

    def run(self) -> None:
        """The thread."""
        statistics = self._engine.statistics
        while not self._has_ended.wait(SAMPLE_S):
            thread = next((thread for thread in threading.enumerate() if thread.name == "engine"), None)
            if thread is None or thread.ident is None:
                continue
            clock = time.pthread_getcpuclockid(thread.ident)
            dispatches, gaps = sum(statistics.dispatches.values()), len(self._gaps)
            self.samples.append((time.perf_counter(), time.clock_gettime(clock), statistics.host_s, dispatches, gaps))

    def stop(self) -> dict[str, Any]:
        """Ends the thread: the samples, and all gaps of the device in seconds."""
        self._has_ended.set()
        self.join()
        return {"samples": self.samples, "gaps": self._gaps}

"""Measures a round's parts, each in a loop on the device, beside the least time of their bytes and operations."""

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.decoding import speculative
from dflash_jax.decoding.state import PLAIN_SETTINGS, Settings, put_slots, take_slots
from dflash_jax.engine import steps
from dflash_jax.engine.ahead_of_time import AheadOfTime
from dflash_jax.engine.config import PREFILL_SIZES, has_large_chunks, largest_prefill
from dflash_jax.engine.executables import Executables
from dflash_jax.engine.memory import pages_of_slots
from dflash_jax.engine.model_runner import ModelRunner
from dflash_jax.engine.pages import Pages
from dflash_jax.engine.steps import BATCH, Programs, Specs, Step
from dflash_jax.errors import EngineError
from dflash_jax.models import moe as moe_layer
from dflash_jax.models.config import MoeSpec
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.layers import with_backend
from dflash_jax.ops import moe
from dflash_jax.ops.backend import Backend
from dflash_jax.ops.kernels.cpu import calls as cpu
from dflash_jax.parallel.devices import Device
from dflash_jax.parallel.sharding import DATA, spec
from dflash_jax.planner import measure_slot, weigh
from tools.decode.pair import ROOM, Pair, Point

ROUNDS = 16


def measured_bandwidth(size: int = 2**31, passes: int = 16) -> float:
    """Bytes per second of a large array on one device, over and over in one program.

    The array is read and written, or read only, whichever is faster.
    """
    size, passes = (size, passes) if jax.default_backend() != "cpu" else (2**28, 4)

    def write(x):
        return jax.lax.fori_loop(0, passes, lambda _, x: x + 1, x)

    def read(x):
        # Each pass needs the sum of the one before.
        total = jax.lax.fori_loop(0, passes, lambda _, total: jnp.sum(x * (1 + total)), jnp.float32(0))
        return x.at[0].set(total)

    bandwidths = []
    for function, moved in ((write, 2 * size), (read, size)):
        run = jax.jit(function, donate_argnums=0)
        x, times = jax.block_until_ready(run(jnp.zeros((size // 4,), jnp.float32))), []
        for _ in range(5):
            began = time.perf_counter()
            x = jax.block_until_ready(run(x))
            times.append(time.perf_counter() - began)
        bandwidths.append(passes * moved / min(times))
        del x
    return max(bandwidths)


def choices(target, drafter, state, slots, block):
    """Experts that each layer's tokens are sent to, int [layers, tokens, k]."""
    seen, route, in_cpp = [], moe.route, cpu.mixture

    def spy(logits, *args):
        weights, chosen = route(logits, *args)
        seen.append(chosen)
        return weights, chosen

    def spy_on_cpp(x, logits, live, gate_up, down, top, *args):
        # The kernel chooses experts itself.
        seen.append(jax.lax.top_k(logits, top)[1])
        return in_cpp(x, logits, live, gate_up, down, top, *args)

    moe.route, cpu.mixture = spy, spy_on_cpp
    try:
        # Choices inside a kernel cannot be seen.
        plain = with_backend(target, Backend.xla(target.backend.platform, target.backend.card))
        speculative.verify(plain, take_slots(plain.backend, state, slots), block)
    finally:
        moe.route, cpu.mixture = route, in_cpp
    return jnp.stack(seen)


@contextmanager
def forced(tokens: int, experts: int | None) -> Iterator[None]:
    """Sends batches of ``tokens`` to ``experts`` experts of each layer, one after another, evenly, inside the context.

    Batches of other sizes keep the router's choice. The router's own products are computed as before.
    """
    mixture = moe_layer.mixture

    def mixture_of_forced(backend, x, logits, *args, experts_per_token, **options):
        if logits.shape[0] == tokens:
            count = logits.shape[1]
            choice = np.arange(tokens * experts_per_token).reshape(tokens, -1) % experts
            wanted = np.zeros(logits.shape, np.float32)
            np.put_along_axis(wanted, choice * count // experts, 1e4, axis=1)
            logits = jnp.clip(logits, -1, 1) + wanted
        return mixture(backend, x, logits, *args, experts_per_token=experts_per_token, **options)

    if experts is not None:
        moe_layer.mixture = mixture_of_forced
    try:
        yield
    finally:
        moe_layer.mixture = mixture


def repeated(part):
    """``part(target, drafter, state, moved, ...)``, ROUNDS times in one program, as a round's loop runs it.

    A program for a single part would include the time of its start. ``moved`` counts, so that no call equals the one
    before.
    """

    def run(target, drafter, state, *args, **static):
        def again(_, moved):
            output = jax.lax.optimization_barrier(part(target, drafter, state, moved, *args, **static))
            first = jax.tree.leaves(output)[0].reshape(-1)[0]
            return moved + 1 + jnp.isnan(first.astype(jnp.float32)).astype(jnp.int32)

        return jax.lax.fori_loop(0, ROUNDS, again, jnp.int32(0))

    return run


def verify(target, drafter, state, moved, slots, block_sizes, block, *, drafting: bool):
    """The target's pass over a block."""
    block = (block + moved) % target.config.vocab_size
    return steps.verify.function(target, drafter, state, slots, block_sizes, block, drafting=drafting)


def draft(target, drafter, state, moved, slots, block_sizes, *, settings: Settings):
    """The drafter's pass."""
    state = replace(state, tokens=(state.tokens + moved) % target.config.vocab_size)
    return steps.propose.function(target, drafter, state, slots, block_sizes, settings=settings)


def head(target, drafter, state, moved, hidden):
    """The target's head over hidden states."""
    return target.logits(hidden + moved.astype(hidden.dtype))


def draw(target, drafter, state, moved, slots, block, logits):
    """The part of a round between logits and caches: draws, accepts, and writes tokens into the rows."""
    after = speculative.decide(take_slots(target.backend, state, slots), block, logits + moved)
    return after.tokens, after.length, after.done


def commits(target, drafter, state, slots, block_sizes, block, verified, *, drafting: bool):
    """Writes verified blocks into the caches ROUNDS times; returns (state, lengths)."""
    before = replace(take_slots(target.backend, state, slots), block_sizes=block_sizes)
    logits, features, record = verified
    after, drafter = speculative.decide(before, block, logits), drafter if drafting else None

    def again(_, caches):
        state_before = replace(before, target=caches[0], draft=caches[1])
        committed = speculative.commit(target, drafter, state_before, after, block, features, record)
        return committed.target, committed.draft

    caches, draft = jax.lax.fori_loop(0, ROUNDS, again, (before.target, before.draft))
    done = replace(before, target=caches, draft=draft, block_sizes=state.block_sizes[slots])
    return put_slots(state, done), steps.gather_batch(after.length)


class Bench:
    """Measures points of one pair.

    Attributes:
        programs: The executables.
        pair: The pair.
        bandwidth: Bytes per second of the device.
        device: What its maker states; None where that is not known.
        layout: The mesh.
        weights: The target's weights.
        drafts: The drafter's weights.
        head: Bytes and parameters of the target's head that each of the drafter's passes reads: none with a vocabulary
            of its own.
        slot: Bytes of a slot.
    """

    def __init__(self, pair: Pair, bandwidth: float, device: Device | None = None):
        self.programs, self.pair = Executables(pair.target, pair.drafter), pair
        self.bandwidth, self.device = bandwidth, device
        self.layout = pair.target.layout
        self.weights = weigh(pair.target, self.layout)
        self.drafts = weigh(pair.drafter, self.layout)
        reads_head = pair.drafter.vocabulary is None
        self.head = (self.weights.head, self.weights.head_parameters) if reads_head else (0.0, 0.0)
        self.slot = measure_slot(pair.target, pair.drafter, self.layout)

    def state(self, point: Point):
        """Rows after ``context`` tokens, as far as time and memory can tell."""
        capacity = -(-(point.context + ROOM) // 256) * 256
        counts = pages_of_slots(self.programs, point.batch, capacity, PLAIN_SETTINGS, capacity - point.context)
        runner = ModelRunner(self.programs, point.batch, capacity, PLAIN_SETTINGS, counts)
        pages = Pages(runner, lambda slot, kinds: False)
        for slot in range(point.batch):
            assert pages.cover(slot, point.context, capacity)
        pages.send()
        state = runner.state
        # Rows with the same tokens would all go to the same experts.
        tokens = np.random.default_rng(0).integers(self.programs.config.vocab_size, size=state.tokens.shape)
        state = replace(state, tokens=jax.device_put(tokens.astype(state.tokens.dtype), state.tokens.sharding))
        return self.filled(state, prompt_length=point.context, limit=capacity, block_sizes=point.block_size)

    def calls(self, point: Point, state, rounds: int = ROUNDS, programs: Programs | None = None) -> dict:
        """Functions that run a part of a round, by name: state → (array to wait for, next state)."""
        p, slots = programs or self.programs, np.arange(point.batch, dtype=np.int32)
        block_sizes, settings = np.full(point.batch, point.block_size, np.int32), Settings(point.block_size)
        plain = replace(settings, drafter=None)
        # The block that a round verifies: each row's last token, and the drafts.
        block = np.asarray(state.tokens)[:, point.context - 1 :][:, : point.block_size].copy()
        if point.block_size > 1:
            block = p.read(p.run(steps.propose, state, slots, block_sizes, settings=settings))
        vocab, hidden = p.config.vocab_size, p.config.hidden_size
        wide = spec(DATA, None, self.pair.target.vocab)
        logits = jnp.zeros((point.batch, point.block_size, vocab), jnp.float32)
        states = jnp.zeros((point.batch, point.block_size, hidden), self.pair.target.dtype)

        def decode(s):
            compiled_in = plain if point.block_size == 1 else settings
            arguments = slots, block_sizes, np.int32(rounds), None, None
            after, report = p.run(steps.decode, s, *arguments, settings=compiled_in)
            return report.count, after

        def prefill(s):
            # As if nothing of the prompt had been read.
            size = prefilled(point, self.pair.target)
            n, drafting = np.full(1, size, np.int32), point.block_size > 1
            after, num_cached = p.run(steps.prefill, s, slots[:1], n, None, size=size, drafting=drafting)
            return num_cached, after

        def apart(step: Step, *args, **static):
            return lambda s: (p.run(step, s, *args, **static), s)

        def part(function, args, specs: tuple[Specs, ...], **static):
            return apart(Step(f"{function.__name__} apart", repeated(function), specs, changes=False), *args, **static)

        drafting = point.block_size > 1
        verified = self.verified(state, (slots, block_sizes, block), drafting)

        def commit(s):
            # The arguments of `finish` without the mask.
            step = Step("commits", commits, (BATCH, BATCH, BATCH, steps.finish.args[-1]))
            after, lengths = p.run(step, s, slots, block_sizes, block, verified, drafting=drafting)
            return lengths, after

        parts = {
            "round": decode,
            "verify": part(verify, (slots, block_sizes, block), (BATCH, BATCH, BATCH), drafting=drafting),
            "head": part(head, (states,), (BATCH,)),
            "draw": part(draw, (slots, block, logits), (BATCH, BATCH, wide)),
            "commit": commit,
            "prefill": prefill,
        }
        if drafting:
            parts["draft"] = part(draft, (slots, block_sizes), (BATCH, BATCH), settings=settings)
        if any(isinstance(layer.ffn, MoeSpec) for layer in p.config.layers):
            # Replicated over everything but the rows: what each token chose.
            chosen = Step("choices", choices, (BATCH, BATCH), spec(None, DATA), changes=False)
            parts["choices"] = apart(chosen, slots, block)
        return parts

    def verified(self, state, args: tuple, drafting: bool):
        """Arrays in the shapes that `verify` returns, in which all drafts are wrong."""
        p, static = self.programs, {"drafting": drafting}
        specs = p.specs(steps.verify, state, static)[1]
        lowered = p.lower(steps.verify, state, *args, **static)

        def zeros(shape, spec):
            return jnp.zeros(shape.shape, shape.dtype, device=jax.sharding.NamedSharding(p.mesh, spec))

        return jax.tree.map(zeros, lowered.out_info, jax.tree.broadcast(specs, lowered.out_info))

    def measure(self, point: Point) -> dict:
        """The figures of a point."""
        # Rows are divided among the data shards, each of which routes its own.
        with forced(-(-point.batch // self.layout.data) * point.block_size, point.experts):
            row = self._measure(point)
        if point.experts is not None and self.layout.data == 1 and row["experts_touched"] != point.experts:
            raise EngineError(f"{row['experts_touched']} experts were touched, not {point.experts}")
        return row

    def _measure(self, point: Point) -> dict:
        state = self.state(point)
        began = time.perf_counter()
        with AheadOfTime(self.programs, threads=8) as ahead:
            for call in self.calls(point, state, programs=ahead).values():
                call(state)
        calls = self.calls(point, state)
        figures = {"compile_s": round(time.perf_counter() - began, 1)}
        touched = None
        if "choices" in calls:
            touched = self.experts_touched(calls.pop("choices"), state)
            figures["experts_touched"] = round(touched, 1)
        for name, call in calls.items():
            seconds, state = timed(call, state, partial(self.rewound, point=point, name=name))
            figures[f"{name}_ms"] = round(1e3 * seconds / (1 if name == "prefill" else ROUNDS), 4)
        figures |= self.floors(point, touched, figures["round_ms"])
        figures["prefill_tokens_per_s"] = round(1e3 * prefilled(point, self.pair.target) / figures["prefill_ms"])
        return figures | self.compiled(point)

    @staticmethod
    def experts_touched(choices, state) -> float:
        """Experts that the tokens of a layer are sent to: the mean over layers."""
        return float(np.mean([len(np.unique(layer)) for layer in np.asarray(choices(state)[0])]))

    def rewound(self, state, point: Point, name: str):
        """The state before a part; prefill has a prompt ahead of it."""
        num_cached = point.context - 1 - (prefilled(point, self.pair.target) if name == "prefill" else 0)
        return self.filled(state, length=point.context, num_cached=num_cached, rounds=0, done=False)

    @staticmethod
    def filled(state, **values):
        """The state with some of its arrays filled with one value each."""

        def like(x, value):
            return jax.device_put(np.full(x.shape, value, x.dtype), x.sharding)

        return replace(state, **{name: like(getattr(state, name), value) for name, value in values.items()})

    def work(self, point: Point, touched: float | None) -> list[tuple[float, float]]:
        """(bytes, operations) of what a round must do on each device.

        Those are the products with the weights (of experts, those that are touched), keys and values of the context,
        and the recurrent state, read and written. Operations of attention and of the delta rule are left out.
        """
        rows, block_size = math.ceil(point.batch / self.layout.data), point.block_size
        work = self.weights.work(rows * block_size, touched)
        cached, both = (self.slot.read(point.context, each) for each in (False, True))
        if block_size > 1:
            passes, tokens = self.pair.drafter.config.passes(block_size)
            size, parameters = self.head
            draft = [*self.drafts.work(rows * tokens), (size, 2 * parameters * rows * (block_size - 1) / passes)]
            draft.append((rows * (both - cached), 0.0))
            work += [(passes * moved, passes * operations) for moved, operations in draft]
        return [*work, (rows * (2 * self.slot.state + cached), 0.0)]

    def floors(self, point: Point, touched: float | None, round_ms: float) -> dict:
        """The least times of a round, and the shares of them that a measured one reaches.

        By bytes at the bandwidth of this run and at the data sheet's; and, with arithmetic, where each product takes
        the longer of its bytes and of its operations at the data sheet's rate.
        """
        work = self.work(point, touched)
        moved = sum(size for size, _ in work)
        figures = {"gb_a_round": round(moved / 1e9, 4), "floor_ms": round(1e3 * moved / self.bandwidth, 4)}
        figures["of_floor"] = round(figures["floor_ms"] / round_ms, 3)
        if self.device is not None and self.device.bandwidth and self.device.operations:
            figures["of_data_sheet"] = round(1e3 * moved / self.device.bandwidth / round_ms, 3)
            rate = self.device.operations
            longer_ms = 1e3 * sum(max(size / self.bandwidth, operations / rate) for size, operations in work)
            figures["floor_with_arithmetic_ms"] = round(longer_ms, 4)
            figures["of_floor_with_arithmetic"] = round(longer_ms / round_ms, 3)
        return figures

    def compiled(self, point: Point) -> dict:
        """Temporaries of the loop's program, and the peak memory of the point's programs."""
        keys = [k for k in self.programs.compiled if k[0] == "decode" and k[1].block_size == point.block_size]
        program = self.programs.compiled[keys[-1]]
        temporaries = program.memory_analysis().temp_size_in_bytes
        memory = [program.memory_analysis() for program in self.programs.compiled.values()]
        peaks = [
            m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
            for m in memory
        ]
        return {"temporaries_gb": round(temporaries / 1e9, 3), "peak_gb": round(max(peaks) / 1e9, 2)}


def timed(call, state, rewound) -> tuple:
    """(median seconds of a call, the state after it): each waited for, after one that warms up."""
    times = []
    while len(times) < 6 and sum(times) < 20:
        state = jax.block_until_ready(rewound(state))
        began = time.perf_counter()
        result, state = call(state)
        jax.block_until_ready(result)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:] or times), state


def prefilled(point: Point, target: Decoder) -> int:
    """Prompt tokens that the prefill of a point reads: the largest chunk that its context has room for."""
    backend, layout = target.backend, target.layout
    is_large = has_large_chunks(backend.platform, backend.has_triton, layout.tensor * layout.expert)
    return max(size for size in (*PREFILL_SIZES, largest_prefill(is_large)) if size < point.context)

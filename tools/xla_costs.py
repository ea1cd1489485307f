"""What a program for a TPU moves, multiplies and sends, counted from XLA's text of it: arithmetic, not a measurement.

The optimised program's text names for each array its tiles, with their padding, and its memory: only memory 0 is HBM.

- A loop counts as often as it runs. Its trips follow from its condition. Where they depend on data, a loop of
  `dflash_jax/ops/attention.py` runs over the context that is asked for, one of `ops/moe.py` as if each row had an
  expert of its own, and any other one counts once. If the program's outermost loop is of the last kind, it is that of
  the rounds, and what is outside of it runs once a dispatch.
- Of a conditional in `dflash_jax/decoding/sampling.py` the branch of greedy requests without filters, penalties and
  log-probabilities counts (the first), of any other the branch that takes longest.
- An operation reads its operands in HBM and writes its results there; of an operand that it only slices or gathers, the
  slices; of an array that it updates in place, the update. Copies between memories count where they start.
- Operations are the products' (dots and convolutions), also inside of fusions.
- A Pallas kernel moves the blocks of its grid (`tools/mosaic.py`).
- A collective takes its hops and its bytes on the links of the slice. Work between its start and its end hides it. Of
  several under way work hides one after another, in the order of their starts; a collective hides none.
"""

import base64
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import ceil, inf, prod
from typing import Any

from dflash_jax.parallel.devices import DEVICES, Device
from tools.mosaic import FULL, HIGH, kernel
from tools.xla_text import ENTRY, Computation, Instruction, Shape, computations

# Operations that move nothing, and the ends of those that count where they start.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
FREE |= {"opt-barrier", "add-dependency", "domain"}
# Custom calls that only name an array anew.
FREE_CALLS = ("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "Sharding", "SPMDFullToShardShape")
SAME = ("bitcast", "copy", "reshape", "convert", "transpose")
SLICES, UPDATES = ("dynamic-slice", "slice", "gather"), ("dynamic-update-slice", "scatter")
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all", "ragged-all-to-all")
# Of this module and `tools/mosaic.py`: raised where they count otherwise, so that figures of an older one can be told.
REVISION = 2
SAMPLING, ATTENTION, EXPERTS = "decoding/sampling.py", "ops/attention.py", "ops/moe.py"


# "Each hop over an ICI link has some intrinsic overhead regardless of the data volume. This is typically around 1us":
# "How to Scale Your Model" (jax-ml.github.io/scaling-book/sharding). An assumption for every chip.
HOP = 1e-6


@dataclass(frozen=True)
class Slice:
    """TPUs and what is between them.

    Attributes:
        device: One of them.
        shape: Their number along each axis. The two halves of a v7 are an axis of their own, with a link as all others.
    """

    device: Device
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str) -> "Slice":
        """A slice by its name, such as v6e:2x4."""
        chip, _, shape = name.partition(":")
        halves = (2,) if chip == "tpu7x" else ()
        return cls(DEVICES[chip], (*(int(n) for n in shape.split("x")), *halves))

    def rate(self, kind: str) -> float:
        """Operations a second of products whose factors are both of this kind; "" where they are of two."""
        fast = {"s8": self.device.int8, "u8": self.device.int8}.get(kind, self.device.fp8 if kind[:2] == "f8" else 0.0)
        return fast or self.device.operations

    def box(self, count: int) -> list[int]:
        """The part of the slice with ``count`` devices and the fewest hops: where a mesh's axis is taken to be."""
        boxes: list[tuple[int, ...]] = [()]
        for n in self.shape:
            boxes = [(*box, d) for box in boxes for d in range(1, n + 1) if n % d == 0]
        best = min((box for box in boxes if prod(box) == count), key=sum, default=(count,))
        return [d for d in best if d > 1]

    def collective(self, opcode: str, devices: int, size: int) -> float:
        """Seconds of a collective of ``size`` bytes: of the reduced array, or of all that is gathered.

        It goes along one axis after another. An axis is a line whose ends are not joined, as in slices smaller than a
        pod's axis: d - 1 hops. An all-reduce goes along each axis twice. Of each device two links send at a time (of a
        pair of devices, one).
        """
        if devices == 1:
            return 0.0
        box = self.box(devices)
        phases = 2 if opcode == "all-reduce" else 1
        hops, moved = phases * sum(d - 1 for d in box), phases * size * (devices - 1) / devices
        if opcode == "collective-permute":
            hops, moved = 1, size
        return hops * HOP + moved / (self.device.link * (1 if box == [2] else 2))


@dataclass(frozen=True)
class Cost:
    """What one operation takes each time that it runs.

    Attributes:
        name: XLA's name.
        opcode: What it is.
        source: The innermost lines of Python that it comes from.
        result: Its results in XLA's notation.
        times: How often it runs.
        read, written: Bytes of HBM.
        operations: Those of its products.
        seconds: The longer of both, by the chip's figures.
        cycles: The compiler's own estimate; None where it has none.
        sent: Bytes of a collective.
        collective: Seconds of a collective.
        hidden: Those of it that other operations hide.
        is_once: Whether it runs once a dispatch, not in each round.
    """

    name: str
    opcode: str
    source: str
    result: str
    times: int = 1
    read: int = 0
    written: int = 0
    operations: float = 0.0
    seconds: float = 0.0
    cycles: int | None = None
    sent: int = 0
    collective: float = 0.0
    hidden: float = 0.0
    is_once: bool = False

    @property
    def total(self) -> float:
        """Seconds of all its runs that nothing hides."""
        return self.times * (self.seconds + self.collective - self.hidden)


class Program:
    """An optimised program, read from its text.

    Args:
        hlo: XLA's text.
        slice_: Where it runs.
        context: Positions in the caches.
        pools: Positions that a slot has in a pool of keys or values, by the number of the pool's elements.
    """

    def __init__(self, hlo: str, slice_: Slice, context: int = 0, pools: dict[int, int] | None = None) -> None:
        self.slice, self.context, self.pools = slice_, context, pools or {}
        self.computations = computations(hlo)
        self.callers: dict[str, tuple[Computation, Instruction]] = {}
        self.loops: dict[str, int] = {}
        for computation in self.computations.values():
            for x in computation.instructions.values():
                if x.opcode == "while":
                    self.callers[x.attribute(r"body=%?([\w.-]+)")] = computation, x
        self.frames = _frames(hlo)

    def files(self, x: Instruction) -> list[str]:
        """Lines of Python that an instruction comes from, as file:line, innermost first."""
        frame = x.attribute(r"stack_frame_id=(\d+)")
        return self.frames.get(int(frame), []) if frame else []

    def _is_from(self, x: Instruction, *files: str) -> bool:
        """Whether the innermost line that an instruction comes from is in one of these files."""
        return any(file in line for line in self.files(x)[:1] for file in files)

    @cached_property
    def costs(self) -> list[Cost]:
        """The operations that run."""
        entry = self.computations[ENTRY]
        loops = [
            x for x in entry.instructions.values() if x.opcode == "while" and not self._is_from(x, ATTENTION, EXPERTS)
        ]
        self._rounds = next((x for x in loops if self._known_trips(entry, x) is None), None)
        self._is_once, self._passes = self._rounds is not None, 1
        return list(self._costs(entry, 1))

    def figures(self) -> dict[str, Any]:
        """Sums over all operations; those that run once a dispatch apart, where there are rounds.

        ``compiler_s`` is the compiler's own estimate where it has one of an operation, and our arithmetic for others.
        """
        loops = {"loops": self.loops} if self.costs else {}
        once = [c for c in self.costs if c.is_once]
        figures = self._sums([c for c in self.costs if not c.is_once]) | loops
        return figures | ({"once": self._sums(once)} if once else {})

    def _sums(self, costs: list[Cost]) -> dict[str, Any]:
        def total(value: Callable[[Cost], float]) -> float:
            return sum(c.times * value(c) for c in costs)

        clock = self.slice.device.clock
        return {
            "predicted_s": sum(c.total for c in costs),
            "compiler_s": total(lambda c: c.seconds if c.cycles is None else c.cycles / clock)
            + total(lambda c: c.collective - c.hidden),
            "read": int(total(lambda c: c.read)),
            "written": int(total(lambda c: c.written)),
            "operations": total(lambda c: c.operations),
            "runs": int(total(lambda c: c.read + c.written + c.sent > 0 or c.cycles is not None)),
            "collectives": int(total(lambda c: c.sent > 0)),
            "sent": int(total(lambda c: c.sent)),
            "collective_s": total(lambda c: c.collective),
            "hidden_s": total(lambda c: c.hidden),
        }

    # Computations

    def _costs(self, computation: Computation, times: int) -> Iterator[Cost]:
        """The costs of a computation that runs ``times`` times; a collective's after what hides it."""
        pending: dict[str, Cost] = {}
        for x in computation.instructions.values():
            if x.opcode.endswith(("-update", "-done")) and (started := pending.pop(x.operands[0], None)):
                if x.opcode.endswith("-done"):
                    yield started
                else:
                    pending[x.name] = started
            work = 0.0
            for cost in self._cost(computation, x, times):
                if cost.collective and x.opcode.endswith("-start"):
                    pending[x.name] = cost
                else:
                    work += cost.times * (cost.seconds - cost.hidden) / max(times, 1)
                    yield cost
            for name, cost in pending.items():
                # What starts without operands waits for them: an update brings them.
                if computation.instructions[name].operands:
                    hidden = min(work, cost.collective - cost.hidden)
                    pending[name], work = replace(cost, hidden=cost.hidden + hidden), work - hidden
        yield from (replace(cost, hidden=0.0) for cost in pending.values())

    def _cost(self, computation: Computation, x: Instruction, times: int) -> Iterator[Cost]:
        if x.opcode == "while":
            trips = self._trips(computation, x, times)
            self._is_once = self._is_once and x is not self._rounds
            # An expert's weights are read once over all trips, and once more where one trip ends and the next begins.
            passes, self._passes = self._passes, trips if self._is_from(x, EXPERTS) else self._passes
            for part in ("body", "condition"):
                yield from self._costs(self.computations[x.attribute(rf"{part}=%?([\w.-]+)")], times * trips)
            self._is_once, self._passes = self._is_once or x is self._rounds, passes
        elif x.opcode == "conditional":
            branches = [list(self._costs(self.computations[name], times)) for name in x.branches]
            yield from (
                branches[0]
                if self._is_from(x, SAMPLING)
                else max(branches, key=lambda costs: sum(c.total for c in costs))
            )
        elif x.opcode in ("call", "async-start", "call-start"):
            yield from self._costs(self.computations[x.called], times)
        elif x.opcode not in FREE and not x.opcode.endswith(("-done", "-update")) and not self._is_free(x):
            yield self._operation(computation, x, times)

    def _operation(self, computation: Computation, x: Instruction, times: int) -> Cost:
        read, written, products = self._bytes(computation, x)
        operations = sum(n for _, n in products)
        seconds = max(
            (read + written) / self.slice.device.bandwidth, sum(n / self.slice.rate(kind) for kind, n in products)
        )
        cycles = x.attribute(r'"estimated_cycles":"(\d+)"')
        cost = Cost(
            x.name,
            x.opcode,
            " < ".join(file.rpartition("/")[2] for file in self.files(x)[:2]),
            ", ".join(f"{s.kind}{list(s.dims)}".replace(" ", "") for s in x.shapes[:2]),
            times,
            read,
            written,
            operations,
            seconds,
            # The largest of 64 bits stands for none.
            int(cycles) if cycles and int(cycles) < 2**62 else None,
            is_once=self._is_once,
        )
        if collective := self._collective(computation, x):
            opcode, devices, size = collective
            cost = replace(cost, sent=size, collective=self.slice.collective(opcode, devices, size))
        return cost

    def _collective(self, computation: Computation, x: Instruction) -> tuple[str, int, int] | None:
        """A collective's kind, number of devices and bytes, also of one inside of a fusion."""
        opcode = x.opcode.removesuffix("-start")
        if opcode in COLLECTIVES:
            arrays = [s for name in x.operands for s in computation.instructions[name].shapes]
            size = sum(s.bytes for s in arrays)
            devices = devices_of(x.attributes)
            return opcode, devices, size * (devices if opcode == "all-gather" else 1)
        if x.opcode == "fusion":
            inside = self.computations[x.called]
            return next(
                (found for y in inside.instructions.values() if (found := self._collective(inside, y))),
                None,
            )
        return None

    # Bytes and operations

    def _bytes(self, computation: Computation, x: Instruction) -> tuple[int, int, list[tuple[str, float]]]:
        """Bytes of HBM that an operation reads and writes, and its products as (kind of factors, operations)."""
        operands = [(i, computation.instructions[name].shapes) for i, name in enumerate(x.operands)]
        if x.opcode in ("copy-start", "slice-start", "dynamic-slice-start"):
            source = operands[0][1][0]
            result = (
                x.shapes[0]
                if x.opcode == "copy-start"
                else next(s for s in x.shapes[len(x.operands) :] if s.kind == source.kind)
            )
            return result.bytes if source.memory == 0 else 0, result.in_hbm, []
        read = sum(self._taken(computation, x, i) for i, s in operands if any(shape.in_hbm for shape in s))
        return read, sum(self._written(computation, x)), self._products(computation, x)

    def _kernel(
        self, computation: Computation, x: Instruction
    ) -> tuple[list[float], list[float], dict[str, float]] | None:
        """What `tools.mosaic.kernel` counts of a Pallas kernel; None for other operations."""
        if x.opcode != "custom-call" or not (body := x.attribute(r'"body":"([A-Za-z0-9+/=]+)"')):
            return None
        inputs = tuple(s.dims for name in x.operands for s in computation.instructions[name].shapes)
        return kernel(base64.b64decode(body), inputs, tuple(s.dims for s in x.shapes), self.context, self._passes)

    def _taken(self, computation: Computation, x: Instruction, index: int) -> int:
        """Bytes that an operation takes of an operand, in whatever memory that is."""
        whole = sum(s.bytes for s in computation.instructions[x.operands[index]].shapes)
        if x.opcode == "fusion":
            fused = self.computations[x.called]
            return int(whole * self._part(fused, fused.parameters[index].name))
        if counted := self._kernel(computation, x):
            return int(counted[0][index] * whole)
        if x.opcode in SLICES and index == 0:
            return int(whole * min(1.0, x.shapes[0].size / computation.instructions[x.operands[0]].shapes[0].size))
        return 0 if x.opcode in UPDATES and index == 0 else whole

    def _part(self, fused: Computation, name: str) -> float:
        """The part of an array that a fusion takes; more than all where a kernel in it reads it again."""
        slices, kernels, is_returned = self._uses(fused, name)
        return min(1.0, slices + is_returned) + kernels

    def _uses(self, fused: Computation, name: str) -> tuple[float, float, bool]:
        """The parts of an array that a fusion takes and that kernels in it take, and whether it returns the array.

        What is converted or laid out anew within a fusion is so where it is taken.
        """
        slices, kernels, is_returned = 0.0, 0.0, fused.instructions[name].is_root
        for user in fused.users[name]:
            index, passes = user.operands.index(name), user.opcode in SAME or self._is_free(user)
            if user.opcode == "fusion":
                inner = self.computations[user.called]
                taken, by_kernels, passes = self._uses(inner, inner.parameters[index].name)
                slices, kernels = slices + taken, kernels + by_kernels
            elif user.opcode in SLICES and index == 0:
                slices += user.shapes[0].size / fused.instructions[name].shapes[0].size
            elif counted := self._kernel(fused, user):
                kernels += counted[0][index]
            elif not passes and user.opcode != "tuple" and not (user.opcode in UPDATES and index == 0):
                slices += 1.0
            if passes:
                taken, by_kernels, returns = self._uses(fused, user.name)
                slices, kernels, is_returned = slices + taken, kernels + by_kernels, is_returned or returns
        return slices, kernels, is_returned

    def _is_free(self, x: Instruction) -> bool:
        return any(f'"{call}"' in x.attributes for call in FREE_CALLS)

    def _written(self, computation: Computation, x: Instruction) -> list[int]:
        """Bytes that an operation writes, of each of its results."""
        results = [s.in_hbm for s in x.shapes]
        # The start of a collective may return its operands before what it writes.
        if x.opcode.endswith("-start") and len(results) > len(x.operands):
            results[: len(x.operands)] = [0] * len(x.operands)
        if x.opcode == "fusion":
            fused = self.computations[x.called]
            roots = [fused.root]
            if fused.root.opcode == "tuple":
                roots = [fused.instructions[name] for name in fused.root.operands]
            if len(roots) == len(results):
                return [self._updated(fused, root, n, 0) for n, root in zip(results, roots, strict=True)]
        return [self._updated(computation, x, n, i) for i, n in enumerate(results)]

    def _updated(self, computation: Computation, x: Instruction, whole: int, index: int) -> int:
        """Bytes that an operation writes of its result of ``whole`` bytes: of an update in place the update."""
        while x.opcode == "bitcast":
            x = computation.instructions[x.operands[0]]
        if x.opcode == "fusion" and self.computations[x.called].root.opcode != "tuple":
            inner = self.computations[x.called]
            return self._updated(inner, inner.root, whole, index)
        if counted := self._kernel(computation, x):
            return int(counted[1][index] * whole)
        if x.opcode in UPDATES:
            update = computation.instructions[x.operands[1 if x.opcode == "dynamic-update-slice" else 2]]
            return min(whole, update.shapes[0].bytes)
        return whole

    def _products(self, computation: Computation, x: Instruction) -> list[tuple[str, float]]:
        if x.opcode == "fusion":
            fused = self.computations[x.called]
            return [p for y in fused.instructions.values() for p in self._products(fused, y)]
        if counted := self._kernel(computation, x):
            return [(kind.lower(), n) for kind, n in counted[2].items()]
        if x.opcode in ("dot", "convolution"):
            left, right = (computation.instructions[name].shapes[0] for name in x.operands[:2])
            kind = left.kind if left.kind == right.kind else ""
            precisions = x.attribute(r"operand_precision=\{([\w,]*)\}").split(",")
            passes = max({"highest": FULL, "high": HIGH}.get(precision, 1) for precision in precisions)
            count = _dot(x, left) if x.opcode == "dot" else _convolution(x, left, right)
            return [(kind, passes * count)]
        return []

    # Loops

    def _trips(self, computation: Computation, x: Instruction, times: int) -> int:
        if (known := self._known_trips(computation, x)) is not None:
            how = "by its condition"
        elif self._is_from(x, ATTENTION):
            piece, all_of_it = self._piece(self.computations[x.attribute(r"body=%?([\w.-]+)")])
            known, how = ceil(min(self.context, all_of_it) / piece), f"over a context of {self.context:,}"
            if piece == inf:
                known, how = 1, "takes nothing of a known pool: counted once"
        elif self._is_from(x, EXPERTS) and (rows := self._rows(self.computations[x.attribute(r"body=%?([\w.-]+)")])):
            known, how = rows, "over all rows, or as if each had an expert of its own"
        else:
            known, how = 1, "depends on data: counted once"
        place = next(iter(self.files(x)), x.name).rpartition("/")[2]
        self.loops[f"{place} ×{known} {how}"] = self.loops.get(f"{place} ×{known} {how}", 0) + times
        return known

    def _rows(self, body: Computation) -> int:
        """The most blocks of rows that a loop's body can be for; 0 where it writes none.

        The body writes a block into an array with room for one more. With a list of the blocks, each of one expert,
        they are as many as rows, or all of the list; without one, each block is after the last.
        """
        rows, lists = [(0, 1)], [s.dims[0] for s in body.parameters[0].shapes if s.kind == "s32" and s.dims[1:] == (2,)]
        for x in body.instructions.values():
            holder = body
            while x.opcode == "fusion" and self.computations[x.called].root.opcode in (
                "fusion",
                "dynamic-update-slice",
            ):
                inner = self.computations[x.called]
                holder, x = inner, inner.root
            if x.opcode == "dynamic-update-slice":
                block = holder.instructions[x.operands[1]].shapes[0]
                rows.append((x.shapes[0].dims[0] - block.dims[0], block.dims[0]))
        most, size = max(rows)
        return min(most, *lists) if lists else -(-most // size)

    def _piece(self, body: Computation) -> tuple[float, int]:
        """The positions of a slot that a loop's body takes from a pool at a time, and those that the pool has.

        The first is infinite where it takes from none.
        """
        for x in body.instructions.values():
            for i, name in enumerate(x.operands):
                array = body.instructions[name].shapes
                if x.opcode in ("fusion", *SLICES) and len(array) == 1 and array[0].size in self.pools:
                    positions = self.pools[array[0].size]
                    return positions * self._taken(body, x, i) / array[0].bytes, positions
        return inf, 0

    def _known_trips(self, computation: Computation, x: Instruction) -> int | None:
        if known := x.attribute(r'"known_trip_count":\{"n":"(\d+)"'):
            return int(known)
        condition = self.computations[x.attribute(r"condition=%?([\w.-]+)")]
        compare = condition.root
        inside, arguments = condition, compare.operands
        if compare.opcode == "fusion":
            inside = self.computations[compare.called]
            compare = inside.root
        if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
            return None
        names = compare.operands
        if inside is not condition:
            indices = [int(inside.instructions[name].attribute(r"^\((\d+)\)") or -1) for name in names]
            constants = [self._constant(inside, name) for name in names]
            names = [arguments[i] if c is None else name for i, c, name in zip(indices, constants, names, strict=True)]
        else:
            constants = [None, None]
        if constants[0] is not None or (index := self._element(condition, names[0])) is None:
            return None
        first = self._start(x, index, computation)
        last = constants[1] if constants[1] is not None else self._constant(condition, names[1])
        if last is None and (bound := self._element(condition, names[1])) is not None and self._is_kept(x, bound):
            last = self._start(x, bound, computation)
        step = self._step(x, index)
        return None if first is None or last is None or step is None else max(0, -(-(last - first) // step))

    def _constant(self, computation: Computation, name: str) -> int | None:
        x = computation.instructions[name]
        while x.opcode in SAME:
            x = computation.instructions[x.operands[0]]
        value = re.match(r"\((-?\d+)\)", x.attributes) if x.opcode == "constant" else None
        return int(value[1]) if value else None

    def _element(self, computation: Computation, name: str) -> int | None:
        """Which element of its argument a loop's part takes here."""
        x = computation.instructions[name]
        while x.opcode in SAME:
            x = computation.instructions[x.operands[0]]
        index = x.attribute(r"index=(\d+)") if x.opcode == "get-tuple-element" else ""
        return int(index) if index and computation.instructions[x.operands[0]].opcode == "parameter" else None

    def _start(self, loop: Instruction, index: int, outside: Computation) -> int | None:
        """The constant that an element of a loop's state is at the loop's first trip, whenever the loop runs."""
        argument = outside.instructions[loop.operands[0]]
        if argument.opcode != "tuple":
            return None
        value = argument.operands[index]
        if (constant := self._constant(outside, value)) is not None or outside.name not in self.callers:
            return constant
        around, caller = self.callers[outside.name]
        element = self._element(outside, value)
        if element is None or not self._is_kept(caller, element):
            return None
        return self._start(caller, element, around)

    def _is_kept(self, loop: Instruction, index: int) -> bool:
        """Whether an element of a loop's state is the same in all of its trips."""
        body = self.computations[loop.attribute(r"body=%?([\w.-]+)")]
        return body.root.opcode == "tuple" and self._element(body, body.root.operands[index]) == index

    def _step(self, loop: Instruction, index: int) -> int | None:
        """The constant that a loop adds to an element of its state in each trip."""
        body = self.computations[loop.attribute(r"body=%?([\w.-]+)")]
        x = body.instructions[body.root.operands[index]] if body.root.opcode == "tuple" else None
        while x is not None and x.opcode in SAME:
            x = body.instructions[x.operands[0]]
        if x is None or x.opcode != "add" or index not in [self._element(body, name) for name in x.operands]:
            return None
        return next((n for name in x.operands if (n := self._constant(body, name) or 0) > 0), None)


def devices_of(attributes: str) -> int:
    """The devices of each group of a collective."""
    if mesh := re.search(r"replica_groups=(?:mesh)?\[([^\]]*)\](?: ?\{([^}]*)\})", attributes):
        sizes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        return prod(sizes[name] for name in re.findall(r"'([^']+)'", mesh[2]))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(iota[1])
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(listed[1].split(","))
    return 2 if "source_target_pairs" in attributes else 1


def _frames(hlo: str) -> dict[int, list[str]]:
    """Lines of Python by stack frame, as file:line, innermost first."""
    names = dict(re.findall(r'^(\d+) "(.*)"$', hlo.partition("FileNames")[2].partition("FunctionNames")[0], re.M))
    located = hlo.partition("FileLocations")[2].partition("StackFrames")[0]
    places = {
        place: f"{names.get(file, '')}:{line}"
        for place, file, line in re.findall(r"^(\d+) \{file_name_id=(\d+).*? line=(\d+)", located, re.M)
    }
    stack = hlo.partition("StackFrames")[2].partition("\n\n")[0]
    # A frame's parent is written as its number and one; one is none.
    above = {
        int(frame): (places.get(place, ""), int(parent) - 1)
        for frame, place, parent in re.findall(r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)", stack, re.M)
    }
    frames = {}
    for frame in above:
        lines, at = [], frame
        while at in above and len(lines) < len(above):
            lines.append(above[at][0])
            at = above[at][1]
        frames[frame] = lines
    return frames


def _dot(x: Instruction, left: Shape) -> float:
    contracted = [int(n) for n in x.attribute(r"lhs_contracting_dims=\{([\d,]*)\}").split(",") if n]
    return 2.0 * x.shapes[0].size * prod(left.dims[i] for i in contracted)


def _convolution(x: Instruction, left: Shape, right: Shape) -> float:
    """Operations of a convolution, without those of padding and of dilation's holes."""
    labels = re.match(r"(\w+)_(\w+)->(\w+)", x.attribute(r"dim_labels=([\w>-]+)"))
    assert labels is not None, x.attributes
    size_of = {
        side: dict(zip(names, dims, strict=True))
        for side, names, dims in zip("lro", labels.groups(), (left.dims, right.dims, x.shapes[0].dims), strict=True)
    }
    window = dict(re.findall(r"(\w+)=([\w\-x]+)", x.attribute(r"window=\{([^}]*)\}")))
    # Groups have divided these already: of features the kernel's inputs, of the batch that of the output.
    total = 2.0 * size_of["o"]["b"] * size_of["o"]["f"] * size_of["r"]["i"]
    axes = [c for c in labels[1] if c.isdigit()]
    for i, axis in enumerate(sorted(axes)):

        def number(name: str, default: int, i: int = i) -> int:
            return int(window[name].split("x")[i]) if name in window else default

        low = int(window["pad"].split("x")[i].split("_")[0]) if "pad" in window else 0
        total *= _positions(
            size_of["l"][axis],
            size_of["r"][axis],
            size_of["o"][axis],
            number("stride", 1),
            low,
            number("lhs_dilate", 1),
            number("rhs_dilate", 1),
        )
    return total


@cache
def _positions(left: int, right: int, out: int, stride: int, low: int, left_step: int, right_step: int) -> int:
    """Pairs of an output and a kernel's element along an axis that meet an element of the input."""
    count = 0
    for k in range(right):
        shift = k * right_step - low
        if left_step == 1:
            # 0 <= o * stride + shift < left
            first = max(0, -(shift // stride))
            last = min(out - 1, (left - 1 - shift) // stride)
            count += max(0, last - first + 1)
        else:
            at = (o * stride + shift for o in range(out))
            count += sum(0 <= n < (left - 1) * left_step + 1 and n % left_step == 0 for n in at)
    return count


def costliest(program: Program, count: int) -> str:
    """A table of what takes longest by either time; operations of one line with the same results are one."""
    groups: dict[tuple[str, str, str, str], list[Cost]] = defaultdict(list)
    clock = program.slice.device.clock
    for cost in program.costs:
        once = "once a dispatch" if cost.is_once else ""
        groups[once, cost.opcode, cost.source, cost.result].append(cost)
    titles = ("µs", 9), ("runs", 6), ("read MB", 9), ("written", 9), ("GFLOP", 9), ("compiler µs", 11)
    lines = [" ".join(f"{title:>{width}}" for title, width in titles) + "  operation, from, results"]

    def longest(group: list[Cost]) -> float:
        return sum(max(c.total, c.times * (c.cycles or 0) / clock) for c in group)

    for key, group in sorted(groups.items(), key=lambda item: -longest(item[1]))[:count]:
        figures = [
            sum(c.times * value(c) for c in group)
            for value in (lambda c: c.read / 1e6, lambda c: c.written / 1e6, lambda c: c.operations / 1e9)
        ]
        estimated = [c.times * c.cycles / clock for c in group if c.cycles is not None]
        lines.append(
            f"{1e6 * sum(c.total for c in group):9.1f} {sum(c.times for c in group):6} "
            + " ".join(f"{n:9.2f}" for n in figures)
            + f" {1e6 * sum(estimated):11.1f}" * bool(estimated)
            + " " * 12 * (not estimated)
            + "  "
            + ", ".join(filter(None, key))
        )
    return "\n".join(lines)

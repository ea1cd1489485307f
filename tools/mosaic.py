"""What a Pallas kernel for a TPU moves and multiplies, counted from its module, which XLA does not see into.

The module is in XLA's text. It has the grid, a function of each operand's block indices, and the body. All of their
whole numbers are computed here, point by point of the grid.

- A block is not moved again where the same block follows.
- Copies that the body starts count with what they copy.
- A number that a kernel reads from memory is not known. Where a loop, a branch or a bound depends on one, it is the
  context.
- Blocks whose indices are read from memory, such as experts or pages, differ from one another, but there are no more of
  them than the array has, nor is one moved twice: the lists that grouped products and paged attention read are sorted.
- A grid's bound that is read from memory is the length of the list of indices, or the rows and their tiles where these
  are fewer: an expert without rows is not visited.
- Passes over rows in the order of their experts read each expert once, and one more at each boundary between passes.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import islice, pairwise, product
from math import prod
from typing import Any

from jax.extend.mlir import ir
from jax.interpreters import mlir
from jaxlib.mosaic.python import tpu

MOST_POINTS = 10_000
DYNAMIC = -(2**63)
BITS = re.compile(r"\D+(\d+)")
# The matrix units take bfloat16: products of it that one of float32 is, at full precision and at the next.
FULL, HIGH = 6, 3
PASSES = {"fp32": FULL, "bf16x3": HIGH}

# A whole number, an expression of numbers that are read from memory (a tuple), or None for everything else.
Value = Any


def _quotient(a: int, b: int) -> int:
    """The quotient towards zero, as in C."""
    return (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1) if b else 0


SCALARS: dict[str, Callable[..., int]] = {
    "addi": lambda a, b: a + b,
    "subi": lambda a, b: a - b,
    "muli": lambda a, b: a * b,
    "divsi": _quotient,
    "divui": _quotient,
    "floordivsi": lambda a, b: a // b if b else 0,
    "ceildivsi": lambda a, b: -(-a // b) if b else 0,
    "remsi": lambda a, b: a - _quotient(a, b) * b,
    "remui": lambda a, b: a - _quotient(a, b) * b,
    "minsi": min,
    "minui": min,
    "maxsi": max,
    "maxui": max,
    "andi": lambda a, b: a & b,
    "ori": lambda a, b: a | b,
    "xori": lambda a, b: a ^ b,
    "shli": lambda a, b: a << b,
    "shrsi": lambda a, b: a >> b,
    "shrui": lambda a, b: a >> b,
    "select": lambda c, a, b: a if c else b,
    **dict.fromkeys(("index_cast", "index_castui", "extsi", "extui", "trunci"), lambda a: a),
}
# By MLIR's number of the predicate; those without signs follow.
COMPARISONS: list[Callable[[int, int], bool]] = [
    lambda a, b: a == b,
    lambda a, b: a != b,
    *[lambda a, b: a < b, lambda a, b: a <= b, lambda a, b: a > b, lambda a, b: a >= b] * 2,
]


def _evaluated(operation: str | int, values: tuple[Value, ...]) -> Value:
    """A number, or the expression where one of ``values`` is not known."""
    if None in values:
        return None
    if any(isinstance(v, tuple) for v in values):
        return (operation, values)
    return int((COMPARISONS[operation] if isinstance(operation, int) else SCALARS[operation])(*values))


def _assumed(value: Value, context: int) -> int | None:
    """The number, with the context in place of each that is read from memory."""
    if not isinstance(value, tuple):
        return value
    operation, values = value
    return context if operation == "load" else _evaluated(operation, tuple(_assumed(v, context) for v in values))


def _placed(value: Value, context: int) -> Value:
    """A block's index with the context in its bounds; what is read from a list stays what is read there."""
    if not isinstance(value, tuple):
        return value
    operation, values = value
    if operation == "load":
        return (operation, tuple(_placed(v, context) for v in values))
    if isinstance(operation, int) or operation.startswith(("min", "max", "div", "floordiv", "ceildiv", "select")):
        return _assumed(value, context)
    return _evaluated(operation, tuple(_placed(v, context) for v in values))


class _Run:
    """Runs blocks of a module, for their whole numbers, and adds up copies and products."""

    def __init__(self, context: int) -> None:
        self.context = context
        # Bytes of each argument that copies read ("read", argument) and write.
        self.copied: dict[tuple[str, int], float] = defaultdict(float)
        self.products: dict[str, float] = defaultdict(float)
        # (elements of the list, indices) of each number that is read from memory.
        self.loads: list[tuple[int, tuple[Value, ...]]] = []
        self._counts: dict[Any, bool] = {}

    def block(self, block, values: dict[Any, Value]) -> tuple[Value, ...]:
        """What the last operation of a block takes."""
        for each in block.operations:
            op = each.operation
            name = op.name.removeprefix("stable_mosaic.")
            taken = tuple(values.get(x) for x in op.operands)
            if name in ("scf.yield", "func.return"):
                return taken
            for result, value in zip(op.results, self._operation(op, name, taken, values), strict=False):
                values[result] = value
        return ()

    def _operation(self, op, name: str, taken: tuple[Value, ...], values: dict[Any, Value]) -> tuple[Value, ...]:
        dialect, _, short = name.partition(".")
        if name == "arith.constant":
            number = re.fullmatch(r"(-?\d+) : (?:i\d+|index)", text := str(op.attributes["value"]))
            return (int(number[1]) if number else {"true": 1, "false": 0}.get(text),)
        if name == "arith.cmpi":
            return (_evaluated(op.attributes["predicate"].value, taken),)
        if dialect == "arith" and short in SCALARS:
            return (_evaluated(short, taken),)
        if name == "memref.load":
            self.loads.append((prod(op.operands[0].type.shape), taken[1:]))
            return (("load", (_argument(op.operands[0]), *taken[1:])),)
        if name == "scf.if":
            holds = _assumed(taken[0], self.context)
            region = op.regions[0 if holds is None or holds else 1]
            return self.block(region.blocks[0], values) if len(region.blocks) else ()
        if name == "scf.for":
            return self._loop(op, taken, values)
        for region in op.regions:
            for inner in region.blocks:
                self.block(inner, values)
        if name == "tpu.enqueue_dma":
            sizes = [int(n) for n in re.findall(r"[:,] (\d+)", str(op.attributes["operandSegmentSizes"]))]
            self._copy(op.operands[0], op.operands[sizes[0] + sizes[1]])
        elif name == "tpu.matmul":
            self._product(op)
        return ()

    def _loop(self, op, taken: tuple[Value, ...], values: dict[Any, Value]) -> tuple[Value, ...]:
        first, last, step = (_assumed(v, self.context) for v in taken[:3])
        carried, body = taken[3:], op.regions[0].blocks[0]
        if op not in self._counts:
            self._counts[op] = _counts(op)
        if not self._counts[op]:
            return (None,) * len(carried)
        trips: Iterable[int | None] = [None]
        # A loop whose bounds are not numbers runs once.
        if first is not None and last is not None and step is not None:
            trips = range(first, last, step or 1)
        for i in trips:
            values.update(zip(body.arguments, (i, *carried), strict=True))
            carried = self.block(body, values)
        return carried

    def _copy(self, source, target) -> None:
        for array, way in ((source, "read"), (target, "written")):
            space = str(array.type)
            if "<any>" in space or "<hbm>" in space:
                self.copied[way, _argument(array)] += _bytes(array.type)

    def _product(self, op) -> None:
        left, right, out = (x.type for x in list(op.operands)[:3])
        contracted = re.search(r"<\[([\d, ]*)\]", str(op.attributes["dimension_numbers"]))
        depth = prod(left.shape[int(n)] for n in contracted[1].split(",")) if contracted else left.shape[-1]
        kinds = {str(x.element_type) for x in (left, right)}
        precision = re.search(r"contract_precision<(\w+)>", _attribute(op, "precision"))
        passes = PASSES.get(precision[1], 1) if precision else 1
        self.products[kinds.pop() if len(kinds) == 1 else ""] += passes * 2 * prod(out.shape) * depth


def _counts(op) -> bool:
    """Whether an operation has copies or products in it."""
    return bool(re.search(r"tpu\.(enqueue_dma|matmul)\b", str(op)))


def _argument(value) -> int:
    """The number of the argument that a value is a part of; -1 for what the kernel makes itself."""
    while not isinstance(owner := value.owner, ir.Block):
        if not owner.name.removeprefix("stable_mosaic.").startswith(("tpu.memref_", "memref.")) or not owner.operands:
            return -1
        value = owner.operands[0]
    return list(owner.arguments).index(value)


def _bytes(kind) -> float:
    array = ir.MemRefType(kind)
    bits = BITS.match(str(array.element_type))
    return prod(array.shape) * int(bits[1]) / 8 if bits else 0.0


def _parsed(body: bytes):
    """The module of a kernel."""
    context = mlir.make_ir_context()
    tpu.register_dialect(context)
    context.allow_unregistered_dialects = True
    with context:
        return ir.Module.parse(body)


def _attribute(op, name: str) -> str:
    return str(op.attributes[name]) if name in op.attributes else ""


def _integers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"-?\d+", text.partition(":")[2])]


@lru_cache(maxsize=256)
def kernel(
    body: bytes,
    inputs: tuple[tuple[int, ...], ...],
    results: tuple[tuple[int, ...], ...],
    context: int = 0,
    passes: int = 1,
) -> tuple[list[float], list[float], dict[str, float]]:
    """Counts a kernel.

    Args:
        body: Its module, as bytecode or as text.
        inputs: The shapes of the call's operands.
        results: Those of its results.
        context: Positions in the caches.
        passes: Calls that together have the rows of all experts, in the order of these.

    Returns:
        The part of each operand and of each result that is moved (2.0: it is moved twice), and the operations of its
        products by the kind of both factors.
    """
    module = _parsed(body)
    functions = {str(f.attributes["sym_name"]).strip('"'): f.operation for f in module.body.operations}
    main = next(f for f in functions.values() if "scalar_prefetch" in f.attributes)
    arguments = main.regions[0].blocks[0].arguments
    grid = _integers(_attribute(main, "iteration_bounds"))
    lists, scratch = (int(_attribute(main, f"{n}").split()[0]) for n in ("scalar_prefetch", "scratch_operands"))
    arrays = list(range(len(grid) + lists, len(arguments) - scratch))
    shapes = [*inputs[len(inputs) - len(arrays) + len(results) :], *results]
    windows = re.findall(r"\{[^{}]*\}", _attribute(main, "window_params"))
    moved = [0.0] * len(arrays)

    indices = []
    for window in windows:
        function = re.search(r"transform_indices = @([\w.]+)", window)
        indices.append(functions[function[1]] if function else None)
    bounds = [
        _integers(f": {m[1]}" if (m := re.search(r"window_bounds = array<i64: ([^>]*)>", w)) else "") for w in windows
    ]
    grid = [_dynamic(d, indices, shapes, bounds, passes) if n == DYNAMIC else n for d, n in enumerate(grid)]
    points = prod(grid)
    counted = min(points, MOST_POINTS)
    if not windows:
        # Without a grid every array in vector memory is copied whole.
        moved = [0.0 if re.search("<(any|hbm)>", str(arguments[i].type)) else 1.0 for i in arrays]
    for i, function in enumerate(indices):
        if function is not None:
            moved[i] = _parts(function, grid, shapes[i], bounds[i], context, passes) * points / counted
        elif windows:
            moved[i] = 0.0 if re.search("<(any|hbm)>", str(arguments[arrays[i]].type)) else 1.0
    run, entry = _Run(context), main.regions[0].blocks[0]
    for point in _points(grid) if _counts(main) else ():
        run.block(entry, dict(zip(entry.arguments, point, strict=False)))
    for (_, argument), size in run.copied.items():
        if argument in arrays:
            moved[arrays.index(argument)] += size * points / counted / _bytes(arguments[argument].type)
    products = {kind: n * points / counted for kind, n in run.products.items()}
    count = len(arrays) - len(results)
    return [*[0.0] * (len(inputs) - count), *moved[:count]], moved[count:], products


def _points(grid: list[int]) -> Iterator[tuple[int, ...]]:
    """Points in their order, the last axis fastest; of many the first."""
    return islice(product(*(range(n) for n in grid)), MOST_POINTS)


def _of_pass(shape: tuple[int, ...], blocks: int, passes: int) -> int:
    """How many blocks of an array one of several passes takes on average: its share of experts, all of its rows."""
    return -(-(blocks + passes - 1) // passes) if len(shape) > 2 else blocks


def _dynamic(axis: int, functions: list, shapes: list[tuple[int, ...]], bounds: list[list[int]], passes: int) -> int:
    """The most points along an axis whose bound is read from memory."""
    most = []
    for function, shape, bound in zip(functions, shapes, bounds, strict=True):
        run = _Run(0)
        block = function.regions[0].blocks[0] if function is not None else None
        if block is not None:
            run.block(block, {x: ("axis", (axis,)) if i == axis else 0 for i, x in enumerate(block.arguments)})
        if lists := [size for size, indices in run.loads if "('axis'" in repr(indices)]:
            most += [n - shape[0] + _of_pass(shape, shape[0], passes) for n in lists]
            if len(shape) == 2:
                most.append(shape[0] + -(-shape[0] // bound[0]) - 1)
    return min(most, default=1)


def _part(place: tuple[Value, ...], bounds: list[int], shape: tuple[int, ...]) -> float:
    """The part of an array that the block at ``place`` is: the last along an axis may be smaller.

    One whose index is read from memory is as large as the mean.
    """
    part = 1.0
    for i, bound, n in zip(place, bounds, shape, strict=True):
        count = -(-n // bound)
        part *= min(bound, n - bound * max(0, min(i, count - 1))) / n if isinstance(i, int) and n else 1 / max(count, 1)
    return part


def _parts(function, grid: list[int], shape: tuple[int, ...], bounds: list[int], context: int, passes: int) -> float:
    """The part of an array that is moved, in blocks."""
    block = function.regions[0].blocks[0]
    run = _Run(context)
    known: list[tuple[Value, ...]] = []
    for point in _points(grid):
        place = run.block(block, dict(zip(block.arguments, point, strict=False)))
        known.append(tuple(_placed(v, context) for v in place))
    moved = sum(_part(b, bounds, shape) for a, b in zip([None, *known], known, strict=False) if a != b)
    read = [any(isinstance(place[i], tuple) for place in known) for i in range(len(bounds))]
    if not any(read):
        return moved
    # Where only what is read from memory changes from point to point, no block comes twice in a sweep.
    listed = [tuple(v for v, is_read in zip(place, read, strict=True) if is_read) for place in known]
    if any(a == b and x != y for (a, x), (b, y) in pairwise(zip(listed, known, strict=True))):
        return moved
    distinct = len(set(known))
    of_axis = [-(-n // b) for n, b in zip(shape, bounds, strict=True)]
    most = prod(
        _of_pass(shape, n, passes) if is_read else len({place[i] for place in known})
        for i, (n, is_read) in enumerate(zip(of_axis, read, strict=True))
    )
    return moved * min(1.0, most / distinct)

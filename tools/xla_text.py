"""Figures out of XLA's text: an optimised program's operations, and the kernels of a GPU's thunks."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

# Custom calls are Triton's kernels, and some of XLA's.
KERNELS = ("CustomKernel", "CustomCall", "Kernel", "Gemm", "CuDnn")


def thunk_kinds(text: str) -> tuple[Counter, Counter]:
    """Number of thunks of each kind: (those that always run, those inside branches of conditionals).

    A loop's body counts once.
    """
    always, branches, opened = Counter(), Counter(), []
    for line in text.splitlines():
        # Of a loop inside of a branch XLA writes this line without its indentation.
        if line.strip() == "condition:":
            continue
        indent = len(line) - len(line.lstrip())
        while opened and indent <= opened[-1]:
            opened.pop()
        if re.match(r"\s*(\w+_branch|branch_\d+|branch \d+).*:$", line):
            opened.append(indent)
        elif found := re.match(r"\s*\d+: k(\w+)", line):
            (branches if opened else always)[found[1]] += 1
    return always, branches


ENTRY = "ENTRY"
BITS = {"pred": 8, "s4": 4, "u4": 4, "f4e2m1fn": 4, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "token": 0}
BITS |= {f"{letter}{bits}": bits for letter in "su" for bits in (2, 8, 16, 32)} | {"f32": 32, "f16": 16, "bf16": 16}


@dataclass(frozen=True)
class Shape:
    """An array as XLA writes it, such as bf16[16,2048]{1,0:T(8,128)(2,1)S(1)}."""

    kind: str
    dims: tuple[int, ...]
    order: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()
    memory: int = 0

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.dims)

    @cached_property
    def bytes(self) -> int:
        """Bytes with the padding of the tiles."""
        minor_first = [self.dims[i] for i in self.order] or list(reversed(self.dims))
        for i, step in enumerate(reversed(self.tile)):
            if i < len(minor_first):
                minor_first[i] = -(-minor_first[i] // step) * step
            else:
                minor_first.append(step)
        return prod(minor_first) * BITS.get(self.kind, 8 if self.kind.startswith("f8") else 32) // 8

    @property
    def in_hbm(self) -> int:
        """Bytes in HBM."""
        return self.bytes if self.memory == 0 else 0


def shapes_of(text: str) -> list[Shape]:
    """The arrays of a type in XLA's notation, those of a tuple in their order."""
    shapes = []
    for kind, dims, layout in re.findall(r"(\w+)\[([\d,<= ]*)\](?:\{([^}]*)\})?", text):
        order, _, rest = layout.partition(":")
        tile = re.match(r"T\(([\d,]+)\)", rest)
        memory = re.search(r"S\((\d+)\)", rest)
        numbers = (re.sub(r"[<= ]", "", dims), order, tile[1] if tile else "")
        parts = [tuple(int(n) for n in x.split(",") if n) for x in numbers]
        shapes.append(Shape(kind, *parts, memory=int(memory[1]) if memory else 0))
    return shapes


@dataclass(frozen=True)
class Instruction:
    """A line of a computation."""

    name: str
    shapes: list[Shape]
    opcode: str
    operands: list[str]
    attributes: str
    is_root: bool = False

    def attribute(self, pattern: str) -> str:
        """The first group of a pattern in the attributes, or ""."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else ""

    @property
    def called(self) -> str:
        """The computation that this runs once."""
        return self.attribute(r"(?:calls|to_apply)=%?([\w.-]+)")

    @property
    def branches(self) -> list[str]:
        """A conditional's computations; the first is that of false and of 0."""
        if names := self.attribute(r"branch_computations=\{([^}]*)\}"):
            return [name.strip().lstrip("%") for name in names.split(",")]
        return [self.attribute(rf"{side}_computation=%?([\w.-]+)") for side in ("false", "true")]


def _closing(text: str, start: int) -> int:
    """The place after the parenthesis that closes the one at ``start``."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    return len(text)


def _instruction(line: str) -> Instruction | None:
    match = re.match(r"\s+(ROOT )?%?([\w.-]+) = ", line)
    if not match:
        return None
    start = match.end()
    end = _closing(line, start) if line[start] == "(" else line.index(" ", start)
    opcode = re.match(r" ([a-z][\w-]*)\(", line[end:])
    if not opcode:
        return None
    opened = end + opcode.end() - 1
    closed = _closing(line, opened)
    inside, attributes = line[opened:closed], line[closed:]
    operands = [] if opcode[1] in ("constant", "parameter") else re.findall(r"%([\w.-]+)", inside)
    if opcode[1] in ("constant", "parameter"):
        attributes = inside + attributes
    return Instruction(match[2], shapes_of(line[start:end]), opcode[1], operands, attributes, bool(match[1]))


@dataclass
class Computation:
    """A computation's instructions by name, in the order in which they run."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @cached_property
    def root(self) -> Instruction:
        """What it returns."""
        return next(x for x in reversed(self.instructions.values()) if x.is_root)

    @cached_property
    def parameters(self) -> list[Instruction]:
        """Its parameters in their order."""
        found = [x for x in self.instructions.values() if x.opcode == "parameter"]
        return sorted(found, key=lambda x: int(x.attribute(r"^\((\d+)\)")))

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that take what each one returns."""
        users = defaultdict(list)
        for x in self.instructions.values():
            for operand in dict.fromkeys(x.operands):
                users[operand].append(x)
        return users


def _lines(hlo: str) -> Iterator[str]:
    """Lines, each with those that it goes on in: a kernel's metadata may have ends of lines."""
    whole = ""
    for line in hlo.splitlines():
        if re.match(r"(?:ENTRY )?%?[\w.-]+ \(.*\{$|\s+(?:ROOT )?%?[\w.-]+ = |\}$", line):
            yield whole
            whole = line
        else:
            whole += line
    yield whole


def computations(hlo: str) -> dict[str, Computation]:
    """A program's computations by their names; the first one's is ENTRY."""
    found: dict[str, Computation] = {}
    computation = None
    for line in _lines(hlo):
        if opened := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line):
            name = ENTRY if opened[1] else opened[2]
            computation = found[name] = Computation(name)
        elif computation is not None and (instruction := _instruction(line)):
            computation.instructions[instruction.name] = instruction
    return found


def shape_key(shape) -> tuple[int, ...]:
    """A key that an array and its copies share, whatever their order of axes."""
    return tuple(sorted(int(n) for n in shape if int(n) > 1))


def _called(every: dict[str, Computation], of_fusions: bool) -> set[str]:
    """The computations that are a part of one operation: of a fusion, or of any operation that calls one."""
    instructions = (x for computation in every.values() for x in computation.instructions.values())
    return {x.called for x in instructions if x.opcode == "fusion" or not of_fusions}


def copied_bytes(hlo: str, shapes: set[tuple[int, ...]]) -> int:
    """Bytes of arrays of one of ``shapes`` that are written by a copy or a transposition.

    Inside a fusion neither writes anything, unless it is what the fusion returns.
    """
    every = computations(hlo)
    inside = _called(every, of_fusions=True)
    return sum(
        x.shapes[0].bytes
        for name, computation in every.items()
        for x in computation.instructions.values()
        if x.opcode in ("copy", "transpose") and (x.is_root or name not in inside)
        if shape_key(x.shapes[0].dims) in shapes
    )


# Operations that start no kernel of their own.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all"}


def written_bytes(hlo: str, shapes: set[tuple[int, ...]]) -> int:
    """Bytes that operations write which run by themselves, except arrays of ``shapes``, which are updated in place.

    Loops count once.
    """
    every = computations(hlo)
    inside = _called(every, of_fusions=False)
    return sum(
        array.bytes
        for name, computation in every.items()
        for x in computation.instructions.values()
        if name not in inside and x.opcode not in FREE
        for array in x.shapes
        if shape_key(array.dims) not in shapes
    )


def launched(hlo: str) -> list[int]:
    """The number of kernels of each call of `ops.kernels.triton.call`: the second number of its plan."""
    counts = []
    for line in hlo.splitlines():
        if 'custom_call_target="dflash_launch"' not in line:
            continue
        if plan := re.search(r'plan = dense<"0x.{16}(.{16})', line):
            counts.append(int.from_bytes(bytes.fromhex(plan[1]), "little"))
        elif plan := re.search(r"plan = dense<\[\d+, (\d+)", line):
            counts.append(int(plan[1]))
        else:
            raise ValueError(f"a call whose plan has another form: {line[:300]}")
    return counts


def weights_read(hlo: str, shapes: set[tuple[int, ...]]) -> int:
    """Bytes of arrays of ``shapes`` that the operations of a program take, or of a loop's body where that is more.

    An array counts once for each operation that reads it; its shape identifies it. Arrays whose rows are gathered, such
    as an embedding, are left out.
    """
    every = computations(hlo)
    loops = [x for x in every[ENTRY].instructions.values() if x.opcode == "while"]
    bodies = [every[x.attribute(r"body=%?([\w.-]+)")] for x in loops if "body=" in x.attributes]
    return max(_read(computation, shapes) for computation in [every[ENTRY], *bodies])


def _read(computation: Computation, shapes: set[tuple[int, ...]]) -> int:
    sources: dict[str, tuple[str, int]] = {}
    total = 0
    for x in computation.instructions.values():
        if x.opcode in ("parameter", "get-tuple-element"):
            if len(x.shapes) == 1 and shape_key(x.shapes[0].dims) in shapes:
                sources[x.name] = x.name, x.shapes[0].bytes
        elif x.opcode == "bitcast" and x.operands[0] in sources:
            sources[x.name] = sources[x.operands[0]]
        elif x.opcode not in FREE and not re.search(r"gather|dynamic.slice", x.name):
            total += sum(dict(sources[name] for name in x.operands if name in sources).values())
    return total

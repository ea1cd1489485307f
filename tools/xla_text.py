"""Figures out of XLA's text: an optimised program's operations, and the kernels of a GPU's thunks."""

import math
import re
from collections import Counter
from collections.abc import Iterator

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


def shape_key(shape) -> tuple[int, ...]:
    """A key that an array and its copies share, whatever their order of axes."""
    return tuple(sorted(int(n) for n in shape if int(n) > 1))


ITEM = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1}


def bytes_of(kind: str, shape: str) -> int:
    """Bytes of an array in XLA's notation."""
    return ITEM.get(kind, 4) * math.prod(int(n) for n in shape.split(",") if n)


def copied_bytes(hlo: str, shapes: set[tuple[int, ...]]) -> int:
    """Bytes of arrays of one of ``shapes`` that are written by a copy or a transposition.

    Inside a fusion neither writes anything, unless it is what the fusion returns.
    """
    fused = set(re.findall(r"kind=k\w+, calls=%?([\w.-]+)", hlo))
    total, inside = 0, False
    for line in hlo.splitlines():
        if opened := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            inside = opened[1] in fused
        match = re.match(r"\s+(ROOT )?%?\S+ = (\w+)\[([\d,]+)\]\S* (?:copy|transpose)\(", line)
        if match and (match[1] or not inside) and shape_key(match[3].split(",")) in shapes:
            total += bytes_of(match[2], match[3])
    return total


# Operations that start no kernel of their own.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all"}


def working(hlo: str) -> Iterator[str]:
    """Types and shapes that each operation of an optimised program that runs by itself returns. Loops count once."""
    fused = set(re.findall(r"(?:kind=k\w+, calls|to_apply)=%?([\w.-]+)", hlo))
    inside = False
    for line in hlo.splitlines():
        if opened := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            inside = opened[1] in fused
            continue
        match = re.match(r"\s+(?:ROOT )?%?\S+ = (.*?[\])}]) ([a-z][\w-]*)\(", line)
        if match and not inside and match[2] not in FREE:
            yield match[1]


def written_bytes(hlo: str, shapes: set[tuple[int, ...]]) -> int:
    """Bytes of the results of these operations, except arrays of ``shapes``, which are updated in place."""
    arrays = (array for returned in working(hlo) for array in re.findall(r"(\w+)\[([\d,]*)\]", returned))
    return sum(
        bytes_of(kind, shape) for kind, shape in arrays if shape_key(filter(None, shape.split(","))) not in shapes
    )


def computations(hlo: str) -> dict[str, list[str]]:
    """The lines of each computation, by its name; the first one's is ENTRY."""
    lines_by_name, name = {}, None
    for line in hlo.splitlines():
        if opened := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line):
            name = "ENTRY" if opened[1] else opened[2]
            lines_by_name[name] = []
        elif name:
            lines_by_name[name].append(line)
    return lines_by_name


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
    loops = [line for line in every["ENTRY"] if " while(" in line]
    bodies = [body[1] for line in loops if (body := re.search(r"body=%?([\w.-]+)", line))]
    return max(_read(every[name], shapes) for name in ["ENTRY", *bodies])


def _read(lines: list[str], shapes: set[tuple[int, ...]]) -> int:
    shapes_by_name, total = {}, 0
    for line in lines:
        if not (match := re.match(r"\s+(?:ROOT )?%?(\S+) = (.*?[\])}]) ([a-z][\w-]*)\((.*)$", line)):
            continue
        name, kind, operation, arguments = match.groups()
        operands = set(re.findall(r"%([\w.-]+)", arguments.partition(")")[0]))
        if operation in ("parameter", "get-tuple-element"):
            if (one := re.match(r"(\w+)\[([\d,]+)\]", kind)) and shape_key(one[2].split(",")) in shapes:
                shapes_by_name[name] = name, bytes_of(*one.groups())
        elif operation == "bitcast" and operands & shapes_by_name.keys():
            shapes_by_name[name] = shapes_by_name[operands.pop()]
        elif operation not in FREE and not re.search(r"gather|dynamic.slice", name):
            total += sum(dict(shapes_by_name[x] for x in operands & shapes_by_name.keys()).values())
    return total

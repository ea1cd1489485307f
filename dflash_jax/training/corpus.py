"""Text that is on every machine, split and packed: the Python standard library's own sources (PSF licence)."""

import ast
import hashlib
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Generated tables, tests and data dumps teach nothing that a reader would call Python.
LEFT_OUT = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "site-packages",
    "encodings",
    "pydoc_data",
    "turtledemo",
    "__pycache__",
    "ensurepip",
}


@dataclass(frozen=True)
class Document:
    name: str
    text: str


def is_held_out(name: str, every: int = 20) -> bool:
    """A split by file name: the same on every machine, and stable when files come or go."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % every == 0


def sources(root: Path) -> Iterator[Document]:
    """Python files below ``root``, in order."""
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if LEFT_OUT & set(Path(name).parts) or name.startswith("_sysconfigdata"):
            continue
        yield Document(name, path.read_text(encoding="utf-8", errors="replace"))


def standard_library() -> tuple[list[Document], list[Document]]:
    """(training documents, held-out documents) from the running Python's own library."""
    train, held_out = [], []
    for document in sources(Path(sysconfig.get_paths()["stdlib"])):
        (held_out if is_held_out(document.name) else train).append(document)
    return train, held_out


def documented_functions(documents: list[Document]) -> Iterator[tuple[Document, ast.FunctionDef, str]]:
    """(document, function, its docstring) of each function that has one."""
    for document in documents:
        try:
            tree = ast.parse(document.text)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)):
                yield document, node, doc


def conversations(documents: list[Document], longest: int = 1500) -> list[list[dict]]:
    """Chats made from documented functions: the docstring's first line asks, the function's source answers."""
    chats = []
    for document, node, doc in documented_functions(documents):
        source = ast.get_source_segment(document.text, node)
        if source is None or len(source) > longest:
            continue
        source = source.replace("\n" + " " * node.col_offset, "\n")
        ask = f"Write the function `{node.name}`: {doc.strip().splitlines()[0]}"
        chats.append([{"role": "user", "content": ask}, {"role": "assistant", "content": source}])
    return chats


def function_heads(documents: list[Document], shortest: int = 60, longest: int = 700) -> list[str]:
    """Functions up to the end of their docstring, each once, for a model to complete."""
    heads = []
    for document, node, _ in documented_functions(documents):
        lines = document.text.splitlines()[node.lineno - 1 : node.body[0].end_lineno]
        head = textwrap.dedent("\n".join(lines)) + "\n"
        if shortest <= len(head) <= longest:
            heads.append(head)
    return list(dict.fromkeys(heads))


def windows(stream: np.ndarray, length: int, rows: int, steps: int, seed: int):
    """Yields ``steps`` batches int32 [rows, length + 1] cut from a token stream, every epoch at another offset,
    shuffled."""
    rng = np.random.default_rng(seed)
    starts = np.zeros((0,), np.int64)
    for _ in range(steps):
        while len(starts) < rows:
            fresh = np.arange(rng.integers(length), len(stream) - length - 1, length)
            starts = np.concatenate([starts, rng.permutation(fresh)])
        yield np.stack([stream[s : s + length + 1] for s in starts[:rows]]).astype(np.int32)
        starts = starts[rows:]

"""Text that every machine has: the Python standard library's own sources (PSF licence), split and packed."""

import ast
import hashlib
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Generated tables, tests and data dumps are not typical Python code.
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
    """A source file.

    Attributes:
        name: Its path below the root.
        text: Its content.
    """

    name: str
    text: str


def is_held_out(name: str, every: int = 20) -> bool:
    """Whether a file is held out, by a hash of its name.

    The split is the same on every machine, and does not change when other files come or go.
    """
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % every == 0


def sources(root: Path) -> Iterator[Document]:
    """Yields the Python files below ``root``, sorted by path."""
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if LEFT_OUT & set(Path(name).parts) or name.startswith("_sysconfigdata"):
            continue
        yield Document(name, path.read_text(encoding="utf-8", errors="replace"))


def standard_library() -> tuple[list[Document], list[Document]]:
    """The standard library of the running Python.

    Returns:
        Training documents and held-out documents.
    """
    train, held_out = [], []
    for document in sources(Path(sysconfig.get_paths()["stdlib"])):
        (held_out if is_held_out(document.name) else train).append(document)
    return train, held_out


def documented_functions(documents: list[Document]) -> Iterator[tuple[Document, ast.FunctionDef, str]]:
    """Yields (document, function, docstring) for each function with a docstring."""
    for document in documents:
        try:
            tree = ast.parse(document.text)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)):
                yield document, node, doc


def conversations(documents: list[Document], longest: int = 1500) -> list[list[dict]]:
    """Chats made from documented functions.

    The user asks with the first line of the docstring, and the assistant answers with the source.

    Args:
        documents: Source files.
        longest: Most characters of a function's source.
    """
    chats = []
    for document, node, doc in documented_functions(documents):
        source = ast.get_source_segment(document.text, node)
        if source is None or len(source) > longest:
            continue
        source = source.replace("\n" + " " * node.col_offset, "\n")
        question = f"Write the function `{node.name}`: {doc.strip().splitlines()[0]}"
        chats.append([{"role": "user", "content": question}, {"role": "assistant", "content": source}])
    return chats


def function_heads(documents: list[Document], shortest: int = 60, longest: int = 700) -> list[str]:
    """Functions up to the end of their docstring, each once, as prompts for completion.

    Args:
        documents: Source files.
        shortest: Fewest characters of a prompt.
        longest: Most characters of a prompt.
    """
    heads = []
    for document, node, _ in documented_functions(documents):
        lines = document.text.splitlines()[node.lineno - 1 : node.body[0].end_lineno]
        head = textwrap.dedent("\n".join(lines)) + "\n"
        if shortest <= len(head) <= longest:
            heads.append(head)
    return list(dict.fromkeys(heads))


def windows(stream: np.ndarray, length: int, rows: int, steps: int, seed: int):
    """Cuts a token stream into batches, shuffled, every epoch at another offset.

    Args:
        stream: Token ids [N].
        length: Tokens of a row that are predicted.
        rows: Rows of a batch.
        steps: Batches.
        seed: Of offsets and order.

    Yields:
        int32 [rows, length + 1].
    """
    rng = np.random.default_rng(seed)
    starts = np.zeros((0,), np.int64)
    for _ in range(steps):
        while len(starts) < rows:
            fresh = np.arange(rng.integers(length), len(stream) - length - 1, length)
            starts = np.concatenate([starts, rng.permutation(fresh)])
        yield np.stack([stream[s : s + length + 1] for s in starts[:rows]]).astype(np.int32)
        starts = starts[rows:]

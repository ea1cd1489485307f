"""Data files as token ids on disk: each is tokenised once, on all cores, and then mapped into memory.

A cache is a directory named after what its tokens depend on: the file's content, the tokenizer's files and options, the
vocabulary, and the code. It grows part by part, and what was interrupted goes on after the last part.
"""

import json
import os
import queue
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from hashlib import blake2b, file_digest
from importlib.metadata import version
from pathlib import Path

import numpy as np

from dflash_jax import progress
from dflash_jax.checkpoint.config_files import read_json
from dflash_jax.checkpoint.files import write_json, writing
from dflash_jax.errors import EngineError, InputError
from dflash_jax.frontend import messages as frontend_messages
from dflash_jax.frontend import tokenizer as frontend_tokenizer
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.training import conversations, tokenising
from dflash_jax.training.locks import locked
from dflash_jax.training.tokenising import Part, tokenise_part
from dflash_jax.workers.process import Nursery, WorkerProcess

# Bytes of a part. Smaller files are tokenised in this process.
PART_BYTES = 2**22
# Files of a cache.
TOKENS, ENDS, MEDIA, RECORD = "tokens.bin", "ends.bin", "media.bin", "record.json"
ITEM_BYTES = {TOKENS: 4, ENDS: 8, MEDIA: 24}
CODE = (conversations, tokenising, frontend_messages, frontend_tokenizer)
# Seconds after which a thread that waits for a worker looks whether it is still wanted.
LOOK_S = 1.0


class TokenFile:
    """The documents of a data file.

    Attributes:
        tokens: Token ids with `LEARNED`, of all documents, uint32 [N], mapped.
        ends: The end of each document's tokens, int64 [D].
        media: Of each document with images or videos, which has no tokens here: its index, line and first byte,
            int64 [M, 3].
        faults: Lines that are invalid.
        first_fault: The line of the first one, and why; None without one.
    """

    def __init__(self, directory: Path):
        """Opens a complete cache."""
        record = read_json(directory / RECORD)
        self.tokens = _array(directory / TOKENS, np.uint32, record["counts"][TOKENS])
        self.ends = np.array(_array(directory / ENDS, np.int64, record["counts"][ENDS]))
        self.media = np.array(_array(directory / MEDIA, np.int64, 3 * record["counts"][MEDIA])).reshape(-1, 3)
        self.faults: int = record["faults"]
        self.first_fault: tuple[int, str] | None = record["first_fault"] and tuple(record["first_fault"])


def _array(path: Path, dtype, size: int) -> np.ndarray:
    # A file without content cannot be mapped.
    return np.memmap(path, dtype, "r", shape=(size,)) if size else np.zeros(0, dtype)


@contextmanager
def token_file(
    path: Path, tokenizer: Tokenizer | None, vocab_size: int, folder: Path | None
) -> Iterator[tuple[TokenFile, Path]]:
    """Opens the cache of a data file, and makes what is missing of it.

    Args:
        path: JSON lines; also a pipe.
        tokenizer: The target's, None for a target without one.
        vocab_size: Token ids must be below it.
        folder: Where caches are kept; None keeps none.

    Yields:
        The documents, and the file to read lines with images or videos from.

    Raises:
        InputError: The file is unreadable, or the cache cannot be written.
        EngineError: A process that tokenises was ended.
    """
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dflash-tokens-")))
        source = path
        try:
            if path.exists() and not path.is_file() and not path.is_dir():
                # A pipe is read once.
                copy = stack.enter_context(tempfile.NamedTemporaryFile(prefix="dflash-data-"))
                with path.open("rb") as file:
                    shutil.copyfileobj(file, copy)
                copy.flush()
                source = Path(copy.name)
            with source.open("rb") as file:
                before = os.fstat(file.fileno())
                digest = file_digest(file, _blake).hexdigest()
        except OSError as e:
            raise InputError(f"data {path} cannot be read: {e.strerror}") from None
        key = _blake(f"{digest} {vocab_size} {_tokenizer_digest(tokenizer)}".encode()).hexdigest()
        directory = folder / key
        with locked(directory / "lock", str(directory), wait=True):
            _complete(directory, source, tokenizer, vocab_size)
        after = source.stat()
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            shutil.rmtree(directory, ignore_errors=True)
            raise InputError(f"data {path} has changed while it was read")
        yield TokenFile(directory), source


def _blake(data: bytes = b""):
    return blake2b(data, digest_size=16)


def _tokenizer_digest(tokenizer: Tokenizer | None) -> str:
    """Identifies what a tokenizer makes of a line, apart from the vocabulary's size."""
    digest = _blake()
    for module in CODE:
        digest.update(Path(module.__file__ or "").read_bytes())
    if tokenizer is not None:
        digest.update(json.dumps([version("tokenizers"), version("transformers")]).encode())
        arguments = tokenizer.arguments
        directory = Path(arguments.pop("directory"))
        digest.update(json.dumps(arguments, sort_keys=True).encode())
        paths = [p for p in directory.rglob("*") if p.suffix in (".json", ".jinja", ".txt", ".model") and p.is_file()]
        for path in sorted(paths):
            digest.update(path.relative_to(directory).as_posix().encode() + _blake(path.read_bytes()).digest())
    return digest.hexdigest()


class _Writer:
    """Appends parts to a cache, whose record counts what is whole."""

    def __init__(self, directory: Path):
        """Opens a cache, new or begun."""
        self.path = directory / RECORD
        self.state = {"input": 0, "lines": 0, "faults": 0, "first_fault": None, "counts": dict.fromkeys(ITEM_BYTES, 0)}
        try:
            found = read_json(self.path)
            sizes = {name: (directory / name).stat().st_size for name in ITEM_BYTES}
            if all(found["counts"][name] * ITEM_BYTES[name] <= sizes[name] for name in ITEM_BYTES):
                self.state = found
        except (InputError, OSError, LookupError, TypeError):
            # New, or broken: made anew.
            pass
        self._directory = directory

    def add(self, part: Part, size: int) -> None:
        """Appends a part that was ``size`` bytes of the data."""
        state, counts = self.state, self.state["counts"]
        media = part.media + np.array([counts[ENDS], state["lines"], 0])
        arrays = {TOKENS: part.tokens, ENDS: np.cumsum(part.lengths) + counts[TOKENS], MEDIA: media}
        for name, array in arrays.items():
            path = self._directory / name
            with writing(path), path.open("r+b" if path.exists() else "wb") as file:
                file.truncate(counts[name] * ITEM_BYTES[name])
                file.seek(0, os.SEEK_END)
                file.write(array.tobytes())
                file.flush()
                os.fsync(file.fileno())
        if part.first_fault is not None and state["first_fault"] is None:
            number, text = part.first_fault
            state["first_fault"] = (state["lines"] + number, text)
        state["faults"] += part.faults
        state["lines"] += part.lines
        state["input"] += size
        for name, array in arrays.items():
            counts[name] += len(array)
        write_json(self.path, state)


def _complete(directory: Path, source: Path, tokenizer: Tokenizer | None, vocab_size: int) -> None:
    """Tokenises what is not in the cache yet."""
    writer, total = _Writer(directory), source.stat().st_size
    start = writer.state["input"]
    if start == total and writer.path.exists():
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = min(cores, -(-(total - start) // PART_BYTES))
    with ExitStack() as stack:
        if count > 1:
            results = stack.enter_context(_workers(count, source, start, tokenizer, vocab_size))
        else:
            results = ((tokenise_part(source, s, n, tokenizer, vocab_size), n) for s, n in _parts(source, start))
        options = {"total": total, "unit": "B", "unit_scale": True, "initial": start}
        with progress.bar(description="tokenising", disable=count <= 1, **options) as bar:
            for part, size in results:
                writer.add(part, size)
                bar.update(size)
        if start == total:
            writer.add(Part(), 0)


def _parts(path: Path, start: int) -> Iterator[tuple[int, int]]:
    """(First byte, bytes) of parts of whole lines."""
    with path.open("rb") as file:
        total = os.fstat(file.fileno()).st_size
        while start < total:
            file.seek(min(start + PART_BYTES, total) - 1)
            file.readline()
            yield start, file.tell() - start
            start = file.tell()


@contextmanager
def _workers(
    count: int, source: Path, start: int, tokenizer: Tokenizer | None, vocab_size: int
) -> Iterator[Iterator[tuple[Part, int]]]:
    """Tokenises parts in ``count`` processes; yields an iterator of them, in their order, with their bytes."""
    first = {"tokenizer": None if tokenizer is None else tokenizer.arguments, "vocab_size": vocab_size}
    nursery = Nursery("dflash_jax.training.token_worker", first, "the processes that tokenise do not start")
    idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
    workers, pool, is_over = list[WorkerProcess](), ThreadPoolExecutor(count, "tokenise"), False

    def work(at: int, size: int) -> Part:
        worker, message = idle.get(), None
        try:
            worker.send({"path": str(source.absolute()), "start": at, "size": size})
            while message is None and not is_over:
                message = worker.wait(LOOK_S)
        except (OSError, EOFError):
            raise EngineError("a process that tokenises was ended, perhaps for want of memory: try again") from None
        finally:
            # Also a lost one, so that no thread waits for it.
            idle.put(worker)
        return Part.from_bytes(message) if message is not None else Part()

    def results() -> Iterator[tuple[Part, int]]:
        # A few more than there are workers, so that none waits; not all, which may not fit into memory.
        waiting = deque()
        for at, size in _parts(source, start):
            waiting.append((pool.submit(work, at, size), size))
            if len(waiting) > 2 * count:
                future, taken = waiting.popleft()
                yield future.result(), taken
        for future, taken in waiting:
            yield future.result(), taken

    try:
        nursery.start()
        for _ in range(count):
            workers.append(nursery.fork())
            idle.put(workers[-1])
        yield results()
    finally:
        is_over = True
        nursery.stop()
        for worker in workers:
            worker.kill()
        pool.shutdown(cancel_futures=True)
        for worker in workers:
            worker.socket.close()

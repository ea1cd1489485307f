"""Files of a batch in OpenAI's format: one request a line in, one answer a line out."""

import fcntl
import json
import os
import stat
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import FileIO

from dflash_jax.errors import InputError
from dflash_jax.server.errors import dumped

PIECE = 2**16
LONGEST_ID = 512
# The beginning of every line of an output.
HEAD = b'{"id":"batch_req_'


@dataclass(frozen=True)
class Entry:
    """A request of a batch.

    Attributes:
        line: Its line in the input, from 1.
        custom_id: The id by which its answer is found.
        url: The endpoint.
        body: The request's body as JSON in ASCII, since a text may have unpaired surrogates.
    """

    line: int
    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True)
class Fault:
    """A line that is no valid request.

    Attributes:
        line: Its line in the input, from 1.
        code: The kind of error.
        message: The reason.
        custom_id: Its id, if it has one.
    """

    line: int
    code: str
    message: str
    custom_id: str | None = None


@dataclass
class Done:
    """Entries that an output already has.

    Attributes:
        ids: custom_ids of answers.
        lines: Lines of the input that were no requests.
    """

    ids: set[str] = field(default_factory=set)
    lines: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.ids) + len(self.lines)


def open_input(name: str) -> FileIO:
    """Opens a file for reading without a buffer, or stdin for ``-``.

    Raises:
        InputError: It cannot be opened.
    """
    try:
        return FileIO(0 if name == "-" else name, "rb", closefd=name != "-")
    except OSError as e:
        raise InputError(f"{name}: {e.strerror}") from None


def count_lines(stream: FileIO) -> int | None:
    """Lines of a file; None for a pipe, which can be read only once."""
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        return None
    count, last = 0, b"\n"
    while piece := stream.read(2**20):
        count, last = count + piece.count(b"\n"), piece[-1:]
    stream.seek(0)
    return count + (last != b"\n")


def lines(stream: FileIO, most: int) -> Iterator[tuple[int, bytes | None]]:
    """Yields (number, line) of each line that is not blank.

    The line is None where it has more than ``most`` bytes; such a line is never in memory as a whole.
    """
    number, buffer, is_long = 1, bytearray(), False
    while True:
        piece = stream.read(PIECE)
        for i, part in enumerate(piece.split(b"\n")):
            if i:
                if is_long or buffer.strip():
                    yield number, None if is_long else bytes(buffer)
                number, buffer, is_long = number + 1, bytearray(), False
            if not is_long:
                buffer += part
                is_long = len(buffer) > most
        if not piece:
            if is_long or buffer.strip():
                yield number, None if is_long else bytes(buffer)
            return


def parsed(number: int, raw: bytes | None, most: int, urls: frozenset[str]) -> Entry | Fault:
    """Parses a line of the input.

    Args:
        number: Its number.
        raw: Its bytes; None where it is too long.
        most: The limit of its bytes, for the message.
        urls: Endpoints of a batch.
    """

    def fault(code: str, message: str) -> Fault:
        return Fault(number, code, message, custom_id)

    custom_id = None
    if raw is None:
        return fault("line_too_long", f"the line has more than {most} bytes")
    try:
        entry = json.loads(raw.decode("utf-8-sig"))
        # Serialised here: the limit of nesting depends on the stack, which is deeper where the body is sent.
        content = json.dumps(entry.get("body")).encode("ascii") if isinstance(entry, dict) else b""
    except (ValueError, RecursionError) as e:
        reason = "it is nested too deeply" if isinstance(e, RecursionError) else str(e).partition(": line")[0]
        return fault("invalid_json", f"the line is not JSON: {reason[:200]}")
    if not isinstance(entry, dict):
        return fault("invalid_request", f"the line is a {type(entry).__name__}: it must be an object")
    name, url, body = entry.get("custom_id"), entry.get("url"), entry.get("body")
    if not isinstance(name, str) or not 1 <= len(name) <= LONGEST_ID:
        return fault("invalid_request", f"custom_id must be a text of 1 to {LONGEST_ID} characters")
    custom_id = name
    if entry.get("method", "POST") != "POST":
        return fault("invalid_request", f"method is {str(entry['method'])[:20]!r}: it must be POST")
    if not isinstance(url, str) or url not in urls:
        return fault("invalid_url", f"url is {str(url)[:80]!r}: it must be one of {', '.join(sorted(urls))}")
    if not isinstance(body, dict):
        return fault("invalid_request", "body must be an object")
    if body.get("stream"):
        return fault("invalid_request", "body.stream must be false: a batch has whole answers")
    return Entry(number, custom_id, url, content)


def entries(stream: FileIO, most: int, urls: frozenset[str], done: Done) -> Iterator[Entry | Fault]:
    """Yields the requests of a batch that are not done, and faults of lines that are no requests."""
    seen: set[str] = set()
    for number, raw in lines(stream, most):
        entry = parsed(number, raw, most, urls)
        if isinstance(entry, Entry):
            if entry.custom_id in seen:
                message = f"custom_id {entry.custom_id[:80]!r} is that of an earlier line"
                entry = Fault(number, "duplicate_custom_id", message, entry.custom_id)
            else:
                seen.add(entry.custom_id)
        is_done = entry.custom_id in done.ids if isinstance(entry, Entry) else entry.line in done.lines
        if not is_done:
            yield entry


class Output:
    """The file of answers. A line is written as a whole before the next; one process at a time writes.

    Attributes:
        name: The file; ``-`` is stdout.
        done: Entries of earlier runs.
    """

    def __init__(self, name: str):
        """Opens a file to append to. An incomplete last line is removed.

        Raises:
            InputError: The file is not a batch's output, or another process writes to it.
        """
        self.name, self.done = name, Done()
        if name == "-":
            self._file = FileIO(1, "wb", closefd=False)
            return
        try:
            self._file = FileIO(name, "ab")
        except OSError as e:
            raise InputError(f"{name}: {e.strerror}") from None
        try:
            if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._read()
        except BlockingIOError:
            self._file.close()
            raise InputError(f"{name}: another run writes to it") from None
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, *_) -> None:
        self._file.close()

    def _read(self) -> None:
        at = number = 0
        with open(self.name, "rb") as file:
            for line in file:
                number += 1
                if not line.startswith(HEAD[: len(line)]):
                    raise InputError(f"{self.name}: line {number} is none of a batch's output: give another -o")
                if not line.endswith(b"\n"):
                    break
                self._record(line, number)
                at += len(line)
        self._file.truncate(at)

    def _record(self, line: bytes, number: int) -> None:
        try:
            value = json.loads(line)
            if value["error"] is None:
                self.done.ids.add(value["custom_id"])
            else:
                self.done.lines.add(value["error"]["line"])
        except (ValueError, RecursionError, LookupError, TypeError):
            raise InputError(f"{self.name}: line {number} is none of a batch's output: give another -o") from None

    def write(self, custom_id: str | None, response: dict | None, error: dict | None) -> None:
        """Appends an answer or an error.

        Raises:
            InputError: The file cannot be written.
        """
        value = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
        left = memoryview(dumped(value) + b"\n")
        try:
            while left:
                left = left[self._file.write(left) :]
        except BrokenPipeError:
            raise
        except OSError as e:
            raise InputError(f"{'stdout' if self.name == '-' else self.name}: {e.strerror}") from None

    def is_file(self, stream: FileIO) -> bool:
        """Whether ``stream`` is this file."""
        output, other = os.fstat(self._file.fileno()), os.fstat(stream.fileno())
        return stat.S_ISREG(output.st_mode) and os.path.samestat(output, other)

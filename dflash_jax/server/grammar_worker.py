"""The processes in which grammars are compiled and walked: ``python -m dflash_jax.server.grammar_worker FD``.

A grammar comes from outside, and llguidance works on it in native code that may overflow its stack, take gigabytes or
never return. So that no request can do this to another:

- The *nursery* reads the tokenizer once and does nothing but fork.
- Each grammar has a process, which compiles it within limits of time and memory and then does nothing but fork.
- Each sequence that follows the grammar has a process, which computes its masks.

A process that exceeds a limit dies, which closes its socket; the server (`grammar.py`) has the other end and sees no
more of it than that. A fork shares its memory with what it was forked from, so a sequence costs milliseconds and a few
pages.

A new process is asked for by a byte that carries the descriptor of its socket. It begins with a frame of its process
id; then frames of JSON go in, and frames of JSON or masks come out.
"""

import json
import os
import resource
import signal
import socket
import struct
import sys
from contextlib import suppress

from dflash_jax.errors import InputError
from dflash_jax.server.grammar_walk import GrammarTokens, GrammarWalk

# Grammars may refer to each other thousands of levels deep, and are walked recursively.
STACK_BYTES = 2**29
# Below everything else that the server does.
NICENESS = 10
# The first byte of an answer about masks.
MASKS, REFUSAL = b"\0", b"\1"
_LENGTH = struct.Struct("!I")


def framed(payload: bytes) -> bytes:
    """A payload behind its length."""
    return _LENGTH.pack(len(payload)) + payload


def unframed(data: bytes | bytearray) -> bytes | None:
    """The payload of the frame that ``data`` begins with; None where that is not whole."""
    if len(data) < _LENGTH.size or len(data) - _LENGTH.size < (length := _LENGTH.unpack_from(data)[0]):
        return None
    return bytes(data[_LENGTH.size : _LENGTH.size + length])


class _Frames:
    """Frames over a socket; EOFError when the other end is gone."""

    def __init__(self, connection: socket.socket):
        self.socket = connection

    def send(self, payload: bytes) -> None:
        self.socket.sendall(framed(payload))

    def read(self) -> dict:
        return json.loads(self._exactly(_LENGTH.unpack(self._exactly(_LENGTH.size))[0]))

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = self.socket.recv(min(size, 2**16))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def main() -> None:
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    stack = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    if resource.getrlimit(resource.RLIMIT_STACK)[0] != stack:
        # The limit of the stack counts from a program's start.
        resource.setrlimit(resource.RLIMIT_STACK, (stack, hard))
        os.execv(sys.executable, [sys.executable, "-m", "dflash_jax.server.grammar_worker", *sys.argv[1:]])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        # Where the machine's memory runs out, the system ends this before the server.
        file.write("1000")
    # Ctrl-C on a terminal is the server's, which drains. Ended children need no parent that waits for them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    frames = _Frames(control)
    given = frames.read()
    tokens = GrammarTokens(**{key: tuple(v) if isinstance(v, list) else v for key, v in given.items()})
    tokens.load()
    frames.send(str(os.getpid()).encode())
    _fork_for_each(control, lambda frames: _compile(tokens, frames))


def _fork_for_each(control: socket.socket, work) -> None:
    """Forks a process for each descriptor that arrives, until the other end is gone."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        for descriptor in descriptors:
            if not os.fork():
                control.close()
                with suppress(EOFError, OSError):
                    frames = _Frames(socket.socket(fileno=descriptor))
                    frames.send(str(os.getpid()).encode())
                    work(frames)
                os._exit(0)
            os.close(descriptor)


def _compile(tokens: GrammarTokens, frames: _Frames) -> None:
    """A grammar's process: one answer, and then a fork for each sequence."""
    wanted = frames.read()
    _limit_memory(wanted["memory_bytes"])
    _limit_seconds(wanted["compile_s"])
    try:
        matcher, notes = tokens.matcher(wanted["kind"], wanted["value"], wanted["field"])
        # The first mask costs more than all others, and is the same for all sequences.
        tokens.mask(matcher)
    except (InputError, MemoryError) as e:
        frames.send(json.dumps({"error": str(e) or "it needs too much memory"}).encode())
        return
    frames.send(json.dumps({"notes": notes}).encode())
    _limit_seconds(None)
    _fork_for_each(frames.socket, lambda frames: _walk(tokens, matcher, frames))


def _walk(tokens: GrammarTokens, matcher, frames: _Frames) -> None:
    """A sequence's process: masks behind what was taken, and behind each draft."""
    wanted = frames.read()
    _limit_memory(wanted["memory_bytes"])
    walk = GrammarWalk(tokens, matcher, wanted["thought"])
    while True:
        asked = frames.read()
        try:
            walk.take(asked["taken"])
            answer = MASKS + b"".join(walk.masks(asked["drafts"]))
        except (InputError, MemoryError) as e:
            answer = REFUSAL + (str(e) or "the text's form needs too much memory").encode()
        frames.send(answer)


def _limit_memory(more: int) -> None:
    """``more`` bytes of address space at most, beyond what is in use."""
    with suppress(OSError):
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = used + more if hard == resource.RLIM_INFINITY else min(used + more, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _limit_seconds(seconds: int | None) -> None:
    """So much of the processor's time from now on; None for no limit."""
    hard, times = resource.getrlimit(resource.RLIMIT_CPU)[1], os.times()
    limit = hard if seconds is None else int(times.user + times.system) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


if __name__ == "__main__":
    main()

"""One model on the devices of several processes: the followers make the leader's calls of its `ModelRunner`, too.

Every process must start the same programs in the same order. The leader alone has requests, schedules them and reads
results; each call that starts a program goes to the followers as a message first: a number, the runner, the name of a
method and small arguments of the host. Arrays that stay on the devices between two calls (segments and snapshots, and
what a round with masks has verified) go by the number of the call that made them.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from hashlib import blake2b
from inspect import signature
from typing import Any

import jax

from dflash_jax.decoding.batch_init import Admission
from dflash_jax.decoding.prefill import MediaChunk
from dflash_jax.decoding.state import Settings
from dflash_jax.engine.config import Speculation
from dflash_jax.engine.dispatch import Dispatch
from dflash_jax.engine.executables import Executables
from dflash_jax.engine.model_runner import ModelRunner
from dflash_jax.errors import EngineError
from dflash_jax.models.drafting import Drafters, DraftWindow
from dflash_jax.ops.backend import Backend
from dflash_jax.parallel.encoding import Codec
from dflash_jax.parallel.group import MAX_CALL, Group


@dataclass(frozen=True)
class Reference:
    """In a message: arrays that an earlier call has made.

    Attributes:
        number: That of the call.
    """

    number: int


CODEC = Codec((Dispatch, Speculation, Settings, DraftWindow, Admission, MediaChunk, Reference))
# Methods of a runner that start programs or copies: followers call them, too. What those of KEPT return stays on the
# devices, and is an argument of later calls.
KEPT = frozenset(("verify", "save", "snapshot", "to_host", "to_device"))
METHODS = KEPT | {"reset", "admit_packed", "prefill", "recompute", "score", "decode", "propose", "finish"}
METHODS |= {"next_token_scores", "set_tables", "load", "restore"}
# Those that wait for results, which the leader alone reads.
WAITS = ("wait", "read", "read_scores", "read_blocks")
BEGIN, NEW = "begin", "new"


class Handle:
    """What followers keep under the number of a call, for as long as the leader has this object.

    Args:
        number: The number.
        released: Gets the number at the end.
    """

    def __init__(self, number: int, released: deque[int]):
        self.number, self._released = number, released

    def __del__(self):
        # On any thread, in the middle of anything: the next message takes it along.
        self._released.append(self.number)


@dataclass(frozen=True, eq=False)
class Shared:
    """Arrays that the followers have their parts of, too. A pytree.

    Attributes:
        arrays: This process's view of them.
        handle: By which followers know them.
    """

    arrays: Any
    handle: Handle


jax.tree_util.register_dataclass(Shared, data_fields=["arrays"], meta_fields=["handle"])


def _kernels(backend: Backend) -> tuple:
    """What a backend has, without the reasons for what it lacks: they are in the words of the host."""
    return (
        *(backend.platform, backend.card, backend.kernels, backend.reproducible),
        *(backend.no_cpp is None, backend.no_triton is None),
    )


def fingerprint(programs: Sequence[Executables]) -> str:
    """What must be the same in all processes, beside `Group.agree` and calls: their kinds, models, kernels, weights."""
    digest = blake2b(repr((CODEC.layout, sorted(METHODS))).encode(), digest_size=16)
    for each in programs:
        target, drafter = each.pair
        drafters = drafter.drafters if isinstance(drafter, Drafters) else (drafter,)
        # Kernels are the same for all models.
        models = each.config, [getattr(x, "config", None) for x in drafters], _kernels(target.backend)
        digest.update(repr((models, sorted((each.compiler_options or {}).items()))).encode())
        digest.update(repr([(x.shape, x.dtype.name, str(x.sharding)) for x in each.weights]).encode())
    return digest.hexdigest()


class Leader:
    """The leader's side of a turn. Threads may share it.

    Args:
        group: The processes, in a turn.
        programs: The executables that runners use, in the order of the followers.

    Attributes:
        is_over: Whether the turn is over; then its runners cannot be used any more.
    """

    def __init__(self, group: Group, programs: Sequence[Executables]):
        self._group, self._programs, self.is_over = group, tuple(programs), False
        # The last call's number.
        self._number, self._lock = 0, threading.RLock()
        self._released: deque[int] = deque()
        with self.call(0, BEGIN, fingerprint(programs)):
            pass

    def close(self) -> None:
        """Ends the turn, after a call that another thread makes."""
        with self._lock:
            self.is_over = True

    def runner(self, programs: Executables, *args: Any) -> "LeadingRunner":
        """A runner of this turn, whose executables must be those of the turn; arguments as in `ModelRunner`."""
        which = next((i for i, each in enumerate(self._programs) if each is programs), None)
        if which is None:
            raise EngineError("the other processes do not have this model: begin another turn with it")
        return LeadingRunner(self, which, programs, *args)

    @contextmanager
    def call(self, runner: int, method: str, *args: Any) -> Iterator[int]:
        """Sends a call to the followers; the block makes it here.

        Where the block fails, the others may have succeeded, and nothing that follows would be the same everywhere: all
        processes end.

        Args:
            runner: The number of the call that made the runner.
            method: One of `METHODS`.
            *args: What `CODEC` encodes.

        Yields:
            The call's number.

        Raises:
            EngineError: The turn is over, or the message too large. Then it was not sent, and all can go on.
            TypeError: An argument cannot be encoded. So can all then.
            OverflowError: An int has more than 64 bits. So can all then.
        """
        # Programs start here in the order in which their messages were sent.
        with self._lock:
            if self.is_over:
                raise EngineError("this engine is of a turn that is over: it was made inside an earlier `leading`")
            number, count = self._number + 1, len(self._released)
            # Others may append meanwhile: no iteration.
            released = tuple(self._released[i] for i in range(count))
            message = CODEC.encode((number, released, runner, method, args))
            if len(message) > MAX_CALL:
                raise EngineError(f"{method}: a message of {len(message)} bytes; the most is {MAX_CALL}")
            # An interrupt from here on may leave the followers with a part of the message.
            try:
                self._number = number
                for _ in released:
                    self._released.popleft()
                self._group.send(message)
                yield number
            except BaseException as e:
                self._group.fail(f"{type(e).__name__}: {e}")

    def handle(self, number: int) -> Handle:
        """The handle of what followers keep under the number of a call, one of `KEPT` or `NEW`."""
        return Handle(number, self._released)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Ends all processes where the block, which starts no program, fails. An interrupt leaves all as they were."""
        try:
            yield
        except Exception as e:
            self._group.fail(f"{type(e).__name__}: {e}")


class LeadingRunner(ModelRunner):
    """A `ModelRunner` whose calls the followers make, too: those of `METHODS`, and errors of `WAITS` end all processes.

    What `KEPT` return is `Shared`.

    Args:
        leader: Sends the calls.
        which: The index of ``programs`` among the followers'.
        programs: As in `ModelRunner`.
        *args: The others of `ModelRunner`.
    """

    def __init__(self, leader: Leader, which: int, programs: Executables, *args: Any):
        self._leader = leader
        with leader.call(0, NEW, which, *args) as number:
            self._handle = leader.handle(number)
            super().__init__(programs, *args)


def _sent(x: Any) -> Any:
    """An argument as a message has it."""
    if isinstance(x, Shared):
        return Reference(x.handle.number)
    return tuple(x) if isinstance(x, list) else x


def _led(method: str) -> Callable[..., Any]:
    """The leader's form of one of `METHODS`."""

    @wraps(getattr(ModelRunner, method))
    def call(self: LeadingRunner, *args: Any, **keywords: Any) -> Any:
        own = getattr(super(LeadingRunner, self), method)
        if keywords:
            bound = signature(own).bind(*args, **keywords)
            bound.apply_defaults()
            args = bound.args
        with self._leader.call(self._handle.number, method, *map(_sent, args)) as number:
            result = own(*(x.arrays if isinstance(x, Shared) else x for x in args))
            return Shared(result, self._leader.handle(number)) if method in KEPT else result

    return call


def _watched(method: str) -> Callable[..., Any]:
    """The leader's form of one of `WAITS`."""

    @wraps(getattr(ModelRunner, method))
    def call(self: LeadingRunner, *args: Any) -> Any:
        with self._leader.watched():
            return getattr(super(LeadingRunner, self), method)(*args)

    return call


for _method in METHODS:
    setattr(LeadingRunner, _method, _led(_method))
for _method in WAITS:
    setattr(LeadingRunner, _method, _watched(_method))


class Results:
    """Waits on a thread for what a follower's programs compute, since nothing reads it there. An error ends all.

    Args:
        group: The processes.
    """

    def __init__(self, group: Group):
        self._group = group
        self._queue: queue.SimpleQueue[tuple[Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="results", daemon=True)
        self._thread.start()

    def add(self, result: Any) -> None:
        """Adds arrays that no later call donates."""
        self._queue.put((result,))

    def wait(self) -> None:
        """Waits for all of them."""
        self.close()
        self._thread.join()

    def close(self) -> None:
        """Ends the thread after the last of them."""
        self._queue.put(None)

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            try:
                jax.block_until_ready(entry)
            except Exception as e:
                self._group.fail(f"{type(e).__name__}: {e}")
            # Else the arrays stay until the next result.
            del entry


class Follower:
    """A follower's side of a turn.

    Args:
        group: The processes.
        programs: The executables, in the order of the leader's.
    """

    def __init__(self, group: Group, programs: Sequence[Executables]):
        self._group, self._programs, self._last = group, tuple(programs), 0
        # Runners and arrays by the number of the call that made them.
        self._kept: dict[int, Any] = {}

    def run(self) -> None:
        """Makes the leader's calls until its turn ends. A call that fails ends all processes."""
        with self._group.turn():
            results = Results(self._group)
            try:
                while (message := self._group.next()) is not None:
                    results.add(self._made(*CODEC.decode(message)))
                results.wait()
            except Exception as e:
                self._group.fail(f"{type(e).__name__}: {e}")
            finally:
                results.close()

    def _made(self, number: int, released: tuple[int, ...], runner: int, method: str, args: tuple) -> Any:
        """Makes a call: its result."""
        if number != self._last + 1:
            raise EngineError(f"call {number} follows call {self._last}")
        self._last = number
        for each in released:
            del self._kept[each]
        if method == BEGIN:
            if args != (fingerprint(self._programs),):
                raise EngineError("its model, kernels or weights are not the leader's: give all the same command")
        elif method == NEW:
            which, *rest = args
            self._kept[number] = ModelRunner(self._programs[which], *rest)
        elif method in METHODS:
            known = (self._kept[x.number] if isinstance(x, Reference) else x for x in args)
            result = getattr(self._kept[runner], method)(*known)
            if method in KEPT:
                self._kept[number] = result
            return result
        else:
            raise EngineError(f"{method} is no call of a runner")
        return None

"""One model on the devices of several processes: the leader's calls of its `ModelRunner`, made by the followers, too.

Every process must start the same programs in the same order. The leader alone has requests, schedules them and reads
results; each call that starts a program goes to the followers as a message first: a number, the runner, the name of a
method and small arguments of the host. Arrays that stay on the devices between two calls (segments and snapshots of
prefixes, and what a round with masks has verified) go by the number of the call that made them.
"""

import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import jax
import numpy as np
from jaxlib import version as jaxlib_version

from dflash_jax.decoding.batch_init import Admission
from dflash_jax.decoding.prefill import MediaChunk
from dflash_jax.decoding.state import Settings
from dflash_jax.engine.config import Speculation
from dflash_jax.engine.dispatch import Dispatch
from dflash_jax.engine.executables import Executables
from dflash_jax.engine.host_copies import HostCopies
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
# What a follower calls: methods of a runner, and of its `HostCopies`.
COPIES = frozenset(("to_host", "to_device"))
KEPT = COPIES | {"verify", "save", "snapshot"}
METHODS = KEPT | {"reset", "admit_packed", "prefill", "replay", "score", "decode", "propose", "finish", "load"}
METHODS |= {"restore", "next_token_scores", "set_tables"}
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

    @property
    def reference(self) -> Reference:
        """What stands for them in a message."""
        return Reference(self.handle.number)


jax.tree_util.register_dataclass(Shared, data_fields=["arrays"], meta_fields=["handle"])


def _kernels(backend: Backend) -> tuple:
    """What a backend has, without the reasons for what it lacks: they are in the words of the host."""
    return backend.platform, backend.card, backend.kernels, backend.no_cpp is None, backend.no_triton is None


def fingerprint(programs: Sequence[Executables]) -> str:
    """What must be the same in all processes, beside what calls have: versions, calls, models, kernels and weights."""
    # The package itself imports the frontend, which this layer may not.
    ours = sys.modules[__name__.partition(".")[0]].__version__
    versions = ours, jax.__version__, jaxlib_version.__version__
    digest = blake2b(repr((versions, CODEC.layout, sorted(METHODS))).encode(), digest_size=16)
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
        """Ends the turn, behind a call that another thread makes."""
        with self._lock:
            self.is_over = True

    def runner(
        self,
        programs: Executables,
        slots: int,
        capacity: int,
        settings: Settings,
        pages: tuple[int, int] | None = None,
    ) -> "ReplayedRunner":
        """A runner of this turn; its executables must be those of the turn."""
        which = next((i for i, each in enumerate(self._programs) if each is programs), None)
        if which is None:
            raise EngineError("the other processes do not have this model: begin another turn with it")
        return ReplayedRunner(self, which, programs, slots, capacity, settings, pages)

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

    @contextmanager
    def keeping(self, runner: int, method: str, *args: Any) -> Iterator[Handle]:
        """Sends a call of `KEPT` or `NEW`, as `call` does: the handle of what the followers keep."""
        with self.call(runner, method, *args) as number:
            yield Handle(number, self._released)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Ends all processes where the block, which starts no program, fails. An interrupt leaves all as they were."""
        try:
            yield
        except Exception as e:
            self._group.fail(f"{type(e).__name__}: {e}")


class ReplayedRunner(ModelRunner):
    """A `ModelRunner` whose calls the followers make, too.

    Args:
        leader: Sends the calls.
        which: The index of ``programs`` among the followers'.
        programs: As in `ModelRunner`, and so are the further ones.
        slots: See there.
        capacity: See there.
        settings: See there.
        pages: See there.
    """

    def __init__(
        self,
        leader: Leader,
        which: int,
        programs: Executables,
        slots: int,
        capacity: int,
        settings: Settings,
        pages: tuple[int, int] | None = None,
    ):
        self._leader = leader
        with leader.keeping(0, NEW, which, slots, capacity, settings, pages) as self._handle:
            super().__init__(programs, slots, capacity, settings, pages)

    def _call(self, method: str, *args: Any):
        return self._leader.call(self._handle.number, method, *args)

    def _keeping(self, method: str, *args: Any):
        return self._leader.keeping(self._handle.number, method, *args)

    def reset(self) -> None:
        """See `ModelRunner`."""
        with self._call("reset"):
            super().reset()

    def admit_packed(self, slot: int, admission: Admission) -> None:
        """See `ModelRunner`."""
        with self._call("admit_packed", slot, admission):
            super().admit_packed(slot, admission)

    def prefill(
        self,
        slots: Sequence[int],
        tokens: Sequence[int],
        size: int,
        batch: int = 1,
        drafting: bool = True,
        media: MediaChunk | None = None,
    ):
        """See `ModelRunner`."""
        with self._call("prefill", tuple(slots), tuple(tokens), size, batch, drafting, media):
            return super().prefill(slots, tokens, size, batch, drafting, media)

    def replay(self, slot: int, blocks: int):
        """See `ModelRunner`."""
        with self._call("replay", slot, blocks):
            return super().replay(slot, blocks)

    def score(self, slot: int, tokens: int, size: int, media: MediaChunk | None = None):
        """See `ModelRunner`."""
        with self._call("score", slot, tokens, size, media):
            return super().score(slot, tokens, size, media)

    def decode(self, dispatch: Dispatch):
        """See `ModelRunner`."""
        with self._call("decode", dispatch):
            return super().decode(dispatch)

    def propose(self, dispatch: Dispatch) -> np.ndarray:
        """See `ModelRunner`."""
        with self._call("propose", dispatch):
            return super().propose(dispatch)

    def verify(self, dispatch: Dispatch, blocks: np.ndarray) -> Shared:
        """See `ModelRunner`."""
        with self._keeping("verify", dispatch, blocks) as handle:
            return Shared(super().verify(dispatch, blocks), handle)

    def finish(
        self, dispatch: Dispatch, blocks: np.ndarray, allowed: np.ndarray, is_late: np.ndarray, verified: Shared
    ):
        """See `ModelRunner`."""
        with self._call("finish", dispatch, blocks, allowed, is_late, verified.reference):
            return super().finish(dispatch, blocks, allowed, is_late, verified.arrays)

    def next_token_scores(self) -> tuple[np.ndarray, np.ndarray]:
        """See `ModelRunner`."""
        with self._call("next_token_scores"):
            return super().next_token_scores()

    def set_tables(self, table: np.ndarray, windowed: np.ndarray) -> None:
        """See `ModelRunner`."""
        with self._call("set_tables", table, windowed):
            super().set_tables(table, windowed)

    def save(self, pages: Sequence[int], is_windowed: bool) -> Shared:
        """See `ModelRunner`."""
        with self._keeping("save", tuple(pages), is_windowed) as handle:
            return Shared(super().save(pages, is_windowed), handle)

    def load(self, pages: Sequence[int], segments: Shared, is_windowed: bool) -> None:
        """See `ModelRunner`."""
        with self._call("load", tuple(pages), segments.reference, is_windowed):
            super().load(pages, segments.arrays, is_windowed)

    def snapshot(self, slot: int) -> Shared:
        """See `ModelRunner`."""
        with self._keeping("snapshot", slot) as handle:
            return Shared(super().snapshot(slot), handle)

    def restore(self, slot: int, length: int, snapshot: Shared) -> None:
        """See `ModelRunner`."""
        with self._call("restore", slot, length, snapshot.reference):
            super().restore(slot, length, snapshot.arrays)

    def host_copies(self) -> HostCopies:
        """See `ModelRunner`."""
        return ReplayedCopies(self._leader, self._handle, super().host_copies().devices)

    def wait(self, ticket) -> None:
        """See `ModelRunner`."""
        with self._leader.watched():
            super().wait(ticket)

    def read(self, ticket, logprobs: bool):
        """See `ModelRunner`."""
        with self._leader.watched():
            return super().read(ticket, logprobs)

    def read_scores(self, ticket):
        """See `ModelRunner`."""
        with self._leader.watched():
            return super().read_scores(ticket)


class ReplayedCopies(HostCopies):
    """`HostCopies` of every process, each to and from its own memory.

    Args:
        leader: Sends the calls.
        runner: The handle of the runner.
        devices: As in `HostCopies`.
    """

    def __init__(self, leader: Leader, runner: Handle, devices: int):
        super().__init__(devices)
        self._leader, self._runner = leader, runner

    def to_host(self, arrays: Any) -> Any:
        """See `HostCopies`. A host without memory ends all processes: the others have made their copies."""
        return self._copied("to_host", super().to_host, arrays)

    def to_device(self, arrays: Any) -> Any:
        """See `HostCopies`."""
        return self._copied("to_device", super().to_device, arrays)

    def _copied(self, method: str, copy: Callable[[Any], Any], arrays: Any) -> Any:
        """A copy of each `Shared` of a tree."""

        def one(shared: Shared) -> Shared:
            with self._leader.keeping(self._runner.number, method, shared.reference) as handle:
                return Shared(copy(shared.arrays), handle)

        return jax.tree.map(one, arrays, is_leaf=lambda x: isinstance(x, Shared))


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
        """Ends the thread behind the last of them."""
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
                raise EngineError("its model or its versions are not the leader's: give all processes the same command")
        elif method == NEW:
            which, *rest = args
            self._kept[number] = ModelRunner(self._programs[which], *rest)
        elif method in METHODS:
            target = self._kept[runner]
            target = target.host_copies() if method in COPIES else target
            result = getattr(target, method)(*(self._kept[x.number] if type(x) is Reference else x for x in args))
            if method in KEPT:
                self._kept[number] = result
            return result
        else:
            raise EngineError(f"{method} is no call of a runner")
        return None

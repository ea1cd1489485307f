"""The compiled programs behind `LLM`: few, compiled when first needed, timed apart, kept on disk between runs."""

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib.version import __version_info__ as JAXLIB

from dflash_jax.decoding import prefix_snapshot, speculative, step_functions
from dflash_jax.decoding.batch_init import Admission
from dflash_jax.decoding.sampling import Logprobs
from dflash_jax.decoding.state import DecodeState, Settings, empty_state, state_specs
from dflash_jax.decoding.step_functions import Report
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.drafter import Drafting
from dflash_jax.parallel.sharding import DATA, parameter_specs, place

log = logging.getLogger("dflash_jax")

# On NVIDIA GPUs: the whole loop in one graph, with what it calls. Products of one operand stay apart: to merge them XLA
# copies their weights into one array, anew in each round. Sums over devices are NCCL's: XLA's own kernels for them, the
# default from jaxlib 0.11.1 on, cannot be in a graph (0.12.0): the host would start a round in dozens of pieces.
GPU_OPTIONS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,"
    "COLLECTIVES,WHILE,CONDITIONAL",
    "xla_gpu_graph_min_graph_size": 1,
    "xla_gpu_dot_merger_threshold_mb": 0,
} | ({"xla_gpu_experimental_use_collective_kernels": ""} if JAXLIB >= (0, 11, 1) else {})
# A compiled program has about as many; a directory without room for them is full.
PROBE_BYTES = 2**20
ROWS, WHOLE = PartitionSpec(DATA), PartitionSpec()


def enable_disk_cache() -> None:
    """Keeps compiled programs in the user's cache directory, unless the user has chosen a place
    (JAX_COMPILATION_CACHE_DIR)."""
    if jax.config.jax_compilation_cache_dir is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        try:
            from platformdirs import user_cache_path
        except ModuleNotFoundError:
            # A checkout run in an image that holds JAX and no more: the benchmarks of decoding do without.
            return
        jax.config.update("jax_compilation_cache_dir", str(Path(user_cache_path("dflash_jax")) / "xla"))
    directory = jax.config.jax_compilation_cache_dir
    # A place of another kind (gs://…) is JAX's own business.
    is_writable = directory is None or "://" in directory or _is_writable(Path(directory))
    # Else JAX warns at each program that it cannot write. What is there is read all the same.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1 if is_writable else float("inf"))
    jax.config.update("jax_enable_compilation_cache", is_writable or Path(directory).is_dir())
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@cache
def _is_writable(directory: Path) -> bool:
    """Whether programs can be kept there; says so once where they cannot."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
    except OSError as e:
        log.warning("compiled programs are not kept: %s: %s", directory, e.strerror)
        return False
    return True


def _put(x, sharding):
    """On its devices; what lies there already does not move, and a shape is told where it would."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.device_put(x, sharding)


class Executables:
    """Calls the loop's functions on one pair of models, over their mesh. The state is donated: use what comes back.

    ``rows`` are of shape [data shards * b]: for each shard of the mesh's data axis, b of its own rows; those past its
    last are nobody. Modules are flattened once, here: crossing ``jax.jit`` as modules would cost a walk over every
    parameter at each call.
    """

    # For all programs, by XLA's names; None: what suits the platform.
    compiler_options: dict | None = None

    def __init__(self, target: Decoder, drafter: Drafting | None, mesh: Mesh | None = None):
        """``mesh``: by default that of the target's layout, on this machine's devices. Modules may be abstract: then
        programs can be lowered, for devices that are not there."""
        self.mesh, self._pair = mesh or target.layout.mesh(), (target, drafter)
        self._specs, self._structure = parameter_specs(self._pair), jax.tree.structure(self._pair)
        self.weights = jax.tree.map(_put, jax.tree.leaves(self._pair), self._shardings(self._specs))
        self.compiled: dict = {}
        self.compile_s = self.last_compile_s = 0.0
        # While compiling ahead: the threads, what they are at, and what that will bring.
        self._threads: ThreadPoolExecutor | None = None
        self._pending: dict[tuple, Future] = {}
        self._shapes: dict[tuple, object] = {}

    def _on_gpu(self) -> bool:
        return self.mesh.devices.flat[0].platform in ("gpu", "cuda")

    @property
    def count(self) -> int:
        """Executables compiled so far."""
        return len(self.compiled)

    @property
    def config(self):
        """The target's."""
        return self._pair[0].config

    @property
    def data(self) -> int:
        """Shards of the rows."""
        return self._pair[0].layout.data

    def _shardings(self, specs):
        return jax.tree.map(lambda s: NamedSharding(self.mesh, s), specs)

    def _compiled(self, key: tuple, lower: Callable):
        """The program for ``key``, compiled when first asked for."""
        if key not in self.compiled:
            began = time.perf_counter()
            self.compiled[key] = self._compile(lower())[0]
            self.last_compile_s = time.perf_counter() - began
            self.compile_s += self.last_compile_s
        return self.compiled[key]

    def _compile(self, lowered) -> tuple:
        """(program, seconds)."""
        began = time.perf_counter()
        options = self.compiler_options or (GPU_OPTIONS if self._on_gpu() else None)
        return lowered.compile(compiler_options=options), time.perf_counter() - began

    @contextmanager
    def ahead(self, threads: int) -> Iterator[dict[tuple, Future]]:
        """Inside, calls compute nothing: their programs are compiled by ``threads``, states stay as they are, and
        shapes come back. Yields what the threads are at, futures of (program, seconds)."""
        began = time.perf_counter()
        with ThreadPoolExecutor(threads, "compile") as self._threads:
            try:
                yield self._pending
            finally:
                self._threads, pending, self._pending, self._shapes = None, self._pending, {}, {}
        self.compiled |= {key: future.result()[0] for key, future in pending.items()}
        self.compile_s += time.perf_counter() - began

    def _foreseen(self, key: tuple, lower: Callable, out):
        """What the program of ``key`` would bring, while compiling ahead."""
        if key not in self._shapes:
            lowered = lower()
            if key not in self.compiled:
                self._pending[key] = self._threads.submit(self._compile, lowered)
            shapes = lowered.out_info
            self._shapes[key] = jax.tree.map(_put, shapes, self._shardings(jax.tree.broadcast(out, shapes)))
        return self._shapes[key]

    def read(self, x) -> np.ndarray:
        """On the host; zeros while compiling ahead."""
        return np.zeros(x.shape, x.dtype) if self._threads else np.asarray(x)

    def _specs_of(self, state: DecodeState):
        return state_specs(*self._pair, state)

    def _lower(self, function: Callable, state: DecodeState, args: tuple, specs: tuple, out, donate: bool = True):
        """``specs``: PartitionSpecs of ``args``; ``out``: of what the function returns beside the state, or, where
        that is not ``donate``d, of all that it returns."""

        def run(leaves, state, *args):
            return function(*jax.tree.unflatten(self._structure, leaves), state, *args)

        state_specs = self._specs_of(state)
        mapped = jax.shard_map(
            run,
            mesh=self.mesh,
            in_specs=(self._specs, state_specs, *specs),
            out_specs=(state_specs, out) if donate else out,
            check_vma=False,
        )
        # float32 means float32: accelerators would otherwise multiply in fewer bits.
        with jax.default_matmul_precision("highest" if self._pair[0].dtype == jnp.float32 else "default"):
            return jax.jit(mapped, donate_argnums=1 if donate else ()).lower(self.weights, state, *args)

    def call(self, key: tuple, function: Callable, state: DecodeState, args: tuple, specs: Callable, donate=True):
        """``specs()``: those of ``args``, and of what comes out, as for `_lower`.

        The state is of one shape for an engine's life: its rows and capacity tell its programs apart.
        """
        shapes = tuple(x.shape for x in jax.tree.leaves(args))
        key = (*key, state.tokens.shape, state.logprobs is not None, shapes)
        if jax.process_count() > 1:
            args = jax.tree.map(self._place, args, specs()[0], is_leaf=lambda x: isinstance(x, np.ndarray | jax.Array))

        def lower():
            return self._lower(function, state, args, *specs(), donate)

        if self._threads:
            out = specs()[1]
            found = self._foreseen(key, lower, (WHOLE, out) if donate else out)
            return (state, found[1]) if donate else found
        return self._compiled(key, lower)(self.weights, state, *args)

    def _place(self, x, spec):
        """Several hosts each give their own part of what all of them know."""
        return x if isinstance(x, jax.Array) else place(np.asarray(x), NamedSharding(self.mesh, spec))

    def abstract_state(self, rows: int, capacity: int, settings: Settings) -> DecodeState:
        """The shapes of a state and where they lie."""
        state = jax.eval_shape(partial(empty_state, *self._pair, rows, capacity, settings))
        return jax.tree.map(_put, state, self._shardings(self._specs_of(state)))

    def _abstract(self, *shape: int, dtype=jnp.int32):
        spec = ROWS if shape else WHOLE
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, spec))

    def lower_prefill(self, state: DecodeState, rows: int, size: int):
        """`prefill` of ``rows`` rows of an abstract state: a ``jax.stages.Lowered``."""
        args = (self._abstract(rows), self._abstract(rows))
        return self._lower(partial(step_functions.prefill, size=size), state, args, (ROWS, ROWS), WHOLE)

    def lower_decode(self, state: DecodeState, rows: int, settings: Settings):
        """`decode` of ``rows`` rows of an abstract state: a ``jax.stages.Lowered``."""
        args = (self._abstract(rows), self._abstract(rows), self._abstract())
        return self._lower(partial(step_functions.decode, settings=settings), state, args, (ROWS, ROWS, WHOLE), WHOLE)

    def empty(self, rows: int, capacity: int, settings: Settings) -> DecodeState:
        """`empty_state` on the mesh."""
        make = partial(empty_state, *self._pair, rows, capacity, settings)
        shardings = self._shardings(self._specs_of(jax.eval_shape(make)))
        key = ("empty", rows, capacity, settings)
        return self._compiled(key, lambda: jax.jit(make, out_shardings=shardings).lower())()

    def admit(self, state: DecodeState, rows, admission: Admission) -> DecodeState:
        """``state`` with a fresh prompt in one row."""

        def specs():
            return (ROWS, jax.tree.map(lambda _: WHOLE, admission)), WHOLE

        return self.call(("admit",), step_functions.admit, state, (rows, admission), specs)[0]

    def prefill(self, state: DecodeState, rows, n, size: int, drafting: bool = True) -> tuple[DecodeState, jax.Array]:
        """Feeds the next n [rows] ≤ ``size`` prompt tokens of each row, the drafter with them unless ``drafting`` is
        False; also returns how many each has behind it."""
        # Without a drafter there is one program, whatever is asked.
        drafting = drafting and self._pair[1] is not None
        function, specs = partial(step_functions.prefill, size=size, drafting=drafting), ((ROWS, ROWS), WHOLE)
        return self.call(("prefill", size, drafting), function, state, (rows, n), lambda: specs)

    def score(self, state: DecodeState, rows, n, size: int, top: int) -> tuple[DecodeState, Logprobs]:
        """`prefill` without the drafter; also returns `Logprobs` [rows, size] of what follows each token, and of the
        ``top`` likeliest."""
        function, specs = partial(step_functions.score, size=size, top=top), ((ROWS, ROWS), WHOLE)
        return self.call(("score", size, top), function, state, (rows, n), lambda: specs)

    def decode(self, state: DecodeState, rows, width, rounds: int, settings: Settings) -> tuple[DecodeState, Report]:
        """Up to ``rounds`` rounds of each row, ``width`` [rows] tokens wide."""
        function, specs = partial(step_functions.decode, settings=settings), ((ROWS, ROWS, WHOLE), WHOLE)
        return self.call(("decode", settings), function, state, (rows, width, np.int32(rounds)), lambda: specs)

    def propose(self, state: DecodeState, rows, width, settings: Settings) -> jax.Array:
        """The window int [rows, W] that a round is about to verify. First of the three parts of a round whose draws
        are masked."""
        function, specs = partial(step_functions.propose, settings=settings), ((ROWS, ROWS), WHOLE)
        return self.call(("propose", settings), function, state, (rows, width), lambda: specs, donate=False)

    def _verified_specs(self, settings: Settings):
        target, drafter = self._pair
        return speculative.verified_specs(target, drafter if settings.drafting else None)

    def verify(self, state: DecodeState, rows, width, block, settings: Settings):
        """What `finish` needs of the target's pass over ``block``; second part."""
        function = partial(step_functions.verify, settings=settings)

        def specs():
            return (ROWS, ROWS, ROWS), self._verified_specs(settings)

        return self.call(("verify", settings), function, state, (rows, width, block), specs, donate=False)

    def finish(self, state: DecodeState, rows, width, block, mask, verified, settings: Settings):
        """Draws under packed ``mask`` uint32 [rows, W, ceil(V / 32)] and commits: (state, `Report`); third part."""
        function = partial(step_functions.finish, settings=settings)

        def specs():
            return (ROWS, ROWS, ROWS, ROWS, self._verified_specs(settings)), WHOLE

        return self.call(("finish", settings), function, state, (rows, width, block, mask, verified), specs)

    def save(self, state: DecodeState, rows, start: int, size: int):
        """Keys and values of ``size`` positions from ``start`` of one row: a segment for `load`."""
        function = partial(step_functions.save, size=size)

        def specs():
            return (ROWS, WHOLE), prefix_snapshot.segment_specs(self._specs_of(state))

        return self.call(("save", size), function, state, (rows, np.int32(start)), specs, donate=False)

    def load(self, state: DecodeState, rows, start: int, segment) -> DecodeState:
        def specs():
            return (ROWS, WHOLE, prefix_snapshot.segment_specs(self._specs_of(state))), WHOLE

        return self.call(("load",), step_functions.load, state, (rows, np.int32(start), segment), specs)[0]

    def snapshot(self, state: DecodeState, rows):
        """What a row remembers beside keys and values by position, for `restore`."""

        def specs():
            return (ROWS,), prefix_snapshot.snapshot_specs(self._specs_of(state))

        return self.call(("snapshot",), step_functions.snapshot, state, (rows,), specs, donate=False)

    def restore(self, state: DecodeState, rows, length: int, snapshot) -> DecodeState:
        """``state`` with a row as it was when it had ``length`` tokens behind it."""

        def specs():
            return (ROWS, WHOLE, prefix_snapshot.snapshot_specs(self._specs_of(state))), WHOLE

        return self.call(("restore",), step_functions.restore, state, (rows, np.int32(length), snapshot), specs)[0]

    def draw(self, state: DecodeState) -> tuple:
        """Raw logits and what is maximised, [B, V], for the token behind what each row has."""
        return self.call(("draw",), step_functions.draw, state, (), lambda: ((), WHOLE), donate=False)

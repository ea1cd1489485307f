"""The compiled programs behind `LLM`: compiled when first needed, timed apart from decoding, kept on disk."""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxlib.version import __version_info__ as JAXLIB

from dflash_jax import progress
from dflash_jax.decoding.state import DecodeState, Settings, empty_state, num_pages
from dflash_jax.decoding.widths import BINS, LENGTHS
from dflash_jax.engine import steps
from dflash_jax.engine.steps import BATCH, REPLICATED, Programs, Step
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.drafting import Drafting
from dflash_jax.ops.kernels.triton.launch import chained
from dflash_jax.parallel.devices import device_name
from dflash_jax.parallel.sharding import parameter_specs, place

log = logging.getLogger("dflash_jax")

# On NVIDIA GPUs: the whole loop in one graph, with what it calls. Products of one operand stay apart: to merge them XLA
# copies their weights into one array, anew in each round. Sums over devices use NCCL: XLA's own kernels for them, the
# default from jaxlib 0.11.1 on, cannot be in a graph (0.12.0), and the host would start a round in dozens of pieces.
GPU_OPTIONS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,"
    "COLLECTIVES,WHILE,CONDITIONAL",
    "xla_gpu_graph_min_graph_size": 1,
    "xla_gpu_dot_merger_threshold_mb": 0,
} | ({"xla_gpu_experimental_use_collective_kernels": ""} if JAXLIB >= (0, 11, 1) else {})
# On TPUs with 128 MiB of VMEM: most of it is the kernels' own, as others' recipes for v6e have it. Otherwise XLA copies
# the weights of a layer's experts to it ahead of their product, and those that no token has chosen too.
TPU_OPTIONS = {"xla_tpu_scoped_vmem_limit_kib": 98304}
# On a v7: 16-bit weights are read in the tiles of 8 rows that they are in. Otherwise XLA copies all of them in each
# dispatch into tiles of 16, for as much memory again; a mesh's programs take no weights that are placed in these.
V7_OPTIONS = {"xla_tpu_control_large_2nd_minor_layout_for_x16": False}


def compiler_options(device: Any) -> dict[str, Any] | None:
    """XLA's options that suit a `jax.Device`, which this machine need not have; None: XLA's own."""
    if device.platform in ("gpu", "cuda"):
        return GPU_OPTIONS
    name = device_name(device.device_kind)
    return V7_OPTIONS if name == "tpu7x" else TPU_OPTIONS if name in ("v5e", "v6e") else None


def put(x, sharding):
    """Places ``x``. Arrays already placed are not copied; shape structs get the sharding attached."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.device_put(x, sharding)


class Executables(Programs):
    """Compiles and runs the steps of one pair of models, over their mesh.

    The modules are flattened once, here: passing them through ``jax.jit`` would walk over every parameter at each call.

    Args:
        target: The model that verifies. Abstract modules are allowed: then programs can be lowered for devices that
            are not there.
        drafter: The model that drafts, or None.
        mesh: The devices; by default those of the target's layout on this machine.

    Attributes:
        compiler_options: XLA's options of all programs, by XLA's names; None takes those that suit the platform.
        mesh: The devices.
        weights: The arrays of both modules.
        compiled: Programs by key.
    """

    compiler_options: dict | None = None

    def __init__(self, target: Decoder, drafter: Drafting | None, mesh: Mesh | None = None):
        super().__init__(target, drafter)
        self.mesh = mesh or target.layout.mesh()
        self.compiled: dict = {}
        self._take()

    def _take(self) -> None:
        specs, structure = parameter_specs(self.pair), jax.tree.structure(self.pair)
        self.weights = jax.tree.map(put, jax.tree.leaves(self.pair), self.shardings(specs))
        # Another thread may lower programs of the weights before: it reads this once.
        self._lowered = specs, structure, self.weights

    def replace(self, target: Decoder, drafter: Drafting | None) -> None:
        """Runs with other weights from now on.

        Weights of the same form use the programs that are compiled. A CPU's have another one once they are not exact in
        16 bits, and keep it; its programs are compiled anew.

        Args:
            target: As the one before, with other arrays; or with shapes, which takes no memory and runs nothing.
            drafter: Likewise.
        """
        before, self.pair = self._form, (target, drafter)
        self._take()
        if self._form != before:
            self.compiled = {}

    @property
    def _form(self) -> tuple:
        return self._lowered[1], tuple((x.shape, x.dtype.name) for x in self.weights)

    @property
    def count(self) -> int:
        """Programs compiled so far."""
        return len(self.compiled)

    def shardings(self, specs):
        """``specs``, a tree of PartitionSpecs, on this mesh."""
        return jax.tree.map(lambda s: NamedSharding(self.mesh, s), specs)

    def _compiled(self, key: tuple, lower: Callable):
        """The program for ``key``, compiled at its first use."""
        if key not in self.compiled:
            began = time.perf_counter()
            count, expected = self.count + 1, self.last_compile_s or None
            with progress.step(f"compiling program {count}", expected, line="compiling programs"):
                self.compiled[key] = self.compile(lower())[0]
            self.last_compile_s = time.perf_counter() - began
            self.compile_s += self.last_compile_s
        return self.compiled[key]

    def compile(self, lowered) -> tuple:
        """Compiles a ``jax.stages.Lowered``: (program, seconds)."""
        began = time.perf_counter()
        options = self.compiler_options or compiler_options(self.mesh.devices.flat[0])
        try:
            program = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as e:
            # Compilers of other versions may not have an option of ours.
            if self.compiler_options or "No such compile option" not in str(e):
                raise
            log.warning("compiled without the options %s: %s", options, e)
            program = lowered.compile()
        return program, time.perf_counter() - began

    def lower(self, step: Step, state: DecodeState, *args: Any, **static: Any):
        """Traces a step; arguments as in `run`, arrays or shapes. Returns a ``jax.stages.Lowered``."""
        weight_specs, structure, weights = self._lowered

        def run(leaves, state, *args):
            return step.function(*jax.tree.unflatten(structure, leaves), state, *args, **static)

        backend = self.pair[0].backend
        if backend.joins_launches:
            run = chained(run)
        state_specs, (in_specs, out_specs) = self.state_specs(state), self.specs(step, state, static)
        mapped = jax.shard_map(
            run,
            mesh=self.mesh,
            in_specs=(weight_specs, state_specs, *in_specs),
            out_specs=(state_specs, out_specs) if step.changes else out_specs,
            check_vma=False,
        )
        # Accelerators would multiply float32 in fewer bits by default.
        with jax.default_matmul_precision("highest" if self.pair[0].dtype == jnp.float32 else "default"):
            return jax.jit(mapped, donate_argnums=1 if step.changes else ()).lower(weights, state, *args)

    def prepared(self, step: Step, state: DecodeState, args: tuple, static: dict[str, Any]) -> tuple[tuple, tuple]:
        """(key, args) as a step's program is looked up and called.

        The state of an engine has one shape for life: its slots, capacity and pages identify its programs, with what
        its structure says (windows of caches, whether log-probabilities are recorded).
        """
        shapes = tuple(x.shape for x in jax.tree.leaves(args))
        key = (step.name, *static.values(), state.tokens.shape, num_pages(state), jax.tree.structure(state), shapes)
        if jax.process_count() > 1:
            args = jax.tree.map(self._place, args, jax.tree.broadcast(self.specs(step, state, static)[0], args))
        return key, args

    def run(self, step: Step, state: DecodeState, *args: Any, **static: Any) -> Any:
        """See `Programs`."""
        key, args = self.prepared(step, state, args, static)
        return self._compiled(key, lambda: self.lower(step, state, *args, **static))(self.weights, state, *args)

    def read(self, x) -> np.ndarray:
        """See `Programs`."""
        return np.asarray(x)

    def _place(self, x, spec):
        """Places an argument. Each of several hosts has the whole value and places the part of its own devices."""
        return x if isinstance(x, jax.Array) else place(np.asarray(x), NamedSharding(self.mesh, spec))

    def abstract_state(
        self, slots: int, capacity: int, settings: Settings, pages: tuple[int, int] | None = None
    ) -> DecodeState:
        """The shapes and shardings of an `empty_state`."""
        state = jax.eval_shape(partial(empty_state, *self.pair, slots, capacity, settings, pages))
        return jax.tree.map(put, state, self.shardings(self.state_specs(state)))

    def _abstract(self, *shape: int, dtype=jnp.int32):
        spec = BATCH if shape else REPLICATED
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, spec))

    def lower_prefill(self, state: DecodeState, batch: int, size: int):
        """`steps.prefill` of ``batch`` slots of an abstract state: a ``jax.stages.Lowered``."""
        slots = self._abstract(batch)
        return self.lower(steps.prefill, state, slots, slots, None, size=size, drafting=True)

    def lower_decode(self, state: DecodeState, batch: int, settings: Settings):
        """`steps.decode` of ``batch`` slots of an abstract state: a ``jax.stages.Lowered``."""
        slots, rates, prices = self._abstract(batch), None, None
        if settings.has_widths:
            sharding = NamedSharding(self.mesh, REPLICATED)
            shape = LENGTHS, settings.block_size - 1, BINS
            rates = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
            prices = self._abstract(batch, dtype=jnp.float32)
        return self.lower(steps.decode, state, slots, slots, self._abstract(), rates, prices, settings=settings)

    def empty(self, slots: int, capacity: int, settings: Settings, pages: tuple[int, int] | None = None) -> DecodeState:
        """See `Programs`."""
        make = partial(empty_state, *self.pair, slots, capacity, settings, pages)
        shardings = self.shardings(self.state_specs(jax.eval_shape(make)))
        key = ("empty", slots, capacity, settings, pages)
        return self._compiled(key, lambda: jax.jit(make, out_shardings=shardings).lower())()

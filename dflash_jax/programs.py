"""The compiled programs behind `LLM`: few, compiled when first needed, timed apart, kept on disk between runs."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dflash_jax import prompts as host
from dflash_jax import speculative
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.drafter import Drafter
from dflash_jax.sampling import perturbed, process
from dflash_jax.sharding import DATA, parameter_specs, place
from dflash_jax.speculative import DecodeState, Settings

# Tokens of a row that one dispatch may bring.
REPORT_SIZE = 256


def enable_disk_cache() -> None:
    """Keeps compiled programs in the user's cache directory, unless the user has chosen a place
    (JAX_COMPILATION_CACHE_DIR)."""
    if jax.config.jax_compilation_cache_dir is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        from platformdirs import user_cache_path

        jax.config.update("jax_compilation_cache_dir", str(Path(user_cache_path("dflash_jax")) / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Report:
    """What a dispatch brought, small enough to read back every time: the new tokens [B, C] (``count`` [B] of them),
    what each of its ``rounds`` [B] yielded, accepted [B, C], and ``done`` bool [B]."""

    tokens: jax.Array
    count: jax.Array
    accepted: jax.Array
    rounds: jax.Array
    done: jax.Array


def report(before_length, before_rounds, state: DecodeState, size: int) -> Report:
    """The difference between now and then, at most ``size`` (static) tokens a row."""

    def since(buffer, start):
        places = jnp.minimum(start[:, None] + jnp.arange(size), buffer.shape[1] - 1)
        return jnp.take_along_axis(buffer, places, axis=1)

    return Report(
        since(state.tokens, before_length),
        state.length - before_length,
        since(state.accepted, before_rounds),
        state.rounds - before_rounds,
        state.done,
    )


def gathered(report: Report) -> Report:
    """All rows of a report, on every device: any host may read it."""
    return jax.tree.map(lambda x: jax.lax.all_gather(x, DATA, tiled=True), report)


def _prefill_chunk(target, drafter, state: DecodeState, *, size: int) -> tuple[DecodeState, None]:
    return speculative.prefill_chunk(target, drafter, state, size), None


def _first_token(target, drafter, state: DecodeState) -> tuple[DecodeState, Report]:
    after = speculative.first_token(target, state)
    return after, gathered(report(state.length, state.rounds, after, 1))


def _decode(target, drafter, state: DecodeState, rounds, *, settings: Settings) -> tuple[DecodeState, Report]:
    after = speculative.decode(target, drafter, state, rounds, REPORT_SIZE, settings)
    return after, gathered(report(state.length, state.rounds, after, max(REPORT_SIZE, settings.window)))


def _draw(target, drafter, state: DecodeState) -> tuple[DecodeState, tuple]:
    """(state, (raw logits, what is maximised)), [B, V] each, for the token behind the prompt."""
    raw = target.logits(state.hidden[:, None])
    scores = perturbed(process(raw, state.sampling), state.sampling, state.length[:, None])
    whole = [target.vocab.gather(x[:, 0], -1) for x in (raw, scores)]
    return state, tuple(jax.lax.all_gather(x, DATA, tiled=True) for x in whole)


def _put(x, sharding):
    """On its devices; what lies there already does not move, and a shape is told where it would."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.device_put(x, sharding)


class Programs:
    """Calls the loop's functions on one pair of models, over their mesh. The state is donated: use what comes back.

    Modules are flattened once, here: crossing ``jax.jit`` as modules would cost a walk over every parameter at each
    call.
    """

    def __init__(self, target: Decoder, drafter: Drafter | None, mesh: Mesh | None = None):
        """``mesh``: by default that of the target's layout, on this machine's devices. Modules may be abstract: then
        programs can be lowered, for devices that are not there."""
        self.mesh, self._pair, self._models = mesh or target.layout.mesh(), (target, drafter), {}
        for drafts, pair in ((True, (target, drafter)), (False, (target, None))):
            specs = parameter_specs(pair)
            leaves = jax.tree.map(_put, jax.tree.leaves(pair), self._shardings(specs))
            self._models[drafts] = leaves, specs, jax.tree.structure(pair)
        self.compiled: dict = {}
        self.compile_s = 0.0

    @property
    def count(self) -> int:
        """Programs compiled so far."""
        return len(self.compiled)

    def weights(self, drafts: bool) -> list:
        """The parameters where they lie: the target's, with ``drafts`` the drafter's behind."""
        return self._models[drafts][0]

    def _shardings(self, specs):
        return jax.tree.map(lambda s: NamedSharding(self.mesh, s), specs)

    def _compiled(self, key: tuple, lower: Callable):
        """The program for ``key``, compiled when first asked for."""
        if key not in self.compiled:
            began = time.perf_counter()
            self.compiled[key] = lower().compile()
            self.compile_s += time.perf_counter() - began
        return self.compiled[key]

    def _lower(self, drafts: bool, function: Callable, state: DecodeState, *args):
        leaves, specs, structure = self._models[drafts]

        def run(leaves, state, *args):
            return function(*jax.tree.unflatten(structure, leaves), state, *args)

        state_specs = speculative.state_specs(*self._pair, state)
        mapped = jax.shard_map(
            run,
            mesh=self.mesh,
            in_specs=(specs, state_specs, *(PartitionSpec() for _ in args)),
            out_specs=(state_specs, PartitionSpec()),
            check_vma=False,
        )
        # float32 means float32: accelerators would otherwise multiply in fewer bits.
        with jax.default_matmul_precision("highest" if leaves[0].dtype == "float32" else "default"):
            return jax.jit(mapped, donate_argnums=1).lower(leaves, state, *args)

    def _call(self, key: tuple, drafts: bool, function: Callable, state: DecodeState, *args):
        inputs, kind = jax.tree.flatten((state, args))
        key = (*key, drafts, kind, *((x.shape, x.dtype) for x in inputs))
        return self._compiled(key, lambda: self._lower(drafts, function, state, *args))(
            self._models[drafts][0], state, *args
        )

    def abstract_state(self, rows: int, capacity: int, settings: Settings, drafts: bool) -> DecodeState:
        """The shapes of a state and where they lie."""
        target, drafter = self._pair
        make = partial(speculative.empty_state, target, drafter if drafts else None, rows, capacity, settings)
        state = jax.eval_shape(make)
        return jax.tree.map(_put, state, self._shardings(speculative.state_specs(*self._pair, state)))

    def lower_prefill(self, state: DecodeState, size: int, drafts: bool):
        """`prefill_chunk` for an abstract state: a ``jax.stages.Lowered``."""
        return self._lower(drafts, partial(_prefill_chunk, size=size), state)

    def lower_decode(self, state: DecodeState, settings: Settings, drafts: bool):
        """`decode` for an abstract state: a ``jax.stages.Lowered``."""
        rounds = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(self.mesh, PartitionSpec()))
        return self._lower(drafts, partial(_decode, settings=settings), state, rounds)

    def start(self, prompts, max_new_tokens, capacity: int, settings: Settings, drafts: bool, **options) -> DecodeState:
        """`prompts.init_state` on the mesh."""
        target, drafter = self._pair
        pair = target, drafter if drafts else None

        def make():
            return speculative.empty_state(*pair, len(prompts), capacity, settings)

        shardings = self._shardings(speculative.state_specs(*pair, jax.eval_shape(make)))
        key = ("empty", drafts, len(prompts), capacity, settings)
        empty = self._compiled(key, lambda: jax.jit(make, out_shardings=shardings).lower())()
        options |= {"settings": settings, "capacity": capacity, "empty": empty}
        state = host.init_state(*pair, prompts, max_new_tokens, **options)

        def put(x, sharding):
            return x if x.sharding.is_equivalent_to(sharding, x.ndim) else place(np.asarray(x), sharding)

        return jax.tree.map(put, state, shardings)

    def prefill_chunk(self, state: DecodeState, size: int, drafts: bool) -> DecodeState:
        return self._call(("prefill", size), drafts, partial(_prefill_chunk, size=size), state)[0]

    def first_token(self, state: DecodeState) -> tuple[DecodeState, Report]:
        return self._call(("first",), False, _first_token, state)

    def decode(self, state: DecodeState, rounds: int, settings: Settings, drafts: bool) -> tuple[DecodeState, Report]:
        rounds = place(np.int32(rounds), NamedSharding(self.mesh, PartitionSpec()))
        return self._call(("decode", settings), drafts, partial(_decode, settings=settings), state, rounds)

    def fetch(self, tree):
        """Arrays of a state on this host, whichever hosts hold them."""
        whole = NamedSharding(self.mesh, PartitionSpec())
        if any(not x.is_fully_addressable for x in jax.tree.leaves(tree)):
            tree = jax.jit(lambda x: x, out_shardings=whole)(tree)
        return jax.device_get(tree)

    def draw(self, state: DecodeState) -> tuple:
        """Raw logits and what is maximised, [B, V], for the token behind a prefilled prompt."""
        return self._call(("draw",), False, _draw, state)[1]

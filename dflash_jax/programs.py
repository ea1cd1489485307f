"""The compiled programs behind `LLM`: few, compiled when first needed, timed apart, kept on disk between runs."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from dflash_jax import speculative
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.drafter import Drafter
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


def _first_token(target, drafter, state: DecodeState) -> tuple[DecodeState, Report]:
    after = speculative.first_token(target, state)
    return after, report(state.length, state.rounds, after, 1)


def _decode(target, drafter, state: DecodeState, rounds, *, settings: Settings) -> tuple[DecodeState, Report]:
    after = speculative.decode(target, drafter, state, rounds, REPORT_SIZE, settings)
    return after, report(state.length, state.rounds, after, REPORT_SIZE)


class Programs:
    """Calls the loop's functions on one pair of models. The state is donated: use what comes back.

    Modules are flattened once, here: crossing ``jax.jit`` as modules would cost a walk over every parameter at each
    call.
    """

    def __init__(self, target: Decoder, drafter: Drafter | None):
        self._models = {}
        for drafts, pair in ((True, (target, drafter)), (False, (target, None))):
            self._models[drafts] = jax.tree.flatten(pair)
        self.compiled: dict = {}
        self.compile_s = 0.0

    @property
    def count(self) -> int:
        """Programs compiled so far."""
        return len(self.compiled)

    def _call(self, key: tuple, drafts: bool, function: Callable, state: DecodeState, *args):
        leaves, structure = self._models[drafts]
        inputs, kind = jax.tree.flatten((state, args))
        key = (*key, drafts, kind, *((x.shape, x.dtype) for x in inputs))
        if key not in self.compiled:
            began = time.perf_counter()

            def run(leaves, state, *args):
                return function(*jax.tree.unflatten(structure, leaves), state, *args)

            # float32 means float32: accelerators would otherwise multiply in fewer bits.
            with jax.default_matmul_precision("highest" if leaves[0].dtype == "float32" else "default"):
                self.compiled[key] = jax.jit(run, donate_argnums=1).lower(leaves, state, *args).compile()
            self.compile_s += time.perf_counter() - began
        return self.compiled[key](leaves, state, *args)

    def prefill_chunk(self, state: DecodeState, size: int, drafts: bool) -> DecodeState:
        return self._call(("prefill", size), drafts, partial(speculative.prefill_chunk, size=size), state)

    def first_token(self, state: DecodeState) -> tuple[DecodeState, Report]:
        return self._call(("first",), False, _first_token, state)

    def decode(self, state: DecodeState, rounds: int, settings: Settings, drafts: bool) -> tuple[DecodeState, Report]:
        rounds = jnp.int32(rounds)
        return self._call(("decode", settings), drafts, partial(_decode, settings=settings), state, rounds)

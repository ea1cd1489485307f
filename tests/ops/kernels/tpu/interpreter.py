"""Pallas' interpreter of TPUs: kernels with their memories, copies and semaphores, on a CPU."""

from contextlib import redirect_stdout
from io import StringIO

import jax
from jax.experimental.pallas import tpu as pltpu

from dflash_jax.ops.backend import Backend, choose

TPU = Backend.for_tpu("all")


def interpreted(function):
    """``function``, whose kernels are interpreted: memory that nothing wrote is NaN, and no two copies may race."""
    program = jax.jit(function)

    def call(*args):
        races = pltpu.InterpretParams(detect_races=True)
        # The detector prints what it finds.
        with redirect_stdout(StringIO()) as printed, pltpu.force_tpu_interpret_mode(races):
            results = jax.block_until_ready(program(*args))
        assert "RACE" not in printed.getvalue(), printed.getvalue()
        return results

    return call


def pallas(op, implementations, *options):
    """An operation's Pallas kernel, interpreted; ``options`` follow the arrays."""

    def run(*args):
        implementation = choose(op, implementations, TPU, *args, *options)
        assert implementation.name == "pallas"
        return implementation.call(TPU, *args, *options)

    return interpreted(run)

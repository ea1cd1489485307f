"""How programs are compiled."""

from types import SimpleNamespace

import jax
import pytest

from dflash_jax.engine import executables
from dflash_jax.engine.ahead_of_time import AheadOfTime
from dflash_jax.engine.executables import TPU_OPTIONS, V7_OPTIONS, Executables, compiler_options


@pytest.mark.parametrize(
    ("kind", "options"),
    [("TPU v5 lite", TPU_OPTIONS), ("TPU v6 lite", TPU_OPTIONS), ("TPU v5", None), ("TPU7x", V7_OPTIONS), ("x", None)],
)
def test_a_tpu_has_its_kinds_options(kind, options):
    assert compiler_options(SimpleNamespace(platform="tpu", device_kind=kind)) == options


def compiled(own: dict | None, monkeypatch) -> float:
    """What a program of a compiler without the option of this device returns; ``own``: options that a user has set."""
    monkeypatch.setattr(executables, "compiler_options", lambda device: {"xla_no_such_option": True})
    device = SimpleNamespace(flat=[None])
    programs = SimpleNamespace(compiler_options=own, mesh=SimpleNamespace(devices=device))
    program, _ = Executables.compile(programs, jax.jit(lambda x: 2 * x).lower(1.0))  # type: ignore[arg-type]
    return float(program(1.0))


def test_a_compiler_without_one_of_our_options_takes_its_own(monkeypatch):
    assert compiled(None, monkeypatch) == 2.0


def test_an_option_of_the_users_that_the_compiler_has_not_is_an_error(monkeypatch):
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_other"):
        compiled({"xla_other": True}, monkeypatch)


def test_a_program_of_weights_that_are_replaced_meanwhile_is_not_among_those_of_the_new_ones():
    first, second = {}, {}
    program = SimpleNamespace(out_info=(), name="of the first weights")

    def lower(*_, **__):
        own.compiled = second
        return program

    own = SimpleNamespace(
        pair=(None, None),
        compiled=first,
        compile_s=0.0,
        prepared=lambda step, state, args, static: ("key", args),
        lower=lower,
        compile=lambda lowered: (lowered, 1.0),
        shardings=lambda specs: specs,
    )
    step = SimpleNamespace(args=(), result=executables.REPLICATED, changes=False)
    with AheadOfTime(own, 1) as programs:  # type: ignore[arg-type]
        programs.specs = lambda *_: ((), ())
        programs.run(step, None)  # type: ignore[arg-type]
    assert (first, second) == ({"key": program}, {})

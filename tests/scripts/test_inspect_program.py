"""What XLA makes of the loop: one while, no callbacks, few programs, caches in place."""

import pytest

from dflash_jax import LLM
from dflash_jax.decoding.state import PLAIN_SETTINGS
from dflash_jax.engine.model_runner import ModelRunner
from tests.helpers import load_script


@pytest.fixture(scope="module")
def figures():
    return load_script("compile/inspect_program.py").inspect(LLM())


def test_the_whole_loop_is_one_program_on_the_device(figures):
    assert figures["outer_while_loops"] == 1
    assert figures["callbacks"] == 0


def test_a_varied_session_compiles_one_program_of_each_kind(figures):
    kinds = ["admit", "decode", "empty", "load", "prefill", "restore", "save", "set_tables", "snapshot"]
    assert figures["programs"] == kinds
    # Pages of both kinds are saved and loaded.
    assert figures["compiled_programs"] == len(kinds) + 2


def test_the_state_is_donated_and_no_kv_cache_is_copied(figures):
    assert figures["donated_bytes"] == figures["state_bytes"]
    assert figures["copied_kv_bytes"] == figures["copied_kv_bytes_of_prefill"] == 0


def test_without_a_drafter_prefill_is_one_program():
    """Otherwise the first question of a warm engine would wait for a compiler."""
    programs = LLM().plain_programs
    runner = ModelRunner(programs, 1, 256, PLAIN_SETTINGS)
    for drafting in (True, False):
        runner.prefill([0], [0], 16, drafting=drafting)
    assert [key[0] for key in programs.compiled].count("prefill") == 1

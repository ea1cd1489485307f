"""The host's memory, and copies in its pinned part, which the CPU's devices have too."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.engine import memory
from dflash_jax.engine.memory import LIMIT_VARIABLE, allow_pinned_memory, free_memory
from dflash_jax.engine.model_runner import ModelRunner


def test_what_comes_back_from_the_host_is_the_same_bits_under_the_same_sharding():
    values = jax.random.bits(jax.random.key(0), (3, 5), jnp.uint32)
    arrays = [(jax.lax.bitcast_convert_type(values, jnp.float32), values.astype(jnp.bfloat16)), [jnp.arange(7)]]
    on_host = ModelRunner.to_host(arrays)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(on_host)} == {"pinned_host"}
    again = ModelRunner.to_device(on_host)
    for x, y in zip(jax.tree.leaves(arrays), jax.tree.leaves(again), strict=True):
        assert (x.sharding, x.dtype) == (y.sharding, y.dtype)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_where_the_host_has_no_memory_there_is_no_copy(monkeypatch):
    def fails(*args):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(jax, "device_put", fails)
    message = "RESOURCE_EXHAUSTED: Out of host memory"
    assert ModelRunner.to_host([jnp.ones(3)]) is None
    message = "INTERNAL: another error"
    with pytest.raises(jax.errors.JaxRuntimeError, match="another"):
        ModelRunner.to_host([jnp.ones(3)])


def test_free_memory_is_within_the_limit_of_the_container(monkeypatch, tmp_path):
    free = free_memory()
    assert 0 < free < 2**50
    limit, usage = tmp_path / "max", tmp_path / "current"
    usage.write_text("4096\n")
    monkeypatch.setattr(memory, "CGROUPS", ((str(limit), str(usage)),))
    for text, expected in (("8192\n", 4096), ("1024\n", 0)):
        limit.write_text(text)
        assert free_memory() == expected
    limit.write_text("max\n")
    assert free_memory() > 4096


def test_the_limit_of_pinned_memory_is_raised_unless_it_is_set(monkeypatch):
    monkeypatch.setenv(LIMIT_VARIABLE, "5")
    allow_pinned_memory()
    assert os.environ[LIMIT_VARIABLE] == "5"
    monkeypatch.delenv(LIMIT_VARIABLE)
    allow_pinned_memory()
    assert int(os.environ[LIMIT_VARIABLE]) >= 64

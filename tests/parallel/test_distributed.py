"""How processes learn of each other, without starting any."""

import os
from types import SimpleNamespace

import jax
import pytest

from dflash_jax.errors import InputError
from dflash_jax.parallel import distributed

OF_A_SET = {"LWS_LEADER_ADDRESS": "dflash-0.dflash.default", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "2"}


@pytest.fixture
def calls(monkeypatch):
    """The arguments of jax.distributed.initialize, and the coordinator's address that it reads."""
    calls = []

    def initialize(**options):
        calls.append(options | {"address": os.environ.get("JAX_COORDINATOR_ADDRESS")})

    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        # Set first, so that what `start` sets is removed at the end.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(jax, "config", SimpleNamespace(update=lambda *_: None))
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    return calls


def test_a_leader_worker_set_names_the_processes(calls, monkeypatch):
    for name, value in OF_A_SET.items():
        monkeypatch.setenv(name, value)
    distributed.start()
    assert calls == [{"num_processes": 4, "process_id": 2, "address": "dflash-0.dflash.default:8476"}]


def test_variables_of_jax_win(calls, monkeypatch):
    for name, value in OF_A_SET.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "10.0.0.1:9")
    monkeypatch.setenv("JAX_PROCESS_ID", "3")
    distributed.start()
    assert calls == [{"num_processes": 4, "process_id": 3, "address": "10.0.0.1:9"}]


def test_a_set_without_numbers_is_refused(calls, monkeypatch):
    monkeypatch.setenv("LWS_LEADER_ADDRESS", "x")
    with pytest.raises(InputError, match="no cluster is recognised"):
        distributed.start()
